"""Kernels under NVIDIA's compute-sanitizer: the command, its log read case by case, and what is believed.

A child process that runs kernels is started behind the tool (``Sanitizer.command`` and
``environment``), which writes what it finds into a log, line by line. ``Log.reports`` gives what came
since the last case, and ``judged`` makes it part of the verdict. What the tools see here:

* ``memcheck``: accesses outside every allocation, or misaligned. Each segment of a case is an
  allocation of its own (``impl.devices.cuda``) with padding behind it, so that reads past its ends are
  seen too, which comparing bytes cannot show. It ends the process's CUDA context at the first error.
* ``initcheck``: global memory that is read before anything wrote it. Inputs, and bytes between tensors,
  are uploaded and hence written; what it can judge is what the contract calls undefined before the
  call: output tensors, which then keep what their new allocation holds, and whatever the callee
  allocates. Indices, strides and stale records are the byte comparison's to find.
* ``synccheck``: barriers that are reached by some threads only, or misused.
* ``racecheck``: accesses to shared memory that no barrier orders.

Racecheck takes the writes of a bulk copy (``cp.async.bulk``, the form without a tensor map) for those of
the thread that issues it, and does not carry the order that the copy's mbarrier gives round a loop to
threads of other warps, so correct pipelines are reported; a bulk copy by tensor map it does not watch at
all. Both were measured on minimal kernels (``AI/RACECHECK_TMA_HAZARD.md`` in Dao-AILab/flash-attention).
``believed`` therefore sets aside one shape of report and no other: in a kernel that the CuTe DSL made, a
write that races with reads alone. The log does not name instructions, so a race between such a kernel's
ordinary stores and loads passes with them; the emulator orders every one of them by vector clocks.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from impl.contract import UnavailableError, one_line
from impl.devices.cuda import SANITIZE_VARIABLE
from oracle.judge import Problem, Verdict

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
PACKAGES = ("nvidia-cuda-sanitizer-api", "nvidia-cuda-sanitizer-api-cu12")
"""Distributions that hold the program."""
SLOWER = 20.0
"""How much longer a case may take behind the tool."""
_OPTIONS = {
    "target-processes": "application-only",  # compilers that a kernel starts are none of its business
    "print-limit": "0",  # errors of later cases count too
    "show-backtrace": "device",
    "require-cuda-init": "no",
    "check-exit-code": "no",  # the suite reports how processes end
}
_MORE = {
    "memcheck": {"report-api-errors": "no", "padding": "512"},  # API errors are exceptions, told as such
    "initcheck": {"check-api-memory-access": "no"},  # reading results back is the suite's own doing
    "synccheck": {},
    "racecheck": {"racecheck-report": "analysis"},
}


@dataclass(frozen=True)
class Sanitizer:
    """One tool of a compute-sanitizer that is at hand."""

    tool: str
    program: Path
    known: frozenset[str]
    """Options of this version."""

    def command(self, log: Path) -> list[str]:
        """What to put before a child's own command line.

        The child is then the tool's grandchild, in the same process group, with the standard streams
        that the tool was given.
        """
        wanted = {"tool": self.tool, "log-file": str(log).replace("%", "%%")} | _OPTIONS | _MORE[self.tool]
        options = [x for name, value in wanted.items() if name in self.known for x in (f"--{name}", value)]
        return [str(self.program), *options]

    def environment(self) -> dict[str, str]:
        """What to add to a child's environment: every tensor is an allocation of its own."""
        return {SANITIZE_VARIABLE: self.tool, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sanitizer(tool: str) -> Sanitizer:
    """The tool; ``UnavailableError`` says what is missing."""
    if tool not in TOOLS:
        raise UnavailableError(f"unknown sanitizer tool {tool!r}; it must be one of {', '.join(TOOLS)}")
    places = [*_places()]
    program = next((place for place in places if os.access(place, os.X_OK) and place.is_file()), None)
    if program is None:
        raise UnavailableError(
            f"--sanitize needs compute-sanitizer of the CUDA toolkit (or pip install {PACKAGES[0]}); found "
            f"none on PATH, in CUDA_HOME or in {places[-1].parent}"
        )
    try:
        asked = subprocess.run(
            [program, "--help"], capture_output=True, text=True, timeout=60, check=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{program} --help failed: {one_line(error)}") from None
    known = frozenset(re.findall(r"(?<![-\w])--([a-z][a-z0-9-]+)", asked.stdout))
    if not {"tool", "log-file"} <= known:
        raise UnavailableError(f"{program} is not a compute-sanitizer that this suite knows")
    return Sanitizer(tool, program, known)


def watching(tool: str, device: str) -> Sanitizer | None:
    """The tool that is asked for, if one is; ``UnavailableError`` where it has nothing to watch."""
    if not tool:
        return None
    if device != "cuda":
        raise UnavailableError(f"--sanitize watches kernels on a GPU; found device {device}")
    return sanitizer(tool)


def _places() -> Iterable[Path]:
    found = shutil.which("compute-sanitizer")
    if found:
        yield Path(found)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "compute-sanitizer" / "compute-sanitizer"
            yield Path(home) / "bin" / "compute-sanitizer"
    for name in PACKAGES:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from (
            Path(str(file.locate())) for file in files if file.match("compute-sanitizer/compute-sanitizer")
        )
    yield Path("/usr/local/cuda/bin/compute-sanitizer")


@dataclass(frozen=True)
class Report:
    """One finding of a tool: its first line, and the lines below it."""

    head: str
    details: tuple[str, ...] = ()

    @property
    def failure(self) -> bool:
        """Whether it is about the tool itself: it says that errors may have gone undetected."""
        return self.head.startswith("Internal Sanitizer") or "Results might be incorrect" in self.head

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """(access, code) of each party; the access is Read, Write or nothing."""
        lines = (_RACE.search(self.head), *(_PARTY.match(x) for x in self.details))
        parties = tuple((x["access"] or "", x["place"]) for x in lines if x)
        if parties:
            return parties
        places = (re.search(r"\bat (\S.*)$", line) for line in (*self.details, self.head))
        return tuple(("", x[1]) for x in places if x)[:1]

    @property
    def kernel(self) -> str:
        """The function that runs on the device, without its arguments: of nested ones the outermost."""
        frames = [x for x in self.details if x.startswith("Device Frame:")]
        if frames:
            place = frames[-1].removeprefix("Device Frame:").strip()
        else:
            place = self.places[0][1] if self.places else ""
        return re.split(r"\(|\+0x|:0x| in ", place)[0].strip()

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The same for the same fault, whatever thread met it."""
        return _NUMBER.sub("", self.head), tuple((a, _NUMBER.sub("", place)) for a, place in self.places)

    def describe(self) -> str:
        """One line: what, where, and which thread of which block."""
        below = [line for line in self.details if not line.startswith(_BACKTRACE)]
        kernel = f" [kernel {self.kernel}]" if self.kernel else ""
        return one_line("; ".join((self.head, *below)) + kernel, 600)


_BACKTRACE = ("Device Frame:", "Host Frame", "Saved host backtrace")
_RACE = re.compile(r"Race reported between (?P<access>Read|Write) access at (?P<place>.+)$")
_PARTY = re.compile(r"and (?P<access>Read|Write) access at (?P<place>.+?)(?: \[\d[\d,]* hazards?\])?$")
_NUMBER = re.compile(r"\b0x[0-9a-f]{8,}|\(\d+, ?\d+, ?\d+\)")
_MARK = "========="
_END = b"\n=========\n"
"""How most reports end; the lines of one come one by one."""
_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
"""Seconds without a line after which nothing more is expected: behind an end, and elsewhere."""
_NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|(ERROR|LEAK|RACECHECK) SUMMARY|Error: process didn't terminate|Target application|"
    r"Tracking kernels launched|No attachable process|(Warning|Error): .*(print-limit|num-callers)"
)


def parse(lines: Iterable[str]) -> list[Report]:
    """The reports in whole lines of a log; a report's lines below its first are indented."""
    found: list[Report] = []
    for line in lines:
        if not line.startswith(_MARK):
            continue  # what the program printed
        text = line[len(_MARK) :].rstrip()
        if not text.strip():
            continue
        if text.startswith("   "):
            if found:
                found[-1] = replace(found[-1], details=(*found[-1].details, text.strip()))
        else:
            found.append(Report(text.strip()))
    return [report for report in found if not _NO_REPORT.match(report.head)]


class Log:
    """A tool's log, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def reports(self, patience: float = 0.0) -> list[Report]:
        """What came since the last call; waits up to ``patience`` seconds for a first report.

        Once there is one, the tool may go on as long as it writes without a pause.
        """
        start, size, quiet = time.monotonic(), 0, time.monotonic()
        while True:
            text, now = self._rest(), time.monotonic()
            if len(text) != size:
                size, quiet = len(text), now
            found = parse(text.decode(errors="replace").splitlines())
            pause = _PAUSE if text.endswith(_END) else _LONGEST_PAUSE
            if now - quiet >= pause if found else now - start >= patience:
                break
            time.sleep(0.01)
        self._read += size
        return found

    def _rest(self) -> bytes:
        """Whole lines that were not read yet."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return b""
        return data[: data.rfind(b"\n") + 1]


def believed(report: Report) -> bool:
    """Whether a report is taken for a fault: not one that racecheck is known to make of bulk copies."""
    if not _RACE.search(report.head):
        return True
    accesses = [access for access, _ in report.places]
    bulk = re.match(r"(kernel_)?cutlass_", report.kernel) is not None
    return not (bulk and accesses[0] == "Write" and len(accesses) > 1 and set(accesses[1:]) == {"Read"})


def judged(verdict: Verdict, tool: str, reports: Sequence[Report]) -> Verdict:
    """The verdict with what the tool found: first of all, for what came of it comes after it."""
    counts: dict[object, list[Report]] = {}
    for report in reports:
        if believed(report):
            counts.setdefault(report.key, []).append(report)
    problems = tuple(
        Problem("sanitizer", text=f"{tool}: {some[0].describe()}", count=len(some), total=len(some)).noted(
            f"{len(some)} such reports"
        )
        for some in counts.values()
    )
    return replace(verdict, ratio=inf, problems=problems + verdict.problems) if problems else verdict


def set_aside(reports: Sequence[Report]) -> int:
    """How many reports are known to be no faults."""
    return sum(not believed(report) for report in reports)
