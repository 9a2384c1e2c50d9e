"""The strategies reach what they are there for, shrink to what one wants to read, and keep their bounds."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from ci.minimize import minimize
from impl.contract import Domain, Implementation, Records, UnavailableError
from oracle.buckets import EXAMPLES
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvUpdate
from oracle.calls.fused_verify import FusedVerify
from oracle.case import Case
from oracle.judge import Problem, Verdict
from oracle.layout import DENSE, TensorSpec
from oracle.values import REGIMES
from tests.meta.drawn import OPERATIONS, sample
from tests.strategies.cases import CASES, MAKERS, cases
from tests.strategies.values import COMMIT_THEMES, CONV_THEMES, FUSED_THEMES, regimes, verify_themes
from tests.strategies.variants import palette

BIAS = TensorSpec(name="bias", axes=("channel",), shape=(64,), dtype="float32", role="parameter")
EACH = pytest.mark.parametrize("op", OPERATIONS)
ROUNDS = 100
"""Of ten examples each, at most: the rarest buckets are reached by one case in a hundred."""


THEMED = {"verify": verify_themes(bounded=True), "commit": COMMIT_THEMES, "fused_verify": FUSED_THEMES}


@EACH
def test_every_regime_is_reached(op: str) -> None:
    """Also the rarest, of a table with many regimes among many; the plain one is the absent one."""
    specs = EXAMPLES[op].tensors() | ({"bias": BIAS} if "conv" in op else {})
    tables = {spec.table for spec in specs.values() if spec.table in REGIMES}
    left = {(table, name) for table in tables for name in REGIMES[table]}
    for drawn in sample(regimes(specs, themes=THEMED.get(op, CONV_THEMES)), 5 * ROUNDS):
        assert drawn.keys() <= tables
        assert not any(name == next(iter(REGIMES[table])) for table, name in drawn.items())
        left -= set(drawn.items()) | {(table, next(iter(REGIMES[table]))) for table in tables - drawn.keys()}
        if not left:
            break
    assert left == set()


@pytest.mark.parametrize("op", ["conv_prefill", "packed_conv"])
def test_lengths_around_a_block(op: str) -> None:
    """Sequences of 63 to 67 and 127 to 129 tokens, and batches past 32 rows."""
    lengths = {*range(1, 10), 15, 16, 17, 31, 33, *range(63, 68), 127, 128, 129}
    counts = {0, 1, 2, 3, 4, 5, 32, 33, 65}
    for case in sample(CASES[op](), ROUNDS):
        lengths -= {n for i, n in enumerate(case.call.qlens) if case.call.live(i)}
        counts.discard(case.call.rows)
        if not lengths and not counts:
            break
    assert (lengths, counts) == (set(), set())


def smallest(op: str, wanted: Callable[[Case], bool] = lambda _: True, **options: Any) -> Case:
    """What Hypothesis shrinks the first case that is wanted to."""
    limits = settings(
        max_examples=2000,
        database=None,
        derandomize=True,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    return find(CASES[op](**options), wanted, settings=limits)


@EACH
def test_the_smallest_case_is_plain(op: str) -> None:
    """One row of one token at most, dense memory, plain values, no relation."""
    case = smallest(op, lambda case: case.call.rows > 0)
    assert (case.layouts, case.pages, case.regimes, case.relation) == ({}, (), {}, None)
    assert (case.seed, case.poison) == (0, "nan")
    assert case.call.rows == 1
    assert sum(case.call.qlens) <= (4 if op == "conv_update" else 1)
    assert case.call.slots == (1,)


def reduced(op: str, wanted: Callable[[Case], bool]) -> Case:
    """What is left of a failure: Hypothesis shrinks it, then the minimiser does."""
    failed = Verdict(problems=(Problem("value", "out", "conv"),))
    found = smallest(op, lambda case: _varlen(case) and wanted(case))
    return minimize(found, failed, lambda case: failed if wanted(case) else Verdict())[0]


def _varlen(case: Case) -> bool:
    """Without query_start_loc all rows have the window's tokens (see ``test_smaller``)."""
    return not isinstance(case.call, ConvUpdate) or case.call.form == "varlen"


