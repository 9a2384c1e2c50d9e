"""``run(program, launch)``: execute one launch on the engine at hand."""

import os

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Launch, Report
from impl.cute.emulator.program import Program

ENGINES = ("native", "reference")
MOST_SHARED = 1 << 18
"""Bytes of shared memory of a CTA: more than any GPU has."""
ENGINE_VARIABLE = "KDAFUZZ_EMULATOR"
"""Environment variable: native, reference or auto (native where a C++ compiler is at hand)."""


def chosen_engine(engine: str | None = None) -> str:
    """The engine that runs: the one asked for, the environment's, or the fastest that can be had.

    ``ValueError``: no such engine, or the native one was asked for and cannot be built.
    """
    wanted = engine or os.environ.get(ENGINE_VARIABLE, "auto")
    if wanted not in (*ENGINES, "auto"):
        raise ValueError(f"{ENGINE_VARIABLE} must be native, reference or auto, not {wanted!r}")
    if wanted == "reference":
        return wanted
    from impl.cute.emulator.native.build import available

    why = available()
    if why and wanted == "native":
        raise ValueError(f"the native engine of the emulator cannot be had: {why}")
    return "reference" if why else "native"


def run(program: Program, launch: Launch, engine: str | None = None) -> Report:
    """Execute the launch; ``EmulatorError`` says what a GPU would have got wrong, and where."""
    threads = launch.block
    if program.threads and tuple(threads) != program.threads:
        raise EmulatorError("unsupported", f"block {threads} of a kernel for {program.threads} threads")
    if (threads[0] * threads[1] * threads[2]) % 32:
        raise EmulatorError("unsupported", f"block {threads} is not a whole number of warps")
    if min(threads) < 1 or min(launch.grid) < 0:
        raise EmulatorError("unsupported", f"grid {launch.grid} of blocks {threads}")
    if not 0 <= launch.shared_bytes <= MOST_SHARED:
        raise EmulatorError("unsupported", f"{launch.shared_bytes} bytes of shared memory")
    if len(launch.params) != program.param_bytes:
        raise EmulatorError(
            "unsupported", f"{len(launch.params)} bytes of parameters for {program.param_bytes}"
        )
    if chosen_engine(engine) == "native":
        from impl.cute.emulator.native.engine import execute
    else:
        from impl.cute.emulator.reference.engine import execute
    return execute(program, launch)
