"""Finding a vLLM: the four forms, wheels, the cache and git, on made-up trees."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from impl.vllm import cache, wheels
from impl.vllm.load import load
from impl.vllm.source import SourceError, resolve, split_flavour
from tests.fake_vllm import KERNELS, SHARED, UTILS, tree_files, write_repository, write_tree, write_wheel

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KDAFUZZ_WHEELS", raising=False)


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(version: Version, folder: Path) -> Path:
        raise AssertionError(f"a test asked the package index for {version}")

    monkeypatch.setattr(wheels, "download", refuse)


# Forms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm", ("vllm", "triton")),
        ("vllm:cute", ("vllm", "cute")),
        ("vllm@0.33.0:cute", ("vllm@0.33.0", "cute")),
        ("vllm:/a:b@c", ("vllm:/a:b@c", "triton")),
        ("vllm:/a@HEAD:cute", ("vllm:/a@HEAD", "cute")),
        (":cute", (":cute", "triton")),
    ],
)
def test_flavour_is_the_trailing_word(text: str, expected: tuple[str, str]) -> None:
    assert split_flavour(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "vllm:", "vllm@", "vllm@latest", "triton", "vllm:/no/such/place", "vllm:/no@HEAD"),
        *("vllm:" + "x" * 300, "vllm:~nobody-of-this-name/vllm"),
    ],
)
def test_wrong_forms_are_one_sentence(text: str) -> None:
    with pytest.raises(SourceError) as caught:
        resolve(text)
    message = str(caught.value)
    assert "\n" not in message
    assert "vllm" in message


def test_tree(tmp_path: Path) -> None:
    source = resolve(f"vllm:{write_tree(tmp_path / 'tree', tree_files(null=7))}")
    assert (source.label, source.version, source.root) == ("vllm@0.30.1", "0.30.1", tmp_path / "tree")
    loaded = load(source)
    assert loaded.verify()(0, 0, 0) == ("conv 0.30.1", 7, False)
    loaded.set_conv_state_dim_first(True)
    assert loaded.verify()(0, 0, 0) == ("conv 0.30.1", 7, True)
    assert loaded.record_layout() == "slot"
    assert loaded.records_class() is None
    assert loaded.constants() == {"NULL_BLOCK_ID": 7, "PAD_SLOT_ID": -1}
    assert not (tmp_path / "cache").exists()


def test_tree_of_the_package_folder_itself(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "site", tree_files())
    assert resolve(f"vllm:{root / 'vllm'}").root == root


def test_a_path_with_at_and_colon_wins_over_a_revision(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "a:b@HEAD", tree_files())
    write_repository(tmp_path / "a:b")
    assert resolve(f"vllm:{root}").root == root
    assert resolve(f"vllm:{tmp_path / 'a:b'}@main").root != root


def test_an_edited_tree_is_another_source(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", tree_files())
    before = load(resolve(f"vllm:{root}"))
    assert before.record_layout() == "slot"
    write_tree(root, {KERNELS: tree_files("records")[KERNELS]})
    after = load(resolve(f"vllm:{root}"))
    assert (before.record_layout(), after.record_layout()) == ("slot", "row")


def test_installed_is_found_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write_tree(tmp_path / "site", tree_files(version="0.31.2")))
    source = resolve("vllm")
    assert (source.label, source.root) == ("vllm@0.31.2", tmp_path / "site")
    assert load(source).record_layout() == "slot"
    assert "vllm" not in sys.modules


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bare folder of that name on the path is a namespace package, not vLLM.
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SourceError, match="not installed"):
        resolve("vllm")


# Wheels and releases


def test_wheel(tmp_path: Path) -> None:
    files = tree_files() | {"vllm/huge.so": "x", "vllm/models/other.py": "y"}
    source = resolve(f"vllm:{write_wheel(tmp_path, files)}")
    assert source.label == "vllm@0.30.1"
    assert load(source).verify()(0, 0, 0) == ("conv 0.30.1", 0, False)
    unpacked = {path.name for path in source.root.rglob("*") if path.is_file()}
    assert "huge.so" not in unpacked
    assert "other.py" not in unpacked


def test_wheels_of_one_name_and_other_content_do_not_mix(tmp_path: Path) -> None:
    roots = {
        resolve(f"vllm:{write_wheel(tmp_path / layout, tree_files(layout))}").root
        for layout in ("records", "correction_cache, kg_cache")
    }
    assert len(roots) == 2


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("built_as", ["0.30.1", "0.30.1+cu129"])
def test_release_from_a_wheel_folder_then_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_as: str
) -> None:
    wheel = write_wheel(tmp_path / "wheels", tree_files(), built_as)
    monkeypatch.setenv("KDAFUZZ_WHEELS", os.pathsep.join([str(tmp_path / "nowhere"), str(wheel.parent)]))
    first = resolve("vllm@0.30.1")
    wheel.unlink()
    assert resolve("vllm@0.30.1") == first
    assert first.version == "0.30.1"


def test_release_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "elsewhere", tree_files())

    def fetch(version: Version, folder: Path) -> Path:
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(wheels, "download", fetch)
    assert resolve("vllm@0.30.1").version == "0.30.1"
    assert not list(cache.cache_dir().rglob("*.whl"))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("/usr/bin/python: No module named pip", "no pip"),
        (
            "WARNING: NewConnectionError: Failed to resolve\nERROR: No matching distribution found",
            "out of reach",
        ),
        ("ERROR: No matching distribution found for vllm==0.99", "has no vLLM 0.99; name a release"),
        ("ERROR: disk full\n", r"\(ERROR: disk full\)"),
    ],
)
def test_what_pip_says_becomes_one_sentence(
    monkeypatch: pytest.MonkeyPatch, said: str, sentence: str
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SourceError, match=sentence):
        resolve("vllm@0.99")


@pytest.mark.usefixtures("no_pip")
def test_old_versions(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"^needs vLLM >= 0\.29; found 0\.28\.1$"):
        resolve("vllm@0.28.1")
    old = {"vllm/__init__.py": "", "vllm/_version.py": "version = '0.28.1'\n", UTILS: "PAD_SLOT_ID = -1\n"}
    for text in (write_tree(tmp_path / "old", old), write_wheel(tmp_path, old, "0.28.1")):
        with pytest.raises(SourceError, match=r"^needs vLLM >= 0\.29; found 0\.28\.1$"):
            resolve(f"vllm:{text}")
    write_tree(tmp_path / "old", {"vllm/_version.py": "version = '0.31.0'\n"})
    with pytest.raises(SourceError, match=r"found 0\.31\.0 without vllm/models/kimi_k3"):
        resolve(f"vllm:{tmp_path / 'old'}")


def test_a_candidate_of_the_first_release_is_not_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, tree_files(), "0.29.0rc1")
    monkeypatch.setenv("KDAFUZZ_WHEELS", str(wheel.parent))
    assert resolve("vllm@0.29.0rc1").version == "0.29.0rc1"


@pytest.mark.parametrize(
    "name", ["../evil.py", "/abs.py", "vllm/models/kimi_k3/nvidia/../../../../../x.py", "C:/x.py"]
)
def test_hostile_member_names_are_refused(tmp_path: Path, name: str) -> None:
    wheel = write_wheel(tmp_path / "w", tree_files() | {name: "x"})
    with pytest.raises(SourceError, match="refused to unpack"):
        resolve(f"vllm:{wheel}")
    assert {path.name for path in tmp_path.rglob("*.py")} == set()


def test_links_in_wheels_are_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, tree_files())
    with zipfile.ZipFile(wheel, "a") as archive:
        link = zipfile.ZipInfo("vllm/models/kimi_k3/nvidia/link.py")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(SourceError, match="a link or too large"):
        resolve(f"vllm:{wheel}")


def test_what_is_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(SourceError, match="as a wheel"):
        resolve(f"vllm:{tmp_path / 'note.txt'}")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(SourceError, match="not a vLLM wheel"):
        resolve(f"vllm:{tmp_path / 'other.whl'}")


def test_a_wheel_cut_short(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, tree_files())
    data = bytearray(wheel.read_bytes())
    at = data.index(b"def kda_recoverssm_verify")
    data[at : at + 3] = b"xxx"
    wheel.write_bytes(bytes(data))
    with pytest.raises(SourceError, match="cannot unpack"):
        resolve(f"vllm:{wheel}")
    assert not [path for path in cache.cache_dir().iterdir() if path.is_dir()]


# The cache


def _lose_a_file(entry: Path) -> None:
    (entry / KERNELS).unlink()


def _change_a_byte(entry: Path) -> None:
    path = entry / KERNELS
    path.write_text(path.read_text().replace("tag", "gat"))


def _add_a_file(entry: Path) -> None:
    (entry / SHARED).write_text("stale = 1\n")


def _lose_the_marker(entry: Path) -> None:
    (entry / cache.MARKER).unlink()


def _garble_the_marker(entry: Path) -> None:
    (entry / cache.MARKER).write_text(json.dumps([1]))


def _be_a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("")


@pytest.mark.parametrize(
    "damage",
    [_lose_a_file, _change_a_byte, _add_a_file, _lose_the_marker, _garble_the_marker, _be_a_file],
)
def test_a_damaged_cache_entry_is_made_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    text = f"vllm:{write_wheel(tmp_path, tree_files())}"
    source = resolve(text)
    good = (source.root / KERNELS).read_text()
    damage(source.root)
    assert resolve(text) == source
    assert (source.root / KERNELS).read_text() == good
    assert not (source.root / SHARED).exists()
    assert [path.name for path in cache.cache_dir().iterdir() if path.is_dir()] == [source.root.name]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SourceError, match="KDAFUZZ_CACHE"):
        resolve(f"vllm:{write_wheel(tmp_path, tree_files())}")


def test_cache_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("KDAFUZZ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "kdafuzz"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "kdafuzz"


@pytest.mark.parametrize("locks", ["with locks", "without locks"])
def test_many_processes_unpack_one_wheel(tmp_path: Path, locks: str) -> None:
    many = {f"vllm/models/kimi_k3/nvidia/m{index}.py": "x = 1\n" * 200 for index in range(150)}
    wheel = write_wheel(tmp_path, tree_files() | many)
    code = (
        "import sys\n"
        "if sys.argv[2] == 'without locks': sys.modules['fcntl'] = None\n"
        "from impl.vllm.source import resolve\n"
        "sys.stdin.readline()\n"
        "source = resolve('vllm:' + sys.argv[1])\n"
        "print(source.root, len(list(source.root.rglob('m*.py'))))\n"
    )
    command = [sys.executable, "-c", code, str(wheel), locks]
    workers = [
        subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert len(set(answers)) == 1
    assert answers[0].split()[1] == "150"
    assert len([path for path in cache.cache_dir().iterdir() if path.is_dir()]) == 1
