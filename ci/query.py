"""Asks in a process of its own what an implementation offers: loading it may crash, or set Triton's mode."""

import contextlib
import os
import signal
import subprocess
import sys

import msgspec

from ci.processes import die_with_parent, ending
from impl.contract import Domain, UnavailableError, one_line
from impl.registry import refuse_device

_SECONDS = 600.0
"""Enough for a download of a wheel of some hundred megabytes."""


class Offer(msgspec.Struct, frozen=True):
    """What an implementation says of itself; ``error`` if it cannot be had at all."""

    version: str = ""
    operations: tuple[str, ...] = ()
    absent: dict[str, str] = {}
    domains: dict[str, Domain] = {}
    devices: tuple[str, ...] = ()
    gpu: str = ""
    gpu_uuid: str = ""
    """Of the GPU that was asked, as nvidia-smi writes them; nothing on other devices."""
    error: str = ""


def probe(implementation: str, device: str) -> Offer:
    """Load ``implementation`` for ``device`` and return its offer; ``UnavailableError`` if there is none."""
    offer = ask(implementation, device)
    if offer.error:
        raise UnavailableError(offer.error)
    refuse_device(implementation, device, offer.devices)
    return offer


def ask(implementation: str, device: str) -> Offer:
    """Like ``probe``, with the reason of a failure in ``error``."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "ci.query", implementation, device, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,  # so that a download is stopped with it
    )
    try:
        answer, errors = child.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return Offer(error=f"{implementation}: loading did not end within {_SECONDS:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    try:
        return msgspec.json.decode(answer, type=Offer)
    except msgspec.ValidationError as error:
        return Offer(error=f"{implementation}: its factory's Implementation is wrong: {one_line(error)}")
    except msgspec.DecodeError:
        return Offer(error=f"{implementation}: loading failed: {ending(child.returncode, errors)}")


def _answer(implementation: str, device: str) -> Offer:
    from impl.devices.registry import open_device
    from impl.registry import resolve

    try:
        open_device(device)
        found = resolve(implementation)
    except UnavailableError as error:
        return Offer(error=str(error))
    return Offer(
        found.version,
        found.all_operations,
        dict(found.absent),
        {operation: found.offered(operation) for operation in found.all_operations},
        found.devices,
        *_gpu(device),
    )


def _gpu(device: str) -> tuple[str, str]:
    """Name and UUID of the GPU that a device is."""
    if device != "cuda":
        return "", ""
    import torch

    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return facts.name, f"{'MIG' if 'MIG' in facts.name.split() else 'GPU'}-{facts.uuid}"


def main() -> None:
    """Answer on the standard output the process was born with; what loading prints goes elsewhere."""
    die_with_parent(int(sys.argv[3]))
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        answer.write(msgspec.json.encode(_answer(sys.argv[1], sys.argv[2])))


if __name__ == "__main__":
    main()
