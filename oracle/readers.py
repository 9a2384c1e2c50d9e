"""How each operation's arguments are read: the other direction of ``impl.bindings``.

Shapes and dtypes give the dimensions, query_start_loc and the slots the rows. ``ValueError`` in one
sentence for what is no call of the operation.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from oracle.calls import AnyCall
from oracle.calls.base import NULL_SLOT, numbering
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import WIDTH, FusedVerify
from oracle.calls.fused_verify import K as FUSED_K
from oracle.calls.verify import Verify
from oracle.passed import Passed, by_name
from oracle.plan import align

Arguments = Mapping[str, Any]
MOST_TABLE = 512
"""Entries of a block table that a case keeps; of a larger one, two columns a request."""


def passed(operation: str, arguments: Arguments) -> tuple[AnyCall, Passed]:
    """The call that these arguments make, all rows of it, and its tensors."""
    if operation not in READERS:
        raise ValueError(f"no operation {operation!r} to dump; there are {', '.join(READERS)}")
    found = Passed(operation, *by_name(arguments))
    call = READERS[operation](found)
    try:
        call = msgspec.convert(msgspec.to_builtins(call), type(call))
    except msgspec.ValidationError as error:
        raise ValueError(f"no call of {operation}: {error}") from None
    call.check()
    return call, found


def _verify(p: Passed) -> Verify:
    for name in ("q", "k", "v", "raw_g", "raw_beta", "out"):
        given = p.tensors.get(name)
        if given is not None and given.dim() == (3 if name == "raw_beta" else 4) and len(given) == 1:
            p.tensors[name] = given[0]
    for name in ("q", "k", "raw_g"):
        p.fit(name, "T", "H", "K")
    p.fit("v", "T", "H", "V")
    p.fit("raw_beta", "T", "H")
    p.fit("A_log", "H")
    p.fit("state", "S", "H", "V", "K")
    layout = p.number("record_layout", "row")
    leading = "S" if layout == "slot" else "R"
    p.fit("correction", leading, "H", "Q", "V")
    p.fit("key_gate", leading, "H", "Q", "2K")
    p.fit("out", "T", "H", "V")
    flat = "dt_bias" in p.tensors and p.tensors["dt_bias"].dim() == 1
    heads, key_dim = p.size("H", "heads"), p.size("K", "key_dim")
    _shape_bias(p, "dt_bias", heads, key_dim)
    qlens = p.starts()
    slots = p.rows("state_indices", len(qlens))
    activation = p.dtype("q", "k", "v", "raw_g", "raw_beta", default="bfloat16")
    return Verify(
        **p.batch(slots, qlens, "state_indices"),
        tail=p.tail(qlens),
        heads=heads,
        key_dim=key_dim,
        value_dim=p.size("V", "value_dim"),
        window=p.integer("spec_query_len") or p.size("Q", default=max((*qlens, 1))),
        capacity=0 if layout == "slot" else p.size("R", default=len(qlens)),
        records=layout,
        activation=activation,
        out=p.dtype("out", default=activation),
        state=p.dtype("state", default="float32"),
        lower_bound=p.bound(),
        flat_bias=flat,
        own_out="out" in p.tensors,
    )


def _shape_bias(p: Passed, name: str, heads: int, key_dim: int) -> None:
    bias = p.tensors.get(name)
    if bias is None:
        return
    if bias.numel() != heads * key_dim:
        raise ValueError(
            f"{name} must have {heads * key_dim} elements, one a key channel; found {bias.numel()}"
        )
    p.tensors[name] = bias.reshape(heads, key_dim)


def _conv(p: Passed, state: str) -> dict[str, Any]:
    """Fields that the convolutions share; dimensions are learned."""
    p.fit("weight", "C", "W")
    p.fit("bias", "C")
    p.fit(state, "S", "C", "P")
    conv = p.dtype(state, default="float32")
    bias = p.dtype("bias", default="")
    width = p.size("W", "width", WIDTH)
    return {
        "channels": p.size("C", "channels"),
        "width": width,
        "state_len": p.size("P", "state_len", width - 2 + (p.integer("max_query_len") or 1)),
        "activation": p.dtype("x", default="bfloat16"),
        "conv": conv,
        "taps": p.dtype("weight", default=conv),
        "bias": bias or None,
        "silu": p.number("activation", None) in ("silu", "swish", True),
    }


def _update(p: Passed) -> ConvUpdate:
    x = p.tensors.get("x")
    if x is None:
        raise ValueError("needs x: its shape says how the tokens come")
    form: Any = "varlen" if "query_start_loc" in p.tensors else "batch" if x.dim() == 3 else "single"
    for name in ("x", "out"):
        if name in p.tensors and form != "varlen":
            view = p.tensors[name]
            p.tensors[name] = view.mT if form == "batch" else view.unsqueeze(1)
        p.fit(name, *(("T", "C") if form == "varlen" else ("N", "L", "C")))
    fields = _conv(p, "conv_state")
    if form == "varlen":
        qlens = p.starts()
        window = p.integer("max_query_len") or max((*qlens, 1))
    else:
        window = p.size("L")
        qlens = (window,) * p.size("N")
    slots = p.rows("conv_state_indices", len(qlens))
    counts = p.integers("num_accepted_tokens") if "num_accepted_tokens" in p.tensors else []
    null = p.scalars.get("null_block_id", 0)
    if null not in (0, None):
        raise ValueError(f"null_block_id must be 0 or None; found {null!r}")
    return ConvUpdate(
        **p.batch(slots, qlens, "conv_state_indices"),
        **fields,
        tail=p.tail(qlens) if form == "varlen" else 0,
        window=window,
        accepted=tuple(counts),
        accepted_dtype=p.dtype("num_accepted_tokens", default="int32"),
        form=form,
        null_block=null,
        own_out="out" in p.tensors,
    )


def _prefill_fields(p: Passed) -> dict[str, Any]:
    fields = _conv(p, "conv_states")
    qlens = p.starts()
    slots = p.rows("cache_indices", len(qlens))
    held = "conv_states" in p.tensors
    initial = p.integers("has_initial_state") if "has_initial_state" in p.tensors else [held] * len(qlens)
    return {
        **p.batch(slots, qlens, "cache_indices"),
        **fields,
        "tail": p.tail(qlens),
        "silu": p.number("activation", "silu") in ("silu", "swish", True),
        "most_tokens": max((*qlens, 1)),
        "initial": tuple(map(bool, initial)),
    }


def _prefill(p: Passed) -> ConvPrefill:
    if "x" in p.tensors:
        p.tensors["x"] = p.tensors["x"].mT
    p.fit("x", "T", "C")
    return ConvPrefill(**_prefill_fields(p))


def _packed(p: Passed) -> PackedConv:
    p.fit("x", "T", "C")
    part_dim = p.integer("part_dim")
    if part_dim is None:
        raise ValueError("needs part_dim: it says how wide a plane is")
    return PackedConv(**_prefill_fields(p), part_dim=part_dim)


def _fused(p: Passed) -> FusedVerify:
    wrapper = p.number("self")
    first = p.number("conv_dim_first", getattr(wrapper, "conv_dim_first", True))
    p.sizes["K"] = FUSED_K
    p.fit("mixed_qkv", "T", "3HK")
    p.fit("raw_gate", "T", "HK")
    p.fit("raw_beta", "T", "H")
    p.fit("A_log", "H")
    if "dt_bias" in p.tensors:
        p.tensors["dt_bias"] = p.tensors["dt_bias"].reshape(-1)
    p.fit("dt_bias", "HK")
    p.fit("state", "S", "H", "K", "K")
    p.fit("correction", "R", "H", "Q", "K")
    p.fit("key_gate", "R", "H", "Q", "2K")
    p.fit("conv_state", "S", *(("3HK", "P") if first else ("P", "3HK")))
    p.fit("conv_weight", "3HK", str(WIDTH))
    p.fit("out", "T", "HK")
    qlens = p.starts()
    slots = p.rows("state_indices", len(qlens))
    given, bound = "num_accepted_tokens" in p.tensors, p.bound()
    window = getattr(wrapper, "window", None) or p.integer("window") or p.sizes.get("Q")
    for name in ("mixed_qkv", "raw_gate", "raw_beta", "state", "key_gate", "conv_state", "out"):
        if p.dtype(name, default="bfloat16") != "bfloat16":
            raise ValueError(f"{name} of a fused verify is bfloat16; found {p.tensors[name].dtype}")
    return FusedVerify(
        **p.batch(slots, qlens, "state_indices"),
        tail=p.tail(qlens),
        heads=p.size("H", "heads"),
        window=window or p.size("P", "window", (max((*qlens, 1))) + WIDTH - 2) - WIDTH + 2,
        capacity=p.size("R", default=len(qlens)),
        accepted=tuple(p.integers("num_accepted_tokens")) if given else (1,) * len(qlens),
        dim_first=bool(first),
        taps=p.dtype("conv_weight", default="bfloat16"),
        lower_bound=-5.0 if bound is None else bound,
    )


_PARTS = {"conv_states": "conv_state", "checkpoints": "state", "correction_caches": "correction"}
_PARTS |= {"kg_caches": "key_gate", "A_log": "A_log", "dt_bias": "dt_bias"}


def _spread(p: Passed) -> int:
    """Take a context's tensors apart, a name a layer; returns how many layers there are."""
    context = p.number("self")
    for attribute, kind in _PARTS.items():
        for layer, tensor in enumerate(getattr(context, attribute, ())):
            p.tensors[f"{kind}.{layer}"] = tensor
    if context is not None:
        p.scalars |= {"lower_bound": context.lower_bound, "spec_query_len": context.spec_query_len}
        p.sizes["R"] = len(context.commit_lens)
    layers = [int(name.partition(".")[2]) for name in p.tensors if re.fullmatch(r"[a-zA-Z_]+\.\d{1,3}", name)]
    if sorted(set(layers)) != list(range(max(layers, default=-1) + 1)) or not layers:
        raise ValueError(
            "needs its layers' tensors as conv_state.0, state.0, .. from layer 0 on, or the context"
        )
    return max(layers) + 1


