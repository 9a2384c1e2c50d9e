"""Barriers of a CTA: the named ones (bar.sync) and the mbarriers in shared memory.

Both pass on what the arriving warps know (see ``clocks``) to the warps that wait.
"""

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import LANES, SHARED_BASE
from impl.cute.emulator.reference.clocks import Clocks

NAMED = 16
"""Named barriers of a CTA."""


MOST_MBARRIERS = 4096


class NamedBarrier:
    """One of the CTA's barriers: warps arrive, and those that wait go on when enough have."""

    def __init__(self, number: int, clocks: Clocks) -> None:
        self._number, self._clocks = number, clocks
        self._arrived, self._expected = 0, 0
        self._known = clocks.nothing()
        self._waiting: set[int] = set()

    def arrive(self, warp: int, expected: int, *, wait: bool) -> None:
        """A warp's threads arrive; ``expected`` threads complete the phase."""
        if self._arrived and expected != self._expected:
            text = f"barrier {self._number} for {expected} threads, in a phase for {self._expected}"
            raise EmulatorError("barrier", text)
        self._arrived, self._expected = self._arrived + LANES, expected
        if self._arrived > expected:
            text = f"{self._arrived} threads arrived at barrier {self._number} for {expected}"
            raise EmulatorError("barrier", text)
        np.maximum(self._known, self._clocks.snapshot(warp), out=self._known)
        if wait:
            self._waiting.add(warp)
        if self._arrived == expected:
            for other in self._waiting:
                self._clocks.acquire(other, self._known)
            self._arrived = 0
            self._known = self._clocks.nothing()
            self._waiting = set()

    def holds(self, warp: int) -> bool:
        """Whether the warp waits here."""
        return warp in self._waiting


class Mbarrier:
    """An mbarrier: ``count`` arrivals and all expected bytes complete a phase. ``maker`` initialised it."""

    def __init__(self, count: int, clocks: Clocks, maker: int) -> None:
        self.maker, self.made = maker, int(clocks.counter[maker])
        self.shown = False  # by fence.mbarrier_init
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.arriving = clocks.nothing()  # what arrivals and copies have passed on, ever
        self.completed = clocks.nothing()  # the same at the last completion of a phase

    def arrive(self, vector: np.ndarray, arrivals: int = 1, expect: int = 0) -> int:
        """Arrive, passing on a vector; returns the parity of the phase before."""
        parity = self.phase & 1
        self.bytes += expect
        self.pass_on(vector)
        self.pending -= arrivals
        if self.pending < 0:
            raise EmulatorError("barrier", f"more arrivals at an mbarrier than its count {self.count}")
        self._advance()
        return parity

    def pass_on(self, vector: np.ndarray) -> None:
        """Add to what a completion of this phase tells those who wait."""
        np.maximum(self.arriving, vector, out=self.arriving)

    def complete_bytes(self, size: int) -> None:
        """A copy's bytes have arrived."""
        self.bytes -= size
        self._advance()

    def expect(self, size: int) -> None:
        """More bytes belong to this phase."""
        self.bytes += size
        self._advance()

    def ready(self, parity: int) -> bool:
        """Whether the phase of that parity is complete."""
        if parity > 1:
            raise EmulatorError("barrier", f"a wait for a phase of parity {parity}; it must be 0 or 1")
        return self.phase & 1 != parity

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.completed = self.arriving.copy()


class Barriers:
    """All barriers of a CTA."""

    def __init__(self, threads: int, clocks: Clocks) -> None:
        self._clocks, self._threads = clocks, threads
        self._named: dict[int, NamedBarrier] = {}
        self._mbarriers: dict[int, Mbarrier] = {}

    def named(self, number: int) -> NamedBarrier:
        """The barrier of that number."""
        if not 0 <= number < NAMED:
            raise EmulatorError("barrier", f"barrier {number} of {NAMED}")
        return self._named.setdefault(number, NamedBarrier(number, self._clocks))

    def expected(self, count: int) -> int:
        """Threads of a barrier instruction's count; 0 means all of the CTA."""
        return count or self._threads

    def init(self, address: int, count: int, maker: int) -> None:
        """Make an mbarrier at a shared address, by that warp."""
        if count == 0:
            raise EmulatorError("barrier", f"an mbarrier at {address:#x} with count 0")
        if address not in self._mbarriers and len(self._mbarriers) >= MOST_MBARRIERS:
            raise EmulatorError("unsupported", f"more than {MOST_MBARRIERS} mbarriers")
        self._mbarriers[address] = Mbarrier(count, self._clocks, maker)

    def at(self, address: int) -> Mbarrier:
        """The mbarrier at a shared address."""
        if address not in self._mbarriers:
            raise EmulatorError("barrier", f"no initialised mbarrier at shared address {address:#x}")
        return self._mbarriers[address]

    def show(self, maker: int) -> None:
        """Show the mbarriers that a warp made to asynchronous copies."""
        for each in self._mbarriers.values():
            each.shown |= each.maker == maker

    def of_copy(self, address: int, warp: int) -> Mbarrier:
        """The mbarrier that a warp's copy completes on; a fence must have followed its initialisation."""
        found = self.at(address)
        visible = self._clocks.known[warp, self._clocks.proxy(found.maker)]
        if not found.shown and visible < found.made:
            text = f"a copy completes on the mbarrier at {address:#x}, with no fence.mbarrier_init"
            raise EmulatorError("proxy", f"{text} nor fence.proxy.async since it was initialised")
        return found

    def invalidate(self, address: int) -> None:
        """Forget the mbarrier at a shared address."""
        self.at(address)
        del self._mbarriers[address]

    def describe(self) -> str:
        """Every mbarrier's state, one a line."""
        return "\n".join(
            f"mbarrier at offset {address - SHARED_BASE:#x}: phase {b.phase}, "
            f"{b.pending} of {b.count} arrivals pending, {b.bytes} bytes outstanding"
            for address, b in sorted(self._mbarriers.items())
        )
