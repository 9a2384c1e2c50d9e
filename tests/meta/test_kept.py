"""What an object keeps is its own: it hides nothing, and goes into no copy of the object."""

from dataclasses import dataclass

import msgspec
import pytest

from oracle.kept import kept
from tests.meta.test_calls import BASES


@dataclass(frozen=True)
class _Base:
    number: int

    @kept
    def twice(self) -> list[int]:
        return [2 * self.number]


@dataclass(frozen=True)
class _Derived(_Base):
    @kept
    def twice(self) -> list[int]:
        return [*super().twice(), *super().twice()]


def test_it_is_computed_once() -> None:
    one = _Base(3)
    assert one.twice() is one.twice()
    assert _Base(4).twice() == [8]


def test_what_an_overridden_method_keeps_is_apart() -> None:
    one = _Derived(3)
    assert one.twice() == one.twice() == [6, 6]
    assert _Base.twice(one) == [6]


@pytest.mark.parametrize("op", BASES)
def test_a_call_may_be_asked_in_any_order(op: str) -> None:
    """Whatever was asked before, the answers are those of a new one."""
    asked, fresh = msgspec.structs.replace(BASES[op]), msgspec.structs.replace(BASES[op])
    tensors = fresh.tensors()
    assert (asked.starts, asked.tensors(), asked.results()) == (fresh.starts, tensors, fresh.results())
    shorter = msgspec.structs.replace(asked, qlens=(1, 1, 1), hostile=())
    assert shorter.starts == (0, 1, 2, 3)
