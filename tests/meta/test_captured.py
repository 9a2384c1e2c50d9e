"""Dumps of real calls: what was passed comes back, in every operation, and shrinks to the fault."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from ci.bisect.items import History
from ci.bisect.log import Asked, Log, read_log
from ci.candidates import candidates, measure
from ci.executor import Executor
from ci.failures import load, save, sidecar_of, slim
from ci.minimize import minimize
from impl.contract import UnavailableError
from oracle.calls.base import Place
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvUpdate
from oracle.calls.verify import Verify
from oracle.captured import Captured, drawable, path_of, read
from oracle.case import Case
from oracle.codec import CaseError, canonical, case_from_json
from oracle.dump import dump, dumping
from oracle.judge import Problem, Verdict
from oracle.layout import placed
from oracle.values import Values, build, checksum
from tests.meta.callers import arguments_of, call
from tests.meta.calls import verify_of
from tests.meta.commands import CASE, Result, here, plug_in, tree
from tests.meta.drawn import OPERATIONS, sample
from tests.meta.mutants import BYTES
from tests.meta.mutated_corpus import limited, one_line
from tests.strategies.cases import CASES

replace = msgspec.structs.replace
EACH = pytest.mark.parametrize("op", OPERATIONS)
FAILED = Verdict(problems=(Problem("value", "out", "output", text="planted"),))
WIDE = Case(
    call=Verify(
        heads=16,
        key_dim=32,
        value_dim=32,
        window=3,
        pool=300,
        qlens=(3,) * 64,
        slots=tuple(range(299, 235, -1)),
        ids=tuple(range(64)),
        capacity=70,
        activation="bfloat16",
        out="bfloat16",
        state="bfloat16",
    ),
    seed=3,
)
ROW, TOKEN, HEAD, VALUE = 37, 1, 11, 21
"""Where the one value of the wide dump lies that a planted fault needs."""


def plain(case: Case) -> Case:
    return replace(case, relation=None)


def dumped(case: Case, folder: Path) -> Path:
    """The dump of a case's call, as its caller makes it."""
    call(case, lambda operation, function: dumping(operation, function, folder))
    (path,) = folder.glob("*.safetensors")
    return path


def read_by(case: Case, values: Values, name: str, row: int) -> torch.Tensor:
    """What a row reads of a tensor, flat; of a parameter all."""
    spec, x, filled = case.call.tensors()[name], values.tensors[name], values.filled[name]
    if spec.role == "parameter":
        return x.flatten()
    places: list[Place] = []
    if spec.role == "token":
        places = [case.call.token_place(row)]
    else:
        places = list(dict.fromkeys((index,) for other, index, _ in case.call.blocks(name) if other == row))
    mask = filled[(...,) + (None,) * (x.dim() - filled.dim())].expand(x.shape)
    return torch.cat([x[place][mask[place]] for place in places]) if places else x[:0].flatten()


def lying(case: Case, other: Case) -> dict[str, Any]:
    """Start and strides of the case's tensors; no address hangs on the stride of a side of 1.

    Left out are tensors without elements, here or there, and those that a context copies.
    """
    specs, others = case.call.tensors(), other.call.tensors()
    sizes = {
        name: [min(pair) for pair in zip(specs[name].shape, others[name].shape, strict=True)]
        for name in specs
    }
    return {
        name: (spot.start, [s for s, n in zip(spot.strides, sizes[name], strict=True) if n > 1])
        for name, spot in placed(specs, case.layouts, case.pages).items()
        if 0 not in sizes[name] and name.partition(".")[0] not in ("A_log", "dt_bias")
    }


@EACH
def test_a_dump_is_the_call(op: str, tmp_path: Path) -> None:
    """Every row reads the same bits in tensors that lie alike; pools alone are smaller."""
    for number, case in enumerate(map(plain, sample(CASES[op](), 2))):
        found = load(dumped(case, tmp_path / str(number))).case
        specs, got = case.call.tensors(), found.call.tensors()
        assert specs.keys() == got.keys()
        assert [spec.dtype for spec in specs.values()] == [spec.dtype for spec in got.values()]
        assert (found.call.qlens, found.call.rows) == (case.call.qlens, case.call.rows)
        assert lying(case, found) == lying(found, case)
        mine, theirs = build(case), build(found)
        for name, spec in specs.items():
            for row in range(case.call.rows) if drawable(spec) else ():
                a, b = read_by(case, mine, name, row), read_by(found, theirs, name, row)
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (name, row)
        # Nothing of it was drawn: another seed makes nothing else.
        assert checksum(replace(found, seed=found.seed + 1)) == checksum(found)
        assert checksum(slim(found)) == checksum(found)


