"""How a repair is described, probed, put in force and taken back."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_MISSING = object()


class Patches:
    """Attributes replaced on foreign objects, in order, so that ``undo`` restores every one of them."""

    def __init__(self) -> None:
        self._saved: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name`` to ``value``; an attribute the owner did not have itself is deleted on undo."""
        self._saved.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: object, name: str, make: Callable[[Callable], Callable]) -> None:
        """Replace the function ``owner.name`` by ``make(that function)``."""
        self.replace(owner, name, make(getattr(owner, name)))

    def undo(self) -> None:
        """Put back everything replaced so far, the latest first."""
        while self._saved:
            owner, name, original = self._saved.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@dataclass(frozen=True)
class Fault:
    """One thing the interpreter does wrong: a probe that answers True where it is right, and the repair."""

    name: str
    sentence: str
    sound: Callable[[], bool]
    repair: Callable[[Patches], None]

    def present(self) -> bool:
        """Probe the Triton in use; an exception out of the probe counts as the fault."""
        with warnings.catch_warnings(), np.errstate(all="warn"):
            warnings.simplefilter("ignore")
            try:
                return not self.sound()
            except Exception:
                return True
