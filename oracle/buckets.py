"""What a case reaches, as names: the events a campaign counts, each with a reason to be there.

A bucket that no run reaches is a hole in the strategies; ``BUCKETS`` lists them all so that
a missing one can be told from one that does not exist.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from oracle.calls import CALLS
from oracle.calls.base import PAD_SLOT, Call
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import STATIC, WIDTH, FusedVerify
from oracle.calls.serve import Serve
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.layout import DENSE, TensorSpec, placed
from oracle.reach import commit, dtypes, memory, values

Flags = dict[str, bool]
PAST_A_BOUNDARY = "values: correction not finite, past a boundary"


def buckets(case: Case) -> frozenset[str]:
    """The buckets of ``BUCKETS`` that the case falls into."""
    flags = _flags(case)
    reached = {name for name, on in flags.items() if on}
    reached.add(f"relation: {type(case.relation).__name__}" if case.relation else "relation: none")
    reached.add("values: unusual" if case.regimes else "values: plain")
    if "specials" in case.regimes.values():
        reached.add("values: not finite")
        if isinstance(case.call, Commit) and _past_a_boundary(case.call, case.regimes):
            reached.add(PAST_A_BOUNDARY)
    reached.add(f"dtypes: {dtypes.combination(case.call)}")
    if not isinstance(case.call, Serve):
        reached |= memory.places(case)
    return frozenset(reached | (values.reached(case) & _OF_VALUES[case.op]))


def _past_a_boundary(call: Commit, regimes: Mapping[str, str]) -> bool:
    """Whether a correction that a row accepts beyond a block boundary may not be finite."""
    if regimes.get("correction") != "specials":
        return False
    plans = (call.plan(row) for row in range(call.rows))
    return any(plan.writes_boundary and plan.m < plan.n for plan in plans)


def _flags(case: Case) -> Flags:
    if isinstance(case.call, Serve):  # its rows are events, its memory is the engine's
        return _serve(case.call)
    paths = _paths(case) if isinstance(case.call, FusedVerify) else {}
    return {**_rows(case.call), **_slots(case.call), **_memory(case), **_KINDS[case.op](case.call), **paths}


def _rows(call: Call) -> Flags:
    n, lengths = call.rows, call.qlens
    return {
        "rows: none": n == 0,
        "rows: one": n == 1,
        "rows: several": n > 1,
        "row: full window": call.longest in lengths,
        "row: partial": any(1 < x < call.longest for x in lengths),
        "row: one token": 1 in lengths,
        "row: empty first": lengths[:1] == (0,),
        "row: empty middle": 0 in lengths[1:-1],
        "row: empty last": lengths[-1:] == (0,),
        "row: all empty": n > 0 and not any(lengths),
        "tokens: padding": call.tail > 0,
        "tokens: last row ends at T": n > 0 and call.tail == 0 and lengths[-1] > 0,
    }


def _slots(call: Call) -> Flags:
    null = [call.null(i) and call.qlens[i] > 0 for i in range(call.rows)]
    live = {call.slots[i] for i in range(call.rows) if call.live(i)}
    empty = {s for s, qlen in zip(call.slots, call.qlens, strict=True) if qlen == 0}
    return {
        "slot: null 0": any(on and s == 0 for on, s in zip(null, call.slots, strict=True)),
        "slot: null -1": any(on and s == PAD_SLOT for on, s in zip(null, call.slots, strict=True)),
        "slot: null first": any(null[:1]),
        "slot: null in the middle": any(null[1:-1]),
        "slot: null last": any(null[-1:]),
        "slot: null, part of a window": any(
            on and x < call.longest for on, x in zip(null, call.qlens, strict=True)
        ),
        "slot: all null": any(null) and not live,
        "slot: empty row without a slot": any(s <= 0 for s in empty),
        "slot: last of the pool": call.pool - 1 in live,
        "slot: empty row with a live slot": bool(live & empty),
    }


def _memory(case: Case) -> Flags:
    layouts, specs = case.layouts, case.call.tensors()
    strided = [n for n in layouts if specs[n].index and any(layouts[n].gaps)]
    slots = [n for n, spec in specs.items() if spec.index and spec.axes == ("row",) and "indices" in n]
    return {
        "memory: dense": not layouts and not case.pages,
        "memory: odd offset": any(x.offset % 2 for x in layouts.values()),
        "memory: odd stride": any(gap % 2 for x in layouts.values() for gap in x.gaps),
        "memory: other order": any(x.order for x in layouts.values()),
        "memory: shared page": bool(case.pages),
        "memory: fence": any(x.fence != "none" for x in layouts.values())
        or any(page.fence != "none" for page in case.pages),
        "index: strided": bool(strided),
        "index: strided, one row": case.call.rows == 1 and any(layouts.get(n, DENSE).gaps for n in slots),
        "index: int64": any(spec.dtype == "int64" for spec in specs.values()),
    }


def _heads(call: Verify | Commit | Serve) -> Flags:
    bound = call.lower_bound
    return {
        "dims: K != V": call.key_dim != call.value_dim,
        "dims: masked K": not math.log2(call.key_dim).is_integer(),
        "dims: several value blocks": call.value_dim > 32,
        "dims: 128": call.key_dim == call.value_dim == 128,
        "records: row": call.records == "row",
        "records: slot": call.records == "slot",
        "records: spare rows": call.records == "row" and call.capacity > call.rows,
        "gate: bounded": bound is not None,
        "gate: unbounded": bound is None,
        "gate: bound 0": bound == 0.0,
        "gate: |bound| * Q above 88": bound is not None and -bound * call.window > 88.0,
    }


def _dtypes(field: str, value: str, *names: str) -> Flags:
    return {f"{field}: {name}": value == name for name in names}


def _verify(call: Verify) -> Flags:
    return {
        **_heads(call),
        **_dtypes("activation", call.activation, "float32", "bfloat16", "float16"),
        **_dtypes("state", call.state, "float32", "bfloat16"),
        "out: other dtype": call.out != call.activation,
        "out: allocated by the callee": not call.own_out,
    }


def _conv(call: ConvUpdate | ConvPrefill) -> Flags:
    return {
        **{f"width: {width}": call.width == width for width in (2, 3, 4)},
        **_dtypes("activation", call.activation, "float32", "bfloat16", "float16"),
        "bias: none": call.bias is None,
        "bias: there": call.bias is not None,
        "silu": call.silu,
        "identity": not call.silu,
        "dims: several channel blocks": call.channels > 256,
        "dims: masked channels": not math.log2(call.channels).is_integer(),
    }


def _roundings(call: ConvUpdate | ConvPrefill) -> Flags:
    return {
        "products: rounded to bfloat16": call.conv == call.taps == "bfloat16",
        "products: float32": not call.conv == call.taps == "bfloat16",
        "state: rounds the input": call.conv == "bfloat16" != call.activation,
        "row: spare columns": call.state_len > call.width - 1,
    }


def _update(call: ConvUpdate) -> Flags:
    counts = [a for i, a in enumerate(call.accepted) if call.live(i)]
    return {
        **_conv(call),
        **_roundings(call),
        **{f"width: {width}": call.width == width for width in (5, 6)},
        **{f"form: {form}": call.form == form for form in ("varlen", "batch", "single")},
        "counts: none": not call.accepted,
        "counts: one": 1 in counts,
        "counts: several": any(a > 1 for a in counts),
        "counts: none, short row": not call.accepted
        and any(call.live(i) and call.qlens[i] < call.window for i in range(call.rows)),
        "null: none": call.null_block is None,
        "null: none, slot 0 live": call.null_block is None and 0 in call.slots,
        "out: in place": call.in_place,
        "out: the cast input": call.cast,
        "out: the caller's": call.own_out,
    }


def _prefill(call: ConvPrefill) -> Flags:
    live = [i for i in range(call.rows) if call.live(i)]
    return {
        **_conv(call),
        **_roundings(call),
        **_sequences(call),
        "row: short, continued": any(call.initial[i] and call.qlens[i] < call.width - 1 for i in live),
        "row: short, new": any(not call.initial[i] and call.qlens[i] < call.width - 1 for i in live),
    }


def _sequences(call: ConvPrefill) -> Flags:
    live = [i for i in range(call.rows) if call.live(i)]
    return {
        "row: continued": any(call.initial[i] for i in live),
        "row: new": any(not call.initial[i] for i in live),
        "row: over 64 tokens": any(call.qlens[i] > 64 for i in live),
        "rows: over 32": call.rows > 32,
    }


def _packed(call: PackedConv) -> Flags:
    flags = {**_conv(call), **_sequences(call), "planes: several": call.channels > call.part_dim}
    return {name: on for name, on in flags.items() if name not in ("width: 2", "width: 3")}


def _commit(call: Commit) -> Flags:
    return {
        **_heads(call),
        **_dtypes("state", call.state, "float32", "bfloat16"),
        **_dtypes("conv", call.conv, "float32", "bfloat16"),
        "layers: one": call.layers == 1,
        "layers: several": call.layers > 1,
        "conv: dim first": call.dim_first,
        "conv: token major": not call.dim_first,
        "conv: one column": call.history == 1,
        "requests: none": not call.requests,
        "requests: permuted": bool(call.requests) and call.requests != tuple(range(call.rows)),
        "requests: spare": len(call.accepted) > call.rows,
        **commit.counts(call),
        **commit.blocks(call),
        **commit.slots(call),
    }


def _fused(call: FusedVerify) -> Flags:
    counts = [a for i, a in enumerate(call.accepted) if call.live(i)]
    return {
        "heads: one": call.heads == 1,
        "heads: several": call.heads > 1,
        "window: eight": call.window == 8,
        "records: spare rows": call.capacity > call.rows,
        "gate: bound 0": call.lower_bound == 0.0,
        "gate: |bound| * Q above 80": -call.lower_bound * call.window > 80.0,
        "conv: dim first": call.dim_first,
        "conv: token major": not call.dim_first,
        "products: rounded to bfloat16": call.taps == "bfloat16",
        "products: float32": call.taps == "float32",
        "counts: one": 1 in counts,
        "counts: several": any(a > 1 for a in counts),
    }


def _paths(case: Case) -> Flags:
    """The path, and what of dim-first memory makes it plain: each is read differently."""
    call, path = case.call, case.path
    assert isinstance(call, FusedVerify)
    spots = placed(call.tensors(), case.layouts, case.pages)
    plain = path == "plain" and call.dim_first
    rows = [spots[name].strides[0] % 8 != 0 for name in ("mixed_qkv", "raw_gate")]
    conv = spots["conv_state"].strides
    return {
        **{f"path: {name}": path == name for name in ("warp-specialised", "plain", "declined")},
        "path: none to tell": path == "",
        "plain: projection rows": plain and rows[0],
        "plain: gate rows": plain and rows[1],
        "plain: conv rows": plain and (conv[1] != call.state_len or conv[0] % 8 != 0),
        "plain: taps": plain and spots["conv_weight"].strides[0] != WIDTH,
    }


def _serve(call: Serve) -> Flags:
    decoded = [
        (a, n) for a, n, kind in zip(call.accepted, call.qlens, call.kinds, strict=True) if kind == "decode"
    ]
    reused = [call.slots[i] for i in range(call.rows) if call.kinds[i] == "finish"]
    kinds = ("dims: K != V", "records: row", "records: slot", "gate: bounded", "gate: unbounded")
    return {
        **{name: on for name, on in _heads(call).items() if name in kinds},
        **_dtypes("activation", call.activation, "float32", "bfloat16", "float16"),
        **_dtypes("state", call.state, "float32", "bfloat16"),
        **_dtypes("conv", call.conv, "float32", "bfloat16"),
        **{f"event: {kind}": kind in call.kinds for kind in ("prefill", "decode", "plain", "finish", "pad")},
        "event: cached": "cached" in call.kinds and call.block_size > 0,
        "event: request used again": any(r in call.slots[call.slots.index(r) + 1 :] for r in reused),
        "mode: plain": not call.block_size,
        "mode: blocks": call.block_size > 0,
        "counts: all rejected but one": any(a == 1 < n for a, n in decoded),
        "counts: zero": any(a <= 0 for a, _ in decoded),
        "counts: over the query": any(a > n for a, n in decoded),
        "steps: over 20": len(set(call.steps)) > 20,
    }


_KINDS: dict[str, Callable[[Any], Flags]] = {
    "verify": _verify,
    "conv_update": _update,
    "conv_prefill": _prefill,
    "packed_conv": _packed,
    "commit": _commit,
    "fused_verify": _fused,
    "serve": _serve,
}


def _all(op: str) -> tuple[str, ...]:
    """Every bucket of an operation: the names do not depend on the case, so any call gives them."""
    call = EXAMPLES[op]
    unreachable = UNREACHABLE.get(op, ())
    relations = ("none", *(name.title().replace("_", "") for name in call.relations))
    return (
        *(name for name in _flags(Case(call=call)) if name not in unreachable),
        *(name for name in memory.names(_tensors(op)) if name not in unreachable),
        *(f"dtypes: {name}" for name in dtypes.combinations(op)),
        *sorted(_OF_VALUES[op]),
        "values: plain",
        "values: unusual",
        *(("values: not finite",) if op != "serve" else ()),
        *((PAST_A_BOUNDARY,) if op == "commit" else ()),
        *(f"relation: {name}" for name in relations),
    )


def _tensors(op: str) -> list[TensorSpec]:
    """Every tensor that a caller of the operation may pass; those of serving are the engine's."""
    if op == "serve":
        return []
    calls = (EXAMPLES[op], *(msgspec.structs.replace(EXAMPLES[op], **more) for more in _OPTIONAL.get(op, ())))
    return list({name: spec for call in calls for name, spec in call.tensors().items()}.values())


