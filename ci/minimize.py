"""Makes a failing case smaller in the terms of its own domain, after Hypothesis's shrinking.

Hypothesis shrinks the choices that drew a case; where one choice moves many others it ends in
a local minimum. Here whole rows, tokens and heads go, memory becomes dense and values plain.
A row's values hang on its id, so dropping other rows leaves them bit for bit as they were.

The order of ``candidates`` is total and fixed, and every candidate is smaller than its case
by ``measure``: the result depends on the case and the implementation alone, and the loop ends.
"""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

import msgspec

from impl.contract import UnavailableError
from oracle.calls import AnyCall
from oracle.case import Case, Hostile, Permute
from oracle.judge import Verdict

T = TypeVar("T")
replace = msgspec.structs.replace
SEEDS = 12
"""Other seeds to try where dropping heads changes the values, so that the fault may need other ones."""


FEW_ROWS = 8
"""Batches up to this many rows are tried row by row; larger ones in parts first."""
CALLS, SECONDS = 200, 30.0
"""Judgements and time that one minimisation may take after a search."""


def minimize(
    case: Case,
    verdict: Verdict,
    judge: Callable[[Case], Verdict],
    keep: Callable[[Case, Verdict], None] = lambda case, verdict: None,
    *,
    until: float = float("inf"),
    calls: int = CALLS,
    seconds: float = SECONDS,
) -> tuple[Case, Verdict]:
    """The smallest case found that fails in the same way (``signature``), and its verdict.

    ``keep`` is told of every smaller case at once. Ends early at ``until`` (a
    ``time.monotonic`` moment) or when ``calls`` or ``seconds`` are spent. A candidate that the
    implementation does not take is passed over; what else ``judge`` raises passes through.
    """
    wanted = signature(verdict)
    until = min(until, time.monotonic() + seconds)
    improved = True
    while improved:
        improved = False
        for candidate in candidates(case):
            if calls == 0 or time.monotonic() > until:
                return case, verdict
            calls -= 1
            try:
                second = judge(candidate)
            except UnavailableError:
                continue  # such as a count of heads that the implementation does not take
            if not second.ok and signature(second) == wanted:
                case, verdict, improved = candidate, second, True
                keep(case, verdict)
                break
    return case, verdict


def signature(verdict: Verdict) -> tuple[str, str, str]:
    """What makes two failures the same: kind, stage and tensor of the first problem."""
    first = verdict.problems[0]
    return first.kind, first.stage, first.tensor


def measure(case: Case) -> tuple[object, ...]:
    """A case's size, most significant first; every candidate's is lexicographically less."""
    call = case.call
    return (
        call.rows,
        tuple(getattr(call, name) for name in call.shrinkable),
        sum(call.qlens),
        call.size(),
        case.relation is not None,
        len(case.pages),
        len(case.layouts),
        len(case.regimes),
        call.pool + sum(abs(slot) for slot in call.slots),
        case.seed,
        case.poison != "nan",
    )


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, valid ones only: fewer rows, heads, tokens; then memory, values, names."""
    for attempt in _attempts(case):
        try:
            smaller = attempt()
        except ValueError:
            continue  # outside the contract, such as a permutation of a row that is gone
        if measure(smaller) < measure(case):
            yield smaller


def _attempts(case: Case) -> Iterator[Callable[[], Case]]:
    call = case.call
    for rows in _fewer_rows(call.rows):
        yield lambda rows=rows: _only_rows(case, rows)  # type: ignore[misc]
    for name in call.shrinkable:
        size = getattr(call, name)
        for smaller in sorted({1, size // 2, size - 1} - {0, size}):
            changed = {name: smaller}
            yield lambda c=changed: _with(case, **c)  # type: ignore[misc]
            for seed in range(SEEDS):
                yield lambda c=changed, s=seed: replace(_with(case, **c), seed=s)  # type: ignore[misc]
    for i, qlen in enumerate(call.qlens):
        for shorter in sorted({0, 1, qlen // 2, qlen - 1} - {qlen, -1}):
            yield lambda i=i, n=shorter: kept(case, call.with_qlen(i, n))  # type: ignore[misc]
    for change in call.smaller():
        yield lambda c=change: _with(case, **c)  # type: ignore[misc]
    yield lambda: replace(case, relation=None)
    yield lambda: replace(case, layouts={}, pages=())
    for i in range(len(case.pages)):
        yield lambda i=i: replace(case, pages=case.pages[:i] + case.pages[i + 1 :])  # type: ignore[misc]
    for name in sorted(case.layouts):
        yield lambda name=name: replace(case, layouts=_without(case.layouts, name))  # type: ignore[misc]
    yield lambda: replace(case, regimes={})
    for name in sorted(case.regimes):
        yield lambda name=name: replace(case, regimes=_without(case.regimes, name))  # type: ignore[misc]
    yield lambda: replace(kept(case, call.compact()), relation=None)
    yield lambda: kept(case, call.compact())
    yield lambda: replace(case, seed=0)
    yield lambda: replace(case, poison="nan")


def _fewer_rows(count: int) -> Iterator[list[int]]:
    """Rows to keep: of many, all but ever smaller parts; of a few, each alone and all but each."""
    rows = list(range(count))
    parts = 2
    while count > FEW_ROWS and parts <= count:
        edges = [count * i // parts for i in range(parts + 1)]
        if parts == 2:
            yield from (rows[a:b] for a, b in pairwise(edges))
        else:
            yield from (rows[:a] + rows[b:] for a, b in pairwise(edges))
        parts *= 2
    if count <= FEW_ROWS:
        yield from ([i] for i in rows)
        yield from ([j for j in rows if j != i] for i in rows)


def _without(entries: dict[str, T], name: str) -> dict[str, T]:
    return {key: value for key, value in entries.items() if key != name}


def _with(case: Case, **fields: object) -> Case:
    return kept(case, replace(case.call, **fields))


def kept(case: Case, call: AnyCall) -> Case:
    """The case with another call, and of its memory and values what that call has."""
    specs = call.tensors()
    pages = []
    for page in case.pages:
        kept = [i for i, name in enumerate(page.members) if name in specs]
        gaps = tuple(page.gaps[i] for i in kept) if page.gaps else ()
        if kept:
            pages.append(replace(page, members=tuple(page.members[i] for i in kept), gaps=gaps))
    tables = {spec.table for spec in specs.values()}
    return replace(
        case,
        call=call,
        layouts={name: layout for name, layout in case.layouts.items() if name in specs},
        pages=tuple(pages),
        regimes={table: regime for table, regime in case.regimes.items() if table in tables},
    )


def _only_rows(case: Case, rows: list[int]) -> Case:
    """The case with these rows alone; ids and slots stay, so the rows keep their values."""
    relation = case.relation
    match relation:
        case Hostile(row=row, token=token):
            relation = Hostile(rows.index(row), token)
        case Permute(order=order):
            relation = Permute(tuple(rows.index(i) for i in order if i in rows))
        case _:
            pass
    smaller = kept(replace(case, relation=None), case.call.only(rows))
    return replace(smaller, relation=relation)
