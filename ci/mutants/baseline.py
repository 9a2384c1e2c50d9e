"""The test that kernels usually come with, to measure what ours adds.

A handful of fixed shapes, values from a normal distribution with seed 42, dense tensors, one call
each, and a single number per tensor: the root mean square of the error over that of the expected
values, below 0.005. It is given what such tests do not have: the oracle's values, every tensor
that the operation writes (integers exactly), and a process of its own for each mutant.

    python -m ci.mutants.baseline IMPLEMENTATION DEVICE OPERATION,..
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from impl.bindings import BINDINGS
from impl.contract import Implementation, one_line
from impl.devices.base import Device
from impl.observe import written
from oracle.calls import AnyCall
from oracle.calls.base import State
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Cells
from oracle.layout import DTYPES
from oracle.tracked import arithmetic
from oracle.values import build

TOLERANCE = 0.005
SEED = 42
_BF16: State = "bfloat16"
_FP32: State = "float32"


def shapes(operation: str, *, layout: str = "row") -> tuple[Case, ...]:
    """The fixed cases of an operation; ``layout`` is where its records lie."""
    return tuple(Case(call=call, seed=SEED) for call in _CALLS[operation](layout))


def _verifies(layout: str) -> list[Verify]:
    return [
        Verify(
            heads=4,
            key_dim=dim,
            value_dim=dim,
            window=4,
            pool=rows + 1,
            qlens=(4,) * rows,
            slots=tuple(range(1, rows + 1)),
            ids=tuple(range(rows)),
            capacity=rows if layout == "row" else 0,
            records="row" if layout == "row" else "slot",
            activation="bfloat16",
            out="bfloat16",
            state=state,
            lower_bound=bound,
        )
        for rows, dim, state, bound in (
            (1, 128, _FP32, -5.0),
            (4, 64, _BF16, -5.0),
            (4, 64, _FP32, None),
        )
    ]


def _updates(layout: str) -> list[ConvUpdate]:
    return [
        ConvUpdate(
            pool=rows + 1,
            qlens=(4,) * rows,
            slots=tuple(range(1, rows + 1)),
            ids=tuple(range(rows)),
            channels=256,
            state_len=6,
            window=4,
            accepted=(1, 4, 2, 3)[:rows] if counted else (),
            form="varlen" if counted else "batch",
            activation="bfloat16",
            conv=conv,
            taps=conv,
        )
        for rows, counted, conv in ((1, True, _BF16), (4, True, _FP32), (4, False, _BF16))
    ]


def _sequences(qlens: tuple[int, ...]) -> dict[str, Any]:
    """Rows of a prefill: some begin, some go on."""
    count = len(qlens)
    return {
        "pool": count + 1,
        "qlens": qlens,
        "slots": tuple(range(1, count + 1)),
        "ids": tuple(range(count)),
        "initial": (False, True, True, False)[:count],
        "most_tokens": max(qlens),
    }


def _prefills(layout: str) -> list[ConvPrefill]:
    return [
        ConvPrefill(
            **_sequences(qlens),
            channels=256,
            state_len=3,
            activation="bfloat16",
            conv=conv,
            taps=conv,
            bias=bias,
        )
        for qlens, conv, bias in (((64,), _FP32, None), ((40, 17, 64, 9), _BF16, _BF16))
    ]


def _packeds(layout: str) -> list[PackedConv]:
    return [
        PackedConv(
            **_sequences(qlens),
            channels=384,
            part_dim=128,
            state_len=3,
            activation="bfloat16",
        )
        for qlens in ((64,), (40, 17, 64, 9))
    ]


def _commits(layout: str) -> list[Commit]:
    return [
        Commit(
            layers=1 + align,
            heads=4,
            key_dim=dim,
            value_dim=dim,
            window=4,
            pool=2 * rows + 1,
            qlens=(4,) * rows,
            slots=tuple(range(1, rows + 1)),
            ids=tuple(range(rows)),
            accepted=(2, 1, 4, 3)[:rows],
            channels=256,
            state_len=6,
            capacity=rows,
            records="row" if layout == "row" else "slot",
            activation="bfloat16",
            state="bfloat16",
            conv="bfloat16",
            lower_bound=-5.0,
            block_size=16 if align else 0,
            computed=(14, 30, 8, 31)[:rows] if align else (),
            table=tuple((row + 1, rows + row + 1, 0) for row in range(rows)) if align else (),
        )
        for rows, dim, align in ((1, 128, False), (4, 64, False), (4, 64, True))
    ]


def _fused(layout: str) -> list[FusedVerify]:
    return [
        FusedVerify(
            heads=2,
            window=4,
            pool=rows + 1,
            qlens=(4,) * rows,
            slots=tuple(range(1, rows + 1)),
            ids=tuple(range(rows)),
            capacity=rows,
            accepted=(1, 4, 2, 3)[:rows],
        )
        for rows in (1, 4)
    ]


_CALLS: dict[str, Callable[[str], Sequence[AnyCall]]] = {
    "verify": _verifies,
    "conv_update": _updates,
    "conv_prefill": _prefills,
    "packed_conv": _packeds,
    "commit": _commits,
    "fused_verify": _fused,
}


def failing(operation: str, implementation: Implementation, device: Device) -> str:
    """What the first shape that fails fails with; nothing if all pass."""
    layout = implementation.offered(operation).records[0]
    for case in shapes(operation, layout=layout):
        wrong = _failing(case, implementation, device)
        if wrong:
            return f"{case.call.describe()}: {wrong}"
    return ""


def _failing(case: Case, implementation: Implementation, device: Device) -> str:
    values = build(case)
    inputs = {name: x.clone().contiguous() for name, x in values.tensors.items()}
    for name, spec in case.call.tensors().items():
        if spec.output:
            inputs[name] = torch.zeros(spec.shape, dtype=DTYPES[spec.dtype])
    expected = expect(case, values, arithmetic(implementation.arithmetic, device.name))
    try:
        device.share(inputs, written(case.call))
        with device.variants(case.seed)[0].context():
            run = BINDINGS[case.op](case.call, inputs, implementation.function(case), implementation)
            returned = run()
        device_results: Mapping[str, torch.Tensor] = inputs | dict(returned)
    except Exception as error:  # whatever a kernel raises fails the test
        return f"{type(error).__name__}: {one_line(error)}"
    for name, cells in expected.cells.items():
        wrong = _compared(cells, device_results[name])
        if wrong:
            return f"{name}: {wrong}"
    return ""


def _compared(cells: Cells, seen: torch.Tensor) -> str:
    """The usual criterion over the cells that are defined."""
    value, found = cells.value[cells.written], seen.reshape(cells.written.shape)[cells.written]
    if not found.is_floating_point():
        return "" if torch.equal(found.long(), value.long()) else "other integers"
    value, found = value.double(), found.double()
    if not found.numel():
        return ""
    scale = value.square().mean().sqrt().item()
    ratio = (found - value).square().mean().sqrt().item() / (scale + 1e-8)
    return "" if ratio < TOLERANCE else f"RMSE ratio {ratio:.3g}"


class Answer(msgspec.Struct, frozen=True):
    """By operation what failed, or nothing where the test passes."""

    failing: dict[str, str]


def main(name: str, device_name: str, operations: tuple[str, ...]) -> None:
    """Print an ``Answer``; what kernels print goes elsewhere."""
    from impl.devices.registry import open_device
    from impl.registry import resolve

    torch.set_num_threads(1)
    device = open_device(device_name)
    implementation = resolve(name)
    found: dict[str, str] = {}
    for operation in operations:
        found[operation] = failing(operation, implementation, device)
        if found[operation]:
            break
    print(f"\n{msgspec.json.encode(Answer(found)).decode()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], tuple(sys.argv[3].split(",")))
