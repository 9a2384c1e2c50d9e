"""``judge(expected, observation) -> Verdict``: every element within its bound, every other byte kept.

A kernel computes in fp32 and rounds once when it stores. The oracle bounds the fp32 number;
the judge therefore asks how far the *nearest fp32 number that rounds to the observed
element* lies from the oracle's value:

    excess = distance from value to [midpoint below observed, midpoint above observed]
    ratio  = excess / bound            (for a store without rounding, |observed - value| / bound)

``ratio <= 1`` holds exactly if the declared arithmetic allows the element, and the ratio
measures the arithmetic alone, whatever the precision of the store.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from oracle.expectation import DECLINED, Cells, Expected, Observation
from oracle.parts import PART
from oracle.stored import bits, over_bound, same_bits

Tensor = torch.Tensor


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: what kind, where first, how badly and how often.

    ``kind`` is value, copy, frame, path, schedule, stray, raised, relation, crash, hang, leak or sanitizer.
    ``ratio`` is that of the worst element (infinite where no bound applies), and ``count`` of ``total``
    elements are wrong.
    """

    kind: str
    tensor: str = ""
    stage: str = ""
    index: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    expected: str = ""
    observed: str = ""
    bound: float = 0.0
    ratio: float = math.inf
    count: int = 1
    total: int = 1
    text: str = ""

    def noted(self, note: str) -> "Problem":
        """The same with a note behind what its text says."""
        return replace(self, text=f"{self.text}; {note}" if self.text else note)

    def describe(self) -> str:
        """One line for people."""
        place = ", ".join(f"{axis} {i}" for axis, i in zip(self.axes, self.index, strict=False))
        where = f"{self.tensor}[{', '.join(map(str, self.index))}] ({place})" if self.index else self.tensor
        if self.kind == "value":
            head = f"{where}: expected {self.expected} +- {self.bound:.3g}, observed {self.observed}"
            counted = f"ratio {self.ratio:.3g}; {self.count} of {self.total} elements"
            return f"{self.stage}: {head}; {counted}" + (f"; {self.text}" if self.text else "")
        if self.kind in ("copy", "frame", "relation"):
            what = {"copy": "copy differs", "frame": "must keep its bytes", "relation": "image differs"}[
                self.kind
            ]
            head = f"{where} {what}: expected {self.expected}, observed {self.observed}"
            return f"{self.stage}: {head}; {self.count} of {self.total} elements" + (
                f"; {self.text}" if self.text else ""
            )
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    """Whether the observation is what the contract allows, and how close it came.

    ``ratio`` is the largest of all bounded elements, ``ratios`` the largest per tensor, and
    ``problems`` are in the order of the algorithm's stages: the first is where it diverged.
    ``cause`` is the step before it that explains it, if one does (``oracle.diagnosis``).
    """

    ratio: float = 0.0
    ratios: dict[str, float] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    path: str = ""
    cause: str = ""

    @property
    def ok(self) -> bool:
        """No problem at all."""
        return not self.problems

    @property
    def stage(self) -> str:
        """The stage that diverged first, or nothing."""
        return next((p.stage or p.kind for p in self.problems), "")


STAGES = ("plan", "conv", "roll", "record", "correction", "output", "fold")


def judge(expected: Expected, seen: Observation, axes: dict[str, tuple[str, ...]] | None = None) -> Verdict:
    """Compare every tensor of the observation with what is expected of it.

    ``axes`` names the tensors' dimensions for the messages.
    """
    if seen.raised:
        return Verdict(math.inf, problems=(Problem("raised", text=seen.raised),), path=seen.path)
    axes = axes or {}
    problems: list[Problem] = []
    ratios: dict[str, float] = {}
    for name, after in seen.after.items():
        cells, names = expected.cells.get(name), axes.get(name, ())
        if cells is not None:
            ratio, problem = _judge_written(name, cells, after, names)
            if cells.bound is not None:
                ratios[name] = ratio
            problems += [problem] if problem else []
        if cells is None or not cells.fresh:
            problem = _judge_frame(name, cells, seen.before[name], after, names)
            problems += [problem] if problem else []
    missing = expected.cells.keys() - seen.after.keys()
    problems += [Problem("raised", text=f"the call returned no {name}") for name in sorted(missing)]
    problems.sort(key=lambda p: STAGES.index(p.stage) if p.stage in STAGES else len(STAGES))
    problems += _judge_path(expected.path, seen.path)
    problems += [
        Problem("schedule", text=text) for text in (seen.differs, *_returned(expected, seen)) if text
    ]
    problems += [
        Problem(
            "stray",
            text=f"{s.count} bytes changed outside every tensor, first at {s.near} {s.offset:+d} bytes",
        )
        for s in seen.strays
    ]
    return Verdict(max(ratios.values(), default=0.0), ratios, tuple(problems), seen.path)


def _returned(expected: Expected, seen: Observation) -> Iterator[str]:
    """Where defined cells of what the callee allocates depend on the schedule: the others are free."""
    for schedules, tensors in seen.returned.items():
        for name, other in tensors.items():
            here, cells = seen.after[name], expected.cells.get(name)
            if cells is None or here.shape != cells.written.shape:
                continue  # judged as that
            if other.shape != here.shape:
                yield f"schedules {schedules} return {name} in different shapes"
                continue
            wrong = cells.written & ~same_bits(here, other)
            if bool(wrong.any()):
                index = ", ".join(str(int(i)) for i in torch.nonzero(wrong)[0])
                count = f"{int(wrong.sum())} of its {wrong.numel()} elements"
                yield f"schedules {schedules} return different bytes, first at {name}[{index}], {count}"


