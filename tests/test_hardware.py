"""What only hardware can show: repeats, launch settings, stream order, streams, graphs, far memory.

The properties are in ``tests.hardware`` and ``tests.far_memory``, and ``meta.test_hardware_power`` runs
them without a GPU; CuTe wrappers have more of their kind in ``test_cute_paths``.
"""

from collections.abc import Callable

import msgspec
import pytest

from impl.contract import UnavailableError
from impl.registry import require_device, resolve, split
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.layout import Layout
from tests.far_memory import STRIDES, far_entries_are_found
from tests.hardware import (
    Chain,
    Rig,
    Setting,
    contents,
    graphs_follow_contents,
    late_inputs_are_waited_for,
    repeats_agree,
    settings_are_right,
    streams_do_not_meet,
)
from tests.meta.drawn import OPERATIONS, sample
from tests.strategies.cases import cases
from tests.test_cute_paths import ALIGNED_COMMIT, BASE, COMMIT, ODD_ROWS, fused

pytestmark = pytest.mark.gpu
change = msgspec.structs.replace

VERIFY = Verify(
    heads=2,
    key_dim=128,
    value_dim=128,
    window=4,
    pool=8,
    qlens=(4, 1, 3),
    slots=(3, 1, 5),
    ids=(0, 1, 2),
    capacity=4,
    activation="bfloat16",
    out="bfloat16",
    state="bfloat16",
)
"""Fits ``COMMIT``: the same slots, rows and records."""
MASKED_VERIFY = change(
    VERIFY,
    key_dim=48,
    value_dim=20,
    records="slot",
    activation="float32",
    out="float32",
    state="float32",
    lower_bound=None,
    own_out=False,
    slots=(3, 0, 5),
)
UPDATE = ConvUpdate(
    channels=200,
    window=4,
    state_len=6,
    pool=6,
    qlens=(4, 4, 0, 4),
    slots=(3, 1, 5, 0),
    ids=(0, 1, 2, 3),
    accepted=(2, 3, 1, 1),
    activation="bfloat16",
    conv="bfloat16",
    taps="bfloat16",
    bias="bfloat16",
)
IN_PLACE_UPDATE = change(UPDATE, accepted=(), own_out=False, form="batch", qlens=(4, 4, 4, 4), taps="float32")
PREFILL = ConvPrefill(
    channels=192,
    state_len=4,
    pool=6,
    most_tokens=128,
    qlens=(70, 1, 0, 33),
    slots=(3, 1, 5, 2),
    ids=(0, 1, 2, 3),
    initial=(True, False, True, True),
    activation="bfloat16",
)
NARROW_PREFILL = change(PREFILL, width=3, activation="float32", conv="bfloat16", silu=False, bias="float32")
PACKED = PackedConv(**{name: getattr(PREFILL, name) for name in ConvPrefill.__struct_fields__}, part_dim=64)
CORNERS: dict[str, tuple[Case, ...]] = {
    "verify": (Case(call=VERIFY), Case(call=MASKED_VERIFY, layouts={"state": Layout(gaps=(8, 3, 2, 1))})),
    "conv_update": (Case(call=UPDATE), Case(call=IN_PLACE_UPDATE)),
    "conv_prefill": (Case(call=PREFILL), Case(call=NARROW_PREFILL)),
    "packed_conv": (Case(call=PACKED), Case(call=change(PACKED, part_dim=192, bias="float32"))),
    "commit": (Case(call=COMMIT), Case(call=ALIGNED_COMMIT)),
    "fused_verify": (fused(), fused(layouts=ODD_ROWS)),
}
"""Two calls of each operation that differ in what is compiled; several programs, dead rows among them."""
MANY = tuple(range(1, 65))
"""Slots of a batch that fills a GPU more than once."""
WAVES: dict[str, Case] = {
    "verify": Case(
        call=change(
            VERIFY,
            heads=16,
            qlens=(4,) * 64,
            slots=MANY,
            ids=tuple(range(64)),
            pool=65,
            capacity=64,
        )
    ),
    "conv_update": Case(
        call=change(
            UPDATE,
            channels=2048,
            qlens=(4,) * 64,
            slots=MANY,
            ids=tuple(range(64)),
            accepted=tuple(1 + i % 4 for i in range(64)),
            pool=65,
        )
    ),
    "commit": Case(
        call=change(
            COMMIT,
            heads=16,
            channels=2048,
            qlens=(4,) * 64,
            slots=MANY,
            ids=tuple(range(64)),
            accepted=tuple(1 + i % 4 for i in range(64)),
            pool=65,
            capacity=64,
        )
    ),
}
COMPILER: list[Setting] = [
    {"num_warps": warps, "num_stages": stages} for warps in (1, 2, 4, 8) for stages in (1, 2, 3, 4)
]
TILES: dict[str, list[Setting]] = {
    "verify": [{"BV": 4}, {"BV": 8, "num_warps": 2}, {"BV": 64, "num_warps": 4}],
    "conv_update": [{"CHANNELS": 32}, {"CHANNELS": 256, "GROUP": 1}, {"CHANNELS": 64, "num_warps": 4}],
    "conv_prefill": [
        {"TOKENS": 16, "GROUP": 4},
        {"TOKENS": 64, "CHANNELS": 64},
        {"CHANNELS": 256, "GROUP": 2, "num_warps": 2},
    ],
    "commit": [{"BV": 4}, {"BV": 8, "BC": 32}, {"BV": 64, "BC": 64, "num_warps": 4}],
}
TILES["packed_conv"] = TILES["conv_prefill"]
FOUR = {"qlens": (1, 1, 2), "slots": (3, 1, 2), "pool": 4, "ids": (0, 1, 2)}
"""Three rows, four tokens and four slots."""
FAR_CASES: dict[str, tuple[Case, tuple[str, ...]]] = {
    "verify": (Case(call=change(VERIFY, **FOUR)), ("state", "k", "v", "out", "correction", "key_gate")),
    "verify-slot": (
        Case(call=change(VERIFY, **FOUR, records="slot", state="float32")),
        ("state", "correction", "key_gate"),
    ),
    "conv_update": (
        Case(call=change(UPDATE, **FOUR | {"qlens": (2, 2, 2)}, window=2, accepted=(1, 2, 2))),
        ("conv_state", "x", "out"),
    ),
    "conv_prefill": (Case(call=change(PREFILL, **FOUR, initial=(True, False, True))), ("conv_states", "x")),
    "packed_conv": (Case(call=change(PACKED, **FOUR, initial=(True, False, True))), ("conv_states", "x")),
    "commit": (
        Case(call=change(COMMIT, **FOUR, accepted=(1, 1, 2))),
        ("state.0", "conv_state.0", "correction.0", "key_gate.0"),
    ),
    "fused_verify": (
        fused(change(BASE, **FOUR, capacity=4, accepted=(1, 2, 3))),
        ("state", "conv_state", "mixed_qkv", "correction", "key_gate", "out"),
    ),
}
"""Cases, and which of their tensors are put far apart, one at a time."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" in metafunc.fixturenames:
        names = split(metafunc.config.getoption("--impl"))
        metafunc.parametrize("rig", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, device: str) -> Rig:
    if device != "cuda":
        pytest.skip(
            "needs a CUDA GPU; found none" if device == "cpu" else f"needs --device cuda; found {device}"
        )
    try:
        implementation = resolve(request.param)
        require_device(implementation, device)
    except UnavailableError as error:
        pytest.fail(str(error), pytrace=False)
    return Rig(implementation, device)


def offered(rig: Rig, operation: str) -> None:
    """Skip the test if the implementation lacks the operation."""
    if operation not in rig.implementation.operations:
        found = rig.implementation.absent.get(operation, "none")
        pytest.skip(f"needs {operation}; found {found}")


def drawn(rig: Rig, operation: str, count: int = 3) -> list[Case]:
    """The largest of some drawn cases of few kernel variants."""
    strategy = cases(operation, rig.implementation.offered(operation), variants=2, relations=())
    taken = [case for case in sample(strategy, 1) if not rig.implementation.takes(case)]
    size: Callable[[Case], int] = lambda case: case.call.rows * case.call.tokens  # noqa: E731
    return sorted((x for x in taken if x.path != "declined"), key=size)[-count:]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_repeats_agree(rig: Rig, operation: str, number: int) -> None:
    offered(rig, operation)
    repeats_agree(rig, rig.placed(CORNERS[operation][number]))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_repeats_of_drawn_cases_agree(rig: Rig, operation: str) -> None:
    offered(rig, operation)
    for case in drawn(rig, operation):
        repeats_agree(rig, rig.placed(case))


@pytest.mark.parametrize("operation", WAVES)
def test_repeats_of_full_waves_agree(rig: Rig, operation: str) -> None:
    """More programs than the GPU holds at once."""
    offered(rig, operation)
    repeats_agree(rig, rig.placed(WAVES[operation]))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("operation", TILES)
def test_settings_are_right(
    rig: Rig, operation: str, number: int, record_property: Callable[[str, object], None]
) -> None:
    """Warps, stages and tiles of the own Triton kernels: all that the GPU can hold give what they must."""
    if rig.implementation.name != "triton":
        pytest.skip("needs the own Triton kernels, whose launches can be set; found others")
    settings = COMPILER + TILES[operation]
    refused = settings_are_right(rig, CORNERS[operation][number], settings)
    record_property("settings refused by the hardware", refused)
    for text in refused:
        print(f"skipped: needs more resources than the GPU has; found {text}")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_late_inputs_are_waited_for(rig: Rig, operation: str, number: int) -> None:
    offered(rig, operation)
    late_inputs_are_waited_for(rig, CORNERS[operation][number])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_writer_that_lets_its_dependents_start_is_waited_for(rig: Rig, operation: str, number: int) -> None:
    """Shipped CuTe kernels read some of this before they wait: their writers must not let them start."""
    offered(rig, operation)
    if rig.implementation.name not in ("triton", "cute"):
        pytest.skip("needs kernels that wait for everything that kernels write; found others")
    late_inputs_are_waited_for(rig, CORNERS[operation][number], early=True)


@pytest.mark.parametrize("records", ["row", "slot"])
def test_verify_and_commit_back_to_back(rig: Rig, records: str) -> None:
    for operation in ("verify", "commit"):
        offered(rig, operation)
    verify, commit = (Case(call=change(call, records=records)) for call in (VERIFY, COMMIT))
    repeats_agree(rig, Chain(rig, verify, commit))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_streams_do_not_meet(rig: Rig, operation: str) -> None:
    """The operation beside itself with other values, and beside another one."""
    offered(rig, operation)
    here = CORNERS[operation][0]
    others = [x for x in OPERATIONS if x in rig.implementation.operations]
    other = others[(others.index(operation) + 1) % len(others)]
    streams_do_not_meet(rig, (here, change(here, seed=here.seed + 1)))
    streams_do_not_meet(rig, (here, CORNERS[other][1]))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_graphs_follow_contents(rig: Rig, operation: str, number: int) -> None:
    offered(rig, operation)
    if not rig.implementation.offered(operation).graphs:
        pytest.skip("needs a call that a graph can hold; found one that waits for the host")
    graphs_follow_contents(rig, contents(CORNERS[operation][number]))


@pytest.mark.parametrize(
    ("which", "name"), [(which, name) for which, (_, names) in FAR_CASES.items() for name in names]
)
@pytest.mark.parametrize("stride", STRIDES)
def test_far_entries_are_found(rig: Rig, which: str, name: str, stride: str) -> None:
    """Slots, rows or tokens more than 2**31 elements apart, in real memory."""
    offered(rig, which.partition("-")[0])
    far_entries_are_found(rig, FAR_CASES[which][0], name, STRIDES[stride])
