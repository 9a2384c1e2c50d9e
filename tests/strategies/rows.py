"""Strategies over the rows of a batch: lengths, slots, null rows, empty rows."""

from dataclasses import dataclass

from hypothesis import strategies as st

from oracle.case import NULL_SLOT, PAD_SLOT


@dataclass(frozen=True)
class Rows:
    """Parallel lists of a batch, the pool of slots they lie in, and padding tokens."""

    qlens: tuple[int, ...]
    slots: tuple[int, ...]
    pool: int
    tail: int


@st.composite
def rows(draw: st.DrawFn, *, window: int, max_rows: int = 6) -> Rows:
    """Batches of 0 to ``max_rows`` rows of 0 to ``window`` tokens, slots anywhere in a pool.

    Live rows have distinct slots. A row may be null (slot 0 or -1) whatever its length, and
    an empty row may carry any slot, a live row's too, as CUDA-graph padding does. The last
    slot of the pool is used often: an index of -1 would wrap to it. Shrinks towards one
    short row in slot 1.
    """
    count = (
        draw(st.integers(0, max_rows)) if draw(st.integers(0, 15)) == 15 else draw(st.integers(1, max_rows))
    )
    qlens = draw(st.lists(st.integers(0, window), min_size=count, max_size=count))
    pool = count + 1 + draw(st.integers(0, 3))
    slots = draw(st.lists(st.integers(1, max(pool - 1, 1)), min_size=count, max_size=count, unique=True))
    nulls = draw(st.lists(st.sampled_from((0, 0, 0, 0, 1, 2)), min_size=count, max_size=count))
    for i, null in enumerate(nulls):
        if null:
            slots[i] = NULL_SLOT if null == 1 else PAD_SLOT
        elif qlens[i] == 0 and count > 1 and draw(st.booleans()):
            slots[i] = slots[draw(st.integers(0, count - 1))]
    free = count * window - sum(qlens)
    # Mostly none, so that the last row ends where its tensors do.
    tail = min(free, draw(st.sampled_from((0, 0, 0, 1, 2, 3))))
    return Rows(tuple(qlens), tuple(slots), pool, tail)
