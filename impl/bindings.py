"""How each operation's public signature is called with a case's tensors.

A binding prepares the call: what it returns can be run, also while a CUDA graph is captured.
A run returns the tensors that the callee allocated, by name, and raises what a caller would
have to call wrong: another tensor than the one passed in, another dtype.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from impl.contract import Implementation, Records
from oracle.calls.commit import PLAN, Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify

Views = dict[str, torch.Tensor]
Function = Callable[..., Any]
Prepared = Callable[[], Views]


def call_verify(call: Verify, views: Views, function: Function, _: Implementation) -> Prepared:
    """``kda_recoverssm_verify``, token tensors with a leading 1."""
    arguments: dict[str, object] = {
        name: views[name].unsqueeze(0) for name in ("q", "k", "v", "raw_g", "raw_beta")
    }
    bias = views["dt_bias"]
    arguments |= {
        "A_log": views["A_log"],
        "dt_bias": bias.flatten() if call.flat_bias else bias,
        "lower_bound": call.lower_bound,
        "checkpoint_state": views["state"],
        "query_start_loc": views["query_start_loc"],
        "state_indices": views["state_indices"],
        "spec_query_len": call.window,
    }
    if call.records == "row":
        arguments["records"] = Records(views["correction"], views["key_gate"])
    else:
        arguments |= {"correction_cache": views["correction"], "kg_cache": views["key_gate"]}
    out = views["out"].unsqueeze(0) if call.own_out else None

    def run() -> Views:
        result = function(**arguments, out=out)
        if out is not None:
            _require_same("verify", "out", result, out)
            return {}
        _require_new("verify", result, views["v"].dtype)
        return {"out": result[0]}

    return run


def call_update(call: ConvUpdate, views: Views, function: Function, _: Implementation) -> Prepared:
    """``causal_conv1d_update``: x ``[T, C]``, ``[N, C, L]`` or ``[N, C]``."""

    def shaped(name: str) -> torch.Tensor:
        view = views[name]
        return view if call.form == "varlen" else view.mT if call.form == "batch" else view[:, 0]

    x = shaped("x")
    given = shaped("out") if call.own_out else x if call.in_place else None
    varlen: dict[str, object] = {}
    if call.form == "varlen":
        varlen = {"query_start_loc": views["query_start_loc"], "max_query_len": call.window}

    def run() -> Views:
        result = function(
            x=x,
            conv_state=views["conv_state"],
            weight=views["weight"],
            bias=views.get("bias"),
            activation="silu" if call.silu else None,
            conv_state_indices=views["conv_state_indices"],
            num_accepted_tokens=views.get("num_accepted_tokens"),
            null_block_id=call.null_block,
            out=given if call.own_out else None,
            **varlen,
        )
        if given is not None:
            _require_same("causal_conv1d_update", "out" if call.own_out else "x", result, given)
            return {}
        _require_new("causal_conv1d_update", result, x.dtype)
        form = {"varlen": lambda: result, "batch": lambda: result.mT, "single": lambda: result.unsqueeze(1)}
        return {"out": form[call.form]()}

    return run


def call_prefill(call: ConvPrefill, views: Views, function: Function, _: Implementation) -> Prepared:
    """``causal_conv1d_fn``: x and the result are ``[C, T]``."""

    def run() -> Views:
        result = function(
            x=views["x"].T,
            weight=views["weight"],
            bias=views.get("bias"),
            conv_states=views["conv_states"],
            query_start_loc=views["query_start_loc"],
            cache_indices=views["cache_indices"],
            has_initial_state=views["has_initial_state"],
            activation="silu" if call.silu else None,
        )
        _require_new("causal_conv1d_fn", result, views["x"].dtype)
        return {"out": result.T}

    return run


def call_packed(call: PackedConv, views: Views, function: Function, _: Implementation) -> Prepared:
    """``packed_causal_conv1d_fn``: x ``[T, C]``, the result ``[C // part_dim, T, part_dim]``."""

    def run() -> Views:
        result = function(
            x=views["x"],
            weight=views["weight"],
            bias=views.get("bias"),
            conv_states=views["conv_states"],
            query_start_loc=views["query_start_loc"],
            cache_indices=views["cache_indices"],
            has_initial_state=views["has_initial_state"],
            part_dim=call.part_dim,
            activation="silu" if call.silu else None,
        )
        _require_new("packed_causal_conv1d_fn", result, views["x"].dtype)
        if not result.is_contiguous():
            raise ValueError("packed_causal_conv1d_fn returns dense planes; it returned strided ones")
        return {"out": result}

    return run


def call_commit(call: Commit, views: Views, context: Any, implementation: Implementation) -> Prepared:
    """``KDARecoverSSMCommitContext.create(layers, ..)``, then ``.commit(..)``; gives the plan it left."""
    implementation.set_conv_state_dim_first(call.dim_first)
    made = context.create(
        [_layer(call, views, index) for index in range(call.layers)],
        spec_query_len=call.window,
        max_num_reqs=call.capacity,
    )

    def run() -> Views:
        result = made.commit(
            num_accepted_tokens=views["num_accepted_tokens"],
            state_indices=views["state_indices"],
            query_start_loc=views["query_start_loc"],
            request_indices=views.get("request_indices"),
            block_table=views.get("block_table"),
            num_computed_tokens=views.get("num_computed_tokens"),
            mamba_block_size=call.block_size or None,
        )
        if result is not None:
            raise TypeError(f"commit must return None; it returned {type(result).__name__}")
        return {name: getattr(made, name) for name in PLAN}

    return run


def _layer(call: Commit, views: Views, index: int) -> SimpleNamespace:
    """What commit reads of a model's layer."""
    conv, state, correction, key_gate = (
        views[f"{part}.{index}"] for part in ("conv_state", "state", "correction", "key_gate")
    )
    stored = conv if call.dim_first else conv.mT
    by_slot = (correction, key_gate) if call.records == "slot" else ()
    return SimpleNamespace(
        kv_cache=(stored, state, *by_slot),
        A_log=views[f"A_log.{index}"],
        dt_bias=views[f"dt_bias.{index}"].flatten(),
        local_num_heads=call.heads,
        head_dim=call.key_dim,
        gate_lower_bound=call.lower_bound,
        **({"recoverssm_records": Records(correction, key_gate)} if call.records == "row" else {}),
    )


class Launched(dict[str, torch.Tensor]):
    """What a fused verify left: it allocates nothing, but tells whether it declined the call."""

    def __init__(self, wrapper: Any, *, declined: bool) -> None:
        super().__init__()
        self.declined = declined
        self._wrapper = wrapper

    def check(self) -> None:
        """Raise ``ValueError`` unless the wrapper's work counter is zero; the device must be done."""
        left = int(self._wrapper.counter)
        if left:
            raise ValueError(
                f"the fused verify left its work counter at {left}; it must be 0 between launches"
            )


def call_fused_verify(call: FusedVerify, views: Views, wrapper: Any, _: Implementation) -> Prepared:
    """``CuteRecoverSSMVerify(..)``, ``.compile()``, then called by keyword, any number of times."""
    made = wrapper(
        num_heads=call.heads,
        window=call.window,
        conv_dim_first=call.dim_first,
        conv_weight_dtype=views["conv_weight"].dtype,
        device=views["state"].device,
    )
    made.compile()
    passed = views.keys() - {"correction", "key_gate"}
    arguments: dict[str, object] = {name: views[name] for name in passed}
    arguments |= {
        "lower_bound": call.lower_bound,
        "records": Records(views["correction"], views["key_gate"]),
    }

    def run() -> Views:
        result = made(**arguments)
        if not isinstance(result, bool):
            raise TypeError(f"a fused verify must return a bool; it returned {type(result).__name__}")
        return Launched(made, declined=not result)

    return run


def _require_same(function: str, name: str, result: object, given: torch.Tensor) -> None:
    """The result must be the tensor that was passed in, as an object or as a view of all of it."""
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{function} must return its output tensor; it returned {type(result).__name__}")
    same = result.dtype == given.dtype and result.shape == given.shape and result.stride() == given.stride()
    if not same or result.data_ptr() != given.data_ptr():
        raise ValueError(f"{function} was given {name} and must return it; it returned another tensor")


def _require_new(function: str, result: object, dtype: torch.dtype) -> None:
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"{function} must return its output tensor; it returned {type(result).__name__}")
    if result.dtype != dtype:
        raise ValueError(f"{function} without out returns {dtype}; it returned {result.dtype}")


BINDINGS: dict[str, Callable[[Any, Views, Any, Implementation], Prepared]] = {
    "verify": call_verify,
    "conv_update": call_update,
    "conv_prefill": call_prefill,
    "packed_conv": call_packed,
    "commit": call_commit,
    "fused_verify": call_fused_verify,
}
"""Per operation, how its public signature is called with a case's tensors."""
