"""Options, profiles and the header of the suite's pytest runs."""

import gc
import os
import secrets
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import SkipTest

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from ci import pytest_gpus as gpus
from ci.asked import default_palette
from ci.database import KeyedDatabase, open_database, redacted
from ci.executor import Executor
from ci.failures import CORPORA, replay_line, save
from ci.journal import Journal, recover
from ci.known import LIST, Known, explained, read_known
from ci.query import Offer, ask
from ci.report import describe
from ci.reporting import plugin as reporting
from ci.reporting.record import Ledger, Record
from ci.rounds import ROUND, Rounds
from impl.contract import Domain, UnavailableError
from impl.devices.registry import NAMES, default
from impl.registry import split
from oracle.buckets import buckets
from oracle.case import Case
from oracle.judge import Verdict
from tests.profiles import chosen, register, time_box
from tests.strategies.cases import cases


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kdafuzz")
    group.addoption(
        "--impl", default="triton", help="implementations to test, comma-separated [default: triton]"
    )
    group.addoption("--device", choices=NAMES, help="where kernels run [default: the best at hand]")
    group.addoption("--corpus", type=Path, default=CORPORA, help="folder of saved cases to replay")
    group.addoption("--replay", action="append", default=[], help="replay only this case file or id")
    group.addoption(
        "--save-failures", type=Path, default=Path(".kdafuzz/failures"), help="where minimal failing cases go"
    )
    group.addoption(
        "--database",
        help="where failing examples are remembered: a folder or redis://.. that runs may share, readonly: "
        "before it if this one must not write [default: KDAFUZZ_DATABASE, else .hypothesis/examples]",
    )
    reporting.add_options(group)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    gpus.steal_work(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    return gpus.auto_workers(_device(config))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """A worker was killed: say what it was judging."""
    del crashitem
    for path in recover(sched.config.getoption("--save-failures")):
        report.longrepr = f"{report.longrepr}; it was judging {path}: kdafuzz replay {path}"


_SUSPECTS = pytest.StashKey[list[Path]]()
"""What killed processes of earlier runs were judging."""


def pytest_configure(config: pytest.Config) -> None:
    gpus.take_seat(config)
    why = _forgetful(config)
    if why and config.getoption("--database"):
        raise pytest.UsageError(f"--database is of no use where nothing is remembered: {why}")
    try:
        register(open_database("" if why else _database(config)))
        hypothesis.settings.load_profile(_profile(config))
    except (UnavailableError, InvalidArgument) as error:
        raise pytest.UsageError(str(error)) from None
    device = _device(config)
    gpus.register(config, device)
    worker = hasattr(config, "workerinput")
    config.stash[_SUSPECTS] = [] if worker else recover(config.getoption("--save-failures"))
    names = split(config.getoption("--impl"))
    template = Record(device=device, profile=_profile(config), seed=_seed(config) or "its own")
    reporting.register(config, names, lambda name: offer_of(name, device), template)


def _device(config: pytest.Config) -> str:
    return str(config.getoption("--device") or default())


def _profile(config: pytest.Config) -> str:
    return chosen(config.getoption("--hypothesis-profile"))


def _database(config: pytest.Config) -> str:
    return str(config.getoption("--database") or os.environ.get("KDAFUZZ_DATABASE", ""))


def _forgetful(config: pytest.Config) -> str:
    """Why the run uses no database, if so: Hypothesis's rules."""
    if _profile(config) == "ci":
        return "the profile ci draws the same examples each time (CI machines use it by default)"
    return "with --hypothesis-seed the seed alone says what is drawn" if _seed(config) else ""


def _seed(config: pytest.Config) -> str:
    return str(config.getoption("--hypothesis-seed") or "")


def pytest_report_header(config: pytest.Config) -> list[str]:
    database = "none" if _forgetful(config) else redacted(_database(config))
    device = _device(config)
    lines = [
        f"kdafuzz: device {device}, profile {_profile(config)}, seed {_seed(config) or 'its own'}, "
        f"database {database}"
    ]
    for name in split(config.getoption("--impl")):
        offer = offer_of(name, device)
        lines.append(f"kdafuzz: {offer.error}" if offer.error else f"kdafuzz: {name} {offer.version}")
    for path in config.stash[_SUSPECTS]:
        lines.append(f"kdafuzz: an earlier run was killed while it judged {path}: kdafuzz replay {path}")
    return lines


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
        told = ""
        try:
            self._search(Rounds(strategy, self.require), self.settings())
        except pytest.fail.Exception as failed:
            told = f"{failed}{self._unless_alone()}"
        if told:  # out here, or pytest would print both
            pytest.fail(told, pytrace=False)

    def _search(self, rounds: Rounds, profile: hypothesis.settings) -> None:
        """Replay, then draw; the profile is that of the running test."""
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

    def alone(self, case: Case) -> Verdict:
        """The verdict on a case as the only one of a new process."""
        return self._executor.alone(case)

    def require(self, case: Case, *, excuse: bool = True) -> None:
        """Judge a case; a failing one is saved and described with its replay line.

        A known finding is no failure: in a search it is an event and the search goes on, in a
        test of single cases it ends the test as an expected failure. Without ``excuse`` it is one.
        """
        verdict = self.check(case)
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
            self._failing = case
            added = "" if hypothesis.currently_in_test_context() else self._unless_alone()
            told = "\n".join(describe(case, verdict, path, self.name, self.device))
            pytest.fail(told + added, pytrace=False)

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Saved cases first: they tell most in the least time.
    items.sort(key=lambda item: "case_file" not in getattr(item, "fixturenames", ()))
    if config.getoption("--replay"):
        kept = [item for item in items if "case_file" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()  # Hypothesis collects garbage before every run; a tenth of a second for what is imported


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        names = split(metafunc.config.getoption("--impl"))
        metafunc.parametrize("subject", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    found = _device(pytestconfig)
    reporting.reporter(pytestconfig).check_device(found)  # a worker may not see the GPU
    return found


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, device: str) -> Iterator[Subject]:
    config = request.config
    seconds = time_box(_profile(config))
    known = read_known(config.getoption("--corpus") / LIST.name)
    ledger = reporting.reporter(config).ledger
    folder, seed = config.getoption("--save-failures"), _seed(config)
    made = Subject(request.param, device, folder, seconds, known, ledger, seed)
    if made.offer.error:
        pytest.fail(made.offer.error, pytrace=False)
    yield made
    made.close()
