"""The arithmetic of one window and head, for 128 threads: thread c has key and value channel c.

Short convolution, gates, probes, couplings (contract, sections 1.2, 1.3, 1.5; formulas in
``Window``). A token's values never depend on a later token. Tokens past the row's end hold
zeros in place of their inputs; their results are finite where the inputs are, and not stored.

Sums over the 128 key channels go through shared memory: ``partial`` has, per sum, one fp32 of
each warp; ``total`` has the sums, once per warp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cutlass import Float32, Int32, Uint16

from impl.cute.device import (
    LOG2_E,
    add,
    asm,
    barrier_warp,
    exp2,
    exponential,
    fma,
    load_shared,
    multiply,
    pack_bf16,
    reciprocal,
    reciprocal_root,
    store_shared,
    unpack_bf16,
    widen_bf16,
)
from impl.cute.mma import K, Product, narrow_bf16

TAPS = 4
EPS = 1e-6
LANES, WARPS = 32, 4


@dataclass(frozen=True)
class Convolved:
    """A channel's tokens after convolution, SiLU and rounding: bits of bf16, and the same in fp32."""

    bits: list[Uint16]
    values: list[Float32]


def convolve(
    history: Sequence[Uint16], inputs: Sequence[Uint16], taps: Sequence[Float32], *, exact_products: bool
) -> Convolved:
    """Causal convolution of a channel's tokens behind its last three inputs.

    Products with bf16 taps are rounded to bf16 (``exact_products`` False), with fp32 taps fused into the sum.
    """
    x = [widen_bf16(each) for each in (*history, *inputs)]
    bits, values = [], []
    for t in range(len(inputs)):
        acc = Float32(0.0)
        if exact_products:
            for j in range(TAPS):
                acc = fma(x[t + j], taps[j], acc)
        else:
            for j in range(0, TAPS, 2):
                products = [multiply(x[t + i], taps[i]) for i in (j, j + 1)]
                for product in unpack_bf16(pack_bf16(*products)):
                    acc = add(acc, product)
        growth = exp2(multiply(acc, Float32(-LOG2_E)))
        bits.append(narrow_bf16(multiply(acc, reciprocal(add(growth, Float32(1.0))))))
        values.append(widen_bf16(bits[-1]))
    return Convolved(bits, values)


def cumulative_decays(
    raw: Sequence[Uint16], bias: Float32, a_log: Float32, lower_bound: Float32
) -> list[Float32]:
    """Base-2 logarithms of the decay from before the window to each token's end."""
    slope = multiply(exponential(a_log), Float32(-LOG2_E))
    strongest = multiply(lower_bound, Float32(LOG2_E))
    logs: list[Float32] = []
    for bits in raw:
        rate = reciprocal(add(exp2(multiply(slope, add(widen_bf16(bits), bias))), Float32(1.0)))
        logs.append(fma(strongest, rate, logs[-1]) if logs else multiply(strongest, rate))
    return logs


