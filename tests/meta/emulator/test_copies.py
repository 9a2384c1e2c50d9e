"""Bulk copies, tensor copies, cp.async and matrix fragments: bytes, completion, fences, alignment."""

import itertools

import numpy as np
import pytest

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Schedule
from tests.meta.emulator.ptx import EAGER, ENGINES, SCHEDULES, aligned, engine_or_skip, execute, kernel

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)

START = """
    mov.u32 %r0, smem;
    setp.ne.b32 %p0, %tid, 0;
    @%p0 bra READY;
    mbarrier.init.shared::cta.b64 [%r0], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""
WAIT = """{
    .reg .pred p;
TRY:
    mbarrier.try_wait.parity.shared::cta.b64 p, [%r0], 0;
    @p bra DONE;
    bra TRY;
DONE:
    }"""
LOAD = (
    START
    + """
    @%p0 bra WAITING;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], {expected};
    add.s32 %r1, %r0, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%buf0+{offset}], {size}, [%r0];
WAITING:
    {wait}
    shl.b32 %r2, %tid, 2;
    add.s32 %r2, %r2, %r0;
    ld.shared.b32 %r3, [%r2+128];
    mul.wide.u32 %d0, %tid, 4;
    add.s64 %d1, %buf1, %d0;
    st.global.b32 [%d1], %r3;
"""
)


def load(engine: str, schedule: Schedule = EAGER, **change: object) -> np.ndarray:
    engine_or_skip(engine)
    fields = {"expected": 128, "offset": 64, "size": 128, "wait": WAIT} | change
    source, out = aligned(np.arange(64, dtype=np.uint32)), aligned(np.zeros(64, np.uint32))
    body = LOAD.format(**fields)
    execute(
        kernel(body, buffers=2, threads=64), [source, out], engine, threads=64, shared=512, schedule=schedule
    )
    return out


def load_error(engine: str, schedule: Schedule = EAGER, **change: object) -> EmulatorError:
    with pytest.raises(EmulatorError) as caught:
        load(engine, schedule, **change)
    return caught.value


@each_engine
@each_schedule
def test_bulk_load(schedule: Schedule, engine: str) -> None:
    assert list(load(engine, schedule)[:32]) == list(range(16, 48))


@each_engine
@each_schedule
def test_reading_before_the_bytes_are_waited_for(schedule: Schedule, engine: str) -> None:
    assert load_error(engine, schedule, wait="").kind == "race"


@each_engine
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"expected": 144}, "deadlock"),
        ({"offset": 8}, "misaligned"),
        ({"size": 120, "expected": 120}, "misaligned"),
        ({"offset": 144}, "bounds"),
        ({"size": 512, "expected": 512, "offset": 0}, "bounds"),
    ],
)
def test_bulk_loads_that_cannot_be(change: dict[str, int], kind: str, engine: str) -> None:
    assert load_error(engine, EAGER, **change).kind == kind


INIT = "    mbarrier.init.shared::cta.b64 [%r0], 1;\n"
SHOW = "    fence.mbarrier_init.release.cluster;\n"
PROXY = "    fence.proxy.async.shared::cta;\n"
SYNC = "READY:\n    bar.sync 0;\n"
SECOND = "    setp.eq.s32 %p1, %warp, 0;\n    @%p1 bra GO;\n" + SHOW + "GO:\n    bar.sync 0;\n"


@each_engine
@each_schedule
@pytest.mark.parametrize(
    ("start", "kind"),
    [
        pytest.param(INIT + PROXY + SYNC, "", id="proxy fence"),
        pytest.param(INIT + SYNC + PROXY, "", id="proxy fence of who copies"),
        pytest.param(INIT + SHOW + INIT + SYNC, "proxy", id="made again"),
        pytest.param(INIT + SYNC, "proxy", id="no fence"),
        pytest.param(SHOW + PROXY + INIT + SYNC, "proxy", id="too early"),
        pytest.param(INIT + SYNC + SECOND, "proxy", id="of another warp"),
    ],
)
def test_copies_complete_on_an_mbarrier_that_a_fence_has_shown(
    start: str, kind: str, schedule: Schedule, engine: str
) -> None:
    engine_or_skip(engine)
    assert START.endswith(INIT + SHOW + SYNC)
    body = LOAD.replace(INIT + SHOW + SYNC, start).format(expected=128, offset=64, size=128, wait=WAIT)
    arrays = [aligned(np.arange(64, dtype=np.uint32)), aligned(np.zeros(64, np.uint32))]
    text = kernel(body, buffers=2, threads=64)
    if not kind:
        execute(text, arrays, engine, threads=64, shared=512, schedule=schedule)
        assert list(arrays[1][:32]) == list(range(16, 48))
        return
    missing = r"with no fence\.mbarrier_init nor fence\.proxy\.async"
    with pytest.raises(EmulatorError, match=missing) as caught:
        execute(text, arrays, engine, threads=64, shared=512, schedule=schedule)
    assert caught.value.kind == kind


STORE = (
    START
    + """
    shl.b32 %r2, %tid, 2;
    add.s32 %r2, %r2, %r0;
    st.shared.b32 [%r2+128], %tid;
    {fence}
    {barrier}
    @%p0 bra OUT;
    add.s32 %r1, %r0, 128;
    cp.async.bulk.global.shared::cta.bulk_group [%buf0], [%r1], 256;
    cp.async.bulk.commit_group;
    {wait}
    {then}
