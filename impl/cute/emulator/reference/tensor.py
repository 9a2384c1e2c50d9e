"""Tensor memory, and the tcgen05 instructions that use it.

Order in tensor memory is kept apart from that of everything else (``Clocks.tensor_known``): only the
tcgen05 fences and the wait for loads carry it over.
"""

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import Op
from impl.cute.emulator.reference import matrices
from impl.cute.emulator.reference.arithmetic import F4, F8, canonical
from impl.cute.emulator.reference.clocks import Clocks
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.shared import Origin
from impl.cute.emulator.reference.warp import Warp

U4, U8 = np.uint32, np.uint64
LANES, COLUMNS = 128, 512
POISON, IN_FLIGHT = 0x7FC00000, 0xFFFFFFFF
_SMALLEST = 32
"""Fewest columns of an allocation."""
M = 128


class TensorMemory:
    """The CTA's tensor memory, u4 [128, 512], its allocations, and per column who wrote and read it."""

    def __init__(self, clocks: Clocks) -> None:
        self.data = np.full((LANES, COLUMNS), POISON, U4)
        self.allocated: dict[int, int] = {}
        self._clocks = clocks
        self._written = np.zeros(COLUMNS, U4)
        self._read = np.zeros((clocks.warps, COLUMNS), U4)

    def allocate(self, columns: int) -> int:
        """The first column of a new allocation, the lowest that fits."""
        if columns < _SMALLEST or columns & (columns - 1) or columns > COLUMNS:
            raise EmulatorError(
                "tensor-memory", f"allocation of {columns} columns, not a power of two from 32 on"
            )
        for base in sorted({0, *(start + size for start, size in self.allocated.items())}):
            free = all(
                base >= start + size or base + columns <= start for start, size in self.allocated.items()
            )
            if free and base + columns <= COLUMNS:
                self.allocated[base] = columns
                return base
        raise EmulatorError("tensor-memory", f"no {columns} columns are free, allocated: {self.allocated}")

    def free(self, warp: int, address: int, columns: int) -> None:
        """Give an allocation back; what touched it must be known to be done."""
        if self.allocated.get(address) != columns:
            text = f"deallocation of {columns} columns at {address:#x}, allocated: {self.allocated}"
            raise EmulatorError("tensor-memory", text)
        known, clocks = self._clocks.tensor_known[warp], self._clocks
        loads = known[clocks.loads(0) : clocks.loads(0) + clocks.warps]
        mine = slice(address, address + columns)
        if (self._read[:, mine] > loads[:, None]).any() or (self._written[mine] > known[clocks.tensor]).any():
            text = (
                f"tcgen05.dealloc of columns {address} to {address + columns - 1} that a product or a "
                "tcgen05.ld may still be using: fence::before_thread_sync, a barrier and "
                "fence::after_thread_sync come first"
            )
            raise EmulatorError("tensor-memory", text)
        del self.allocated[address]

    def columns(self, first: int, count: int, what: str) -> slice:
        """Columns of one allocation."""
        for base, size in self.allocated.items():
            if base <= first and first + count <= base + size:
                return slice(first, first + count)
        text = f"{what} of columns {first} to {first + count - 1}, allocated: {self.allocated}"
        raise EmulatorError("tensor-memory", text)

    def load(self, warp: int, lane: int, columns: slice) -> np.ndarray:
        """A warp reads 32 lanes, [columns, 32]; the products that wrote them must be known to be done."""
        known = self._clocks.tensor_known[warp, self._clocks.tensor]
        if (self._written[columns] > known).any():
            text = (
                f"tcgen05.ld of columns {columns.start} to {columns.stop - 1} before their product is known "
                "to be done: wait for its mbarrier, then tcgen05.fence::after_thread_sync"
            )
            raise EmulatorError("tensor-memory", text)
        self._read[warp, columns] = self._clocks.counter[self._clocks.loads(warp)]
        return self.data[lane : lane + 32, columns].T.copy()

    def accumulate(
        self, origin: Origin, known: np.ndarray, columns: slice, product: np.ndarray, *, add: bool
    ) -> None:
        """Store or add a product, f8 [128, columns], rounded once; all loads must be known to be done."""
        loads = known[self._clocks.loads(0) : self._clocks.loads(0) + self._clocks.warps]
        late = self._read[:, columns] > loads[:, None]
        if late.any():
            warp = int(np.argmax(late.any(1)))
            text = (
                f"tcgen05.mma writes columns {columns.start} to {columns.stop - 1} while warp {warp}'s "
                "tcgen05.ld of them may be under way: tcgen05.wait::ld and fence::before_thread_sync "
                "and a barrier come first"
            )
            raise EmulatorError("tensor-memory", text)
        before = np.ascontiguousarray(self.data[:, columns]).view(F4).astype(F8)
        result = product + before if add else product
        self.data[:, columns] = canonical(result.astype(F4)).view(U4)
        self._written[columns] = origin.clock


