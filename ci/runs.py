"""One call that was run and judged, for those who want to see more of it than its verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from oracle.calls import AnyCall
from oracle.expectation import Expected, Observation
from oracle.judge import Verdict


@dataclass(frozen=True)
class Run:
    """A call: what was expected of it, what it left, and the verdict on that.

    ``axes`` names the tensors' dimensions. ``call`` says which rows and slots they are, where that is
    known; ``inputs`` are its tensors as they were built, and ``what`` says which call it is where a
    case makes several. ``differs`` marks cells that a relation asks to be the same and that are not.
    """

    expected: Expected
    seen: Observation
    verdict: Verdict
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    call: AnyCall | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    what: str = ""
    differs: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there is nothing wrong to be seen in it."""
        return self.verdict.ok and not self.differs


Watch = Callable[[Run], None]
"""Is told of every call of a case, in order."""


def ignore(run: Run) -> None:
    """Does nothing with a call."""
