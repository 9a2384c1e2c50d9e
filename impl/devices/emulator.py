"""The emulator device: compiled CuTe kernels executed on the CPU, everything else as on the cpu device.

Memory is the cpu device's; Triton kernels that a call launches run in Triton's interpreter on
the same bytes. Launches of CuTe kernels go through several schedules, which must leave the
same bytes, and may access nothing but the call's tensors.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from impl.contract import UnavailableError
from impl.cute.emulator import settings
from impl.cute.emulator.compiled import allocation, why_absent
from impl.cute.emulator.launch import Allocation, Schedule
from impl.cute.emulator.run import chosen_engine
from impl.devices.base import T, Variant
from impl.devices.cpu import CpuDevice

CTAS = (3, 8, 1)
"""Of ``settings.ctas``: fewer than a call's heads, the most heads that a CTA of commit takes, and one."""


class EmulatorDevice(CpuDevice):
    """Emulates launches under the schedules of ``settings.SCHEDULES_VARIABLE``, in grids of several sizes."""

    name = "emulator"

    def __init__(self) -> None:
        why = why_absent()
        if why:
            raise UnavailableError(f"device emulator: {why}")
        super().__init__()
        self._allocations: tuple[Allocation, ...] = ()
        self._text = os.environ.get(settings.SCHEDULES_VARIABLE) or settings.DEFAULT_SCHEDULES
        try:
            self.schedules(0)
            chosen_engine()
            self._functions = settings.parse_functions(os.environ.get(settings.FUNCTIONS_VARIABLE, ""))
        except ValueError as error:
            raise UnavailableError(f"device emulator: {error}") from None

    def schedules(self, seed: int) -> tuple[Schedule, ...]:
        """The schedules of a case: ``seed`` is that of a priority schedule without one of its own."""
        return settings.parse_schedules(self._text, seed)

    def share(self, views: Mapping[str, torch.Tensor], written: frozenset[str]) -> None:
        """Kernels may access these tensors from now on, and no others of the case's memory."""
        self._allocations = tuple(
            allocation(name, view, writable=name in written) for name, view in views.items() if view.numel()
        )

    def variants(self, seed: int) -> Sequence[Variant]:
        """One for each schedule. Bits do not depend on the CTAs either: they take turns, as the seed says."""
        numbers = [CTAS[(seed + i) % len(CTAS)] for i in range(len(self.schedules(seed)))]
        return tuple(
            Variant(f"{schedule} ctas={ctas}", partial(self._context, schedule, ctas, seed))
            for schedule, ctas in zip(self.schedules(seed), numbers, strict=True)
        )

    def _context(self, schedule: Schedule, ctas: int, seed: int) -> AbstractContextManager[object]:
        return settings.using(
            schedule=schedule,
            ctas=ctas,
            functions=self._functions,
            seed=seed,
            allocations=self._allocations,
        )

    def replay(self, run: Callable[[], T], restore: Callable[[], None]) -> T:
        """A launch must leave what the next one needs: runs it, restores memory and runs it again."""
        run()
        restore()
        return run()
