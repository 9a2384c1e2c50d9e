"""The part of pytest runs that spreads workers over the GPUs of this host: one GPU each, by UUID.

``pytest -n auto`` starts as many workers as fit the GPUs, or the processors where kernels run on
them. A worker's GPU is settled before CUDA starts in it, or in a process that it starts.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ci.gpus import Gpu, Seat, cores, described, seats, visible, worker_count
from impl.contract import UnavailableError

NAME = "kdafuzz-gpus"
_SENT = "kdafuzz_environment"
"""Under this name a worker gets what it must have in its environment."""
_OVERRULES = "PYTEST_XDIST_AUTO_NUM_WORKERS"
"""pytest-xdist's own variable: who sets it wants that many."""


def take_seat(config: pytest.Config) -> None:
    """Take one core; in a worker, see no GPU but its own from now on. Before anything may ask CUDA."""
    torch.set_num_threads(1)  # workers share the machine
    os.environ.update(getattr(config, "workerinput", {}).get(_SENT, {}))


def auto_workers(device: str) -> int | None:
    """How many workers ``-n auto`` means; None: pytest-xdist's own answer, one a processor."""
    if device != "cuda" or _OVERRULES in os.environ:
        return None
    return worker_count(_gpus(), cores())


def steal_work(config: pytest.Config) -> None:
    """Let workers that have run out of tests take others' over, unless ``--dist`` says who runs what.

    pytest-xdist's own way deals tests out in runs of neighbours and never takes one back: where the
    slow tests are neighbours, all but one worker wait for them in the end.
    """
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def register(config: pytest.Config, device: str) -> None:
    """In the controller of workers on GPUs, give each one its own."""
    count = getattr(config.option, "numprocesses", None) or 0
    if device == "cuda" and count and not hasattr(config, "workerinput"):
        gpus = _gpus()
        places = seats(gpus, min(count, config.option.maxprocesses or count))
        config.pluginmanager.register(Spread(gpus, places), NAME)


def _gpus() -> tuple[Gpu, ...]:
    try:
        return visible()
    except UnavailableError as error:
        raise pytest.UsageError(str(error)) from None


class Spread:
    """Which worker has which GPU; one that takes the place of a dead one gets that one's."""

    def __init__(self, gpus: Sequence[Gpu], places: Sequence[Seat]) -> None:
        self._gpus, self._seats = gpus, list(places)
        self._taken: dict[str, Seat] = {}

    def pytest_report_header(self) -> list[str]:
        """Who works where."""
        return [f"kdafuzz: {line}" for line in described(self._gpus, self._seats)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker, before it starts, which GPU is its own."""
        if self._seats:
            seat = self._seats.pop(0)
            self._taken[node.gateway.id] = seat
            node.workerinput[_SENT] = seat.environment()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker has ended: its place is free."""
        del error
        seat = self._taken.pop(node.gateway.id, None)
        if seat is not None:
            self._seats.insert(0, seat)