def test_a_dump_is_judged_right(tmp_path: Path) -> None:
    """By kernels of every operation, which take the path that the case takes."""
    with Executor("triton", "cpu") as ours, Executor("tests.meta.fused_fake:implementation", "cpu") as fake:
        for op in OPERATIONS:
            drawn = sample(CASES[op](), 30)
            case = next(c for c in drawn if 2 <= c.call.rows <= 6 and c.call.effort < 200 and c.layouts)
            case, executor = replace(plain(case), regimes={}), fake if op == "fused_verify" else ours
            found = load(dumped(case, tmp_path / op)).case
            verdict = executor.check(found)
            assert verdict.ok, verdict.problems
            assert found.path == case.path


def test_what_a_row_does_not_read_is_not_kept(tmp_path: Path) -> None:
    """Columns of a conv row between those for the final and for the boundary slot; records past the count."""
    commit = Commit(
        heads=1,
        key_dim=4,
        value_dim=4,
        window=4,
        channels=1,
        state_len=4,
        capacity=1,
        pool=9,
        qlens=(4,),
        slots=(5,),
        ids=(0,),
        accepted=(4,),
        block_size=4,
        computed=(3,),
        table=((6, 7),),
    )
    tensors, _ = read(dumped(Case(call=commit), tmp_path / "all"))
    assert [x != 0.0 for x in tensors["conv_state.0/0"].flatten().tolist()] == [True, False, False, True]
    fewer = replace(commit, accepted=(2,))
    tensors, _ = read(dumped(Case(call=fewer), tmp_path / "two"))
    assert tensors["correction.0/0"].shape == (1, 2, 4)
    assert tensors.keys() >= {"state.0/0", "A_log.0"}


@EACH
def test_any_subset_of_the_values(op: str, tmp_path: Path) -> None:
    """A table that a dump lacks is drawn, the others are as they were; without all it is a drawn case."""
    case = plain(next(c for c in sample(CASES[op](), 30) if 2 <= c.call.rows <= 6 and any(c.call.qlens)))
    found = load(dumped(case, tmp_path)).case
    assert found.captured is not None
    values, free = build(found), build(replace(found, captured=None))
    for table in found.captured.tables:
        rest = tuple(t for t in found.captured.tables if t != table)
        less = replace(found, captured=replace(found.captured, tables=rest) if rest else None)
        mixed = build(less)
        for name, spec in found.call.tensors().items():
            for row in range(case.call.rows) if drawable(spec) else ():
                wanted = free if spec.table == table else values
                a, b = read_by(less, mixed, name, row), read_by(less, wanted, name, row)
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (table, name, row)


def wide_dump(folder: Path, case: Case = WIDE) -> Path:
    arguments = arguments_of(case)
    arguments["v"][0, 3 * ROW + TOKEN, HEAD, VALUE] = 80.0
    dump(folder / "wide.safetensors", "verify", arguments)
    return folder / "wide.safetensors"


def fails_with_the_value(case: Case) -> Verdict:
    return FAILED if (build(case).tensors["v"].abs() > 50.0).any() else Verdict()


def test_a_wide_dump_shrinks_to_the_bad_row(tmp_path: Path) -> None:
    """64 rows and 16 heads: the row, the head and the tokens up to the bad one, in few judgements."""
    judged: list[Case] = []

    def judge(case: Case) -> Verdict:
        judged.append(case)
        return fails_with_the_value(case)

    case = load(wide_dump(tmp_path)).case
    assert case.call.pool == 65
    smallest, _ = minimize(case, FAILED, judge)
    found = verify_of(smallest)
    assert (found.ids, found.qlens, found.slots, found.pool) == ((ROW,), (TOKEN + 1,), (1,), 2)
    assert (found.heads, found.key_dim, found.value_dim, found.window) == (1, 16, 16, TOKEN + 1)
    assert smallest.captured is not None
    assert (smallest.captured.tables, smallest.captured.heads) == (("v",), (HEAD,))
    assert smallest.captured.value == 16
    assert build(smallest).tensors["v"][TOKEN, 0, VALUE - 16] == 80.0
    assert (smallest.layouts, smallest.pages, smallest.regimes) == ({}, (), {})
    assert len(judged) < 120