@EACH
def test_the_smallest_live_case_has_one_token(op: str) -> None:
    """A fault that needs no more than a live row comes out as one row of one token in slot 1."""
    case = reduced(op, lambda case: any(case.call.live(i) for i in range(case.call.rows)))
    assert (case.call.qlens, case.call.slots, case.call.tail) == ((1,), (1,), 0)
    assert (case.layouts, case.pages, case.regimes, case.relation, case.seed) == ({}, (), {}, None, 0)


@EACH
def test_the_smallest_of_two_rows(op: str) -> None:
    """A fault that needs two live rows has two of one token."""
    case = reduced(op, lambda case: sum(case.call.live(i) for i in range(case.call.rows)) == 2)
    assert (case.call.qlens, case.call.slots, case.call.pool) == ((1, 1), (1, 2), 3)


def test_a_boundary_is_reduced_to_its_arithmetic() -> None:
    """A fault at a block's end: one row of one token, in one layer, whose commit ends there."""

    def ends(case: Case) -> bool:
        call = case.call
        assert isinstance(call, Commit)
        return any(call.plan(row).writes_boundary for row in range(call.rows))

    call = reduced("commit", ends).call
    assert isinstance(call, Commit)
    assert (call.qlens, call.accepted, call.layers, call.requests) == ((1,), (1,), 1, ())
    # Block size and computed tokens shrink each on its own: they end where neither can alone.
    assert (call.window, call.state_len, call.computed) == (1, 1, (call.block_size - 1,))
    assert len(call.table) == 1


@pytest.mark.parametrize("op", OPERATIONS)
def test_cases_of_a_palette_stay_in_it(op: str) -> None:
    """A compiled kernel meets the palette's constants and strides, and no others."""
    chosen = palette(MAKERS[op], 5, 4, Domain())
    seen = set()
    for case in sample(cases(op, Domain(), seed=5, variants=4), 10):
        call = case.call
        fits = [i for i, variant in enumerate(chosen) if _made_of(case, variant.fields)]
        assert fits
        seen |= set(fits)
        heads = getattr(call, "heads", None)
        assert heads is None or any(heads in chosen[i].heads for i in fits)
        if op == "fused_verify":  # its kernels take strides as arguments
            continue
        # Pages keep every divisibility; a variant of odd strides or other orders has none.
        fits = [i for i in fits if not case.pages or not (chosen[i].skewed or chosen[i].ordered)]
        assert any(_skew(case, chosen[i].skewed or ()) for i in fits)
        assert any(layout.order for layout in case.layouts.values()) <= any(chosen[i].ordered for i in fits)
    assert seen == set(range(4))


def _made_of(case: Case, fields: dict[str, Any]) -> bool:
    """Whether the call has the variant's fields; some of them are choices rather than fields."""
    call = case.call
    free = {"counted", "aligned", "mapped"}
    for name, value in fields.items():
        if name in free:
            continue
        if getattr(call, name) != value:
            return False
    return (
        "counted" not in fields or call.rows == 0 or bool(getattr(call, "accepted", ())) == fields["counted"]
    )


def _skew(case: Case, skewed: tuple[str, ...]) -> bool:
    """Whether the tensors with an odd start are those of the variant."""
    odd = {name.partition(".")[0] for name, layout in case.layouts.items() if layout.offset % 16}
    return odd <= set(skewed)


@pytest.mark.parametrize("op", ["conv_update", "conv_prefill", "packed_conv"])
def test_a_variant_of_a_convolution_has_one_arrangement(op: str) -> None:
    """Its kernels take strides as constants: cases of one variant differ in nothing that a stride shows."""
    found: dict[object, set[str]] = {}
    for case in sample(cases(op, Domain(), seed=2, variants=1), 4):
        shape = (tuple(sorted(case.call.tensors())), case.call.rows == 1)
        found.setdefault(shape, set()).add(str({n: x.gaps for n, x in case.layouts.items()}))
    assert all(len(arrangements) == 1 for arrangements in found.values())


def nothing(*_: object, **__: object) -> None:
    raise AssertionError("only asked for its signature")


def by_row(q: object, records: Records) -> None:
    """A verify of the ``row`` layout, by its signature."""


def by_slot(q: object, correction_cache: object, kg_cache: object) -> None:
    """A verify of the ``slot`` layout, by its signature."""


