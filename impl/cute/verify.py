"""Fused verify, plain: 128 threads a CTA do everything; any strides, both layouts of conv rows.

Persistent CTAs take items (a head of a row) by tickets. Per item: convolve and roll, put probes
and sums (``impl.cute.window``), multiply with the state page, solve, store. The page of the next
item, brought by tensor copies, is on its way from the moment the product has read this one's.

Nothing is read or written before the dependency wait. A row's state, the record positions and
columns past its tokens, and everything of a null row but its outputs stay as they are.
"""

from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute

from impl.cute import paging
from impl.cute.compile import Variant
from impl.cute.device import (
    address,
    barrier,
    load_global,
    load_shared,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    sigmoid,
    start_later_kernels,
    store_shared,
    unpack_bf16,
    wait_for_earlier_kernels,
    widen_bf16,
)
from impl.cute.guarded import load_global_if, store_global_if, store_shared_if
from impl.cute.mma import ALIGNMENT, K, product
from impl.cute.paging import (
    Items,
    Space,
    TokenStore,
    allocate,
    announce,
    at,
    fake_arguments,
    fetch_page,
    null_row,
    page_copies,
)
from impl.cute.window import TAPS, Convolved, Window, convolve

THREADS = 128
_BOARD = 32
"""Bytes of a next item: its number, and what ``Items.find`` says of it."""


