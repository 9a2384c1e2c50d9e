"""KDA commit in Triton: fold the accepted tokens of a speculative window into conv and SSM state.

One launch does the three steps of the contract (1.6) for all layers. Its grid is (part, row,
layer). The first parts fold, each a tile of one head's state; the others compact, each a block
of conv channels. Every program works its row's plan out anew from a few scalars, so none waits
for what another one stores; the row's first program stores the plan. Guaranteed: no host
synchronisation, every address that can pass 2**31 is formed in int64, index vectors and block
table may be strided, a program reads its share of the source before it overwrites it. Not
guaranteed: anything for rows whose destination is another row's source or destination.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from impl.triton.gate import log_decay
from impl.triton.launch import adjusted

NULL_BLOCK_ID = 0

_CHANNELS = 256
"""Channels a program compacts; a warp's lanes keep whole channels."""
_TILE_BYTES = 8192
"""State that a program folds, in one warp: 128 registers a lane for a bf16 state."""

_TABLE = (
    "conv_state_base_addrs",
    "conv_state_block_strides",
    "conv_state_dim_strides",
    "conv_state_token_strides",
    "state_base_addrs",
    "state_block_strides",
    "correction_cache_base_addrs",
    "correction_cache_block_strides",
    "kg_cache_base_addrs",
    "kg_cache_block_strides",
)
"""Rows of the int64 table, in the kernel's order; nine rows of inner strides follow them."""

# These make no new binary when their divisibility or alignment changes: all of them are scalars
# or address scalars.
_RUNTIME = (
    "accepted_ptr",
    "slot_ptr",
    "starts_ptr",
    "request_ptr",
    "blocks_ptr",
    "computed_ptr",
    "accepted_step",
    "slot_step",
    "starts_step",
    "request_step",
    "blocks_row",
    "blocks_step",
    "computed_step",
    "block_size",
    "width",
    "capacity",
    "pitch",
    "lower_bound",
    "window",
    "heads",
    "channels",
    "history",
)


