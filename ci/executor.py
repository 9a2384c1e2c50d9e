"""Judges cases in a child process, so that a crash or a hang is a verdict like any other."""

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO

import msgspec

from ci.check import crashed
from ci.child import Hello, Reply, send
from ci.processes import ending
from impl.contract import UnavailableError
from oracle.case import Case
from oracle.judge import Verdict

START_SECONDS = 600.0
"""For loading an implementation: imports, and perhaps a download of some hundred megabytes."""
_MAX_REPLY_BYTES = 1 << 24
_LOOK_SECONDS = 1.0
"""How often a silent child is looked at: a process that it left behind may keep its pipe open."""


class SuiteError(RuntimeError):
    """The suite itself failed; the message holds the child's traceback."""


class Executor:
    """A child process that judges one case at a time on one implementation and device.

    ``check`` never raises for what a kernel does: a dead child gives a verdict of kind
    ``crash`` and a silent one, after ``timeout`` seconds, of kind ``hang``. Either way the
    next case gets a new child. Use it as a context manager, in one thread: the child ends
    with the thread that started it.
    """

    def __init__(self, implementation: str, device: str, *, timeout: float = 60.0) -> None:
        self.implementation, self._device, self._timeout = implementation, device, timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def start(self) -> None:
        """Have the implementation loaded, if it is not yet; ``UnavailableError`` if it cannot be."""
        if self._child is not None:
            return
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        # Whatever the child appends stays short: the file is emptied before every case.
        fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "ci.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,  # so that what a kernel starts is stopped with it
        )
        try:
            loaded = self._ask(Hello(self.implementation, self._device), START_SECONDS)
        except BaseException:
            self.close()
            raise
        if isinstance(loaded, Verdict):
            raise UnavailableError(f"{self.implementation}: loading failed: {loaded.problems[0].text}")

    def check(self, case: Case) -> Verdict:
        """Judge ``case``. ``UnavailableError``: it cannot run here; ``SuiteError``: our own fault."""
        self.start()
        assert self._errors is not None
        self._errors.truncate(0)
        reply = self._ask(case, self._timeout)
        if isinstance(reply, Verdict):
            return reply
        if reply.verdict is None:
            raise SuiteError("the child process gave no verdict")
        if any("CUDA error" in problem.text for problem in reply.verdict.problems):
            self.close()  # the error sticks to the process; the next case needs a new one
        return reply.verdict

    def kill(self) -> None:
        """End the case that is running, if one is; its verdict will be a crash. For signal handlers."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the child, and what it started."""
        if self._child is not None:
            self.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout, self._errors):
                with contextlib.suppress(OSError):  # a dead child's unsent bytes
                    assert stream is not None
                    stream.close()
        self._child = None

    def __enter__(self) -> "Executor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, message: Hello | Case, timeout: float) -> Reply | Verdict:
        """The child's answer, or the verdict on a child that gave none."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            send(self._child.stdin, message)
        except BrokenPipeError:
            return self._died()
        data = self._receive(timeout)
        if isinstance(data, Verdict):
            return data
        try:
            reply = msgspec.msgpack.decode(data, type=Reply)
        except msgspec.DecodeError:
            self.close()
            return crashed("the process wrote into the channel of the suite")
        if reply.unavailable:
            raise UnavailableError(reply.unavailable)
        if reply.broken:
            raise SuiteError(reply.broken)
        if reply.died is not None:
            return crashed(ending(reply.died, self._last_words()))
        return reply

    def _receive(self, timeout: float) -> bytes | Verdict:
        """One reply's bytes, or the verdict on a child that did not give one."""
        assert self._child is not None
        assert self._child.stdout is not None
        deadline = time.monotonic() + timeout
        data = b""
        need = 4
        while len(data) < need:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._child.stdout], [], [], min(max(0.0, left), _LOOK_SECONDS))
            if ready:
                part = self._child.stdout.read1(1 << 20)  # type: ignore[attr-defined]
                if not part:
                    return self._died()
                data += part
                if need == 4 and len(data) >= 4:
                    need = 4 + int(struct.unpack("<I", data[:4])[0])
                    if need > _MAX_REPLY_BYTES:
                        break  # no reply of ours
            elif _ended(self._child.pid):
                return self._died()
            elif left <= 0.0:
                self.close()
                return crashed(f"no result after {timeout:g} s; the process was stopped", "hang")
        return data[4:need]

    def _died(self) -> Verdict:
        assert self._child is not None
        # Its pipe is closed: it is ending, or goes on without ever being able to answer.
        end = time.monotonic() + 5.0
        while not _ended(self._child.pid) and time.monotonic() < end:
            time.sleep(0.01)
        last = self._last_words()
        child = self._child
        self.close()
        return crashed(ending(child.returncode, last))

    def _last_words(self) -> bytes:
        if self._errors is None:
            return b""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        return self._errors.read()


def _ended(pid: int) -> bool:
    """Whether our child has ended; it is left for ``close`` to collect."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
