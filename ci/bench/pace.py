"""Searches in several processes at once, each with a kernel's process: examples a second, and memory."""

import gc
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from ci.executor import Executor
from ci.gpus import Gpu, seats, visible
from ci.processes import die_with_parent, resident
from ci.search import Search, run
from impl.contract import Domain, UnavailableError, one_line
from oracle.case import Case
from oracle.judge import Verdict
from tests.strategies.cases import cases

_PATIENCE = 3600.0
"""Seconds for a process to load its implementation and to judge its examples twice."""


@dataclass(frozen=True)
class Task:
    """What every process searches; process ``i`` has the seed ``seed + i``."""

    implementation: str
    operation: str
    device: str
    domain: Domain
    examples: int
    seed: int
    palette: int
    timeout: float

    def search(self, index: int = 0) -> Search:
        """One process's search, with nothing judged yet."""
        strategy = cases(self.operation, self.domain, seed=self.seed, variants=self.palette)
        return Search(strategy, lambda case: Verdict(), self.seed + index, self.examples, shrink=False)


@dataclass(frozen=True)
class Pace:
    """Of ``jobs`` processes: judged examples a second of all, and per process memory in bytes.

    ``early`` and ``resident`` are what a kernel's process holds once it has judged every case once, and
    at the end; ``gpu`` what it takes of its GPU, if no other process is at work there.
    """

    jobs: int
    rate: float
    early: int
    resident: int
    gpu: int | None = None


@dataclass(frozen=True)
class _Part:
    """One process's share, with moments of ``time.monotonic``."""

    began: float = 0.0
    ended: float = 0.0
    examples: int = 0
    early: int = 0
    resident: int = 0
    error: str = ""


def pace(task: Task, jobs: int) -> Pace:
    """Have every process judge its examples twice: first unwatched (it loads and compiles), then timed.

    ``UnavailableError`` where an implementation cannot be loaded, or an example fails.
    """
    gpus: Sequence[Gpu] = visible() if task.device == "cuda" else ()
    places = seats(gpus, jobs)
    spawn = multiprocessing.get_context("spawn")
    barrier, told = spawn.Barrier(jobs), spawn.Queue()
    processes = [
        spawn.Process(target=_judge, args=(task, i, places[i].environment() if places else {}, barrier, told))
        for i in range(jobs)
    ]
    for process in processes:
        process.start()
    try:
        parts = [_next(told, processes) for _ in processes]
        taken = gpus[0].free - visible()[0].free if jobs == 1 and gpus else None
    finally:
        for process in processes:
            process.terminate()
            process.join()
    errors = [part.error for part in parts if part.error]
    if errors:
        raise UnavailableError(errors[0])
    seconds = max(part.ended for part in parts) - min(part.began for part in parts)
    return Pace(
        jobs,
        sum(part.examples for part in parts) / seconds,
        max(part.early for part in parts),
        max(part.resident for part in parts),
        taken,
    )


def _next(told: "Queue[_Part]", processes: Sequence[multiprocessing.process.BaseProcess]) -> _Part:
    """What one more process tells; none is waited for that has died."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            return told.get(timeout=1.0)
        except Exception:  # queue.Empty, or a part that was cut off by its process's end
            if any(process.exitcode for process in processes):
                break
    raise UnavailableError("a process of the benchmark died, or came to no end")


def _judge(
    task: Task, index: int, environment: Mapping[str, str], barrier: Barrier, told: "Queue[_Part]"
) -> None:
    """One process: it stays, with its memory, until it is ended."""
    os.environ.update(environment)
    die_with_parent(os.getppid())
    gc.freeze()
    executor = Executor(task.implementation, task.device, timeout=task.timeout)

    def judge(case: Case) -> Verdict:
        verdict = executor.check(case)
        if not verdict.ok:
            raise UnavailableError(f"an example fails, see kdafuzz fuzz: {verdict.problems[0].describe()}")
        return verdict

    try:
        search = replace(task.search(index), judge=judge)
        run(search)
        early = resident(executor.pid)
        barrier.wait(_PATIENCE)
        began = time.monotonic()
        tally, _ = run(search)
        told.put(_Part(began, time.monotonic(), tally.examples, early, resident(executor.pid)))
        time.sleep(_PATIENCE)
    except Exception as error:
        barrier.abort()
        told.put(_Part(error=one_line(error)))
    finally:
        executor.finish()
