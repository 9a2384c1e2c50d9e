"""Strategies over whole cases, one per operation."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from impl.contract import Domain
from oracle.case import (
    Case,
    Hostile,
    OtherPoison,
    Permute,
    Prefix,
    Relation,
    Relayout,
    Rename,
    Repeat,
    Verify,
)
from tests.strategies.layouts import arrangements, arrangements_of_class, same_binary
from tests.strategies.rows import rows
from tests.strategies.values import regimes
from tests.strategies.variants import Variant, constants, variants

ANY = Domain()
PROJECTION = ("q", "k", "v", "raw_g", "raw_beta")
"""Activations that a fused projection interleaves by token."""


@st.composite
def verify_cases(
    draw: st.DrawFn,
    *,
    domain: Domain = ANY,
    palette: Sequence[Variant] | None = None,
    relations: Sequence[str] | None = None,
) -> Case:
    """Cases of verify: any batch, any memory, any values, and often a metamorphic relation.

    1 to 8 heads, head dimensions and windows of ``variants``, 0 to 6 rows (see ``rows``; large
    states without a palette have at most 2 heads and 3 rows), all dtypes, both record layouts, strides,
    offsets, pages and fences (see ``layouts``).
    ``palette`` restricts what a compiler would have to make anew. ``relations`` lists the
    relations to draw from (default: none most of the time, else any); an empty list draws
    none. Shrinks towards one row of one token, one head, plain values, dense memory, no
    relation.
    """
    variant = draw(variants(domain, palette))
    # Many rows and heads of a large state show an interpreter nothing new, and cost it seconds.
    large = palette is None and variant.head_dims[0] * variant.head_dims[1] >= 4096
    heads = draw(st.sampled_from((1, 2) if large else (1, 2, 3, 4, 8)))
    batch = draw(rows(window=variant.window, max_rows=3 if large else 6))
    count = len(batch.qlens)
    call = Verify(
        **constants(variant),
        heads=heads,
        pool=batch.pool,
        qlens=batch.qlens,
        slots=batch.slots,
        ids=tuple(range(count)),
        tail=batch.tail,
        capacity=count + draw(st.integers(0, 2)) if variant.records == "row" else 0,
        flat_bias=draw(st.booleans()),
    )
    specs = call.tensors()
    slot_page = ("state", "correction", "key_gate") if variant.records == "slot" else ("state",)
    if variant.skewed is None:
        layouts, pages = draw(arrangements(specs, pageable=(PROJECTION, slot_page)))
    else:
        layouts, pages = draw(arrangements_of_class(specs, skewed=variant.skewed))
    case = Case(
        call=call,
        layouts=layouts,
        pages=pages,
        regimes=draw(regimes(specs, bounded=call.lower_bound is not None)),
        seed=draw(st.integers(0, 2**32 - 1)),
        poison=draw(st.sampled_from(("nan", "huge"))),
    )
    relation = draw(_relations(case, relations))
    return Case(**{name: getattr(case, name) for name in Case.__struct_fields__} | {"relation": relation})


RELATIONS = ("repeat", "other_poison", "prefix", "hostile", "permute", "rename", "relayout")


@st.composite
def _relations(draw: st.DrawFn, case: Case, wanted: Sequence[str] | None) -> Relation | None:
    names: Sequence[Any] = (None,) * 10 + RELATIONS if wanted is None else tuple(wanted) or (None,)
    call = case.call
    match draw(st.sampled_from(names)):
        case "repeat":
            return Repeat()
        case "other_poison":
            return OtherPoison()
        case "prefix":
            return Prefix(draw(st.integers(0, call.window)))
        case "hostile" if call.rows:
            row = draw(st.integers(0, call.rows - 1))
            return Hostile(row, draw(st.integers(0, call.window)))
        case "permute":
            return Permute(tuple(draw(st.permutations(range(call.rows)))))
        case "rename":
            return Rename(draw(_renamed(call)))
        case "relayout":
            return Relayout(draw(same_binary(call.tensors(), case.layouts, case.pages)), case.pages)
    return None


@st.composite
def _renamed(draw: st.DrawFn, call: Verify) -> tuple[int, ...]:
    """Other slots for the rows: a permutation of the pool's live slots; null rows stay."""
    order = draw(st.permutations(range(1, call.pool)))
    return tuple(order[slot - 1] if slot > 0 else slot for slot in call.slots)


CASES = {"verify": verify_cases}
"""Per operation, its strategy."""
