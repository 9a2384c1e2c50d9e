"""Makes a failing case smaller in the terms of its own domain, after Hypothesis's shrinking.

Hypothesis shrinks the choices that drew a case; where one choice moves many others it ends in
a local minimum. What is tried, and in which order, is in ``ci.candidates``: every candidate is smaller
than its case, so the result depends on the case and the implementation alone, and the loop ends.
"""

import time
from collections.abc import Callable

from ci.candidates import candidates
from impl.contract import UnavailableError
from oracle.case import Case
from oracle.judge import Verdict

CALLS, SECONDS = 200, 30.0
"""Judgements and time that one minimisation may take after a search."""


def minimize(
    case: Case,
    verdict: Verdict,
    judge: Callable[[Case], Verdict],
    keep: Callable[[Case, Verdict], None] = lambda case, verdict: None,
    *,
    until: float = float("inf"),
    calls: int = CALLS,
    seconds: float = SECONDS,
) -> tuple[Case, Verdict]:
    """The smallest case found that fails in the same way (``signature``), and its verdict.

    ``keep`` is told of every smaller case at once. Ends early at ``until`` (a
    ``time.monotonic`` moment) or when ``calls`` or ``seconds`` are spent. A candidate that the
    implementation does not take is passed over; what else ``judge`` raises passes through.
    """
    wanted = signature(verdict)
    until = min(until, time.monotonic() + seconds)
    improved = True
    while improved:
        improved = False
        for candidate in candidates(case, verdict):
            if calls == 0 or time.monotonic() > until:
                return case, verdict
            calls -= 1
            try:
                second = judge(candidate)
            except UnavailableError:
                continue  # such as a count of heads that the implementation does not take
            if not second.ok and signature(second) == wanted:
                case, verdict, improved = candidate, second, True
                keep(case, verdict)
                break
    return case, verdict


def signature(verdict: Verdict) -> tuple[str, str, str]:
    """What makes two failures the same: kind, stage and tensor of the first problem."""
    first = verdict.problems[0]
    return first.kind, first.stage, first.tensor
