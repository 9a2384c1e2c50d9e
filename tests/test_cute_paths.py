"""Properties of the CuTe wrappers over several calls: declining, what objects remember, streams.

Each property is a function of a ``Bench``, for any implementation of the fused verify; they raise
``AssertionError``. The tests run them on ``cute``, and on those implementations of ``--impl`` that end
in ``:cute``: on the GPU with ``--device cuda``, on the emulator otherwise.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from impl.arena import Arena
from impl.bindings import BINDINGS
from impl.contract import Implementation, Records, UnavailableError
from impl.cute.emulator import settings
from impl.devices.registry import open_device
from impl.observe import written
from impl.registry import resolve, split
from oracle.calls.commit import Commit
from oracle.calls.fused_verify import DYNAMIC, FusedVerify, K
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import DECLINED, Expected, Observation
from oracle.judge import judge
from oracle.layout import Layout, Page
from oracle.stored import same_bits
from oracle.tracked import arithmetic
from oracle.values import Values, build
from tests.meta.drawn import sample
from tests.strategies.cases import cases

change = msgspec.structs.replace
WRITTEN = ("out", "correction", "key_gate", "conv_state", "state")
"""Tensors that verify or commit write."""
RECORDS = ("correction", "key_gate")
PER_LAYER = ("state", "conv_state", *RECORDS, "A_log", "dt_bias")
"""Tensors that commit knows with the layer's number."""
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
ONE = change(BASE, heads=1, window=1, capacity=1, qlens=(1,), slots=(2,), ids=(0,), accepted=(1,))
FULL = change(BASE, qlens=(4, 1, 2))
"""Six items, none of them empty."""
ODD_ROWS = {"mixed_qkv": Layout(gaps=(1, 0))}
SLOT_PAGES = (Page(members=("conv_state", "state"), gaps=(0, 64), tail=16),)
NOBODY: dict[str, Any] = {"qlens": (), "slots": (), "ids": (), "accepted": ()}
COMMIT = Commit(
    heads=2,
    key_dim=K,
    value_dim=K,
    window=4,
    channels=24,
    state_len=6,
    pool=8,
    qlens=(4, 1, 3),
    slots=(3, 1, 5),
    ids=(0, 1, 2),
    capacity=4,
    accepted=(2, 1, 3),
    activation="bfloat16",
    state="bfloat16",
    conv="bfloat16",
)
ALIGNED_COMMIT = change(
    COMMIT,
    slots=(2, 1, 5),
    accepted=(4, 1, 3),
    block_size=8,
    computed=(6, 3, 9),
    table=((2, 3, 0), (1, 0, 0), (4, 5, 0)),
)
"""The first row crosses a block's boundary and ends in the next block."""
VERIFIES: list[tuple[dict[str, Any], dict[str, Layout]]] = [
    ({}, {}),
    ({"heads": 1}, {}),
    ({}, ODD_ROWS),
    ({"dim_first": False}, {}),
    ({"taps": "float32"}, {}),
    ({"window": 2, "qlens": (2, 1, 0), "accepted": (2, 1, 1)}, {}),
    ({"heads": 3}, ODD_ROWS),
    ({"dim_first": False, "taps": "float32"}, {}),
    ({"lower_bound": -11.0}, {}),
]
"""Calls that differ in what kernels are compiled for or chosen by."""
COMMITS = (
    COMMIT,
    ALIGNED_COMMIT,
    change(COMMIT, heads=1, layers=2),
    change(COMMIT, window=2, state_len=4, qlens=(2, 1, 2)),
    change(ALIGNED_COMMIT, heads=1),
    change(ALIGNED_COMMIT, records="slot"),
    change(COMMIT, records="slot"),
)


# ---- What properties are made of.


