"""Faults to plant in ``impl/triton/commit.py``: its plan, compaction, fold and host side.

Not here, for nothing that a call within the contract shows changes: counts clamped at the query
but not at the window (a query fits the window), the mask of the boundary column and of rows
whose table ends before it, the plan of rows past the last (undefined), whatever only a
compiler takes from alignment. Nor the address of a storage where a view's is meant: on the CPU
a view of the arena starts where its storage does.
"""

from tests.meta.faults import Fault

NO_CLAIM = 1 << 30
"""As ``rows``, ``heads`` and ``tokens``: nothing is said of the smallest case."""


def _fault(name: str, classes: tuple[int, ...], old: str, new: str, module: str = "commit") -> Fault:
    return Fault(
        name,
        classes,
        old,
        new,
        rows=NO_CLAIM,
        heads=NO_CLAIM,
        tokens=NO_CLAIM,
        module=module,
        operation="commit",
    )


_N = "n = tl.minimum(tl.minimum(tl.maximum(accepted, 0), length), window).to(tl.int32)"
_LIVE = "live = (source > NULL) & (n > 0)"
_COLUMN = "tl.minimum(block + tl.where(used + n > block_size, 1, 0), width - 1)"
_CROSSED = "crossed = live & (used + n >= block_size) & (block < width)"
_STORE_N = "tl.store(plan_ptr + row, n)"

PLAN = (
    _fault(
        "negative_count_is_live",
        (1,),
        f"{_N}\n    {_LIVE}",
        f"{_N.replace('tl.maximum(accepted, 0)', 'accepted')}\n    live = (source > NULL) & (n != 0)",
    ),
    _fault("count_of_zero_is_live", (1,), _LIVE, "live = source > NULL"),
    _fault(
        "count_past_the_query", (2, 9), "tl.maximum(accepted, 0), length)", "tl.maximum(accepted, 0), window)"
    ),
    _fault(
        "query_for_count",
        (2, 4),
        _N,
        "n = tl.minimum(length, window).to(tl.int32) + 0 * accepted.to(tl.int32)",
    ),
    _fault(
        "accepted_by_row",
        (3,),
        "accepted_ptr + request * accepted_step",
        "accepted_ptr + row * accepted_step",
    ),
    _fault(
        "computed_by_row",
        (3,),
        "computed_ptr + request * computed_step",
        "computed_ptr + row * computed_step",
    ),
    _fault("table_by_row", (3,), "blocks_ptr += request * blocks_row", "blocks_ptr += row * blocks_row"),
    _fault("accepted_stride_ignored", (10,), "request * accepted_step", "request"),
    _fault("request_stride_ignored", (10,), "request_ptr + row * request_step", "request_ptr + row"),
    _fault("slot_stride_ignored_by_plan", (10,), "slot_ptr + row * slot_step", "slot_ptr + row"),
    _fault("row_end_stride_ignored_by_plan", (10,), "(row + 1) * starts_step", "(row + 1)"),
    _fault("table_stride_ignored", (10,), "blocks_ptr + column * blocks_step", "blocks_ptr + column"),
    _fault("boundary_stride_ignored", (10,), "blocks_ptr + block * blocks_step", "blocks_ptr + block"),
    _fault("table_width_for_stride", (10,), "request * blocks_row", "request * width"),
    _fault(
        "wide_table_read_as_narrow",
        (10,),
        "blocks_ptr += request * blocks_row",
        "blocks_ptr = blocks_ptr.to(tl.pointer_type(tl.int32)) + request * blocks_row",
    ),
    _fault(
        "wide_requests_read_as_narrow",
        (3, 10),
        "tl.load(request_ptr + row",
        "tl.load(request_ptr.to(tl.pointer_type(tl.int32)) + row",
    ),
    _fault("final_column_of_the_next_token", (26,), "used + n > block_size", "used + n >= block_size"),
    _fault("final_column_unclamped", (26,), _COLUMN, "block + tl.where(used + n > block_size, 1, 0)"),
    _fault("boundary_of_the_next_block", (26,), "blocks_ptr + block *", "blocks_ptr + (block + 1) *"),
    _fault("boundary_only_when_passed", (26,), "used + n >= block_size", "used + n > block_size"),
    _fault("boundary_without_crossing", (26,), _CROSSED, "crossed = live & (block < width)"),
    _fault("boundary_one_token_early", (26,), "block_size - used, 0)", "block_size - used - 1, 0)"),
    _fault(
        "dead_rows_have_a_boundary_length",
        (26,),
        "tl.where(live, block_size - used, 0)",
        "(block_size - used)",
    ),
    _fault("pad_slot_is_live", (7,), _LIVE, "live = (source != NULL) & (n > 0)"),
    _fault("null_slot_is_live", (7,), _LIVE, "live = (source >= NULL) & (n > 0)"),
    _fault("null_rows_keep_their_count", (7,), "n = tl.where(live, n, 0)", "n = tl.maximum(n, 0)"),
    _fault("null_rows_keep_their_slot", (7,), "final = tl.where(live, source, nothing)", "final = source"),
    _fault("null_rows_name_a_block", (7, 26), "mask=live & (column >= 0)", "mask=column >= 0"),
    _fault("dead_rows_are_read", (9, 25), "    if n == 0:\n        return\n", ""),
    _fault(
        "plan_pitch_without_padding", (27,), "                capacity,\n", "                max_num_reqs,\n"
    ),
    _fault("plan_left_to_the_second_layer", (8,), "(part == 0) & (layer == 0)", "(part == 0) & (layer == 1)"),
    _fault(
        "plan_count_dropped_without_a_slot",
        (8,),
        _STORE_N,
        "tl.store(plan_ptr + row, tl.where(final > NULL, n, 0))",
    ),
    _fault("plan_boundary_length_unstored", (8,), "tl.store(plan_ptr + 3 * capacity + row, m)", "pass"),
)

