"""A fuzzing run: searches over implementations and operations, spread over processes.

The parent holds the plan, the table and the progress; each of ``jobs`` worker processes
takes a shard (an implementation, an operation, a seed, a number of examples), draws cases
and has them judged in a child of its own. Shards depend on the run's seed alone, not on
the number of jobs, so the same seed runs the same cases anywhere.
"""

import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path

from ci.executor import SuiteError
from ci.search import Failure, Tally
from ci.worker import Event, Options, Shard, work
from impl.contract import Domain

_STOP_SECONDS = 5.0
"""For workers to save what they found when a run is interrupted."""
_KEPT: list[object] = []
"""Channels of past runs. Their last reference must not be a feeder thread's: that would free their
semaphores while the interpreter ends, and the system's tracker of semaphores would complain."""
SHARD = 100
"""Examples of one search: enough for Hypothesis to leave its small beginnings, few enough to share out."""


@dataclass
class Row:
    """One line of the table: an implementation on an operation."""

    implementation: str
    operation: str
    version: str = ""
    absent: str = ""
    stopped: str = ""
    """Why the rest of it could not be run."""
    tally: Tally = field(default_factory=Tally)
    failures: list[tuple[Failure, Path]] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0

    @property
    def rate(self) -> float:
        """Judged examples a second, over all processes."""
        return self.tally.executions / max(self.ended - self.started, 1e-9) if self.tally.executions else 0.0


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
        if self._deadline is not None:
            index = 0
            while any(map(self._wanted, keys)) and time.time() < self._deadline:
                yield from (Shard(*key, index, SHARD, self.rows[key].version) for key in keys)
                index += 1
            return
        for key in keys:
            for index, start in enumerate(range(0, self.options.examples, SHARD)):
                size = min(SHARD, self.options.examples - start)
                yield Shard(*key, index, size, self.rows[key].version)

    def execute(self, progress: Callable[["Run"], None]) -> None:
        """Run the plan. ``SuiteError`` if the suite itself fails; an interruption passes through."""
        context = multiprocessing.get_context("spawn")
        tasks: Queue[tuple[Shard, Domain] | None] = context.Queue()
        events: Queue[Event] = context.Queue()
        workers: list[BaseProcess] = []
        try:
            # Ctrl-C reaches every process of the terminal; only this one shall act on it.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                for _ in range(self._jobs()):
                    arguments = (self.options, self._deadline, tasks, events)
                    workers.append(context.Process(target=work, args=arguments, daemon=True))
                    workers[-1].start()
            finally:
                signal.signal(signal.SIGINT, before)
            self._feed(tasks, events, workers, progress)
            for _ in workers:
                tasks.put(None)
            for worker in workers:
                worker.join()
        finally:
            self._stop(workers, events)
            for channel in (tasks, events):
                channel.cancel_join_thread()
            _KEPT.append((tasks, events))

    def _jobs(self) -> int:
        """No more processes than there are shards."""
        if self._deadline is not None:
            return self.options.jobs
        return max(1, min(self.options.jobs, sum(1 for _ in self.shards())))

    def _stop(self, workers: Sequence[BaseProcess], events: "Queue[Event]") -> None:
        """End the workers that are left, and take in the failing cases that they save on the way."""
        for worker in workers:
            worker.terminate()
        end = time.monotonic() + _STOP_SECONDS
        while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
            self._take_failure(events, 0.1)
        for worker in workers:
            worker.kill()
            worker.join()
        # One that was killed may have left half an event, which would be waited for.
        while all(worker.exitcode != -signal.SIGKILL for worker in workers):
            if not self._take_failure(events, 0.0):
                break

    def _take_failure(self, events: "Queue[Event]", timeout: float) -> bool:
        try:
            event = events.get(timeout=timeout)
        except (queue.Empty, EOFError, OSError):
            return False
        if event.failure is not None:
            self._take(event)
        return True

    def _feed(
        self,
        tasks: "Queue[tuple[Shard, Domain] | None]",
        events: "Queue[Event]",
        workers: Sequence[BaseProcess],
        progress: Callable[["Run"], None],
    ) -> None:
        plan, pending, exhausted = self.shards(), 0, False
        while pending or not exhausted:
            for worker in workers:
                if worker.exitcode is not None:
                    raise SuiteError(f"a worker process died (exit code {worker.exitcode})")
            while not exhausted and pending < 2 * self.options.jobs:
                shard = next(plan, None)
                if shard is None:
                    exhausted = True
                elif self._wanted(shard.key):
                    tasks.put((shard, self.domains[shard.key]))
                    pending += 1
            try:
                event = events.get(timeout=0.5)
            except queue.Empty:
                progress(self)
                continue
            self._take(event)
            pending -= event.done
            progress(self)

    def _wanted(self, key: tuple[str, str]) -> bool:
        row = self.rows[key]
        return not row.absent and not row.stopped and (self.options.keep_going or not row.failures)

    def _take(self, event: Event) -> None:
        row, now = self.rows[event.shard.key], time.monotonic()
        if event.broken:
            raise SuiteError(event.broken)
        if event.unavailable:
            row.stopped = event.unavailable
        if event.tally is not None:
            row.started = row.started or now - event.tally.seconds
            row.ended = now
            row.tally.add(event.tally)
        known = {path for _, path in row.failures}  # two shards may end in one smallest case
        if event.failure is not None and event.path is not None and event.path not in known:
            row.failures.append((event.failure, event.path))
