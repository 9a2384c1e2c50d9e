"""KDA speculative verify in Triton: run a window per request, write records, keep the checkpoint.

One program, a single warp, serves (value block, row, head) and loops over the row's tokens, so
tokens past its length cost nothing and no binary is made per window. The state stays in fp32
registers from its single load to the last token and is never stored. Guaranteed: no host
synchronisation, every address that can pass 2**31 is formed in int64, index vectors may be
strided. Not guaranteed: anything for rows longer than the window (their tokens past it are
ignored) or for two live rows that share a record row.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from impl.triton.gate import log_decay
from impl.triton.launch import adjusted

NULL_BLOCK_ID = 0

# These make no new binary when their values or addresses change; the strides in ``wide`` do, for a
# compiler that knows them to be multiples of 16 makes vector accesses of what they lead to. Tuples and
# declared types spare the launch time.
_RUNTIME = (
    "beta_ptr",
    "a_log_ptr",
    "qsl_ptr",
    "slot_ptr",
    "lower_bound",
    "window",
    "beta_token",
    "u_row",
    "qsl_step",
    "slot_step",
    "inner",
)


@triton.jit
def _load_token(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    q_token,
    k_token,
    v_token,
    g_token,
    beta_token,
    token,
    in_k,
    in_v,
    live,
):
    """Key, gate, query, value and beta of a token, as stored; of one that is not live, nothing is read."""
    in_k &= live
    in_v &= live
    raw_k = tl.load(k_ptr + token * k_token, mask=in_k, other=0.0)
    raw_g = tl.load(g_ptr + token * g_token, mask=in_k, other=0.0)
    raw_q = tl.load(q_ptr + token * q_token, mask=in_k, other=0.0)
    raw_v = tl.load(v_ptr + token * v_token, mask=in_v, other=0.0)
    raw_beta = tl.load(beta_ptr + token * beta_token, mask=live)
    return raw_k, raw_g, raw_q, raw_v, raw_beta


@triton.jit(do_not_specialize=_RUNTIME)
def _verify_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    state_ptr,
    u_ptr,
    kg_ptr,
    out_ptr,
    qsl_ptr,
    slot_ptr,
    lower_bound: tl.float32,
    window: tl.int32,
    wide,
    beta_token: tl.int64,
    u_row: tl.int64,
    qsl_step: tl.int64,
    slot_step: tl.int64,
    inner,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BOUNDED: tl.constexpr,
    RECORD_BY_SLOT: tl.constexpr,
    NULL: tl.constexpr,
):
    q_token, k_token, v_token, g_token, out_token, state_slot, kg_row = wide
    DENSE: tl.constexpr = len(inner) == 0  # state and record rows are
    if DENSE:
        state_head, state_v, state_k = V * K, K, 1
        u_head, u_pos, u_dim = V * window, V, 1
        kg_head, kg_pos, kg_dim = 2 * K * window, 2 * K, 1
    else:
        state_head, state_v, state_k, u_head, u_pos, u_dim, kg_head, kg_pos, kg_dim = inner
    v_block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)

    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    first = tl.load(qsl_ptr + row * qsl_step).to(tl.int64)
    count = tl.load(qsl_ptr + (row + 1) * qsl_step).to(tl.int64) - first
    count = tl.minimum(count, window)

    ks = tl.arange(0, BK)
    vs = v_block * BV + tl.arange(0, BV)
    in_k = ks < K
    in_v = vs < V
    out_ptr += head * V + vs

    if slot <= NULL:
        zeros = tl.zeros([BV], tl.float32)
        for t in range(count):
            tl.store(out_ptr + (first + t) * out_token, zeros, mask=in_v)
        return
    if count <= 0:
        return

    state_ptr += slot * state_slot + head * state_head
    if DENSE:  # 32 bits within the tile, or every element needs an address of its own
        tile = state_ptr + v_block.to(tl.int64) * (BV * K) + tl.arange(0, BV)[:, None] * K + ks[None, :]
    else:
        tile = state_ptr + vs.to(tl.int64)[:, None] * state_v + ks.to(tl.int64)[None, :] * state_k
    raw_state = tl.load(tile, mask=in_v[:, None] & in_k[None, :], other=0.0)
    inputs = (q_ptr + head * K + ks, k_ptr + head * K + ks, v_ptr + head * V + vs, g_ptr + head * K + ks)
    inputs += (beta_ptr + head, q_token, k_token, v_token, g_token, beta_token)
    ahead = _load_token(*inputs, first, in_k, in_v, True)
    a = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + head * K + ks, mask=in_k, other=0.0)

    record = slot if RECORD_BY_SLOT else row
    u_ptr += record * u_row + head * u_head + vs.to(tl.int64) * u_dim
    kg_ptr += record * kg_row + head * kg_head + ks.to(tl.int64) * kg_dim

    state = raw_state.to(tl.float32)
    for t in range(count):
        token = first + t
        raw_k, raw_g, raw_q, raw_v, raw_beta = ahead
        # The next token is on its way while this one is computed.
        ahead = _load_token(*inputs, token + 1, in_k, in_v, t + 1 < count)

        k = raw_k.to(tl.float32)
        q = raw_q.to(tl.float32)
        v = raw_v.to(tl.float32)
        beta = tl.sigmoid(raw_beta.to(tl.float32))
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (K**-0.5)
        state *= tl.exp(log_decay(raw_g.to(tl.float32) + bias, a, lower_bound, BOUNDED))[None, :]
        u = beta * (v - tl.sum(state * k[None, :], axis=1))
        state += u[:, None] * k[None, :]

        tl.store(out_ptr + token * out_token, tl.sum(state * q[None, :], axis=1), mask=in_v)
        tl.store(u_ptr + t * u_pos, u, mask=in_v)
        if v_block == 0:
            # Stored as loaded: widening would be exact, but there is nothing to compute.
            tl.store(kg_ptr + t * kg_pos, raw_k, mask=in_k)
            tl.store(kg_ptr + t * kg_pos + K * kg_dim, raw_g, mask=in_k)


@dataclass(frozen=True)
class KDARecoverSSMRecords:
    """One layer's verify records, a row per row of the batch.

    ``correction [R, H, Q, V]`` fp32 holds u_t; ``key_gate [R, H, Q, 2K]`` in the activation
    dtype holds the raw key and the raw gate of every token.
    """

    correction: torch.Tensor
    key_gate: torch.Tensor

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        num_heads: int,
        spec_query_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KDARecoverSSMRecords":
        """Uninitialised buffers for ``max_num_reqs`` rows, with V = K = ``head_dim``."""
        shape = (max_num_reqs, num_heads, spec_query_len)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty((*shape, 2 * head_dim), dtype=dtype, device=device),
        )


def kda_recoverssm_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    checkpoint_state: torch.Tensor,
    records: KDARecoverSSMRecords,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    spec_query_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Verify a speculative window; row ``i`` of the batch writes record row ``i``.

    q, k, raw_g ``[1, T, H, K]``, v and out ``[1, T, H, V]``, raw_beta ``[1, T, H]`` (a logit)
    in one activation dtype; A_log ``[H]`` and dt_bias (H*K elements) fp32; state
    ``[S, H, V, K]``; query_start_loc ``[N+1]``, state_indices ``[N]`` int32 or int64.
    Returns out; ``ValueError`` for arguments that do not fit together.
    """
    return _verify(
        (q, k, v, raw_g, raw_beta, A_log, dt_bias),
        lower_bound,
        checkpoint_state,
        (records.correction, records.key_gate),
        query_start_loc,
        state_indices,
        spec_query_len,
        out,
        by_slot=False,
    )


