"""The cpu device: Triton kernels under Triton's own interpreter, repaired where it is faulty.

``activate()`` switches the interpreter on, probes it for each known fault and repairs those it finds; where
upstream is right the repair steps aside. Call it before anything imports Triton.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ._patching import Fault, Patches

__all__ = ["CompilerLoadedError", "Repair", "activate", "repairs", "speedups"]


class CompilerLoadedError(ValueError):
    """Triton was imported with its compiler on, so its library functions cannot be interpreted any more."""


@dataclass(frozen=True)
class Repair:
    """One known fault of the interpreter and what was done about it.

    ``needed``: the Triton in use has the fault. ``applied``: the repair is in force and the probe now
    passes; ``needed and not applied`` means that verdicts of this device cannot be trusted.
    """

    name: str
    fault: str
    needed: bool
    applied: bool


@dataclass
class _State:
    patches: Patches
    needed: tuple[Fault, ...] = ()
    repairs: tuple[Repair, ...] = ()
    fast: bool = False


_state = _State(Patches())


def activate() -> tuple[Repair, ...]:
    """Set TRITON_INTERPRET=1, import Triton, repair what its interpreter needs, and say what was done.

    Idempotent. Raises ``CompilerLoadedError`` if Triton was imported before without the interpreter.
    """
    if _state.repairs:
        os.environ["TRITON_INTERPRET"] = "1"
        return _state.repairs
    _interpret()
    faults = _faults()
    # Probed before any repair, so that no repair hides another fault.
    _state.needed = tuple(fault for fault in faults if fault.present())
    speedups()
    _state.repairs = tuple(
        Repair(f.name, f.sentence, f in _state.needed, f in _state.needed and not f.present()) for f in faults
    )
    return _state.repairs


def repairs() -> tuple[Repair, ...]:
    """Return what ``activate`` found and did, in a fixed order; empty before it ran."""
    return _state.repairs


def speedups(enabled: bool = True) -> None:
    """Switch the interpreter's cheaper bookkeeping on (``activate`` does) or off; results do not change.

    Needs the interpreter: raises ``CompilerLoadedError`` like ``activate``.
    """
    _interpret()
    _state.fast = enabled
    _install(_state.needed)


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Take one repair back for a while: a test shows by it that the fault is real and the test sees it."""
    _install(tuple(fault for fault in _state.needed if fault.name != name))
    try:
        yield
    finally:
        _install(_state.needed)


def _interpret() -> None:
    # Triton decides between compiler and interpreter when a function is decorated, and its own library
    # (tl.sum, tl.sigmoid) is decorated at import.
    language = sys.modules.get("triton.language")
    if language is not None and type(language.sum).__name__ != "InterpretedFunction":
        raise CompilerLoadedError(
            "The cpu device needs Triton's interpreter; found Triton already imported with its compiler on. "
            "Call activate(), or set TRITON_INTERPRET=1, before anything imports triton."
        )
    os.environ["TRITON_INTERPRET"] = "1"


def _faults() -> tuple[Fault, ...]:
    from . import _arithmetic, _launching, _reductions  # not at the top: they import Triton

    return _arithmetic.FAULTS + _reductions.FAULTS + _launching.FAULTS


def _install(faults: tuple[Fault, ...]) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from . import _speed

    _state.patches.undo()
    # Kernels are rewritten once and kept; the loop repair changes how.
    InterpretedFunction.rewritten_fn.clear()
    for fault in faults:
        fault.repair(_state.patches)
    if _state.fast:
        _speed.apply(_state.patches)