def test_where_the_first_problem_lies_is_tried_first(tmp_path: Path) -> None:
    """The row and the head that a verdict points at, by token or by record row: two judgements."""
    case = load(wide_dump(tmp_path)).case
    token = 3 * ROW + TOKEN
    by_token = Problem("value", "out", "output", (token, HEAD, VALUE), ("token", "head", "v"))
    by_row = Problem("value", "correction", "correction", (ROW, HEAD, 1, 4), ("row", "head", "position", "v"))
    for problem in (by_token, by_row):
        one = next(candidates(case, Verdict(problems=(problem,))))
        assert (one.call.ids, verify_of(one).heads) == ((ROW,), 16)
        there = dataclasses.replace(problem, index=(TOKEN if problem is by_token else 0, HEAD, 0, 0))
        two = next(candidates(one, Verdict(problems=(there,))))
        assert two.captured is not None
        assert (two.call.ids, two.captured.heads) == ((ROW,), (HEAD,))


def test_a_slot_points_at_its_row() -> None:
    """A commit's by the slot that the row writes, which is not the one it reads."""
    rows: dict[str, Any] = {
        "qlens": (1,) * 9,
        "slots": tuple(range(1, 10)),
        "ids": tuple(range(9)),
        "pool": 19,
    }
    table = tuple((10 + row,) for row in range(9))
    commit = Commit(
        heads=1,
        key_dim=4,
        value_dim=4,
        window=2,
        channels=4,
        state_len=3,
        capacity=9,
        accepted=(1,) * 9,
        block_size=4,
        computed=(0,) * 9,
        table=table,
        **rows,
    )
    update = ConvUpdate(channels=4, state_len=3, window=1, **rows)
    for call_, name, slot in ((commit, "state.0", 16), (update, "conv_state", 7)):
        problem = Problem("value", name, "fold", (slot, 0, 0), call_.results()[name].axes)
        first = next(candidates(Case(call=call_), Verdict(problems=(problem,))))
        assert first.call.ids == (6,)


def test_what_is_left_is_bit_for_bit_as_it_was(tmp_path: Path) -> None:
    """Every candidate that keeps its captured values has those of its rows, heads and channels."""
    path = tmp_path / "three.safetensors"
    dump(path, "verify", arguments_of(WIDE), rows=[3, ROW, 60])
    case, whole, kinds = load(path).case, build(WIDE).tensors["v"].view(64, 3, 16, 32), set()
    for smaller in candidates(case):
        assert measure(smaller) < measure(case)
        assert case_from_json(canonical(smaller)) == smaller
        part, small = smaller.captured, verify_of(smaller)
        if part is None or "v" not in part.tables:
            continue
        mine = build(smaller).tensors["v"]
        for row in range(small.rows):
            theirs = whole[small.ids[row], : small.qlens[row], list(part.heads)]
            theirs = theirs[..., part.value : part.value + small.value_dim]
            assert torch.equal(mine[small.token_place(row)], theirs)
        kinds |= {("rows", small.rows), ("heads", part.heads), ("value", part.value), ("key", part.key)}
    assert kinds >= {("rows", 1), ("rows", 2), ("heads", tuple(range(8, 16))), ("value", 16), ("key", 16)}


