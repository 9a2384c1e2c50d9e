"""tcgen05: products against a scalar sum, tensor memory's rules, fences and commits that must be there."""

import numpy as np
import pytest

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Schedule
from tests.meta.emulator.ptx import EAGER, ENGINES, SCHEDULES, aligned, engine_or_skip, execute, kernel
from tests.meta.emulator.test_hopper import swizzled

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
N = 16
A_BYTES, B_BYTES = 32768, N * 256
ROWS = 1 << 4 | 1 << 7 | 1 << 10 | (N >> 3) << 17 | 8 << 24
"""Instruction descriptor: f32 += bf16 x bf16, N columns, 128 rows."""
DESCRIPTOR = 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61
"""K-major, 128-byte swizzle, groups of 8 rows 1024 bytes apart."""
TRY = """{{
    .reg .pred p;
TRY:
    mbarrier.try_wait.parity.shared::cta.b64 p, [%r10], {parity};
    @p bra DONE;
    bra TRY;
DONE:
    }}"""

COPY = f"""
    mov.u32 %r0, smem;
    add.s32 %r10, %r0, {A_BYTES + B_BYTES};
    mul.lo.s32 %r1, %tid, 16;
    add.s32 %r1, %r1, %r0;
    mul.wide.u32 %d0, %tid, 16;
    add.s64 %d1, %buf0, %d0;
    mov.u32 %r2, 0;
COPY:
    ld.global.v4.b32 {{{{%r3, %r4, %r5, %r6}}}}, [%d1];
    st.shared.v4.b32 [%r1], {{{{%r3, %r4, %r5, %r6}}}};
    add.s32 %r1, %r1, 2048;
    add.s64 %d1, %d1, 2048;
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p0, %r2, {(A_BYTES + B_BYTES) // 2048};
    @%p0 bra COPY;
    setp.ne.b32 %p1, %warp, 0;
    @%p1 bra ALLOCATED;
    {{alloc}}
    setp.ne.b32 %p2, %lane, 0;
    @%p2 bra ALLOCATED;
    mbarrier.init.shared::cta.b64 [%r10], 1;
    fence.mbarrier_init.release.cluster;
ALLOCATED:
    {{proxy}}
    {{before}}
    bar.sync 0;
    {{after}}
    ld.shared.b32 %r11, [%r10+8];
"""
PRODUCT = """
    setp.ne.b32 %p3, %tid, 0;
    @%p3 bra ISSUED;
    setp.ne.b32 %p4, 0, 0;
    {mmas}
    {commit}
ISSUED:
    {wait}
    {fence}
    shl.b32 %r12, %warp, 21;
    add.s32 %r12, %r12, %r11;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {{%r16, %r17, %r18, %r19, %r20, %r21, %r22, %r23,
        %r24, %r25, %r26, %r27, %r28, %r29, %r30, %r31}}, [%r12{column}];
    {loaded}
    mul.wide.u32 %d4, %tid, 64;
    add.s64 %d4, %buf1, %d4;
    {stores}
    {again}
    {release}
"""
STORES = "\n".join(f"    st.global.b32 [%d4+{4 * i}], %r{16 + i};" for i in range(N))


def mmas(count: int = 8, idesc: int = ROWS, descriptor: int = DESCRIPTOR, first: str = "%p4") -> str:
    """The products of ``count`` steps of 16, issued by one thread."""
    lines = ["setp.eq.b32 %p5, 0, 0;"]
    for step in range(count):
        for name, base, span in (("%d2", 0, 16384), ("%d3", A_BYTES, N * 128)):
            lines += [
                f"add.s32 %r7, %r0, {base + step // 4 * span + step % 4 * 32};", "shr.u32 %r7, %r7, 4;",
                f"cvt.u64.u32 {name}, %r7;", f"or.b64 {name}, {name}, {descriptor};",
            ]  # fmt: skip
        predicate = first if step == 0 else "%p5"
        lines.append(f"tcgen05.mma.cta_group::1.kind::f16 [%r11], %d2, %d3, {idesc}, {predicate};")
    return "\n    ".join(lines)


FIELDS = {
    "alloc": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10+8], 32;\n"
    "    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "proxy": "fence.proxy.async.shared::cta;",
    "before": "tcgen05.fence::before_thread_sync;",
    "after": "tcgen05.fence::after_thread_sync;",
    "mmas": mmas(),
    "commit": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r10];",
    "wait": TRY.format(parity=0),
    "fence": "tcgen05.fence::after_thread_sync;",
    "column": "",
    "loaded": "tcgen05.wait::ld.sync.aligned;",
    "stores": STORES,
    "again": "",
    "release": """tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p1 bra OUT;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;
OUT:""",
}


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def run(engine: str, schedule: Schedule = EAGER, **change: str) -> tuple[np.ndarray, ...]:
    engine_or_skip(engine)
    rng = np.random.default_rng(3)
    a, b = bf16(rng.standard_normal((128, 128))), bf16(rng.standard_normal((N, 128)))
    image = aligned(np.concatenate((swizzled(a), swizzled(b))))
    out = aligned(np.zeros((128, N), np.float32))
    text = kernel((COPY + PRODUCT).format(**(FIELDS | change)), buffers=2, threads=128, target="sm_100a")
    execute(text, [image, out], engine, threads=128, shared=image.nbytes + 64, schedule=schedule)
    return wide(a), wide(b), out


