"""Strategies over cases of the three convolutions."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from impl.contract import Domain
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.case import Case
from tests.strategies.assembly import cases_of
from tests.strategies.rows import Rows, rows
from tests.strategies.values import CONV_THEMES
from tests.strategies.variants import ACTIVATIONS, Choose, Variant, index_dtypes, skewed_and_heads, variants

ANY = Domain()
CHANNELS = (8, 1, 3, 16, 40, 64, 96, 256, 257, 300)
"""One and several channel blocks, masked tails."""
TOKENS = ("x", "weight", "out")
LENGTHS = st.one_of(
    st.integers(0, 9),
    st.sampled_from((0, 3, 7, 8, 9, 15, 16, 17, 31, 33)),
    st.sampled_from((63, 0, 64, 65, 66, 67, 127, 128, 129, 150)),
)
"""Sequence lengths around W - 1 and around the blocks of kernels."""
LONGEST = 150
FEW = st.sampled_from((0, 1, 2, 3, 1, 0))


def _family(choose: Choose, domain: Domain, widths: Sequence[int], dtypes: Sequence[str]) -> dict[str, Any]:
    return {
        "channels": choose("channels", CHANNELS),
        "width": choose("width", widths),
        "activation": choose("activation", domain.activations or ACTIVATIONS),
        "conv": choose("conv", dtypes),
        "taps": choose("taps", dtypes),
        "bias": choose("bias", (None, "float32", *dtypes)),
        "silu": choose("silu", (True, False)),
        **index_dtypes(choose, domain, "starts_dtype", "slots_dtype"),
    }


def make_update(choose: Choose, domain: Domain, free: bool) -> Variant:
    """A variant of causal_conv1d_update."""
    form = choose("form", ("varlen", "varlen", "varlen", "batch", "single"))
    width = choose("width", (4, 4, 4, 2, 3, 5, 6))
    counted = choose("counted", (True, True, False))
    window = 1 if form == "single" else choose("window", domain.windows or (4, 1, 2, 3, 5, 6, 7, 8))
    needed = width - 2 + window if counted else width - 1
    fields = {
        **_family(choose, domain, (width,), ("float32", "bfloat16")),
        **index_dtypes(choose, domain, "accepted_dtype"),
        "form": form,
        "window": window,
        "counted": counted,
        "state_len": needed + choose("spare", (0, 0, 1, 3)),
        "null_block": choose("null_block", (0, 0, 0, None)),
        "own_out": choose("own_out", (True, True, False)),
    }
    strided = (*TOKENS, "conv_state", "conv_state_indices")
    return Variant(fields, **({} if free else skewed_and_heads(choose, strided)))


def make_prefill(choose: Choose, domain: Domain, free: bool) -> Variant:
    """A variant of causal_conv1d_fn."""
    width = choose("width", (4, 4, 4, 2, 3))
    fields = {
        **_family(choose, domain, (width,), ("float32", "bfloat16")),
        "state_len": width - 1 + choose("spare", (0, 0, 1, 4)),
    }
    strided = (*TOKENS[:2], "conv_states", "cache_indices")
    return Variant(fields, **({} if free else skewed_and_heads(choose, strided)))


def make_packed(choose: Choose, domain: Domain, free: bool) -> Variant:
    """A variant of packed_causal_conv1d_fn."""
    part_dim = choose("part_dim", (64, 64, 128, 192))
    fields = {
        **_family(choose, domain, (4,), ("float32",)),
        "part_dim": part_dim,
        "channels": part_dim * choose("parts", (1, 2, 3)),
        "state_len": 3 + choose("spare", (0, 0, 1, 4)),
    }
    strided = (*TOKENS[:2], "conv_states", "cache_indices")
    return Variant(fields, **({} if free else skewed_and_heads(choose, strided)))


@st.composite
def update_cases(
    draw: st.DrawFn,
    *,
    domain: Domain = ANY,
    palette: Sequence[Variant] | None = None,
    relations: Sequence[str] | None = None,
) -> Case:
    """Cases of causal_conv1d_update: every form of x, with and without accepted counts.

    0 to 6 rows of up to 8 tokens, 1 to 300 channels, widths 2 to 6, rows with 0 to 3 spare
    columns, slots null at 0, at or below 0, or not at all. Accepted counts, lengths and slots
    are independent. Shrinks towards one row of one token.
    """
    variant = draw(variants(make_update, domain, palette))
    fields = dict(variant.fields)
    window, counted, form = fields["window"], fields.pop("counted"), fields["form"]
    pads = domain.pad_slots and fields["null_block"] is not None
    every = None if form == "varlen" else st.just(window)
    batch = draw(rows(window=window, lengths=every, pads=pads, padding=form == "varlen"))
    slots = batch.slots if fields["null_block"] is not None else _without_null(batch)
    count = len(batch.qlens)
    accepted = tuple(draw(st.integers(1, window)) for _ in range(count)) if counted else ()
    call = ConvUpdate(
        **fields,
        pool=max((batch.pool, *(slot + 1 for slot in slots))),
        qlens=batch.qlens,
        slots=slots,
        ids=tuple(range(count)),
        tail=batch.tail,
        accepted=accepted,
    )
    return draw(_drawn(call, variant, domain, relations))


def _without_null(batch: Rows) -> tuple[int, ...]:
    """Slots where 0 is one like any other: the first null row has it, later ones have new slots."""
    taken, slots = max(batch.slots, default=0), []
    for slot in batch.slots:
        if slot <= 0:
            slot = 0 if 0 not in slots else taken + 1
            taken = max(taken, slot)
        slots.append(slot)
    return tuple(slots)


@st.composite
def _sequences(draw: st.DrawFn, pads: bool) -> tuple[Rows, int]:
    """Batches of sequences: a few of up to 150 tokens, or now and then many that are short or empty."""
    if draw(st.sampled_from((False,) * 5 + (True,))):
        count = draw(st.sampled_from((33, 65, 32, 97)))
        qlens = tuple(draw(st.lists(FEW, min_size=count, max_size=count)))
        live = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        slots = tuple(i + 1 if on else 0 for i, on in enumerate(live))
        return Rows(qlens, slots, count + 1, draw(st.sampled_from((0, 0, 2)))), 3
    lengths = draw(st.sampled_from((LENGTHS,) * 31 + (st.just(0),)))
    batch = draw(rows(window=LONGEST, max_rows=5, lengths=lengths, pads=pads))
    return batch, LONGEST


@st.composite
def prefill_cases(
    draw: st.DrawFn,
    *,
    domain: Domain = ANY,
    palette: Sequence[Variant] | None = None,
    relations: Sequence[str] | None = None,
) -> Case:
    """Cases of causal_conv1d_fn: sequences of 0 to 150 tokens, or 32 to 97 short ones, continued or new.

    1 to 300 channels, widths 2 to 4. Shrinks towards one row of one token that is new.
    """
    variant = draw(variants(make_prefill, domain, palette))
    call = ConvPrefill(**draw(_prefill_fields(variant, domain)))
    return draw(_drawn(call, variant, domain, relations))


@st.composite
def packed_cases(
    draw: st.DrawFn,
    *,
    domain: Domain = ANY,
    palette: Sequence[Variant] | None = None,
    relations: Sequence[str] | None = None,
) -> Case:
    """Cases of packed_causal_conv1d_fn: 1 to 3 planes of 64 to 192 channels; sequences as in prefill."""
    variant = draw(variants(make_packed, domain, palette))
    call = PackedConv(**draw(_prefill_fields(variant, domain)))
    return draw(_drawn(call, variant, domain, relations))


@st.composite
def _prefill_fields(draw: st.DrawFn, variant: Variant, domain: Domain) -> dict[str, Any]:
    batch, longest = draw(_sequences(domain.pad_slots))
    count = len(batch.qlens)
    return {
        **variant.fields,
        "pool": batch.pool,
        "qlens": batch.qlens,
        "slots": batch.slots,
        "ids": tuple(range(count)),
        "tail": batch.tail,
        "most_tokens": longest,
        "initial": tuple(draw(st.booleans()) for _ in range(count)),
    }


def _drawn(
    call: ConvUpdate | ConvPrefill, variant: Variant, domain: Domain, relations: Sequence[str] | None
) -> st.SearchStrategy[Case]:
    return cases_of(call, variant=variant, domain=domain, themes=CONV_THEMES, relations=relations, fixed=True)
