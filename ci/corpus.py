"""``kdafuzz corpus check``: every case file readable, named by its content, small and explained."""

import tomllib
from pathlib import Path

from ci.campaign import console
from ci.failures import CORPORA, case_id
from ci.replay import load
from impl.contract import one_line
from oracle.codec import CaseError

MAX_CASE_BYTES = 2048
KNOWN_FIELDS = {"implementation", "versions", "operation", "case", "stage", "cause"}


def command(folder: Path | None) -> int:
    """Check a corpus; 0 clean, 1 for cases against the rules, 2 for what cannot be read."""
    out, root = console(), folder or CORPORA
    if not root.is_dir():
        raise CaseError(f"{root}: no such folder")
    unusable: list[str] = []
    against: list[str] = []
    files = sorted(file for file in root.rglob("*.json") if not file.is_dir())
    for file in files:
        try:
            against += [f"{file}: {problem}" for problem in rules_broken(file, root)]
        except CaseError as error:
            unusable.append(str(error))
    unusable += _known_problems(root / "known.toml", {file.stem[-8:] for file in files})
    for line in (*unusable, *against):
        out.print(line, markup=False)
    out.print(f"{len(files)} cases, {len(unusable)} unusable, {len(against)} against the rules")
    return 2 if unusable else 1 if against else 0


def rules_broken(file: Path, root: Path) -> list[str]:
    """What is wrong with a readable case file; ``CaseError`` if it is not readable."""
    entry = load(file)
    name, problems = case_id(entry.case), []
    if not file.stem.endswith(f"-{name}"):
        problems.append(f"must be named <slug>-{name}.json after its content")
    if file.parent != root / entry.case.op:
        problems.append(f"must lie in {root / entry.case.op}")
    if file.stat().st_size > MAX_CASE_BYTES:
        problems.append(f"has {file.stat().st_size} bytes; at most {MAX_CASE_BYTES}")
    if not entry.why:
        problems.append("does not say why it is there (field 'why')")
    if not entry.checksum:
        problems.append("has no checksum of its values")
    return problems


def _known_problems(path: Path, ids: set[str]) -> list[str]:
    """What is wrong with the list of known findings; a missing list is an empty one."""
    if not path.exists():
        return []
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        return [f"{path}: {one_line(error)}"]
    entries = table.pop("known", [])
    problems = [f"{path}: unknown table {name!r}; it holds [[known]]" for name in table]
    if not isinstance(entries, list):
        return [*problems, f"{path}: needs its entries as [[known]]"]
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or set(entry) != KNOWN_FIELDS:
            problems.append(f"{path}: entry {number} needs the fields {', '.join(sorted(KNOWN_FIELDS))}")
        elif not all(isinstance(value, str) for value in entry.values()):
            problems.append(f"{path}: entry {number} needs text in every field")
        elif entry["case"] not in ids:
            problems.append(f"{path}: entry {number} names case {entry['case']}, which is not in the corpus")
    return problems
