"""Which cells are inputs: exactly those that the contract reads, so that all others hold poison."""

import torch

from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate
from oracle.case import Case
from oracle.values import build
from tests.meta.drawn import over
from tests.strategies.cases import CASES

Tensor = torch.Tensor


def mask(case: Case, name: str) -> Tensor:
    """All false, in the tensor's shape."""
    return torch.zeros(case.call.tensors()[name].shape, dtype=torch.bool)


def check(case: Case, name: str, read: Tensor) -> None:
    """The tensor's inputs are the cells that are read, and hold values."""
    values = build(case)
    filled, tensor = values.filled[name], values.tensors[name]
    filled = filled.reshape(*filled.shape, *([1] * (read.ndim - filled.ndim))).expand(read.shape)
    assert torch.equal(filled, read), name
    if name.startswith(("x", "conv_state", "state")):
        assert bool(tensor[read].count_nonzero() > 0) or not bool(read.any()) or bool(case.regimes)


@over(CASES["conv_update"]())
def test_update_reads_its_history(case: Case) -> None:
    """Columns f to f + W - 2 of live slots; live tokens, and null rows' where their cast is returned."""
    call = case.call
    assert isinstance(call, ConvUpdate)
    history, x = mask(case, "conv_state"), mask(case, "x")
    start = 0
    for row, (slot, qlen) in enumerate(zip(call.slots, call.qlens, strict=True)):
        null = slot <= 0 and call.null_block == 0
        first = call.accepted[row] - 1 if call.accepted else 0
        if not null and qlen:
            history[slot, :, first : first + call.width - 1] = True
        if not null or (not call.own_out and call.activation != call.conv):
            if call.form == "varlen":
                x[start : start + qlen] = True
            else:
                x[row, :qlen] = True
        start += qlen
    check(case, "conv_state", history)
    check(case, "x", x)


def _prefill(case: Case) -> None:
    call = case.call
    assert isinstance(call, ConvPrefill)
    history, x, start = mask(case, "conv_states"), mask(case, "x"), 0
    for slot, qlen, continues in zip(call.slots, call.qlens, call.initial, strict=True):
        if slot > 0 and qlen:
            history[slot, :, : call.width - 1] |= continues
            x[start : start + qlen] = True
        start += qlen
    check(case, "conv_states", history)
    check(case, "x", x)


@over(CASES["conv_prefill"]())
def test_prefill_reads_the_history_of_rows_that_continue(case: Case) -> None:
    _prefill(case)


@over(CASES["packed_conv"]())
def test_packed_reads_what_prefill_does(case: Case) -> None:
    _prefill(case)


@over(CASES["commit"](), 20)
def test_commit_reads_what_it_folds(case: Case) -> None:
    """Source states, n records, conv columns from n - 1 and, with a boundary, from m - 1."""
    call = case.call
    assert isinstance(call, Commit)
    kept = call.state_len - call.window + 1
    for layer in range(call.layers):
        names = [f"{kind}.{layer}" for kind in ("conv_state", "state", "correction", "key_gate")]
        conv, state, correction, key_gate = (mask(case, name) for name in names)
        for row, slot in enumerate(call.slots):
            plan = call.plan(row)
            if plan.n == 0 or plan.final <= 0:
                continue
            state[slot] = True
            conv[slot, :, plan.n - 1 : plan.n - 1 + kept] = True
            if plan.boundary > 0:
                conv[slot, :, plan.m - 1 : plan.m - 1 + kept] = True
            at = row if call.records == "row" else slot
            correction[at, :, : plan.n] = True
            key_gate[at, :, : plan.n] = True
        for name, read in zip(names, (conv, state, correction, key_gate), strict=True):
            check(case, name, read)
