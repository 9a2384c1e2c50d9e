"""One Hypothesis search: draw cases of an operation, judge them, shrink what fails."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy

from ci.check import died
from ci.minimize import minimize, signature
from ci.rounds import ROUND, Rounds, drawn_from
from ci.worst.near import Nearness
from oracle.buckets import buckets
from oracle.case import Case
from oracle.codec import canonical
from oracle.judge import Verdict

Judge = Callable[[Case], Verdict]
Explain = Callable[[Case, Verdict], str]
"""The id of the known finding that a failing verdict shows again, or nothing."""


class FoundError(AssertionError):
    """A case failed; Hypothesis shrinks towards the smallest that raises this."""


class StopError(BaseException):
    """No verdict can be had, or kept: past Hypothesis, which would shrink any ordinary exception."""

    def __init__(self, reason: Exception) -> None:
        super().__init__()
        self.reason = reason


class InterruptedSearchError(KeyboardInterrupt):
    """An interruption while a failing case was being shrunk; ``failure`` is the smallest so far."""

    def __init__(self, failure: "Failure") -> None:
        super().__init__()
        self.failure = failure


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
    ``known`` counts the examples that failed as a known finding does, by the id of its case;
    they are neither failures nor in ``ratios``.
    """

    examples: int = 0
    executions: int = 0
    seconds: float = 0.0
    ratio: float = 0.0
    ratios: list[float] = field(default_factory=list)
    by_tensor: dict[str, float] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    nearness: Nearness = field(default_factory=Nearness)
    """Of a hunt (``ci.worst``) alone; a search leaves it empty."""

    def add(self, other: "Tally") -> None:
        """Add another search's counts; digests are summed, so order is free."""
        self.examples += other.examples
        self.executions += other.executions
        self.seconds += other.seconds
        self.ratio = max(self.ratio, other.ratio)
        self.ratios += other.ratios
        for name, ratio in other.by_tensor.items():
            self.by_tensor[name] = max(ratio, self.by_tensor.get(name, 0.0))
        for mine, theirs in ((self.reached, other.reached), (self.known, other.known)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        self.nearness.add(other.nearness)
        if other.digest:
            mixed = int(self.digest or "0", 16) + int(other.digest, 16)
            self.digest = f"{mixed % (1 << 64):016x}"


@dataclass(frozen=True)
class Search:
    """The parameters of one search.

    ``until`` is a ``time.monotonic`` deadline for all of it, ``shrink_seconds`` how long
    Hypothesis may shrink (a crash costs a new process at every step); ``ci.minimize`` follows.
    ``known`` names the finding that explains a failing verdict: such a case is counted and the
    search goes on, and no other failure is shrunk into one. ``found`` is told of the first failing
    case at once, and of every smaller one while it is being shrunk.
    """

    strategy: SearchStrategy[Case]
    judge: Judge
    seed: int
    examples: int
    until: float = float("inf")
    shrink: bool = True
    shrink_seconds: float = 90.0
    report: Callable[[Tally], None] = lambda _: None
    known: Explain = lambda case, verdict: ""
    found: Callable[["Failure"], None] = lambda failure: None
    hunting: bool = False
    """Whether the cases that come nearest to their bounds are kept (``ci.worst``)."""


_AGAIN = 10
"""Cases that are judged once more where the smallest one failed once and then passed."""


def run(search: Search) -> tuple[Tally, Failure | None]:
    """Run a search to its end or to its first failure, shrunk if asked for.

    ``search.report`` gets a tally of what came since the last report, at least once a second.
    What ``search.judge`` raises ends the search.
    """
    recorder = Recorder(search)
    flaky = rounds(search, recorder, search.examples)
    return conclude(search, recorder, flaky=flaky)


def rounds(
    search: Search, recorder: "Recorder", examples: int, *, aimed: bool = False, size: int = ROUND
) -> bool:
    """Draw and judge so many examples, up to the first failure; returns whether that passed once more.

    ``aimed``: in each round Hypothesis aims at large ratios, and nothing of it is a tally's example.
    """
    recorder.counting = not aimed
    for index, start in enumerate(range(0, examples, size)):
        flaky = _round(search, recorder, index, min(size, examples - start), aimed=aimed)
        if recorder.failure is not None or time.monotonic() > search.until:
            return flaky
    return False


def conclude(search: Search, recorder: "Recorder", *, flaky: bool) -> tuple[Tally, Failure | None]:
    """Make what failed smaller, if anything did, and report the rest."""
    shrunk = search.shrink and not flaky and not recorder.late
    try:
        flaky = flaky and not recorder.settle()
        if recorder.failure is not None and search.shrink and not flaky:
            recorder.minimize()
    except KeyboardInterrupt:
        assert recorder.failure is not None
        raise InterruptedSearchError(replace(recorder.failure, shrunk=False)) from None
    tally, failure = recorder.finish(), recorder.failure
    return tally, replace(failure, shrunk=shrunk, flaky=flaky) if failure is not None else None


def _round(search: Search, recorder: "Recorder", index: int, examples: int, *, aimed: bool) -> bool:
    """One Hypothesis run; returns whether a failing case passed when it was run again."""
    settings = hypothesis.settings(
        settings_profile(), phases=_phases(shrink=search.shrink, aimed=aimed), report_multiple_bugs=False
    )
    try:
        recorder.rounds.draw(settings, search.seed * 1_000_003 + (-1 - index if aimed else index), examples)
    except FoundError:
        return False
    except FlakyFailure:
        return True
    except StopError as stop:
        raise stop.reason from None
    except KeyboardInterrupt:
        if recorder.failure is not None:
            raise InterruptedSearchError(replace(recorder.failure, shrunk=False)) from None
        raise
    return False


def _phases(*, shrink: bool, aimed: bool) -> tuple[Phase, ...]:
    return (Phase.generate, *((Phase.target,) if aimed else ()), *((Phase.shrink,) if shrink else ()))


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


class Recorder:
    """Judges a search's cases and keeps count."""

    def __init__(self, search: Search) -> None:
        self.failure: Failure | None = None
        self.late = False
        """Whether the time ran out while a failing case was being shrunk."""
        self.counting = True
        """Whether what is judged is an example: drawn, and aimed at nothing."""
        self.last = 0.0
        """The largest ratio of the case that was judged last."""
        self.rounds = Rounds(drawn_from(search.strategy), self._drawn)
        self._search, self._until = search, search.until
        self._failing: dict[bytes, Failure] = {}
        self._causes: dict[tuple[str, str, str], str] = {}
        self._steady: set[bytes] = set()
        """Cases that failed twice: Hypothesis asks up to six times, and each may take a whole timeout."""
        self._passed: set[bytes] = set()
        """Cases that passed since the first one failed: some may have failed before."""
        self._whole, self._part = Tally(), Tally()
        self.nearness = Nearness()
        """Of the whole of a hunt."""
        self._hash = hashlib.blake2b(digest_size=8)
        self._reported = time.monotonic()

    def _drawn(self, case: Case) -> None:
        """Judge a case that Hypothesis drew, and tell it how near to failing that came if it is to aim."""
        self.run(case)
        if not self.counting:
            hypothesis.target(self.last, label="ratio")

    def run(self, case: Case) -> None:
        """Judge one case; raises ``FoundError`` if it fails."""
        search, part = self._search, self._part
        start = time.monotonic()
        if start > self._until:
            # The time is up: let Hypothesis run out of examples, and settle on what it found.
            self.late = self.failure is not None
            self._fail(self._failing.get(canonical(case)))
            return
        if self._steady and (seen := canonical(case)) in self._steady:
            self._fail(self._failing[seen])
        try:
            verdict = self._verdict(case)
        except Exception as error:
            raise StopError(error) from error
        now = time.monotonic()
        part.executions += 1
        part.seconds += now - start
        if not verdict.ok:
            verdict = self._with_cause(verdict)
        elif self._failing:
            self._passed.add(canonical(case))
        finding = "" if verdict.ok else search.known(case, verdict)
        failed = not verdict.ok and not finding
        if self.failure is None:
            self._note(case, verdict, finding)
        if now - self._reported > 0.5 or failed:
            self._report(now)
        if failed:
            if self.failure is None:
                self._until = min(search.until, now + search.shrink_seconds)
            failing, failure = canonical(case), Failure(case, verdict)
            if failing in self._failing:
                self._steady.add(failing)
            if failing not in self._failing:
                self._tell(replace(failure, shrunk=False))
            self._failing[failing] = failure
            self._fail(failure)

    def _verdict(self, case: Case) -> Verdict:
        """The verdict; while another kind of failure is made smaller, a process that died is asked twice.

        Whoever killed it from outside must not decide what the smallest case is.
        """
        verdict = self._search.judge(case)
        if self.failure is not None and died(verdict) and not died(self.failure.verdict):
            verdict = self._search.judge(case)
        return verdict

    def _note(self, case: Case, verdict: Verdict, finding: str) -> None:
        """Take a case that was judged before the first failure into account."""
        self.last = min(verdict.ratio, 1e9)
        if self.counting:
            self._count(case, verdict, finding)
        if self._search.hunting and verdict.ok:
            self._part.ratio = max(self._part.ratio, verdict.ratio)
            for nearness in (self._part.nearness, self.nearness):
                nearness.saw(case, verdict.ratios, drawn=self.counting)

    def _count(self, case: Case, verdict: Verdict, finding: str) -> None:
        """Take an example into the tally: every one up to the first failure."""
        part = self._part
        part.examples += 1
        self._hash.update(canonical(case))
        for name in buckets(case):
            part.reached[name] = part.reached.get(name, 0) + 1
        if finding:
            part.known[finding] = part.known.get(finding, 0) + 1
            return
        part.ratios.append(min(verdict.ratio, 1e9))
        if verdict.ok:
            part.ratio = max(part.ratio, verdict.ratio)
            for name, ratio in verdict.ratios.items():
                part.by_tensor[name] = max(ratio, part.by_tensor.get(name, 0.0))

    def _with_cause(self, verdict: Verdict) -> Verdict:
        """The verdict, with the cause that a larger case of the same failure told if this one tells none."""
        key = signature(verdict)
        if verdict.cause:
            self._causes.setdefault(key, verdict.cause)
        return replace(verdict, cause=verdict.cause or self._causes.get(key, ""))

    def _fail(self, failure: Failure | None) -> None:
        if failure is not None:
            self.failure = failure
            raise FoundError(failure.verdict.stage)

    def _tell(self, failure: Failure) -> None:
        try:
            self._search.found(failure)
        except Exception as error:  # no verdict of the case, whatever Hypothesis would take it for
            raise StopError(error) from error

    def settle(self) -> bool:
        """Fall back to the last case that fails once more, if one does: what came once may hide a fault."""
        found = [failure for key, failure in self._failing.items() if key not in self._passed]
        for failure in found[: -_AGAIN - 1 : -1]:
            verdict = self._again(failure.case)
            if not verdict.ok:
                self._keep(failure.case, verdict)
                return True
        return False

    def minimize(self) -> None:
        """Make the failing case smaller by the domain's own steps (``ci.minimize``)."""
        assert self.failure is not None
        minimize(self.failure.case, self.failure.verdict, self._again, self._keep, until=self._search.until)

    def _again(self, case: Case) -> Verdict:
        """The verdict on a case of no example; a known finding is none that counts."""
        self._part.executions += 1
        self._report(time.monotonic())
        verdict = self._verdict(case)
        known = not verdict.ok and self._search.known(case, verdict)
        return replace(verdict, problems=()) if known else verdict

    def _keep(self, case: Case, verdict: Verdict) -> None:
        self.failure = Failure(case, self._with_cause(verdict))
        self._search.found(replace(self.failure, shrunk=False))

    def _report(self, now: float) -> None:
        self._search.report(self._part)
        self._whole.add(self._part)
        self._part, self._reported = Tally(), now

    def finish(self) -> Tally:
        """Report the rest; returns the whole."""
        self._part.digest = self._hash.hexdigest()
        self._report(time.monotonic())
        return self._whole
