"""Calls of serving: each runs on memory as the last one left it, and is judged by its own oracle."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from ci import steps
from ci.runs import Run, Watch, ignore
from impl.contract import FUSED, Implementation
from impl.devices.base import Device
from impl.observe import observe
from oracle.calls import AnyCall
from oracle.calls.serve import Lying, Serve
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import DECLINED, Expected, Observation
from oracle.judge import Problem, judge
from oracle.tracked import Arithmetic, arithmetic
from oracle.values import Values, index_tensors

Tensor = torch.Tensor


class WrongError(Exception):
    """A call, or what it came to, was wrong."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__()
        self.problems = problems


@dataclass(frozen=True)
class Called:
    """Memory after a call, what was expected of it, and whether it was declined."""

    after: dict[str, Tensor]
    expected: Expected
    declined: bool


class Calls:
    """Runs calls on an implementation, its fallback included, and keeps the worst ratios.

    ``step`` is what problems say of when they came; ``watch`` is told of every call.
    ``UnavailableError``: nothing serves a part.
    """

    def __init__(
        self,
        case: Case,
        script: Serve,
        implementation: Implementation,
        device: Device,
        watch: Watch = ignore,
    ) -> None:
        self._watch = watch
        self._case, self._script, self._device = case, script, device
        self._parts = implementation.serving()
        if FUSED in self._parts:
            self._parts[FUSED] = _kept(self._parts[FUSED])
        self.step = 0
        self.ratios: dict[str, float] = {}
        self.path = ""

    @property
    def fused(self) -> bool:
        """Whether windows go through a fused verify."""
        return FUSED in self._parts and self._script.fusable

    def arithmetic(self, operation: str) -> Arithmetic:
        """What runs an operation has this arithmetic."""
        return arithmetic(self._parts[operation].arithmetic, self._device.name)

    def run(self, call: AnyCall, tensors: dict[str, Tensor], lying: Lying = "dense") -> Called:
        """Run a call on these tensors; ``WrongError`` if any byte is."""
        layouts = steps.layouts(self._script, call, lying)
        case = Case(call=call, layouts=layouts, poison=self._case.poison)
        values = Values.full(tensors | index_tensors(call))
        seen = observe(case, self._parts[case.op], self._device, values)
        self.path = seen.path
        expected = expect(case, values, self.arithmetic(case.op))
        axes = {name: spec.axes for name, spec in call.results().items()}
        self.judge(case.op, expected, seen, axes, call, values.tensors)
        return Called(seen.after, expected, seen.path == DECLINED)

    def judge(
        self,
        what: str,
        expected: Expected,
        seen: Observation,
        axes: dict[str, tuple[str, ...]],
        call: AnyCall,
        inputs: dict[str, Tensor] | None = None,
    ) -> None:
        """Hold an observation against what is expected; ``WrongError`` if it differs."""
        verdict = judge(expected, seen, axes)
        note = f"in {what} of step {self.step}"
        self._watch(Run(expected, seen, verdict, axes, call, inputs or {}, note))
        for name, ratio in verdict.ratios.items():
            key = f"{what} {name.partition('.')[0]}"
            self.ratios[key] = max(ratio, self.ratios.get(key, 0.0))
        if not verdict.ok:
            raise WrongError(tuple(problem.noted(note) for problem in verdict.problems))


def _kept(implementation: Implementation) -> Implementation:
    """The same with one wrapper of the fused verify for all steps, as a layer has it."""
    operations = dict(implementation.operations)
    operations[FUSED] = cache(implementation.variants(FUSED)[""])
    return replace(implementation, operations=operations)
