"""What one property test did, as JUnit properties: pytest-xdist carries those to its controller."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields

from oracle.judge import Verdict


@dataclass
class Record:
    """One property test on one implementation. What is empty is left out of the properties.

    ``examples`` counts the cases up to the first failure and ``seconds`` is the time to judge them;
    ``largest_ratio`` is that of the examples which passed, and ``known`` counts those which failed
    as a finding of ``corpora/known.toml`` does. ``case`` is where a failing case was saved and
    ``replay`` the command that runs it again. ``absent`` says why the operation is not offered,
    ``stale`` which entry of ``known.toml`` the implementation passes.
    """

    implementation: str = ""
    version: str = ""
    device: str = ""
    gpu: str = ""
    gpu_uuid: str = ""
    profile: str = ""
    seed: str = ""
    operation: str = ""
    examples: int = 0
    seconds: float = 0.0
    largest_ratio: float = 0.0
    known: int = 0
    case: str = ""
    replay: str = ""
    absent: str = ""
    stale: str = ""

    def properties(self) -> list[tuple[str, object]]:
        """For ``user_properties`` of a test; none if it is no property test."""
        if not self.implementation:
            return []
        given = asdict(self)
        return [(name, value) for name, value in given.items() if value != "" or name == "operation"]

    @classmethod
    def of(cls, properties: Iterable[tuple[str, object]]) -> "Record | None":
        """The record that a report's properties hold, if they hold one."""
        names = {item.name for item in fields(cls)}
        given = {name: value for name, value in properties if name in names}
        return cls(**given) if "implementation" in given else None  # type: ignore[arg-type]


@dataclass
class Ledger:
    """Where the tests of a process keep the record of the one that runs."""

    current: Record = field(default_factory=Record)
    failed: bool = False

    def begin(self, record: Record) -> None:
        """Another test starts."""
        self.current, self.failed = record, False

    def needs(self, operation: str, absent: str) -> None:
        """What the test is of, also where it comes to judge nothing, and why that is not offered."""
        assert not self.current.examples or self.current.operation == operation, "a test is of one operation"
        self.current.operation, self.current.absent = operation, absent

    def saved(self, case: str, replay: str) -> None:
        """Where the failing case lies, and what repeats it."""
        self.current.case, self.current.replay = case, replay

    def judged(self, verdict: Verdict, seconds: float, *, known: bool) -> None:
        """Count an example; those that shrink a failing one are none."""
        record = self.current
        if self.failed:
            return
        record.examples += 1
        record.seconds += seconds
        record.known += known
        if verdict.ok:
            record.largest_ratio = max(record.largest_ratio, verdict.ratio)
        self.failed = not verdict.ok and not known
