"""How a kernel is launched: warps, stages and tiles, and what a sweep asks of them instead.

Every launch of this package passes its options through ``adjusted``. Normally they come back as
they are; within ``launch_settings`` those that are named there are replaced, so that one kernel
can be run in many configurations, which must all leave what the contract says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_COMPILER = ("num_warps", "num_stages")
"""Options of any kernel; all others are a kernel's own constants, and count only where it has them."""
_asked: list[tuple[dict[str, int], list[tuple[str, dict[str, Any]]]]] = []


@contextmanager
def launch_settings(**settings: int) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Launch with these options: ``num_warps``, ``num_stages``, or tiles by their name in a kernel.

    Gives a list that fills with (kernel, options) of every launch within. ``ValueError`` for an
    option that is no power of two, ``num_stages`` apart, which must be positive.
    """
    for name, value in settings.items():
        if value < 1 or (name != "num_stages" and value & (value - 1)):
            kind = "positive" if name == "num_stages" else "a power of two"
            raise ValueError(f"launch option {name} must be {kind}; found {value}")
    launches: list[tuple[str, dict[str, Any]]] = []
    _asked.append((settings, launches))
    try:
        yield launches
    finally:
        _asked.pop()


def adjusted(kernel: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a launch of ``kernel`` is to use in place of its own."""
    if not _asked:  # a call at N = 1 is bound by the host
        return options
    settings, launches = _asked[-1]
    options = options | {n: value for n, value in settings.items() if n in options or n in _COMPILER}
    launches.append((kernel, options))
    return options
