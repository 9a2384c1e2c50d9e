"""Small PTX kernels for tests: text around a body, and running it on arrays."""

from collections.abc import Sequence

import numpy as np
import pytest

from impl.cute.emulator.launch import Allocation, Functions, Launch, Report, Schedule
from impl.cute.emulator.native.build import available
from impl.cute.emulator.program import Program
from impl.cute.emulator.run import run

ENGINES = ("reference", "native")
EAGER = Schedule("eager")
SCHEDULES = (EAGER, Schedule("lazy"), *(Schedule("priority", seed) for seed in range(4)))


def engine_or_skip(engine: str) -> str:
    """The engine, or a skip that says why the native one cannot be had."""
    if engine == "native" and (why := available()):
        pytest.skip(f"needs the native engine; {why}")
    return engine


def kernel(
    body: str, *, buffers: int = 1, threads: int = 32, target: str = "sm_90a", registers: str = ""
) -> str:
    """A module with one kernel: buffers' addresses in ``%buf0..``, ``%tid``, ``%cta``; ``smem`` is shared."""
    parameters = ",\n".join(f"    .param .u64 p{i}" for i in range(buffers))
    loads = "\n".join(f"    ld.param.u64 %buf{i}, [p{i}];" for i in range(buffers))
    return f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(
{parameters}
)
.reqntid {threads}, 1, 1
{{
    .reg .b64 %buf<{buffers}>;
    .reg .b32 %tid, %cta, %lane, %warp;
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<48>;
    .reg .b64 %d<16>;
    {registers}
{loads}
    mov.u32 %tid, %tid.x;
    mov.u32 %cta, %ctaid.x;
    and.b32 %lane, %tid, 31;
    shr.u32 %warp, %tid, 5;
{body}
    ret;
}}
"""


def execute(
    text: str,
    arrays: Sequence[np.ndarray],
    engine: str,
    *,
    grid: int = 1,
    threads: int = 32,
    shared: int = 0,
    schedule: Schedule = EAGER,
    functions: Functions = "rounded",
    read_only: Sequence[int] = (),
) -> Report:
    """Run the kernel on the arrays, which it changes in place; they must start on 16 bytes."""
    params = np.array([array.ctypes.data for array in arrays], np.uint64).tobytes()
    allocations = tuple(
        Allocation(f"buffer{i}", array.ctypes.data, array.nbytes, i not in read_only)
        for i, array in enumerate(arrays)
    )
    launch = Launch(
        (grid, 1, 1), (threads, 1, 1), shared, params, allocations, schedule=schedule, functions=functions
    )
    return run(Program.parse(text), launch, engine)


def aligned(values: np.ndarray, align: int = 128) -> np.ndarray:
    """A copy that starts on ``align`` bytes."""
    raw = np.zeros(values.nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    result = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    result[...] = values
    return result
