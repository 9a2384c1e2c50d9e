"""Properties of commit: against the oracle, and the bitwise invariants of the contract (1.6; 1.8, 3 to 6).

Every example is also checked byte by byte: what the call may not write keeps its bytes.
"""

from typing import Any

import msgspec
import pytest

from oracle.calls.commit import Commit
from oracle.case import Case
from oracle.plan import RowPlan
from tests.subject import Subject

BASE = Commit(
    heads=2,
    key_dim=16,
    value_dim=8,
    window=4,
    channels=24,
    state_len=6,
    pool=8,
    qlens=(4, 1, 3),
    slots=(3, 1, 5),
    ids=(0, 1, 2),
    capacity=4,
    accepted=(2, 1, 3),
)
LAYOUTS = pytest.mark.parametrize("records", ["row", "slot"])


def test_differential(subject: Subject) -> None:
    """The plan exactly, conv columns bit for bit, states within their bound, every other byte unchanged."""
    subject.search(subject.cases("commit"))


@pytest.mark.parametrize("relation", Commit.relations)
def test_invariant(subject: Subject, relation: str) -> None:
    """A case and its image under the relation agree bit for bit."""
    strategy = subject.cases("commit", relation)
    # An interpreter runs such a case twice in seconds; the differential test has them all.
    subject.search(strategy.filter(light) if subject.device == "cpu" else strategy)


