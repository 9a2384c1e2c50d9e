"""The plan of a commit against its tokens, walked one by one, over every small case (contract, 1.6)."""

from collections.abc import Iterator
from itertools import product

import pytest

from oracle.plan import RowPlan, align, plain

TABLE = (11, 12, 13, 14, 15, 16)


def walked(qlen: int, Q: int, accepted: int, nc: int, B: int) -> tuple[int, int, int | None, int]:
    """(n, column of the last token's block, column of the block that ends or None, tokens to its end)."""
    n = 0
    while n < accepted and n < qlen and n < Q:
        n += 1
    final, ended = 0, None
    for t in range(n):
        final = (nc + t) // B
        if (nc + t) % B == B - 1 and ended is None:
            ended = final
    m = 1
    while (nc + m) % B:
        m += 1
    return n, final, ended, m


def grid() -> Iterator[tuple[int, int, int, int, int]]:
    """(Q, B, qlen, accepted, computed) around every boundary, B = Q and B = 2 Q included."""
    for Q in (1, 2, 3, 4):
        for B in sorted({Q, Q + 1, Q + 2, 2 * Q}):
            yield from ((Q, B, *rest) for rest in product(range(Q + 1), range(-1, Q + 2), range(3 * B + 1)))


def test_every_small_plan() -> None:
    narrow = crossed = clamped = 0
    for Q, B, qlen, accepted, nc in grid():
        n, final, ended, m = walked(qlen, Q, accepted, nc, B)
        for width in range(1, 6):
            table = TABLE[:width]
            arguments = (qlen, Q, accepted, nc, B, table)
            assert align(0, *arguments) == align(-1, *arguments) == RowPlan()
            if n == 0:
                assert align(7, *arguments) == RowPlan()
                continue
            if ended is not None and ended >= width:
                narrow += 1
                with pytest.raises(ValueError, match="too narrow for the block that fills up"):
                    align(7, *arguments)
                continue
            clamped += final >= width
            crossed += ended is not None
            boundary = 0 if ended is None else table[ended]
            assert align(7, *arguments) == RowPlan(n, table[min(final, width - 1)], boundary, m)
    assert min(narrow, crossed, clamped) > 500  # the grid has all of them


def test_every_small_plain_plan() -> None:
    for Q, qlen, accepted, slot in product((1, 2, 4), range(6), range(-2, 8), (-1, 0, 1, 9)):
        n = len([t for t in range(qlen) if t < accepted and t < Q])
        assert plain(slot, qlen, Q, accepted) == (RowPlan(n, slot) if slot > 0 and n else RowPlan())


@pytest.mark.parametrize("slot", [0, -1, 5])
def test_a_table_may_hold_anything(slot: int) -> None:
    """Null and padding columns pass into the plan as they are; only ``writes`` tells them from slots."""
    plan = align(7, 4, 4, 4, 2, 4, (slot, 9))
    assert plan == RowPlan(4, 9, slot, 2)
    assert (plan.writes, plan.writes_boundary) == (True, slot > 0)
    plan = align(7, 4, 4, 4, 2, 4, (9, slot))
    assert plan == RowPlan(4, slot, 9, 2)
    assert (plan.writes, plan.writes_boundary) == (slot > 0, slot > 0)


def test_a_commit_that_ends_on_a_boundary_stays_in_its_block() -> None:
    """0.29 to 0.31 took the next block's column: lost where it is null, in a live slot where it is not."""
    for next_slot in (0, -1, 5):
        assert align(7, 4, 4, 4, 4, 4, (2, 3, next_slot)) == RowPlan(4, 3, 3, 4)
