"""``kdafuzz corpus``: check a folder of cases, add one to it, keep one of each kind of failure."""

from pathlib import Path

from ci.campaign import console
from ci.candidates import measure
from ci.failures import CORPORA, case_id, dumps_in, file_name, load, sidecar_of, slim, write_entry
from ci.known import problems_of
from impl.contract import one_line
from oracle.captured import sidecar
from oracle.case import Case
from oracle.codec import CaseError, CaseFile, dumps
from oracle.values import checksum

MAX_CASE_BYTES = 2048
MAX_CAPTURED_BYTES = 1 << 18
"""Of the captured values of a case: a state of K = V = 128 in float32 has a quarter of it."""


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
    against += [f"{file}: captured values without a case" for file in sorted(dumps_in(root))]
    unusable += problems_of(root / "known.toml", cases)
    for line in (*unusable, *against):
        out.print(one_line(line, 1000), markup=False)
    out.print(f"{len(files)} cases, {len(unusable)} unusable, {len(against)} against the rules")
    return 2 if unusable else 1 if against else 0


def add(path: Path, why: str, folder: Path | None, words: str) -> int:
    """Put a saved case into a corpus, named by its content, with why it is there."""
    out, root, entry = console(), folder or CORPORA, load(path)
    case = slim(entry.case)
    placed = root / file_name(case, words)
    twins = sorted(placed.parent.glob(f"*-{case_id(case)}.json"))
    if twins:
        raise CaseError(f"{path}: the corpus has this case already: {twins[0]}")
    made = CaseFile(kdafuzz=entry.kdafuzz, case=case, checksum=checksum(case), why=why, found=entry.found)
    captured = len(sidecar(case.captured.digest).data()) if case.captured is not None else 0
    for size, most in ((len(dumps(made)), MAX_CASE_BYTES), (captured, MAX_CAPTURED_BYTES)):
        if size > most:
            raise CaseError(f"{path}: {size} bytes, at most {most}; kdafuzz minimize it first")
    write_entry(placed, made)
    out.print(f"added {placed}", soft_wrap=True, markup=False)
    return 0


def dedupe(folder: Path, *, remove: bool) -> int:
    """Of failing cases that agree in implementation, path taken and signature, keep the smallest.

    The signature is the first problem's kind, stage and tensor, as it was saved with the case.
    """
    out = console()
    groups: dict[tuple[str, str, str, str], list[tuple[Path, Case]]] = {}
    for file in sorted(file for file in folder.rglob("*.json") if not file.is_dir()):
        entry = load(file)
        told = entry.found
        key = (entry.case.op, told.get("implementation", ""), told.get("path", ""), told.get("signature", ""))
        # Without a signature nothing is known of it, so it is one of its own.
        groups.setdefault(key if key[3] else (*key[:3], str(file)), []).append((file, entry.case))
    others = 0
    for key, members in groups.items():
        (kept, _), *rest = sorted(members, key=lambda member: (measure(member[1]), str(member[0])))
        others += len(rest)
        what = " ".join(part for part in key if part and part != str(kept))
        out.print(f"{len(members)} of {what}: keep {kept}", soft_wrap=True, markup=False)
        for file, _ in rest:
            if remove:
                file.unlink()
                sidecar_of(file).unlink(missing_ok=True)
            out.print(f"    {'removed' if remove else 'could go:'} {file}", soft_wrap=True, markup=False)
    hint = "" if remove else " (--remove removes them)"
    out.print(f"{len(groups)} kinds of failure, {others} further cases{hint}")
    return 0


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
    place = sidecar_of(file)
    if place.exists() and entry.case.captured is None:
        problems.append("uses none of the captured values beside it")
    if place.exists() and place.stat().st_size > MAX_CAPTURED_BYTES:
        problems.append(f"has {place.stat().st_size} bytes of captured values; at most {MAX_CAPTURED_BYTES}")
    if not entry.why:
        problems.append("does not say why it is there (field 'why')")
    if not entry.checksum:
        problems.append("has no checksum of its values")
    return problems