OUT:
"""
)
FENCE = "fence.proxy.async.shared::cta;"


def store(engine: str, schedule: Schedule = EAGER, **change: str) -> np.ndarray:
    engine_or_skip(engine)
    fields = {"fence": FENCE, "barrier": "bar.sync 0;", "wait": "cp.async.bulk.wait_group 0;", "then": ""}
    out = aligned(np.zeros(64, np.uint32))
    body = STORE.format(**(fields | change))
    execute(kernel(body, threads=64), [out], engine, threads=64, shared=512, schedule=schedule)
    return out


@each_engine
@each_schedule
def test_bulk_store(schedule: Schedule, engine: str) -> None:
    assert list(store(engine, schedule)) == list(range(64))


@each_engine
@each_schedule
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"fence": ""}, "proxy"),
        ({"barrier": ""}, "race"),
        ({"wait": ""}, "bulk"),
        ({"wait": "", "then": "st.shared.b32 [%r0+128], 0;\ncp.async.bulk.wait_group 0;"}, "race"),
    ],
)
def test_bulk_stores_out_of_order(change: dict[str, str], kind: str, schedule: Schedule, engine: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        store(engine, schedule, **change)
    assert caught.value.kind == kind, caught.value


@each_engine
@each_schedule
def test_shared_memory_may_be_written_once_a_store_has_read_it(schedule: Schedule, engine: str) -> None:
    change = {"wait": "cp.async.bulk.wait_group.read 0;", "then": "st.shared.b32 [%r0+128], 7;"}
    assert list(store(engine, schedule, **change)) == list(range(64))


@each_engine
def test_a_fence_after_the_barrier_serves_too(engine: str) -> None:
    assert list(store(engine, fence="", barrier=f"bar.sync 0;\n    {FENCE}")) == list(range(64))


def tensor_map(array: np.ndarray, strides: tuple[int, ...], dims: tuple[int, ...], box: tuple[int, ...],
               swizzle: int, fill: bool = False) -> bytes:  # fmt: skip
    """The 128 bytes of a bf16 map; ``strides`` are bytes from the second dimension on."""
    words = np.zeros(32, np.uint32)
    base = array.ctypes.data
    words[0], words[1] = base & 0xFFFFFFFF, base >> 32
    words[2] = (len(dims) - 1) << 4 | 10 << 7 | swizzle << 13 | int(fill) << 15
    for i, stride in enumerate(strides):
        words[3 + i] = stride // 16 & 0xFFFFFFFF
        words[7] |= (stride // 16 >> 32) << 4 * i
    words[8 : 8 + len(dims)] = [d - 1 for d in dims]
    words[13] |= (box[0] - 1) << 24
    for i, size in enumerate(box[1:]):
        words[14] |= (size - 1) << 8 * i
    return words.tobytes()


TENSOR = """
.version 8.8
.target sm_90a
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 x, .param .u32 y)
.reqntid 32, 1, 1
{{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %d<8>;
    mov.u32 %r9, %tid.x;
    setp.ne.b32 %p0, %r9, 0;
    mov.u32 %r8, smem;
    add.s32 %r0, %r8, {bytes};
    @%p0 bra READY;
    mbarrier.init.shared::cta.b64 [%r0], 1;
    fence.mbarrier_init.release.cluster;
    ld.param.u32 %r1, [x];
    ld.param.u32 %r2, [y];
    mov.b64 %d0, map;
    cvta.param.u64 %d0, %d0;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], {bytes};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r8], [%d0, {{%r1, %r2}}], [%r0];
