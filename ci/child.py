"""The process that runs kernels: reads cases, writes verdicts, and may die of what it runs.

Messages are msgpack, each behind its length in 4 bytes (little-endian): a ``Hello``, answered
when everything is loaded, then cases, each answered by its verdict (``Judge``); one that is to
be dumped has a ``Prepare`` before it and a ``Draw`` after it. A request has a number above 0, which
its reply repeats. The channels are the standard streams the process was born with; what kernels
print goes to standard error, and what they read is empty.
"""

import gc
import mmap
import os
import struct
import sys
import traceback
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import torch

from ci.leaks import check_memory_too
from ci.maps.files import Dump
from ci.processes import adopt_orphans, die_with_parent, kill_children, no_memory
from ci.runs import ignore
from impl.contract import Implementation, UnavailableError, one_line
from impl.devices.base import Device
from oracle.captured import SidecarError, register
from oracle.case import Case
from oracle.judge import Verdict

M = TypeVar("M")


class Hello(msgspec.Struct, frozen=True):
    """Load this implementation for this device."""

    implementation: str
    device: str


class Judge(msgspec.Struct, frozen=True, tag="judge"):
    """Give the verdict on this case; its captured values, if it has any, lie in the file ``sidecar``."""

    case: Case
    sidecar: str = ""
    number: int = 0


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Write into this folder what is known before a call of this case, which comes next."""

    case: Case
    folder: str
    sidecar: str = ""
    number: int = 0


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Write into the folder of ``Prepare`` what the call has left since."""

    number: int = 0


class Reply(msgspec.Struct, frozen=True):
    """A verdict; or why there is none: ``unavailable`` (the user's concern) or ``broken`` (ours).

    All empty in answer to a ``Hello``: ready. ``died`` is the exit code of a process that ended
    while it judged the case; the one that replies has everything loaded and goes on.
    ``unwritable`` says why a dump is not there. ``number`` is that of the request, and 0 where a
    process died between two: nobody asked for that reply.
    """

    verdict: Verdict | None = None
    unavailable: str = ""
    broken: str = ""
    died: int | None = None
    unwritable: str = ""
    number: int = 0


def send(stream: IO[bytes], message: Hello | Judge | Prepare | Draw | Reply) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


_NUMBER = struct.Struct("<Q")
_HELLO = msgspec.msgpack.Decoder(Hello)
_REQUEST = msgspec.msgpack.Decoder(Judge | Prepare | Draw)


def _receive(stream: IO[bytes], decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    header = stream.read(4)
    return decoder.decode(stream.read(struct.unpack("<I", header)[0])) if header else None


def main() -> None:
    """Serve until the input ends."""
    # 0: what lies between us and the executor, such as a sanitizer, is our parent, and ends with it.
    die_with_parent(int(sys.argv[1]) or os.getppid())
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # One core a process: the tensors are small, and as many processes as cores run side by side.
    torch.set_num_threads(1)
    hello = _receive(requests, _HELLO)
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
    at_work = mmap.mmap(-1, _NUMBER.size)
    if device.name != "cuda":
        _restore_after_deaths(replies, at_work)
    answer = _Answers(implementation, device)
    while request := _receive(requests, _REQUEST):
        _NUMBER.pack_into(at_work, 0, request.number)
        try:
            reply = answer.to(request)
        except Exception as error:  # a fault of the suite must reach the user, not die in a pipe
            reply = _failed(error)
        _NUMBER.pack_into(at_work, 0, 0)  # before: an answer that was sent must not be owed
        send(replies, msgspec.structs.replace(reply, number=request.number))


class _Answers:
    """What each request is answered; a dump begun stays until it is drawn."""

    def __init__(self, implementation: Implementation, device: Device) -> None:
        self._implementation, self._device = implementation, device
        self._dump: Dump | None = None

    def to(self, request: Judge | Prepare | Draw) -> Reply:
        """The reply; a dump that cannot be written is told as that."""
        if not isinstance(request, Draw) and request.case.captured is not None:
            register(request.case.captured.digest, Path(request.sidecar))
        if isinstance(request, Judge):
            watch = self._dump.keep if self._dump is not None else ignore
            return Reply(check_memory_too(request.case, self._implementation, self._device, watch))
        try:
            if isinstance(request, Prepare):
                self._dump = Dump(Path(request.folder), request.case, self._implementation, self._device)
                self._dump.prepare()
                return Reply()
            dump, self._dump = self._dump, None
            if dump is not None:
                dump.finish()
            return Reply()
        except OSError as error:
            self._dump = None
            return Reply(unwritable=one_line(error, 1000))


def _restore_after_deaths(replies: IO[bytes], at_work: mmap.mmap) -> None:
    """Return in a forked copy of this process, again and again as long as copies die of their cases.

    A copy has everything loaded: a crash costs milliseconds, and shrinking one hundreds of them.
    ``at_work`` is memory that they share, with the number of the request that a copy is answering.
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
        (number,) = _NUMBER.unpack_from(at_work)
        _NUMBER.pack_into(at_work, 0, 0)
        send(replies, Reply(died=code, number=number))


def _failed(error: Exception) -> Reply:
    if isinstance(error, UnavailableError | SidecarError):
        return Reply(unavailable=str(error))
    if no_memory(error):
        return Reply(unavailable="there is not enough memory here to judge the case")
    return Reply(broken="".join(traceback.format_exception(error)).encode(errors="replace").decode())


if __name__ == "__main__":
    main()
