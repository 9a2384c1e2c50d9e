"""Matrix operands of tensor-core instructions in shared memory: K-major bf16, 16 elements of K a step."""

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.reference.arithmetic import F8, U2, from_bf16
from impl.cute.emulator.reference.copies import swizzled
from impl.cute.emulator.reference.shared import SharedMemory

K = 16
_ROW_BYTES = {0: 16, 1: 32, 2: 64, 3: 128}
"""Bytes from row to row within eight rows, by swizzle mode (0: none)."""


def blackwell_mode(descriptor: int) -> int:
    """The swizzle mode of an sm_100 descriptor: version 1, no base offset, layout in bits 61 to 63."""
    modes = {0: 0, 6: 1, 4: 2, 2: 3}
    layout = descriptor >> 61 & 7
    if descriptor >> 46 & 7 != 1 or descriptor >> 49 & 7 or layout not in modes:
        text = f"shared-memory descriptor {descriptor:#x}: version 1, no base offset, swizzle 0, 2, 4 or 6"
        raise EmulatorError("descriptor", text)
    return modes[layout]


def hopper_mode(descriptor: int) -> int:
    """The swizzle mode of an sm_90 descriptor: no base offset, layout in bits 62 and 63."""
    if descriptor >> 49 & 7:
        raise EmulatorError("descriptor", f"shared-memory descriptor {descriptor:#x} with a base offset")
    return {0: 0, 3: 1, 2: 2, 1: 3}[descriptor >> 62 & 3]


def element_addresses(descriptor: int, mode: int, rows: np.ndarray) -> np.ndarray:
    """Shared address of each element, [rows, K]: groups of eight rows are a stride apart.

    Without swizzle a row's 16-byte halves are a leading offset apart; with it they are neighbours
    in a row of the swizzle's span, permuted by the address.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    r, k = rows[:, None], np.arange(K)[None, :]
    row_start = start + r // 8 * stride + r % 8 * _ROW_BYTES[mode]
    within = k // 8 * leading + k % 8 * 2 if mode == 0 else k * 2
    return swizzled(row_start + within, mode)


def check_operand(shared: SharedMemory, addresses: np.ndarray, what: str) -> None:
    """All elements lie in shared memory."""
    shared.check_range(addresses.ravel(), 2, 2, what)


def operand(shared: SharedMemory, addresses: np.ndarray) -> np.ndarray:
    """The elements as float64, [rows, K]."""
    return from_bf16(shared.gather(addresses.ravel(), 2).view(U2)).astype(F8).reshape(addresses.shape)
