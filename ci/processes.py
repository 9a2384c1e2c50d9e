"""Processes that end with the one that started them, whatever ends it."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from impl.contract import one_line

PIPE_BROKEN = 141
"""Exit code where nobody reads on, as a shell reports a process that died of SIGPIPE."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came; handled like Ctrl-C, so that nothing is left running or half done."""


def raise_on_sigterm() -> None:
    """Turn SIGTERM into ``TerminatedError`` in the main thread."""

    def handler(*_: object) -> None:
        raise TerminatedError

    signal.signal(signal.SIGTERM, handler)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when ``parent``, which started it, is gone (Linux).

    Strictly: when the thread that started it ends. A parent killed outright cannot stop its
    children, and one of them may hang in a kernel for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of whatever a dead child of this process leaves behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_memory(error: BaseException) -> bool:
    """Whether an error means that the machine has no memory left; torch has no type for it."""
    if isinstance(error, RuntimeError):
        return "DefaultCPUAllocator: " in str(error)
    return isinstance(error, MemoryError)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if there is none of that number."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def kill_children() -> None:
    """Kill every child of this process and wait for its end, and for theirs that are adopted then."""
    while children := [pid for pid in _processes() if _parent(pid) == os.getpid()]:
        for pid in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def ending(code: int, errors: bytes) -> str:
    """How a process ended, by its exit code, and the last line of what it said."""
    try:
        text = (
            f"the process died of {signal.Signals(-code).name}"
            if code < 0
            else f"the process exited with {code}"
        )
    except ValueError:
        text = f"the process died of signal {-code}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"{text}: {one_line(lines[-1], 300)}" if lines else text
