"""The cuda device: compiled kernels on a GPU, all segments in one buffer that is used again.

Behind compute-sanitizer (``SANITIZE_VARIABLE`` names its tool) every segment is an allocation of its
own, made anew for every case, so that the tool knows where segments end.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from impl.contract import UnavailableError
from impl.devices.base import Memory, Segment, T, Variant
from impl.devices.share import limit_memory, share_compiled_kernels

SANITIZE_VARIABLE = "KDAFUZZ_SANITIZE"
"""Environment variable: the tool that watches this process."""
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


class ExactMemory:
    """Every segment an allocation of exactly its size, if PyTorch's caching is off.

    With ``leave`` undefined bytes, those of outputs, stay as the allocation had them: a tool that looks
    for reads of memory that nothing wrote sees theirs. What lies there is then what the call starts from.
    """

    def __init__(self, segments: Sequence[Segment], device: str = "cuda") -> None:
        self._segments = segments
        self._parts = [torch.empty(s.size, dtype=torch.uint8, device=device) for s in segments]
        self._undefined: np.ndarray | None = None

    def leave(self, undefined: np.ndarray) -> None:
        """Leave these bytes of the image (bool) out of the first upload."""
        self._undefined = undefined

    def upload(self, image: np.ndarray) -> None:
        """One copy a segment; bytes left out are set in the image to what they hold."""
        undefined, self._undefined = self._undefined, None
        for segment, part in zip(self._segments, self._parts, strict=True):
            here = slice(segment.start, segment.start + segment.size)
            if undefined is None or not undefined[here].any():
                part.copy_(torch.from_numpy(image[here]))
                continue
            # By index, for that writes the chosen bytes and touches no others.
            chosen = torch.from_numpy(np.flatnonzero(~undefined[here]))
            part[chosen.to(part.device)] = torch.from_numpy(image[here])[chosen].to(part.device)
            held = part.cpu().numpy()
            image[here] = np.where(undefined[here], held, image[here])

    def download(self, image: np.ndarray) -> None:
        """One copy a segment; waits for each."""
        for segment, part in zip(self._segments, self._parts, strict=True):
            image[segment.start : segment.start + segment.size] = part.cpu().numpy()

    def view(self, segment: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the segment's bytes."""
        return self._parts[segment][offset : offset + count * dtype.itemsize].view(dtype)


class CudaDevice:
    """The current CUDA device of this process."""

    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnavailableError(
                "device cuda needs a CUDA GPU; found none (torch.cuda.is_available() is false)"
            )
        limit_memory()
        share_compiled_kernels()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cuda")
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._watched = bool(os.environ.get(SANITIZE_VARIABLE))

    def memory(self, segments: Sequence[Segment]) -> Memory:
        """One buffer for all segments, grown when a case needs more; behind a tool one for each."""
        if self._watched:
            return ExactMemory(segments)
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
        """Run once to compile, capture, and replay from the starting bytes.

        Behind a tool it just runs: without PyTorch's caching nothing can be allocated in a capture.
        """
        if self._watched:
            return run()
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
