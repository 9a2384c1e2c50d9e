"""What commit must write: the plan, compacted conv rows, folded states (contract, section 1.6)."""

import torch

from oracle.calls.commit import PLAN, Commit
from oracle.case import Case
from oracle.expectation import Cells, Expected
from oracle.gate import log_decay
from oracle.parts import slices
from oracle.plan import RowPlan
from oracle.recurrence import fold
from oracle.tracked import Arithmetic, Tracked, exact
from oracle.values import Values

Tensor = torch.Tensor


def expect_commit(case: Case, values: Values, ar: Arithmetic) -> Expected:
    """The plan exactly, conv columns bit for bit, states within the bound of the fold."""
    call = case.call
    assert isinstance(call, Commit)
    plans = [call.plan(row) for row in range(call.rows)]
    cells = _plan(call, plans)
    for layer in range(call.layers):
        cells[f"conv_state.{layer}"] = _compacted(call, plans, values.tensors[f"conv_state.{layer}"])
        cells[f"state.{layer}"] = _folded(call, plans, values, layer, ar)
    return Expected(cells)


def _plan(call: Commit, plans: list[RowPlan]) -> dict[str, Cells]:
    fields = zip(*((p.n, p.final, p.boundary, p.m) for p in plans), strict=True) if plans else [()] * 4
    written = torch.arange(call.capacity) < call.rows
    result = {}
    for name, field in zip(PLAN, fields, strict=True):
        value = torch.zeros(call.capacity, dtype=torch.int32)
        value[: call.rows] = torch.tensor(field, dtype=torch.int32)
        result[name] = Cells(written, value, None, "plan", fresh=True)
    return result


def _compacted(call: Commit, plans: list[RowPlan], before: Tensor) -> Cells:
    """Columns n-1.. (m-1.. at a boundary) of the source move to column 0; all reads come first."""
    written, value = torch.zeros(before.shape, dtype=torch.bool), before.clone()
    for row, plan in enumerate(plans):
        for slot, n in ((plan.final, plan.n), (plan.boundary, plan.m)):
            if plan.writes and slot > 0:
                written[slot, :, : call.history] = True
                source = before[call.slots[row], :, n - 1 : n - 1 + call.history]
                value[slot, :, : call.history] = source
    return Cells(written, value, None, "roll")


def _folded(call: Commit, plans: list[RowPlan], values: Values, layer: int, ar: Arithmetic) -> Cells:
    state = values.tensors[f"state.{layer}"]
    written = torch.zeros(state.shape, dtype=torch.bool)
    value, bound = (
        torch.zeros(state.shape, dtype=torch.float64),
        torch.zeros(state.shape, dtype=torch.float64),
    )
    rows = [row for row, plan in enumerate(plans) if plan.writes]
    targets = [(j, plans[row].final, plans[row].n) for j, row in enumerate(rows)]
    targets += [
        (j, plans[row].boundary, plans[row].m) for j, row in enumerate(rows) if plans[row].writes_boundary
    ]
    if targets:
        part = torch.tensor([j for j, _, _ in targets])
        slots, tokens = torch.tensor([s for _, s, _ in targets]), torch.tensor([n for _, _, n in targets])
        sources = torch.tensor([call.slots[row] for row in rows])[part]
        k, g, u = (x[part] for x in _records(call, values, layer, rows, plans, ar))
        written[slots] = True
        for n, h in slices(len(targets), call.heads, call.value_dim * call.key_dim):
            S = exact(state[:, h][sources[n]])
            result = fold(S, k[n, h], g[n, h], u[n, h], tokens[n], ar)
            value[:, h][slots[n]], bound[:, h][slots[n]] = result.v, result.e
    return Cells(written, value, bound, "fold")


def _records(
    call: Commit, values: Values, layer: int, rows: list[int], plans: list[RowPlan], ar: Arithmetic
) -> tuple[Tracked, Tracked, Tracked]:
    """Raw keys [n, H, Q, K], log decays [n, H, Q, K] and corrections [n, H, Q, V]; dead positions are 0."""
    at = [call.record_row(row) for row in rows]
    count = torch.tensor([plans[row].n for row in rows])
    valid = (torch.arange(call.window) < count[:, None])[:, None, :, None]  # [n, 1, Q, 1]
    both = torch.where(valid, values.tensors[f"key_gate.{layer}"][at].double(), 0.0)
    u = torch.where(valid, values.tensors[f"correction.{layer}"][at].double(), 0.0)
    K = call.key_dim
    A_log = exact(values.tensors[f"A_log.{layer}"])[:, None, None]
    dt_bias = exact(values.tensors[f"dt_bias.{layer}"])[:, None, :]
    g = log_decay(exact(both[..., K:]), A_log, dt_bias, call.lower_bound, ar)
    return exact(both[..., :K]), g, exact(u)
