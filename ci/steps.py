"""The calls that a step of serving is made of, and what memory must hold after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ci.slots import Slots
from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.serve import WIDTH, Lying, Serve
from oracle.calls.verify import Verify
from oracle.expectation import Cells, Expected
from oracle.layout import Layout
from oracle.serving import Request

Tensor = torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of one call: events of the script, the request of each (0: padding), and its slot."""

    events: tuple[int, ...]
    requests: tuple[int, ...]
    slots: tuple[int, ...]


def batch_of(script: Serve, events: Sequence[int], pads: Sequence[int], slots: Slots) -> Batch:
    """Events and padding in their order; an empty padding row repeats a live slot, as captured graphs do."""
    order = tuple(sorted((*events, *pads)))
    requests = tuple(script.slots[i] if i in events else 0 for i in order)
    own = [slots.slot(request) if request else 0 for request in requests]
    alias = next(slot for slot in own if slot)
    places = (slot if script.qlens[i] else alias for i, slot in zip(order, own, strict=True))
    return Batch(order, requests, tuple(places))


def prefill(
    script: Serve, events: Sequence[int], slots: Sequence[int], continued: Sequence[bool]
) -> ConvPrefill:
    """The convolution of whole chunks."""
    return ConvPrefill(
        **_rows(script, events, slots),
        **_conv(script),
        most_tokens=script.chunk,
        initial=tuple(continued),
    )


def update(script: Serve, batch: Batch, *, counted: bool) -> ConvUpdate:
    """The convolution of a window; after a commit every count is 1."""
    return ConvUpdate(
        **_rows(script, batch.events, batch.slots),
        **_conv(script),
        window=script.window if counted else 1,
        accepted=(1,) * len(batch.events) if counted else (),
    )


def fused(script: Serve, batch: Batch) -> FusedVerify:
    """Both in one call; after a commit every count is 1."""
    assert script.lower_bound is not None
    return FusedVerify(
        **_rows(script, batch.events, batch.slots),
        heads=script.heads,
        window=script.window,
        capacity=script.capacity,
        accepted=(1,) * len(batch.events),
        dim_first=script.dim_first,
        taps=script.taps,
        lower_bound=script.lower_bound,
    )


def verify(script: Serve, batch: Batch) -> Verify:
    """The window itself."""
    return Verify(
        **_rows(script, batch.events, batch.slots),
        **_heads(script),
        capacity=script.capacity if script.records == "row" else 0,
        out=script.activation,
    )


def commit(script: Serve, batch: Batch, slots: Slots, *, wide: bool) -> Commit:
    """The accepted tokens; requests are numbered among all that run, padding rows come after them.

    ``wide`` gives the block table a column more.
    """
    names = sorted(slots.running)
    requests: list[int] = []
    total = len(names)
    for request in batch.requests:
        requests.append(names.index(request) if request else total)
        total += not request
    accepted = [script.window] * total  # of requests that are not in the batch: must not matter
    for i, r in zip(batch.events, requests, strict=True):
        accepted[r] = script.accepted[i] if script.kinds[i] != "plain" else 1
    blocks: dict[str, Any] = {}
    if script.block_size:
        running = [slots.running[name] for name in names]
        width = max(len(one.table) for one in running) + wide
        spare = total - len(names)
        blocks = {
            "block_size": script.block_size,
            "computed": (*(one.model.tokens for one in running), *[0] * spare),
            "table": (
                *(tuple(one.table) + (0,) * (width - len(one.table)) for one in running),
                *[(0,) * width] * spare,
            ),
        }
    return Commit(
        **_rows(script, batch.events, batch.slots),
        **_heads(script),
        channels=script.channels,
        state_len=script.state_len,
        capacity=script.capacity,
        accepted=tuple(accepted),
        requests=tuple(requests),
        dim_first=script.dim_first,
        conv=script.conv,
        **blocks,
    )


def held(wanted: dict[int, Request], state: Tensor, conv: Tensor) -> Expected:
    """What state ``[S, H, V, K]`` and conv rows ``[S, C, P]`` hold of these slots, by the model."""
    value, bound = (torch.zeros(state.shape, dtype=torch.float64) for _ in range(2))
    written, columns = (torch.zeros(x.shape, dtype=torch.bool) for x in (state, conv))
    history = torch.zeros_like(conv)
    for slot, model in wanted.items():
        written[slot], value[slot], bound[slot] = True, model.S, model.E[:, :, None]
        columns[slot, :, : WIDTH - 1] = True
        history[slot, :, : WIDTH - 1] = model.history
    return Expected(
        {"state": Cells(written, value, bound, "fold"), "conv_state": Cells(columns, history, None, "roll")}
    )


def layouts(script: Serve, call: AnyCall, lying: Lying) -> dict[str, Layout]:
    """Where a call's tensors lie: stored ones in the script's wider slots, tokens as the step's do."""
    found = {}
    for name, spec in call.tensors().items():
        inner = (0,) * (len(spec.shape) - 1)
        if spec.role == "slot" and script.gap:
            found[name] = Layout(gaps=(script.gap, *inner))
        elif spec.role == "token" and spec.strided != "dense" and lying != "dense":
            found[name] = Layout(gaps=(1, *inner)) if lying == "wide" else Layout(offset=1)
    return found


def _rows(script: Serve, events: Sequence[int], slots: Sequence[int]) -> dict[str, Any]:
    return {
        "pool": script.pool,
        "qlens": tuple(script.qlens[i] for i in events),
        "slots": tuple(slots),
        "ids": tuple(range(len(events))),
    }


def _conv(script: Serve) -> dict[str, Any]:
    shared = {name: getattr(script, name) for name in ("activation", "conv", "taps")}
    return {"channels": script.channels, "state_len": script.state_len, **shared}


def _heads(script: Serve) -> dict[str, Any]:
    names = ("heads", "key_dim", "value_dim", "window", "records", "activation", "state", "lower_bound")
    return {name: getattr(script, name) for name in names}
