"""The bounds are not slack: arithmetic as declared comes close to each; and numpy is as declared."""

import numpy as np
import pytest
import torch

from oracle.recurrence import normalise, stepwise
from oracle.tracked import ANY_ORDER, COMPILED, FLUSH, INTERPRETED, SUBNORMAL, Arithmetic, Tracked, U, exact
from tests.meta.fp32 import (
    covered,
    exp32,
    operand,
    ratios,
    reciprocal32,
    rsqrt32,
    sigmoid32,
    softplus32,
)

ALL = pytest.mark.parametrize(
    "ar", [COMPILED, INTERPRETED, ANY_ORDER], ids=["compiled", "interpreted", "any"]
)
RNG = np.random.default_rng(20240229)
ONES = (1.0 + 2.0**-23 * RNG.integers(0, 2**23, 1 << 16)).astype(np.float32)
"""65,536 numbers from 1 to 2: products and sums of them round by up to half a step."""
BOTH = (-1.0, 1.0)


def test_mul_and_add_reach_their_bounds() -> None:
    a, b = operand(ONES), operand(ONES[::-1].copy())
    assert ratios(COMPILED.mul(a.known, b.known), a.held * b.held).max() > 0.99
    assert ratios(COMPILED.add(a.known, b.known), a.held + b.held).max() > 0.99
    assert ratios(COMPILED.add(a.known, b.known, -1.0), a.held - b.held).max() == 0.0


def test_operand_errors_add_up_to_the_bound() -> None:
    # Both factors low by their whole error, both terms likewise.
    a, b = operand(ONES, 1e-3, 1.0), operand(ONES[::-1].copy(), 1e-3, 1.0)
    assert ratios(COMPILED.mul(a.known, b.known), a.held * b.held).min() > 0.99
    assert ratios(COMPILED.add(a.known, b.known), a.held + b.held).min() > 0.99
    opposed = operand(ONES[::-1].copy(), 1e-3, -1.0)
    assert ratios(COMPILED.add(a.known, opposed.known, -1.0), a.held - opposed.held).min() > 0.99


def test_a_product_that_underflows_is_half_a_step_off() -> None:
    # The last step's half is 2**-150; the bound is twice that, and nothing comes closer.
    a = operand(np.float32(2.0**-75))
    with np.errstate(under="ignore"):
        bound = COMPILED.mul(a.known, a.known)
        assert ratios(bound, a.held * a.held).max() > 0.49
    assert float(bound.e) < 1.01 * SUBNORMAL


@ALL
def test_exp_reaches_its_bound(ar: Arithmetic) -> None:
    for low, high, share in ((-80.0, 0.0, 0.95), (-1.0, 0.0, 0.75), (-1e-3, 0.0, 0.7)):
        a = operand(np.linspace(low, high, 1 << 14))
        assert max(ratios(ar.exp(a.known), exp32(ar, a.held, s)).max() for s in BOTH) > share
    moved = operand(np.linspace(-5.0, 0.0, 1 << 14), 0.01, -1.0)
    assert ratios(ar.exp(moved.known), exp32(ar, moved.held, 1.0)).max() > 0.97


@ALL
def test_rsqrt_reaches_its_bound(ar: Arithmetic) -> None:
    a = operand(np.linspace(1.0, 4.0, 1 << 16))
    assert max(ratios(ar.rsqrt(a.known), rsqrt32(ar, a.held, s)).max() for s in BOTH) > 0.99
    moved = operand(np.linspace(1.0, 4.0, 1 << 14), 0.01, 1.0)
    assert ratios(ar.rsqrt(moved.known), rsqrt32(ar, moved.held, 1.0)).max() > 0.98


@ALL
def test_sigmoid_reaches_its_bound(ar: Arithmetic) -> None:
    # Just below 1 a correct quotient is off by half of U at most, so 3/4 is the most there.
    for low, high, share in ((-80.0, 0.0, 0.9), (-2.0, 2.0, 0.75), (8.0, 20.0, 0.7)):
        a = operand(np.linspace(low, high, 1 << 14))
        found = [ratios(ar.sigmoid(a.known), sigmoid32(ar, a.held, (s, -s))).max() for s in BOTH]
        assert max(found) > share, (low, found)
    moved = operand(np.linspace(-5.0, 5.0, 1 << 14), 1e-3, -1.0)
    assert ratios(ar.sigmoid(moved.known), sigmoid32(ar, moved.held, (-1.0, 1.0))).max() > 0.95


@ALL
def test_softplus_reaches_its_bound(ar: Arithmetic) -> None:
    for low, high, share in ((-17.0, -5.0, 0.8), (-2.0, 2.0, 0.8), (5.0, 20.0, 0.9)):
        a = operand(np.linspace(low, high, 1 << 14))
        found = [ratios(ar.softplus(a.known), softplus32(ar, a.held, (s, s))).max() for s in BOTH]
        assert max(found) > share, (low, found)
    # The literal expression is exactly 0 below -17, and the bound is what that costs.
    gone = operand(np.linspace(-17.5, -17.4, 100))
    held = softplus32(ar, gone.held, (0.0, 0.0))
    assert not held.any()
    assert ratios(ar.softplus(gone.known), held).min() > 0.3
    beyond = operand(np.linspace(20.5, 1e4, 100))
    assert float(ar.softplus(beyond.known).e.max()) == 0.0


