"""Properties of calls that only hardware can break, for any implementation on any device.

Repeats, launch settings, the order of a stream, streams side by side, replayed graphs. They raise
``AssertionError``, which names the launch and the first byte that is wrong. On the cpu device there
is one stream, which is the program's order, and nothing is late: there they show that their own
logic is right, and that it finds what is planted.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from ci.check import check
from impl.arena import Arena
from impl.bindings import BINDINGS, Launched, Views
from impl.contract import Implementation
from impl.devices.registry import open_device
from impl.triton.launch import launch_settings
from oracle.case import Case
from oracle.expect import expect
from oracle.stored import bits
from oracle.values import Values, build

Setting = dict[str, int]
LATE_MICROSECONDS = 1000
"""How long a writer waits before it writes: longer than any launch takes to start."""
FROM_KERNELS = ("state", "conv_state", "conv_states", "correction", "key_gate")
"""Tensors that kernels of the contract write for others to read, a layer's number left out."""


@dataclass(frozen=True)
class Rig:
    """An implementation on a device."""

    implementation: Implementation
    device: str

    def times(self, count: int) -> int:
        """How often something is done that hardware must get right every time."""
        return count if self.device == "cuda" else 3

    def wait(self) -> None:
        """Wait until everything is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def placed(self, case: Case, values: Values | None = None) -> "Placed":
        """The case in memory of its own; ``Skipped`` if the implementation does not take it."""
        refusal = self.implementation.takes(case)
        if refusal:
            pytest.skip(refusal)
        return Placed(self, case, values if values is not None else build(case))

    def bound(self, case: Case, views: Views) -> Callable[[], Views]:
        """The call, bound to these tensors."""
        function = self.implementation.function(case)
        return BINDINGS[case.op](case.call, views, function, self.implementation)

    def stream(self) -> Callable[[], AbstractContextManager[object]]:
        """A way onto a stream of its own."""
        return partial(torch.cuda.stream, torch.cuda.Stream()) if self.device == "cuda" else nullcontext

    def late(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        microseconds: int = LATE_MICROSECONDS,
        *,
        early: bool = False,
    ) -> Callable[[], None]:
        """A kernel that writes the sources after a while; ``early``: it lets dependent kernels start before.

        The host does not wait for it.
        """
        if self.device != "cuda":
            return partial(_copy, targets, sources)
        from tests.late_writer import table, write_late

        return partial(write_late, table(targets, sources), microseconds, early=early)

    def captured(self, run: Callable[[], Views]) -> Callable[[], Views]:
        """The replay of a run captured in a graph; it gives the tensors that the captured run returned."""
        if self.device != "cuda":
            return run
        with torch.cuda.stream(torch.cuda.Stream()):
            run()  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                returned = run()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()

        def replay() -> Views:
            graph.replay()
            return returned

        return replay


class Work:
    """What is launched again and again over memory of its own."""

    def __init__(self, rig: Rig, arenas: list[Arena]) -> None:
        self.rig, self.arenas = rig, arenas
        self.parts = [part for arena in arenas for part in arena.parts()]
        """Every byte."""
        self.start = [part.clone() for part in self.parts]

    def run(self) -> Views:
        """Launch; gives the tensors that the callee allocated."""
        raise NotImplementedError

    def run_apart(self) -> Views:
        """The same, waiting wherever that is possible."""
        returned = self.run()
        self.rig.wait()
        return returned

    def defined(self, returned: Views) -> dict[str, torch.Tensor]:
        """Of tensors that the callee allocated, the bits of what the contract defines."""
        return {}

    def restore(self, contents: list[torch.Tensor] | None = None) -> None:
        """Give memory its first bytes again, or others."""
        _copy(self.parts, self.start if contents is None else contents)

    def look(self, returned: Views, parts: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Every byte and every defined bit of what was returned; all as integers."""
        return [*(self.parts if parts is None else parts), *self.defined(returned).values()]

    def alone(self) -> list[torch.Tensor]:
        """What one launch leaves that has the device to itself."""
        self.restore()
        self.rig.wait()
        returned = self.run_apart()
        if isinstance(returned, Launched):
            assert not returned.declined, "the call was declined"
            returned.check()
        self._names = list(self.defined(returned))
        return [x.clone() for x in self.look(returned)]

    def difference(self, seen: list[torch.Tensor], wanted: list[torch.Tensor]) -> str:
        """Where what was seen is not what was wanted, in words."""
        found, place = [], 0
        for arena in self.arenas:
            here = slice(place, place + len(arena.plan.segments))
            arena.after, image = (_image(arena, x[here]) for x in (seen, wanted))
            found += [arena.difference(image)]
            place = here.stop
        for name, a, b in zip(self._names, seen[place:], wanted[place:], strict=True):
            if bool((a != b).any()):
                index = (a != b).nonzero()[0].tolist()
                found += [f"first at {name}{index} of the result, {int((a != b).sum())} elements"]
        return "; ".join(text for text in found if text)


