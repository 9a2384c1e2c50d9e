"""Loads and stores: what arrives, and every access that memory does not allow, by name, line and warp."""

import numpy as np
import pytest

from impl.cute.emulator.errors import EmulatorError
from tests.meta.emulator.ptx import ENGINES, aligned, engine_or_skip, execute, kernel

pytestmark = pytest.mark.parametrize("engine", ENGINES)


def words(count: int = 64) -> np.ndarray:
    return aligned(np.arange(count, dtype=np.uint32) * 0x01010101)


def fails(kind: str, body: str, engine: str, **options: object) -> EmulatorError:
    """The error of a kernel that must fail so."""
    engine_or_skip(engine)
    arrays = options.pop("arrays", None) or [words()]
    with pytest.raises(EmulatorError) as caught:
        execute(kernel(body, buffers=len(arrays)), arrays, engine, **options)  # type: ignore[arg-type]
    assert caught.value.kind == kind, caught.value
    assert caught.value.line > 0
    assert caught.value.source
    assert caught.value.cta == (0, 0, 0)
    return caught.value


def at(offset: str = "4") -> str:
    return f"    mul.wide.u32 %d0, %tid, {offset};\n    add.s64 %d1, %buf0, %d0;\n"


def test_vectors_narrow_loads_and_dropped_elements(engine: str) -> None:
    engine_or_skip(engine)
    source, out = words(128), aligned(np.zeros(32 * 6, np.uint64))
    body = (
        at("16")
        + """
    ld.global.v4.b32 {%r0, _, %r2, %r3}, [%d1];
    ld.global.b16 %r4, [%d1+6];
    ld.global.s32 %d3, [%d1+12];
    mul.wide.u32 %d4, %tid, 48;
    add.s64 %d4, %buf1, %d4;
    cvt.u64.u32 %d5, %r0;
    st.global.b64 [%d4], %d5;
    cvt.u64.u32 %d5, %r3;
    st.global.b64 [%d4+8], %d5;
    cvt.u64.u32 %d5, %r4;
    st.global.b64 [%d4+16], %d5;
    st.global.b64 [%d4+24], %d3;
    st.global.v2.b32 [%d4+32], {%r2, %r0};
    st.global.b16 [%d4+40], %r3;
"""
    )
    execute(kernel(body, buffers=2), [source, out], engine)
    for lane, row in enumerate(out.reshape(32, 6)):
        a, b, c, d = (int(x) for x in source[4 * lane : 4 * lane + 4])
        wide = d if d < 1 << 31 else d | 0xFFFFFFFF << 32
        assert [int(x) for x in row] == [a, d, b >> 16, wide, c | a << 32, d & 0xFFFF]


def test_read_past_the_end(engine: str) -> None:
    error = fails("bounds", at() + "    ld.global.b32 %r0, [%d1+132];", engine)
    assert "buffer0" in error.text


def test_read_below_the_start(engine: str) -> None:
    fails("bounds", at() + "    ld.global.b32 %r0, [%d1+-4];", engine)


def test_vector_that_straddles_the_end(engine: str) -> None:
    arrays = [aligned(np.zeros(129, np.uint32))]
    fails("bounds", at("16") + "    ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d1+16];", engine, arrays=arrays)


def test_masked_lanes_may_point_anywhere(engine: str) -> None:
    engine_or_skip(engine)
    data = words()
    body = (
        at()
        + """
    setp.lt.u32 %p0, %tid, 16;
    @%p0 ld.global.b32 %r0, [%d1+192];
    @%p0 add.s32 %r0, %r0, 1;
    @%p0 st.global.b32 [%d1+192], %r0;
"""
    )
    before = data.copy()
    execute(kernel(body), [data], engine)
    assert (data[48:] == before[48:] + 1).all()
    assert (data[:48] == before[:48]).all()


