"""Properties of verify: against the oracle, and the bitwise invariants of the contract (1.8, 3 to 6).

Every example is also checked byte by byte: what the call may not write keeps its bytes.
"""

import pytest

from oracle.calls.verify import Verify
from oracle.case import Case
from tests.subject import Subject

BASE = Verify(
    heads=2,
    key_dim=16,
    value_dim=16,
    window=4,
    pool=6,
    qlens=(4, 1, 0),
    slots=(3, 1, 5),
    ids=(0, 1, 2),
    capacity=3,
)


def test_differential(subject: Subject) -> None:
    """Every element within its bound, every other byte unchanged."""
    subject.search(subject.cases("verify"))


@pytest.mark.parametrize("relation", Verify.relations)
def test_invariant(subject: Subject, relation: str) -> None:
    """A case and its image under the relation agree bit for bit."""
    subject.search(subject.cases("verify", relation))


def _based(subject: Subject, **changes: object) -> Case:
    fields = {name: getattr(BASE, name) for name in Verify.__struct_fields__} | changes
    fields["records"] = subject.domain("verify").records[0]
    return Case(call=Verify(**fields))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"qlens": (), "slots": (), "ids": ()}, id="no-rows"),
        pytest.param({"qlens": (0, 0, 0)}, id="all-empty"),
        pytest.param({"qlens": (0, 0, 0), "tail": 3}, id="all-empty-but-padding"),
        pytest.param({"slots": (0, -1, 0)}, id="all-null"),
        pytest.param({"slots": (5, -1, 5)}, id="empty-row-repeats-a-live-slot"),
        pytest.param({"lower_bound": 0.0}, id="bound-zero-is-bounded"),
        pytest.param({"lower_bound": None}, id="unbounded"),
        pytest.param({"key_dim": 1, "value_dim": 1, "heads": 1}, id="one-by-one"),
        pytest.param({"key_dim": 129, "value_dim": 33}, id="one-past-a-block"),
        pytest.param({"key_dim": 256, "value_dim": 256, "heads": 1}, id="wide"),
        pytest.param({"out": "float64"}, id="out-float64"),
        pytest.param({"out": "float16", "activation": "bfloat16", "state": "bfloat16"}, id="three-dtypes"),
        pytest.param({"starts_dtype": "int64", "slots_dtype": "int64"}, id="int64-indices"),
        pytest.param({"window": 8, "qlens": (8, 1, 7)}, id="window-eight"),
        pytest.param(
            {
                "qlens": (2,) * 40,
                "slots": tuple(range(1, 41)),
                "ids": tuple(range(40)),
                "pool": 41,
                "capacity": 40,
            },
            id="forty-rows",
        ),
    ],
)
def test_corner(subject: Subject, changes: dict[str, object]) -> None:
    """Corners that a search should not be needed for."""
    subject.require(_based(subject, **changes))
