"""The processes of a run: mutants go to workers, each of which judges one at a time."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

from ci.mutants.judging import Outcome, Task, judge
from ci.processes import die_with_parent


def execute(tasks: Iterable[Task], jobs: int, done: Callable[[Task, Outcome], None]) -> None:
    """Judge every task and tell ``done`` of each as it ends; an interruption ends the workers too."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start, initargs=(os.getpid(),))
    try:
        futures: dict[Future[Outcome], Task] = {pool.submit(judge, task): task for task in tasks}
        for future in as_completed(futures):
            done(futures[future], future.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():
            worker.kill()


def _start(parent: int) -> None:
    """A worker leaves interruptions to the process that started it, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
