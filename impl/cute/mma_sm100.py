"""The product on Blackwell: tcgen05, its result in tensor memory."""

from typing import ClassVar

from cutlass import Float32, Int32, Uint32, cute

from impl.cute.device import asm, load_shared, mbarrier_init, mbarrier_init_fence, mbarrier_wait, registers
from impl.cute.mma import ROWS, Product

_TMEM_COLUMNS = 32
"""Allocated: the fewest that there are."""


class Tcgen05(Product):
    """One M128 product per step, issued by warp 0. ``scratch``: an mbarrier, then tensor memory's address."""

    version: ClassVar[int] = 1

    def __init__(self, probes: int) -> None:
        super().__init__(probes)
        self.scratch_bytes = 16

    @cute.jit
    def setup(self, scratch: Int32, tid: Int32) -> None:
        """Allocate tensor memory; a barrier of the CTA must follow."""
        if tid < 32:
            asm(
                f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {_TMEM_COLUMNS};"
                " tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
                "r",
                (scratch + 8,),
            )
        if tid == 0:
            mbarrier_init(scratch, 1)
            mbarrier_init_fence()
        asm("tcgen05.fence::before_thread_sync;", "")

    @cute.jit
    def close(self, scratch: Int32, tid: Int32) -> None:
        """Give tensor memory back, after a barrier of the CTA."""
        if tid < 32:
            (tmem,) = load_shared(scratch + 8)
            code = "tcgen05.fence::after_thread_sync; "
            code += f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {_TMEM_COLUMNS};"
            asm(code, "r", (tmem,))

    @cute.jit
    def issue(self, a: Int32, b: Int32, scratch: Int32, tid: Int32) -> tuple[Float32, ...]:
        """Start the product. Nothing is carried to ``rows``."""
        if tid < 32:
            self._start(a, b, scratch)
        return ()

    def _start(self, a: Int32, b: Int32, scratch: Int32) -> None:
        (tmem,) = load_shared(scratch + 8)
        # fp32 sums of bf16 products, both operands K-major.
        kind = 1 << 4 | 1 << 7 | 1 << 10 | (self.b_rows >> 3) << 17 | (ROWS >> 4) << 24
        code = "{ .reg .pred more, first, one; .reg .b64 da, db; "
        code += "setp.eq.b32 more, 0, 0; setp.ne.b32 first, 0, 0; "
        code += "tcgen05.fence::after_thread_sync; elect.sync _|one, 0xffffffff; "
        for step, (in_a, in_b) in enumerate(self._steps()):
            code += f"add.s64 da, $1, {in_a}; add.s64 db, $2, {in_b}; "
            into = "more" if step else "first"
            code += f"@one tcgen05.mma.cta_group::1.kind::f16 [$0], da, db, $3, {into}; "
        code += "@one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$4]; }"
        asm(code, "r,l,l,r,r", (tmem, self._descriptor(a), self._descriptor(b), Uint32(kind), scratch))

    def rows(
        self, flight: tuple[Float32, ...], scratch: Int32, tid: Int32, phase: Int32
    ) -> tuple[Float32, ...]:
        """Wait; all columns of row ``tid``. ``phase`` is the parity of the number of products before."""
        mbarrier_wait(scratch, phase)
        (tmem,) = load_shared(scratch + 8)
        n = self.b_rows
        code = "tcgen05.fence::after_thread_sync; "
        code += f"tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {registers(n)}, [${n}]; "
        code += "tcgen05.wait::ld.sync.aligned; tcgen05.fence::before_thread_sync;"
        quarter = Uint32(tid >> 5) << 21
        d = asm(code, ",".join(["=f"] * n + ["r"]), (tmem + quarter,), (Float32,) * n)
        return tuple(d[i] + d[i + self.columns] for i in range(self.columns))
