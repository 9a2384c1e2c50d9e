"""A fuzzing run: searches over implementations and operations, spread over processes.

The parent holds the plan, the table and the progress; each of ``jobs`` worker processes
takes a shard (an implementation, an operation, a seed, a number of examples), draws cases
and has them judged in a child of its own. Shards depend on the run's seed alone, not on
the number of jobs, so the same seed runs the same cases anywhere: a shard whose worker was
killed is searched again by another, and a run that was cut short can be resumed.
"""

import contextlib
import copy
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from ci.executor import SuiteError
from ci.failures import save
from ci.gpus import Seat
from ci.journal import recover
from ci.processes import ending
from ci.runlog import Past, RunLog, unfinished
from ci.search import Failure, Tally
from ci.worker import Event, Options, Shard, work
from impl.contract import Domain

_STOP_SECONDS = 5.0
"""For workers to save what they found when a run is interrupted."""
SHARD = 100
"""Examples of one search: enough for Hypothesis to leave its small beginnings, few enough to share out."""
HUNT = 400
"""Examples of one hunt: a climb goes on from what it found before."""
DEATHS = 3
"""So many workers in a row that die of one shard are taken for a fault of what it draws."""


@dataclass
class Row:
    """One line of the table: an implementation on an operation.

    ``tally`` counts everything, ``finished`` only the shards that were searched to their end.
    """

    implementation: str
    operation: str
    version: str = ""
    absent: str = ""
    stopped: str = ""
    """Why the rest of it could not be run."""
    tally: Tally = field(default_factory=Tally)
    finished: Tally = field(default_factory=Tally)
    failures: list[tuple[Failure, Path]] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    earlier: float = 0.0
    """Seconds that it took before the run was resumed."""

    @property
    def rate(self) -> float:
        """Judged examples a second, over all processes."""
        seconds = self.earlier + self.ended - self.started
        return self.tally.executions / max(seconds, 1e-9) if self.tally.executions else 0.0


@dataclass
class _Worker:
    """A worker process, and what it is at."""

    process: BaseProcess
    channel: Connection
    seat: Seat | None
    shard: Shard | None = None
    part: Tally = field(default_factory=Tally)
    found: bool = False
    """Whether the shard has a failing case, this time."""