class Window:
    """A window of ``tokens`` tokens (1 to 8).

    With L_t the cumulative log decay, s_t and z_t the factors that normalise key and (scaled)
    query, S the old state and thread r its row r:

        p_t = e^{L_t} k_t      r_t = e^{L_t} q_t              probes, for the tensor cores
        c_ti = sum_c e^{L_t - L_i} k_i k_t      d_ti likewise with q_t
        u_t = beta_t (v_t - s_t S p_t - sum_{i<t} (c_ti s_i s_t) u_i)
        o_t = z_t S r_t + sum_{i<=t} (d_ti s_i z_t) u_i

    Each e^{L_t - L_i} is one exponential of at most 1, so no bound on the decay is needed.
    Couplings are scaled before they meet a correction, which may be as large as fp32 allows (s_t
    reaches 1000, where a key is tiny).
    Probes are not normalised, so a sum of squares above the fp32 range gives NaN.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.probes = 2 * tokens
        self.sums = 2 * tokens + tokens * tokens
        """Squares of keys, squares of queries, then per token its c_ti and d_ti."""
        blocks = -(-self.sums // LANES)
        rest = self.sums - LANES * (blocks - 1)
        self._batches = [LANES] * (blocks - 1) + [1 << (rest - 1).bit_length()]
        self.partial_bytes = sum(self._batches) * WARPS * 4
        self.total_bytes = blocks * LANES * WARPS * 4

    def put(
        self,
        product: Product,
        b: Int32,
        partial: Int32,
        channel: Int32,
        gates: Sequence[Uint16],
        bias: Float32,
        a_log: Float32,
        lower_bound: Float32,
        k: Convolved,
        q: Convolved,
    ) -> None:
        """Store this channel's probes and this warp's parts of the sums; a barrier must follow."""
        logs = cumulative_decays(gates, bias, a_log, lower_bound)
        self._put_probes(product, b, channel, logs, k.values, q.values)
        self._put_sums(partial, channel, logs, k.values, q.values)

    def _put_probes(
        self,
        product: Product,
        b: Int32,
        channel: Int32,
        logs: Sequence[Float32],
        k: Sequence[Float32],
        q: Sequence[Float32],
    ) -> None:
        """Store this channel of the probes: p_t in column t, r_t in column ``tokens`` + t."""
        for t in range(self.tokens):
            decay = exp2(logs[t])
            product.put(b, t, channel, multiply(decay, k[t]))
            product.put(b, self.tokens + t, channel, multiply(decay, q[t]))

    def _put_sums(
        self,
        partial: Int32,
        tid: Int32,
        logs: Sequence[Float32],
        k: Sequence[Float32],
        q: Sequence[Float32],
    ) -> None:
        """Store this warp's part of every sum; a barrier must follow."""
        terms = [multiply(x, x) for x in (*k, *q)]
        for t in range(self.tokens):
            aged = [multiply(k[i], exp2(logs[t] - logs[i])) for i in range(t)]
            terms += [multiply(x, k[t]) for x in aged]
            terms += [multiply(x, q[t]) for x in (*aged, k[t])]
        lane, first = tid & (LANES - 1), 0
        for size in self._batches:
            batch = terms[first : first + size]
            batch += [Float32(0.0)] * (size - len(batch))
            mine = first + (lane >> (LANES // size).bit_length() - 1)
            store_shared(partial + mine * (WARPS * 4) + (tid >> 5) * 4, (_lane_sums(batch, lane),))
            first += size

    def add_sums(self, partial: Int32, total: Int32, tid: Int32) -> None:
        """Each warp adds up all sums for itself and turns those of squares into normalising factors."""
        lane = tid & (LANES - 1)
        mine = total + (tid >> 5) * (self.total_bytes // WARPS)
        last = sum(self._batches) - 1
        for block in range(len(self._batches)):
            index = lane + LANES * block
            if block == len(self._batches) - 1 and LANES * (block + 1) > last + 1:
                index = _smaller(index, last)
            parts = load_shared(partial + index * (WARPS * 4), WARPS, Float32)
            value = add(add(parts[0], parts[1]), add(parts[2], parts[3]))
            if block == 0:
                root = reciprocal_root(add(value, Float32(EPS)))
                scale = _choose(index, self.tokens, root, multiply(root, Float32(K**-0.5)))
                value = _choose(index, self.probes, scale, value)
            store_shared(mine + (lane + LANES * block) * 4, (value,))
        barrier_warp()

    def solve(
        self,
        total: Int32,
        tid: Int32,
        projections: Sequence[Float32],
        v: Sequence[Float32],
        betas: Sequence[Float32],
        store: Callable[[int, Float32, Float32], None],
    ) -> None:
        """Corrections and outputs of this thread's row, handed to ``store(t, u, o)`` token by token."""
        fetch = _Table(total + (tid >> 5) * (self.total_bytes // WARPS))
        keys: list[Float32] = []
        us: list[Float32] = []
        at = self.probes
        for t in range(self.tokens):
            key, query = fetch(t), fetch(self.tokens + t)
            keys.append(key)
            acc = fma(-key, projections[t], v[t])
            for i in range(t):
                acc = fma(multiply(multiply(fetch(at + i), keys[i]), -key), us[i], acc)
            at += t
            us.append(multiply(betas[t], acc))
            o = multiply(query, projections[self.tokens + t])
            for i in range(t + 1):
                o = fma(multiply(multiply(fetch(at + i), keys[i]), query), us[i], o)
            at += t + 1
            store(t, us[t], o)


class _Table:
    """fp32 values in shared memory, fetched four at a time, each once."""

    def __init__(self, at: Int32) -> None:
        self._at = at
        self._known: dict[int, tuple[Float32, ...]] = {}

    def __call__(self, index: int) -> Float32:
        chunk = index // 4
        if chunk not in self._known:
            self._known[chunk] = load_shared(self._at + chunk * 16, 4, Float32)
        return self._known[chunk][index % 4]


def _lane_sums(values: list[Float32], lane: Int32) -> Float32:
    """Sums over the warp of 2**n values: lane l gets that of value l >> (5 - n).

    Every value is summed along the same tree.
    """
    distance = LANES // 2
    while distance:
        half = len(values) // 2
        if half:
            bit = lane & distance
            kept = [_either(bit, values[half + i], values[i]) for i in range(half)]
            given = [_either(bit, values[i], values[half + i]) for i in range(half)]
        else:
            kept = given = values
        values = [add(x, _across(y, distance)) for x, y in zip(kept, given, strict=True)]
        distance //= 2
    return values[0]


def _across(value: Float32, distance: int) -> Float32:
    code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    return asm(code, "=f,f", (value,), (Float32,))


def from_lane(value: Int32, lane: int) -> Int32:
    """A lane's value, in the whole warp."""
    return asm(f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;", "=r,r", (value,), (Int32,))


def _either(condition: Int32, nonzero: Float32, zero: Float32) -> Float32:
    code = "{ .reg .pred p; setp.ne.b32 p, $1, 0; selp.f32 $0, $2, $3, p; }"
    return asm(code, "=f,r,f,f", (condition, nonzero, zero), (Float32,), memory=False)


def _choose(index: Int32, bound: int, below: Float32, other: Float32) -> Float32:
    code = f"{{ .reg .pred p; setp.lt.s32 p, $1, {bound}; selp.f32 $0, $2, $3, p; }}"
    return asm(code, "=f,r,f,f", (index, below, other), (Float32,), memory=False)


def _smaller(value: Int32, bound: int) -> Int32:
    return asm(f"min.s32 $0, $1, {bound};", "=r,r", (value,), (Int32,), memory=False)