def _commit(p: Passed) -> Commit:
    layers = _spread(p)
    for layer in range(layers):
        p.fit(f"conv_state.{layer}", "S", "C", "P")
        p.fit(f"state.{layer}", "S", "H", "V", "K")
        p.fit(f"A_log.{layer}", "H")
    kind: Any = p.number("record_layout") or _record_layout(p)
    heads = p.size("H", "heads")
    for layer in range(layers):
        p.fit(f"correction.{layer}", "S" if kind == "slot" else "R", "H", "Q", "V")
        p.fit(f"key_gate.{layer}", "S" if kind == "slot" else "R", "H", "Q", "2K")
        _shape_bias(p, f"dt_bias.{layer}", heads, p.size("K", "key_dim"))
    qlens = p.starts()
    slots = p.rows("state_indices", len(qlens))
    counts = "num_accepted_tokens" in p.tensors
    accepted = p.integers("num_accepted_tokens") if counts else list(qlens)
    requests = p.integers("request_indices") if "request_indices" in p.tensors else []
    window = p.integer("spec_query_len") or p.size("Q", "spec_query_len")
    blocks, others = _blocks(p, slots, qlens, requests, accepted, window)
    first = p.tensors.get("conv_state.0")

    def named(part: str) -> list[str]:
        return [f"{part}.{layer}" for layer in range(layers)]

    return Commit(
        **p.batch(slots, qlens, "state_indices", others),
        **blocks,
        layers=layers,
        heads=heads,
        key_dim=p.size("K", "key_dim"),
        value_dim=p.size("V", "value_dim"),
        window=window,
        channels=p.size("C", default=1),
        state_len=p.size("P", default=window),
        capacity=p.size("R", default=len(qlens)),
        accepted=tuple(max(-(1 << 16), min(n, 1 << 16)) for n in accepted),
        requests=tuple(requests),
        records=kind,
        dim_first=first is None or first.stride(1) >= first.stride(2),
        activation=p.dtype(*named("key_gate"), default="bfloat16"),
        state=p.dtype(*named("state"), default="float32"),
        conv=p.dtype(*named("conv_state"), default="float32"),
        lower_bound=p.bound(),
        accepted_dtype=p.dtype("num_accepted_tokens", default="int32"),
        requests_dtype=p.dtype("request_indices", default="int32"),
        computed_dtype=p.dtype("num_computed_tokens", default="int32"),
        table_dtype=p.dtype("block_table", default="int32"),
    )


