"""Judges one item: in a process of its own, with empty compile caches, as often as asked."""

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ci.bisect.items import Item
from ci.bisect.rule import Seen, run_of
from ci.executor import Executor
from ci.failures import load, locate
from impl.contract import UnavailableError, one_line
from impl.devices.registry import default
from impl.vllm.cache import cache_dir
from impl.vllm.source import SourceError, resolve, split_flavour
from oracle.case import Case

_COMPILED = re.compile(r"cute-|triton-|venv-|\.")
"""Entries of the cache folder that hold compiled kernels, or are no kernels' business."""


@dataclass(frozen=True)
class Probe:
    """How to judge an item. ``SuiteError`` if the suite itself fails on the way."""

    case: Case
    device: str | None = None
    repeats: int = 1
    timeout: float = 60.0

    def __call__(self, item: Item) -> Seen:
        """Every judgement, or why there is none."""
        start = time.monotonic()
        try:
            seen = self._seen(item)
        except UnavailableError as error:
            seen = Seen(why=one_line(error, 1000))
        return msgspec.structs.replace(seen, seconds=round(time.monotonic() - start, 3))

    def _seen(self, item: Item) -> Seen:
        python, note = sys.executable, ""
        if item.package:
            from ci.bisect.environments import environment

            made = environment(item.package)
            python, note = str(made.python), f"with {', '.join(made.others)}" if made.others else ""
        _fetch(item.implementation)
        device = self.device or default((item.implementation,))
        with (
            empty_caches() as variables,
            Executor(
                item.implementation, device, timeout=self.timeout, python=python, environment=variables
            ) as executor,
        ):
            return Seen(tuple(run_of(executor.check(self.case)) for _ in range(self.repeats)), note=note)


def _fetch(implementation: str) -> None:
    """Have a vLLM's files in the cache, which the judging process is only lent."""
    if re.match(r"vllm($|[:@])", implementation):
        try:
            resolve(split_flavour(implementation)[0])
        except SourceError as error:
            raise UnavailableError(str(error)) from None


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Environment variables for a process that finds no kernel compiled before, but every source."""
    home = cache_dir()
    with tempfile.TemporaryDirectory(prefix="kdafuzz-bisect-") as scratch:
        lent = Path(scratch) / "cache"
        lent.mkdir()
        # The emulator is the suite's own: what is built of it stays.
        (home / "emulator").mkdir(parents=True, exist_ok=True)
        for entry in home.iterdir():
            if not _COMPILED.match(entry.name):
                (lent / entry.name).symlink_to(entry)
        yield {
            "KDAFUZZ_CACHE": str(lent),
            "TRITON_CACHE_DIR": str(Path(scratch) / "triton"),
            "CUTE_DSL_CACHE_DIR": str(Path(scratch) / "cute"),
        }


def one_case(text: str) -> Case:
    """The case that a PATH or ID names."""
    files = locate(text)
    if len(files) > 1:
        raise UnavailableError(f"{text}: {len(files)} cases; a bisection takes one")
    return load(files[0]).case
