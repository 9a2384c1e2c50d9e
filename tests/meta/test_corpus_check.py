"""``kdafuzz corpus check`` finds what is against the rules, reads whatever it meets, and changes nothing."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci.failures import case_id, load
from oracle.calls.verify import Verify
from oracle.case import Case, OtherPoison, Relayout
from oracle.codec import CaseError, dumps
from oracle.layout import Layout
from oracle.values import checksum
from tests.meta.commands import CALL, CASE, entry, here, tree
from tests.meta.mutated_corpus import limited


def corpus(folder: Path) -> Path:
    """A corpus of one good case."""
    good = folder / "verify" / f"good-{case_id(CASE)}.json"
    good.parent.mkdir(parents=True)
    good.write_bytes(dumps(entry()))
    return good


def saved(folder: Path, case: Case = CASE, slug: str = "other", **fields: Any) -> None:
    path = folder / "verify" / f"{slug}-{case_id(case)}.json"
    path.write_bytes(dumps(entry(case=case, checksum=checksum(case), **fields)))


OTHER = Case(call=Verify(**CALL), seed=1)
WIDE = Case(
    call=Verify(**CALL),
    layouts={name: Layout(offset=1) for name in ("q", "k", "v")},
    relation=Relayout({name: Layout(offset=2) for name in CASE.call.tensors()}),
)
KNOWN = (
    '[[known]]\nimplementation="a"\nversions=">=1"\noperation="verify"\nstage="plan"\n'
    'bucket="records: row"\ncause="e"\n'
)
SPOILED: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "nothing": (lambda f: None, 0, "1 cases, 0 unusable, 0 against"),
    "another": (lambda f: saved(f, OTHER), 0, "2 cases"),
    "relation": (lambda f: saved(f, Case(call=CASE.call, relation=OtherPoison())), 0, "2 cases"),
    "misnamed": (lambda f: misname(f, OTHER), 1, "must be named"),
    "misplaced": (lambda f: misplace(f, OTHER), 1, "must lie in"),
    "unexplained": (lambda f: saved(f, OTHER, why=""), 1, "does not say why"),
    "oversized": (lambda f: saved(f, WIDE, why="long " * 300), 1, "bytes; at most 2048"),
    "broken": (lambda f: (f / "verify/x-00000000.json").write_text("{"), 2, "1 unusable"),
    "a folder of that name": (lambda f: (f / "verify/x.json").mkdir(), 0, "1 cases"),
    "known in order": (lambda f: known(f, KNOWN + f'case="{case_id(CASE)}"'), 0, "0 unusable"),
    "known case absent": (lambda f: known(f, KNOWN + 'case="00000000"'), 2, "not in the corpus"),
    "known of a number": (lambda f: known(f, KNOWN + "case=[1]"), 2, "needs text in every field"),
    "known of no bucket": (
        lambda f: known(f, KNOWN.replace("row", "nine") + f'case="{case_id(CASE)}"'),
        2,
        "names bucket 'records: nine'",
    ),
    "known without fields": (lambda f: known(f, "[[known]]\n"), 2, "needs the fields"),
    "known no list": (lambda f: known(f, "known = 3"), 2, "needs its entries as [[known]]"),
    "known misspelt": (lambda f: known(f, "[[knwon]]\n"), 2, "unknown table 'knwon'"),
    "known deep": (lambda f: known(f, "known = " + "[" * 100_000), 2, "known.toml: "),
    "a pipe": (lambda f: os.mkfifo(f / "verify/x.json"), 2, "not a file"),
    "a name of two lines": (
        lambda f: (f / "verify/a\nb\x1b[2J.json").write_text("{"),
        2,
        "a b?[2J.json: not a case file",
    ),
    "a long checksum": (lambda f: drifted(f, "a\nb" * 100_000), 2, "saved a ba ba b"),
    "known a pipe": (lambda f: os.mkfifo(f / "known.toml"), 2, "known.toml: cannot read: it is a pipe"),
    "known a number without end": (lambda f: known(f, "known = " + "9" * 5000), 2, "known.toml: "),
    "known not TOML": (lambda f: known(f, "[["), 2, "known.toml: "),
    "known not text": (lambda f: (f / "known.toml").write_bytes(b"\xff"), 2, "known.toml: "),
    "known a folder": (lambda f: (f / "known.toml").mkdir(), 2, "known.toml: "),
}


def drifted(folder: Path, text: str) -> None:
    (folder / "verify" / "drifted.json").write_bytes(dumps(entry(checksum=text)))


def known(folder: Path, text: str) -> None:
    (folder / "known.toml").write_text(text)


def misname(folder: Path, case: Case) -> None:
    saved(folder, case)
    next((folder / "verify").glob(f"*-{case_id(case)}.json")).rename(folder / "verify" / "named-wrongly.json")


def misplace(folder: Path, case: Case) -> None:
    saved(folder, case)
    next((folder / "verify").glob(f"*-{case_id(case)}.json")).rename(folder / f"top-{case_id(case)}.json")


@pytest.mark.parametrize("spoiled", SPOILED)
def test_corpus_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, spoiled: str
) -> None:
    spoil, code, sentence = SPOILED[spoiled]
    folder = tmp_path / "[/red]corpus"
    corpus(folder)
    spoil(folder)
    before = tree(folder)
    with limited(60.0):  # a pipe must not be waited for
        result = here(monkeypatch, capsys, tmp_path, "corpus", "check", str(folder))
    assert (result.code, result.err) == (code, "")
    assert sentence in result.out
    assert all(line.isprintable() and len(line) < 1200 for line in result.out.split("\n"))
    assert tree(folder) == before


def test_what_load_says_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(dumps(entry(checksum="a\nb\x1b" * 1000)))
    with pytest.raises(CaseError, match="makes other values") as caught:
        load(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000

    def too_much(case: Case) -> str:
        raise MemoryError

    monkeypatch.setattr("ci.failures.checksum", too_much)
    with pytest.raises(CaseError, match=r"case\.json: there is not enough memory for its values$"):
        load(path)
