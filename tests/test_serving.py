"""Serving as a state machine: requests come, decode with any accept pattern, share prefixes, end, come again.

The rules only write the script; the engine of ``ci.serving`` runs it on the implementation and
holds every call against its oracle and every committed state against a model that has seen
accepted tokens alone. So a failing script is a case like any other: saved, replayed, shrunk.
"""

import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.errors import StopTest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from impl.contract import Domain
from oracle.case import Case
from tests.strategies.serve import BULK_STEPS, REQUESTS, STEPS, THEMES, Event, make_serve, script, serve_cases
from tests.strategies.values import regimes
from tests.strategies.variants import Variant, palette, variants
from tests.subject import Subject

DATA = st.data()
WHO = st.integers(1, REQUESTS)
CHUNKS = st.sampled_from((1, 2, 3, 5, 9, 16))


class Serving(RuleBasedStateMachine):
    """Each rule is a step; what has run when the rules end is one case."""

    def __init__(
        self, judge: Callable[[Case], None], domain: Domain, chosen: tuple[Variant, ...] | None
    ) -> None:
        super().__init__()
        self._judge, self._domain, self._chosen = judge, domain, chosen
        self._fields: dict[str, Any] = {}
        self._steps: list[list[Event]] = []
        self._running: set[int] = set()
        self._case: dict[str, Any] = {}

    @initialize(data=DATA, seed=st.integers(0, 2**32 - 1), poison=st.sampled_from(("nan", "huge")))
    def choose(self, data: st.DataObject, seed: int, poison: str) -> None:
        """Dimensions, dtypes, layouts and values, once for the run."""
        self._fields = data.draw(variants(make_serve, self._domain, self._chosen)).fields
        specs = script(self._fields, [[("prefill", 1, 1, 0)]]).tensors()
        chosen = data.draw(regimes(specs, themes=THEMES, finite=True))
        self._case = {"seed": seed, "poison": poison, "regimes": chosen}

    @rule(chunks=st.dictionaries(WHO, CHUNKS, min_size=1, max_size=2))
    def prefill(self, chunks: dict[int, int]) -> None:
        """Requests start, or go on with another chunk."""
        self._steps.append([("prefill", request, tokens, 0) for request, tokens in chunks.items()])
        self._running |= chunks.keys()

    @precondition(lambda self: self._running)
    @rule(data=DATA, pads=st.lists(st.booleans(), max_size=2))
    def decode(self, data: st.DataObject, pads: list[bool]) -> None:
        """Some requests run a window; padding rows of a captured graph stand among them."""
        window = self._fields["window"]
        rows: list[Event] = []
        for request in data.draw(st.permutations(sorted(self._running))):
            tokens = data.draw(st.integers(0, window))
            accepted = data.draw(st.integers(1, window + 1))
            if tokens:
                rows.append(("decode", request, tokens, accepted))
        rows += [("pad", 0, window if filled else 0, 1) for filled in pads]
        self._steps.append(rows)

    @precondition(lambda self: self._running)
    @rule(data=DATA)
    def plain(self, data: st.DataObject) -> None:
        """A step without speculation."""
        request = data.draw(st.sampled_from(sorted(self._running)))
        self._steps.append([("plain", request, 1, 1)])

    @precondition(lambda self: self._running)
    @rule(data=DATA, rejected=st.booleans())
    def finish(self, data: st.DataObject, rejected: bool) -> None:
        """A request ends, by itself or because nothing was accepted; its slots are used again."""
        request = data.draw(st.sampled_from(sorted(self._running)))
        self._steps.append([("decode", request, 1, 0) if rejected else ("finish", request, 0, 0)])
        self._running.discard(request)

    @precondition(lambda self: self._fields["block_size"] and len(self._running) < REQUESTS)
    @rule(data=DATA, pick=st.integers(0, 3))
    def cached(self, data: st.DataObject, pick: int) -> None:
        """A request starts from a block boundary that another one left."""
        request = data.draw(st.sampled_from(sorted(set(range(1, REQUESTS + 1)) - self._running)))
        self._steps.append([("cached", request, 0, pick)])
        self._running.add(request)

    def teardown(self) -> None:
        """Run the script, unless Hypothesis has given the example up: it would not hear of a failure."""
        if self._steps and not isinstance(sys.exc_info()[1], StopTest):
            self._judge(Case(call=script(self._fields, self._steps), **self._case))


