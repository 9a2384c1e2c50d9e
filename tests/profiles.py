"""The Hypothesis profiles of the suite: how many examples, which, and from where.

Every one descends from Hypothesis's profile ``default`` by name. The profile that is current when
ours are made is another one on a CI machine: Hypothesis's own ``ci``, which would hand down that
nothing is random and nothing remembered. None has a deadline (a first call compiles), health
checks (large cases are wanted), or a printed blob (a failing case is on disk already).
"""

import os
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import ExampleDatabase

NIGHTLY_MINUTES = float(os.environ.get("KDAFUZZ_NIGHTLY_MINUTES", "10"))
"""How long one test may search under the profile ``nightly``."""


def dev(database: ExampleDatabase) -> settings:
    """25 random examples after those remembered: an answer while one is working on something."""
    return settings(_common(), max_examples=25, database=database)


def ci(database: ExampleDatabase) -> settings:
    """100 examples, the same each time: a verdict on a revision must not depend on luck.

    Nor may it depend on what other runs remember, so there is no database (Hypothesis knows no
    derandomised search with one). Where those examples matter too, ``repro`` is a second run.
    """
    del database
    return settings(_common(), max_examples=100, derandomize=True, database=None)


def nightly(database: ExampleDatabase) -> settings:
    """200 random examples after those remembered, and more of them for ``time_box`` seconds a test."""
    return settings(_common(), max_examples=200, database=database)


def repro(database: ExampleDatabase) -> settings:
    """The remembered examples alone, neither shrunk nor mutated.

    The number of examples is a limit on those that pass by now: with a small one, a test would
    end before it came to those that still fail.
    """
    phases = (Phase.explicit, Phase.reuse)
    return settings(_common(), max_examples=10_000, phases=phases, database=database)


PROFILES: dict[str, Callable[[ExampleDatabase], settings]] = {
    "dev": dev,
    "ci": ci,
    "nightly": nightly,
    "repro": repro,
}


def register(database: ExampleDatabase) -> None:
    """Make the profiles known to Hypothesis, with the examples remembered in ``database``."""
    for name, make in PROFILES.items():
        settings.register_profile(name, make(database))


def chosen(asked: str | None) -> str:
    """The profile asked for, else ``ci`` on machines that set ``CI``, as CI services do, else ``dev``."""
    return asked or ("ci" if os.environ.get("CI") else "dev")


def time_box(name: str) -> float:
    """How many seconds a property is searched at least, whatever the number of examples."""
    return 60.0 * NIGHTLY_MINUTES if name == "nightly" else 0.0


def _common() -> settings:
    return settings(
        settings.get_profile("default"),
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
