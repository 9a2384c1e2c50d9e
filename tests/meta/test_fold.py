"""``fold``: both orders of evaluation count, and what the pieces of a bound promise."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.recurrence import fold
from oracle.tracked import COMPILED, FLT_MAX, Tracked, exact, in_range, larger, select

Tensor = torch.Tensor
FEW = st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3)
ERRORS = st.lists(st.floats(0, 1e3), min_size=3, max_size=3)


def tracked(v: list[float], e: list[float]) -> Tracked:
    return Tracked(torch.tensor(v, dtype=torch.float64), torch.tensor(e, dtype=torch.float64))


@given(FEW, ERRORS, FEW, ERRORS)
def test_larger_holds_whichever_way_was_taken(
    v: list[float], e: list[float], w: list[float], f: list[float]
) -> None:
    a, b = tracked(v, e), tracked(w, f)
    both = larger(a, b)
    assert torch.equal(both.v, a.v)
    assert bool((both.e >= a.e).all())
    # Any number within either bound is within the common one, up to the rounding of a double.
    reach = torch.maximum((b.v + b.e - both.v).abs(), (b.v - b.e - both.v).abs())
    assert bool((reach <= both.e * (1 + 1e-15) + 1e-12).all())
    assert bool(((both.e <= a.e) | (both.e <= reach * (1 + 1e-15) + 1e-12)).all())  # and no larger


@given(FEW, ERRORS, FEW, ERRORS, st.lists(st.booleans(), min_size=3, max_size=3))
def test_select_takes_value_and_bound_together(
    v: list[float], e: list[float], w: list[float], f: list[float], on: list[bool]
) -> None:
    found = select(torch.tensor(on), tracked(v, e), tracked(w, f))
    for i, first in enumerate(on):
        assert (float(found.v[i]), float(found.e[i])) == ((v[i], e[i]) if first else (w[i], f[i]))


def test_in_range_withdraws_only_past_the_range() -> None:
    step = 2.0**104  # of fp32 at its end
    a = tracked([FLT_MAX, FLT_MAX, -FLT_MAX, step, math.inf], [0.0, step, step, FLT_MAX, 0.0])
    found = in_range(a)
    assert found.e.tolist() == [0.0, math.inf, math.inf, math.inf, math.inf]
    assert torch.equal(found.v, a.v)


def folded(S: float, updates: list[float], decays: list[float], tokens: int | None = None) -> Tracked:
    """One cell: state, corrections along a unit key, decay factors by token."""

    def row(x: list[float]) -> Tensor:
        return torch.tensor(x, dtype=torch.float64).reshape(1, 1, -1, 1)

    # A key of 1e3 is normalised to 1 within 1e-12.
    n = torch.tensor([len(updates) if tokens is None else tokens])
    k = exact(torch.full((1, 1, len(updates), 1), 1e3))
    g = exact(row([math.log(d) for d in decays]))
    state = exact(torch.full((1, 1, 1, 1), S, dtype=torch.float64))
    found = fold(state, k, g, exact(row(updates)), n, COMPILED)
    return Tracked(found.v.reshape(()), found.e.reshape(()))


def test_nothing_is_claimed_where_one_order_may_overflow() -> None:
    # Forwards 3e38 + 3e38 comes first; backwards all is decayed before it is added.
    forwards = folded(3e38, [3e38, 0.0], [1.0, 1e-20])
    # Backwards 3e38 + 3e38 comes first; forwards state and first update cancel.
    backwards = folded(-3e38, [3e38, 3e38], [1.0, 1.0])
    for found in (forwards, backwards):
        assert float(found.e) == math.inf
        assert float(found.v) < FLT_MAX
    # Half of either overflows in no order.
    assert float(folded(1e38, [1e38, 0.0], [1.0, 1e-20]).e) < 1e15
    assert float(folded(-1e38, [1e38, 1e38], [1.0, 1.0]).e) < 1e33


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_tokens_past_the_count_do_not_matter(tokens: int) -> None:
    plain = folded(1.0, [0.5, -0.25, 2.0], [0.5, 0.25, 0.125], tokens)
    for poison in (1e30, math.inf, math.nan):
        updates = [0.5, -0.25, 2.0][:tokens] + [poison] * (3 - tokens)
        found = folded(1.0, updates, [0.5, 0.25, 0.125], tokens)
        assert (float(found.v), float(found.e)) == (float(plain.v), float(plain.e))


def test_a_single_cell_by_hand() -> None:
    # ((1 x 0.5 + 0.5) x 0.25 - 0.25) x 0.125 + 2
    found = folded(1.0, [0.5, -0.25, 2.0], [0.5, 0.25, 0.125])
    assert abs(float(found.v) - 2.0) < 1e-11
    assert 2.0**-24 < float(found.e) < 40 * 2.0**-24
