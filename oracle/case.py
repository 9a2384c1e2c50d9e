"""The case: one frozen, seeded description of a call and of the memory it runs in.

A case never holds tensor elements. It names dimensions, dtypes, the rows of the batch (as
parallel lists, which shrink better than a list of rows), where every tensor lies, a value
regime per tensor and one seed; ``oracle.values`` builds the elements from these.
"""

from typing import Annotated, Literal

import msgspec

from oracle.layout import (
    DENSE,
    Layout,
    Page,
    Strided,
    TensorSpec,
    check_layout,
    check_page,
    extent,
    intern_field,
    strides,
)

NULL_SLOT = 0
PAD_SLOT = -1
MAX_BYTES = 1 << 30
"""Largest memory one case may ask for; a hostile file is refused, not allocated."""

Small = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=65536)]
Slot = Annotated[int, msgspec.Meta(ge=PAD_SLOT, le=65535)]
Window = Annotated[int, msgspec.Meta(ge=1, le=64)]
Seed = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Activation = Literal["bfloat16", "float16", "float32"]
State = Literal["bfloat16", "float32"]
Index = Literal["int32", "int64"]
Poison = Literal["nan", "huge"]


class Verify(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op", tag="verify"
):
    """A call of verify: run a window of tokens per request, leave the checkpoint alone.

    Row ``i`` has ``qlens[i]`` tokens and the state slot ``slots[i]`` (0 and -1 are null).
    ``ids[i]`` names the row's values: a row keeps them wherever it stands in the batch and
    whatever its slot is called. ``hostile[i]`` is the first token of row ``i`` whose values
    are not finite or extreme (``qlens[i]`` or more: none is). ``tail`` is the number of
    padding tokens after the last row. ``capacity`` is the number of record rows in the
    ``row`` layout; the ``slot`` layout has one per state slot.
    """

    heads: Small
    key_dim: Small
    value_dim: Small
    window: Window
    pool: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    qlens: tuple[Count, ...]
    slots: tuple[Slot, ...]
    ids: tuple[Count, ...]
    hostile: tuple[Count, ...] = ()
    tail: Count = 0
    capacity: Count = 0
    records: Literal["row", "slot"] = "row"
    activation: Activation = "float32"
    out: Literal["bfloat16", "float16", "float32", "float64"] = "float32"
    state: State = "float32"
    starts_dtype: Index = "int32"
    slots_dtype: Index = "int32"
    lower_bound: Annotated[float, msgspec.Meta(ge=-100.0, le=0.0)] | None = -5.0
    flat_bias: bool = False
    own_out: bool = True
    """Whether the caller passes ``out``; otherwise the callee allocates it."""

    @property
    def rows(self) -> int:
        """N, the number of requests of the step."""
        return len(self.qlens)

    @property
    def starts(self) -> tuple[int, ...]:
        """First token of every row, and the end of the last one (query_start_loc)."""
        result = [0]
        for qlen in self.qlens:
            result.append(result[-1] + qlen)
        return tuple(result)

    @property
    def tokens(self) -> int:
        """T, the tokens of the step, padding included."""
        return sum(self.qlens) + self.tail

    @property
    def record_rows(self) -> int:
        """Leading size of the record buffers."""
        return self.capacity if self.records == "row" else self.pool

    def record_row(self, row: int) -> int:
        """Where row ``row`` keeps its records."""
        return row if self.records == "row" else self.slots[row]

    def live(self, row: int) -> bool:
        """Whether the row computes anything but zeros."""
        return self.slots[row] > NULL_SLOT and self.qlens[row] > 0

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor that the caller passes, in the order of the public signature."""
        return {name: spec for name, spec in self.results().items() if self.own_out or name != "out"}

    def results(self) -> dict[str, TensorSpec]:
        """The same and the output, whoever allocates it."""
        H, K, V, Q, T, R = (
            self.heads,
            self.key_dim,
            self.value_dim,
            self.window,
            self.tokens,
            self.record_rows,
        )
        act = self.activation
        leading: Strided = "leading"
        token, record = ("token", "head"), ("row", "head", "position")
        specs = (
            TensorSpec(name="q", axes=(*token, "k"), shape=(T, H, K), dtype=act, strided=leading),
            TensorSpec(name="k", axes=(*token, "k"), shape=(T, H, K), dtype=act, strided=leading),
            TensorSpec(name="v", axes=(*token, "v"), shape=(T, H, V), dtype=act, strided=leading),
            TensorSpec(name="raw_g", axes=(*token, "k"), shape=(T, H, K), dtype=act, strided=leading),
            TensorSpec(name="raw_beta", axes=token, shape=(T, H), dtype=act, strided=leading),
            TensorSpec(name="A_log", axes=("head",), shape=(H,), dtype="float32", strided="dense"),
            TensorSpec(name="dt_bias", axes=("head", "k"), shape=(H, K), dtype="float32", strided="dense"),
            TensorSpec(
                name="state", axes=("slot", "head", "v", "k"), shape=(self.pool, H, V, K), dtype=self.state
            ),
            TensorSpec(
                name="correction", axes=(*record, "v"), shape=(R, H, Q, V), dtype="float32", output=True
            ),
            TensorSpec(
                name="key_gate", axes=(*record, "channel"), shape=(R, H, Q, 2 * K), dtype=act, output=True
            ),
            TensorSpec(
                name="query_start_loc",
                axes=("row",),
                shape=(self.rows + 1,),
                dtype=self.starts_dtype,
                index=True,
            ),
            TensorSpec(
                name="state_indices", axes=("row",), shape=(self.rows,), dtype=self.slots_dtype, index=True
            ),
            TensorSpec(
                name="out", axes=(*token, "v"), shape=(T, H, V), dtype=self.out, output=True, strided=leading
            ),
        )
        return {s.name: s for s in specs}

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract of verify."""
        n = self.rows
        if not len(self.slots) == len(self.ids) == n or len(self.hostile) not in (0, n):
            raise ValueError("qlens, slots, ids and hostile need one entry a row")
        if len(set(self.ids)) != n:
            raise ValueError("ids must be distinct: they name the rows' values")
        if any(qlen > self.window for qlen in self.qlens):
            raise ValueError("a row has more tokens than the window")
        if self.tokens > n * self.window:
            raise ValueError("more tokens than rows times window")
        if any(slot >= self.pool for slot in self.slots):
            raise ValueError("a row names a slot outside the pool")
        live = [self.slots[i] for i in range(n) if self.live(i)]
        if len(set(live)) != len(live):
            raise ValueError("two live rows share a slot")
        if not self.own_out and self.out != self.activation:
            raise ValueError("an output that the callee allocates has the activation dtype")
        if self.records == "row" and self.capacity < n:
            raise ValueError("capacity is below the number of rows")


