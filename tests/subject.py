"""What a property test has of an implementation: its cases, and a judge that saves what fails."""

import os
import secrets
import time
from itertools import count
from pathlib import Path
from unittest import SkipTest

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy

from ci.asked import default_palette
from ci.check import died
from ci.database import KeyedDatabase
from ci.executor import Executor
from ci.failures import replay_line, save
from ci.journal import Journal
from ci.known import Known, explained
from ci.query import Offer, ask
from ci.report import describe
from ci.reporting.record import Ledger
from ci.rounds import ROUND, Rounds, Run, drawn_from
from impl.contract import Domain
from oracle.buckets import buckets
from oracle.case import Case
from oracle.judge import Verdict
from tests.strategies.cases import cases

_OFFERS: dict[tuple[str, str], Offer] = {}


def offer_of(name: str, device: str) -> Offer:
    """What an implementation offers, asked once a process."""
    if (name, device) not in _OFFERS:
        _OFFERS[name, device] = ask(name, device)
    return _OFFERS[name, device]


def _test() -> str:
    """The name of the running test."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


class Subject:
    """One implementation on one device, and what a property test needs of it."""

    def __init__(
        self,
        name: str,
        device: str,
        save_to: Path,
        time_box: float,
        known: tuple[Known, ...] = (),
        ledger: Ledger | None = None,
        seed: str = "",
    ) -> None:
        self.name, self.device, self.known, self.ledger = name, device, known, ledger or Ledger()
        self.offer = offer_of(name, device)
        self._save_to = save_to
        self._executor = Executor(name, device, journal=Journal(save_to, name, device))
        self._last: tuple[str, Path | None] = ("", None)
        self._failing: Case | None = None
        self._told = ""
        self._dies = False
        """Whether the process of the case that failed last in this search dies."""
        self._time_box, self._seed = time_box, seed
        self.palette = default_palette(device, 25)

    def domain(self, operation: str) -> Domain:
        """What the implementation takes of an operation; the test is skipped if it does not offer it."""
        absent = self._enter(operation)
        if absent:
            pytest.skip(f"needs {operation}; found {absent}")
        return self.offer.domains[operation]

    def _enter(self, operation: str) -> str:
        """Enter what the test is of; returns why the implementation does not offer it, or nothing."""
        offered = operation in self.offer.domains
        absent = "" if offered else self.offer.absent.get(operation, "none")
        self.ledger.needs(operation, absent)
        return absent

    def cases(self, operation: str, *relations: str) -> SearchStrategy[Case]:
        """The operation's cases, with one of these relations or none."""
        domain = self.domain(operation)
        return cases(operation, domain, variants=self.palette, relations=relations)

    def search(self, strategy: SearchStrategy[Case]) -> None:
        """Require what is remembered, then what is drawn, and more while there is time, if there is a box."""
        self.search_by(drawn_from(strategy))

    def search_by(self, run: Run, steps: int = 50) -> None:
        """As ``search``, with runs of any kind; a state machine's make so many steps at most."""
        told = ""
        try:
            self._search(Rounds(run, self.require), self.settings(steps))
        except pytest.fail.Exception as failed:
            told = f"{failed}{self._unless_alone()}"
        except FlakyFailure:
            told = f"{self._told}\nNot reproducible: it passed when it was run again, in the same process"
        if told:  # out here, or pytest would print both
            pytest.fail(told, pytrace=False)

    def _search(self, rounds: Rounds, profile: hypothesis.settings) -> None:
        """Replay, then draw; the profile is that of the running test."""
        self._failing = None
        end = time.monotonic() + self._time_box
        drawing = Phase.generate in profile.phases
        try:
            rounds.replay(profile)
        except SkipTest:
            if not drawing:
                raise
        seed = self._seed_of(profile)
        # Aiming begins with the twelfth of 25 examples, and its examples are variations of one.
        aimless = hypothesis.settings(profile, phases=set(profile.phases) - {Phase.target})
        for index in count() if drawing else ():
            left = profile.max_examples - index * ROUND
            if left <= 0 and time.monotonic() >= end:
                break
            rounds.draw(aimless, f"{seed} {index}", min(ROUND, left) if left > 0 else ROUND)

    def _seed_of(self, profile: hypothesis.settings) -> str:
        """What the running test draws: by the seed asked for, or the test's name alone, or chance.

        The name is without the implementation's: all of them, and all versions, get the same cases.
        """
        if self._seed or profile.derandomize:
            return f"{self._seed} {_test().replace(f'[{self.name}', '[')}"
        return secrets.token_hex(8)

    def _unless_alone(self) -> str:
        """What to add if the case that failed last passes as the only one of a new process."""
        if self._failing is None or not self.alone(self._failing).ok:
            return ""
        return "\nAs the only case of a new process it passes: what ran before it counts, or chance does"

    def settings(self, steps: int = 50) -> hypothesis.settings:
        """The profile's, for the running test: what failed here is replayed by this test on this subject."""
        database = hypothesis.settings().database
        if database is not None:
            database = KeyedDatabase(database, f"{_test()} {self.offer.version} {self.device}")
        return hypothesis.settings(database=database, stateful_step_count=steps)

    def check(self, case: Case) -> Verdict:
        """The verdict on a case, whatever it is."""
        self._enter(case.op)
        self._executor.start()
        start = time.monotonic()
        verdict = self._executor.check(case)
        known = explained(self.known, self.name, self.offer.version, case, verdict) is not None
        self.ledger.judged(verdict, time.monotonic() - start, known=known)
        return verdict

    def _verdict(self, case: Case) -> Verdict:
        """The verdict; while another kind of failure is shrunk, a process that died is asked twice.

        Whoever killed it from outside must not decide what the smallest case is.
        """
        verdict = self.check(case)
        if hypothesis.currently_in_test_context() and self._failing and died(verdict) and not self._dies:
            verdict = self.check(case)
        return verdict

    def alone(self, case: Case) -> Verdict:
        """The verdict on a case as the only one of a new process."""
        return self._executor.alone(case)

    def require(self, case: Case, *, excuse: bool = True) -> None:
        """Judge a case; a failing one is saved and described with its replay line.

        A known finding is no failure: in a search it is an event and the search goes on, in a
        test of single cases it ends the test as an expected failure. Without ``excuse`` it is one.
        """
        verdict = self._verdict(case)
        known = self.known if excuse else ()
        finding = explained(known, self.name, self.offer.version, case, verdict)
        if hypothesis.currently_in_test_context():
            for name in buckets(case):
                hypothesis.event(name)
            if finding is not None:
                hypothesis.event(f"known finding {finding.case}")
                return
            hypothesis.target(min(verdict.ratio, 1e9), label="ratio")
        if finding is not None:
            pytest.xfail(f"known finding {finding.describe()}")
        if not verdict.ok:
            found = {"implementation": self.name, "device": self.device}
            path = self._save(case, verdict, found)
            self.ledger.saved(str(path), replay_line(path, self.name, self.device))
            self._failing, self._dies = case, died(verdict)
            added = "" if hypothesis.currently_in_test_context() else self._unless_alone()
            self._told = "\n".join(describe(case, verdict, path, self.name, self.device))
            pytest.fail(self._told + added, pytrace=False)

    def _save(self, case: Case, verdict: Verdict, found: dict[str, str]) -> Path:
        """Save the case in place of the larger one that shrinking saved before it in the same test."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        before = set(self._save_to.rglob("*.json"))
        path = save(self._save_to, case, verdict, found)
        last_test, last_path = self._last
        if last_test == test and last_path is not None and last_path != path:
            last_path.unlink(missing_ok=True)
        self._last = (test, path if path not in before or last_path == path else None)
        return path

    def close(self) -> None:
        """Stop the child process."""
        self._executor.finish()
