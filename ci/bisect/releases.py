"""Releases of vLLM between two versions, wheels in a folder, and the versions of any package."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ci.bisect.items import History, Item, listed
from impl.contract import UnavailableError
from impl.vllm.cache import cache_dir

_WHEEL = re.compile(r"vllm-([^-]+)-.*\.whl")
_INDEX_SECONDS = 120.0


def releases(text: str, *, flavour: str = "") -> History:
    """The releases of ``A..B``, ends included: what the package index has, and what is at hand."""
    first, last = _range(text, "--versions")
    here = _at_hand()
    index = published("vllm")
    found = sorted({version for version in (*here, *(index or ())) if first <= version <= last})
    missing = [str(end) for end in (first, last) if end not in found]
    if missing:
        known = ", ".join(map(str, sorted({*here, *(index or ())})[-8:])) or "none"
        raise UnavailableError(f"there is no vLLM {' nor '.join(missing)}; known: {known}")
    note = "the package index is out of reach: only releases at hand are searched"
    items = [Item(str(version), f"vllm@{version}{flavour}") for version in found]
    return listed(items, () if index is not None else (note,))


def wheels(folder: Path, *, flavour: str = "") -> History:
    """The wheels of vLLM in a folder, by version."""
    found = []
    for path in sorted(folder.glob("vllm-*.whl")) if folder.is_dir() else ():
        named = _WHEEL.fullmatch(path.name)
        version = _version(named[1]) if named else None
        if version is not None:
            found.append((version, path))
    if len(found) < 2:
        raise UnavailableError(f"{folder}: needs two wheels of vLLM (vllm-VERSION-*.whl); found {len(found)}")
    twice = len({version for version, _ in found}) < len(found)
    items = [
        Item(path.name if twice else str(version), f"vllm:{path.absolute()}{flavour}")
        for version, path in sorted(found)
    ]
    return listed(items)


def packages(text: str, implementation: str) -> History:
    """``NAME=A..B`` or ``NAME=A,B,C``: the implementation with each version of a package."""
    name, equals, versions = text.partition("=")
    name = re.sub(r"[-_.]+", "-", name.strip()).lower()
    if not equals or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise UnavailableError(f"--package {text!r} must be NAME=A..B or NAME=A,B,C, as triton=3.6.0..3.7.1")
    if ".." in versions:
        first, last = _range(versions, "--package")
        index = published(name)
        if index is None:
            raise UnavailableError(
                f"the package index has no {name}, or is out of reach; list the versions: {name}=A,B,C"
            )
        found = [version for version in sorted(set(index)) if first <= version <= last]
    else:
        found = sorted({_asked(part, "--package") for part in versions.split(",")})
    if len(found) < 2:
        raise UnavailableError(f"--package {text}: needs two versions; found {len(found)}")
    return listed([Item(str(version), implementation, package=f"{name}=={version}") for version in found])


def published(package: str) -> list[Version] | None:
    """The releases that the package index has for this Python; None if it cannot be asked, or has none."""
    options = ["--disable-pip-version-check", "--no-input", "--retries=0", "--timeout=15"]
    command = [sys.executable, "-m", "pip", "index", "versions", package, *options]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_INDEX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    told = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return list(_versions(told[1].split(","))) if told else None


def _at_hand() -> list[Version]:
    """Releases in the folders of KDAFUZZ_WHEELS and in the cache."""
    names = []
    for folder in filter(None, os.environ.get("KDAFUZZ_WHEELS", "").split(os.pathsep)):
        paths = Path(folder).expanduser().glob("vllm-*.whl")
        names += [found[1] for path in paths if (found := _WHEEL.fullmatch(path.name))]
    names += [path.name.removeprefix("release-") for path in cache_dir().glob("release-*")]
    # The build of a release for another CUDA is that release.
    return [Version(version.public) for version in _versions(names)]


def _range(text: str, option: str) -> tuple[Version, Version]:
    first, dots, last = text.partition("..")
    if not dots:
        raise UnavailableError(f"{option} {text!r} must be A..B, as 0.29.0..0.33.0")
    ends = _asked(first, option), _asked(last, option)
    if ends[0] >= ends[1]:
        raise UnavailableError(f"{option} {text}: the first version must be lower than the last")
    return ends


def _asked(text: str, option: str) -> Version:
    found = _version(text.strip())
    if found is None:
        raise UnavailableError(f"{option}: {text.strip()!r} is not a version")
    return found


def _versions(texts: Iterable[str]) -> Iterable[Version]:
    return (found for text in texts if (found := _version(text.strip())) is not None)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
