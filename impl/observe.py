"""``observe(case, implementation, device) -> Observation``: run one call and say what it did."""

import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from impl.arena import Arena
from impl.contract import Implementation, Records, UnavailableError, one_line
from impl.devices.base import Device
from impl.settings import settings_kept
from oracle.case import Case
from oracle.expectation import Observation
from oracle.values import Values, build

Views = dict[str, torch.Tensor]


def observe(
    case: Case, implementation: Implementation, device: Device, values: Values | None = None
) -> Observation:
    """Lay the case out on ``device``, call the implementation once, and read everything back.

    An exception of the implementation is part of the observation. ``UnavailableError``: the
    implementation cannot take this case at all.
    """
    refusal = implementation.takes(case)
    if refusal:
        raise UnavailableError(refusal)
    function = implementation.variants(case.op)[case.call.records]
    arena = Arena(case, values if values is not None else build(case), device)
    returned: Views = {}
    raised = ""
    try:
        with settings_kept():
            returned = BINDINGS[case.op](case, arena.views(), function)
        arena.finish()
        returned = {name: tensor.detach().cpu() for name, tensor in returned.items()}
        path = one_line(implementation.path())
    except Exception as error:  # whatever a kernel raises is its result
        raised, path = _describe(error), ""
    after = arena.dense(arena.after)
    after |= returned if not raised else {}
    return Observation(
        before=arena.dense(arena.before),
        after=after,
        strays=arena.strays(),
        raised=raised,
        path=path,
        device=device.name,
        arithmetic=implementation.arithmetic,
    )


def call_verify(case: Case, views: Views, function: Callable[..., object]) -> Views:
    """Call a verify by keywords; returns the output it allocated, if the case passes none."""
    call = case.call
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
    result = function(**arguments, out=out)
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"verify must return its output tensor; it returned {type(result).__name__}")
    if out is not None:
        same = result.dtype == out.dtype and result.shape == out.shape and result.stride() == out.stride()
        if not same or result.data_ptr() != out.data_ptr():
            raise ValueError("verify was given out and must return it; it returned another tensor")
        return {}
    if result.dtype != views["v"].dtype:
        raise ValueError(f"verify without out returns {views['v'].dtype}; it returned {result.dtype}")
    return {"out": result[0]}


BINDINGS: dict[str, Callable[[Case, Views, Callable[..., object]], Views]] = {"verify": call_verify}
"""Per operation, how its public signature is called with a case's tensors."""


def _describe(error: Exception) -> str:
    try:
        text = one_line(error)
    except Exception:  # its own __str__ may be at fault
        text = ""
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + _place(error)


def _place(error: Exception) -> str:
    """Where it was raised: the last line of the traceback, and of the kernel's own that led there."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    if not frames:
        return ""
    places = dict.fromkeys(f"{Path(f.filename).name}:{f.lineno}" for f in (frames[0], frames[-1]))
    return f" (at {', '.join(places)})"
