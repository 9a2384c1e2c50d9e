"""What the oracle expects of memory after a call, and what a run left there."""

from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor
DECLINED = "declined"
"""The path of a call that did nothing and said so."""


@dataclass(frozen=True)
class Cells:
    """What one tensor must hold after the call.

    ``written`` (bool, the tensor's shape) marks the defined cells; all others keep their
    bytes, or are free where ``fresh`` says that the callee allocated the tensor. ``value``
    is float64 and ``bound`` the absolute error before the store to the tensor's dtype. With
    ``bound=None`` the cells are copies: ``value`` has the tensor's own dtype and every bit
    counts, except that a NaN may change its payload. ``stage`` names the step of the
    algorithm that makes the tensor. ``via`` is a dtype that bounded cells round to before
    they round to the tensor's own. ``copied`` marks cells of a bounded tensor that are copies
    all the same.
    """

    written: Tensor
    value: Tensor
    bound: Tensor | None
    stage: str
    fresh: bool = False
    via: torch.dtype | None = None
    copied: Tensor | None = None


@dataclass(frozen=True)
class Expected:
    """Expected cells of every output; tensors not named must not change at all.

    ``path`` is the code path that must be taken; empty: no claim.
    """

    cells: dict[str, Cells]
    path: str = ""


@dataclass(frozen=True)
class Stray:
    """Bytes changed outside every tensor: ``count`` of them, the first near tensor ``near``.

    ``offset`` counts bytes from the first element of ``near``; it may be negative.
    """

    near: str
    offset: int
    count: int


@dataclass(frozen=True)
class Observation:
    """What one run did: every tensor before and after, dense on the CPU, and what else moved.

    ``raised`` is the one-line description of an exception; then the tensors are whatever the
    call left. ``path`` names the code path taken where the implementation tells. ``differs`` says
    where memory depends on the schedule, on a device that runs several; ``returned`` is what the
    callee allocated in others than the one of ``after``, by the names of both.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    strays: tuple[Stray, ...] = ()
    raised: str = ""
    path: str = ""
    device: str = "cpu"
    arithmetic: str = "sequential-fp32"
    differs: str = ""
    returned: dict[str, dict[str, Tensor]] = field(default_factory=dict)
