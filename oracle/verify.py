"""What verify must write (contract, section 1.4)."""

from dataclasses import dataclass

import torch

from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.expectation import Cells, Expected
from oracle.gate import log_decay
from oracle.layout import DTYPES
from oracle.parts import in_parts
from oracle.recurrence import normalise, stepwise
from oracle.tracked import Arithmetic, Tracked, exact
from oracle.values import Values

Tensor = torch.Tensor


@dataclass(frozen=True)
class LiveRows:
    """The rows that compute, gathered into windows of equal length.

    ``rows [n]`` are their places in the batch, ``token [n, Q]`` the token of every window
    position (0 where there is none) and ``valid [n, Q]`` whether there is one.
    """

    rows: Tensor
    slots: Tensor
    token: Tensor
    valid: Tensor


def live_rows(call: Verify | FusedVerify) -> LiveRows:
    """Gather the live rows of a call."""
    rows = [i for i in range(call.rows) if call.live(i)]
    position = torch.arange(call.window)
    start = torch.tensor([call.starts[i] for i in rows], dtype=torch.long)[:, None]
    length = torch.tensor([call.qlens[i] for i in rows], dtype=torch.long)[:, None]
    valid = position < length
    token = torch.where(valid, start + position, 0)
    slots = torch.tensor([call.slots[i] for i in rows], dtype=torch.long)
    return LiveRows(torch.tensor(rows, dtype=torch.long), slots, token, valid)


def expect_verify(case: Case, values: Values, ar: Arithmetic) -> Expected:
    """Outputs, corrections and records of a verify call; the checkpoint must not change."""
    call = case.call
    assert isinstance(call, Verify)
    live = live_rows(call)
    window = _compute(call, values, live, ar) if len(live.rows) else None
    cells = {
        "correction": _corrections(call, live, window[0] if window else None),
        "key_gate": _records(call, live, values),
        "out": _outputs(call, live, window[1] if window else None),
    }
    return Expected(cells)


def _compute(call: Verify, values: Values, live: LiveRows, ar: Arithmetic) -> tuple[Tracked, Tracked]:
    """Corrections and outputs of the live rows, each ``[n, H, Q, V]``."""
    q, k, v, raw_g, raw_beta = (_window(values, name, live) for name in ("q", "k", "v", "raw_g", "raw_beta"))
    A_log = exact(values.tensors["A_log"])[:, None, None]  # [H, 1, 1]
    dt_bias = exact(values.tensors["dt_bias"])[:, None, :]  # [H, 1, K]
    g = log_decay(raw_g, A_log, dt_bias, call.lower_bound, ar)
    scaled_q = ar.scale(normalise(q, ar), float(call.key_dim) ** -0.5)
    unit_k, beta, states = normalise(k, ar), ar.sigmoid(raw_beta), values.tensors["state"]

    def part(n: slice, h: slice) -> tuple[Tracked, Tracked]:
        state = exact(states[:, h][live.slots[n]])
        result = stepwise(scaled_q[n, h], unit_k[n, h], v[n, h], g[n, h], beta[n, h], state, ar)
        return result.u, result.o

    u, o = in_parts(len(live.rows), call.heads, call.value_dim * call.key_dim, part)
    return u, o


def _window(values: Values, name: str, live: LiveRows) -> Tracked:
    """A token tensor ``[T, H, ...]`` as ``[n, H, Q, ...]``, zero where a row has no token."""
    gathered = values.tensors[name][live.token].transpose(1, 2)
    valid = live.valid[:, None, :].reshape(len(live.rows), 1, -1, *([1] * (gathered.ndim - 3)))
    return exact(torch.where(valid, gathered.double(), 0.0))


def _corrections(call: Verify, live: LiveRows, u: Tracked | None) -> Cells:
    shape = (call.record_rows, call.heads, call.window, call.value_dim)
    written = torch.zeros(shape, dtype=torch.bool)
    value, bound = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    if u is not None:
        row = torch.tensor([call.record_row(int(i)) for i in live.rows])
        written[row] = live.valid[:, None, :, None].expand(-1, *shape[1:])
        value[row], bound[row] = u.v, u.e
    return Cells(written, value, bound, "correction")


def _records(call: Verify, live: LiveRows, values: Values) -> Cells:
    shape = (call.record_rows, call.heads, call.window, 2 * call.key_dim)
    written = torch.zeros(shape, dtype=torch.bool)
    value = torch.zeros(shape, dtype=DTYPES[call.activation])
    if len(live.rows):
        row = torch.tensor([call.record_row(int(i)) for i in live.rows])
        written[row] = live.valid[:, None, :, None].expand(-1, *shape[1:])
        both = torch.cat((values.tensors["k"], values.tensors["raw_g"]), -1)
        value[row] = both[live.token].transpose(1, 2)
    return Cells(written, value, None, "record")


def _outputs(call: Verify, live: LiveRows, o: Tracked | None) -> Cells:
    shape = (call.tokens, call.heads, call.value_dim)
    written = torch.zeros(shape, dtype=torch.bool)
    written[: call.starts[-1]] = True  # null rows are exact zeros
    value, bound = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    if o is not None:
        token = live.token[live.valid]
        value[token], bound[token] = o.v.transpose(1, 2)[live.valid], o.e.transpose(1, 2)[live.valid]
    return Cells(written, value, bound, "output", fresh=not call.own_out)
