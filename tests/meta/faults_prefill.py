"""Faults of the prefill: whole sequences, the search for a program's sequence, packed planes."""

from dataclasses import replace

from tests.meta.faults_conv import in_packed, in_prefill

_INITIAL = "mask=live & (initial != 0)"
_LAST_INPUTS = f"{_INITIAL}, other=0.0),)\n        _store_last_inputs(x_ptr, state_ptr, count"
_PREFILL_ROW = "state_ptr += slot * state_slot + channel * state_channel\n    state_dtype"
_FOUND = "first.to(tl.int64) // TOKENS + probe <= program"

PREFILL = (
    in_prefill("initial_flag_ignored", (5,), _INITIAL, "mask=live"),
    in_prefill("initial_flag_inverted", (5,), _INITIAL, "mask=live & (initial == 0)"),
    in_prefill(
        "zeros_not_stored",
        (4, 25),
        "kept[c], mask=live)",
        "kept[c], mask=live & (count + c >= len(history)))",
    ),
    in_prefill(
        "short_sequence_loses_its_history",
        (4, 25),
        "tl.where(token + len(history) == j, history[j], value)",
        "value",
    ),
    in_prefill("every_chunk_starts_from_the_state", (4, 25), "if begin == 0:", "if begin >= 0:"),
    in_prefill(
        "chunk_starts_from_zeros", (25,), "mask=live & (begin > 0), other", "mask=live & (begin < 0), other"
    ),
    in_prefill("chunk_history_one_late", (25,), "at = begin + j - (W - 1)", "at = begin + j - (W - 2)"),
    in_prefill("state_of_the_first_chunk", (4, 25), _LAST_INPUTS, _LAST_INPUTS.replace("count", "own")),
    in_prefill(
        "last_partial_chunk_dropped",
        (25,),
        "(begin >= count)",
        "(begin >= count) | ((begin > 0) & (begin + TOKENS > count))",
    ),
    in_prefill("empty_sequence_stores_its_state", (9, 25), "(begin >= count)", "(begin > count)"),
    in_prefill(
        "tokens_of_a_chunk_not_limited",
        (25, 27),
        "own = tl.minimum(count - begin, TOKENS)",
        "own = tl.minimum(count, TOKENS)",
    ),
    in_prefill("search_strictly_below", (25,), _FOUND, _FOUND.replace("<=", "<")),
    in_prefill("search_without_empty_rows", (25,), _FOUND, _FOUND.replace(" + probe", "")),
    in_prefill(
        "search_level_strictly_below",
        (25,),
        "(start // TOKENS + probe <= program)",
        "(start // TOKENS + probe < program)",
    ),
    in_prefill("search_digits_upwards", (25,), "step = 32 ** (LEVELS - level)", "step = 32**level"),
    in_prefill(
        "search_level_missing", (25,), "while 32 ** (levels + 1) < rows:", "while 32 ** (levels + 2) < rows:"
    ),
    in_prefill(
        "search_past_the_last_row", (25,), "    inside = probe < rows\n", "    inside = probe <= rows\n"
    ),
    in_prefill(
        "programs_for_chunks_only",
        (25,),
        '(tokens // options["TOKENS"] + rows)',
        'triton.cdiv(tokens, options["TOKENS"])',
    ),
    in_prefill(
        "one_program_short",
        (25,),
        '(tokens // options["TOKENS"] + rows)',
        '(tokens // options["TOKENS"] + rows - 1)',
    ),
    in_prefill("prefill_null_strictly_below", (7,), "(slot <= null)", "(slot < null)"),
    in_prefill("prefill_null_zero_only", (7,), "(slot <= null)", "(slot == null)"),
    in_prefill("prefill_slot_stride_ignored", (10,), "probe * slot_step", "probe"),
    in_prefill("prefill_initial_stride_ignored", (10,), "probe * initial_step", "probe"),
    in_prefill(
        "prefill_first_token_stride_ignored",
        (10,),
        "first = tl.load(qsl_ptr + probe * qsl_step",
        "first = tl.load(qsl_ptr + probe",
    ),
    in_prefill(
        "prefill_output_by_input_stride", (10,), "out_ptr + begin * out_token", "out_ptr + begin * x_token"
    ),
    in_prefill(
        "prefill_input_channel_stride",
        (10,),
        "first * x_token + channel * x_channel",
        "first * x_token + channel",
    ),
    in_prefill(
        "prefill_channel_by_column_stride",
        (11,),
        _PREFILL_ROW,
        _PREFILL_ROW.replace("state_channel", "state_column"),
    ),
    in_prefill(
        "prefill_page_stride_for_length",
        (12,),
        _PREFILL_ROW,
        _PREFILL_ROW.replace("state_slot", "part_dim * state_channel"),
    ),
    in_prefill("prefill_state_by_row", (3,), _PREFILL_ROW, _PREFILL_ROW.replace("slot *", "row *")),
    in_prefill("prefill_channel_mask", (25, 27), "live = place < part_dim", "live = place <= part_dim"),
    in_prefill(
        "prefill_token_relative_to_row", (3,), "x_ptr += first * x_token + channel", "x_ptr += channel"
    ),
    in_prefill("prefill_reads_past_the_sequence", (25,), "count - t - GROUP, live", "count - t, live"),
)

PACKED = (
    in_packed(
        "every_plane_convolves_the_first", (12,), "channel = part * part_dim + place", "channel = place"
    ),
    in_packed("planes_by_token_stride", (12,), "part * out_part", "part * out_token"),
    in_packed(
        "planes_interleaved", (11,), "part = (block // blocks_a_part)", "part = (block % blocks_a_part)"
    ),
    in_packed(
        "packed_bias_dropped",
        (6,),
        "x, weight, bias, conv_states, *indices, out",
        "x, weight, None, conv_states, *indices, out",
        "packed_conv",
    ),
    in_packed("packed_always_silu", (28,), "silu=is_silu(activation)", "silu=True", "packed_conv"),
    in_packed(
        "packed_never_initial",
        (4,),
        "(query_start_loc, cache_indices, has_initial_state)",
        "(query_start_loc, cache_indices, has_initial_state & False)",
        "packed_conv",
    ),
    in_packed(
        "packed_in_conv_dtype",
        (8, 21),
        "dtype=x.dtype, device",
        "dtype=conv_states.dtype, device",
        "packed_conv",
    ),
    in_packed(
        "packed_input_taken_for_dense",
        (10, 12),
        "launch_prefill(x, weight",
        "launch_prefill(x.as_strided(x.shape, (dim, 1)), weight",
        "packed_conv",
    ),
)

SEARCH = (
    replace(
        in_prefill("search_forgets_its_first_level", (25,), "row += tl.sum((inside", "row = tl.sum((inside"),
        beyond="needs more than 1024 rows; a drawn case has up to 97",
    ),
)

FAULTS = {fault.name: fault for fault in PREFILL + PACKED + SEARCH}
"""Every fault by name."""
