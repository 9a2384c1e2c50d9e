"""Fused verify, warp-specialised: one warp fetches, four compute; conv rows dim-first, rows of 16 bytes.

Warp 4 takes items (a head of a row) by tickets and brings everything an item needs: activations,
conv rows, taps and bias by bulk copies into one of two stages, the state page by tensor copies
into one buffer. Warps 0 to 3 convolve and roll in shared memory, put probes and sums
(``impl.cute.window``), multiply, solve and store; rolled conv rows go back by bulk copies.

While an item is solved, the next one's page and inputs arrive. mbarriers, each with the phase of
the stage's or page's turn:

    filled[s]   stage s holds an item's inputs, or the item is null, or there are no more
    freed[s]    the four warps are done with stage s, its rolled rows are read
    loaded      the page and the item's betas are there
    multiplied  the four warps have their rows of the product: page, probes and sums may be overwritten

Nothing is read or written before the dependency wait. Guarantees are those of ``impl.cute.verify``;
columns of a conv row past a row's tokens are stored back as they were loaded.
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
    barrier_warp,
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait_read,
    load_global,
    load_shared,
    mbarrier_arrive,
    mbarrier_expect,
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
from impl.cute.guarded import load_global_if, load_shared_if, store_shared_if
from impl.cute.mma import ALIGNMENT, K, product, store_half
from impl.cute.paging import (
    Items,
    Space,
    TokenStore,
    allocate,
    at,
    fake_arguments,
    fetch_page,
    null_row,
    page_copies,
)
from impl.cute.window import TAPS, Window, convolve, from_lane

COMPUTE = 128
THREADS = COMPUTE + 32
_END, _NULL, _LIVE = range(3)
"""What an item is that a stage describes."""
_ROW = K * 2
"""Bytes of 128 bf16 values."""
_STAGES = 2
_MULTIPLIERS = 1
"""Number of the four warps' barrier."""


