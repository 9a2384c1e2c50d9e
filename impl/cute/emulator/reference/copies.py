"""Asynchronous copies between global and shared memory: bulk, tensor (TMA) and cp.async."""

import itertools

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import Op
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.shared import Origin
from impl.cute.emulator.reference.warp import Warp
from impl.cute.emulator.tensormap import TensorMap

U4, U8 = np.uint32, np.uint64
_BULK = 16
"""Alignment of the addresses and sizes of bulk copies, and of a tensor copy's first coordinate in bytes."""
_BOX = 128
"""Alignment of a tensor copy's shared address."""
SPAN = (0, 32, 64, 128)
"""Bytes within which a swizzle mode of a tensor map permutes chunks of 16 bytes."""


def swizzled(addresses: np.ndarray, mode: int) -> np.ndarray:
    """Shared addresses with 16-byte chunks permuted: address bits 7 and up are xor-ed into bits 4 and up."""
    chunks = (0, 1, 3, 7)[mode]
    flips: np.ndarray = (addresses >> 7 & chunks) << 4
    result: np.ndarray = np.bitwise_xor(addresses, flips, dtype=np.int64)
    return result


def _check_bulk(what: str, *numbers: int) -> None:
    if any(number % _BULK for number in numbers):
        listed = ", ".join(f"{number:#x}" for number in numbers)
        raise EmulatorError("misaligned", f"{what}: addresses and size {listed} must be multiples of {_BULK}")


def _arrival(warp: Warp, address: int) -> tuple[int, int]:
    """The entity of copies that complete on an initialised mbarrier, and the new copy's number."""
    warp.cta.barriers.of_copy(address, warp.index)
    entity = warp.cta.clocks.copies_on(address)
    return entity, warp.cta.clocks.tick(entity)


def _complete(warp: Warp, address: int, origin: Origin, size: int) -> None:
    """The copy's bytes arrive at its mbarrier."""
    mbarrier = warp.cta.barriers.at(address)
    passed = warp.cta.clocks.nothing()
    passed[origin.entity] = origin.clock
    mbarrier.pass_on(passed)
    mbarrier.complete_bytes(size)


