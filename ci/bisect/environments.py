"""A Python environment that differs from ours in the version of one package.

It is a virtual environment that holds the package, and what of its requirements cannot be ours;
everything else is read from the folders of the environment that we run in, which stand behind its
own. So as little as can be differs, and one is made in seconds.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from impl.contract import UnavailableError, one_line
from impl.vllm.cache import cache_dir

_MARKER = ".kdafuzz-complete"
_BEHIND = "zz-kdafuzz-behind.pth"
"""Sorts last: the package's own files of this kind come first."""
_CONSTRAINT = re.compile(r"requested \(constraint\) ([a-z0-9-]+)==")
_SECONDS = 1800.0


class InstallError(UnavailableError):
    """An environment that cannot be made; ``said`` is all that the failing command said."""

    def __init__(self, what: str, said: str) -> None:
        super().__init__(f"{what} cannot be installed: {_reason(said)}")
        self.said = said


@dataclass(frozen=True)
class Environment:
    """An interpreter, and what beside the package has another version than here (``protobuf==6.33.1``)."""

    python: Path
    others: tuple[str, ...] = ()


def environment(requirement: str) -> Environment:
    """The environment with ``triton==3.6.0``, from the cache if it is there.

    ``UnavailableError`` says in one line why it cannot be made.
    """
    name, _, version = requirement.partition("==")
    pins = _pins(name)
    facts = json.dumps([requirement, pins, sys.version, sys.prefix, _behind()])
    home = cache_dir()
    entry = home / f"venv-{name}-{version}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    if not (entry / _MARKER).exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=home) as scratch:
            made = Path(scratch) / "venv"
            _make(made, requirement, pins)
            _check(made, name, version)
            (made / _MARKER).write_text("".join(f"{other}\n" for other in _others(made, pins)))
            _publish(made, entry)
    return Environment(_python(entry), tuple((entry / _MARKER).read_text().split()))


def _make(folder: Path, requirement: str, pins: dict[str, str]) -> None:
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], requirement)
    while True:
        try:
            _install(folder, requirement, pins)
            break
        except InstallError as error:
            # What the package itself cannot live with need not be as it is here.
            unwanted = {name for name in _CONSTRAINT.findall(error.said) if name in pins}
            if not unwanted:
                raise
            pins = {name: pin for name, pin in pins.items() if name not in unwanted}
    lines = [f"import site; site.addsitedir({place!r})\n" for place in _behind()]
    (_site(folder) / _BEHIND).write_text("".join(lines))


def _install(folder: Path, requirement: str, pins: dict[str, str]) -> None:
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pins.values()))
    pip = [sys.executable, "-m", "pip", "--python", str(_python(folder)), "install"]
    options = ["--disable-pip-version-check", "--no-input", "--only-binary=:all:", "--no-cache-dir"]
    _run([*pip, *options, "--constraint", str(constraints), requirement], requirement)


def _others(folder: Path, pins: dict[str, str]) -> list[str]:
    """What was installed in another version than here."""
    found = _pins("", importlib.metadata.distributions(path=[str(_site(folder))]))
    return [pin for name, pin in found.items() if pins.get(name, pin) != pin]


def _check(folder: Path, name: str, version: str) -> None:
    """Make sure that it has the version, and finds it before ours."""
    ask = f"import importlib.metadata as m; print(m.version({name!r}))"
    found = _run([str(_python(folder)), "-P", "-c", ask], name).strip()
    if found != version:
        raise UnavailableError(f"the environment for {name} {version} has {found}; report this")


def _publish(made: Path, entry: Path) -> None:
    try:
        made.replace(entry)
    except OSError:
        if (entry / _MARKER).exists():
            return  # another process was faster
        shutil.rmtree(entry)
        made.replace(entry)


def _pins(package: str, among: Iterable[Distribution] | None = None) -> dict[str, str]:
    """What is installed here, less the package and those that are parts of it by name; as requirements."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions() if among is None else among:
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and not (package and (name == package or name.startswith(f"{package}-"))):
            found.setdefault(name, f"{name}=={distribution.version}")
    return dict(sorted(found.items()))


def _behind() -> list[str]:
    """Folders of packages of the environment that we run in."""
    return [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _site(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _run(command: list[str], what: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(what, f"no end after {_SECONDS:g} s") from None
    if done.returncode:
        raise InstallError(what, done.stdout + done.stderr)
    return done.stdout


def _reason(said: str) -> str:
    """What pip gives as its reason: what conflicts, else its last error, else its last line."""
    conflict = re.search(r"The conflict is caused by:\n((?: +.*\n)+)", said)
    if conflict:
        lines = [line.strip() for line in conflict[1].splitlines()]
        return one_line("; ".join(dict.fromkeys((lines[0], lines[-1]))))
    lines = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    rest = [line for line in said.splitlines() if line.strip()]
    return one_line(lines[-1] if lines else rest[-1] if rest else "no reason given")