class Stage:
    """Offsets in bytes of an item's inputs in a stage."""

    def __init__(self, window: int, *, f32_taps: bool) -> None:
        self.tap_bytes = 4 if f32_taps else 2
        self.columns = window + TAPS - 2
        self.conv_row = self.columns * 2
        self.conv_plane = K * self.conv_row
        self.taps_plane = K * TAPS * self.tap_bytes
        self.conv = window * 4 * _ROW  # behind a q, k, v and gate of every token
        self.taps = self.conv + 3 * self.conv_plane
        self.bias = self.taps + 3 * self.taps_plane
        self.facts = self.bias + K * 4
        """Kind, row, head, first token, number of tokens, accepted count, slot, nothing."""
        self.betas = self.facts + 32
        self.bytes = -(-(self.betas + 32) // 128) * 128
        self.fixed = 3 * (self.conv_plane + self.taps_plane) + K * 4
        """Bytes that bulk copies bring, beside the tokens'."""


class VerifyWs:
    """The kernel for an architecture, a window and a dtype of taps."""

    def __init__(self, arch: str, window: int, *, f32_taps: bool) -> None:
        self.window = Window(window)
        self.f32_taps = f32_taps
        self.product = product(arch, self.window.probes)
        self.stage = Stage(window, f32_taps=f32_taps)

    def spaces(self) -> list[Space]:
        """Page, probes, the product's own, stages, partial and total sums, mbarriers."""
        return [
            Space(self.product.a_bytes, ALIGNMENT),
            Space(self.product.b_bytes, ALIGNMENT),
            Space(self.product.scratch_bytes, 128),
            Space(self.stage.bytes * _STAGES, 128),
            Space(self.window.partial_bytes, 16),
            Space(self.window.total_bytes, 16),
            Space(8 * (2 * _STAGES + 1), 8),
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
        """Launch at most ``ctas`` CTAs on tensors that keep the rules of contract 1.7 for this path."""
        atom, pages = page_copies(state, A_log.shape[0])
        inputs = (mixed_qkv, raw_gate, raw_beta, dt_bias, conv_state, conv_weight)
        outputs = (correction, key_gate, out)
        work = (query_start_loc, state_indices, num_accepted_tokens, counter)
        grid = cutlass.min(state_indices.shape[0] * A_log.shape[0], ctas)
        self.kernel(inputs, outputs, work, conv_state, A_log, lower_bound, atom, pages).launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Any,
        outputs: Any,
        work: Any,
        conv_state: cute.Tensor,
        A_log: cute.Tensor,
        lower_bound: Float32,
        atom: Any,
        pages: Any,
    ):
        """Set shared memory up, and part."""
        product = self.product
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        page, *places, bar = allocate(self.spaces())
        b, scratch, stages, partials, totals, filled = [address(each) for each in places]
        loaded = cute.recast_ptr(bar, dtype=Int64)
        freed = filled + 8 * _STAGES
        multiplied = freed + 8 * _STAGES

        product.setup(scratch, tid)
        if tid == 0:
            for i in cutlass.range_constexpr(_STAGES):
                mbarrier_init(filled + 8 * i, 1)
                mbarrier_init(freed + 8 * i, COMPUTE // 32)
            mbarrier_init(address(loaded), 1)
            mbarrier_init(multiplied, COMPUTE // 32)
            mbarrier_init_fence()
        if tid < COMPUTE:
            for i in cutlass.range_constexpr(product.b_bytes // (16 * COMPUTE)):
                store_shared(b + (i * COMPUTE + tid) * 16, (Uint32(0),) * 4)
        barrier()
        wait_for_earlier_kernels()
        if warp == COMPUTE // 32:
            fetch = partial(fetch_page, atom, pages, page, loaded)
            self._produce(inputs, work, A_log.shape[0], stages, filled, freed, multiplied, fetch)
        else:
            spaces = (address(page), b, scratch, partials, totals, stages)
            bars = (filled, freed, address(loaded), multiplied)
            self._compute(outputs, conv_state, A_log, lower_bound, spaces, bars, tid)
        start_later_kernels()
        barrier()
        product.close(scratch, tid)

    @cute.jit
    def _produce(
        self,
        inputs: Any,
        work: Any,
        heads: Int32,
        stages: Int32,
        filled: Int32,
        freed: Int32,
        multiplied: Int32,
        fetch: Any,
    ):
        """The fetching warp."""
        raw_beta = inputs[2]
        layout = self.stage
        lane = cute.arch.lane_idx()
        items = Items(*work, heads, self.window.tokens)
        # Objects whose attributes are used in the loop would count as carried by it.
        last_item, take, look_ahead = items.count - 1, items.take, items.look_ahead
        copy_inputs = partial(self._copy_inputs, inputs, heads)
        item = cute.arch.block_idx()[0]
        slot, begin, count, accepted = items.find(item)
        turn, pages = Int32(0), Int32(0)
        while item <= last_item:
            row = item // heads
            head = item - row * heads
            ticket = take(lane)
            if count > 0:
                s = turn & 1
                stage, full = stages + s * layout.bytes, filled + 8 * s
                beta = load_global_if(at(raw_beta, begin + lane, head), lane, count)
                mbarrier_wait(freed + 8 * s, ((turn >> 1) & 1) ^ 1)
                if lane == 0:
                    kind = Int32(_NULL)
                    if slot > 0:
                        kind = Int32(_LIVE)
                    store_shared(stage + layout.facts, (kind, row, head, begin))
                    store_shared(stage + layout.facts + 16, (count, accepted, slot, Int32(0)))
                    if slot > 0:
                        mbarrier_expect(full, count * (4 * _ROW) + layout.fixed)
                    else:
                        mbarrier_arrive(full)
                barrier_warp()
                if slot > 0:
                    copy_inputs(stage, full, lane, slot, head, begin, count)
                    store_shared_if(stage + layout.betas + lane * 4, sigmoid(widen_bf16(beta)), lane, 8)
                    mbarrier_wait(multiplied, (pages & 1) ^ 1)
                    barrier_warp()
                    fetch(slot, head)
                    pages = pages + 1
                turn = turn + 1
            item, slot, begin, count, accepted = [from_lane(x, 0) for x in look_ahead(ticket, lane)]
        s = turn & 1
        mbarrier_wait(freed + 8 * s, ((turn >> 1) & 1) ^ 1)
        if lane == 0:
            store_shared(stages + s * layout.bytes + layout.facts, (Int32(_END),) * 4)
            mbarrier_arrive(filled + 8 * s)

    @cute.jit
    def _copy_inputs(
        self,
        inputs: Any,
        heads: Int32,
        stage: Int32,
        full: Int32,
        lane: Int32,
        slot: Int32,
        head: Int32,
        begin: Int32,
        count: Int32,
    ):
        """Start an item's bulk copies: a q, k, v or gate row a lane; then conv rows, taps and bias."""
        mixed_qkv, raw_gate, _, dt_bias, conv_state, conv_weight = inputs
        layout, width = self.stage, heads * K
        plane = lane & 3
        token = begin + (lane >> 2)
        if lane < 4 * count:
            source = at(mixed_qkv, token, plane * width + head * K)
            if plane == 3:
                source = at(raw_gate, token, head * K)
            bulk_load(stage + lane * _ROW, source, _ROW, full)
        if lane < 3:
            channel = lane * width + head * K
            source = at(conv_state, slot, channel)
            bulk_load(stage + layout.conv + lane * layout.conv_plane, source, layout.conv_plane, full)
            source = at(conv_weight, channel)
            bulk_load(stage + layout.taps + lane * layout.taps_plane, source, layout.taps_plane, full)
        if lane == 3:
            bulk_load(stage + layout.bias, at(dt_bias, head * K), K * 4, full)

    @cute.jit
    def _compute(
        self,
        outputs: Any,
        conv_state: cute.Tensor,
        A_log: cute.Tensor,
        lower_bound: Float32,
        spaces: Any,
        bars: Any,
        tid: Int32,
    ):
        """The four computing warps."""
        filled, freed = bars[0], bars[1]
        layout, tokens, stages = self.stage, self.window.tokens, spaces[5]
        live = partial(self._live, outputs, conv_state, A_log, lower_bound, spaces, bars, tid)
        turn, pages, kind = Int32(0), Int32(0), Int32(_NULL)
        while kind != _END:
            s = turn & 1
            stage = stages + s * layout.bytes
            mbarrier_wait(filled + 8 * s, (turn >> 1) & 1)
            kind, row, head, begin = load_shared(stage + layout.facts, 4, Int32)
            if kind == _LIVE:
                live(stage, row, head, begin, pages)
                pages = pages + 1
            if kind == _NULL:
                (count,) = load_shared(stage + layout.facts + 16, 1, Int32)
                null_row(outputs[2], begin, count, head * K + tid, tokens)
            barrier_warp()
            if tid & 31 == 0:
                mbarrier_arrive(freed + 8 * s)
            turn = turn + 1

    @cute.jit
    def _live(
        self,
        outputs: Any,
        conv_state: cute.Tensor,
        A_log: cute.Tensor,
        lower_bound: Float32,
        spaces: Any,
        bars: Any,
        tid: Int32,
        stage: Int32,
        row: Int32,
        head: Int32,
        begin: Int32,
        pages: Int32,
    ):
        """One item of a live row that has tokens."""
        page, b, scratch, partials, totals, _ = spaces
        _, _, loaded, multiplied = bars
        product, window, layout = self.product, self.window, self.stage
        Q, phase = window.tokens, pages & 1
        count, accepted, slot, _ = load_shared(stage + layout.facts + 16, 4, Int32)
        (a_log,) = load_global(at(A_log, head), 1, Float32)
        raw = [
            [load_shared_if(stage + (4 * t + j) * _ROW + tid * 2, t, count) for t in range(Q)]
            for j in range(4)
        ]
        gates = raw[3]
        (bias,) = load_shared(stage + layout.bias + tid * 4, 1, Float32)
        convolved = []
        for j in cutlass.range_constexpr(3):
            columns = stage + layout.conv + j * layout.conv_plane + tid * layout.conv_row
            history = [load_shared(columns + (accepted - 1 + i) * 2, 1, Uint16)[0] for i in range(TAPS - 1)]
            convolved.append(
                convolve(history, raw[j], self._taps(stage, j, tid), exact_products=self.f32_taps)
            )
            for i in cutlass.range_constexpr(TAPS - 2):
                store_half(columns + i * 2, history[1 + i])
            for t in cutlass.range_constexpr(Q):
                store_shared_if(columns + (TAPS - 2 + t) * 2, raw[j][t], t, count)
        q, k, v = convolved
        mbarrier_wait(multiplied, phase ^ 1)
        window.put(product, b, partials, tid, gates, bias, a_log, lower_bound, k, q)
        product.publish()
        barrier(_MULTIPLIERS, COMPUTE)
        if tid == 0:
            for j in cutlass.range_constexpr(3):
                to = at(conv_state, slot, (j * A_log.shape[0] + head) * K)
                bulk_store(to, stage + layout.conv + j * layout.conv_plane, layout.conv_plane)
            bulk_commit()

        mbarrier_wait(loaded, phase)
        flight = product.issue(page, b, scratch, tid)
        store = TokenStore(*outputs, row, head, begin, count, tid)
        store.records(k.bits, gates)
        window.add_sums(partials, totals, tid)
        betas = stage + layout.betas
        rates = load_shared(betas, 4, Float32) + (load_shared(betas + 16, 4, Float32) if Q > 4 else ())
        projections = product.rows(flight, scratch, tid, phase)
        barrier_warp()
        if tid & 31 == 0:
            mbarrier_arrive(multiplied)
        window.solve(totals, tid, projections, v.values, rates, store.result)
        if tid == 0:
            bulk_wait_read()

    def _taps(self, stage: Int32, plane: int, channel: Int32) -> tuple[Float32, ...]:
        size = TAPS * self.stage.tap_bytes
        start = stage + self.stage.taps + plane * self.stage.taps_plane + channel * size
        if self.f32_taps:
            return load_shared(start, TAPS, Float32)
        low, high = load_shared(start, 2, Uint32)
        return (*unpack_bf16(low), *unpack_bf16(high))


def make(variant: Variant, options: str) -> Any:
    """Compile a variant."""
    return cute.compile(_kernel(variant), *fake_arguments(f32_taps=variant["f32_taps"]), options=options)


def shared_bytes(variant: Variant) -> int:
    """Shared memory of a CTA."""
    return paging.shared_bytes(_kernel(variant).spaces())


def _kernel(variant: Variant) -> VerifyWs:
    return VerifyWs(variant.arch, variant.window, f32_taps=variant["f32_taps"])
