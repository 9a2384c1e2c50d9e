"""Failing cases on disk: names, atomic writes, lookup by id, and the line that replays one."""

import hashlib
import os
import re
import secrets
import shlex
import tempfile
from pathlib import Path

import msgspec

from ci.processes import no_memory
from impl.contract import one_line
from oracle import captured
from oracle.case import Case, image
from oracle.codec import SCHEMA, CaseError, CaseFile, canonical, dumps, read
from oracle.dump import read_dump
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
    """Write a failing case below ``folder``, whole or not at all; the same case has one name.

    Captured values lie beside it, those that it uses.
    """
    case = slim(case)
    problem = verdict.problems[0]
    parts = [found.get("implementation", ""), problem.stage or problem.kind, problem.tensor]
    words = " ".join(dict.fromkeys(parts))
    path = folder / file_name(case, words)
    entry = CaseFile(kdafuzz=SCHEMA, case=case, checksum=checksum(case), found=found | _told(verdict))
    write_entry(path, entry)
    return path


def write_entry(path: Path, entry: CaseFile) -> None:
    """Write a case file; its captured values first, so that it never stands without them."""
    if entry.case.captured is not None:
        source = captured.sidecar(entry.case.captured.digest)
        write_atomically(sidecar_of(path), source.data())
        captured.register(source.digest, sidecar_of(path))
    write_atomically(path, dumps(entry))


def sidecar_of(path: Path) -> Path:
    """Where the captured values of a case file lie, if it has any."""
    return path.with_suffix(captured.SUFFIX)


def slim(case: Case) -> Case:
    """The same case on a sidecar, in the folder for temporary files, of just the values that it uses."""
    if case.captured is None:
        return case
    less = captured.slim(case.captured, case.call)
    if less.digest == case.captured.digest:
        return case
    _lent(less)
    replace = msgspec.structs.replace
    slimmed = replace(case, captured=replace(case.captured, digest=less.digest))
    assert checksum(slimmed) == checksum(case), "a case has other values without what it does not use"
    return slimmed


_folder: tempfile.TemporaryDirectory[str] | None = None


def _lent(source: captured.Sidecar) -> None:
    """Put a sidecar where processes of this run can read it."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="kdafuzz-captured-")
    path = Path(_folder.name) / f"{source.digest}{captured.SUFFIX}"
    path.write_bytes(source.data())
    captured.hold(source, path)


def _told(verdict: Verdict) -> dict[str, str]:
    """What a saved case says of its verdict; ``signature`` is the same for failures of one kind."""
    problem = verdict.problems[0]
    told = {
        "problem": problem.describe(),
        "signature": " ".join(filter(None, (problem.kind, problem.stage, problem.tensor))),
        "path": verdict.path,
        "cause": verdict.cause,
    }
    return {name: text for name, text in told.items() if text}


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


def write_json(path: Path, value: object, *, indented: bool = False) -> None:
    """Write a command's results where ``--json`` says, which need not be a regular file."""
    data = msgspec.json.encode(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(data, indent=1) if indented else data)


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
        found = sorted(file for file in [*path.rglob("*.json"), *dumps_in(path)] if not file.is_dir())
        if not found:
            raise CaseError(f"{text}: no case files (*.json) and no dumps (*.safetensors) in this folder")
        return found
    if path.exists():
        return [path]
    if not ID.fullmatch(text):
        raise CaseError(f"{text}: no such file or folder, and no case id (eight hexadecimal digits)")
    matches = sorted({match for folder in folders for match in folder.rglob(f"*-{text}.json")})
    if not matches:
        raise CaseError(f"{text}: no case of this id in {' or '.join(map(str, folders))}")
    return matches[:1]


def dumps_in(folder: Path) -> list[Path]:
    """Dumps: files of captured values that no case file stands beside."""
    return [file for file in folder.rglob(f"*{captured.SUFFIX}") if not file.with_suffix(".json").exists()]


def load(path: Path) -> CaseFile:
    """Read a case file, or a dump, and make sure that this build makes the values it was saved with.

    Where its captured values lie is then known in this process.
    """
    try:
        entry = _read_dump(path) if path.suffix == captured.SUFFIX else read(path)
        if entry.case.captured is not None and path.suffix != captured.SUFFIX:
            _find_sidecar(path, entry.case.captured.digest)
    except ValueError as error:
        raise error if isinstance(error, CaseError) else CaseError(_named(path, error)) from None
    try:
        if entry.case.relation is not None:
            image(entry.case)
        built = checksum(entry.case)
    except ValueError as error:
        raise CaseError(f"{path}: {one_line(error)}") from None
    except (MemoryError, RuntimeError) as error:
        if not no_memory(error):
            raise
        raise CaseError(f"{path}: there is not enough memory for its values") from None
    if entry.checksum and built != entry.checksum:
        saved = one_line(entry.checksum, 40)
        raise CaseError(
            f"{path}: this build makes other values (checksum {built}, saved {saved}); use the kdafuzz that "
            "saved it"
        )
    return entry


def _find_sidecar(path: Path, digest: str) -> None:
    place = sidecar_of(path)
    if not place.exists():
        raise CaseError(f"{path}: its captured values are not beside it: no {place.name}")
    captured.read_sidecar(place, digest)


def _read_dump(path: Path) -> CaseFile:
    tensors, about = captured.read(path)
    entry, source = read_dump(tensors, about, str(path))
    if entry.case.captured is not None and entry.case.captured.digest != source.digest:
        raise CaseError(f"{path}: its case is of other captured values than it holds")
    if captured.MARK in about:
        captured.hold(source, path)
    else:
        _lent(source)
    return entry


def _named(path: Path, error: Exception) -> str:
    text = one_line(error)
    return text if text.startswith(str(path)) else f"{path}: {text}"


def replay_line(path: Path, implementation: str, device: str) -> str:
    """The command that runs a saved case again."""
    return shlex.join(["kdafuzz", "replay", str(path), "--impl", implementation, "--device", device])
