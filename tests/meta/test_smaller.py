"""The minimiser's steps for every operation, and how large a case is as JSON."""

from collections.abc import Callable

import pytest

from ci.candidates import candidates, measure
from ci.minimize import minimize
from impl.contract import UnavailableError
from oracle.buckets import EXAMPLES
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate
from oracle.case import Case, image
from oracle.codec import SCHEMA, CaseFile, canonical, case_from_json, dumps, loads
from oracle.judge import Problem, Verdict
from tests.meta.drawn import OPERATIONS, any_cases, over, sample
from tests.strategies.cases import CASES

EACH = pytest.mark.parametrize("op", OPERATIONS)
FAILED = Verdict(problems=(Problem("value", "out", "conv"),))


@over(any_cases())
def test_candidates_are_smaller_cases(case: Case) -> None:
    size, count = measure(case), 0
    for candidate in candidates(case):
        assert type(candidate) is Case
        assert candidate.op == case.op
        assert measure(candidate) < size
        candidate.call.check()
        assert case_from_json(canonical(candidate)) == candidate
        count += 1
        if count == 60:
            break
    assert count or case.call.rows <= 1


@EACH
def test_the_smallest_call_is_the_smallest(op: str) -> None:
    """What the minimiser makes of a case whose every part is beside the point."""
    drawn = _example(op, lambda case: case.call.rows > 2 and bool(case.layouts) and case.relation is not None)
    smallest, _ = minimize(drawn, FAILED, lambda _: FAILED)
    assert smallest.call.rows in (0, 1)
    assert (smallest.layouts, smallest.pages, smallest.regimes, smallest.relation) == ({}, (), {}, None)
    assert smallest.seed == 0
    assert sum(smallest.call.qlens) <= 1
    again, _ = minimize(smallest, FAILED, lambda _: FAILED)
    assert again == smallest


def test_candidates_that_an_implementation_does_not_take_are_passed_over() -> None:
    drawn = _example("verify", lambda case: getattr(case.call, "heads", 0) > 2 and case.call.rows > 1)

    def judge(case: Case) -> Verdict:
        if getattr(case.call, "heads", 0) != getattr(drawn.call, "heads", 0):
            raise UnavailableError("no such count of heads")
        return FAILED

    smallest, _ = minimize(drawn, FAILED, judge)
    assert getattr(smallest.call, "heads", 0) == getattr(drawn.call, "heads", 0)
    assert smallest.call.rows <= 1


@EACH
def test_a_fault_of_one_kind_of_row_keeps_one_such_row(op: str) -> None:
    """A fault that needs one live row of two tokens: nothing else is left of the case."""

    def faulty(case: Case) -> bool:
        return any(case.call.live(i) and n >= 2 for i, n in enumerate(case.call.qlens))

    drawn = _example(op, lambda case: case.call.rows > 2 and faulty(case) and _varlen(case))
    smallest, _ = minimize(drawn, FAILED, lambda case: _verdict(faulty(case)))
    call = smallest.call
    assert (call.qlens, call.slots, call.ids) == ((2,), (1,), call.ids)
    assert call.pool == 2
    assert [getattr(call, name) for name in call.shrinkable] == [1] * len(call.shrinkable)
    if isinstance(call, Commit):
        assert (call.block_size, len(call.accepted), call.requests, call.window) == (0, 1, (), 2)
        assert call.state_len == 2
    if isinstance(call, ConvUpdate):
        assert (call.window, call.accepted in ((), (1,)), call.silu, call.bias) == (2, True, False, None)
    if isinstance(call, ConvPrefill):
        assert (call.most_tokens, call.initial, call.silu, call.bias) == (2, (False,), False, None)


def test_a_batch_of_rows_of_one_length_becomes_shorter() -> None:
    """Without query_start_loc every row has the window's tokens: window and lengths must shrink as one."""
    rows = {"pool": 4, "qlens": (4, 4), "slots": (1, 2), "ids": (0, 1)}
    call = ConvUpdate(**rows, channels=1, state_len=3, window=4, form="batch", silu=False)  # type: ignore[arg-type]
    smallest, _ = minimize(Case(call=call), FAILED, lambda case: _verdict(case.call.rows > 0))
    assert smallest.call.qlens == (1,)


def _verdict(failed: bool) -> Verdict:
    return FAILED if failed else Verdict()


def _varlen(case: Case) -> bool:
    return not isinstance(case.call, ConvUpdate) or case.call.form == "varlen"


def _example(op: str, wanted: Callable[[Case], bool]) -> Case:
    return next(filter(wanted, sample(CASES[op](), 100)))


@EACH
def test_json_of_the_smallest(op: str) -> None:
    case = Case(call=EXAMPLES[op])
    assert case_from_json(canonical(case)) == case
    assert len(canonical(case)) < 600


@over(any_cases())
def test_json_round_trip(case: Case) -> None:
    data = canonical(case)
    assert case_from_json(data) == case
    assert canonical(case_from_json(data)) == data
    entry = CaseFile(kdafuzz=SCHEMA, case=case, checksum="00", why="drawn")
    assert loads(dumps(entry)) == entry
    if case.relation is not None:
        assert image(case).relation is None


@EACH
def test_most_cases_are_short(op: str) -> None:
    """2 kB hold nearly every case; a commit of three layers, pages and five rows may take more."""
    sizes = sorted(len(canonical(case)) for case in sample(CASES[op](), 30))
    assert len(sizes) >= 250
    assert sum(size <= 2048 for size in sizes) >= (0.95 if op == "commit" else 0.99) * len(sizes), sizes[-15:]
