"""How many additions a term of a sum passes through: declared, and found out.

The order of a numpy sum is read off its results (Xie et al., "FPRev", 2024): put M at place
i, -M at place j and 1 elsewhere, M so large that M + 1 = M. Ones that meet M or -M before
the two cancel are lost; what remains counts the terms outside the smallest partial sum that
holds both. The distinct sizes of these partial sums, over all j, are the additions that the
term at i passes through.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from oracle.tracked import ANY_ORDER, COMPILED, INTERPRETED, Arithmetic, Tracked, U

M = np.float32(2.0**100)
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Triton pads a block to a power of two."""

Sum = Callable[[np.ndarray], np.ndarray]


def additions_of(place: int, width: int, total: Sum) -> int:
    """Additions that the term at ``place`` passes through in a sum of ``width`` terms."""
    others = [j for j in range(width) if j != place]
    probe = np.ones((len(others), width), np.float32)
    probe[:, place] = M
    probe[np.arange(len(others)), others] = -M
    sizes = {int(width - remaining) for remaining in total(probe)}
    assert all(2 <= size <= width for size in sizes)
    return len(sizes)


def depth(width: int, total: Sum) -> int:
    """The most additions of any term; long sums are probed at places spread over every block."""
    places = range(width) if width <= 64 else sorted({*range(0, width, 7), *range(9), width - 1})
    return max((additions_of(i, width, total) for i in places), default=0)


def by_row(rows: np.ndarray) -> np.ndarray:
    """As tl.sum(x, axis=1) of a block: one reduction over the last axis."""
    return np.asarray(np.sum(rows, axis=1))


def one_by_one(rows: np.ndarray) -> np.ndarray:
    """As tl.sum(x) of a vector: a reduction of each row on its own."""
    return np.array([np.sum(row) for row in rows])


def left_to_right(rows: np.ndarray) -> np.ndarray:
    return np.array(np.cumsum(rows, axis=1, dtype=np.float32)[:, -1])


def test_the_probe_finds_known_depths() -> None:
    assert depth(9, left_to_right) == 8
    assert additions_of(8, 9, left_to_right) == 1

    def halves(rows: np.ndarray) -> np.ndarray:
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        return np.array(rows[:, 0])

    assert depth(32, halves) == 5


@pytest.mark.parametrize("total", [by_row, one_by_one])
@pytest.mark.parametrize("width", WIDTHS)
def test_numpy_adds_as_often_as_declared_and_no_more(width: int, total: Sum) -> None:
    assert depth(width, total) == INTERPRETED.additions(width)


@pytest.mark.parametrize("width", [3, 5, 33, 96, 100])
def test_other_lengths_count_as_the_next_power_of_two(width: int) -> None:
    padded = 1 << (width - 1).bit_length()
    assert INTERPRETED.additions(width) == INTERPRETED.additions(padded)
    assert COMPILED.additions(width) == COMPILED.additions(padded)


def block_depth(width: int, per_lane: int, lanes: int, warps: int) -> int:
    """Depth of a block reduction: lanes add their own elements in turn, then butterflies join them.

    A layout smaller than the block repeats along it and a larger one holds copies.
    """
    covered = min(width, per_lane * lanes * warps)
    own = min(per_lane, width) * (width // covered)
    holders = width // own
    return own - 1 + (holders - 1).bit_length()


@pytest.mark.parametrize("width", WIDTHS)
def test_compiled_declaration_covers_every_block_layout(width: int) -> None:
    depths = {
        block_depth(width, per_lane, lanes, warps)
        for per_lane in (1, 2, 4, 8)
        for lanes in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4)
        # A lane's share is at most a 16-byte load or what 32 lanes leave it.
        if width <= max(per_lane, -(-width // 32), 8) * lanes * warps
    }
    assert max(depths) <= COMPILED.additions(width)
    assert COMPILED.additions(width) <= max(depths) + 7


@pytest.mark.parametrize("n", [1, 2, 3, 17, 128, 1000])
def test_any_order_allows_a_chain(n: int) -> None:
    assert ANY_ORDER.additions(n) == n - 1


@pytest.mark.parametrize("ar", [COMPILED, INTERPRETED, ANY_ORDER], ids=["compiled", "interpreted", "any"])
def test_nothing_is_added_in_a_sum_of_one(ar: Arithmetic) -> None:
    a = Tracked(torch.tensor([[3.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    assert float(ar.sum(a).e) == 0.0


def worst_terms(width: int, total: Sum) -> np.ndarray:
    """Terms whose sum in this order loses half a step at every addition of the deepest place.

    That place holds 1; every partial sum that joins it is worth 2**-24 and a little more, so each
    addition rounds up by a little less than 2**-24.
    """
    place = max(range(width), key=lambda i: additions_of(i, width, total))
    probe = np.ones((width, width), np.float32)
    probe[:, place] = M
    probe[np.arange(width), range(width)] = -M
    probe[place] = 0.0
    sizes = width - total(probe)
    terms = np.zeros(width, np.float32)
    terms[place] = 1.0
    for size in sorted({int(s) for j, s in enumerate(sizes) if j != place}):
        joined = [j for j in range(width) if j != place and int(sizes[j]) == size]
        terms[joined[0]] = 2.0**-24 * (1 + 2.0**-20)
    return terms


@pytest.mark.parametrize(
    ("ar", "total", "width"),
    [
        (INTERPRETED, by_row, 4),
        (INTERPRETED, by_row, 16),
        (INTERPRETED, by_row, 128),
        (INTERPRETED, by_row, 256),
        (ANY_ORDER, left_to_right, 2),
        (ANY_ORDER, left_to_right, 33),
        (ANY_ORDER, left_to_right, 128),
    ],
)
def test_the_bound_of_a_sum_is_reached(ar: Arithmetic, total: Sum, width: int) -> None:
    terms = worst_terms(width, total)
    exact = torch.from_numpy(terms.astype(np.float64))
    bound = ar.sum(Tracked(exact, torch.zeros_like(exact)))
    ratio = abs(float(total(terms[None])[0]) - float(bound.v)) / float(bound.e)
    assert 0.99 < ratio <= 1.0
    assert float(bound.e) < 1.01 * ar.additions(width) * U
