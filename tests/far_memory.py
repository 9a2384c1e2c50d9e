"""Tensors whose entries lie more than 2**31 elements apart, in real memory.

Entry ``i`` of a tensor starts at element ``i * stride``. A kernel that forms that product in 32 bits,
signed or not, in elements or in bytes, comes out somewhere else: there lies poison, in memory that
it may touch without a fault, so that what it reads is wrong and what it writes is seen. Only these
places and the entries themselves are ever written; the rest of the allocation is never touched.
"""

import mmap
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from impl.arena import poison
from impl.bindings import Launched
from impl.devices.share import VARIABLE, whole_memory
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Observation
from oracle.judge import judge
from oracle.tracked import arithmetic
from tests.hardware import Placed, Rig

STRIDES = {"wide": (1 << 31) + (1 << 20), "narrow": 3 * (1 << 29) + (1 << 20)}
"""Elements from an entry to the next, no powers of two. The wide one needs 64 bits itself; the narrow one
fits 32, and a compiler that is told so multiplies in 32 unless the other factor is wide."""
RED_ZONE = 256
SPARE_BYTES = 1 << 30
"""What a call needs beside the far tensor; at least a worker's share is left for the others."""
PATIENCE_SECONDS = 120.0
_NORESERVE = 0x4000  # of Linux; Python 3.11 does not name it


@dataclass(frozen=True)
class Zone:
    """Bytes that must keep what they hold, from the tensor's first one, and what they would be taken for."""

    start: int
    end: int
    what: str


def zones(entries: int, size: int, itemsize: int, stride: int) -> list[Zone]:
    """Where 32-bit products would come out, and the neighbourhood of every entry of ``size`` bytes."""
    found = []
    for entry in range(entries):
        true = entry * stride * itemsize
        found.append(Zone(true - RED_ZONE, true + size + RED_ZONE, f"beside entry {entry}"))
        for unit, factor in (("elements", itemsize), ("bytes", 1)):
            product = true // factor
            wrapped = {"unsigned": product % (1 << 32)}
            wrapped["signed"] = (product + (1 << 31)) % (1 << 32) - (1 << 31)
            found += [
                Zone(at * factor, at * factor + size, f"where entry {entry} is in {sign} 32-bit {unit}")
                for sign, at in wrapped.items()
                if at * factor != true
            ]
    return found


def reserve(rig: Rig, size: int) -> torch.Tensor:
    """Memory for far entries, uninitialised; ``Skipped`` where the device has too little."""
    if rig.device != "cuda":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    needed = size + max(SPARE_BYTES, int(os.environ.get(VARIABLE) or 0))
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        if free >= needed:
            try:
                return torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:  # another process was faster
                pass
        # What other tests of this run hold, they give back.
        if total < needed or time.monotonic() > end:
            kind = "memory" if total < needed else "free memory"
            found = total if total < needed else free
            pytest.skip(f"needs {needed / 2**30:.1f} GiB of GPU {kind}; found {found / 2**30:.1f} GiB")
        time.sleep(0.5)


def far_entries_are_found(rig: Rig, case: Case, name: str, stride: int) -> None:
    """The call with one tensor far apart is judged as ever, and nothing is written where wrapping leads."""
    work = rig.placed(case)  # which opens the device, and that limits its memory to a worker's share
    # More than the share; other tests of the run wait for what this one holds.
    with whole_memory() if rig.device == "cuda" else nullcontext():
        _far_entries_are_found(rig, work, name, stride)


def _far_entries_are_found(rig: Rig, work: Placed, name: str, stride: int) -> None:
    case = work.case
    near = work.views[name]
    itemsize, entries = near.element_size(), near.shape[0]
    size = near[0].numel() * itemsize
    assert entries >= 3, f"{name} has {entries} entries; needs 3, so that one lies past 2**31"
    assert size + 2 * RED_ZONE < (1 << 20), "entries reach into each other's places"
    places = zones(entries, size, itemsize, stride)
    lowest = -min(zone.start for zone in places)
    below = -(-lowest // 4096) * 4096
    buffer = reserve(rig, below + max(zone.end for zone in places))
    strides = (stride, *torch.empty(near.shape[1:]).stride())
    far = buffer.view(near.dtype) if not buffer.numel() % itemsize else buffer[: -(buffer.numel() % itemsize)]
    far = far.view(near.dtype).as_strided(near.shape, strides, below // itemsize)
    watched = [buffer[below + zone.start : below + zone.end] for zone in places]
    for part in watched:
        part.copy_(torch.from_numpy(poison(case.poison, part.numel())))
    before = work.arena.dense(work.arena.before)
    far.copy_(before[name])
    kept = [part.clone() for part in watched]

    returned = rig.bound(case, work.views | {name: far})()
    work.arena.finish()
    if isinstance(returned, Launched):
        assert not returned.declined, "the call was declined"
        returned.check()
    after = work.arena.dense(work.arena.after) | {x: y.cpu() for x, y in returned.items()}
    after[name] = far.cpu().contiguous()
    far.copy_(before[name])  # what is left in the zones is what nobody may write
    for zone, part, first in zip(places, watched, kept, strict=True):
        changed = part != first
        if bool(changed.any()):
            at = zone.start + int(changed.nonzero()[0])
            count = int(changed.sum())
            raise AssertionError(
                f"{name}: {count} bytes written {zone.what}, first at byte {at} of the tensor"
            )
    seen = Observation(before=before, after=after, strays=work.arena.strays())
    declared = arithmetic(rig.implementation.arithmetic, rig.device)
    verdict = judge(expect(case, work.values, declared), seen)
    assert verdict.ok, f"{name} far apart: {verdict.problems[0].describe()}"
