"""The part of pytest runs that reports: JUnit properties, demands of CI, and the summary for it.

The process that runs a test attaches what a property test did to its report, and pytest-xdist
carries it to the controller. There, or in the only process, it is added up when all is over.
"""

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ci.query import Offer
from ci.reporting.demands import MIN_EXAMPLES, REQUIRE_GPU, Demands, all_skipped
from ci.reporting.publish import BUILDKITE, GITHUB, Outlets
from ci.reporting.record import Ledger, Record
from ci.reporting.summary import Failed, Line, Summary
from impl.contract import OPERATIONS, UnavailableError

NAME = "kdafuzz-reporting"
_SENT = "kdafuzz_demands"
"""Under this name a worker gets the demands."""
_TAKEN = (REQUIRE_GPU, MIN_EXAMPLES, GITHUB, BUILDKITE)
Key = tuple[str, str]


def add_options(group: pytest.OptionGroup) -> None:
    """The options that go with the environment's variables."""
    group.addoption(
        "--require-gpu",
        action="store_true",
        help=f"a missing GPU, or a run in which nothing ran, is an error; as {REQUIRE_GPU}=1",
    )
    group.addoption(
        "--min-examples",
        type=int,
        help=f"fail where an operation judged fewer examples, per implementation; as {MIN_EXAMPLES}",
    )


def register(
    config: pytest.Config, implementations: Sequence[str], offer: Callable[[str], Offer], template: Record
) -> None:
    """Report on this run. ``pytest.UsageError``, before any test, if a demand cannot be met.

    ``template`` has what the records of all tests have in common. What the environment asks of
    this run it asks of no other: the runs that tests start do not see it.
    """
    given = getattr(config, "workerinput", {}).get(_SENT)
    try:
        demands = Demands(*given) if given is not None else _demands(config)
        if given is None and not config.getoption("collectonly"):
            demands.check_device(template.device)
    except UnavailableError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Reporter(config, demands, implementations, offer, template), NAME)


def reporter(config: pytest.Config) -> "Reporter":
    """The plugin that ``register`` made."""
    found = config.pluginmanager.get_plugin(NAME)
    assert isinstance(found, Reporter)
    return found


def _demands(config: pytest.Config) -> Demands:
    asked = Demands.asked()
    examples = config.getoption("--min-examples")
    gpu = asked.gpu or config.getoption("--require-gpu")
    return Demands(gpu, asked.examples if examples is None else examples)


@dataclass
class _Counts:
    """What the controller adds up."""

    executed: int = 0
    of_subjects: int = 0
    """Tests of implementations; ``judging`` of them judged something on the device."""
    judging: int = 0
    seconds: dict[Key, float] = field(default_factory=dict)
    lines: dict[Key, Line] = field(default_factory=dict)
    absent: set[Key] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    others: list[Failed] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    gpus: set[str] = field(default_factory=set)


