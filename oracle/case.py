"""The case: one frozen, seeded description of a call and of the memory it runs in.

A case never holds tensor elements. It names dimensions, dtypes, the rows of the batch (as
parallel lists, which shrink better than a list of rows), where every tensor lies, a value
regime per tensor and one seed; ``oracle.values`` builds the elements from these. Captured ones
lie in a sidecar, of which a case has the digest (``oracle.captured``).
"""

from typing import Annotated, Literal

import msgspec

from oracle.calls import AnyCall
from oracle.calls.base import NULL_SLOT, Count, Slot
from oracle.calls.conv import PackedConv
from oracle.captured import Captured
from oracle.layout import (
    DENSE,
    Layout,
    Page,
    check_alike,
    check_layout,
    check_page,
    extent,
    intern_field,
    strides,
)

MAX_BYTES = 1 << 30
"""Largest memory one case may ask for; a hostile file is refused, not allocated."""
MAX_DRAWN = 1 << 29
"""Most elements that one case may draw values of, a minute's work: likewise."""

Seed = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Poison = Literal["nan", "huge"]


class Repeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="repeat"):
    """Launching twice from the same starting bytes gives the same bits."""


class OtherPoison(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="other_poison"
):
    """What lies in dead bytes changes no defined bit."""


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="prefix"):
    """Dropping the tokens from ``cut`` on changes no bit of the earlier ones."""

    cut: Count


class Hostile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hostile"):
    """Extreme or NaN values in tokens >= ``token`` of row ``row`` change no other bit."""

    row: Count
    token: Count


class Permute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="permute"):
    """Reordering the rows (row ``order[i]`` comes at place ``i``) only reorders the results."""

    order: tuple[Count, ...]


class Rename(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="rename"):
    """Calling slot ``s`` ``names[s]`` moves results, no more; slot 0 keeps its name."""

    names: tuple[Slot, ...]


class Relayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="relayout"):
    """Other strides, offsets and padding change no bit."""

    layouts: dict[str, Layout]
    pages: tuple[Page, ...] = ()


class Unpacked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="unpacked"):
    """The packed convolution gives the bits of the plain one."""


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="split"):
    """A commit past a block boundary is one up to it and one of the rest, within the bounds."""


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="graph"):
    """The replay of a captured graph gives the bits of the eager call."""


Relation = Repeat | OtherPoison | Prefix | Hostile | Permute | Rename | Relayout | Unpacked | Split | Graph


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call, the memory it runs in, how its values are made, and what is claimed of it.

    Without ``relation`` the claim is the oracle's: every defined element within its bound,
    every other byte unchanged. With one it is also that the case and its image under the
    relation agree bit for bit. Fields are never mutated, the dictionaries included.
    """

    call: AnyCall
    layouts: dict[str, Layout] = {}
    pages: tuple[Page, ...] = ()
    regimes: dict[str, str] = {}
    seed: Seed = 0
    poison: Poison = "nan"
    relation: Relation | None = None
    captured: Captured | None = None

    @property
    def op(self) -> str:
        """The operation's name, as ``--op`` takes it."""
        return str(self.call.__struct_config__.tag)

    @property
    def path(self) -> str:
        """The code path that the call must take; empty where the contract lays none down."""
        return self.call.path(self.layouts, self.pages)

    def memory(self) -> int:
        """Bytes of its tensors as they lie, and of what a run keeps beside them."""
        specs, size = self.call.tensors(), self.call.own_bytes()
        for name, spec in specs.items():
            layout = self.layouts.get(name, DENSE)
            size += (layout.offset + extent(spec.shape, strides(spec, layout))) * spec.itemsize
        for page in self.pages:
            size += (sum(page.gaps) + page.tail) * max(specs[name].shape[0] for name in page.members)
            size += page.offset
        return size

    def __post_init__(self) -> None:
        intern_field(self, "poison")
        self.call.check()
        specs = self.call.tensors()
        for name, layout in self.layouts.items():
            if name not in specs:
                raise ValueError(f"{self.op} has no tensor {name!r}")
            check_layout(specs[name], layout)
        paged = [name for page in self.pages for name in page.members]
        if len(set(paged)) != len(paged):
            raise ValueError("a tensor lies in two pages")
        for page in self.pages:
            check_page(page, specs, self.layouts)
        check_alike(specs, self.layouts)
        self.call.check_memory(self.layouts, self.pages)
        unknown = self.regimes.keys() - {spec.table for spec in specs.values()}
        if unknown:
            raise ValueError(f"{self.op} has no tensor {min(unknown)!r} to give values to")
        if self.captured is not None:
            self.captured.check(self.call)
        size = self.memory()
        if size > MAX_BYTES:
            raise ValueError(f"the case needs {size} bytes; the limit is {MAX_BYTES}")
        drawn = self.call.drawn()
        if drawn > MAX_DRAWN:
            raise ValueError(f"the case draws {drawn} elements; the limit is {MAX_DRAWN}")
        self._check_relation()

    def _check_relation(self) -> None:
        relation = self.relation
        if relation is None:
            return
        if relation.__struct_config__.tag not in self.call.relations:
            raise ValueError(f"{self.op} has no invariant {relation.__struct_config__.tag!r}")
        if isinstance(relation, Permute) and sorted(relation.order) != list(range(self.call.rows)):
            raise ValueError("a permutation must name every row once")
        if isinstance(relation, Hostile) and relation.row >= self.call.rows:
            raise ValueError("the hostile row is not in the batch")
        if isinstance(relation, Rename) and (
            sorted(relation.names) != list(range(self.call.pool)) or relation.names[NULL_SLOT] != NULL_SLOT
        ):
            raise ValueError("new names must be the slots of the pool in another order, 0 first")
        # The image must be a case too: a file that asks for another is refused when it is read.
        other = image(self)
        # Two code paths may differ in the last bit.
        if isinstance(relation, Relayout) and other.path != self.path:
            raise ValueError(f"the other layouts take the path {other.path!r} instead of {self.path!r}")


def image(case: Case) -> Case:
    """The case that ``case`` is related to; itself free of a relation. The case must have one.

    A split commit's is the commit itself: its parts follow from what the first one leaves.
    """
    replace = msgspec.structs.replace
    call, relation = case.call, case.relation
    plain = replace(case, relation=None)
    match relation:
        case Repeat() | Graph():
            return plain
        case OtherPoison():
            return replace(plain, poison="huge" if case.poison == "nan" else "nan")
        case Prefix(cut=cut):
            return _with(plain, call.cut(cut))
        case Hostile(row=row, token=token):
            hostile = list(call.hostile or call.qlens)
            hostile[row] = min(token, hostile[row])
            return _with(plain, replace(call, hostile=tuple(hostile)))
        case Permute(order=order):
            return _with(plain, call.only(list(order)))
        case Rename(names=names):
            return _with(plain, call.renamed(names))
        case Relayout(layouts=layouts, pages=pages):
            return replace(plain, layouts=layouts, pages=pages)
        case Split():
            return plain
        case Unpacked() if isinstance(call, PackedConv):
            return _with(plain, call.unpacked())
    raise AssertionError(f"no image for {relation!r}")


def _with(case: Case, call: AnyCall) -> Case:
    """The case with another call, and of its memory what that call has."""
    names = call.tensors().keys()
    return msgspec.structs.replace(
        case, call=call, layouts={name: layout for name, layout in case.layouts.items() if name in names}
    )
