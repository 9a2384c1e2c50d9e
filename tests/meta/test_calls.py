"""What a call refuses, and what relations and the minimiser make of one."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.codec import CaseError, canonical, case_from_json
from tests.meta.drawn import MORE, any_cases

replace = msgspec.structs.replace
ROWS: dict[str, Any] = {"pool": 8, "qlens": (4, 1, 2), "slots": (3, 1, 5), "ids": (0, 1, 2)}
HEADS: dict[str, Any] = {"heads": 1, "key_dim": 2, "value_dim": 3, "window": 4, "capacity": 3}
BASES: dict[str, AnyCall] = {
    "verify": Verify(**ROWS, **HEADS),
    "conv_update": ConvUpdate(**ROWS, channels=3, state_len=6, window=4, accepted=(2, 4, 1)),
    "conv_prefill": ConvPrefill(**ROWS, channels=3, state_len=3, most_tokens=9, initial=(True, False, True)),
    "packed_conv": PackedConv(
        **ROWS, channels=128, part_dim=64, state_len=3, most_tokens=9, initial=(True, False, True)
    ),
    "commit": Commit(**ROWS, **HEADS, channels=3, state_len=6, accepted=(4, 1, 0)),
    "fused_verify": FusedVerify(**ROWS, heads=1, window=4, capacity=3, accepted=(4, 1, 2)),
}
ALIGN: dict[str, Any] = {"block_size": 4, "computed": (2, 0, 0), "table": ((2, 4), (1, 0), (5, 0))}
EACH = pytest.mark.parametrize("op", BASES)
ANY = any_cases()
SHORT = "a stored row is shorter than the history"
PARTS = "part_dim must be a multiple of 64 that divides the channels"


@EACH
def test_the_base_is_in_the_contract(op: str) -> None:
    BASES[op].check()
    assert Case(call=BASES[op]).op == op


@EACH
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"qlens": (4, 1)}, r"qlens, slots, ids(, hostile)? and \w+ need one entry a row"),
        ({"slots": (3, 1, 5, 6)}, r"qlens, slots, ids(, hostile)? and \w+ need one entry a row"),
        ({"ids": (0, 1)}, r"qlens, slots, ids(, hostile)? and \w+ need one entry a row"),
        ({"hostile": (1,)}, r"qlens, slots, ids(, hostile)? and \w+ need one entry a row"),
        ({"ids": (0, 1, 0)}, "ids must be distinct: they name the rows' values"),
        ({"slots": (3, 1, 8)}, "a row names a slot outside the pool"),
        ({"slots": (3, 8, 1), "qlens": (4, 0, 2)}, "a row names a slot outside the pool"),
        ({"slots": (3, 1, 3)}, "two live rows share a slot"),
    ],
)
def test_batches_that_no_operation_takes(op: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        replace(BASES[op], **changes).check()
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Case(call=replace(BASES[op], **changes))


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("conv_update", {"accepted": (1, 2)}, "qlens, slots, ids, hostile and accepted need one entry a row"),
    ("conv_update", {"qlens": (5, 1, 2)}, "a row has more tokens than max_query_len"),
    ("conv_update", {"accepted": (), "state_len": 2}, SHORT),
    ("conv_update", {"accepted": (), "width": 6, "state_len": 4}, SHORT),
    ("conv_update", {"null_block": None, "slots": (3, -1, 5)}, "without a null block no slot may be below 0"),
    (
        "conv_update",
        {"form": "batch"},
        "without query_start_loc every row has window tokens, and there is no padding",
    ),
    (
        "conv_update",
        {"form": "batch", "qlens": (4, 4, 4), "tail": 1},
        "without query_start_loc every row has window tokens, and there is no padding",
    ),
    ("conv_update", {"form": "single", "qlens": (4, 4, 4)}, r"an x of \[N, C\] has one token a row"),
    ("conv_update", {"accepted": (0, 4, 1)}, "accepted counts lie between 1 and max_query_len"),
    ("conv_update", {"accepted": (2, 5, 1)}, "accepted counts lie between 1 and max_query_len"),
    ("conv_update", {"state_len": 5, "qlens": (1, 1, 2)}, "a history ends past its stored row"),
    ("conv_update", {"accepted": (1, 1, 1), "state_len": 5}, "a rolled row is longer than the stored one"),
    ("conv_update", {"null_block": None, "slots": (0, 0, 5)}, "two live rows share a slot"),
    ("fused_verify", {"accepted": (1, 2)}, "qlens, slots, ids, hostile and accepted need one entry a row"),
    ("fused_verify", {"accepted": ()}, "accepted needs one entry a row"),
    ("fused_verify", {"accepted": (0, 4, 1)}, "accepted counts lie between 1 and the window"),
    ("fused_verify", {"accepted": (2, 5, 1)}, "accepted counts lie between 1 and the window"),
    ("fused_verify", {"qlens": (5, 1, 2)}, "a row has more tokens than the window"),
    ("fused_verify", {"capacity": 2}, "capacity is below the number of rows"),
    ("fused_verify", {"lower_bound": -22.0625}, r"\|lower_bound\| times the window is above 88"),
    ("fused_verify", {"slots_dtype": "int64"}, "index vectors of a fused verify are int32"),
    ("conv_prefill", {"initial": (True,)}, "qlens, slots, ids, hostile and initial need one entry a row"),
    ("conv_prefill", {"initial": ()}, "initial needs one entry a row"),
    ("conv_prefill", {"width": 5, "state_len": 9}, "prefill takes widths 2 to 4"),
    ("conv_prefill", {"most_tokens": 3}, "a row has more tokens than most_tokens"),
    ("conv_prefill", {"state_len": 2}, SHORT),
    ("packed_conv", {"state_len": 2}, SHORT),
    ("packed_conv", {"width": 3}, "packed prefill takes width 4"),
    ("packed_conv", {"conv": "bfloat16"}, "packed prefill takes float32 taps and state"),
    ("packed_conv", {"taps": "bfloat16"}, "packed prefill takes float32 taps and state"),
    ("packed_conv", {"channels": 96}, PARTS),
    ("packed_conv", {"part_dim": 32}, PARTS),
    ("commit", {"requests": (0, 1)}, "qlens, slots, ids, hostile and requests need one entry a row"),
    ("commit", {"qlens": (5, 1, 2)}, "a row has more tokens than the window"),
    ("commit", {"tail": 1}, "a commit has no tokens, so no padding of them"),
    ("commit", {"capacity": 2}, "more rows than max_num_reqs"),
    ("commit", {"state_len": 3}, "a conv row is shorter than the window"),
    ("commit", {"requests": (0, 1, 1)}, "two rows name one request"),
    ("commit", {"requests": (0, 3, 1)}, "a row names a request without an accepted count"),
    ("commit", {"accepted": (4, 1)}, "a row names a request without an accepted count"),
    ("commit", {"computed": (0, 0, 0)}, "computed tokens and a block table need a block size"),
    ("commit", {"table": ((1,),) * 3}, "computed tokens and a block table need a block size"),
    ("commit", {**ALIGN, "block_size": 3}, "a block is smaller than the window"),
    ("commit", {**ALIGN, "computed": (0, 0)}, "computed tokens and block table need one entry a request"),
    ("commit", {**ALIGN, "table": ((1, 2),)}, "computed tokens and block table need one entry a request"),
    (
        "commit",
        {**ALIGN, "table": ((2, 4), (1,), (5, 0))},
        "a block table has rows of one width, at least 1",
    ),
    ("commit", {**ALIGN, "table": ((), (), ())}, "a block table has rows of one width, at least 1"),
    (
        "commit",
        {**ALIGN, "table": ((2, 8), (1, 0), (5, 0))},
        "the block table names a slot outside the pool",
    ),
    (
        "commit",
        {**ALIGN, "computed": (6, 0, 0), "table": ((2,), (1,), (5,))},
        "the block table is too narrow for the block that fills up",
    ),
    (
        "commit",
        {**ALIGN, "slots": (0, 1, 5), "computed": (6, 0, 0), "table": ((2,), (1,), (5,))},
        "the block table is too narrow for the block that fills up",
    ),
    (
        "commit",
        {**ALIGN, "table": ((2, 2), (1, 0), (5, 0))},
        "boundary and final slot may coincide only at the boundary itself",
    ),
    ("commit", {**ALIGN, "table": ((2, 1), (1, 0), (5, 0))}, "a slot that one row writes is another row's"),
    ("commit", {**ALIGN, "table": ((1, 4), (1, 0), (5, 0))}, "a slot that one row writes is another row's"),
    ("commit", {**ALIGN, "table": ((2, 4), (4, 0), (5, 0))}, "a slot that one row writes is another row's"),
    ("commit", {**ALIGN, "table": ((2, 4), (2, 0), (5, 0))}, "a slot that one row writes is another row's"),
]


@pytest.mark.parametrize(("op", "changes", "sentence"), REFUSALS)
def test_calls_outside_the_contract(op: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        replace(BASES[op], **changes).check()


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("conv_update", {"slots": (0, 0, -1)}),
        ("conv_update", {"slots": (3, 3, 5), "qlens": (4, 0, 2)}),
        ("conv_update", {"null_block": None, "slots": (0, 1, 5)}),
        ("conv_update", {"form": "batch", "qlens": (4, 4, 4)}),
        ("conv_update", {"accepted": (), "state_len": 3}),
        ("conv_prefill", {"initial": (False,) * 3, "tail": 5}),
        ("packed_conv", {"channels": 192, "part_dim": 192}),
        ("fused_verify", {"slots": (0, 3, -1), "lower_bound": -22.0}),
        ("fused_verify", {"slots": (3, 3, 5), "qlens": (4, 0, 2), "tail": 40}),
        ("commit", ALIGN),
        ("commit", {**ALIGN, "table": ((3, 4), (1, 0), (5, 0))}),
        ("commit", {**ALIGN, "table": ((2, 3), (1, 0), (5, 0))}),
        ("commit", {**ALIGN, "table": ((2, 0), (2, 0), (5, 0))}),  # without a final slot row 0 writes nothing
        ("commit", {**ALIGN, "table": ((5, 4), (1, 0), (5, 0))}),  # row 2 commits nothing: slot 5 is free
        ("commit", {"requests": (2, 0, 1), "accepted": (1, 1, 1, 9)}),
        ("commit", {"state_len": 4}),
    ],
)
def test_calls_inside_the_contract(op: str, changes: dict[str, Any]) -> None:
    replace(BASES[op], **changes).check()


@pytest.mark.parametrize(
    ("op", "field", "value"),
    [
        ("conv_update", "width", 7),
        ("conv_update", "width", 1),
        ("conv_update", "null_block", 1),
        ("conv_update", "form", "other"),
        ("conv_update", "conv", "float16"),
        ("conv_prefill", "most_tokens", 0),
        ("packed_conv", "part_dim", 0),
        ("fused_verify", "window", 9),
        ("fused_verify", "heads", 0),
        ("fused_verify", "taps", "float16"),
        ("fused_verify", "lower_bound", None),
        ("fused_verify", "lower_bound", -88.5),
        ("commit", "layers", 0),
        ("commit", "records", "both"),
        ("commit", "computed", [-1, 0, 0]),
        ("commit", "block_size", -4),
        ("commit", "table", [[-2], [0], [0]]),
        ("commit", "lower_bound", 1.0),
    ],
)
def test_files_that_ask_for_more(op: str, field: str, value: object) -> None:
    call = replace(BASES[op], **ALIGN) if op == "commit" else BASES[op]
    tree = json.loads(canonical(Case(call=call)))
    tree["call"][field] = value
    with pytest.raises(CaseError, match=rf"^not a valid case: .*\$\.call\.{field}"):
        case_from_json(json.dumps(tree))


@MORE
@given(ANY, st.data())
def test_only_keeps_what_is_a_row_s(case: Case, data: st.DataObject) -> None:
    call = case.call
    order = data.draw(st.permutations(range(call.rows)))[data.draw(st.integers(0, call.rows)) :]
    fewer = call.only(order)
    fewer.check()
    assert fewer.rows == len(order)
    assert (fewer.pool, type(fewer)) == (call.pool, type(call))
    for place, row in enumerate(order):
        for name in ("qlens", "slots", "ids", "hostile", "accepted", "initial"):
            if name in call.per_row and getattr(call, name):
                assert getattr(fewer, name)[place] == getattr(call, name)[row]
        if isinstance(call, Commit):
            assert isinstance(fewer, Commit)
            assert fewer.request(place) == call.request(row)
            assert fewer.plan(place) == call.plan(row)
            assert fewer.capacity - fewer.rows == call.capacity - call.rows
    if isinstance(call, Verify) and call.records == "row":
        assert isinstance(fewer, Verify)
        assert fewer.capacity - fewer.rows == call.capacity - call.rows
    if isinstance(call, FusedVerify):
        assert isinstance(fewer, FusedVerify)
        assert fewer.capacity - fewer.rows == call.capacity - call.rows
    if not isinstance(call, Commit):
        assert fewer.tail <= call.tail
        assert fewer.tail == call.tail or isinstance(call, Verify)


@MORE
@given(ANY, st.data())
def test_renamed_names_every_slot(case: Case, data: st.DataObject) -> None:
    call = case.call
    names = (0, *data.draw(st.permutations(range(1, call.pool))))
    renamed = call.renamed(names)
    renamed.check()
    table = {-1: -1, **dict(enumerate(names))}
    assert renamed.slots == tuple(table[s] for s in call.slots)
    back = [0] * call.pool
    for old, new in enumerate(names):
        back[new] = old
    assert renamed.renamed(tuple(back)) == call
    if isinstance(call, Commit):
        assert isinstance(renamed, Commit)
        assert renamed.table == tuple(tuple(table[s] for s in columns) for columns in call.table)
        for row in range(call.rows):
            a, b = call.plan(row), renamed.plan(row)
            assert (b.n, b.final, b.boundary, b.m) == (a.n, table[a.final], table[a.boundary], a.m)


@MORE
@given(ANY, st.integers(0, 9))
def test_cut_shortens_every_row(case: Case, tokens: int) -> None:
    if isinstance(case.call, Commit):
        with pytest.raises(ValueError, match=r"^a commit has no prefix invariance$"):
            case.call.cut(tokens)
        assert "prefix" not in case.call.relations
        return
    cut = case.call.cut(tokens)
    assert cut.qlens == tuple(min(n, tokens) for n in case.call.qlens)
    assert replace(cut, qlens=case.call.qlens) == case.call


@MORE
@given(ANY)
def test_compact_is_the_same_call_in_less(case: Case) -> None:
    call, compact = case.call, case.call.compact()
    compact.check()
    assert (compact.qlens, compact.ids) == (call.qlens, call.ids)
    assert compact.pool <= call.pool
    assert compact.compact() == compact
    assert [compact.null(i) for i in range(call.rows)] == [call.null(i) for i in range(call.rows)]
    pairs = set(zip(call.slots, compact.slots, strict=True))
    if isinstance(call, Commit):
        assert isinstance(compact, Commit)
        for row in range(call.rows):
            a, b = call.plan(row), compact.plan(row)
            assert (a.n, a.m, a.writes, a.writes_boundary) == (b.n, b.m, b.writes, b.writes_boundary)
            pairs |= {(a.final, b.final), (a.boundary, b.boundary)}
    # One new name for every old one, and the reverse.
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)


def test_compact_keeps_boundaries_and_drops_idle_columns() -> None:
    call = replace(BASES["commit"], **ALIGN, slots=(6, 1, 5)).compact()
    assert isinstance(call, Commit)
    # Slots 6, 1, 5 in order of the rows, then row 0's final slot 4 and its boundary 2.
    assert (call.slots, call.table, call.pool) == ((1, 2, 3), ((5, 4), (2, 0), (3, 0)), 6)


@MORE
@given(ANY, st.data())
def test_with_qlen_changes_one_row(case: Case, data: st.DataObject) -> None:
    call = case.call
    if call.rows:
        row = data.draw(st.integers(0, call.rows - 1))
        qlen = data.draw(st.integers(0, call.qlens[row]))
        changed = call.with_qlen(row, qlen)
        assert changed.qlens == (*call.qlens[:row], qlen, *call.qlens[row + 1 :])
        assert changed.tail <= call.tail
        assert replace(changed, qlens=call.qlens, tail=call.tail) == call
