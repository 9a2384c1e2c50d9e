"""A CTA: its warps and all that they share."""

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import LANES
from impl.cute.emulator.reference.asynchronous import Queues
from impl.cute.emulator.reference.barriers import Barriers
from impl.cute.emulator.reference.clocks import Clocks
from impl.cute.emulator.reference.machine import Machine
from impl.cute.emulator.reference.shared import SharedMemory
from impl.cute.emulator.reference.tensor import TensorMemory
from impl.cute.emulator.reference.warp import Warp


class Cta:
    """The CTA of a linear number in the grid, x fastest."""

    def __init__(self, machine: Machine, linear: int) -> None:
        x, y, _ = machine.launch.grid
        self.machine, self.linear = machine, linear
        self.index = (linear % x, linear // x % y, linear // (x * y))
        count = -(-machine.threads // LANES)
        self.clocks = Clocks(count)
        self.shared = SharedMemory(machine.launch.shared_bytes, self.clocks)
        self.barriers = Barriers(LANES * count, self.clocks)
        self.tensor = TensorMemory(self.clocks)
        self.queues = Queues(self.index, eager=machine.launch.schedule.mode == "eager")
        self.warps = [Warp(self, w) for w in range(count)]

    @property
    def finished(self) -> bool:
        """Whether all warps have exited."""
        return all(warp.finished for warp in self.warps)

    def finish(self) -> None:
        """Do what is left in the queues; then nothing may be left to be waited for or freed."""
        while self.queues.do_oldest():
            pass
        for warp in self.warps:
            left = [operation for groups in warp.bulk for operation in groups.left()]
            if left:
                where = left[0].instruction
                text = (
                    f"the CTA ended with no wait for the bulk store of PTX line {where.line}: {where.source}"
                )
                raise EmulatorError("bulk", text, cta=self.index, warp=warp.index)
        if self.tensor.allocated:
            text = f"the CTA ended with tensor memory allocated: {self.tensor.allocated}"
            raise EmulatorError("tensor-memory", text, cta=self.index)

    def waiting(self) -> list[str]:
        """Where every unfinished warp is, one a line."""
        places = []
        for warp in self.warps:
            for at in sorted(warp.groups):
                ins = self.machine.code[at]
                places.append(
                    f"CTA {self.index} warp {warp.index} waits at PTX line {ins.line}: {ins.source}"
                )
        return places
