"""What all CTAs of a launch share."""

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import LANES, PARAM_BASE
from impl.cute.emulator.launch import Launch
from impl.cute.emulator.program import Program
from impl.cute.emulator.reference.functions import chosen
from impl.cute.emulator.reference.global_memory import GlobalMemory
from impl.cute.emulator.reference.instruction import instructions
from impl.cute.emulator.reference.splitmix import Generator
from impl.cute.emulator.tensormap import BYTES, TensorMap, decode


class Machine:
    """A program and its launch: code, global memory, parameters, approximate functions.

    ``executed`` counts the instructions of all warps, ``random`` draws the schedule in priority mode.
    """

    def __init__(self, program: Program, launch: Launch) -> None:
        self.program, self.launch = program, launch
        self.code = instructions(program)
        self.memory = GlobalMemory(launch.allocations, launch.params)
        self.functions = chosen(launch.functions, launch.seed)
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.executed = 0
        priority = launch.schedule.mode == "priority"
        self.random = Generator(launch.schedule.seed) if priority else None
        self._image = np.array(program.image, np.uint8)
        for offset, size, register in program.parameters:
            value = np.frombuffer(launch.params[offset : offset + size], np.uint8)
            self._image[register : register + LANES * size] = np.tile(value, LANES)
        self._tensor_maps: dict[int, TensorMap] = {}

    def image(self) -> np.ndarray:
        """A new register file with constants and parameters in place."""
        return self._image.copy()

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at the address of a parameter."""
        offset = address - PARAM_BASE
        if offset not in self.program.tensor_maps:
            raise EmulatorError("tensor-map", f"{address:#x} is not the address of a tensor-map parameter")
        if offset not in self._tensor_maps:
            self._tensor_maps[offset] = decode(self.launch.params[offset : offset + BYTES])
        return self._tensor_maps[offset]