class Placed:
    """A case in memory of its own, which stays as long as this object."""

    def __init__(self, case: Case, device: str, values: Values | None = None) -> None:
        self.case = case
        self.values = values if values is not None else build(case)
        self.device = open_device(device)
        self.arena = Arena(case, self.values, self.device)
        self.views = self.arena.views()

    def image(self) -> np.ndarray:
        """All bytes, when the device is done."""
        self.arena.finish()
        return self.arena.after

    def require_untouched(self) -> None:
        """No byte differs from the starting ones."""
        where = "" if (self.image() == self.arena.before).all() else self.arena.difference(self.arena.before)
        assert not where, f"bytes changed, {where}"

    def require_same(self, image: np.ndarray, what: str) -> None:
        """All bytes are as in an image of the same memory."""
        self.image()
        where = self.arena.difference(image)
        assert not where, f"{what}: {where}"


@dataclass(frozen=True)
class Bench:
    """An implementation on a device, and how one of its objects is called there."""

    implementation: Implementation
    device: str

    @property
    def repeats(self) -> int:
        """How often a call is repeated that must give the same bits."""
        return 1000 if self.device == "cuda" else 3

    def place(self, case: Case, values: Values | None = None) -> Placed:
        """Memory for a case; ``Skipped`` if the implementation does not take it."""
        refusal = self.implementation.takes(case)
        if refusal:
            pytest.skip(refusal)
        return Placed(case, self.device, values)

    def wrapper(self, call: FusedVerify) -> Any:
        """A compiled wrapper for calls of this shape."""
        made: Any = self.implementation.variants("fused_verify")[""](
            num_heads=call.heads,
            window=call.window,
            conv_dim_first=call.dim_first,
            conv_weight_dtype=getattr(torch, call.taps),
            device=torch.empty(0, device="cuda" if self.device == "cuda" else "cpu").device,
        )
        made.compile()
        return made

    def verify(
        self, made: Any, placed: Placed, turn: int = 0, others: dict[str, torch.Tensor] | None = None
    ) -> bool:
        """Call the wrapper on placed memory; ``others`` are tensors in place of the case's."""
        views, call = placed.views, placed.case.call
        assert isinstance(call, FusedVerify)
        arguments = {name: x for name, x in views.items() if name not in RECORDS} | (others or {})
        records = Records(views["correction"], views["key_gate"])
        placed.device.share(views, written(call))
        with self._variant(placed, turn):
            launched = made(**arguments, lower_bound=call.lower_bound, records=records)
        assert launched is True or launched is False, f"returned {launched!r}"
        path = self.implementation.path()
        if launched and path and placed.case.path not in ("", DECLINED):
            assert path == placed.case.path, f"took the path {path} for {placed.case.path}"
        return bool(launched)

    def context(self, placed: Placed) -> Any:
        """A commit context over the memory of a fused verify, as a layer's."""
        call, views = placed.case.call, placed.views
        assert isinstance(call, FusedVerify)
        self.implementation.set_conv_state_dim_first(call.dim_first)
        layer = SimpleNamespace(
            kv_cache=(views["conv_state"] if call.dim_first else views["conv_state"].mT, views["state"]),
            A_log=views["A_log"],
            dt_bias=views["dt_bias"],
            local_num_heads=call.heads,
            head_dim=K,
            gate_lower_bound=call.lower_bound,
            recoverssm_records=Records(views["correction"], views["key_gate"]),
        )
        made: Any = self.implementation.variants("commit")[""]
        return made.create([layer], spec_query_len=call.window, max_num_reqs=call.capacity)

    def commit(self, context: Any, placed: Placed, turn: int = 0) -> None:
        """Commit the accepted tokens of the rows that were verified."""
        layer = {f"{name}.0" if name in PER_LAYER else name: x for name, x in placed.views.items()}
        placed.device.share(layer, frozenset({"state.0", "conv_state.0"}))
        names = ("num_accepted_tokens", "state_indices", "query_start_loc")
        with self._variant(placed, turn):
            context.commit(**{name: placed.views[name] for name in names})

    def prepared_commit(self, placed: Placed) -> Callable[[], dict[str, torch.Tensor]]:
        """A case of commit with a context of its own; each call commits and gives the plan."""
        function, call = self.implementation.function(placed.case), placed.case.call
        run = BINDINGS["commit"](call, placed.views, function, self.implementation)

        def commit() -> dict[str, torch.Tensor]:
            placed.device.share(placed.views, written(call))
            with self._variant(placed, 0):
                return {name: x.cpu() for name, x in run().items()}

        return commit

    def triton_pair(self, placed: Placed) -> None:
        """What a caller runs when the wrapper declines: the convolution, then verify."""
        call, v = placed.case.call, placed.views
        assert isinstance(call, FusedVerify)
        heads = (call.heads, K)
        triton = resolve("triton")
        update, verify = (triton.variants(name) for name in ("conv_update", "verify"))
        y = torch.zeros_like(v["mixed_qkv"], memory_format=torch.contiguous_format)
        update[""](
            x=v["mixed_qkv"],
            conv_state=v["conv_state"] if call.dim_first else v["conv_state"].mT,
            weight=v["conv_weight"],
            activation="silu",
            conv_state_indices=v["state_indices"],
            num_accepted_tokens=v["num_accepted_tokens"],
            query_start_loc=v["query_start_loc"],
            max_query_len=call.window,
            out=y,
        )
        q, k, value = y.view(1, call.tokens, 3, *heads).unbind(2)
        verify["row"](
            q=q,
            k=k,
            v=value,
            raw_g=v["raw_gate"].unflatten(1, heads)[None],
            raw_beta=v["raw_beta"][None],
            A_log=v["A_log"],
            dt_bias=v["dt_bias"],
            lower_bound=call.lower_bound,
            checkpoint_state=v["state"],
            records=Records(v["correction"], v["key_gate"]),
            query_start_loc=v["query_start_loc"],
            state_indices=v["state_indices"],
            spec_query_len=call.window,
            out=v["out"].unflatten(1, heads)[None],
        )

    def require_right(
        self, placed: Placed, declared: str = "", more: dict[str, torch.Tensor] | None = None
    ) -> tuple[Expected, dict[str, torch.Tensor]]:
        """Everything within the oracle's bounds for an arithmetic, every other byte kept; what was left."""
        arena, case = placed.arena, placed.case
        arena.finish()
        after = arena.dense(arena.after) | (more or {})
        seen = Observation(before=arena.dense(arena.before), after=after, strays=arena.strays())
        # Triton kernels run in the interpreter where CuTe kernels are emulated.
        where = "cpu" if declared and self.device == "emulator" else self.device
        ar = arithmetic(declared or self.implementation.arithmetic, where)
        # Of a declined call nothing is expected, of what runs in its place the same as of dense memory.
        dense = change(case, layouts={}, pages=()) if case.path == DECLINED else case
        expected = replace(expect(dense, placed.values, ar), path="")
        verdict = judge(expected, seen)
        assert verdict.ok, f"{declared or 'the kernel'}: {verdict.problems[0].describe()}"
        return expected, after

    def _variant(self, placed: Placed, turn: int) -> AbstractContextManager[object]:
        """On the emulator a schedule, another one each turn."""
        found = placed.device.variants(placed.case.seed)
        return found[turn % len(found)].context()


