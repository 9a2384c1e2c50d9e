"""Strategies over the invariants that a case may claim."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from oracle.calls.commit import Commit
from oracle.calls.conv import ConvUpdate
from oracle.case import (
    Case,
    Graph,
    Hostile,
    OtherPoison,
    Permute,
    Prefix,
    Relation,
    Relayout,
    Rename,
    Repeat,
    Split,
    Unpacked,
)
from oracle.layout import TensorSpec
from tests.strategies.layouts import same_binary


@st.composite
def related(
    draw: st.DrawFn,
    case: Case,
    specs: dict[str, TensorSpec],
    wanted: Sequence[str] | None,
    *,
    graphs: bool = True,
) -> Case:
    """The case with a relation of ``wanted`` (default: none most of the time, else any that it may have)."""
    possible = tuple(name for name in case.call.relations if graphs or name != "graph")
    options: Sequence[Any] = (None,) * 10 + possible if wanted is None else tuple(wanted) or (None,)
    relation = draw(_relations(case, specs, draw(st.sampled_from(options))))
    return msgspec.structs.replace(case, relation=relation) if relation is not None else case


@st.composite
def _relations(
    draw: st.DrawFn, case: Case, specs: dict[str, TensorSpec], name: str | None
) -> Relation | None:
    call = case.call
    match name:
        case "repeat":
            return Repeat()
        case "graph":
            return Graph()
        case "other_poison":
            return OtherPoison()
        case "prefix" if not isinstance(call, ConvUpdate) or call.form == "varlen":
            return Prefix(draw(st.integers(0, call.longest)))
        case "hostile" if call.rows:
            row = draw(st.integers(0, call.rows - 1))
            return Hostile(row, draw(st.integers(0, call.longest)))
        case "permute":
            return Permute(tuple(draw(st.permutations(range(call.rows)))))
        case "rename":
            return Rename((0, *draw(st.permutations(range(1, call.pool)))))
        case "relayout":
            return Relayout(draw(same_binary(specs, case.layouts, case.pages)), case.pages)
        case "unpacked":
            return Unpacked()
        case "split" if isinstance(call, Commit) and call.block_size:
            return Split()
    return None
