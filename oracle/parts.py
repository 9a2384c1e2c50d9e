"""Large tensors worked on in parts that stay in a core's cache: then time grows as their elements do."""

import itertools
from collections.abc import Callable, Iterator

from oracle.tracked import Tracked

PART = 1 << 16
"""Elements of a part's largest tensor: a dozen arrays of them stay in a core's cache."""


def slices(rows: int, heads: int, each: int) -> Iterator[tuple[slice, slice]]:
    """Some rows and heads (or channels) at a time, each once.

    ``each`` is how many elements of the largest tensor belong to one row and head.
    """
    most = max(1, PART // max(1, each))
    count = max(1, most // max(1, heads))
    for n, h in itertools.product(range(0, rows, count), range(0, heads, most)):
        yield slice(n, n + count), slice(h, h + most)


def in_parts(
    rows: int, heads: int, each: int, compute: Callable[[slice, slice], tuple[Tracked, ...]]
) -> tuple[Tracked, ...]:
    """What ``compute`` gives for some rows and heads, put together to ``[rows, heads, ..]``."""
    every = list(slices(rows, heads, each))
    if len(every) <= 1:
        return compute(slice(None), slice(None))
    whole: tuple[Tracked, ...] = ()
    for at in every:
        results = compute(*at)
        whole = whole or tuple(_room(result, rows, heads) for result in results)
        for target, result in zip(whole, results, strict=True):
            target.v[at], target.e[at] = result.v, result.e
    return whole


def _room(like: Tracked, rows: int, heads: int) -> Tracked:
    shape = (rows, heads, *like.v.shape[2:])
    return Tracked(like.v.new_empty(shape), like.e.new_empty(shape))