class Run:
    """A fuzzing run; ``rows`` may be read at any time, also after an interruption.

    ``seats`` gives each worker its GPU. ``notes`` says what happened beside the cases: killed workers.
    """

    def __init__(
        self,
        options: Options,
        versions: dict[str, str],
        domains: dict[tuple[str, str], Domain],
        *,
        seats: Sequence[Seat] = (),
        log: RunLog | None = None,
        past: Past | None = None,
    ) -> None:
        self.options = options
        self.domains = domains
        self.notes: list[str] = []
        self.rows = {
            (i, o): Row(i, o, versions.get(i, ""))
            for i in options.implementations
            for o in options.operations
        }
        self._seats, self._log = seats, log
        self._finished: set[Shard] = set()
        """Those of the run that this one goes on with."""
        self._left: dict[Shard, tuple[Failure, Path]] = {}
        """Failing cases of shards that will be searched again."""
        self._deaths: dict[Shard, int] = {}
        self._suspects: dict[Shard, list[Path]] = {}
        used = past.seconds if past is not None else 0.0
        self._deadline = time.time() + options.minutes * 60 - used if options.minutes is not None else None
        if past is not None:
            self._take_past(past)

    def _take_past(self, past: Past) -> None:
        self._finished, self._left = set(past.shards), unfinished(past)
        for shard, tally in past.shards.items():
            row = self.rows[shard.key]
            row.finished.add(tally)
            row.earlier = past.seconds
            if shard in past.failures:
                self._keep(shard, *past.failures[shard])
        for row in self.rows.values():
            row.tally = copy.deepcopy(row.finished)

    @property
    def _shard(self) -> int:
        """Examples of one search."""
        return HUNT if self.options.hunting else SHARD

    def shards(self) -> Iterator[Shard]:
        """The plan: every row's shards in turn, without end if the run is bounded by time."""
        keys = [key for key in self.rows if key in self.domains]
        if self._deadline is not None:
            index = 0
            while any(map(self._wanted, keys)) and time.time() < self._deadline:
                yield from (Shard(*key, index, self._shard, self.rows[key].version) for key in keys)
                index += 1
            return
        for key in keys:
            for index, start in enumerate(range(0, self.options.examples, self._shard)):
                size = min(self._shard, self.options.examples - start)
                yield Shard(*key, index, size, self.rows[key].version)

    def execute(self, progress: Callable[["Run"], None]) -> None:
        """Run the plan. ``SuiteError`` if the suite itself fails; an interruption passes through."""
        workers: list[_Worker] = []
        try:
            self._feed(workers, progress)
            for worker in workers:
                with contextlib.suppress(OSError):  # it has died, and has nothing to do
                    worker.channel.send(None)
            for worker in workers:
                worker.process.join()
        finally:
            self._stop(workers)
            for shard, found in self._left.items():
                self._keep(shard, *found)
            if self._log is not None:
                self._log.close()

    def _start(self, seat: Seat | None) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        environment = seat.environment() if seat is not None else {}
        process = context.Process(
            target=work, args=(self.options, self._deadline, theirs, environment), daemon=True
        )
        # Ctrl-C reaches every process of the terminal; only this one shall act on it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        return _Worker(process, ours, seat)

    def _feed(self, workers: list[_Worker], progress: Callable[["Run"], None]) -> None:
        past = self._finished | self._left.keys()
        plan, again = (shard for shard in self.shards() if shard not in past), deque(self._left)
        while True:
            self._hand_out(workers, plan, again)
            if all(worker.shard is None for worker in workers):
                return
            ready = connection.wait([worker.channel for worker in workers], timeout=0.5)
            for worker in [worker for worker in workers if worker.channel in ready]:
                if not self._hear(worker):
                    self._bury(workers, worker, again)
            progress(self)

    def _hand_out(self, workers: list[_Worker], plan: Iterator[Shard], again: "deque[Shard]") -> None:
        """Give shards to workers until all are busy or nothing is left; start those that are missing."""
        while True:
            idle = next((worker for worker in workers if worker.shard is None), None)
            if idle is None and len(workers) >= self.options.jobs:
                return
            shard = self._next(plan, again)
            if shard is None:
                return
            if idle is None:
                idle = self._start(self._free_seat(workers))
                workers.append(idle)
            self._give(idle, shard)

    def _next(self, plan: Iterator[Shard], again: "deque[Shard]") -> Shard | None:
        while (shard := again.popleft() if again else next(plan, None)) is not None:
            if self._wanted(shard.key):
                return shard
        return None

    def _free_seat(self, workers: Sequence[_Worker]) -> Seat | None:
        free = list(self._seats)
        for worker in workers:
            if worker.seat is not None:
                free.remove(worker.seat)
        return free[0] if free else None

    def _give(self, worker: _Worker, shard: Shard) -> None:
        worker.shard, worker.part, worker.found = shard, Tally(), False
        with contextlib.suppress(OSError):  # it has died; that will be heard
            worker.channel.send((shard, self.domains[shard.key]))

    def _hear(self, worker: _Worker) -> bool:
        """Take one event in; False if the worker is dead, which may have cut it short."""
        try:
            event = worker.channel.recv()
        except Exception:  # whatever half a message may bring about
            return False
        self._take(worker, event)
        return True

    def _bury(self, workers: list[_Worker], dead: _Worker, again: "deque[Shard]") -> None:
        """Have what a dead worker was at searched again, by another one; give up on a deadly shard."""
        dead.process.kill()
        dead.process.join()
        dead.channel.close()
        workers.remove(dead)
        how, shard = ending(dead.process.exitcode or 0, b""), dead.shard
        suspects = recover(self.options.save, dead.process.pid)
        during = f" while it judged {', '.join(map(str, suspects))}" if suspects else ""
        if shard is None:
            return
        self._deaths[shard] = self._deaths.get(shard, 0) + 1
        self._suspects.setdefault(shard, []).extend(suspects)
        row = self.rows[shard.key]
        row.tally = copy.deepcopy(row.finished)
        for other in workers:
            if other.shard is not None and other.shard.key == shard.key:
                row.tally.add(other.part)
        if self._deaths[shard] >= DEATHS:
            row.stopped = f"{DEATHS} workers were lost over one part of the search; the last{during}: {how}"
            return
        self.notes.append(f"a worker was lost ({how}); another one does its part again")
        if self._wanted(shard.key):
            again.append(shard)

    def _stop(self, workers: Sequence[_Worker]) -> None:
        """End the workers that are left, and take in the failing cases that they save on the way."""
        for worker in workers:
            worker.process.terminate()
        end = time.monotonic() + _STOP_SECONDS
        left = list(workers)
        while left and time.monotonic() < end:
            ready = connection.wait([worker.channel for worker in left], timeout=0.1)
            left = [w for w in left if w.channel not in ready or self._hear_last(w)]
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.channel.close()

    def _hear_last(self, worker: _Worker) -> bool:
        """Take a failing case in; False once the worker has ended."""
        try:
            event = worker.channel.recv()
        except Exception:  # as above
            return False
        if event.failure is not None:
            self._take(worker, event)
        return True

    def _wanted(self, key: tuple[str, str]) -> bool:
        row = self.rows[key]
        return not row.absent and not row.stopped and (self.options.keep_going or not row.failures)

    def _take(self, worker: _Worker, event: Event) -> None:
        row, shard, now = self.rows[event.shard.key], event.shard, time.monotonic()
        if event.broken:
            raise SuiteError(event.broken)
        if event.unavailable:
            row.stopped = event.unavailable
        if event.tally is not None:
            row.started = row.started or now - event.tally.seconds
            row.ended = now
            row.tally.add(event.tally)
            worker.part.add(event.tally)
        if event.failure is not None and event.path is not None:
            worker.found = True
            self._found(shard, event.failure, event.path)
        if event.done:
            self._end(worker, shard)

    def _found(self, shard: Shard, failure: Failure, path: Path) -> None:
        """A failing case, or a smaller one in its place."""
        before = self._left.get(shard)
        self._left[shard] = failure, path
        if not path.exists():  # by now: another part, or an earlier search of this one, was past it
            found = {"implementation": shard.implementation, "device": self.options.device}
            save(self.options.save, failure.case, failure.verdict, found)
        if self._log is not None:
            self._log.failed(shard, failure, path)
        if before is not None and before[1] not in self._paths():
            before[1].unlink(missing_ok=True)

    def _paths(self) -> set[Path]:
        """Where failing cases are: two shards may come to one case."""
        kept = [found for row in self.rows.values() for found in row.failures]
        return {path for _, path in (*kept, *self._left.values())}

    def _end(self, worker: _Worker, shard: Shard) -> None:
        if shard in self._left:
            failure, path = self._left.pop(shard)
            late = self._deadline is not None and time.time() > self._deadline
            if not worker.found and not late and not self.rows[shard.key].stopped:
                # A worker that was lost had it; the one that did its part again had not.
                failure = replace(failure, flaky=True)
                if self._log is not None:
                    self._log.failed(shard, failure, path)
            self._keep(shard, failure, path)
        for suspect in self._suspects.pop(shard, []):
            suspect.unlink(missing_ok=True)  # judged again, and nobody died
        self.rows[shard.key].finished.add(worker.part)
        if self._log is not None and not self.rows[shard.key].stopped:
            self._log.done(shard, worker.part)
        worker.shard = None

    def _keep(self, shard: Shard, failure: Failure, path: Path) -> None:
        row = self.rows[shard.key]
        if all(path != known for _, known in row.failures):  # two shards may end in one smallest case
            row.failures.append((failure, path))
