"""Results that an immutable object keeps."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

S = TypeVar("S")
R = TypeVar("R")


def kept(method: Callable[[S], R]) -> Callable[[S], R]:
    """A method without arguments, computed once an object: neither it nor the result may ever change.

    ``functools.cached_property`` takes a lock in Python 3.11, which costs more than what is kept here.
    """
    # No attribute has such a name: what is kept hides none, nor what a method of a base class keeps.
    name = f"kept {method.__qualname__}"

    @wraps(method)
    def result(self: S) -> R:
        held: dict[str, R] = self.__dict__
        if name not in held:
            held[name] = method(self)
        return held[name]

    return result
