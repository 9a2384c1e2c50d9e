"""Properties of the short convolutions: against the oracle, and the bitwise invariants (1.5; 1.8, 3 to 6).

Every example is also checked byte by byte: what the call may not write keeps its bytes.
"""

from typing import Any

import msgspec
import pytest

from oracle.buckets import EXAMPLES
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.case import Case, Unpacked
from oracle.values import build
from tests.subject import Subject

OPERATIONS = ("conv_update", "conv_prefill", "packed_conv")
ROWS: dict[str, Any] = {"pool": 6, "qlens": (4, 1, 0), "slots": (3, 1, 5), "ids": (0, 1, 2)}
UPDATE = ConvUpdate(**ROWS, channels=8, state_len=6, window=4, accepted=(2, 4, 1))
PREFILL = ConvPrefill(**ROWS, channels=8, state_len=3, most_tokens=200, initial=(True, False, True))
PACKED = PackedConv(
    **ROWS, channels=64, part_dim=64, state_len=3, most_tokens=200, initial=(True, False, True)
)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_differential(subject: Subject, operation: str) -> None:
    """Every element within its bound, every other byte unchanged."""
    subject.search(subject.cases(operation))


@pytest.mark.parametrize(
    ("operation", "relation"),
    [(name, relation) for name in OPERATIONS for relation in EXAMPLES[name].relations],
)
def test_invariant(subject: Subject, operation: str, relation: str) -> None:
    """A case and its image under the relation agree bit for bit."""
    if relation == "graph" and not subject.domain(operation).graphs:
        pytest.skip("needs a call that a graph can hold; found one that waits for the host")
    strategy = subject.cases(operation, relation)
    # An interpreter runs such a case twice in seconds; the differential test has them all.
    subject.search(strategy.filter(light) if subject.device == "cpu" else strategy)


def light(case: Case) -> bool:
    """Whether an interpreter needs less than a tenth of a second: 8 ms a row, 1 ms a token, by blocks."""
    call = case.call
    assert isinstance(call, ConvUpdate | ConvPrefill)
    return sum(1 + n // 8 for n in call.qlens) * (1 + call.channels // 128) <= 10


def required(subject: Subject, call: ConvUpdate | ConvPrefill, **rest: Any) -> Case:
    """Judge a call; slots of -1 become 0 where the implementation knows only that as null."""
    case = Case(call=call, **rest)
    if not subject.domain(case.op).pad_slots:
        slots = tuple(max(slot, 0) for slot in call.slots)
        case = msgspec.structs.replace(case, call=msgspec.structs.replace(call, slots=slots))
    subject.require(case)
    return case


def rows(*qlens: int, slots: tuple[int, ...] = ()) -> dict[str, Any]:
    """The fields of a batch of such lengths, row i in slot i + 1 unless said otherwise."""
    n = len(qlens)
    slots = slots or tuple(range(1, n + 1))
    return {"qlens": qlens, "slots": slots, "ids": tuple(range(n)), "pool": max((1, *slots)) + 2}


FEW: dict[str, Any] = {"qlens": (), "slots": (), "ids": ()}
BF16: dict[str, Any] = {"activation": "bfloat16", "conv": "bfloat16", "taps": "bfloat16"}
BATCH: dict[str, Any] = {**rows(4, 4, 4, slots=(4, 0, 2)), "form": "batch"}
SINGLE: dict[str, Any] = {**rows(1, 1, 1, slots=(4, 0, 2)), "form": "single", "window": 1, "state_len": 3}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({**FEW, "accepted": ()}, id="no-rows"),
        pytest.param({**FEW, "accepted": (), "tail": 3}, id="no-rows-but-padding"),
        pytest.param({**FEW, "accepted": (), "form": "batch"}, id="no-rows-batch"),
        pytest.param({**FEW, **SINGLE, **FEW, "accepted": ()}, id="no-rows-single"),
        pytest.param({"slots": (0, -1, 0)}, id="all-null"),
        pytest.param({"slots": (0, -1, 0), **BF16, "own_out": False}, id="all-null-in-place"),
        pytest.param({"slots": (0, -1, 0), **BF16, "conv": "float32", "own_out": False}, id="all-null-cast"),
        pytest.param({"qlens": (0, 0, 0)}, id="all-empty"),
        pytest.param({"qlens": (0, 0, 0), "tail": 3}, id="all-empty-but-padding"),
        pytest.param({"slots": (5, -1, 5)}, id="empty-row-repeats-a-live-slot"),
        pytest.param({"channels": 1}, id="one-channel"),
        pytest.param({"channels": 257}, id="one-past-a-block"),
        pytest.param({"channels": 257, **BF16, "own_out": False}, id="one-past-a-block-in-place"),
        pytest.param({"window": 8, "state_len": 10, "qlens": (8, 1, 7)}, id="window-eight"),
        pytest.param({"window": 1, **rows(1, 0, 1), "state_len": 3, "accepted": (1, 1, 1)}, id="window-one"),
        pytest.param({"state_len": 11}, id="spare-columns"),
        pytest.param(BATCH, id="batch"),
        pytest.param({**BATCH, "accepted": ()}, id="batch-no-counts"),
        pytest.param({**BATCH, **BF16, "own_out": False}, id="batch-in-place"),
        pytest.param(
            {**BATCH, "activation": "float16", "own_out": False, "conv": "bfloat16"}, id="batch-cast"
        ),
        pytest.param({**SINGLE, "accepted": (1, 1, 1)}, id="single"),
        pytest.param({**SINGLE, "accepted": ()}, id="single-no-counts"),
        pytest.param({**SINGLE, "accepted": (), **BF16, "own_out": False}, id="single-in-place"),
        pytest.param({"null_block": None, "slots": (0, 1, 5)}, id="slot-0-is-live"),
        pytest.param({**SINGLE, "accepted": (), "null_block": None}, id="slot-0-is-live-single"),
        pytest.param({"accepted": (), "qlens": (1, 2, 3), "state_len": 3}, id="short-rows-no-counts"),
        pytest.param({"accepted": (), "qlens": (1, 2, 0), "state_len": 5}, id="short-rows-no-counts-spare"),
        pytest.param(
            {"starts_dtype": "int64", "slots_dtype": "int64", "accepted_dtype": "int64"}, id="int64"
        ),
        pytest.param({"bias": "bfloat16", "silu": False}, id="bias-identity"),
        pytest.param({**rows(*(2,) * 40), "accepted": (1, 3) * 20}, id="forty-rows"),
    ],
)
def test_corner_of_update(subject: Subject, changes: dict[str, Any]) -> None:
    """Corners of causal_conv1d_update that a search should not be needed for."""
    required(subject, msgspec.structs.replace(UPDATE, **changes), seed=7)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("counted", [True, False], ids=["counts", "no-counts"])
