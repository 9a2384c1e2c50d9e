"""Judges cases in a child process, so that a crash or a hang is a verdict like any other."""

import contextlib
import fcntl
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import msgspec

from ci.check import crashed
from ci.child import Draw, Hello, Judge, Prepare, Reply, send
from ci.journal import Journal
from ci.processes import ending
from ci.sanitize import SLOWER, Log, Sanitizer, judged
from impl.contract import UnavailableError
from oracle.captured import SidecarError, path_of
from oracle.case import Case
from oracle.judge import Verdict

START_SECONDS = 600.0
"""For loading an implementation: imports, and perhaps a download of some hundred megabytes."""
EFFORT_A_SECOND = {"cpu": 80.0, "emulator": 800.0}
"""How much of a call's ``effort`` a device without a GPU gets done, on a busy machine."""
DUMP_SECONDS = 600.0
"""For what a dump writes before a call or after it."""
BYTES_A_SECOND = 1 << 25
"""Memory that is filled, computed anew and compared there."""
_MAX_REPLY_BYTES = 1 << 24
_LOOK_SECONDS = 1.0
"""How often a silent child is looked at: a process that it left behind may keep its pipe open."""


class Child(Protocol):
    """What of a process is used here, as ``subprocess.Popen`` has it."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    returncode: Any

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code."""


class SuiteError(RuntimeError):
    """The suite itself failed; the message holds the child's traceback."""


