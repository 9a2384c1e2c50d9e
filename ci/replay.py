"""``kdafuzz replay``: judge saved cases again, one badge line each.

PASS and KNOWN (a failure that ``corpora/known.toml`` explains) are clean. FAIL is not, nor is
STALE: the case of a known finding passes on a version that the entry lists.
"""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ci.campaign import console
from ci.executor import Executor
from ci.failures import case_id, locate
from ci.known import Known, explained, named, read_known, stale
from ci.query import ask
from ci.report import describe
from impl.contract import UnavailableError
from impl.devices.registry import default
from impl.registry import split
from oracle.case import Case, image
from oracle.codec import CaseError, CaseFile, read
from oracle.judge import Verdict
from oracle.values import checksum


def load(path: Path) -> CaseFile:
    """Read a case file and make sure that this build makes the values it was saved with."""
    entry = read(path)
    try:
        if entry.case.relation is not None:
            image(entry.case)
        built = checksum(entry.case)
    except ValueError as error:
        raise CaseError(f"{path}: {error}") from None
    if entry.checksum and built != entry.checksum:
        raise CaseError(
            f"{path}: this build makes other values (checksum {built}, saved {entry.checksum}); use the "
            "kdafuzz that saved it"
        )
    return entry


def command(paths: tuple[str, ...], implementations: str, device: str | None, timeout: float) -> int:
    """Replay every path on every implementation; returns the exit code."""
    out = console()
    files = [file for text in paths for file in locate(text)]
    entries = [(file, load(file)) for file in files]
    asked = split(implementations) if implementations else ()
    findings = _Findings(read_known())
    failed = ran = 0
    executors: dict[tuple[str, str], Executor] = {}
    try:
        for name in asked:
            # What was asked for by name must be there; what a file names is skipped where it is not.
            on = device or default((name,))
            executors[name, on] = Executor(name, on, timeout=timeout)
            executors[name, on].start()
        for file, entry in entries:
            names = asked or (entry.found.get("implementation", "triton"),)
            for name in names:
                on = device or entry.found.get("device") or default((name,))
                executor = executors.setdefault((name, on), Executor(name, on, timeout=timeout))
                try:
                    executor.start()
                    verdict = executor.check(entry.case)
                except UnavailableError as error:
                    told = escape(f"{case_id(entry.case)} {entry.case.op} {name}: {error}")
                    out.print(f"[yellow]SKIP[/yellow] {told}", soft_wrap=True)
                    continue
                ran += 1
                failed += not _told(out, file, entry, name, on, verdict, findings)
    finally:
        for executor in executors.values():
            executor.close()
    if not ran:
        raise UnavailableError("nothing was run: every case was skipped")
    return 1 if failed else 0


class _Findings:
    """The known findings, and the versions of the implementations that they speak of."""

    def __init__(self, entries: tuple[Known, ...]) -> None:
        self._entries = entries
        self._versions: dict[tuple[str, str], str] = {}

    def version(self, name: str, device: str) -> str:
        """What an implementation says it is; asked where a finding may speak of it, once."""
        if not any(name.startswith(entry.implementation) for entry in self._entries):
            return ""
        if (name, device) not in self._versions:
            self._versions[name, device] = ask(name, device).version
        return self._versions[name, device]

    def explain(self, name: str, device: str, case: Case, verdict: Verdict) -> Known | None:
        """The finding that a failure shows again."""
        if verdict.ok:
            return None
        return explained(self._entries, name, self.version(name, device), case, verdict)

    def missed(self, name: str, device: str, case: Case, verdict: Verdict) -> str:
        """Why a pass is wrong here, or nothing."""
        if not verdict.ok or all(entry.case != case_id(case) for entry in self._entries):
            return ""
        version = self.version(name, device)
        entry = named(self._entries, name, version, case)
        return stale(entry, name, version) if entry is not None else ""


def _told(
    out: Console, file: Path, entry: CaseFile, name: str, device: str, verdict: Verdict, findings: _Findings
) -> bool:
    """Print a case's badge and what there is to say; returns whether it is clean."""
    known = findings.explain(name, device, entry.case, verdict)
    missed = findings.missed(name, device, entry.case, verdict)
    if known is not None:
        badge, lines = "[yellow]KNOWN[/yellow]", [known.describe()]
    elif missed:
        badge, lines = "[red]STALE[/red]", [missed]
    elif verdict.ok:
        badge, lines = "[green]PASS[/green]", []
    else:
        badge, lines = "[red]FAIL[/red]", describe(entry.case, verdict, file, name, device)
    path = f" path {verdict.path}" if verdict.path else ""
    told = f"{case_id(entry.case)} {entry.case.op} {name} on {device}:{path} ratio {verdict.ratio:.3f}"
    out.print(f"{badge} {escape(told)}", soft_wrap=True)
    for line in lines:
        out.print(f"     {line}", soft_wrap=True, markup=False)
    return known is not None or (verdict.ok and not missed)
