"""Calls of the short convolution (contract, section 1.5): update, prefill and packed prefill."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from oracle.calls.base import Activation, Call, Channels, Count, Place, Small, State, Window, taps
from oracle.kept import kept
from oracle.layout import Strided, TensorSpec


class _Conv(Call, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the three share. ``state_len`` is P, the columns of a stored row; ``conv`` its dtype."""

    channels: Channels
    width: Annotated[int, msgspec.Meta(ge=2, le=6)] = 4
    state_len: Small
    activation: Activation = "float32"
    conv: State = "float32"
    taps: State = "float32"
    bias: State | None = None
    """dtype of the bias; ``None`` if there is none."""
    silu: bool = True

    shrinkable: ClassVar[tuple[str, ...]] = ("channels",)

    @property
    def effort(self) -> int:
        """One pass over its tokens."""
        return taps(self.tokens, self.rows, self.channels)

    def pageable(self) -> tuple[tuple[str, ...], ...]:
        """The page of a slot."""
        return (tuple(name for name, spec in self.results().items() if spec.role == "slot"),)

    def _specs(self, x: TensorSpec, state: str, slots: str) -> list[TensorSpec]:
        """x, the taps, the bias if there is one, the stored rows and their indices."""
        C = self.channels
        specs = [
            x,
            TensorSpec(
                name="weight",
                axes=("channel", "tap"),
                shape=(C, self.width),
                dtype=self.taps,
                role="parameter",
            ),
            TensorSpec(
                name=state,
                axes=("slot", "channel", "column"),
                shape=(self.pool, C, self.state_len),
                dtype=self.conv,
                role="slot",
                values="conv_state",
            ),
            TensorSpec(name=slots, axes=("row",), shape=(self.rows,), dtype=self.slots_dtype, role="index"),
        ]
        if self.bias is not None:
            specs.insert(
                2,
                TensorSpec(name="bias", axes=("channel",), shape=(C,), dtype=self.bias, role="parameter"),
            )
        return specs

    def _starts(self) -> TensorSpec:
        return TensorSpec(
            name="query_start_loc",
            axes=("row",),
            shape=(self.rows + 1,),
            dtype=self.starts_dtype,
            role="index",
        )

    def smaller(self) -> Iterator[dict[str, Any]]:
        """No padding, no activation, no bias, a row no longer than needed."""
        yield {"tail": 0}
        yield {"silu": False}
        yield {"bias": None}
        yield {"state_len": self.width - 1}
        yield {"state_len": self.state_len - 1}

    def size(self) -> tuple[int, ...]:
        """Padding, activation, bias, columns."""
        return self.tail, self.silu, self.bias is not None, self.state_len

    def describe(self) -> str:
        """Dimensions and dtypes."""
        return (
            f"{self.rows} rows, {self.tokens} tokens, {self.channels} channels, width {self.width}, "
            f"rows of {self.state_len}, x {self.activation}, state {self.conv}, taps {self.taps}"
        )


