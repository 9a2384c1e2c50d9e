"""Known findings: which failing verdicts ``corpora/known.toml`` explains, so that runs go on past them.

An entry is narrow on purpose: an implementation, a range of its versions, an operation, the stage
that diverges first and a bucket of ``oracle.buckets``. A failure that agrees in all five is taken
for the finding; one in another stage or kind of case is a new failure.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ci.failures import CORPORA, case_id
from impl.contract import OPERATIONS, one_line
from oracle.buckets import BUCKETS, buckets
from oracle.case import Case, image
from oracle.codec import CaseError, content
from oracle.judge import STAGES, Verdict

CUTE = ":cute"
"""What forms of vLLM end in that are its CuTe kernels."""
LIST = CORPORA / "known.toml"
ALL_STAGES = (*STAGES, "frame", "path", "schedule", "stray", "raised", "crash", "hang", "leak", "sanitizer")
"""What a verdict may name as the first stage to diverge."""


@dataclass(frozen=True)
class Known:
    """One finding in kernels that we do not mend; ``case`` is the id of its minimal case in the corpus."""

    implementation: str
    versions: str
    operation: str
    case: str
    stage: str
    bucket: str
    cause: str

    def covers(self, implementation: str, version: str) -> bool:
        """Whether it speaks of this implementation in this version.

        ``vllm@0.31.0`` is a ``vllm``, and ``vllm@0.33.0:cute`` a ``vllm:cute`` as well.
        """
        name, end = self.implementation, ""
        if name.endswith(CUTE) and implementation.endswith(CUTE):
            name, end = name.removesuffix(CUTE), CUTE
        kind = implementation.removesuffix(end).removeprefix(name)
        if not implementation.startswith(name) or kind[:1] not in ("", ":", "@"):
            return False
        try:
            return SpecifierSet(self.versions).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False  # such as a tree of unknown version: nothing is known of it

    def describe(self) -> str:
        """One line: case, versions, cause."""
        return (
            f"{self.case} ({self.operation} of {self.implementation} {self.versions}): "
            f"{one_line(self.cause, 1000)}"
        )


def explained(
    entries: Sequence[Known], implementation: str, version: str, case: Case, verdict: Verdict
) -> Known | None:
    """The finding that a failing verdict shows again, if one does."""
    if verdict.ok:
        return None
    reached: frozenset[str] | None = None
    for entry in entries:
        if (entry.operation, entry.stage) != (case.op, verdict.stage):
            continue
        if entry.covers(implementation, version):
            reached = _reached(case) if reached is None else reached
            if entry.bucket in reached:
                return entry
    return None


def named(entries: Sequence[Known], implementation: str, version: str, case: Case) -> Known | None:
    """The entry that has this very case and covers this version: there the case must fail."""
    name = case_id(case)
    return next((e for e in entries if e.case == name and e.covers(implementation, version)), None)


def stale(entry: Known, implementation: str, version: str) -> str:
    """What to say where the case of an entry passes."""
    return (
        f"stale: {implementation} ({version}) passes case {entry.case}, which corpora/known.toml lists as a "
        f"finding in {entry.implementation} {entry.versions}; narrow its versions"
    )


def _reached(case: Case) -> frozenset[str]:
    """Buckets of the case and of its image: either may be what fails."""
    return buckets(case) | (buckets(image(case)) if case.relation is not None else frozenset())


def read_known(path: Path = LIST) -> tuple[Known, ...]:
    """The entries of a list; a missing list is an empty one. ``CaseError`` where one is unusable."""
    entries, problems = _entries(path)
    if problems:
        raise CaseError(problems[0])
    return tuple(entry for _, entry in entries)


def problems_of(path: Path, cases: Mapping[str, Case]) -> list[str]:
    """Everything that is wrong with a list beside a corpus of these ``cases`` by id."""
    entries, problems = _entries(path)
    for number, entry in entries:
        case = cases.get(entry.case)
        if case is None:
            wrong = f"names case {entry.case}, which is not in the corpus"
        elif case.op != entry.operation:
            wrong = f"names case {entry.case}, which is a case of {case.op}"
        elif entry.bucket not in _reached(case):
            wrong = f"names case {entry.case}, which does not fall into bucket {entry.bucket!r}"
        else:
            continue
        problems.append(f"{path}: entry {number} {wrong}")
    return problems


def _entries(path: Path) -> tuple[list[tuple[int, Known]], list[str]]:
    """The usable entries with their numbers, and what is wrong with the others."""
    if not path.exists():
        return [], []
    try:
        table = tomllib.loads(content(path).decode())
    except CaseError as error:
        return [], [str(error)]
    except (ValueError, RecursionError) as error:  # no TOML, no text, a number without end
        return [], [f"{path}: {one_line(error)}"]
    given = table.pop("known", [])
    problems = [f"{path}: unknown table {name!r}; it holds [[known]]" for name in table]
    if not isinstance(given, list):
        return [], [*problems, f"{path}: needs its entries as [[known]]"]
    entries = []
    for number, fields_ in enumerate(given, 1):
        wrong = _wrong(fields_)
        if wrong:
            problems.append(f"{path}: entry {number} {wrong}")
        else:
            entries.append((number, Known(**fields_)))
    return entries, problems


def _wrong(given: object) -> str:
    """What is wrong with one entry by itself, or nothing."""
    names = {field.name for field in fields(Known)}
    if not isinstance(given, dict) or set(given) != names:
        return f"needs the fields {', '.join(sorted(names))}"
    if not all(isinstance(value, str) and value.strip() for value in given.values()):
        return "needs text in every field"
    try:
        SpecifierSet(given["versions"])
    except InvalidSpecifier:
        return f'needs versions such as ">=0.29,<0.32"; found {one_line(given["versions"])!r}'
    operation = given["operation"]
    if operation not in OPERATIONS:
        return f"names no operation; it takes one of {', '.join(OPERATIONS)}"
    if given["stage"] not in ALL_STAGES:
        return f"names no stage; it takes one of {', '.join(ALL_STAGES)}"
    if given["bucket"] not in BUCKETS[operation]:
        return f"names bucket {one_line(given['bucket'])!r}, which {operation} does not have"
    return ""
