"""``observe(case, implementation, device) -> Observation``: run one call and say what it did."""

import traceback
from pathlib import Path

from impl.arena import Arena
from impl.bindings import BINDINGS, Views
from impl.contract import Implementation, UnavailableError, one_line
from impl.devices.base import Device
from impl.settings import settings_kept
from oracle.case import Case
from oracle.expectation import Observation
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
    bind = BINDINGS[case.op]
    arena = Arena(case, values if values is not None else build(case), device)
    returned: Views = {}
    raised = ""
    try:
        with settings_kept():
            run = bind(case.call, arena.views(), implementation.function(case), implementation)
            returned = device.replay(run, arena.restore) if replayed else run()
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
