"""The kernel benchmark: bytes by hand, inputs, agreement, tables, and every call once without a GPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.bench import inputs as sets
from ci.bench import kernels
from ci.bench.agreement import difference
from ci.bench.calls import Grid, Size, call_of
from ci.bench.subjects import Subject, subjects
from ci.bench.tables import show
from ci.bench.traffic import moved, moved_by_fold
from ci.campaign import console
from impl.contract import Domain, Implementation, UnavailableError
from impl.cute import aot
from impl.cute.emulator.compiled import why_absent
from impl.vllm import gpu
from tests.fake_vllm import CUTE, tree_files, write_tree
from tests.meta.commands import Result, here
from tests.meta.zoo import compute

CPU = torch.device("cpu")
WINDOW = {"rows": 2, "window": 4, "heads": 2}
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """``kdafuzz bench kernels`` in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: here(monkeypatch, capsys, tmp_path, "bench", "kernels", *arguments)


def only(size: Size) -> Any:
    return call_of(size, tuple(range(1, size.needs + 1)), size.needs + 1)


# ---- Bytes.


@pytest.mark.parametrize(
    ("size", "bytes_by_hand"),
    [
        # State 2*2*128*128*2 = 131072. A token and head: q, k, gate, v 4*256, beta 2, correction 512,
        # keys and gates 512, out 256, together 2306, 16 times. Parameters 2*129*4, indices (3 + 2)*4.
        pytest.param(Size("verify", **WINDOW), 131072 + 16 * 2306 + 1032 + 20, id="verify"),
        # The same, 768 conv channels: two histories of 3 columns, two rows of 6, all of 2 bytes, 4 taps;
        # accepted counts.
        pytest.param(
            Size("fused_verify", **WINDOW),
            131072 + 16 * 2306 + 1032 + 20 + 2 * 768 * 9 * 2 + 768 * 8 + 8,
            id="fused_verify",
        ),
        # 8 tokens of 768 channels in and out; rows and taps as above; indices (3 + 2 + 2)*4.
        pytest.param(
            Size("conv_update", **WINDOW), 8 * 768 * 4 + 2 * 768 * 9 * 2 + 768 * 8 + 28, id="conv_update"
        ),
        # A layer: states in and out, 16 records of 1024, parameters, three columns moved; the plan 2*16.
        pytest.param(
            Size("commit", **WINDOW, layers=3),
            3 * (2 * 131072 + 16 * 1024 + 1032 + 2 * 2 * 768 * 3 * 2) + 32 + 28,
            id="commit",
        ),
        # A single token accepted: the history is where it belongs.
        pytest.param(
            Size("commit", rows=2, window=1, heads=2, layers=1),
            2 * 131072 + 4 * 1024 + 1032 + 32 + 28,
            id="commit of one token",
        ),
        # 70 tokens of 192 channels in and out; 3 columns of fp32 read by 3 sequences, written by 4; 4 taps
        # of fp32; indices 5*4 + 4*4 + 4 flags.
        pytest.param(
            Size("conv_prefill", tokens=70, channels=192),
            70 * 192 * 4 + 7 * 192 * 3 * 4 + 192 * 16 + 40,
            id="conv_prefill",
        ),
        pytest.param(
            Size("packed_conv", tokens=70, channels=192),
            70 * 192 * 4 + 7 * 192 * 3 * 4 + 192 * 16 + 40,
            id="packed_conv",
        ),
    ],
)
def test_bytes_by_hand(size: Size, bytes_by_hand: int) -> None:
    assert moved(only(size)) == bytes_by_hand


def test_a_fold_moves_states_and_records_alone() -> None:
    call = only(Size("commit", **WINDOW, layers=3))
    assert moved_by_fold(call) == 3 * (2 * 131072 + 16 * 1024 + 1032) + 5 * 2 * 4


# ---- Inputs.


def test_sets_share_pools_but_no_slot() -> None:
    made = sets.build(Size("fused_verify", rows=2, window=1, heads=1), CPU, 3)
    slots = [slot for x in made for slot in x.call.slots]
    assert len(set(slots)) == 6
    assert min(slots) == 1
    for name in ("state", "conv_state", "conv_weight"):
        assert len({x.views[name].data_ptr() for x in made}) == 1
    for name in ("mixed_qkv", "correction", "out", "state_indices"):
        assert len({x.views[name].data_ptr() for x in made}) == 3
    assert [x.views["state_indices"].tolist() for x in made] == [list(x.call.slots) for x in made]
    assert not torch.equal(made[0].views["mixed_qkv"], made[1].views["mixed_qkv"])


