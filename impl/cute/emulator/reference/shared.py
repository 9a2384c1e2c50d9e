"""Shared memory of a CTA, and the shadow that finds accesses which nothing orders.

The shadow keeps, per unit of two bytes, who wrote it last and who has read it since: an entity of
``clocks`` with the number of the event. A *generic* access is one of a warp's own loads and stores,
an *async* one belongs to a copy or a tensor-core operation and carries the vector of its issue.
"""

from dataclasses import dataclass

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import SHARED_BASE
from impl.cute.emulator.reference.clocks import Clocks

POISON = 0xFF
_NOBODY = -1
_ASYNC, _SEVERAL = 255, 254
"""Lanes of a writer or reader that are no lane."""


@dataclass(frozen=True)
class Origin:
    """Who makes an async access: its entity, the event's number, the vector of its issue, its line."""

    entity: int
    clock: int
    vector: np.ndarray
    line: int


class _Readers:
    """One entity's reads: per unit the number of the last since the last write (0: none) and its lane."""

    def __init__(self, units: int) -> None:
        self.clock = np.zeros(units, np.uint32)
        self.lane = np.zeros(units, np.uint8)


class SharedMemory:
    """``size`` bytes from ``SHARED_BASE`` on, poisoned, with their shadow."""

    def __init__(self, size: int, clocks: Clocks) -> None:
        self.size = size
        self.bytes = np.full(size, POISON, np.uint8)
        self._clocks = clocks
        units = -(-size // 2)
        self._writer = np.full(units, _NOBODY, np.int32)
        self._writer_clock = np.zeros(units, np.uint32)
        self._writer_lane = np.zeros(units, np.uint8)
        self._writer_line = np.zeros(units, np.int32)
        self._readers: dict[int, _Readers] = {}

    # data

    def check_range(self, addresses: np.ndarray, size: int, align: int, what: str) -> None:
        """Every ``size`` bytes from an address are shared memory, and ``align`` divides the address."""
        start = addresses.astype(np.int64)
        misaligned = start % align != 0
        wrong = misaligned | (start < SHARED_BASE) | (start + size > SHARED_BASE + self.size)
        if wrong.any():
            at = int(np.argmax(wrong))
            kind = "misaligned" if misaligned[at] else "bounds"
            raise EmulatorError(
                kind, f"{what} of {size} bytes at shared address {self.place(int(start[at]))}"
            )

    def gather(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The ``size`` bytes from each address on, u1 [addresses, size]."""
        found: np.ndarray = self.bytes[_spread(addresses, size)]
        return found

    def scatter(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store rows of bytes at the addresses; of two at one place the later row stays."""
        self.bytes[_spread(addresses, values.shape[1])] = values

    def place(self, address: int) -> str:
        """An address and its offset in dynamic shared memory, for error texts."""
        return f"{address:#x} (offset {address - SHARED_BASE:#x} of {self.size:#x})"

    # generic accesses

    def generic_read(self, warp: int, lanes: np.ndarray, addresses: np.ndarray, size: int) -> None:
        """Lanes of a warp read: what they read must be ordered before, and is now known to be read.

        * a write of another warp or an async one: the warp's vector must cover it
        * a write of another lane of the warp: something must have synchronised the warp since
        """
        units, lane = _units(addresses, size, lanes)
        now = self._clocks.counter[warp]
        writer, clock = self._writer[units], self._writer_clock[units]
        covered = self._clocks.known[warp][writer] >= clock
        own_conflict = (self._writer_lane[units] != lane) & (clock == now)
        bad = (writer != _NOBODY) & np.where(writer == warp, own_conflict, ~covered)
        if bad.any():
            at = int(np.argmax(bad))
            raise self._race(units[at], f"read by warp {warp} lane {lane[at]}", "of what {} wrote")
        readers = self._reads_of(warp)
        old_clock, old_lane = readers.clock[units], readers.lane[units]
        readers.lane[units] = lane
        several = (readers.lane[units] != lane) | ((old_clock == now) & (old_lane != lane))
        readers.lane[units[several]] = _SEVERAL
        readers.clock[units] = now

    def generic_write(
        self, warp: int, lanes: np.ndarray, addresses: np.ndarray, size: int, line: int
    ) -> None:
        """Lanes of a warp write: the last writer and all readers since must be ordered before.

        Writes of the warp's own lanes need no order among themselves; a read by another lane of
        the warp needs a synchronisation of the warp in between.
        """
        units, lane = _units(addresses, size, lanes)
        now, known = self._clocks.counter[warp], self._clocks.known[warp]
        writer = self._writer[units]
        bad = (writer != _NOBODY) & (writer != warp) & (known[writer] < self._writer_clock[units])
        if bad.any():
            at = int(np.argmax(bad))
            raise self._race(units[at], f"written by warp {warp} lane {lane[at]}", "over what {} wrote")
        for entity, readers in self._readers.items():
            clock = readers.clock[units]
            own_conflict = (clock == now) & (readers.lane[units] != lane)
            bad = own_conflict if entity == warp else clock > known[entity]
            if bad.any():
                at = int(np.argmax(bad))
                raise self._race_with_reader(units[at], f"written by warp {warp} lane {lane[at]}", entity)
        self._record_write(units, warp, lane, now, line)

    # async accesses

    def async_read(self, origin: Origin, addresses: np.ndarray, size: int, what: str) -> None:
        """An async operation reads: writes must come before its issue, generic ones and a proxy fence too."""
        units, _ = _units(addresses, size, None)
        self._check_writer(origin, units, what, "of what {} wrote")
        writer, clock = self._writer[units], self._writer_clock[units]
        generic = (writer != _NOBODY) & (writer < self._clocks.warps)
        visible = origin.vector[np.where(generic, self._clocks.warps + writer, 0)]  # see Clocks.proxy
        bad = generic & (visible < clock)
        if bad.any():
            at = int(np.argmax(bad))
            place = self.place(SHARED_BASE + 2 * int(units[at]))
            text = f"{what} reads shared address {place}, {self._writer_text(units[at])} wrote it,"
            raise EmulatorError("proxy", f"{text} with no fence.proxy.async in between")
        readers = self._reads_of(origin.entity)
        readers.clock[units] = np.maximum(readers.clock[units], np.uint32(origin.clock))

    def async_write(self, origin: Origin, addresses: np.ndarray, size: int, what: str) -> None:
        """An async operation writes: the last writer and all readers since must come before its issue."""
        units, _ = _units(addresses, size, None)
        self._check_writer(origin, units, what, "over what {} wrote")
        for entity, readers in self._readers.items():
            bad = readers.clock[units] > origin.vector[entity]
            if bad.any():
                raise self._race_with_reader(units[int(np.argmax(bad))], f"written by {what}", entity)
        self._record_write(units, origin.entity, np.uint8(_ASYNC), origin.clock, origin.line)

    # the shadow

    def _check_writer(self, origin: Origin, units: np.ndarray, what: str, relation: str) -> None:
        writer = self._writer[units]
        bad = (writer != _NOBODY) & (origin.vector[writer] < self._writer_clock[units])
        if bad.any():
            raise self._race(units[int(np.argmax(bad))], f"accessed by {what}", relation)

    def _record_write(
        self, units: np.ndarray, entity: int, lane: np.ndarray | np.uint8, clock: int, line: int
    ) -> None:
        self._writer[units], self._writer_clock[units] = entity, clock
        self._writer_lane[units], self._writer_line[units] = lane, line
        for readers in self._readers.values():
            readers.clock[units] = 0

    def _reads_of(self, entity: int) -> _Readers:
        if entity not in self._readers:
            self._readers[entity] = _Readers(len(self._writer))
        return self._readers[entity]

    def _writer_text(self, unit: int) -> str:
        lane, line = self._writer_lane[unit], self._writer_line[unit]
        who = self._clocks.name(int(self._writer[unit]))
        return f"{who}{'' if lane == _ASYNC else f' lane {lane}'} at PTX line {line}"

    def _race(self, unit: int, access: str, relation: str) -> EmulatorError:
        place = self.place(SHARED_BASE + 2 * int(unit))
        other = relation.format(self._writer_text(unit))
        text = f"shared address {place}: {access} {other}, with nothing in between that orders them"
        return EmulatorError("race", text)

    def _race_with_reader(self, unit: int, access: str, entity: int) -> EmulatorError:
        place, lane = self.place(SHARED_BASE + 2 * int(unit)), self._readers[entity].lane[unit]
        who = self._clocks.name(entity)
        if entity < self._clocks.warps:
            who += " lanes" if lane == _SEVERAL else f" lane {lane}"
        text = (
            f"shared address {place}: {access} after {who} read it, with nothing in between that orders them"
        )
        return EmulatorError("race", text)


def _spread(addresses: np.ndarray, size: int) -> np.ndarray:
    """Offsets of the ``size`` bytes from each address on, [addresses, size]."""
    return (addresses.astype(np.int64) - SHARED_BASE)[:, None] + np.arange(size)


def _units(addresses: np.ndarray, size: int, lanes: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The units that accesses touch, and the lane of each, address by address."""
    first = (addresses.astype(np.int64) - SHARED_BASE) // 2
    each = max(size // 2, 1)
    units = (first[:, None] + np.arange(each)).ravel()
    return units, np.repeat(lanes.astype(np.uint8), each) if lanes is not None else np.zeros(0, np.uint8)