def test_drawn_values_beside_captured_ones_go_by_their_heads(tmp_path: Path) -> None:
    """A fault that needs a captured and a drawn table survives the loss of other heads and layers."""
    case = next(c for c in sample(CASES["commit"](), 30) if isinstance(c.call, Commit) and c.call.layers == 2)
    found = load(dumped(plain(case), tmp_path)).case
    assert found.captured is not None
    rest = tuple(t for t in found.captured.tables if t != "A_log")
    part = replace(found.captured, tables=rest)
    mixed = replace(found, captured=part)
    assert isinstance(mixed.call, Commit)
    last = mixed.call.heads - 1
    one = replace(
        mixed,
        call=replace(mixed.call, layers=1, heads=1),
        layouts={},
        captured=replace(part, layers=(1,), heads=(last,)),
    )
    assert build(one).tensors["A_log.0"][0] == build(mixed).tensors["A_log.1"][last]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """The command, in this process and the test's folder."""
    plug_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: here(monkeypatch, capsys, tmp_path, *map(str, arguments))


def test_the_commands_take_dumps(tmp_path: Path, run: Callable[..., Result]) -> None:
    """minimize, replay, bisect-step, corpus add and check, on the dump and on what is left of it."""
    path = wide_dump(tmp_path, replace(WIDE, call=replace(WIDE.call, key_dim=8, value_dim=22)))
    spiked = ("--impl", "zoo_outside:spiked", "--device", "cpu")
    done = run("minimize", path, *spiked)
    assert done.code == 1, done.err
    assert "cases judged in" in done.out
    (saved,) = (tmp_path / ".kdafuzz/failures").rglob("*.json")
    entry = load(saved)
    assert (entry.case.call.ids, verify_of(entry.case).heads, entry.case.call.tokens) == (
        (ROW,),
        1,
        TOKEN + 1,
    )
    assert sidecar_of(saved).stat().st_size < 600
    assert run("replay", saved, *spiked).code == 1
    assert run("replay", saved, "--impl", "zoo_outside:right", "--device", "cpu").code == 0
    step = run("bisect-step", saved, "--repeats", "1", *spiked)
    assert (step.code, "failure 'value output out'" in step.out) == (1, True)
    words = ("--why", "a test", "--name", "spike", "--to", "own")
    assert "kdafuzz minimize it first" in run("corpus", "add", path, *words).err
    assert run("corpus", "add", saved, *words).code == 0
    (placed_at,) = (tmp_path / "own").rglob("*.json")
    assert load(placed_at).case == entry.case
    assert run("corpus", "check", "own").code == 0
    placed_at.unlink()
    assert "captured values without a case" in run("corpus", "check", "own").out


def test_saving_is_slim_and_the_same(tmp_path: Path) -> None:
    case = load(wide_dump(tmp_path)).case
    assert case.captured is not None
    part = replace(case.captured, heads=(2, 5), value=16)
    call_ = replace(case.call.only([3, 60]), heads=2, value_dim=16)
    some = replace(case, call=call_, layouts={}, captured=part)
    path = save(tmp_path / "saved", some, FAILED, {"implementation": "a", "device": "cpu"})
    again = load(path).case
    assert checksum(again) == checksum(some)
    wanted = build(WIDE).tensors["v"].view(64, 3, 16, 32)[[3, 60]][:, :, [2, 5], 16:]
    assert torch.equal(build(again).tensors["v"], wanted.reshape(6, 2, 16))
    assert sidecar_of(path).stat().st_size < (tmp_path / "wide.safetensors").stat().st_size / 100
    assert slim(again) == again
    assert save(tmp_path / "saved", again, FAILED, {"implementation": "a", "device": "cpu"}) == path


def test_a_bisection_goes_on_with_its_values(tmp_path: Path) -> None:
    """Its log says where they lie; without them it is refused."""
    path = tmp_path / "some.safetensors"
    dump(path, "verify", arguments_of(CASE))
    case = load(path).case
    assert case.captured is not None
    asked = Asked(case, History(()), sidecar=str(path_of(case.captured.digest)))
    log = Log(tmp_path / "log.jsonl", asked)
    log.close()
    assert read_log(tmp_path / "log.jsonl")[0] == asked
    path.unlink()
    with pytest.raises(UnavailableError, match=r"cannot resume .*some\.safetensors: cannot read"):
        read_log(tmp_path / "log.jsonl")


