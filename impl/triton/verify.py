"""KDA speculative verify in Triton: run a window per request, write records, keep the checkpoint.

One program, a single warp, serves (value block, row, head) and loops over the row's tokens, so
tokens past its length cost nothing and no binary is made per window. The state stays in fp32
registers from its single load to the last token and is never stored. Guaranteed: no host
synchronisation, every address that can pass 2**31 is formed in int64, index vectors may be
strided. Not guaranteed: anything for rows longer than the window (their tokens past it are
ignored) or for two live rows that share a record row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NULL_BLOCK_ID = 0

# These make no new binary when their divisibility changes. The strides of wide loads are not
# here: a compiler that knows them to be 1 or multiples of 16 makes vector loads of them.
_RUNTIME = (
    "lower_bound",
    "window",
    "beta_token",
    "u_row",
    "u_head",
    "u_pos",
    "kg_row",
    "kg_head",
    "kg_pos",
    "qsl_step",
    "slot_step",
)


@triton.jit
def _log_decay(x, a, lower_bound, BOUNDED: tl.constexpr):
    if BOUNDED:
        return lower_bound * tl.sigmoid(a * x)
    return -a * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


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
    lower_bound,
    window,
    q_token,
    k_token,
    v_token,
    g_token,
    beta_token,
    out_token,
    state_slot,
    state_head,
    state_v,
    state_k,
    u_row,
    u_head,
    u_pos,
    u_dim,
    kg_row,
    kg_head,
    kg_pos,
    kg_dim,
    qsl_step,
    slot_step,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BOUNDED: tl.constexpr,
    RECORD_BY_SLOT: tl.constexpr,
    NULL: tl.constexpr,
):
    v_block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)

    first = tl.load(qsl_ptr + row * qsl_step).to(tl.int64)
    count = tl.load(qsl_ptr + (row + 1) * qsl_step).to(tl.int64) - first
    count = tl.minimum(count, window)
    if count <= 0:
        return
    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)

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

    tile = vs.to(tl.int64)[:, None] * state_v + ks.to(tl.int64)[None, :] * state_k
    state = tl.load(
        state_ptr + slot * state_slot + head * state_head + tile,
        mask=in_v[:, None] & in_k[None, :],
        other=0.0,
    ).to(tl.float32)
    a = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + head * K + ks, mask=in_k, other=0.0)

    record = slot if RECORD_BY_SLOT else row
    u_ptr += record * u_row + head * u_head + vs.to(tl.int64) * u_dim
    kg_ptr += record * kg_row + head * kg_head + ks.to(tl.int64) * kg_dim
    q_ptr += head * K + ks
    k_ptr += head * K + ks
    g_ptr += head * K + ks
    v_ptr += head * V + vs
    beta_ptr += head

    for t in range(count):
        token = first + t
        raw_k = tl.load(k_ptr + token * k_token, mask=in_k, other=0.0)
        raw_g = tl.load(g_ptr + token * g_token, mask=in_k, other=0.0)
        q = tl.load(q_ptr + token * q_token, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + token * v_token, mask=in_v, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(beta_ptr + token * beta_token).to(tl.float32))

        k = raw_k.to(tl.float32)
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)
        q *= tl.rsqrt(tl.sum(q * q) + 1e-6) * (K**-0.5)
        state *= tl.exp(_log_decay(raw_g.to(tl.float32) + bias, a, lower_bound, BOUNDED))[None, :]
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
    _check_activations(q, k, v, raw_g, raw_beta)
    _check_state(q, v, state, records, window, slots.shape[0], by_slot=by_slot)
    _check_parameters(q, A_log, dt_bias)
    _check_batch(q, starts, slots, window)
    out = torch.empty_like(v) if out is None else out
    _check_out(v, out)
    if any(t.device != q.device for t in (*inputs, state, *records, starts, slots, out)):
        raise ValueError("KDA verify needs all tensors on one device")
    if q.shape[1] == 0:
        return out
    _launch(inputs, lower_bound, state, records, starts, slots, window, out, by_slot=by_slot)
    return out


def _check_activations(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, raw_g: torch.Tensor, raw_beta: torch.Tensor
) -> None:
    if q.ndim != 4 or q.shape[0] != 1:
        raise ValueError(f"KDA verify needs q of shape [1, tokens, heads, key_dim]; found {tuple(q.shape)}")
    _, tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1] if v.ndim else 0
    if k.shape != q.shape or v.shape != (1, tokens, heads, value_dim):
        raise ValueError(
            f"KDA verify needs k like q and v of [1, tokens, heads, value_dim]; "
            f"found q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if raw_g.shape != q.shape or raw_beta.shape != (1, tokens, heads):
        raise ValueError(
            f"KDA verify needs a gate like q and beta of [1, tokens, heads]; "
            f"found gate {tuple(raw_g.shape)}, beta {tuple(raw_beta.shape)}"
        )
    if any(t.stride()[2:] != (key_dim, 1) for t in (q, k, raw_g)):
        raise ValueError("KDA verify needs dense heads in q, k and gate: trailing strides (key_dim, 1)")
    if v.stride()[2:] != (value_dim, 1) or raw_beta.stride(2) != 1:
        raise ValueError("KDA verify needs dense heads in v and beta: trailing strides (value_dim, 1) and 1")


def _check_state(
    q: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    records: tuple[torch.Tensor, torch.Tensor],
    window: int,
    rows: int,
    *,
    by_slot: bool,
) -> None:
    _, _, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    if state.ndim != 4 or state.shape[1:] != (heads, value_dim, key_dim):
        raise ValueError(
            f"KDA verify needs a checkpoint of [slots, {heads}, {value_dim}, {key_dim}]; "
            f"found {tuple(state.shape)}"
        )
    correction, key_gate = records
    leading = state.shape[0] if by_slot else correction.shape[0]
    if correction.shape != (leading, heads, window, value_dim) or leading < (0 if by_slot else rows):
        raise ValueError(
            f"KDA verify needs a correction buffer of "
            f"[{'slots' if by_slot else f'at least {rows}'}, {heads}, {window}, {value_dim}]; "
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


def _check_parameters(q: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> None:
    _, _, heads, key_dim = q.shape
    if A_log.shape != (heads,) or dt_bias.numel() != heads * key_dim:
        raise ValueError(
            f"KDA verify needs gate parameters A_log [{heads}] and dt_bias of {heads * key_dim} elements; "
            f"found {tuple(A_log.shape)} and {tuple(dt_bias.shape)}"
        )
    if not A_log.is_contiguous() or not dt_bias.is_contiguous():
        raise ValueError("KDA verify needs contiguous gate parameters A_log and dt_bias")


def _check_batch(q: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, window: int) -> None:
    tokens, rows = q.shape[1], slots.shape[0]
    if starts.shape[0] != rows + 1:
        raise ValueError(f"KDA verify needs query_start_loc of {rows + 1} entries; found {starts.shape[0]}")
    if tokens > rows * window:
        raise ValueError(f"KDA verify takes at most {rows} rows x {window} tokens; found {tokens} tokens")


def _check_out(v: torch.Tensor, out: torch.Tensor) -> None:
    if out.shape != v.shape:
        raise ValueError(f"KDA verify needs out of shape {tuple(v.shape)}; found {tuple(out.shape)}")
    if out.stride()[2:] != (v.shape[-1], 1):
        raise ValueError("KDA verify needs dense heads in out: trailing strides (value_dim, 1)")


def _launch(
    inputs: tuple[torch.Tensor, ...],
    lower_bound: float | None,
    state: torch.Tensor,
    records: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    slots: torch.Tensor,
    window: int,
    out: torch.Tensor,
    *,
    by_slot: bool,
) -> None:
    q, k, v, raw_g, raw_beta, A_log, dt_bias = inputs
    correction, key_gate = records
    heads, key_dim, value_dim = q.shape[2], q.shape[3], v.shape[3]
    block_k = triton.next_power_of_2(key_dim)
    # One warp holds the state tile: 64 registers a lane at most, 16 x 128 for the usual head.
    block_v = max(1, min(triton.next_power_of_2(value_dim), 2048 // block_k, 16))
    _verify_kernel[(triton.cdiv(value_dim, block_v), slots.shape[0], heads)](
        q,
        k,
        v,
        raw_g,
        raw_beta,
        A_log,
        dt_bias,
        state,
        correction,
        key_gate,
        out,
        starts,
        slots,
        0.0 if lower_bound is None else lower_bound,
        window,
        q.stride(1),
        k.stride(1),
        v.stride(1),
        raw_g.stride(1),
        raw_beta.stride(1),
        out.stride(1),
        *state.stride(),
        *correction.stride(),
        *key_gate.stride(),
        starts.stride(0),
        slots.stride(0),
        K=key_dim,
        V=value_dim,
        BK=block_k,
        BV=block_v,
        BOUNDED=lower_bound is not None,
        RECORD_BY_SLOT=by_slot,
        NULL=NULL_BLOCK_ID,
        num_warps=1,
    )