@triton.jit
def _pointer(address, offset, TYPE: tl.constexpr, DENSE: tl.constexpr):
    """``offset`` elements past an address out of the table; dense tensors start on 4 elements."""
    pointer = address.to(tl.pointer_type(TYPE)) + offset
    if DENSE:
        pointer = tl.multiple_of(pointer, TYPE.primitive_bitwidth // 2)
    return pointer


@triton.jit
def _plan_row(
    row,
    accepted_ptr,
    slot_ptr,
    starts_ptr,
    request_ptr,
    blocks_ptr,
    computed_ptr,
    accepted_step,
    slot_step,
    starts_step,
    request_step,
    blocks_row,
    blocks_step,
    computed_step,
    block_size,
    width,
    window,
    NULL: tl.constexpr,
):
    """(source, n, final, boundary, m) of a row: n = 0 if it is dead, m = 0 without a block table."""
    source = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    first = tl.load(starts_ptr + row * starts_step).to(tl.int64)
    length = tl.load(starts_ptr + (row + 1) * starts_step).to(tl.int64) - first
    request = row
    if request_ptr is not None:
        request = tl.load(request_ptr + row * request_step).to(tl.int64)
    accepted = tl.load(accepted_ptr + request * accepted_step).to(tl.int64)
    n = tl.minimum(tl.minimum(tl.maximum(accepted, 0), length), window).to(tl.int32)
    live = (source > NULL) & (n > 0)
    n = tl.where(live, n, 0)
    nothing = tl.zeros_like(source) + NULL
    final = tl.where(live, source, nothing)
    boundary = nothing
    m = n * 0
    if blocks_ptr is not None:
        # n <= block_size, so the last token lies in the block of the first one or in the next:
        # one division, and no sum that could overflow.
        computed = tl.load(computed_ptr + request * computed_step)
        block = computed // block_size
        used = (computed - block * block_size).to(tl.int64)
        block = block.to(tl.int64)
        column = tl.minimum(block + tl.where(used + n > block_size, 1, 0), width - 1)
        blocks_ptr += request * blocks_row
        final = tl.load(blocks_ptr + column * blocks_step, mask=live & (column >= 0), other=NULL)
        crossed = live & (used + n >= block_size) & (block < width)
        boundary = tl.load(blocks_ptr + block * blocks_step, mask=crossed, other=NULL)
        final = final.to(tl.int64)
        boundary = boundary.to(tl.int64)
        m = tl.where(live, block_size - used, 0).to(tl.int32)
    return source, n, final, boundary, m


@triton.jit
def _compact(
    entry,
    pitch,
    block,
    channels,
    history,
    source,
    n,
    final,
    boundary,
    m,
    BC: tl.constexpr,
    CONV: tl.constexpr,
    ALIGN: tl.constexpr,
    NULL: tl.constexpr,
):
    """Move a channel block's kept columns of one layer to the front of the destination rows."""
    base = tl.load(entry)
    slot_step = tl.load(entry + pitch)
    channel_step = tl.load(entry + 2 * pitch)
    column_step = tl.load(entry + 3 * pitch)
    cs = block * BC + tl.arange(0, BC)
    in_final = (cs < channels) & (final > NULL)
    in_boundary = in_final & (boundary > NULL)
    # An integer type of the conv state's size, for what is copied is bits.
    page = base.to(tl.pointer_type(CONV)) + cs.to(tl.int64) * channel_step
    # Right in place: a lane owns its channels, and from step h on it reads no column below h.
    for h in range(history):
        kept = tl.load(page + source * slot_step + (n - 1 + h) * column_step, mask=in_final)
        if ALIGN:
            crossing = tl.load(page + source * slot_step + (m - 1 + h) * column_step, mask=in_boundary)
            tl.store(page + boundary * slot_step + h * column_step, crossing, mask=in_boundary)
        tl.store(page + final * slot_step + h * column_step, kept, mask=in_final)


@triton.jit
def _fold(
    entry,
    pitch,
    a_log_ptr,
    bias_ptr,
    v_block,
    row,
    layer,
    head,
    heads,
    source,
    n,
    final,
    boundary,
    m,
    lower_bound,
    window,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE: tl.constexpr,
    RECORD: tl.constexpr,
    BOUNDED: tl.constexpr,
    DENSE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ALIGN: tl.constexpr,
    NULL: tl.constexpr,
):
    """Fold n recorded tokens into one tile of a head's state, by the recurrence (1.3)."""
    ks = tl.arange(0, BK)
    vs = v_block * BV + tl.arange(0, BV)
    in_k = ks < K
    in_v = vs < V
    inside = in_v[:, None] & in_k[None, :]

    state_base = tl.load(entry + 4 * pitch)
    state_slot = tl.load(entry + 5 * pitch)
    u_base = tl.load(entry + 6 * pitch)
    u_row = tl.load(entry + 7 * pitch)
    kg_base = tl.load(entry + 8 * pitch)
    kg_row = tl.load(entry + 9 * pitch)
    if DENSE:
        state_head = V * K
        tile = vs[:, None] * K + ks[None, :]
        u_head = V * window
        u_step = V
        u_dims = vs
        kg_head = 2 * K * window
        kg_step = 2 * K
        k_dims = ks
        g_dims = K + ks
    else:
        state_head = tl.load(entry + 10 * pitch)
        state_v = tl.load(entry + 11 * pitch)
        state_k = tl.load(entry + 12 * pitch)
        tile = vs.to(tl.int64)[:, None] * state_v + ks.to(tl.int64)[None, :] * state_k
        u_head = tl.load(entry + 13 * pitch)
        u_step = tl.load(entry + 14 * pitch)
        u_dims = vs.to(tl.int64) * tl.load(entry + 15 * pitch)
        kg_head = tl.load(entry + 16 * pitch)
        kg_step = tl.load(entry + 17 * pitch)
        kg_dim = tl.load(entry + 18 * pitch)
        k_dims = ks.to(tl.int64) * kg_dim
        g_dims = (K + ks.to(tl.int64)) * kg_dim
    record = source if BY_SLOT else row
    u_ptr = _pointer(u_base, record * u_row + head * u_head, tl.float32, DENSE)
    kg_ptr = _pointer(kg_base, record * kg_row + head * kg_head, RECORD, DENSE)
    bias_ptr += (layer * heads + head) * K

    state_ptr = _pointer(state_base, source * state_slot + head * state_head, STATE, DENSE)
    state = tl.load(state_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    next_k = tl.load(kg_ptr + k_dims, mask=in_k, other=0.0)
    next_g = tl.load(kg_ptr + g_dims, mask=in_k, other=0.0)
    next_u = tl.load(u_ptr + u_dims, mask=in_v, other=0.0)
    a = tl.exp(tl.load(a_log_ptr + layer * heads + head))
    bias = tl.load(bias_ptr + ks, mask=in_k, other=0.0)

    last = -1
    if ALIGN:
        last = tl.where((final > NULL) & (boundary > NULL), m - 1, -1)
    for t in range(n):
        k = next_k.to(tl.float32)
        x = next_g.to(tl.float32) + bias
        u = next_u
        # The next token's record is on its way while this one is folded; past the last, nothing is read.
        more = t + 1 < n
        u_ptr += u_step
        kg_ptr += kg_step
        next_k = tl.load(kg_ptr + k_dims, mask=in_k & more, other=0.0)
        next_g = tl.load(kg_ptr + g_dims, mask=in_k & more, other=0.0)
        next_u = tl.load(u_ptr + u_dims, mask=in_v & more, other=0.0)

        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        state *= tl.exp(log_decay(x, a, lower_bound, BOUNDED))[None, :]
        state += u[:, None] * k[None, :]
        if ALIGN:  # noqa: SIM102 - the compiler decides the outer one
            if t == last:
                to = _pointer(state_base, boundary * state_slot + head * state_head, STATE, DENSE)
                tl.store(to + tile, state, mask=inside)
    if final > NULL:
        to = _pointer(state_base, final * state_slot + head * state_head, STATE, DENSE)
        tl.store(to + tile, state, mask=inside)


@triton.jit(do_not_specialize=_RUNTIME)
def _commit_kernel(
    accepted_ptr,
    slot_ptr,
    starts_ptr,
    request_ptr,
    blocks_ptr,
    computed_ptr,
    accepted_step,
    slot_step,
    starts_step,
    request_step,
    blocks_row,
    blocks_step,
    computed_step,
    block_size,
    width,
    heads,
    plan_ptr,
    capacity,
    table_ptr,
    pitch,
    a_log_ptr,
    bias_ptr,
    lower_bound,
    window,
    channels,
    history,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    STATE: tl.constexpr,
    RECORD: tl.constexpr,
    CONV: tl.constexpr,
    BOUNDED: tl.constexpr,
    DENSE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    NULL: tl.constexpr,
):
    ALIGN: tl.constexpr = blocks_ptr is not None
    TILES: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2)

    source, n, final, boundary, m = _plan_row(
        row,
        accepted_ptr,
        slot_ptr,
        starts_ptr,
        request_ptr,
        blocks_ptr,
        computed_ptr,
        accepted_step,
        slot_step,
        starts_step,
        request_step,
        blocks_row,
        blocks_step,
        computed_step,
        block_size,
        width,
        window,
        NULL,
    )
    if (part == 0) & (layer == 0):
        tl.store(plan_ptr + row, n)
        tl.store(plan_ptr + capacity + row, final)
        tl.store(plan_ptr + 2 * capacity + row, boundary)
        tl.store(plan_ptr + 3 * capacity + row, m)
    if n == 0:
        return

    entry = table_ptr + layer
    if part < heads * TILES:
        _fold(
            entry,
            pitch,
            a_log_ptr,
            bias_ptr,
            part % TILES,
            row,
            layer,
            (part // TILES).to(tl.int64),
            heads,
            source,
            n,
            final,
            boundary,
            m,
            lower_bound,
            window,
            K,
            V,
            BK,
            BV,
            STATE,
            RECORD,
            BOUNDED,
            DENSE,
            BY_SLOT,
            ALIGN,
            NULL,
        )
    else:
        block = part - heads * TILES
        _compact(entry, pitch, block, channels, history, source, n, final, boundary, m, BC, CONV, ALIGN, NULL)


_dim_first = False


def set_conv_state_dim_first(flag: bool) -> None:
    """Say how conv states are stored, for the whole process: ``[S, C, P]`` if true, else ``[S, P, C]``."""
    global _dim_first
    _dim_first = bool(flag)


def is_conv_state_dim_first() -> bool:
    """Whether conv states are stored ``[S, C, P]``; ``create`` transposes the others."""
    return _dim_first


@dataclass(frozen=True, eq=False)
class KDARecoverSSMCommitContext:
    """What a commit needs to know of L layers: addresses, strides, gate parameters, and room for a plan.

    Addresses ``[L]`` and strides ``[L]`` (in elements) are int64, the plan's four vectors int32
    ``[max_num_reqs]``: those of the last commit, undefined past its rows. ``A_log [L, H]`` and
    ``dt_bias [L, H, K]`` are copies made by ``create``.
    """

    conv_states: tuple[torch.Tensor, ...]
    conv_state_base_addrs: torch.Tensor
    conv_state_block_strides: torch.Tensor
    conv_state_dim_strides: torch.Tensor
    conv_state_token_strides: torch.Tensor
    conv_history_len: int
    checkpoints: tuple[torch.Tensor, ...]
    state_base_addrs: torch.Tensor
    state_block_strides: torch.Tensor
    correction_caches: tuple[torch.Tensor, ...]
    correction_cache_base_addrs: torch.Tensor
    correction_cache_block_strides: torch.Tensor
    kg_caches: tuple[torch.Tensor, ...]
    kg_cache_base_addrs: torch.Tensor
    kg_cache_block_strides: torch.Tensor
    commit_lens: torch.Tensor
    final_state_indices: torch.Tensor
    boundary_state_indices: torch.Tensor
    boundary_recovery_lens: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None
    spec_query_len: int
    backend: Literal["cute", "triton"]
    _max_num_reqs: int
    _fixed: tuple[Any, ...]
    _options: dict[str, Any]

    @classmethod
    def create(
        cls,
        layers: Sequence[Any],
        *,
        spec_query_len: int,
        max_num_reqs: int,
        backend: Literal["cute", "triton"] = "triton",
    ) -> "KDARecoverSSMCommitContext":
        """Gather the layers; their tensors must stay where they are as long as the context is used.

        A layer has ``A_log [H]``, ``dt_bias [H*K]``, ``local_num_heads``, ``head_dim`` (K),
        ``gate_lower_bound`` and ``kv_cache``: conv and state beside ``recoverssm_records`` (one
        record row per batch row), or conv, state, correction and key/gate (one per state slot).
        ``backend`` chooses the fold: "cute" is one launch of its own, for K = V = 128, bf16 and a
        lower bound. ``ValueError`` for layers that do not fit together, or not the backend.
        """
        if not layers:
            raise ValueError("KDA commit needs at least one layer; found none")
        by_slot = _check_pages(layers)
        bounds = {layer.gate_lower_bound for layer in layers}
        if len(bounds) != 1:
            raise ValueError(
                f"KDA commit needs one gate bound for all layers; found {sorted(bounds, key=str)}"
            )
        states = [layer.kv_cache[1] for layer in layers]
        records = [_records(layer, by_slot=by_slot) for layer in layers]
        corrections, key_gates = [r[0] for r in records], [r[1] for r in records]
        _check_states(states)
        _check_records(states[0], corrections, key_gates, spec_query_len, None if by_slot else max_num_reqs)
        _check_gates(layers, states[0])
        convs = _conv_states(layers, states[0], spec_query_len)
        if backend not in ("triton", "cute"):
            raise ValueError(f"KDA commit needs backend 'triton' or 'cute'; found {backend!r}")

        device, (heads, _, key_dim) = states[0].device, states[0].shape[1:]
        table = _table(convs, states, corrections, key_gates).to(device)
        capacity = -(-max_num_reqs // 4) * 4  # the plan's rows start on 16 bytes, as the table's do
        plan = torch.empty((4, capacity), dtype=torch.int32, device=device)
        a_log = torch.stack([layer.A_log.detach().to(device, torch.float32) for layer in layers])
        biases = [layer.dt_bias.detach().to(device, torch.float32) for layer in layers]
        bias = torch.stack([x.reshape(heads, key_dim) for x in biases])
        lower_bound = bounds.pop()
        bound = 0.0 if lower_bound is None else float(lower_bound)
        channels, history = convs[0].shape[1], convs[0].shape[2] - spec_query_len + 1
        options = _shapes(states, corrections, key_gates) | {
            "CONV": {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[convs[0].element_size()],
            "BOUNDED": lower_bound is not None,
            "BY_SLOT": by_slot,
        }
        made = cls(
            **{name: row[: len(layers)] for name, row in zip(_TABLE, table, strict=False)},
            conv_states=tuple(convs),
            conv_history_len=history,
            checkpoints=tuple(states),
            correction_caches=tuple(corrections),
            kg_caches=tuple(key_gates),
            commit_lens=plan[0, :max_num_reqs],
            final_state_indices=plan[1, :max_num_reqs],
            boundary_state_indices=plan[2, :max_num_reqs],
            boundary_recovery_lens=plan[3, :max_num_reqs],
            A_log=a_log,
            dt_bias=bias,
            lower_bound=lower_bound,
            spec_query_len=spec_query_len,
            backend=backend,
            _max_num_reqs=max_num_reqs,
            _fixed=(
                plan,
                capacity,
                table,
                table.shape[1],
                a_log,
                bias,
                bound,
                spec_query_len,
                channels,
                history,
            ),
            _options=options,
        )
        if backend == "cute":
            from impl.cute.host import check_commit

            check_commit(made)
        return made

    @property
    def by_slot(self) -> bool:
        """Whether records lie at state slots, not at batch rows."""
        return bool(self._options["BY_SLOT"])

    def commit(
        self,
        num_accepted_tokens: torch.Tensor,
        state_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        request_indices: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
        mamba_block_size: int | None = None,
    ) -> None:
        """Fold each row's accepted tokens into every layer's SSM and conv state, and leave the plan.

        state_indices ``[N]`` and query_start_loc ``[N+1]`` by row; num_accepted_tokens,
        num_computed_tokens and block_table ``[requests, columns]`` by request, which for row
        ``i`` is ``request_indices[i]`` or ``i``; int32 or int64. The last three arguments
        together choose align mode. ``ValueError`` for arguments that do not fit together.
        """
        rows = state_indices.shape[0]
        if rows == 0:
            return
        index = (num_accepted_tokens, state_indices, query_start_loc)
        align = (block_table, num_computed_tokens, mamba_block_size)
        self._check(rows, index, request_indices, align)
        if self.backend == "triton":
            self._launch(rows, index, request_indices, align, self.checkpoints[0].shape[1])
            return
        from impl.cute.host import cute_recoverssm_commit

        self._plan_and_compact(rows, index, request_indices, align)
        cute_recoverssm_commit(self, state_indices, rows, align=block_table is not None)

    def _plan_and_compact(
        self,
        rows: int,
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        requests: torch.Tensor | None,
        align: tuple[torch.Tensor | None, torch.Tensor | None, int | None],
    ) -> None:
        """All of a commit but the fold, for a fold of another kind that runs on the finished plan."""
        self._launch(rows, index, requests, align, 0)

    def _check(
        self,
        rows: int,
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        requests: torch.Tensor | None,
        align: tuple[torch.Tensor | None, torch.Tensor | None, int | None],
    ) -> None:
        blocks, computed, block_size = align
        if rows > self._max_num_reqs:
            raise ValueError(f"KDA commit was made for at most {self._max_num_reqs} rows; found {rows}")
        if index[2].shape[0] != rows + 1:
            raise ValueError(
                f"KDA commit needs query_start_loc of {rows + 1} entries; found {index[2].shape[0]}"
            )
        if requests is not None and requests.shape[0] < rows:
            raise ValueError(
                f"KDA commit needs request_indices of at least {rows} entries; found {requests.shape[0]}"
            )
        missing = sum(x is None for x in align)
        if 0 < missing < 3:
            raise ValueError(
                f"KDA commit needs block_table, num_computed_tokens and mamba_block_size together; "
                f"found {3 - missing} of them"
            )
        if block_size is not None and block_size < self.spec_query_len:
            raise ValueError(
                f"KDA commit needs mamba_block_size of at least the window {self.spec_query_len}; "
                f"found {block_size}"
            )
        if self.backend == "cute" and index[1].dtype != torch.int32:
            raise ValueError(
                f"KDA commit needs int32 state_indices for the CuTe fold; found {index[1].dtype}"
            )
        if blocks is not None and blocks.ndim != 2:
            raise ValueError(
                f"KDA commit needs a block table of [requests, columns]; found {tuple(blocks.shape)}"
            )
        device = self.commit_lens.device
        for x in (*index, requests, blocks, computed):
            if x is not None and x.device != device:
                raise ValueError(f"KDA commit needs all tensors on {device}; found one on {x.device}")

    def _launch(
        self,
        rows: int,
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        requests: torch.Tensor | None,
        align: tuple[torch.Tensor | None, torch.Tensor | None, int | None],
        heads: int,
    ) -> None:
        accepted, slots, starts = index
        blocks, computed, block_size = align
        options = adjusted("commit", self._options)
        tiles = -(-options["V"] // options["BV"])
        blocks_of_channels = -(-self.conv_states[0].shape[1] // options["BC"])
        parts = heads * tiles + blocks_of_channels
        _commit_kernel[(parts, rows, len(self.checkpoints))](
            accepted,
            slots,
            starts,
            requests,
            blocks,
            computed,
            accepted.stride(0),
            slots.stride(0),
            starts.stride(0),
            0 if requests is None else requests.stride(0),
            *((0, 0) if blocks is None else blocks.stride()),
            0 if computed is None else computed.stride(0),
            block_size or 1,
            0 if blocks is None else blocks.shape[1],
            heads,
            *self._fixed,
            **options,
        )


def _check_pages(layers: Sequence[Any]) -> bool:
    """Whether the layers keep one record row per state slot; they must all do, or none."""
    by_slot = [getattr(layer, "recoverssm_records", None) is None for layer in layers]
    for layer, slot in zip(layers, by_slot, strict=True):
        if len(layer.kv_cache) != (4 if slot else 2):
            needed = (
                "four page parts (conv, state, correction, key/gate)"
                if slot
                else "two page parts (conv, state) beside recoverssm_records"
            )
            raise ValueError(f"KDA commit needs {needed}; found {len(layer.kv_cache)}")
    if any(by_slot) and not all(by_slot):
        raise ValueError("KDA commit needs page parts of one record layout; found layers of both")
    return by_slot[0]


def _check_states(states: list[torch.Tensor]) -> None:
    for state in states:
        if state.ndim != 4:
            raise ValueError(
                f"KDA commit needs a checkpoint of [slots, heads, value_dim, key_dim]; "
                f"found {tuple(state.shape)}"
            )
    for state in states[1:]:
        if _kind(state) != _kind(states[0]) or state.shape != states[0].shape:
            raise ValueError(
                f"KDA commit needs checkpoints of one shape, dtype, device and inner strides; "
                f"found {_describe(states[0])} and {_describe(state)}"
            )


def _check_records(
    state: torch.Tensor,
    corrections: list[torch.Tensor],
    key_gates: list[torch.Tensor],
    window: int,
    rows: int | None,
) -> None:
    """``rows`` is the least number of record rows, or None for exactly one per slot."""
    slots, heads, value_dim, key_dim = state.shape
    for name, buffers, width, dtype in (
        ("correction", corrections, value_dim, torch.float32),
        ("key/gate", key_gates, 2 * key_dim, key_gates[0].dtype),
    ):
        inner = (heads, window, width)
        for x in buffers:
            enough = x.ndim == 4 and (x.shape[0] == slots if rows is None else x.shape[0] >= rows)
            alike = (x.dtype, x.device) == (dtype, state.device) and _kind(x) == _kind(buffers[0])
            if not enough or x.shape[1:] != inner or not alike:
                raise ValueError(
                    f"KDA commit needs {name} records of {dtype} "
                    f"[{slots if rows is None else f'at least {rows}'}, {heads}, {window}, {width}] "
                    f"on {state.device}, alike in every layer; found {_describe(x)}"
                )


def _check_gates(layers: Sequence[Any], state: torch.Tensor) -> None:
    _, heads, _, key_dim = state.shape
    for layer in layers:
        if layer.A_log.shape != (heads,):
            raise ValueError(f"KDA commit needs A_log of [{heads}]; found {tuple(layer.A_log.shape)}")
    for layer in layers:
        named = (layer.local_num_heads, layer.head_dim)
        if layer.dt_bias.numel() != heads * key_dim or named != (heads, key_dim):
            raise ValueError(
                f"KDA commit needs dt_bias of {heads} heads x {key_dim} channels; "
                f"found {tuple(layer.dt_bias.shape)} for {named[0]} x {named[1]}"
            )


def _conv_states(layers: Sequence[Any], state: torch.Tensor, window: int) -> list[torch.Tensor]:
    """The layers' conv states as ``[S, C, P]``."""
    stored = [layer.kv_cache[0] for layer in layers]
    for conv in stored:
        if conv.ndim != 3:
            raise ValueError(
                f"KDA commit needs a conv state of three dimensions (slots, channels, columns); "
                f"found {tuple(conv.shape)}"
            )
    convs = stored if is_conv_state_dim_first() else [conv.transpose(1, 2) for conv in stored]
    if convs[0].shape[2] < window:
        raise ValueError(
            f"KDA commit needs conv rows of at least the window's {window} columns; found {convs[0].shape[2]}"
        )
    for conv in convs:
        fits = conv.shape[0] == state.shape[0] and conv.device == state.device
        if not fits or conv.shape != convs[0].shape or conv.dtype != convs[0].dtype:
            raise ValueError(
                f"KDA commit needs conv states alike in shape and dtype, of {state.shape[0]} slots on "
                f"{state.device}; found {_describe(convs[0])} and {_describe(conv)}"
            )
    return convs


def _kind(x: torch.Tensor) -> tuple[object, ...]:
    return x.dtype, x.device, x.stride()[1:]


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"


def _records(layer: Any, *, by_slot: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if by_slot:
        return layer.kv_cache[2], layer.kv_cache[3]
    return layer.recoverssm_records.correction, layer.recoverssm_records.key_gate


def _table(convs: Sequence[torch.Tensor], *others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Addresses and strides, a column per layer; the rows are ``_TABLE`` and then the inner strides."""
    # An even number of columns: kernels may load a row as vectors of 16 bytes.
    table = torch.zeros((len(_TABLE) + 9, -(-len(convs) // 2) * 2), dtype=torch.int64)
    for i, (conv, *parts) in enumerate(zip(convs, *others, strict=True)):
        column = [conv.data_ptr(), *conv.stride()]
        for x in parts:
            column += [x.data_ptr(), x.stride(0)]
        for x in parts:
            column += x.stride()[1:]
        table[:, i] = torch.tensor(column)
    return table


def _shapes(
    states: list[torch.Tensor], corrections: list[torch.Tensor], key_gates: list[torch.Tensor]
) -> dict[str, Any]:
    """What a program handles, as the kernel's constants."""
    _, _, value_dim, key_dim = states[0].shape
    block_k = triton.next_power_of_2(key_dim)
    dense = all(_is_dense(x) for x in (*states, *corrections, *key_gates))
    # Without dense rows every element needs an address of its own, and registers for it.
    tile = (_TILE_BYTES if dense else _TILE_BYTES // 4) // (block_k * states[0].element_size())
    return {
        "K": key_dim,
        "V": value_dim,
        "BK": block_k,
        "BV": min(triton.next_power_of_2(value_dim), max(1, tile)),
        "BC": _CHANNELS,
        "STATE": _triton_type(states[0]),
        "RECORD": _triton_type(key_gates[0]),
        "DENSE": dense,
        "NULL": NULL_BLOCK_ID,
        "num_warps": 1,
    }


def _triton_type(x: torch.Tensor) -> Any:
    return getattr(tl, str(x.dtype).removeprefix("torch."))


def _is_dense(x: torch.Tensor) -> bool:
    """Whether rows are contiguous and a lane can take four elements at once from any of them."""
    steps = (x.data_ptr() // x.element_size(), x.stride(0), x.shape[3])
    return x[:1].is_contiguous() and all(step % 4 == 0 for step in steps)
