"""``kdafuzz corpus check``: every case file readable, named by its content, small and explained."""

from pathlib import Path

from ci.campaign import console
from ci.failures import CORPORA, case_id
from ci.known import problems_of
from ci.replay import load
from oracle.case import Case
from oracle.codec import CaseError, CaseFile

MAX_CASE_BYTES = 2048


def command(folder: Path | None) -> int:
    """Check a corpus; 0 clean, 1 for cases against the rules, 2 for what cannot be read."""
    out, root = console(), folder or CORPORA
    if not root.is_dir():
        raise CaseError(f"{root}: no such folder")
    unusable: list[str] = []
    against: list[str] = []
    cases: dict[str, Case] = {}
    files = sorted(file for file in root.rglob("*.json") if not file.is_dir())
    for file in files:
        try:
            entry = load(file)
            against += [f"{file}: {problem}" for problem in _broken(entry, file, root)]
            cases[case_id(entry.case)] = entry.case
        except CaseError as error:
            unusable.append(str(error))
    unusable += problems_of(root / "known.toml", cases)
    for line in (*unusable, *against):
        out.print(line, markup=False)
    out.print(f"{len(files)} cases, {len(unusable)} unusable, {len(against)} against the rules")
    return 2 if unusable else 1 if against else 0


def rules_broken(file: Path, root: Path) -> list[str]:
    """What is wrong with a readable case file; ``CaseError`` if it is not readable."""
    return _broken(load(file), file, root)


def _broken(entry: CaseFile, file: Path, root: Path) -> list[str]:
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