def test_a_case_without_its_values(tmp_path: Path) -> None:
    """Missing or of other contents, they are refused in a sentence."""
    case = load(wide_dump(tmp_path)).case
    path = save(tmp_path / "saved", replace(case, call=case.call.only([0])), FAILED, {})
    other = save(tmp_path / "other", replace(case, call=case.call.only([1])), FAILED, {})
    place = sidecar_of(path)
    place.write_bytes(sidecar_of(other).read_bytes())
    with pytest.raises(CaseError, match=r"holds other values than it should \(digest [0-9a-f]{16}, not"):
        load(path)
    place.unlink()
    with pytest.raises(CaseError, match=r"its captured values are not beside it: no .*\.safetensors$"):
        load(path)
    lost = replace(CASE, captured=Captured("0" * 16, ("q",), (0,)))
    with (
        Executor("triton", "cpu") as executor,
        pytest.raises(ValueError, match="in a file that is not at hand"),
    ):
        executor.check(lost)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no rows": (lambda a: a.pop("query_start_loc"), "needs query_start_loc"),
    "rows that decrease": (
        lambda a: a.update(query_start_loc=torch.tensor([0, 2, 1])),
        "must begin with 0 and not decrease",
    ),
    "too many tokens": (
        lambda a: a.update(query_start_loc=torch.tensor([0, 2, 9])),
        "ends at 9; there are 3 tokens",
    ),
    "slots outside": (lambda a: a.update(state_indices=torch.tensor([1, 9])), "names slot 9; the pool has 3"),
    "one slot twice": (lambda a: a.update(state_indices=torch.tensor([1, 1])), "two live rows share a slot"),
    "heads that differ": (lambda a: a.update(k=a["k"][:, :, :0]), r"k must be \[T, H, K\] like the others"),
    "dtypes that differ": (lambda a: a.update(k=a["k"].half()), "must have one dtype"),
    "a dtype of none": (lambda a: a.update(A_log=a["A_log"].double()), "A_log must be float32"),
    "axes": (lambda a: a.update(v=a["v"][0, 0]), r"v must be \[T, H, V\]; found \[1, 4\]"),
    "a window too small": (lambda a: a.update(spec_query_len=1), "a row has more tokens than the window"),
    "a bound": (
        lambda a: a.update(lower_bound=3.0),
        "no call of verify: .*Expected `float` <= 0",
    ),
    "strides": (
        lambda a: a.update(q=a["q"].repeat_interleave(2, -1)[..., ::2]),
        "layout of q may not move its trailing dimensions",
    ),
    "no dimensions": (
        lambda a: [a.pop(n) for n in ("q", "k", "raw_g", "checkpoint_state", "dt_bias", "records")],
        "the tensors of this verify do not tell K; give key_dim",
    ),
}


@pytest.mark.parametrize("spoiled", REFUSED)
def test_what_is_no_call(spoiled: str, tmp_path: Path) -> None:
    """Refused in a sentence, nothing written; and the model that is dumped goes on."""
    spoil, sentence = REFUSED[spoiled]
    arguments = arguments_of(CASE)
    dump(tmp_path / "sound.safetensors", "verify", arguments)
    spoil(arguments)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=sentence) as caught:
        dump(tmp_path / "dump.safetensors", "verify", arguments)
    assert one_line(str(caught.value))
    assert tree(tmp_path) == before


def test_dumping_leaves_the_function_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first calls that are wanted are dumped, what cannot be dumped is said, every call is made."""

    def verify(**given: Any) -> int:
        return len(given)

    arguments = arguments_of(CASE)
    wrapped = dumping("verify", verify, tmp_path, calls=2, when=lambda given: given["spec_query_len"] == 2)
    assert wrapped.__name__ == "verify"
    assert wrapped(**arguments | {"spec_query_len": 3}) == len(arguments)
    assert not tree(tmp_path)
    assert [wrapped(**arguments) for _ in range(3)] == [len(arguments)] * 3
    assert len(tree(tmp_path)) == 2
    broken = dumping("verify", verify, tmp_path / "none")
    assert broken(**arguments | {"query_start_loc": None}) == len(arguments)
    assert "kdafuzz: not dumped: " in capsys.readouterr().err
    unsure = dumping("verify", verify, tmp_path / "none", when=lambda given: given["absent"] == 2)
    assert unsure(**arguments) == len(arguments)
    assert "kdafuzz: not dumped: 'absent'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="no operation 'serve' to dump"):
        dump(tmp_path / "serve", "serve", {})


def test_some_rows(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    dump(path, "verify", arguments_of(WIDE), rows=[60, 2])
    found = load(path).case
    assert found.call.ids == (2, 60)
    whole = build(WIDE).tensors["q"]
    assert torch.equal(build(found).tensors["q"], torch.cat([whole[6:9], whole[180:183]]))
    with pytest.raises(ValueError, match=r"rows must be among 0 to 63; found \[64\]"):
        dump(path, "verify", arguments_of(WIDE), rows=[64])


def raw(case: Case) -> dict[str, torch.Tensor]:
    """The call's tensors by name, dense, as anybody may save them."""
    arguments = arguments_of(case)
    records = arguments.pop("records")
    arguments |= {"correction": records.correction, "key_gate": records.key_gate}
    return {name: x.contiguous() for name, x in arguments.items() if isinstance(x, torch.Tensor)}