class Placed(Work):
    """One call."""

    def __init__(self, rig: Rig, case: Case, values: Values) -> None:
        self.case, self.values = case, values
        self.arena = Arena(case, self.values, open_device(rig.device))
        super().__init__(rig, [self.arena])
        self.views = self.arena.views()
        self._run = rig.bound(case, self.views)
        self._masks: dict[str, torch.Tensor] = {}

    def run(self) -> Views:
        """Call it."""
        return self._run()

    def defined(self, returned: Views) -> dict[str, torch.Tensor]:
        """Elsewhere there may be anything."""
        if returned and not self._masks:
            cells = expect(self.case, self.values).cells
            self._masks = {name: cells[name].written.to(x.device) for name, x in returned.items()}
        return {name: torch.where(self._masks[name], bits(x), 0) for name, x in returned.items()}


class Chain(Work):
    """Verify, commit, verify over one state and one set of records, with nothing between them."""

    def __init__(self, rig: Rig, verify: Case, commit: Case) -> None:
        first, second = rig.placed(verify), rig.placed(commit)
        super().__init__(rig, [first.arena, second.arena])
        shared = {name: x for name, x in second.views.items() if name in first.views}
        shared |= {name: second.views[f"{name}.0"] for name in first.views if f"{name}.0" in second.views}
        wrong = [name for name, x in shared.items() if x.shape != first.views[name].shape]
        assert not wrong, f"the two calls do not fit together in {wrong}"
        verifies = rig.bound(verify, first.views | shared)
        self._steps: tuple[Callable[[], object], ...] = (verifies, second.run, verifies)

    def run(self) -> Views:
        """All steps."""
        for step in self._steps:
            step()
        return {}

    def run_apart(self) -> Views:
        """All steps, each when the one before is done."""
        for step in self._steps:
            step()
            self.rig.wait()
        return {}


class Comparison:
    """Compares launches with what is wanted, without waiting for any of them."""

    def __init__(
        self, work: Work, wanted: list[torch.Tensor], parts: list[torch.Tensor] | None = None
    ) -> None:
        self._work, self._wanted, self._parts = work, wanted, parts
        self._turn = torch.full((), -1, device=wanted[0].device)
        self._seen = [x.clone() for x in wanted]

    def add(self, turn: int, returned: Views) -> None:
        """Compare what a launch left; the first that differs is kept."""
        now = self._work.look(returned, self._parts)
        differs = torch.stack([(a != b).any() for a, b in zip(now, self._wanted, strict=True)]).any()
        first = differs & (self._turn < 0)
        self._turn = torch.where(first, turn, self._turn)
        self._seen = [torch.where(first, a, b) for a, b in zip(now, self._seen, strict=True)]

    def require_same(self, what: str) -> None:
        """``AssertionError`` names the first launch that left other bits, and where."""
        self._work.rig.wait()
        turn = int(self._turn)
        if turn >= 0:
            where = self._work.difference(self._seen, self._wanted)
            raise AssertionError(f"{what}, launch {turn}: {where}")


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _image(arena: Arena, parts: list[torch.Tensor]) -> np.ndarray:
    image: np.ndarray = arena.before.copy()
    for segment, part in zip(arena.plan.segments, parts, strict=True):
        image[segment.start : segment.start + segment.size] = part.cpu().numpy()
    return image


def _values(case: Case, first: Case) -> Values:
    """The case's values; a commit's context has copied the first one's gate parameters."""
    values = build(case)
    if case.op != "commit":
        return values
    kept = {n: x for n, x in build(first).tensors.items() if n.partition(".")[0] in ("A_log", "dt_bias")}
    return replace(values, tensors={**values.tensors, **kept})


# ---- Properties.


def repeats_agree(rig: Rig, work: Work) -> None:
    """Launched 200 times from the same bytes: the bits of the first launch, which found nothing warm."""
    compared = Comparison(work, work.alone())
    for turn in range(rig.times(200)):
        work.restore()
        compared.add(turn, work.run())
    compared.require_same("launched again")


