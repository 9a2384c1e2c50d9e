"""``kdafuzz corpus check`` finds what is against the rules, reads whatever it meets, and changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci.failures import case_id
from oracle.calls.verify import Verify
from oracle.case import Case, OtherPoison, Relayout
from oracle.codec import dumps
from oracle.layout import Layout
from oracle.values import checksum
from tests.meta.commands import CALL, CASE, entry, here, tree


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
    "known not TOML": (lambda f: known(f, "[["), 2, "known.toml: "),
    "known not text": (lambda f: (f / "known.toml").write_bytes(b"\xff"), 2, "known.toml: "),
    "known a folder": (lambda f: (f / "known.toml").mkdir(), 2, "known.toml: "),
}


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
    result = here(monkeypatch, capsys, tmp_path, "corpus", "check", str(folder))
    assert (result.code, result.err) == (code, "")
    assert sentence in result.out
    assert tree(folder) == before