def fused(call: FusedVerify = BASE, layouts: dict[str, Layout] | None = None, **fields: Any) -> Case:
    """A case with these layouts."""
    return Case(call=call, layouts=layouts or {}, **fields)


class Steps:
    """Verifies and commits back to back on one memory; what is expected is each step observed alone."""

    def __init__(self, bench: Bench, case: Case, steps: Sequence[str]) -> None:
        self.bench, self.steps = bench, steps
        self._expected = self._apart(case)
        self.placed = bench.place(case)
        self.made = bench.wrapper(case.call)  # type: ignore[arg-type]
        self.context = bench.context(self.placed) if "commit" in steps else None
        self._start = {name: self.placed.views[name].clone() for name in WRITTEN}
        self.wrong = torch.zeros((), dtype=torch.bool, device=self.placed.views["state"].device)
        self._turn = 0

    def _apart(self, case: Case) -> Placed:
        """The last of the steps' memories: each step has its own, and objects of its own."""
        image: np.ndarray | None = None
        for step in self.steps:
            placed = self.bench.place(case)
            if image is not None:
                placed.arena.before = image
                placed.arena.restore()
            if step == "commit":
                self.bench.commit(self.bench.context(placed), placed)
            else:
                assert self.bench.verify(self.bench.wrapper(case.call), placed)  # type: ignore[arg-type]
            image = placed.image()
        return placed

    def restore(self) -> None:
        """Give the tensors that are written their first bytes again."""
        for name, start in self._start.items():
            self.placed.views[name].copy_(start)

    def step(self, index: int) -> None:
        """One of the steps."""
        self._turn += 1
        if self.steps[index] == "commit":
            self.bench.commit(self.context, self.placed, self._turn)
        else:
            assert self.bench.verify(self.made, self.placed, self._turn), "declined"

    def all(self) -> None:
        """The steps, with nothing between them."""
        for index in range(len(self.steps)):
            self.step(index)

    def compare(self) -> None:
        """Note whether a bit of what is written differs; waits for nothing."""
        for name in WRITTEN:
            same = same_bits(self.placed.views[name], self._expected.views[name])
            self.wrong |= ~same.all()

    def require_same(self, what: str) -> None:
        """No comparison found a difference, nothing else was written, and the counter is zero."""
        self.placed.require_same(self._expected.image(), f"{what}, the last time")
        assert not bool(self.wrong), f"{what}: other bits than the steps one by one"
        left = int(self.made.counter)
        assert left == 0, f"{what}: the work counter is {left}"


