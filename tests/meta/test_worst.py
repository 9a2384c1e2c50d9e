"""A hunt finds the cases that come nearest to their bounds, the same ones every time, and what fails."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

import ci.worst.hunt
from ci.search import Failure, Search, Tally
from ci.worst.hunt import hunt
from ci.worst.measure import MOST, Measured, compared
from ci.worst.mutate import mutated
from ci.worst.near import COMPARED, Nearness
from ci.worst.plain import OPERATIONS as REFERENCES
from ci.worst.plain import plain
from impl.contract import Domain, UnavailableError
from oracle.case import Case
from oracle.codec import canonical, read
from oracle.expect import expect
from oracle.expectation import Cells, Observation
from oracle.judge import Problem, Verdict, judge
from oracle.reach.dtypes import combination
from oracle.tracked import ANY_ORDER
from oracle.values import build
from tests.meta.calls import verify_of
from tests.meta.commands import Result, here, plug_in
from tests.meta.drawn import sample
from tests.strategies.cases import CASES
from tests.strategies.verify import verify_cases

ANY = Domain()


def hunted(judged: Callable[[Case], Verdict], examples: int = 150) -> tuple[Tally, Failure | None]:
    """What a hunt over verify finds."""
    return hunt(Search(verify_cases(), judged, 3, examples, hunting=True), ANY, compiled=False)


def ratio_of(case: Case) -> float:
    """High where many tensors have unusual values: seldom by chance, one more at a time in a climb."""
    return len(case.regimes) / 10.0


def hill(case: Case) -> Verdict:
    return Verdict(ratio_of(case), {"out": ratio_of(case), "correction": 0.1})


def test_a_climb_goes_where_chance_does_not() -> None:
    tally, failure = hunted(hill)
    assert failure is None
    found = tally.nearness
    by_chance = max(max(ratios) for ratios in found.samples.values())
    assert by_chance < 0.8
    assert max(near.ratio for near in found.worst.values()) == tally.ratio == 0.8
    for (_, tensor), near in found.worst.items():
        assert near.ratio == hill(near.case).ratios[tensor]


def test_only_what_is_drawn_is_an_example() -> None:
    tally, _ = hunted(hill, 100)
    assert tally.examples == len(tally.ratios) == 40
    assert sum(len(ratios) for ratios in tally.nearness.samples.values()) == 2 * 40
    assert 60 < tally.executions <= 100
    assert 0 < len(tally.nearness.cases) <= COMPARED


def told(tally: Tally) -> object:
    found = tally.nearness
    worst = {kind: (near.ratio, canonical(near.case)) for kind, near in found.worst.items()}
    return worst, found.samples, list(map(canonical, found.cases)), tally.digest


def test_a_seed_gives_its_hunt() -> None:
    one, again = hunted(hill, 60)[0], hunted(hill, 60)[0]
    assert told(one) == told(again)
    search = Search(verify_cases(), hill, 4, 60, hunting=True)
    assert told(hunt(search, ANY, compiled=False)[0]) != told(one)


def test_an_error_is_found_as_large_as_it_is() -> None:
    """An implementation that is off by a share of its bound, by more of it where a gate has the bound 0."""

    def judged(case: Case) -> Verdict:
        call = msgspec.structs.replace(verify_of(case), out="float64", own_out=True)
        case = msgspec.structs.replace(case, call=call, relation=None)
        values = build(case)
        expected = expect(case, values)
        after = dict(values.tensors)
        for name, cells in expected.cells.items():
            share = 0.0 if name != "out" else 0.625 if call.lower_bound == 0.0 else 0.25
            moved = cells.value if cells.bound is None else cells.value + share * cells.bound
            after[name] = moved if name == "out" else moved.to(getattr(torch, _stored(case, name)))
        verdict = judge(expected, Observation(after, after))
        assert verdict.ok, verdict.problems
        return verdict

    worst = hunted(judged, 120)[0].nearness.worst
    assert max(near.ratio for (_, tensor), near in worst.items() if tensor == "out") == pytest.approx(0.625)


def _stored(case: Case, name: str) -> str:
    return case.call.results()[name].dtype


def test_what_a_climb_finds_wrong_is_a_failure() -> None:
    """And it is shrunk, as one that is drawn."""

    def judged(case: Case) -> Verdict:
        if ratio_of(case) < 0.8:
            return hill(case)
        return Verdict(1.5, problems=(Problem("value", "out", "output", ratio=1.5),))

    tally, failure = hunted(judged)
    assert failure is not None
    assert failure.verdict.ratio == 1.5
    assert ratio_of(failure.case) == 0.8
    assert (verify_of(failure.case).rows, failure.case.layouts) == (0, {})
    assert tally.ratio == 0.7


def test_neighbours_may_be_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an implementation does not take is passed over; where it takes none, it is gone."""
    calls = 0

    def refusing(which: Callable[[int], bool]) -> Callable[[Case], Verdict]:
        nonlocal calls
        calls = 0

        def judged(case: Case) -> Verdict:
            nonlocal calls
            calls += 1
            if calls > 40 and which(calls):  # of 36, those of the climb
                raise UnavailableError("not taken")
            return hill(case)

        return judged

    tally, failure = hunted(refusing(lambda call: call % 2 == 0), 60)
    assert failure is None
    assert 40 < tally.executions < calls
    monkeypatch.setattr(ci.worst.hunt, "REFUSED", 5)
    with pytest.raises(UnavailableError, match="not taken"):
        hunted(refusing(lambda call: True), 60)
    assert calls == 40 + 6