def test_a_file_of_your_own(tmp_path: Path) -> None:
    """Tensors by their argument names with metadata, any of them; scalars are JSON."""
    path = tmp_path / "own.safetensors"
    scalars = {"operation": "verify", "lower_bound": "-5.0", "spec_query_len": "2"}
    save_file(raw(CASE), path, metadata=scalars)
    found = load(path).case
    assert replace(found, captured=None, layouts={}).call == replace(CASE.call, slots=(1, 2), flat_bias=False)
    assert checksum(replace(found, call=CASE.call)) == checksum(CASE)
    few = {name: raw(CASE)[name] for name in ("q", "query_start_loc", "checkpoint_state")}
    save_file(few, path, metadata=scalars)
    less = load(path).case
    assert less.captured is not None
    assert less.captured.tables == ("q", "state")
    assert torch.equal(build(less).tensors["q"], build(CASE).tensors["q"].to(torch.float32))
    for metadata, sentence in (
        ({}, "its metadata do not name an operation"),
        ({"operation": "fold"}, "no operation 'fold' to dump"),
        ({"operation": "verify", "spec_query_len": "x"}, "spec_query_len must be an integer; found 'x'"),
        ({"operation": "verify", "lower_bound": "[1]"}, "lower_bound must be a number or None"),
        ({"kdafuzz": "9"}, "holds captured values without a case"),
    ):
        save_file(few, path, metadata=metadata)
        with pytest.raises(CaseError, match=sentence) as caught:
            load(path)
        assert one_line(str(caught.value))


def test_spoiled_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    arguments = arguments_of(CASE)
    dump(tmp_path / "sound.safetensors", "verify", arguments)
    save_file(raw(CASE), tmp_path / "raw.safetensors", metadata={"operation": "verify", "lower_bound": "-1"})
    files = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    saved = save(tmp_path / "saved", load(tmp_path / "sound.safetensors").case, FAILED, {})
    files.append(sidecar_of(saved).read_bytes())
    path, told = tmp_path / "mutant.safetensors", list[str]()
    rng = random.Random(5)
    for index in range(300):
        kind = rng.choice(sorted(BYTES))
        if kind in ("UTF-16", "byte order mark", "line ends"):  # these are of text
            kind = "bits flipped"
        data = bytearray(files[index % 3])
        head = int.from_bytes(data[:8], "little")
        if rng.random() < 0.5:  # in the header: names, shapes, the case
            data[8 : 8 + head] = BYTES[kind](rng, bytes(data[8 : 8 + head]), files[0])
            data[:8] = len(data).to_bytes(8, "little") if rng.random() < 0.1 else data[:8]
        else:
            data = bytearray(BYTES[kind](rng, bytes(data), files[(index + 1) % 3]))
        target = sidecar_of(saved) if index % 3 == 2 else path
        target.write_bytes(data)
        with limited(10.0):
            try:
                load(saved if index % 3 == 2 else path)
            except CaseError as error:
                told.append(str(error))
    assert [text for text in told if not one_line(text)] == []
    assert 100 < len(told) < 300


def test_odd_files(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")
    for name, sentence in (
        ("folder", "is no regular file"),
        ("empty", "not a safetensors file"),
        ("device", "is no regular file"),
        ("absent", "No such file"),
    ):
        with pytest.raises(CaseError, match=sentence):
            load(tmp_path / f"{name}.safetensors")
