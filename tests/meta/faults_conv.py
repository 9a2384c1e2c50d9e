"""Faults to plant in ``impl/triton/conv.py``: the arithmetic that all convolutions share, and the update.

Not here, for nothing that a call within the contract shows on a CPU changes: a product rounded
only where one factor is bf16 (it is wide anyhow), fma or not, barriers, accepted counts of 0
(outside the contract of update), the state stored by every chunk (the same bytes each time),
channels dealt out by plane or over all planes (the blocks are the same), padding tokens that
the cast leaves out (their inputs are dead), planes that are not dense (no caller looks).
"""

from tests.meta.faults import Fault
from tests.meta.faults_commit import NO_CLAIM


def _fault(
    operation: str, name: str, classes: tuple[int, ...], old: str, new: str, module: str = "conv"
) -> Fault:
    return Fault(
        name,
        classes,
        old,
        new,
        rows=NO_CLAIM,
        heads=NO_CLAIM,
        tokens=NO_CLAIM,
        module=module,
        operation=operation,
    )


def in_update(name: str, classes: tuple[int, ...], old: str, new: str) -> Fault:
    """A fault of conv.py that causal_conv1d_update shows."""
    return _fault("conv_update", name, classes, old, new)


def in_prefill(name: str, classes: tuple[int, ...], old: str, new: str) -> Fault:
    """A fault of conv.py that causal_conv1d_fn shows."""
    return _fault("conv_prefill", name, classes, old, new)


def in_packed(name: str, classes: tuple[int, ...], old: str, new: str, module: str = "conv") -> Fault:
    """A fault that packed_causal_conv1d_fn shows."""
    return _fault("packed_conv", name, classes, old, new, module)


_TAPS = "(first, second, third, fourth)"
_TAP = "weight_ptr + channel * weight_channel + j * weight_tap"
_PRODUCT = "acc += window[j] * taps[j]"
_FMA = "acc = tl.fma(window[j].to(tl.float32), taps[j].to(tl.float32), acc)"
_Y = "y = _output(window, taps, bias, SILU)"
_SILU = "return x / (1 + tl.exp(x * -1.0))"

ARITHMETIC = (
    in_update("taps_reversed", (11,), f"return {_TAPS}", "return (fourth, third, second, first)"),
    in_prefill("taps_split_in_halves", (11,), f"return {_TAPS}", "return (first, third, second, fourth)"),
    in_update("strided_taps_reversed", (11,), _TAP, _TAP.replace("+ j", "+ (W - 1 - j)")),
    in_update(
        "weight_strides_swapped", (11,), _TAP, "weight_ptr + channel * weight_tap + j * weight_channel"
    ),
    in_prefill("tap_stride_ignored", (10,), _TAP, "weight_ptr + channel * weight_channel + j"),
    in_update(
        "update_weight_rows_taken_for_dense",
        (10, 12),
        "COPY=copy,\n        DENSE_WEIGHT=weight.stride() == (width, 1),",
        "COPY=copy,\n        DENSE_WEIGHT=weight.stride(1) == 1,",
    ),
    in_packed(
        "prefill_weight_rows_taken_for_dense",
        (10, 12),
        "HAS_BIAS=bias is not None,\n        DENSE_WEIGHT=weight.stride() == (width, 1),",
        "HAS_BIAS=bias is not None,\n        DENSE_WEIGHT=weight.stride(1) == 1,",
    ),
    in_update("bias_dropped", (6,), _Y, "y = _output(window, taps, bias * 0.0, SILU)"),
    in_prefill("bias_after_the_activation", (21,), _Y, "y = _output(window, taps, bias * 0.0, SILU) + bias"),
    in_update("bias_stride_ignored", (10,), "channel * bias_step", "channel"),
    in_prefill("silu_sign", (22,), _SILU, "return x / (1 + tl.exp(x))"),
    in_update("silu_overflows", (22,), _SILU, "return x * tl.exp(x) / (1 + tl.exp(x))"),
    in_update("silu_always", (28,), "return _silu(acc) if SILU else acc", "return _silu(acc)"),
    in_update("product_not_rounded", (21,), _PRODUCT, _FMA),
    in_update(
        "product_always_rounded",
        (21,),
        _FMA,
        "acc += (window[j].to(tl.float32) * taps[j].to(tl.float32)).to(tl.bfloat16)",
    ),
    in_prefill("taps_narrowed", (21,), _FMA, _FMA.replace("taps[j]", "taps[j].to(tl.bfloat16)")),
    in_update(
        "sum_in_bfloat16", (21,), _PRODUCT, "acc = (acc + window[j] * taps[j]).to(tl.bfloat16).to(tl.float32)"
    ),
    in_update("input_not_cast_to_the_state", (21,), "x = group[r].to(state_dtype)", "x = group[r]"),
    in_update(
        "own_output_rounded_through_the_state",
        (21,),
        "through_state, copy = out is None, False",
        "through_state, copy = True, False",
    ),
    in_update(
        "output_not_rounded_through_the_state",
        (21,),
        "through_state, copy = out is None, False",
        "through_state, copy = False, False",
    ),
    in_prefill("prefill_not_rounded_through_the_state", (21,), "THROUGH_STATE=True", "THROUGH_STATE=False"),
    in_prefill(
        "chunk_history_not_cast",
        (21,),
        "mask=live & (begin > 0), other=0.0).to(state_dtype),)",
        "mask=live & (begin > 0), other=0.0),)",
    ),
)

