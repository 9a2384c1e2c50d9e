"""Mutated kernels behind their own host code, judged by the suite: which mutation is found, how, how soon.

A subject is an implementation, an operation and one compiled variant of it. Its cases are drawn
by the suite's own strategies; a mutation replaces the program of that variant wherever the host
code launches it, and is found when a case's verdict is not clean.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings

from impl.contract import Domain, Implementation
from impl.cute.emulator.compiled import Emulated
from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.program import Program
from impl.devices.base import Device
from impl.devices.registry import open_device
from impl.observe import observe
from impl.registry import resolve
from oracle.calls.commit import Commit
from oracle.calls.fused_verify import FusedVerify
from oracle.case import Case
from oracle.codec import canonical
from oracle.expect import expect
from oracle.expectation import Expected
from oracle.judge import Verdict, judge
from oracle.tracked import arithmetic
from oracle.values import build
from tests.meta.emulator.mutations import Mutation
from tests.strategies.cases import CASES

HEADS = {"commit": 4, "fused_verify": 2}
"""Heads to be confused with each other; a CTA of commit uses its two buffers twice."""
WINDOW = 8
"""No column of a product is padding."""
CASE_COUNT, DRAWN = 60, 1200
KEPT = 10
"""Cases whose expectations are kept, of some 30 MB each: the first, which tell most mutations."""


@dataclass(frozen=True)
class Finding:
    """How a mutation was found: by the how-manieth case, as what kind of problem, in what words."""

    cases: int
    kind: str
    text: str


@dataclass(frozen=True)
class Subject:
    """One kernel: ``path`` is the implementation's word for it."""

    implementation: str
    operation: str
    path: str

    @cached_property
    def _expected(self) -> dict[object, Expected]:
        return {}

    @cached_property
    def _programs(self) -> dict[str, Program]:
        """Of the kernels as they are."""
        return {}

    @cached_property
    def _device(self) -> Device:
        return open_device("emulator")

    @cached_property
    def _offered(self) -> Implementation:
        self._device  # noqa: B018 - it must switch Triton to its interpreter before kernels are loaded
        return resolve(self.implementation)

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """Cases that launch the kernel: the richest of many drawn from a fixed seed, without relations."""
        domain = replace(
            self._offered.offered(self.operation), heads=(HEADS[self.operation],), windows=(WINDOW,)
        )
        found = [case for case in drawn(self.operation, domain) if self._wanted(case)]
        return tuple(sorted(found, key=_richness, reverse=True)[:CASE_COUNT])

    def _wanted(self, case: Case) -> bool:
        """Whether the case launches the kernel with something to do."""
        if isinstance(case.call, Commit):
            return any(case.call.plan(row).writes for row in range(case.call.rows))
        live = [row for row in range(case.call.rows) if case.call.live(row)]
        return len(live) > 1 and self.taken(case) == self.path

    def taken(self, case: Case) -> str:
        """The path that the oracle says the case takes."""
        assert isinstance(case.call, FusedVerify)
        return case.call.path(case.layouts, case.pages)

    def judge(self, case: Case) -> Verdict:
        """The verdict, without a search for its cause; of the first cases, what must come out is kept."""
        values = build(case)
        seen = observe(case, self._offered, self._device, values)
        key = canonical(case), seen.arithmetic
        expected = self._expected.get(key)
        if expected is None:
            expected = expect(case, values, arithmetic(seen.arithmetic, self._device.name))
            if len(self._expected) < KEPT:
                self._expected[key] = expected
        return judge(expected, seen)

    @cached_property
    def texts(self) -> dict[str, list[tuple[int, Case]]]:
        """PTX of every kernel that the cases launch, with the numbers of those that do; all are right."""
        found: dict[str, list[tuple[int, Case]]] = {}
        for number, case in enumerate(self.cases, 1):
            seen: dict[str, None] = {}
            with programs(lambda text: seen.setdefault(text), self._programs):  # noqa: B023 - used at once
                verdict = self.judge(case)
            assert verdict.ok, verdict
            for text in seen:
                found.setdefault(text, []).append((number, case))
        return found

    def find(self, original: str, mutation: Mutation) -> Finding | None:
        """The first case that tells the mutation from the kernel, or None: one that launches it."""
        with programs(lambda text: mutation.text if text == original else None, self._programs):
            for number, case in self.texts[original]:
                try:
                    verdict = self.judge(case)
                except EmulatorError as error:  # refused when lowered
                    return Finding(number, error.kind, error.text)
                if not verdict.ok:
                    problem = verdict.problems[0]
                    return Finding(number, problem.kind, problem.text)
        return None


@cache
def drawn(operation: str, domain: Domain) -> tuple[Case, ...]:
    """The distinct cases among those drawn, without relations; the kernels of an operation share them."""
    found: dict[object, Case] = {}

    @seed(20)
    @settings(
        max_examples=DRAWN,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(CASES[operation](domain=domain))
    def take(case: Case) -> None:
        case = msgspec.structs.replace(case, relation=None)
        found[msgspec.json.encode(case)] = case

    take()
    return tuple(found.values())


def _richness(case: Case) -> tuple[int, ...]:
    """How much of a kernel a case exercises: late boundaries, null rows with tokens, lengths that differ."""
    call = case.call
    if isinstance(call, Commit):
        plans = [call.plan(row) for row in range(call.rows)]
        late = max((p.m for p in plans if p.writes_boundary), default=0)
        return late, len({p.n for p in plans}), call.rows
    null = {call.qlens[row] for row in range(call.rows) if call.null(row)}
    return len(null - {0}), len(set(call.qlens)), call.rows


@contextmanager
def programs(change: Callable[[str], str | None], kept: dict[str, Program]) -> Iterator[None]:
    """Launches execute what ``change`` makes of a kernel's PTX; None leaves it, as it is in ``kept``."""
    original = Emulated.__dict__["program"]
    changed: dict[str, Program] = {}

    def program(self: Emulated) -> Program:
        text = change(self.ptx)
        made = kept if text in (None, self.ptx) else changed
        text = text or self.ptx
        if text not in made:
            made[text] = Program.parse(text)
        return made[text]

    setattr(Emulated, "program", property(program))  # noqa: B010 - a property, to the checker
    try:
        yield
    finally:
        setattr(Emulated, "program", original)  # noqa: B010
