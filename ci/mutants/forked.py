"""Processes as copies of this one, in which everything but the mutated kernels is loaded already.

A new process takes seconds to import what a mutant is judged with, and most mutants are killed
within one. Only for the CPU: a CUDA context does not survive a fork, and CuTe kernels are found on
disk by digests that loaded modules know.
"""

import contextlib
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO

import torch

from ci import child
from ci.executor import Child, Executor
from ci.mutants.subjects import Copy
from ci.processes import die_with_parent, ending


class Fork:
    """A copy of this process that does ``run`` and ends, as ``subprocess.Popen`` would show it."""

    def __init__(self, run: Callable[[], None], copy: Copy, errors: IO[bytes]) -> None:
        requests, replies = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(run, copy, (requests[0], replies[1], errors.fileno()))
        with contextlib.suppress(OSError):  # it does so too; whoever is first
            os.setpgid(self.pid, self.pid)
        os.close(requests[0])
        os.close(replies[1])
        self.stdin: IO[bytes] | None = os.fdopen(requests[1], "wb")
        self.stdout: IO[bytes] | None = os.fdopen(replies[0], "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, however long it takes; the exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _run(run: Callable[[], None], copy: Copy, streams: tuple[int, int, int]) -> None:
    """In the copy: its own streams and the mutant's files; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os.closerange(3, 1024)
        os.environ.update(copy.environment)
        if copy.package is not None:
            _find_in(copy.package)
        run()
        code = 0
    except BaseException:  # told by the exit code and the last line
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _find_in(package: Path) -> None:
    """Have what is not yet imported of our package come from another folder."""
    package_now = importlib.import_module("impl")
    assert not any(name.startswith("impl.triton") for name in sys.modules), "the sound kernels are loaded"
    package_now.__path__[:] = [str(package)]
    importlib.invalidate_caches()


@cache
def prepare(device: str) -> None:
    """Load once what every copy needs."""
    from impl.devices.registry import open_device

    torch.set_num_threads(1)  # no threads that a copy would miss
    open_device(device)


class ForkedExecutor(Executor):
    """An executor whose children are copies of this process."""

    def __init__(self, copy: Copy, device: str, *, timeout: float) -> None:
        prepare(device)
        super().__init__(copy.implementation, device, timeout=timeout)
        self._copy = copy

    def _launched(self, errors: IO[bytes]) -> Child:
        parent = os.getpid()

        def serve() -> None:
            sys.argv[1:] = [str(parent)]
            child.main()

        return Fork(serve, self._copy, errors)


def answer_of(run: Callable[[], None], copy: Copy, device: str, limit: float) -> tuple[bytes, str]:
    """What ``run`` printed in a copy of this process, and how that ended if not well."""
    prepare(device)
    parent = os.getpid()

    def guarded() -> None:
        die_with_parent(parent)
        run()

    with tempfile.TemporaryFile() as errors:
        fork = Fork(guarded, copy, errors)
        assert fork.stdin is not None
        assert fork.stdout is not None
        fork.stdin.close()
        end, data = time.monotonic() + limit, b""
        with fork.stdout as stream:
            while select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
                part = os.read(stream.fileno(), 1 << 16)
                if not part:
                    code = fork.wait()
                    errors.seek(0)
                    return data, ending(code, errors.read()) if code else ""
                data += part
        os.killpg(fork.pid, signal.SIGKILL)
        fork.wait()
        return b"", f"no result after {limit:g} s"
