"""Strategies over cases of the fused verify."""

from collections.abc import Sequence

from hypothesis import strategies as st

from impl.contract import Domain
from oracle.calls.fused_verify import DYNAMIC, MOST_DECAY, FusedVerify
from oracle.case import Case
from oracle.layout import DENSE, Fence, Layout, Page, TensorSpec
from tests.strategies.assembly import cases_of
from tests.strategies.layouts import Arrangement
from tests.strategies.rows import rows
from tests.strategies.values import FUSED_THEMES
from tests.strategies.variants import Choose, Variant, variants

ANY = Domain()
HEADS = (1, 2, 3)
WINDOWS = (4, 8, 1, 2, 3, 5, 6, 7)
EVEN = st.sampled_from((0, 8, 16, 24, 48))
"""Gaps and offsets that keep 16 bytes for every dtype."""
ODD = st.sampled_from((1, 2, 4, 3, 5, 9))
"""Such that do not, for two bytes an element."""
ANY_GAP = st.one_of(st.just(0), EVEN, ODD)
WALLED = ("mixed_qkv", "raw_gate", "out", "state", "conv_state", "conv_weight")
"""Tensors that are aligned wherever they end, as long as they are dense: they may lie against a fence."""


def make_fused(choose: Choose, domain: Domain, free: bool) -> Variant:
    """A variant of the fused verify: what a kernel is compiled for. Its strides are arguments."""
    heads = choose("heads", domain.heads or HEADS)
    windows = tuple(w for w in domain.windows or WINDOWS if w <= 8)
    fields = {
        "heads": heads,
        "window": choose("window", windows),
        "dim_first": choose("dim_first", (True, True, False)),
        "taps": choose("taps", ("bfloat16", "float32")),
    }
    return Variant(fields, heads=(heads,), skewed=None if free else DYNAMIC)


