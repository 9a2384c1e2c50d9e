"""Stepping a warp: which of its lanes move, and until when."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import Op
from impl.cute.emulator.reference import (
    collectives,
    copies,
    elementwise,
    memory,
    synchronisation,
    tensor,
    wgmma,
)
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.outcome import Outcome
from impl.cute.emulator.reference.warp import Warp

Handler = Callable[[Warp, Instruction, np.ndarray], Outcome | None]


def _trap(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    raise EmulatorError("trap", "the kernel trapped")


def _divergence(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    raise EmulatorError("divergence", "a collective that its guard keeps some lanes of the warp from")


HANDLERS: dict[Op, Handler] = {
    **elementwise.HANDLERS,
    **memory.HANDLERS,
    **collectives.HANDLERS,
    **synchronisation.HANDLERS,
    **copies.HANDLERS,
    **tensor.HANDLERS,
    **wgmma.HANDLERS,
    Op.TRAP: _trap,
}
"""What every operation does, to the lanes of a mask; branches and exits are ``_run``'s."""


class Step(NamedTuple):
    """Whether a step executed or registered anything, and how it ended."""

    moved: bool
    outcome: Outcome | None = None


def step(warp: Warp, budget: int | None = None) -> Step:
    """Run the lowest group of lanes that can move, for at most ``budget`` instructions."""
    warp.progress = False
    for at in sorted(warp.groups):
        executed, outcome = _run(warp, at, budget)
        if executed:
            return Step(True, outcome)
    return Step(warp.progress)


def _run(warp: Warp, start: int, budget: int | None) -> tuple[int, Outcome | None]:
    """Run the group at ``start`` until something ends the step; the number of instructions, and how it ended.

    Ends: the budget is used up; the instruction cannot proceed (nothing of it was done); lanes may join
    here and other groups exist; lanes took different ways or exited; the warp yielded.
    """
    mask, at, executed = warp.groups[start], start, 0
    outcome: Outcome | None = None
    while outcome is None and executed != budget:
        ins = warp.machine.code[at]
        if executed and ins.leader and len(warp.groups) > 1:
            break
        _check_limit(warp, ins)
        if ins.converged and not np.array_equal(mask, warp.live):
            break
        active = _active(warp, ins, mask)
        parted = False  # whether lanes took different ways or exited
        following = at + 1
        if not active.any():
            pass
        elif ins.op in (Op.BRA, Op.EXIT):
            parted = ins.op == Op.EXIT or not np.array_equal(active, mask)
            following = ins.target
        else:
            outcome = _execute(warp, ins, active, mask)
            if outcome is Outcome.BLOCKED:
                break
        executed += 1
        warp.executed += 1
        warp.machine.executed += 1
        if parted:
            _part(warp, start, ins, active, at + 1)
            return executed, None
        at = following
    if executed:
        del warp.groups[start]
        warp.place(at, mask)
    return executed, outcome


def _part(warp: Warp, start: int, ins: Instruction, active: np.ndarray, after: int) -> None:
    """The active lanes of a group branch or exit, its other lanes go on."""
    rest = warp.groups.pop(start) & ~active
    if ins.op == Op.EXIT:
        warp.live = warp.live & ~active
    else:
        warp.place(ins.target, active)
    warp.place(after, rest)


def _active(warp: Warp, ins: Instruction, mask: np.ndarray) -> np.ndarray:
    """The lanes of a group that an instruction's guard lets take part."""
    if ins.guard < 0:
        return mask
    holds = np.not_equal(warp.read(ins.guard, np.uint8), 0)
    result: np.ndarray = mask & np.not_equal(holds, bool(ins.negate))
    return result


def _execute(warp: Warp, ins: Instruction, active: np.ndarray, mask: np.ndarray) -> Outcome | None:
    try:
        handler = _divergence if ins.converged and not np.array_equal(active, mask) else HANDLERS[ins.op]
        return handler(warp, ins, active)
    except EmulatorError as error:
        raise ins.located(error, warp.cta.index, warp.index) from None


def _check_limit(warp: Warp, ins: Instruction) -> None:
    """The launch may execute one more instruction."""
    limit = warp.machine.launch.max_instructions
    if warp.machine.executed >= limit:
        error = EmulatorError("limit", f"more than {limit} instructions")
        raise ins.located(error, warp.cta.index, warp.index)
