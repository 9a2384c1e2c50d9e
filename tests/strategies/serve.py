"""Strategies over scripts of events for serving."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from impl.contract import Domain
from oracle.calls.serve import Kind, Lying, Serve
from oracle.case import Case
from tests.strategies.values import regimes
from tests.strategies.variants import ACTIVATIONS, Choose, Variant, variants

ANY = Domain()
REQUESTS = 4
"""Requests that a script names."""
STEPS = 30
BULK_STEPS = 10
"""Of kernels that copy in bulk: they need large heads, and emulated steps take a second."""
LYING: tuple[tuple[Lying, ...] | msgspec.UnsetType, ...] = (
    msgspec.UNSET,
    ("dense", "shifted"),
    ("dense", "wide"),
    ("shifted", "dense", "wide", "dense"),
)
SERVED_DIMS = ((16, 16), (8, 24), (24, 8), (32, 32))
THEMES: tuple[dict[str, str], ...] = (
    {},
    {"x": "near_one", "weight": "near_one"},
    {"raw_g": "fast", "A_log": "spread"},
    {"raw_g": "slow", "raw_beta": "near_one"},
    {"raw_g": "mixed", "dt_bias": "spread"},
    {"raw_g": "thresholds", "raw_beta": "thresholds"},
)


def make_serve(choose: Choose, domain: Domain, free: bool) -> Variant:
    """A variant of serving: asks ``choose(name, options)``; the first option is the simplest."""
    dims = [d for d in SERVED_DIMS if not domain.head_dims or d in domain.head_dims] or domain.head_dims
    key_dim, value_dim = choose("head_dims", dims)
    window = choose("window", domain.windows or (4, 1, 2, 3, 6))
    # Kernels that copy in bulk: all in bf16, slots of whole copies, tokens where other kernels must run.
    bulk = bool(domain.aligned)
    narrow = choose("narrow", (True,) if bulk else (False, True))
    bounds = (-5.0, -1.0) if domain.bounded_only else (-5.0, None, -1.0)
    return Variant(
        {
            "heads": choose("heads", (1, 2)),
            "key_dim": key_dim,
            "value_dim": value_dim,
            "window": window,
            "block_size": choose("blocks", (0, window, window + 1, 8)),
            "records": choose("records", domain.records),
            "dim_first": choose("dim_first", (True, False)),
            "activation": choose("activation", domain.activations or ACTIVATIONS),
            "state": choose("state", domain.states or ("float32", "bfloat16")),
            "conv": "bfloat16" if narrow else "float32",
            "taps": choose("taps", ("float32", "bfloat16")),
            "lower_bound": choose("lower_bound", bounds),
            "gap": choose("gap", (0, 16) if bulk else (0, 1, 16)),
            **({"lying": choose("lying", LYING)} if bulk else {}),
            "pool": choose("pool", (9, 6) if bulk else (6, 9, 14)),
            "capacity": choose("capacity", (5, 3, 6)),
        }
    )


Event = tuple[Kind, int, int, int]
"""Kind, request, tokens, accepted."""
KINDS: tuple[Kind, ...] = (
    "prefill",
    "decode",
    "decode",
    "decode",
    "decode",
    "plain",
    "pad",
    "cached",
    "finish",
)


@st.composite
def events(draw: st.DrawFn, window: int) -> Event:
    """One event: mostly a window of one of four requests; shrinks towards a prefill of one token."""
    request = draw(st.integers(1, REQUESTS))
    kind: Kind = draw(st.sampled_from(KINDS))
    if kind == "prefill":
        return kind, request, draw(st.sampled_from((1, 2, 3, 5, 9, 16))), 0
    if kind == "decode":
        accepted = st.one_of(st.integers(1, window), st.sampled_from((window + 1, window, 1, 1, 0)))
        return kind, request, draw(st.integers(1, window)), draw(accepted)
    if kind == "pad":
        return kind, 0, draw(st.integers(0, window)), 1
    return kind, request, int(kind == "plain"), draw(st.integers(0, 3))


def script(fields: dict[str, Any], steps: Sequence[Sequence[Event]]) -> Serve:
    """The call that serves these events, step by step."""
    rows = [(index, *event) for index, step in enumerate(steps) for event in step]
    return Serve(
        **fields,
        steps=tuple(step for step, *_ in rows),
        kinds=tuple(kind for _, kind, *_ in rows),
        slots=tuple(request for _, _, request, *_ in rows),
        qlens=tuple(tokens for *_, tokens, _ in rows),
        accepted=tuple(accepted for *_, accepted in rows),
        ids=tuple(range(len(rows))),
    )


@st.composite
def serve_cases(
    draw: st.DrawFn,
    *,
    domain: Domain = ANY,
    palette: Sequence[Variant] | None = None,
    relations: Sequence[str] | None = None,
    most_steps: int = STEPS,
) -> Case:
    """Scripts of up to 30 steps of one to five events over four requests.

    Requests start by a prefill or from a cached boundary, decode windows with any accept
    pattern, end, and come again in used slots. Shrinks towards one prefill.
    """
    variant = draw(variants(make_serve, domain, palette))
    most_steps = min(most_steps, BULK_STEPS) if domain.aligned else most_steps
    window = variant.fields["window"]
    first: list[Event] = [("prefill", r, draw(st.integers(1, 5)), 0) for r in (1, 2)]
    count = draw(st.sampled_from((most_steps - 1, most_steps - 1, most_steps // 2, 3)))
    steps = [first, *(draw(st.lists(events(window), min_size=1, max_size=5)) for _ in range(count))]
    call = script(variant.fields, steps)
    return Case(
        call=call,
        regimes=draw(regimes(call.tensors(), themes=THEMES, finite=True)),
        seed=draw(st.integers(0, 2**32 - 1)),
        poison=draw(st.sampled_from(("nan", "huge"))),
    )
