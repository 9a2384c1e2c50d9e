"""Libraries of CuTe kernels: built, described, loaded where there is no DSL, refused when they are stale."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("tvm_ffi", reason="needs the extra kdafuzz[cute]")
pytest.importorskip("cutlass.cute", reason="needs the extra kdafuzz[cute]")

from ci.aot import command
from ci.cli import cli
from ci.doctor import show_kernels
from impl.contract import UnavailableError
from impl.cute import aot
from impl.cute.compile import ARCHITECTURES, MAX_WINDOW, variant
from impl.cute.emulator.host import compiler

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes for commit, window 4, Hopper."""
    made = tmp_path_factory.mktemp("aot")
    asked = ["aot", "--arch", "sm_90a", "--kernel", "commit", "--window", "4", "--out", str(made)]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    assert "commit_sm_90a_q4_by_slot_align" in done.output
    return made


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing loaded before a test, nor after it."""
    monkeypatch.setattr(aot, "_LIBRARIES", {})
    aot._load_environment.cache_clear()
    yield
    aot._load_environment.cache_clear()


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / aot.MANIFEST).read_text())["kernels"]
    return found


def test_the_manifest_describes_every_library(folder: Path) -> None:
    names = {f"commit_sm_90a_q4{x}" for x in ("", "_align", "_by_slot", "_by_slot_align")}
    assert entries(folder).keys() == names
    for name, entry in entries(folder).items():
        data = (folder / entry["library"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["arguments"][-1] == "chunk"
        assert 32 < entry["registers"] <= 168, name  # three CTAs of 128 threads an SM
        assert entry["frame"] == 0, name  # nothing is spilled
        assert 0 < entry["shared"] <= 227 * 1024 // 3 - 1024


def test_functions_are_found_by_name(folder: Path) -> None:
    assert aot.loaded("commit_sm_90a_q4") is None
    assert set(aot.load(folder)) == entries(folder).keys()
    assert callable(aot.loaded("commit_sm_90a_q4"))
    assert aot.loaded("commit_sm_90a_q3") is None


def test_a_machine_without_the_dsl_takes_them_from_the_environment(folder: Path) -> None:
    code = """
import sys
sys.modules["cutlass"] = None
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "cutlass" else real(name, *rest)
from impl.contract import UnavailableError
from impl.cute.compile import function, variant
assert callable(function(variant("commit", "sm_90a", 4, by_slot=False, align=True), "cuda"))
try:
    function(variant("commit", "sm_90a", 5, by_slot=False, align=True), "cuda")
except UnavailableError as error:
    print(error)
"""
    environment = {**os.environ, aot.FOLDER_VARIABLE: str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no library holds commit_sm_90a_q5_align" in done.stdout


def test_with_the_dsl_a_variant_is_built_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first function is compiled, another process loads it without the DSL."""
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path))
    monkeypatch.delenv(aot.FOLDER_VARIABLE, raising=False)
    assert callable(aot.cached(variant("commit", "sm_90a", 1, by_slot=False, align=False)))
    code = """
import sys
from impl.cute.compile import function, variant
assert callable(function(variant("commit", "sm_90a", 1, by_slot=False, align=False), "cuda"))
assert "cutlass" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 0}, "build it again"),
        (
            {"kernels": {"x": {"library": "x.so", "kernel": "commit", "source": "old"}}},
            "other kernel sources",
        ),
        ({"kernels": {"x": {}}}, "no folder of kdafuzz aot"),
    ],
)
def test_other_manifests_are_refused(change: dict[str, Any], text: str, folder: Path, tmp_path: Path) -> None:
    manifest = json.loads((folder / aot.MANIFEST).read_text()) | change
    (tmp_path / aot.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UnavailableError, match=text):
        aot.load(tmp_path)


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no folder of kdafuzz aot"):
        aot.load(tmp_path)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("sm_80", "commit", "4"), "--arch must be some of"),
        (("sm_90a", "", "4"), "--kernel must be some of"),
        (("sm_90a", "commit", "9"), "--window must be some of 1 to 8"),
    ],
)
def test_unknown_choices_are_refused(given: tuple[str, str, str], text: str, tmp_path: Path) -> None:
    arches, names, windows = given
    with pytest.raises(UnavailableError, match=text):
        command(arches, tmp_path / "new", names, windows)
    assert not (tmp_path / "new").exists()


def test_doctor_tells_what_a_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compiled once; told again without compiling; a kernel that cannot be had does not stop it."""
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    wanted = variant("commit", "sm_90a", 1, by_slot=False, align=False)
    show_kernels([wanted])
    first = capsys.readouterr().out
    (entry,) = aot.build([wanted], tmp_path / "built")
    told = [wanted.name, "sm_90a", *(str(entry[x]) for x in ("registers", "shared", "frame", "cubin"))]
    assert told in _rows(first)
    assert entry["cubin"] > 4096

    def broken(*_: object) -> None:
        raise RuntimeError("no [compiler]")

    monkeypatch.setattr(aot, "_library", broken)
    show_kernels([wanted, variant("commit", "sm_90a", 2, by_slot=False, align=False)])
    again = capsys.readouterr().out
    assert told in _rows(again)
    assert "not found out: RuntimeError: no [compiler]" in again


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]


def test_doctor_refuses_unknown_windows() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--kernels", "--window", "9"])
    assert isinstance(done.exception, UnavailableError)
    assert "--window must be some of 1 to 8" in str(done.exception)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_largest_commit_spills_nothing(arch: str, tmp_path: Path) -> None:
    wanted = variant("commit", arch, MAX_WINDOW, by_slot=True, align=True)
    (entry,) = aot.build([wanted], tmp_path)
    assert entry["frame"] == 0
    assert entry["registers"] <= 168
    assert entry["shared"] <= 227 * 1024 // 2 - 1024  # two CTAs an SM
