"""The workers of a fuzzing run: what they are told, what they tell, and what they do."""

import gc
import multiprocessing
import os
import queue
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

from ci.executor import Executor, SuiteError
from ci.failures import save
from ci.known import Known, explained
from ci.processes import TerminatedError, die_with_parent
from ci.search import Failure, InterruptedSearchError, Search, Tally, run
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
    keep_going: bool = False
    known: tuple[Known, ...] = ()


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
    """What a worker tells: progress, a failure, a shard's end, or that it cannot go on."""

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
        try:
            return self.executor.check(case)
        finally:
            if self.asked:
                raise TerminatedError

    def use(self, implementation: str, options: Options) -> None:
        """Have a child process for an implementation."""
        if self.executor is None or self.executor.implementation != implementation:
            self.close()
            self.executor = Executor(implementation, options.device, timeout=options.timeout)

    def close(self) -> None:
        """Stop the child process."""
        if self.executor is not None:
            self.executor.close()


def work(
    options: Options,
    deadline: float | None,
    tasks: "Queue[tuple[Shard, Domain] | None]",
    events: "Queue[Event]",
) -> None:
    """A worker process: one shard after the other, one child process per implementation."""
    gc.freeze()  # Hypothesis collects garbage before every run; a tenth of a second for what is imported
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    parent = multiprocessing.parent_process()
    die_with_parent(os.getppid() if parent is None or parent.pid is None else parent.pid)
    try:
        while not stop.asked:
            try:
                task = tasks.get(timeout=0.5)
            except queue.Empty:
                continue
            if task is None:
                break
            stop.use(task[0].implementation, options)
            _run_shard(options, deadline, *task, stop, events)
    except KeyboardInterrupt:
        pass
    finally:
        stop.close()


def _run_shard(
    options: Options,
    deadline: float | None,
    shard: Shard,
    domain: Domain,
    stop: _Stop,
    events: "Queue[Event]",
) -> None:
    def keep(failure: Failure) -> None:
        found = {"implementation": shard.implementation, "device": options.device}
        try:
            path = save(options.save, failure.case, failure.verdict, found)
        except OSError as error:
            raise UnavailableError(f"cannot save a failing case: {error}") from None
        events.put(Event(shard, failure=failure, path=path))

    def known(case: Case, verdict: Verdict) -> str:
        finding = explained(options.known, shard.implementation, shard.version, case, verdict)
        return finding.case if finding is not None else ""

    try:
        search = Search(
            strategy=cases(shard.operation, domain, seed=options.seed, variants=options.palette),
            judge=stop.check,
            seed=options.seed * 1_000_003 + shard.index,
            examples=shard.examples,
            until=float("inf") if deadline is None else time.monotonic() + deadline - time.time(),
            report=lambda tally: events.put(Event(shard, tally)),
            known=known,
        )
        _, failure = run(search)
        if failure is not None:
            keep(failure)
        events.put(Event(shard, done=True))
    except UnavailableError as error:
        events.put(Event(shard, unavailable=str(error), done=True))
    except InterruptedSearchError as interruption:
        keep(interruption.failure)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever ends a worker must end the run with it
        text = str(error) if isinstance(error, SuiteError) else traceback.format_exc()
        events.put(Event(shard, broken=text, done=True))
