"""Verify kernels that spoil what a right one leaves, in known cells: ``tests.meta.spoiled:head``, .."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from impl.contract import Implementation
from impl.registry import resolve
from impl.triton.verify import KDARecoverSSMRecords, kda_recoverssm_verify

Tensor = torch.Tensor


def _after(spoil: Callable[[Tensor, Tensor], object]) -> Implementation:
    """Our verify with ``spoil(out, what lay there before)`` behind it."""

    def verify(out: Tensor, records: KDARecoverSSMRecords, **given: Any) -> Tensor:
        before = out.clone()
        kda_recoverssm_verify(out=out, records=records, **given)
        spoil(out, before)
        return out

    return Implementation(name="spoiled", operations={"verify": verify}, arithmetic="sequential-fp32")


def head() -> Implementation:
    """Head 1 is twice what it should be."""
    return _after(lambda out, before: out[:, :, 1].mul_(2.0))


def unwritten() -> Implementation:
    """The first token is not written."""
    return _after(lambda out, before: out[:, 0].copy_(before[:, 0]))


def crash() -> Implementation:
    """The process ends in the call."""
    return _after(lambda out, before: os.abort())


def broken() -> Implementation:
    """The call raises when it has written everything."""

    def spoil(out: Tensor, before: Tensor) -> None:
        raise RuntimeError("spoiled on purpose")

    return _after(spoil)


def serving() -> Implementation:
    """All of our kernels, with a verify whose third call is wrong in its first head."""
    ours, calls = resolve("triton"), iter(range(1 << 30))
    wrong = _after(lambda out, before: next(calls) == 2 and out[:, :, 0].mul_(2.0))
    return replace(ours, name="spoiled", operations={**ours.operations, **wrong.operations})
