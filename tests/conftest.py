"""Options, profiles and the header of the suite's pytest runs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck
from hypothesis.strategies import SearchStrategy

from ci.campaign import default_palette
from ci.executor import Executor
from ci.failures import CORPORA, save
from ci.known import LIST, Known, explained, read_known
from ci.query import Offer, ask
from ci.report import describe
from impl.contract import Domain
from impl.devices.registry import NAMES, default
from impl.registry import split
from oracle.buckets import buckets
from oracle.case import Case
from oracle.judge import Verdict
from tests.strategies.cases import cases

NIGHTLY_MINUTES = float(os.environ.get("KDAFUZZ_NIGHTLY_MINUTES", "10"))
"""How long one test may search under the profile ``nightly``."""
PROFILES = {
    "dev": hypothesis.settings(max_examples=25),
    "ci": hypothesis.settings(max_examples=100, derandomize=True, database=None),
    "nightly": hypothesis.settings(max_examples=200),
    "repro": hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse]),
}


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


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # one core a process; workers share the machine
    # The parent profile is Hypothesis's default: its own CI profile would switch off the database.
    parent = hypothesis.settings.get_profile("default")
    for name, profile in PROFILES.items():
        hypothesis.settings.register_profile(
            name,
            hypothesis.settings(
                parent,
                max_examples=profile.max_examples,
                derandomize=profile.derandomize,
                database=profile.database,
                phases=profile.phases,
                deadline=None,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_report_header(config: pytest.Config) -> list[str]:
    chosen = config.getoption("--hypothesis-profile") or ("ci" if os.environ.get("CI") else "dev")
    device = config.getoption("--device") or default()
    seed = config.getoption("--hypothesis-seed") or "its own"
    lines = [f"kdafuzz: device {device}, profile {chosen}, seed {seed}"]
    for name in split(config.getoption("--impl")):
        offer = offer_of(name, device)
        lines.append(f"kdafuzz: {offer.error}" if offer.error else f"kdafuzz: {name} {offer.version}")
    return lines


_OFFERS: dict[tuple[str, str], Offer] = {}


def offer_of(name: str, device: str) -> Offer:
    """What an implementation offers, asked once a process."""
    if (name, device) not in _OFFERS:
        _OFFERS[name, device] = ask(name, device)
    return _OFFERS[name, device]


class Subject:
    """One implementation on one device, and what a property test needs of it."""

    def __init__(
        self, name: str, device: str, save_to: Path, time_box: float, known: tuple[Known, ...] = ()
    ) -> None:
        self.name, self.device, self.known = name, device, known
        self.offer = offer_of(name, device)
        self._save_to = save_to
        self._executor = Executor(name, device)
        self._last: tuple[str, Path | None] = ("", None)
        self._time_box = time_box
        self.palette = default_palette(device, 25)

    def domain(self, operation: str) -> Domain:
        """What the implementation takes of an operation; the test is skipped if it does not offer it."""
        if operation not in self.offer.domains:
            pytest.skip(f"needs {operation}; found {self.offer.absent.get(operation, 'none')}")
        return self.offer.domains[operation]

    def cases(self, operation: str, *relations: str) -> SearchStrategy[Case]:
        """The operation's cases, with one of these relations or none."""
        domain = self.domain(operation)
        return cases(operation, domain, variants=self.palette, relations=relations)

    def search(self, strategy: SearchStrategy[Case]) -> None:
        """Require what the strategy draws; again with other cases while there is time, if there is a box."""

        @hypothesis.given(strategy)
        def holds(case: Case) -> None:
            self.require(case)

        end = time.monotonic() + self._time_box
        holds()
        while time.monotonic() < end:
            holds()

    def check(self, case: Case) -> Verdict:
        """The verdict on a case, whatever it is."""
        return self._executor.check(case)

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
            pytest.fail("\n".join(describe(case, verdict, path, self.name, self.device)), pytrace=False)

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
        self._executor.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--replay"):
        kept = [item for item in items if "case_file" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        names = split(metafunc.config.getoption("--impl"))
        metafunc.parametrize("subject", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--device") or default())


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, device: str) -> Iterator[Subject]:
    config = request.config
    time_box = 60.0 * NIGHTLY_MINUTES if config.getoption("--hypothesis-profile") == "nightly" else 0.0
    known = read_known(config.getoption("--corpus") / LIST.name)
    made = Subject(request.param, device, config.getoption("--save-failures"), time_box, known)
    if made.offer.error:
        pytest.fail(made.offer.error, pytrace=False)
    yield made
    made.close()
