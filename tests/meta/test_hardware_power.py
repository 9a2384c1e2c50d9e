"""Properties of ``tests.hardware`` and ``tests.far_memory`` hold for sound kernels and find planted faults.

All of it runs in the interpreter. What is late on a GPU is played here by writes that wait in a
queue: a sound callee lets them happen before it reads, a wrong one afterwards.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from impl.contract import Implementation
from impl.devices.base import Device
from impl.devices.registry import open_device
from impl.devices.share import VARIABLE
from impl.registry import resolve
from impl.triton import launch
from impl.triton.launch import adjusted, launch_settings
from oracle.calls.fused_verify import FusedVerify
from oracle.case import Case
from tests import far_memory
from tests import hardware as properties
from tests.far_memory import STRIDES, far_entries_are_found, zones
from tests.hardware import Chain, Rig
from tests.meta.faults import FAULTS
from tests.meta.fused_fake import implementation as fused_fake
from tests.meta.planted import Bench
from tests.meta.planted import load as load_planted
from tests.test_hardware import COMPILER, CORNERS, FAR_CASES, TILES

change = msgspec.structs.replace
Function = Callable[..., Any]
SMALL_VERIFY = change(
    CORNERS["verify"][1].call, key_dim=8, value_dim=8, activation="bfloat16", out="bfloat16"
)
VERIFY = Case(call=change(SMALL_VERIFY, own_out=True))
ALLOCATES = Case(call=SMALL_VERIFY)
UPDATE = Case(call=change(CORNERS["conv_update"][0].call, channels=24))
COMMIT = Case(
    call=change(
        CORNERS["commit"][0].call,
        key_dim=8,
        value_dim=8,
        records="slot",
        lower_bound=None,
        state="float32",
        channels=8,
        slots=SMALL_VERIFY.slots,
    )
)
LISTED = {
    "verify": (VERIFY, ALLOCATES),
    "conv_update": (UPDATE, Case(call=change(CORNERS["conv_update"][1].call, channels=24))),
    "conv_prefill": (CORNERS["conv_prefill"][1],),
    "packed_conv": (change(CORNERS["packed_conv"][1], call=change(CORNERS["packed_conv"][1].call)),),
    "commit": (COMMIT, Case(call=change(CORNERS["commit"][1].call, key_dim=8, value_dim=8, channels=8))),
}
SOUND = [pytest.param(case, id=f"{op}-{i}") for op, some in LISTED.items() for i, case in enumerate(some)]


@dataclass(frozen=True)
class Queue(Rig):
    """Late writes wait until a callee, or whoever waits, lets them happen."""

    pending: list[Callable[[], None]] = field(default_factory=list)

    def flush(self) -> None:
        """Let them happen."""
        while self.pending:
            self.pending.pop(0)()

    def wait(self) -> None:
        """Everything that was launched is done."""
        self.flush()

    def late(self, *arguments: Any, **options: Any) -> Callable[[], None]:
        """The write comes later."""
        return partial(self.pending.append, super().late(*arguments, **options))


def of(
    operation: str = "", wrong: Callable[[Function], Function] | None = None, make: type[Rig] = Rig
) -> Rig:
    """The own kernels on the CPU, with one operation's functions wrapped."""
    open_device("cpu")
    own = resolve("triton")
    if wrong is None:
        return make(own, "cpu")
    found = own.operations[operation]
    functions = found if isinstance(found, tuple) else (found,)
    wrapped = tuple(functools.wraps(function)(wrong(function)) for function in functions)
    return make(replace(own, operations={**own.operations, operation: wrapped}), "cpu")


def broken(match: str) -> Any:
    return pytest.raises(AssertionError, match=match)


# ---- Sound kernels.


@pytest.mark.parametrize("case", SOUND)
def test_sound_kernels_repeat_themselves(case: Case) -> None:
    rig = of()
    properties.repeats_agree(rig, rig.placed(case))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("case", SOUND)
def test_sound_kernels_wait(case: Case, early: bool) -> None:
    properties.late_inputs_are_waited_for(of(), case, early=early)


