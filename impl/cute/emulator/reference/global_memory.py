"""Global memory: the allocations of a launch, read and written where they lie, and the parameters."""

import ctypes
from collections import Counter

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import PARAM_BASE
from impl.cute.emulator.launch import Allocation


class GlobalMemory:
    """Bounds-checked memory; ``early`` counts accesses made before the dependency wait.

    ``reads`` and ``writes`` count per allocation name.
    """

    def __init__(self, allocations: tuple[Allocation, ...], params: bytes) -> None:
        self._names = [a.name for a in allocations] + ["parameters"]
        self._start = np.array([a.start for a in allocations] + [PARAM_BASE], np.int64)
        self._end = self._start + np.array([a.size for a in allocations] + [len(params)], np.int64)
        self._writable = np.array([a.writable for a in allocations] + [False])
        self._bytes = [_host_bytes(a.start, a.size) for a in allocations]
        self._bytes.append(np.frombuffer(params, np.uint8) if params else np.zeros(0, np.uint8))
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()

    def find(
        self, addresses: np.ndarray, size: int, align: int, what: str, *, write: bool = False
    ) -> np.ndarray:
        """Per address the allocation that holds its ``size`` bytes, the first one if several do.

        Of a write the first writable one. Errors: misaligned, bounds, read-only.
        """
        start = addresses.astype(np.int64)
        holds = (start[:, None] >= self._start) & (start[:, None] + size <= self._end)
        inside = np.any(holds, axis=1)
        usable = holds & self._writable if write else holds
        misaligned = start % align != 0
        wrong = misaligned | ~usable.any(1)
        if wrong.any():
            at = int(np.argmax(wrong))
            address = int(start[at])
            if misaligned[at]:
                raise EmulatorError("misaligned", f"{what} of {size} bytes at {address:#x}")
            if not inside[at]:
                raise EmulatorError(
                    "bounds", f"{what} of {size} bytes at {address:#x}: {self._near(address, size)}"
                )
            name = self._names[int(np.argmax(holds[at]))]
            raise EmulatorError("read-only", f"{what} of {size} bytes to {name} at {address:#x}")
        return np.asarray(np.argmax(usable, 1))

    def count(self, found: np.ndarray, *, write: bool = False) -> None:
        """Note early accesses, one for each allocation in ``found``."""
        counts = self.writes if write else self.reads
        counts.update(self._names[i] for i in found if i < len(self._names) - 1)

    def holder(self, address: int) -> np.ndarray:
        """The allocation that holds an address, as an array of one or none."""
        holds = (address >= self._start) & (address < self._end)
        return np.nonzero(holds)[0][:1]

    def gather(self, found: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """The ``size`` bytes from each address on, u1 [addresses, size]."""
        result = np.empty((len(addresses), size), np.uint8)
        for index in np.unique(found):
            chosen = found == index
            result[chosen] = self._bytes[index][self._spread(index, addresses[chosen], size)]
        return result

    def scatter(self, found: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store rows of bytes at the addresses; of two at one place the later row stays."""
        if len(found) and (found == found[0]).all():
            self._bytes[found[0]][self._spread(found[0], addresses, values.shape[1])] = values
            return
        for i, index in enumerate(found):  # allocations may overlap: keep the order of the rows
            at = int(addresses[i]) - int(self._start[index])
            self._bytes[index][at : at + values.shape[1]] = values[i]

    def _spread(self, index: int, addresses: np.ndarray, size: int) -> np.ndarray:
        offsets: np.ndarray = addresses.astype(np.int64) - self._start[index]
        result: np.ndarray = np.add.outer(offsets, np.arange(size))
        return result

    def _near(self, address: int, size: int) -> str:
        """Where an access lies relative to the nearest allocation."""
        past, below = address + size - self._end, self._start - address
        distance = np.maximum(past, below)
        index = int(np.argmin(distance))
        side = "past" if past[index] >= below[index] else "below"
        return f"{distance[index]} bytes {side} {self._names[index]}"


def _host_bytes(start: int, size: int) -> np.ndarray:
    """``size`` bytes of this process's memory."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(start))
