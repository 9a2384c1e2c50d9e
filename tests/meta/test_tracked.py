"""Every tracked operation covers every fp32 evaluation that its declaration allows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.tracked import (
    ANY_ORDER,
    ARITHMETICS,
    COMPILED,
    FACTORED,
    FLT_MAX,
    INTERPRETED,
    Arithmetic,
    Tracked,
    arithmetic,
    constant,
)
from tests.meta.fp32 import (
    HUGE,
    Operand,
    covered,
    exp32,
    operand,
    operands,
    rsqrt32,
    sigmoid32,
    softplus32,
)

ALL = pytest.mark.parametrize(
    "ar", [COMPILED, INTERPRETED, ANY_ORDER], ids=["compiled", "interpreted", "any"]
)
SHARES = st.sampled_from((-1.0, -0.5, 0.0, 1.0))


@given(operands(), operands())
def test_mul(a: Operand, b: Operand) -> None:
    bound = COMPILED.mul(a.known, b.known)
    with np.errstate(over="ignore", under="ignore"):
        covered(within_range(bound), a.held * b.held)


def within_range(bound: Tracked) -> Tracked:
    """The bound without the products past the fp32 range: there an implementation holds infinity."""
    return Tracked(bound.v, bound.e.where(bound.magnitude <= FLT_MAX, torch.inf))


@ALL
@given(operands(low=64, sign="positive"), operands(low=64), SHARES)
def test_products_past_the_range_end_where_that_is_harmless(
    ar: Arithmetic, a: Operand, b: Operand, share: float
) -> None:
    # Sums withdraw the claim; exp of a decay and sigmoid take infinity as they take 1e39.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        held, known = a.held * b.held, ar.mul(a.known, b.known)
        covered(ar.sigmoid(known), sigmoid32(ar, held, (share, share)))
        covered(ar.exp(Tracked(-known.v.abs(), known.e)), exp32(ar, -np.abs(held), share))
        covered(ar.add(known, b.known), held + b.held)
        covered(ar.sum(Tracked(known.v[:, None], known.e[:, None])), held)


@given(operands(), st.sampled_from((128**-0.5, 5**-0.5, 1e-6, 1.0, 0.1)))
def test_scale(a: Operand, factor: float) -> None:
    with np.errstate(over="ignore", under="ignore"):
        covered(COMPILED.scale(a.known, factor), a.held * np.float32(factor))


@given(operands(), operands(), st.sampled_from((1.0, -1.0)))
def test_add(a: Operand, b: Operand, sign: float) -> None:
    with np.errstate(over="ignore"):
        covered(COMPILED.add(a.known, b.known, sign), a.held + np.float32(sign) * b.held)


@given(operands(), operands(), operands())
def test_mul_then_add_fused_or_not(a: Operand, b: Operand, c: Operand) -> None:
    bound = COMPILED.add(COMPILED.mul(a.known, b.known), c.known)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        covered(bound, a.held * b.held + c.held)
        # A product of two fp32 numbers is exact in double; the second rounding adds 2**-53 at most.
        wide = a.held.astype(np.float64) * b.held.astype(np.float64) + c.held.astype(np.float64)
        covered(bound, wide.astype(np.float32))


@given(operands(), operands(), st.sampled_from((1, 2, 4, 16, 64, 256)))
def test_dot_in_any_order_fused_or_not(a: Operand, b: Operand, n: int) -> None:
    bound = ANY_ORDER.sum(_folded(ANY_ORDER, a, b, n))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        products = (a.held * b.held).reshape(-1, n)
        for order in (np.arange(n), np.arange(n)[::-1], np.argsort(-np.abs(products[0]), kind="stable")):
            total = products[:, order[0]].copy()
            fused = total.copy()
            for i in order[1:]:
                total = total + products[:, i]
                exact = a.held.reshape(-1, n)[:, i].astype(np.float64) * b.held.reshape(-1, n)[:, i]
                fused = (exact + fused).astype(np.float32)
            covered(bound, total)
            covered(bound, fused)
        covered(bound, products.sum(-1))
        covered(INTERPRETED.sum(_folded(INTERPRETED, a, b, n)), products.sum(-1))


def _folded(ar: Arithmetic, a: Operand, b: Operand, n: int) -> Tracked:
    product = ar.mul(a.known, b.known)
    return Tracked(product.v.reshape(-1, n), product.e.reshape(-1, n))


def test_sum_at_the_end_of_the_range_may_overflow_on_the_way() -> None:
    # The exact sum is a finite fp32 number's neighbour, yet three roundings upwards reach infinity.
    step = 2.0**104
    terms = np.array([2.0**127, HUGE - 2.0**127 - 2 * step, 0, 0, 0, 0], np.float64)
    terms[2:4] = step * (0.5 + 2.0**-20)
    terms[4] = step * 0.5
    a = operand(terms.astype(np.float32))
    bound = ANY_ORDER.sum(a.known)
    with np.errstate(over="ignore"):
        total = np.float32(0)
        for term in a.held:
            total = np.float32(total + term)
    assert float(a.known.v.sum()) <= FLT_MAX
    assert np.isinf(total)
    covered(bound, total)


@ALL
@given(a=operands(low=-30, high=7, most=1e-3), share=SHARES, flush=st.booleans())
def test_exp(ar: Arithmetic, a: Operand, share: float, flush: bool) -> None:
    with np.errstate(over="ignore", under="ignore"):
        covered(ar.exp(a.known), exp32(ar, a.held, share, flush=flush))


@ALL
@given(offsets=st.lists(st.integers(-400, 400), min_size=1, max_size=20), share=SHARES)
def test_exp_near_both_ends_of_the_range(ar: Arithmetic, offsets: list[int], share: float) -> None:
    for end in (88.72283, -87.33654, -103.97208):
        x = np.float32(end) + np.array([*offsets, -1, 0, 1], np.float32) * np.spacing(np.float32(end))
        a = operand(x)
        covered(ar.exp(a.known), exp32(ar, a.held, share))


@given(st.sampled_from((0.0, -0.0, -1e4, -3e38, -np.inf)))
def test_exp_of_what_is_certainly_zero(x: float) -> None:
    bound = COMPILED.exp(operand(x).known)
    assert float(bound.v) in (0.0, 1.0)
    assert float(bound.e) < 1e-6


@ALL
@given(a=operands(sign="positive", low=-100), share=SHARES)
def test_rsqrt(ar: Arithmetic, a: Operand, share: float) -> None:
    covered(ar.rsqrt(a.known), rsqrt32(ar, a.held, share))


def test_rsqrt_claims_nothing_where_the_error_reaches_half() -> None:
    a = operand(np.array([1.0, 2.0], np.float32), 0.9, 1.0)
    assert COMPILED.rsqrt(Tracked(a.known.v, a.known.v * 0.5)).e.isinf().all()


@ALL
@given(a=operands(low=-30, high=12, most=1e-3), shares=st.tuples(SHARES, SHARES))
def test_sigmoid(ar: Arithmetic, a: Operand, shares: tuple[float, float]) -> None:
    with np.errstate(under="ignore", over="ignore"):
        covered(ar.sigmoid(a.known), sigmoid32(ar, a.held, shares))


@ALL
@given(
    x=st.lists(st.floats(-120, 120, width=32), min_size=1, max_size=50),
    error=st.sampled_from((0.0, 2.0**-24, 2.0**-20, 2.0**-12)),
    where=st.sampled_from((-1.0, 1.0)),
    shares=st.tuples(SHARES, SHARES),
)
def test_sigmoid_and_softplus_at_ordinary_arguments(
    ar: Arithmetic, x: list[float], error: float, where: float, shares: tuple[float, float]
) -> None:
    a = operand(x, error, where)
    with np.errstate(under="ignore", over="ignore"):
        covered(ar.sigmoid(a.known), sigmoid32(ar, a.held, shares))
        covered(ar.softplus(a.known), softplus32(ar, a.held, shares))


@ALL
@given(a=operands(low=-30, high=20, most=2.0**-20), shares=st.tuples(SHARES, SHARES))
def test_softplus(ar: Arithmetic, a: Operand, shares: tuple[float, float]) -> None:
    with np.errstate(under="ignore"):
        covered(ar.softplus(a.known), softplus32(ar, a.held, shares))


@ALL
@pytest.mark.parametrize("error", [0.0, 2.0**-24, 2.0**-20, 1e-4])
@pytest.mark.parametrize("where", [-1.0, -0.5, 0.5, 1.0])
def test_softplus_on_either_side_of_20(ar: Arithmetic, error: float, where: float) -> None:
    steps = np.arange(-64, 65, dtype=np.float32) * np.spacing(np.float32(20.0))
    a = operand(np.float32(20.0) + steps, error, where)
    for shares in ((-1.0, -1.0), (1.0, 1.0), (0.0, 0.0), (1.0, -1.0)):
        covered(ar.softplus(a.known), softplus32(ar, a.held, shares))


def test_a_threshold_of_10_is_seen() -> None:
    # Above 10 the identity is log1p(e**-x) away from the literal, 4.5e-5 at 10: outside the bound.
    a = operand(np.float32(10.5))
    assert abs(float(a.held[0]) - float(COMPILED.softplus(a.known).v)) > 2 * float(
        COMPILED.softplus(a.known).e
    )


def test_one_infinite_operand_claims_nothing() -> None:
    for x in (np.inf, -np.inf, np.nan):
        a, one = operand(x).known, operand(1.0).known
        for result in (COMPILED.mul(a, one), COMPILED.add(a, one)):
            assert not result.v.isfinite().any() or not result.e.isfinite().any()


def test_a_constant_covers_its_rounding() -> None:
    for value in (1e-6, 128**-0.5, 0.1, 3.0):
        assert abs(float(np.float32(value)) - value) <= float(constant(value).e)


def test_lookup_names_what_there_is() -> None:
    assert {arithmetic(*key) for key in ARITHMETICS} == {COMPILED, INTERPRETED, ANY_ORDER, FACTORED}
    with pytest.raises(ValueError, match="no arithmetic 'exact' on cpu; declare one of: any-order-fp32, fac"):
        arithmetic("exact", "cpu")


def test_masses_of_numbers_stay_tensors() -> None:
    a = operand(np.ones(6, np.float32)).known
    assert COMPILED.sum(Tracked(a.v.reshape(2, 3), a.e.reshape(2, 3))).v.shape == torch.Size([2])
