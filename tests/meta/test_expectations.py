"""What every operation's oracle owes the judge: cells that fit the call, from inputs alone.

A run that does exactly what is expected has no problem, one that does anything else has; the
invariants that a call claims hold of the oracle's own numbers.
"""

import math
from dataclasses import replace as replaced

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.buckets import EXAMPLES
from oracle.calls.commit import PLAN
from oracle.calls.conv import ConvUpdate
from oracle.case import Case, image
from oracle.expect import expect
from oracle.expectation import Cells, Expected, Observation
from oracle.judge import STAGES, judge
from oracle.layout import DTYPES
from oracle.relations import row_maps
from oracle.stored import bits, same_bits
from oracle.values import Values, build
from tests.meta.drawn import OPERATIONS, any_cases, over
from tests.strategies.cases import CASES

Tensor = torch.Tensor
replace = msgspec.structs.replace
PAIRED = ("prefix", "hostile", "permute", "rename", "unpacked")
"""Relations whose image is another call."""


def perfect(case: Case, values: Values, expected: Expected) -> Observation:
    """A run that left exactly what is expected; every other byte is as it was."""
    before: dict[str, Tensor] = {}
    for name, spec in case.call.tensors().items():
        plain = torch.full(spec.shape, 7, dtype=DTYPES[spec.dtype])
        before[name] = plain if spec.output else values.tensors[name]
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name, cells in expected.cells.items():
        spec = case.call.results()[name]
        target = after.setdefault(name, torch.full(spec.shape, 7, dtype=DTYPES[spec.dtype]))
        number = cells.value if cells.via is None else cells.value.float().to(cells.via)
        target[cells.written] = number[cells.written].to(target.dtype)
    return Observation(before, after, path=expected.path)


@over(any_cases())
def test_a_perfect_run_is_right(case: Case) -> None:
    values = build(case)
    expected = expect(case, values)
    seen = perfect(case, values, expected)
    verdict = judge(expected, seen)
    assert verdict.ok, verdict.problems[0].describe()
    assert verdict.ratio <= 1.0
    for name, cells in expected.cells.items():
        spec = case.call.results()[name]
        assert cells.value.shape == cells.written.shape == spec.shape
        assert cells.bound is None or cells.bound.shape == spec.shape
        assert cells.value.dtype == (DTYPES[spec.dtype] if cells.bound is None else torch.float64)
        assert cells.fresh != case.call.passed(name)
        assert cells.stage in STAGES


@given(any_cases(), st.integers(0, 1 << 20))
def test_any_other_cell_is_a_problem(case: Case, at: int) -> None:
    """One cell of each tensor in turn, changed far beyond its bound or by a bit where there is none."""
    values = build(case)
    expected = expect(case, values)
    seen = perfect(case, values, expected)
    for name, right in seen.after.items():
        if not right.numel():
            continue
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at % right.numel()), right.shape))
        cells, wrong = expected.cells.get(name), right.clone()
        if cells is not None and bool(cells.written[place]) and cells.bound is not None:
            # Finite and far from what is right, on the other side of 0.
            far = 6e4 if right.dtype == torch.float16 else 3e38
            wrong[place] = -far if float(right[place]) > 0.0 else far
            if 1e4 < float(cells.bound[place]) < math.inf:
                continue  # perhaps not far enough
        else:
            bits(wrong)[place] ^= 1
        verdict = judge(expected, replaced(seen, after={**seen.after, name: wrong}))
        wanted = [(name, place, 1)] if _claimed(cells, place, right) else []
        assert [(p.tensor, p.index, p.count) for p in verdict.problems] == wanted, name


def _claimed(cells: Cells | None, place: tuple[int, ...], right: Tensor) -> bool:
    """Whether the contract says anything of a cell that the change breaks."""
    if cells is None or not bool(cells.written[place]):
        return cells is None or not cells.fresh
    if cells.bound is None:
        return not bool(right.isnan()[place])  # a NaN's payload is free
    value, bound = cells.value[place], cells.bound[place]
    return not bool(value.isfinite()) or bool(bound.isfinite())


@over(any_cases())
def test_the_oracle_reads_inputs_only(case: Case) -> None:
    """Dead cells may hold anything: no number that is expected depends on them."""
    values = build(case)
    poisoned = {name: tensor.clone() for name, tensor in values.tensors.items()}
    for name, tensor in poisoned.items():
        if tensor.is_floating_point():
            tensor[~values.filled[name]] = torch.nan
    first, second = expect(case, values), expect(case, Values(poisoned, values.filled))
    assert first.cells.keys() == second.cells.keys()
    for name, cells in first.cells.items():
        other = second.cells[name]
        assert torch.equal(cells.written, other.written)
        pairs = [(cells.value, other.value)]
        if cells.bound is not None and other.bound is not None:
            pairs.append((cells.bound, other.bound))
        for a, b in pairs:
            assert bool(same_bits(a, b, any_nan=True)[cells.written].all()), name


@over(any_cases())
def test_rows_name_the_cells_that_are_written(case: Case) -> None:
    """A call's ``cells`` of all rows are the oracle's write set, but for what no row decides."""
    call, expected = case.call, expect(case)
    for name, cells in expected.cells.items():
        named = torch.zeros_like(cells.written)
        for row, qlen in enumerate(call.qlens):
            for place in call.cells(name, row, qlen):
                named[place] = True
            assert not any(bool(named[place].logical_not().any()) for place in call.cells(name, row, 0))
        assert bool((cells.written | ~named).all()), name
        if isinstance(call, ConvUpdate) and call.cast and name == "out":
            dead = [i for i in range(call.rows) if not call.live(i)]
            for row in dead:  # they hold the cast input, which relations need not look at
                named[call.token_place(row)] = True
        if name not in PLAN:
            assert torch.equal(named, cells.written), name


@over(any_cases())
def test_more_tokens_decide_more_cells(case: Case) -> None:
    call = case.call
    shapes = {name: spec.shape for name, spec in call.results().items()}
    for name in expect(case).cells:
        for row, qlen in enumerate(call.qlens):
            before = torch.zeros(shapes[name], dtype=torch.bool)
            for tokens in sorted({0, 1, qlen // 2, qlen}):
                if tokens <= qlen:
                    now = torch.zeros_like(before)
                    for place in call.cells(name, row, tokens):
                        now[place] = True
                    assert bool((now | ~before).all())
                    before = now


@pytest.mark.parametrize("op", OPERATIONS)
@given(data=st.data())
def test_invariants_hold_of_the_oracle(op: str, data: st.DataObject) -> None:
    """Cells that a relation pairs have the same value, whichever of the two cases computes it."""
    strategy = CASES[op]
    case = data.draw(strategy(relations=[name for name in PAIRED if name in EXAMPLES[op].relations]))
    if case.relation is None:
        return
    other = image(case)
    first, second = expect(case), expect(other)
    for name, cells in first.cells.items():
        for m in row_maps(case):
            here = case.call.cells(name, m.row, m.tokens)
            there = other.call.cells(name, m.image_row, m.tokens)
            for left, right in zip(here, there if here else [], strict=True):
                a, b = cells.value[left], second.cells[name].value[right]
                if a.shape != b.shape:
                    a = a.movedim(0, -2).reshape(b.shape)
                if cells.bound is None:
                    assert bool(same_bits(a, b, any_nan=True).all()), name
                    continue
                # Sums in double may differ by their order, by far less than any bound.
                same = (a - b).abs() <= 1e-9 * a.abs() + 1e-30
                assert bool((same | ~(a.isfinite() & b.isfinite())).all()), name
                assert torch.equal(a.isfinite(), b.isfinite()), name
