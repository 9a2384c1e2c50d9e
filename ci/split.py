"""A commit in two parts: up to the block boundary, then the rest (contract, section 1.8, 2).

``S_n`` must be what ``commit(m)`` and then ``commit(n - m)`` leave, with records and conv
columns moved up by ``m``: the columns bit for bit, the state within the sum of the bounds,
for decays shrink what the first part added.
"""

import msgspec
import torch

from ci.runs import Run, Watch, ignore
from impl.contract import Implementation
from impl.devices.base import Device
from impl.observe import observe
from oracle.calls.commit import Commit
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Cells, Expected, Observation
from oracle.judge import Problem, Verdict, judge
from oracle.tracked import Arithmetic
from oracle.values import Values, build, index_tensors

Tensor = torch.Tensor


def split(
    case: Case,
    expected: Expected,
    seen: Observation,
    implementation: Implementation,
    device: Device,
    ar: Arithmetic,
    watch: Watch = ignore,
) -> tuple[Problem, ...]:
    """What is wrong with the two parts, against the one commit that ``seen`` is."""
    call = case.call
    assert isinstance(call, Commit)
    rows = [row for row in range(call.rows) if _crosses(call, row)]
    if not rows:
        return ()
    plain = msgspec.structs.replace(case, relation=None)
    cut, whole = _cut(call, rows), build(plain)
    first = msgspec.structs.replace(plain, call=cut)
    values = Values(whole.tensors | index_tensors(cut), whole.filled)
    middle, problems = _run(first, values, implementation, device, ar, watch)
    if problems:
        return problems
    second = msgspec.structs.replace(plain, call=_rest(call, rows))
    moved = _moved(call, rows, whole.tensors, middle.after)
    last, problems = _run(second, moved, implementation, device, ar, watch)
    if problems:
        return problems
    bounds = [expect(first, values, ar), expect(second, moved, ar), expected]
    return _compared(call, rows, bounds, last, seen, watch)


def _crosses(call: Commit, row: int) -> bool:
    plan = call.plan(row)
    return plan.writes_boundary and plan.m < plan.n


def _cut(call: Commit, rows: list[int]) -> Commit:
    """The call that accepts just the tokens before the boundary in these rows."""
    accepted = list(call.accepted)
    for row in rows:
        accepted[call.request(row)] = call.plan(row).m
    return msgspec.structs.replace(call, accepted=tuple(accepted))


def _rest(call: Commit, rows: list[int]) -> Commit:
    """The call that goes on from the boundary slots; other rows are done."""
    accepted, computed = [0] * len(call.accepted), list(call.computed)
    slots, qlens = list(call.slots), list(call.qlens)
    for row in rows:
        plan, r = call.plan(row), call.request(row)
        accepted[r], computed[r] = plan.n - plan.m, call.computed[r] + plan.m
        slots[row], qlens[row] = plan.boundary, qlens[row] - plan.m
    for row in range(call.rows):
        if row not in rows:
            slots[row] = 0
    return msgspec.structs.replace(
        call, accepted=tuple(accepted), computed=tuple(computed), slots=tuple(slots), qlens=tuple(qlens)
    )


def _moved(call: Commit, rows: list[int], before: dict[str, Tensor], middle: dict[str, Tensor]) -> Values:
    """Memory for the second part: the boundary's states, everything else moved up by m."""
    tensors = {name: tensor.clone() for name, tensor in middle.items() if name in before}
    for layer in range(call.layers):
        for row in rows:
            plan, source = call.plan(row), call.slots[row]
            rest = before[f"conv_state.{layer}"][source][:, plan.m :]
            tensors[f"conv_state.{layer}"][plan.boundary, :, : rest.shape[1]] = rest
            here = call.record_row(row)
            there = here if call.records == "row" else plan.boundary
            for name in (f"correction.{layer}", f"key_gate.{layer}"):
                tensors[name][there, :, : call.window - plan.m] = before[name][here, :, plan.m :]
    return Values.full(tensors | index_tensors(_rest(call, rows)))


def _run(
    case: Case,
    values: Values,
    implementation: Implementation,
    device: Device,
    ar: Arithmetic,
    watch: Watch,
) -> tuple[Observation, tuple[Problem, ...]]:
    seen, expected = observe(case, implementation, device, values), expect(case, values, ar)
    verdict: Verdict = judge(expected, seen)
    note = "in a part of the commit"
    axes = {name: spec.axes for name, spec in case.call.results().items()}
    watch(Run(expected, seen, verdict, axes, case.call, values.tensors, note))
    return seen, tuple(problem.noted(note) for problem in verdict.problems)


def _compared(
    call: Commit,
    rows: list[int],
    parts: list[Expected],
    last: Observation,
    whole: Observation,
    watch: Watch,
) -> tuple[Problem, ...]:
    """The final slots of the two commits against those of the one."""
    cells: dict[str, Cells] = {}
    for layer in range(call.layers):
        state, conv = f"state.{layer}", f"conv_state.{layer}"
        first, second, one = (part.cells[state] for part in parts)
        assert first.bound is not None
        assert second.bound is not None
        assert one.bound is not None
        written, columns = torch.zeros_like(one.written), torch.zeros_like(parts[2].cells[conv].written)
        bound = second.bound + one.bound
        value = whole.after[state].double()
        step = torch.finfo(whole.after[state].dtype).eps
        for row in rows:
            plan = call.plan(row)
            written[plan.final] = True
            # The boundary state was stored: what it was rounded by stays in the second part's result.
            rounded = step / 2 * first.value[plan.boundary].abs() + 2.0**-133
            own = step / 2 * (value[plan.final].abs() + bound[plan.final]) + 2.0**-133
            bound[plan.final] += first.bound[plan.boundary] * (1 + step) + rounded + own
            columns[plan.final, :, : call.history] = True
        cells[state] = Cells(written, value, bound, "fold")
        cells[conv] = Cells(columns, whole.after[conv], None, "roll")
    tensors = {name: last.after[name] for name in cells}
    joined, both = Expected(cells), Observation(tensors, tensors)
    verdict = judge(joined, both)
    note = "commit(m) and commit(n - m) against commit(n)"
    axes = {name: spec.axes for name, spec in call.results().items()}
    watch(Run(joined, both, verdict, axes, call, what=note))
    return tuple(problem.noted(note) for problem in verdict.problems)