@pytest.mark.parametrize(
    ("access", "offset"), [("b32", 2), ("b16", 1), ("v2.b32", 4), ("v4.b32", 8), ("b64", 4)]
)
def test_misaligned(access: str, offset: int, engine: str) -> None:
    to = {"b32": "%r0", "b16": "%h0", "v2.b32": "{%r0, %r1}", "v4.b32": "{%r0, %r1, %r2, %r3}", "b64": "%d3"}
    fails("misaligned", f"    ld.global.{access} {to[access]}, [%buf0+{offset}];", engine)


def test_store_to_an_input(engine: str) -> None:
    error = fails("read-only", at() + "    st.global.b32 [%d1], %tid;", engine, read_only=[0])
    assert "buffer0" in error.text


def test_atomics_hand_out_tickets(engine: str) -> None:
    engine_or_skip(engine)
    counter, out = aligned(np.zeros(1, np.uint32)), aligned(np.zeros(128, np.uint32))
    body = """
    atom.relaxed.gpu.global.add.u32 %r0, [%buf0], 1;
    mad.lo.s32 %r1, %cta, 64, %tid;
    mul.wide.u32 %d0, %r1, 4;
    add.s64 %d1, %buf1, %d0;
    st.global.b32 [%d1], %r0;
"""
    execute(kernel(body, buffers=2, threads=64), [counter, out], engine, grid=2, threads=64)
    assert counter[0] == 128
    assert sorted(out) == list(range(128))


def test_compare_and_swap_and_exchange(engine: str) -> None:
    engine_or_skip(engine)
    data = aligned(np.array([5, 7], np.uint32))
    body = """
    setp.eq.s32 %p0, %tid, 3;
    @%p0 atom.global.cas.b32 %r0, [%buf0], 5, 9;
    @%p0 atom.global.exch.b32 %r1, [%buf0+4], %r0;
"""
    execute(kernel(body), [data], engine)
    assert list(data) == [9, 5]


def test_shared_memory_starts_as_poison(engine: str) -> None:
    engine_or_skip(engine)
    data = words()
    body = at() + "    mov.u32 %r0, smem;\n    ld.shared.b32 %r1, [%r0+64];\n    st.global.b32 [%d1], %r1;\n"
    execute(kernel(body), [data], engine, shared=128)
    assert np.isnan(data[:32].view(np.float32)).all()


@pytest.mark.parametrize("offset", [-4, 128])
def test_shared_bounds(offset: int, engine: str) -> None:
    fails("bounds", f"    mov.u32 %r0, smem;\n    ld.shared.b32 %r1, [%r0+{offset}];", engine, shared=128)


def test_shared_misaligned(engine: str) -> None:
    fails(
        "misaligned", "    mov.u32 %r0, smem;\n    ld.shared.v2.b32 {%r1, %r2}, [%r0+4];", engine, shared=128
    )


def test_reads_before_the_dependency_wait_are_reported(engine: str) -> None:
    engine_or_skip(engine)
    data, out = words(), words()
    body = (
        at()
        + """
    ld.global.b32 %r0, [%d1];
    griddepcontrol.wait;
    add.s64 %d2, %buf1, %d0;
    ld.global.b32 %r1, [%d2];
    st.global.b32 [%d2], %r0;
"""
    )
    report = execute(kernel(body, buffers=2), [data, out], engine)
    assert dict(report.early) == {"buffer0": (32, 0)}


def test_knowing_of_the_dependency_passes_through_a_barrier(engine: str) -> None:
    engine_or_skip(engine)
    data = words()
    body = """
    setp.ne.b32 %p0, %warp, 0;
    @%p0 bra OTHER;
    griddepcontrol.wait;
OTHER:
    bar.sync 0;
    mul.wide.u32 %d0, %tid, 4;
    add.s64 %d1, %buf0, %d0;
    ld.global.b32 %r0, [%d1];
"""
    report = execute(kernel(body, threads=64), [data], engine, threads=64)
    assert not report.early