@pytest.mark.parametrize("case", SOUND)
def test_sound_kernels_follow_contents(case: Case) -> None:
    properties.graphs_follow_contents(of(), properties.contents(case))


def test_sound_kernels_keep_apart() -> None:
    properties.streams_do_not_meet(of(), (UPDATE, ALLOCATES))
    properties.streams_do_not_meet(of(), (COMMIT, change(COMMIT, seed=1)))


def test_sound_kernels_back_to_back() -> None:
    rig = of()
    properties.repeats_agree(rig, Chain(rig, VERIFY, COMMIT))


FUSED: FusedVerify = FAR_CASES["fused_verify"][0].call  # type: ignore[assignment]


def test_a_fused_verify_has_all_properties() -> None:
    open_device("cpu")
    rig, case = Rig(fused_fake(), "cpu"), Case(call=change(FUSED, heads=1))
    properties.repeats_agree(rig, rig.placed(case))
    properties.late_inputs_are_waited_for(rig, case, early=True)
    properties.graphs_follow_contents(rig, properties.contents(case))
    properties.streams_do_not_meet(rig, (case, change(case, seed=1)))
    for name in FAR_CASES["fused_verify"][1]:
        far_entries_are_found(rig, case, name, STRIDES["wide"])


FAR_SOUND = [("verify", "state"), ("verify-slot", "correction"), ("conv_update", "x"), ("commit", "state.0")]
FAR_SOUND += [("conv_prefill", "conv_states"), ("packed_conv", "x"), ("commit", "conv_state.0")]


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize(("which", "name"), FAR_SOUND)
def test_sound_kernels_find_far_entries(which: str, name: str, stride: int) -> None:
    far_entries_are_found(of(), FAR_CASES[which][0], name, stride)


# ---- Planted faults.


def _wavering(function: Function) -> Function:
    calls = itertools.count()

    def call(**arguments: Any) -> Any:
        result = function(**arguments)
        if next(calls) == 2:
            result.view(torch.int16).flatten()[-1:] ^= 1
        return result

    return call


def test_a_bit_of_one_launch_is_found() -> None:
    """In what the caller passed, and in what the callee allocated."""
    for case, place in (
        (UPDATE, r"first at out\[11, 23\]"),
        (ALLOCATES, r"first at out\[7, 1, 7\] of the result"),
    ):
        rig = of(case.op, _wavering)
        with broken(f"launch 1: {place}"):
            properties.repeats_agree(rig, rig.placed(case))


def test_a_byte_beside_the_tensors_is_found() -> None:
    def creeping(function: Function) -> Function:
        calls = itertools.count()

        def call(**arguments: Any) -> Any:
            result, x = function(**arguments), arguments["x"]
            x.as_strided((1,), (1,), x.storage_offset() - 8).fill_(float(next(calls)))
            return result

        return call

    rig = of("conv_update", creeping)
    with broken("2 bytes outside every tensor|1 bytes outside every tensor"):
        properties.repeats_agree(rig, rig.placed(UPDATE))


@pytest.mark.parametrize("operation", TILES)
def test_every_launch_asks_for_its_settings(operation: str) -> None:
    """Also for tiles, which change the grid; the results are judged."""
    case = LISTED[operation][0]
    assert properties.settings_are_right(of(), case, TILES[operation][:2] + COMPILER[-1:]) == []
    with launch_settings(num_warps=2, num_stages=1) as launches:
        of().placed(case).run()
    assert launches
    for kernel, options in launches:
        assert (options["num_warps"], options["num_stages"]) == (2, 1), kernel


def test_settings_end_with_their_block() -> None:
    options = {"num_warps": 1, "BV": 4}
    with launch_settings(num_warps=4, CHANNELS=8) as outer:
        with launch_settings(BV=2) as inner:
            assert adjusted("a", options) == {"num_warps": 1, "BV": 2}
        assert adjusted("b", options) == {"num_warps": 4, "BV": 4}
    assert adjusted("c", options) is options
    assert [kernel for kernel, _ in inner] == ["a"]
    assert [kernel for kernel, _ in outer] == ["b"]


