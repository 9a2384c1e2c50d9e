"""Faults to plant in own verify and its gate, each a text edit, with what the suite must make of it.

Edits are anchored in the kernel's text: one that matches nowhere, or twice, is an error, so a
change of the kernel never leaves a fault that no longer plants anything.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One edit ``old -> new``, the classes of FAULT_CLASSES.md it stands for, and its smallest case.

    ``rows``, ``heads`` and ``tokens`` bound the batch that shrinking must reach. ``beyond``
    says why no drawn case can show the fault; it then has a test of its own.
    """

    name: str
    classes: tuple[int, ...]
    old: str
    new: str
    rows: int = 1
    heads: int = 1
    tokens: int = 2
    beyond: str = ""
    module: str = "verify"
    operation: str = "verify"


def plant(source: str, fault: Fault) -> str:
    """The source with the fault in it; ``ValueError`` unless the edit matches exactly once."""
    found = source.count(fault.old)
    if found != 1 or fault.old == fault.new:
        raise ValueError(f"fault {fault.name!r} must match exactly once and change the text; found {found}")
    return source.replace(fault.old, fault.new)


_GATE = "state *= tl.exp(log_decay(raw_g.to(tl.float32) + bias, a, lower_bound, BOUNDED))[None, :]"
_CORRECTION = "u = beta * (v - tl.sum(state * k[None, :], axis=1))"
_UPDATE = "state += u[:, None] * k[None, :]"
_LAST_STORE = "tl.store(kg_ptr + t * kg_pos + K * kg_dim, raw_g, mask=in_k)"
_INDENT = "\n        "
_LOOP = "    for t in range(count):\n        token"
_ZEROS = "        for t in range(count):\n            tl.store"
_KEY = "raw_k = tl.load(k_ptr + token * k_token, mask=in_k, other=0.0)"
_STORE_STATE = "tl.store(tile, state, mask=in_v[:, None] & in_k[None, :])"
_INPUTS = "raw_k, raw_g, raw_q, raw_v, raw_beta = ahead"

MASKS = (
    Fault("state_mask_without_k", (11, 25), "mask=in_v[:, None] & in_k[None, :]", "mask=in_v[:, None]"),
    Fault("state_mask_without_v", (25,), "mask=in_v[:, None] & in_k[None, :]", "mask=in_k[None, :]"),
    Fault("key_unmasked", (25,), "token * k_token, mask=in_k, other", "token * k_token, mask=live, other"),
    Fault("query_unmasked", (25,), "token * q_token, mask=in_k, other", "token * q_token, mask=live, other"),
    Fault("gate_unmasked", (25,), "token * g_token, mask=in_k, other", "token * g_token, mask=live, other"),
    Fault("value_unmasked", (25,), "token * v_token, mask=in_v, other", "token * v_token, mask=live, other"),
    Fault(
        "bias_unmasked", (25,), "bias_ptr + head * K + ks, mask=in_k, other=0.0", "bias_ptr + head * K + ks"
    ),
    Fault(
        "key_masked_by_multiplication",
        (5,),
        _KEY,
        _KEY.replace("in_k", "live") + "\n    raw_k *= in_k.to(raw_k.dtype)",
    ),
    Fault(
        "output_unmasked",
        (27,),
        "tl.sum(state * q[None, :], axis=1), mask=in_v",
        "tl.sum(state * q[None, :], axis=1)",
    ),
    Fault("correction_unmasked", (27,), "u_ptr + t * u_pos, u, mask=in_v", "u_ptr + t * u_pos, u"),
    Fault("gate_record_unmasked", (27,), "K * kg_dim, raw_g, mask=in_k", "K * kg_dim, raw_g"),
    Fault("key_mask_off_by_one", (25,), "in_k = ks < K", "in_k = ks <= K"),
    Fault("value_mask_off_by_one", (25, 27), "in_v = vs < V", "in_v = vs <= V"),
    Fault(
        "last_value_block_dropped",
        (25,),
        '-(-value_dim // options["BV"])',
        'max(value_dim // options["BV"], 1)',
    ),
    Fault("records_by_the_wrong_block", (25,), "if v_block == 0:", "if v_block == V // BV:"),
)

