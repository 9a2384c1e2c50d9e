"""Settings of the process that a kernel may not change: its caller computes with them afterwards."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TINY = 5e-324


def _flushes() -> bool:
    """Whether this thread's processor flags turn subnormal numbers into zeros."""
    return bool(torch.tensor(_TINY, dtype=torch.float64).mul(1.0).eq(0.0))


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, torch.set_default_device),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flushing of subnormal numbers": (_flushes, torch.set_flush_denormal),
    "the working directory": (os.getcwd, os.chdir),
}
"""Per setting, how it is read and how it is set back."""


@contextmanager
def settings_kept() -> Iterator[None]:
    """Set every setting back at the end; ``RuntimeError`` names one that the block had changed."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    try:
        yield
    finally:
        changed = [name for name, (read, _) in SETTINGS.items() if read() != before[name]]
        for name in changed:
            SETTINGS[name][1](before[name])
    if changed:
        raise RuntimeError(f"the call changed {', '.join(changed)}")
