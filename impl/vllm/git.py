"""Source files of one revision of a git repository, read without touching its work tree or index."""

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

from impl.vllm.cache import NEEDED_FILES, NEEDED_FOLDERS, Files, SourceError, is_needed

_REPOSITORY_VARIABLES = frozenset(
    [
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_PREFIX",
        "GIT_COMMON_DIR",
        "GIT_NAMESPACE",
        "GIT_OBJECT_DIRECTORY",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    ]
)


def commit_hash(repo: Path, rev: str) -> str:
    """Return the full hash of commit `rev` (anything `git rev-parse` takes); raise SourceError if none."""
    _git_dir(repo)
    if not rev or rev.startswith("-"):
        raise SourceError(f"{rev!r} is not a git revision; write vllm:REPO@REV")
    fault = f"{repo} has no revision {rev!r}; fetch it or name another"
    return run(repo, ["rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}"], fault).decode().strip()


def version_of(repo: Path, commit: str) -> str:
    """Return `0.33.0` on a release tag, `0.33.0+g1a2b3c4d5` after one, else the abbreviated hash."""
    try:
        text = run(
            repo, ["describe", "--tags", "--long", "--abbrev=9", "--match", "v[0-9]*", commit], "no tag"
        )
    except SourceError:
        return commit[:9]
    found = re.fullmatch(r"v(\d[^-]*(?:-[^-]+)*)-(\d+)-(g[0-9a-f]+)", text.decode().strip())
    if not found:
        return commit[:9]
    tag, distance, short = found.groups()
    return tag if distance == "0" else f"{tag}+{short}"


def files(repo: Path, commit: str) -> Files:
    """Yield the needed files at that commit as (name, bytes); symbolic links are left out."""
    # A pathspec that matches nothing makes `git archive` fail, so list first what this commit has.
    wanted = [*NEEDED_FOLDERS, *NEEDED_FILES]
    listing = run(
        repo, ["ls-tree", "-r", "-z", "--name-only", commit, "--", *wanted], f"cannot list {commit[:9]}"
    )
    names = [name for name in listing.decode().split("\0") if name and is_needed(name)]
    present = [path for path in wanted if any(name == path or name.startswith(path) for name in names)]
    if not present:
        return
    archive = run(
        repo, ["archive", "--format=tar", commit, "--", *present], f"cannot read {commit[:9]} of {repo}"
    )
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and is_needed(member.name):
                handle = tar.extractfile(member)
                assert handle is not None
                yield member.name, handle.read()


def run(repo: Path, arguments: list[str], fault: str) -> bytes:
    """Return what git says; raise SourceError, `fault` and git's own first line, where it fails."""
    # Inside a git hook these name another repository than ours.
    environment = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    # Run from the git folder: paths are then relative to the top of the tree, even if `repo` lies below it.
    place = repo if arguments[0] == "rev-parse" else _git_dir(repo)
    command = ["git", "--no-optional-locks", "-C", str(place), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env={**environment, "LC_ALL": "C"}, check=False)
    except FileNotFoundError as error:
        raise SourceError("git is not installed; install it to load vllm:REPO@REV") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise SourceError(fault + (f" (git: {said[0].removeprefix('fatal: ')})" if said else ""))
    return done.stdout


def _git_dir(repo: Path) -> Path:
    fault = f"{repo} is not a git repository; write vllm:PATH for a plain tree"
    return Path(run(repo, ["rev-parse", "--absolute-git-dir"], fault).decode().strip())
