"""Times on a GPU, in microseconds a call. The L2 cache is overwritten before what is timed starts."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ci.bench.inputs import LAUNCHES

Calls = Sequence[Callable[[], object]]
"""The same call on every set of inputs, in turn."""
_REPLAYS, _WARM = 15, 3
_FLUSH_BYTES = 256 << 20
_COPIED_BYTES = 1 << 30
_BATCH, _BATCHES = 60, 9
"""60 calls of a few launches fit in a GPU's queue: a loop over them never waits for the GPU."""


class Clock:
    """Measures on the current CUDA device."""

    def __init__(self) -> None:
        self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def copy_rate(self) -> float:
        """Bytes a second of a device-to-device copy of 1 GiB, read and written bytes both counted."""
        source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        took = self._median(lambda: target.copy_(source))
        return 2 * _COPIED_BYTES / (took * 1e-6)

    def graph(self, calls: Calls) -> float:
        """GPU time of a call: a CUDA graph of ``LAUNCHES`` of them, replayed; the median.

        Every call must have run before: what is launched first may compile.
        """
        count = max(LAUNCHES, len(calls))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Kept, so that every call's allocations are its own: none writes over a warm one.
            kept = [calls[i % len(calls)]() for i in range(count)]
        took = self._median(graph.replay) / count
        del kept
        return took

    def single(self, calls: Calls) -> float:
        """Time of single calls on an idle GPU, launch gaps included: for those that wait for the host."""
        times = []
        for i in range(_WARM + _REPLAYS):
            self._flushed.zero_()
            torch.cuda.synchronize()
            times.append(_between(calls[i % len(calls)]))
        return statistics.median(times[_WARM:])

    def _median(self, run: Callable[[], object]) -> float:
        times = []
        for _ in range(_WARM + _REPLAYS):
            self._flushed.zero_()
            times.append(_between(run))
        return statistics.median(times[_WARM:])


def _between(run: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e3


def walls(contenders: Sequence[Calls]) -> list[tuple[float, float]]:
    """Per contender (host, wall): a loop of calls without and with one wait at its end; the least of 9.

    They take turns, so that a noisy neighbour meets all of them.
    """
    found: list[list[tuple[float, float]]] = [[] for _ in contenders]
    for _ in range(_BATCHES):
        for times, calls in zip(found, contenders, strict=True):
            times.append(_loop(calls))
    return [(min(host for host, _ in times), min(wall for _, wall in times)) for times in found]


def _loop(calls: Calls) -> tuple[float, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(_BATCH):
        calls[i % len(calls)]()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    return host / _BATCH * 1e6, wall / _BATCH * 1e6
