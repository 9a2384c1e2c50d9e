"""A call of verify (contract, section 1.4)."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

import msgspec

from oracle.calls.base import Activation, Call, Count, LowerBound, Place, Small, State, Window, folds
from oracle.kept import kept
from oracle.layout import TensorSpec


class Verify(Call, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="verify"):
    """Run a window of tokens per request, leave the checkpoint alone.

    ``capacity`` is the number of record rows in the ``row`` layout; the ``slot`` layout has
    one per state slot.
    """

    heads: Small
    key_dim: Small
    value_dim: Small
    window: Window
    capacity: Count = 0
    records: Literal["row", "slot"] = "row"
    activation: Activation = "float32"
    out: Literal["bfloat16", "float16", "float32", "float64"] = "float32"
    state: State = "float32"
    lower_bound: LowerBound = -5.0
    flat_bias: bool = False
    own_out: bool = True
    """Whether the caller passes ``out``; otherwise the callee allocates it."""

    shrinkable: ClassVar[tuple[str, ...]] = ("heads",)
    narrowable: ClassVar[tuple[str, ...]] = ("key_dim", "value_dim")
    relations: ClassVar[tuple[str, ...]] = (*Call.relations, "prefix", "hostile")

    @property
    def effort(self) -> int:
        """One fold of the window in every row: kernels take masked steps too."""
        return folds(self.rows * self.window, self.heads, self.key_dim, self.value_dim)

    @property
    def longest(self) -> int:
        """The window."""
        return self.window

    @property
    def record_rows(self) -> int:
        """Leading size of the record buffers."""
        return self.capacity if self.records == "row" else self.pool

    def record_row(self, row: int) -> int:
        """Where row ``row`` keeps its records."""
        return row if self.records == "row" else self.slots[row]

    def passed(self, name: str) -> bool:
        """All but an output that the callee allocates."""
        return self.own_out or name != "out"

    def pageable(self) -> tuple[tuple[str, ...], ...]:
        """A fused projection, and the page of a slot."""
        projection = ("q", "k", "v", "raw_g", "raw_beta")
        page = ("state", "correction", "key_gate") if self.records == "slot" else ("state",)
        return projection, page

    @kept
    def results(self) -> dict[str, TensorSpec]:
        """q, k, raw_g [T, H, K], v, out [T, H, V], raw_beta [T, H], state [S, H, V, K], the records."""
        H, K, V, Q, T = self.heads, self.key_dim, self.value_dim, self.window, self.tokens
        act = self.activation
        token, record = ("token", "head"), ("row", "head", "position")
        rows = self.record_rows

        def tokens(name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> TensorSpec:
            return TensorSpec(name=name, axes=axes, shape=shape, dtype=act, role="token", strided="leading")

        specs = (
            tokens("q", (*token, "k"), (T, H, K)),
            tokens("k", (*token, "k"), (T, H, K)),
            tokens("v", (*token, "v"), (T, H, V)),
            tokens("raw_g", (*token, "k"), (T, H, K)),
            tokens("raw_beta", token, (T, H)),
            TensorSpec(
                name="A_log", axes=("head",), shape=(H,), dtype="float32", role="parameter", strided="dense"
            ),
            TensorSpec(
                name="dt_bias",
                axes=("head", "k"),
                shape=(H, K),
                dtype="float32",
                role="parameter",
                strided="dense",
            ),
            TensorSpec(
                name="state",
                axes=("slot", "head", "v", "k"),
                shape=(self.pool, H, V, K),
                dtype=self.state,
                role="slot",
            ),
            TensorSpec(
                name="correction", axes=(*record, "v"), shape=(rows, H, Q, V), dtype="float32", role="output"
            ),
            TensorSpec(
                name="key_gate",
                axes=(*record, "channel"),
                shape=(rows, H, Q, 2 * K),
                dtype=act,
                role="output",
            ),
            TensorSpec(
                name="query_start_loc",
                axes=("row",),
                shape=(self.rows + 1,),
                dtype=self.starts_dtype,
                role="index",
            ),
            TensorSpec(
                name="state_indices", axes=("row",), shape=(self.rows,), dtype=self.slots_dtype, role="index"
            ),
            TensorSpec(
                name="out",
                axes=(*token, "v"),
                shape=(T, H, V),
                dtype=self.out,
                role="output",
                strided="leading",
            ),
        )
        return {s.name: s for s in specs}

    def cells(self, name: str, row: int, tokens: int) -> list[Place]:
        """Outputs of the row's first tokens, and their records if the row is live."""
        if name == "out":
            return [(slice(self.starts[row], self.starts[row] + tokens),)]
        written = self.live(row) and tokens > 0
        return [(self.record_row(row), slice(None), slice(tokens))] if written else []

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract of verify."""
        self._check_rows()
        if any(qlen > self.window for qlen in self.qlens):
            raise ValueError("a row has more tokens than the window")
        if self.tokens > self.rows * self.window:
            raise ValueError("more tokens than rows times window")
        if not self.own_out and self.out != self.activation:
            raise ValueError("an output that the callee allocates has the activation dtype")
        if self.records == "row" and self.capacity < self.rows:
            raise ValueError("capacity is below the number of rows")

    def only(self, order: list[int]) -> Self:
        """The rows alone, with as many spare record rows as before and no more padding than fits."""
        fewer: Self = super().only(order)
        free = len(order) * self.window - sum(fewer.qlens)
        capacity = len(order) + self.capacity - self.rows if self.records == "row" else self.capacity
        return msgspec.structs.replace(fewer, tail=min(self.tail, free), capacity=capacity)

    def with_qlen(self, row: int, qlen: int) -> Self:
        """Another length of one row, with as much of the padding as fits."""
        changed: Self = super().with_qlen(row, qlen)
        free = self.rows * self.window - sum(changed.qlens)
        return msgspec.structs.replace(changed, tail=min(self.tail, free))

    def compact(self) -> Self:
        """Small slot names, and no spare record rows."""
        capacity = self.rows if self.records == "row" else self.capacity
        return msgspec.structs.replace(super().compact(), capacity=capacity)

    def smaller(self) -> Iterator[dict[str, Any]]:
        """No padding, a smaller window."""
        yield {"tail": 0}
        for window in self.shorter_windows():
            yield {"window": window}

    def size(self) -> tuple[int, ...]:
        """Padding, window, spare record rows."""
        return self.tail, self.window, self.capacity

    def describe(self) -> str:
        """Dimensions and dtypes."""
        return (
            f"{self.rows} rows, {self.heads} heads, K {self.key_dim}, V {self.value_dim}, "
            f"window {self.window}, {self.tokens} tokens, {self.activation}, {self.records} records"
        )
