"""A fuzzing run: searches over implementations and operations, spread over processes.

The parent holds the plan, the table and the progress; each of ``jobs`` worker processes
takes a shard (an implementation, an operation, a seed, a number of examples), draws cases
and has them judged in a child of its own. Shards depend on the run's seed alone, not on
the number of jobs, so the same seed runs the same cases anywhere.
"""

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

from hypothesis.strategies import SearchStrategy

from ci.executor import Executor, SuiteError
from ci.failures import save
from ci.search import Failure, Search, Tally, run
from impl.contract import Domain, UnavailableError
from oracle.case import Case
from tests.strategies.cases import CASES
from tests.strategies.variants import palette

SHARD = 100
"""Examples of one search: enough for Hypothesis to leave its small beginnings, few enough to share out."""


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


@dataclass(frozen=True)
class Shard:
    """One search of the plan. ``key`` is the table row it belongs to."""

    implementation: str
    operation: str
    index: int
    examples: int

    @property
    def key(self) -> tuple[str, str]:
        """The row."""
        return self.implementation, self.operation


@dataclass
class Row:
    """One line of the table: an implementation on an operation."""

    implementation: str
    operation: str
    version: str = ""
    absent: str = ""
    tally: Tally = field(default_factory=Tally)
    failures: list[tuple[Failure, Path]] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0

    @property
    def rate(self) -> float:
        """Judged examples a second, over all processes."""
        return self.tally.executions / max(self.ended - self.started, 1e-9) if self.tally.executions else 0.0


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


class Run:
    """A fuzzing run; ``rows`` may be read at any time, also after an interruption."""

    def __init__(
        self, options: Options, versions: dict[str, str], domains: dict[tuple[str, str], Domain]
    ) -> None:
        self.options = options
        self.domains = domains
        self.rows = {
            (i, o): Row(i, o, versions.get(i, ""))
            for i in options.implementations
            for o in options.operations
        }
        self._deadline = time.time() + options.minutes * 60 if options.minutes is not None else None

    def shards(self) -> Iterator[Shard]:
        """The plan: every row's shards in turn, without end if the run is bounded by time."""
        keys = [key for key in self.rows if key in self.domains]
        if self.options.minutes is not None:
            index = 0
            while keys and time.time() < (self._deadline or 0.0):
                yield from (Shard(*key, index, SHARD) for key in keys)
                index += 1
            return
        for key in keys:
            for index, start in enumerate(range(0, self.options.examples, SHARD)):
                yield Shard(*key, index, min(SHARD, self.options.examples - start))

    def execute(self, progress: Callable[["Run"], None]) -> None:
        """Run the plan. ``SuiteError`` if the suite itself fails; an interruption passes through."""
        context = multiprocessing.get_context("spawn")
        tasks: Queue[tuple[Shard, Domain] | None] = context.Queue(maxsize=2 * self.options.jobs)
        events: Queue[Event] = context.Queue()
        workers = [
            context.Process(target=_work, args=(self.options, self._deadline, tasks, events), daemon=False)
            for _ in range(self.options.jobs)
        ]
        for worker in workers:
            worker.start()
        try:
            self._feed(tasks, events, workers, progress)
            for _ in workers:
                tasks.put(None)
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                worker.terminate()
            for channel in (tasks, events):
                channel.cancel_join_thread()

    def _feed(
        self,
        tasks: "Queue[tuple[Shard, Domain] | None]",
        events: "Queue[Event]",
        workers: Sequence[BaseProcess],
        progress: Callable[["Run"], None],
    ) -> None:
        plan, pending, exhausted = self.shards(), 0, False
        while pending or not exhausted:
            while not exhausted and pending < 2 * self.options.jobs:
                shard = next(plan, None)
                if shard is None:
                    exhausted = True
                elif self._wanted(shard):
                    tasks.put((shard, self.domains[shard.key]))
                    pending += 1
            try:
                event = events.get(timeout=0.5)
            except queue.Empty:
                if not all(worker.is_alive() for worker in workers):
                    raise SuiteError("a worker process died") from None
                progress(self)
                continue
            self._take(event)
            pending -= event.done
            progress(self)

    def _wanted(self, shard: Shard) -> bool:
        row = self.rows[shard.key]
        return not row.absent and (self.options.keep_going or not row.failures)

    def _take(self, event: Event) -> None:
        row, now = self.rows[event.shard.key], time.monotonic()
        if event.broken:
            raise SuiteError(event.broken)
        if event.unavailable:
            row.absent = event.unavailable
        if event.tally is not None:
            row.started = row.started or now - event.tally.seconds
            row.ended = now
            row.tally.add(event.tally)
        if event.failure is not None and event.path is not None:
            row.failures.append((event.failure, event.path))


def _work(
    options: Options,
    deadline: float | None,
    tasks: "Queue[tuple[Shard, Domain] | None]",
    events: "Queue[Event]",
) -> None:
    """A worker process: one shard after the other, one child process per implementation."""
    executor: Executor | None = None
    current = ""
    try:
        while (task := tasks.get()) is not None:
            shard, domain = task
            if executor is None or current != shard.implementation:
                if executor is not None:
                    executor.close()
                current = shard.implementation
                executor = Executor(current, options.device, timeout=options.timeout)
            _run_shard(options, deadline, shard, domain, executor, events)
    except KeyboardInterrupt:
        pass
    finally:
        if executor is not None:
            executor.close()


def _run_shard(
    options: Options,
    deadline: float | None,
    shard: Shard,
    domain: Domain,
    executor: Executor,
    events: "Queue[Event]",
) -> None:
    try:
        search = Search(
            strategy=strategy(shard.operation, domain, options.seed, options.palette),
            judge=executor.check,
            seed=options.seed * 1_000_003 + shard.index,
            examples=shard.examples,
            until=float("inf") if deadline is None else time.monotonic() + deadline - time.time(),
            report=lambda tally: events.put(Event(shard, tally)),
        )
        _, failure = run(search)
        if failure is not None:
            found = {"implementation": shard.implementation, "device": options.device}
            events.put(
                Event(shard, failure=failure, path=save(options.save, failure.case, failure.verdict, found))
            )
        events.put(Event(shard, done=True))
    except UnavailableError as error:
        events.put(Event(shard, unavailable=str(error), done=True))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever ends a worker must end the run with it
        text = str(error) if isinstance(error, SuiteError) else traceback.format_exc()
        events.put(Event(shard, broken=text, done=True))


def strategy(operation: str, domain: Domain, seed: int, palette_size: int) -> SearchStrategy[Case]:
    """The operation's strategy for a domain; with a palette of ``palette_size`` variants unless 0."""
    chosen = palette(seed, palette_size, domain) if palette_size else None
    return CASES[operation](domain=domain, palette=chosen)
