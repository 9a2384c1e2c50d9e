"""Every property of ``tests.test_cute_paths`` holds for a sound wrapper and is broken by wrong ones."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from impl.contract import Implementation
from impl.cute import compile as kernels
from impl.cute import host
from impl.devices.registry import open_device
from impl.registry import resolve
from oracle.calls.fused_verify import DYNAMIC
from oracle.case import Case
from oracle.layout import Layout
from tests import test_cute_paths as paths
from tests.meta.fused_fake import FusedFake, Run
from tests.test_cute_paths import ALIGNED_COMMIT, BASE, COMMIT, FULL, Bench, Placed, fused

change = msgspec.structs.replace
CALLS = [
    fused(seed=1),
    fused(change(BASE, taps="float32"), seed=2),
    fused(change(BASE, lower_bound=-11.0), seed=3),
    fused(change(BASE, dim_first=False), seed=4),
    fused(layouts=paths.ODD_ROWS, seed=5),
]
OFF = [fused(layouts={name: Layout(offset=1)}, seed=i) for i, name in enumerate(DYNAMIC)]


class Sound(FusedFake):
    """The fake with all that section 1.7 says of the own wrapper."""

    def __call__(self, **arguments: Any) -> Any:
        """Nothing to do is done at once; strided index vectors are declined."""
        return self._enter(arguments)

    def _enter(self, arguments: dict[str, Any]) -> Any:
        if not len(arguments["state_indices"]) or not len(arguments["mixed_qkv"]):
            return True
        index = [arguments[name] for name in ("query_start_loc", "state_indices", "num_accepted_tokens")]
        if any(x.stride(0) != 1 and len(x) > 1 for x in index):
            return False
        return self._launch(arguments)

    def _launch(self, arguments: dict[str, Any]) -> Any:
        """What is left to say by a wrong one."""
        return super().__call__(**arguments)

    def _aligned(self, arguments: dict[str, Any]) -> bool:
        """Whether the call is not to be declined."""
        return all(arguments[name].data_ptr() % 16 == 0 for name in DYNAMIC)


class CountsDeclined(Sound):
    """Takes a ticket before it declines."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        self.counter += not self._aligned(arguments)
        return super()._launch(arguments)


class RollsFirst(Sound):
    """Rolls the conv rows, then looks at the alignment of the rest."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        self._fill(arguments["conv_state"])
        return super()._launch(arguments)

    def _fill(self, x: torch.Tensor) -> None:
        x[3] = x[3].roll(1, 0)


class OtherNaN(Sound):
    """NaNs as a conversion gives them, which the contract of one kernel allows; here two must agree."""

    name = "key_gate"

    def _launch(self, arguments: dict[str, Any]) -> Any:
        x = arguments["conv_state"] if self.name == "conv_state" else arguments["records"].key_gate[..., 128:]
        bits = x.view(torch.int16)
        before = bits.clone()
        result = super()._launch(arguments)
        bits[x.isnan() & (bits != before)] ^= 1
        return result


class OtherNaNRolled(OtherNaN):
    """Likewise, in conv rows."""

    name = "conv_state"


class DeclinesAll(Sound):
    """Always sound, never of use."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        return False


class IgnoresStrides(Sound):
    """Looks at no index vector's stride."""

    def _enter(self, arguments: dict[str, Any]) -> Any:
        return self._launch(arguments)


class DeclinesAnyStride(Sound):
    """Even that of a vector of one element, which says nothing."""

    def _enter(self, arguments: dict[str, Any]) -> Any:
        return arguments["state_indices"].stride() == (1,) and super()._enter(arguments)


class LooksOnce(Sound):
    """Takes the first call's alignment for all."""

    looked = False

    def _launch(self, arguments: dict[str, Any]) -> Any:
        fault, self.looked = self.looked, True
        self.run.fault = "never declines" if fault else ""
        return super()._launch(arguments)


class SulksForever(Sound):
    """Once declined, always declined."""

    declined = False

    def _launch(self, arguments: dict[str, Any]) -> Any:
        self.declined = self.declined or not self._aligned(arguments)
        return not self.declined and super()._launch(arguments)


class KeepsPath(Sound):
    """The kernel of the first launch, for strides may change but shapes do not."""

    first: bool | None = None

    def _special(self, t: dict[str, torch.Tensor]) -> bool:
        if self.first is None:
            self.first = super()._special(t)
        return self.first


