"""Error maps name the wrong cells and no others, and the numbers beside them are what was compared."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

from ci.check import check
from ci.failures import CORPORA, case_id, load, locate
from ci.maps import pictures
from ci.maps.files import Dump, folder_of
from ci.maps.grades import SYMBOLS, graded
from ci.maps.text import render
from ci.maps.told import Dumps
from ci.runs import Run
from impl.devices.registry import open_device
from impl.registry import resolve
from oracle.calls.verify import Verify
from oracle.case import Case, Permute, image
from oracle.codec import dumps
from oracle.judge import Verdict, judge
from oracle.relations import differing, disagreements
from oracle.values import build
from tests.meta.commands import Result, entry, here

Tensor = torch.Tensor
CASE = Case(
    call=Verify(
        heads=3,
        key_dim=8,
        value_dim=8,
        window=4,
        pool=6,
        qlens=(4, 1, 2, 0),
        slots=(3, 1, 5, 2),
        ids=(0, 1, 2, 3),
        tail=2,
        capacity=5,
    ),
    regimes={"raw_g": "normal"},
    seed=3,
)


def runs_of(case: Case, implementation: str = "triton") -> list[Run]:
    """Every call of the case."""
    device, runs = open_device("cpu"), list[Run]()  # the device first: it decides how Triton is imported
    check(case, resolve(implementation), device, runs.append)
    return runs


def run_of(case: Case, implementation: str = "triton") -> Run:
    """The first one."""
    return runs_of(case, implementation)[0]


@pytest.fixture(scope="module")
def sound() -> Run:
    return run_of(CASE)


def spoiled(run: Run, name: str, spoil: Callable[[Tensor], object]) -> Run:
    """The run with one tensor other than it was left, judged again."""
    after = {key: tensor.clone() for key, tensor in run.seen.after.items()}
    spoil(after[name])
    seen = replace(run.seen, after=after)
    return replace(run, seen=seen, verdict=judge(run.expected, seen, dict(run.axes)))


def section(run: Run, name: str) -> list[str]:
    """The lines of one tensor's maps, without headline and blanks around them."""
    parts = [part for part in render(run).split("\n\n") if part.startswith(f"{name}:")]
    return [line.strip() for line in parts[0].splitlines()[1:]] if parts else []


def tables(run: Run, name: str) -> dict[str, dict[str, str]]:
    """Title to (label to symbols) of a tensor's maps."""
    found: dict[str, dict[str, str]] = {}
    lines = section(run, name)
    titles = [i for i, line in enumerate(lines) if " by " in line or " of " in line.split("  ")[0]]
    for start, end in zip(titles, [*titles, len(lines)][1:], strict=True):
        rows = [line.rsplit("  ", 1) for line in lines[start + 2 : end]]
        found[lines[start]] = {" ".join(row[0].split()): row[1] if len(row) > 1 else "" for row in rows}
    return found


ROWS = [f"row {i} {n}" for i, n in enumerate(("4 tokens, slot 3", "1 token, slot 1", "2 tokens, slot 5"))]


def test_a_right_call_is_all_dots(sound: Run) -> None:
    assert sound.ok
    by_head = dict.fromkeys(ROWS, "...")
    assert tables(sound, "out") == {"row by head": {**by_head, "padding 2 tokens": "---"}}
    text = render(sound)
    assert "0 wrong, 168 to be written" in text  # 7 tokens of 3 heads of 8
    assert ". within its bound" in text


def test_a_wrong_head(sound: Run) -> None:
    run = spoiled(sound, "out", lambda out: out[:7, 1].mul_(2.0))
    found = tables(run, "out")
    digits = [found["row by head"][row] for row in ROWS]
    assert all(line[0] == line[2] == "." and line[1].isdigit() for line in digits), digits
    assert found["row by head"]["padding 2 tokens"] == "---"
    (deeper,) = (rows for title, rows in found.items() if title.startswith("token by head of row"))
    assert all(line[0] == line[2] == "." and line[1].isdigit() for line in deeper.values()), deeper
    last = next(title for title in found if title.startswith("token by v of row"))
    assert last.endswith("head 1")


def test_a_wrong_token(sound: Run) -> None:
    run = spoiled(sound, "out", lambda out: out[2].mul_(1.5))
    found = tables(run, "out")
    assert [found["row by head"][row].count(".") for row in ROWS] == [0, 3, 3]
    by_token = found["token by head of row 0"]
    assert {label for label, line in by_token.items() if line != "..."} == {"token 2"}
    assert by_token["token 2"].isdigit()