def _record_layout(p: Passed) -> str:
    """Records lie by slot where there are as many as slots and not as many as requests."""
    records = p.tensors.get("correction.0", p.tensors.get("key_gate.0"))
    by_slot = records is not None and len(records) == p.sizes.get("S") != p.sizes.get("R")
    return "slot" if by_slot else "row"


def _blocks(
    p: Passed,
    slots: list[int],
    qlens: tuple[int, ...],
    requests: list[int],
    accepted: list[int],
    window: int,
) -> tuple[dict[str, Any], list[int]]:
    """Fields of the block mode, and the slots that plans ask for beside the rows': the table keeps those."""
    size = p.integer("mamba_block_size")
    if not size:
        for name in ("block_table", "num_computed_tokens"):
            p.tensors.pop(name, None)
        return {}, []
    if "block_table" not in p.tensors or "num_computed_tokens" not in p.tensors:
        raise ValueError("a commit with mamba_block_size needs block_table and num_computed_tokens")
    computed, table = p.integers("num_computed_tokens"), p.tensors["block_table"].tolist()
    if (
        p.tensors["block_table"].dim() != 2
        or len(table) != len(computed)
        or not p.tensors["block_table"].numel()
    ):
        raise ValueError("block_table must be [requests, columns], a row for each of num_computed_tokens")
    if len(accepted) != len(table):
        raise ValueError("block_table and num_accepted_tokens must have one entry a request")
    named = requests or list(range(len(qlens)))
    if any(not 0 <= r < len(table) for r in named):
        raise ValueError("a row names a request that block_table does not have")
    if len(table) * len(table[0]) > MOST_TABLE:
        table, computed = _first_blocks(table, computed, size)
    plans = {
        r: align(slot, qlen, window, accepted[r], computed[r], size, tuple(table[r]))
        for slot, qlen, r in zip(slots, qlens, named, strict=True)
    }
    used = {r: {plan.final, plan.boundary} for r, plan in plans.items()}
    others = [slot for r in used for slot in sorted(used[r])]
    names = numbering((*slots, *others))
    kept = [
        tuple(names[s] if s > NULL_SLOT and s in used.get(r, ()) else min(s, NULL_SLOT) for s in columns)
        for r, columns in enumerate(table)
    ]
    return {"block_size": size, "computed": tuple(computed), "table": tuple(kept)}, others


def _first_blocks(
    table: list[list[int]], computed: list[int], size: int
) -> tuple[list[list[int]], list[int]]:
    """Every request moved into its first block, with that column and the next."""
    width = len(table[0])
    at = [nc // size for nc in computed]
    moved = [[t[min(c, width - 1)], t[min(c + 1, width - 1)]] for t, c in zip(table, at, strict=True)]
    return moved, [nc % size for nc in computed]


READERS: dict[str, Callable[[Passed], AnyCall]] = {
    "verify": _verify,
    "conv_update": _update,
    "conv_prefill": _prefill,
    "packed_conv": _packed,
    "commit": _commit,
    "fused_verify": _fused,
}
"""Per operation, how its arguments are read; a script of serving is no call."""
