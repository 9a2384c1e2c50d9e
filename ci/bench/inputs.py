"""Tensors of the timed calls: sets of them that together are far larger than a GPU's L2 cache.

A graph calls once on every set, in turn, and the cache is overwritten before it starts, so that
what a call reads comes from memory. Sets share pools and parameters but no slot. Values are normal,
and the same for every implementation: a tensor's name and its set seed them.
"""

import random
import zlib
from dataclasses import dataclass

import torch

from ci.bench.calls import Size, call_of
from ci.bench.traffic import moved
from impl.bindings import Views
from oracle.calls import AnyCall
from oracle.layout import DTYPES, TensorSpec

FOOTPRINT = 512 << 20
"""Bytes that the sets should move at least, if there are not ``LAUNCHES`` of them before that."""
LAUNCHES = 24
"""Calls in a graph, and most sets."""
MISALIGNED = "mixed_qkv"
"""The tensor whose rows ``odd`` inputs put off their alignment."""
_PARAMETER_SCALE = 0.5


@dataclass(frozen=True)
class Inputs:
    """One set: a call, and the tensors that the caller passes."""

    call: AnyCall
    views: Views


def sets_of(size: Size) -> int:
    """How many sets a graph goes round: two at least."""
    one = call_of(size, tuple(range(1, size.needs + 1)), size.needs + 1)
    return min(LAUNCHES, max(2, -(-FOOTPRINT // moved(one))))


def build(size: Size, device: torch.device, sets: int, *, odd: bool = False) -> list[Inputs]:
    """The sets; ``odd``: rows of the projection lie one element further apart, off 16 bytes."""
    pool = sets * size.needs + 1
    order = list(range(1, pool))
    random.Random(pool).shuffle(order)
    shared: Views = {}
    result = []
    for index in range(sets):
        slots = tuple(order[index * size.needs : (index + 1) * size.needs])
        call = call_of(size, slots, pool)
        views = {}
        for name, spec in call.tensors().items():
            if spec.axes[0] == "slot" or spec.role == "parameter":
                if name not in shared:
                    shared[name] = tensor(call, spec, device, 0)
                views[name] = shared[name]
            else:
                views[name] = tensor(call, spec, device, index)
        if odd:
            views[MISALIGNED] = _spread(views[MISALIGNED])
        result.append(Inputs(call, views))
    return result


def tensor(call: AnyCall, spec: TensorSpec, device: torch.device, index: int) -> torch.Tensor:
    """A dense tensor of set ``index``: the call's own numbers, zeros for outputs, else normal values."""
    dtype = DTYPES[spec.dtype]
    if spec.role == "index":
        return torch.tensor(call.index_values()[spec.name], dtype=dtype, device=device)
    if spec.role == "output":
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{spec.name} {index}".encode()))
    made = torch.empty(spec.shape, dtype=dtype, device=device).normal_(generator=generator)
    return made.mul_(_PARAMETER_SCALE) if spec.role == "parameter" else made


def _spread(x: torch.Tensor) -> torch.Tensor:
    wider = torch.zeros((x.shape[0], x.shape[1] + 1), dtype=x.dtype, device=x.device)
    wider[:, : x.shape[1]] = x
    return wider[:, : x.shape[1]]