def stream_of(device: str) -> Callable[[], AbstractContextManager[object]]:
    """A way onto a stream of its own; where there are none, the program's order."""
    if device != "cuda":
        return nullcontext
    stream = torch.cuda.Stream()
    return lambda: torch.cuda.stream(stream)


# ---- Properties.


def declined_calls_write_nothing(bench: Bench, case: Case) -> None:
    """And the Triton pair afterwards leaves what the CuTe path does, as far as section 1.7 says so."""
    values = build(case)
    off, made = bench.place(case, values), bench.wrapper(case.call)  # type: ignore[arg-type]
    assert case.path == DECLINED
    assert not bench.verify(made, off), "launched on memory that is not aligned"
    off.require_untouched()
    assert int(made.counter) == 0
    bench.triton_pair(off)
    # The frame is part of it: neither path may write a state.
    _, by_triton = bench.require_right(off, "sequential-fp32")
    on = bench.place(change(case, layouts={}, pages=()), values)
    assert bench.verify(made, on), "declined dense memory"
    expected, by_cute = bench.require_right(on)
    rolled, records = expected.cells["conv_state"].written, expected.cells["key_gate"]
    same = same_bits(by_triton["conv_state"], by_cute["conv_state"])
    assert bool(same[rolled].all()), "conv rows differ"
    assert records.copied is not None
    same = same_bits(by_triton["key_gate"], by_cute["key_gate"])
    assert bool(same[records.copied & records.written].all()), "gate records differ"


def a_strided_index_is_declined(bench: Bench, name: str) -> None:
    """An index vector of more than one element whose elements lie apart; one of a single element is dense."""
    for call, declined in ((BASE, True), (ONE, name == "query_start_loc")):
        placed, made = bench.place(fused(call)), bench.wrapper(call)
        dense = placed.views[name]
        wide = torch.full((2 * len(dense),), 1 << 20, dtype=dense.dtype, device=dense.device)
        wide[::2] = dense
        assert wide.data_ptr() % 16 == 0
        assert bench.verify(made, placed, others={name: wide[::2]}) != declined
        if declined:
            placed.require_untouched()
        else:
            bench.require_right(placed)