def _spread(low: float, high: float) -> np.ndarray:
    """A quarter of a million fp32 numbers, evenly spread and each moved by a few steps."""
    x = np.linspace(low, high, 1 << 18).astype(np.float32)
    return np.asarray(np.clip(x + RNG.integers(-9, 10, x.size).astype(np.float32) * np.spacing(x), low, high))


def _worst(found: np.ndarray, exact: np.ndarray) -> float:
    """Largest relative error, in units of U, of results that are normal numbers."""
    normal = np.abs(exact) > FLUSH
    return float((np.abs(found - exact)[normal] / np.abs(exact)[normal]).max() / U)


def test_numpy_exp_is_as_declared() -> None:
    for low, high in ((-87.3, 88.7), (-1.0, 1.0), (-0.01, 0.01), (-20.0, 0.0)):
        x = _spread(low, high)
        assert _worst(np.exp(x), np.exp(x.astype(np.float64))) * U <= INTERPRETED.exp_rel
    assert np.exp(np.float32(-np.inf)) == 0.0
    with np.errstate(over="ignore", under="ignore"):
        assert np.exp(np.float32(90)) == np.inf
        assert np.exp(np.float32(-104)) == 0.0


def test_numpy_log_is_as_declared() -> None:
    next_to_one = (1.0 + 2.0**-23 * np.arange(1 << 18)).astype(np.float32)
    for x in (next_to_one, _spread(1.0, 3.0), np.exp2(_spread(0.0, 127.9)), np.exp2(_spread(-125.0, 0.0))):
        assert _worst(np.log(x), np.log(x.astype(np.float64))) * U <= INTERPRETED.log_rel
    assert np.log(np.float32(1)) == 0.0


def test_numpy_reciprocals_are_as_declared() -> None:
    x = np.concatenate((_spread(1.0, 4.0), np.exp2(_spread(-125.0, 127.0))))
    one = np.float32(1.0)
    assert _worst(one / np.sqrt(x), x.astype(np.float64) ** -0.5) * U <= INTERPRETED.rsqrt_rel
    assert _worst(one / x, 1.0 / x.astype(np.float64)) * U <= INTERPRETED.div_rel * (1 + 1e-12)
    assert np.array_equal(reciprocal32(INTERPRETED, x, 1.0), one / x)


def test_numpy_composites_stay_inside() -> None:
    one, twenty = np.float32(1.0), np.float32(20.0)
    for low, high in ((-120.0, 120.0), (-20.0, 20.5), (-1.0, 1.0), (19.99, 20.01)):
        a = operand(_spread(low, high))
        with np.errstate(over="ignore", under="ignore"):
            covered(INTERPRETED.sigmoid(a.known), one / (one + np.exp(-a.held)))
            literal = np.where(a.held > twenty, a.held, np.log(one + np.exp(a.held)))
        covered(INTERPRETED.softplus(a.known), literal)


@pytest.mark.parametrize("seed", range(4))
def test_a_window_in_numpy_stays_inside_and_near(seed: int) -> None:
    """The recurrence in fp32 against its tracked bounds: covered, and within a factor of 200."""
    rng = np.random.default_rng(seed)
    N, H, Q, K, V = 2, 2, 6, 64, 32
    q, k = rng.standard_normal((2, N, H, Q, K)).astype(np.float32)
    k[1] = k[1, :, :1] + np.float32(0.03) * k[1]  # nearly parallel keys: corrections cancel
    v = rng.standard_normal((N, H, Q, V)).astype(np.float32)
    g = -(np.float32(5.0) * rng.random((N, H, Q, K)) ** 6).astype(np.float32)
    beta = rng.random((N, H, Q)).astype(np.float32)
    S = rng.standard_normal((N, H, V, K)).astype(np.float32)
    scaled = INTERPRETED.scale(normalise(_exact(q), INTERPRETED), K**-0.5)
    unit = normalise(_exact(k), INTERPRETED)
    bounds = stepwise(scaled, unit, _exact(v), _exact(g), _exact(beta), _exact(S), INTERPRETED)
    eps, one, factor = np.float32(1e-6), np.float32(1.0), np.float32(K**-0.5)
    largest = 0.0
    for t in range(Q):
        kt, qt = k[:, :, t], q[:, :, t]
        kt = kt * (one / np.sqrt((kt * kt).sum(-1, keepdims=True) + eps))
        qt = qt * (one / np.sqrt((qt * qt).sum(-1, keepdims=True) + eps) * factor)
        S = S * np.exp(g[:, :, t])[:, :, None, :]
        u = beta[:, :, t, None] * (v[:, :, t] - (S * kt[:, :, None, :]).sum(-1))
        S = S + u[..., None] * kt[:, :, None, :]
        for bound, result in ((bounds.u, u), (bounds.o, (S * qt[:, :, None, :]).sum(-1))):
            covered(bound[:, :, t], result)
            largest = max(largest, float(ratios(bound[:, :, t], result).max()))
    covered(bounds.state, S)
    assert largest > 1 / 200


def _exact(x: np.ndarray) -> Tracked:
    return exact(torch.from_numpy(x))
