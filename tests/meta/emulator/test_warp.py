"""Lanes that part and join, and what they say to each other."""

import numpy as np
import pytest

from impl.cute.emulator.errors import EmulatorError
from tests.meta.emulator.ptx import ENGINES, SCHEDULES, aligned, engine_or_skip, execute, kernel

pytestmark = pytest.mark.parametrize("engine", ENGINES)
STORE = "    mul.wide.u32 %d0, %tid, 4;\n    add.s64 %d1, %buf0, %d0;\n    st.global.b32 [%d1], %r0;\n"


def run(body: str, engine: str, **options: object) -> np.ndarray:
    """%r0 of each of the 32 lanes at the end."""
    engine_or_skip(engine)
    out = aligned(np.zeros(32, np.uint32))
    execute(kernel(body + STORE), [out], engine, **options)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_loops_of_different_length_join_again(schedule: object, engine: str) -> None:
    body = """
    mov.u32 %r0, 0;
    mov.u32 %r1, %tid;
LOOP:
    setp.eq.s32 %p0, %r1, 0;
    @%p0 bra DONE;
    add.s32 %r0, %r0, %r1;
    sub.s32 %r1, %r1, 1;
    bra LOOP;
DONE:
    shfl.sync.bfly.b32 %r0, %r0, 1, 31, -1;
"""
    assert list(run(body, engine, schedule=schedule)) == [(n ^ 1) * ((n ^ 1) + 1) // 2 for n in range(32)]


def test_nested_branches(engine: str) -> None:
    body = """
    setp.lt.u32 %p0, %tid, 16;
    and.b32 %r1, %tid, 1;
    setp.eq.s32 %p1, %r1, 0;
    @!%p0 bra HIGH;
    mov.u32 %r0, 1;
    @%p1 bra EVEN;
    add.s32 %r0, %r0, 10;
    bra JOIN;
EVEN:
    add.s32 %r0, %r0, 20;
    bra JOIN;
HIGH:
    mov.u32 %r0, 2;
JOIN:
    add.s32 %r0, %r0, 100;
"""
    assert list(run(body, engine)) == [102 if n >= 16 else 121 - 10 * (n % 2) for n in range(32)]


def test_scoped_labels_of_inline_assembly(engine: str) -> None:
    start = "    mov.u32 %r0, 0;\n    and.b32 %r1, %tid, 1;\n"
    one = """
    {
    .reg .pred p;
    setp.eq.s32 p, %r1, 0;
    @p bra DONE;
    add.s32 %r0, %r0, 1;
DONE:
    }
"""
    assert list(run(start + one + one, engine)) == [0, 2] * 16


@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("bfly.b32 %r0|%p0, %r1, 5", lambda n: n ^ 5),
        ("idx.b32 %r0|%p0, %r1, %r2", lambda n: (n * 7) & 31),
        ("down.b32 %r0|%p0, %r1, 3", lambda n: n + 3 if n + 3 < 32 else n),
    ],
)
def test_shuffles(shuffle: str, source: object, engine: str) -> None:
    body = f"    mul.lo.s32 %r1, %tid, 3;\n    mul.lo.s32 %r2, %tid, 7;\n    shfl.sync.{shuffle}, 31, -1;\n"
    assert list(run(body, engine)) == [3 * source(n) for n in range(32)]  # type: ignore[operator]


def test_shuffle_up_and_its_predicate(engine: str) -> None:
    body = """
    shfl.sync.up.b32 %r1|%p0, %tid, 2, 0, -1;
    selp.b32 %r0, %r1, 99, %p0;
"""
    assert list(run(body, engine)) == [99, 99, *range(30)]


def test_votes_and_ballot(engine: str) -> None:
    body = """
    setp.gt.u32 %p0, %tid, 29;
    vote.sync.any.pred %p1, %p0, -1;
    vote.sync.all.pred %p2, %p0, -1;
    vote.sync.ballot.b32 %r0, %p0, -1;
    selp.b32 %r1, 1, 0, %p1;
    selp.b32 %r2, 2, 0, %p2;
    add.s32 %r0, %r0, %r1;
    add.s32 %r0, %r0, %r2;
"""
    assert set(run(body, engine)) == {0xC0000001}


def test_election_takes_the_lowest_lane(engine: str) -> None:
    body = """
    mov.u32 %r0, 7;
    elect.sync %r1|%p0, -1;
    @%p0 mov.u32 %r0, 1;
    add.s32 %r0, %r0, %r1;
"""
    assert list(run(body, engine)) == [1] + [7] * 31


def test_collective_without_all_lanes_never_runs(engine: str) -> None:
    body = """
    setp.lt.u32 %p0, %tid, 16;
    @%p0 bra WAIT;
    mov.u32 %r0, 1;
SPIN:
    bra SPIN2;
WAIT:
    shfl.sync.bfly.b32 %r0, %tid, 1, 31, -1;
    bra END;
SPIN2:
    bar.sync 1, 64;
END:
"""
    engine_or_skip(engine)
    with pytest.raises(EmulatorError) as caught:
        run(body, engine)
    assert caught.value.kind in ("divergence", "deadlock")


