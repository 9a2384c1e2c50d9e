"""What an execution device is: memory made of fenced segments, filled from a host image."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """``size`` bytes of one allocation, at ``start`` in the host image."""

    start: int
    size: int


class Memory(Protocol):
    """Device memory for the segments of one case."""

    def upload(self, image: np.ndarray) -> None:
        """Set every segment's bytes from the host image (uint8)."""

    def download(self, image: np.ndarray) -> None:
        """Wait for the device, then copy every segment's bytes into the host image."""

    def view(self, segment: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor of ``count`` elements that starts ``offset`` bytes into a segment."""


@runtime_checkable
class Reserved(Protocol):
    """Memory that can leave bytes as it was given them."""

    def leave(self, undefined: np.ndarray) -> None:
        """Leave these bytes of the image (bool) out of the first upload, which sets them in the image."""


@dataclass(frozen=True)
class Variant:
    """One of the ways in which a device runs a case; all must leave the same bytes."""

    name: str = ""
    context: Callable[[], AbstractContextManager[object]] = nullcontext


class Host(Protocol):
    """A place for memory."""

    def memory(self, segments: Sequence[Segment]) -> Memory:
        """Memory for these segments, valid until the next call."""

    def synchronize(self) -> None:
        """Wait until the device is idle; raises what a kernel left behind."""


class Device(Host, Protocol):
    """A place to run implementations."""

    name: str

    def share(self, views: Mapping[str, torch.Tensor], written: frozenset[str]) -> None:
        """Learn what the call's tensors are, and which of them it may write; most devices ignore it."""

    def variants(self, seed: int) -> Sequence[Variant]:
        """The ways to run a case of this seed, at least one."""

    def replay(self, run: Callable[[], T], restore: Callable[[], None]) -> T:
        """Capture ``run`` in a graph, ``restore`` memory, replay; without graphs it just runs."""