def settings_are_right(rig: Rig, case: Case, settings: Sequence[Setting]) -> list[str]:
    """Every launch setting that the hardware can hold is judged by the oracle; gives those it cannot hold.

    It must hold at least half of them.
    """
    refused = []
    for setting in settings:
        with launch_settings(**setting) as launches:
            verdict = check(case, rig.implementation, open_device(rig.device))
        text = verdict.problems[0].describe() if verdict.problems else ""
        if "OutOfResources" in text:
            refused.append(f"{setting}: {text}")
            continue
        assert not text, f"{setting}: {text}"
        assert launches, f"{setting}: no launch asked for its settings"
        for kernel, options in launches:
            used = {name: options[name] for name in setting if name in options}
            assert used.items() <= setting.items(), f"{setting}: {kernel} was launched with {used}"
    assert 2 * len(refused) <= len(settings), f"too few settings ran; refused: {refused}"
    return refused


def late_inputs_are_waited_for(rig: Rig, case: Case, *, early: bool = False) -> None:
    """Inputs written on the same stream just before the launch, a millisecond late.

    Until then they hold poison, and indices that name nothing. ``early``: the writer lets dependent
    launches start at once; then only what kernels write for each other is late.
    """
    work = rig.placed(case)
    wanted = work.alone()
    spoiled = spoil(work, only=FROM_KERNELS if early else ())
    write, compared = rig.late(work.parts, work.start, early=early), Comparison(work, wanted)
    for turn in range(rig.times(20)):
        work.restore(spoiled)
        write()
        compared.add(turn, work.run())
    compared.require_same("behind a writer that is late")


def spoil(work: Placed, only: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """The work's bytes with NaN for every float and 0 for every index, of some tensors or of all."""
    specs = work.case.call.tensors()
    work.restore()
    for name, view in work.views.items():
        if not only or name.partition(".")[0] in only:
            view.fill_(float("nan") if view.is_floating_point() and not specs[name].index else 0)
    work.rig.wait()
    spoiled = [part.clone() for part in work.parts]
    work.restore()
    return spoiled


def streams_do_not_meet(rig: Rig, cases: tuple[Case, Case]) -> None:
    """Two calls launched at once on two streams, 50 times: each leaves what it leaves alone."""
    works = [rig.placed(case) for case in cases]
    compared = [Comparison(work, work.alone()) for work in works]
    ways = [rig.stream() for _ in works]
    # The writers hold both streams until both calls are queued.
    writers = [rig.late(work.parts, work.start) for work in works]
    rig.wait()
    for turn in range(rig.times(50)):
        returned = []
        for writer, way in zip(writers, ways, strict=True):
            with way():
                writer()
        for work, way in zip(works, ways, strict=True):
            with way():
                returned.append(work.run())
        for comparison, result, way in zip(compared, returned, ways, strict=True):
            with way():
                comparison.add(turn, result)
    rig.wait()
    for case, comparison in zip(cases, compared, strict=True):
        comparison.require_same(f"{case.op} beside {' and '.join(other.op for other in cases)}")


def graphs_follow_contents(rig: Rig, cases: Sequence[Case]) -> None:
    """A graph captured with one case's bytes, replayed 50 times with those of others of the same shape."""
    works = [rig.placed(case, _values(case, cases[0])) for case in cases]
    shapes = {tuple(work.arena.plan.segments) for work in works}
    assert len(shapes) == 1, "the cases do not have one memory layout"
    wanted, base = [work.alone() for work in works], works[0]
    base.restore()
    replay = rig.captured(base.run)
    compared = [Comparison(work, x, base.parts) for work, x in zip(works, wanted, strict=True)]
    for turn in range(rig.times(50)):
        chosen = turn % len(works)
        base.restore(works[chosen].start)
        compared[chosen].add(turn, replay())
    for case, comparison in zip(cases, compared, strict=True):
        comparison.require_same(f"replayed with the bytes of seed {case.seed}")


def contents(case: Case) -> list[Case]:
    """The case with its rows in one order, with other values, and in another order."""
    change, call = msgspec.structs.replace, case.call
    order = list(range(call.rows))
    # Not in their own order: a commit would not name requests then, and have other memory.
    turned = change(case, call=call.only(order[1:] + order[:1]))
    mirrored = change(case, call=call.only(order[::-1]), seed=case.seed + 2)
    return [turned, change(turned, seed=case.seed + 1), mirrored]