_KEPT = "kept = tl.load(page + source * slot_step + (n - 1 + h) * column_step, mask=in_final)"
_LOAD_CROSSING = "crossing = tl.load(page + source * slot_step + (m - 1 + h) * column_step, mask=in_boundary)"
_CROSSING = f"            {_LOAD_CROSSING}\n"
_TO_BOUNDARY = (
    "            tl.store(page + boundary * slot_step + h * column_step, crossing, mask=in_boundary)\n"
)
_TO_FINAL = "        tl.store(page + final * slot_step + h * column_step, kept, mask=in_final)\n"
_STEPS = "channel_step = tl.load(entry + 2 * pitch)\n    column_step = tl.load(entry + 3 * pitch)"

COMPACTION = (
    _fault("columns_one_late", (1, 26), "(n - 1 + h) * column_step", "(n + h) * column_step"),
    _fault("columns_not_moved", (4,), "(n - 1 + h) * column_step", "h * column_step"),
    _fault("history_one_short", (8,), "for h in range(history):", "for h in range(history - 1):"),
    _fault("history_one_long", (25, 27), "for h in range(history):", "for h in range(history + 1):"),
    _fault(
        "columns_from_the_last",
        (15,),
        "    for h in range(history):\n",
        "    for i in range(history):\n        h = history - 1 - i\n",
    ),
    _fault(
        "final_stored_before_boundary_is_read",
        (15, 26),
        f"        if ALIGN:\n{_CROSSING}{_TO_BOUNDARY}{_TO_FINAL}",
        f"{_TO_FINAL}        if ALIGN:\n{_CROSSING}{_TO_BOUNDARY}",
    ),
    _fault("columns_of_the_final_slot", (26,), _KEPT, _KEPT.replace("source", "final")),
    _fault("boundary_columns_by_count", (4, 26), "(m - 1 + h) * column_step", "(n - 1 + h) * column_step"),
    _fault("boundary_columns_one_late", (4, 26), "(m - 1 + h) * column_step", "(m + h) * column_step"),
    _fault(
        "conv_strides_swapped", (11,), _STEPS, _STEPS.replace("2", "X").replace("3", "2").replace("X", "3")
    ),
    _fault(
        "conv_strides_of_the_first_layer",
        (12,),
        "tl.load(entry + pitch)",
        "tl.load(entry - tl.program_id(2) + pitch)",
    ),
    _fault("one_layer_for_all", (12,), "entry = table_ptr + layer", "entry = table_ptr"),
    _fault("channel_mask_off_by_one", (25, 27), "in_final = (cs < channels)", "in_final = (cs <= channels)"),
    _fault("first_channel_block_only", (25,), "block * BC + tl.arange(0, BC)", "tl.arange(0, BC)"),
    _fault(
        "columns_of_a_null_final",
        (7, 26),
        "(cs < channels) & (final > NULL)",
        "(cs < channels) & (final != NULL)",
    ),
    _fault(
        "boundary_columns_without_final",
        (26,),
        "in_boundary = in_final & (boundary > NULL)",
        "in_boundary = (cs < channels) & (boundary > NULL)",
    ),
    _fault(
        "conv_always_dim_first",
        (11, 12),
        "convs = stored if is_conv_state_dim_first() else [",
        "convs = stored if stored else [",
    ),
    _fault("conv_of_one_column_refused", (28,), "convs[0].shape[2] < window", "convs[0].shape[2] <= window"),
)