def test_a_wrong_row_of_records(sound: Run) -> None:
    run = spoiled(sound, "key_gate", lambda x: x[2, :, :2, :8].add_(1.0))
    found = tables(run, "key_gate")
    assert found["row by head"] == dict(zip(ROWS, ("...", "...", "~~~"), strict=True))
    assert found["position by head of row 2"] == {
        "position 0": "~~~",
        "position 1": "~~~",
        "position 2": "---",
        "position 3": "---",
    }
    assert found["position by channel of row 2, head 0"]["position 1"] == "~" * 8 + "." * 8
    assert tables(run, "out") == {}, "what is right is one line beside what is wrong"


def test_what_is_not_finite(sound: Run) -> None:
    run = spoiled(sound, "out", lambda out: out[1, 2].__setitem__(5, torch.nan))
    found = tables(run, "out")
    assert found["row by head"][ROWS[0]] == "..#"
    assert found["token by head of row 0"] == {
        "token 0": "...",
        "token 1": "..#",
        "token 2": "...",
        "token 3": "...",
    }
    assert found["token by v of row 0, head 2"]["token 1"] == ".....#.."


def test_poison_that_was_left(sound: Run) -> None:
    run = spoiled(sound, "out", lambda out: out[6].copy_(sound.seen.before["out"][6]))
    found = tables(run, "out")
    assert found["row by head"][ROWS[2]] == "!!!"
    assert found["token by head of row 2"] == {"token 0": "...", "token 1": "!!!"}


def test_dead_cells_and_inputs_that_changed(sound: Run) -> None:
    dead = spoiled(sound, "correction", lambda x: x[2, 1, 3].zero_())
    assert tables(dead, "correction")["position by head of row 2"]["position 3"] == "-x-"
    inputs = spoiled(sound, "state", lambda x: x[1, 0, 3, 2].add_(1.0))
    found = tables(inputs, "state")
    assert found["slot by head"] == {"slot 1 row 1": "x--"}
    assert found["v by k of slot 1, head 0"]["v 3"] == "--x-----"


def test_a_missing_output_and_one_of_another_shape(sound: Run) -> None:
    after = {name: x for name, x in sound.seen.after.items() if name != "out"}
    assert "out (the call returned none):" in render(replace(sound, seen=replace(sound.seen, after=after)))
    run = replace(sound, seen=replace(sound.seen, after=after | {"out": torch.zeros(2, 2)}))
    assert "out (came as (2, 2)):" in render(run)
    assert {grade.item() for one in graded(run) if one.name == "out" for grade in one.grade.unique()} == {
        SYMBOLS.index("!"),
        SYMBOLS.index(" "),
    }


FUSED = "tests.meta.fused_fake:implementation"
JUDGED = dict.fromkeys(("c05d56e6", "bde71198", "d12cdfb6", "49ba3718", "3630aea5", "1aec8e23"), "triton")


@pytest.mark.parametrize(("name", "implementation"), [*JUDGED.items(), ("0ff60a73", FUSED)])
def test_what_the_maps_call_wrong_is_what_the_judge_counts(name: str, implementation: str) -> None:
    """Every operation: one element in thirteen of everything is another."""
    case = msgspec.structs.replace(load(locate(name)[0]).case, relation=None)
    run = run_of(case, implementation)
    assert run.ok
    for tensor in run.seen.after:
        worse = spoiled(run, tensor, _every_thirteenth)
        counted = sum(p.count for p in worse.verdict.problems if p.tensor == tensor)
        one = [one for one in graded(worse) if one.name == tensor]
        assert sum(int(each.wrong.sum()) for each in one) == counted
        assert (render(worse).count(f"\n{tensor}:") + render(worse).startswith(f"{tensor}:") == 1) or not one


def _every_thirteenth(x: Tensor) -> None:
    flat = x.contiguous().flatten()
    flat[::13] = ~flat[::13] if flat.dtype == torch.bool else flat[::13] + 3
    x.copy_(flat.view_as(x))


def test_states_in_blocks() -> None:
    case = load(locate("d12cdfb6")[0]).case
    run = run_of(case)
    name = "state.0"
    slot = int(torch.nonzero(run.expected.cells[name].written.flatten(1).any(1))[0])
    worse = spoiled(run, name, lambda x: x[slot, 0, 1:3, 4].mul_(3.0))
    found = tables(worse, name)
    (title,) = (title for title in found if title.startswith(f"v by k of slot {slot}, head 0"))
    marked = {label: line.strip(".") for label, line in found[title].items() if line.strip(".")}
    assert set(marked) == {"v 1", "v 2"}
    assert all(line.isdigit() and len(line) == 1 for line in marked.values())