def test_state_machine(subject: Subject) -> None:
    """Any sequence of steps leaves what the plain recurrence over the accepted tokens leaves."""
    domain = subject.domain("serve")
    chosen = palette(make_serve, 0, subject.palette, domain) if subject.palette else None

    def run(settings: hypothesis.settings, seed: int | str, judge: Callable[[Case], None]) -> None:
        @hypothesis.seed(seed)
        class Bound(Serving):
            def __init__(self) -> None:
                super().__init__(judge, domain, chosen)

        run_state_machine_as_test(Bound, settings=settings)

    subject.search_by(run, steps=BULK_STEPS if domain.aligned else STEPS)


def test_drawn_scripts(subject: Subject) -> None:
    """The scripts that ``kdafuzz fuzz --op serve`` draws, with several events a step."""
    domain = subject.domain("serve")
    chosen = palette(make_serve, 0, subject.palette, domain) if subject.palette else None
    subject.search(serve_cases(domain=domain, palette=chosen, most_steps=10))


BASE: dict[str, Any] = {
    "heads": 2,
    "key_dim": 16,
    "value_dim": 8,
    "window": 4,
    "pool": 9,
    "capacity": 4,
}


BULK: dict[str, Any] = {
    "heads": 1,
    "key_dim": 128,
    "value_dim": 128,
    **dict.fromkeys(("activation", "state", "conv", "taps"), "bfloat16"),
    "lying": ("dense", "shifted", "wide"),
}
"""What the base becomes for kernels that copy in bulk."""


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        pytest.param(
            {"state": "bfloat16"},
            [
                [("prefill", 1, 5, 0)],
                *[[("decode", 1, 4, n)] for n in (4, 1, 2, 1, 4)],
                [("plain", 1, 1, 1)],
                [("prefill", 1, 3, 0)],
            ],
            id="accept-4-1-2-1-4-then-plain-then-prefill",
        ),
        pytest.param(
            {"block_size": 4},
            [
                [("prefill", 1, 3, 0)],
                [("decode", 1, 4, 4)],
                [("cached", 2, 0, 0)],
                [("decode", 2, 4, 3), ("decode", 1, 4, 2)],
                [("finish", 1, 0, 0)],
                [("decode", 2, 4, 4)],
            ],
            id="another-request-starts-from-the-boundary",
        ),
        pytest.param(
            {"block_size": 4},
            [[("prefill", 1, 4, 0)], [("decode", 1, 4, 4)], [("decode", 1, 4, 4)], [("plain", 1, 1, 1)]],
            id="every-commit-ends-on-a-boundary",
        ),
        pytest.param(
            {"pool": 2},
            [
                [("prefill", 1, 9, 0)],
                [("decode", 1, 2, 2)],
                [("finish", 1, 0, 0)],
                [("prefill", 2, 1, 0)],
                [("decode", 2, 4, 1), ("pad", 0, 4, 1), ("pad", 0, 0, 1)],
            ],
            id="one-slot-used-again",
        ),
    ],
)
def test_script(subject: Subject, fields: dict[str, Any], steps: list[list[Event]]) -> None:
    """Scripts that a search should not be needed for."""
    domain = subject.domain("serve")
    base = BASE | (BULK if domain.aligned else fields)
    given = base | {"block_size": fields.get("block_size", 0), "records": domain.records[0]}
    subject.require(Case(call=script(given, steps)))