def test_misaligned_inputs_hold_the_same_values() -> None:
    size = Size("fused_verify", rows=2, window=2, heads=1)
    (even, _), (odd, _) = (sets.build(size, CPU, 2, odd=odd) for odd in (False, True))
    assert odd.views["mixed_qkv"].stride() == (385, 1)
    assert odd.views["mixed_qkv"].data_ptr() % 16 == 0
    for name, view in even.views.items():
        assert torch.equal(view, odd.views[name]), name


def test_sets_are_larger_than_a_cache_together() -> None:
    few = Size("verify", rows=256, window=8, heads=16)
    assert sets.sets_of(few) * moved(only(few)) >= sets.FOOTPRINT
    assert sets.sets_of(few) < sets.LAUNCHES
    assert sets.sets_of(Size("verify", rows=1, window=1, heads=1)) == sets.LAUNCHES
    assert sets.sets_of(Size("packed_conv", tokens=1 << 17, channels=4608)) == 2


# ---- Agreement.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x, ""),
        (lambda x: x * 1.01, ""),
        (lambda x: x * 1.1, "x: a vector differs by 10.0%"),
        (lambda x: x.index_fill(1, torch.tensor([5]), 0.0), "x: a vector differs"),
        (lambda x: x.index_fill(0, torch.tensor([1]), float("nan")), "x: a vector differs by inf%"),
        (lambda x: x.double(), "torch.float64, not"),
    ],
)
def test_a_difference_is_seen(change: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    x = torch.ones(4, 64)
    found = difference({"x": x}, {"x": change(x)})
    assert text in found
    assert bool(text) == bool(found)


def test_integers_must_be_equal() -> None:
    one = {"plan": torch.tensor([1, 2])}
    assert not difference(one, {"plan": torch.tensor([1, 2])})
    assert difference(one, {"plan": torch.tensor([1, 3])}) == "plan: 1 of 2 integers differ"
    assert difference(one, {}) == "only one has plan"


# ---- Calls.


class Counted:
    """A verify in plain PyTorch that counts its calls and may be wrong, or fail."""

    def __init__(self, fault: str = "") -> None:
        self.calls: list[dict[str, Any]] = []
        self.fault = fault

    def implementation(self) -> Implementation:
        """One that offers this verify."""

        def verify(records: Any, out: torch.Tensor, **given: Any) -> torch.Tensor:
            self.calls.append({**given, "records": records, "out": out})
            if self.fault == "raises":
                raise RuntimeError("no such luck")
            if self.fault == "unavailable":
                raise UnavailableError("not for this window")
            compute(records=records, out=out, **given)
            if self.fault == "wrong":
                out[0, -1] *= 1.5
            return out

        return Implementation("counted", {"verify": verify}, domain=Domain(records=("row",)))


def test_the_direct_call_is_the_binding_s() -> None:
    counted = Counted()
    (subject,) = subjects("verify", "counted", counted.implementation())
    first, _ = sets.build(Size("verify", rows=2, window=2, heads=1), CPU, 2)
    job = subject.bind(first)
    assert len(counted.calls) == 1
    assert job.results.keys() == {"out", "correction", "key_gate", "state"}
    assert job.results["state"].shape[0] == 2  # of the set's slots alone
    before = {name: x.clone() for name, x in job.results.items()}
    first.views["out"].zero_()
    job.call()
    assert len(counted.calls) == 2
    assert torch.equal(first.views["out"], before["out"])
    first.views["correction"].zero_()
    assert torch.equal(job.results["correction"], before["correction"])  # the first call's, whatever follows
    for name, given in counted.calls[0].items():
        assert given is counted.calls[1][name] or given == counted.calls[1][name]


def made_of(**parts: Counted) -> Callable[[str], Implementation]:
    found = {name: x.implementation() for name, x in parts.items()}

    def resolve(name: str) -> Implementation:
        if name in found:
            return found[name]
        raise UnavailableError(f"{name} is not here")

    return resolve


def test_a_wrong_kernel_is_marked(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        kernels, "resolve", made_of(a=Counted(), b=Counted("wrong"), c=Counted("raises"), d=Counted())
    )
    done = run("--check", "--impl", "a,b,c,d,e", "--op", "verify", "--json", "found.json")
    assert done.code == 1
    (row,) = [line for line in done.out.splitlines() if "N 2 Q 2" in line and "│" in line]
    assert [cell.strip() for cell in row.split("│")[4:-1]] == ["agrees", "WRONG", "WRONG", "agrees", "-"]
    assert "WRONG N 2 Q 2 b: out: a vector differs by 50.0% of its norm" in done.out
    assert "WRONG N 2 Q 2 c: RuntimeError: no such luck" in done.out
    assert "- e: e is not here" in done.out
    assert "results agree" not in done.out
    found = json.loads((tmp_path / "found.json").read_text())
    entries = found["tables"][0]["rows"][0]["entries"]
    assert [name for name, x in entries.items() if x["problem"]] == ["b", "c"]
    assert entries["a"]["bytes"] == moved(only(Size("verify", rows=2, window=2, heads=1)))


def test_what_cannot_be_had_at_a_size_is_absent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "resolve", made_of(a=Counted(), b=Counted("unavailable")))
    done = run("--check", "--impl", "a,b", "--op", "verify")
    assert done.code == 0
    assert "- b: not for this window (first at N 2 Q 2)" in done.out