@pytest.mark.parametrize("op", CASES)
def test_neighbours_are_cases_of_the_same_kind(op: str) -> None:
    rng = random.Random(op)
    drawn = list(sample(CASES[op](), 2))
    made = 0
    for case in drawn:
        for compiled in (False, True):
            other = mutated(case, rng, drawn, ANY, compiled=compiled)
            if other is None:
                continue
            made += 1
            assert (other.op, other.relation) == (op, None)
            assert combination(other.call) == combination(case.call)
            assert msgspec.json.decode(canonical(other), type=Case) == other
            if compiled:
                fixed = ("window", "key_dim", "value_dim", "heads", "lower_bound", "channels")
                for name in fixed:
                    assert getattr(other.call, name, None) == getattr(case.call, name, None)
    assert made > len(drawn)


def test_nearness_adds_up_in_any_order() -> None:
    parts = []
    for index, case in enumerate(sample(verify_cases(relations=()), 6)):
        part = Nearness()
        part.saw(case, {"out": index % 5 / 5.0, "correction": 0.5}, drawn=True)
        parts.append(part)
    forwards, backwards = Nearness(), Nearness()
    for part in parts:
        forwards.add(part)
    for part in reversed(parts):
        backwards.add(part)
    assert forwards.worst == backwards.worst
    assert forwards.cases == backwards.cases
    assert len(forwards.cases) == COMPARED < len(parts)
    assert {near.ratio for (_, tensor), near in forwards.worst.items() if tensor == "out"} <= {0.4, 0.6, 0.8}


def test_layers_count_as_one_tensor() -> None:
    found = Nearness()
    (case,) = list(sample(CASES["commit"](), 1))[:1]
    found.saw(case, {"state.0": 0.25, "state.1": 0.5}, drawn=True)
    assert [tensor for _, tensor in found.worst] == ["state"]
    assert list(found.samples.values()) == [[0.5]]


@pytest.mark.parametrize("op", REFERENCES)
def test_the_plain_reference_is_right(op: str) -> None:
    """Within fp32 bounds wherever values are plain and products are not rounded; and near them."""
    largest = 0.0
    for case in sample(CASES[op](relations=()), 6):
        taps, conv = (getattr(case.call, name, "float32") for name in ("taps", "conv"))
        rounded = taps == "bfloat16" and (op == "fused_verify" or conv == "bfloat16")
        if rounded or "specials" in case.regimes.values() or case.path == "declined":
            continue
        largest = max(largest, worst_of_plain(case))
    assert 0.01 < largest <= 1.0


def worst_of_plain(case: Case) -> float:
    """How near the plain reference comes to bounds for sums in any order, and one more for a root."""
    values = build(case)
    ar = replace(ANY_ORDER, rsqrt_rel=2.0**-22, div_rel=2.0**-22)
    expected = expect(case, values, ar)
    made = plain(case, values.tensors)
    cells = {name: one for name, one in expected.cells.items() if one.bound is not None}
    after = {name: made[name] for name in cells}
    verdict = judge(replace(expected, cells=cells, path=""), Observation(after, after))
    assert not [p for p in verdict.problems if p.kind != "frame"], verdict.problems[0].describe()
    return verdict.ratio


