"""How near cases came to their bounds: the worst of each kind, and what chance finds."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from oracle.case import Case
from oracle.codec import canonical
from oracle.reach.dtypes import combination
from oracle.reach.memory import base

COMPARED = 40
"""Drawn cases of an operation that are kept, to be measured against a plain reference."""


@dataclass(frozen=True)
class Near:
    """A case and the largest ratio of one of its tensors."""

    ratio: float
    case: Case

    def beats(self, other: "Near | None") -> bool:
        """Whether it is nearer; of equals the one whose bytes come first is, whichever was found first."""
        if other is None or self.ratio != other.ratio:
            return other is None or self.ratio > other.ratio
        return canonical(self.case) < canonical(other.case)


Kind = tuple[str, str]
"""The dtypes of a call, and a tensor's name without its layer."""


@dataclass
class Nearness:
    """What a hunt found, by kind; those of several hunts add up, in any order.

    ``worst`` is over everything that was judged and passed, ``samples`` has a ratio for every drawn
    example, and ``cases`` are a few of these.
    """

    worst: dict[Kind, Near] = field(default_factory=dict)
    samples: dict[Kind, list[float]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    def saw(self, case: Case, ratios: Mapping[str, float], *, drawn: bool) -> None:
        """Take a case that passed into account; ``drawn``: it is a random example."""
        of_tensor: dict[str, float] = {}
        for name, ratio in ratios.items():
            of_tensor[base(name)] = max(ratio, of_tensor.get(base(name), 0.0))
        for name, ratio in of_tensor.items():
            kind = combination(case.call), name
            self._take(kind, Near(ratio, case))
            if drawn:
                self.samples.setdefault(kind, []).append(ratio)
        if drawn and of_tensor:
            self._keep([case])

    def add(self, other: "Nearness") -> None:
        """Add what another hunt found."""
        for kind, near in other.worst.items():
            self._take(kind, near)
        for kind, ratios in other.samples.items():
            self.samples.setdefault(kind, []).extend(ratios)
        self._keep(other.cases)

    def _take(self, kind: Kind, near: Near) -> None:
        if near.beats(self.worst.get(kind)):
            self.worst[kind] = near

    def _keep(self, cases: list[Case]) -> None:
        """Those whose digests are the smallest: a choice that no order of arrival changes."""
        if cases:
            by_digest = {hashlib.blake2b(canonical(case)).digest(): case for case in (*self.cases, *cases)}
            self.cases = [by_digest[digest] for digest in sorted(by_digest)[:COMPARED]]
