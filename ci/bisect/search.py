"""The search itself: which item to judge next, and which may be the first of the new kind.

Items are numbers in topological order, parents first. ``old`` and ``new`` are the two kinds, as
the two ends have them; whatever descends from a new item is taken to be new. A list is a
history in which every item has the one before as its only parent.

Why not ``git bisect``: releases, wheels and compilers are searched by the same rule, a log can
be replayed, and nothing is written to anybody's repository. ``bisect-step`` serves those who prefer it.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal

Answer = Literal["old", "new", "skip"]
_LONGEST_JUMP = 20
"""As a power of two: how far from what was skipped an item is looked for at first."""


class Search:
    """A search over a history of which the last item is new and the first ``known_old`` are old.

    On a list of n items behind the old ones at most ceil(log2 n) answers are old or new, whatever
    is skipped. ``candidates`` are exactly the items that agree with every answer so far.
    """

    def __init__(self, parents: Sequence[Sequence[int]], known_old: int = 1) -> None:
        if not 0 < known_old < len(parents):
            raise ValueError(f"needs old items and a new one; got {known_old} old of {len(parents)}")
        self._parents, self._first = parents, known_old
        # Bit i stands for item i; an item is among its own ancestors, what is known to be old in none.
        self._ancestors = [0] * len(parents)
        for item in range(known_old, len(parents)):
            found = 1 << item
            for parent in parents[item]:
                if parent >= item:
                    raise ValueError(f"item {item} has parent {parent}, which does not come before it")
                found |= self._ancestors[parent]
            self._ancestors[item] = found
        self._tip = len(parents) - 1
        self._candidates = self._ancestors[self._tip]
        self._skipped = 0
        self._promise = self._steps()

    @property
    def candidates(self) -> tuple[int, ...]:
        """Items that may be the first new one, the last of them the oldest that is known to be new."""
        return tuple(_ones(self._candidates))

    @property
    def steps(self) -> int:
        """Answers that are still needed at most, on a list."""
        return min(self._promise, self._steps())

    def boundary(self) -> tuple[int, ...]:
        """Old parents of the candidates."""
        found = {p for item in self.candidates for p in self._parents[item]}
        return tuple(sorted(p for p in found if not self._candidates >> p & 1))

    def next(self) -> int | None:
        """The item to judge now; None if no further answer can tell more."""
        open_ = self._open()
        if not open_:
            return None
        classes = open_.bit_count() + 1
        worse = {}
        for item in _ones(open_):
            older = (open_ & self._ancestors[item]).bit_count()
            worse[item] = max(older, classes - older)
        # Any split that keeps the promise will do, so go away from what was skipped: it comes in ranges.
        allowed = max(1 << self._promise >> 1, min(worse.values()))
        permitted = [item for item, left in worse.items() if left <= allowed]
        return min(self._away(permitted), key=lambda item: (worse[item], item))

    def is_open(self, item: int) -> bool:
        """Whether an answer for the item would tell something."""
        return bool(self._open() >> item & 1)

    def tell(self, item: int, answer: Answer) -> None:
        """Take the answer for an open item, such as ``next`` names."""
        if not self.is_open(item):
            raise ValueError(f"item {item} is not open")
        match answer:
            case "skip":
                self._skipped |= 1 << item
                return
            case "old":
                self._candidates &= ~self._ancestors[item]
            case "new":
                self._candidates &= self._ancestors[item]
                self._tip = item
        self._promise = self._steps()

    def _open(self) -> int:
        """Candidates whose answer is not known, nor known to be missing."""
        return self._candidates & ~self._skipped & ~(1 << self._tip)

    def _steps(self) -> int:
        return self._open().bit_count().bit_length()

    def _away(self, items: list[int]) -> list[int]:
        """Those farthest from everything skipped, as far as the number of skips asks for."""
        skipped = list(_ones(self._skipped & self._candidates))
        if not skipped:
            return items
        far = {item: _distance(skipped, item) for item in items}
        wanted: int = 1 << min(len(skipped), _LONGEST_JUMP)
        while wanted > max(far.values()):
            wanted >>= 1
        return [item for item in items if far[item] >= wanted]


def _distance(places: list[int], item: int) -> int:
    """To the nearest of some sorted places."""
    at = bisect_left(places, item)
    return min(abs(place - item) for place in places[max(0, at - 1) : at + 1])


def _ones(bits: int) -> Iterator[int]:
    """Numbers of the bits that are set, in order."""
    text = bin(bits)[:1:-1]
    at = text.find("1")
    while at >= 0:
        yield at
        at = text.find("1", at + 1)


def line(count: int) -> tuple[tuple[int, ...], ...]:
    """The parents of a list of ``count`` items."""
    return tuple((item - 1,) if item else () for item in range(count))
