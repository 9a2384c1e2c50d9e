"""Strategies over whole cases, by operation."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from impl.contract import Domain
from oracle.case import Case
from tests.strategies.commit import commit_cases, make_commit
from tests.strategies.conv import (
    make_packed,
    make_prefill,
    make_update,
    packed_cases,
    prefill_cases,
    update_cases,
)
from tests.strategies.fused_verify import fused_cases, make_fused
from tests.strategies.serve import make_serve, serve_cases
from tests.strategies.variants import Maker, Variant, make_verify, palette
from tests.strategies.verify import verify_cases

CASES: dict[str, Callable[..., st.SearchStrategy[Case]]] = {
    "verify": verify_cases,
    "conv_update": update_cases,
    "conv_prefill": prefill_cases,
    "packed_conv": packed_cases,
    "commit": commit_cases,
    "fused_verify": fused_cases,
    "serve": serve_cases,
}
"""Per operation, its strategy."""
MAKERS: dict[str, Maker] = {
    "verify": make_verify,
    "conv_update": make_update,
    "conv_prefill": make_prefill,
    "packed_conv": make_packed,
    "commit": make_commit,
    "fused_verify": make_fused,
    "serve": make_serve,
}
"""Per operation, what makes the variants of its palette."""


def cases(
    operation: str, domain: Domain, *, seed: int = 0, variants: int = 0, **options: Any
) -> st.SearchStrategy[Case]:
    """The operation's cases in a domain; with a palette of so many ``variants`` unless 0."""
    chosen: Sequence[Variant] | None = None
    if variants:
        chosen = palette(MAKERS[operation], seed, variants, domain)
    return CASES[operation](domain=domain, palette=chosen, **options)
