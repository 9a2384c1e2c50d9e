"""Strategies over the rows of a batch: lengths, slots, null rows, empty rows."""

from dataclasses import dataclass

from hypothesis import strategies as st

from oracle.calls.base import NULL_SLOT, PAD_SLOT


@dataclass(frozen=True)
class Rows:
    """Parallel lists of a batch, the pool of slots they lie in, and padding tokens."""

    qlens: tuple[int, ...]
    slots: tuple[int, ...]
    pool: int
    tail: int


@st.composite
def rows(
    draw: st.DrawFn,
    *,
    window: int,
    max_rows: int = 6,
    lengths: st.SearchStrategy[int] | None = None,
    pads: bool = True,
    padding: bool = True,
) -> Rows:
    """Batches of 0 to ``max_rows`` rows of 0 to ``window`` tokens, slots anywhere in a pool.

    Live rows have distinct slots. A row may be null (slot 0, or -1 if ``pads``) whatever its
    length, and an empty row often carries its neighbour's slot, as CUDA-graph padding does. The
    last slot of the pool is used often: an index of -1 would wrap to it. ``lengths`` draws
    other lengths; ``padding`` allows tokens after the last row. Shrinks towards one short row
    in slot 1, by dropping whole rows.
    """
    kinds = ("own",) * 3 + ("null", "pad" if pads else "null") + ("neighbour",) * 3
    row = st.tuples(
        lengths if lengths is not None else st.integers(0, window),
        st.integers(1, max_rows + 3),
        st.sampled_from(kinds),
    )
    # Lists are short by themselves, and an empty batch is worth little but a look.
    least = draw(st.sampled_from((1, 2, 3, 4, 2, 3, 4, 5, 1, 2, 3, 0, 0)))
    batch = draw(st.lists(row, min_size=min(least, max_rows), max_size=max_rows, unique_by=lambda r: r[1]))
    slots = [_slot(batch, i) for i in range(len(batch))]
    pool = max((slot for _, slot, _ in batch), default=1) + 1 + draw(st.sampled_from((0, 0, 1, 3)))
    qlens = tuple(qlen for qlen, _, _ in batch)
    # Mostly no padding, so that the last row ends where its tensors do.
    tail = draw(st.sampled_from((0, 0, 0, 1, 2, 3))) if padding else 0
    return Rows(qlens, tuple(slots), pool, min(len(batch) * window - sum(qlens), tail))


def _slot(batch: list[tuple[int, int, str]], i: int) -> int:
    qlen, slot, kind = batch[i]
    if kind == "neighbour" and qlen == 0:
        return batch[(i + 1) % len(batch)][1]
    return {"null": NULL_SLOT, "pad": PAD_SLOT}.get(kind, slot)