ROWS = (
    Fault("one_token_too_many", (25, 27), _LOOP, "    count += 1\n" + _LOOP),
    Fault(
        "first_token_skipped",
        (25,),
        _LOOP,
        "    ahead = _load_token(*inputs, first + 1, in_k, in_v, 1 < count)\n"
        + _LOOP.replace("range(", "range(1, "),
    ),
    Fault("last_token_skipped", (25,), _LOOP, _LOOP.replace("count", "count - 1")),
    Fault("window_always_full", (2, 25, 27), "tl.minimum(count, window)", "window + 0 * count"),
    Fault(
        "key_read_one_token_ahead",
        (25,),
        _KEY,
        _KEY + "\n    raw_k += 0.0 * tl.load(k_ptr + (token + 1) * k_token, mask=in_k, other=0.0)",
    ),
    Fault(
        "empty_row_writes_a_token",
        (9, 25),
        "    if count <= 0:\n        return\n",
        "    count = tl.maximum(count, 1)\n",
        rows=2,
    ),
    Fault("null_strictly_below", (7,), "if slot <= NULL:", "if slot < NULL:"),
    Fault("null_zero_only", (7,), "if slot <= NULL:", "if slot == NULL:"),
    Fault(
        "null_outputs_unwritten",
        (8,),
        "            tl.store(out_ptr + (first + t) * out_token, zeros, mask=in_v)",
        "            pass",
    ),
    Fault("null_zeros_fill_the_window", (8, 27), _ZEROS, _ZEROS.replace("count", "window")),
    Fault("null_zeros_one_too_many", (8, 27), _ZEROS, _ZEROS.replace("count", "count + 1")),
    Fault("null_zeros_one_too_few", (8,), _ZEROS, _ZEROS.replace("count", "count - 1")),
    Fault("null_zeros_unmasked", (27,), "out_token, zeros, mask=in_v", "out_token, zeros"),
    Fault(
        "padding_zeroed",
        (8, 27),
        "    if tokens == 0:\n        return out\n",
        "    if tokens == 0:\n        return out\n    out[:, int(starts[-1]) :] = 0.0\n",
    ),
    Fault(
        "caller_output_ignored", (8,), "torch.empty_like(v) if out is None else out", "torch.empty_like(v)"
    ),
    Fault("state_by_row", (3,), "slot * state_slot", "row * state_slot"),
    Fault("records_always_by_row", (3,), "slot if RECORD_BY_SLOT else row", "row"),
    Fault("records_always_by_slot", (3, 27), "slot if RECORD_BY_SLOT else row", "slot"),
    Fault("token_relative_to_row", (3,), "token = first + t", "token = t", rows=2),
    Fault(
        "last_tokens_beta",
        (23,),
        _INPUTS,
        _INPUTS + _INDENT + "raw_beta = tl.load(beta_ptr + head + (first + count - 1) * beta_token)",
    ),
    Fault(
        "record_tail_zeroed",
        (5, 27),
        _LOOP,
        "    for t in range(window):\n"
        "        tl.store(u_ptr + t * u_pos, tl.zeros([BV], tl.float32), mask=in_v)\n" + _LOOP,
    ),
)

STRIDES = (
    Fault(
        "state_strides_swapped",
        (11,),
        "[:, None] * state_v + ks.to(tl.int64)[None, :] * state_k",
        "[:, None] * state_k + ks.to(tl.int64)[None, :] * state_v",
    ),
    Fault(
        "state_k_stride_ignored", (10, 12), "ks.to(tl.int64)[None, :] * state_k", "ks.to(tl.int64)[None, :]"
    ),
    Fault("state_head_stride_for_slot", (12,), "slot * state_slot", "slot * state_head", heads=2),
    Fault("correction_head_stride", (11,), "head * u_head", "head * u_pos", heads=2),
    Fault("correction_position_stride", (11,), "t * u_pos, u", "t * u_head, u"),
    Fault("correction_channel_stride", (10,), "vs.to(tl.int64) * u_dim", "vs.to(tl.int64)"),
    Fault("key_record_channel_stride", (10,), "ks.to(tl.int64) * kg_dim", "ks.to(tl.int64)"),
    Fault("gate_record_channel_stride", (10,), "K * kg_dim, raw_g", "K, raw_g"),
    Fault("query_by_value_stride", (10, 11), "token * q_token", "token * v_token"),
    Fault("gate_by_key_stride", (10,), "token * g_token", "token * k_token"),
    Fault("null_output_by_value_stride", (10,), "(first + t) * out_token", "(first + t) * v_token"),
    Fault("first_token_stride_ignored", (10,), "qsl_ptr + row * qsl_step", "qsl_ptr + row", rows=2),
    Fault("row_end_stride_ignored", (10,), "qsl_ptr + (row + 1) * qsl_step", "qsl_ptr + (row + 1)"),
    Fault("slot_stride_ignored", (10,), "slot_ptr + row * slot_step", "slot_ptr + row", rows=2),
    Fault("one_A_log_for_all_heads", (6,), "tl.load(a_log_ptr + head)", "tl.load(a_log_ptr)", heads=2),
    Fault("one_bias_for_all_heads", (6,), "bias_ptr + head * K + ks", "bias_ptr + ks", heads=2),
)

