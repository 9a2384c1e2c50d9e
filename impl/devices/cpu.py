"""The cpu device: Triton's interpreter over memory fenced by inaccessible pages.

Every segment is a mapping of its own with ``PROT_NONE`` pages below and above, so an
access outside it stops the process at once: reads too, which no canary can show. The
harness runs cases in a child process and reports its death as the case's failure.
"""

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from impl.contract import UnavailableError
from impl.devices.base import Segment, T, Variant

_PROT_NONE, _PROT_RW = 0, 3
_PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
PAGE = mmap.PAGESIZE


GUARD = 1 << 24
"""Bytes of inaccessible address space at either end; an access further off may hit another mapping."""


class _Mapping:
    """Whole pages of readable and writable memory between two inaccessible stretches."""

    def __init__(self, size: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._munmap, self._whole = libc.munmap, size + 2 * GUARD
        self._base = libc.mmap(None, self._whole, _PROT_NONE, _PRIVATE_ANONYMOUS, -1, 0)
        if self._base in (None, ctypes.c_void_p(-1).value):
            self._base = None
            raise MemoryError(f"cannot map {self._whole} bytes: errno {ctypes.get_errno()}")
        if libc.mprotect(self._base + GUARD, size, _PROT_RW) != 0:
            raise MemoryError(f"cannot make {size} bytes accessible: errno {ctypes.get_errno()}")
        self.buffer = (ctypes.c_uint8 * size).from_address(self._base + GUARD)
        self.bytes = np.ctypeslib.as_array(self.buffer)

    def __del__(self) -> None:
        base = getattr(self, "_base", None)
        if base:
            self._munmap(base, self._whole)


class CpuMemory:
    """Segments as fenced mappings; a segment ends exactly at its upper fence."""

    def __init__(self, segments: Sequence[Segment], mappings: Sequence[_Mapping]) -> None:
        self._segments, self._mappings = segments, mappings

    def upload(self, image: np.ndarray) -> None:
        """Copy the image into the mappings."""
        for segment, mapping in zip(self._segments, self._mappings, strict=True):
            mapping.bytes[-segment.size :] = image[segment.start : segment.start + segment.size]

    def download(self, image: np.ndarray) -> None:
        """Copy the mappings into the image."""
        for segment, mapping in zip(self._segments, self._mappings, strict=True):
            image[segment.start : segment.start + segment.size] = mapping.bytes[-segment.size :]

    def view(self, segment: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the mapping's own bytes; its storage is the whole mapping, as on a GPU."""
        mapping = self._mappings[segment]
        first = len(mapping.bytes) - self._segments[segment].size + offset
        whole = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
        return whole[first : first + count * dtype.itemsize].view(dtype)


class CpuDevice:
    """Runs Triton kernels through the interpreter; keeps its mappings for the next case."""

    name = "cpu"

    def __init__(self) -> None:
        from impl.devices.interpreter import activate

        broken = [repair.name for repair in activate() if repair.needed and not repair.applied]
        if broken:
            raise UnavailableError(
                f"device cpu: this Triton's interpreter has faults we cannot repair: {', '.join(broken)}"
            )
        self._spare: dict[int, list[_Mapping]] = defaultdict(list)

    def memory(self, segments: Sequence[Segment]) -> CpuMemory:
        """Fenced memory; a size's mappings are used again, in turn, by later cases."""
        used: dict[int, int] = defaultdict(int)
        mappings = []
        for segment in segments:
            size = -(-segment.size // PAGE) * PAGE
            pool, index = self._spare[size], used[size]
            if index == len(pool):
                pool.append(_Mapping(size))
            mappings.append(pool[index])
            used[size] += 1
        return CpuMemory(segments, mappings)

    def share(self, views: Mapping[str, torch.Tensor], written: frozenset[str]) -> None:
        """Nothing is checked against it."""

    def variants(self, seed: int) -> Sequence[Variant]:
        """There is one way."""
        return (Variant(),)

    def replay(self, run: Callable[[], T], restore: Callable[[], None]) -> T:
        """There are no graphs: runs it."""
        return run()

    def synchronize(self) -> None:
        """The interpreter is done when it returns."""
