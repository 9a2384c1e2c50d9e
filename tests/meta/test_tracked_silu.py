"""``tracked.silu`` against 50-digit arithmetic and against fp32 as it is evaluated: a / (1 + exp(-a))."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

from oracle.tracked import ANY_ORDER, COMPILED, FLUSH, INTERPRETED, Arithmetic, Tracked, U
from oracle.values import REGIMES, Stream
from tests.meta.fp32 import Array, Operand, covered, exp32, inward, operand, operands, ratios

ALL = pytest.mark.parametrize(
    "ar", [COMPILED, INTERPRETED, ANY_ORDER], ids=["compiled", "interpreted", "any"]
)
SHARES = st.sampled_from((-1.0, -0.5, 0.0, 1.0))
BELOW = (-104.0, -103.97, -100.0, -88.75, -88.5, -88.0, -87.4, -87.3, -87.0, -20.0, -1.2785, -1.0, 0.0)
THRESHOLDS = (*BELOW, *(-x for x in BELOW if x))


def silu32(ar: Arithmetic, x: Array, shares: tuple[float, float], *, gone: bool = False) -> Array:
    """SiLU as written, exponential and quotient with a share of their errors.

    ``gone`` is a fast division, which gives 0 where its divisor passes 2**126.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        below = np.float32(1.0) + exp32(ar, -x, shares[0])
        exact = x.astype(np.float64) / below.astype(np.float64)
        result = exact.astype(np.float32)
        if ar.div_rel > U:
            size = np.abs(exact)
            result = np.copysign(inward(size * (1.0 + shares[1] * ar.div_rel), size), x)
    return np.where(gone & (below > 2.0**126), np.float32(0.0), result)


def around(x: float, steps: int = 400) -> Array:
    """fp32 numbers next to ``x``."""
    x32 = np.float32(x)
    return x32 + np.arange(-steps, steps + 1, dtype=np.float32) * np.spacing(np.float32(max(abs(x), 1e-3)))


def dense() -> Array:
    """Numbers all over the range, evenly, by binades and next to every threshold."""
    rng = np.random.default_rng(7)
    even = rng.uniform(-120.0, 120.0, 1 << 15)
    binades = np.ldexp(rng.uniform(1, 2, 1 << 14), rng.integers(-149, 20, 1 << 14))
    signs = rng.choice((-1.0, 1.0), 1 << 14)
    saturated = REGIMES["x"]["saturated"](Stream(1, "x", 0, 0), (64, 16)).flatten()
    parts = (even, signs * binades, saturated, *(around(x) for x in THRESHOLDS))
    return np.concatenate(parts).astype(np.float32)


@pytest.mark.parametrize("low", [-1000.0, -110.0, -20.0, -1.0, 0.0, 20.0])
def test_the_value_is_silu(low: float) -> None:
    """Doubles: u (1 + |a|) of the value, under 1e-12 to |a| = 1000."""
    x = np.random.default_rng(8).uniform(low, low + abs(low) / 2 + 10.0, 200)
    found = COMPILED.silu(operand(x).known)
    with mp.workdps(50):
        for a, v in zip(x.astype(np.float32), found.v.tolist(), strict=True):
            expected = mpf(float(a)) / (1 + mp.exp(-mpf(float(a))))
            assert abs(v - expected) <= mpmath.mpf("1e-12") * abs(expected) + mpmath.mpf("1e-300")


@ALL
@pytest.mark.parametrize("gone", [False, True])
def test_dense(ar: Arithmetic, gone: bool) -> None:
    a = operand(dense())
    for shares in ((-1.0, -1.0), (1.0, 1.0), (0.0, 0.0), (1.0, -1.0), (-1.0, 1.0)):
        covered(ar.silu(a.known), silu32(ar, a.held, shares, gone=gone))