@pytest.mark.parametrize("setting", [{"num_warps": 3}, {"BV": 0}, {"num_stages": 0}])
def test_settings_that_no_kernel_can_have(setting: dict[str, int]) -> None:
    with (
        pytest.raises(ValueError, match=f"launch option {next(iter(setting))} must be"),
        launch_settings(**setting),
    ):
        pass


def test_a_launch_that_does_not_ask_is_found() -> None:
    def deaf(function: Function) -> Function:
        def call(**arguments: Any) -> Any:
            with launch_settings():
                return function(**arguments)

        return call

    with broken("num_warps.*no launch asked"):
        properties.settings_are_right(of("conv_update", deaf), UPDATE, COMPILER)


def test_a_launch_that_does_not_use_what_it_asked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def stubborn(kernel: str, options: dict[str, Any]) -> dict[str, Any]:
        launch._asked[-1][1].append((kernel, options))
        return options

    monkeypatch.setattr("impl.triton.conv.adjusted", stubborn)
    with broken("conv_update was launched with"):
        properties.settings_are_right(of(), UPDATE, [{"num_warps": 2}])


def test_a_setting_that_computes_wrongly_is_found() -> None:
    def fragile(function: Function) -> Function:
        def call(**arguments: Any) -> Any:
            result = function(**arguments)
            if launch._asked[-1][0].get("num_stages") == 3:
                result[0, 0] += 1.0
            return result

        return call

    with broken(r"'num_stages': 3.*conv: out.* ratio"):
        properties.settings_are_right(of("conv_update", fragile), UPDATE, COMPILER)


def _limited(most: int) -> Callable[[Function], Function]:
    from triton.runtime.errors import OutOfResources  # not before the interpreter is on

    def limit(function: Function) -> Function:
        def call(**arguments: Any) -> Any:
            if launch._asked[-1][0].get("num_warps", 1) > most:
                raise OutOfResources(300000, 232448, "shared memory")
            return function(**arguments)

        return call

    return limit


def test_settings_that_the_hardware_cannot_hold() -> None:
    """They are named; with more than half of them refused nothing is claimed."""
    of()
    refused = properties.settings_are_right(of("conv_update", _limited(4)), UPDATE, COMPILER)
    assert len(refused) == 4
    assert all("'num_warps': 8" in text and "shared memory" in text for text in refused)
    with broken("too few settings ran"):
        properties.settings_are_right(of("conv_update", _limited(1)), UPDATE, COMPILER)


def _sound_reader(rig_of: dict[str, Queue]) -> Callable[[Function], Function]:
    def wrap(function: Function) -> Function:
        def call(**arguments: Any) -> Any:
            rig_of["rig"].flush()
            return function(**arguments)

        return call

    return wrap


def _early_reader(name: str, rig_of: dict[str, Queue]) -> Callable[[Function], Function]:
    def wrap(function: Function) -> Function:
        def call(**arguments: Any) -> Any:
            early = arguments[name].clone()
            rig_of["rig"].flush()
            now, late = arguments[name], arguments[name].clone()
            now.copy_(early)
            result = function(**arguments)
            if torch.equal(now.view(torch.uint8), early.view(torch.uint8)):
                now.copy_(late)
            return result

        return call

    return wrap


def _queue(operation: str, wrap: Callable[[dict[str, Queue]], Callable[[Function], Function]]) -> Queue:
    known: dict[str, Queue] = {}
    made = of(operation, wrap(known), Queue)
    assert isinstance(made, Queue)
    known["rig"] = made
    return made


EARLY = [
    ("x", UPDATE, False),
    ("weight", UPDATE, False),
    ("conv_state_indices", UPDATE, False),
    ("query_start_loc", UPDATE, False),
    ("conv_state", UPDATE, True),
    ("checkpoint_state", VERIFY, True),
    ("A_log", VERIFY, False),
]