def kda_recoverssm_verify_by_slot(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    checkpoint_state: torch.Tensor,
    correction_cache: torch.Tensor,
    kg_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    spec_query_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same with one record row per state slot: ``[S, H, Q, V]`` and ``[S, H, Q, 2K]``."""
    return _verify(
        (q, k, v, raw_g, raw_beta, A_log, dt_bias),
        lower_bound,
        checkpoint_state,
        (correction_cache, kg_cache),
        query_start_loc,
        state_indices,
        spec_query_len,
        out,
        by_slot=True,
    )


def _verify(
    inputs: tuple[torch.Tensor, ...],
    lower_bound: float | None,
    state: torch.Tensor,
    records: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    slots: torch.Tensor,
    window: int,
    out: torch.Tensor | None,
    *,
    by_slot: bool,
) -> torch.Tensor:
    q, k, v, raw_g, raw_beta, A_log, dt_bias = inputs
    correction, key_gate = records
    token_strides, beta_token = _check_activations(q, k, v, raw_g, raw_beta)
    _, tokens, heads, key_dim = q.shape
    value_dim, rows = v.shape[3], slots.shape[0]
    state_slot, u_row, kg_row, inner = _check_state(
        q, state, correction, key_gate, (heads, window, value_dim, key_dim), None if by_slot else rows
    )
    _check_parameters(A_log, dt_bias, heads, heads * key_dim)
    _check_batch(starts, rows, tokens, window)
    out = torch.empty_like(v) if out is None else out
    out_token = _check_out(v, out)
    device = q.device
    for x in (k, v, raw_g, raw_beta, A_log, dt_bias, state, correction, key_gate, starts, slots, out):
        if x.device != device:
            raise ValueError("KDA verify needs all tensors on one device")
    if tokens == 0:
        return out
    options = adjusted("verify", _tiling(key_dim, value_dim, rows * heads * value_dim >= _MANY))
    _verify_kernel[(-(-value_dim // options["BV"]), rows, heads)](
        *inputs,
        state,
        correction,
        key_gate,
        out,
        starts,
        slots,
        lower_bound or 0.0,
        window,
        (*token_strides, out_token, state_slot, kg_row),
        beta_token,
        u_row,
        starts.stride(0),
        slots.stride(0),
        inner,
        **options,
        BOUNDED=lower_bound is not None,
        RECORD_BY_SLOT=by_slot,
    )
    return out


_MANY = 96 * 32
"""Value channels, over all rows and heads, from which larger tiles still fill a GPU."""


@functools.cache
def _tiling(key_dim: int, value_dim: int, many: bool) -> dict[str, int]:
    """The kernel's constants for these sizes."""
    block_k = triton.next_power_of_2(key_dim)
    # One warp holds the state tile: 32 x 128 for the usual head, or 16 where programs are few.
    largest = 32 if many else 16
    block_v = max(1, min(triton.next_power_of_2(value_dim), 128 * largest // block_k, largest))
    constants = {"K": key_dim, "V": value_dim, "BK": block_k, "BV": block_v, "NULL": NULL_BLOCK_ID}
    return constants | {"num_warps": 1}


# The checks read every shape and stride once, for a call at N = 1 is bound by the host, and give
# back the strides that the launch needs.


def _check_activations(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, raw_g: torch.Tensor, raw_beta: torch.Tensor
) -> tuple[tuple[int, int, int, int], int]:
    """The token strides of q, k, v and gate, and that of beta."""
    shape, v_shape = q.shape, v.shape
    if len(shape) != 4 or shape[0] != 1:
        raise ValueError(f"KDA verify needs q of shape [1, tokens, heads, key_dim]; found {tuple(q.shape)}")
    _, tokens, heads, key_dim = shape
    value_dim = v_shape[-1] if v_shape else 0
    if k.shape != shape or v_shape != (1, tokens, heads, value_dim):
        raise ValueError(
            f"KDA verify needs k like q and v of [1, tokens, heads, value_dim]; "
            f"found q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if raw_g.shape != shape or raw_beta.shape != (1, tokens, heads):
        raise ValueError(
            f"KDA verify needs a gate like q and beta of [1, tokens, heads]; "
            f"found gate {tuple(raw_g.shape)}, beta {tuple(raw_beta.shape)}"
        )
    q_strides, k_strides, g_strides = q.stride(), k.stride(), raw_g.stride()
    if not q_strides[2:] == k_strides[2:] == g_strides[2:] == (key_dim, 1):
        raise ValueError("KDA verify needs dense heads in q, k and gate: trailing strides (key_dim, 1)")
    v_strides, beta_strides = v.stride(), raw_beta.stride()
    if v_strides[2:] != (value_dim, 1) or beta_strides[2] != 1:
        raise ValueError("KDA verify needs dense heads in v and beta: trailing strides (value_dim, 1) and 1")
    return (q_strides[1], k_strides[1], v_strides[1], g_strides[1]), beta_strides[1]


def _check_state(
    q: torch.Tensor,
    state: torch.Tensor,
    correction: torch.Tensor,
    key_gate: torch.Tensor,
    sizes: tuple[int, int, int, int],
    rows: int | None,
) -> tuple[int, int, int, tuple[int, ...]]:
    """Slot and row strides, and those within a row, none if all rows are dense.

    ``rows`` is the least number of record rows, or None for exactly one per slot.
    """
    heads, window, value_dim, key_dim = sizes
    state_shape, u_shape = state.shape, correction.shape
    if len(state_shape) != 4 or state_shape != (state_shape[0], heads, value_dim, key_dim):
        raise ValueError(
            f"KDA verify needs a checkpoint of [slots, {heads}, {value_dim}, {key_dim}]; "
            f"found {tuple(state.shape)}"
        )
    leading = state_shape[0] if rows is None else u_shape[0]
    if u_shape != (leading, heads, window, value_dim) or (rows is not None and leading < rows):
        raise ValueError(
            f"KDA verify needs a correction buffer of "
            f"[{'slots' if rows is None else f'at least {rows}'}, {heads}, {window}, {value_dim}]; "
            f"found {tuple(correction.shape)}"
        )
    if key_gate.shape != (leading, heads, window, 2 * key_dim):
        raise ValueError(
            f"KDA verify needs a key/gate buffer of [{leading}, {heads}, {window}, {2 * key_dim}]; "
            f"found {tuple(key_gate.shape)}"
        )
    if correction.dtype != torch.float32:
        raise ValueError(f"KDA verify needs a float32 correction buffer; found {correction.dtype}")
    if key_gate.dtype != q.dtype:
        raise ValueError(f"KDA verify needs a key/gate buffer of {q.dtype}, as q is; found {key_gate.dtype}")
    states, us, kgs = state.stride(), correction.stride(), key_gate.stride()
    inner = states[1:] + us[1:] + kgs[1:]
    dense = (value_dim * key_dim, key_dim, 1, window * value_dim, value_dim, 1)
    dense += (2 * window * key_dim, 2 * key_dim, 1)
    return states[0], us[0], kgs[0], () if inner == dense else inner


def _check_parameters(A_log: torch.Tensor, dt_bias: torch.Tensor, heads: int, channels: int) -> None:
    if A_log.shape != (heads,) or dt_bias.numel() != channels:
        raise ValueError(
            f"KDA verify needs gate parameters A_log [{heads}] and dt_bias of {channels} elements; "
            f"found {tuple(A_log.shape)} and {tuple(dt_bias.shape)}"
        )
    if not A_log.is_contiguous() or not dt_bias.is_contiguous():
        raise ValueError("KDA verify needs contiguous gate parameters A_log and dt_bias")


def _check_batch(starts: torch.Tensor, rows: int, tokens: int, window: int) -> None:
    if starts.shape[0] != rows + 1:
        raise ValueError(f"KDA verify needs query_start_loc of {rows + 1} entries; found {starts.shape[0]}")
    if tokens > rows * window:
        raise ValueError(f"KDA verify takes at most {rows} rows x {window} tokens; found {tokens} tokens")


def _check_out(v: torch.Tensor, out: torch.Tensor) -> int:
    """The token stride."""
    if out.shape != v.shape:
        raise ValueError(f"KDA verify needs out of shape {tuple(v.shape)}; found {tuple(out.shape)}")
    strides = out.stride()
    if strides[2:] != (v.shape[3], 1):
        raise ValueError("KDA verify needs dense heads in out: trailing strides (value_dim, 1)")
    return strides[1]
