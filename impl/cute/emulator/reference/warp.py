"""A warp: its registers, which lanes are where, and what it has issued."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from impl.cute.emulator.isa import LANES
from impl.cute.emulator.reference.asynchronous import Groups
from impl.cute.emulator.reference.barriers import NamedBarrier

if TYPE_CHECKING:
    from impl.cute.emulator.reference.cta import Cta
    from impl.cute.emulator.reference.instruction import Instruction
    from impl.cute.emulator.reference.wgmma import Product


class Warp:
    """Warp ``index`` of a CTA. ``groups`` maps an instruction's index to the lanes at it, bool [32]."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.machine = cta.machine
        self.registers = self.machine.image()
        self.live = np.arange(LANES) + LANES * index < self.machine.threads
        self.groups: dict[int, np.ndarray] = {0: self.live.copy()} if self.live.any() else {}
        self.executed = 0
        self.barrier: NamedBarrier | None = None  # arrived at and not yet passed
        self.progress = False  # an arrival since the step began
        self.timed_out: set[tuple[Instruction, int, int]] = set()  # waits that gave up: mbarrier, phase
        self.bulk = [Groups() for _ in range(LANES)]
        self.copies = Groups()
        self.products = Groups()
        self.product_fence = False
        self.waiting_products: list[Product] = []
        self.tensor_loads: list[tuple[int, np.ndarray]] = []  # register and value at the wait
        self._specials()

    @property
    def finished(self) -> bool:
        """Whether all lanes have exited."""
        return not self.groups

    @property
    def early(self) -> bool:
        """Whether nothing the warp knows of has waited for the kernels that the launch depends on."""
        clocks = self.cta.clocks
        return bool(clocks.known[self.index, clocks.dependency] == 0)

    def place(self, at: int, mask: np.ndarray) -> None:
        """Lanes go to an instruction, joining those that are there."""
        if mask.any():
            self.groups[at] = self.groups[at] | mask if at in self.groups else mask

    # registers

    def read(self, register: int, dtype: type[np.generic]) -> np.ndarray:
        """A register's lanes (a view)."""
        width = np.dtype(dtype).itemsize
        return self.registers[register : register + LANES * width].view(dtype)

    def write(self, register: int, values: np.ndarray, mask: np.ndarray) -> None:
        """Set a register in the lanes of the mask; ``values`` has an element of its width for each lane."""
        if register >= 0:
            width = values.dtype.itemsize
            held = self.registers[register : register + LANES * width].view(values.dtype)
            np.copyto(held, values, where=mask)

    def rows(self, register: int, size: int) -> np.ndarray:
        """A register of ``size`` bytes as u1 [32, size] (a view)."""
        return self.registers[register : register + LANES * size].reshape(LANES, size)

    def global_address(self, register: int, offset: int) -> np.ndarray:
        """8-byte addresses ``register + offset``."""
        return self.read(register, np.uint64) + np.uint64(offset & 0xFFFF_FFFF_FFFF_FFFF)

    def shared_address(self, register: int, offset: int) -> np.ndarray:
        """4-byte addresses ``register + offset``."""
        return self.read(register, np.uint32) + np.uint32(offset & 0xFFFF_FFFF)

    def _specials(self) -> None:
        machine, everyone = self.machine, np.ones(LANES, bool)
        thread = np.arange(LANES) + LANES * self.index
        nx, ny, nz = machine.launch.block
        values: dict[str, np.ndarray | int] = {"%laneid": np.arange(LANES), "%warpid": self.index}
        values |= {"%tid.x": thread % nx, "%tid.y": thread // nx % ny, "%tid.z": thread // (nx * ny)}
        values |= dict(zip(("%ntid.x", "%ntid.y", "%ntid.z"), (nx, ny, nz), strict=True))
        values |= dict(zip(("%ctaid.x", "%ctaid.y", "%ctaid.z"), self.cta.index, strict=True))
        values |= dict(zip(("%nctaid.x", "%nctaid.y", "%nctaid.z"), machine.launch.grid, strict=True))
        for name, register in machine.program.specials.items():
            self.write(register, np.broadcast_to(values[name], LANES).astype(np.uint32), everyone)
