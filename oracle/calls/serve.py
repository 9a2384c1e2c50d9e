"""Serving: many requests over many steps through all operations (contract, section 1.8)."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from oracle.calls.base import (
    Activation,
    Call,
    Count,
    LowerBound,
    Place,
    Small,
    State,
    Window,
    folds,
    taps,
)
from oracle.calls.fused_verify import ALIGNMENT, MOST_DECAY, FusedVerify
from oracle.kept import kept
from oracle.layout import DTYPES, TensorSpec

WIDTH = 4
MOST_WINDOW = 8
"""Tokens that a fused verify takes of a request."""
Kind = Literal["prefill", "decode", "plain", "cached", "finish", "pad"]
Lying = Literal["dense", "wide", "shifted"]


class Serve(Call, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="serve"):
    """A script of events, one a row: ``slots[i]`` names a request (1 and up), not a slot of the pool.

    Events of one ``step`` run together: ``finish`` frees a request's slots, ``cached`` starts
    one from a block boundary that another request left, ``prefill`` runs a chunk of
    ``qlens[i]`` tokens (and starts the request), ``decode`` offers a window of them of which
    ``accepted[i]`` are accepted, ``plain`` decodes one without counts, ``pad`` is a row of a
    captured graph without request. An event that cannot happen (no such request, no free slot) is
    left out. After a step without an accepted token a request ends. ``block_size`` 0 serves
    without prefix caching. ``gap`` widens the slots of every stored tensor. ``lying`` says where
    the tokens of decoding steps lie, which take its entries in turn: dense, in rows an element
    wider, or from one element on. A fused verify has another kernel for wide rows, and declines
    shifted ones.
    """

    heads: Small
    key_dim: Small
    value_dim: Small
    window: Window
    capacity: Count
    kinds: tuple[Kind, ...]
    steps: tuple[Count, ...]
    accepted: tuple[Annotated[int, msgspec.Meta(ge=-64, le=64)], ...]
    chunk: Small = 16
    """Most tokens of one prefill."""
    block_size: Count = 0
    records: Literal["row", "slot"] = "row"
    dim_first: bool = True
    activation: Activation = "float32"
    state: State = "float32"
    conv: State = "float32"
    taps: State = "float32"
    lower_bound: LowerBound = -5.0
    gap: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    lying: Annotated[tuple[Lying, ...], msgspec.Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET
    """Unset where all are dense: the JSON of such a case does not have it."""

    per_row: ClassVar[tuple[str, ...]] = (*Call.per_row, "kinds", "steps", "accepted")
    shrinkable: ClassVar[tuple[str, ...]] = ("heads",)
    narrowable: ClassVar[tuple[str, ...]] = ("key_dim", "value_dim")
    relations: ClassVar[tuple[str, ...]] = ()

    @property
    def effort(self) -> int:
        """A window for every decoding event through verify and commit, all tokens through the convolution."""
        decoding = sum(kind in ("decode", "plain", "pad") for kind in self.kinds)
        folded = folds(decoding * self.window, self.heads, self.key_dim, self.value_dim)
        return 2 * folded + taps(self.tokens, self.rows, self.channels)

    @property
    def launches(self) -> int:
        """Per step a convolution, a verify and a commit."""
        return 3 * len(set(self.steps))

    def own_bytes(self) -> int:
        """The slots of the pool, the records, and per request the model's state in float64."""
        stored, activation = DTYPES[self.state].itemsize, DTYPES[self.activation].itemsize
        state = self.heads * self.value_dim * self.key_dim
        slot = self.channels * self.state_len * DTYPES[self.conv].itemsize + state * stored
        record = self.heads * self.window * (4 * self.value_dim + 2 * self.key_dim * activation)
        rows = self.capacity if self.records == "row" else self.pool
        return self.pool * slot + rows * record + len(set(self.slots)) * state * 8

    @property
    def longest(self) -> int:
        """The longest event."""
        return max(self.chunk, self.window)

    @property
    def channels(self) -> int:
        """C of the packed projection: q, k, v."""
        return self.heads * (2 * self.key_dim + self.value_dim)

    @property
    def state_len(self) -> int:
        """P, the columns of a stored conv row."""
        return WIDTH - 1 + self.window - 1

    @property
    def fusable(self) -> bool:
        """Whether a fused verify takes its windows (contract, section 1.7)."""
        bound = self.lower_bound
        return (
            (self.key_dim, self.value_dim, self.records)
            == (FusedVerify.key_dim, FusedVerify.value_dim, "row")
            and {self.activation, self.state, self.conv} == {"bfloat16"}
            and self.window <= MOST_WINDOW
            and self.gap * DTYPES["bfloat16"].itemsize % ALIGNMENT == 0
            and bound is not None
            and -bound * self.window <= MOST_DECAY
        )

    def live(self, row: int) -> bool:
        """Whether the event has tokens."""
        return self.qlens[row] > 0

    @kept
    def results(self) -> dict[str, TensorSpec]:
        """The events' tokens x [T, C], raw_g [T, H, K], raw_beta [T, H], and the parameters."""
        H, K, T, C = self.heads, self.key_dim, self.tokens, self.channels

        def spec(name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> TensorSpec:
            role: Literal["token", "parameter"] = "token" if axes[0] == "token" else "parameter"
            return TensorSpec(name=name, axes=axes, shape=shape, dtype=dtype, role=role, strided="dense")

        specs = (
            spec("x", ("token", "channel"), (T, C), self.activation),
            spec("raw_g", ("token", "head", "k"), (T, H, K), self.activation),
            spec("raw_beta", ("token", "head"), (T, H), self.activation),
            spec("weight", ("channel", "tap"), (C, WIDTH), self.taps),
            spec("A_log", ("head",), (H,), "float32"),
            spec("dt_bias", ("head", "k"), (H, K), "float32"),
        )
        return {s.name: s for s in specs}

    def cells(self, name: str, row: int, tokens: int) -> list[Place]:
        """Serving has no relations."""
        return []

    def check(self) -> None:
        """Raise ``ValueError`` where the script makes no sense."""
        n = self.rows
        if any(len(getattr(self, name)) != n for name in self.per_row if name != "hostile"):
            raise ValueError("every list of a script needs one entry an event")
        if len(set(self.ids)) != n:
            raise ValueError("ids must be distinct: they name the events' values")
        if self.hostile or self.tail:
            raise ValueError("a script has no hostile tokens and no padding of its own")
        if tuple(sorted(self.steps)) != self.steps:
            raise ValueError("the steps of a script must be in order")
        for kind, qlen in zip(self.kinds, self.qlens, strict=True):
            most = {"prefill": self.chunk, "decode": self.window, "pad": self.window, "plain": 1}.get(kind, 0)
            if qlen > most:
                raise ValueError(f"an event {kind!r} has at most {most} tokens")
        if self.block_size and self.block_size < self.window:
            raise ValueError("a block is smaller than the window")

    def only(self, order: list[int]) -> Self:
        """These events alone; the order must be theirs."""
        if sorted(order) != order:
            raise ValueError("the events of a script have an order")
        return super().only(order)

    def compact(self) -> Self:
        """Steps numbered without gaps."""
        numbers = {step: i for i, step in enumerate(sorted(set(self.steps)))}
        return msgspec.structs.replace(self, steps=tuple(numbers[s] for s in self.steps))

    def smaller(self) -> Iterator[dict[str, Any]]:
        """No blocks, no gap, dense tokens, fewer slots and rows, plainer dtypes."""
        yield {"block_size": 0}
        yield {"gap": 0}
        yield {"lying": msgspec.UNSET}
        yield {"pool": self.pool - 1}
        yield {"capacity": self.capacity - 1}
        yield {"activation": "float32", "state": "float32", "conv": "float32", "taps": "float32"}

    def size(self) -> tuple[int, ...]:
        """Blocks, gap, odd places, rows, narrow dtypes, last step."""
        narrow = sum(x != "float32" for x in (self.activation, self.state, self.conv, self.taps))
        lying = len(self.lying) if self.lying else 0
        return self.block_size, self.gap, lying, self.capacity, narrow, max(self.steps, default=0)

    def describe(self) -> str:
        """Dimensions and dtypes."""
        mode = f"blocks of {self.block_size}" if self.block_size else "plain"
        return (
            f"{self.rows} events in {len(set(self.steps))} steps, {self.heads} heads, K {self.key_dim}, "
            f"V {self.value_dim}, window {self.window}, {mode}, state {self.state}, {self.records} records"
        )
