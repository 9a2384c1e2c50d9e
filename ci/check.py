"""One case judged whole: against the oracle, byte by byte, and under its relation."""

import math
from dataclasses import replace

from ci.serving import serve
from ci.split import split
from impl.contract import Implementation, UnavailableError
from impl.devices.base import Device
from impl.observe import observe
from oracle.calls.serve import Serve
from oracle.case import Case, Graph, Split, image
from oracle.diagnosis import diagnose
from oracle.expect import expect
from oracle.expectation import Expected, Observation
from oracle.judge import Problem, Verdict, judge
from oracle.relations import disagreements
from oracle.tracked import arithmetic
from oracle.values import build


def check(case: Case, implementation: Implementation, device: Device) -> Verdict:
    """Run the case, and its image if it claims a relation, and judge everything.

    ``UnavailableError``: the implementation does not take the case.
    """
    if isinstance(case.call, Serve):
        refusal = implementation.takes(case)
        if refusal:
            raise UnavailableError(refusal)
        return serve(case, implementation, device)
    expected, seen, verdict = _judged(case, implementation, device)
    if case.relation is None or not verdict.ok:
        return verdict
    if isinstance(case.relation, Split):
        ar = arithmetic(seen.arithmetic, device.name)
        return replace(verdict, problems=split(case, expected, seen, implementation, device, ar))
    replayed = isinstance(case.relation, Graph)
    _, other, second = _judged(image(case), implementation, device, replayed=replayed)
    ratios = {name: max(ratio, second.ratios.get(name, 0.0)) for name, ratio in verdict.ratios.items()}
    problems = second.problems or tuple(disagreements(case, expected, seen, other))
    return Verdict(max(verdict.ratio, second.ratio), ratios, problems, verdict.path)


def _judged(
    case: Case, implementation: Implementation, device: Device, *, replayed: bool = False
) -> tuple[Expected, Observation, Verdict]:
    values = build(case)
    seen = observe(case, implementation, device, values, replayed=replayed)
    try:
        declared = arithmetic(seen.arithmetic, device.name)
    except ValueError as error:
        raise UnavailableError(f"{implementation.name}: {error}") from None
    expected = expect(case, values, declared)
    axes = {name: spec.axes for name, spec in case.call.results().items()}
    verdict = judge(expected, seen, axes)
    if not verdict.ok:
        verdict = replace(verdict, cause=diagnose(case, values, expected, seen, verdict))
    return expected, seen, verdict


def crashed(text: str, kind: str = "crash") -> Verdict:
    """The verdict on a run that did not return: the process died, or had to be stopped."""
    return Verdict(math.inf, problems=(Problem(kind, text=text),))
