"""Barriers, mbarriers, and shared memory between warps: what is ordered, what is a race, what never ends."""

import numpy as np
import pytest

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Schedule
from tests.meta.emulator.ptx import EAGER, ENGINES, SCHEDULES, aligned, engine_or_skip, execute, kernel

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)

NEIGHBOUR = """
    mov.u32 %r0, smem;
    shl.b32 %r1, %tid, 2;
    add.s32 %r2, %r0, %r1;
    st.shared.b32 [%r2], %tid;
    {between}
    add.s32 %r3, %tid, {step};
    and.b32 %r3, %r3, 127;
    shl.b32 %r3, %r3, 2;
    add.s32 %r3, %r3, %r0;
    ld.shared.b32 %r4, [%r3];
    {after}
    mul.wide.u32 %d0, %tid, 4;
    add.s64 %d1, %buf0, %d0;
    st.global.b32 [%d1], %r4;
"""


def run(body: str, engine: str, schedule: Schedule = EAGER, threads: int = 128) -> np.ndarray:
    engine_or_skip(engine)
    out = aligned(np.zeros(128, np.uint32))
    execute(kernel(body, threads=threads), [out], engine, threads=threads, shared=1024, schedule=schedule)
    return out


def error(body: str, engine: str, schedule: Schedule = EAGER, threads: int = 128) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        run(body, engine, schedule, threads)
    return caught.value


@each_engine
@each_schedule
def test_a_barrier_orders_warps(schedule: Schedule, engine: str) -> None:
    out = run(NEIGHBOUR.format(between="bar.sync 0;", step=33, after=""), engine, schedule)
    assert list(out) == [(n + 33) % 128 for n in range(128)]


@each_engine
@each_schedule
def test_without_the_barrier_it_is_a_race_in_every_schedule(schedule: Schedule, engine: str) -> None:
    found = error(NEIGHBOUR.format(between="", step=32, after=""), engine, schedule)
    assert found.kind == "race"
    assert "PTX" in str(found)


@each_engine
def test_a_warp_barrier_orders_lanes(engine: str) -> None:
    out = run(NEIGHBOUR.format(between="bar.warp.sync -1;", step=0, after=""), engine)
    assert list(out) == list(range(128))
    body = NEIGHBOUR.replace("add.s32 %r3, %tid, {step};", "xor.b32 %r3, %tid, 1;")
    assert list(run(body.format(between="bar.warp.sync -1;", after=""), engine)) == [
        n ^ 1 for n in range(128)
    ]
    assert error(body.format(between="", after=""), engine).kind == "race"


@each_engine
@each_schedule
def test_overwriting_what_another_warp_still_reads(schedule: Schedule, engine: str) -> None:
    after = "{wait}\n    st.shared.b32 [%r2], %r4;"
    body = NEIGHBOUR.format(between="bar.sync 0;", step=32, after=after)
    assert error(body.format(wait=""), engine, schedule).kind == "race"
    run(body.format(wait="bar.sync 0;"), engine, schedule)


@each_engine
def test_lane_overwrites_what_its_neighbour_read(engine: str) -> None:
    body = NEIGHBOUR.replace("add.s32 %r3, %tid, {step};", "xor.b32 %r3, %tid, 1;")
    after = "{wait}\n    st.shared.b32 [%r2], %r4;"
    body = body.format(between="bar.warp.sync -1;", after=after)
    assert error(body.format(wait=""), engine).kind == "race"
    run(body.format(wait="bar.warp.sync -1;"), engine)


@each_engine
def test_half_words_of_two_lanes_are_apart(engine: str) -> None:
    body = """
    mov.u32 %r0, smem;
    shl.b32 %r1, %tid, 1;
    add.s32 %r2, %r0, %r1;
    cvt.u16.u32 %h0, %tid;
    st.shared.b16 [%r2], %h0;
    ld.shared.b16 %h1, [%r2];
"""
    run(body, engine)


@each_engine
def test_named_barrier_of_two_warps(engine: str) -> None:
    body = """
    setp.gt.u32 %p0, %warp, 1;
    @%p0 bra OUT;
    bar.sync 3, 64;
OUT:
"""
    run(body, engine)


@each_engine
def test_too_few_at_a_barrier_is_a_deadlock_that_says_who_waits(engine: str) -> None:
    body = "    setp.gt.u32 %p0, %warp, 2;\n    @%p0 bra OUT;\n    bar.sync 3, 128;\nOUT:\n"
    found = error(body, engine)
    assert found.kind == "deadlock"
    assert "bar.sync 3, 128" in found.text
    assert all(f"warp {w}" in found.text for w in range(3))


@each_engine
def test_too_many_at_a_barrier(engine: str) -> None:
    body = """
    setp.lt.u32 %p0, %warp, 1;
    @%p0 bra A;
    bar.sync 3, 96;
    bra OUT;
A:
    bar.sync 3, 64;
OUT:
"""
    assert error(body, engine).kind in ("barrier", "deadlock")


