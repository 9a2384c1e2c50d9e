"""Running error analysis: a value in double precision and a bound on what fp32 may make of it.

``Tracked(v, e)`` says: an implementation of the declared arithmetic, given the same inputs,
holds a number within ``e`` of ``v``. Every operation propagates its operands' errors without
dropping second-order terms and adds its own rounding (N. J. Higham, *Accuracy and Stability
of Numerical Algorithms*, 2nd ed., sections 2.2, 3.1 and 3.3). Fusing a product into an
addition only removes a rounding, so the bounds hold for either.

An infinite or NaN error means that the fp32 computation may overflow there, or that an
operand is not finite: nothing is claimed of such an element's size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from oracle.kept import kept

Tensor = torch.Tensor
U = 2.0**-24
"""Unit roundoff of fp32 with round to nearest."""
FLT_MAX = 3.4028234663852886e38
SUBNORMAL = 2.0**-149
"""Absolute error of a product that underflows gradually (half a step, rounded up)."""
FACTORED_NAME = "factored-fp32"
FLUSH = 2.0**-126
"""Absolute error of a function that may flush a subnormal result to zero."""


@dataclass(frozen=True)
class Tracked:
    """A float64 tensor ``v`` and an absolute error bound ``e`` of the same shape."""

    v: Tensor
    e: Tensor

    def __getitem__(self, index: object) -> "Tracked":
        return Tracked(self.v[index], self.e[index])  # type: ignore[index]

    @property
    @kept
    def size(self) -> Tensor:
        """The value's absolute value."""
        return self.v.abs()

    @property
    @kept
    def magnitude(self) -> Tensor:
        """The largest absolute value an implementation may hold."""
        return self.size + self.e

    def unbound(self, dim: int) -> "list[Tracked]":
        """The parts along a dimension, which they lack."""
        return [Tracked(v, e) for v, e in zip(self.v.unbind(dim), self.e.unbind(dim), strict=True)]


def exact(v: Tensor) -> Tracked:
    """An input: widened to float64, free of error."""
    v = v.double()
    return Tracked(v, torch.zeros_like(v))


@cache
def constant(value: float) -> Tracked:
    """A decimal constant of the contract, rounded to fp32 by the implementation."""
    v = torch.tensor(value, dtype=torch.float64)
    return Tracked(v, v.abs() * U)