@pytest.mark.parametrize(("name", "case", "early"), EARLY, ids=[name for name, _, _ in EARLY])
def test_an_early_read_is_found(name: str, case: Case, early: bool) -> None:
    properties.late_inputs_are_waited_for(_queue(case.op, _sound_reader), case, early=early)
    rig = _queue(case.op, partial(_early_reader, name))
    with broken("behind a writer that is late, launch 0: first at"):
        properties.late_inputs_are_waited_for(rig, case, early=early)


def test_a_writer_that_lets_dependents_start_spoils_no_parameter() -> None:
    """What no kernel writes may be read early."""
    for name, case in (("weight", UPDATE), ("A_log", VERIFY)):
        rig = _queue(case.op, partial(_early_reader, name))
        properties.late_inputs_are_waited_for(rig, case, early=True)


def test_an_output_that_two_calls_share_is_found() -> None:
    kept: dict[object, torch.Tensor] = {}

    def sharing(function: Function) -> Function:
        def call(**arguments: Any) -> Any:
            result = function(**arguments)
            return kept.setdefault(result.shape, result).copy_(result)

        return call

    cases = (ALLOCATES, change(ALLOCATES, seed=1))
    with broken("verify beside verify and verify, launch 0: first at out"):
        properties.streams_do_not_meet(of("verify", sharing), cases)


@pytest.mark.parametrize("name", ["query_start_loc", "conv_state_indices", "weight"])
def test_a_tensor_that_a_graph_does_not_read_again_is_found(name: str) -> None:
    def remembering(function: Function) -> Function:
        known: dict[int, torch.Tensor] = {}

        def call(**arguments: Any) -> Any:
            first = known.setdefault(arguments[name].data_ptr(), arguments[name].clone())
            return function(**arguments | {name: first})

        return call

    case = change(UPDATE, call=UPDATE.call.only([0, 2, 1, 3]))
    with broken("replayed with the bytes of seed [12], launch [12]: first at"):
        properties.graphs_follow_contents(of("conv_update", remembering), properties.contents(case))


def test_records_that_a_commit_reads_too_early_are_found() -> None:
    def slow(known: dict[str, Queue]) -> Callable[[Function], Function]:
        def wrap(function: Function) -> Function:
            def call(**arguments: Any) -> Any:
                name = "correction_cache" if "correction_cache" in arguments else "records"
                records = arguments[name] if name == "correction_cache" else arguments[name].correction
                before = records.clone()
                result = function(**arguments)
                after = records.clone()
                records.copy_(before)
                known["rig"].pending.append(lambda: records.copy_(after))
                return result

            return call

        return wrap

    rig = _queue("verify", slow)
    with broken("launched again, launch 0: .*state.0"):
        properties.repeats_agree(rig, Chain(rig, VERIFY, COMMIT))


# ---- Far memory.


def _wrapped(tensor: torch.Tensor, *, signed: bool, unit: int) -> list[torch.Tensor]:
    """The entries of a tensor where 32-bit products find them; ``unit`` bytes are counted as one."""
    found = []
    for entry in range(tensor.shape[0]):
        product = entry * tensor.stride(0) * tensor.element_size() // unit % (1 << 32)
        product -= (1 << 32) if signed and product >= 1 << 31 else 0
        offset = tensor.storage_offset() + product * unit // tensor.element_size()
        found.append(tensor.as_strided(tensor.shape[1:], tensor.stride()[1:], offset))
    return found


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize(
    ("which", "argument", "name"),
    [
        ("conv_update", "conv_state", "conv_state"),
        ("conv_update", "out", "out"),
        ("verify", "checkpoint_state", "state"),
    ],
)
def test_an_address_in_32_bits_is_found(
    which: str, argument: str, name: str, bytes_: bool, signed: bool, stride: int
) -> None:
    """What is read is poison, and what is written is seen."""

    def narrow(function: Function) -> Function:
        def call(**arguments: Any) -> Any:
            far = arguments[argument]
            entries = _wrapped(far, signed=signed, unit=1 if bytes_ else far.element_size())
            near = torch.stack(entries)
            result = function(**arguments | {argument: near})
            for entry, value in zip(entries, near, strict=True):
                entry.copy_(value)
            return far if argument == "out" else result

        return call

    with broken(f"{name}: .*bytes written where entry|{name} far apart"):
        far_entries_are_found(of(which, narrow), FAR_CASES[which][0], name, stride)


