"""Schedules: they reach different orders, a seed replays one, engines agree; refusals name line and text."""

import numpy as np
import pytest

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Schedule
from impl.cute.emulator.program import Program
from tests.meta.emulator.ptx import ENGINES, aligned, engine_or_skip, execute, kernel

each_engine = pytest.mark.parametrize("engine", ENGINES)
TICKETS = """
    mov.u32 %r5, 0;
TAKE:
    setp.ne.b32 %p0, %lane, 0;
    @%p0 bra TOOK;
    atom.global.add.u32 %r0, [%buf0], 1;
    mul.wide.u32 %d0, %r0, 4;
    add.s64 %d1, %buf1, %d0;
    mad.lo.s32 %r1, %cta, 4, %warp;
    st.global.b32 [%d1], %r1;
TOOK:
    bar.warp.sync -1;
    add.s32 %r5, %r5, 1;
    setp.lt.u32 %p1, %r5, 8;
    @%p1 bra TAKE;
"""


def order(engine: str, schedule: Schedule) -> list[int]:
    """Which warp took which ticket: 3 CTAs of 4 warps take 8 each."""
    engine_or_skip(engine)
    counter, out = aligned(np.zeros(1, np.uint32)), aligned(np.zeros(96, np.uint32))
    text = kernel(TICKETS, buffers=2, threads=128)
    execute(text, [counter, out], engine, grid=3, threads=128, schedule=schedule)
    return [int(x) for x in out]


@each_engine
def test_random_priorities_reach_many_orders(engine: str) -> None:
    orders = {tuple(order(engine, Schedule("priority", seed))) for seed in range(8)}
    assert len(orders) == 8


@pytest.mark.parametrize(
    "schedule", [Schedule("eager"), Schedule("lazy"), *(Schedule("priority", s) for s in range(6))], ids=str
)
def test_a_seed_is_one_order_in_both_engines(schedule: Schedule) -> None:
    first = order("reference", schedule)
    assert first == order("reference", schedule)
    assert first == order("native", schedule)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("ex2.approx.f32 %r0, %r1;", "ex2.approx.f32"),
        ("tanh.approx.f32 %r0, %r1;", "tanh"),
        ("add.rz.f32 %r0, %r1, %r2;", "add.rz"),
        ("ld.local.b32 %r0, [%d0];", "ld.local"),
        ("ld.global.b32.unknown %r0, [%d0];", "unknown"),
        ("shfl.sync.bfly.b32 %r0, %r1, 1, 7199, -1;", "shfl"),
        ("shfl.sync.bfly.b32 %r0, %r1, 1, 31, 255;", "part of a warp"),
        ("bar.sync 0, 48;", "part of a warp"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d0, {%r0}], [%r2];", "2d.global"),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
            "{%r0, %r1, %r2, %r3}, %d0, %d1, %p0, 1, 1, 0, 0;",
            "f16",
        ),
        ("add.s32 %r0, %d1, %nothing;", "%nothing"),
        ("cvt.u32.u64 %d0, %d1;", "%d0"),
        ("mbarrier.arrive.noComplete.shared.b64 _, [%r0];", "noComplete"),
        ("multimem.red.add.f32 [%d0], %r0;", "multimem"),
        ("mbarrier.arrive.relaxed.cta.shared.b64 _, [%r0];", "relaxed"),
        ("mbarrier.init.shared.b64 [%r0];", "mbarrier.init"),
        ("mov.b32 %r0, 0d3FF0000000000000;", "0d3FF"),
        ("mov.b32 %r0, 010;", "010"),
        ("ld.global.b32 %r0, [%d0+16U];", "16U"),
        ("ld.param.b32 %r0, [p0+4096];", "4096"),
        ("atom.global.cas.b32 %r0, [%d0], %r1;", "operands"),
        ("add.s16 %h0, %h1;", "operands"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name_and_line(statement: str, what: str) -> None:
    text = kernel(f"    mov.u32 %r0, 0;\n    {statement}")
    line = next(n for n, row in enumerate(text.splitlines(), 1) if statement in row)
    with pytest.raises(EmulatorError) as caught:
        Program.parse(text)
    assert caught.value.kind == "unsupported"
    assert caught.value.line == line
    assert what in str(caught.value)


def test_memory_declared_in_the_module_is_refused() -> None:
    text = kernel("").replace(".visible .entry", ".global .align 4 .b8 table[16];\n.visible .entry")
    with pytest.raises(EmulatorError, match="table"):
        Program.parse(text)


@each_engine
@pytest.mark.parametrize(("grid", "shared"), [(-1, 0), (1, -8), (1, 1 << 20)])
def test_launches_that_no_gpu_takes(grid: int, shared: int, engine: str) -> None:
    engine_or_skip(engine)
    with pytest.raises(EmulatorError) as caught:
        execute(kernel(""), [aligned(np.zeros(32, np.uint32))], engine, grid=grid, shared=shared)
    assert caught.value.kind == "unsupported"


def test_block_and_parameters_must_be_the_kernels() -> None:
    out = aligned(np.zeros(32, np.uint32))
    with pytest.raises(EmulatorError, match="64"):
        execute(kernel(""), [out], "reference", threads=64)
    with pytest.raises(EmulatorError, match="parameters"):
        execute(kernel("", buffers=1), [out, out], "reference")
