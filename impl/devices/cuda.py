"""The cuda device: compiled kernels on a GPU, all segments in one buffer that is used again."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from impl.contract import UnavailableError
from impl.devices.base import Segment, T, Variant

_SLACK = 512
"""Bytes kept free round the segments, so that a near miss stays inside the buffer and is seen."""


class CudaMemory:
    """The segments as parts of one device buffer, in the host image's order."""

    def __init__(self, buffer: torch.Tensor, staging: torch.Tensor, segments: Sequence[Segment]) -> None:
        self._buffer, self._staging, self._segments = buffer, staging, segments

    def upload(self, image: np.ndarray) -> None:
        """One copy to the device."""
        self._staging[: len(image)] = torch.from_numpy(image)
        self._buffer[_SLACK : _SLACK + len(image)].copy_(self._staging[: len(image)], non_blocking=True)

    def download(self, image: np.ndarray) -> None:
        """One copy from the device; waits for it."""
        self._staging[: len(image)].copy_(self._buffer[_SLACK : _SLACK + len(image)])
        image[:] = self._staging[: len(image)].numpy()

    def view(self, segment: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the buffer's bytes."""
        first = _SLACK + self._segments[segment].start + offset
        return self._buffer[first : first + count * dtype.itemsize].view(dtype)


class CudaDevice:
    """The current CUDA device of this process."""

    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnavailableError(
                "device cuda needs a CUDA GPU; found none (torch.cuda.is_available() is false)"
            )
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cuda")
        self._staging = torch.empty(0, dtype=torch.uint8)

    def memory(self, segments: Sequence[Segment]) -> CudaMemory:
        """One buffer for all segments, grown when a case needs more."""
        size = max((s.start + s.size for s in segments), default=0)
        if len(self._staging) < size:
            self._buffer = torch.empty(2 * size + 2 * _SLACK, dtype=torch.uint8, device="cuda")
            self._staging = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return CudaMemory(self._buffer, self._staging, segments)

    def share(self, views: Mapping[str, torch.Tensor], written: frozenset[str]) -> None:
        """Nothing is checked against it."""

    def variants(self, seed: int) -> Sequence[Variant]:
        """There is one way."""
        return (Variant(),)

    def replay(self, run: Callable[[], T], restore: Callable[[], None]) -> T:
        """Run once to compile, capture, and replay from the starting bytes."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph: it collects garbage first, which costs more than all the rest.
            graph.capture_begin()
            try:
                result = run()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        restore()
        graph.replay()
        torch.cuda.synchronize()
        return result

    def synchronize(self) -> None:
        """Wait for the device; a sticky error surfaces here."""
        torch.cuda.synchronize()