Call = Verify


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
    """Naming the slots otherwise (``slots`` replaces the case's) moves results, no more."""

    slots: tuple[Slot, ...]


class Relayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="relayout"):
    """Other strides, offsets and padding change no bit."""

    layouts: dict[str, Layout]
    pages: tuple[Page, ...] = ()


Relation = Repeat | OtherPoison | Prefix | Hostile | Permute | Rename | Relayout


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A call, the memory it runs in, how its values are made, and what is claimed of it.

    Without ``relation`` the claim is the oracle's: every defined element within its bound,
    every other byte unchanged. With one it is also that the case and its image under the
    relation agree bit for bit. Fields are never mutated, the dictionaries included.
    """

    call: Call
    layouts: dict[str, Layout] = {}
    pages: tuple[Page, ...] = ()
    regimes: dict[str, str] = {}
    seed: Seed = 0
    poison: Poison = "nan"
    relation: Relation | None = None

    @property
    def op(self) -> str:
        """The operation's name, as ``--op`` takes it."""
        return str(self.call.__struct_config__.tag)

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
        unknown = self.regimes.keys() - specs.keys()
        if unknown:
            raise ValueError(f"{self.op} has no tensor {min(unknown)!r} to give values to")
        size = 0
        for name, spec in specs.items():
            layout = self.layouts.get(name, DENSE)
            size += (layout.offset + extent(spec.shape, strides(spec, layout))) * spec.itemsize
        size += sum(
            (sum(page.gaps) + page.tail) * max(specs[name].shape[0] for name in page.members) + page.offset
            for page in self.pages
        )
        if size > MAX_BYTES:
            raise ValueError(f"the case needs {size} bytes; the limit is {MAX_BYTES}")
        self._check_relation()

    def _check_relation(self) -> None:
        rows, relation = self.call.rows, self.relation
        if isinstance(relation, Permute) and sorted(relation.order) != list(range(rows)):
            raise ValueError("a permutation must name every row once")
        if isinstance(relation, Hostile) and relation.row >= rows:
            raise ValueError("the hostile row is not in the batch")
        if isinstance(relation, Rename) and [s > NULL_SLOT for s in relation.slots] != [
            s > NULL_SLOT for s in self.call.slots
        ]:
            raise ValueError("renaming must keep null rows null and live rows live")
        # The image must be a case too: a file that asks for another is refused when it is read.
        if isinstance(relation, Rename):
            msgspec.structs.replace(self.call, slots=relation.slots).check()
        if isinstance(relation, Relayout):
            Case(call=self.call, layouts=relation.layouts, pages=relation.pages)
