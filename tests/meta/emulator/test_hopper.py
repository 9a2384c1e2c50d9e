"""The emulator against what a Hopper GPU (H200, sm_90a) answered: scalar operations and warpgroup products.

The data are our own measurements: inputs and the GPU's answers, bit for bit.
"""

from pathlib import Path

import numpy as np
import pytest

from impl.cute.emulator.launch import Schedule
from tests.meta.emulator.ptx import ENGINES, aligned, engine_or_skip, execute, kernel

DATA = Path(__file__).parent / "data"
STEPS, SPAN = 8, 16384


@pytest.mark.parametrize("engine", ENGINES)
def test_103_scalar_operations_are_bit_identical(engine: str) -> None:
    engine_or_skip(engine)
    data = np.load(DATA / "hopper_ops.npz")
    got = np.zeros_like(data["answers"])
    arrays = [aligned(data["w"]), aligned(data["x"]), aligned(got), aligned(np.zeros(16, np.uint8))]
    text = (DATA / "hopper_ops.ptx").read_text()
    execute(text, arrays, engine, grid=len(data["w"]) // 128, threads=128, functions="exact-sm90")
    equal = (arrays[2] == data["answers"]).all(1)
    assert len(equal) == 103
    assert equal.all(), list(data["names"][~equal])


def test_correct_rounding_is_not_what_a_gpu_does() -> None:
    data = np.load(DATA / "hopper_ops.npz")
    arrays = [aligned(data["w"]), aligned(data["x"]), aligned(np.zeros_like(data["answers"]))]
    arrays.append(aligned(np.zeros(16, np.uint8)))
    text = (DATA / "hopper_ops.ptx").read_text()
    execute(text, arrays, "reference", grid=len(data["w"]) // 128, threads=128, functions="rounded")
    differ = {str(name) for name in data["names"][(arrays[2] != data["answers"]).any(1)]}
    assert differ
    assert all(any(word in name for word in ("ex2", "rsqrt", "div", "exp")) for name in differ), differ


def bf16_split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp32 as bf16 bits of its high part and of what that leaves."""

    def rounded(y: np.ndarray) -> np.ndarray:
        u = y.view(np.uint32).astype(np.uint64)
        return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)

    high = rounded(x)
    return high, rounded(x - (high.astype(np.uint32) << 16).view(np.float32))


def swizzled(rows: np.ndarray) -> np.ndarray:
    """bf16 bits [R, 128] as two halves of 64 columns, K-major, 128-byte swizzle: bytes in shared memory."""
    count = len(rows)
    image = np.zeros((2, count * 64), np.uint16)
    r, k = np.meshgrid(np.arange(count), np.arange(64), indexing="ij")
    at = r * 128 + k * 2
    at = (at ^ ((at >> 7 & 7) << 4)) // 2
    for half in range(2):
        image[half, at] = rows[:, 64 * half : 64 * half + 64]
    return image.ravel()


def product_kernel(n: int, chains: int) -> str:
    """Copy A (32 KB) and B to shared memory; two m64 products of ``n`` columns, each operand B in turn.

    Thread t of product m stores its accumulator i at word (m * 128 + t) * n / 2 + i.
    """
    accumulators = n // 2
    b_bytes = 2 * n * 128 * chains
    lines = [
        f"""
    mov.u32 %r0, smem;
    mul.lo.s32 %r1, %tid, 16;
    add.s32 %r1, %r1, %r0;
    mul.wide.u32 %d0, %tid, 16;
    add.s64 %d1, %buf0, %d0;
    mov.u32 %r2, 0;
COPY:
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d1];
    st.shared.v4.b32 [%r1], {{%r3, %r4, %r5, %r6}};
    add.s32 %r1, %r1, 2048;
    add.s64 %d1, %d1, 2048;
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p0, %r2, {(32768 + b_bytes) // 2048};
    @%p0 bra COPY;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.b32 %p1, 0, 0;"""
    ]
    registers = ", ".join(f"%acc{i}" for i in range(accumulators))
    lines.append(f"    .reg .b32 %acc<{accumulators}>;")
    for m in range(2):
        lines += [f"    mov.b32 %acc{i}, 0;" for i in range(accumulators)]
        lines.append("    wgmma.fence.sync.aligned;")
        first = True
        for chain in range(chains):
            for step in range(STEPS):
                a = f"{m * 8192 + step // 4 * SPAN + step % 4 * 32}"
                b = f"{32768 + chain * n * 256 + step // 4 * n * 128 + step % 4 * 32}"
                for name, at in (("%d2", a), ("%d3", b)):
                    lines += [
                        f"    add.s32 %r7, %r0, {at};", "    shr.u32 %r7, %r7, 4;",
                        f"    cvt.u64.u32 {name}, %r7;",
                        f"    or.b64 {name}, {name}, {1 << 62 | 64 << 32 | 1 << 16};",
                    ]  # fmt: skip
                predicate = "%p1" if first else "%p2"
                if first:
                    lines.append("    setp.eq.b32 %p2, 0, 0;")
                first = False
                lines.append(
                    f"    wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{registers}}}, %d2, %d3, "
                    f"{predicate}, 1, 1, 0, 0;"
                )
        lines += ["    wgmma.commit_group.sync.aligned;", "    wgmma.wait_group.sync.aligned 0;"]
        lines += [
            f"    add.s32 %r8, %tid, {128 * m};", f"    mul.wide.u32 %d4, %r8, {accumulators * 4};",
            "    add.s64 %d4, %buf1, %d4;",
        ]  # fmt: skip
        lines += [f"    st.global.b32 [%d4+{4 * i}], %acc{i};" for i in range(accumulators)]
    return kernel("\n".join(lines), buffers=2, threads=128)


def run_product(a: np.ndarray, parts: list[np.ndarray], engine: str, schedule: Schedule) -> np.ndarray:
    """[128, n] fp32: A times each part in turn, all into one accumulator."""
    n = len(parts[0])
    image = aligned(np.concatenate([swizzled(a), *map(swizzled, parts)]))
    out = aligned(np.zeros(2 * 128 * n // 2, np.float32))
    execute(
        product_kernel(n, len(parts)),
        [image, out],
        engine,
        threads=128,
        shared=image.nbytes,
        schedule=schedule,
    )
    thread, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i >> 1 & 1)
    column = 8 * (i >> 2) + 2 * (thread % 4) + (i & 1)
    result = np.zeros((128, n), np.float32)
    for m in range(2):
        result[64 * m + row, column] = out.reshape(2, 128, n // 2)[m]
    return result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["wide", "hi_lo"])
def test_warpgroup_products_are_bit_identical(order: str, engine: str) -> None:
    engine_or_skip(engine)
    data = np.load(DATA / "hopper_wgmma.npz")
    schedules = [Schedule("eager"), Schedule("lazy"), Schedule("priority", 3)]
    for block, (a, b) in enumerate(zip(data["A"], data["B"], strict=True)):
        high, low = bf16_split(b)
        parts = [np.concatenate((high, low))] if order == "wide" else [high, low]
        got = run_product(a, parts, engine, schedules[block % 3])
        if order == "wide":
            with np.errstate(all="ignore"):
                got = got[:, :16] + got[:, 16:]
        wanted = data[order][block]
        same = (got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))
        assert same.all(), (block, int((~same).sum()))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_subnormal_factor_is_aligned_by_the_smallest_exponent(engine: str) -> None:
    """2**20 * 2**-133 counts as exponent 20 - 126, so 2**-135 beside it is cut off, as on an H200."""
    engine_or_skip(engine)
    a, b = np.zeros((128, 128), np.uint16), np.zeros((16, 128), np.uint16)
    a[0, :2] = (20 + 127) << 7, (127 - 60) << 7
    b[0, :2] = 1, (127 - 75) << 7
    b[1, 1] = (127 - 75) << 7
    got = run_product(a, [b], engine, Schedule("eager"))
    assert got[0, 0] == np.float32(2.0**-113)
    assert got[0, 1] == np.float32(2.0**-135)