def test_once_calls_so_many_times(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr(kernels, "resolve", made_of(a=counted, b=Counted("unavailable")))
    done = run("--check", "--impl", "b,a", "--op", "verify", "--once", "3")
    assert done.code == 0
    assert "- verify N 2 Q 2, b: not for this window" in done.out
    assert "verify N 2 Q 2, a: 3 calls" in done.out
    assert len(counted.calls) == 2 + 3  # the binding's, and the direct one that --check adds


def test_every_way_of_own_kernels_is_called(run: Run) -> None:
    """The whole command, kernels included: Triton's interpreted, CuTe's emulated where the DSL is."""
    done = run("--check", "--impl", "triton,cute")
    assert done.code == 0, done.out
    emulated = not why_absent()
    assert done.out.count("results agree") == (2 if emulated else 0)
    assert done.out.count("agrees") == 6 + (4 if emulated else 0)
    assert ("cute: plain" in done.out) == emulated
    assert "- cute: packed_conv: cute does not offer it" in done.out or not emulated


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--check", "--op", "verify,sing"), "unknown operation"),
        (("--check", "--rows", "0"), "--rows takes a list of numbers from 1 to 4096"),
        (("--check", "--windows", "9"), "--windows takes a list of numbers from 1 to 8"),
        (("--check", "--channels", "200"), "--channels must be 3 parts"),
        (("--check", "--impl", "nothing"), "no implementation has any of these operations here"),
        (("--check", "--impl", "nothing", "--once", "1"), "no implementation has any of these operations"),
    ],
)
def test_refusals(arguments: tuple[str, ...], text: str, run: Run) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert text in done.err
    assert done.err.count("\n") == 1


def test_times_need_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("--impl", "triton")
    assert done.code == 2
    assert done.err == "kdafuzz: bench kernels needs a CUDA GPU; found none (--check runs without)\n"


# ---- Times, by a clock that knows them.


class Known:
    """A clock that makes the calls, and says that they took 2 us in a graph and 5 us alone."""

    def __init__(self) -> None:
        self.sets: list[int] = []

    def copy_rate(self) -> float:
        """A terabyte a second."""
        return 1e12

    def graph(self, calls: Any) -> float:
        """2 us."""
        self.sets.append(len(calls))
        for call in calls:
            call()
        return 2.0

    def single(self, calls: Any) -> float:
        """5 us."""
        return self.graph(calls) + 3.0


def test_a_table_tells_times_and_shares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(kernels, "resolve", made_of(a=Counted(), b=Counted(), c=Counted("wrong")))
    monkeypatch.setattr(kernels, "walls", lambda contenders: [(1.5, 4.5)] * len(contenders))
    monkeypatch.setattr(kernels, "sets_of", lambda size: 3)
    bench = kernels.Bench(["a", "b", "c"], "cpu")
    bench.clock = clock = Known()  # type: ignore[assignment]
    columns = [
        (name, _held(subject, name == "a"), device) for name, subject, device in bench.columns("verify")
    ]
    monkeypatch.setattr(bench, "columns", lambda op: iter(columns))
    grid = Grid(rows=(1, 2), windows=(1,), heads=1, layers=1, tokens=(), channels=0)
    table = bench.table("verify", grid, console())
    show(console(), table)
    told = capsys.readouterr().out
    assert clock.sets == [3] * 6
    one, two = table.rows
    assert one.floor_us == pytest.approx(35602 / 1e6)  # the bytes above by hand, at 1 TB/s
    assert one.entries["a"].us == 2.0
    assert "2.0 (2%)" in told
    assert "5.0 (1%)*" in told
    marked = next(line for line in told.splitlines() if "WRONG" in line)
    assert [cell.strip() for cell in marked.split("│")[4:-1]] == ["", "", "WRONG"]
    assert "* no graph can hold it" in told
    assert "wall 4.5" in told
    assert "host 1.5" in told
    assert one.entries["a"].wall_us == 4.5
    assert two.entries["a"].wall_us is None  # only where a launch is what matters


