"""Strategies over cases of verify."""

from collections.abc import Sequence

from hypothesis import strategies as st

from impl.contract import Domain
from oracle.calls.verify import Verify
from oracle.case import Case
from tests.strategies.assembly import cases_of
from tests.strategies.rows import rows
from tests.strategies.values import verify_themes
from tests.strategies.variants import Variant, make_verify, variants

ANY = Domain()


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
    variant = draw(variants(make_verify, domain, palette))
    fields = variant.fields
    # Many rows and heads of a large state show an interpreter nothing new, and cost it seconds.
    large = not domain.heads and palette is None and fields["key_dim"] * fields["value_dim"] >= 4096
    heads = draw(st.sampled_from((1, 2) if large else variant.heads))
    batch = draw(rows(window=fields["window"], max_rows=3 if large else 6, pads=domain.pad_slots))
    count = len(batch.qlens)
    call = Verify(
        **fields,
        heads=heads,
        pool=batch.pool,
        qlens=batch.qlens,
        slots=batch.slots,
        ids=tuple(range(count)),
        tail=batch.tail,
        capacity=count + draw(st.integers(0, 2)) if fields["records"] == "row" else 0,
        flat_bias=draw(st.booleans()),
    )
    themes = verify_themes(bounded=call.lower_bound is not None)
    return draw(cases_of(call, variant=variant, domain=domain, themes=themes, relations=relations))