def light(case: Case) -> bool:
    """Whether the case has few programs: an interpreter takes some milliseconds for each."""
    call = case.call
    assert isinstance(call, Commit)
    parts = call.heads * (1 + call.key_dim * call.value_dim // 2048) + 1 + call.channels // 256
    return call.rows * call.layers * parts <= 20


def required(subject: Subject, call: Commit, records: str, **rest: Any) -> None:
    """Judge a call in a record layout that the implementation has."""
    if records not in subject.domain("commit").records:
        pytest.skip(f"needs records by {records}; found {', '.join(subject.domain('commit').records)}")
    subject.require(Case(call=msgspec.structs.replace(call, records=records), **rest))


def one_row(slot: int, computed: int, accepted: int, table: tuple[int, ...], **changes: Any) -> Commit:
    """A full row in align mode, with blocks of one window unless said otherwise, beside a plain second row.

    The second row commits one token into the slot of its own block, so that the first has a neighbour.
    """
    width = len(table)
    fields: dict[str, Any] = {
        "qlens": (4, 1),
        "slots": (slot, 7),
        "ids": (0, 1),
        "accepted": (accepted, 1),
        "block_size": 4,
        "computed": (computed, 0),
        "table": (table, (7, *(0,) * (width - 1))),
    }
    return msgspec.structs.replace(BASE, **(fields | changes))


NOTHING: dict[str, Any] = {"qlens": (), "slots": (), "ids": (), "accepted": ()}
ALIGNED: dict[str, Any] = {"block_size": 6, "computed": (4, 0, 5), "table": ((2, 3), (1, 0), (4, 5))}
BF16: dict[str, Any] = {"activation": "bfloat16", "state": "bfloat16", "conv": "bfloat16"}
INT64 = {
    f"{name}_dtype": "int64" for name in ("starts", "slots", "accepted", "requests", "computed", "table")
}


@LAYOUTS
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({**NOTHING, "capacity": 2}, id="no-rows"),
        pytest.param({**NOTHING, "capacity": 2, "block_size": 4}, id="no-rows-align"),
        pytest.param({**NOTHING, "capacity": 0}, id="no-rows-no-capacity"),
        pytest.param({"slots": (0, -1, 0)}, id="all-null"),
        pytest.param({"slots": (0, -1, 0), **ALIGNED}, id="all-null-align"),
        pytest.param({"qlens": (0, 0, 0)}, id="all-empty"),
        pytest.param({"qlens": (0, 0, 0), **ALIGNED}, id="all-empty-align"),
        pytest.param({"qlens": (4, 0, 0), "slots": (3, 3, 3)}, id="empty-rows-repeat-a-live-slot"),
        pytest.param({"accepted": (0, 0, 0)}, id="accepted-0"),
        pytest.param({"accepted": (0, 0, 0), **ALIGNED}, id="accepted-0-align"),
        pytest.param({"accepted": (-1, -4, 1)}, id="accepted-negative"),
        pytest.param({"accepted": (-1, 1, -4), **ALIGNED}, id="accepted-negative-align"),
        pytest.param({"accepted": (5, 4, 9)}, id="accepted-over"),
        pytest.param({"accepted": (65536, 65536, 65536)}, id="accepted-far-over"),
        pytest.param({"accepted": (5, 4, 9), **ALIGNED}, id="accepted-over-align"),
        pytest.param({"state_len": 4}, id="one-history-column"),
        pytest.param({"state_len": 4, **ALIGNED}, id="one-history-column-align"),
        pytest.param({"state_len": 9}, id="more-history-columns"),
        pytest.param({"layers": 3, "dim_first": False}, id="three-layers-token-major"),
        pytest.param({"layers": 3, "dim_first": False, **ALIGNED, **BF16}, id="three-layers-align-bfloat16"),
        pytest.param({"channels": 1}, id="one-channel"),
        pytest.param({"channels": 257, "dim_first": False}, id="one-past-a-block"),
        pytest.param({"channels": 257, **ALIGNED, "conv": "bfloat16"}, id="one-past-a-block-align"),
        pytest.param({"requests": (4, 0, 2), "accepted": (1, 9, 3, 9, 2)}, id="requests"),
        pytest.param(
            {
                "requests": (4, 0, 2),
                "accepted": (1, 9, 3, 9, 2),
                "block_size": 6,
                "computed": (0, 77, 5, 1 << 30, 4),
                "table": ((1, 0), (6, 6), (4, 5), (7, 7), (2, 3)),
            },
            id="requests-align",
        ),
        pytest.param(
            {
                **INT64,
                **ALIGNED,
                "requests": (2, 1, 0),
                "computed": (5, 0, 4),
                "table": ((4, 5), (1, 0), (2, 3)),
            },
            id="int64",
        ),
        pytest.param({"lower_bound": None}, id="unbounded"),
        pytest.param({"lower_bound": 0.0}, id="bound-zero-is-bounded"),
        pytest.param({"window": 1, "qlens": (1, 1, 0), "state_len": 3}, id="window-one"),
        pytest.param(
            {"window": 8, "qlens": (8, 1, 7), "accepted": (8, 1, 5), "state_len": 10}, id="window-eight"
        ),
        pytest.param({"key_dim": 33, "value_dim": 65, "heads": 1}, id="one-past-a-power"),
        pytest.param({"key_dim": 128, "value_dim": 128, "heads": 1, **ALIGNED, **BF16}, id="128"),
        pytest.param({"activation": "float16", "state": "bfloat16"}, id="three-dtypes"),
        pytest.param(
            {
                "qlens": (2,) * 40,
                "slots": tuple(range(1, 41)),
                "ids": tuple(range(40)),
                "accepted": (1, 2, 3, 0) * 10,
                "pool": 41,
                "capacity": 40,
            },
            id="forty-rows",
        ),
    ],
)
def test_corner(subject: Subject, changes: dict[str, Any], records: str) -> None:
    """Corners that a search should not be needed for."""
    required(subject, msgspec.structs.replace(BASE, **changes), records, seed=3)


