"""``excess`` over every bf16 and fp16 number: zero exactly for what rounds to it.

The independent definition is in integers: all finite numbers of a format are multiples of
its smallest subnormal, so midpoints are exact integers once that step is halved. Round to
nearest, ties to even. On a tie itself the excess is 0 for both neighbours: either may be
what a nearby fp32 number rounds to.
"""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from oracle.stored import excess

Tensor = torch.Tensor
FORMATS = {torch.bfloat16: (7, 8), torch.float16: (10, 5)}
"""Stored mantissa and exponent bits."""
DTYPES = pytest.mark.parametrize("dtype", list(FORMATS), ids=["bf16", "fp16"])


def patterns(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a 16-bit format, in the order of their bits."""
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)


def _scaled(x: Fraction, exponent: int) -> Fraction:
    """x times a power of two."""
    return x * Fraction(1 << max(exponent, 0), 1 << max(-exponent, 0))


def value_of(code: int, dtype: torch.dtype) -> Fraction:
    """A non-negative pattern's value from its fields; infinity counts as the next power of two."""
    mantissa_bits, exponent_bits = FORMATS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent == 0:
        return _scaled(Fraction(mantissa), 1 - bias - mantissa_bits)
    return _scaled(1 + Fraction(mantissa, 2**mantissa_bits), exponent - bias)


def preimages(dtype: torch.dtype) -> list[tuple[Fraction, Fraction | None]]:
    """Per non-negative code up to infinity, the interval of reals that round to it."""
    mantissa_bits, exponent_bits = FORMATS[dtype]
    infinity = (2**exponent_bits - 1) << mantissa_bits
    values = [value_of(code, dtype) for code in range(infinity + 1)]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    lows = [-middles[0], *middles]
    return list(zip(lows, [*middles, None], strict=True))


@DTYPES
def test_excess_is_the_distance_to_the_preimage(dtype: torch.dtype) -> None:
    intervals = preimages(dtype)
    codes = torch.arange(len(intervals), dtype=torch.int16)
    low = torch.tensor([float(a) for a, _ in intervals], dtype=torch.float64)
    high = torch.tensor([torch.inf if b is None else float(b) for _, b in intervals], dtype=torch.float64)
    assert [Fraction(x) for x in low.tolist()] == [a for a, _ in intervals]  # midpoints are doubles
    for sign in (1, -1):
        x = sign * codes.view(dtype)
        width = (high - low).nan_to_num(posinf=1.0)
        for at in (low, (low + high.clamp(max=1e300)) / 2, high.clamp(max=1e308)):
            assert not excess(sign * at, x).any()
        for step in (2.0**-20, 0.5, 3.0, 2.0**60):
            outside = step * width
            below = excess(sign * (low - outside), x)
            assert torch.equal(below, low - (low - outside))
            above = excess(sign * (high - -outside), x)[:-1]
            assert torch.equal(above, ((high + outside) - high)[:-1])


@DTYPES
def test_excess_is_zero_exactly_for_what_rounds_there(dtype: torch.dtype) -> None:
    x = patterns(dtype)
    finite = x[x.isfinite()].double().unique()
    limit = 2 * finite[-1] - finite[-2]  # the next number, were there one
    grid = torch.cat((-limit[None], finite, limit[None]))
    step = grid[1:] - grid[:-1]
    for share in (0.0, 2.0**-13, 0.25, 0.5 - 2.0**-13, 0.5, 0.5 + 2.0**-13, 0.75, 1.0 - 2.0**-13):
        value = grid[:-1] + share * step
        rounded = value.to(dtype)
        assert not excess(value, rounded).any()
        for there in (grid[:-1].to(dtype), grid[1:].to(dtype)):
            is_it = (there == rounded) | (there.isinf() & rounded.isinf() & (there.sign() == rounded.sign()))
            free = excess(value, there) == 0.0
            assert torch.equal(free, is_it) or share == 0.5
            assert share != 0.5 or bool(free.all())  # a tie belongs to both


@DTYPES
def test_nan_is_no_number_s_rounding(dtype: torch.dtype) -> None:
    nans = patterns(dtype)[patterns(dtype).isnan()]
    assert len(nans) == 2 * (2 ** FORMATS[dtype][0] - 1)
    assert excess(torch.zeros(len(nans), dtype=torch.float64), nans).isnan().all()


@DTYPES
def test_both_zeros_have_the_same_preimage(dtype: torch.dtype) -> None:
    half = float(value_of(1, dtype)) / 2
    for zero in (0.0, -0.0):
        x = torch.tensor([zero] * 4, dtype=dtype)
        value = torch.tensor([half, -half, 3 * half, -3 * half], dtype=torch.float64)
        assert excess(value, x).tolist() == [0.0, 0.0, 2 * half, 2 * half]


@DTYPES
def test_infinity_takes_all_beyond_half_a_step_past_the_largest(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    edge = {torch.bfloat16: 2.0**128 - 2.0**119, torch.float16: 65520.0}[dtype]
    infinity = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
    for value, distance in ((edge, 0.0), (1e300, 0.0), (largest, edge - largest)):
        signed = torch.tensor([value, -value], dtype=torch.float64)
        assert excess(signed, infinity).tolist() == [distance, distance]
        assert (excess(signed, -infinity) >= edge).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_store_that_does_not_round_has_no_slack(dtype: torch.dtype) -> None:
    value = torch.tensor([1.0, -2.5, 1e-40, 3e38], dtype=torch.float64)
    moved = value + torch.tensor([2.0**-24, 0.5, 1e-42, 1e30], dtype=torch.float64)
    observed = value.to(dtype)
    assert torch.equal(excess(moved, observed), (observed.double() - moved).abs())