def test_a_kernel_with_a_narrow_address_is_found(tmp_path: Path) -> None:
    """A real one: the slot's offset in 32 bits."""
    open_device("cpu")
    with Bench(tmp_path) as bench:
        module = load_planted(str(bench.select(FAULTS["state_address_in_32_bits"])))
    functions = (module.kda_recoverssm_verify, module.kda_recoverssm_verify_by_slot)
    own = resolve("triton")
    planted = Implementation("planted", {"verify": functions}, arithmetic=own.arithmetic)
    with broken("state far apart"):
        far_entries_are_found(Rig(planted, "cpu"), FAR_CASES["verify"][0], "state", STRIDES["narrow"])


def test_zones_are_where_32_bits_lead() -> None:
    found = {(zone.start, zone.what) for zone in zones(4, 64, 2, (1 << 31) + (1 << 20))}
    low, high = -(1 << 31), 1 << 31
    assert ((low + (1 << 20)) * 2, "where entry 1 is in signed 32-bit elements") in found
    assert (2 * (1 << 21), "where entry 2 is in unsigned 32-bit elements") in found
    assert ((high + 3 * (1 << 20)) * 2, "where entry 3 is in unsigned 32-bit elements") in found
    assert (1 << 21, "where entry 1 is in unsigned 32-bit bytes") in found
    assert not any("entry 0" in what and "bit" in what for _, what in found)


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_no_zone_reaches_into_an_entry(itemsize: int, stride: int) -> None:
    """Not of tensors as large as may be, but for the zones beside entries; some wrap in every way."""
    size, entries = (1 << 20) - 512, 4
    found = zones(entries, size, itemsize, stride)
    places = [range(i * stride * itemsize, i * stride * itemsize + size) for i in range(entries)]
    inside = [zone for zone in found if "beside" not in zone.what]
    assert not any(zone.start < e.stop and e.start < zone.end for zone in inside for e in places)
    ways = {zone.what.partition(" is in ")[2] for zone in inside}
    assert len(ways) == 4


def test_too_little_memory_is_a_skip_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(far_memory, "PATIENCE_SECONDS", 0.0)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, total, kind in (
        (10 * gib, 12 * gib, "memory; found 12.0"),
        (10 * gib, 90 * gib, "free memory; found 10.0"),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free, total=total: (free, total))
        with pytest.raises(pytest.skip.Exception, match=rf"needs 17\.0 GiB of GPU {kind} GiB"):
            far_memory.reserve(Rig(resolve("triton"), "cuda"), 16 * gib)
    monkeypatch.setenv(VARIABLE, str(7 * gib))
    with pytest.raises(pytest.skip.Exception, match=r"needs 23\.0 GiB of GPU free memory"):
        far_memory.reserve(Rig(resolve("triton"), "cuda"), 16 * gib)


def test_far_entries_may_take_more_than_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a device limits its process: the limit is lifted after that, and before memory is asked for."""
    order: list[str] = []

    def opened(name: str) -> Device:
        order.append(f"{name} opened")
        return open_device("cpu")

    @contextmanager
    def lifted() -> Iterator[None]:
        order.append("lifted")
        yield

    def reserved(rig: Rig, size: int) -> torch.Tensor:
        order.append("reserved")
        pytest.skip("enough")

    monkeypatch.setattr("tests.hardware.open_device", opened)
    monkeypatch.setattr(far_memory, "whole_memory", lifted)
    monkeypatch.setattr(far_memory, "reserve", reserved)
    case, (name, *_) = FAR_CASES["verify"]
    with pytest.raises(pytest.skip.Exception, match="enough"):
        far_entries_are_found(Rig(resolve("triton"), "cuda"), case, name, STRIDES["wide"])
    assert order == ["cuda opened", "lifted", "reserved"]
