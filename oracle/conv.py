"""What the short convolutions must write (contract, section 1.5).

y_t = act(bias + sum_j w_j win[t + j]),   win = history ++ inputs
"""

from dataclasses import dataclass

import torch

from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.case import Case
from oracle.expectation import Cells, Expected
from oracle.layout import DTYPES
from oracle.parts import in_parts
from oracle.tracked import Arithmetic, Tracked, exact, in_range
from oracle.values import Values

Tensor = torch.Tensor
SMALLEST_BF16 = 2.0**-133
"""The step of bf16 below 2**-126, where a product may be rounded twice or flushed."""


@dataclass(frozen=True)
class Windows:
    """The live rows of a call: ``win [n, C, W-1+L]`` in the conv dtype, zero past a row's end.

    ``rows [n]`` are their places in the batch, L is the longest row's length.
    """

    rows: list[int]
    win: Tensor


def expect_update(case: Case, values: Values, ar: Arithmetic) -> Expected:
    """Outputs and rolled rows of causal_conv1d_update."""
    call = case.call
    assert isinstance(call, ConvUpdate)
    state = values.tensors["conv_state"]
    windows = _windows(call, values, [state[call.slots[i]][:, call.first(i) :] for i in _live(call)])
    name = "x" if call.in_place else "out"
    out = _outputs(
        call, values, windows, ar, via=None if call.own_out else DTYPES[call.conv], fresh=call.cast
    )
    if call.cast:
        _hold_the_cast(call, values, out)
    rolled = {}
    for i, win in zip(windows.rows, windows.win, strict=True):
        # With counts every input is kept for whichever of them is accepted, else the last W - 1.
        start, columns = (
            (1, call.width - 2 + call.qlens[i]) if call.accepted else (call.qlens[i], call.width - 1)
        )
        rolled[call.slots[i]] = win[:, start : start + columns]
    return Expected({name: out, "conv_state": _stored(state, rolled)})


def expect_prefill(case: Case, values: Values, ar: Arithmetic) -> Expected:
    """Outputs and stored rows of causal_conv1d_fn, and of the packed form in planes."""
    call = case.call
    assert isinstance(call, ConvPrefill)
    state = values.tensors["conv_states"]
    history = [
        state[call.slots[i]] if call.initial[i] else torch.zeros_like(state[call.slots[i]])
        for i in _live(call)
    ]
    windows = _windows(call, values, history)
    out = _outputs(call, values, windows, ar, via=DTYPES[call.conv], fresh=True)
    if isinstance(call, PackedConv):
        assert out.bound is not None
        written, value, bound = (_planes(call, x) for x in (out.written, out.value, out.bound))
        out = Cells(written, value, bound, "conv", fresh=True, via=out.via)
    rolled = {
        call.slots[i]: win[:, call.qlens[i] : call.qlens[i] + call.width - 1]
        for i, win in zip(windows.rows, windows.win, strict=True)
    }
    return Expected({"out": out, "conv_states": _stored(state, rolled)})


def convolve(win: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool, ar: Arithmetic) -> Tracked:
    """Taps 0..W-1 in order onto the bias, in fp32: win ``[n, C, W-1+L]``, weight ``[C, W]`` to ``[n, C, L]``.

    Products of bf16 numbers are rounded to bf16 first.
    """

    def part(n: slice, c: slice) -> tuple[Tracked]:
        return (_convolve(win[n, c], weight[c], bias[c] if bias is not None else None, silu=silu, ar=ar),)

    rows, channels, columns = win.shape
    return in_parts(rows, channels, columns, part)[0]


def _convolve(win: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool, ar: Arithmetic) -> Tracked:
    width = weight.shape[1]
    length = win.shape[2] - width + 1
    acc = exact(bias)[:, None] if bias is not None else None
    for j in range(width):
        term = _product(win[:, :, j : j + length], weight[:, j, None], ar)
        acc = term if acc is None else ar.add(acc, term)
    assert acc is not None
    return ar.silu(acc) if silu else acc


def _product(x: Tensor, w: Tensor, ar: Arithmetic) -> Tracked:
    if x.dtype == w.dtype == torch.bfloat16:
        v = (x * w).double()
        return Tracked(v, torch.where(v.abs() < 2.0**-125, SMALLEST_BF16, 0.0))
    return in_range(ar.mul(exact(x), exact(w)))


def _live(call: ConvUpdate | ConvPrefill) -> list[int]:
    return [i for i in range(call.rows) if call.live(i)]


def _windows(call: ConvUpdate | ConvPrefill, values: Values, history: list[Tensor]) -> Windows:
    """Gather the rows; ``history[j]`` starts with the W - 1 columns before the j-th live row's inputs."""
    rows, before = _live(call), call.width - 1
    longest = max((call.qlens[i] for i in rows), default=0)
    dtype = DTYPES[call.conv]
    win = torch.zeros(len(rows), call.channels, before + longest, dtype=dtype)
    x = values.tensors["x"].to(dtype)  # inputs are cast first, rounded once
    for j, i in enumerate(rows):
        win[j, :, :before] = history[j][:, :before]
        win[j, :, before : before + call.qlens[i]] = x[call.token_place(i)].T
    return Windows(rows, win)


def _outputs(
    call: ConvUpdate | ConvPrefill,
    values: Values,
    windows: Windows,
    ar: Arithmetic,
    *,
    via: torch.dtype | None,
    fresh: bool,
) -> Cells:
    shape = values.tensors["x"].shape
    written = torch.zeros(shape, dtype=torch.bool)
    value, bound = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    if windows.rows:
        y = convolve(windows.win, values.tensors["weight"], values.tensors.get("bias"), silu=call.silu, ar=ar)
        for j, i in enumerate(windows.rows):
            place, n = call.token_place(i), call.qlens[i]
            written[place] = True
            value[place], bound[place] = y.v[j, :, :n].T, y.e[j, :, :n].T
    return Cells(written, value, bound, "conv", fresh, via)


def _hold_the_cast(call: ConvUpdate, values: Values, out: Cells) -> None:
    """Tokens that nobody computes hold the input as the conv state would: exactly."""
    cast = values.tensors["x"].to(DTYPES[call.conv]).double()
    for i in range(call.rows):
        if not call.live(i) and call.qlens[i]:
            place = call.token_place(i)
            out.written[place] = True
            out.value[place] = cast[place]


def _stored(state: Tensor, rolled: dict[int, Tensor]) -> Cells:
    """Stored rows: bit for bit, columns from 0 on."""
    written, value = torch.zeros(state.shape, dtype=torch.bool), torch.zeros_like(state)
    for slot, columns in rolled.items():
        written[slot, :, : columns.shape[1]] = True
        value[slot, :, : columns.shape[1]] = columns
    return Cells(written, value, None, "roll")


def _planes(call: PackedConv, x: Tensor) -> Tensor:
    """[T, C] as [C // part_dim, T, part_dim]."""
    return x.reshape(call.tokens, call.channels // call.part_dim, call.part_dim).transpose(0, 1)