READY:
    bar.sync 0;
    {wait}
    ld.param.u64 %d1, [out];
    mov.u32 %r3, %r9;
COPY:
    setp.ge.u32 %p1, %r3, {words};
    @%p1 bra OUT;
    shl.b32 %r4, %r3, 2;
    mul.wide.u32 %d2, %r3, 4;
    add.s64 %d2, %d2, %d1;
    add.s32 %r4, %r4, %r8;
    ld.shared.b32 %r5, [%r4];
    st.global.b32 [%d2], %r5;
    add.s32 %r3, %r3, 32;
    bra COPY;
OUT:
    ret;
}}
"""
SPANS = {0: 0, 1: 32, 2: 64, 3: 128}


def tensor_copy(
    box: tuple[int, int], swizzle: int, x: int, y: int, engine: str, fill: bool = False, *, deep: bool = False
) -> None:
    """Copy a box of a [24, 80] tensor (pitch 96), compare the shared image; ``deep``: 5 dimensions."""
    from impl.cute.emulator.launch import Allocation, Launch
    from impl.cute.emulator.program import Program
    from impl.cute.emulator.run import run

    engine_or_skip(engine)
    source = aligned(np.arange(24 * 96, dtype=np.uint16))
    pitch = max(box[0] * 2, SPANS[swizzle])
    size = box[0] * box[1] * 2
    span = -(-pitch * box[1] // 1024) * 1024
    out = aligned(np.zeros(span // 4, np.uint32))
    raw = tensor_map(source, (192,), (80, 24), box, swizzle, fill)
    if deep:
        raw = tensor_map(source, (192,) * 4, (80, 24, 1, 1, 1), (*box, 256, 256, 16), swizzle, fill)
    params = raw + np.uint64(out.ctypes.data).tobytes() + np.array([x, y], np.int32).tobytes()
    text = TENSOR.format(bytes=span, words=span // 4, wait=WAIT).replace(f"[%r0], {span};", f"[%r0], {size};")
    if deep:
        text = text.replace("tensor.2d", "tensor.5d").replace("{%r1, %r2}", "{%r1, %r2, %r2, %r2, %r2}")
    allocations = (
        Allocation("source", source.ctypes.data, source.nbytes, writable=False),
        Allocation("out", out.ctypes.data, out.nbytes),
    )
    run(Program.parse(text), Launch((1, 1, 1), (32, 1, 1), span + 64, params, allocations), engine)
    wanted = np.full(span // 2, 0xFFFF, np.uint16)
    # The swizzle acts on shared addresses; dynamic shared memory starts on 1024 bytes.
    for row, column in itertools.product(range(box[1]), range(box[0])):
        at = row * pitch + column * 2
        mask = {0: 0, 1: 1, 2: 3, 3: 7}[swizzle]
        at ^= (at >> 7 & mask) << 4
        inside = 0 <= x + column < 80 and 0 <= y + row < 24
        wanted[at // 2] = source[(y + row) * 96 + x + column] if inside else (0x7FF7 if fill else 0)
    assert (out.view(np.uint16) == wanted).all()


@each_engine
@pytest.mark.parametrize(
    ("box", "swizzle"), [((64, 8), 3), ((16, 8), 1), ((32, 8), 2), ((8, 16), 0), ((16, 4), 3)]
)
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 5), (72, 20), (-8, -3), (80, 0), (0, 24)])
def test_tensor_copy(box: tuple[int, int], swizzle: int, x: int, y: int, engine: str) -> None:
    tensor_copy(box, swizzle, x, y, engine)


@each_engine
def test_tensor_copy_fills_with_nan(engine: str) -> None:
    tensor_copy((64, 8), 3, 40, 20, engine, fill=True)


@each_engine
@pytest.mark.parametrize("x", [1, 4, -4])
def test_first_coordinate_must_be_16_bytes(x: int, engine: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        tensor_copy((64, 8), 3, x, 0, engine)
    assert caught.value.kind == "tensor-map"


@each_engine
def test_swizzle_narrower_than_the_box(engine: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        tensor_copy((64, 8), 2, 0, 0, engine)
    assert caught.value.kind == "tensor-map"


ASYNC = """
    mov.u32 %r0, smem;
    mul.wide.u32 %d0, %tid, 16;
    add.s64 %d1, %buf0, %d0;
    shl.b32 %r1, %tid, 4;
    add.s32 %r1, %r1, %r0;
    mov.u32 %r2, 12;
    cp.async.cg.shared.global [%r1], [%d1], 16{source};
    cp.async.commit_group;
    {wait}
    {barrier}
    xor.b32 %r3, %tid, 37;
    shl.b32 %r3, %r3, 4;
    add.s32 %r3, %r3, %r0;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3];
    add.s64 %d2, %buf1, %d0;
    st.global.v4.b32 [%d2], {{%r4, %r5, %r6, %r7}};