def test_numpy_stays_inside() -> None:
    for error, where in ((0.0, 0.0), (2.0**-24, 1.0), (2.0**-20, -1.0), (1e-4, 1.0)):
        a = operand(dense(), error, where)
        with np.errstate(over="ignore", under="ignore"):
            found = a.held / (np.float32(1.0) + np.exp(-a.held))
        covered(INTERPRETED.silu(a.known), found)
        covered(ANY_ORDER.silu(a.known), found)


def test_torch_stays_inside() -> None:
    x = torch.from_numpy(dense())
    for found in (torch.nn.functional.silu(x), x * torch.sigmoid(x)):
        # Its exponential and order are its own: twice the bound is what such a form may need.
        bound = ANY_ORDER.silu(operand(x.numpy()).known)
        covered(Tracked(bound.v, 2.0 * bound.e), found.numpy())


@ALL
@given(a=operands(low=-40, high=8, most=1e-3), shares=st.tuples(SHARES, SHARES), gone=st.booleans())
def test_operands_with_errors(ar: Arithmetic, a: Operand, shares: tuple[float, float], gone: bool) -> None:
    covered(ar.silu(a.known), silu32(ar, a.held, shares, gone=gone))


@ALL
@pytest.mark.parametrize("error", [2.0**-24, 2.0**-12, 0.01, 0.25])
@pytest.mark.parametrize("where", [-1.0, 1.0])
def test_errors_at_the_thresholds(ar: Arithmetic, error: float, where: float) -> None:
    """Where SiLU turns (-1.278, its slope is 0) and bends most (0), second-order terms count."""
    for x in THRESHOLDS:
        a = operand(around(x), error, where)
        for shares in ((-1.0, -1.0), (1.0, 1.0)):
            covered(ar.silu(a.known), silu32(ar, a.held, shares))


@ALL
def test_the_bound_is_reached(ar: Arithmetic) -> None:
    """Adversarial fp32 comes within a third of the bound wherever something is claimed at all."""
    for low, high in ((-80.0, -20.0), (-20.0, -2.0), (-2.0, 2.0), (2.0, 30.0)):
        a = operand(np.linspace(low, high, 1 << 14))
        worst = max(ratios(ar.silu(a.known), silu32(ar, a.held, (s, -s))).max() for s in (-1.0, 1.0))
        assert worst > 1 / 3, (low, worst)
    moved = operand(np.linspace(0.5, 20.0, 1 << 12), 1e-3, 1.0)
    assert ratios(ar.silu(moved.known), silu32(ar, moved.held, (0.0, 0.0))).max() > 0.9


@ALL
def test_the_bound_is_the_sum_of_its_roundings(ar: Arithmetic) -> None:
    """At most exponential, addition and quotient, and all of the value only where a division may flush."""
    x = dense()
    bound = ar.silu(operand(x).known)
    a, v = np.abs(x).astype(np.float64), bound.v.abs().numpy()
    share = torch.sigmoid(-torch.from_numpy(x).double()).numpy()
    rel = share * (ar.exp_rel + 2.0 * U * a) + U + ar.div_rel
    most = 1.02 * rel * v + FLUSH + np.where(x < -87.3, v, 0.0)
    assert bool((bound.e.numpy() <= most * (1 + 1e-12)).all())


def test_what_is_not_finite() -> None:
    for x in (np.nan, np.inf, -np.inf):
        bound = COMPILED.silu(operand(x).known)
        assert not bool(bound.v.isfinite().any()) or not bool(bound.e.isfinite().any())
    far = COMPILED.silu(operand(np.array([3e38, -3e38, 1e4, -1e4], np.float32)).known)
    with np.errstate(over="ignore"):
        for gone in (False, True):
            held = np.array([3e38, -3e38, 1e4, -1e4], np.float32)
            covered(far, silu32(COMPILED, held, (0.0, 0.0), gone=gone))
    assert far.v.tolist()[1::2] == [0.0, 0.0]
    assert float(far.e[1]) <= FLUSH
