"""A case's call as what a test knows it to be."""

from oracle.calls.verify import Verify
from oracle.case import Case


def verify_of(case: Case) -> Verify:
    """The call of a case of verify."""
    assert isinstance(case.call, Verify)
    return case.call
