"""fp32 evaluations with adversarial errors: what the tracked bounds must cover.

Every function here is written from the declaration alone: results of ``+ - *`` are numpy's
fp32, and a function's result is the exact one moved by any share of its declared relative
error, then rounded to fp32 towards the exact one so that the declaration still holds.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from oracle.tracked import FLUSH, Arithmetic, Tracked, U

Array = Any
HUGE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, repr=False)
class Operand:
    """What an implementation holds (fp32) and what the oracle knows of it."""

    held: Array
    known: Tracked


@st.composite
def operands(
    draw: st.DrawFn, *, low: int = -149, high: int = 127, sign: str = "any", most: float = 0.25
) -> Operand:
    """256 fp32 numbers with exponents within ``low`` to ``high``, each within its error of a value.

    The error is 0 or a relative 2**-24 to ``most``; the held number lies at either end of it
    or within. Shrinks towards exact powers of two.
    """
    span = sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    mantissa = 1.0 + draw(st.sampled_from((0.0, 1.0))) * rng.integers(0, 2**23, 256) * 2.0**-23
    held = np.ldexp(mantissa, rng.integers(span[0], span[1] + 1, 256)).astype(np.float32)
    if sign == "any":
        held *= rng.choice(np.array([-1, 1], np.float32), 256)
    if sign == "negative":
        held = -held
    error = draw(st.sampled_from([e for e in (0.0, 2.0**-24, 2.0**-20, 1e-3, 0.25) if e <= most]))
    return operand(held, error, rng.choice((-1.0, -0.5, 0.0, 1.0), 256))


def operand(held: Array, error: float = 0.0, where: Array | float = 0.0) -> Operand:
    """``held`` as an operand whose value lies ``where * error`` (relative) away from it."""
    held = np.atleast_1d(np.asarray(held, np.float32))
    exact = held.astype(np.float64)
    value = exact * (1.0 + error * where)
    # The error is stated anew, so that rounding the value cannot leave the number outside it.
    bound = np.maximum(np.abs(exact) * error, np.abs(value - exact)) if error else np.zeros_like(value)
    return Operand(held, Tracked(torch.from_numpy(value), torch.from_numpy(bound)))


def inward(wanted: Array, exact: Array) -> Array:
    """``wanted`` (float64) as fp32, rounded towards ``exact``; subnormals may be flushed instead."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = np.asarray(wanted).astype(np.float32)
        outside = (np.abs(result.astype(np.float64) - exact) > np.abs(wanted - exact)) & (wanted != exact)
        stepped = np.nextafter(result, np.float32(0.0))
        stepped = np.where(np.abs(exact) > np.abs(wanted), np.nextafter(result, np.float32(np.inf)), stepped)
    return np.where(outside & np.isfinite(result) & (np.abs(exact) <= HUGE), stepped, result)


def exp32(ar: Arithmetic, x: Array, share: float, *, flush: bool = False) -> Array:
    """exp with ``share`` of its declared error, -1 to 1."""
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = np.exp(wide)
        wanted = exact * np.maximum(1.0 + share * (ar.exp_rel + 2.0 * U * np.abs(wide)), 0.0)
    result = inward(wanted, exact)
    return np.where(flush & (wanted < FLUSH), np.float32(0.0), result)


def log32(ar: Arithmetic, x: Array, share: float) -> Array:
    """log with ``share`` of its declared error."""
    exact = np.log(x.astype(np.float64))
    return inward(exact * (1.0 + share * ar.log_rel), exact)


def rsqrt32(ar: Arithmetic, x: Array, share: float) -> Array:
    """Reciprocal square root with ``share`` of its declared error."""
    exact = x.astype(np.float64) ** -0.5
    return inward(exact * (1.0 + share * ar.rsqrt_rel), exact)


def reciprocal32(ar: Arithmetic, x: Array, share: float) -> Array:
    """1 / x with ``share`` of a division's declared error; the exact quotient rounds where it is U."""
    exact = 1.0 / x.astype(np.float64)
    if ar.div_rel <= U:
        return exact.astype(np.float32)
    return inward(exact * (1.0 + share * ar.div_rel), exact)


def sigmoid32(ar: Arithmetic, x: Array, shares: tuple[float, float]) -> Array:
    """1 / (1 + exp(-x)) as written."""
    with np.errstate(over="ignore"):
        denominator = np.float32(1.0) + exp32(ar, -x, shares[0])
    return reciprocal32(ar, denominator, shares[1])


def softplus32(ar: Arithmetic, x: Array, shares: tuple[float, float]) -> Array:
    """log(1 + exp(x)) as written, x above 20."""
    inner = np.float32(1.0) + exp32(ar, np.minimum(x, np.float32(20.0)), shares[0])
    return np.where(x > np.float32(20.0), x, log32(ar, inner, shares[1]))


def ratios(bound: Tracked, result: Array) -> Array:
    """|result - value| / bound, 0 where nothing is claimed."""
    value, error = bound.v.numpy(), bound.e.numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = np.abs(np.asarray(result).astype(np.float64) - value)
        ratio = np.where(distance == 0.0, 0.0, distance / error)
    return np.where(np.isfinite(error), ratio, 0.0)


def covered(bound: Tracked, result: Array) -> None:
    """Assert that every result lies within its bound; the bound itself is a double, 1e-9 loose."""
    ratio = ratios(bound, result)
    worst = int(np.nan_to_num(ratio, nan=math.inf).argmax())
    assert ratio.flat[worst] <= 1.0 + 1e-9, (
        f"element {worst}: {np.asarray(result).flat[worst]!r} for {float(bound.v.flatten()[worst])!r} "
        f"+- {float(bound.e.flatten()[worst])!r}, ratio {ratio.flat[worst]}"
    )
