"""Spoiled case files through ``corpus check`` and ``replay``: ``python -m tests.meta.mutated_corpus``.

Every mutant is read and, where it still is a case, judged on the kernels of this repository by
the functions behind the commands. All of them go through the real ``corpus check`` too, a folder
at a time, and a sample through the real ``replay``. Whatever is neither judged right nor refused
in one line is listed: a traceback, a hang, memory without limit, a file that was left somewhere.
"""

import argparse
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.executor import Executor, SuiteError
from ci.failures import CORPORA, load
from impl.contract import UnavailableError
from oracle.codec import CaseError
from tests.meta.commands import command_line
from tests.meta.mutants import Mutant, mutants

READ_SECONDS = 60.0
JUDGE_SECONDS = 60.0
COMMAND_SECONDS = 180.0
DATA_BYTES = 6 << 30
"""What a process may have of private memory: a case asks for 1 GiB at most."""
IMPLEMENTATIONS = {"fused_verify": "tests.meta.fused_fake:implementation"}
"""What judges an operation that the Triton kernels lack."""
GOOD = ("refused", "right", "not taken")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant; ``text`` says what was told or what went wrong."""

    mutant: str
    kinds: tuple[str, ...]
    name: str
    text: str = ""
    seconds: float = 0.0


class SlowError(Exception):
    """Reading took too long."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``SlowError`` in the main thread after some seconds."""

    def stop(*_: object) -> None:
        raise SlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def limit_memory() -> None:
    """Let this process and its children have no more than ``DATA_BYTES`` each."""
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))


def one_line(text: str) -> bool:
    """Whether a message is what the commands promise: short, in one line, fit for a terminal."""
    return len(text) < 1500 and text.isprintable()


class Judge:
    """The functions behind the commands, one mutant after the other."""

    def __init__(self) -> None:
        self._executors: dict[str, Executor] = {}

    def outcome(self, path: Path, kinds: tuple[str, ...]) -> Outcome:
        """Read and judge a file."""
        began = time.monotonic()
        name, text = self._outcome(path)
        return Outcome(path.name, kinds, name, text, time.monotonic() - began)

    def _outcome(self, path: Path) -> tuple[str, str]:
        try:
            with limited(READ_SECONDS):
                case = load(path).case
        except CaseError as error:
            return ("refused", str(error)) if one_line(str(error)) else ("REFUSED IN BAD WORDS", repr(error))
        except SlowError:
            return "SLOW TO READ", ""
        except Exception as error:  # anything else is what this looks for
            return "RAISED WHEN READ", repr(error)
        name = IMPLEMENTATIONS.get(case.op, "triton")
        try:
            verdict = self._executor(name).check(case)
        except UnavailableError as error:
            return (
                ("not taken", str(error)) if one_line(str(error)) else ("REFUSED IN BAD WORDS", repr(error))
            )
        except SuiteError as error:
            return "RAISED WHEN JUDGED", str(error)
        if verdict.ok:
            return "right", ""
        return "JUDGED WRONG", verdict.problems[0].describe()

    def _executor(self, name: str) -> Executor:
        return self._executors.setdefault(name, Executor(name, "cpu", timeout=JUDGE_SECONDS))

    def close(self) -> None:
        """End the processes that judged."""
        for executor in self._executors.values():
            executor.close()


_judge: Judge


def _start() -> None:
    global _judge
    _judge = Judge()


def _work(job: tuple[Path, tuple[str, ...]]) -> Outcome:
    return _judge.outcome(*job)


def run_all(folder: Path, given: Iterable[Mutant], jobs: int) -> list[Outcome]:
    """Write the mutants into ``folder``, then read and judge every one in ``jobs`` processes."""
    work = []
    for mutant in given:
        path = folder / mutant.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(mutant.data)
        work.append((path, mutant.kinds))
    found = []
    with multiprocessing.get_context("spawn").Pool(jobs, _start) as pool:
        for outcome in pool.imap_unordered(_work, work, chunksize=4):
            found.append(outcome)
            if outcome.name not in GOOD:
                print(outcome.name, outcome.mutant, outcome.kinds, outcome.text[:3000], flush=True)
            if len(found) % 500 == 0:
                print(f"  {len(found)} done", flush=True)
    return found


def odd_files(folder: Path) -> None:
    """Everything that is called a case file and is no file of some kilobytes."""
    folder.mkdir(parents=True)
    good = next(CORPORA.rglob("*.json"))
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "nowhere.json").symlink_to("absent.json")
    (folder / "link.json").symlink_to(good)
    (folder / "round").symlink_to(folder)
    (folder / "folder.json").mkdir()
    (folder / "inner.json").mkdir()
    (folder / "inner.json" / "file.json").write_bytes(good.read_bytes()[:50])
    os.mkfifo(folder / "pipe.json")
    (folder / "device.json").symlink_to("/dev/zero")
    (folder / "full.json").symlink_to("/dev/full")
    (folder / "empty.json").touch()
    (folder / "locked.json").write_bytes(good.read_bytes())
    (folder / "locked.json").chmod(0)
    with (folder / "sparse.json").open("wb") as file:
        file.truncate(1 << 30)
    (folder / "a\nb\x1b[2J.json").write_bytes(good.read_bytes())
    (Path(os.fsdecode(bytes(folder) + b"/\xff.json"))).write_bytes(b"{")
    (folder / "[red].json").write_bytes(b"{")
    with socket.socket(socket.AF_UNIX) as end:
        before = Path.cwd()
        os.chdir(folder)  # a socket's path is at most 107 bytes
        end.bind("socket.json")
        os.chdir(before)


