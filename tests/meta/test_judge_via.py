"""A store that rounds twice: ``excess`` against every number of the dtype in between (contract, 1.5).

The reference sorts all numbers of ``via``, casts each with torch, and reads off which of them
arrive at an observed number; reals in between round at the midpoints.
"""

import math
from dataclasses import dataclass

import pytest
import torch

from oracle.stored import excess

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = [(BF16, FP16), (BF16, FP32), (FP16, BF16), (FP16, FP32), (BF16, torch.float64)]
EACH = pytest.mark.parametrize(("via", "stored"), PAIRS, ids=lambda x: str(x).removeprefix("torch."))
LIMIT = {BF16: 2.0**128, FP16: 2.0**16}


def patterns(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of a 16-bit dtype."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


@dataclass(frozen=True)
class Reached:
    """Stored numbers that can arise, and the reals ``low`` to ``high`` of each."""

    stored: Tensor
    low: Tensor
    high: Tensor


def reached(via: torch.dtype, stored: torch.dtype) -> Reached:
    """By brute force over every number of ``via``."""
    numbers = patterns(via)
    numbers = numbers[~numbers.isnan()]
    numbers = numbers[numbers.double().sort(stable=True).indices]
    numbers = numbers[torch.cat((torch.tensor([True]), numbers[1:].double() != numbers[:-1].double()))]
    finite = numbers.double().clamp(-LIMIT[via], LIMIT[via])
    edges = torch.cat(
        (torch.tensor([-math.inf]).double(), (finite[1:] + finite[:-1]) / 2, torch.tensor([math.inf]))
    )
    arrived = numbers.to(stored)
    changes = (arrived[1:].double() != arrived[:-1].double()).nonzero().flatten() + 1
    first = torch.cat((torch.tensor([0]), changes))
    last = torch.cat((changes, torch.tensor([len(arrived)])))
    return Reached(arrived[first], edges[first], edges[last])


@EACH
def test_the_reals_of_every_reachable_number(via: torch.dtype, stored: torch.dtype) -> None:
    found = reached(via, stored)
    assert len(found.stored) > 8_000  # fp16 has 30 of bf16's 254 binades, bf16 an eighth of fp16's digits
    for end, outwards, inner in ((found.low, -math.inf, found.high), (found.high, math.inf, found.low)):
        some = end.isfinite()
        at, x = end[some], found.stored[some]
        assert not excess(at, x, via).any()
        beyond = torch.nextafter(at, torch.full_like(at, outwards))
        assert torch.equal(excess(beyond, x, via), (beyond - at).abs())
        far = at + torch.where(torch.tensor(outwards < 0), -at.abs(), at.abs())
        assert torch.equal(excess(far, x, via), (far - at).abs())
        middle = at / 2 + inner[some].clamp(-1e300, 1e300) / 2
        assert not excess(middle, x, via).any()
    # An infinite observation is reached from as far as one likes, and from the other side never.
    for sign in (1.0, -1.0):
        infinite = torch.tensor([sign * math.inf]).to(stored)
        assert float(excess(torch.tensor([sign * 1e300], dtype=torch.float64), infinite, via)) == 0.0
        assert float(excess(torch.tensor([-sign * 1e300], dtype=torch.float64), infinite, via)) >= 1e300


@EACH
def test_torch_rounds_as_the_interval_says(via: torch.dtype, stored: torch.dtype) -> None:
    """The next fp32 number inside an end goes to the observed one, the next outside to another."""
    found = reached(via, stored)
    for end, outwards in ((found.low, -math.inf), (found.high, math.inf)):
        some = end.isfinite() & (found.low < found.high)
        at, x = end[some].float(), found.stored[some]
        assert torch.equal(at.double(), end[some])  # midpoints have few digits
        inside = torch.nextafter(at, torch.full_like(at, -outwards))
        outside = torch.nextafter(at, torch.full_like(at, outwards))
        assert torch.equal(inside.to(via).to(stored).double(), x.double())
        assert bool((outside.to(via).to(stored).double() != x.double()).all())


@EACH
def test_numbers_that_nothing_reaches(via: torch.dtype, stored: torch.dtype) -> None:
    if stored in LIMIT:
        all_stored = patterns(stored)
    else:  # the numbers of via and both neighbours of each, the largest one included
        wide = patterns(via).to(stored)
        wide = wide[~wide.isnan()]
        ends = [torch.full_like(wide, end) for end in (math.inf, -math.inf)]
        all_stored = torch.cat((wide, *(torch.nextafter(wide, end) for end in ends)))
    possible = torch.isin(all_stored.double(), reached(via, stored).stored.double())
    nan = all_stored.isnan()
    for value in (0.0, 1.0, -3.0e38, 6.5e4, math.inf):
        distance = excess(torch.full(all_stored.shape, value, dtype=torch.float64), all_stored, via)
        assert bool(distance[nan].isnan().all())
        assert bool(distance[~nan & ~possible].isinf().all())
        if math.isfinite(value):
            assert not bool(distance[possible & all_stored.isfinite()].isinf().any())
    assert bool((~possible & ~nan).any())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounding_twice_to_one_dtype_is_rounding_once(dtype: torch.dtype) -> None:
    x = patterns(dtype)
    x = x[~x.isnan()]
    generator = torch.Generator().manual_seed(3)
    value = x.double().clamp(-1e30, 1e30) * (1 + 0.01 * torch.randn(len(x), generator=generator).double())
    assert torch.equal(excess(value, x, dtype), excess(value, x))
    assert torch.equal(excess(value, x, FP32), excess(value, x))
    assert torch.equal(excess(value, x, None), excess(value, x))


@pytest.mark.parametrize("seed", range(4))
def test_what_rounds_has_no_excess(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).to(torch.int32)
    x = raw.view(FP32)
    x = torch.cat((x[x.isfinite()], torch.randn(1 << 14, generator=generator)))
    x = x[x.view(torch.int32) % 4096 != 0]  # ties: both neighbours have them
    for via, stored in PAIRS:
        assert not excess(x.double(), x.to(via).to(stored), via).any()
        moved = x.to(via).to(stored)
        # What skips the first rounding is seen as soon as it makes a difference.
        once = x.to(stored)
        differs = once.double() != moved.double()
        assert bool((excess(x.double(), once, via)[differs] > 0.0).all())
        assert bool(differs.any())
