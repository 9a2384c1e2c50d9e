"""The case that a process is judging, on disk before it starts: what kills the process cannot take it along.

A journal is one file, empty between cases. It is not synced to the disk, since the file system
keeps what a killed process has written.
"""

import contextlib
import os
import platform
import secrets
from pathlib import Path

from ci.failures import file_name, write_atomically
from oracle.case import Case
from oracle.codec import SCHEMA, CaseError, CaseFile, dumps, read
from oracle.values import checksum

FOLDER = "running"
"""Where journals lie in the folder of failing cases."""
SUFFIX = ".case"
_WHY = "was being judged when its process was killed"
_ATTEMPTS = 1000
_EXITING = 0x4
"""Linux's PF_EXITING, set before a process closes its files."""


class Journal:
    """The journal of one implementation on one device, in this process. Made on first use."""

    def __init__(self, save: Path, implementation: str, device: str) -> None:
        name = f"{_owner(os.getpid())}-{secrets.token_hex(4)}{SUFFIX}"
        self._path = (save / FOLDER / name).absolute()
        self._found = {"implementation": implementation, "device": device, "problem": _WHY}
        self._file: int | None = None

    def start(self, case: Case) -> None:
        """Say that ``case`` is about to run."""
        if self._file is None:
            self._file = self._open()
        data = dumps(CaseFile(kdafuzz=SCHEMA, case=case, checksum="", found=self._found))
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    def _open(self) -> int:
        attempts = 0
        while True:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except (FileNotFoundError, FileExistsError):
                # Another process may remove the folders, if empty, between any two steps of this.
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise

    def end(self) -> None:
        """Say that it has a verdict, or will have none that is worth looking for."""
        if self._file is not None:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others, or failing cases, are there
                self._path.parent.rmdir()
                self._path.parent.parent.rmdir()


def recover(save: Path, pid: int | None = None) -> list[Path]:
    """Turn what killed processes of this host left into case files, or the one ``pid``; returns those.

    Each is a suspect and no more: whoever killed the process may have had other reasons.
    """
    found = []
    for path in sorted((save / FOLDER).glob(f"*{SUFFIX}")):
        if not _abandoned(path, pid):
            continue
        with contextlib.suppress(
            CaseError
        ):  # empty: between cases; half a case: it was killed while it wrote
            entry = read(path)
            kept = CaseFile(
                kdafuzz=SCHEMA, case=entry.case, checksum=_checksum(entry.case), found=entry.found
            )
            found.append(save / file_name(entry.case, f"{entry.found.get('implementation', '')} killed"))
            write_atomically(found[-1], dumps(kept))
        path.unlink(missing_ok=True)
    return found


def _checksum(case: Case) -> str:
    """Empty where the values cannot be built: that may be what the process died of."""
    try:
        return checksum(case)
    except (ValueError, MemoryError):
        return ""


def _abandoned(path: Path, pid: int | None) -> bool:
    """Whether a journal is that of a process of this host, or that one, and the process has ended."""
    owner, _, _ = path.name.removesuffix(SUFFIX).rpartition("-")
    host, *numbers = owner.rsplit("-", 2)
    if host != platform.node() or len(numbers) != 2 or not numbers[0].isdigit():
        return False
    number = int(numbers[0])
    return pid in (None, number) and owner != _owner(number)


def _owner(pid: int) -> str:
    """A process of this host, by its number and its start: numbers are used again."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # It may be ending, or wait for its parent to take note of its end.
        started = "gone" if state in "ZX" or int(rest[5]) & _EXITING else rest[18]
    except OSError:
        started = "gone"
    return f"{platform.node()}-{pid}-{started}"
