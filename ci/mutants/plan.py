"""Which mutants a run judges: drawn evenly, the listed ones set aside, no-ops left out."""

import ast
import fnmatch
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ci.mutants.listed import Entry, Listed
from ci.mutants.sites import Mutant, planted
from ci.mutants.subjects import Subject
from impl.contract import UnavailableError


@dataclass(frozen=True)
class Planned:
    """Mutants of a subject to judge, and listed ones, which are not; ``stale`` keys are listed in vain."""

    subject: Subject
    mutants: tuple[Mutant, ...]
    aside: tuple[tuple[Mutant, Entry], ...] = ()
    stale: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[Mutant, ...]:
        """All of them."""
        return (*self.mutants, *(mutant for mutant, _ in self.aside))


def plan(
    subject: Subject,
    operations: Sequence[str],
    listed: Listed,
    *,
    count: int | None = None,
    only: Sequence[str] = (),
    with_listed: bool = False,
) -> Planned:
    """The mutants of functions that one of these operations reaches, at most ``count`` of them.

    ``only`` are ids or keys, ids with ``*`` for any letters; with them nothing is left out.
    """
    everything = subject.mutants()
    reached = [
        replace(each, operations=tuple(op for op in each.operations if op in operations))
        for each in everything
        if set(each.operations) & set(operations) - {"serve"}
    ]
    chosen = _only(reached, only) if only else sample(reached, count)
    aside = [] if with_listed or only else [(each, listed.of(each)) for each in chosen]
    set_aside = [(each, entry) for each, entry in aside if entry is not None]
    left = {each.id for each, _ in set_aside}
    mutants = [each for each in chosen if each.id not in left and not _same(each, subject)]
    stale = tuple(listed.stale(everything, subject.texts))
    return Planned(subject, tuple(mutants), tuple(set_aside), stale)


def _same(mutant: Mutant, subject: Subject) -> bool:
    """Whether the fault is one of spelling alone."""
    bare = [re.sub(r"[\s()]", "", text) for text in (mutant.old, mutant.new)]
    if bare[0] != bare[1]:
        return False
    source = subject.texts[mutant.module]
    try:
        return ast.dump(ast.parse(planted(source, mutant))) == ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def _only(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    chosen = []
    for name in names:
        found = [each for each in mutants if each.key == name or fnmatch.fnmatchcase(each.id, name)]
        if not found:
            raise UnavailableError(f"there is no mutant {name!r}; --list prints those that there are")
        chosen += found
    return list(dict.fromkeys(chosen))


def sample(mutants: Sequence[Mutant], count: int | None) -> list[Mutant]:
    """At most ``count``: operations and operators take turns, and the functions of each.

    Which ones of a function come first hangs on their keys alone: a change elsewhere in the module
    changes little of the choice.
    """
    if count is None or count >= len(mutants):
        return list(mutants)
    groups: dict[tuple[str, str], list[Mutant]] = {}
    for each in mutants:
        groups.setdefault((each.operations[0], each.operator), []).append(each)
    # In no order of theirs: a small sample is not to end with the first operation.
    keys = sorted(groups, key=lambda key: zlib.crc32(" ".join(key).encode()))
    turns = [_by_turns(groups[key]) for key in keys]
    chosen: list[Mutant] = []
    while len(chosen) < count:
        for turn in turns:
            following = next(turn, None)
            if following is not None and len(chosen) < count:
                chosen.append(following)
    place = {each.id: i for i, each in enumerate(mutants)}
    return sorted(chosen, key=lambda each: place[each.id])


def _by_turns(mutants: Iterable[Mutant]) -> Iterator[Mutant]:
    """One of each function, then the next one of each."""
    functions: dict[str, list[Mutant]] = {}
    for each in sorted(mutants, key=lambda each: zlib.crc32(each.key.encode())):
        functions.setdefault(each.function, []).append(each)
    queues = list(functions.values())
    while queues:
        for queue in queues:
            yield queue.pop(0)
        queues = [queue for queue in queues if queue]
