"""Judges cases in a child process, so that a crash or a hang is a verdict like any other."""

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
from ci.child import Reply, Request, send
from impl.contract import UnavailableError
from oracle.case import Case
from oracle.judge import Verdict

START_SECONDS = 300.0
"""Allowance for a child's first verdict: imports, and on a GPU the first compilation."""


class SuiteError(RuntimeError):
    """The suite itself failed; the message holds the child's traceback."""


class Executor:
    """A child process that judges one case at a time on one implementation and device.

    ``check`` never raises for what a kernel does: a dead child gives a verdict of kind
    ``crash`` and a silent one, after ``timeout`` seconds, of kind ``hang``. Either way the
    next case gets a new child. Use it as a context manager.
    """

    def __init__(self, implementation: str, device: str, *, timeout: float = 60.0) -> None:
        self._implementation, self._device, self._timeout = implementation, device, timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._warm = False

    def check(self, case: Case) -> Verdict:
        """Judge ``case``. ``UnavailableError``: it cannot run here; ``SuiteError``: our own fault."""
        child = self._start()
        assert child.stdin is not None
        try:
            send(child.stdin, Request(case, self._implementation, self._device))
        except BrokenPipeError:
            return self._died()
        data = self._receive(self._timeout if self._warm else max(self._timeout, START_SECONDS))
        if isinstance(data, Verdict):
            return data
        self._warm = True
        reply = msgspec.msgpack.decode(data, type=Reply)
        if reply.unavailable:
            raise UnavailableError(reply.unavailable)
        if reply.verdict is None:
            raise SuiteError(reply.broken)
        if any("CUDA error" in problem.text for problem in reply.verdict.problems):
            self.close()  # the error sticks to the process; the next case needs a new one
        return reply.verdict

    def close(self) -> None:
        """Stop the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout, self._errors):
                if stream is not None:
                    stream.close()
        self._child, self._warm = None, False

    def __enter__(self) -> "Executor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._child is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "ci.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self._child

    def _receive(self, timeout: float) -> bytes | Verdict:
        """One reply's bytes, or the verdict on a child that did not give one."""
        deadline = time.monotonic() + timeout
        data = b""
        need = 4
        while len(data) < need:
            assert self._child is not None
            assert self._child.stdout is not None
            ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                return crashed(f"no result after {timeout:.0f} s; the process was stopped", "hang")
            part = self._child.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not part:
                return self._died()
            data += part
            if need == 4 and len(data) >= 4:
                need = 4 + int(struct.unpack("<I", data[:4])[0])
        return data[4:need]

    def _died(self) -> Verdict:
        assert self._child is not None
        code = self._child.wait()
        text = (
            f"the process died of {signal.Signals(-code).name}"
            if code < 0
            else f"the process exited with {code}"
        )
        last = self._last_error_line()
        self.close()
        return crashed(f"{text}{': ' + last if last else ''}")

    def _last_error_line(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""