def test_relations_are_mapped() -> None:
    """Where a case and its image differ, though each is right: row 1 is the image's first."""
    case = msgspec.structs.replace(CASE, relation=Permute((1, 0, 2, 3)))
    first, second = runs_of(case)
    assert first.ok
    assert second.ok
    assert differing(case, image(case).call, first.expected, first.seen, second.seen) == {}
    other = spoiled(second, "out", lambda out: out[0, 2].add_(1e-9).mul_(1.01))
    found = differing(case, image(case).call, first.expected, first.seen, other.seen)
    run = replace(first, differs=found)
    assert not run.ok
    assert tables(run, "out")["row by head"] == {
        **dict(zip(ROWS, ("...", "..~", "..."), strict=True)),
        "padding 2 tokens": "---",
    }
    (problem,) = disagreements(case, image(case).call, first.expected, first.seen, other.seen)
    assert (problem.tensor, problem.count) == ("out", int(found["out"].sum())) == ("out", 8)


def test_planes_against_the_plain_convolution_are_mapped() -> None:
    case = load(locate("88c2e76c")[0]).case
    first, second = runs_of(case)
    other = spoiled(second, "out", lambda out: out[3, 70].add_(1.0))
    found = differing(case, image(case).call, first.expected, first.seen, other.seen)
    assert torch.nonzero(found["out"]).tolist() == [[1, 3, 6]]


def test_a_declined_call_has_no_map() -> None:
    """It writes nothing, so that nothing is compared but what it may not touch."""
    run = run_of(load(locate("2bd901aa")[0]).case, FUSED)
    assert run.ok
    assert not section(run, "out")
    changed = spoiled(run, "out", lambda out: out[0, :1].zero_())
    assert section(changed, "out")


# The command


def save(case: Case, folder: Path) -> Path:
    path = folder / "case.json"
    path.write_bytes(dumps(entry(case=case, checksum="")))
    return path


Command = Callable[..., Result]