@dataclass(frozen=True)
class Arithmetic:
    """What an implementation declares of its fp32 arithmetic; all figures are relative errors.

    ``exp_rel`` holds beside ``2 U |x|``, which pays for forming x * log2(e) before a base-2
    exponential. ``additions(n)`` is the largest number of additions that a term of an
    n-term sum passes through.
    """

    name: str
    exp_rel: float
    log_rel: float
    rsqrt_rel: float
    div_rel: float
    additions: Callable[[int], int]

    @property
    def factored(self) -> bool:
        """Whether windows are computed from the old state alone (``oracle.factored``)."""
        return self.name == FACTORED_NAME

    def mul(self, a: Tracked, b: Tracked) -> Tracked:
        """a * b, rounded once.

        Past the fp32 range an implementation holds infinity, which is outside this bound. Of
        such a product ``sum`` withdraws the claim, and ``sigmoid`` and the ``exp`` of a decay
        take infinity as they take 1e39; the oracle uses it for nothing else.
        """
        v = a.v * b.v
        e = (a.magnitude * b.e).addcmul_(b.size, a.e)
        return Tracked(v, e.add_(v.abs().add_(e), alpha=U).add_(SUBNORMAL))

    def scale(self, a: Tracked, factor: float) -> Tracked:
        """a times a constant of the contract."""
        return self.mul(a, constant(factor))

    def add(self, a: Tracked, b: Tracked, sign: float = 1.0) -> Tracked:
        """a + sign * b, rounded once."""
        v = torch.add(a.v, b.v, alpha=sign)
        e = a.e + b.e
        magnitude = v.abs().add_(e)
        return _in_range(Tracked(v, e.add_(magnitude, alpha=U)), magnitude)

    def sum(self, a: Tracked) -> Tracked:
        """Sum over the last dimension, in any order that ``additions`` allows."""
        d = self.additions(a.v.shape[-1]) * U
        magnitude = a.magnitude.sum(-1)
        e = a.e.sum(-1) + d / (1.0 - d) * magnitude
        return _in_range(Tracked(a.v.sum(-1), e), magnitude + e)

    def exp(self, a: Tracked) -> Tracked:
        """e**a."""
        v = torch.exp(a.v)
        grown = v * torch.expm1(a.e)
        rel = self.exp_rel + 2.0 * U * a.magnitude
        # e**-inf is exactly 0 whatever the relative error says; 0 * inf would lose that.
        own = torch.where(v == 0.0, torch.zeros_like(v), rel * (v + grown))
        return _in_range(Tracked(v, grown + own + FLUSH), v + grown + own)

    def rsqrt(self, a: Tracked) -> Tracked:
        """a**-1/2 for a > 0; unbounded once the error reaches half of a."""
        v = torch.rsqrt(a.v)
        r = a.e / a.v
        moved = v * (torch.rsqrt(1.0 - r.clamp(max=0.5)) - 1.0)
        e = moved + self.rsqrt_rel * (v + moved) + FLUSH
        return Tracked(v, torch.where(r < 0.5, e, torch.full_like(e, math.inf)))

    def sigmoid(self, a: Tracked) -> Tracked:
        """1 / (1 + e**-a), as a division.

        An input error d moves the result by at most s (1 - s) (e**|d| - 1). The exponential
        enters 1 + e**-a with the weight 1 - s; one addition and one division follow.
        """
        s, t = torch.sigmoid(a.v), torch.sigmoid(-a.v)
        moved = s * t * torch.expm1(a.e)
        # Past 700 the exponential's own error has no meaning: s or 1 - s is far below FLUSH.
        exp_rel = self.exp_rel + 2.0 * U * a.magnitude.clamp(max=700.0)
        rel = t * exp_rel * (1.0 + exp_rel) + U + self.div_rel
        return Tracked(s, moved + 1.01 * rel * (s + moved) + FLUSH)

    def silu(self, a: Tracked) -> Tracked:
        """a / (1 + e**-a), as a division.

        The derivative is s (1 + a (1 - s)) with s the sigmoid, the second one at most 1/2. Once
        e**-a passes 2**126 a fast division may give 0, and past the fp32 range any does.
        """
        s, t = torch.sigmoid(a.v), torch.sigmoid(-a.v)
        v = a.v * s
        moved = (s * (1.0 + a.v * t)).abs() * a.e + 0.25 * a.e * a.e
        exp_rel = self.exp_rel + 2.0 * U * a.magnitude.clamp(max=700.0)
        rel = t * exp_rel * (1.0 + exp_rel) + U + self.div_rel
        vanishing = a.e - a.v > 126.0 * math.log(2.0)
        own = 1.01 * rel * (v.abs() + moved) + torch.where(vanishing, v.abs(), 0.0)
        # e**-inf is 0: an infinite sum of taps stays infinite, or is NaN on the other side.
        return Tracked(v, moved + own + FLUSH)

    def softplus(self, a: Tracked) -> Tracked:
        """log(1 + e**a), and a itself above 20: the contract's literal expression.

        The sum 1 + e**a is rounded before the logarithm, so the error is absolute: below
        about -17 an implementation holds exactly 0. Where a is within its error of 20 an
        implementation may take either branch; they differ by log1p(e**-20) < 2.1e-9, and the
        literal one brings its errors along.
        """
        above = a.v > 20.0
        either = (a.v - 20.0).abs() <= a.e
        # At most 20 where the literal branch is out of the question: no overflow, and no claim.
        x = torch.where(above, a.v.clamp(max=20.0), a.v)
        v = torch.where(above, a.v, torch.log1p(torch.exp(x)))
        y = 1.0 + torch.exp(x)
        e_y = (self.exp_rel + 2.0 * U * x.abs()) * (y - 1.0) + U * y * 1.01
        e_log = e_y / (y - e_y)
        literal = e_log + self.log_rel * (v + e_log)
        e = torch.where(above & ~either, 0.0, literal)
        return Tracked(v, e + a.e + torch.where(either, 2.1e-9, 0.0))


