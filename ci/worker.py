"""The workers of a fuzzing run: what they are told, what they tell, and what they do."""

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from ci.executor import Executor, SuiteError
from ci.failures import save
from ci.journal import Journal
from ci.known import Known, explained
from ci.processes import TerminatedError, die_with_parent
from ci.sanitize import watching
from ci.search import Failure, InterruptedSearchError, Search, Tally, run
from ci.worst.hunt import hunt
from impl.contract import Domain, UnavailableError
from oracle.case import Case
from oracle.judge import Verdict
from tests.strategies.cases import cases


@dataclass(frozen=True)
class Options:
    """What a run is asked to do; ``minutes`` overrules ``examples``."""

    implementations: tuple[str, ...]
    operations: tuple[str, ...]
    device: str
    examples: int = 100
    minutes: float | None = None
    seed: int = 0
    jobs: int = 1
    save: Path = Path(".kdafuzz/failures")
    palette: int = 0
    timeout: float = 60.0
    shrink_seconds: float = 90.0
    sanitize: str = ""
    keep_going: bool = False
    known: tuple[Known, ...] = ()
    hunting: bool = False
    """Whether searches are hunts for the nearest cases (``ci.worst``)."""


@dataclass(frozen=True)
class Shard:
    """One search of the plan. ``key`` is the table row it belongs to."""

    implementation: str
    operation: str
    index: int
    examples: int
    version: str = ""
    """What the implementation says it is: known findings hold for some versions."""

    @property
    def key(self) -> tuple[str, str]:
        """The row."""
        return self.implementation, self.operation


@dataclass(frozen=True)
class Event:
    """What a worker tells: progress, a failure, a shard's end, or that it cannot go on.

    A failure is told with its ``path``, at once and for every smaller case; the last before
    ``done`` is the result.
    """

    shard: Shard
    tally: Tally | None = None
    failure: Failure | None = None
    path: Path | None = None
    done: bool = False
    unavailable: str = ""
    broken: str = ""


class _Stop:
    """Handles SIGTERM: asks the search to end, and ends the case that it may be waiting for.

    It raises nothing: a signal that comes during garbage collection, where Hypothesis has a
    hook, would have its exception swallowed.
    """

    def __init__(self) -> None:
        self.asked = False
        self.executor: Executor | None = None

    def __call__(self, *_: object) -> None:
        self.asked = True
        if self.executor is not None:
            self.executor.kill()

    def check(self, case: Case) -> Verdict:
        """The executor's verdict; ``TerminatedError`` in place of whatever came of a stop."""
        assert self.executor is not None
        if self.asked:  # between two cases; the executor would start another process
            raise TerminatedError
        try:
            return self.executor.check(case)
        finally:
            if self.asked:
                raise TerminatedError

    def use(self, implementation: str, options: Options) -> None:
        """Have a child process for an implementation."""
        if self.executor is None or self.executor.implementation != implementation:
            self.close()
            journal = Journal(options.save, implementation, options.device)
            self.executor = Executor(
                implementation,
                options.device,
                timeout=options.timeout,
                journal=journal,
                sanitizer=watching(options.sanitize, options.device),
            )

    def close(self) -> None:
        """Stop the child process."""
        if self.executor is not None:
            self.executor.finish()


def work(
    options: Options, deadline: float | None, channel: Connection, environment: Mapping[str, str]
) -> None:
    """A worker process: one shard after the other, one child process per implementation.

    It gets (shard, domain) pairs through ``channel``, of which it alone has this end, and None at
    the end; it sends events. ``environment`` says which GPU is its own.
    """
    os.environ.update(environment)
    gc.freeze()  # Hypothesis collects garbage before every run; a tenth of a second for what is imported
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    parent = multiprocessing.parent_process()
    die_with_parent(os.getppid() if parent is None or parent.pid is None else parent.pid)
    try:
        while not stop.asked:
            if not channel.poll(0.5):
                continue
            task: tuple[Shard, Domain] | None = channel.recv()
            if task is None:
                break
            stop.use(task[0].implementation, options)
            _run_shard(options, deadline, *task, stop, channel)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
    finally:
        stop.close()


def _run_shard(
    options: Options,
    deadline: float | None,
    shard: Shard,
    domain: Domain,
    stop: _Stop,
    channel: Connection,
) -> None:
    def keep(failure: Failure) -> None:
        found = {"implementation": shard.implementation, "device": options.device}
        try:
            path = save(options.save, failure.case, failure.verdict, found)
        except OSError as error:
            raise UnavailableError(f"cannot save a failing case: {error}") from None
        channel.send(Event(shard, failure=failure, path=path))

    def known(case: Case, verdict: Verdict) -> str:
        finding = explained(options.known, shard.implementation, shard.version, case, verdict)
        return finding.case if finding is not None else ""

    try:
        search = Search(
            strategy=cases(shard.operation, domain, seed=options.seed, variants=options.palette),
            judge=stop.check,
            seed=options.seed * 1_000_003 + shard.index,
            examples=shard.examples,
            shrink=options.shrink_seconds > 0.0,
            shrink_seconds=options.shrink_seconds,
            until=float("inf") if deadline is None else time.monotonic() + deadline - time.time(),
            report=lambda tally: channel.send(Event(shard, tally)),
            known=known,
            found=keep,
            hunting=options.hunting,
        )
        compiled = options.device != "cpu"
        _, failure = hunt(search, domain, compiled=compiled) if options.hunting else run(search)
        if failure is not None:
            keep(failure if failure.flaky else _alone(failure, stop))
        channel.send(Event(shard, done=True))
    except UnavailableError as error:
        channel.send(Event(shard, unavailable=str(error), done=True))
    except InterruptedSearchError as interruption:
        keep(interruption.failure)
        raise
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:  # whatever ends a worker must end the run with it
        text = str(error) if isinstance(error, SuiteError) else traceback.format_exc()
        channel.send(Event(shard, broken=text, done=True))


def _alone(failure: Failure, stop: _Stop) -> Failure:
    """The failure, marked if the case passes as the only one of a new process."""
    stop.close()
    try:
        return replace(failure, flaky=stop.check(failure.case).ok)
    except KeyboardInterrupt:
        raise InterruptedSearchError(failure) from None
