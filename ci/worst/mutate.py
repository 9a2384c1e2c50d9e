"""Neighbours of a case, for a climb towards larger ratios: other values, rows and dimensions, same dtypes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ci.candidates import kept
from impl.contract import Domain
from oracle.case import Case
from oracle.values import REGIMES

replace = msgspec.structs.replace
TRIES = 20
"""Neighbours that are tried for one within the contract."""
SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 24, 32, 48, 64, 100, 128)
CHANNELS = (1, 2, 8, 64, 128, 192, 256, 300)
BOUNDS = (-88.0, -22.0, -11.0, -5.0, -1.0, -0.0625, 0.0, None)


def mutated(
    case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain, *, compiled: bool
) -> Case | None:
    """A neighbour of the case; ``None`` where none was found that the contract allows.

    ``donors`` lend their regimes. ``compiled``: a kernel is compiled for dimensions, windows and
    bounds, so these stay. A neighbour claims no relation: that would only run it twice.
    """
    moves = _VALUES + _ROWS + (() if compiled else _DIMENSIONS)
    for _ in range(TRIES):
        neighbour = replace(case, relation=None)
        try:
            for move in rng.choices(moves, k=rng.choice((1, 1, 2, 3))):
                neighbour = move(neighbour, rng, donors, domain)
        except ValueError:  # outside the contract, such as a layout that the new dimensions do not have
            continue
        if neighbour != case:
            return neighbour
    return None


Move = Callable[[Case, random.Random, Sequence[Case], Domain], Case]


def _seed(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    return replace(case, seed=rng.getrandbits(32))


def _regime(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    """Another regime of one tensor."""
    table = rng.choice(_tables(case))
    names = list(REGIMES[table])
    chosen = rng.choice(names)
    others = {name: regime for name, regime in case.regimes.items() if name != table}
    return replace(case, regimes=others if chosen == names[0] else others | {table: chosen})


def _crossed(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    """The regimes of another case, or some of them."""
    tables = _tables(case)
    lent = {t: regime for t, regime in rng.choice(donors).regimes.items() if t in tables}
    return replace(case, regimes=lent if rng.random() < 0.5 else case.regimes | lent)


def _tables(case: Case) -> list[str]:
    return sorted({spec.table for spec in case.call.tensors().values() if spec.table in REGIMES})


def _length(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    """Another length of one row."""
    call = case.call
    if not call.rows:
        raise ValueError("no row")
    row = rng.randrange(call.rows)
    return kept(case, call.with_qlen(row, rng.randint(0, min(call.longest, 16))))


def _fewer(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    """One row less: what is judged faster is judged more often."""
    call = case.call
    if call.rows < 2:
        raise ValueError("too few rows")
    gone = rng.randrange(call.rows)
    return kept(case, call.only([row for row in range(call.rows) if row != gone]))


def _accepted(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    """Another accepted count."""
    call: Any = case.call
    counts = getattr(call, "accepted", ())
    if not counts:
        raise ValueError("no counts")
    at = rng.randrange(len(counts))
    return kept(case, replace(call, accepted=(*counts[:at], rng.randint(1, call.longest), *counts[at + 1 :])))


def _bound(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    """Another bound of the gate."""
    bounds = [bound for bound in BOUNDS if bound is not None or not domain.bounded_only]
    bound = rng.choice((*bounds, -rng.randint(1, 88) / 2.0))
    return _with(case, lower_bound=bound)


def _window(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    call: Any = case.call
    window = rng.choice(domain.windows or range(1, 9))
    fields = {"window": window}
    if case.op == "commit":
        fields["state_len"] = call.history + window - 1
    return _with(case, **fields)


def _dimensions(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    call: Any = case.call
    if not hasattr(call, "key_dim") or case.op == "fused_verify":
        return _with(case, channels=rng.choice(CHANNELS)) if case.op.startswith("conv") else case
    dims = domain.head_dims or ((rng.choice(SIZES), rng.choice(SIZES)),)
    key_dim, value_dim = rng.choice(dims)
    return _with(case, key_dim=key_dim, value_dim=value_dim)


def _heads(case: Case, rng: random.Random, donors: Sequence[Case], domain: Domain) -> Case:
    return _with(case, heads=rng.choice(domain.heads or (1, 2)))


def _with(case: Case, **fields: object) -> Case:
    """The case with other fields of its call; where its memory does not fit them, a dense one."""
    if not set(fields) <= set(case.call.__struct_fields__):
        raise ValueError("no such field")
    call = replace(case.call, **fields)
    try:
        return kept(case, call)
    except ValueError:
        return kept(replace(case, layouts={}, pages=()), call)


_VALUES: tuple[Move, ...] = (_seed, _seed, _seed, _regime, _regime, _crossed)
_ROWS: tuple[Move, ...] = (_length, _fewer, _accepted)
_DIMENSIONS: tuple[Move, ...] = (_bound, _window, _dimensions, _heads)