"""


def copy_async(engine: str, schedule: Schedule = EAGER, **change: str) -> tuple[np.ndarray, np.ndarray]:
    engine_or_skip(engine)
    fields = {"source": "", "wait": "cp.async.wait_group 0;", "barrier": "bar.sync 0;"} | change
    source, out = aligned(np.arange(256, dtype=np.uint32) + 1), aligned(np.zeros(256, np.uint32))
    text = kernel(ASYNC.format(**fields), buffers=2, threads=64)
    execute(text, [source, out], engine, threads=64, shared=1024, schedule=schedule)
    return source.reshape(64, 4), out.reshape(64, 4)


@each_engine
@each_schedule
def test_cp_async(schedule: Schedule, engine: str) -> None:
    source, out = copy_async(engine, schedule)
    assert (out == source[np.arange(64) ^ 37]).all()


@each_engine
def test_cp_async_fills_with_zero(engine: str) -> None:
    source, out = copy_async(engine, source=", %r2")
    assert (out[:, :3] == source[np.arange(64) ^ 37, :3]).all()
    assert not out[:, 3].any()


@each_engine
@each_schedule
@pytest.mark.parametrize("change", [{"wait": ""}, {"barrier": ""}, {"wait": "cp.async.wait_group 1;"}])
def test_cp_async_needs_wait_and_barrier(change: dict[str, str], schedule: Schedule, engine: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        copy_async(engine, schedule, **change)
    assert caught.value.kind == "race"


MATRIX = """
    mov.u32 %r0, smem;
    shl.b32 %r1, %lane, 4;
    add.s32 %r1, %r1, %r0;
    mul.wide.u32 %d0, %tid, 16;
    add.s64 %d1, %buf0, %d0;
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d1];
    st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{load}.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r1];
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4{store}.shared.b16 [%r1], {{%r2, %r3, %r4, %r5}};
    bar.warp.sync -1;
    ld.shared.v4.b32 {{%r6, %r7, %r8, %r9}}, [%r1];
    add.s64 %d2, %buf1, %d0;
    st.global.v4.b32 [%d2], {{%r6, %r7, %r8, %r9}};
    add.s64 %d3, %buf2, %d0;
    st.global.v4.b32 [%d3], {{%r2, %r3, %r4, %r5}};
"""


@each_engine
@pytest.mark.parametrize(("load_", "store_"), list(itertools.product(("", ".trans"), repeat=2)))
def test_matrix_fragments(load_: str, store_: str, engine: str) -> None:
    engine_or_skip(engine)
    source = aligned(np.arange(256, dtype=np.uint16))
    out, fragments = aligned(np.zeros(256, np.uint16)), aligned(np.zeros(256, np.uint16))
    text = kernel(MATRIX.format(load=load_, store=store_), buffers=3)
    execute(text, [source, out, fragments], engine, shared=512)
    matrices = source.reshape(4, 8, 8)
    held = matrices.transpose(0, 2, 1) if load_ else matrices
    lanes = fragments.reshape(32, 4, 2)
    for lane, m, half in itertools.product(range(32), range(4), range(2)):
        assert lanes[lane, m, half] == held[m, lane // 4, 2 * (lane % 4) + half]
    assert (out.reshape(4, 8, 8) == (held.transpose(0, 2, 1) if store_ else held)).all()


@each_engine
def test_a_box_of_four_gigabytes_is_out_of_bounds(engine: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        tensor_copy((8, 256), 0, 0, 0, engine, deep=True)
    assert caught.value.kind == "bounds"