class KeepsTensors(Sound):
    """Finds outputs by shape, not by address."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.known: dict[object, torch.Tensor] = {}

    def _launch(self, arguments: dict[str, Any]) -> Any:
        if not self._aligned(arguments):
            return False
        out = self.known.setdefault(arguments["out"].shape, arguments["out"])
        return super()._launch(arguments | {"out": out})


class OneOfAll(Sound):
    """What a process compiled once is taken whatever else it was compiled for."""

    compiled_for: ClassVar[dict[object, Any]] = {}

    def _once(self, value: Any) -> Any:
        """The value of the first object of as many heads."""
        return self.compiled_for.setdefault((self.num_heads, self.window), value)


class OneDtypeOfTaps(OneOfAll):
    """The taps' dtype is not part of the key."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        taps = arguments["conv_weight"].to(self._once(self.conv_weight_dtype))
        return super()._launch(arguments | {"conv_weight": taps})


class OneBound(OneOfAll):
    """The bound is compiled in, and not part of the key."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        return super()._launch(arguments | {"lower_bound": self._once(arguments["lower_bound"])})


class OneBoundAnObject(Sound):
    """Right for fresh objects."""

    bound: float | None = None

    def _launch(self, arguments: dict[str, Any]) -> Any:
        self.bound = arguments["lower_bound"] if self.bound is None else self.bound
        return super()._launch(arguments | {"lower_bound": self.bound})


class WritesEarlierOutputs(Sound):
    """Clears what it used before."""

    before: torch.Tensor | None = None

    def _launch(self, arguments: dict[str, Any]) -> Any:
        if self.before is not None and self.before.data_ptr() != arguments["out"].data_ptr():
            self.before.zero_()
        self.before = arguments["out"]
        return super()._launch(arguments)


class ReadsEarly(Sound):
    """Reads a tensor before the kernel in front has written it."""

    name = "state"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: dict[int, torch.Tensor] = {}

    def _launch(self, arguments: dict[str, Any]) -> Any:
        now = arguments[self.name]
        old = self.seen.get(now.data_ptr(), now)
        kept = now.clone()
        current = kept.clone()
        now.copy_(old)
        result = super()._launch(arguments)
        written = now.clone() if self.name == "conv_state" else current
        now.copy_(written)
        self.seen[now.data_ptr()] = kept
        return result


class ReadsConvRowsEarly(ReadsEarly):
    """Likewise conv rows."""

    name = "conv_state"


class ForgetsCounter(Sound):
    """Nobody resets it."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        self.counter += len(arguments["state_indices"])
        return super()._launch(arguments)


class ForgetsCounterOfNothing(Sound):
    """Leaves tickets where no row is live: nobody takes the last one."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        starts = arguments["query_start_loc"]
        live = (arguments["state_indices"] > 0) & (starts[1:] > starts[:-1])
        self.counter += not bool(live.any())
        return super()._launch(arguments)


class HidesTickets(Sound):
    """The counter that it shows is not the one it uses; that one is never reset."""

    tickets = 0

    def _launch(self, arguments: dict[str, Any]) -> Any:
        first, self.tickets = self.tickets, self.tickets + len(arguments["state_indices"])
        return True if first else super()._launch(arguments)


class LosesTheLastItem(Sound):
    """One item short."""

    def _launch(self, arguments: dict[str, Any]) -> Any:
        starts = arguments["query_start_loc"][:-1]
        rows = {name: arguments[name][:-1] for name in ("state_indices", "num_accepted_tokens")}
        return super()._launch(arguments | rows | {"query_start_loc": starts})


class Wavers(Sound):
    """Another last bit in every other launch."""

    odd = False

    def _launch(self, arguments: dict[str, Any]) -> Any:
        result = super()._launch(arguments)
        if self.odd:
            arguments["out"].view(torch.int16)[0, 0] ^= 1
        self.odd = not self.odd
        return result


class WritesWhenThereIsNothing(Sound):
    """Rolls before it counts rows."""

    def _enter(self, arguments: dict[str, Any]) -> Any:
        arguments["conv_state"][1, 0, 0] = 0.0
        return super()._enter(arguments)


class DeclinesNothing(Sound):
    """Looks at alignment before it looks whether there is work."""

    def _enter(self, arguments: dict[str, Any]) -> Any:
        return self._aligned(arguments) and super()._enter(arguments)


class TwicePair(Bench):
    """Runs the Triton pair twice behind a declined call."""

    def triton_pair(self, placed: Placed) -> None:
        """Both again."""
        super().triton_pair(placed)
        super().triton_pair(placed)


def bench_of(wrapper: type[Sound] = Sound, fault: str = "", made: type[Bench] = Bench) -> Bench:
    """A wrapper on the CPU, with this project's commit."""
    open_device("cpu")
    run = Run(fault)
    own = resolve("triton")
    implementation = Implementation(
        name=wrapper.__name__,
        operations={"fused_verify": partial(wrapper, run=run), "commit": own.operations["commit"]},
        arithmetic="factored-fp32",
        devices=("cpu",),
        path=lambda: run.path,
        set_conv_state_dim_first=own.set_conv_state_dim_first,
    )
    return made(implementation, "cpu")


