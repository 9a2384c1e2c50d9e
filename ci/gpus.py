"""Worker processes and the GPUs of this host: how many, and which of them each one may see.

A worker gets its GPU by UUID before CUDA starts in it. The UUID, unlike an index, means the same
GPU whatever ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` say, and works for a part of one (MIG) too.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ci.processes import ending
from impl.contract import UnavailableError, one_line
from impl.devices.share import VARIABLE

VISIBLE = "CUDA_VISIBLE_DEVICES"
WORKER_BYTES = 3 << 30
"""GPU memory of one worker: two GiB of tensors, and a CUDA context with its kernels."""
CONTEXT_BYTES = 1 << 30
_QUERY = Path(__file__).with_name("gpu_query.py")
"""Run as a file: the package would load torch."""
_SECONDS = 60.0


@dataclass(frozen=True)
class Gpu:
    """A device as CUDA shows it; memory in bytes."""

    uuid: str
    name: str
    total: int
    free: int

    @property
    def room(self) -> int:
        """How many workers its free memory holds."""
        return self.free // WORKER_BYTES


@dataclass(frozen=True)
class Seat:
    """The place of a worker: a GPU, and the bytes of it that its tensors may take."""

    gpu: Gpu
    share: int

    def environment(self) -> dict[str, str]:
        """What a process must have in its environment before CUDA starts in it."""
        return {VISIBLE: self.gpu.uuid, VARIABLE: str(self.share)}


def visible() -> tuple[Gpu, ...]:
    """The GPUs that CUDA would use here, in its order. ``UnavailableError`` if the driver is broken."""
    try:
        asked = subprocess.run(
            [sys.executable, "-P", str(_QUERY)],
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"cannot ask CUDA for its GPUs: no answer within {_SECONDS:g} s") from None
    if asked.returncode:
        said = asked.stderr.decode(errors="replace").strip().splitlines()
        why = one_line(said[-1]) if said else ending(asked.returncode, b"")
        raise UnavailableError(f"cannot ask CUDA for its GPUs: {why}")
    return msgspec.json.decode(asked.stdout, type=tuple[Gpu, ...])


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def worker_count(gpus: Sequence[Gpu], processors: int) -> int:
    """As many as fit the GPUs' free memory and the processors, but one for each GPU with room, and one."""
    rooms = [gpu.room for gpu in gpus if gpu.room]
    return max(1, len(rooms), min(sum(rooms), processors))


def seats(gpus: Sequence[Gpu], count: int) -> list[Seat]:
    """A place for each of ``count`` workers: the next one goes where most memory is left for it.

    Each GPU with room gets its first before any gets its second; those with equal free memory get
    equally many. No place at all where there are no GPUs.
    """
    if not gpus:
        return []
    held = [0] * len(gpus)
    order = []
    for _ in range(count):
        best = max(
            range(len(gpus)),
            key=lambda i: (gpus[i].room > 0 and not held[i], gpus[i].free / (held[i] + 1), -i),
        )
        held[best] += 1
        order.append(best)
    return [Seat(gpus[i], max(gpus[i].free // held[i] - CONTEXT_BYTES, CONTEXT_BYTES)) for i in order]


def described(gpus: Sequence[Gpu], places: Sequence[Seat]) -> list[str]:
    """A line for each GPU: who it is, and how many workers it has."""
    lines = []
    for gpu in gpus:
        mine = [seat for seat in places if seat.gpu.uuid == gpu.uuid]
        share = f", {mine[0].share / 2**30:.1f} GiB each" if mine else ""
        lines.append(
            f"{gpu.name} ({gpu.uuid}), {gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free: "
            f"{len(mine)} workers{share}"
        )
    return lines