def _bulk_load(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    kinds: tuple[type[np.generic], ...] = (U4, U8, U4, U4)
    for lane in np.nonzero(mask)[0]:
        numbers = [int(warp.read(x, kind)[lane]) for x, kind in zip(ins.operands, kinds, strict=True)]
        _bulk_load_one(warp, ins, *numbers)


def _bulk_load_one(warp: Warp, ins: Instruction, to: int, source: int, size: int, mbarrier: int) -> None:
    memory, shared, clocks = warp.machine.memory, warp.cta.shared, warp.cta.clocks
    _check_bulk("bulk load", to, source, size)
    target, start = np.array([to]), np.array([source], U8)
    shared.check_range(target, size, _BULK, "bulk load")
    found = memory.find(start, size, _BULK, "bulk load")
    entity, clock = _arrival(warp, mbarrier)
    if warp.early:
        memory.count(found)
    origin = Origin(entity, clock, clocks.snapshot(warp.index), ins.line)

    def effect() -> None:
        shared.async_write(origin, target, size, "a bulk load")
        shared.scatter(target, memory.gather(found, start, size))
        _complete(warp, mbarrier, origin, size)

    warp.cta.queues.issue("copy", warp.index, ins, effect, clock)


def _bulk_store(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    kinds: tuple[type[np.generic], ...] = (U8, U4, U4)
    for lane in np.nonzero(mask)[0]:
        numbers = [int(warp.read(x, kind)[lane]) for x, kind in zip(ins.operands, kinds, strict=True)]
        _bulk_store_one(warp, ins, int(lane), *numbers)


def _bulk_store_one(warp: Warp, ins: Instruction, lane: int, to: int, source: int, size: int) -> None:
    memory, shared, clocks = warp.machine.memory, warp.cta.shared, warp.cta.clocks
    _check_bulk("bulk store", to, source, size)
    target, start = np.array([to], U8), np.array([source])
    shared.check_range(start, size, _BULK, "bulk store")
    found = memory.find(target, size, _BULK, "bulk store", write=True)
    if warp.early:
        memory.count(found, write=True)
    entity = clocks.stores(warp.index)
    clock = clocks.tick(entity)
    origin = Origin(entity, clock, clocks.snapshot(warp.index), ins.line)

    def effect() -> None:
        shared.async_read(origin, start, size, "a bulk store")
        memory.scatter(found, target, shared.gather(start, size))

    warp.bulk[lane].add(warp.cta.queues.issue("store", warp.index, ins, effect, clock))


def _bulk_commit(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    for lane in np.nonzero(mask)[0]:
        warp.bulk[lane].commit()


def _bulk_wait(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """What is waited for is done now, in the order of issue; afterwards its reads are known to be over."""
    lanes = np.nonzero(mask)[0]
    taken = itertools.chain.from_iterable(warp.bulk[lane].take(ins.imm) for lane in lanes)
    for operation in sorted(taken, key=lambda o: o.number):
        warp.cta.queues.do(operation)
        warp.cta.clocks.learn(warp.index, warp.cta.clocks.stores(warp.index), operation.clock)


def _tensor_load(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    to, tensor_map, mbarrier, *coordinates = ins.operands
    for lane in np.nonzero(mask)[0]:
        corner = [int(warp.read(x, np.int32)[lane]) for x in coordinates]
        layout = warp.machine.tensor_map(int(warp.read(tensor_map, U8)[lane]))
        places = (int(warp.read(to, U4)[lane]), int(warp.read(mbarrier, U4)[lane]))
        _tensor_load_one(warp, ins, layout, corner, *places)


def _check_box(layout: TensorMap, corner: list[int]) -> None:
    width = layout.element_bytes
    if len(corner) != len(layout.dims):
        text = f"{len(corner)} coordinates for a tensor map of rank {len(layout.dims)}"
    elif layout.swizzle and layout.box[0] * width > SPAN[layout.swizzle]:
        text = f"box rows of {layout.box[0] * width} bytes with a swizzle of {SPAN[layout.swizzle]}"
    elif corner[0] * width % _BULK:
        text = f"first coordinate {corner[0]}: {corner[0] * width} bytes, not a multiple of {_BULK}"
    else:
        return
    raise EmulatorError("tensor-map", text)


def _tensor_load_one(
    warp: Warp, ins: Instruction, layout: TensorMap, corner: list[int], to: int, mbarrier: int
) -> None:
    memory, shared, clocks = warp.machine.memory, warp.cta.shared, warp.cta.clocks
    width, row = layout.element_bytes, layout.box[0] * layout.element_bytes
    pitch = max(row, SPAN[layout.swizzle])
    elements = int(np.prod(layout.box))
    _check_box(layout, corner)
    shared.check_range(np.array([to]), elements * width // row * pitch, _BOX, "tensor load")
    source, inside = _box_addresses(layout, corner)
    found = memory.find(source[inside], width, 1, "tensor load")
    entity, clock = _arrival(warp, mbarrier)
    if warp.early:
        memory.count(memory.holder(layout.base))
    origin = Origin(entity, clock, clocks.snapshot(warp.index), ins.line)
    offset = np.arange(elements) * width
    target = swizzled(to + offset // row * pitch + offset % row, layout.swizzle)

    def effect() -> None:
        shared.async_write(origin, target, width, "a tensor load")
        fill = np.frombuffer(layout.fill.to_bytes(2, "little") * 4, np.uint8)[:width]
        values = np.broadcast_to(fill, (elements, width)).copy()
        values[inside] = memory.gather(found, source[inside], width)
        shared.scatter(target, values)
        _complete(warp, mbarrier, origin, elements * width)

    warp.cta.queues.issue("copy", warp.index, ins, effect, clock)


def _box_addresses(layout: TensorMap, corner: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Global address of every element of a box, first dimension fastest, and whether it is in the tensor."""
    steps = np.indices(layout.box[::-1]).reshape(len(layout.box), -1)[::-1]
    positions = steps + np.array(corner)[:, None]
    dims, strides = np.array(layout.dims)[:, None], np.array(layout.strides)[:, None]
    inside = ((positions >= 0) & (positions < dims)).all(0)
    return layout.base + (positions * strides).sum(0), inside


def _copy(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """cp.async: the lanes' copies are one operation; bytes beyond the source bytes are zero."""
    memory, shared, clocks, lanes = warp.machine.memory, warp.cta.shared, warp.cta.clocks, np.nonzero(mask)[0]
    to, source, limit = ins.operands
    target, start = warp.read(to, U4)[lanes], warp.read(source, U8)[lanes]
    sizes = np.full(len(lanes), ins.size)
    if limit >= 0:
        sizes = np.minimum(warp.read(limit, U4)[lanes].astype(np.int64), ins.size)
    shared.check_range(target, ins.size, ins.size, "cp.async")
    if (start % U8(ins.size)).any():
        raise EmulatorError("misaligned", f"cp.async of {ins.size} bytes from a misaligned address")
    pieces = []
    for size in np.unique(sizes[sizes > 0]):
        chosen = np.nonzero(sizes == size)[0]
        pieces.append((chosen, memory.find(start[chosen], int(size), 1, "cp.async")))
        if warp.early:
            memory.count(pieces[-1][1])
    entity = clocks.copies(warp.index)
    clock = clocks.tick(entity)
    origin = Origin(entity, clock, clocks.snapshot(warp.index), ins.line)

    def effect() -> None:
        shared.async_write(origin, target, ins.size, "cp.async")
        values = np.zeros((len(target), ins.size), np.uint8)
        for chosen, found in pieces:
            size = int(sizes[chosen[0]])
            values[chosen, :size] = memory.gather(found, start[chosen], size)
        shared.scatter(target, values)

    warp.copies.add(warp.cta.queues.issue("copy", warp.index, ins, effect, clock))


def _copy_commit(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    warp.copies.commit()


def _copy_wait(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    for operation in warp.copies.take(ins.imm):
        warp.cta.queues.do(operation)
        warp.cta.clocks.learn(warp.index, warp.cta.clocks.copies(warp.index), operation.clock)


HANDLERS = {
    Op.BULK_LOAD: _bulk_load,
    Op.BULK_STORE: _bulk_store,
    Op.BULK_COMMIT: _bulk_commit,
    Op.BULK_WAIT: _bulk_wait,
    Op.TMA_LOAD: _tensor_load,
    Op.CP_ASYNC: _copy,
    Op.CP_ASYNC_COMMIT: _copy_commit,
    Op.CP_ASYNC_WAIT: _copy_wait,
}
