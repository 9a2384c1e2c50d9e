"""Loads, stores and atomics of global and shared memory, and matrix fragments."""

import numpy as np

from impl.cute.emulator.isa import Op
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.warp import Warp

U2, U4 = np.uint16, np.uint32
_ROW = 16
"""Bytes of a row of a matrix fragment."""


def _put(warp: Warp, ins: Instruction, lanes: np.ndarray, rows: np.ndarray) -> None:
    """Distribute rows of ``count`` elements over the registers of the list."""
    for i, register in enumerate(ins.operands):
        if register >= 0:
            warp.rows(register, ins.size)[lanes] = rows[:, i * ins.size : (i + 1) * ins.size]


def _collect(warp: Warp, ins: Instruction, lanes: np.ndarray) -> np.ndarray:
    """The elements to store, u1 [lanes, size * count]."""
    return np.concatenate([warp.rows(register, ins.size)[lanes] for register in ins.operands], axis=1)


def _load_global(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    memory, lanes, size = warp.machine.memory, np.nonzero(mask)[0], ins.size * ins.count
    addresses = warp.global_address(ins.a, ins.imm)[lanes]
    found = memory.find(addresses, size, size, "load")
    if warp.early:
        memory.count(found)
    _put(warp, ins, lanes, memory.gather(found, addresses, size))


def _store_global(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    memory, lanes, size = warp.machine.memory, np.nonzero(mask)[0], ins.size * ins.count
    addresses = warp.global_address(ins.a, ins.imm)[lanes]
    found = memory.find(addresses, size, size, "store", write=True)
    if warp.early:
        memory.count(found, write=True)
    memory.scatter(found, addresses, _collect(warp, ins, lanes))


def _atomic(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """Lane by lane, lowest first: the old value, and a new one in its place."""
    memory, lanes = warp.machine.memory, np.nonzero(mask)[0]
    addresses = warp.global_address(ins.a, ins.imm)[lanes]
    found = memory.find(addresses, 4, 4, "atomic", write=True)
    if warp.early:
        memory.count(found)
        memory.count(found, write=True)
    b = warp.read(ins.b, U4).copy()
    c = warp.read(ins.c, U4).copy() if ins.op == Op.ATOM_CAS else b
    old = np.zeros(32, U4)
    for i, lane in enumerate(lanes):
        where, at = found[i : i + 1], addresses[i : i + 1]
        old[lane] = memory.gather(where, at, 4).view(U4)[0, 0]
        new = b[lane : lane + 1]
        if ins.op == Op.ATOM_ADD:
            new = old[lane : lane + 1] + new
        elif ins.op == Op.ATOM_CAS:
            new = c[lane : lane + 1] if old[lane] == b[lane] else old[lane : lane + 1]
        memory.scatter(where, at, new.view(np.uint8).reshape(1, 4))
    warp.write(ins.dst, old, mask)


def _load_shared(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    shared, lanes, size = warp.cta.shared, np.nonzero(mask)[0], ins.size * ins.count
    addresses = warp.shared_address(ins.a, ins.imm)[lanes]
    shared.check_range(addresses, size, size, "load")
    shared.generic_read(warp.index, lanes, addresses, size)
    _put(warp, ins, lanes, shared.gather(addresses, size))


def _store_shared(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    shared, lanes, size = warp.cta.shared, np.nonzero(mask)[0], ins.size * ins.count
    addresses = warp.shared_address(ins.a, ins.imm)[lanes]
    shared.check_range(addresses, size, size, "store")
    shared.generic_write(warp.index, lanes, addresses, size, ins.line)
    shared.scatter(addresses, _collect(warp, ins, lanes))


def _load_matrix(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """Matrix i has its rows at the addresses of lanes 8i .. 8i+7; lane l gets two elements of row l / 4.

    Transposed: of column l / 4.
    """
    shared, count = warp.cta.shared, len(ins.operands)
    lanes = np.arange(8 * count)
    addresses = warp.shared_address(ins.a, ins.imm)[lanes]
    shared.check_range(addresses, _ROW, _ROW, "ldmatrix")
    shared.generic_read(warp.index, lanes, addresses, _ROW)
    matrices = shared.gather(addresses, _ROW).view(U2).reshape(count, 8, 8)
    if ins.size:
        matrices = matrices.swapaxes(1, 2).copy()
    for register, fragment in zip(ins.operands, matrices.reshape(count, 64).view(U4), strict=True):
        warp.write(register, fragment, mask)


def _store_matrix(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """The inverse of ``_load_matrix``."""
    shared, count = warp.cta.shared, len(ins.operands)
    lanes = np.arange(8 * count)
    addresses = warp.shared_address(ins.a, ins.imm)[lanes]
    shared.check_range(addresses, _ROW, _ROW, "stmatrix")
    matrices = np.stack([warp.rows(register, 4).ravel().view(U2) for register in ins.operands]).reshape(
        count, 8, 8
    )
    if ins.size:
        matrices = matrices.swapaxes(1, 2).copy()
    shared.generic_write(warp.index, lanes, addresses, _ROW, ins.line)
    shared.scatter(addresses, matrices.view(np.uint8).reshape(8 * count, _ROW))


HANDLERS = {
    Op.LD_GLOBAL: _load_global,
    Op.ST_GLOBAL: _store_global,
    Op.ATOM_ADD: _atomic,
    Op.ATOM_EXCH: _atomic,
    Op.ATOM_CAS: _atomic,
    Op.LD_SHARED: _load_shared,
    Op.ST_SHARED: _store_shared,
    Op.LDMATRIX: _load_matrix,
    Op.STMATRIX: _store_matrix,
}
