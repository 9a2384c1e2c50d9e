"""KDA commit's fold in the CuTe DSL: accepted tokens into the SSM state of all layers, in one launch.

Contract 1.6, for a finished plan: with ``L_t`` the cumulative log decay and ``k^_t`` the normalised
recorded keys,

    S_n = S_0 e^{L_{n-1}} + sum_{t<n} u_t (k^_t e^{L_{n-1} - L_t})^T    -> final slot
    S_m the same for the first m tokens                                 -> boundary slot (align)

A CTA of 128 threads serves one (chunk of heads, row, layer). A head's state page and its records
arrive by bulk copy in one of two stages while the head before is folded; thread c makes key
channel c's factors, then 16 lanes fold a state row at a time in place, and one bulk copy stores
the page. K = V = 128, a bf16 state, SM90 or newer.

Guaranteed: nothing is read before earlier kernels of the stream are done; of a row's records
only the first n positions are read; all of a head's page is loaded before any of it is stored,
so the source may be the final or the boundary slot; bits do not depend on the chunk, on other
rows, nor on tokens past n (for S_m: past m). Not guaranteed: anything where a destination is
another row's source or destination.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from impl.cute.compile import Variant
from impl.cute.device import (
    LOG2_E,
    add,
    address,
    barrier,
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait_read,
    exp2,
    exponential,
    fence_async,
    fma,
    load_shared,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    multiply,
    pack_bf16,
    reciprocal_root,
    sigmoid,
    start_later_kernels,
    store_global,
    store_shared,
    unpack_bf16,
    wait_for_earlier_kernels,
    warp_sum,
    widen_bf16,
)

K = 128
"""Key and value channels of a head."""
THREADS = 128
NULL_SLOT = 0
_EPSILON = 1e-6
_ROW = K * 4
"""Bytes of 128 fp32 values, or of one token's bf16 key and gate."""
_STATE_ROW = K * 2
_PAGE = K * _STATE_ROW
_LANES = 16
"""Threads that share a state row, eight keys each."""
_GROUP_ROWS = K // (THREADS // _LANES)
"""Consecutive state rows that 16 lanes fold one after the other."""
_ROWS = 8
"""State rows that a thread has in registers at once."""


