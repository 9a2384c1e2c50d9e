"""What decides which binary a compiled kernel needs, drawn apart from the rest.

An interpreter takes any combination, so on the CPU every dimension is drawn freely. A GPU
compiles one binary per combination of compile-time constants and of the divisibility of
every stride and address; drawing these freely would spend the run in the compiler. A
*palette* is a list of variants made from a seed: a run draws variants from its palette and
everything else freely, and other seeds have other palettes.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from impl.contract import Domain
from oracle.case import Verify

HEAD_DIMS = (
    (16, 16),
    (32, 16),
    (16, 32),
    (48, 16),
    (8, 40),
    (64, 64),
    (128, 128),
    (96, 160),
    (33, 65),
    (1, 2),
    (5, 3),
    (16, 24),
    (7, 9),
)
"""(key_dim, value_dim): powers of two and masked tails, K != V, one and several value blocks."""
BOUNDS = (-5.0, None, -1.0, 0.0, None, -0.0625, None, -11.0, 0.0, -22.0, -88.0)
HEADS = (1, 2, 3, 4, 8)
ACTIVATIONS = ("float32", "bfloat16", "float16")
STRIDED = (
    "q",
    "k",
    "v",
    "raw_g",
    "raw_beta",
    "state",
    "correction",
    "key_gate",
    "out",
    "query_start_loc",
    "state_indices",
)

Choose = Callable[[str, Sequence[Any]], Any]


@dataclass(frozen=True)
class Variant:
    """Compile-time constants of a verify, and which tensors have odd strides or offsets.

    ``heads`` are the head counts to draw from: one head makes some strides 1, which a
    compiler treats as a constant. ``skewed`` names the odd tensors; ``None`` leaves every
    tensor's divisibility to chance.
    """

    head_dims: tuple[int, int]
    window: int
    activation: str
    out: str
    own_out: bool
    state: str
    starts_dtype: str
    slots_dtype: str
    lower_bound: float | None
    records: str
    heads: tuple[int, ...]
    skewed: tuple[str, ...] | None


def make_variant(choose: Choose, domain: Domain, *, free: bool) -> Variant:
    """Make a variant by asking ``choose(name, options)``; the first option is the simplest."""
    activation = choose("activation", domain.activations or ACTIVATIONS)
    own_out = choose("own_out", (True, True, False))
    out = choose("out", (activation, "float32", "bfloat16", "float16", "float64")) if own_out else activation
    index = domain.index_dtypes or ("int32", "int64")
    skewed: tuple[str, ...] | None = None
    heads: tuple[int, ...] = HEADS
    if not free:
        heads = choose("heads", (HEADS[:1], HEADS[1:], HEADS[1:]))
        kind = choose("skew", ("none", "none", "one", "all"))
        skewed = {"none": (), "one": (choose("skewed", STRIDED),), "all": STRIDED}[kind]
    return Variant(
        head_dims=choose("head_dims", domain.head_dims or HEAD_DIMS),
        window=choose("window", domain.windows or (4, 1, 2, 3, 5, 6, 7, 8, 11)),
        activation=activation,
        out=out,
        own_out=own_out,
        state=choose("state", domain.states or ("float32", "bfloat16")),
        starts_dtype=choose("starts_dtype", index),
        slots_dtype=choose("slots_dtype", index),
        lower_bound=choose("lower_bound", BOUNDS),
        records=choose("records", domain.records),
        heads=heads,
        skewed=skewed,
    )


def palette(seed: int, size: int, domain: Domain) -> tuple[Variant, ...]:
    """``size`` variants from a seed, the plainest first (failures shrink towards it)."""
    rng = random.Random(f"palette {seed}")
    plainest = make_variant(lambda _, options: options[0], domain, free=False)
    drawn = (
        make_variant(lambda _, options: rng.choice(options), domain, free=False) for _ in range(size - 1)
    )
    return (plainest, *drawn)


def variants(domain: Domain, chosen: Sequence[Variant] | None) -> st.SearchStrategy[Variant]:
    """Variants of a palette, or any; shrinks towards the first option of every choice."""
    if chosen is not None:
        return st.sampled_from(chosen)
    return _free_variants(domain)


@st.composite
def _free_variants(draw: st.DrawFn, domain: Domain) -> Variant:
    return make_variant(lambda _, options: draw(st.sampled_from(options)), domain, free=True)


def constants(variant: Variant) -> dict[str, Any]:
    """The variant's share of the fields of ``Verify``."""
    key_dim, value_dim = variant.head_dims
    shared = [name for name in Verify.__struct_fields__ if hasattr(variant, name) and name != "heads"]
    fields = {name: getattr(variant, name) for name in shared}
    return {**fields, "key_dim": key_dim, "value_dim": value_dim}
