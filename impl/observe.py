"""``observe(case, implementation, device) -> Observation``: run one call and say what it did."""

import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from impl.arena import Arena
from impl.bindings import BINDINGS, Launched, Views
from impl.contract import Implementation, UnavailableError, one_line
from impl.devices.base import Device, Variant
from impl.settings import settings_kept
from oracle.calls import AnyCall
from oracle.case import Case
from oracle.expectation import DECLINED, Observation
from oracle.values import Values, build


def observe(
    case: Case,
    implementation: Implementation,
    device: Device,
    values: Values | None = None,
    *,
    replayed: bool = False,
) -> Observation:
    """Lay the case out on ``device``, call the implementation once, and read everything back.

    ``replayed``: as the replay of a captured graph, on a device that has graphs.

    An exception of the implementation is part of the observation. ``UnavailableError``: the
    implementation cannot take this case at all.
    """
    refusal = implementation.takes(case)
    if refusal:
        raise UnavailableError(refusal)
    arena = Arena(case, values if values is not None else build(case), device)
    runs: list[_Run] = []
    differs = ""
    for variant in device.variants(case.seed):
        if runs:
            arena.restore()
        runs.append(_run(case, implementation, device, arena, variant, replayed))
        again = len(runs) > 1 and not runs[-1].raised
        different = arena.difference(runs[0].image) if again else ""
        if different:
            differs = f"schedules {runs[0].name} and {variant.name} leave different bytes, {different}"
        if different or runs[-1].raised:
            break
    # What failed, or else what came first: the others left the same.
    told = runs[-1] if runs[-1].raised else runs[0]
    after = arena.dense(told.image)
    after |= told.returned
    return Observation(
        before=arena.dense(arena.before),
        after=after,
        strays=arena.strays(),
        raised=told.raised,
        path=told.path,
        device=device.name,
        arithmetic=implementation.arithmetic,
        differs=differs,
        returned={f"{told.name} and {other.name}": other.returned for other in runs if other is not told},
    )


@dataclass(frozen=True)
class _Run:
    """What one variant of a device left."""

    name: str
    image: np.ndarray
    returned: Views
    raised: str = ""
    path: str = ""


def _run(
    case: Case, implementation: Implementation, device: Device, arena: Arena, variant: Variant, replayed: bool
) -> _Run:
    """Bind and call once, over memory as the case has it."""
    bind, views = BINDINGS[case.op], arena.views()
    device.share(views, written(case.call))
    try:
        with settings_kept(), variant.context():
            run = bind(case.call, views, implementation.function(case), implementation)
            returned = device.replay(run, arena.restore) if replayed else run()
        arena.finish()
        declined = False
        if isinstance(returned, Launched):
            returned.check()
            declined = returned.declined
        # A copy: the callee may use the memory again for its next call.
        returned = {name: tensor.detach().to("cpu", copy=True) for name, tensor in returned.items()}
        path = DECLINED if declined else one_line(implementation.path())
    except Exception as error:  # whatever a kernel raises is its result
        place = f" (schedule {variant.name})" if variant.name else ""
        return _Run(variant.name, arena.after, {}, _describe(error) + place)
    return _Run(variant.name, arena.after, returned, path=path)


_WRITTEN = {"commit": ("state", "conv_state"), "fused_verify": ("conv_state",)}
"""Per operation of emulated kernels, what they write of tensors that are inputs too."""


def written(call: AnyCall) -> frozenset[str]:
    """Names of the tensors that a callee may write: outputs, and what the operation updates in place."""
    updated = _WRITTEN.get(str(call.__struct_config__.tag))
    return frozenset(
        name
        for name, spec in call.tensors().items()
        if updated is None or spec.output or name.partition(".")[0] in updated
    )


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