_DECAY = "state *= tl.exp(log_decay(x, a, lower_bound, BOUNDED))[None, :]"
_UPDATE = "state += u[:, None] * k[None, :]"
_INDENT = "\n        "
_LAST = "last = tl.where((final > NULL) & (boundary > NULL), m - 1, -1)"

GATE = (
    _fault("fold_without_gate_bias", (6,), "next_g.to(tl.float32) + bias", "next_g.to(tl.float32)"),
    _fault(
        "fold_A_log_not_exponentiated",
        (6,),
        "tl.exp(tl.load(a_log_ptr + layer * heads + head))",
        "tl.load(a_log_ptr + layer * heads + head)",
    ),
    _fault("fold_softplus_threshold", (6, 22), "x > 20.0", "x > 10.0", "gate"),
    _fault(
        "fold_softplus_overflows",
        (22,),
        "tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))",
        "tl.log(1.0 + tl.exp(x))",
        "gate",
    ),
    _fault("fold_sigmoid_without_A", (6,), "tl.sigmoid(a * x)", "tl.sigmoid(x)", "gate"),
    _fault(
        "fold_zero_bound_is_no_bound",
        (6,),
        '"BOUNDED": lower_bound is not None',
        '"BOUNDED": bool(lower_bound)',
    ),
    _fault("fold_A_log_of_the_first_layer", (6,), "a_log_ptr + layer * heads + head", "a_log_ptr + head"),
    _fault("fold_bias_of_the_first_layer", (6,), "(layer * heads + head) * K", "head * K"),
    _fault("fold_bias_of_one_head", (6,), "(layer * heads + head) * K", "layer * heads * K"),
)

