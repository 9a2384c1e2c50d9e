"""The revisions between two of a git repository, of those that touch what the kernels are loaded from.

Nothing is checked out: the loader reads the files of any revision out of the repository.
"""

from pathlib import Path
from typing import Literal

from ci.bisect.items import History, Item
from impl.contract import UnavailableError, one_line
from impl.vllm import git
from impl.vllm.cache import NEEDED_FILES, NEEDED_FOLDERS
from impl.vllm.source import SourceError

_FIELDS = "%H%x00%P%x00%as %an: %s"


def revisions(
    repo: Path,
    good: str,
    bad: str,
    *,
    flavour: str = "",
    first_parent: bool = False,
    paths: tuple[str, ...] = (),
) -> History:
    """The history between two revisions, whichever of them is the older one.

    Other revisions than those that touch ``paths`` (default: every file that can be loaded) have the
    files of a parent, so they are left out. ``UnavailableError`` in one line if there is no such history.
    """
    try:
        return _revisions(repo.expanduser().absolute(), good, bad, flavour, first_parent, paths)
    except SourceError as error:
        raise UnavailableError(str(error)) from None


def _revisions(
    repo: Path, good: str, bad: str, flavour: str, first_parent: bool, paths: tuple[str, ...]
) -> History:
    ends = git.commit_hash(repo, good), git.commit_hash(repo, bad)
    if ends[0] == ends[1]:
        raise UnavailableError(f"{good} and {bad} are one revision, {ends[0][:9]}; name two")
    old, new, notes = _ordered(repo, *ends)
    span = f"{old[:9]}..{new[:9]}"
    asked = ["--parents", "--topo-order", "--reverse", "--no-color", "--no-show-signature"]
    asked += ["--first-parent"] if first_parent else []
    said = git.run(
        repo,
        ["log", *asked, "-z", f"--format={_FIELDS}", new, f"^{old}", "--", *(paths or _loadable())],
        f"cannot list the revisions {span} of {repo}",
    )
    rows = said.decode(errors="replace").rstrip("\0").split("\0")
    if len(rows) < 3:
        raise UnavailableError(
            f"no revision in {span} touches {' or '.join(paths) or 'the kernels'}: the ends have equal files"
        )
    followed = 1 if first_parent else None
    listed = [(rows[at], rows[at + 1].split()[:followed], rows[at + 2]) for at in range(0, len(rows), 3)]
    return _history(repo, old, listed, flavour, notes, "bad" if old == ends[1] else "good")


def _history(
    repo: Path,
    old: str,
    listed: list[tuple[str, list[str], str]],
    flavour: str,
    notes: tuple[str, ...],
    claim: Literal["good", "bad"],
) -> History:
    """Items of the old end, of other parents that lie behind it, and of what ``git log`` listed."""
    inside = {name for name, _, _ in listed}
    outside = dict.fromkeys(p for _, parents, _ in listed for p in parents if p not in inside)
    front = [old, *(name for name in outside if name != old)]
    position = {name: at for at, name in enumerate([*front, *(name for name, _, _ in listed)])}

    def item(name: str, parents: tuple[int, ...] = (), about: str = "") -> Item:
        return Item(name, f"vllm:{repo}@{name}{flavour}", parents, one_line(about))

    items = [item(name) for name in front]
    for name, parents, about in listed:
        # A first revision of all has no parent: what is before it is as good as the old end.
        items.append(item(name, tuple(position[p] for p in parents) or (0,), about))
    return History(tuple(items), len(front), notes, claim)


def _ordered(repo: Path, good: str, bad: str) -> tuple[str, str, tuple[str, ...]]:
    """The older and the newer end; where neither descends from the other, where the lines parted is old."""
    fault = f"{good[:9]} and {bad[:9]} have no common history"
    base = git.run(repo, ["merge-base", good, bad], fault).decode().strip()
    if base == good:
        return good, bad, ()
    if base == bad:
        return bad, good, ()
    note = (
        f"neither {good[:9]} (good) nor {bad[:9]} (bad) descends from the other: searched between their "
        f"merge base {base[:9]}, which must be good, and the bad one"
    )
    return base, bad, (note,)


def _loadable() -> tuple[str, ...]:
    return (*NEEDED_FOLDERS, *NEEDED_FILES)
