"""From a drawn call to a case: memory, values, seed, poison and a relation."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from impl.contract import Domain, base_name
from oracle.calls import AnyCall
from oracle.case import Case
from oracle.layout import TensorSpec
from tests.strategies.layouts import (
    Arrangement,
    aligned,
    arrangement_of_class,
    arrangements,
    arrangements_of_class,
)
from tests.strategies.relations import related
from tests.strategies.values import regimes
from tests.strategies.variants import Variant

Memory = Callable[[dict[str, TensorSpec]], st.SearchStrategy[Arrangement]]


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
    memory: Memory | None = None,
) -> Case:
    """Cases of a call: any memory that the domain and the variant allow, any values, often a relation.

    ``fixed`` gives a variant one arrangement of memory, for kernels that take strides as
    constants; ``memory`` draws the arrangement of an operation with rules of its own. Shrinks
    towards dense memory, plain values, no relation.
    """
    specs = {name: _free(spec, domain) for name, spec in call.tensors().items()}
    pageable = [[name for name in group if name in specs] for group in call.pageable()]
    how: dict[str, Any] = {"skewed": variant.skewed or (), "pageable": pageable, "ordered": variant.ordered}
    if memory is not None:
        layouts, pages = draw(memory(specs))
    elif variant.skewed is None:
        layouts, pages = draw(arrangements(specs, pageable=pageable))
    elif fixed:
        layouts, pages = arrangement_of_class(random.Random(variant.layout_seed).choice, specs, **how)
    else:
        layouts, pages = draw(arrangements_of_class(specs, **how))
    if domain.aligned:
        layouts, pages = aligned(specs, layouts, pages, domain.aligned)
    case = Case(
        call=call,
        layouts=layouts,
        pages=pages,
        regimes=draw(regimes(specs, themes=themes)),
        seed=draw(st.integers(0, 2**32 - 1)),
        poison=draw(st.sampled_from(("nan", "huge"))),
    )
    return draw(related(case, _movable(specs), relations, graphs=domain.graphs))


def _free(spec: TensorSpec, domain: Domain) -> TensorSpec:
    """The tensor, dense where the domain wants it so."""
    if spec.name in domain.dense:
        return msgspec.structs.replace(spec, strided="dense")
    inside = base_name(spec.name) in domain.dense_inside and spec.strided != "dense"
    return msgspec.structs.replace(spec, strided="leading") if inside else spec


def _movable(specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors with what no relation may move pinned: taps decide the path of a fused verify."""
    taps = specs.get("conv_weight")
    return specs if taps is None else {**specs, taps.name: msgspec.structs.replace(taps, strided="dense")}
