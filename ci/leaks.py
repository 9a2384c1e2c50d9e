"""Whether a call keeps GPU memory: given the same case again, it takes some more every time."""

import gc
from dataclasses import replace
from itertools import pairwise

import torch

from ci.check import check
from ci.runs import Watch, ignore
from impl.contract import Implementation
from impl.devices.base import Device
from oracle.case import Case
from oracle.judge import Problem, Verdict

TURNS = 4
"""What is made once, such as a table for a new variant, is there before the second turn."""


def check_memory_too(
    case: Case, implementation: Implementation, device: Device, watch: Watch = ignore
) -> Verdict:
    """``check``, and a problem of kind ``leak`` if torch's allocator holds more after every turn."""
    if device.name != "cuda":
        return check(case, implementation, device, watch)
    before = _held()
    verdict = check(case, implementation, device, watch)
    if not verdict.ok or _held() <= before:
        return verdict
    held = []
    for _ in range(TURNS):
        again = check(case, implementation, device)
        if not again.ok:
            return again
        gc.collect()  # what only a cycle holds is not kept
        held.append(_held())
    grown = [later - earlier for earlier, later in pairwise(held)]
    if min(grown) <= 0:
        return verdict
    text = f"every call of this case keeps GPU memory: {grown} bytes, one after the other"
    return replace(verdict, problems=(Problem("leak", text=text),))


def _held() -> int:
    """Bytes that the allocator has given out: ``torch.cuda.memory_allocated`` lists all else first."""
    held: int = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"]
    return held
