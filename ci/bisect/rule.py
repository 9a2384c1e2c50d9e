"""What the judgements of one item mean: good, bad, or nothing that can be told."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ci.minimize import signature
from impl.contract import one_line
from oracle.judge import Verdict

Kind = Literal["good", "bad", "skip"]


class Run(msgspec.Struct, frozen=True):
    """One judgement: how it failed (nothing: it passed), and the largest ratio, if any was measured."""

    failure: str
    ratio: float | None
    text: str = ""


class Seen(msgspec.Struct, frozen=True):
    """All judgements of one item; none, and ``why``, if it could not be had. ``note`` is for the user."""

    runs: tuple[Run, ...] = ()
    why: str = ""
    note: str = ""
    seconds: float = 0.0

    @property
    def ratio(self) -> float | None:
        """The largest of all runs."""
        return max((run.ratio for run in self.runs if run.ratio is not None), default=None)


@dataclass(frozen=True)
class Outcome:
    """What an item is, and why in a few words."""

    kind: Kind
    why: str = ""


def run_of(verdict: Verdict) -> Run:
    """What is kept of a verdict."""
    ratio = verdict.ratio if verdict.ratios else None
    if verdict.ok:
        return Run("", ratio)
    return Run(failure_of(verdict), ratio, one_line(verdict.problems[0].describe()))


def failure_of(verdict: Verdict) -> str:
    """A failing verdict's signature in words: kind, stage, tensor; of an exception its type."""
    words = [word for word in dict.fromkeys(signature(verdict)) if word]
    if words == ["raised"]:
        words.append(verdict.problems[0].text.partition(":")[0].partition(" ")[0])
    return " ".join(words)


@dataclass(frozen=True)
class Rule:
    """When an item is bad: it fails as ``like`` says (empty: anyhow), or its ratio is above ``threshold``.

    Whatever fails in another way tells nothing of this failure. ``any_run``: one failing run
    of several makes an item bad; otherwise runs that disagree tell nothing.
    """

    threshold: float | None = None
    like: str = ""
    any_run: bool = False

    def outcome(self, seen: Seen) -> Outcome:
        """What the item is."""
        if seen.why:
            return Outcome("skip", seen.why)
        if self.threshold is not None:
            unmeasured = next((run for run in seen.runs if run.ratio is None), None)
            if unmeasured is not None:
                return Outcome("skip", f"no ratio: {unmeasured.text or 'no bounded output'}")
        else:
            other = next((run for run in seen.runs if self.like and run.failure not in ("", self.like)), None)
            if other is not None:
                return Outcome("skip", f"another failure: {other.text}")
        bad = [run for run in seen.runs if self._bad(run)]
        if bad and len(bad) < len(seen.runs):
            mixed = f"mixed: {len(bad)} of {len(seen.runs)} runs {self._verb}"
            return Outcome("bad" if self.any_run else "skip", mixed)
        if not bad:
            return Outcome("good")
        return Outcome("bad", bad[0].text)

    def like_first(self, seen: Seen) -> "Rule":
        """The rule that takes for bad what failed first here."""
        found = next((run.failure for run in seen.runs if run.failure), "")
        return self if self.threshold is not None else replace(self, like=self.like or found)

    @property
    def _verb(self) -> str:
        return "fail" if self.threshold is None else f"have a ratio above {self.threshold:g}"

    def _bad(self, run: Run) -> bool:
        if self.threshold is None:
            return run.failure != ""
        assert run.ratio is not None
        return math.isnan(run.ratio) or run.ratio > self.threshold