def command(sandbox: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command in the sandbox; exit code, output, and what is wrong with how it ended."""
    inside = sandbox / "a" / "b"
    environment = {
        **os.environ,
        "HOME": str(sandbox / "home"),
        "TMPDIR": str(sandbox / "tmp"),
        "KDAFUZZ_CACHE": str(sandbox / "cache"),
        "KDAFUZZ_WHEELS": str(sandbox / "wheels"),
        "PIP_NO_INDEX": "1",
    }
    try:
        done = subprocess.run(
            command_line(*arguments),
            cwd=inside,
            env=environment,
            capture_output=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "", "HANGS"
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    wrong = ""
    if done.returncode not in (0, 1, 2):
        wrong = f"EXIT CODE {done.returncode}"
    if "Traceback" in out + err:
        wrong = "TRACEBACK"
    elif any(not line.isprintable() for line in (*out.split("\n"), *err.split("\n"))):
        wrong = "CONTROL CHARACTERS"
    elif len(err.splitlines()) > 1:
        wrong = "MORE THAN A LINE"
    return done.returncode, out, wrong and f"{wrong}: {err[-3000:] or out[-3000:]}"


def make_sandbox(sandbox: Path) -> Path:
    """Folders for everything that a process may look for; returns the one for case files."""
    for name in ("a/b", "home", "tmp", "cache", "wheels", "files"):
        (sandbox / name).mkdir(parents=True, exist_ok=True)
    return sandbox / "files"


def names(sandbox: Path) -> set[str]:
    """Every path below the sandbox, without what may change.

    The cache is there to be written; pip asks rustc for its version, and rustup then has settings.
    """
    free = (sandbox / "cache", sandbox / "home" / ".rustup")
    found = [path for path in sandbox.rglob("*") if not any(path.is_relative_to(place) for place in free)]
    return {os.fsencode(path.relative_to(sandbox)).decode(errors="replace") for path in found}


def commands(sandbox: Path, outcomes: list[Outcome], sample: int, jobs: int) -> Counter[str]:
    """``corpus check`` on every folder of mutants, ``replay`` on a sample of them and on odd files."""
    files = sandbox / "files"
    work: list[tuple[str, tuple[str, ...], set[int]]] = [
        ("corpus check", ("corpus", "check", str(folder)), {1, 2}) for folder in sorted(files.iterdir())
    ]
    passed, refused = ([o for o in outcomes if (o.name == "refused") == wanted] for wanted in (False, True))
    for outcome in (*passed[: sample // 2], *refused[: sample // 2]):
        path = str(next(files.rglob(outcome.mutant)))
        chosen = ("--impl", "triton", "--device", "cpu") if hash_of(outcome.mutant) % 2 else ()
        expected = {"refused": {2}, "right": {0, 2}, "not taken": {2}}.get(outcome.name, {0, 1, 2})
        work.append(("replay", ("replay", path, *chosen), expected))
    for odd in sorted((files / "odd").iterdir()):
        given = ("replay", str(odd), "--impl", "triton", "--device", "cpu")
        work.append(("replay of an odd file", given, {0, 1, 2}))

    def told(job: tuple[str, tuple[str, ...], set[int]]) -> str:
        what, arguments, expected = job
        code, out, wrong = command(sandbox, *arguments)
        if not wrong and code not in expected:
            wrong = f"EXIT CODE {code}, expected {sorted(expected)}: {out[-2000:]}"
        if wrong:
            print(what, *arguments, wrong, flush=True)
        return f"{what}: {wrong.partition(':')[0] or f'exit code {code}'}"

    with ThreadPoolExecutor(jobs) as pool:
        return Counter(pool.map(told, work))


def hash_of(name: str) -> int:
    """A number that a mutant's name stands for."""
    return int(name[7:15], 16)


def main() -> None:
    """Parse options, run, print the tables; exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--commands", type=int, default=200, help="how many go through the real replay")
    given: Any = parser.parse_args()
    limit_memory()
    with tempfile.TemporaryDirectory() as holder:
        sandbox = Path(holder)
        files = make_sandbox(sandbox)
        made = (
            Mutant(f"{i // 500:03d}/{m.name}", m.kinds, m.data)
            for i, m in enumerate(mutants(CORPORA, given.count, given.seed))
        )
        began = time.monotonic()
        outcomes = run_all(files, made, given.jobs)
        read = time.monotonic() - began
        odd_files(files / "odd")
        before = names(sandbox)
        table = commands(sandbox, outcomes, given.commands, given.jobs)
        left = sorted(names(sandbox) ^ before)
    rows = Counter(outcome.name for outcome in outcomes)
    for name, count in [*rows.most_common(), *table.most_common()]:
        print(f"{count:7d}  {name}")
    slowest = sorted(outcomes, key=lambda o: o.seconds)[-5:]
    print("slowest:", *(f"{o.mutant} {o.name} {o.seconds:.1f} s" for o in slowest), sep="\n  ")
    print("files left:", *left[:20] or ["none"])
    print(f"{read:.0f} s for reading and judging, {time.monotonic() - began - read:.0f} s for the commands")
    clean = not left and rows.keys() <= set(GOOD) and all("exit code" in name for name in table)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
