"""The smaller cases that a failing one is tried as: the minimiser's steps, and the order that makes it end.

Whole rows, tokens and heads go, memory becomes dense and values plain. A row's values hang on its
id, so dropping other rows leaves them bit for bit as they were. Of a capture any heads, layers
and ranges of channels stay as they were too; other values become new ones where dimensions
shrink, so a few seeds are tried.

The order is total and fixed: the row and the captured head where the first problem lies; rows;
layers, heads and channels; head dimensions; tokens; the operation's own; relation; memory;
captured values drawn instead; regimes; names; seed; poison. Every candidate is smaller than
its case by ``measure``.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.captured import Captured
from oracle.case import Case, Hostile, Permute
from oracle.judge import Verdict

T = TypeVar("T")
replace = msgspec.structs.replace
SEEDS = 12
"""Other seeds to try where dropping heads changes the values, so that the fault may need other ones."""
FEW_SEEDS = 3
"""Those to try where heads become narrower."""
PLAIN = 16
"""Channels of a head below which none is made narrower: fewer say less of what is wrong."""

FEW_ROWS = 8
"""Batches up to this many rows are tried row by row; larger ones in parts first."""


def measure(case: Case) -> tuple[object, ...]:
    """A case's size, most significant first; every candidate's is lexicographically less."""
    call = case.call
    return (
        call.rows,
        tuple(getattr(call, name) for name in call.shrinkable),
        tuple(getattr(call, name) for name in call.narrowable),
        getattr(call, "channels", 0),
        sum(call.qlens),
        call.size(),
        case.relation is not None,
        len(case.pages),
        len(case.layouts),
        len(case.captured.tables) if case.captured is not None else 0,
        len(case.regimes),
        call.pool + sum(abs(slot) for slot in call.slots),
        case.seed,
        case.poison != "nan",
    )


def candidates(case: Case, verdict: Verdict | None = None) -> Iterator[Case]:
    """Smaller cases, valid ones only: first the row and the captured head that the verdict points at.

    Then fewer rows, heads, tokens; then memory, values, names.
    """
    for attempt in itertools.chain(_pointed_at(case, verdict), _attempts(case)):
        try:
            smaller = attempt()
        except ValueError:
            continue  # outside the contract, such as a permutation of a row that is gone
        if measure(smaller) < measure(case):
            yield smaller


def _pointed_at(case: Case, verdict: Verdict | None) -> Iterator[Callable[[], Case]]:
    """Of many rows the one, of captured heads the one, where the first problem lies."""
    problem = verdict.problems[0] if verdict is not None else None
    place = dict(zip(problem.axes, problem.index, strict=False)) if problem is not None else {}
    row = _row_at(case.call, place) if case.call.rows > FEW_ROWS else None
    if row is not None:
        yield lambda: _only_rows(case, [row])
    captured, head = case.captured, place.get("head")
    if captured is not None and head is not None and head < len(captured.heads):
        only = (captured.heads[head],)
        yield lambda: _recaptured(case, {"heads": 1}, {"heads": only})


def _row_at(call: AnyCall, place: Mapping[str, int]) -> int | None:
    """The row whose tokens, record row or slot lie there."""
    rows = range(call.rows)
    if "token" in place:
        return next((i for i in rows if call.starts[i] <= place["token"] < call.starts[i + 1]), None)
    if "row" in place and getattr(call, "records", "row") == "row":
        return place["row"] if place["row"] < call.rows else None
    slot = place.get("slot", place.get("row"))
    return next((i for i in rows if slot in _slots_of(call, i)), None)


def _slots_of(call: AnyCall, row: int) -> tuple[int, ...]:
    if not isinstance(call, Commit):
        return (call.slots[row],)
    plan = call.plan(row)
    return plan.final, plan.boundary


def _attempts(case: Case) -> Iterator[Callable[[], Case]]:
    call = case.call
    for rows in _fewer_rows(call.rows):
        yield lambda rows=rows: _only_rows(case, rows)  # type: ignore[misc]
    yield from _fewer_parts(case) if case.captured is None else _fewer_captured(case, case.captured)
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
    yield from _drawn_instead(case)
    yield lambda: replace(case, regimes={})
    for name in sorted(case.regimes):
        yield lambda name=name: replace(case, regimes=_without(case.regimes, name))  # type: ignore[misc]
    yield lambda: replace(kept(case, call.compact()), relation=None)
    yield lambda: kept(case, call.compact())
    yield lambda: replace(case, seed=0)
    yield lambda: replace(case, poison="nan")


def _fewer_parts(case: Case) -> Iterator[Callable[[], Case]]:
    """Fewer layers, heads and channels, narrower heads; all values are others then."""
    call = case.call
    for name in call.shrinkable:
        size = getattr(call, name)
        for smaller in sorted({1, size // 2, size - 1} - {0, size}):
            yield from _with_seeds(case, {name: smaller}, SEEDS)
    for name in call.narrowable:
        size = getattr(call, name)
        for smaller in sorted({PLAIN, size // 2}):
            if PLAIN <= smaller < size:
                yield from _with_seeds(case, {name: smaller}, FEW_SEEDS)


def _with_seeds(case: Case, change: dict[str, int], count: int) -> Iterator[Callable[[], Case]]:
    yield lambda: _with(case, **change)
    for seed in range(count):
        yield lambda s=seed: replace(_with(case, **change), seed=s)  # type: ignore[misc]


def _fewer_captured(case: Case, captured: Captured) -> Iterator[Callable[[], Case]]:
    """Some of the captured layers and heads, one half of a range of channels; what stays is as it was."""
    call = case.call
    for name in ("layers", "heads"):
        chosen: tuple[int, ...] = getattr(captured, name)
        for part in _fewer_rows(len(chosen)) if len(chosen) > 1 else ():
            some = tuple(chosen[i] for i in part)
            yield lambda n=name, k=some: _recaptured(case, {n: len(k)}, {n: k})  # type: ignore[misc]
    steps = {"channels": getattr(call, "part_dim", 1), "key_dim": PLAIN, "value_dim": PLAIN}
    for name, field in (("channels", "channel"), ("key_dim", "key"), ("value_dim", "value")):
        count, odd = divmod(getattr(call, name, 0), steps[name])
        if name not in call.__struct_fields__ or count < 1:
            continue
        first, half = getattr(captured, field), (count + bool(odd)) // 2 * steps[name]
        whole = getattr(call, name)
        for start, size in ((0, half), (half, whole - half)) if 0 < half < whole else ():
            yield lambda n=name, f=field, a=first + start, z=size: _recaptured(case, {n: z}, {f: a})  # type: ignore[misc]


def _recaptured(case: Case, of_call: dict[str, object], of_capture: dict[str, object]) -> Case:
    """The case with another part of its captured values, and the call that has just these."""
    assert case.captured is not None
    plain = _with(replace(case, captured=None), **of_call)
    return replace(plain, captured=replace(case.captured, **of_capture))


def _drawn_instead(case: Case) -> Iterator[Callable[[], Case]]:
    """All captured values drawn by the plainest regime, or those of one table."""
    captured = case.captured
    if captured is None:
        return
    yield lambda: replace(case, captured=None)
    for table in captured.tables:
        rest = tuple(other for other in captured.tables if other != table)
        yield lambda r=rest: replace(case, captured=replace(captured, tables=r))  # type: ignore[misc]


def _fewer_rows(count: int) -> Iterator[list[int]]:
    """Rows to keep: of many, all but ever smaller parts; of a few, each alone and all but each."""
    rows = list(range(count))
    parts = 2
    while count > FEW_ROWS and parts <= count:
        edges = [count * i // parts for i in range(parts + 1)]
        if parts == 2:
            yield from (rows[a:b] for a, b in itertools.pairwise(edges))
        else:
            yield from (rows[:a] + rows[b:] for a, b in itertools.pairwise(edges))
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
        held = [i for i, name in enumerate(page.members) if name in specs]
        gaps = tuple(page.gaps[i] for i in held) if page.gaps else ()
        if held:
            pages.append(replace(page, members=tuple(page.members[i] for i in held), gaps=gaps))
    tables = {spec.table for spec in specs.values()}
    captured = case.captured
    if captured is not None:
        tables_held = tuple(table for table in captured.tables if table in tables)
        captured = replace(captured, tables=tables_held) if tables_held else None
    return replace(
        case,
        call=call,
        layouts={name: layout for name, layout in case.layouts.items() if name in specs},
        pages=tuple(pages),
        regimes={table: regime for table, regime in case.regimes.items() if table in tables},
        captured=captured,
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
