"""How often strategies must reach each bucket: ``floors.toml``, which says why."""

import math
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from oracle.buckets import BUCKETS, buckets
from oracle.case import Case

TABLE = Path(__file__).with_name("floors.toml")


@cache
def floors(op: str) -> dict[str, int]:
    """Per bucket of an operation, of a thousand cases how many must fall into it.

    ``ValueError`` where the table names a bucket that the operation does not have.
    """
    table = tomllib.loads(TABLE.read_text())
    named = table["paired_buckets"]
    own = set(named.get(op, ()))
    unknown = own - set(BUCKETS[op])
    unknown |= set(named["every"]) - {bucket for known in BUCKETS.values() for bucket in known}
    if unknown or named.keys() - {"every", *BUCKETS}:
        raise ValueError(f"{TABLE.name}: no bucket {min(unknown, default='')!r} of {op}")
    paired = own | set(named["every"])
    return {bucket: table["paired" if bucket in paired else "single"] for bucket in BUCKETS[op]}


def short(op: str, cases: Iterable[Case]) -> dict[str, tuple[int, int]]:
    """Buckets that too few of the cases fall into: how many do, and how many must."""
    counts: Counter[str] = Counter()
    drawn = 0
    for case in cases:
        counts.update(buckets(case))
        drawn += 1
    least = {bucket: math.ceil(floor * drawn / 1000) for bucket, floor in floors(op).items()}
    return {bucket: (counts[bucket], need) for bucket, need in least.items() if counts[bucket] < need}