@pytest.fixture
def kdafuzz(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command, in this process and the test's folder."""
    return lambda *arguments: here(monkeypatch, capsys, tmp_path, *arguments)


def replayed(kdafuzz: Command, folder: Path, name: str, case: Case = CASE) -> tuple[Result, Path]:
    implementation = f"tests.meta.spoiled:{name}" if name != "triton" else name
    done = kdafuzz("replay", str(save(case, folder)), "--impl", implementation, "--dump", "dump")
    return done, folder_of(folder / "dump", case, implementation)


def test_replay_writes_maps_and_numbers(tmp_path: Path, kdafuzz: Command) -> None:
    done, folder = replayed(kdafuzz, tmp_path, "head")
    assert done.code == 1, done.err
    assert folder.name.startswith(f"{case_id(CASE)}-tests.meta.spoiled-head-")
    assert f"dump dump/{folder.name}" in done.out
    maps = (folder / "maps.txt").read_text()
    for line in maps.splitlines():
        assert line.strip() in done.out
    assert (folder / "verdict.txt").read_text().startswith(f"case {case_id(CASE)}: ")
    assert load(folder / "case.json").case == CASE
    run = run_of(CASE, "tests.meta.spoiled:head")
    assert maps == render(run)
    found = load_file(folder / "numbers.safetensors")
    values = build(CASE).tensors
    assert {name for name in found if name.endswith(".input")} == {f"{name}.input" for name in values}
    for name, wanted in numbers(run, values).items():
        assert same(found.pop(name), wanted), name
    assert found == {}
    with safe_open(folder / "numbers.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["implementation"] == "spoiled"
    assert json.loads(facts["case"])["call"]["heads"] == 3


def numbers(run: Run, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the file must hold."""
    wanted = {f"{name}.input": x for name, x in values.items()}
    wanted |= {f"{name}.observed": x for name, x in run.seen.after.items()}
    for name, cells in run.expected.cells.items():
        wanted |= {f"{name}.expected": cells.value, f"{name}.written": cells.written}
        if cells.bound is not None:
            wanted[f"{name}.bound"] = cells.bound
    return wanted


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits in the same shape and dtype."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def test_a_crash_leaves_what_was_known_before(tmp_path: Path, kdafuzz: Command) -> None:
    old = folder_of(tmp_path / "dump", CASE, "tests.meta.spoiled:crash")
    old.mkdir(parents=True)
    for stale in ("out.png", "maps.txt", "numbers.safetensors"):
        (old / stale).write_text("of another run")
    done, folder = replayed(kdafuzz, tmp_path, "crash")
    assert (done.code, folder) == (1, old), done.err
    assert "the call did not return" in (folder / "maps.txt").read_text()
    assert "the call did not return" in done.out
    assert "SIGABRT" in (folder / "verdict.txt").read_text()
    found = load_file(folder / "numbers.safetensors")
    assert same(found["out.expected"], run_of(CASE).expected.cells["out"].value)
    assert same(found["state.input"], build(CASE).tensors["state"])
    assert not any(name.endswith(".observed") for name in found)
    names = {"case.json", "verdict.txt", "maps.txt", "numbers.safetensors"}
    assert {path.name for path in folder.iterdir()} == names


def dumped(case: Case, name: str, folder: Path) -> str:
    """The maps of a case that is run and dumped in this process."""
    device = open_device("cpu")
    implementation = resolve(name)
    dump = Dump(folder, case, implementation, device)
    dump.prepare()
    check(case, implementation, device, dump.keep)
    dump.finish()
    return (folder / "maps.txt").read_text()


def test_a_call_that_raises_is_shown_as_it_left_memory(tmp_path: Path) -> None:
    maps = dumped(CASE, "tests.meta.spoiled:broken", tmp_path)
    assert maps.startswith("the call raised RuntimeError: spoiled on purpose")
    assert "out.observed" in load_file(tmp_path / "numbers.safetensors")
    assert (tmp_path / "out.png").exists() is pictures.available()


def test_what_was_not_written_is_poison_in_the_arena_too(tmp_path: Path) -> None:
    dumped(CASE, "tests.meta.spoiled:unwritten", tmp_path)
    run = run_of(CASE, "tests.meta.spoiled:unwritten")
    assert tables(run, "out")["token by head of row 0"]["token 0"] == "!!!"
    assert tables(run, "out")["row by head"][ROWS[1]] == "..."


def test_a_right_case_is_dumped_too(tmp_path: Path) -> None:
    assert dumped(CASE, "triton", tmp_path) == render(run_of(CASE))


def test_minimize_dumps_the_smallest(tmp_path: Path, kdafuzz: Command) -> None:
    save(CASE, tmp_path)
    name = "tests.meta.spoiled:head"
    done = kdafuzz("minimize", "case.json", "--impl", name, "--seconds", "0", "--dump", "small")
    assert done.code == 1, done.err
    (folder,) = (tmp_path / "small").iterdir()
    smallest = load(next((tmp_path / ".kdafuzz" / "failures").rglob("*.json"))).case
    assert load(folder / "case.json").case == smallest
    assert f"dump small/{folder.name}" in done.out
    assert "row by head" in done.out


def test_serving_has_a_map_of_the_wrong_call_alone(tmp_path: Path) -> None:
    case = load(next((CORPORA / "serve").glob("rejected-tokens-row-*.json"))).case
    assert "every call of the script is right" in dumped(case, "triton", tmp_path)
    name = "tests.meta.spoiled:serving"
    maps = dumped(case, name, tmp_path)
    assert maps.startswith("in verify of step 3\n\n")
    assert "\nout: token " in maps
    assert "\n  row by head\n" in maps
    assert "q.input" in load_file(tmp_path / "numbers.safetensors")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, kdafuzz: Command) -> None:
    path = save(CASE, tmp_path)
    (tmp_path / "file").write_text("")
    done = kdafuzz("replay", str(path), "--impl", "triton", "--dump", "file")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert "'--dump'" in done.err
    below = kdafuzz("replay", str(path), "--impl", "triton", "--dump", "file/below")
    assert (below.code, below.out, len(below.err.splitlines())) == (2, "", 1)
    assert "--dump file/below: cannot write to" in below.err
    # A folder in it may be in the way all the same: only the process that writes finds out.
    taken = folder_of(tmp_path / "dump", CASE, "triton")
    taken.parent.mkdir()
    taken.write_text("")
    done = kdafuzz("replay", str(path), "--impl", "triton", "--dump", "dump")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert done.err.startswith("kdafuzz: --dump")


def test_folders_of_odd_names_are_apart() -> None:
    names = ["vllm:a/b", "vllm:a-b", "vllm:a b", "vllm@0.33.0", "x" * 500, "x" * 501]
    folders = [folder_of(Path("d"), CASE, name) for name in names]
    assert len(set(folders)) == len(names)
    assert folders[3].name == f"{case_id(CASE)}-vllm@0.33.0"
    assert all(len(folder.name) < 120 and folder.parent == Path("d") for folder in folders)


# Pictures


def test_pictures_are_images(sound: Run) -> None:
    if not pictures.available():
        pytest.skip("needs matplotlib (pip install -e '.[report]'); found none")
    import matplotlib.image

    run = spoiled(sound, "out", lambda out: out[:7, 1].mul_(2.0))
    drawn = dict(pictures.pictures(run))
    assert set(drawn) == {"correction", "key_gate", "out"}
    for data in drawn.values():
        image: Any = matplotlib.image.imread(io.BytesIO(data))
        assert image.ndim == 3
        assert min(image.shape[:2]) > 100
        assert image.std() > 0.0
    assert drawn["out"] != dict(pictures.pictures(sound))["out"]


def test_without_matplotlib_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Verdict()
    for there, times in ((False, 1), (True, 0)):
        monkeypatch.setattr("ci.maps.told.available", lambda there=there: there)
        said = io.StringIO()
        dumps = Dumps(tmp_path)
        for _ in range(2):
            dumps.tell(Console(file=said), CASE, "triton", right)
        assert said.getvalue().count("pip install -e '.[report]'") == times
