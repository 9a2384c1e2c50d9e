"""From a drawn call to a case: memory, values, seed, poison and a relation."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from impl.contract import Domain
from oracle.calls import AnyCall
from oracle.case import Case
from oracle.layout import TensorSpec
from tests.strategies.layouts import arrangement_of_class, arrangements, arrangements_of_class
from tests.strategies.relations import related
from tests.strategies.values import regimes
from tests.strategies.variants import Variant


@st.composite
def cases_of(
    draw: st.DrawFn,
    call: AnyCall,
    *,
    variant: Variant,
    domain: Domain,
    themes: Sequence[dict[str, str]],
    relations: Sequence[str] | None,
    fixed: bool = False,
) -> Case:
    """Cases of a call: any memory that the domain and the variant allow, any values, often a relation.

    ``fixed`` gives a variant one arrangement of memory, for kernels that take strides as
    constants. Shrinks towards dense memory, plain values, no relation.
    """
    specs = {name: _free(spec, domain) for name, spec in call.tensors().items()}
    pageable = [[name for name in group if name in specs] for group in call.pageable()]
    how: dict[str, Any] = {"skewed": variant.skewed or (), "pageable": pageable, "ordered": variant.ordered}
    if variant.skewed is None:
        layouts, pages = draw(arrangements(specs, pageable=pageable))
    elif fixed:
        layouts, pages = arrangement_of_class(random.Random(variant.layout_seed).choice, specs, **how)
    else:
        layouts, pages = draw(arrangements_of_class(specs, **how))
    case = Case(
        call=call,
        layouts=layouts,
        pages=pages,
        regimes=draw(regimes(specs, themes=themes)),
        seed=draw(st.integers(0, 2**32 - 1)),
        poison=draw(st.sampled_from(("nan", "huge"))),
    )
    return draw(related(case, specs, relations, graphs=domain.graphs))


def _free(spec: TensorSpec, domain: Domain) -> TensorSpec:
    """The tensor, dense where the domain wants it so."""
    return msgspec.structs.replace(spec, strided="dense") if spec.name in domain.dense else spec
