"""What a case reaches, as names: the events a campaign counts, each with a reason to be there.

A bucket that no run reaches is a hole in the strategies; ``BUCKETS`` lists them all so that
a missing one can be told from one that does not exist.
"""

import math

from oracle.case import PAD_SLOT, Case, Verify
from oracle.layout import DENSE

BUCKETS: dict[str, tuple[str, ...]] = {
    "verify": (
        "rows: none",
        "rows: one",
        "rows: several",
        "row: full window",
        "row: partial",
        "row: one token",
        "row: empty first",
        "row: empty middle",
        "row: empty last",
        "row: all empty",
        "slot: null 0",
        "slot: null -1",
        "slot: null in the middle",
        "slot: last of the pool",
        "slot: empty row with a live slot",
        "tokens: padding",
        "tokens: last row ends at T",
        "dims: K != V",
        "dims: masked K",
        "dims: several value blocks",
        "dims: 128",
        "records: row",
        "records: slot",
        "records: spare rows",
        "activation: float32",
        "activation: bfloat16",
        "activation: float16",
        "state: float32",
        "state: bfloat16",
        "out: other dtype",
        "out: allocated by the callee",
        "gate: bounded",
        "gate: unbounded",
        "gate: bound 0",
        "gate: |bound| * Q above 88",
        "index: int64",
        "index: strided",
        "index: strided, one row",
        "memory: dense",
        "memory: odd offset",
        "memory: odd stride",
        "memory: other order",
        "memory: shared page",
        "memory: fence",
        "values: plain",
        "values: unusual",
        "values: not finite",
        "relation: none",
        "relation: Repeat",
        "relation: OtherPoison",
        "relation: Prefix",
        "relation: Hostile",
        "relation: Permute",
        "relation: Rename",
        "relation: Relayout",
    )
}


def buckets(case: Case) -> frozenset[str]:
    """The buckets of ``BUCKETS`` that the case falls into."""
    call = case.call
    reached = {*_rows(call), *_slots(call), *_kinds(call), *_memory(case)}
    reached.add(f"relation: {type(case.relation).__name__}" if case.relation else "relation: none")
    reached.add("values: unusual" if case.regimes else "values: plain")
    if "specials" in case.regimes.values():
        reached.add("values: not finite")
    return frozenset(reached)


def _rows(call: Verify) -> set[str]:
    n, lengths = call.rows, call.qlens
    found = {"rows: none" if n == 0 else "rows: one" if n == 1 else "rows: several"}
    flags = {
        "row: full window": call.window in lengths,
        "row: partial": any(1 < x < call.window for x in lengths),
        "row: one token": 1 in lengths,
        "row: empty first": lengths[:1] == (0,),
        "row: empty middle": 0 in lengths[1:-1],
        "row: empty last": lengths[-1:] == (0,),
        "row: all empty": n > 0 and not any(lengths),
        "tokens: padding": call.tail > 0,
        "tokens: last row ends at T": n > 0 and call.tail == 0 and lengths[-1] > 0,
    }
    return found | {name for name, on in flags.items() if on}


def _slots(call: Verify) -> set[str]:
    null = [slot <= 0 and qlen > 0 for slot, qlen in zip(call.slots, call.qlens, strict=True)]
    live = {call.slots[i] for i in range(call.rows) if call.live(i)}
    empty = {s for s, qlen in zip(call.slots, call.qlens, strict=True) if qlen == 0}
    flags = {
        "slot: null 0": any(on and s == 0 for on, s in zip(null, call.slots, strict=True)),
        "slot: null -1": any(on and s == PAD_SLOT for on, s in zip(null, call.slots, strict=True)),
        "slot: null in the middle": any(null[1:-1]),
        "slot: last of the pool": call.pool - 1 in live,
        "slot: empty row with a live slot": bool(live & empty),
    }
    return {name for name, on in flags.items() if on}


def _kinds(call: Verify) -> set[str]:
    bound = call.lower_bound
    flags = {
        "dims: K != V": call.key_dim != call.value_dim,
        "dims: masked K": not math.log2(call.key_dim).is_integer(),
        "dims: several value blocks": call.value_dim > 32,
        "dims: 128": call.key_dim == call.value_dim == 128,
        f"records: {call.records}": True,
        "records: spare rows": call.records == "row" and call.capacity > call.rows,
        f"activation: {call.activation}": True,
        f"state: {call.state}": True,
        "out: other dtype": call.out != call.activation,
        "out: allocated by the callee": not call.own_out,
        "gate: unbounded" if bound is None else "gate: bounded": True,
        "gate: bound 0": bound == 0.0,
        "gate: |bound| * Q above 88": bound is not None and -bound * call.window > 88.0,
        "index: int64": "int64" in (call.starts_dtype, call.slots_dtype),
    }
    return {name for name, on in flags.items() if on}


def _memory(case: Case) -> set[str]:
    layouts, specs = case.layouts, case.call.tensors()
    strided_index = [n for n in layouts if specs[n].index and any(layouts[n].gaps)]
    flags = {
        "memory: dense": not layouts and not case.pages,
        "memory: odd offset": any(x.offset % 2 for x in layouts.values()),
        "memory: odd stride": any(gap % 2 for x in layouts.values() for gap in x.gaps),
        "memory: other order": any(x.order for x in layouts.values()),
        "memory: shared page": bool(case.pages),
        "memory: fence": any(x.fence != "none" for x in layouts.values())
        or any(page.fence != "none" for page in case.pages),
        "index: strided": bool(strided_index),
        "index: strided, one row": case.call.rows == 1
        and any(layouts.get(n, DENSE).gaps for n in ("state_indices",)),
    }
    return {name for name, on in flags.items() if on}
