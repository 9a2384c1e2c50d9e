"""What all calls share: a batch of rows over a pool of slots, and what tools may ask of a call.

A call names dimensions, dtypes and, as parallel lists (they shrink better than a list of
rows), the rows of its batch. The methods here are all that values, relations, layouts and
the minimiser know of it, so an operation is added by a subclass and an oracle.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from oracle.kept import kept
from oracle.layout import Layout, Page, TensorSpec

NULL_SLOT = 0
PAD_SLOT = -1

Small = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Channels = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Count = Annotated[int, msgspec.Meta(ge=0, le=65536)]
Slot = Annotated[int, msgspec.Meta(ge=PAD_SLOT, le=65535)]
Window = Annotated[int, msgspec.Meta(ge=1, le=64)]
Activation = Literal["bfloat16", "float16", "float32"]
State = Literal["bfloat16", "float32"]
Index = Literal["int32", "int64"]
LowerBound = Annotated[float, msgspec.Meta(ge=-100.0, le=0.0)] | None
Place = tuple[int | slice, ...]


class Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True, tag_field="op"):
    """A batch: row ``i`` has ``qlens[i]`` tokens and the state slot ``slots[i]`` (0 and -1 are null).

    ``ids[i]`` names the row's values: a row keeps them wherever it stands in the batch and
    whatever its slot is called. ``hostile[i]`` is the first token of row ``i`` whose values
    are not finite or extreme (``qlens[i]`` or more: none is). ``tail`` is the number of
    padding tokens after the last row, ``pool`` the number of slots.
    """

    pool: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    qlens: tuple[Count, ...]
    slots: tuple[Slot, ...]
    ids: tuple[Count, ...]
    hostile: tuple[Count, ...] = ()
    tail: Count = 0
    starts_dtype: Index = "int32"
    slots_dtype: Index = "int32"

    per_row: ClassVar[tuple[str, ...]] = ("qlens", "slots", "ids", "hostile")
    """Fields with one entry a row, or none at all."""
    shrinkable: ClassVar[tuple[str, ...]] = ()
    """Sizes that a minimiser may lower to 1."""
    narrowable: ClassVar[tuple[str, ...]] = ()
    """Channels of a head that it may lower, though not below what is common."""
    relations: ClassVar[tuple[str, ...]] = (
        "repeat",
        "graph",
        "other_poison",
        "permute",
        "rename",
        "relayout",
    )
    """Invariants of section 1.8 that the operation has, as ``oracle.relations`` names them."""

    @property
    def rows(self) -> int:
        """N, the number of requests of the step."""
        return len(self.qlens)

    @property
    @kept
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
    def longest(self) -> int:
        """Tokens that a row may have; a row's values do not depend on how many it has."""
        raise NotImplementedError

    def null(self, row: int) -> bool:
        """Whether the row's slot is null."""
        return self.slots[row] <= NULL_SLOT

    def live(self, row: int) -> bool:
        """Whether the row computes anything but zeros."""
        return self.qlens[row] > 0 and not self.null(row)

    def reads_tokens(self, row: int) -> bool:
        """Whether the row's tokens are inputs."""
        return self.live(row)

    def token_place(self, row: int) -> Place:
        """Where the row's tokens lie in a tensor whose leading axes say so."""
        return (slice(self.starts[row], self.starts[row + 1]),)

    def blocks(self, name: str) -> Iterator[tuple[int, int, Place | None]]:
        """For a tensor of slots or record rows: (row, leading index, cells of it that are inputs).

        ``None`` means all cells of that index. A row may have several entries.
        """
        for row in range(self.rows):
            if self.live(row):
                yield row, self.slots[row], None

    def divided(self, spec: TensorSpec, axis: str, size: int) -> list[tuple[str, int]]:
        """An axis of a tensor as the axes that it is made of, slowest first: by these, captured values go."""
        return [(axis, size)]

    def index_values(self) -> dict[str, Any]:
        """The elements of every index tensor, nested as its shape is."""
        return {"query_start_loc": self.starts, "state_indices": self.slots}

    def results(self) -> dict[str, TensorSpec]:
        """Every tensor that the caller passes or gets, in the order of the public signature."""
        raise NotImplementedError

    def passed(self, name: str) -> bool:
        """Whether the caller passes this tensor; otherwise the callee allocates it."""
        return True

    @kept
    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor that the caller passes."""
        return {name: spec for name, spec in self.results().items() if self.passed(name)}

    def pageable(self) -> tuple[tuple[str, ...], ...]:
        """Groups of tensors that may share a page."""
        return ()

    def cells(self, name: str, row: int, tokens: int) -> list[Place]:
        """The cells of output ``name`` that the first ``tokens`` tokens of a row decide alone."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract."""
        self._check_rows()

    def check_memory(self, layouts: Mapping[str, Layout], pages: Sequence[Page]) -> None:
        """Raise ``ValueError`` where the memory is outside the contract of this operation."""

    def path(self, layouts: Mapping[str, Layout], pages: Sequence[Page]) -> str:
        """The code path that a call in this memory must take; empty where none is laid down."""
        return ""

    def _check_rows(self) -> None:
        n = self.rows
        for name in self.per_row:
            given = len(getattr(self, name))
            if given != n and (given or name in ("qlens", "slots", "ids")):
                names = f"{', '.join(self.per_row[:-1])} and {self.per_row[-1]}"
                raise ValueError(f"{names} need one entry a row")
        if len(set(self.ids)) != n:
            raise ValueError("ids must be distinct: they name the rows' values")
        if any(slot >= self.pool for slot in self.slots):
            raise ValueError("a row names a slot outside the pool")
        live = [self.slots[i] for i in range(n) if self.live(i)]
        if len(set(live)) != len(live):
            raise ValueError("two live rows share a slot")

    def only(self, order: list[int]) -> Self:
        """The call with these rows alone, in this order."""
        fields = {
            name: tuple(getattr(self, name)[i] for i in order) for name in self.per_row if getattr(self, name)
        }
        return msgspec.structs.replace(self, **fields)

    def cut(self, tokens: int) -> Self:
        """The call with every row cut to its first ``tokens`` tokens."""
        return msgspec.structs.replace(self, qlens=tuple(min(n, tokens) for n in self.qlens))

    def renamed(self, names: tuple[int, ...]) -> Self:
        """The call with slot ``s`` called ``names[s]``; null slots stay."""
        return msgspec.structs.replace(self, slots=rename(self.slots, names))

    def with_qlen(self, row: int, qlen: int) -> Self:
        """The call with another length of one row, and no padding."""
        qlens = (*self.qlens[:row], qlen, *self.qlens[row + 1 :])
        return msgspec.structs.replace(self, qlens=qlens, tail=0)

    def compact(self) -> Self:
        """The call with live slots numbered from 1 in row order, in a pool no larger than needed."""
        names = numbering(self.slots)
        slots = tuple(names.get(slot, slot) for slot in self.slots)
        return msgspec.structs.replace(self, slots=slots, pool=len(names) + 1)

    def shorter_windows(self) -> list[int]:
        """Windows to try in place of one that is larger than the rows need."""
        return sorted({max(self.qlens, default=1), self.longest - 1} - {0, self.longest})

    def smaller(self) -> Iterator[dict[str, Any]]:
        """Changes of the operation's own fields that make a case simpler, most wanted first."""
        yield from ()

    @property
    def effort(self) -> int:
        """What an interpreter's time goes by, roughly: programs of some thousand elements."""
        raise NotImplementedError

    @property
    def launches(self) -> int:
        """Calls whose memory is compared."""
        return 1

    def own_bytes(self) -> int:
        """Memory that a run needs beside the tensors that the caller passes."""
        return 0

    def drawn(self) -> int:
        """Elements of which values are drawn: of a row's tokens always as many as it may have."""
        count = 0
        for spec in self.tensors().values():
            if spec.role == "token":
                inner = spec.shape[2:] if spec.axes[0] == "row" else spec.shape[1:]
                count += self.rows * self.longest * math.prod(inner)
            elif spec.role == "slot":
                count += self.rows * math.prod(spec.shape[1:])
            elif spec.role == "parameter":
                count += math.prod(spec.shape)
        return count

    def size(self) -> tuple[int, ...]:
        """Sizes of the operation's own, most significant first, for the order of the minimiser."""
        return ()

    def describe(self) -> str:
        """Dimensions in a few words, for messages."""
        return f"{self.rows} rows, {self.tokens} tokens"


def rename(slots: tuple[int, ...], names: tuple[int, ...]) -> tuple[int, ...]:
    """Slots by their new names; null ones stay."""
    return tuple(names[slot] if slot > NULL_SLOT else slot for slot in slots)


def numbering(slots: tuple[int, ...]) -> dict[int, int]:
    """New numbers from 1 for the live slots, in order of appearance."""
    names: dict[int, int] = {}
    for slot in slots:
        if slot > NULL_SLOT:
            names.setdefault(slot, len(names) + 1)
    return names


def folds(tokens: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Programs that take tokens into the states ``[V, K]`` of their heads, one token after the other."""
    return tokens * heads * (1 + key_dim * value_dim // 2048)


def taps(tokens: int, rows: int, channels: int) -> int:
    """Programs that convolve the channels of so many tokens."""
    return (1 + channels // 256) * (rows + tokens // 8)
