"""What a launch is: its grid, its memory, the order in which things may happen, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["eager", "lazy", "priority"]
Functions = Literal["exact-sm90", "rounded", "perturbed"]


@dataclass(frozen=True)
class Allocation:
    """``size`` bytes of global memory at the host address ``start`` that the kernel may access.

    Allocations may overlap, as tensors interleaved in one page do. A store needs one that is writable.
    """

    name: str
    start: int
    size: int
    writable: bool = True


@dataclass(frozen=True)
class Schedule:
    """The order of events in a launch.

    ``eager`` does asynchronous work when it is issued, ``lazy`` only when nothing else can
    move. ``priority`` gives warps and asynchronous queues random priorities, drawn anew at
    random moments, all from ``seed``.
    """

    mode: Mode = "eager"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.mode}:{self.seed}" if self.mode == "priority" else self.mode


@dataclass(frozen=True)
class Launch:
    """One kernel launch: ``params`` are the raw parameter bytes in the layout of the kernel's signature.

    ``functions`` chooses the arithmetic of approximate instructions: Hopper's own tables, correct
    rounding, or correct rounding disturbed within the measured error by a hash of the operands
    and ``seed``.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: bytes
    allocations: tuple[Allocation, ...]
    schedule: Schedule = Schedule()
    functions: Functions = "rounded"
    seed: int = 0
    resident: int = 2
    max_instructions: int = 50_000_000


@dataclass(frozen=True)
class Report:
    """What a launch did.

    ``instructions`` counts those of warps. ``early`` holds, per allocation, reads and writes made
    before the accessing warp knew that the kernels it depends on were done.
    """

    instructions: int
    early: Mapping[str, tuple[int, int]] = field(default_factory=dict)
