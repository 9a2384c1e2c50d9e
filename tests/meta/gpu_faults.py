"""Verify kernels for a GPU that are right but for one way in which they break, on some cases.

    kdafuzz fuzz --impl tests.meta.gpu_faults:hang,triton --op verify --device cuda --timeout 10

They break where a case has at least two heads: that must come out as one failure of such a case,
while everything else runs on.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from impl.contract import Implementation
from impl.triton.verify import kda_recoverssm_verify

_KEPT: list[torch.Tensor] = []


@triton.jit
def _wild_store(ptr):  # type: ignore[no-untyped-def]
    tl.store(ptr + (1 << 42), 1.0)


@triton.jit(debug=True)
def _assert(ptr):  # type: ignore[no-untyped-def]
    tl.device_assert(tl.load(ptr) == 12345.0, "planted")


@triton.jit
def _spin(ptr):  # type: ignore[no-untyped-def]
    while tl.atomic_add(ptr, 0.0) < 1.0:
        pass


def _on_gpu(kernel: Any) -> Callable[[], None]:
    def run() -> None:
        kernel[(1,)](torch.zeros(1, device="cuda"))

    return run


def _keep() -> None:
    _KEPT.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))


def _made(name: str, fault: Callable[[], object]) -> Implementation:
    def verify(records: Any, **given: Any) -> object:
        if given["v"].shape[2] >= 2:
            fault()
        return kda_recoverssm_verify(records=records, **given)

    return Implementation(
        name=name, operations={"verify": verify}, arithmetic="sequential-fp32", devices=("cuda",)
    )


def illegal() -> Implementation:
    """Stores far outside all memory: the CUDA context is lost."""
    return _made("illegal", _on_gpu(_wild_store))


def asserting() -> Implementation:
    """An assertion fails on the device."""
    return _made("asserting", _on_gpu(_assert))


def hang() -> Implementation:
    """Spins for ever on the device."""
    return _made("hang", _on_gpu(_spin))


def leak() -> Implementation:
    """Keeps a mebibyte of GPU memory a call."""
    return _made("leak", _keep)


def oom() -> Implementation:
    """Asks for more memory than there is."""
    return _made("oom", lambda: torch.empty(1 << 45, dtype=torch.uint8, device="cuda"))


def segfault() -> Implementation:
    """Its host code reads address 0."""
    return _made("segfault", lambda: ctypes.string_at(0))


def abort() -> Implementation:
    """Its host code aborts the process."""
    return _made("abort", os.abort)