def _judge_path(expected: str, seen: str) -> list[Problem]:
    """Implementations need not tell their path, but every call tells whether it was declined."""
    told = seen or expected == DECLINED
    if not expected or not told or seen == expected:
        return []
    return [Problem("path", text=f"this memory asks for the path {expected}; taken: {seen or 'another'}")]


def _judge_written(
    name: str, cells: Cells, after: Tensor, axes: tuple[str, ...]
) -> tuple[float, Problem | None]:
    total = int(cells.written.sum())
    if after.shape != cells.written.shape:
        text = f"{name} has shape {tuple(after.shape)}; expected {tuple(cells.written.shape)}"
        return math.inf, Problem("raised", text=text)
    if cells.bound is None:
        wrong = cells.written & ~same_bits(cells.value, after, any_nan=True)
        problem = _first("copy", name, cells.stage, wrong, cells.value, after, axes, total)
        return 0.0, problem
    # Only what is written is looked at: of a pool of states that is a few slots.
    found = _over_bound(cells, after, _chosen(cells.written))
    if cells.copied is not None:
        source = cells.value.to(after.dtype)
        wrong = cells.written & cells.copied & ~same_bits(source, after, any_nan=True)
        first = _first("copy", name, cells.stage, wrong, source, after, axes, total)
        if first is not None:
            return found.largest, replace(first, count=first.count + found.count)
    if not found.count:
        return found.largest, None
    index = tuple(int(i) for i in torch.nonzero(cells.written)[found.first])
    return found.largest, Problem(
        kind="value",
        tensor=name,
        stage=cells.stage,
        index=index,
        axes=axes,
        expected=f"{float(cells.value[index]):.9g}",
        observed=f"{float(after[index]):.9g}",
        bound=float(cells.bound[index]),
        ratio=found.largest,
        count=found.count,
        total=total,
    )


@dataclass
class _Over:
    """The largest ratio of some cells, how many are above 1, and which of them is the first."""

    largest: float = 0.0
    count: int = 0
    first: int = 0


def _over_bound(cells: Cells, after: Tensor, chosen: Tensor) -> _Over:
    """``over_bound`` of the chosen cells, copied ones left out, a part at a time."""
    assert cells.bound is not None
    over, seen = _Over(), 0
    tensors = (cells.value, cells.bound, after, *([cells.copied] if cells.copied is not None else []))
    for group in _groups(chosen, after):
        parts = [x[group].flatten() for x in tensors]
        for start in range(0, len(parts[0]), PART):
            value, bound, observed, *copied = (x[start : start + PART] for x in parts)
            ratio = over_bound(value, bound, observed, cells.via)
            ratio = torch.where(copied[0], 0.0, ratio) if copied else ratio
            largest = float(ratio.max())
            if largest > 1.0:
                wrong = torch.nonzero(ratio > 1.0)
                over.first = over.first if over.count else seen + int(wrong[0])
                over.count += len(wrong)
            over.largest = max(over.largest, largest)
            seen += len(value)
    return over


def _groups(chosen: Tensor, of: Tensor) -> list[Tensor | int]:
    """Indices that together say ``chosen``: leading entries a few at a time, large ones in place."""
    if chosen.ndim == of.ndim:
        return [chosen]
    entries = torch.nonzero(chosen).flatten()
    most = PART // max(1, of[0].numel())
    return list(entries.split(most)) if most > 1 else [int(entry) for entry in entries]


def _chosen(written: Tensor) -> Tensor:
    """An index of the written cells, in order: of whole leading entries if that says it, as for slots."""
    if written.ndim < 2 or not written.numel():
        return written
    leading = written.flatten(1)
    whole = leading.all(1)
    return whole if torch.equal(whole, leading.any(1)) else written


def _judge_frame(
    name: str, cells: Cells | None, before: Tensor, after: Tensor, axes: tuple[str, ...]
) -> Problem | None:
    wrong = bits(before) != bits(after)
    if cells is not None:
        wrong &= ~cells.written
    stage = cells.stage if cells is not None else "frame"
    return _first("frame", name, stage, wrong, before, after, axes, int(wrong.numel()))


def _first(
    kind: str,
    name: str,
    stage: str,
    wrong: Tensor,
    want: Tensor,
    got: Tensor,
    axes: tuple[str, ...],
    total: int,
) -> Problem | None:
    if not bool(wrong.any()):
        return None
    index = tuple(int(i) for i in torch.nonzero(wrong)[0])
    return Problem(
        kind=kind,
        tensor=name,
        stage=stage,
        index=index,
        axes=axes,
        expected=_show(want[index]),
        observed=_show(got[index]),
        count=int(wrong.sum()),
        total=total,
    )


def _show(element: Tensor) -> str:
    """A number with its bits: two NaNs or two zeros are told apart."""
    width = 2 * element.element_size()
    raw = int(bits(element.reshape(1))[0]) & ((1 << 4 * width) - 1)
    text = f"{float(element):.9g}" if element.is_floating_point() else str(int(element))
    return f"{text} (0x{raw:0{width}x})"