GATES = (
    Fault("softplus_threshold", (6, 22), "x > 20.0", "x > 10.0", module="gate"),
    Fault(
        "softplus_overflows",
        (22,),
        "tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))",
        "tl.log(1.0 + tl.exp(x))",
        module="gate",
    ),
    Fault("softplus_without_A", (6,), "-a * tl.where", "-tl.where", module="gate"),
    Fault("sigmoid_without_A", (6,), "tl.sigmoid(a * x)", "tl.sigmoid(x)", module="gate"),
    Fault("A_log_not_exponentiated", (6,), "tl.exp(tl.load(a_log_ptr + head))", "tl.load(a_log_ptr + head)"),
    Fault("gate_bias_dropped", (6,), "raw_g.to(tl.float32) + bias", "raw_g.to(tl.float32)"),
    Fault("zero_bound_is_no_bound", (6, 28), "BOUNDED=lower_bound is not None", "BOUNDED=bool(lower_bound)"),
    Fault(
        "beta_not_squashed",
        (6,),
        "tl.sigmoid(raw_beta.to(tl.float32))",
        "raw_beta.to(tl.float32)",
    ),
)

ARITHMETIC = (
    Fault("key_eps", (24,), "tl.sum(k * k) + 1e-6", "tl.sum(k * k) + 1e-5"),
    Fault("query_eps", (24,), "tl.sum(q * q) + 1e-6", "tl.sum(q * q) + 1e-5"),
    Fault(
        "key_eps_outside_the_root",
        (24,),
        "tl.rsqrt(tl.sum(k * k) + 1e-6)",
        "1.0 / (tl.sqrt(tl.sum(k * k)) + 1e-6)",
    ),
    Fault("key_by_query_norm", (24,), "k *= tl.rsqrt(tl.sum(k * k)", "k *= tl.rsqrt(tl.sum(q * q)"),
    Fault("key_norm_in_activation_dtype", (21,), "tl.sum(k * k)", "tl.sum(raw_k * raw_k).to(tl.float32)"),
    Fault("scale_missing", (6,), " * (K**-0.5)", ""),
    Fault("scale_by_value_dim", (11,), "K**-0.5", "V**-0.5"),
    Fault(
        "decay_after_the_update",
        (6,),
        _GATE + _INDENT + _CORRECTION + _INDENT + _UPDATE,
        _CORRECTION + _INDENT + _UPDATE + _INDENT + _GATE,
    ),
    Fault("decay_after_the_correction", (6,), _GATE + _INDENT + _CORRECTION, _CORRECTION + _INDENT + _GATE),
    Fault("decay_along_values", (11,), "lower_bound, BOUNDED))[None, :]", "lower_bound, BOUNDED))[:, None]"),
    Fault(
        "beta_on_value_only",
        (24,),
        "beta * (v - tl.sum(state * k[None, :], axis=1))",
        "beta * v - tl.sum(state * k[None, :], axis=1)",
    ),
    Fault("correction_recorded_before_beta", (4,), "u_pos, u, mask", "u_pos, u / beta, mask"),
    Fault(
        "output_of_the_old_state",
        (24,),
        "tl.sum(state * q[None, :], axis=1)",
        "tl.sum((state - u[:, None] * k[None, :]) * q[None, :], axis=1)",
    ),
    Fault(
        "state_rounded_every_token",
        (21,),
        _UPDATE,
        _UPDATE + _INDENT + "state = state.to(tl.bfloat16).to(tl.float32)",
    ),
    Fault(
        "correction_rounded_in_update",
        (21,),
        _UPDATE,
        "state += u.to(tl.bfloat16).to(tl.float32)[:, None] * k[None, :]",
    ),
    Fault(
        "output_rounded_twice",
        (21,),
        "out_token, tl.sum(state * q[None, :], axis=1)",
        "out_token, tl.sum(state * q[None, :], axis=1).to(tl.bfloat16).to(tl.float32)",
    ),
    Fault(
        "checkpoint_written_back",
        (4, 27),
        _LAST_STORE,
        _LAST_STORE + "\n    " + _STORE_STATE,
    ),
    Fault("correction_one_position_late", (1, 27), "u_ptr + t * u_pos", "u_ptr + (t + 1) * u_pos"),
    Fault(
        "key_one_position_early", (1, 27), "kg_ptr + t * kg_pos, raw_k", "kg_ptr + (t - 1) * kg_pos, raw_k"
    ),
    Fault("key_recorded_normalised", (4, 6), "t * kg_pos, raw_k", "t * kg_pos, k"),
    Fault("gate_recorded_with_bias", (6,), "K * kg_dim, raw_g", "K * kg_dim, raw_g + bias"),
)

ADDRESSES = (
    Fault(
        "state_address_in_32_bits",
        (13,),
        "slot * state_slot",
        "slot.to(tl.int32) * state_slot",
        beyond="needs strides past 2**31 elements; a case takes at most 1 GiB",
    ),
)

FAULTS = {fault.name: fault for fault in MASKS + ROWS + STRIDES + GATES + ARITHMETIC + ADDRESSES}
"""Every fault by name."""
