"""What a fuzzing run is asked: by options, or by the log of the run that it goes on with."""

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ci.gpus import Gpu, cores, described, seats, visible, worker_count
from ci.journal import recover
from ci.known import read_known
from ci.runlog import FOLDER, Past, RunLog, latest, new_path, read_log
from ci.runlog import describe as describe_past
from ci.sanitize import watching
from ci.worker import Options
from impl.contract import OPERATIONS, UnavailableError
from impl.devices.registry import default
from impl.registry import split

LATEST = "latest"
"""For ``--resume``: the run that was started last."""


@dataclass(frozen=True)
class Asked:
    """Options, the log, and what that has already; ``suspects`` are cases that killed processes left."""

    options: Options
    no_known: bool
    log: RunLog
    gpus: tuple[Gpu, ...]
    past: Past | None = None
    suspects: tuple[Path, ...] = ()

    def told(self) -> list[str]:
        """What is said before the run."""
        options = self.options
        much = f"{options.minutes:g} minutes" if options.minutes else f"{options.examples} examples each"
        palette = f", palette of {options.palette} variants" if options.palette else ""
        lines = [
            f"kdafuzz fuzz: {', '.join(options.implementations)} on {options.device}, {much}, "
            f"{options.jobs} processes, seed {options.seed}{palette}"
        ]
        lines += described(self.gpus, seats(self.gpus, options.jobs))
        if self.past is not None:
            lines.append(f"resumed from {self.log.path}: {describe_past(self.past)}")
        else:
            lines += [
                "a process of an earlier run was killed while it judged a case; to see whether "
                f"it was the case: {shlex.join(['kdafuzz', 'replay', str(path)])}"
                for path in self.suspects
            ]
        return [*lines, "loading (a release of vLLM is downloaded on its first use) .."]


def from_options(
    *,
    implementations: str,
    operations: str,
    examples: int,
    minutes: float | None,
    seed: int | None,
    device: str | None,
    jobs: int | None,
    save: Path,
    palette: int | None,
    timeout: float,
    shrink_seconds: float,
    sanitize: str | None,
    keep_going: bool,
    no_known: bool,
    resume: None = None,
) -> Asked:
    """A new run by the options of the command; ``UnavailableError`` in one line if one is wrong."""
    del resume
    names = split(implementations)
    device = device or default(names)
    watching(sanitize or "", device)  # refuses what cannot be had before anything runs
    gpus = visible() if device == "cuda" else ()
    seed = secrets.randbelow(2**31) if seed is None else seed
    options = Options(
        implementations=names,
        operations=operations_of(operations),
        device=device,
        examples=examples,
        minutes=minutes,
        seed=seed,
        jobs=jobs or _jobs(gpus),
        save=save,
        palette=default_palette(device, examples) if palette is None else palette,
        timeout=timeout,
        shrink_seconds=shrink_seconds,
        sanitize=sanitize or "",
        keep_going=keep_going,
        known=() if no_known else read_known(),
    )
    return Asked(options, no_known, RunLog(new_path(save, seed)), gpus, suspects=tuple(recover(save)))


def resumed(*, resume: str, save: Path, jobs: int | None, **_: Any) -> Asked:
    """The run of a log again, with this many processes; what else it was asked stands in the log."""
    path = latest(save) if resume == LATEST else Path(resume)
    if path.parent.name != FOLDER:
        path = path.absolute()  # it may be named from within its folder
    past = read_log(path)
    if path.parent.name != FOLDER:
        raise UnavailableError(f"cannot resume {path}: it lies in no folder {FOLDER} of failing cases")
    gpus = visible() if past.options.device == "cuda" else ()
    folder = path.parent.parent
    options = replace(
        past.options,
        save=folder,
        jobs=jobs or _jobs(gpus),
        known=() if past.no_known else read_known(),
    )
    return Asked(options, past.no_known, RunLog(path), gpus, past, tuple(recover(folder)))


def operations_of(text: str, among: Sequence[str] = OPERATIONS) -> tuple[str, ...]:
    """The operations that ``--op`` lists; ``UnavailableError`` if one is not ``among`` those there are."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in among]
    if unknown or not names:
        found = f"found {unknown[0]!r}" if unknown else "found none"
        raise UnavailableError(
            f"unknown operation {text!r}; --op takes a list of {', '.join(among)}; {found}"
        )
    return names


def numbers_of(option: str, text: str, most: int) -> tuple[int, ...]:
    """The numbers from 1 to ``most`` that an option lists; ``UnavailableError`` for anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(x.isdecimal() and 1 <= int(x) <= most for x in parts):
        raise UnavailableError(f"{option} takes a list of numbers from 1 to {most}; found {text!r}")
    return tuple(int(x) for x in parts)


def _jobs(gpus: Sequence[Gpu]) -> int:
    return worker_count(gpus, cores()) if gpus else cores()


def default_palette(device: str, examples: int) -> int:
    """Distinct kernel variants a run of ``examples`` may ask for; 0 where nothing is compiled."""
    return 0 if device == "cpu" else max(16, min(256, examples // 50))