@st.composite
def fused_cases(
    draw: st.DrawFn,
    *,
    domain: Domain = ANY,
    palette: Sequence[Variant] | None = None,
    relations: Sequence[str] | None = None,
) -> Case:
    """Cases of the fused verify: 1 to 3 heads, windows of 1 to 8, 0 to 4 rows, both conv layouts.

    Memory is drawn for a code path (see ``memories``); lengths, slots and accepted counts are
    independent. The gate's bound is often the strongest that the window allows. Shrinks
    towards one row of one token, one head, dense memory.
    """
    variant = draw(variants(make_fused, domain, palette))
    window = variant.fields["window"]
    batch = draw(rows(window=window, max_rows=4, pads=domain.pad_slots))
    count = len(batch.qlens)
    strongest = -(MOST_DECAY * 16 // window) / 16
    bounds = (-5.0, strongest, -1.0, strongest, -0.0625, 0.0)
    call = FusedVerify(
        **variant.fields,
        pool=batch.pool,
        qlens=batch.qlens,
        slots=batch.slots,
        ids=tuple(range(count)),
        tail=batch.tail,
        capacity=count + draw(st.integers(0, 2)),
        accepted=tuple(draw(st.integers(1, window)) for _ in range(count)),
        lower_bound=max(draw(st.sampled_from(bounds)), strongest),
    )
    return draw(
        cases_of(
            call,
            variant=variant,
            domain=domain,
            themes=FUSED_THEMES,
            relations=relations,
            memory=lambda specs: memories(call, specs),
        )
    )


@st.composite
def memories(draw: st.DrawFn, call: FusedVerify, specs: dict[str, TensorSpec]) -> Arrangement:
    """Memory for one of the code paths, or whatever a fused projection and a slot's page leave.

    Static tensors always start on 16 bytes. Shrinks towards dense memory.
    """
    kind = draw(st.sampled_from(("dense", "special", "plain", "declined", "pages", "special", "plain")))
    chosen: dict[str, Layout] = {}
    pages: tuple[Page, ...] = ()
    if kind != "dense":
        gaps = draw(_gaps(call, specs, kind))
        for name, spec in specs.items():
            # Four bytes an element need a multiple of 4, so any of EVEN will do.
            chosen[name] = Layout(offset=draw(EVEN), gaps=gaps.get(name, ()))
            if spec.strided == "dense" and name not in DYNAMIC:
                chosen[name] = Layout(offset=draw(EVEN))
    if kind == "declined":
        for name in draw(st.lists(st.sampled_from(DYNAMIC), min_size=1, max_size=3, unique=True)):
            step = draw(st.sampled_from((1, 2) if specs[name].index else (1, 2, 4, 3)))
            chosen[name] = Layout(offset=chosen[name].offset + step, gaps=chosen[name].gaps)
    if kind == "pages":
        pages = draw(_pages(call))
        for page in pages:
            for name in page.members:
                chosen.pop(name)
    wall: Fence = draw(st.sampled_from(("none", "above", "below", "above")))
    paged = {name for page in pages for name in page.members}
    for name in WALLED if wall != "none" else ():
        if name not in paged and chosen.get(name, DENSE).gaps == ():
            chosen[name] = Layout(fence=wall)
    return {name: layout for name, layout in chosen.items() if layout != DENSE}, pages


@st.composite
def _gaps(
    draw: st.DrawFn, call: FusedVerify, specs: dict[str, TensorSpec], kind: str
) -> dict[str, tuple[int, ...]]:
    """Gaps that leave the warp-specialised path open, or close it in at least one way."""
    words = st.sampled_from((4, 8, 12) if call.taps == "bfloat16" else (1, 2, 3, 4, 12))
    closing = {
        "mixed_qkv": st.tuples(ODD, st.just(0)),
        "raw_gate": st.tuples(ODD, st.just(0)),
        "conv_state": st.one_of(
            st.tuples(ODD, st.just(0), st.just(0)), st.tuples(ANY_GAP, st.one_of(ODD, EVEN), st.just(0))
        ),
        "conv_weight": st.tuples(words, st.just(0)),
    }
    gaps: dict[str, tuple[int, ...]] = {
        "mixed_qkv": (draw(EVEN), 0),
        "raw_gate": (draw(EVEN), 0),
        "raw_beta": (draw(ANY_GAP), 0),
        "out": (draw(ANY_GAP), 0),
        "state": (draw(EVEN), 0, 0, 0),
        "correction": (draw(ANY_GAP), draw(ANY_GAP), draw(ANY_GAP), 0),
        "key_gate": (draw(ANY_GAP), draw(ANY_GAP), draw(ANY_GAP), 0),
        "conv_state": (draw(EVEN), 0, 0),
    }
    if kind == "plain" or (kind == "declined" and draw(st.booleans())):
        for name in draw(st.lists(st.sampled_from(sorted(closing)), min_size=1, max_size=2, unique=True)):
            gaps[name] = draw(closing[name])
    allowed = {name: _allowed(specs[name], found) for name, found in gaps.items()}
    return {name: found for name, found in allowed.items() if any(found)}


def _allowed(spec: TensorSpec, gaps: tuple[int, ...]) -> tuple[int, ...]:
    """The gaps that the tensor may have: a domain may leave it fewer than the contract does."""
    free = {"dense": 0, "leading": 1}.get(spec.strided, len(gaps))
    return (*gaps[:free], *(0,) * (len(gaps) - free))


@st.composite
def _pages(draw: st.DrawFn, call: FusedVerify) -> tuple[Page, ...]:
    """The page of a slot, and often one projection of everything but the output."""
    apart = st.sampled_from((0, 16, 64, 256))
    members = ("conv_state", "state") if draw(st.booleans()) else ("state", "conv_state")
    gaps = (draw(apart), draw(apart))
    slots = Page(
        members=members,
        gaps=gaps if any(gaps) else (),
        tail=draw(apart),
        offset=draw(st.sampled_from((0, 16))),
    )
    if not draw(st.booleans()):
        return (slots,)
    # Rows that end where raw_beta does leave the next ones off 16 bytes, unless they are filled up.
    fill = -2 * call.heads % 16
    odd = draw(st.sampled_from((0, 0, 0, 2, 8, 30)))
    projection = Page(
        members=("mixed_qkv", "raw_gate", "raw_beta"),
        gaps=(0, 0, odd) if odd else (),
        tail=draw(st.sampled_from((fill, (fill - odd) % 16, 0, 6))),
        offset=draw(st.sampled_from((0, 0, 0, 2, 16))),
    )
    return slots, projection
