"""Asks in a process of its own what an implementation offers: loading it may crash, or set Triton's mode."""

import subprocess
import sys

import msgspec

from impl.contract import Domain, UnavailableError

_SECONDS = 600.0
"""Enough for a download of a wheel of some hundred megabytes."""


class Offer(msgspec.Struct, frozen=True):
    """What an implementation says of itself; ``error`` if it cannot be had at all."""

    version: str = ""
    operations: tuple[str, ...] = ()
    absent: dict[str, str] = {}
    domain: Domain = Domain()
    devices: tuple[str, ...] = ()
    error: str = ""


def probe(implementation: str, device: str) -> Offer:
    """Load ``implementation`` for ``device`` and return its offer; ``UnavailableError`` if there is none."""
    offer = ask(implementation, device)
    if offer.error:
        raise UnavailableError(offer.error)
    if device not in offer.devices:
        raise UnavailableError(
            f"{implementation} does not run on {device}; it runs on {', '.join(offer.devices)}"
        )
    return offer


def ask(implementation: str, device: str) -> Offer:
    """Like ``probe``, with the reason of a failure in ``error``."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ci.query", implementation, device],
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Offer(error=f"{implementation}: loading did not end within {_SECONDS:.0f} s")
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit status {done.returncode}"
        return Offer(error=f"{implementation}: loading failed: {why}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Offer)


def _answer(implementation: str, device: str) -> Offer:
    from impl.devices.registry import open_device
    from impl.registry import resolve

    try:
        open_device(device)
        found = resolve(implementation)
    except UnavailableError as error:
        return Offer(error=str(error))
    return Offer(found.version, tuple(found.operations), dict(found.absent), found.domain, found.devices)


if __name__ == "__main__":
    print(msgspec.json.encode(_answer(sys.argv[1], sys.argv[2])).decode())