def an_object_keeps_no_path(bench: Bench, call: FusedVerify) -> None:
    """Aligned, misaligned in each tensor of a step, on the other path, aligned again: the same bits."""
    made, values = bench.wrapper(call), build(fused(call))
    aligned = bench.place(fused(call), values)
    assert bench.verify(made, aligned), "declined dense memory"
    bench.require_right(aligned)
    first = aligned.image()
    for name in DYNAMIC:
        for offset in (1, 3):
            off = bench.place(fused(call, {name: Layout(offset=offset)}), values)
            assert not bench.verify(made, off), f"launched with {name} off its alignment"
            off.require_untouched()
        odd = bench.place(fused(call, ODD_ROWS), values)
        assert bench.verify(made, odd), "declined odd rows"
        bench.require_right(odd)
        aligned.arena.restore()
        assert bench.verify(made, aligned), f"declined dense memory after {name} off its alignment"
        aligned.require_same(first, f"after {name} off its alignment")


def configurations_do_not_mix(bench: Bench, verifies: Sequence[Case], commits: Sequence[Case]) -> None:
    """Objects that are used in turn give what fresh ones give, and leave earlier results alone."""
    alone = [_alone(bench, case) for case in (*verifies, *commits)]
    objects: dict[tuple[object, ...], Any] = {}
    kept: list[tuple[Placed, np.ndarray]] = []
    order = [*range(len(alone))]
    # Contexts are all made before the first commit.
    contexts = {i: bench.place(x.case, x.values) for i, x in enumerate(alone) if i >= len(verifies)}
    prepared = {i: bench.prepared_commit(placed) for i, placed in contexts.items()}
    for turn in (order, order[::-1], order[::2] + order[1::2]):
        for i in turn:
            case = alone[i].case
            if i in contexts:
                placed = contexts[i]
                kept = [(other, image) for other, image in kept if other is not placed]
                placed.arena.restore()
                prepared[i]()
            else:
                call = case.call
                assert isinstance(call, FusedVerify)
                placed = bench.place(case, alone[i].values)
                key = (call.heads, call.window, call.dim_first, call.taps)
                if key not in objects:
                    objects[key] = bench.wrapper(call)
                assert bench.verify(objects[key], placed), "declined"
            placed.require_same(alone[i].image(), f"unlike a fresh object's: {case.call.describe()}")
            for other, image in kept:
                other.require_same(image, f"changed by a later call: {other.case.call.describe()}")
            kept.append((placed, placed.image()))


def _alone(bench: Bench, case: Case) -> Placed:
    """The case by an object of its own, judged."""
    placed = bench.place(case)
    if isinstance(case.call, FusedVerify):
        assert bench.verify(bench.wrapper(case.call), placed), "declined"
        bench.require_right(placed)
    else:
        bench.require_right(placed, more=bench.prepared_commit(placed)())
    return placed


def nothing_reads_early(bench: Bench, case: Case, *, graph: bool = False, streams: int = 1) -> None:
    """Verify, commit, verify without a sync: the bits of each step observed alone.

    Repeated from the same bytes; with ``graph`` replayed from a captured one. With two
    ``streams`` two sets of memory and objects take turns on streams of their own.
    """
    sets = [Steps(bench, case, ("verify", "commit", "verify")) for _ in range(streams)]
    run: list[Callable[[], object]] = [_captured(steps) if graph else steps.all for steps in sets]
    ways = [stream_of(bench.device) for _ in sets]
    sets[0].placed.device.synchronize()
    for _ in range(bench.repeats):
        for steps, once, way in zip(sets, run, ways, strict=True):
            with way():
                steps.restore()
                once()
                steps.compare()
    sets[0].placed.device.synchronize()
    for steps in sets:
        steps.require_same("back to back")