class ConvUpdate(_Conv, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="conv_update"):
    """Convolve a window of tokens per request and roll the stored rows in place.

    ``accepted[i]`` is ``num_accepted_tokens`` of row ``i``; without counts the list is empty.
    ``form`` is how x comes: ``varlen`` ``[T, C]`` with query_start_loc, ``batch`` ``[N, C, L]``
    or ``single`` ``[N, C]``; in the last two every row has ``window`` tokens. ``null`` is
    null_block_id. Without ``own_out`` x is overwritten, or a new tensor returned.
    """

    window: Window
    """max_query_len."""
    accepted: tuple[Count, ...] = ()
    accepted_dtype: Literal["int32", "int64"] = "int32"
    form: Literal["varlen", "batch", "single"] = "varlen"
    null_block: Literal[0] | None = 0
    own_out: bool = True

    per_row: ClassVar[tuple[str, ...]] = (*Call.per_row, "accepted")
    relations: ClassVar[tuple[str, ...]] = (*Call.relations, "prefix", "hostile")

    @property
    def longest(self) -> int:
        """max_query_len."""
        return self.window

    @property
    def in_place(self) -> bool:
        """Whether x itself is overwritten and returned."""
        return not self.own_out and self.activation == self.conv

    @property
    def cast(self) -> bool:
        """Whether a new tensor is returned whose uncomputed tokens hold the cast input."""
        return not self.own_out and self.activation != self.conv

    def first(self, row: int) -> int:
        """The column where the row's history starts (f of the contract)."""
        return self.accepted[row] - 1 if self.accepted else 0

    def null(self, row: int) -> bool:
        """A slot at or below null_block_id; none is null without one."""
        return self.null_block is not None and self.slots[row] <= self.null_block

    def reads_tokens(self, row: int) -> bool:
        """Null rows' tokens too where the result holds their cast."""
        return self.live(row) or self.cast

    def token_place(self, row: int) -> Place:
        """[T, C], or [N, L, C] where every row has as many tokens."""
        return super().token_place(row) if self.form == "varlen" else (row, slice(self.qlens[row]))

    def blocks(self, name: str) -> Iterator[tuple[int, int, Place | None]]:
        """The W - 1 columns of history; all others are dead."""
        for row in range(self.rows):
            if self.live(row):
                first = self.first(row)
                yield row, self.slots[row], (slice(None), slice(first, first + self.width - 1))

    def index_values(self) -> dict[str, Any]:
        """query_start_loc, slots and accepted counts."""
        return {
            "query_start_loc": self.starts,
            "conv_state_indices": self.slots,
            "num_accepted_tokens": self.accepted,
        }

    def passed(self, name: str) -> bool:
        """All but an output that the callee allocates."""
        return self.own_out or name != "out"

    @kept
    def results(self) -> dict[str, TensorSpec]:
        """x and out [T, C] or [N, L, C], conv_state [S, C, P], weight [C, W], bias [C], indices [N]."""
        C = self.channels
        axes: tuple[str, ...] = ("token", "channel")
        shape: tuple[int, ...] = (self.tokens, C)
        if self.form != "varlen":
            axes, shape = ("row", "position", "channel"), (self.rows, self.window, C)
        specs = self._specs(
            TensorSpec(name="x", axes=axes, shape=shape, dtype=self.activation, role="token"),
            "conv_state",
            "conv_state_indices",
        )
        if self.form == "varlen":
            specs.append(self._starts())
        if self.accepted:
            specs.append(
                TensorSpec(
                    name="num_accepted_tokens",
                    axes=("row",),
                    shape=(self.rows,),
                    dtype=self.accepted_dtype,
                    role="index",
                )
            )
        if not self.in_place:
            specs.append(TensorSpec(name="out", axes=axes, shape=shape, dtype=self.activation, role="output"))
        return {s.name: s for s in specs}

    def cells(self, name: str, row: int, tokens: int) -> list[Place]:
        """Outputs of the first tokens; the columns of the rolled row that they decide."""
        if not self.live(row) or tokens == 0:
            return []
        if name != "conv_state":
            if self.form != "varlen":
                return [(row, slice(tokens))]
            return [(slice(self.starts[row], self.starts[row] + tokens),)]
        if self.accepted:
            return [(self.slots[row], slice(None), slice(self.width - 2 + tokens))]
        whole = tokens == self.qlens[row]
        return [(self.slots[row], slice(None), slice(self.width - 1))] if whole else []

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract."""
        self._check_rows()
        if any(qlen > self.window for qlen in self.qlens):
            raise ValueError("a row has more tokens than max_query_len")
        if self.state_len < self.width - 1:
            raise ValueError("a stored row is shorter than the history")
        if self.null_block is None and any(slot < 0 for slot in self.slots):
            raise ValueError("without a null block no slot may be below 0")
        if self.form != "varlen" and (self.tail or any(qlen != self.window for qlen in self.qlens)):
            raise ValueError("without query_start_loc every row has window tokens, and there is no padding")
        if self.form == "single" and self.window != 1:
            raise ValueError("an x of [N, C] has one token a row")
        for row in range(self.rows if self.accepted else 0):
            if not 1 <= self.accepted[row] <= self.window:
                raise ValueError("accepted counts lie between 1 and max_query_len")
            if self.first(row) + self.width - 1 > self.state_len:
                raise ValueError("a history ends past its stored row")
            if self.width - 2 + self.qlens[row] > self.state_len:
                raise ValueError("a rolled row is longer than the stored one")

    def smaller(self) -> Iterator[dict[str, Any]]:
        """The family's, and a smaller window, counts of one."""
        yield from super().smaller()
        if self.form != "varlen":
            yield from self._shorter_rows()
        for window in self.shorter_windows():
            yield {"window": window}
        for i, count in enumerate(self.accepted):
            if count > 1:
                yield {"accepted": (*self.accepted[:i], 1, *self.accepted[i + 1 :])}

    def _shorter_rows(self) -> Iterator[dict[str, Any]]:
        """Fewer tokens in every row: without query_start_loc all have the window's."""
        for window in sorted({1, self.window // 2, self.window - 1} - {0, self.window}):
            yield {
                "window": window,
                "qlens": (window,) * self.rows,
                "accepted": tuple(min(count, window) for count in self.accepted),
                "hostile": tuple(min(token, window) for token in self.hostile),
            }

    def size(self) -> tuple[int, ...]:
        """The family's, window, counts."""
        return (*super().size(), self.window, sum(self.accepted))


class ConvPrefill(_Conv, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="conv_prefill"):
    """Convolve whole sequences and store the last W - 1 inputs of each.

    ``initial[i]`` says whether row ``i`` continues from its stored row. ``most_tokens`` bounds
    the sequences.
    """

    most_tokens: Small
    initial: tuple[bool, ...]

    per_row: ClassVar[tuple[str, ...]] = (*Call.per_row, "initial")
    relations: ClassVar[tuple[str, ...]] = (*Call.relations, "prefix", "hostile")
    x_strided: ClassVar[Strided] = "any"

    @property
    def longest(self) -> int:
        """The longest sequence that may be drawn."""
        return self.most_tokens

    def blocks(self, name: str) -> Iterator[tuple[int, int, Place | None]]:
        """Columns 0..W-2 of the rows that continue."""
        for row in range(self.rows):
            if self.live(row) and self.initial[row]:
                yield row, self.slots[row], (slice(None), slice(self.width - 1))

    def index_values(self) -> dict[str, Any]:
        """query_start_loc, slots and has_initial_state."""
        return {
            "query_start_loc": self.starts,
            "cache_indices": self.slots,
            "has_initial_state": self.initial,
        }

    def passed(self, name: str) -> bool:
        """The callee allocates the output."""
        return name != "out"

    @kept
    def results(self) -> dict[str, TensorSpec]:
        """x and out [T, C], conv_states [S, C, P], weight [C, W], bias [C], indices [N]."""
        axes, shape = ("token", "channel"), (self.tokens, self.channels)
        x = TensorSpec(
            name="x", axes=axes, shape=shape, dtype=self.activation, role="token", strided=self.x_strided
        )
        specs = self._specs(x, "conv_states", "cache_indices")
        initial = TensorSpec(
            name="has_initial_state", axes=("row",), shape=(self.rows,), dtype="bool", role="index"
        )
        specs += [self._starts(), initial, self._out()]
        return {s.name: s for s in specs}

    def _out(self) -> TensorSpec:
        return TensorSpec(
            name="out",
            axes=("token", "channel"),
            shape=(self.tokens, self.channels),
            dtype=self.activation,
            role="output",
        )

    def cells(self, name: str, row: int, tokens: int) -> list[Place]:
        """Outputs of the first tokens; the stored row if all of them are among these."""
        if not self.live(row) or tokens == 0:
            return []
        if name == "conv_states":
            whole = tokens == self.qlens[row]
            return [(self.slots[row], slice(None), slice(self.width - 1))] if whole else []
        return [self._out_place(slice(self.starts[row], self.starts[row] + tokens))]

    def _out_place(self, tokens: slice) -> Place:
        return (tokens,)

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract."""
        self._check_rows()
        if len(self.initial) != self.rows:
            raise ValueError("initial needs one entry a row")
        if self.width > 4:
            raise ValueError("prefill takes widths 2 to 4")
        if any(qlen > self.most_tokens for qlen in self.qlens):
            raise ValueError("a row has more tokens than most_tokens")
        if self.state_len < self.width - 1:
            raise ValueError("a stored row is shorter than the history")

    def smaller(self) -> Iterator[dict[str, Any]]:
        """The family's, shorter bounds, rows that do not continue."""
        yield from super().smaller()
        yield {"most_tokens": max(self.qlens, default=1) or 1}
        for i, flag in enumerate(self.initial):
            if flag:
                yield {"initial": (*self.initial[:i], False, *self.initial[i + 1 :])}

    def size(self) -> tuple[int, ...]:
        """The family's, the bound, rows that continue."""
        return (*super().size(), self.most_tokens, sum(self.initial))


class PackedConv(ConvPrefill, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="packed_conv"):
    """Prefill of a packed projection into dense planes ``[C // part_dim, T, part_dim]``."""

    part_dim: Channels

    relations: ClassVar[tuple[str, ...]] = (*ConvPrefill.relations, "unpacked")
    shrinkable: ClassVar[tuple[str, ...]] = ()
    x_strided: ClassVar[Strided] = "leading"

    def unpacked(self) -> ConvPrefill:
        """The same convolution as a plain prefill."""
        fields = {name: getattr(self, name) for name in ConvPrefill.__struct_fields__}
        return ConvPrefill(**fields)

    def _out(self) -> TensorSpec:
        return TensorSpec(
            name="out",
            axes=("part", "token", "channel"),
            shape=(self.channels // self.part_dim, self.tokens, self.part_dim),
            dtype=self.activation,
            role="output",
        )

    def _out_place(self, tokens: slice) -> Place:
        return (slice(None), tokens)

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract."""
        super().check()
        if self.width != 4:
            raise ValueError("packed prefill takes width 4")
        if self.conv != "float32" or self.taps != "float32":
            raise ValueError("packed prefill takes float32 taps and state")
        if self.channels % self.part_dim or self.part_dim % 64:
            raise ValueError("part_dim must be a multiple of 64 that divides the channels")

    def smaller(self) -> Iterator[dict[str, Any]]:
        """One plane, then the family's."""
        if self.channels > self.part_dim:
            yield {"channels": self.part_dim}
        if self.part_dim > 64:
            yield {"channels": 64, "part_dim": 64}
        yield from super().smaller()

    def size(self) -> tuple[int, ...]:
        """Channels, then the family's."""
        return (self.channels, self.part_dim, *super().size())