class Executor:
    """A child process that judges one case at a time on one implementation and device.

    ``check`` never raises for what a kernel does: a dead child gives a verdict of kind
    ``crash`` and a silent one, after ``timeout`` seconds, of kind ``hang``. Either way the
    next case gets a new child. One that died by itself between two cases is a ``crash`` of the
    next; one that was killed then says nothing of either. ``journal`` is told what runs, and a
    ``sanitizer`` watches it; ``python`` is the child's interpreter, and ``environment`` what its
    variables have on top of ours. Use it as a context manager, in one thread: the child ends with
    the thread that started it.
    """

    def __init__(
        self,
        implementation: str,
        device: str,
        *,
        timeout: float = 60.0,
        journal: Journal | None = None,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        sanitizer: Sanitizer | None = None,
    ) -> None:
        self.implementation, self._device, self._timeout = implementation, device, timeout
        self._python, self._environment = python, dict(environment or {})
        self._journal = journal
        self._sanitizer = sanitizer
        if sanitizer is not None:
            self._timeout *= SLOWER
            self._environment |= sanitizer.environment()
        self._logs: tempfile.TemporaryDirectory[str] | None = None
        self._log: Log | None = None
        self._judged = 0
        self._child: Child | None = None
        self._errors: IO[bytes] | None = None
        self._asked = 0
        self._unread = b""

    @property
    def pid(self) -> int:
        """Of the process that judges; 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    def start(self) -> None:
        """Have the implementation loaded, if it is not yet; ``UnavailableError`` if it cannot be."""
        if self._child is not None and _killed(self._child.pid):
            self.close()
        if self._child is not None:
            return
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        # Whatever the child appends stays short: the file is emptied before every case.
        fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)
        self._child = self._launched(self._errors)
        try:
            loaded = self._ask(Hello(self.implementation, self._device), START_SECONDS)
        except BaseException:
            self.close()
            raise
        if isinstance(loaded, Verdict):
            raise UnavailableError(f"{self.implementation}: loading failed: {loaded.problems[0].text}")

    def _launched(self, errors: IO[bytes]) -> Child:
        """A new child, which leads a process group, so that what a kernel starts is stopped with it."""
        return subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            process_group=0,
        )

    def _command(self) -> list[str]:
        """The child's command line; behind a sanitizer, whatever that puts between is its parent."""
        child = [self._python, "-P", "-m", "ci.child"]
        if self._sanitizer is None:
            return [*child, str(os.getpid())]
        if self._logs is None:
            self._logs = tempfile.TemporaryDirectory(prefix="kdafuzz-")
        self._log = Log(Path(self._logs.name) / secrets.token_hex(8))
        return [*self._sanitizer.command(self._log.path), *child, "0"]

    def check(self, case: Case) -> Verdict:
        """Judge ``case``. ``UnavailableError``: it cannot run here; ``SuiteError``: our own fault."""
        self._require_time(case)
        if self._journal is None:
            return self._check(case)
        self._journal.start(case)
        try:
            return self._check(case)
        finally:
            self._journal.end()

    def alone(self, case: Case) -> Verdict:
        """The verdict on ``case`` as the only one of a new process; errors as of ``check``."""
        self.close()
        return self.check(case)

    def dumped(self, case: Case, folder: Path) -> Verdict:
        """Judge ``case``, and write its maps and numbers into ``folder``.

        Where the process dies of the call, the folder has what was known before it. ``OSError``: it
        cannot be written; other errors as of ``check``.
        """
        self._require_time(case)
        self.start()
        self._write(Prepare(case, str(folder.absolute()), _sidecar(case)))
        verdict = self.check(case)
        if self._child is not None:
            self._write(Draw())
        return verdict

    def _write(self, message: Prepare | Draw) -> None:
        """Have a part of a dump written; a new process, which knows of none, writes nothing."""
        reply = self._ask(message, DUMP_SECONDS)
        if isinstance(reply, Verdict):
            raise SuiteError(f"the dump was not written: {reply.problems[0].text}")
        if reply.unwritable:
            raise OSError(f"--dump: {reply.unwritable}")

    def _require_time(self, case: Case) -> None:
        """Refuse what would only run into the timeout: that would be called a hang."""
        if self._device not in EFFORT_A_SECOND:
            return
        launches = case.call.launches * (2 if case.relation is not None else 1)
        seconds = case.call.effort / EFFORT_A_SECOND[self._device]
        seconds += launches * case.memory() / BYTES_A_SECOND
        if seconds > max(self._timeout, 60.0):
            raise UnavailableError(
                f"the case would take {self._device} about {seconds:.0f} s; "
                "raise --timeout or use --device cuda"
            )

    def _check(self, case: Case) -> Verdict:
        """The verdict, of a second process if the first had no memory left for the case."""
        before = self._judged
        verdict = self._verdict(case)
        if not _out_of_memory(verdict) or not before:
            return verdict
        self.close()
        verdict = self._verdict(case)
        if _out_of_memory(verdict):
            return verdict
        return crashed(
            f"out of GPU memory in a process that had judged {before} cases; in a new process this one has "
            "enough: memory is kept from call to call",
            "leak",
        )

    def _verdict(self, case: Case) -> Verdict:
        sidecar = _sidecar(case)
        self.start()
        assert self._errors is not None
        self._errors.truncate(0)
        self._judged += 1
        log = self._log  # of this child, whatever becomes of it
        reply = self._ask(Judge(case, sidecar), self._timeout)
        if isinstance(reply, Verdict):
            return self._with_reports(reply, log)
        if reply.verdict is None:
            raise SuiteError("the child process gave no verdict")
        verdict = self._with_reports(reply.verdict, log)
        if any("CUDA error" in problem.text for problem in reply.verdict.problems):
            self.close()  # the error sticks to the process; the next case needs a new one
        return verdict

    def _with_reports(self, verdict: Verdict, log: Log | None) -> Verdict:
        """The verdict with what the sanitizer says of the case."""
        if self._sanitizer is None or log is None:
            return verdict
        reports = log.reports(patience=0.2 if verdict.ok else 5.0)
        lost = next((report for report in reports if report.failure), None)
        if lost is not None:
            raise SuiteError(f"the sanitizer lost track: {lost.describe()}")
        return judged(verdict, self._sanitizer.tool, reports)

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
        self._child, self._judged, self._unread = None, 0, b""

    def finish(self) -> None:
        """Stop the child for good, and put the journal and the sanitizer's logs away."""
        self.close()
        if self._logs is not None:
            self._logs.cleanup()
            self._logs = None
        if self._journal is not None:
            self._journal.close()

    def __enter__(self) -> "Executor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def _ask(self, message: Hello | Judge | Prepare | Draw, timeout: float) -> Reply | Verdict:
        """The child's answer, or the verdict on a child that gave none."""
        assert self._child is not None
        assert self._child.stdin is not None
        number = 0
        if not isinstance(message, Hello):
            self._asked = number = self._asked + 1
            message = msgspec.structs.replace(message, number=number)
        try:
            send(self._child.stdin, message)
        except BrokenPipeError:
            return self._died()
        # Of a dump only the call itself is a kernel's affair.
        wanted = (0, number) if isinstance(message, Judge) else (number,)
        reply = self._reply(wanted, time.monotonic() + timeout, timeout)
        if isinstance(reply, Verdict):
            return reply
        if reply.unavailable:
            raise UnavailableError(reply.unavailable)
        if reply.broken:
            raise SuiteError(reply.broken)
        if reply.died is not None:
            told = ending(reply.died, self._last_words())
            if reply.number:
                self._judged = 0
                return crashed(told)
            self.close()  # the message waits in it for a copy to answer, or was lost with one
            if reply.died == -signal.SIGKILL:  # from outside: it says nothing of any case
                self.start()
                self._judged = 1
                return self._ask(message, timeout)
            return crashed(f"after the case before this one {told}")
        return reply

    def _reply(self, wanted: tuple[int, ...], deadline: float, timeout: float) -> Reply | Verdict:
        """The first reply of one of these numbers, or the verdict on a child that did not give one.

        One of another number is late: its process died once it had answered. One of none says that a
        process died before it read the request.
        """
        while True:
            data = self._receive(deadline, timeout)
            if isinstance(data, Verdict):
                return data
            try:
                reply = msgspec.msgpack.decode(data, type=Reply)
            except msgspec.DecodeError:
                self.close()
                return crashed("the process wrote into the channel of the suite")
            if reply.number in wanted:
                return reply

    def _receive(self, deadline: float, timeout: float) -> bytes | Verdict:
        """One reply's bytes, or the verdict on a child that did not give one."""
        assert self._child is not None
        assert self._child.stdout is not None
        while True:
            data = self._unread
            need = 4 + int(struct.unpack("<I", data[:4])[0]) if len(data) >= 4 else 4
            if len(data) >= max(need, 5) or need > _MAX_REPLY_BYTES:  # the latter is no reply of ours
                self._unread = data[need:]
                return data[4:need]
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._child.stdout], [], [], min(max(0.0, left), _LOOK_SECONDS))
            if ready:
                part = self._child.stdout.read1(1 << 20)  # type: ignore[attr-defined]
                if not part:
                    return self._died()
                self._unread += part
            elif _ended(self._child.pid):
                return self._died()
            elif left <= 0.0:
                self.close()
                return crashed(f"no result after {timeout:g} s; the process was stopped", "hang")

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


def _sidecar(case: Case) -> str:
    """Where the case's captured values are, if it has any; ``UnavailableError`` if that is not known."""
    if case.captured is None:
        return ""
    try:
        return str(path_of(case.captured.digest))
    except SidecarError as error:
        raise UnavailableError(str(error)) from None


def _out_of_memory(verdict: Verdict) -> bool:
    return any(p.kind == "raised" and "out of memory" in p.text for p in verdict.problems)


def _killed(pid: int) -> bool:
    """Whether our child has been killed from outside; the system does it where memory runs out."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None and (found.si_code, found.si_status) == (os.CLD_KILLED, signal.SIGKILL)


def _ended(pid: int) -> bool:
    """Whether our child has ended; it is left for ``close`` to collect."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