def cells_of(value: list[float], bound: list[float], written: list[bool]) -> Cells:
    v, e = (torch.tensor(x, dtype=torch.float64) for x in (value, bound))
    return Cells(torch.tensor(written), v, e, "output")


def test_a_bound_is_held_against_twice_a_plain_error() -> None:
    cells = cells_of([1.0, 2.0, 3.0, 0.0], [0.25, 0.5, 1.0, 9.0], [True, True, True, False])
    seen, reference = torch.tensor([1.5, 2.0, 3.0, 7.0]), torch.tensor([1.0, 2.125, 3.0, 5.0])
    # Twice an eighth; the median bound is a half; the kernel is off by a half.
    assert compared(cells, seen, reference) == (2.0, True)
    assert compared(cells, torch.tensor([1.25, 2.0, 3.0, 7.0]), reference) == (2.0, False)
    assert compared(cells, seen, torch.tensor([1.0, 2.0, 3.0, 0.0])) == (MOST, True)
    assert compared(cells_of([1.0], [float("inf")], [True]), seen[:1], reference[:1]) is None
    # A store to bf16 may round by half a step: 2**-8 of 2 here.
    narrow = compared(cells_of([2.0], [0.0], [True]), torch.tensor([2.0]).bfloat16(), torch.tensor([2.125]))
    assert narrow == (2.0**-7 / 0.25, False)
    assert msgspec.json.decode(msgspec.json.encode(Measured("out", MOST, True)), type=Measured).share == MOST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with implementations in it."""
    plug_in(tmp_path)
    return tmp_path


OPTIONS = ("--op", "verify", "--device", "cpu", "--jobs", "1", "--seed", "5", "--json", "found.json")


@pytest.mark.slow
def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    """The table, and per kind a case that shows the same ratio when it is replayed."""
    implementation = ("--impl", "zoo_outside:right")
    result = here(monkeypatch, capsys, folder, "worst", *implementation, *OPTIONS, "--examples", "40")
    assert (result.code, result.err) == (0, "")
    assert "ours : 2 plain" in result.out
    found = json.loads((folder / "found.json").read_text())
    assert (found["seed"], found["device"], found["failures"]) == (5, "cpu", [])
    assert {row["tensor"] for row in found["rows"]} == {"out", "correction"}
    for row in found["rows"]:
        assert row["worst"] >= row["quantiles"]["100"] >= row["quantiles"]["50"]
        assert read(folder / row["case"]).found["ratio"].endswith(f" of {row['tensor']}")
    assert any(row["ours_over_twice_plain"] for row in found["rows"])
    nearest = max(found["rows"], key=lambda row: row["worst"])
    again = here(monkeypatch, capsys, folder, "replay", nearest["case"])
    assert f"ratio {nearest['worst']:.3f}" in again.out


@pytest.mark.slow
def test_the_command_reports_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    implementation = ("--impl", "zoo_outside:raises")
    result = here(monkeypatch, capsys, folder, "worst", *implementation, *OPTIONS, "--examples", "10")
    assert result.code == 1
    (path,) = json.loads((folder / "found.json").read_text())["failures"]
    assert f"zoo_outside:raises verify: failing case {path}\n" in result.out
    assert here(monkeypatch, capsys, folder, "replay", path).code == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--op", "fold"), "unknown operation 'fold'; --op takes a list of verify, "),
        (("--impl", ","), "--impl names nothing; it takes a list of "),
        (("--examples", "9"), "Invalid value for '--examples': 9 is not in the range 10<=x<=10000000."),
        (("--minutes", "nan"), "Invalid value for '--minutes': 'nan' is not a number."),
        (("--save", "zoo_outside.py/x"), "--save zoo_outside.py/x: cannot write to "),
    ],
)
def test_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    result: Result = here(monkeypatch, capsys, folder, "worst", "--device", "cpu", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"kdafuzz: {sentence}")
    assert result.err.count("\n") == 1
