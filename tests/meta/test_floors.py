"""Strategies reach every bucket, each as often as ``tests/strategies/floors.toml`` asks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oracle.buckets import BUCKETS, buckets
from oracle.case import Case
from tests.meta.drawn import sample
from tests.strategies import floors as table
from tests.strategies.cases import CASES
from tests.strategies.floors import floors, short

ROUNDS = {"serve": 12}
"""Of ten examples each; one of serving takes as long to draw as three of another operation."""
EACH = pytest.mark.parametrize("op", CASES)


@EACH
def test_strategies_reach_their_floors(op: str) -> None:
    """The same draws every time: what falls short has become rarer, and needs more weight in its strategy."""
    known = set(BUCKETS[op])

    def drawn() -> Iterator[Case]:
        for case in sample(CASES[op](), ROUNDS.get(op, 40)):
            assert buckets(case) <= known
            yield case

    assert short(op, drawn()) == {}


def test_a_strategy_without_a_kind_of_case_falls_short() -> None:
    missing = short("commit", sample(CASES["commit"](relations=()), 10))
    asked = {name for name in BUCKETS["commit"] if name.startswith("relation: ")} - {"relation: none"}
    assert asked <= missing.keys()
    # Ninety-odd cases of a hundred draws: one in a hundred is one.
    assert missing["relation: Split"] == (0, 1)


def test_every_bucket_has_a_floor() -> None:
    for op, names in BUCKETS.items():
        found = floors(op)
        assert tuple(found) == names
        assert set(found.values()) == {10, 100}


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ('"rows: several"', '"rows: seven"', "rows: seven"),
        ("verify = [", 'verify = ["event: pad",', "event: pad"),
        ("serve = [", "served = [", ""),
    ],
)
def test_a_table_with_an_unknown_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, name: str
) -> None:
    wrong = tmp_path / "floors.toml"
    wrong.write_text(table.TABLE.read_text().replace(old, new, 1))
    monkeypatch.setattr(table, "TABLE", wrong)
    floors.cache_clear()
    try:
        with pytest.raises(ValueError, match=f"floors.toml: no bucket '{name}' of verify"):
            floors("verify")
    finally:
        floors.cache_clear()