def test_guarded_collective_of_some_lanes(engine: str) -> None:
    engine_or_skip(engine)
    with pytest.raises(EmulatorError) as caught:
        run("    setp.lt.u32 %p0, %tid, 16;\n    @%p0 shfl.sync.bfly.b32 %r0, %tid, 1, 31, -1;\n", engine)
    assert caught.value.kind == "divergence"


def test_lanes_that_left_do_not_count(engine: str) -> None:
    engine_or_skip(engine)
    out = aligned(np.zeros(32, np.uint32))
    body = """
    setp.gt.u32 %p0, %tid, 7;
    @%p0 ret;
    vote.sync.ballot.b32 %r0, %p0, -1;
    add.s32 %r0, %r0, 5;
"""
    execute(kernel(body + STORE), [out], engine)
    assert list(out) == [5] * 8 + [0] * 24


def test_trap_and_endless_loop(engine: str) -> None:
    engine_or_skip(engine)
    with pytest.raises(EmulatorError) as caught:
        run("    setp.eq.s32 %p0, %tid, 3;\n    @%p0 trap;\n", engine)
    assert caught.value.kind == "trap"


@pytest.mark.parametrize("value", [-1, 1, 0])
def test_predicate_constants_are_true_or_false(value: int, engine: str) -> None:
    body = f"    mov.u32 %r0, 7;\n    mov.pred %p0, {value};\n    @%p0 mov.u32 %r0, 1;\n"
    assert set(run(body, engine)) == ({1} if value else {7})


@pytest.mark.parametrize(
    ("comparison", "holds"),
    [
        ("lt.s16", lambda n: n - 16 < 3),
        ("gt.u16", lambda n: (n - 16) & 0xFFFF > 3),
        ("eq.b16", lambda n: n - 16 == 3),
        ("lt.s32", lambda n: n - 16 < 3),
        ("hi.u32", lambda n: (n - 16) & 0xFFFFFFFF > 3),
        ("ge.s64", lambda n: n - 16 >= 3),
        ("lo.u64", lambda n: (n - 16) & (1 << 64) - 1 < 3),
    ],
)
def test_integer_comparisons(comparison: str, holds: object, engine: str) -> None:
    register = {"16": "%h0", "32": "%r2", "64": "%d5"}[comparison[-2:]]
    body = f"""
    sub.s32 %r2, %tid, 16;
    cvt.u16.u32 %h0, %r2;
    cvt.s64.s32 %d5, %r2;
    setp.{comparison} %p0|%p1, {register}, 3;
    selp.b32 %r0, 1, 0, %p0;
    selp.b32 %r1, 2, 0, %p1;
    add.s32 %r0, %r0, %r1;
"""
    assert list(run(body, engine)) == [1 if holds(n) else 2 for n in range(32)]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("comparison", "holds"),
    [
        ("lt", [1, 0, 0, 0]), ("ge", [0, 1, 1, 0]), ("ne", [1, 0, 1, 0]), ("ltu", [1, 0, 0, 1]),
        ("equ", [0, 1, 0, 1]), ("neu", [1, 0, 1, 1]), ("num", [1, 1, 1, 0]), ("nan", [0, 0, 0, 1]),
    ],
)  # fmt: skip
def test_float_comparisons(comparison: str, holds: list[int], engine: str) -> None:
    body = f"""
    and.b32 %r1, %tid, 3;
    mov.b32 %r2, 0f7FC00000;
    setp.eq.s32 %p1, %r1, 0;
    @%p1 mov.b32 %r2, 0fBF800000;
    setp.eq.s32 %p1, %r1, 1;
    @%p1 mov.b32 %r2, 0f80000000;
    setp.eq.s32 %p1, %r1, 2;
    @%p1 mov.b32 %r2, 0f7F800000;
    setp.{comparison}.f32 %p0, %r2, 0f00000000;
    selp.b32 %r0, 1, 0, %p0;
"""
    assert list(run(body, engine)) == holds * 8


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
def test_a_comparison_combined_with_its_own_destination(combine: str, engine: str) -> None:
    body = f"""
    and.b32 %r1, %tid, 1;
    setp.eq.s32 %p1, %r1, 0;
    setp.lt.{combine}.u32 %p1|%p2, %tid, 5, %p1;
    selp.b32 %r0, 1, 0, %p1;
    selp.b32 %r1, 2, 0, %p2;
    add.s32 %r0, %r0, %r1;
"""
    of = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}[combine]
    wanted = [of(n < 5, n % 2 == 0) + 2 * of(n >= 5, n % 2 == 0) for n in range(32)]
    assert list(run(body, engine)) == wanted