class Commit:
    """The kernel for windows of up to ``window`` tokens.

    ``by_slot``: a row's records lie at its source slot, not at its own number. ``align``: rows may
    have a boundary slot.
    """

    def __init__(self, window: int, *, by_slot: bool, align: bool) -> None:
        self.window, self.by_slot, self.align = window, by_slot, align

    @cute.jit
    def __call__(
        self,
        state_addrs: cute.Tensor,
        state_steps: cute.Tensor,
        u_addrs: cute.Tensor,
        u_steps: cute.Tensor,
        kg_addrs: cute.Tensor,
        kg_steps: cute.Tensor,
        a_log: cute.Tensor,
        bias: cute.Tensor,
        sources: cute.Tensor,
        lengths: cute.Tensor,
        finals: cute.Tensor,
        boundaries: cute.Tensor,
        boundary_lengths: cute.Tensor,
        lower_bound: Float32,
        chunk: Int32,
        stream: Any,
    ) -> None:
        """Launch it.

        Addresses and leading strides (elements) ``[L]`` int64; a_log ``[L, H]`` and bias ``[L, H, K]``
        fp32; the plan's vectors ``[N]`` int32; ``chunk`` heads a CTA.
        """
        layers, heads = a_log.shape
        grid = [(heads + chunk - 1) // chunk, lengths.shape[0], layers]
        self.kernel(
            state_addrs,
            state_steps,
            u_addrs,
            u_steps,
            kg_addrs,
            kg_steps,
            a_log,
            bias,
            sources,
            lengths,
            finals,
            boundaries,
            boundary_lengths,
            lower_bound,
            chunk,
        ).launch(grid=grid, block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        state_addrs: cute.Tensor,
        state_steps: cute.Tensor,
        u_addrs: cute.Tensor,
        u_steps: cute.Tensor,
        kg_addrs: cute.Tensor,
        kg_steps: cute.Tensor,
        a_log: cute.Tensor,
        bias: cute.Tensor,
        sources: cute.Tensor,
        lengths: cute.Tensor,
        finals: cute.Tensor,
        boundaries: cute.Tensor,
        boundary_lengths: cute.Tensor,
        lower_bound: Float32,
        chunk: Int32,
    ) -> None:
        """One chunk of heads of a row in a layer."""
        window: cutlass.Constexpr = self.window
        tid, _, _ = cute.arch.thread_idx()
        part, row, layer = cute.arch.block_idx()
        memory = cutlass.memory.SmemAllocator()
        stages = address(memory.allocate(2 * _stage_bytes(window), byte_alignment=128))
        norms = address(memory.allocate(4 * _padded(window) * 4, byte_alignment=16))
        # Per stage, whether its records have arrived, and its page.
        arrived = address(memory.allocate(4 * 8, byte_alignment=8))
        if tid == 0:
            for i in cutlass.range_constexpr(4):
                mbarrier_init(arrived + 8 * i, 1)
            mbarrier_init_fence()
        barrier()
        wait_for_earlier_kernels()
        start_later_kernels()

        n = lengths[row]
        source = Int64(sources[row])
        final = Int64(finals[row])
        m = Int32(0)
        boundary = Int64(NULL_SLOT)
        if cutlass.const_expr(self.align):
            m = boundary_lengths[row]
            boundary = Int64(boundaries[row])
        # Where boundary and final slot are one they get the same bits (m = n).
        crosses = (m > 0) & (boundary > NULL_SLOT) & (boundary != final)
        first = part * chunk
        record = source if cutlass.const_expr(self.by_slot) else Int64(row)
        step = state_steps[layer] * 2
        pages = state_addrs[layer] + Int64(first) * _PAGE
        records = Int64(first) * (window * _ROW)
        u_rows = u_addrs[layer] + record * u_steps[layer] * 4 + records
        kg_rows = kg_addrs[layer] + record * kg_steps[layer] * 2 + records
        if (n > 0) & (source > NULL_SLOT) & (final > NULL_SLOT):
            _fold_heads(
                stages,
                norms,
                arrived,
                pages + source * step,
                pages + final * step,
                pages + boundary * step,
                u_rows,
                kg_rows,
                a_log[layer, None],
                bias[layer, None, tid],
                first,
                min(chunk, a_log.shape[1] - first),
                n,
                m,
                crosses,
                lower_bound,
                tid,
                window,
                self.align,
            )


@cute.jit
def _fold_heads(
    stages: Int32,
    norms: Int32,
    arrived: Int32,
    source: Int64,
    final: Int64,
    boundary: Int64,
    u_rows: Int64,
    kg_rows: Int64,
    a_log: cute.Tensor,
    bias: cute.Tensor,
    first: Int32,
    count: Int32,
    n: Int32,
    m: Int32,
    crosses: cutlass.Boolean,
    lower_bound: Float32,
    tid: Int32,
    window: cutlass.Constexpr,
    align: cutlass.Constexpr,
) -> None:
    """Fold ``count`` heads; the addresses are those of the first one's pages and records."""
    if tid == 0:
        _fetch(stages, arrived, source, u_rows, kg_rows, n, window)
    # Decays are powers of two in here: their logarithms carry this factor.
    bound = multiply(lower_bound, Float32(LOG2_E))
    next_a, next_shift = a_log[first], bias[first]
    for i in cutlass.range(count, unroll=1):
        stage = stages + (i & 1) * _stage_bytes(window)
        ready = arrived + (i & 1) * 16
        parity = (i >> 1) & 1
        us = stage + _PAGE
        factors = us + window * _ROW
        a, shift = exponential(next_a), next_shift
        after = min(i + 1, count - 1)
        next_a, next_shift = a_log[first + after], bias[first + after]
        mbarrier_wait(ready, parity)
        keys, logs, total = _read_records(factors, n, a, shift, bound, tid, window)
        _sum_squares(norms, keys, tid, window)
        # From here on keys and gates are in registers, and their place is free.
        barrier()
        if (tid == 0) & (i < after):
            # The other stage's page has been folded; what stores it must have read it too.
            bulk_wait_read()
            records = Int64(after) * (window * _ROW)
            _fetch(
                stages + (after & 1) * _stage_bytes(window),
                arrived + (after & 1) * 16,
                source + Int64(after) * _PAGE,
                u_rows + records,
                kg_rows + records,
                n,
                window,
            )
        _normalise(keys, norms, window)
        here = Int64(i) * _PAGE
        if cutlass.const_expr(align):  # noqa: SIM102 (decided when compiled)
            if crosses:
                _write_factors(factors, keys, logs, _log_before(m, logs, window), tid, window)
                barrier()
                mbarrier_wait(ready + 8, parity)
                _fold(stage, factors, us, m, boundary + here, tid, window, False)
                barrier()
        _write_factors(factors, keys, logs, total, tid, window)
        barrier()
        mbarrier_wait(ready + 8, parity)
        _fold(stage, factors, us, n, final, tid, window, True)
        fence_async()
        barrier()
        if tid == 0:
            bulk_store(final + here, stage, _PAGE)
            bulk_commit()
    if tid == 0:
        bulk_wait_read()


def _padded(window: int) -> int:
    """Squared norms of a window, so that vectors of four can be read."""
    return (window + 3) // 4 * 4


def _stage_bytes(window: int) -> int:
    """A page, corrections, and the keys and gates, in whose place the factors go: one row more."""
    return _PAGE + window * _ROW + (window + 1) * _ROW


def _fetch(
    stage: Int32, ready: Int32, page: Int64, u_rows: Int64, kg_rows: Int64, n: Int32, window: int
) -> None:
    """Start loading a head's first n records and its page; one thread."""
    size = n * _ROW
    mbarrier_expect(ready, size * 2)
    bulk_load(stage + (_PAGE + window * _ROW), kg_rows, size, ready)
    bulk_load(stage + _PAGE, u_rows, size, ready)
    mbarrier_expect(ready + 8, _PAGE)
    bulk_load(stage, page, _PAGE, ready + 8)


def _read_records(
    records: Int32, n: Int32, a: Float32, shift: Float32, bound: Float32, tid: Int32, window: int
) -> tuple[cute.Tensor, cute.Tensor, Float32]:
    """Key channel ``tid``: raw keys, cumulative log decays, and the last of them. Zeros from n on."""
    keys = cute.make_rmem_tensor((window,), Float32)
    logs = cute.make_rmem_tensor((window,), Float32)
    total = Float32(0.0)
    for t in range(window):
        inside = n > t
        # What was never loaded is not read.
        at = records + cutlass.min(Int32(t), n - 1) * _ROW + tid * 2
        key = widen_bf16(load_shared(at, 1, Uint16)[0])
        gate = widen_bf16(load_shared(at + _STATE_ROW, 1, Uint16)[0])
        log = multiply(bound, sigmoid(multiply(a, add(gate, shift))))
        keys[t] = cutlass.select_(inside, key, Float32(0.0))
        total = cutlass.select_(inside, add(total, log), total)
        logs[t] = total
    return keys, logs, total


@cute.jit
def _sum_squares(norms: Int32, keys: cute.Tensor, tid: Int32, window: cutlass.Constexpr) -> None:
    """A warp's sum of squared keys of each token, for all to read after a barrier."""
    warp = tid // 32
    for t in cutlass.range_constexpr(window):
        squares = warp_sum(multiply(keys[t], keys[t]))
        if tid % 32 == 0:
            store_shared(norms + (warp * _padded(window) + t) * 4, [squares])


def _log_before(m: Int32, logs: cute.Tensor, window: int) -> Float32:
    """The cumulative log decay of the first m tokens, m > 0."""
    found = logs[0]
    for t in range(1, window):
        found = cutlass.select_(m > t, logs[t], found)
    return found


def _normalise(keys: cute.Tensor, norms: Int32, window: int) -> None:
    """Scale raw keys to length one, from each warp's sums of squares."""
    for first in range(0, window, 4):
        sums = [load_shared(norms + (w * _padded(window) + first) * 4, 4, Float32) for w in range(4)]
        for t in range(first, min(first + 4, window)):
            square = add(
                add(sums[0][t - first], sums[1][t - first]), add(sums[2][t - first], sums[3][t - first])
            )
            keys[t] = multiply(keys[t], reciprocal_root(add(square, Float32(_EPSILON))))


def _write_factors(
    factors: Int32, keys: cute.Tensor, logs: cute.Tensor, total: Float32, tid: Int32, window: int
) -> None:
    """Key channel ``tid``'s factor of each token, ``k^ e^{total - L_t}``, and last the state's, ``e^total``.

    Of a thread's eight channels in ``_fold`` the first four lie at 16 bytes times its lane, the
    others 256 bytes on: vector loads without bank conflicts.
    """
    at = factors + ((tid >> 2) & 1) * (_ROW // 2) + (tid >> 3) * 16 + (tid & 3) * 4
    for t in range(window):
        store_shared(at + t * _ROW, [multiply(keys[t], exp2(total - logs[t]))])
    store_shared(at + window * _ROW, [exp2(total)])


def _factor(at: Int32) -> tuple[Float32, ...]:
    """Eight channels' factors."""
    return load_shared(at, 4, Float32) + load_shared(at + _ROW // 2, 4, Float32)


@cute.jit
def _fold(
    page: Int32,
    factors: Int32,
    us: Int32,
    tokens: Int32,
    to: Int64,
    tid: Int32,
    window: cutlass.Constexpr,
    in_place: cutlass.Constexpr,
) -> None:
    """Fold the first ``tokens`` tokens into the page, in place or to the global address ``to``."""
    lane = tid % _LANES
    first = (tid // _LANES) * _GROUP_ROWS
    mine = factors + lane * 16
    for part in cutlass.range(_GROUP_ROWS // _ROWS, unroll=1):
        row = first + part * _ROWS
        offset = row * _STATE_ROW + lane * 16
        state = cute.make_rmem_tensor((_ROWS, 8), Float32)
        decay = _factor(mine + window * _ROW)
        for r in cutlass.range_constexpr(_ROWS):
            words = load_shared(page + offset + r * _STATE_ROW, 4)
            for w in cutlass.range_constexpr(4):
                low, high = unpack_bf16(words[w])
                state[r, 2 * w] = multiply(low, decay[2 * w])
                state[r, 2 * w + 1] = multiply(high, decay[2 * w + 1])
        for t in cutlass.range(tokens, unroll=1):
            factor = _factor(mine + t * _ROW)
            u = ()
            for r in cutlass.range_constexpr(0, _ROWS, 4):
                u = u + load_shared(us + t * _ROW + (row + r) * 4, 4, Float32)
            for r in cutlass.range_constexpr(_ROWS):
                for j in cutlass.range_constexpr(8):
                    state[r, j] = fma(u[r], factor[j], state[r, j])
        for r in cutlass.range_constexpr(_ROWS):
            words = [pack_bf16(state[r, 2 * w], state[r, 2 * w + 1]) for w in range(4)]
            if cutlass.const_expr(in_place):
                store_shared(page + offset + r * _STATE_ROW, words)
            else:
                store_global(to + Int64(offset + r * _STATE_ROW), words)


def shared_bytes(variant: Variant) -> int:
    """Shared memory of a CTA."""
    return 2 * _stage_bytes(variant.window) + 4 * _padded(variant.window) * 4 + 4 * 8


def make(variant: Variant, options: str) -> Any:
    """Compile a variant with these options of ``cute.compile``."""
    layers, heads, rows = (cute.sym_int() for _ in range(3))

    def vector(kind: Any, size: Any) -> Any:
        return make_fake_tensor(kind, (size,), (1,))

    return cute.compile(
        Commit(variant.window, by_slot=variant["by_slot"], align=variant["align"]),
        *(vector(Int64, layers) for _ in range(6)),
        make_fake_tensor(Float32, (layers, heads), (cute.sym_int64(), 1)),
        make_fake_tensor(Float32, (layers, heads, K), (cute.sym_int64(), K, 1)),
        make_fake_tensor(Int32, (rows,), (cute.sym_int64(),)),
        *(vector(Int32, rows) for _ in range(4)),
        Float32(0.0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
