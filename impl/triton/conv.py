"""The short causal convolution in Triton: decode and verify update, and prefill.

One thread owns a channel from its history to its last output: the last W-1 inputs stay in
registers, and the next tokens are loaded while these are computed. ``_output`` is the
arithmetic of every function of this family, ``_stream`` its order over tokens. Guaranteed: no
host synchronisation and no tables made on the host (safe in a CUDA graph), every address that
can pass 2**31 is formed in int64, all strides are honoured, all reads of a conv row come before
any write to it. Not guaranteed: anything for two live rows that share a slot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from impl.triton.launch import adjusted

NULL_BLOCK_ID = 0
PAD_SLOT_ID = -1
_BELOW_ALL_SLOTS = -(2**62)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_STATE_FLOATS = (torch.bfloat16, torch.float32)

# These make no new binary when their divisibility changes. The strides of wide accesses are not
# here: a compiler that knows them to be 1 or multiples of 16 makes vector accesses of them.
_UPDATE_RUNTIME = (
    "rows",
    "tokens",
    "null",
    "weight_channel",
    "weight_tap",
    "bias_step",
    "state_slot",
    "state_column",
    "slot_step",
    "accepted_step",
    "qsl_step",
)
_PREFILL_RUNTIME = (
    "blocks",
    "rows",
    "null",
    "weight_channel",
    "weight_tap",
    "bias_step",
    "state_slot",
    "state_column",
    "qsl_step",
    "slot_step",
    "initial_step",
)


@triton.jit
def _silu(x):
    """``x / (1 + exp(-x))``; compiled, with bare approximations, which flush what is subnormal."""
    if _INTERPRETED:
        return x / (1 + tl.exp(x * -1.0))  # as -x, which Triton would compute as 0 - x
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, is_pure=True, pack=1
    )
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + power], tl.float32, is_pure=True, pack=1
    )
    return x * inverse


@triton.jit
def _output(window, taps, acc, SILU: tl.constexpr):
    """One output: ``act(acc + sum_j window[j] * taps[j])``, j upwards; bf16 times bf16 rounds to bf16.

    The fma is spelled out: left to the compiler, a change of layout inside the sum undoes it.
    """
    for j in tl.static_range(len(taps)):
        if window[j].dtype == tl.bfloat16 and taps[j].dtype == tl.bfloat16:
            acc += window[j] * taps[j]
        else:
            acc = tl.fma(window[j].to(tl.float32), taps[j].to(tl.float32), acc)
    return _silu(acc) if SILU else acc


@triton.jit
def _load_group(x_ptr, x_token, left, live, GROUP: tl.constexpr):
    """The next GROUP tokens, undefined where fewer are ``left``, and the address after them."""
    group = ()
    for r in tl.static_range(GROUP):
        group += (tl.load(x_ptr, mask=live & (r < left)),)
        x_ptr += x_token
    return group, x_ptr


@triton.jit
def _stream(
    group,
    x_ptr,
    out_ptr,
    roll_ptr,
    count,
    x_token,
    out_token,
    roll_column,
    live,
    history,
    taps,
    bias,
    GROUP: tl.constexpr,
    SILU: tl.constexpr,
    THROUGH_STATE: tl.constexpr,
    ROLL: tl.constexpr,
):
    """The outputs of ``count`` tokens after ``history``, of which ``group`` is already loaded.

    With ROLL the inputs also go to the conv row.
    """
    state_dtype: tl.constexpr = history[0].dtype
    for t in range(0, count, GROUP):
        ahead, x_ptr = _load_group(x_ptr, x_token, count - t - GROUP, live, GROUP)
        for r in tl.static_range(GROUP):
            x = group[r].to(state_dtype)
            inside = live & (r < count - t)
            if ROLL:
                tl.store(roll_ptr, x, mask=inside)
                roll_ptr += roll_column
            window = history
            window += (x,)
            y = _output(window, taps, bias, SILU)
            if THROUGH_STATE:
                y = y.to(state_dtype)
            tl.store(out_ptr, y.to(out_ptr.dtype.element_ty), mask=inside)
            out_ptr += out_token
            history = window[1:]
        group = ahead


@triton.jit
def _load_taps(
    weight_ptr, channel, live, weight_channel, weight_tap, W: tl.constexpr, DENSE_WEIGHT: tl.constexpr
):
    """The W taps of every channel; four dense ones come in one access a channel."""
    if DENSE_WEIGHT and W == 4:
        at = channel[:, None] * 4 + tl.arange(0, 4)[None, :]
        tile = tl.load(weight_ptr + at, mask=live[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(tile, [channel.shape[0], 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (first, second, third, fourth)
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight_ptr + channel * weight_channel + j * weight_tap, mask=live, other=0.0),)
    return taps


@triton.jit
def _load_bias(bias_ptr, channel, live, bias_step, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        return tl.load(bias_ptr + channel * bias_step, mask=live, other=0.0).to(tl.float32)
    return tl.zeros([channel.shape[0]], tl.float32)


@triton.jit
def _store_last_inputs(x_ptr, state_ptr, count, x_token, state_column, live, history):
    """Columns 0 .. W-2 of the row <- the last W-1 of ``history`` and the ``count`` inputs after it."""
    state_dtype: tl.constexpr = history[0].dtype
    kept = ()
    for c in tl.static_range(len(history)):
        token = count + c - len(history)  # negative: this column keeps a part of the history
        value = tl.load(x_ptr + token * x_token, mask=live & (token >= 0), other=0.0).to(state_dtype)
        for j in tl.static_range(len(history)):
            value = tl.where(token + len(history) == j, history[j], value)
        kept += (value,)
    tl.debug_barrier()  # the row and, in place, the inputs are read before either is written
    for c in tl.static_range(len(history)):
        tl.store(state_ptr + c * state_column, kept[c], mask=live)


@triton.jit
def _copy_token(x_ptr, out_ptr, live, state_dtype: tl.constexpr):
    x = tl.load(x_ptr, mask=live).to(state_dtype)
    tl.store(out_ptr, x.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=_UPDATE_RUNTIME)
def _update_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    slot_ptr,
    accepted_ptr,
    qsl_ptr,
    channels,
    rows,
    tokens,
    null,
    x_row,
    x_token,
    x_channel,
    out_row,
    out_token,
    out_channel,
    weight_channel,
    weight_tap: tl.int64,
    bias_step,
    state_slot,
    state_channel,
    state_column: tl.int64,
    slot_step,
    accepted_step,
    qsl_step,
    W: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCEPTED: tl.constexpr,
    VARLEN: tl.constexpr,
    THROUGH_STATE: tl.constexpr,
    COPY: tl.constexpr,
    DENSE_WEIGHT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    live = channel < channels
    x_ptr += channel * x_channel
    out_ptr += channel * out_channel
    state_dtype: tl.constexpr = state_ptr.dtype.element_ty

    slot = tl.load(slot_ptr + row * slot_step).to(tl.int64)
    if VARLEN:
        first = tl.load(qsl_ptr + row * qsl_step).to(tl.int64)
        count = tl.load(qsl_ptr + (row + 1) * qsl_step).to(tl.int64) - first
        if COPY:
            # Tokens past the last row belong to nobody; the rows share them out.
            past = tl.load(qsl_ptr + rows.to(tl.int64) * qsl_step).to(tl.int64)
            for t in range(past + row, tokens, rows):
                _copy_token(x_ptr + t * x_token, out_ptr + t * out_token, live, state_dtype)
        x_ptr += first * x_token
        out_ptr += first * out_token
    else:
        count = tokens.to(tl.int64)
        x_ptr += row * x_row
        out_ptr += row * out_row
    if count <= 0:
        return
    if slot <= null:
        if COPY:
            for t in range(count):
                _copy_token(x_ptr + t * x_token, out_ptr + t * out_token, live, state_dtype)
        return

    state_ptr += slot * state_slot + channel * state_channel
    own = count.to(tl.int32)
    group, next_ptr = _load_group(x_ptr, x_token, own, live, GROUP)
    newest = 0
    if ACCEPTED:
        newest = tl.load(accepted_ptr + row * accepted_step).to(tl.int64) - 1
    history = ()
    for j in tl.static_range(W - 1):
        history += (tl.load(state_ptr + (newest + j) * state_column, mask=live, other=0.0),)
    if ACCEPTED:
        tl.debug_barrier()  # the row rolls in place: it is read before it is written
        for j in tl.static_range(1, W - 1):
            tl.store(state_ptr + (j - 1) * state_column, history[j], mask=live)
    else:
        _store_last_inputs(x_ptr, state_ptr, count, x_token, state_column, live, history)

    taps = _load_taps(weight_ptr, channel, live, weight_channel, weight_tap, W, DENSE_WEIGHT)
    bias = _load_bias(bias_ptr, channel, live, bias_step, HAS_BIAS)
    _stream(
        group,
        next_ptr,
        out_ptr,
        state_ptr + (W - 2) * state_column,
        own,
        x_token,
        out_token,
        state_column,
        live,
        history,
        taps,
        bias,
        GROUP,
        SILU,
        THROUGH_STATE,
        ROLL=ACCEPTED,
    )


@triton.jit
def _pick(values, chosen):
    return tl.sum(tl.where(chosen, values, 0)).to(tl.int64)


@triton.jit
def _find_row(
    qsl_ptr,
    slot_ptr,
    initial_ptr,
    qsl_step,
    slot_step,
    initial_step,
    rows,
    program,
    TOKENS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """A program's sequence and its first token, end, slot and initial flag.

    It is the last i with ``qsl[i] // TOKENS + i <= program`` (0 if none). Sequence i owns the
    programs from that number to the next sequence's, never fewer than its chunks. The numbers
    grow strictly, empty sequences included, so 32 are tested at a time, LEVELS times to come
    within 32. All that a program needs to know of these is loaded at once: one wait, not three.
    """
    lane = tl.arange(0, 32)
    row = program * 0
    for level in tl.static_range(LEVELS):
        step = 32 ** (LEVELS - level)
        probe = row + lane * step
        inside = (lane > 0) & (probe < rows)
        start = tl.load(qsl_ptr + probe * qsl_step, mask=inside, other=0).to(tl.int64)
        row += tl.sum((inside & (start // TOKENS + probe <= program)).to(tl.int32)) * step
    probe = row + lane
    inside = probe < rows
    first = tl.load(qsl_ptr + probe * qsl_step, mask=inside, other=0)
    end = tl.load(qsl_ptr + (probe + 1) * qsl_step, mask=inside, other=0)
    slot = tl.load(slot_ptr + probe * slot_step, mask=inside, other=0)
    initial = tl.load(initial_ptr + probe * initial_step, mask=inside, other=0).to(tl.int32)
    below = inside & (lane > 0) & (first.to(tl.int64) // TOKENS + probe <= program)
    place = tl.sum(below.to(tl.int32))
    mine = lane == place
    return row + place, _pick(first, mine), _pick(end, mine), _pick(slot, mine), _pick(initial, mine)


@triton.jit(do_not_specialize=_PREFILL_RUNTIME)
def _prefill_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    qsl_ptr,
    slot_ptr,
    initial_ptr,
    part_dim,
    blocks,
    rows,
    null,
    x_token,
    x_channel,
    out_part,
    out_token,
    weight_channel,
    weight_tap: tl.int64,
    bias_step,
    state_slot,
    state_channel,
    state_column: tl.int64,
    qsl_step,
    slot_step,
    initial_step,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    LEVELS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DENSE_WEIGHT: tl.constexpr,
):
    program = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    blocks_a_part = tl.cdiv(part_dim, CHANNELS)
    part = (block // blocks_a_part).to(tl.int64)
    place = (block % blocks_a_part) * CHANNELS + tl.arange(0, CHANNELS)
    live = place < part_dim
    channel = part * part_dim + place

    row, first, end, slot, initial = _find_row(
        qsl_ptr, slot_ptr, initial_ptr, qsl_step, slot_step, initial_step, rows, program, TOKENS, LEVELS
    )
    count = end - first
    begin = (program - row - first // TOKENS) * TOKENS
    if (begin < 0) | (begin >= count) | (slot <= null):
        return

    x_ptr += first * x_token + channel * x_channel
    out_ptr += first * out_token + part * out_part + place
    state_ptr += slot * state_slot + channel * state_channel
    state_dtype: tl.constexpr = state_ptr.dtype.element_ty
    own = tl.minimum(count - begin, TOKENS).to(tl.int32)
    group, next_ptr = _load_group(x_ptr + begin * x_token, x_token, own, live, GROUP)
    history = ()
    for j in tl.static_range(W - 1):
        at = begin + j - (W - 1)
        history += (tl.load(x_ptr + at * x_token, mask=live & (begin > 0), other=0.0).to(state_dtype),)
    taps = _load_taps(weight_ptr, channel, live, weight_channel, weight_tap, W, DENSE_WEIGHT)
    bias = _load_bias(bias_ptr, channel, live, bias_step, HAS_BIAS)
    if begin == 0:
        history = ()
        for j in tl.static_range(W - 1):
            history += (tl.load(state_ptr + j * state_column, mask=live & (initial != 0), other=0.0),)
        _store_last_inputs(x_ptr, state_ptr, count, x_token, state_column, live, history)
    _stream(
        group,
        next_ptr,
        out_ptr + begin * out_token,
        None,
        own,
        x_token,
        out_token,
        0,
        live,
        history,
        taps,
        bias,
        GROUP,
        SILU,
        THROUGH_STATE=True,
        ROLL=False,
    )


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = NULL_BLOCK_ID,
    validate_data: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve the new tokens of every row and roll its conv state in place (contract 1.5).

    x ``[T, C]`` with query_start_loc ``[N+1]`` and max_query_len, else ``[N, C]`` or
    ``[N, C, L]``; bf16, fp16 or fp32. conv_state ``[S, C, P]`` and weight ``[C, W]``, W from 2 to
    6, bf16 or fp32; bias ``[C]``; conv_state_indices and num_accepted_tokens ``[N]`` int32 or
    int64. The history is columns f to f+W-2 with f = num_accepted_tokens - 1, or 0. A row whose
    slot is <= null_block_id is skipped. Returns out; without it x, overwritten, or, where the
    dtypes of x and conv_state differ, a new tensor whose skipped tokens hold the input rounded to
    the state's dtype. validate_data changes nothing: all checks are always made.
    ``AssertionError`` for an unknown activation, ``ValueError`` for what does not fit together.
    """
    name = "causal_conv1d_update"
    if not (activation is None or isinstance(activation, bool) or activation in ("silu", "swish")):
        raise AssertionError(
            f"{name} knows the activations None, a bool, silu and swish; found {activation!r}"
        )
    rows, length = _check_update_input(name, x, query_start_loc, max_query_len)
    _check_parameters(name, x.shape[1], x, weight, bias, conv_state, widest=6)
    rows = _check_vector(name, "conv_state_indices", conv_state_indices, rows)
    if query_start_loc is not None:
        _check_vector(name, "query_start_loc", query_start_loc, rows + 1)
    if num_accepted_tokens is not None:
        _check_vector(name, "num_accepted_tokens", num_accepted_tokens, rows)
        columns = weight.shape[1] - 2 + length
        if query_start_loc is None and conv_state.shape[2] < columns:
            raise ValueError(
                f"{name} needs conv_state rows of {columns} columns for windows of {length} tokens; "
                f"found {conv_state.shape[2]}"
            )
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"{name} needs out like x, {tuple(x.shape)} {x.dtype} on {x.device}; "
            f"found {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    vectors = (conv_state_indices, num_accepted_tokens, query_start_loc)
    _check_devices(name, x, weight, bias, conv_state, *vectors)
    return _launch_update(
        x, weight, bias, conv_state, vectors, length, null_block_id, out, silu=bool(activation)
    )


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int | None = NULL_BLOCK_ID,
    metadata: object = None,
    validate_data: bool = False,
) -> torch.Tensor:
    """Convolve whole sequences and leave their last W-1 inputs in the conv state (contract 1.5).

    x ``[C, T]``, bf16, fp16 or fp32; weight ``[C, W]``, W from 2 to 4, and conv_states ``[S, C, P]``
    bf16 or fp32; bias ``[C]``; query_start_loc ``[N+1]`` and cache_indices ``[N]`` int32 or int64;
    has_initial_state ``[N]`` bool: the history is columns 0 to W-2, or zeros. A row whose slot is
    <= null_block_id is skipped. Returns a new tensor ``[C, T]`` in x.dtype, channel-last,
    uninitialised at skipped tokens. SiLU for "silu", "swish" and True, else no activation.
    metadata and pad_slot_id are not needed: the chunks are found on the device; validate_data
    changes nothing: all checks are always made. ``ValueError`` for what does not fit together.
    """
    name = "causal_conv1d_fn"
    if x.ndim != 2:
        raise ValueError(f"{name} needs x of shape [channels, tokens]; found {tuple(x.shape)}")
    channels, tokens = x.shape
    indices = (query_start_loc, cache_indices, has_initial_state)
    check_prefill(name, channels, x, weight, bias, conv_states, *indices, widest=4)
    out = torch.empty((1, tokens, channels), dtype=x.dtype, device=x.device)
    launch_prefill(x.T, weight, bias, conv_states, *indices, out, null_block_id, silu=is_silu(activation))
    return out[0].T


