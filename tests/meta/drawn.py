"""Drawn cases of every operation of one call, and how many of them a cheap test may have."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from ci.rounds import OPENING, ROUND
from impl.contract import Domain
from oracle.case import Case
from oracle.codec import canonical
from tests.strategies.cases import cases

T = TypeVar("T")
OPERATIONS = ("verify", "conv_update", "conv_prefill", "packed_conv", "commit", "fused_verify")
MORE = settings(max_examples=4 * settings().max_examples)
"""For examples of a few milliseconds each."""


def any_cases() -> st.SearchStrategy[Case]:
    """Cases of any operation, with any relation or none."""
    return st.sampled_from(OPERATIONS).flatmap(lambda op: cases(op, Domain()))


def sample(strategy: st.SearchStrategy[T], rounds: int) -> Iterator[T]:
    """The same draws every time, in rounds as a search has them; what each opens with comes once."""
    first: list[T] = []
    for index in range(rounds):
        drawn = _round(strategy, index)
        opening = [x for x in drawn[:OPENING] if not index or x not in first]
        first = first or drawn[:1]
        yield from [*opening, *drawn[OPENING:]]


def over(
    strategy: st.SearchStrategy[Case], rounds: int = 10
) -> Callable[[Callable[[Case], None]], Callable[[], None]]:
    """Run a test over ``sample``: a single run of Hypothesis is mostly mutations of its first ten examples.

    A failing case is not shrunk; its JSON is in a note of the exception.
    """

    def decorate(test: Callable[[Case], None]) -> Callable[[], None]:
        def run() -> None:
            for case in sample(strategy, rounds):
                try:
                    test(case)
                except BaseException as error:
                    error.add_note(f"case: {canonical(case).decode()}")
                    raise

        run.__doc__ = test.__doc__
        return run

    return decorate


def _round(strategy: st.SearchStrategy[T], index: int) -> list[T]:
    found: list[T] = []

    @hypothesis.seed(index)
    @settings(
        max_examples=ROUND,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def draw(drawn: T) -> None:
        found.append(drawn)

    draw()
    return found