FOLD = (
    _fault("fold_decay_after_update", (6,), f"{_DECAY}{_INDENT}{_UPDATE}", f"{_UPDATE}{_INDENT}{_DECAY}"),
    _fault("fold_record_always_by_row", (3,), "record = source if BY_SLOT else row", "record = row"),
    _fault("fold_record_always_by_slot", (3, 27), "record = source if BY_SLOT else row", "record = source"),
    _fault("fold_key_eps", (24,), "tl.sum(k * k) + 1e-6", "tl.sum(k * k) + 1e-5"),
    _fault("fold_key_by_gate_norm", (24,), "tl.sum(k * k) + 1e-6", "tl.sum(x * x) + 1e-6"),
    _fault(
        "fold_key_norm_in_activation_dtype",
        (21,),
        "tl.rsqrt(tl.sum(k * k) + 1e-6)",
        "tl.rsqrt(tl.sum((k * k).to(RECORD).to(tl.float32)) + 1e-6)",
    ),
    _fault(
        "fold_state_rounded_every_token",
        (21,),
        _UPDATE,
        f"{_UPDATE}{_INDENT}state = state.to(STATE).to(tl.float32)",
    ),
    _fault("fold_correction_rounded", (21,), _UPDATE, _UPDATE.replace("u[", "u.to(RECORD).to(tl.float32)[")),
    _fault("fold_one_token_too_many", (4, 5), "for t in range(n):", "for t in range(n + 1):"),
    _fault("fold_reads_the_record_at_n", (5, 25), "more = t + 1 < n", "more = t + 1 <= n"),
    _fault("fold_boundary_one_token_late", (4, 26), _LAST, _LAST.replace("m - 1", "m")),
    _fault("fold_boundary_of_all_tokens", (4, 23, 26), _LAST, _LAST.replace("m - 1", "n - 1")),
    _fault("fold_boundary_without_final", (26,), "(final > NULL) & (boundary > NULL)", "(boundary > NULL)"),
    _fault(
        "fold_boundary_to_a_pad_slot",
        (7, 26),
        "(final > NULL) & (boundary > NULL)",
        "(final > NULL) & (boundary != NULL)",
    ),
    _fault("fold_final_to_a_pad_slot", (7,), "    if final > NULL:", "    if final != NULL:"),
    _fault("fold_into_the_source", (26,), "final * state_slot + head", "source * state_slot + head"),
    _fault(
        "fold_from_the_final_slot",
        (26,),
        "_pointer(state_base, source * state_slot",
        "_pointer(state_base, final * state_slot",
    ),
    _fault(
        "fold_mask_without_k",
        (25, 27),
        "inside = in_v[:, None] & in_k[None, :]",
        "inside = in_v[:, None] & (ks >= 0)[None, :]",
    ),
    _fault(
        "fold_mask_without_v",
        (25, 27),
        "inside = in_v[:, None] & in_k[None, :]",
        "inside = (vs >= 0)[:, None] & in_k[None, :]",
    ),
    _fault(
        "fold_key_unmasked",
        (11, 25),
        "mask=in_k & more, other=0.0)\n        next_g",
        "mask=more, other=0.0)\n        next_g",
    ),
    _fault("fold_value_mask_off_by_one", (27,), "in_v = vs < V", "in_v = vs <= V"),
    _fault(
        "fold_last_value_tile_dropped",
        (25,),
        '-(-options["V"] // options["BV"])',
        'max(options["V"] // options["BV"], 1)',
    ),
    _fault(
        "fold_tile_and_head_confused", (11,), "            part % TILES,\n", "            part % heads,\n"
    ),
)

STRIDES = (
    _fault(
        "fold_state_strides_swapped",
        (11,),
        "[:, None] * state_v + ks.to(tl.int64)[None, :] * state_k",
        "[:, None] * state_k + ks.to(tl.int64)[None, :] * state_v",
    ),
    _fault("fold_correction_head_by_key_dim", (11,), "u_head = V * window", "u_head = K * window"),
    _fault("fold_gate_after_value_dim", (11,), "g_dims = K + ks\n", "g_dims = V + ks\n"),
    _fault("fold_correction_head_stride", (11,), "head * u_head", "head * u_step"),
    _fault("fold_record_head_stride", (11,), "head * kg_head", "head * u_head"),
    _fault(
        "fold_gate_channel_stride", (10,), "(K + ks.to(tl.int64)) * kg_dim", "K + ks.to(tl.int64) * kg_dim"
    ),
    _fault(
        "fold_page_stride_for_length",
        (12,),
        "_pointer(state_base, source * state_slot",
        "_pointer(state_base, source * state_head * heads",
    ),
    _fault("fold_inner_strides_ignored", (10, 12), "return x[:1].is_contiguous() and all(", "return all("),
    _fault(
        "block_of_one_window_refused",
        (26, 28),
        "block_size < self.spec_query_len",
        "block_size <= self.spec_query_len",
    ),
    _fault("full_batch_refused", (28,), "rows > self._max_num_reqs", "rows >= self._max_num_reqs"),
)

FAULTS = {fault.name: fault for fault in PLAN + COMPACTION + GATE + FOLD + STRIDES}
"""Every fault by name."""