PLACES = {
    # Blocks of one window, Q = B = 4: a row of four tokens that starts in mid-block crosses a boundary.
    "all-differ": (one_row(3, 2, 4, (4, 5)), RowPlan(4, 5, 4, 2)),
    "source-is-boundary": (one_row(3, 2, 4, (3, 5)), RowPlan(4, 5, 3, 2)),
    "source-is-final": (one_row(3, 2, 4, (4, 3)), RowPlan(4, 3, 4, 2)),
    "source-is-both": (one_row(3, 0, 4, (3,)), RowPlan(4, 3, 3, 4)),
    "boundary-is-final": (one_row(3, 0, 4, (5,)), RowPlan(4, 5, 5, 4)),
    "one-token-past-the-boundary": (one_row(3, 1, 4, (4, 5)), RowPlan(4, 5, 4, 3)),
    "boundary-after-one-token": (one_row(3, 3, 4, (3, 5)), RowPlan(4, 5, 3, 1)),
    "boundary-after-one-token-in-place": (one_row(3, 3, 3, (4, 3)), RowPlan(3, 3, 4, 1)),
    "ends-exactly-next-null": (one_row(3, 4, 4, (2, 5, 0)), RowPlan(4, 5, 5, 4)),
    "ends-exactly-next-live": (one_row(3, 4, 4, (2, 5, 6)), RowPlan(4, 5, 5, 4)),
    "ends-exactly-at-the-table": (one_row(3, 6, 2, (2, 5)), RowPlan(2, 5, 5, 2)),
    "one-token-short": (one_row(3, 4, 3, (2, 5)), RowPlan(3, 5, 0, 4)),
    "in-one-block": (one_row(3, 8, 2, (2, 6, 3)), RowPlan(2, 3, 0, 4)),
    "in-one-block-moved": (one_row(3, 8, 2, (3, 6, 5)), RowPlan(2, 5, 0, 4)),
    "larger-blocks-cross": (one_row(3, 12, 4, (2, 4, 5), block_size=7), RowPlan(4, 5, 4, 2)),
    "larger-blocks-end": (one_row(3, 10, 4, (2, 4, 5), block_size=7), RowPlan(4, 4, 4, 4)),
    "larger-blocks-do-not": (one_row(3, 7, 4, (2, 4, 5), block_size=7), RowPlan(4, 4, 0, 7)),
    "final-null": (one_row(3, 2, 4, (4, 0)), RowPlan(4, 0, 4, 2)),
    "final-pad": (one_row(3, 2, 4, (4, -1)), RowPlan(4, -1, 4, 2)),
    "boundary-null": (one_row(3, 2, 4, (0, 5)), RowPlan(4, 5, 0, 2)),
    "boundary-pad": (one_row(3, 2, 4, (-1, 5)), RowPlan(4, 5, -1, 2)),
    "boundary-null-final-is-source": (one_row(3, 2, 4, (0, 3)), RowPlan(4, 3, 0, 2)),
    "both-null": (one_row(3, 2, 4, (0, -1)), RowPlan(4, -1, 0, 2)),
    "final-is-clamped": (one_row(3, 4, 2, (5,)), RowPlan(2, 5, 0, 4)),
    "final-is-clamped-far": (one_row(3, 4001, 2, (6, 5)), RowPlan(2, 5, 0, 3)),
    "final-is-clamped-to-null": (one_row(3, 4, 2, (0,)), RowPlan(2, 0, 0, 4)),
    "far-into-the-sequence": (one_row(3, (1 << 30) - 3, 2, (5,)), RowPlan(2, 5, 0, 3)),
}
"""Every way in which source, final and boundary coincide, are null or clamped, and the plan that it is."""


@LAYOUTS
@pytest.mark.parametrize("name", PLACES)
def test_places(subject: Subject, name: str, records: str) -> None:
    """Fault class 26: boundary arithmetic, and reads that must come before writes."""
    call, plan = PLACES[name]
    assert call.plan(0) == plan
    for changes in ({}, {"layers": 2, "dim_first": False, **BF16, "heads": 1, "channels": 3}):
        required(subject, msgspec.structs.replace(call, **changes), records, seed=26)


@pytest.mark.parametrize("regime", ["extreme", "fast", "thresholds", "specials", "zero", "tiny"])
@pytest.mark.parametrize("bound", [-5.0, None, -88.0])
def test_regimes(subject: Subject, regime: str, bound: float | None) -> None:
    """Fault classes 5, 6 and 22: gates at both ends, dead record positions that are not finite."""
    call = one_row(3, 2, 3, (4, 5), lower_bound=bound, hostile=(3, 1))
    regimes = {"key_gate": regime, "A_log": "spread", "dt_bias": "spread"}
    required(subject, call, subject.domain("commit").records[0], regimes=regimes, seed=5)