DOMAINS = {
    "any": Domain(),
    "row": Domain(records=("row",)),
    "slot": Domain(records=("slot",)),
    "no-pads": Domain(pad_slots=False),
    "contiguous": Domain(
        dense=("query_start_loc", "num_accepted_tokens", "has_initial_state", "bias", "state_indices", "x"),
        pad_slots=False,
    ),
    "narrow": Domain(
        head_dims=((128, 128),),
        windows=(1, 2),
        activations=("bfloat16",),
        states=("bfloat16",),
        index_dtypes=("int32",),
    ),
    "cute": Domain(
        records=("row",),
        head_dims=((128, 128),),
        heads=(1, 2, 3, 4),
        windows=(1, 2, 3, 4, 5, 6, 7, 8),
        activations=("bfloat16",),
        states=("bfloat16",),
        index_dtypes=("int32",),
        dense_inside=("state", "correction", "key_gate"),
        aligned=("state", "correction", "key_gate"),
        bounded_only=True,
    ),
}


@EACH
@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.parametrize("variants", [0, 3])
def test_nothing_outside_a_domain_is_drawn(op: str, name: str, variants: int) -> None:
    domain = DOMAINS[name]
    verify = tuple({"row": by_row, "slot": by_slot}[layout] for layout in domain.records)
    operations: dict[str, Any] = {other: verify if other == "verify" else nothing for other in OPERATIONS}
    taking = Implementation(name="restricted", operations=operations, domain=domain)
    restricted = 0
    for case in sample(cases(op, domain, seed=1, variants=variants), 4):
        assert taking.takes(case) == ""
        for tensor in domain.dense:
            assert not any(case.layouts.get(tensor, DENSE).gaps)
        assert domain.pad_slots or -1 not in case.call.slots
        if domain.index_dtypes:
            specs = case.call.tensors().values()
            assert {s.dtype for s in specs if s.index} <= {*domain.index_dtypes, "bool"}
        restricted += bool(case.call.rows)
    assert restricted > 10


def test_a_commit_of_compiled_kernels() -> None:
    """Any number of heads that there is a kernel for, several layers, shared pages; strides but no others."""
    heads, layers, found = set(), set(), set()
    for case in sample(CASES["commit"](domain=DOMAINS["cute"]), 10):
        call = case.call
        assert isinstance(call, Commit)
        heads.add(call.heads)
        layers.add(call.layers)
        found |= {"page"} if case.pages else set()
        for name, layout in case.layouts.items():
            found |= {name.partition(".")[0]} if any(layout.gaps) else set()
    assert (heads, layers) == ({1, 2, 3, 4}, {1, 2, 3})
    assert {"page", "state", "correction", "key_gate", "conv_state"} <= found


@pytest.mark.parametrize("variants", [1, 4])
def test_a_palette_bounds_what_is_compiled(variants: int) -> None:
    """Kernels of a fused verify differ by heads, window, storage, taps and path: at most two per variant."""
    found = set()
    for case in sample(cases("fused_verify", Domain(), seed=3, variants=variants), 10):
        call = case.call
        assert isinstance(call, FusedVerify)
        found.add((call.heads, call.window, call.dim_first, call.taps))
    assert 1 <= len(found) <= variants


@pytest.mark.parametrize("name", ["no-pads", "row", "cute"])
def test_a_domain_restricts(name: str) -> None:
    """The check above can fail: a case drawn without the restriction is not taken."""
    taking = Implementation(name="r", operations={"verify": by_row, "commit": nothing}, domain=DOMAINS[name])
    op = "verify" if name == "no-pads" else "commit"
    assert any(taking.takes(case) for case in sample(CASES[op](), 10))


def test_options_of_a_strategy_are_its_own() -> None:
    assert isinstance(cases("commit", Domain(), relations=("rename",)), st.SearchStrategy)
    for case in sample(cases("commit", Domain(), relations=("rename",)), 2):
        assert type(case.relation).__name__ == "Rename"
    for case in sample(cases("commit", Domain(), relations=()), 2):
        assert case.relation is None


def test_a_callable_without_records_is_refused_every_time() -> None:
    """Also beside one that has them: what was read before the refusal is no answer the next time."""
    subject = Implementation("subject", {"verify": (lambda records: None, lambda nothing: None)})
    for _ in range(2):
        with pytest.raises(UnavailableError, match="has neither a parameter 'records' nor"):
            subject.variants("verify")