class Verify:
    """The kernel for an architecture, a window, a layout of conv rows and a dtype of taps."""

    def __init__(self, arch: str, window: int, *, token_major: bool, f32_taps: bool) -> None:
        self.window = Window(window)
        self.token_major, self.f32_taps = token_major, f32_taps
        self.product = product(arch, self.window.probes)

    def spaces(self) -> list[Space]:
        """Page, probes, the product's own, partial and total sums, betas, next items, mbarrier."""
        window = self.window
        return [
            Space(self.product.a_bytes, ALIGNMENT),
            Space(self.product.b_bytes, ALIGNMENT),
            Space(self.product.scratch_bytes, 128),
            Space(window.partial_bytes, 16),
            Space(window.total_bytes, 16),
            Space(32, 16),
            # Two next items: with null rows there is one barrier between reading one and writing the next.
            Space(2 * _BOARD, 16),
            Space(8, 8),
        ]

    @cute.jit
    def __call__(
        self,
        mixed_qkv: cute.Tensor,
        raw_gate: cute.Tensor,
        raw_beta: cute.Tensor,
        A_log: cute.Tensor,
        dt_bias: cute.Tensor,
        state: cute.Tensor,
        correction: cute.Tensor,
        key_gate: cute.Tensor,
        out: cute.Tensor,
        query_start_loc: cute.Tensor,
        state_indices: cute.Tensor,
        conv_state: cute.Tensor,
        conv_weight: cute.Tensor,
        num_accepted_tokens: cute.Tensor,
        counter: cute.Tensor,
        lower_bound: Float32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch at most ``ctas`` CTAs on tensors as the contract has them (sections 1.5, 1.7)."""
        atom, pages = page_copies(state, A_log.shape[0])
        inputs = (mixed_qkv, raw_gate, raw_beta, A_log, dt_bias, conv_state, conv_weight)
        outputs = (correction, key_gate, out)
        work = (query_start_loc, state_indices, num_accepted_tokens, counter)
        grid = cutlass.min(state_indices.shape[0] * A_log.shape[0], ctas)
        self.kernel(inputs, outputs, work, lower_bound, atom, pages).launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, inputs: Any, outputs: Any, work: Any, lower_bound: Float32, atom: Any, pages: Any):
        """Take items until there are none."""
        product, window = self.product, self.window
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        heads = inputs[3].shape[0]

        page, *places, bar = allocate(self.spaces())
        b, scratch, partials, totals, betas, announced = [address(each) for each in places]
        full = cute.recast_ptr(bar, dtype=Int64)

        product.setup(scratch, tid)
        if tid == 0:
            mbarrier_init(address(full), 1)
            mbarrier_init_fence()
        for i in cutlass.range_constexpr(product.b_bytes // (16 * THREADS)):
            store_shared(b + (i * THREADS + tid) * 16, (Uint32(0),) * 4)
        barrier()
        wait_for_earlier_kernels()

        items = Items(*work, heads, window.tokens)
        # Objects whose attributes are used in the loop would count as carried by it.
        last_item, take, look_ahead = items.count - 1, items.take, items.look_ahead
        fetch = partial(fetch_page, atom, pages, page, full)
        spaces = (address(page), b, scratch, partials, totals, betas)
        live = partial(self._live, inputs, outputs, lower_bound, spaces, address(full), look_ahead)
        item = cute.arch.block_idx()[0]
        slot, begin, count, accepted = items.find(item)
        turn, phase = Int32(0), Int32(0)
        if warp == 0 and slot > 0 and count > 0:
            fetch(slot, item % heads)
        while item <= last_item:
            row = item // heads
            head = item - row * heads
            ticket = take(tid)
            board = announced + turn * _BOARD
            if slot > 0 and count > 0:
                live(tid, row, head, slot, begin, count, accepted, phase, ticket, board)
                phase = phase ^ 1
            else:
                null_row(outputs[2], begin, count, head * K + tid, window.tokens)
                announce(board, look_ahead(ticket, tid), tid)
            barrier()
            item, slot, begin, count = load_shared(board, 4, Int32)
            (accepted,) = load_shared(board + 16, 1, Int32)
            turn = turn ^ 1
            if warp == 0 and item <= last_item and slot > 0 and count > 0:
                fetch(slot, item % heads)
        start_later_kernels()
        barrier()
        product.close(scratch, tid)

    @cute.jit
    def _live(
        self,
        inputs: Any,
        outputs: Any,
        lower_bound: Float32,
        spaces: Any,
        full: Int32,
        look_ahead: Any,
        tid: Int32,
        row: Int32,
        head: Int32,
        slot: Int32,
        begin: Int32,
        count: Int32,
        accepted: Int32,
        phase: Int32,
        ticket: Int32,
        board: Int32,
    ):
        """One item of a live row that has tokens."""
        mixed_qkv, raw_gate, raw_beta, A_log, dt_bias, conv_state, conv_weight = inputs
        page, b, scratch, partials, totals, betas = spaces
        product, window = self.product, self.window
        Q, width = window.tokens, A_log.shape[0] * K
        place = head * K + tid

        raw = [
            [load_global_if(at(mixed_qkv, begin + t, j * width + place), t, count) for t in range(Q)]
            for j in range(3)
        ]
        gates = [load_global_if(at(raw_gate, begin + t, place), t, count) for t in range(Q)]
        beta = load_global_if(at(raw_beta, begin + tid, head), tid, count)
        taps = [load_taps(conv_weight, j * width + place, self.f32_taps) for j in range(3)]
        columns = [partial(self._column, conv_state, slot, j * width + place) for j in range(3)]
        history = [
            [load_global(column(accepted - 1 + i), 1, Uint16)[0] for i in range(TAPS - 1)]
            for column in columns
        ]
        (bias,) = load_global(at(dt_bias, place), 1, Float32)
        (a_log,) = load_global(at(A_log, head), 1, Float32)

        convolved: list[Convolved] = []
        for j in cutlass.range_constexpr(3):
            convolved.append(convolve(history[j], raw[j], taps[j], exact_products=self.f32_taps))
            for i in cutlass.range_constexpr(TAPS - 2):
                store_global_if(columns[j](i), history[j][1 + i], 0, 1)
            for t in cutlass.range_constexpr(Q):
                store_global_if(columns[j](TAPS - 2 + t), raw[j][t], t, count)
        q, k, v = convolved
        window.put(product, b, partials, tid, gates, bias, a_log, lower_bound, k, q)
        store_shared_if(betas + tid * 4, sigmoid(widen_bf16(beta)), tid, Q)
        product.publish()
        barrier()

        mbarrier_wait(full, phase)
        flight = product.issue(page, b, scratch, tid)
        ahead = look_ahead(ticket, tid)
        store = TokenStore(*outputs, row, head, begin, count, tid)
        store.records(k.bits, gates)
        window.add_sums(partials, totals, tid)
        rates = load_shared(betas, 4, Float32) + (load_shared(betas + 16, 4, Float32) if Q > 4 else ())
        announce(board, ahead, tid)
        projections = product.rows(flight, scratch, tid, phase)
        window.solve(totals, tid, projections, v.values, rates, store.result)

    def _column(self, conv_state: cute.Tensor, slot: Int32, channel: Int32, column: Any) -> Int64:
        """The address of a channel's column in a slot's conv row."""
        inner = (column, channel) if self.token_major else (channel, column)
        return at(conv_state, slot, *inner)


@cute.jit
def load_taps(weight: cute.Tensor, channel: Int32, wide: cutlass.Constexpr) -> Any:
    """A channel's four taps; ``wide``: fp32, otherwise bf16."""
    taps = cute.make_rmem_tensor((TAPS,), Float32)
    if weight.stride[0] % TAPS == 0:
        start = at(weight, channel, 0)
        if cutlass.const_expr(wide):
            for i, tap in enumerate(load_global(start, TAPS, Float32)):
                taps[i] = tap
        else:
            for i, word in enumerate(load_global(start, 2, Uint32)):
                taps[2 * i], taps[2 * i + 1] = unpack_bf16(word)
    else:
        for i in cutlass.range_constexpr(TAPS):
            (tap,) = load_global(at(weight, channel, i), 1, Float32 if wide else Uint16)
            taps[i] = tap if wide else widen_bf16(tap)
    return taps


def make(variant: Variant, options: str) -> Any:
    """Compile a variant."""
    return cute.compile(_kernel(variant), *fake_arguments(f32_taps=variant["f32_taps"]), options=options)


def shared_bytes(variant: Variant) -> int:
    """Shared memory of a CTA."""
    return paging.shared_bytes(_kernel(variant).spaces())


def _kernel(variant: Variant) -> Verify:
    return Verify(
        variant.arch, variant.window, token_major=variant["token_major"], f32_taps=variant["f32_taps"]
    )
