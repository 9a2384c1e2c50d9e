"""Cases as JSON: under 2 kB, versioned, with a checksum of the values they build.

The file is an envelope round the case. A checksum that no longer matches means that this
build makes other values from the same seed: such a file is refused, never judged.
"""

import stat
from pathlib import Path
from typing import Annotated

import msgspec

from oracle.case import Case

SCHEMA = 1
MAX_FILE_BYTES = 1 << 20


class CaseError(ValueError):
    """A case file that cannot be used; the message is one line and says why."""


class CaseFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The envelope: schema version, the case, the checksum of its values, and prose.

    ``why`` says what the case is there to show; ``found`` what failed when it was saved
    (implementation, versions, verdict), for people and never read back as a claim.
    """

    kdafuzz: int
    case: Case
    checksum: str = ""
    why: str = ""
    found: dict[str, str] = {}


class _Version(msgspec.Struct):
    kdafuzz: Annotated[int, msgspec.Meta(lt=1 << 31)]


def dumps(entry: CaseFile) -> bytes:
    """The file's bytes: indented JSON with a final newline, fields in declared order."""
    return msgspec.json.format(msgspec.json.encode(entry), indent=1) + b"\n"


def canonical(case: Case) -> bytes:
    """The case's bytes with sorted keys and no blanks: equal cases give equal bytes.

    Fields are sorted too: a case keeps its id where a release declares them in another order.
    """
    return msgspec.json.encode(case, order="sorted")


def loads(data: bytes, name: str = "case") -> CaseFile:
    """Decode a case file; ``CaseError`` in one line for anything that is not one."""
    if len(data) > MAX_FILE_BYTES:
        raise CaseError(f"{name}: {len(data)} bytes is no case file; they are under {MAX_FILE_BYTES}")
    try:
        version = msgspec.json.decode(data, type=_Version).kdafuzz
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CaseError(f"{name}: not a case file: {_one_line(error)}") from None
    if version > SCHEMA:
        raise CaseError(
            f"{name}: written by a newer kdafuzz (schema {version}; this one reads {SCHEMA}); upgrade"
        )
    if version < 1:
        raise CaseError(f"{name}: unknown schema {version}; this kdafuzz reads {SCHEMA}")
    try:
        return msgspec.json.decode(data, type=CaseFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CaseError(f"{name}: not a valid case: {_one_line(error)}") from None


def read(path: Path) -> CaseFile:
    """Read one case file; ``CaseError`` where it is missing, unreadable or no case."""
    return loads(content(path), str(path))


def content(path: Path) -> bytes:
    """The bytes of a regular file, cut just above the limit; ``CaseError`` where there is none.

    A pipe would be waited for and a device never end.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise CaseError(f"{path}: cannot read: it is a pipe, a device or a socket, not a file")
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CaseError(f"{path}: cannot read: {error.strerror or error}") from None


def case_from_json(text: str | bytes) -> Case:
    """Decode a bare case, as ``canonical`` writes it; ``CaseError`` otherwise."""
    try:
        return msgspec.json.decode(text, type=Case)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError) as error:
        raise CaseError(f"not a valid case: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    words = " ".join((str(error) or type(error).__name__).split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