MBARRIER = """
    mov.u32 %r0, smem;
    setp.ne.b32 %p0, %tid, 0;
    @%p0 bra INIT;
    mbarrier.init.shared::cta.b64 [%r0], {count};
    fence.mbarrier_init.release.cluster;
INIT:
    bar.sync 0;
    setp.eq.s32 %p1, %warp, 0;
    @!%p1 bra CONSUME;
    shl.b32 %r1, %tid, 2;
    add.s32 %r2, %r0, %r1;
    st.shared.b32 [%r2+64], %tid;
    {arrive}
    bra OUT;
CONSUME:
    {wait}
    sub.s32 %r3, %tid, 32;
    shl.b32 %r3, %r3, 2;
    add.s32 %r3, %r3, %r0;
    ld.shared.b32 %r4, [%r3+64];
    mul.wide.u32 %d0, %tid, 4;
    add.s64 %d1, %buf0, %d0;
    st.global.b32 [%d1], %r4;
OUT:
"""
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r0];"
WAIT = """{
    .reg .pred p;
TRY:
    mbarrier.try_wait.parity.shared::cta.b64 p, [%r0], 0;
    @p bra DONE;
    bra TRY;
DONE:
    }"""


@each_engine
@each_schedule
@pytest.mark.parametrize("wait", [WAIT, WAIT.replace("try_wait", "test_wait")], ids=["try", "test"])
def test_mbarrier_hands_over(wait: str, schedule: Schedule, engine: str) -> None:
    out = run(MBARRIER.format(count=32, arrive=ARRIVE, wait=wait), engine, schedule, threads=64)
    assert list(out[32:64]) == list(range(32))


@each_engine
@each_schedule
def test_reading_without_waiting_for_the_mbarrier(schedule: Schedule, engine: str) -> None:
    found = error(MBARRIER.format(count=32, arrive=ARRIVE, wait=""), engine, schedule, threads=64)
    assert found.kind == "race"


@each_engine
def test_mbarrier_that_expects_more_arrivals(engine: str) -> None:
    found = error(MBARRIER.format(count=33, arrive=ARRIVE, wait=WAIT), engine, threads=64)
    assert found.kind == "deadlock"
    assert "try_wait" in found.text
    assert "1 of 33 arrivals" in found.text


@each_engine
def test_mbarrier_with_too_many_arrivals(engine: str) -> None:
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r0], 40;"
    found = error(MBARRIER.format(count=32, arrive=arrive, wait=WAIT), engine, threads=64)
    assert found.kind == "barrier"


@each_engine
def test_waiting_for_the_wrong_phase(engine: str) -> None:
    wait = WAIT.replace("[%r0], 0", "[%r0], 1")
    found = error(MBARRIER.format(count=32, arrive=ARRIVE, wait=wait), engine, threads=64)
    assert found.kind == "race"


@each_engine
@pytest.mark.parametrize("wait", [WAIT, WAIT.replace("try_wait", "test_wait")], ids=["try", "test"])
def test_a_phase_has_no_other_parity(wait: str, engine: str) -> None:
    """2 is no other name of 0: what the hardware makes of it is not said."""
    wait = wait.replace("[%r0], 0", "[%r0], 2")
    found = error(MBARRIER.format(count=32, arrive=ARRIVE, wait=wait), engine, threads=64)
    assert (found.kind, found.text) == ("barrier", "a wait for a phase of parity 2; it must be 0 or 1")


@each_engine
def test_mbarrier_that_nobody_initialised(engine: str) -> None:
    found = error("    mov.u32 %r0, smem;\n    mbarrier.arrive.shared::cta.b64 _, [%r0+8];\n", engine)
    assert found.kind == "barrier"


@each_engine
def test_bytes_that_never_come(engine: str) -> None:
    arrive = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], 16;"
    found = error(MBARRIER.format(count=32, arrive=arrive, wait=WAIT), engine, threads=64)
    assert found.kind == "deadlock"
    assert "512" in found.text


@each_engine
def test_ordering_passes_on_through_a_third_warp(engine: str) -> None:
    body = """
    mov.u32 %r0, smem;
    setp.ne.b32 %p0, %tid, 0;
    @!%p0 st.shared.b32 [%r0], 42;
    setp.lt.u32 %p1, %warp, 2;
    @%p1 bar.sync 1, 64;
    setp.eq.s32 %p2, %warp, 0;
    @%p2 bra OUT;
    bar.sync 2, 64;
    ld.shared.b32 %r1, [%r0];
OUT:
"""
    engine_or_skip(engine)
    out = aligned(np.zeros(96, np.uint32))
    execute(kernel(body, threads=96), [out], engine, threads=96, shared=64)
