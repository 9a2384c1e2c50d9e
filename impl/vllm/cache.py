"""A cache of the few vLLM source files that the kernels need.

A cache entry is a directory that is complete or absent: files go to a temporary sibling, the marker (with
a digest of every byte) is written last, and one rename publishes the whole. A reader trusts an entry only
if the digest agrees, so a torn or edited entry is made anew. Many processes may ask for one entry at a
time: they queue on a lock file where the file system has locks, and are still right (but do the work twice)
where it has none.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

NEEDED_FOLDERS = (
    "vllm/models/kimi_k3/nvidia/",
    "vllm/model_executor/layers/mamba/ops/",
)
NEEDED_FILES = (
    "vllm/_version.py",
    "vllm/utils/math_utils.py",
    "vllm/v1/attention/backends/utils.py",
)
MARKER = ".kdafuzz-complete.json"
_FORMAT = 1
_MAX_FILE_BYTES = 16 << 20

Files = Iterable[tuple[str, bytes]]


class SourceError(ValueError):
    """A vLLM source that cannot be used; the message is one sentence for the user."""


def is_needed(name: str) -> bool:
    """Return whether the kernels may load the file `name` (posix, from the tree's root)."""
    return name in NEEDED_FILES or (name.endswith(".py") and name.startswith(NEEDED_FOLDERS))


def cache_dir() -> Path:
    """Return $KDAFUZZ_CACHE, else $XDG_CACHE_HOME/kdafuzz, else ~/.cache/kdafuzz; it need not exist yet."""
    own = os.environ.get("KDAFUZZ_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser().absolute() if base else Path.home() / ".cache") / "kdafuzz"


def cached(key: str) -> Path | None:
    """Return the complete cache entry of that key, or None when there is none that can be trusted."""
    entry = cache_dir() / key
    return entry if _is_complete(entry) else None


def materialise(key: str, files: Callable[[Path], Files]) -> Path:
    """Return the cache entry `key`, made from `files` when it is absent or damaged.

    `files` gets a scratch folder (on the cache's file system, deleted afterwards) and yields (name, bytes).
    Raises SourceError for a cache folder that cannot be written and for whatever `files` refuses.
    """
    found = cached(key)
    if found:
        return found
    home = cache_dir()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _lock(home / f".{key}.lock"):
            return cached(key) or _make(home, key, files)
    except OSError as error:
        raise SourceError(
            f"cannot write the source cache {home} ({error.strerror or error}); point KDAFUZZ_CACHE elsewhere"
        ) from error


def _make(home: Path, key: str, files: Callable[[Path], Files]) -> Path:
    scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=home))
    try:
        tree = scratch / "tree"
        tree.mkdir()
        work = scratch / "work"
        work.mkdir()
        for name, data in files(work):
            target = tree / safe_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        (tree / MARKER).write_text(json.dumps({"format": _FORMAT, "digest": _digest(tree)}))
        return _publish(tree, home / key, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(tree: Path, entry: Path, scratch: Path) -> Path:
    for attempt in range(8):
        try:
            return tree.replace(entry)
        except OSError:
            # The name is taken: by an equal entry of a process that was faster, or by a damaged one.
            if _is_complete(entry):
                return entry
            with contextlib.suppress(FileNotFoundError):
                entry.replace(scratch / f"damaged-{attempt}")
    raise SourceError(f"cannot replace the damaged cache entry {entry}; delete it and run again")


def _is_complete(entry: Path) -> bool:
    try:
        marker = json.loads((entry / MARKER).read_text())
        return bool(marker["format"] == _FORMAT and marker["digest"] == _digest(entry))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(tree: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_dir() or name == MARKER or "__pycache__" in path.parts:
            continue
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as handle:
        # Some network file systems have no locks; the rename in _publish keeps us safe without.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def safe_name(name: str) -> str:
    """Return the member name itself; raise SourceError if it leads out of the folder it is unpacked into."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in parts[0] or "\0" in name:
        raise SourceError(f"refused to unpack: the member name {name!r} leads out of the folder")
    return name


def wheel_names(path: Path) -> list[zipfile.ZipInfo]:
    """List a wheel's members; raise SourceError if it is no zip file or a name leads out of its folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise SourceError(f"cannot read {path} as a wheel ({error})") from error
    for member in members:
        safe_name(member.filename)
    return members


def wheel_files(path: Path) -> Files:
    """Yield a wheel's needed files as (name, bytes); raise SourceError for links, huge or damaged members."""
    members = [member for member in wheel_names(path) if is_needed(member.filename)]
    with zipfile.ZipFile(path) as archive:
        for member in members:
            if stat.S_ISLNK(member.external_attr >> 16) or member.file_size > _MAX_FILE_BYTES:
                raise SourceError(f"refused to unpack {member.filename} of {path.name}: a link or too large")
            try:
                yield member.filename, archive.read(member)
            except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
                raise SourceError(f"cannot unpack {member.filename} of {path.name} ({error})") from error