def _captured(steps: Steps) -> Callable[[], object]:
    """The replay of the steps as a graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        steps.all()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            steps.all()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph.replay


def a_stream_waits_for_another(bench: Bench, case: Case) -> None:
    """Each step on the other of two streams, which waits for the one before: the same bits."""
    steps = Steps(bench, case, ("verify", "commit", "verify"))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for repeat in range(bench.repeats):
        for index in range(3):
            here, there = (streams[(repeat + index + i) % 2] for i in (0, 1))
            here.wait_stream(there)
            with torch.cuda.stream(here):
                if index == 0:
                    steps.restore()
                steps.step(index)
                if index == 2:
                    steps.compare()
    torch.cuda.synchronize()
    steps.require_same("over two streams")


def repeats_agree(bench: Bench, case: Case) -> None:
    """One object on the same bytes, launch after launch: the same bits as a fresh one."""
    steps = Steps(bench, case, ("verify",))
    for _ in range(bench.repeats):
        steps.restore()
        steps.all()
        steps.compare()
    steps.require_same("launched again")


def the_counter_is_left_at_zero(bench: Bench, case: Case) -> None:
    """After every launch; all work is done, and the later launches leave what the first one did."""
    placed, made = bench.place(case), bench.wrapper(case.call)  # type: ignore[arg-type]
    assert int(made.counter) == 0
    first: np.ndarray | None = None
    for turn in range(4):
        placed.arena.restore()
        assert bench.verify(made, placed, turn), "declined"
        image = placed.image()
        left = int(made.counter)
        assert left == 0, f"launch {turn} leaves the work counter at {left}"
        if first is None:
            bench.require_right(placed)
            first = image
        placed.require_same(first, f"launch {turn} unlike the first")


def nothing_to_do_is_done(bench: Bench) -> None:
    """Calls without rows or without tokens return True, whatever their alignment, and write nothing."""
    nowhere = {name: Layout(offset=1) for name in DYNAMIC}
    for changes in (NOBODY, NOBODY | {"tail": 2}, {"qlens": (0, 0, 0)}):
        for layouts in ({}, nowhere):
            call = change(BASE, **changes)
            placed, made = bench.place(fused(call, layouts)), bench.wrapper(call)
            assert bench.verify(made, placed), "declined though there is nothing to do"
            placed.require_untouched()
            assert int(made.counter) == 0


# ---- The tests.


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "bench" in metafunc.fixturenames:
        named = [x for x in split(metafunc.config.getoption("--impl")) if x.endswith(":cute")]
        metafunc.parametrize("bench", ["cute", *named], indirect=True, scope="module")


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Bench:
    device = "cuda" if request.config.getoption("--device") == "cuda" else "emulator"
    name = str(request.param)
    asked = name in split(request.config.getoption("--impl")) or device == "cuda"
    try:
        open_device(device)
        found = resolve(name)
    except UnavailableError as error:
        (pytest.fail if asked else pytest.skip)(str(error))
    if device not in found.devices:
        pytest.skip(f"needs a device of {', '.join(found.devices)}; {name} runs on no other")
    return Bench(found, device)


def needs_cuda(bench: Bench) -> None:
    if bench.device != "cuda":
        pytest.skip("needs --device cuda")


def own(bench: Bench) -> None:
    if bench.implementation.name != "cute":
        pytest.skip("of the own wrapper alone")


def declined_cases(bench: Bench) -> list[Case]:
    """Drawn ones; on the emulator of few kernel variants."""
    palette, wanted = (8, 100) if bench.device == "cuda" else (4, 24)
    drawn = cases(
        "fused_verify", bench.implementation.offered("fused_verify"), variants=palette, relations=()
    )
    found: list[Case] = []
    for case in sample(drawn, 20 * wanted):
        if case.path == DECLINED:
            found.append(case)
        if len(found) == wanted:
            return found
    raise AssertionError(f"only {len(found)} declined cases drawn")


def test_declined_calls_write_nothing(bench: Bench) -> None:
    for case in declined_cases(bench):
        declined_calls_write_nothing(bench, case)


@pytest.mark.parametrize("name", ["query_start_loc", "state_indices", "num_accepted_tokens"])
def test_a_strided_index_is_declined(bench: Bench, name: str) -> None:
    own(bench)
    a_strided_index_is_declined(bench, name)


@pytest.mark.parametrize("changes", [{}, {"dim_first": False}], ids=["dim-first", "token-major"])
def test_an_object_keeps_no_path(bench: Bench, changes: dict[str, Any]) -> None:
    an_object_keeps_no_path(bench, change(BASE, **changes))


def test_configurations_do_not_mix(bench: Bench) -> None:
    verifies = [
        fused(change(BASE, **changes), layouts, seed=i) for i, (changes, layouts) in enumerate(VERIFIES)
    ]
    commits = [Case(call=call, seed=i) for i, call in enumerate(COMMITS)]
    taken = [case for case in commits if not bench.implementation.takes(case)]
    assert len(taken) >= 5
    configurations_do_not_mix(bench, verifies, taken)


SHAPES = [
    pytest.param(fused(), id="warp-specialised"),
    pytest.param(fused(layouts=ODD_ROWS), id="plain"),
    pytest.param(fused(change(BASE, dim_first=False)), id="token-major"),
    pytest.param(fused(ONE), id="one-token"),
    pytest.param(fused(pages=SLOT_PAGES), id="pages"),
]


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("case", SHAPES)
def test_nothing_reads_early(bench: Bench, case: Case, streams: int) -> None:
    nothing_reads_early(bench, case, streams=streams)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("case", SHAPES)
def test_nothing_reads_early_in_a_graph(bench: Bench, case: Case, streams: int) -> None:
    needs_cuda(bench)
    nothing_reads_early(bench, case, graph=True, streams=streams)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
def test_a_stream_waits_for_another(bench: Bench, case: Case) -> None:
    needs_cuda(bench)
    a_stream_waits_for_another(bench, case)


@pytest.mark.parametrize("case", SHAPES)
def test_repeats_agree(bench: Bench, case: Case) -> None:
    """Three launches under as many schedules, or a thousand."""
    repeats_agree(bench, case)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", [{}, ODD_ROWS], ids=["warp-specialised", "plain"])
def test_repeats_of_full_waves_agree(bench: Bench, layouts: dict[str, Layout]) -> None:
    """A thousand launches of more work than the GPU takes at once."""
    needs_cuda(bench)
    repeats_agree(bench, fused(_rows_of(64, heads=16, window=8), layouts))


@pytest.mark.parametrize("layouts", [{}, ODD_ROWS], ids=["warp-specialised", "plain"])
@pytest.mark.parametrize("ctas", [1, 3, 5, 6, 7, 40])
def test_the_counter_is_left_at_zero(bench: Bench, layouts: dict[str, Layout], ctas: int) -> None:
    """Six items, on the emulator for fewer CTAs, as many, and more."""
    with settings.using(ctas=ctas):
        the_counter_is_left_at_zero(bench, fused(FULL, layouts))


@pytest.mark.parametrize(
    "changes", [{"slots": (0, -1, 0)}, {"qlens": (0, 0, 0), "tail": 2}], ids=["all-null", "all-empty"]
)
@pytest.mark.parametrize("layouts", [{}, ODD_ROWS], ids=["warp-specialised", "plain"])
def test_the_counter_is_left_at_zero_without_work(
    bench: Bench, layouts: dict[str, Layout], changes: dict[str, Any]
) -> None:
    the_counter_is_left_at_zero(bench, fused(change(BASE, **changes), layouts))


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", [{}, ODD_ROWS], ids=["warp-specialised", "plain"])
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("ctas_per_sm", [3, 4])
def test_the_counter_is_left_at_zero_by_full_waves(
    bench: Bench, layouts: dict[str, Layout], more: int, ctas_per_sm: int
) -> None:
    """About as many items as the GPU holds CTAs."""
    needs_cuda(bench)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    the_counter_is_left_at_zero(bench, fused(_rows_of(ctas_per_sm * sms + more, heads=1, window=1), layouts))


def test_nothing_to_do_is_done(bench: Bench) -> None:
    own(bench)
    nothing_to_do_is_done(bench)


def _rows_of(count: int, heads: int, window: int) -> FusedVerify:
    """Rows of full windows, each with a slot."""
    return change(
        BASE,
        heads=heads,
        window=window,
        qlens=(window,) * count,
        slots=tuple(range(1, count + 1)),
        ids=tuple(range(count)),
        accepted=tuple(1 + i % window for i in range(count)),
        pool=count + 1,
        capacity=count,
    )
