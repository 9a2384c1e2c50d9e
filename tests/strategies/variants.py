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
    """What a compiler sees of a call: some of its fields, and which tensors have odd strides or offsets.

    ``heads`` are the head counts to draw from: one head makes some strides 1, which a
    compiler treats as a constant. ``skewed`` names the odd tensors; ``None`` leaves every
    tensor's divisibility to chance. ``ordered`` turns inner dimensions round. ``layout_seed``
    fixes all layouts of kernels that take their strides as constants.
    """

    fields: dict[str, Any]
    heads: tuple[int, ...] = HEADS
    skewed: tuple[str, ...] | None = None
    ordered: bool = False
    layout_seed: int = 0


Maker = Callable[[Choose, Domain, bool], Variant]


def skewed_and_heads(choose: Choose, strided: Sequence[str]) -> dict[str, Any]:
    """The share of a variant that only compiled kernels have."""
    heads = choose("heads", (HEADS[:1], HEADS[1:], HEADS[1:]))
    kind = choose("skew", ("none", "none", "one", "all", "order"))
    skewed = {"one": (choose("skewed", strided),), "all": tuple(strided)}.get(kind, ())
    seed = choose("layout_seed", range(64))
    return {"heads": heads, "skewed": skewed, "ordered": kind == "order", "layout_seed": seed}


def index_dtypes(choose: Choose, domain: Domain, *names: str) -> dict[str, str]:
    """A dtype for each of these fields."""
    return {name: choose(name, domain.index_dtypes or ("int32", "int64")) for name in names}


def make_verify(choose: Choose, domain: Domain, free: bool) -> Variant:
    """A variant of verify: asks ``choose(name, options)``; the first option is the simplest."""
    bounds = tuple(bound for bound in BOUNDS if bound is not None) if domain.bounded_only else BOUNDS
    activation = choose("activation", domain.activations or ACTIVATIONS)
    own_out = choose("own_out", (True, True, False))
    out = choose("out", (activation, "float32", "bfloat16", "float16", "float64")) if own_out else activation
    key_dim, value_dim = choose("head_dims", domain.head_dims or HEAD_DIMS)
    fields = {
        "key_dim": key_dim,
        "value_dim": value_dim,
        "window": choose("window", domain.windows or (4, 1, 2, 3, 5, 6, 7, 8, 11)),
        "activation": activation,
        "out": out,
        "own_out": own_out,
        "state": choose("state", domain.states or ("float32", "bfloat16")),
        **index_dtypes(choose, domain, "starts_dtype", "slots_dtype"),
        "lower_bound": choose("lower_bound", bounds),
        "records": choose("records", domain.records),
    }
    how = {} if free else skewed_and_heads(choose, STRIDED)
    if domain.heads:
        how["heads"] = (choose("heads", domain.heads),)
    return Variant(fields, **how)


def palette(make: Maker, seed: int, size: int, domain: Domain) -> tuple[Variant, ...]:
    """``size`` variants from a seed, the plainest first (failures shrink towards it)."""
    rng = random.Random(f"palette {seed}")
    plainest = make(lambda _, options: options[0], domain, False)
    return (plainest, *(make(lambda _, options: rng.choice(options), domain, False) for _ in range(size - 1)))


def variants(make: Maker, domain: Domain, chosen: Sequence[Variant] | None) -> st.SearchStrategy[Variant]:
    """Variants of a palette, or any; shrinks towards the first option of every choice."""
    if chosen is not None:
        return st.sampled_from(chosen)
    return _free_variants(make, domain)


@st.composite
def _free_variants(draw: st.DrawFn, make: Maker, domain: Domain) -> Variant:
    return make(lambda _, options: draw(st.sampled_from(options)), domain, True)
