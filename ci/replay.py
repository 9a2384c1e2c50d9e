"""``kdafuzz replay``: judge saved cases again, one badge line each.

PASS and KNOWN (a failure that ``corpora/known.toml`` explains) are clean. FAIL is not, nor is
STALE: the case of a known finding passes on a version that the entry lists.
"""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ci.campaign import console
from ci.executor import Executor
from ci.failures import case_id, load, locate
from ci.known import Known, explained, named, read_known, stale
from ci.maps.told import Dumps
from ci.query import ask
from ci.report import describe
from ci.sanitize import watching
from impl.contract import UnavailableError, one_line
from impl.devices.registry import default
from impl.registry import split
from oracle.case import Case
from oracle.codec import CaseFile
from oracle.judge import Verdict


def command(
    paths: tuple[str, ...],
    implementations: str,
    device: str | None,
    timeout: float,
    sanitize: str = "",
    dump: Path | None = None,
) -> int:
    """Replay every path on every implementation; returns the exit code.

    ``dump`` is where maps and numbers go.
    """
    out = console()
    files = [file for text in paths for file in locate(text)]
    asked = split(implementations) if implementations else ()
    entries = [(file, load(file)) for file in files]
    findings = _Findings(read_known())
    failed = ran = 0
    dumps = Dumps(dump)
    executors: dict[tuple[str, str], Executor] = {}

    def executor_of(name: str, on: str) -> Executor:
        if (name, on) not in executors:
            executors[name, on] = Executor(name, on, timeout=timeout, sanitizer=watching(sanitize, on))
        return executors[name, on]

    try:
        for name in asked:
            # What was asked for by name must be there; what a file names is skipped where it is not.
            on = device or default((name,))
            executor_of(name, on).start()
        for file, entry in entries:
            for name in asked or (entry.found.get("implementation", "triton"),):
                on = device or entry.found.get("device") or default((name,))
                executor = executor_of(name, on)
                try:
                    split(name)  # which refuses names that cannot be shown; a file may have any
                    executor.start()
                    verdict = dumps.judge(executor, entry.case, file, on)
                except UnavailableError as error:
                    what = f"{case_id(entry.case)} {entry.case.op} {one_line(name, 100)}"
                    told = escape(f"{what}: {one_line(error, 1000)}")
                    out.print(f"[yellow]SKIP[/yellow] {told}", soft_wrap=True)
                    continue
                ran += 1
                failed += not _told(out, file, entry, name, on, verdict, findings)
                dumps.tell(out, entry.case, name, verdict)
    finally:
        for executor in executors.values():
            executor.finish()
    if len(entries) > 1:
        for line in dict.fromkeys(findings.stale):
            out.print(f"warning: {line}", soft_wrap=True, markup=False)
    if not ran:
        raise UnavailableError("nothing was run: every case was skipped")
    return 1 if failed else 0


class _Findings:
    """The known findings, and the versions of the implementations that they speak of."""

    def __init__(self, entries: tuple[Known, ...]) -> None:
        self._entries = entries
        self._versions: dict[tuple[str, str], str] = {}
        self.stale: list[str] = []
        """What was said of entries whose case passes; a long run ends with it."""

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
        if entry is None:
            return ""
        self.stale.append(stale(entry, name, version))
        return self.stale[-1]


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
