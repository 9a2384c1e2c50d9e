"""Properties of the fused verify: against the oracle on every code path, and the bitwise invariants (1.8)."""

import msgspec
import pytest

from oracle.calls.fused_verify import FusedVerify
from oracle.case import Case
from oracle.layout import Layout, Page
from tests.subject import Subject

replace = msgspec.structs.replace
OP = "fused_verify"
BASE = FusedVerify(
    heads=2,
    window=4,
    capacity=3,
    pool=6,
    qlens=(4, 1, 0),
    slots=(3, 1, 5),
    ids=(0, 1, 2),
    accepted=(2, 4, 1),
)
PLAIN = {"mixed_qkv": Layout(gaps=(1, 0))}


def test_differential(subject: Subject) -> None:
    """Every element within its bound, every other byte unchanged, on the path that the memory asks for."""
    subject.search(subject.cases(OP))


@pytest.mark.parametrize("relation", FusedVerify.relations)
def test_invariant(subject: Subject, relation: str) -> None:
    """A case and its image under the relation agree bit for bit."""
    subject.search(subject.cases(OP, relation))


@pytest.mark.parametrize("layouts", [{}, PLAIN], ids=["dense", "odd-rows"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="base"),
        pytest.param({"qlens": (), "slots": (), "ids": (), "accepted": ()}, id="no-rows"),
        pytest.param({"qlens": (0, 0, 0)}, id="all-empty"),
        pytest.param({"qlens": (0, 0, 0), "tail": 3}, id="all-empty-but-padding"),
        pytest.param({"slots": (0, -1, 0)}, id="all-null"),
        pytest.param({"slots": (5, -1, 5)}, id="empty-row-repeats-a-live-slot"),
        pytest.param({"tail": 5}, id="padding"),
        pytest.param({"lower_bound": 0.0}, id="bound-zero-is-bounded"),
        pytest.param({"lower_bound": -22.0}, id="strongest-decay"),
        pytest.param(
            {"window": 8, "qlens": (8, 1, 7), "accepted": (8, 1, 3), "lower_bound": -11.0}, id="eight"
        ),
        pytest.param({"window": 1, "qlens": (1, 1, 0), "accepted": (1, 1, 1)}, id="one-token"),
        pytest.param({"heads": 1}, id="one-head"),
        pytest.param({"taps": "float32"}, id="float32-taps"),
        pytest.param({"dim_first": False}, id="token-major"),
        pytest.param({"dim_first": False, "taps": "float32"}, id="token-major-float32-taps"),
        pytest.param({"capacity": 9}, id="spare-records"),
        pytest.param(
            {
                "heads": 1,
                "qlens": (2,) * 40,
                "slots": tuple(range(1, 41)),
                "ids": tuple(range(40)),
                "accepted": (1, 2, 3, 4) * 10,
                "pool": 41,
                "capacity": 40,
            },
            id="forty-rows",
        ),
    ],
)
def test_corner(subject: Subject, changes: dict[str, object], layouts: dict[str, Layout]) -> None:
    """Corners that a search should not be needed for."""
    subject.domain(OP)
    subject.require(Case(call=replace(BASE, **changes), layouts=layouts))


def test_a_slot_s_page(subject: Subject) -> None:
    """Conv row and state of a slot share a page, as in a key/value cache."""
    subject.domain(OP)
    for members in (("conv_state", "state"), ("state", "conv_state")):
        subject.require(Case(call=BASE, pages=(Page(members=members, gaps=(0, 64), tail=16),)))


def test_a_projection_of_all(subject: Subject) -> None:
    """Slices of one projection: rows of 16 bytes or not, and starts that decline the call."""
    subject.domain(OP)
    members = ("mixed_qkv", "raw_gate", "raw_beta")
    for tail, offset, path in ((12, 0, "warp-specialised"), (0, 0, "plain"), (12, 2, "declined")):
        case = Case(call=BASE, pages=(Page(members=members, tail=tail, offset=offset),))
        assert case.path == path
        subject.require(case)
