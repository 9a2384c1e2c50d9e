"""The gated delta rule over a window, from the old state alone: its value and its error bound.

With cumulative log decays L_t, beta_t, and keys and queries normalised (queries scaled):

    p_t = e^{L_t} k_t     r_t = e^{L_t} q_t     w_i = e^{-L_i} k_i
    u_t = beta_t (v_t - S_0 p_t - sum_{i<t} <w_i, p_t> u_i)
    o_t = S_0 r_t + sum_{i<=t} <w_i, r_t> u_i

The *probes* p and r meet S_0 on tensor cores: each is split into a bf16 high and a bf16 low
half, their products with the bf16 state are exact, and both halves go into one fp32
accumulator. Keys and queries may be normalised before (then the probes are) or after (then
projections and couplings are scaled); the bounds hold for either. Shapes as in ``oracle.recurrence``.
"""

import math
from dataclasses import dataclass

import torch

from oracle.recurrence import EPS, cumulative
from oracle.tracked import (
    FLT_MAX,
    FLUSH,
    SUBNORMAL,
    Arithmetic,
    Tracked,
    U,
    constant,
    larger,
)

Tensor = torch.Tensor

SPLIT = 2.0**-17
"""Relative error of high + low: bf16 has 8 significant bits, so |x - high| <= 2**-8 of x's power of
two, that difference is an fp32 number, and its own rounding error is 2**-9 of it."""
STEPS, TERMS, CUT = 16, 17, 2.0**-25
"""A product with K = 128 takes 8 steps of 16 products for the high and 8 for the low halves. A step
aligns its 16 products and the accumulator to the largest of them and cuts each below 2**-25 of
that (measured on an H200), then cuts the sum to fp32: 2**-23 of it."""
ACCUMULATION = STEPS * (TERMS * CUT + 2.0**-23)
"""Relative to the sum of magnitudes, which bounds every term and every partial sum. It covers an
fp32 rounding of every step too, and halves that are summed apart and added at the end."""
HALVES = 1.0 + 2.0**-8 + SPLIT
"""Magnitude of both halves, in that of the probe."""
BF16_MAX = 3.3895e38
"""Numbers up to here round to a finite bf16 number."""


@dataclass(frozen=True)
class Factors:
    """Normalisers of keys and queries [N, H, Q], and both as they come."""

    k: Tracked
    q: Tracked
    k_scale: Tracked
    q_scale: Tracked


def window(
    q: Tracked, k: Tracked, v: Tracked, g: Tracked, beta: Tracked, state: Tracked, ar: Arithmetic
) -> tuple[Tracked, Tracked]:
    """Corrections and outputs [N, H, Q, V] from raw keys and queries, and the state of a bf16 page.

    Nothing is claimed of a state row with an element that is not finite: an Inf times a low half
    of 0 is NaN in every column, also where a kernel without halves has an Inf.
    """
    factors = Factors(k, q, _normaliser(k, ar), ar.scale(_normaliser(q, ar), float(q.v.shape[-1]) ** -0.5))
    logs = cumulative(g, ar)
    L = Tracked(torch.stack([x.v for x in logs], 2), torch.stack([x.e for x in logs], 2))
    p, r = _projections(factors, L, state, ar)
    c, d = _couplings(factors, L, ar)
    u, o = _solve(p, r, c, d, v, beta, ar)
    broken = ~state.v.isfinite().all(-1)[:, :, None]  # [N, H, 1, V]
    return _unclaimed(u, broken), _unclaimed(o, broken)


def _normaliser(x: Tracked, ar: Arithmetic) -> Tracked:
    """rsqrt(sum x**2 + 1e-6), [N, H, Q]."""
    return ar.rsqrt(ar.add(ar.sum(ar.mul(x, x)), constant(EPS)))


def _projections(f: Factors, L: Tracked, state: Tracked, ar: Arithmetic) -> tuple[Tracked, Tracked]:
    """S_0 p and S_0 r, [N, H, Q, V]."""
    decay = ar.exp(L)

    def of(x: Tracked, scale: Tracked) -> Tracked:
        before = _project(state, ar.mul(decay, ar.mul(x, _wide(scale))), ar)
        after = ar.mul(_project(state, ar.mul(decay, x), ar), _wide(scale))
        return larger(before, after)

    return of(f.k, f.k_scale), of(f.q, f.q_scale)


