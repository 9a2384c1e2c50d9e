"""Spoiled case files are judged right or refused in one line; ``mutated_corpus`` does it by the thousand."""

from pathlib import Path

import pytest

from ci.failures import CORPORA, load
from oracle.codec import CaseError
from tests.meta.mutants import BYTES, CHANGES, mutants
from tests.meta.mutated_corpus import (
    GOOD,
    Judge,
    Outcome,
    command,
    limited,
    make_sandbox,
    names,
    odd_files,
    one_line,
)

COUNT = 240


def test_mutants_are_judged_or_refused(tmp_path: Path) -> None:
    sandbox = tmp_path / "sandbox"
    files = make_sandbox(sandbox)
    judge, outcomes = Judge(), list[Outcome]()
    given = list(mutants(CORPORA, COUNT, 3))
    for mutant in given:
        (files / mutant.name).write_bytes(mutant.data)
    before = names(sandbox)
    try:
        outcomes = [judge.outcome(files / mutant.name, mutant.kinds) for mutant in given]
    finally:
        judge.close()
    assert [o for o in outcomes if o.name not in GOOD] == []
    # Both ways are taken, and every kind of change is tried.
    assert sum(o.name == "right" for o in outcomes) > COUNT // 8
    assert {kind for o in outcomes for kind in o.kinds} == CHANGES.keys() | BYTES.keys()
    code, out, wrong = command(sandbox, "corpus", "check", str(files))
    assert (code, wrong) == (2, "")
    refused = sum(o.name == "refused" for o in outcomes)
    assert out.splitlines()[-1].startswith(f"{COUNT} cases, {refused} unusable, ")
    assert names(sandbox) == before


def test_odd_files_are_refused(tmp_path: Path) -> None:
    sandbox = tmp_path / "sandbox"
    folder = make_sandbox(sandbox) / "odd"
    odd_files(folder)
    before = names(sandbox)
    told = {}
    for path in folder.iterdir():
        with limited(5.0):
            try:
                load(path)
                told[path.name] = ""
            except CaseError as error:
                told[path.name] = str(error).removeprefix(f"{path}: ")
    special = "cannot read: it is a pipe, a device or a socket, not a file"
    assert told.pop("pipe.json") == told.pop("socket.json") == special
    assert told.pop("device.json") == told.pop("full.json") == special
    assert told.pop("loop.json") == "cannot read: Too many levels of symbolic links"
    assert told.pop("nowhere.json") == "cannot read: No such file or directory"
    assert told.pop("sparse.json") == "1048577 bytes is no case file; they are under 1048576"
    assert told.pop("link.json") == told.pop("a\nb\x1b[2J.json") == ""
    code, out, wrong = command(sandbox, "corpus", "check", str(folder))
    assert (code, wrong) == (2, "")
    assert "pipe.json: cannot read: it is a pipe" in out
    assert names(sandbox) == before


def test_what_counts_as_one_line() -> None:
    assert one_line("a sentence")
    assert not one_line("two\nlines")
    assert not one_line("\x1b[2J")
    assert not one_line("x" * 2000)


def test_a_judge_tells_wrong_from_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test relies on: a wrong verdict has a name of its own."""
    monkeypatch.setattr("tests.meta.mutated_corpus.IMPLEMENTATIONS", {"verify": "tests.meta.zoo:raises"})
    judge = Judge()
    try:
        found = judge.outcome(next((CORPORA / "verify").glob("tiny-keys-*.json")), ())
    finally:
        judge.close()
    assert found.name == "JUDGED WRONG"
