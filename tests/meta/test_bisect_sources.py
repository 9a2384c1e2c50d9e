"""Where a bisection's items come from, besides git: releases, wheels, versions of a package."""

import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from ci.bisect import releases
from ci.bisect.environments import environment
from ci.bisect.items import History, Item
from ci.bisect.probe import Probe, empty_caches
from ci.failures import CORPORA, load
from impl.contract import UnavailableError
from impl.vllm.cache import cache_dir
from impl.vllm.source import resolve
from tests.fake_vllm import tree_files, write_wheel

CASE = CORPORA / "conv_update" / "rounded-products-4650af6a.json"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of this test's own."""
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path_factory.mktemp("cache")))


def versions(history: History) -> list[str]:
    """Names of a history's items."""
    return [item.name for item in history.items]


def test_releases_and_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.30.0", "0.31.0", "0.9.0", "0.31.1.dev3"):
        write_wheel(tmp_path, tree_files(), version)
    monkeypatch.setenv("KDAFUZZ_WHEELS", str(tmp_path))
    index = [Version(text) for text in ("0.29.0", "0.30.0", "0.30.2", "0.33.0")]
    monkeypatch.setattr(releases, "published", lambda package: index)
    found = releases.releases("0.29.0..0.31.0", flavour=":cute")
    assert versions(found) == ["0.29.0", "0.30.0", "0.30.2", "0.31.0"]
    assert found.items[1] == Item("0.30.0", "vllm@0.30.0:cute", (0,))
    monkeypatch.setattr(releases, "published", lambda package: None)
    found = releases.releases("0.30.0..0.31.0")
    assert (versions(found), len(found.notes)) == (["0.30.0", "0.31.0"], 1)
    with pytest.raises(UnavailableError, match=r"there is no vLLM 0\.32\.0; known: .*0\.31\.0"):
        releases.releases("0.30.0..0.32.0")
    found = releases.wheels(tmp_path)
    assert versions(found) == ["0.9.0", "0.30.0", "0.31.0", "0.31.1.dev3"]
    assert resolve(found.items[3].implementation).version == "0.31.1.dev3"
    with pytest.raises(UnavailableError, match="needs two wheels"):
        releases.wheels(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.30", "must be A..B"),
        ("0.30..0.29", "lower"),
        ("a..b", "'a' is not a version"),
        ("..", "'' is not a version"),
    ],
)
def test_ranges_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        releases.releases(text)
    with pytest.raises(UnavailableError, match=said if "must" not in said else "needs two versions"):
        releases.packages(f"triton={text}", "triton")


USING = """
import os

import probe_package
from impl.contract import Implementation
from impl.triton.conv import causal_conv1d_update as right

assert "kdafuzz-bisect-" in os.environ["TRITON_CACHE_DIR"]


def causal_conv1d_update(**kwargs):
    return right(**kwargs).add_(probe_package.ADDED)


def factory():
    return Implementation("using", {"conv_update": causal_conv1d_update})
"""


def package_wheel(folder: Path, name: str, version: str, code: str, *requirements: str) -> None:
    """A package of one module."""
    info = f"{name}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {text}\n" for text in requirements)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", code)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_versions_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in an environment of its own, behind which stands ours; one cannot be installed."""
    package_wheel(tmp_path, "probe_package", "1.0", "ADDED = 0.0\n")
    # Something that we have too, in a version that this one cannot live with.
    package_wheel(tmp_path, "probe_package", "2.0", "ADDED = 1.0\n", "mdurl<0.1")
    package_wheel(tmp_path, "mdurl", "0.0.9", "")
    (tmp_path / "using.py").write_text(USING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    history = releases.packages("Probe_Package=2.0,1.0,1.5", "using:factory")
    assert versions(history) == ["1.0", "1.5", "2.0"]
    old, missing, new = map(Probe(load(CASE).case, "cpu", 2), history.items)
    assert [run.failure for run in (*old.runs, *new.runs)] == ["", "", "value conv out", "value conv out"]
    assert (old.note, new.note) == ("", "with mdurl==0.0.9")
    assert missing.why == (
        "probe-package==1.5 cannot be installed: No matching distribution found for probe-package==1.5"
    )
    # What was made once is there.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert environment("probe-package==2.0").others == ("mdurl==0.0.9",)


def test_caches_are_empty_but_for_sources(tmp_path: Path) -> None:
    home = cache_dir()
    for name in ("cute-1", "triton-3.7.1-sm_90", "venv-x", "release-0.33.0", ".lock"):
        (home / name).mkdir(parents=True)
    with empty_caches() as first, empty_caches() as second:
        lent = Path(first["KDAFUZZ_CACHE"])
        assert sorted(path.name for path in lent.iterdir()) == ["emulator", "release-0.33.0"]
        assert not Path(first["TRITON_CACHE_DIR"]).exists()
        assert not first.keys() ^ {"KDAFUZZ_CACHE", "TRITON_CACHE_DIR", "CUTE_DSL_CACHE_DIR"}
        assert not set(first.values()) & set(second.values())
    assert not lent.exists()
    assert (home / "release-0.33.0").is_dir()
