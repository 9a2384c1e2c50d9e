"""What the fused verify must write (contract, sections 1.5 and 1.7).

The convolution and its roll, then verify on the convolution's output rounded to bf16. Of that
rounding nothing is known where the error bound reaches both sides of a tie: such a number
carries one step of bf16 on (``oracle.tracked.bfloat16``).
"""

import torch

from oracle.calls.fused_verify import WIDTH, FusedVerify
from oracle.case import Case
from oracle.conv import convolve
from oracle.expectation import DECLINED, Cells, Expected
from oracle.factored import window
from oracle.gate import log_decay
from oracle.parts import in_parts
from oracle.recurrence import normalise, stepwise
from oracle.tracked import Arithmetic, Tracked, bfloat16, exact
from oracle.values import Values
from oracle.verify import LiveRows, live_rows

Tensor = torch.Tensor


def expect_fused_verify(case: Case, values: Values, ar: Arithmetic) -> Expected:
    """Outputs, corrections, records and rolled rows; nothing at all of a call that is declined."""
    call = case.call
    assert isinstance(call, FusedVerify)
    if case.path == DECLINED:
        return Expected({}, case.path)
    live = live_rows(call)
    win = _windows(call, values, live)
    y = _masked(convolve(win, values.tensors["conv_weight"], None, silu=True, ar=ar), live)
    u, o = _verified(call, values, live, bfloat16(y), ar)
    cells = {
        "correction": _corrections(call, live, u),
        "key_gate": _records(call, values, live, y),
        "conv_state": _rolled(call, values, live, win),
        "out": _outputs(call, live, o),
    }
    return Expected(cells, case.path)


def _windows(call: FusedVerify, values: Values, live: LiveRows) -> Tensor:
    """History and raw inputs of the live rows: [n, 3HK, 3 + Q] in bf16, zero past a row's end."""
    win = torch.zeros(len(live.rows), call.channels, WIDTH - 1 + call.window, dtype=torch.bfloat16)
    for j, row in enumerate(live.rows.tolist()):
        history = values.tensors["conv_state"][(call.slots[row], *call.columns(call.first(row), WIDTH - 1))]
        win[j, :, : WIDTH - 1] = history if call.dim_first else history.T
        inputs = values.tensors["mixed_qkv"][call.token_place(row)]
        win[j, :, WIDTH - 1 : WIDTH - 1 + len(inputs)] = inputs.T
    return win


def _masked(y: Tracked, live: LiveRows) -> Tracked:
    """The convolution's output [n, 3HK, Q], 0 where a row has no token."""
    on = live.valid[:, None]
    return Tracked(torch.where(on, y.v, 0.0), torch.where(on, y.e, 0.0))


def _heads(call: FusedVerify, x: Tensor) -> Tensor:
    """[n, 3HK, Q] as [3, n, H, Q, K]."""
    return x.reshape(len(x), 3, call.heads, call.key_dim, call.window).permute(1, 0, 2, 4, 3)


def _verified(
    call: FusedVerify, values: Values, live: LiveRows, y: Tracked, ar: Arithmetic
) -> tuple[Tracked, Tracked]:
    """Corrections and outputs [n, H, Q, V] from the rounded convolution."""
    H, K = call.heads, call.key_dim
    q, k, v = (Tracked(a, b) for a, b in zip(_heads(call, y.v), _heads(call, y.e), strict=True))
    raw_g = _tokens(values.tensors["raw_gate"].reshape(call.tokens, H, K), live)
    beta = ar.sigmoid(_tokens(values.tensors["raw_beta"], live))
    A_log = exact(values.tensors["A_log"])[:, None, None]  # [H, 1, 1]
    dt_bias = exact(values.tensors["dt_bias"].reshape(H, 1, K))
    g = log_decay(raw_g, A_log, dt_bias, call.lower_bound, ar)
    states = values.tensors["state"]

    def part(n: slice, h: slice) -> tuple[Tracked, Tracked]:
        state = exact(states[:, h][live.slots[n]])
        q_n, k_n, v_n, g_n, beta_n = (x[n, h] for x in (q, k, v, g, beta))
        if ar.factored:
            return window(q_n, k_n, v_n, g_n, beta_n, state, ar)
        scaled_q = ar.scale(normalise(q_n, ar), float(K) ** -0.5)
        result = stepwise(scaled_q, normalise(k_n, ar), v_n, g_n, beta_n, state, ar)
        return result.u, result.o

    u, o = in_parts(len(live.rows), H, call.value_dim * K, part)
    return u, o


def _tokens(x: Tensor, live: LiveRows) -> Tracked:
    """[T, H, ...] as [n, H, Q, ...], zero where a row has no token."""
    gathered = x[live.token].double().transpose(1, 2)
    on = live.valid[:, None].reshape(len(live.rows), 1, gathered.shape[2], *([1] * (gathered.ndim - 3)))
    return exact(torch.where(on, gathered, 0.0))


def _corrections(call: FusedVerify, live: LiveRows, u: Tracked) -> Cells:
    shape = (call.capacity, call.heads, call.window, call.value_dim)
    written, value, bound = _blank(shape)
    written[live.rows] = live.valid[:, None, :, None].expand(-1, *shape[1:])
    value[live.rows], bound[live.rows] = u.v, u.e
    return Cells(written, value, bound, "correction")


def _records(call: FusedVerify, values: Values, live: LiveRows, y: Tracked) -> Cells:
    """Keys as the convolution rounds to them, raw gates bit for bit."""
    H, K = call.heads, call.key_dim
    shape = (call.capacity, H, call.window, 2 * K)
    written, value, bound = _blank(shape)
    written[live.rows] = live.valid[:, None, :, None].expand(-1, *shape[1:])
    gates = values.tensors["raw_gate"].reshape(call.tokens, H, K)[live.token].transpose(1, 2)
    value[live.rows] = torch.cat((_heads(call, y.v)[1], gates.double()), -1)
    bound[live.rows] = torch.cat((_heads(call, y.e)[1], torch.zeros_like(gates, dtype=torch.float64)), -1)
    copied = torch.zeros(shape, dtype=torch.bool)
    copied[..., K:] = True
    return Cells(written, value, bound, "record", copied=copied)


def _rolled(call: FusedVerify, values: Values, live: LiveRows, win: Tensor) -> Cells:
    """Columns 0 and 1 are the last two of the history, then come the raw inputs."""
    before = values.tensors["conv_state"]
    written, value = torch.zeros(before.shape, dtype=torch.bool), before.clone()
    for j, row in enumerate(live.rows.tolist()):
        count = WIDTH - 2 + call.qlens[row]
        place = (call.slots[row], *call.columns(0, count))
        columns = win[j, :, 1 : 1 + count]
        written[place] = True
        value[place] = columns if call.dim_first else columns.T
    return Cells(written, value, None, "roll")


def _outputs(call: FusedVerify, live: LiveRows, o: Tracked) -> Cells:
    written, value, bound = _blank((call.tokens, call.heads * call.value_dim))
    written[: call.starts[-1]] = True  # null rows are exact zeros
    token = live.token[live.valid]
    for target, source in ((value, o.v), (bound, o.e)):
        target[token] = source.transpose(1, 2)[live.valid].flatten(1)
    return Cells(written, value, bound, "output")


def _blank(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Nothing written, values and bounds of 0."""
    zeros = torch.zeros(shape, dtype=torch.float64)
    return torch.zeros(shape, dtype=torch.bool), zeros, zeros.clone()
