"""The product of a state page with a window's probes on tensor cores: what Hopper and Blackwell share.

D [128 rows, columns] = A [128 rows, 128 k] (B_high + B_low)[columns, 128 k]^T in fp32, where B's
fp32 values are split into two bf16 halves. Both halves are columns of one product, so A is read
once, and are added when D is read. Calls of the 128 threads of warps 0 to 3, in this order:

    setup; barrier of the CTA; per product (put; publish; barrier; issue; other work; rows); close

Between ``rows`` of one product and ``put`` of the next that reuses B, or whatever overwrites A,
lies a barrier of the 128 threads (or an mbarrier that each of the 4 warps arrives at): a warp's
``rows`` says nothing of what other warps still read.

Both operands lie K-major in shared memory, in two halves of 64 k with the 128-byte swizzle, as a
tensor copy of a box of 64 k writes them. The matrix descriptors differ in their version alone.
"""

from typing import Any, ClassVar

from cutlass import Float32, Int32, Uint16, Uint32, Uint64

from impl.cute.device import asm, fence_async, widen_bf16

ROWS = 128
"""Value channels of a head: rows of a state page, threads that take part, rows of the product."""
K = 128
"""Key channels of a head."""
HALF = 64
"""Key channels of a box: 128 bytes, the span of the swizzle."""
STEPS = 8
"""Steps of 16 k that an instruction multiplies."""
ALIGNMENT = 1024
"""Of both operands in shared memory, in bytes: the swizzle's period."""
_GROUP = 1024
"""Bytes of 8 rows of 128 bytes."""


class Product:
    """Layout and descriptors. ``probes`` columns are used, of 8 or 16 that there are."""

    version: ClassVar[int]
    """Of matrix descriptors, in bit 46."""

    def __init__(self, probes: int) -> None:
        self.columns = 8 if probes <= 8 else 16
        self.b_rows = 2 * self.columns
        self.a_bytes = ROWS * K * 2
        self.b_bytes = self.b_rows * K * 2

    @staticmethod
    def _offset(row: Any, k: Any, rows: int) -> Any:
        return (k >> 6) * (rows * 2 * HALF) + row * (2 * HALF) + (((k & 63) * 2) ^ ((row & 7) * 16))

    def a_offset(self, row: Any, k: Any) -> Any:
        """Bytes from A's start to the state's element; 8 channels from a multiple of 8 are contiguous."""
        return self._offset(row, k, ROWS)

    def put(self, b: Int32, column: int, k: Int32, value: Float32) -> None:
        """Store channel ``k`` of a probe as its high and low halves: two stores of two bytes."""
        high = narrow_bf16(value)
        low = narrow_bf16(value - widen_bf16(high))
        at = b + self._offset(column, k, self.b_rows)
        store_half(at, high)
        store_half(at + self.columns * 2 * HALF, low)

    def publish(self) -> None:
        """Make what this thread put visible to the tensor cores; a barrier must follow."""
        fence_async()

    def _descriptor(self, at: Int32, groups: int = 1) -> Uint64:
        """``groups`` is how many groups of 8 rows lie from one that is read to the next."""
        swizzled, leading, stride = 1 << 62, 1 << 16, (groups * _GROUP // 16) << 32
        fixed = swizzled | leading | stride | self.version << 46
        return (Uint64(Uint32(at) & Uint32(0x3FFFF)) >> 4) | Uint64(fixed)

    def _steps(self) -> list[tuple[int, int]]:
        """What each step adds to the descriptors of A and B, in units of 16 bytes."""

        def of(rows: int, step: int) -> int:
            return step // 4 * (rows * 2 * HALF // 16) + step % 4 * 2

        return [(of(ROWS, step), of(self.b_rows, step)) for step in range(STEPS)]


def narrow_bf16(value: Float32) -> Uint16:
    """A value rounded to bf16, as bits."""
    return asm("cvt.rn.bf16.f32 $0, $1;", "=h,f", (value,), (Uint16,), memory=False)


def store_half(at: Int32, bits: Uint16) -> None:
    """Two bytes at a shared address."""
    asm("st.shared.b16 [$0], $1;", "r,h", (at, bits))


def product(arch: str, probes: int) -> Product:
    """The product for an architecture (sm_90a, sm_100a or another sm_10x) and 1 to 16 probes."""
    from impl.cute.mma_sm90 import Wgmma
    from impl.cute.mma_sm100 import Tcgen05

    if arch == "sm_90a":
        return Wgmma(probes)
    if arch.startswith("sm_10"):
        return Tcgen05(probes)
    raise ValueError(f"verify needs tensor cores of sm_90a or sm_10x; found {arch}")
