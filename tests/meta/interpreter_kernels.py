"""Minimal kernels, each showing one thing that the interpreter does wrong, or should do right.

Import after ``interpreter.activate()``.
"""
# A kernel's arguments are Triton's values, which have no Python types.
# mypy: disable-error-code="no-untyped-def, attr-defined, misc"

import triton
import triton.language as tl


@triton.jit
def convert(x, y, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, tl.load(x + o).to(y.dtype.element_ty))


@triton.jit
def truncate(x, y, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, tl.load(x + o).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def constant(x, y, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(y + o, tl.load(x + o) * 2.5)
    tl.store(y + B + o, tl.full([B], 1.0039064, tl.bfloat16))
    tl.store(y + 2 * B + o, tl.load(x + o, mask=o < 0, other=-1))
    tl.store(y + 3 * B + o, tl.where(o > 1, tl.load(x + o), 0.3))


@triton.jit
def binary(x, p, sums, differences, products, quotients, orders, negatives, chosen, B: tl.constexpr):
    o = tl.arange(0, B)
    a, b = tl.load(x + o), tl.load(p)
    tl.store(sums + o, a + b)
    tl.store(differences + o, b - a)
    tl.store(products + o, a * b)
    tl.store(quotients + o, a / b)
    order = (a < b).to(tl.int32) + 2 * (a <= b).to(tl.int32) + 4 * (a == b).to(tl.int32)
    order += 8 * (a != b).to(tl.int32) + 16 * (a > b).to(tl.int32) + 32 * (a >= b).to(tl.int32)
    tl.store(orders + o, order)
    tl.store(negatives + o, 1.0 * -a)
    tl.store(chosen + o, tl.where(a < b, a, b))


@triton.jit
def fma(x, y, z, out, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(out + o, tl.fma(tl.load(x + o), tl.load(y + o), tl.load(z + o)))


@triton.jit
def dot(x, y, B: tl.constexpr):
    o = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    a = tl.load(x + o)
    tl.store(y + o, tl.dot(a, tl.trans(a)))


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def reduction(x, rows, columns, total, most, running, least, B: tl.constexpr):
    r = tl.arange(0, B)
    a = tl.load(x + r[:, None] * B + r[None, :])
    tl.store(rows + r, tl.sum(a, 1))
    tl.store(columns + r[None, :], tl.sum(a, 0, keep_dims=True))
    tl.store(total, tl.sum(a))
    tl.store(most + r, tl.reduce(a, 1, _larger))
    tl.store(running + r[:, None] * B + r[None, :], tl.cumsum(a, 1))
    tl.store(least, tl.min(tl.min(a, 0), 0))


@triton.jit
def comparison(x, y, n, B: tl.constexpr):
    o = tl.arange(0, B)
    positive = tl.load(x) > 0
    both = positive & (o < n)
    tl.store(y + o, tl.load(x + o, mask=both, other=-1), mask=n > 1)
    tl.store(
        y + B + o, positive.to(y.dtype.element_ty) + tl.zeros([B], y.dtype.element_ty), mask=(n > 1) & (o < 2)
    )


@triton.jit
def nan(x, y):
    nan = tl.load(x)
    tl.store(y, tl.maximum(nan, 1.0))
    tl.store(y + 1, tl.minimum(1.0, nan))
    tl.store(y + 2, tl.clamp(nan, 2.0, 3.0))
    tl.store(y + 3, tl.maximum(nan, 1.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def count(y, n, m=2, B: tl.constexpr = 4):
    tl.store(y + tl.program_id(0), n)


@triton.jit
def scalar(x, y, scale, flag, B: tl.constexpr, eps=0.5):
    o = tl.arange(0, B)
    tl.store(y + o, tl.where(flag, tl.load(x + o) * scale + eps, 0.0))


@triton.jit
def loop(y, n, wide):
    for i in range(n):
        tl.store(y, i.to(tl.int64) * 1000000)
        tl.store(y + 1, (i * 1000000).to(tl.int64))
    for i in range(tl.load(wide), tl.load(wide) + 1):
        tl.store(y + 2, i * 1000000)
    for i in tl.range(3, 6, 2, num_stages=1):
        tl.store(y + i, i)


@triton.jit
def loud(x, y, B: tl.constexpr):
    o = tl.arange(0, B)
    v = tl.load(x + o)
    tl.store(y + o, tl.exp(v * 1e3) / (v - v))
    tl.store(y, tl.max(v * float("nan"), 0))
    tl.store(y + o, tl.log(-v).to(tl.int32), mask=o > 0)


@triton.jit
def recurrence(k, v, gate, state, bases, lengths, out, scale, K: tl.constexpr, V: tl.constexpr):
    row = tl.program_id(0)
    kk, vv = tl.arange(0, K), tl.arange(0, V)
    n = tl.load(lengths + row)
    if n == 0:
        return
    base = tl.load(bases + row).to(tl.pointer_type(tl.float32))
    h = tl.load(base + vv[:, None] * K + kk[None, :])
    for t in range(n):
        kt = tl.load(k + t * K + kk).to(tl.float32) * scale
        kt = kt * tl.rsqrt(tl.sum(kt * kt) + 1e-6)
        h = h * tl.exp(-tl.sigmoid(tl.load(gate + t * K + kk).to(tl.float32)))[None, :]
        delta = tl.load(v + t * V + vv, mask=vv < V - 1, other=0.0).to(tl.float32) - tl.sum(
            h * kt[None, :], 1
        )
        h += delta[:, None] * kt[None, :]
        tl.store(out + (row * 4 + t) * V + vv, tl.sum(h, 1).to(tl.bfloat16))
    tl.store(state + row.to(tl.int64) * V * K + vv[:, None] * K + kk[None, :], h)


@triton.jit
def bad_pointer(x, y, bad, n, B: tl.constexpr):
    o = tl.arange(0, B)
    p = bad.to(tl.pointer_type(tl.float32))
    tl.store(y + o, tl.load(p + o, mask=o < 0, other=3.0))
    tl.store(y, tl.load(p, mask=n > 1, other=5.0))
    tl.store(p + o, tl.load(x + o), mask=o < 0)
    for i in tl.static_range(2):
        tl.store(y + 2 + i, i)


@triton.jit
def _affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.heuristics({"SHIFT": lambda args: args["n"] > 2})
@triton.jit(do_not_specialize=["n"])
def scan(x, y, n, B: tl.constexpr, SHIFT: tl.constexpr):
    o = tl.arange(0, B)
    _, total = tl.associative_scan((tl.full([B], 0.5, tl.float32), tl.load(x + o)), 0, _affine)
    tl.store(y + o, total + 1 if SHIFT else total)


@triton.jit
def annotation(y, a: tl.int64, b: "tl.int64", c: tl.float64, d: tl.int32):
    tl.store(y, a * 1000000000)
    tl.store(y + 1, b * 1000000000)
    tl.store(y + 2, (c * 3 * 1e16).to(tl.int64))
    tl.store(y + 3, (d * 1000000000).to(tl.int64))
