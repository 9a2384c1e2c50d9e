"""A call of the fused verify (contract, sections 1.5 and 1.7)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from oracle.calls.base import Call, Count, Place, Small, State, folds
from oracle.kept import kept
from oracle.layout import DTYPES, Layout, Page, Role, Spot, Strided, TensorSpec, placed

K = 128
"""Key and value channels of a head."""
WIDTH = 4
"""Taps of the convolution."""
ALIGNMENT = 16
"""Bytes that every tensor starts on a multiple of, or the call is refused or declined."""
MOST_DECAY = 88.0
"""Bound on ``|lower_bound| * window``: e**88 is within the fp32 range, e**89 is not."""
STATIC = ("state", "A_log", "dt_bias", "correction", "key_gate", "conv_state", "conv_weight")
"""Tensors that stay where they are from step to step: a caller guarantees their alignment."""
DYNAMIC = (
    "mixed_qkv",
    "raw_gate",
    "raw_beta",
    "out",
    "query_start_loc",
    "state_indices",
    "num_accepted_tokens",
)
"""Tensors of one step: off their alignment, the call is declined and its caller runs other kernels."""

Path = Literal["", "warp-specialised", "plain", "declined"]


class FusedVerify(Call, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fused_verify"):
    """Convolve, roll and verify a window of tokens per request, in one launch.

    ``accepted[i]`` is ``num_accepted_tokens`` of row ``i``, ``capacity`` the number of record
    rows. ``dim_first`` says how conv rows are stored, ``taps`` is the dtype of the weight.
    """

    heads: Small
    window: Annotated[int, msgspec.Meta(ge=1, le=8)]
    capacity: Count
    accepted: tuple[Count, ...]
    dim_first: bool = True
    taps: State = "bfloat16"
    lower_bound: Annotated[float, msgspec.Meta(ge=-MOST_DECAY, le=0.0)] = -5.0

    per_row: ClassVar[tuple[str, ...]] = (*Call.per_row, "accepted")
    shrinkable: ClassVar[tuple[str, ...]] = ("heads",)
    relations: ClassVar[tuple[str, ...]] = (*Call.relations, "prefix", "hostile")
    key_dim: ClassVar[int] = K
    value_dim: ClassVar[int] = K
    activation: ClassVar[str] = "bfloat16"
    state: ClassVar[str] = "bfloat16"

    @property
    def effort(self) -> int:
        """One fold of the window in every row; the convolution is little beside it."""
        return folds(self.rows * self.window, self.heads, K, K)

    @property
    def longest(self) -> int:
        """The window."""
        return self.window

    @property
    def channels(self) -> int:
        """Convolution channels: q, k and v of all heads."""
        return 3 * self.heads * K

    @property
    def state_len(self) -> int:
        """Columns of a stored conv row."""
        return self.window + WIDTH - 2

    def first(self, row: int) -> int:
        """The column where the row's history starts."""
        return self.accepted[row] - 1

    def columns(self, first: int, count: int) -> Place:
        """Columns of a conv row as it is stored."""
        place = slice(first, first + count)
        return (slice(None), place) if self.dim_first else (place, slice(None))

    def blocks(self, name: str) -> Iterator[tuple[int, int, Place | None]]:
        """States whole, of conv rows the three columns of history."""
        for row in range(self.rows):
            if self.live(row):
                history = self.columns(self.first(row), WIDTH - 1)
                yield row, self.slots[row], history if name == "conv_state" else None

    def divided(self, spec: TensorSpec, axis: str, size: int) -> list[tuple[str, int]]:
        """Channels of a projection are queries, keys and values of all heads, or gates of all heads."""
        if axis != "channel":
            return [(axis, size)]
        heads = [("head", self.heads), ("k", K)]
        return [("part", 3), *heads] if size == self.channels else heads

    def index_values(self) -> dict[str, Any]:
        """query_start_loc, slots and accepted counts."""
        return {**super().index_values(), "num_accepted_tokens": self.accepted}

    def pageable(self) -> tuple[tuple[str, ...], ...]:
        """A fused projection, and the page of a slot."""
        return ("mixed_qkv", "raw_gate", "raw_beta"), ("conv_state", "state")

    @kept
    def results(self) -> dict[str, TensorSpec]:
        """The tensors of the public signature, the records for the record struct.

        mixed_qkv [T, 3HK], raw_gate [T, HK], raw_beta [T, H], A_log [H], dt_bias [HK], state
        [S, H, V, K], correction [R, H, Q, V], key_gate [R, H, Q, 2K], the index vectors,
        conv_state [S, 3HK, Q + 2] or [S, Q + 2, 3HK], conv_weight [3HK, 4], out [T, HV].
        """
        H, Q, T, C = self.heads, self.window, self.tokens, self.channels
        bf16, fp32 = "bfloat16", "float32"
        token, record = ("token", "channel"), ("row", "head", "position", "channel")
        stored = ("channel", "column") if self.dim_first else ("column", "channel")
        row = (C, self.state_len) if self.dim_first else (self.state_len, C)
        specs = (
            _spec("mixed_qkv", token, (T, C), bf16, "token", "leading"),
            _spec("raw_gate", token, (T, H * K), bf16, "token", "leading", "raw_g"),
            _spec("raw_beta", ("token", "head"), (T, H), bf16, "token", "leading"),
            _spec("A_log", ("head",), (H,), fp32, "parameter", "dense"),
            _spec("dt_bias", ("channel",), (H * K,), fp32, "parameter", "dense"),
            _spec("state", ("slot", "head", "v", "k"), (self.pool, H, K, K), bf16, "slot", "leading"),
            _spec("correction", record, (self.capacity, H, Q, K), fp32, "output", "inner", "written"),
            _spec("key_gate", record, (self.capacity, H, Q, 2 * K), bf16, "output", "inner", "written"),
            _spec("query_start_loc", ("row",), (self.rows + 1,), "int32", "index", "dense"),
            _spec("state_indices", ("row",), (self.rows,), "int32", "index", "dense"),
            _spec("num_accepted_tokens", ("row",), (self.rows,), "int32", "index", "dense"),
            _spec("conv_state", ("slot", *stored), (self.pool, *row), bf16, "slot", "inner"),
            _spec("conv_weight", ("channel", "tap"), (C, WIDTH), self.taps, "parameter", "leading", "weight"),
            _spec("out", token, (T, H * K), bf16, "output", "leading"),
        )
        return {s.name: s for s in specs}

    def cells(self, name: str, row: int, tokens: int) -> list[Place]:
        """Outputs of the row's first tokens; their records and rolled columns if the row is live."""
        if name == "out":
            return [(slice(self.starts[row], self.starts[row] + tokens),)]
        if not self.live(row) or tokens == 0:
            return []
        if name == "conv_state":
            return [(self.slots[row], *self.columns(0, WIDTH - 2 + tokens))]
        return [(row, slice(None), slice(tokens))]

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract."""
        self._check_rows()
        if len(self.accepted) != self.rows:
            raise ValueError("accepted needs one entry a row")
        if any(qlen > self.window for qlen in self.qlens):
            raise ValueError("a row has more tokens than the window")
        if any(not 1 <= count <= self.window for count in self.accepted):
            raise ValueError("accepted counts lie between 1 and the window")
        if self.capacity < self.rows:
            raise ValueError("capacity is below the number of rows")
        if -self.lower_bound * self.window > MOST_DECAY:
            raise ValueError(f"|lower_bound| times the window is above {MOST_DECAY:g}")
        if (self.starts_dtype, self.slots_dtype) != ("int32", "int32"):
            raise ValueError("index vectors of a fused verify are int32")

    def path(self, layouts: Mapping[str, Layout], pages: Sequence[Page]) -> Path:
        """The code path that the memory leaves: section 1.7, steps 2 and 3.

        Empty for a call without rows or tokens: whether anything is launched is not said.
        """
        if not (self.rows and self.tokens):
            return ""
        spots = placed(self.tensors(), layouts, pages)
        if not all(spots[name].start % ALIGNMENT == 0 for name in DYNAMIC):
            return "declined"
        conv = spots["conv_state"].strides
        special = (
            self.dim_first
            and spots["mixed_qkv"].strides[0] % 8 == 0
            and spots["raw_gate"].strides[0] % 8 == 0
            and spots["conv_weight"].strides == (WIDTH, 1)
            and conv[1:] == (self.state_len, 1)
            and conv[0] * 2 % ALIGNMENT == 0
        )
        return "warp-specialised" if special else "plain"

    def check_memory(self, layouts: Mapping[str, Layout], pages: Sequence[Page]) -> None:
        """Raise ``ValueError`` unless static tensors start on 16 bytes and states lie 16 bytes apart."""
        spots = placed(self.tensors(), layouts, pages)
        off = [name for name in STATIC if spots[name].start % ALIGNMENT]
        if off:
            raise ValueError(f"{off[0]} must start on a multiple of {ALIGNMENT} bytes")
        if _step(spots["state"], "bfloat16") % ALIGNMENT:
            raise ValueError(f"states must lie a multiple of {ALIGNMENT} bytes apart")
        # Two bfloat16 taps are one word, four are two words that are read as one.
        if self.taps == "bfloat16" and _step(spots["conv_weight"], self.taps) % 8:
            raise ValueError("rows of a bfloat16 weight must lie a multiple of 8 bytes apart")

    def only(self, order: list[int]) -> Self:
        """The rows alone, with as many spare record rows as before."""
        fewer: Self = super().only(order)
        return msgspec.structs.replace(fewer, capacity=len(order) + self.capacity - self.rows)

    def compact(self) -> Self:
        """Small slot names, and no spare record rows."""
        return msgspec.structs.replace(super().compact(), capacity=self.rows)

    def smaller(self) -> Iterator[dict[str, Any]]:
        """No padding, no spare records, smaller windows, counts of one, the plainest dtypes."""
        yield {"tail": 0}
        yield {"capacity": self.rows}
        for window in self.shorter_windows():
            yield {"window": window, "accepted": tuple(min(count, window) for count in self.accepted)}
        for i, count in enumerate(self.accepted):
            if count > 1:
                yield {"accepted": (*self.accepted[:i], 1, *self.accepted[i + 1 :])}
        yield {"dim_first": True}
        yield {"taps": "bfloat16"}

    def size(self) -> tuple[int, ...]:
        """Padding, window, spare record rows, counts, storage, dtype."""
        return (
            self.tail,
            self.window,
            self.capacity,
            sum(self.accepted),
            not self.dim_first,
            self.taps == "float32",
        )

    def describe(self) -> str:
        """Dimensions and dtypes."""
        stored = "dim first" if self.dim_first else "token major"
        return (
            f"{self.rows} rows, {self.heads} heads, window {self.window}, {self.tokens} tokens, "
            f"conv rows {stored}, taps {self.taps}, lower bound {self.lower_bound:g}"
        )


def _spec(
    name: str,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: str,
    role: Role,
    strided: Strided,
    values: str = "",
) -> TensorSpec:
    return TensorSpec(
        name=name, axes=axes, shape=shape, dtype=dtype, role=role, strided=strided, values=values
    )


def _step(spot: Spot, dtype: str) -> int:
    """Bytes from one index of the leading dimension to the next."""
    return spot.strides[0] * DTYPES[dtype].itemsize