def bfloat16(a: Tracked) -> Tracked:
    """The bf16 number that an implementation rounds ``a`` to, and how far another one may lie.

    Where all numbers within the error round to one, the error is 0 from here on. Rounding by
    way of fp32 is right at both ends: what an implementation rounds is an fp32 number.
    """
    v, low, high = (_nearest_bfloat16(x) for x in (a.v, a.v - a.e, a.v + a.e))
    return Tracked(v, torch.where(low == high, torch.zeros_like(v), torch.maximum(high - v, v - low)))


def _nearest_bfloat16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def in_range(a: Tracked) -> Tracked:
    """The same, with the claim withdrawn where it may pass the fp32 range."""
    return _in_range(a, a.magnitude)


def larger(a: Tracked, b: Tracked) -> Tracked:
    """What holds whichever of two ways, with the bounds of ``a`` and of ``b``, computed it."""
    return Tracked(a.v, torch.maximum(a.e, b.e + (a.v - b.v).abs()))


def select(condition: Tensor, a: Tracked, b: Tracked) -> Tracked:
    """``a`` where the condition holds, else ``b``."""
    if bool(condition.all()):
        return a
    if not bool(condition.any()):
        return b
    return Tracked(torch.where(condition, a.v, b.v), torch.where(condition, a.e, b.e))


def _in_range(a: Tracked, magnitude: Tensor) -> Tracked:
    """Withdraw the claim where an intermediate may pass the fp32 range."""
    return Tracked(a.v, a.e.masked_fill(magnitude > FLT_MAX, math.inf))


def _padded(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _additions_compiled(n: int) -> int:
    """A compiled block reduction.

    A lane first adds its own elements: at most 8, the elements of one 16-byte load, or as
    many as 32 lanes leave it. Then 5 shuffle steps join the lanes and 2 the four warps.
    """
    width = _padded(n)
    return max(0, min(width - 1, max(8, width // 32) - 1 + 7))


def _additions_numpy(n: int) -> int:
    """numpy's pairwise sum: 8 accumulators over at most 128 terms, joined in 3 steps, then a tree."""
    width = _padded(n)
    if width < 8:
        return max(0, width - 1)
    return min(width, 128) // 8 - 1 + 3 + max(0, (width // 128).bit_length() - 1)


def _additions_any(n: int) -> int:
    return max(0, n - 1)


# Sources of the figures, in units in the last place (1 ulp is at most 2 U relative):
# ex2.approx 2 ulp, rsqrt.approx 2**-22.9 relative, div.full 2 ulp (PTX ISA, floating point
# instructions); logf 1 ulp (CUDA programming guide, mathematical functions). numpy states
# 2.52 ulp for its float32 exp and 3.83 ulp for log; 1 / sqrt is two roundings. Measured over all
# 2**32 inputs on an H200: ex2.approx 2**-22.71, rsqrt.approx 2**-22.94, rcp.approx 2**-23.28.
COMPILED = Arithmetic("sequential-fp32", 4 * U, 2 * U, 2.0**-22.9, 4 * U, _additions_compiled)
INTERPRETED = Arithmetic("sequential-fp32", 5.04 * U, 7.66 * U, 2.1 * U, U, _additions_numpy)
ANY_ORDER = Arithmetic("any-order-fp32", 5.04 * U, 7.66 * U, 2.0**-22.9, 4 * U, _additions_any)

FACTORED = Arithmetic(FACTORED_NAME, 4 * U, 2 * U, 2.0**-22.9, 4 * U, _additions_any)

ARITHMETICS: dict[tuple[str, str], Arithmetic] = {
    ("sequential-fp32", "cuda"): COMPILED,
    ("sequential-fp32", "cpu"): INTERPRETED,
    ("any-order-fp32", "cuda"): ANY_ORDER,
    ("any-order-fp32", "cpu"): ANY_ORDER,
    (FACTORED_NAME, "cuda"): FACTORED,
    (FACTORED_NAME, "cpu"): FACTORED,
}
"""What an implementation may declare, by (name, device)."""
ARITHMETICS |= {(name, "emulator"): ar for (name, device), ar in ARITHMETICS.items() if device == "cuda"}


def arithmetic(name: str, device: str) -> Arithmetic:
    """Look an arithmetic up; ``ValueError`` lists the names there are."""
    found = ARITHMETICS.get((name, device))
    if found is None:
        names = ", ".join(sorted({known for known, _ in ARITHMETICS}))
        raise ValueError(f"no arithmetic {name!r} on {device}; declare one of: {names}")
    return found
