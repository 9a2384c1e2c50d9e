"""One hunt for the cases that come nearest to their bounds: draw, aim, climb.

Two fifths of its examples are drawn at random and give the distribution. For one fifth Hypothesis
aims at large ratios. Then it climbs: of every kind of output (dtypes and tensor) the worst case so far
has neighbours, and a neighbour that comes nearer takes its place. What fails on the way is a failure
like any other, and ends the hunt.
"""

import random
import time

from ci.search import Failure, FoundError, Recorder, Search, StopError, Tally, conclude, rounds
from ci.worst.mutate import mutated
from ci.worst.near import Nearness
from impl.contract import Domain, UnavailableError
from oracle.case import Case
from oracle.codec import canonical
from oracle.reach.dtypes import combination

AIMED = 50
"""Examples of a round that aims: from half of them on, Hypothesis climbs by itself."""
REFUSED = 100
"""Neighbours in a row that an implementation may refuse before it is taken to be gone."""


def hunt(search: Search, domain: Domain, *, compiled: bool) -> tuple[Tally, Failure | None]:
    """Hunt for ``search.examples`` judgements; the tally's ``nearness`` is what came of it.

    Deterministic from the search's seed, unless its time runs out.
    """
    recorder = Recorder(search)
    drawn, aimed = 2 * search.examples // 5, search.examples // 5
    flaky = rounds(search, recorder, drawn)
    if recorder.failure is None:
        flaky = rounds(search, recorder, aimed, aimed=True, size=AIMED)
    if recorder.failure is None:
        recorder.counting = False
        _climb(search, recorder, search.examples - drawn - aimed, domain, compiled=compiled)
    return conclude(search, recorder, flaky=flaky)


def _parent(found: Nearness, step: int, rng: random.Random) -> Case:
    """The worst case of every kind in turn, and the nearest of all as often.

    Of a kind that nothing came near in, any drawn case: a 16-bit store shows an fp32 error only next
    to a tie, and the first case without any would be a bad place to start from.
    """
    kinds = sorted(found.worst)
    nearest = max(kinds, key=lambda kind: found.worst[kind].ratio)
    kind = nearest if step % 2 else kinds[step // 2 % len(kinds)]
    drawn = [case for case in found.cases if combination(case.call) == kind[0]]
    return rng.choice(drawn) if drawn and not found.worst[kind].ratio else found.worst[kind].case


def _climb(search: Search, recorder: Recorder, steps: int, domain: Domain, *, compiled: bool) -> None:
    rng = random.Random(f"climb {search.seed}")
    tried: set[bytes] = set()
    refused = 0
    for step in range(steps):
        found = recorder.nearness
        if not found.worst or time.monotonic() > search.until:
            return
        donors = [near.case for near in found.worst.values()]
        case = mutated(_parent(found, step, rng), rng, donors, domain, compiled=compiled)
        if case is None or canonical(case) in tried:
            continue
        tried.add(canonical(case))
        try:
            recorder.run(case)
            refused = 0
        except FoundError:
            return
        except StopError as stop:
            # A neighbour may be outside of what the implementation takes.
            refused += 1
            if not isinstance(stop.reason, UnavailableError) or refused > REFUSED:
                raise stop.reason from None
