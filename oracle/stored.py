"""Numbers as memory holds them: their bits, the reals that a store rounds to them, how far off they are."""

import math
from functools import cache

import torch

Tensor = torch.Tensor
NARROW = {torch.bfloat16: 128.0, torch.float16: 16.0}
"""Stores that round, and log2 of the first power of two past their range."""
INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The elements' bits as integers of their size."""
    return x.contiguous().view(INTEGER_OF[x.element_size()])


def same_bits(a: Tensor, b: Tensor, *, any_nan: bool = False) -> Tensor:
    """Elementwise equality of bits; with ``any_nan`` two NaNs agree whatever their payload."""
    same = bits(a) == bits(b)
    if any_nan and a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return same


def excess(value: Tensor, observed: Tensor, via: torch.dtype | None = None) -> Tensor:
    """Distance in float64 from ``value`` to the numbers that round to ``observed``.

    With ``via`` they round to that dtype first and then to the observed one; the distance is
    infinite where no number of dtype ``via`` does.
    """
    low, high = preimage(observed)
    via = via if via in NARROW and via != observed.dtype else None
    if via is not None:
        low, high = _preimage_of_both(low, high, observed, via)
    distance = torch.maximum(low - value, value - high).clamp(min=0.0)
    if via is not None:
        distance = torch.where(low > high, math.inf, distance)
    return torch.where(observed.isnan(), math.nan, distance)


def _ordered(x: Tensor) -> Tensor:
    """Codes of a 16-bit dtype in the order of their values; -0 and 0 have one."""
    raw = bits(x).int()
    return torch.where(raw >= 0, raw, -32768 - raw)


def _decoded(code: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of such codes; past the largest finite number the next power of two."""
    limit = 2.0 ** NARROW[dtype]
    return _encoded(code, dtype).double().clamp(-limit, limit)


def preimage(x: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of reals that round to x: midpoints to its neighbours; overflow included."""
    if x.dtype not in NARROW:
        return x.double(), x.double()
    low, high = _intervals(x.dtype)
    place = bits(x).int() + 32768
    return low[place], high[place]


@cache
def _intervals(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The ends of the interval of every number of a 16-bit dtype, at its bits plus 32768."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    middle, limit = _ordered(x), 2.0 ** NARROW[dtype]
    here = _decoded(middle, dtype)
    low = (here + _decoded(middle - 1, dtype)) / 2
    high = (here + _decoded(middle + 1, dtype)) / 2
    edge = (limit + torch.finfo(dtype).max) / 2
    positive, infinite = bits(x) >= 0, x.isinf()
    low = torch.where(infinite, torch.where(positive, edge, -math.inf), low)
    high = torch.where(infinite, torch.where(positive, math.inf, -edge), high)
    return low, high


def _preimage_of_both(low: Tensor, high: Tensor, observed: Tensor, via: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reals that round, in dtype ``via``, to a number that rounds to ``observed``; may be none.

    Those numbers lie between ``low`` and ``high``; at a tie the ends themselves may round away.
    """
    least, most = low.to(via), high.to(via)
    seen = observed.double()
    up = (least.double() < low) | (least.to(observed.dtype).double() != seen)
    down = (most.double() > high) | (most.to(observed.dtype).double() != seen)
    first, last = _ordered(least) + up.int(), _ordered(most) - down.int()
    first_low = preimage(_encoded(first, via))[0]
    last_high = preimage(_encoded(last, via))[1]
    none = first > last
    ones = torch.ones_like(low)
    return torch.where(none, ones, first_low), torch.where(none, -ones, last_high)


def _encoded(code: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(code >= 0, code, -32768 - code).to(torch.int16).view(dtype)


def over_bound(value: Tensor, bound: Tensor, observed: Tensor, via: torch.dtype | None) -> Tensor:
    """Excess over bound; 0 where nothing can be claimed, infinite where a claim is plainly broken."""
    distance = excess(value, observed, via)
    ratio = torch.where(distance == 0.0, 0.0, distance / bound)
    finite = value.isfinite()
    # Not finite exactly where the exact result is not: NaN and infinities are one class, since
    # fp32 may reach either by overflowing on the way.
    ratio = torch.where(finite, ratio, torch.where(observed.isfinite(), math.inf, 0.0))
    ratio = torch.where(finite & ~bound.isfinite(), 0.0, ratio)
    return ratio.nan_to_num(nan=math.inf, posinf=math.inf)
