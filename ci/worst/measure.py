"""Cases held against the bound that tests of kernels usually take: twice the error of a plain reference.

Such a test computes in fp32 with PyTorch (``ci.worst.plain``), takes the largest error of a tensor's
elements against a better reference, and allows a kernel twice that anywhere in the tensor. Both
bounds are for the same memory: ours is the oracle's plus half a step of the dtype that is stored.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import msgspec
import torch

from ci.processes import die_with_parent, ending
from ci.worst.plain import plain
from impl.contract import UnavailableError
from impl.observe import observe
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Cells
from oracle.tracked import arithmetic
from oracle.values import build

Tensor = torch.Tensor
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of stores that round."""

MOST = 1e9
"""Largest share that is told: a reference without any error allows nothing."""


class Measured(msgspec.Struct, frozen=True):
    """One tensor of one case. ``share`` is the median over its elements of our bound over theirs.

    ``exceeded`` says whether the kernel, which is within ours, is outside of theirs: a false alarm.
    """

    tensor: str
    share: float
    exceeded: bool


def measure(
    implementation: str, device: str, cases: Sequence[Case], seconds: float
) -> list[list[Measured]] | str:
    """What comes of each case, in a process of its own; a line that says why where there is nothing."""
    command = [sys.executable, "-P", "-m", "ci.worst.measure", implementation, device, str(os.getpid())]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    try:
        answer, errors = child.communicate(msgspec.json.encode(list(cases)), timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"took more than {seconds:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    try:
        return msgspec.json.decode(answer, type=list[list[Measured]])
    except msgspec.DecodeError:
        return ending(child.returncode, errors)


def compared(cells: Cells, seen: Tensor, reference: Tensor) -> tuple[float, bool] | None:
    """Our bound over theirs, and whether the kernel exceeds theirs; ``None`` where nothing is claimed."""
    assert cells.bound is not None
    chosen = cells.written & cells.value.isfinite() & cells.bound.isfinite() & reference.isfinite()
    if cells.copied is not None:
        chosen = chosen & ~cells.copied
    if not bool(chosen.any()):
        return None
    value, bound = cells.value[chosen], cells.bound[chosen]
    allowed = 2.0 * float((reference[chosen].double() - value).abs().max())
    error = float((seen[chosen].double() - value).abs().max())
    ours = float((bound + STEP.get(seen.dtype, 0.0) * value.abs()).median())
    share = ours / allowed if allowed else (1.0 if ours == 0.0 else MOST)
    return min(share, MOST), error > allowed


class _Bench:
    """An implementation on a device, loaded once."""

    def __init__(self, implementation: str, device: str) -> None:
        from impl.devices.registry import open_device
        from impl.registry import resolve

        # The device first: it decides how Triton is imported.
        self._device = open_device(device)
        self._implementation = resolve(implementation)

    def measured(self, case: Case) -> list[Measured]:
        """What comes of one case; nothing where the implementation does not take it."""
        values = build(case)
        try:
            seen = observe(case, self._implementation, self._device, values)
        except UnavailableError:
            return []
        expected = expect(case, values, arithmetic(seen.arithmetic, self._device.name))
        theirs = plain(case, values.tensors)
        found = []
        for name, cells in expected.cells.items():
            if cells.bound is not None and name in seen.after and not seen.raised:
                pair = compared(cells, seen.after[name], theirs[name])
                if pair is not None:
                    found.append(Measured(name, *pair))
        return found


def main() -> None:
    """Cases come on standard input; what is measured goes to the output the process was born with."""
    die_with_parent(int(sys.argv[3]))
    cases = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Case])
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        torch.set_num_threads(1)
        bench = _Bench(*sys.argv[1:3])
        answer.write(msgspec.json.encode([bench.measured(case) for case in cases]))


if __name__ == "__main__":
    main()
