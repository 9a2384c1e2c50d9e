"""Hypothesis runs of a few examples each: from its tenth on, a run mostly mutates earlier ones."""

from collections.abc import Callable

import hypothesis
from hypothesis import Phase
from hypothesis.strategies import SearchStrategy

from oracle.case import Case
from oracle.codec import canonical

ROUND = 10
"""Examples of one Hypothesis run. Of 300 examples of one run about 80 are distinct calls, of 300
examples of thirty runs about 240."""
OPENING = 2
"""Examples at the start of a run that may be the simplest case, the same in every run: it is judged once."""


Run = Callable[[hypothesis.settings, int | str, Callable[[Case], None]], None]
"""One Hypothesis run with these settings and this seed; each example is judged. It raises what the judge
raises for the smallest case, and must be of the same function or class every time: the source is the
database's key."""


def drawn_from(strategy: SearchStrategy[Case]) -> Run:
    """Runs whose examples this strategy draws."""

    def run(settings: hypothesis.settings, seed: int | str, judge: Callable[[Case], None]) -> None:
        @settings  # above the seed, which takes the database away
        @hypothesis.seed(seed)
        @hypothesis.given(strategy)
        def holds(case: Case) -> None:
            judge(case)

        holds()

    return run


class Rounds:
    """The rounds of one search, up to the first in which ``judge`` raises.

    Hypothesis then shrinks, and the round ends with what ``judge`` raises for the smallest case, or
    with Hypothesis's ``FlakyFailure`` if the first one passes once more.
    """

    def __init__(self, run: Run, judge: Callable[[Case], None]) -> None:
        self._run, self._judge = run, judge
        self._first = b""
        self._failed = False

    def replay(self, settings: hypothesis.settings) -> None:
        """Judge what the settings' database remembers; raises ``unittest.SkipTest`` if that is nothing."""
        phases = set(settings.phases) - {Phase.generate, Phase.target}
        self._run(hypothesis.settings(settings, phases=phases), 0, self._judge)

    def draw(self, settings: hypothesis.settings, seed: int | str, examples: int) -> None:
        """Draw and judge so many examples; the seed alone says which."""
        opening = OPENING if self._first else 0
        drawn = judged = 0

        def judge(case: Case) -> None:
            nonlocal drawn, judged
            drawn += 1
            again = drawn <= opening and canonical(case) == self._first
            if self._failed or (judged < examples and not again):
                judged += 1
                self._first = self._first or canonical(case)
                self._told(case)

        phases = set(settings.phases) - {Phase.explicit, Phase.reuse}
        self._run(hypothesis.settings(settings, max_examples=examples + opening, phases=phases), seed, judge)

    def _told(self, case: Case) -> None:
        try:
            self._judge(case)
        except BaseException:
            self._failed = True
            raise
