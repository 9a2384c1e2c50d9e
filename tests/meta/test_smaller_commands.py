"""The commands that make failing cases fewer and smaller: minimize, corpus add, corpus dedupe."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ci.failures import case_id, save
from oracle.codec import read
from oracle.judge import Problem, Verdict
from tests.meta.calls import verify_of
from tests.meta.commands import CASE, Result, entry, here, plug_in

replace = msgspec.structs.replace
ROWS = {"qlens": (4, 2, 1), "slots": (8, 3, 1), "ids": (0, 1, 2), "capacity": 3, "pool": 9}
LARGE = replace(
    CASE, call=replace(verify_of(CASE), heads=3, value_dim=20, window=4, **ROWS), poison="huge", seed=5
)
"""Fails on ``zoo:large``: more than one head and more than 16 value channels."""
WRONG = Verdict(problems=(Problem("value", "out", "output", text="planted"),), path="plain")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    plug_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """The command, in this process and that folder."""
    return lambda *arguments: here(monkeypatch, capsys, folder, *map(str, arguments))


def test_minimize(folder: Path, run: Callable[..., Result]) -> None:
    """One row, one token, the two heads that the fault needs; saved with what it is."""
    path = save(folder / "large", LARGE, WRONG, {"implementation": "zoo_outside:large", "device": "cpu"})
    done = run("minimize", path)
    assert done.code == 1, done.err
    (saved,) = (folder / ".kdafuzz/failures").rglob("*.json")
    call = verify_of(read(saved).case)
    assert (call.rows, call.tokens, call.heads) == (1, 1, 2)
    assert read(saved).found["signature"] == "value output out"
    assert f"minimal case {saved.relative_to(folder)}" in done.out


def test_minimize_a_case_that_passes(folder: Path, run: Callable[..., Result]) -> None:
    path = save(folder / "small", CASE, WRONG, {"implementation": "zoo_outside:large", "device": "cpu"})
    done = run("minimize", path)
    assert (done.code, "passes on zoo_outside:large (cpu)" in done.out) == (0, True)
    assert not (folder / ".kdafuzz/failures").exists()


def test_dedupe_keeps_the_smallest_of_each_kind(folder: Path, run: Callable[..., Result]) -> None:
    mine, other = {"implementation": "a", "device": "cpu"}, {"implementation": "b", "device": "cpu"}
    elsewhere = Verdict(problems=(Problem("value", "correction", "correction"),), path="plain")
    kept = [
        save(folder / "some", CASE, WRONG, mine),
        save(folder / "some", LARGE, elsewhere, mine),
        save(folder / "more", LARGE, WRONG, other),
    ]
    gone = save(folder / "more", LARGE, WRONG, mine | {"note": "larger"}).rename(
        folder / "some" / "larger.json"
    )
    kept[2] = save(folder / "more", LARGE, WRONG, other)
    told = run("corpus", "dedupe", folder)
    assert "3 kinds of failure, 1 further cases (--remove removes them)" in told.out
    assert gone.exists()
    assert run("corpus", "dedupe", folder, "--remove").code == 0
    assert [path.exists() for path in (*kept, gone)] == [True, True, True, False]


def test_dedupe_keeps_what_has_no_signature(folder: Path, run: Callable[..., Result]) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        made = entry(case=replace(CASE, seed=seed), checksum="")
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(made))
    assert "2 kinds of failure, 0 further cases" in run("corpus", "dedupe", folder, "--remove").out
    assert len(list(folder.glob("*.json"))) == 2


def test_add(folder: Path, run: Callable[..., Result]) -> None:
    """Named by content, explained, and never twice; ``corpus check`` agrees."""
    path = save(folder, CASE, WRONG, {"implementation": "a", "device": "cpu"})
    assert run("corpus", "add", path, "--why", "a test", "--name", "Two words!", "--to", "own").code == 0
    placed = folder / "own" / "verify" / f"two-words-{case_id(CASE)}.json"
    assert (read(placed).why, read(placed).found["path"]) == ("a test", "plain")
    assert run("corpus", "check", "own").code == 0
    again = run("corpus", "add", path, "--why", "again", "--name", "other", "--to", "own")
    assert (again.code, "the corpus has this case already" in again.err) == (2, True)
