"""Git repositories with a made-up vLLM in every revision, for bisecting: some hundred in a second.

The kernel is our own convolution, right or wrong as the revision says. As a command it writes a
repository of 240 revisions with planted faults and prints what to run on it.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fake_vllm import CONV, tree_files

KERNEL = """\
import functools
import itertools

from impl.triton.conv import causal_conv1d_update as right

# revision {number}
BEHAVIOUR = "{behaviour}"
calls = itertools.count(1)
{top}

@functools.wraps(right)
def causal_conv1d_update(**kwargs):
    out = right(**kwargs)
    kind, _, size = BEHAVIOUR.partition(" ")
    if kind == "raises":
        raise RuntimeError("in this revision")
    if kind in ("wrong", "adds") or (kind == "flaky" and next(calls) % 3 == 1):
        out.add_(float(size or 1))
    if kind == "rolls":
        kwargs["conv_state"].add_(1)
    return out
"""


@dataclass(frozen=True)
class Revision:
    """One commit, and the ``behaviour`` of its kernel.

    right, wrong, raises, rolls (wrong in another output), flaky (wrong in every third call), import
    (cannot be loaded), or ``adds X`` (this much to every element). ``parents`` are positions (None: the
    one before); not ``touching``: it changes the README alone.
    """

    behaviour: str = "right"
    parents: tuple[int, ...] | None = None
    touching: bool = True


def write_history(repo: Path, revisions: Sequence[Revision]) -> list[str]:
    """Make the repository, with a branch main at the last revision; returns their hashes."""
    repo.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", "-b", "main", str(repo)], check=True)
    marks = repo / "marks"
    stream = b"".join(_commit(at, revision) for at, revision in enumerate(revisions)) + b"done\n"
    command = ["git", "-C", str(repo), "fast-import", "--quiet", "--done", f"--export-marks={marks}"]
    subprocess.run(command, input=stream, check=True)
    subprocess.run(["git", "-C", str(repo), "reset", "-q", "--hard", "main"], check=True)
    found = dict(line.split() for line in marks.read_text().splitlines())
    marks.unlink()
    return [found[f":{at + 1}"] for at in range(len(revisions))]


def _commit(at: int, revision: Revision) -> bytes:
    parents = revision.parents if revision.parents is not None else (at - 1,) if at else ()
    lines = [f"commit refs/heads/main\nmark :{at + 1}\ncommitter T <t@t> {1_700_000_000 + 60 * at} +0000"]
    lines += [_data(f"revision {at}: {revision.behaviour}")]
    lines += [f"{'merge' if nth else 'from'} :{parent + 1}" for nth, parent in enumerate(parents)]
    files = {"README": f"{at}\n"} | (tree_files() if not parents else {})
    if revision.touching:
        top = "import vllm.nowhere" if revision.behaviour == "import" else ""
        files[CONV] = KERNEL.format(number=at, behaviour=revision.behaviour, top=top)
    lines += [f"M 100644 inline {name}\n{_data(text)}" for name, text in files.items()]
    return ("\n".join(lines) + "\n\n").encode()


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def planted(count: int, first_bad: int, **ranges: range) -> list[Revision]:
    """A list of revisions that is wrong from one on; ``ranges`` by behaviour lie over it."""
    behaviours = ["right"] * first_bad + ["wrong"] * (count - first_bad)
    for behaviour, places in ranges.items():
        for place in places:
            behaviours[place] = behaviour
    return [Revision(behaviour) for behaviour in behaviours]


def growing(count: int) -> list[Revision]:
    """A list of revisions whose error grows by a little in each."""
    return [Revision(f"adds {2e-7 * at:.3g}") for at in range(count)]


def main(folder: Path) -> None:
    """Write the two repositories and print commands."""
    ranges = {"import": range(100, 117), "rolls": range(150, 156), "flaky": range(175, 182)}
    names = write_history(folder / "steps", planted(240, 163, **ranges))
    drift = write_history(folder / "drift", growing(240))
    case = "corpora/conv_update/rounded-products-4650af6a.json"
    print(f"# the first bad one is {names[163]}")
    ends = ["--good", names[0], "--bad", names[-1]]
    print(shlex.join(["kdafuzz", "bisect", case, "--repo", str(folder / "steps"), *ends]))
    metric = ["--metric", "ratio", "--threshold", "20"]
    ends = ["--good", drift[0], "--bad", drift[-1]]
    print(shlex.join(["kdafuzz", "bisect", case, "--repo", str(folder / "drift"), *ends, *metric]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
