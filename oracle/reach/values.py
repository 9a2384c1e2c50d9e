"""What the values of a case come to: decay sums of its windows, and angles between their keys.

A regime says what was aimed at; these are the numbers themselves. Of a batch the first live row is
looked at, in plain float64: a bucket needs no error bound, and is told for every example.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from oracle.calls.base import Call
from oracle.calls.commit import Commit
from oracle.calls.fused_verify import WIDTH, FusedVerify
from oracle.calls.serve import Serve
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.layout import TensorSpec
from oracle.values import peek

Array = npt.NDArray[Any]
Flags = dict[str, bool]
HEADS = 2
"""Heads that are looked at where each has values of its own."""
KEPT = 2.0**-9
"""A decay sum up to here leaves the bits of a bf16 state as they are."""
GONE = 17.3
"""One past 25 bits leaves an fp32 state nothing beside a number of its size."""
RANGE = 88.0
"""Past it e**-L is no fp32 number, and e**L no normal one."""
EPS = 1e-6

DECAYS = ("none", "slow", "moderate", "full", "mixed in a head", "past the range", "across the range")
KEYS = ("orthogonal", "at an angle", "nearly equal", "eps decides", "zero")


def reached(case: Case) -> set[str]:
    """The buckets of the case's decays and keys; empty for operations without them."""
    look = _LOOKS.get(case.op)
    if look is None:
        return set()
    found: set[str] = set()
    with np.errstate(all="ignore"):  # regimes that are not finite are in no bucket
        seen = look(case, case.call)
        if seen is not None:
            found |= {f"decay: {name}" for name, on in decays(seen[0]).items() if on}
        if seen is not None and seen[1] is not None:
            found |= {f"keys: {name}" for name, on in angles(seen[1]).items() if on}
    return found


def decays(g: Array) -> Flags:
    """Classes of the log decays [H, n, K] of a window, by head: of its median channel, or of its ends."""
    sums = -np.cumsum(g, 1)  # [H, n, K]
    total = sums[:, -1]
    typical = np.median(total, -1)
    low, high = total.min(-1), total.max(-1)
    across = (sums[:, 0] <= RANGE) & (total > RANGE)
    flags = {
        "none": (typical <= KEPT).any(),
        "slow": ((typical > KEPT) & (typical <= math.log(2.0))).any(),
        "moderate": ((typical > math.log(2.0)) & (typical <= GONE)).any(),
        "full": (typical > GONE).any(),
        "mixed in a head": ((low <= math.log(2.0)) & (high > GONE)).any(),
        "past the range": (high > RANGE).any(),
        "near the range": (high > 80.0).any(),
        "across the range": across.any(),
    }
    return {name: bool(on) for name, on in flags.items()}


def angles(k: Array) -> Flags:
    """Classes of the keys [H, n, K] of a window: of single ones, and of any two of a head."""
    size = (k * k).sum(-1)
    unit = k / np.sqrt(size + EPS)[..., None]
    cosine = np.abs(unit @ np.swapaxes(unit, -1, -2))[:, *np.triu_indices(k.shape[1], 1)]
    flags = {
        "orthogonal": (cosine < 2.0**-7).any(),
        "at an angle": ((cosine > 0.1) & (cosine < 0.9)).any(),
        "nearly equal": (cosine > 0.99).any(),
        "eps decides": ((size > 0.0) & (size < 10.0 * EPS)).any(),
        "zero": (size == 0.0).any(),
    }
    return {name: bool(on) for name, on in flags.items()}


Look = tuple[Array, Array | None] | None
"""Log decays and keys [H, n, K] of a window, if there is one."""


def _verify(case: Case, call: Verify) -> Look:
    row = _first(call)
    if row is None:
        return None
    specs, n = few_heads(call), call.qlens[row]
    return log_decays(case, specs, peek(case, specs["raw_g"], row)[:, :n]), peek(case, specs["k"], row)[:, :n]


def _commit(case: Case, call: Commit) -> Look:
    """Of the first layer."""
    row = next((row for row in range(call.rows) if call.plan(row).writes), None)
    if row is None:
        return None
    specs = {name.removesuffix(".0"): spec for name, spec in few_heads(call).items()}
    both = peek(case, specs["key_gate"], row)[:, : call.plan(row).n]
    return log_decays(case, specs, both[..., call.key_dim :]), both[..., : call.key_dim]


def _fused(case: Case, call: FusedVerify) -> Look:
    row = _first(call)
    if row is None:
        return None
    specs, n = call.tensors(), call.qlens[row]
    raw = peek(case, specs["raw_gate"], row)[:n].reshape(n, call.heads, call.key_dim).transpose(1, 0, 2)
    return log_decays(case, specs, raw), convolved_keys(case, call, specs, row)


def convolved_keys(case: Case, call: FusedVerify, specs: dict[str, TensorSpec], row: int) -> Array:
    """Keys [H, n, K] as the convolution makes them, less its roundings."""
    n, own = call.qlens[row], slice(call.heads * call.key_dim, 2 * call.heads * call.key_dim)
    stored = peek(case, specs["conv_state"], row)
    history = (stored if call.dim_first else stored.T)[own, call.first(row) : call.first(row) + WIDTH - 1]
    inputs = peek(case, specs["mixed_qkv"], row)[:n, own].T
    win, taps = np.concatenate((history, inputs), 1), peek(case, specs["conv_weight"])[own]
    y = sum(taps[:, j, None] * win[:, j : j + n] for j in range(WIDTH))
    y = y / (1.0 + np.exp(-y))
    return np.asarray(y).reshape(call.heads, call.key_dim, n).transpose(0, 2, 1)


def _serve(case: Case, call: Serve) -> Look:
    """Of the first window; its keys come of a history that only the engine knows."""
    row = next((i for i in range(call.rows) if call.kinds[i] == "decode" and call.live(i)), None)
    if row is None:
        return None
    specs = few_heads(call)
    return log_decays(case, specs, peek(case, specs["raw_g"], row)[:, : call.qlens[row]]), None


_LOOKS: dict[str, Callable[[Case, Any], Look]] = {
    "verify": _verify,
    "commit": _commit,
    "fused_verify": _fused,
    "serve": _serve,
}


def _first(call: Verify | FusedVerify) -> int | None:
    return next((row for row in range(call.rows) if call.live(row)), None)


def few_heads(call: Call) -> dict[str, TensorSpec]:
    """The call's tensors with no more heads than are looked at; a head's values are its own."""
    return {name: _fewer(spec) for name, spec in call.tensors().items()}


def _fewer(spec: TensorSpec) -> TensorSpec:
    pairs = zip(spec.axes, spec.shape, strict=True)
    shape = tuple(min(n, HEADS) if axis == "head" else n for axis, n in pairs)
    return msgspec.structs.replace(spec, shape=shape) if shape != spec.shape else spec


def log_decays(case: Case, specs: dict[str, TensorSpec], raw: Array) -> Array:
    """Log decays of raw gates [H, n, K]; the gate of ``oracle.gate``."""
    x = raw + peek(case, specs["dt_bias"]).reshape(raw.shape[0], 1, -1)
    a = np.exp(peek(case, specs["A_log"]))[:, None, None]
    bound = getattr(case.call, "lower_bound", None)
    g = -a * np.logaddexp(0.0, x) if bound is None else bound / (1.0 + np.exp(-a * x))
    return np.asarray(g)