_DECAYS = frozenset(f"decay: {name}" for name in values.DECAYS)
_KEYS = frozenset(f"keys: {name}" for name in values.KEYS)
_NONE: frozenset[str] = frozenset()
_OF_VALUES: dict[str, frozenset[str]] = {
    "verify": _DECAYS | _KEYS,
    "conv_update": _NONE,
    "conv_prefill": _NONE,
    "packed_conv": _NONE,
    "commit": _DECAYS | {"keys: eps decides", "keys: zero"},
    "fused_verify": (_DECAYS - {"decay: past the range", "decay: across the range"})
    | _KEYS
    | {"decay: near the range"},
    "serve": _DECAYS - {"decay: past the range", "decay: across the range"},
}
"""Per operation, what its values may come to; a fused verify's contract ends before e**-88."""
_OPTIONAL: dict[str, tuple[dict[str, Any], ...]] = {
    "conv_update": ({"accepted": (1,), "bias": "float32"},),
    "conv_prefill": ({"bias": "float32"},),
    "packed_conv": ({"bias": "float32"},),
    "commit": ({"requests": (0,), "block_size": 1, "computed": (0,), "table": ((1,),)},),
}
"""Fields of calls that have the tensors which the smallest call lacks."""
_ROW: dict[str, Any] = {"pool": 2, "qlens": (1,), "slots": (1,), "ids": (0,)}
_HEAD: dict[str, Any] = {"heads": 1, "key_dim": 1, "value_dim": 1, "window": 1, "capacity": 1}
_CONV: dict[str, Any] = {"channels": 64, "state_len": 3}
EXAMPLES: dict[str, Any] = {
    "verify": Verify(**_ROW, **_HEAD),
    "conv_update": ConvUpdate(**_ROW, **_CONV, window=1),
    "conv_prefill": ConvPrefill(**_ROW, **_CONV, most_tokens=1, initial=(True,)),
    "packed_conv": PackedConv(**_ROW, **_CONV, most_tokens=1, initial=(True,), part_dim=64),
    "commit": Commit(**_ROW, **_HEAD, channels=1, state_len=3, accepted=(1,)),
    "fused_verify": FusedVerify(**_ROW, heads=1, window=1, capacity=1, accepted=(1,)),
    "serve": Serve(**_ROW, **_HEAD, kinds=("prefill",), steps=(0,), accepted=(0,)),
}
"""The smallest call of every operation."""
UNREACHABLE: dict[str, tuple[str, ...]] = {
    "commit": ("tokens: padding",),
    "fused_verify": (
        *("index: strided", "index: strided, one row", "index: int64", "memory: other order"),
        *(f"{name}: address off 16 bytes" for name in STATIC),
        "state: leading stride off 16 bytes",
    ),
}
"""Buckets that an operation's contract leaves nothing in."""
BUCKETS: dict[str, tuple[str, ...]] = {op: _all(op) for op in CALLS}
"""Per operation, every bucket there is."""