def _alloc(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """Lane 0 stores the address to shared memory."""
    shared, lane = warp.cta.shared, np.zeros(1, np.int64)
    where = warp.shared_address(ins.a, ins.imm)[:1]
    shared.check_range(where, 4, 4, "tcgen05.alloc")
    address = np.array([warp.cta.tensor.allocate(ins.count)], U4)
    shared.generic_write(warp.index, lane, where, 4, ins.line)
    shared.scatter(where, address.view(np.uint8).reshape(1, 4))


def _dealloc(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    warp.cta.tensor.free(warp.index, int(warp.read(ins.a, U4)[0]), ins.count)


def _load(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """The registers hold poison until the wait."""
    addresses = warp.shared_address(ins.a, ins.imm)[mask]
    lane, column = int(addresses[0]) >> 16, int(addresses[0]) & 0xFFFF
    if (addresses != addresses[0]).any():
        raise EmulatorError("tensor-memory", "tcgen05.ld with addresses that differ between lanes")
    if lane != 32 * (warp.index % 4):
        raise EmulatorError("tensor-memory", f"tcgen05.ld of lane {lane} by warp {warp.index}")
    columns = warp.cta.tensor.columns(column, len(ins.operands), "tcgen05.ld")
    values = warp.cta.tensor.load(warp.index, lane, columns)
    for register, value in zip(ins.operands, values, strict=True):
        warp.write(register, np.full(32, IN_FLIGHT, U4), mask)
        warp.tensor_loads.append((register, value))


def _wait_load(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """Loads arrive; the warp's own later products are ordered after them."""
    for register, value in warp.tensor_loads:
        warp.write(register, value, mask)
    warp.tensor_loads = []
    clocks, loads = warp.cta.clocks, warp.cta.clocks.loads(warp.index)
    clocks.tensor_known[warp.index, loads] = clocks.tick(loads)


def _fence_before(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """What a later barrier passes on includes the warp's loads, if none is under way."""
    clocks, loads = warp.cta.clocks, warp.cta.clocks.loads(warp.index)
    clock = clocks.tick(loads)
    if not warp.tensor_loads:
        clocks.learn(warp.index, loads, clock)


def _fence_after(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """What the warp learned from barriers holds for tensor memory too."""
    clocks = warp.cta.clocks
    known = clocks.tensor_known[warp.index]
    np.maximum(known, clocks.known[warp.index], out=known)


def _mma(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    d, a, b, idesc, predicate = ins.operands
    for lane in np.nonzero(mask)[0]:
        accumulator, shape = (int(warp.read(x, U4)[lane]) for x in (d, idesc))
        descriptors = [int(warp.read(x, U8)[lane]) for x in (a, b)]
        _mma_one(warp, ins, accumulator, descriptors, shape, add=bool(warp.read(predicate, np.uint8)[lane]))


def _width(idesc: int) -> int:
    """N of an instruction descriptor: f32 += bf16 x bf16, both K-major, M 128."""
    n, m = (idesc >> 17 & 63) * 8, (idesc >> 24 & 31) * 16
    kinds = (idesc >> 4 & 3, idesc >> 7 & 7, idesc >> 10 & 7, idesc >> 13 & 15)
    if kinds != (1, 1, 1, 0) or m != M or n % 16 or not 16 <= n <= 256:
        text = f"instruction descriptor {idesc:#x}: f32 += bf16 x bf16, K-major, M 128, N 16 to 256 by 16"
        raise EmulatorError("descriptor", text)
    return n


def _mma_one(
    warp: Warp, ins: Instruction, accumulator: int, descriptors: list[int], idesc: int, *, add: bool
) -> None:
    """D = A B^T, or D + A B^T: 16 products added in float64, lowest k first, then D, rounded once."""
    tensor, shared, clocks = warp.cta.tensor, warp.cta.shared, warp.cta.clocks
    n = _width(idesc)
    modes = [matrices.blackwell_mode(x) for x in descriptors]
    rows = (np.arange(M), np.arange(n))
    places = [matrices.element_addresses(*x) for x in zip(descriptors, modes, rows, strict=True)]
    for place in places:
        matrices.check_operand(shared, place, "tcgen05.mma operand")
    if accumulator >> 16:
        raise EmulatorError("tensor-memory", f"accumulator {accumulator:#x} does not start at lane 0")
    columns = tensor.columns(accumulator & 0xFFFF, n, "tcgen05.mma")
    known = clocks.tensor_known[warp.index].copy()
    clock = clocks.tick(clocks.tensor)
    origin = Origin(clocks.tensor, clock, clocks.snapshot(warp.index), ins.line)

    def effect() -> None:
        for place in places:
            shared.async_read(origin, place.ravel(), 2, "tcgen05.mma")
        a, b = (matrices.operand(shared, place) for place in places)
        product = np.zeros((M, n), F8)
        for k in range(matrices.K):
            product = product + a[:, k, None] * b[None, :, k]
        tensor.accumulate(origin, known, columns, product, add=add)

    warp.cta.queues.issue("tc", warp.index, ins, effect, clock)


def _commit(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """An arrival at an mbarrier once all products before it are done; it passes on that they are."""
    clocks, barriers = warp.cta.clocks, warp.cta.barriers
    for lane in np.nonzero(mask)[0]:
        address = int(warp.shared_address(ins.a, ins.imm)[lane])
        barriers.at(address)
        passed = clocks.snapshot(warp.index)
        passed[clocks.tensor] = max(passed[clocks.tensor], clocks.counter[clocks.tensor] - 1)

        def effect(address: int = address, passed: np.ndarray = passed) -> None:
            barriers.at(address).arrive(passed)

        warp.cta.queues.issue("tc", warp.index, ins, effect)


HANDLERS = {
    Op.TC_ALLOC: _alloc,
    Op.TC_DEALLOC: _dealloc,
    Op.TC_MMA: _mma,
    Op.TC_COMMIT: _commit,
    Op.TC_LOAD: _load,
    Op.TC_WAIT_LOAD: _wait_load,
    Op.TC_FENCE_BEFORE: _fence_before,
    Op.TC_FENCE_AFTER: _fence_after,
}
