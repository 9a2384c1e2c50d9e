"""One Hypothesis search: draw cases of an operation, judge them, shrink what fails."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy

from oracle.buckets import buckets
from oracle.case import Case
from oracle.codec import canonical
from oracle.judge import Verdict

Judge = Callable[[Case], Verdict]


class FoundError(AssertionError):
    """A case failed; Hypothesis shrinks towards the smallest that raises this."""


@dataclass(frozen=True)
class Failure:
    """A failing case and its verdict; ``shrunk`` says whether it is Hypothesis's minimal one.

    ``flaky`` marks a case that failed once and passed when it was run again.
    """

    case: Case
    verdict: Verdict
    shrunk: bool = True
    flaky: bool = False


@dataclass
class Tally:
    """What a search did so far; tallies of several searches add up.

    ``examples`` counts cases up to the first failure, ``executions`` also those of shrinking.
    ``ratios`` has the largest ratio of every example, ``by_tensor`` the largest of every tensor
    over the examples that passed, ``reached`` how many examples fell into each bucket.
    """

    examples: int = 0
    executions: int = 0
    seconds: float = 0.0
    ratio: float = 0.0
    ratios: list[float] = field(default_factory=list)
    by_tensor: dict[str, float] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    digest: str = ""

    def add(self, other: "Tally") -> None:
        """Add another search's counts; digests combine by exclusive or, so order is free."""
        self.examples += other.examples
        self.executions += other.executions
        self.seconds += other.seconds
        self.ratio = max(self.ratio, other.ratio)
        self.ratios += other.ratios
        for name, ratio in other.by_tensor.items():
            self.by_tensor[name] = max(ratio, self.by_tensor.get(name, 0.0))
        for name, count in other.reached.items():
            self.reached[name] = self.reached.get(name, 0) + count
        mixed = int(self.digest or "0", 16) ^ int(other.digest or "0", 16)
        self.digest = f"{mixed:016x}"


@dataclass(frozen=True)
class Search:
    """The parameters of one search. ``until`` is a ``time.monotonic`` deadline."""

    strategy: SearchStrategy[Case]
    judge: Judge
    seed: int
    examples: int
    until: float = float("inf")
    shrink: bool = True
    report: Callable[[Tally], None] = lambda _: None


ROUND = 10
"""Examples of one Hypothesis run. From its tenth example on, a run mostly mutates earlier ones: of 300
examples of one run about 80 are distinct calls, of 300 examples of thirty runs about 240."""


def run(search: Search) -> tuple[Tally, Failure | None]:
    """Run a search to its end or to its first failure, shrunk if asked for.

    ``search.report`` gets a tally of what came since the last report, at least once a second.
    """
    recorder = _Recorder(search)
    flaky = False
    for index, start in enumerate(range(0, search.examples, ROUND)):
        flaky = _round(search, recorder, index, min(ROUND, search.examples - start))
        if recorder.failure is not None:
            break
    tally, failure = recorder.finish(), recorder.failure
    if failure is not None and flaky:
        failure = Failure(failure.case, failure.verdict, shrunk=False, flaky=True)
    return tally, failure


def _round(search: Search, recorder: "_Recorder", index: int, examples: int) -> bool:
    """One Hypothesis run; returns whether a failing case passed when it was run again."""

    @hypothesis.seed(search.seed * 1_000_003 + index)
    @hypothesis.settings(
        settings_profile(),
        max_examples=examples,
        phases=(Phase.generate, *((Phase.shrink,) if search.shrink else ())),
        report_multiple_bugs=False,
    )
    @hypothesis.given(search.strategy)
    def body(case: Case) -> None:
        recorder.run(case)

    try:
        body()
    except FoundError:
        return False
    except FlakyFailure:
        return True
    return False


def settings_profile() -> hypothesis.settings:
    """What every search of ours needs, whatever profile Hypothesis chose for the machine.

    No deadline (a first call compiles), no database (failures are saved as cases), no health
    checks (large cases are wanted), no printing.
    """
    return hypothesis.settings(
        hypothesis.settings.get_profile("default"),
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )


class _Recorder:
    """Judges a search's cases and keeps count."""

    def __init__(self, search: Search) -> None:
        self.failure: Failure | None = None
        self._search = search
        self._whole, self._part = Tally(), Tally()
        self._hash = hashlib.blake2b(digest_size=8)
        self._reported = time.monotonic()

    def run(self, case: Case) -> None:
        """Judge one case; raises ``FoundError`` if it fails."""
        search, part = self._search, self._part
        start = time.monotonic()
        if start > search.until:
            return  # the time is up: let Hypothesis run out of examples at once
        verdict = search.judge(case)
        now = time.monotonic()
        part.executions += 1
        part.seconds += now - start
        if self.failure is None:
            part.examples += 1
            part.ratios.append(min(verdict.ratio, 1e9))
            self._hash.update(canonical(case))
            for name in buckets(case):
                part.reached[name] = part.reached.get(name, 0) + 1
            if verdict.ok:
                part.ratio = max(part.ratio, verdict.ratio)
                for name, ratio in verdict.ratios.items():
                    part.by_tensor[name] = max(ratio, part.by_tensor.get(name, 0.0))
        if now - self._reported > 0.5 or not verdict.ok:
            self._report(now)
        if not verdict.ok:
            self.failure = Failure(case, verdict)
            raise FoundError(verdict.stage)

    def _report(self, now: float) -> None:
        self._search.report(self._part)
        self._whole.add(self._part)
        self._part, self._reported = Tally(), now

    def finish(self) -> Tally:
        """Report the rest; returns the whole."""
        self._part.digest = self._hash.hexdigest()
        self._report(time.monotonic())
        return self._whole
