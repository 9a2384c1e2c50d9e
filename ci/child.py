"""The process that runs kernels: reads cases, writes verdicts, and may die of what it runs.

Messages are msgpack, each behind its length in 4 bytes (little-endian): a ``Hello``, answered
when everything is loaded, then a ``Question`` for each case, answered by its verdict. The channels are the
standard streams the process was born with; what kernels print goes to standard error, and
what they read is empty.
"""

import gc
import os
import struct
import sys
import traceback
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import torch

from ci.leaks import check_memory_too
from ci.processes import adopt_orphans, die_with_parent, kill_children, no_memory
from impl.contract import UnavailableError
from oracle.captured import SidecarError, register
from oracle.case import Case
from oracle.judge import Verdict

M = TypeVar("M")


class Hello(msgspec.Struct, frozen=True):
    """Load this implementation for this device."""

    implementation: str
    device: str


class Question(msgspec.Struct, frozen=True):
    """Judge this case; its captured values, if it has any, lie in the file ``sidecar``."""

    case: Case
    sidecar: str = ""


class Reply(msgspec.Struct, frozen=True):
    """A verdict; or why there is none: ``unavailable`` (the user's concern) or ``broken`` (ours).

    All empty in answer to a ``Hello``: ready. ``died`` is the exit code of a process that ended
    while it judged the case; the one that replies has everything loaded and goes on.
    """

    verdict: Verdict | None = None
    unavailable: str = ""
    broken: str = ""
    died: int | None = None


def send(stream: IO[bytes], message: Hello | Question | Reply) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes], kind: type[M]) -> M | None:
    header = stream.read(4)
    return msgspec.msgpack.decode(stream.read(struct.unpack("<I", header)[0]), type=kind) if header else None


def main() -> None:
    """Serve until the input ends."""
    # 0: what lies between us and the executor, such as a sanitizer, is our parent, and ends with it.
    die_with_parent(int(sys.argv[1]) or os.getppid())
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # One core a process: the tensors are small, and as many processes as cores run side by side.
    torch.set_num_threads(1)
    hello = _receive(requests, Hello)
    if hello is not None:
        _serve(hello, requests, replies)


def _serve(hello: Hello, requests: IO[bytes], replies: IO[bytes]) -> None:
    from impl.devices.registry import open_device
    from impl.registry import require_device, resolve

    try:
        # The device first: it decides how Triton is imported.
        device = open_device(hello.device)
        implementation = resolve(hello.implementation)
        require_device(implementation, device.name)
    except Exception as error:  # told below
        send(replies, _failed(error))
        return
    send(replies, Reply())
    gc.freeze()
    if device.name != "cuda":
        _restore_after_deaths(replies)
    while question := _receive(requests, Question):
        case = question.case
        try:
            if case.captured is not None:
                register(case.captured.digest, Path(question.sidecar))
            reply = Reply(check_memory_too(case, implementation, device))
        except Exception as error:  # a fault of the suite must reach the user, not die in a pipe
            reply = _failed(error)
        send(replies, reply)


def _restore_after_deaths(replies: IO[bytes]) -> None:
    """Return in a forked copy of this process, again and again as long as copies die of their cases.

    A copy has everything loaded: a crash costs milliseconds, and shrinking one hundreds of them.
    Not for a GPU: a CUDA context does not survive a fork.
    """
    adopt_orphans()
    while True:
        loader = os.getpid()
        copy = os.fork()
        if copy == 0:
            die_with_parent(loader)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        if code == 0:
            os._exit(0)  # the input ended
        kill_children()  # what a kernel started must not outlive its case
        send(replies, Reply(died=code))


def _failed(error: Exception) -> Reply:
    if isinstance(error, UnavailableError | SidecarError):
        return Reply(unavailable=str(error))
    if no_memory(error):
        return Reply(unavailable="there is not enough memory here to judge the case")
    return Reply(broken="".join(traceback.format_exception(error)).encode(errors="replace").decode())


if __name__ == "__main__":
    main()
