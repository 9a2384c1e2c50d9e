"""What is compared is what each call left, whatever the implementation does with its memory afterwards."""

import pytest
import torch

from ci.check import check
from impl.contract import Implementation
from impl.devices.base import Device
from impl.devices.registry import open_device
from oracle.calls.verify import Verify
from oracle.case import Case, Permute, Relation, Repeat
from oracle.judge import Problem
from tests.meta.zoo import _made

CALL = Verify(
    heads=2,
    key_dim=4,
    value_dim=4,
    window=2,
    pool=3,
    qlens=(2, 1),
    slots=(1, 2),
    ids=(0, 1),
    capacity=2,
    own_out=False,
)


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cpu")


def with_one_buffer(*, steady: bool) -> Implementation:
    """Returns the same memory from every call; unless ``steady``, results differ from call to call."""
    buffer, calls = torch.empty(1, 3, 2, 4), 0

    def step(_: object, out: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        moved = out if steady or calls % 2 else out.nextafter(torch.tensor(9.0))
        return buffer.copy_(moved)

    return _made(step)


@pytest.mark.parametrize("relation", [Repeat(), Permute((1, 0))])
@pytest.mark.parametrize("steady", [True, False])
def test_an_output_buffer_that_is_used_again(device: Device, relation: Relation, steady: bool) -> None:
    problems: tuple[Problem, ...] = check(
        Case(call=CALL, relation=relation), with_one_buffer(steady=steady), device
    ).problems
    assert [problem.kind for problem in problems] == ([] if steady else ["relation"])
