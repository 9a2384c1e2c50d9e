"""Strategies over cases of commit."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from impl.contract import Domain
from oracle.calls.commit import Commit
from oracle.case import Case
from tests.strategies.assembly import cases_of
from tests.strategies.rows import Rows, rows
from tests.strategies.values import commit_themes
from tests.strategies.variants import (
    ACTIVATIONS,
    BOUNDS,
    HEAD_DIMS,
    Choose,
    Variant,
    index_dtypes,
    skewed_and_heads,
    variants,
)

ANY = Domain()
CHANNELS = (8, 1, 3, 24, 48, 256, 260)


def make_commit(choose: Choose, domain: Domain, free: bool) -> Variant:
    """A variant of commit: asks ``choose(name, options)``; the first option is the simplest."""
    key_dim, value_dim = choose("head_dims", domain.head_dims or HEAD_DIMS)
    bounds = tuple(bound for bound in BOUNDS if bound is not None) if domain.bounded_only else BOUNDS
    window = choose("window", domain.windows or (4, 1, 2, 3, 5, 8))
    fields = {
        "key_dim": key_dim,
        "value_dim": value_dim,
        "window": window,
        "layers": choose("layers", (1, 2, 3)),
        "channels": choose("channels", CHANNELS),
        "state_len": window + choose("kept", (2, 2, 0, 1, 5)),
        "records": choose("records", domain.records),
        "dim_first": choose("dim_first", (True, False)),
        "activation": choose("activation", domain.activations or ACTIVATIONS),
        "state": choose("state", domain.states or ("float32", "bfloat16")),
        "conv": choose("conv", ("float32", "bfloat16")),
        "lower_bound": choose("lower_bound", bounds),
        **index_dtypes(
            choose,
            domain,
            "starts_dtype",
            "slots_dtype",
            "accepted_dtype",
            "requests_dtype",
            "computed_dtype",
            "table_dtype",
        ),
        "aligned": choose("aligned", (False, True, True, True)),
        "mapped": choose("mapped", (False, True)),
    }
    strided = ("conv_state", "state", "correction", "key_gate", "state_indices", "block_table")
    how = {} if free else skewed_and_heads(choose, strided)
    if domain.heads:
        how["heads"] = (choose("heads", domain.heads),)
    return Variant(fields, **how)


@dataclass(frozen=True)
class Blocks:
    """Align-mode arguments by request, and the pool that holds every slot they name."""

    block_size: int = 0
    computed: tuple[int, ...] = ()
    table: tuple[tuple[int, ...], ...] = ()
    pool: int = 0


@st.composite
def commit_cases(
    draw: st.DrawFn,
    *,
    domain: Domain = ANY,
    palette: Sequence[Variant] | None = None,
    relations: Sequence[str] | None = None,
) -> Case:
    """Cases of commit: 1 to 3 layers, plain or with blocks; counts, lengths, order and table independent.

    Accepted counts run from -1 to past the window, requests are permuted and more than rows,
    computed tokens lie around multiples of the block size; source, final and boundary slots
    coincide in every allowed way, and the table's columns that do not matter hold live slots. Shrinks
    towards one row of one token in plain mode.
    """
    variant = draw(variants(make_commit, domain, palette))
    fields = dict(variant.fields)
    aligned, mapped = fields.pop("aligned"), fields.pop("mapped")
    large = not domain.heads and palette is None and fields["key_dim"] * fields["value_dim"] >= 4096
    if large:
        fields["layers"] = min(fields["layers"], 2)
    heads = draw(st.sampled_from((1, 2) if large else variant.heads))
    window = fields["window"]
    # A row of two tokens or more is what can cross a block's end.
    lengths = st.one_of(st.integers(0, window), st.integers(min(window, 2), window))
    lengths = draw(st.sampled_from((lengths,) * 31 + (st.just(0),)))
    batch = draw(
        rows(window=window, max_rows=3 if large else 5, lengths=lengths, pads=domain.pad_slots, padding=False)
    )
    count = len(batch.qlens)
    requests = tuple(range(count))
    if mapped and count:
        among = draw(st.permutations(range(count + draw(st.integers(0, 2)))))
        requests = tuple(among[:count])
    total = max((count, *(r + 1 for r in requests)))
    counts = st.one_of(st.integers(1, window), st.sampled_from((window, window + 1, window, 1, 0, -1)))
    accepted = tuple(draw(counts) for _ in range(total))
    blocks = Blocks(pool=batch.pool)
    if aligned and count:
        blocks = draw(_blocks(batch, requests, accepted, window))
    call = Commit(
        **fields,
        heads=heads,
        pool=blocks.pool,
        qlens=batch.qlens,
        slots=batch.slots,
        ids=tuple(range(count)),
        capacity=count + draw(st.integers(0, 2)),
        accepted=accepted,
        requests=requests if mapped and count else (),
        block_size=blocks.block_size,
        computed=blocks.computed,
        table=blocks.table,
    )
    themes = commit_themes(bounded=call.lower_bound is not None)
    return draw(cases_of(call, variant=variant, domain=domain, themes=themes, relations=relations))


@st.composite
def _blocks(
    draw: st.DrawFn, batch: Rows, requests: tuple[int, ...], accepted: tuple[int, ...], window: int
) -> Blocks:
    """Computed tokens around block boundaries, and a table whose columns may be any slot that is free."""
    size = window + draw(st.sampled_from((0, 0, 1, 2, window, 13)))
    folded = {r: min(max(accepted[r], 0), batch.qlens[row]) for row, r in enumerate(requests)}
    computed = tuple(draw(_computed(size, window, folded.get(r, 0))) for r in range(len(accepted)))
    columns = {}
    for row, r in enumerate(requests):
        n = folded[r]
        if n > 0:
            end = (computed[r] // size + 1) * size
            boundary = end // size - 1 if computed[r] + n >= end else None
            columns[row] = ((computed[r] + n - 1) // size, boundary)
    # The boundary's column must be there; the final one may be clamped, unless that makes them one.
    needed = max((1, *(b + 1 if f == b else f + 1 for f, b in columns.values() if b is not None)))
    width = max(
        needed, max((1, *(f + 1 for f, _ in columns.values()))) + draw(st.sampled_from((0, 1, -1, -1, -2)))
    )
    fresh, table = batch.pool, []
    others = st.one_of(st.integers(1, batch.pool - 1), st.integers(-1, batch.pool - 1))
    for _ in accepted:
        table.append([draw(others) for _ in range(width)])
    for row, (final, boundary) in columns.items():
        # Columns that nothing is written to keep any slot: a null row's, a boundary's without a final slot.
        if batch.slots[row] <= 0:
            continue
        r, own, last = requests[row], [batch.slots[row]], min(final, width - 1)
        for column in dict.fromkeys((last, boundary)):
            if column is None or (column != last and table[r][last] <= 0):
                continue
            kind = draw(st.sampled_from(("own", "fresh", "fresh", "own", "fresh", "null", "pad")))
            slot = {"null": 0, "pad": -1}.get(kind, fresh)
            if kind == "own" and own:
                slot = own.pop()
            fresh += slot == fresh
            table[r][column] = slot
    return Blocks(size, computed, tuple(map(tuple, table)), fresh)


@st.composite
def _computed(draw: st.DrawFn, size: int, window: int, n: int) -> int:
    """Computed tokens of a request that folds n more: most often these pass or reach the end of a block."""
    kind = draw(st.sampled_from(("pass", "reach", "pass", "near", "any")))
    if kind == "any":
        return draw(st.integers(0, 2 * size))
    end = draw(st.integers(1, 3)) * size
    if kind == "near":
        return max(0, end + draw(st.integers(-window - 1, 1)))
    return end - draw(st.integers(1, max(1, n - 1 if kind == "pass" else n)))