def _project(state: Tracked, probe: Tracked, ar: Arithmetic) -> Tracked:
    """The product of states [N, H, V, K] with probes [N, H, Q, K] on tensor cores."""
    S, size = state.v.abs(), probe.magnitude
    reach = _times(size, S)
    # A half below 2**-126 may count as 0.
    vanished = 2.0 * FLUSH * S.sum(-1)[:, :, None]
    e = _times(probe.e, S) + (SPLIT + HALVES * ACCUMULATION) * reach + vanished
    e = torch.where((size > BF16_MAX).any(-1, keepdim=True), math.inf, e)
    result = Tracked(_times(probe.v, state.v), e)
    return Tracked(result.v, torch.where(HALVES * reach > FLT_MAX, math.inf, result.e))


def _times(probe: Tensor, state: Tensor) -> Tensor:
    return torch.einsum("nhqk,nhvk->nhqv", probe, state)


def _couplings(f: Factors, L: Tracked, ar: Arithmetic) -> tuple[Tracked, Tracked]:
    """<w_i, p_t> and <w_i, r_t> as [N, H, t, i]; those of i > t mean nothing."""
    span, grown = _spans(L, ar)

    def of(x: Tracked, scale: Tracked) -> Tracked:
        def dots(a: Tracked, b: Tracked) -> Tracked:
            a_i, b_t = _earlier(a), _later(b)
            product = ar.mul(ar.mul(a_i, b_t), span)
            # Probe, weight and product may each be subnormal, and the probe meets a huge weight.
            weight = grown * a_i.magnitude
            e = product.e + 1.01 * SUBNORMAL * (1.0 + b_t.magnitude + weight)
            return ar.sum(Tracked(product.v, torch.where(weight > FLT_MAX, math.inf, e)))

        before = dots(ar.mul(f.k, _wide(f.k_scale)), ar.mul(x, _wide(scale)))
        both = ar.mul(Tracked(f.k_scale.v[:, :, None], f.k_scale.e[:, :, None]), _wide(scale))
        return larger(before, ar.mul(dots(f.k, x), both))

    return of(f.k, f.k_scale), of(f.q, f.q_scale)


def _spans(L: Tracked, ar: Arithmetic) -> tuple[Tracked, Tensor]:
    """e^{L_t} e^{-L_i} as [N, H, t, i, K], computed as two exponentials, and a bound on e^{-L_i}.

    Errors that L_t and L_i share drop out of the product. The two products that each factor
    enters are those of the caller, less one rounding, which is added here.
    """
    later, earlier = _later(L), _earlier(L)
    v = torch.exp(later.v - earlier.v)
    moved = v * torch.expm1((later.e - earlier.e).clamp(min=0.0))
    rel = (1.0 + _exp_rel(later, ar)) * (1.0 + _exp_rel(earlier, ar)) * (1.0 + U) - 1.0
    grown = torch.exp(-earlier.v + earlier.e) * (1.0 + _exp_rel(earlier, ar))
    # e^{L_t} below 2**-126 may count as 0.
    return Tracked(v, moved + rel * (v + moved) + FLUSH * grown), grown


def _exp_rel(a: Tracked, ar: Arithmetic) -> Tensor:
    return ar.exp_rel + 2.0 * U * a.magnitude


def _solve(
    p: Tracked, r: Tracked, c: Tracked, d: Tracked, v: Tracked, beta: Tracked, ar: Arithmetic
) -> tuple[Tracked, Tracked]:
    """The triangular system, token by token."""
    us: list[Tracked] = []
    os: list[Tracked] = []
    for t in range(v.v.shape[2]):
        acc = ar.add(v[:, :, t], p[:, :, t], -1.0)
        for i, u in enumerate(us):
            acc = ar.add(acc, ar.mul(_wide(c[:, :, t, i]), u), -1.0)
        us.append(ar.mul(_wide(beta[:, :, t]), acc))
        o = r[:, :, t]
        for i, u in enumerate(us):
            o = ar.add(o, ar.mul(_wide(d[:, :, t, i]), u))
        os.append(o)
    return _stacked(us), _stacked(os)


def _unclaimed(a: Tracked, where: Tensor) -> Tracked:
    return Tracked(torch.where(where, 0.0, a.v), torch.where(where, math.inf, a.e))


def _wide(a: Tracked) -> Tracked:
    return Tracked(a.v[..., None], a.e[..., None])


def _later(a: Tracked) -> Tracked:
    """[N, H, t, K] as [N, H, t, 1, K]."""
    return Tracked(a.v[:, :, :, None], a.e[:, :, :, None])


def _earlier(a: Tracked) -> Tracked:
    """[N, H, i, K] as [N, H, 1, i, K]."""
    return Tracked(a.v[:, :, None], a.e[:, :, None])


def _stacked(parts: list[Tracked]) -> Tracked:
    return Tracked(torch.stack([x.v for x in parts], 2), torch.stack([x.e for x in parts], 2))