def scalar_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Steps of 16: an exact-order fp64 sum, then the accumulator, rounded to fp32 once a step."""
    acc = np.zeros((128, N), np.float32)
    for m in range(128):
        for n in range(N):
            value = np.float32(0)
            for step in range(8):
                total = 0.0
                for k in range(16 * step, 16 * step + 16):
                    total += float(a[m, k]) * float(b[n, k])
                value = np.float32(total + float(value) if step else total)
            acc[m, n] = value
    return acc


@each_engine
@each_schedule
def test_product(schedule: Schedule, engine: str) -> None:
    a, b, out = run(engine, schedule)
    wanted = scalar_product(a, b)
    assert (out.view(np.uint32) == wanted.view(np.uint32)).all()


@each_engine
@each_schedule
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"proxy": ""}, ("proxy",)),
        ({"commit": ""}, ("deadlock",)),
        ({"wait": ""}, ("tensor-memory",)),
        ({"fence": ""}, ("tensor-memory",)),
        ({"wait": TRY.format(parity=1)}, ("tensor-memory",)),
    ],
    ids=["no proxy fence", "no commit", "no wait", "no fence after", "wrong parity"],
)
def test_missing_order(
    change: dict[str, str], kinds: tuple[str, ...], schedule: Schedule, engine: str
) -> None:
    with pytest.raises(EmulatorError) as caught:
        run(engine, schedule, **change)
    assert caught.value.kind in kinds, caught.value


SECOND = """
    {before}
    bar.sync 0;
    {after}
    @%p3 bra AGAIN;
    {mmas}
    {commit}
AGAIN:
"""


@each_engine
@each_schedule
@pytest.mark.parametrize(
    ("before", "after", "sound"),
    [
        ("tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;", True),
        ("", "tcgen05.fence::after_thread_sync;", False),
        ("tcgen05.fence::before_thread_sync;", "", False),
    ],
)
def test_next_product_must_not_overtake_the_loads(
    before: str, after: str, sound: bool, schedule: Schedule, engine: str
) -> None:
    again = SECOND.format(before=before, after=after, mmas=mmas(), commit=FIELDS["commit"])
    again += TRY.replace("TRY", "TRY2").replace("DONE", "DONE2").format(parity=1)
    change = {"again": again, "release": "tcgen05.fence::after_thread_sync;\n" + FIELDS["release"]}
    if sound:
        run(engine, schedule, **change)
        return
    with pytest.raises(EmulatorError) as caught:
        run(engine, schedule, **change)
    assert caught.value.kind == "tensor-memory"


@each_engine
@each_schedule
@pytest.mark.parametrize(
    "fence", ["tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n", "bar.sync 0;\n"]
)
def test_columns_must_not_be_given_back_too_early(fence: str, schedule: Schedule, engine: str) -> None:
    release = FIELDS["release"].replace(fence, "\n", 1)
    assert release != FIELDS["release"]
    with pytest.raises(EmulatorError) as caught:
        run(engine, schedule, release=release)
    assert caught.value.kind == "tensor-memory", caught.value


@each_engine
def test_values_arrive_with_the_wait_for_them(engine: str) -> None:
    *_, out = run(engine, loaded="", stores=STORES + "\n    tcgen05.wait::ld.sync.aligned;")
    assert np.isnan(out).all()


@each_engine
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"release": ""}, "tensor-memory"),
        ({"column": "+32"}, "tensor-memory"),
        ({"column": "+2097152"}, "tensor-memory"),
        ({"alloc": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10+8], 48;"}, "tensor-memory"),
        ({"mmas": mmas(idesc=ROWS | 1 << 13)}, "descriptor"),
        ({"mmas": mmas(idesc=ROWS + (1 << 24))}, "descriptor"),
        ({"mmas": mmas(idesc=ROWS ^ 3 << 7)}, "descriptor"),
        ({"mmas": mmas(descriptor=DESCRIPTOR ^ 1 << 46)}, "descriptor"),
        ({"mmas": mmas(descriptor=DESCRIPTOR | 1 << 49)}, "descriptor"),
        ({"mmas": mmas(descriptor=DESCRIPTOR + (4096 << 32))}, "bounds"),
    ],
)
def test_what_hardware_would_not_take(change: dict[str, str], kind: str, engine: str) -> None:
    with pytest.raises(EmulatorError) as caught:
        run(engine, EAGER, **change)
    assert caught.value.kind == kind, caught.value


@each_engine
def test_first_step_accumulates_onto_poison(engine: str) -> None:
    *_, out = run(engine, mmas=mmas(first="%p5"))
    assert np.isnan(out).all()


@each_engine
def test_wrong_stride_of_row_groups_reads_other_rows(engine: str) -> None:
    a, b, out = run(engine, mmas=mmas(descriptor=DESCRIPTOR - (64 << 32) + (32 << 32)))
    assert not np.array_equal(out, scalar_product(a, b))
