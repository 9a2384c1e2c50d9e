"""``execute(program, launch)``: the numpy engine."""

import numpy as np

from impl.cute.emulator.launch import Launch, Report
from impl.cute.emulator.program import Program
from impl.cute.emulator.reference.machine import Machine
from impl.cute.emulator.reference.schedule import run


def execute(program: Program, launch: Launch) -> Report:
    """Run a launch on the launch's memory; ``EmulatorError`` is the first thing that went wrong."""
    machine = Machine(program, launch)
    with np.errstate(all="ignore"):
        run(machine)
    memory = machine.memory
    names = sorted({*memory.reads, *memory.writes})
    early = {name: (memory.reads[name], memory.writes[name]) for name in names}
    return Report(machine.executed, early)
