"""Failing cases on disk: names, atomic writes, lookup by id, and the line that replays one."""

import hashlib
import os
import re
import secrets
import shlex
import tempfile
from pathlib import Path

from oracle.case import Case
from oracle.codec import SCHEMA, CaseError, CaseFile, canonical, dumps
from oracle.judge import Verdict
from oracle.values import checksum

FAILURES = Path(".kdafuzz/failures")
CORPORA = Path(__file__).resolve().parent.parent / "corpora"
ID = re.compile(r"[0-9a-f]{8}")


def case_id(case: Case) -> str:
    """Eight hexadecimal digits that name a case by its content."""
    return hashlib.blake2b(canonical(case), digest_size=4).hexdigest()


def file_name(case: Case, words: str) -> str:
    """``<op>/<slug>-<8hex>.json``, the slug made of ``words``."""
    slug = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:60] or "case"
    return f"{case.op}/{slug}-{case_id(case)}.json"


def save(folder: Path, case: Case, verdict: Verdict, found: dict[str, str]) -> Path:
    """Write a failing case below ``folder``, whole or not at all; the same case has one name."""
    problem = verdict.problems[0]
    parts = [found.get("implementation", ""), problem.stage or problem.kind, problem.tensor]
    words = " ".join(dict.fromkeys(parts))
    path = folder / file_name(case, words)
    entry = CaseFile(
        kdafuzz=SCHEMA, case=case, checksum=checksum(case), found={**found, "problem": problem.describe()}
    )
    write_atomically(path, dumps(entry))
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: readers see the old bytes or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_writable(path: Path, option: str) -> None:
    """Refuse, before a run, a place where its results could not be written; nothing is left there."""
    if path.exists() and not path.is_dir():
        able, place = os.access(path, os.W_OK), path
    else:
        place = next(p for p in (path, *path.absolute().parents) if p.exists())
        able = _takes_files(place)
    if not able:
        raise OSError(f"{option} {path}: cannot write to {place}")


def _takes_files(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def locate(text: str, folders: tuple[Path, ...] = (FAILURES, CORPORA)) -> list[Path]:
    """The case files that a PATH or ID argument means: a file, a folder's files, or an id's file."""
    path = Path(text)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*.json") if not file.is_dir())
        if not found:
            raise CaseError(f"{text}: no case files (*.json) in this folder")
        return found
    if path.exists():
        return [path]
    if not ID.fullmatch(text):
        raise CaseError(f"{text}: no such file or folder, and no case id (eight hexadecimal digits)")
    matches = sorted({match for folder in folders for match in folder.rglob(f"*-{text}.json")})
    if not matches:
        raise CaseError(f"{text}: no case of this id in {' or '.join(map(str, folders))}")
    return matches[:1]


def replay_line(path: Path, implementation: str, device: str) -> str:
    """The command that runs a saved case again."""
    return shlex.join(["kdafuzz", "replay", str(path), "--impl", implementation, "--device", device])