def declined(bench: Bench) -> None:
    for case in OFF:
        paths.declined_calls_write_nothing(bench, case)


def strided(bench: Bench) -> None:
    for name in ("query_start_loc", "state_indices", "num_accepted_tokens"):
        paths.a_strided_index_is_declined(bench, name)


def order(bench: Bench) -> None:
    paths.an_object_keeps_no_path(bench, BASE)


def mixed(bench: Bench) -> None:
    paths.configurations_do_not_mix(bench, CALLS, [])


def early(bench: Bench) -> None:
    paths.nothing_reads_early(bench, fused())


def early_on_two(bench: Bench) -> None:
    paths.nothing_reads_early(bench, fused(change(BASE, dim_first=False)), streams=2)


def counter(bench: Bench) -> None:
    for slots in (FULL.slots, (0, -1, 0)):
        paths.the_counter_is_left_at_zero(bench, fused(change(FULL, slots=slots)))


def again(bench: Bench) -> None:
    paths.repeats_agree(bench, fused())


PROPERTIES: list[Callable[[Bench], None]] = [
    declined, strided, order, mixed, early, early_on_two, counter, again, paths.nothing_to_do_is_done,
]  # fmt: skip
WRONG: list[tuple[type[Sound], Callable[[Bench], None], str]] = [
    (CountsDeclined, declined, "assert 1 == 0"),
    (RollsFirst, declined, "bytes changed, first at conv_state"),
    (DeclinesAll, declined, "declined dense memory"),
    (IgnoresStrides, strided, "assert True != True"),
    (DeclinesAnyStride, strided, "assert False != False"),
    (LooksOnce, order, "launched with mixed_qkv off its alignment"),
    (SulksForever, order, "declined odd rows"),
    (KeepsPath, order, "took the path warp-specialised for plain"),
    (KeepsTensors, order, "the kernel: output"),
    (OneDtypeOfTaps, mixed, "the kernel: "),
    (OneBound, mixed, "the kernel: "),
    (OneBoundAnObject, mixed, "unlike a fresh object's"),
    (WritesEarlierOutputs, mixed, "changed by a later call"),
    (ReadsEarly, early, "back to back"),
    (ReadsEarly, early_on_two, "back to back"),
    (ReadsConvRowsEarly, early, "back to back"),
    (ForgetsCounter, counter, "launch 0 leaves the work counter at 3"),
    (ForgetsCounterOfNothing, counter, "launch 0 leaves the work counter at 1"),
    (ForgetsCounter, early, "the work counter is"),
    (HidesTickets, counter, "launch 1 unlike the first"),
    (LosesTheLastItem, counter, "the kernel: "),
    (Wavers, counter, "launch 1 unlike the first"),
    (Wavers, again, "launched again"),
    (WritesWhenThereIsNothing, paths.nothing_to_do_is_done, "bytes changed, first at conv_state"),
    (DeclinesNothing, paths.nothing_to_do_is_done, "declined though there is nothing to do"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """What one test compiles is not another's."""
    OneOfAll.compiled_for.clear()
    yield
    OneOfAll.compiled_for.clear()


@pytest.mark.parametrize("prop", PROPERTIES)
def test_a_sound_wrapper_has_the_property(prop: Callable[[Bench], None]) -> None:
    prop(bench_of())


@pytest.mark.parametrize(
    ("wrapper", "prop", "text"),
    WRONG,
    ids=[f"{wrapper.__name__}-{prop.__name__}" for wrapper, prop, _ in WRONG],
)
def test_a_wrong_wrapper_is_found(wrapper: type[Sound], prop: Callable[[Bench], None], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        prop(bench_of(wrapper))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("never declines", "launched on memory that is not aligned"),
        ("writes before it declines", "bytes changed, first at out"),
        ("record of the raw key", "the kernel: record"),
        ("one column less rolls", "the kernel: roll"),
        ("couplings swapped", "the kernel: correction"),
    ],
)
def test_what_a_wrong_wrapper_leaves_is_found(fault: str, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        declined(bench_of(fault=fault))


@pytest.mark.parametrize(
    ("wrapper", "regimes", "text"),
    [
        (OtherNaN, {"raw_g": "specials"}, "gate records differ"),
        (OtherNaNRolled, {"mixed_qkv": "specials"}, "conv rows differ"),
    ],
)
def test_the_two_paths_agree_in_every_bit_of_a_copy(
    wrapper: type[Sound], regimes: dict[str, str], text: str
) -> None:
    """Of NaNs too, which the oracle lets change their payload."""
    case = change(OFF[0], regimes=regimes, call=FULL)
    paths.declined_calls_write_nothing(bench_of(), case)
    with pytest.raises(AssertionError, match=text):
        paths.declined_calls_write_nothing(bench_of(wrapper), case)


def test_a_wrong_pair_behind_a_declined_call_is_found() -> None:
    with pytest.raises(AssertionError, match="sequential-fp32: roll"):
        declined(bench_of(made=TwicePair))


def commit_bench(**changed: Any) -> Bench:
    """The project's commit on the CPU, as a context that calls ``commit`` with other arguments."""
    open_device("cpu")
    own = resolve("triton")
    context: Any = own.operations["commit"]
    wrong = type(context.__name__, (context,), changed)
    implementation = Implementation(
        name="commit",
        operations={"commit": wrong},
        arithmetic=own.arithmetic,
        devices=("cpu",),
        set_conv_state_dim_first=own.set_conv_state_dim_first,
    )
    return Bench(implementation, "cpu")


COMMITS = [Case(call=COMMIT, seed=1), Case(call=ALIGNED_COMMIT, seed=2)]


def test_sound_commits_do_not_mix() -> None:
    paths.configurations_do_not_mix(commit_bench(), [], COMMITS)


def test_a_mode_of_commit_that_is_kept_is_found() -> None:
    """The first commit of the process decides whether boundaries are written."""
    context: Any = resolve("triton").operations["commit"]
    first: list[bool] = []

    def commit(self: Any, *, block_table: Any, num_computed_tokens: Any, **others: Any) -> None:
        first.append(block_table is not None)
        if first[0]:
            context.commit(self, block_table=block_table, num_computed_tokens=num_computed_tokens, **others)
        else:
            context.commit(self, **others | {"mamba_block_size": None})

    with pytest.raises(AssertionError, match="the kernel: "):
        paths.configurations_do_not_mix(commit_bench(commit=commit), [], COMMITS)


def test_a_plan_that_is_kept_is_found() -> None:
    """A context that commits its first bytes' plan is right once: a second context of its kind is not."""
    context: Any = resolve("triton").operations["commit"]
    made: list[Any] = []

    def commit(self: Any, **arguments: Any) -> None:
        made.append(self)
        if made.count(self) > 1:
            arguments["num_accepted_tokens"] = arguments["num_accepted_tokens"] * 0 + 1
        context.commit(self, **arguments)

    with pytest.raises(AssertionError, match="unlike a fresh object's"):
        paths.configurations_do_not_mix(commit_bench(commit=commit), [], COMMITS)


@pytest.mark.parametrize("forgotten", ["align", "by_slot"])
def test_a_compile_cache_of_the_own_fold_that_forgets_is_found(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the emulator; the first value of the process serves all."""
    pytest.importorskip("tvm_ffi", reason="needs the extra kdafuzz[cute]")
    pytest.importorskip("cutlass", reason="needs the extra kdafuzz[cute]")
    right, first = kernels.variant, dict[str, bool]()

    def variant(kernel: str, arch: str, window: int, **options: bool) -> Any:
        if forgotten in options:
            options[forgotten] = first.setdefault(forgotten, options[forgotten])
        return right(kernel, arch, window, **options)

    open_device("emulator")
    bench = Bench(resolve("cute"), "emulator")
    calls = (COMMIT, change(COMMIT, records="slot"), ALIGNED_COMMIT)
    cases = [Case(call=call, seed=i) for i, call in enumerate(calls)]
    paths.configurations_do_not_mix(bench, [], cases)
    monkeypatch.setattr(host, "variant", variant)
    with pytest.raises(AssertionError, match="the kernel: "):
        paths.configurations_do_not_mix(bench, [], cases)
