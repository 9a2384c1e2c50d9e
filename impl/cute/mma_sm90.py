"""The product on Hopper: wgmma, one group of four warps."""

from typing import Any, ClassVar

from cutlass import Float32, Int32

from impl.cute.device import asm, barrier_warp, load_shared, registers, store_shared
from impl.cute.mma import _GROUP, Product


class Wgmma(Product):
    """Two m64 products per step, on the even and on the odd groups of 8 rows of A.

    So warp w ends up with rows 32w to 32w + 31, and redistribution to one row a thread stays
    inside the warp. ``scratch`` holds a warp's rows meanwhile.
    """

    version: ClassVar[int] = 0

    def __init__(self, probes: int) -> None:
        super().__init__(probes)
        self.scratch_bytes = 128 * self.columns * 4

    def setup(self, scratch: Int32, tid: Int32) -> None:
        """Nothing is to be set up."""

    def close(self, scratch: Int32, tid: Int32) -> None:
        """Nothing is to be given back."""

    def issue(self, a: Int32, b: Int32, scratch: Int32, tid: Int32) -> tuple[Float32, ...]:
        """Start the product. The result is in flight: for ``rows`` alone."""
        n, each = self.b_rows, self.b_rows // 2
        code = "{ .reg .pred more, first; .reg .b64 da, db; setp.eq.b32 more, 0, 0; setp.ne.b32 first, 0, 0; "
        code += "wgmma.fence.sync.aligned; "
        for step, (in_a, in_b) in enumerate(self._steps()):
            for half in (0, 1):
                code += f"add.s64 da, ${n}, {in_a + half * _GROUP // 16}; add.s64 db, ${n + 1}, {in_b}; "
                code += f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 "
                code += f"{registers(each, each * half)}, da, db, {'more' if step else 'first'}, 1, 1, 0, 0; "
        code += "wgmma.commit_group.sync.aligned; }"
        operands = (self._descriptor(a, groups=2), self._descriptor(b))
        return asm(code, ",".join(["=f"] * n + ["l", "l"]), operands, (Float32,) * n)

    def rows(
        self, flight: tuple[Float32, ...], scratch: Int32, tid: Int32, phase: Int32
    ) -> tuple[Float32, ...]:
        """Wait; all columns of row ``tid``. ``phase`` does not matter here."""
        n = self.b_rows
        tied = ",".join(["=f"] * n + [str(i) for i in range(n)])
        d = asm("wgmma.wait_group.sync.aligned 0;", tied, flight, (Float32,) * n)
        # Registers of an m64 product: n / 2, those of the low halves' columns behind the others.
        each = n // 4
        halves = [d[n // 2 * m + i] + d[n // 2 * m + each + i] for m in (0, 1) for i in range(each)]
        return self._exchanged(halves, scratch, tid)

    def _exchanged(self, d: list[Float32], scratch: Int32, tid: Int32) -> tuple[Float32, ...]:
        """From fragments to rows. Lane 4q + p has, of rows 8j + q, columns 2p and 2p + 1 of every 8.

        16-byte chunks are xor-ed with the row so that neither side has bank conflicts.
        """
        lane = tid & 31
        q, p = lane >> 2, lane & 3
        chunks = self.columns // 4
        base = scratch + (tid >> 5) * (32 * self.columns * 4)

        def chunk(row: Any, c: Any) -> Any:
            turn = (row >> 2) & 1
            if chunks == 4:
                turn = turn | ((row >> 1) & 1) * 2
            return base + row * (self.columns * 4) + (c ^ turn) * 16

        barrier_warp()  # the warp has read what it exchanged before
        for j in range(4):
            for block in range(self.columns // 8):
                first = j % 2 * (self.columns // 2) + 4 * block + j // 2 * 2
                store_shared(chunk(q + 8 * j, (p >> 1) + 2 * block) + (p & 1) * 8, d[first : first + 2])
        barrier_warp()
        row: tuple[Float32, ...] = ()
        for c in range(chunks):
            row += load_shared(chunk(lane, Int32(c)), 4, Float32)
        return row