_NEWEST = "newest = tl.load(accepted_ptr + row * accepted_step).to(tl.int64) - 1"
_HISTORY = "state_ptr + (newest + j) * state_column"
_SHIFT = "tl.store(state_ptr + (j - 1) * state_column, history[j], mask=live)"
_ROLL_FROM = "state_ptr + (W - 2) * state_column"
_ROLL = (
    "            if ROLL:\n"
    "                tl.store(roll_ptr, x, mask=inside)\n"
    "                roll_ptr += roll_column\n"
    "            window = history\n"
    "            window += (x,)\n"
    "            y = _output(window, taps, bias, SILU)\n"
)
_NOT_DENSE = (
    "    else:\n        _store_last_inputs(x_ptr, state_ptr, count, x_token, state_column, live, history)"
)
_UPDATE_ROW = "state_ptr += slot * state_slot + channel * state_channel\n    own"

UPDATE = (
    in_update("rejected_tokens_stay_in_the_history", (4,), _NEWEST, f"{_NEWEST[:-3]}* 0"),
    in_update("history_one_column_late", (1, 4), _NEWEST, _NEWEST.removesuffix(" - 1")),
    in_update("counts_of_the_first_row", (3,), "accepted_ptr + row * accepted_step", "accepted_ptr"),
    in_update(
        "accepted_stride_ignored_by_update", (10,), "accepted_ptr + row * accepted_step", "accepted_ptr + row"
    ),
    in_update("update_slot_stride_ignored", (10,), "slot_ptr + row * slot_step", "slot_ptr + row"),
    in_update("update_first_token_stride_ignored", (10,), "qsl_ptr + row * qsl_step", "qsl_ptr + row"),
    in_update(
        "update_row_end_stride_ignored", (10,), "qsl_ptr + (row + 1) * qsl_step", "qsl_ptr + (row + 1)"
    ),
    in_update("update_history_column_stride", (11,), _HISTORY, "state_ptr + newest + j"),
    in_update(
        "update_channel_by_column_stride",
        (11,),
        _UPDATE_ROW,
        _UPDATE_ROW.replace("state_channel", "state_column"),
    ),
    in_update(
        "update_page_stride_for_length",
        (12,),
        _UPDATE_ROW,
        _UPDATE_ROW.replace("state_slot", "channels * state_channel"),
    ),
    in_update("update_state_by_row", (3,), _UPDATE_ROW, _UPDATE_ROW.replace("slot *", "row *")),
    in_update("roll_one_column_short", (8,), "tl.static_range(1, W - 1)", "tl.static_range(1, W - 2)"),
    in_update("history_not_shifted", (4,), _SHIFT, _SHIFT.replace("(j - 1)", "j")),
    in_update("inputs_one_column_late", (27,), _ROLL_FROM, "state_ptr + (W - 1) * state_column"),
    in_update("inputs_one_column_early", (4,), _ROLL_FROM, "state_ptr + (W - 3) * state_column"),
    in_update(
        "roll_of_whole_groups",
        (25, 27),
        "tl.store(roll_ptr, x, mask=inside)",
        "tl.store(roll_ptr, x, mask=live)",
    ),
    in_update(
        "roll_of_the_outputs",
        (4, 21),
        _ROLL,
        _ROLL[_ROLL.index("            window") :]
        + _ROLL[: _ROLL.index("            window")].replace(" x,", " y,"),
    ),
    in_update(
        "roll_after_the_outputs",
        (15,),
        "ROLL=ACCEPTED,\n    )",
        f"ROLL=ACCEPTED,\n    )\n    if not ACCEPTED:\n{_NOT_DENSE[10:]}",
    ),
    in_update(
        "short_rows_lose_their_history",
        (4, 25),
        "tl.where(token + len(history) == j, history[j], value)",
        "value",
    ),
    in_update(
        "short_rows_keep_the_oldest",
        (4, 25),
        "tl.where(token + len(history) == j, history",
        "tl.where((c == j) & (token < 0), history",
    ),
    in_update(
        "last_inputs_of_a_full_window",
        (4, 25),
        _NOT_DENSE,
        _NOT_DENSE.replace("count", "tl.maximum(count, W - 1)"),
    ),
    in_update(
        "no_null_block_is_block_zero",
        (7,),
        "_BELOW_ALL_SLOTS if null_block_id is None else null_block_id,\n        *_row",
        "null_block_id or 0,\n        *_row",
    ),
    in_update("update_null_strictly_below", (7,), "    if slot <= null:", "    if slot < null:"),
    in_update("update_null_zero_only", (7,), "    if slot <= null:", "    if slot == null:"),
    in_update("empty_row_rolls", (9, 25), "    if count <= 0:\n        return\n", ""),
    in_update(
        "null_rows_unwritten_by_the_cast",
        (8,),
        "        if COPY:\n            for t in range(count)",
        "        if COPY and not VARLEN:\n            for t in range(count)",
    ),
    in_update(
        "null_rows_copied_uncast",
        (8, 21),
        "x = tl.load(x_ptr, mask=live).to(state_dtype)",
        "x = tl.load(x_ptr, mask=live)",
    ),
    in_update(
        "copy_of_null_rows_one_short",
        (8,),
        "            for t in range(count):\n                _copy",
        "            for t in range(count - 1):\n                _copy",
    ),
    in_update("result_never_in_place", (8,), "torch.empty_like(x) if copy else x", "torch.empty_like(x)"),
    in_update("update_channel_mask", (25, 27), "live = channel < channels", "live = channel <= channels"),
    in_update(
        "update_channels_one_block",
        (25,),
        'triton.cdiv(channels, options["CHANNELS"])',
        'max(channels // options["CHANNELS"], 1)',
    ),
    in_update(
        "one_output_too_many", (25, 27), "inside = live & (r < count - t)", "inside = live & (r <= count - t)"
    ),
    in_update("update_reads_past_the_row", (25,), "count - t - GROUP, live", "count - t, live"),
    in_update(
        "output_by_input_stride",
        (10,),
        "out_ptr += first * out_token\n    else",
        "out_ptr += first * x_token\n    else",
    ),
    in_update(
        "input_channel_stride_ignored",
        (10,),
        "    x_ptr += channel * x_channel\n    out",
        "    x_ptr += channel\n    out",
    ),
    in_update("batch_row_stride", (12,), "x_ptr += row * x_row", "x_ptr += row * tokens * x_token"),
    in_update("exact_rows_refused", (28,), "conv_state.shape[2] < columns", "conv_state.shape[2] <= columns"),
    in_update("six_taps_refused", (28,), "widest=6", "widest=5"),
    in_update(
        "first_row_longer_by_its_start",
        (23,),
        "tl.load(qsl_ptr + (row + 1) * qsl_step).to(tl.int64) - first",
        "tl.load(qsl_ptr + (row + 1) * qsl_step).to(tl.int64)",
    ),
)

FAULTS = {fault.name: fault for fault in ARITHMETIC + UPDATE}
"""Every fault by name; those of prefill alone are in ``faults_prefill``."""