@dataclass(frozen=True)
class Tiling:
    """What one prefill program covers: ``tokens`` of a sequence, ``group`` of them at a time."""

    tokens: int = 32
    channels: int = 128
    warps: int = 1
    group: int = 8

    @property
    def options(self) -> dict[str, int]:
        """The kernel's constants."""
        constants = {"TOKENS": self.tokens, "CHANNELS": self.channels, "GROUP": self.group}
        return constants | {"num_warps": self.warps}


def is_silu(activation: object) -> bool:
    """Whether a prefill's activation is SiLU; everything else is the identity."""
    return activation is True or activation in ("silu", "swish")


def check_prefill(
    name: str,
    channels: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    *,
    widest: int,
) -> None:
    """Refuse what does not fit together, as ``ValueError`` in the words of the function ``name``."""
    _check_parameters(name, channels, x, weight, bias, conv_states, widest=widest)
    rows = _check_vector(name, "cache_indices", cache_indices, None)
    _check_vector(name, "query_start_loc", query_start_loc, rows + 1)
    _check_vector(name, "has_initial_state", has_initial_state, rows, (torch.bool,))
    _check_devices(name, x, weight, bias, conv_states, cache_indices, query_start_loc, has_initial_state)


def launch_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    out: torch.Tensor,
    null_block_id: int | None,
    *,
    silu: bool,
    tiling: Tiling | None = None,
) -> None:
    """Convolve x ``[T, C]`` into out ``[C // D, T, D]``, whose channels are dense; arguments are checked."""
    parts, tokens, part_dim = out.shape
    rows, width = cache_indices.shape[0], weight.shape[1]
    if rows == 0 or out.numel() == 0:
        return
    tiling = tiling or Tiling(channels=128 if part_dim % 128 == 0 else 64)
    levels = 0
    while 32 ** (levels + 1) < rows:
        levels += 1
    options = adjusted("conv_prefill", tiling.options)
    blocks = parts * triton.cdiv(part_dim, options["CHANNELS"])
    # Enough for any lengths: a sequence has at most one program more than it fills.
    _prefill_kernel[((tokens // options["TOKENS"] + rows) * blocks,)](
        x,
        weight,
        bias,
        conv_states,
        out,
        query_start_loc,
        cache_indices,
        has_initial_state,
        part_dim,
        blocks,
        rows,
        _BELOW_ALL_SLOTS if null_block_id is None else null_block_id,
        *x.stride(),
        *out.stride()[:2],
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        *conv_states.stride(),
        query_start_loc.stride(0),
        cache_indices.stride(0),
        has_initial_state.stride(0),
        W=width,
        LEVELS=levels,
        SILU=silu,
        HAS_BIAS=bias is not None,
        DENSE_WEIGHT=weight.stride() == (width, 1),
        **options,
    )


def _launch_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    vectors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    length: int,
    null_block_id: int | None,
    out: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    slots, accepted, starts = vectors
    through_state, copy = out is None, False
    if out is None:
        copy = x.dtype != conv_state.dtype
        if copy and slots.shape[0] == 0:
            return x.to(conv_state.dtype).to(x.dtype)
        out = torch.empty_like(x) if copy else x
    if x.numel() == 0 or slots.shape[0] == 0:
        return out
    channels, width = weight.shape
    group = min(8, triton.next_power_of_2(max(length, 1)))
    options = adjusted("conv_update", {"CHANNELS": 128, "GROUP": group, "num_warps": 1})
    _update_kernel[(slots.shape[0], triton.cdiv(channels, options["CHANNELS"]))](
        x,
        weight,
        bias,
        conv_state,
        out,
        slots,
        accepted,
        starts,
        channels,
        slots.shape[0],
        length if starts is None else x.shape[0],
        _BELOW_ALL_SLOTS if null_block_id is None else null_block_id,
        *_row_token_channel(x),
        *_row_token_channel(out),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        *conv_state.stride(),
        slots.stride(0),
        0 if accepted is None else accepted.stride(0),
        0 if starts is None else starts.stride(0),
        W=width,
        SILU=silu,
        HAS_BIAS=bias is not None,
        ACCEPTED=accepted is not None,
        VARLEN=starts is not None,
        THROUGH_STATE=through_state,
        COPY=copy,
        DENSE_WEIGHT=weight.stride() == (width, 1),
        **options,
    )
    return out


def _row_token_channel(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of ``[rows or tokens, channels]`` (one axis is both) or ``[rows, channels, tokens]``."""
    return x.stride(0), x.stride(2) if x.ndim == 3 else x.stride(0), x.stride(1)


def _check_update_input(
    name: str, x: torch.Tensor, starts: torch.Tensor | None, max_query_len: int
) -> tuple[int | None, int]:
    """The rows, if x tells them, and the most tokens of a row."""
    if starts is not None:
        if x.ndim != 2:
            raise ValueError(f"{name} needs x of shape [tokens, channels]; found {tuple(x.shape)}")
        if max_query_len < 0:
            raise ValueError(f"{name} needs max_query_len with query_start_loc; found {max_query_len}")
        return None, max_query_len
    if x.ndim not in (2, 3):
        raise ValueError(
            f"{name} needs x of shape [rows, channels] or [rows, channels, tokens]; found {tuple(x.shape)}"
        )
    return x.shape[0], x.shape[2] if x.ndim == 3 else 1


def _check_parameters(
    name: str,
    channels: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    *,
    widest: int,
) -> None:
    if x.dtype not in _FLOATS:
        raise ValueError(f"{name} needs x in bfloat16, float16 or float32; found {x.dtype}")
    if weight.ndim != 2 or weight.shape[0] != channels:
        raise ValueError(f"{name} needs a weight of [{channels}, taps]; found {tuple(weight.shape)}")
    width = weight.shape[1]
    if not 2 <= width <= widest:
        raise ValueError(f"{name} takes 2 to {widest} taps; found {width}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{name} needs a bias of [{channels}]; found {tuple(bias.shape)}")
    if conv_state.ndim != 3 or conv_state.shape[1] != channels or conv_state.shape[2] < width - 1:
        raise ValueError(
            f"{name} needs a conv state of [slots, {channels}, at least {width - 1}]; "
            f"found {tuple(conv_state.shape)}"
        )
    if weight.dtype not in _STATE_FLOATS or conv_state.dtype not in _STATE_FLOATS:
        raise ValueError(
            f"{name} needs weight and conv state in bfloat16 or float32; "
            f"found {weight.dtype} and {conv_state.dtype}"
        )
    if bias is not None and bias.dtype not in _FLOATS:
        raise ValueError(f"{name} needs a bias in bfloat16, float16 or float32; found {bias.dtype}")


def _check_vector(
    name: str,
    what: str,
    vector: torch.Tensor | None,
    entries: int | None,
    dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64),
) -> int:
    """The length of a 1-D tensor of ``entries`` elements, any number if None."""
    if vector is None:
        raise ValueError(f"{name} needs {what}; found None")
    if vector.ndim != 1 or entries not in (None, vector.shape[0]):
        size = "any number of" if entries is None else entries
        raise ValueError(f"{name} needs {what} of {size} entries; found {tuple(vector.shape)}")
    if vector.dtype not in dtypes:
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} needs {what} in {kinds}; found {vector.dtype}")
    return vector.shape[0]


def _check_devices(name: str, x: torch.Tensor, *others: torch.Tensor | None) -> None:
    if any(t is not None and t.device != x.device for t in others):
        raise ValueError(f"{name} needs all tensors on one device")
