"""``kdafuzz replay``: judge saved cases again, one badge line each."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ci.campaign import console
from ci.executor import Executor
from ci.failures import case_id, locate
from ci.report import describe
from impl.contract import UnavailableError
from impl.devices.registry import default
from impl.registry import split
from oracle.case import image
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
    failed = ran = 0
    executors: dict[tuple[str, str], Executor] = {}
    try:
        for name in asked:
            # What was asked for by name must be there; what a file names is skipped where it is not.
            on = device or default()
            executors[name, on] = Executor(name, on, timeout=timeout)
            executors[name, on].start()
        for file, entry in entries:
            names = asked or (entry.found.get("implementation", "triton"),)
            on = device or entry.found.get("device") or default()
            for name in names:
                executor = executors.setdefault((name, on), Executor(name, on, timeout=timeout))
                try:
                    executor.start()
                    verdict = executor.check(entry.case)
                except UnavailableError as error:
                    told = escape(f"{case_id(entry.case)} {entry.case.op} {name}: {error}")
                    out.print(f"[yellow]SKIP[/yellow] {told}", soft_wrap=True)
                    continue
                ran += 1
                failed += not verdict.ok
                _badge(out, file, entry, name, on, verdict)
    finally:
        for executor in executors.values():
            executor.close()
    if not ran:
        raise UnavailableError("nothing was run: every case was skipped")
    return 1 if failed else 0


def _badge(out: Console, file: Path, entry: CaseFile, name: str, device: str, verdict: Verdict) -> None:
    badge = "[green]PASS[/green]" if verdict.ok else "[red]FAIL[/red]"
    path = f" path {verdict.path}" if verdict.path else ""
    told = f"{case_id(entry.case)} {entry.case.op} {name} on {device}:{path} ratio {verdict.ratio:.3f}"
    out.print(f"{badge} {escape(told)}", soft_wrap=True)
    for line in describe(entry.case, verdict, file, name, device) if not verdict.ok else ():
        out.print(f"     {line}", soft_wrap=True, markup=False)