@pytest.mark.parametrize("dtypes", [{}, BF16], ids=["float32", "bfloat16"])
def test_width_of_update(subject: Subject, width: int, counted: bool, dtypes: dict[str, Any]) -> None:
    """Every width, in stored rows as short as the contract allows."""
    fields: dict[str, Any] = {"width": width, "accepted": (), "qlens": (4, 4, 0)}
    if counted:
        fields |= {"accepted": (3, 4, 1), "qlens": (4, 1, 2)}
    fields["state_len"] = width + 2 if counted else width - 1
    required(subject, msgspec.structs.replace(UPDATE, **fields, **dtypes), seed=width)


PREFILL_CORNERS = [
    pytest.param({**FEW, "initial": ()}, id="no-rows"),
    pytest.param({**FEW, "initial": (), "tail": 3}, id="no-rows-but-padding"),
    pytest.param({"slots": (0, -1, 0)}, id="all-null"),
    pytest.param({"qlens": (0, 0, 0)}, id="all-empty"),
    pytest.param({"qlens": (0, 0, 0), "tail": 3}, id="all-empty-but-padding"),
    pytest.param({"qlens": (5, 0, 2), "slots": (5, 5, 2)}, id="empty-row-repeats-a-live-slot"),
    pytest.param({**rows(1, 2, 3), "initial": (True,) * 3}, id="short-continued"),
    pytest.param({**rows(1, 2, 3), "initial": (False,) * 3}, id="short-new"),
    pytest.param({**rows(63, 64, 65), "initial": (True, False, True)}, id="around-64"),
    pytest.param({**rows(66, 67, 68), "initial": (False, True, True)}, id="past-64"),
    pytest.param({**rows(127, 128, 129), "initial": (False, True, True)}, id="around-128"),
    pytest.param({**rows(192), "initial": (True,)}, id="three-blocks"),
    pytest.param({"tail": 70}, id="a-block-of-padding"),
    pytest.param({"state_len": 8}, id="spare-columns"),
    pytest.param({"bias": "float32", "silu": False}, id="bias-identity"),
    pytest.param({"starts_dtype": "int64", "slots_dtype": "int64"}, id="int64"),
]