def _held(subject: Any, graph: bool) -> Subject:
    assert isinstance(subject, Subject)
    return replace(subject, graph=graph)


# ---- vLLM's CuTe commit from libraries.


HOST = """
def _compile_verify(*given):
    raise AssertionError("not asked for")
def _compile_commit(*given):
    return ("compiled", *given)
def _architecture(device):
    return "other"
"""


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A made-up vLLM with a CuTe commit, on what seems to be a Hopper GPU."""
    monkeypatch.setattr(gpu, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(aot, "_LIBRARIES", {})
    monkeypatch.setattr(aot, "_load_environment", lambda: None)
    files = tree_files("records", version="0.33.0") | {CUTE: HOST}
    return f"vllm:{write_tree(tmp_path / 'tree', files)}:cute"


def test_the_shipped_commit_comes_from_a_library(shipped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gpu.implementation(shipped)
    assert made.devices == ("cuda",)
    assert set(made.operations) == {"commit"}
    assert "SM10x" in made.absent["fused_verify"]
    module = gpu.host_module(shipped)
    asked: list[str] = []

    def loaded(name: str) -> str:
        asked.append(name)
        return f"library {len(asked)}"

    monkeypatch.setattr(aot, "loaded", loaded)
    assert module._architecture(CPU) == "sm_90a"
    assert module._compile_commit(16, 4, "sm_90a", torch.float32, True) == "library 1"
    assert asked[0].startswith("vllm_commit_")
    assert asked[0].endswith("_sm_90a_h16_q4_align")


def test_without_library_the_dsl_compiles_or_a_sentence_says_what_to_do(
    shipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.implementation(shipped)
    module = gpu.host_module(shipped)
    monkeypatch.setattr(gpu, "_has_dsl", lambda: True)
    given = (16, 4, "sm_90a", torch.float32, False)
    assert module._compile_commit(*given) == ("compiled", *given)
    monkeypatch.setattr(gpu, "_has_dsl", lambda: False)
    with pytest.raises(UnavailableError, match=r"no library holds vllm_commit_\w+_q5; .* --heads 16"):
        module._compile_commit(16, 5, "sm_90a", torch.float32, False)


def test_another_source_has_other_names(
    shipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impl.vllm.load._has_cutlass", lambda: True)
    other = write_tree(tmp_path / "other", tree_files("records", version="0.33.0") | {CUTE: HOST + "x = 1\n"})
    one, two = (
        [x.name for x in gpu.commits(name, ["sm_90a"], [2], [3])] for name in (shipped, f"vllm:{other}:cute")
    )
    assert len(one) == len(two) == 2
    assert not set(one) & set(two)


def test_libraries_are_added_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the manifest held before stays, unless its sources or its library are gone."""
    monkeypatch.setattr(aot, "_require_dsl", lambda: None)
    monkeypatch.setattr(aot, "resources", lambda cubin: {"registers": 1, "frame": 0})
    monkeypatch.setattr(aot, "_link", lambda name, compiling, library: library.write_bytes(b"x") and b"x")
    facts = {"kernel": "vllm commit", "source": "s", "arch": "sm_90a", "window": 4, "options": {}}
    for name in ("one", "two", "gone"):
        list(aot.build([aot.Foreign(name, facts, list)], tmp_path))
    (tmp_path / "gone.so").unlink()
    list(aot.build([aot.Foreign("old", facts | {"kernel": "commit"}, list)], tmp_path))
    list(aot.build([aot.Foreign("three", facts, list)], tmp_path))
    monkeypatch.setattr(aot, "_preload", lambda: None)
    monkeypatch.setattr(aot, "_LIBRARIES", {})
    assert aot.load(tmp_path) == ("one", "three", "two")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--impl", "triton", "--kernel", "commit"), "--impl must be cute or a vLLM with :cute"),
        (("--impl", "vllm@0.33.0:cute", "--kernel", "verify"), "--kernel must be some of commit"),
        (("--impl", "vllm@0.33.0:cute", "--kernel", "commit", "--heads", "x"), "--heads must be some of"),
    ],
)
def test_aot_refuses(
    arguments: tuple[str, ...],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    done = here(monkeypatch, capsys, tmp_path, "aot", "--out", "new", *arguments)
    assert done.code == 2
    assert text in done.err
    assert not (tmp_path / "new").exists()
