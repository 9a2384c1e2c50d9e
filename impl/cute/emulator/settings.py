"""How launches on the emulator are executed: set for a stretch of code, read at every launch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from impl.cute.emulator.launch import Allocation, Functions, Mode, Schedule

DEFAULT_SCHEDULES = "eager,lazy,priority"
SCHEDULES_VARIABLE = "KDAFUZZ_SCHEDULES"
"""Environment variable: the schedules that a case runs under, as ``parse_schedules`` takes them."""
FUNCTIONS_VARIABLE = "KDAFUZZ_FUNCTIONS"
"""Environment variable: the arithmetic of approximate instructions, one of ``launch.Functions``."""


@dataclass(frozen=True)
class Settings:
    """What the kernel itself does not decide.

    ``functions`` None: Hopper's own tables for sm_90a, correct rounding for anything else.
    ``engine`` None: the fastest at hand. ``resident`` CTAs run side by side. ``ctas`` is what a
    persistent kernel gets as the number of CTAs that the device holds, and a CTA of commit as the most
    heads that it folds. ``allocations`` is the
    device memory that kernels may access; tensors of a call outside of it are added.
    """

    schedule: Schedule = field(default_factory=Schedule)
    functions: Functions | None = None
    seed: int = 0
    engine: str | None = None
    resident: int = 2
    ctas: int = 3
    allocations: Sequence[Allocation] = ()


_CURRENT: ContextVar[Settings] = ContextVar("emulator settings", default=Settings())  # noqa: B039 (frozen)


def current() -> Settings:
    """The settings in force."""
    return _CURRENT.get()


@contextmanager
def using(**changes: Any) -> Iterator[Settings]:
    """Change some settings within a ``with`` block."""
    token = _CURRENT.set(replace(_CURRENT.get(), **changes))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)


def parse_schedules(text: str, seed: int) -> tuple[Schedule, ...]:
    """Schedules as ``--schedules`` names them: ``eager,lazy,priority:7``; without a number, ``seed``.

    ``ValueError`` for anything else.
    """
    found: list[Schedule] = []
    for part in text.split(","):
        mode, colon, number = part.strip().partition(":")
        if mode not in get_args(Mode) or (colon and (mode != "priority" or not number.isdecimal())):
            raise ValueError(
                f"schedules are a comma-separated list of eager, lazy and priority[:SEED]; found {text!r}"
            )
        value = int(number) if colon else seed
        if not 0 <= value < 1 << 64:
            raise ValueError(f"the seed of a schedule must be below 2**64; found {value}")
        found.append(Schedule(mode, value if mode == "priority" else 0))  # type: ignore[arg-type]
    return tuple(dict.fromkeys(found))


def parse_functions(text: str) -> Functions | None:
    """The arithmetic that ``FUNCTIONS_VARIABLE`` names, None for no text; ``ValueError`` for any other."""
    for known in get_args(Functions):
        if text == known:
            found: Functions = known
            return found
    if text:
        raise ValueError(
            f"{FUNCTIONS_VARIABLE} must be one of {', '.join(get_args(Functions))}; found {text!r}"
        )
    return None