@pytest.mark.parametrize(
    "changes",
    [
        *PREFILL_CORNERS,
        pytest.param({"channels": 1}, id="one-channel"),
        pytest.param({"channels": 257}, id="one-past-a-block"),
        pytest.param({"width": 2, "state_len": 1, "channels": 257, **BF16}, id="width-2"),
        pytest.param({"width": 3, "state_len": 2, "taps": "bfloat16"}, id="width-3"),
        pytest.param({**BF16, "bias": "bfloat16"}, id="bfloat16"),
        pytest.param({"activation": "float16", "conv": "bfloat16"}, id="input-rounds-to-the-state"),
    ],
)
def test_corner_of_prefill(subject: Subject, changes: dict[str, Any]) -> None:
    """Corners of causal_conv1d_fn that a search should not be needed for."""
    required(subject, msgspec.structs.replace(PREFILL, **changes), seed=8)


@pytest.mark.parametrize(
    "changes",
    [
        *PREFILL_CORNERS,
        pytest.param({"channels": 192, "part_dim": 192}, id="a-plane-of-192"),
        pytest.param({"channels": 576, "part_dim": 192, **rows(65, 3, 0)}, id="three-planes-of-192"),
        pytest.param({"channels": 384, "part_dim": 128, "activation": "bfloat16"}, id="planes-of-128"),
        pytest.param({"channels": 256, "part_dim": 64, "activation": "float16"}, id="four-planes-of-64"),
    ],
)
def test_corner_of_packed(subject: Subject, changes: dict[str, Any]) -> None:
    """Corners of the packed form, each against the oracle and bit for bit against the plain one."""
    required(subject, msgspec.structs.replace(PACKED, **changes), relation=Unpacked(), seed=9)


def many(count: int) -> dict[str, Any]:
    """``count`` sequences, most of no or one token, some null, some continued, one of 5 in the middle."""
    qlens = [(0, 1, 1, 0, 2)[i * 7 % 5] for i in range(count)]
    qlens[count // 2] = 5
    if count > 2:
        qlens[0] = qlens[-1] = 0
    slots = tuple(0 if i % 11 == 10 else i + 1 for i in range(count))
    return {**rows(*qlens, slots=slots), "initial": tuple(i % 3 == 0 for i in range(count))}


COUNTS = [1, 2, 31, 32, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (1023, 1024, 1025))]


@pytest.mark.parametrize("count", COUNTS)
def test_sequence_search_of_packed(subject: Subject, count: int) -> None:
    """Batches around the sizes at which a search for a program's sequence takes another step."""
    required(subject, msgspec.structs.replace(PACKED, **many(count)), relation=Unpacked(), seed=count)


@pytest.mark.parametrize("op", ["conv_update", "conv_prefill"])
@pytest.mark.parametrize("taps", ["bfloat16", "float32"])
@pytest.mark.parametrize("conv", ["bfloat16", "float32"])
def test_a_product_between_two_bfloat16_numbers(subject: Subject, op: str, conv: str, taps: str) -> None:
    """Fault class 21: 1.0078125 squared onto -1.015625 is 0 if the product rounds, else 6.1e-5."""
    base = UPDATE if op == "conv_update" else PREFILL
    fields = {**rows(1, 1), "channels": 256, "conv": conv, "taps": taps, "bias": "float32", "silu": False}
    fields |= {"accepted": (1, 2)} if op == "conv_update" else {"initial": (True, False)}
    regimes = dict.fromkeys(("x", "weight", "bias"), "near_one") | {"conv_state": "zero"}
    case = required(subject, msgspec.structs.replace(base, **fields), regimes=regimes, seed=21)
    values = build(case).tensors
    # The history is zero, so a first token meets the last tap alone.
    literal = (values["x"] == 1.0078125) & (values["weight"][:, -1] == 1.0078125)
    assert bool((literal & (values["bias"] == -1.015625)).any())


@pytest.mark.parametrize("op", ["conv_update", "conv_prefill"])
@pytest.mark.parametrize("dtypes", [{}, BF16, {"activation": "float16"}], ids=["float32", "bfloat16", "half"])
def test_saturated(subject: Subject, op: str, dtypes: dict[str, Any]) -> None:
    """Fault class 22: SiLU where its exponential overflows, underflows or is subnormal."""
    base = UPDATE if op == "conv_update" else PREFILL
    call = msgspec.structs.replace(base, channels=64, **dtypes)
    for weight in ("near_one", "one_hot"):
        required(
            subject, call, regimes={"x": "saturated", "conv_state": "saturated", "weight": weight}, seed=22
        )
