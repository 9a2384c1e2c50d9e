"""``expect(case) -> Expected``: the oracle's one entry."""

from collections.abc import Callable

from oracle.case import Case
from oracle.commit import expect_commit
from oracle.conv import expect_prefill, expect_update
from oracle.expectation import Expected
from oracle.fused_verify import expect_fused_verify
from oracle.tracked import COMPILED, Arithmetic
from oracle.values import Values, build
from oracle.verify import expect_verify

ORACLES: dict[str, Callable[[Case, Values, Arithmetic], Expected]] = {
    "verify": expect_verify,
    "conv_update": expect_update,
    "conv_prefill": expect_prefill,
    "packed_conv": expect_prefill,
    "commit": expect_commit,
    "fused_verify": expect_fused_verify,
}
"""Per operation, the function that says what it must write; serving is made of the others."""


def expect(case: Case, values: Values | None = None, arithmetic: Arithmetic = COMPILED) -> Expected:
    """What the call of ``case`` must leave behind, for an implementation of ``arithmetic``.

    ``values`` are the case's inputs if they are already at hand.
    """
    return ORACLES[case.op](case, values if values is not None else build(case), arithmetic)
