"""The process that runs kernels: reads cases, writes verdicts, and may die of what it runs.

Requests and replies are msgpack, each behind its length in 4 bytes (little-endian). The
reply channel is the standard output the process was born with; whatever kernels print goes
to standard error instead.
"""

import os
import struct
import sys
import traceback
from typing import IO

import msgspec
import torch

from ci.check import check
from impl.contract import UnavailableError
from impl.devices.base import Device
from oracle.case import Case
from oracle.judge import Verdict


class Request(msgspec.Struct, frozen=True):
    """Judge this case on this implementation and device."""

    case: Case
    implementation: str
    device: str


class Reply(msgspec.Struct, frozen=True):
    """A verdict; or why there is none: ``unavailable`` (the user's concern) or ``broken`` (ours)."""

    verdict: Verdict | None = None
    unavailable: str = ""
    broken: str = ""


def send(stream: IO[bytes], message: Request | Reply) -> None:
    """Write one message."""
    data = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def main() -> None:
    """Serve requests until the input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    # One core a process: the tensors are small, and as many processes as cores run side by side.
    torch.set_num_threads(1)
    devices: dict[str, Device] = {}
    while header := requests.read(4):
        request = msgspec.msgpack.decode(requests.read(struct.unpack("<I", header)[0]), type=Request)
        send(replies, _serve(request, devices))


def _serve(request: Request, devices: dict[str, Device]) -> Reply:
    from impl.devices.registry import open_device
    from impl.registry import resolve

    try:
        if request.device not in devices:
            # The device first: it decides how Triton is imported.
            devices[request.device] = open_device(request.device)
        return Reply(check(request.case, resolve(request.implementation), devices[request.device]))
    except UnavailableError as error:
        return Reply(unavailable=str(error))
    except Exception as error:  # a fault of the suite must reach the user, not die in a pipe
        return Reply(broken=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


if __name__ == "__main__":
    main()