class Reporter:
    """The plugin; ``ledger`` is where property tests of this process enter what they do."""

    def __init__(
        self,
        config: pytest.Config,
        demands: Demands,
        implementations: Sequence[str],
        offer: Callable[[str], Offer],
        template: Record,
    ) -> None:
        self.ledger = Ledger()
        self.demands = demands
        self._worker = hasattr(config, "workerinput")
        self._idle = bool(config.getoption("collectonly"))
        self._implementations, self._offer, self._template = implementations, offer, template
        self._counts = _Counts()
        self._problems: list[str] = []
        self._warnings: list[str] = []
        self._taken = {name: os.environ[name] for name in _TAKEN if name in os.environ}
        self._outlets = Outlets() if self._worker else Outlets.claimed()
        for name in _TAKEN:
            os.environ.pop(name, None)

    # In the process that runs tests

    def check_device(self, device: str) -> None:
        """Fail the test that is to run on a device which does not meet the demands."""
        try:
            self.demands.check_device(device)
        except UnavailableError as error:
            pytest.fail(str(error), pytrace=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Open the test's record."""
        name = item.callspec.params.get("subject", "") if hasattr(item, "callspec") else ""
        self.ledger.begin(replace(self._template, implementation=name if isinstance(name, str) else ""))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the record to what is reported from here on, JUnit's part included."""
        if call.when == "call" or (call.when == "setup" and call.excinfo is not None):
            record = self.ledger.current
            if record.implementation:
                offer = self._offer(record.implementation)
                record.version, record.gpu, record.gpu_uuid = offer.version, offer.gpu, offer.gpu_uuid
            item.user_properties += record.properties()
        return (yield)

    # In the controller

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker what is demanded."""
        node.workerinput[_SENT] = (self.demands.gpu, self.demands.examples)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test up."""
        if self._worker or (report.when != "call" and report.passed):
            return
        record = Record.of(report.user_properties)
        counts, expected = self._counts, hasattr(report, "wasxfail")
        skipped = report.skipped and not expected
        if report.when == "call":
            counts.executed += not skipped
        line = self._line(record) if record is not None else None
        if record is not None and line is not None and report.when != "teardown":
            self._add(record, line)
        if skipped:
            reason = _reason(report)
            counts.reasons.append(reason)
            if line is not None:
                line.skipped[reason] += 1
        if report.failed:
            failed = Failed(report.nodeid, report.longreprtext, record.replay if record is not None else "")
            (counts.others if line is None else line.failures).append(failed)

    def _line(self, record: Record) -> Line:
        key = record.implementation, record.operation
        return self._counts.lines.setdefault(key, Line(*key))

    def _add(self, record: Record, line: Line) -> None:
        counts, key = self._counts, (record.implementation, record.operation)
        counts.of_subjects += 1
        counts.judging += record.examples > 0
        counts.seconds[key] = counts.seconds.get(key, 0.0) + record.seconds
        line.version = record.version or line.version
        line.examples += record.examples
        line.rate = line.examples / max(counts.seconds[key], 1e-9)
        line.ratio = max(line.ratio, record.largest_ratio)
        line.known += record.known
        if record.absent:
            counts.absent.add(key)
        if record.stale:
            counts.stale.append(record.stale)
        if record.gpu:
            counts.gpus.add(f"{record.gpu} ({record.gpu_uuid})")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail the run if a demand was not met, and publish the report."""
        if self._worker or self._idle:
            return
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if ended or exitstatus == pytest.ExitCode.TESTS_FAILED:
            self._problems = self._unmet()
        if self._problems and ended:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        facts = [f"device {self._template.device}", *sorted(self._counts.gpus)]
        facts += [f"profile {self._template.profile}", f"seed {self._template.seed}"]
        lines = sorted(self._counts.lines.items(), key=lambda item: self._place(item[0]))
        summary = Summary(
            "kdafuzz, pytest",
            session.exitstatus == pytest.ExitCode.OK,
            facts,
            [line for _, line in lines],
            self._problems,
            self._counts.others,
            self._counts.stale,
        )
        self._warnings = self._outlets.publish(summary)

    def _unmet(self) -> list[str]:
        """Why this run, whatever its tests say, is none that CI can rely on."""
        counts = self._counts
        found = []
        if self.demands.gpu and (not counts.executed or (counts.of_subjects and not counts.judging)):
            found.append(all_skipped(counts.reasons))
        if self.demands.examples:
            judged = {
                key: line.examples
                for key, line in counts.lines.items()
                if key not in counts.absent and key[1]
            }
            asked = {name for name, _ in counts.lines}
            judged |= {(name, "(every operation)"): 0 for name in self._implementations if name not in asked}
            found += self.demands.unmet(judged)
        return found

    def _place(self, key: Key) -> tuple[int, int]:
        name, operation = key
        known = (*self._implementations, name)
        return known.index(name), (*OPERATIONS, operation).index(operation)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say below the failures what CI would overlook there."""
        if self._worker:
            return
        for title, lines, colour in (
            ("stale known findings", self._counts.stale, "yellow"),
            ("demands that were not met", self._problems, "red"),
            ("report", self._warnings, "yellow"),
        ):
            if lines:
                terminalreporter.section(title, sep="-", **{colour: True})
                for line in lines:
                    terminalreporter.line(line)

    def pytest_unconfigure(self) -> None:
        """Another run in this process is asked again."""
        os.environ.update(self._taken)


def _reason(report: pytest.TestReport) -> str:
    """Why a test was skipped."""
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return str(told).removeprefix("Skipped: ")
