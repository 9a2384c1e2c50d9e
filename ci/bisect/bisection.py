"""From the two ends to a proven answer: the order in which things are judged, and what follows.

First both ends: one must be good and the other bad, either way round. Where one of them tells
nothing (what is tested is absent there), an item that differs from the other end is looked
for in its place. Then the search. In the end the first item of the new kind and its parents
are judged once more: an answer that does not come out again is not believed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ci.bisect.items import History
from ci.bisect.rule import Kind, Outcome, Rule, Seen
from ci.bisect.search import Answer, Search
from impl.contract import UnavailableError

Phase = Literal["end", "search", "again"]
Ask = Callable[[Phase, int], Seen]
"""Judges the item of a position."""
Told = Callable[[Phase, int, Seen, Outcome, int], None]
"""Hears of every judgement: the last number is how many steps are left at most."""


@dataclass(frozen=True)
class Result:
    """What may be said: the first item of the ``new`` kind is one of the candidates.

    ``boundary`` are their parents of the old kind. ``steps`` counts the search, ``skips`` those of its
    steps that told nothing, ``doubts`` says why the answer is not proven.
    """

    new: Kind
    candidates: tuple[int, ...]
    boundary: tuple[int, ...]
    steps: int
    skips: dict[int, str]
    doubts: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether it is one item, and proven."""
        return len(self.candidates) == 1 and not self.doubts


def bisect(history: History, rule: Rule, ask: Ask, told: Told) -> Result:
    """Search; ``UnavailableError`` where the ends do not differ or cannot be judged."""
    return _Bisection(history, rule, ask, told).result()


class _Bisection:
    """One search and what it has learnt."""

    def __init__(self, history: History, rule: Rule, ask: Ask, told: Told) -> None:
        self._history, self._rule, self._ask, self._told = history, rule, ask, told
        self._answers: dict[Kind, Answer] = {}
        self._kinds: dict[int, Outcome] = {}
        """Of every item that was judged while searching."""

    def result(self) -> Result:
        """Everything in order."""
        old, new = self._ends()
        self._answers = {old: "old", new: "new", "skip": "skip"}
        search = Search(self._history.parents, self._history.known_old)
        for known, outcome in self._kinds.items():
            if search.is_open(known):
                search.tell(known, self._answers[outcome.kind])
        while (item := search.next()) is not None:
            search.tell(item, self._answers[self._judge(item, search.steps - 1).kind])
        candidates, boundary = search.candidates, search.boundary()
        doubts = self._again({**dict.fromkeys(boundary, old), candidates[-1]: new})
        skips = {item: outcome.why for item, outcome in self._kinds.items() if outcome.kind == "skip"}
        return Result(new, candidates, boundary, len(self._kinds), skips, doubts)

    def _ends(self) -> tuple[Kind, Kind]:
        """What the old and the new end are; from here on the rule knows the failure that counts."""
        places = (0, len(self._history.items) - 1)
        seen = [self._ask("end", place) for place in places]
        for one in seen:
            if self._rule.outcome(one).kind == "bad":
                # The other end fails not at all, or tells nothing of this.
                self._rule = self._rule.like_first(one)
                break
        outcomes = [self._rule.outcome(one) for one in seen]
        for place, one, outcome in zip(places, seen, outcomes, strict=True):
            self._told("end", place, one, outcome, 0)
        old, new = (outcome.kind for outcome in outcomes)
        if "skip" in (old, new):
            return self._other_end(outcomes)
        if old == new:
            raise UnavailableError(f"both ends are {old}, {self._names(places)}: nothing to search for")
        return old, new

    def _other_end(self, outcomes: list[Outcome]) -> tuple[Kind, Kind]:
        """Judge items until one differs from the end that can be judged."""
        places = (0, len(self._history.items) - 1)
        telling = [outcome.kind for outcome in outcomes if outcome.kind != "skip"]
        silent = next(at for at, outcome in enumerate(outcomes) if outcome.kind == "skip")
        why = outcomes[silent].why
        advice = "; try more --repeats, or --mixed bad" if why.startswith("mixed") else ""
        fault = f"the end {self._names((places[silent],))} tells nothing ({why}{advice})"
        if not telling:
            raise UnavailableError(f"{fault}, nor does {self._names((places[1 - silent],))}")
        known = telling[0]
        # What tells nothing is taken to reach from that end inwards.
        sides: tuple[Answer, Answer] = ("old", "new")
        search = Search(self._history.parents, self._history.known_old)
        while (item := search.next()) is not None:
            kind = self._judge(item, search.steps - 1).kind
            if kind not in ("skip", known):
                return (kind, known) if silent == 0 else (known, kind)
            search.tell(item, sides[silent if kind == "skip" else 1 - silent])
        raise UnavailableError(f"{fault}, and of {len(self._kinds)} items before it all others are {known}")

    def _judge(self, item: int, left: int) -> Outcome:
        """One step."""
        seen = self._ask("search", item)
        outcome = self._rule.outcome(seen)
        if outcome.kind == "bad":
            self._rule = self._rule.like_first(seen)
        self._kinds[item] = outcome
        self._told("search", item, seen, outcome, left)
        return outcome

    def _again(self, wanted: dict[int, Kind]) -> tuple[str, ...]:
        """Judge these items once more; what did not come out as it should."""
        doubts = []
        for place, kind in sorted(wanted.items()):
            seen = self._ask("again", place)
            outcome = self._rule.outcome(seen)
            self._told("again", place, seen, outcome, 0)
            if outcome.kind != kind:
                why = f" ({outcome.why})" if outcome.why else ""
                name = self._names((place,))
                doubts.append(f"{name} must be {kind}, and came out {outcome.kind} when asked again{why}")
        return tuple(doubts)

    def _names(self, places: tuple[int, ...]) -> str:
        return " and ".join(self._history.items[place].name for place in places)
