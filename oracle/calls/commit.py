"""A call of commit: create a context over all layers and fold the accepted tokens (contract, 1.6)."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from oracle.calls.base import (
    NULL_SLOT,
    Activation,
    Call,
    Channels,
    Count,
    Index,
    LowerBound,
    Place,
    Slot,
    Small,
    State,
    Window,
    folds,
    numbering,
    rename,
    taps,
)
from oracle.kept import kept
from oracle.layout import TensorSpec
from oracle.plan import RowPlan, align, plain

PLAN = ("commit_lens", "final_state_indices", "boundary_state_indices", "boundary_recovery_lens")


class Commit(Call, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="commit"):
    """Fold accepted tokens into the states of ``layers`` layers and compact their conv rows.

    ``accepted``, ``computed`` and ``table`` have one entry a request; ``requests[i]`` is the
    request of row ``i`` (none: row i is request i). ``block_size`` 0 is the plain mode, without
    ``computed`` and ``table``. ``capacity`` is max_num_reqs, ``state_len`` P of the conv rows,
    ``dim_first`` how they are stored. ``hostile[i]`` speaks of record positions.
    """

    layers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    heads: Small
    key_dim: Small
    value_dim: Small
    window: Window
    channels: Channels
    state_len: Small
    capacity: Count
    accepted: tuple[Annotated[int, msgspec.Meta(ge=-65536, le=65536)], ...]
    requests: tuple[Count, ...] = ()
    block_size: Count = 0
    computed: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 30)], ...] = ()
    table: tuple[tuple[Slot, ...], ...] = ()
    records: Literal["row", "slot"] = "row"
    dim_first: bool = True
    activation: Activation = "float32"
    state: State = "float32"
    conv: State = "float32"
    lower_bound: LowerBound = -5.0
    accepted_dtype: Index = "int32"
    requests_dtype: Index = "int32"
    computed_dtype: Index = "int32"
    table_dtype: Index = "int32"

    per_row: ClassVar[tuple[str, ...]] = (*Call.per_row, "requests")
    shrinkable: ClassVar[tuple[str, ...]] = ("layers", "heads", "channels")
    narrowable: ClassVar[tuple[str, ...]] = ("key_dim", "value_dim")
    relations: ClassVar[tuple[str, ...]] = (*Call.relations, "hostile", "split")

    @property
    def effort(self) -> int:
        """Per layer, one fold of the window in every row and a copy of the row's columns."""
        folded = folds(self.rows * self.window, self.heads, self.key_dim, self.value_dim)
        return self.layers * (folded + taps(0, self.rows, self.channels))

    @property
    def longest(self) -> int:
        """The window."""
        return self.window

    @property
    def record_rows(self) -> int:
        """Leading size of the record buffers."""
        return self.capacity if self.records == "row" else self.pool

    @property
    def history(self) -> int:
        """Columns of a conv row that outlive a commit: P - Q + 1."""
        return self.state_len - self.window + 1

    def request(self, row: int) -> int:
        """The request of a row."""
        return self.requests[row] if self.requests else row

    def plan(self, row: int) -> RowPlan:
        """The row's plan; ``ValueError`` where the block table is too narrow for it."""
        r = self.request(row)
        slot, qlen, accepted = self.slots[row], self.qlens[row], self.accepted[r]
        if not self.block_size:
            return plain(slot, qlen, self.window, accepted)
        return align(slot, qlen, self.window, accepted, self.computed[r], self.block_size, self.table[r])

    def record_row(self, row: int) -> int:
        """Where row ``row`` finds its records."""
        return row if self.records == "row" else self.slots[row]

    def blocks(self, name: str) -> Iterator[tuple[int, int, Place | None]]:
        """Source states, the n records of a row, the conv columns that are kept."""
        for row in range(self.rows):
            plan = self.plan(row)
            if not plan.writes:
                continue
            kind = name.partition(".")[0]
            if kind == "state":
                yield row, self.slots[row], None
            elif kind == "conv_state":
                for n in (plan.n, plan.m) if plan.writes_boundary else (plan.n,):
                    yield row, self.slots[row], (slice(None), slice(n - 1, n - 1 + self.history))
            else:
                yield row, self.record_row(row), (slice(None), slice(plan.n))

    def divided(self, spec: TensorSpec, axis: str, size: int) -> list[tuple[str, int]]:
        """Key and gate of a record are halves."""
        mixed = spec.table == "key_gate" and axis == "channel"
        return [("half", 2), ("k", self.key_dim)] if mixed else [(axis, size)]

    def index_values(self) -> dict[str, Any]:
        """query_start_loc, slots, and the vectors by request."""
        return {
            "query_start_loc": self.starts,
            "state_indices": self.slots,
            "num_accepted_tokens": self.accepted,
            "request_indices": self.requests,
            "num_computed_tokens": self.computed,
            "block_table": self.table,
        }

    def passed(self, name: str) -> bool:
        """The context allocates the plan."""
        return name not in PLAN

    def pageable(self) -> tuple[tuple[str, ...], ...]:
        """The page of a slot, the layers' parts interleaved in it."""
        parts = ("conv_state", "state") + (("correction", "key_gate") if self.records == "slot" else ())
        return (tuple(f"{part}.{layer}" for layer in range(self.layers) for part in parts),)

    @kept
    def results(self) -> dict[str, TensorSpec]:
        """Per layer conv_state [S, C, P], state [S, H, V, K], records, A_log, dt_bias; the index vectors."""
        specs = [spec for layer in range(self.layers) for spec in self._layer(layer)]
        specs += [
            self._index("num_accepted_tokens", ("request",), (len(self.accepted),), self.accepted_dtype),
            self._index("state_indices", ("row",), (self.rows,), self.slots_dtype),
            self._index("query_start_loc", ("row",), (self.rows + 1,), self.starts_dtype),
        ]
        if self.requests:
            specs.append(self._index("request_indices", ("row",), (self.rows,), self.requests_dtype))
        if self.block_size:
            shape = (len(self.table), len(self.table[0]) if self.table else 1)
            specs += [
                self._index("block_table", ("request", "column"), shape, self.table_dtype),
                self._index("num_computed_tokens", ("request",), (len(self.computed),), self.computed_dtype),
            ]
        specs += [
            TensorSpec(name=name, axes=("row",), shape=(self.capacity,), dtype="int32", role="output")
            for name in PLAN
        ]
        return {s.name: s for s in specs}

    def _layer(self, layer: int) -> list[TensorSpec]:
        H, K, V, Q, S, R = (
            self.heads,
            self.key_dim,
            self.value_dim,
            self.window,
            self.pool,
            self.record_rows,
        )
        record = ("row", "head", "position")

        def slots(kind: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> TensorSpec:
            like = f"{kind}.0" if layer and kind != "conv_state" else ""
            name = f"{kind}.{layer}"
            return TensorSpec(
                name=name, axes=axes, shape=shape, dtype=dtype, role="slot", values=kind, like=like
            )

        def parameter(kind: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> TensorSpec:
            return TensorSpec(
                name=f"{kind}.{layer}",
                axes=axes,
                shape=shape,
                dtype="float32",
                role="parameter",
                strided="dense",
                values=kind,
            )

        conv = (S, self.channels, self.state_len)
        return [
            slots("conv_state", ("slot", "channel", "column"), conv, self.conv),
            slots("state", ("slot", "head", "v", "k"), (S, H, V, K), self.state),
            slots("correction", (*record, "v"), (R, H, Q, V), "float32"),
            slots("key_gate", (*record, "channel"), (R, H, Q, 2 * K), self.activation),
            parameter("A_log", ("head",), (H,)),
            parameter("dt_bias", ("head", "k"), (H, K)),
        ]

    def _index(self, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> TensorSpec:
        return TensorSpec(name=name, axes=axes, shape=shape, dtype=dtype, role="index")

    def cells(self, name: str, row: int, tokens: int) -> list[Place]:
        """The slots whose tokens are all among the first ``tokens``; a plan is exact by itself."""
        if name in PLAN:
            return []
        plan, places = self.plan(row), []
        if plan.writes and plan.n <= tokens:
            places.append(plan.final)
        if plan.writes_boundary and plan.m <= tokens:
            places.append(plan.boundary)
        columns: Place = (slice(None), slice(self.history)) if name.startswith("conv_state") else ()
        return [(slot, *columns) for slot in places]

    def check(self) -> None:
        """Raise ``ValueError`` where the call is outside the contract of commit."""
        self._check_rows()
        if any(qlen > self.window for qlen in self.qlens):
            raise ValueError("a row has more tokens than the window")
        if self.tail:
            raise ValueError("a commit has no tokens, so no padding of them")
        if self.rows > self.capacity:
            raise ValueError("more rows than max_num_reqs")
        if self.history < 1:
            raise ValueError("a conv row is shorter than the window")
        if self.requests and len(set(self.requests)) != self.rows:
            raise ValueError("two rows name one request")
        self._check_requests()
        self._check_slots()

    def _check_requests(self) -> None:
        named = [self.request(row) for row in range(self.rows)]
        requests = len(self.accepted)
        if any(r >= requests for r in named):
            raise ValueError("a row names a request without an accepted count")
        if not self.block_size:
            if self.computed or self.table:
                raise ValueError("computed tokens and a block table need a block size")
            return
        if self.block_size < self.window:
            raise ValueError("a block is smaller than the window")
        if not len(self.computed) == len(self.table) == requests:
            raise ValueError("computed tokens and block table need one entry a request")
        if len({len(columns) for columns in self.table}) > 1 or any(not columns for columns in self.table):
            raise ValueError("a block table has rows of one width, at least 1")
        if any(slot >= self.pool for columns in self.table for slot in columns):
            raise ValueError("the block table names a slot outside the pool")
        for row, r in enumerate(named):  # null rows' columns must be readable too
            align(
                NULL_SLOT + 1,
                self.qlens[row],
                self.window,
                self.accepted[r],
                self.computed[r],
                self.block_size,
                self.table[r],
            )

    def _check_slots(self) -> None:
        plans = [self.plan(row) for row in range(self.rows)]
        owner: dict[int, int] = {}
        for row, plan in enumerate(plans):
            if self.live(row) and plan.n > 0:
                owner[self.slots[row]] = row
        for row, plan in enumerate(plans):
            if plan.writes_boundary and plan.boundary == plan.final and plan.m != plan.n:
                raise ValueError("boundary and final slot may coincide only at the boundary itself")
            for slot in {plan.final, plan.boundary} if plan.writes else ():
                if slot > NULL_SLOT and owner.setdefault(slot, row) != row:
                    raise ValueError("a slot that one row writes is another row's")

    def only(self, order: list[int]) -> Self:
        """The rows alone; requests stay as they are, named row by row."""
        requests = self.requests or tuple(range(self.rows))
        changed: Self = super(Commit, msgspec.structs.replace(self, requests=requests)).only(order)
        if changed.requests == tuple(range(len(order))):
            changed = msgspec.structs.replace(changed, requests=())
        return msgspec.structs.replace(changed, capacity=len(order) + self.capacity - self.rows)

    def cut(self, tokens: int) -> Self:
        """Not an invariant of a commit: how many tokens are folded depends on all of them."""
        raise ValueError("a commit has no prefix invariance")

    def renamed(self, names: tuple[int, ...]) -> Self:
        """Slots and block tables by their new names."""
        table = tuple(rename(columns, names) for columns in self.table)
        return msgspec.structs.replace(super().renamed(names), table=table)

    def compact(self) -> Self:
        """Small slot names, no spare requests, columns that matter to no row set to null."""
        requests = [self.request(row) for row in range(self.rows)]
        plans = [self.plan(row) for row in range(self.rows)]
        used = [slot for plan in plans for slot in (plan.final, plan.boundary) if slot > NULL_SLOT]
        names = numbering((*self.slots, *used))
        asked = [self.table[r] for r in requests] if self.block_size else []
        table = tuple(tuple(names.get(s, min(s, NULL_SLOT)) for s in columns) for columns in asked)
        return msgspec.structs.replace(
            self,
            slots=tuple(names.get(slot, slot) for slot in self.slots),
            pool=len(names) + 1,
            capacity=self.rows,
            requests=(),
            accepted=tuple(self.accepted[r] for r in requests),
            computed=tuple(self.computed[r] for r in requests) if self.block_size else (),
            table=table,
        )

    def smaller(self) -> Iterator[dict[str, Any]]:
        """Plain mode, smaller counts, windows, rows and blocks."""
        yield {"block_size": 0, "computed": (), "table": ()}
        yield {"accepted": tuple(min(max(a, 0), self.window) for a in self.accepted)}
        for i, count in enumerate(self.accepted):
            if count > 1:
                yield {"accepted": (*self.accepted[:i], count - 1, *self.accepted[i + 1 :])}
        for i, count in enumerate(self.computed):
            for fewer in sorted({0, count % self.block_size, count - self.block_size, count - 1}):
                if 0 <= fewer < count:
                    yield {"computed": (*self.computed[:i], fewer, *self.computed[i + 1 :])}
        for window in self.shorter_windows():
            yield {"window": window, "state_len": self.history + window - 1}
        yield {"state_len": self.window}
        if self.block_size:
            yield from self._smaller_blocks()
            yield {"block_size": self.block_size - 1}
            yield {"table": tuple(columns[:-1] for columns in self.table)}
        yield {"dim_first": True}

    def _smaller_blocks(self) -> Iterator[dict[str, Any]]:
        """Smaller blocks, every request in its first one, as far from its end as before."""
        for size in sorted({self.window, self.block_size - 1}):
            left = [self.block_size - nc % self.block_size for nc in self.computed]
            first = [nc // self.block_size for nc in self.computed]
            yield {
                "block_size": size,
                "computed": tuple(max(0, size - tokens) for tokens in left),
                "table": tuple((*t, 0, 0)[c : c + 2] for t, c in zip(self.table, first, strict=True)),
            }
        yield {"block_size": self.window}

    def size(self) -> tuple[int, ...]:
        """Block mode, requests, counts, window, columns of conv rows and tables."""
        return (
            self.block_size > 0,
            len(self.accepted),
            sum(map(abs, self.accepted)),
            self.window,
            self.state_len,
            self.block_size,
            sum(self.computed),
            sum(map(len, self.table)),
            self.capacity,
            not self.dim_first,
            sum(abs(slot) for columns in self.table for slot in columns),
            len(self.requests),
        )

    def describe(self) -> str:
        """Dimensions and dtypes."""
        mode = f"blocks of {self.block_size}" if self.block_size else "plain"
        return (
            f"{self.rows} rows, {self.layers} layers, {self.heads} heads, K {self.key_dim}, "
            f"V {self.value_dim}, window {self.window}, {mode}, "
            f"state {self.state}, conv {self.conv}, {self.records} records"
        )
