"""Bisections of whole histories: right answers, honest ranges, logs that a run can go on from."""

import ast
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from math import ceil, log2
from pathlib import Path

import pytest

from ci.bisect.bisection import Phase, Result, bisect
from ci.bisect.command import describe
from ci.bisect.items import History, Item, listed
from ci.bisect.log import Asked, Log, read_log
from ci.bisect.plot import Point, svg
from ci.bisect.revisions import revisions
from ci.bisect.rule import Outcome, Rule, Run, Seen
from ci.failures import CORPORA, load
from impl.contract import UnavailableError
from impl.vllm.source import resolve
from tests.fake_vllm import CONV
from tests.meta.bisect_history import Revision, growing, planted, write_history
from tests.meta.commands import Result as Ended
from tests.meta.commands import here, tree

CASE = CORPORA / "conv_update" / "rounded-products-4650af6a.json"
RANGES = {"import": range(100, 117), "rolls": range(150, 156), "flaky": range(175, 182)}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of this test's own."""
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """240 revisions, wrong from 163 on, with three ranges that tell nothing of it."""
    repo = tmp_path_factory.mktemp("steps") / "repo"
    return repo, write_history(repo, planted(240, 163, **RANGES))


def behaviour(item: Item) -> str:
    """What the kernel of a revision does, read from the file that would be loaded."""
    body = ast.parse((resolve(item.implementation).root / CONV).read_text()).body
    found = next(
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "BEHAVIOUR"
    )
    return str(ast.literal_eval(found))


def seen_of(behaves: str) -> Seen:
    """Three judgements of such a kernel, as the real ones come out."""
    kind, _, size = behaves.partition(" ")
    right, wrong = Run("", 0.1), Run("value conv out", 8e6, "conv: out is wrong")
    match kind:
        case "import":
            return Seen(why="conv_update: absent")
        case "rolls":
            return Seen((Run("copy roll conv_state", 0.1, "roll: differs"),) * 3)
        case "raises":
            return Seen((Run("raised RuntimeError", None, "raised: RuntimeError"),) * 3)
        case "flaky":
            return Seen((wrong, right, right))
        case "adds":
            return Seen((Run("", float(size) * 1e6),) * 3)
    return Seen((wrong if kind == "wrong" else right,) * 3)


def run(
    history: History, rule: Rule | None = None, ask: Callable[[Phase, int], Seen] | None = None
) -> tuple[Result, list[tuple[Phase, str, str]]]:
    """A bisection, and every judgement as (phase, name, kind)."""
    told: list[tuple[Phase, str, str]] = []

    def tell(phase: Phase, place: int, seen: Seen, outcome: Outcome, left: int) -> None:
        told.append((phase, history.items[place].name, outcome.kind))

    found = bisect(
        history,
        rule or Rule(),
        ask or (lambda phase, place: seen_of(behaviour(history.items[place]))),
        tell,
    )
    searched = [name for phase, name, _ in told if phase == "search"]
    assert len(searched) == len(set(searched)) == found.steps
    return found, told


def first(history: History, result: Result) -> str:
    """The name of the one candidate."""
    assert result.found
    return history.items[result.candidates[0]].name


def bounded(history: History, result: Result) -> bool:
    """Whether a search kept its promise."""
    return result.steps <= ceil(log2(len(history.items) - 1)) + len(result.skips)


def test_a_regression_among_other_faults(steps: tuple[Path, list[str]]) -> None:
    repo, names = steps
    before = tree(repo)
    history = revisions(repo, names[0], "main")
    assert [item.name for item in history.items] == names
    assert history.items[163].about == "2023-11-15 T: revision 163: wrong"
    result, told = run(history)
    assert first(history, result) == names[163]
    assert result.boundary == (162,)
    assert bounded(history, result)
    assert [(phase, name) for phase, name, _ in told if phase != "search"] == [
        ("end", names[0]),
        ("end", names[239]),
        ("again", names[162]),
        ("again", names[163]),
    ]
    assert tree(repo) == before


@pytest.mark.parametrize("wrong", [1, 99, 117, 118, 174, 182, 239])
def test_regressions_anywhere_else(steps: tuple[Path, list[str]], wrong: int) -> None:
    history = revisions(steps[0], steps[1][0], "main")
    behaviours = [revision.behaviour for revision in planted(240, wrong, **RANGES)]
    result, _ = run(history, ask=lambda phase, place: seen_of(behaviours[place]))
    assert bounded(history, result)
    # Behind revisions that tell nothing, it may have been any of them.
    ranges = {117: range(100, 118), 182: range(175, 183)}
    assert result.candidates == tuple(ranges.get(wrong, [wrong]))


def test_what_cannot_be_told_is_said(steps: tuple[Path, list[str]]) -> None:
    history = revisions(steps[0], steps[1][0], "main")
    behaviours = [revision.behaviour for revision in planted(240, 108, **RANGES)]
    result, _ = run(history, ask=lambda phase, place: seen_of(behaviours[place]))
    assert result.candidates == tuple(range(100, 118))
    assert (result.boundary, result.found) == ((99,), False)
    assert bounded(history, result)
    lines = describe(history, result)
    assert lines[0].startswith(f"broken in one of 18, {steps[1][100][:12]} .. {steps[1][117][:12]}")
    assert lines[1] == f"  {steps[1][100]} (2023-11-14 T: revision 100: import): conv_update: absent"


def test_what_was_mended_is_found_too(steps: tuple[Path, list[str]]) -> None:
    history = revisions(steps[0], steps[1][239], steps[1][0])
    assert (history.claim, history.items[0].name) == ("bad", steps[1][0])
    swapped = {"right": "wrong", "wrong": "right"}
    result, _ = run(history, ask=lambda phase, at: seen_of(swapped.get(b := behaviour(history.items[at]), b)))
    assert (first(history, result), result.new) == (steps[1][163], "good")
    assert describe(history, result)[0].startswith(f"fixed in {steps[1][163]} ")


def test_growing_errors_by_their_ratio(tmp_path: Path) -> None:
    names = write_history(tmp_path / "repo", growing(240))
    history = revisions(tmp_path / "repo", names[0], names[-1])
    result, _ = run(history, Rule(threshold=20.0))
    # 2e-7 a revision: the ratio is 0.2 times the revision's number.
    assert first(history, result) == names[101]
    assert result.steps <= 8


def test_flaky_ends_and_flaky_faults() -> None:
    history = listed([Item(str(at), "") for at in range(9)])
    mixed = ["right"] * 5 + ["flaky"] * 4
    with pytest.raises(
        UnavailableError, match=r"mixed: 1 of 3 runs fail; try more --repeats, or --mixed bad"
    ):
        run(history, ask=lambda phase, at: seen_of(mixed[at]))
    result, _ = run(history, Rule(any_run=True), ask=lambda phase, at: seen_of(mixed[at]))
    assert first(history, result) == "5"


def test_an_end_that_tells_nothing_is_replaced() -> None:
    history = listed([Item(str(at), "") for at in range(40)])
    for behaviours, found in (
        (["right"] * 11 + ["wrong"] * 9 + ["import"] * 20, "11"),
        (["import"] * 20 + ["right"] * 12 + ["wrong"] * 8, "32"),
        (["wrong"] * 3 + ["right"] * 2 + ["import"] * 35, "3"),
    ):
        result, _ = run(history, ask=lambda phase, at, b=behaviours: seen_of(b[at]))  # type: ignore[misc]
        assert first(history, result) == found
        assert bounded(history, result)
    for behaviours, said in (
        (["right"] * 39 + ["import"], "39 tells nothing .*all others are good"),
        (["import"] * 40, "0 tells nothing .*, nor does 39"),
        (["right"] * 40, "both ends are good, 0 and 39"),
    ):
        with pytest.raises(UnavailableError, match=said):
            run(history, ask=lambda phase, at, b=behaviours: seen_of(b[at]))  # type: ignore[misc]


def test_an_answer_that_does_not_come_out_again_is_not_believed() -> None:
    history = listed([Item(str(at), "") for at in range(9)])

    def ask(phase: Phase, at: int) -> Seen:
        return seen_of("wrong" if at > 4 and not (phase == "again" and at == 5) else "right")

    result, _ = run(history, ask=ask)
    assert (result.candidates, result.found) == ((5,), False)
    assert "not proven: 5 must be bad, and came out good when asked again" in describe(history, result)


def merged(tmp_path: Path) -> tuple[Path, list[str]]:
    """Two lines that part at 1: 2 to 5 and 6 to 11, merged in 12; 13 follows. Wrong from 9 on."""
    sides = [Revision(), Revision()] + [Revision(parents=(at - 1,)) for at in range(2, 6)]
    sides += [Revision("wrong" if at >= 9 else "right", (1 if at == 6 else at - 1,)) for at in range(6, 12)]
    sides += [Revision("wrong", (5, 11)), Revision("wrong")]
    return tmp_path / "repo", write_history(tmp_path / "repo", sides)


def test_merges(tmp_path: Path) -> None:
    repo, names = merged(tmp_path)
    history = revisions(repo, names[0], names[13])
    result, _ = run(history)
    assert first(history, result) == names[9]
    # Along first parents nothing but the merge has it.
    history = revisions(repo, names[0], names[13], first_parent=True)
    assert [item.name for item in history.items] == [names[at] for at in (0, 1, 2, 3, 4, 5, 12, 13)]
    result, _ = run(history)
    assert first(history, result) == names[12]
    assert [history.items[at].name for at in result.boundary] == [names[5]]
    # From inside one line, the other one has parents that are no candidates: they are judged in the end.
    history = revisions(repo, names[3], names[13])
    assert {item.name for item in history.items[: history.known_old]} == {names[3], names[1]}
    result, told = run(history)
    assert first(history, result) == names[9]
    assert {name for phase, name, _ in told if phase == "again"} == {names[8], names[9]}
    # Between two lines, where they parted.
    history = revisions(repo, names[5], names[10])
    assert history.items[0].name == names[1]
    assert "merge base" in history.notes[0]
    assert first(history, run(history)[0]) == names[9]


def test_only_revisions_that_can_change_the_kernels_are_searched(tmp_path: Path) -> None:
    made = [Revision("wrong" if at >= 20 else "right", touching=at % 5 == 0) for at in range(40)]
    names = write_history(tmp_path / "repo", made)
    history = revisions(tmp_path / "repo", names[0], names[39])
    assert [item.name for item in history.items] == [names[at] for at in range(0, 40, 5)]
    assert first(history, run(history)[0]) == names[20]
    every = revisions(tmp_path / "repo", names[0], names[39], paths=("README",))
    assert len(every.items) == 40
    with pytest.raises(UnavailableError, match="touches the kernels: the ends have equal files"):
        revisions(tmp_path / "repo", names[1], names[4])
    with pytest.raises(UnavailableError, match="are one revision"):
        revisions(tmp_path / "repo", names[1], names[1])
    with pytest.raises(UnavailableError, match="no revision 'nothing'"):
        revisions(tmp_path / "repo", "nothing", names[1])


def test_rules() -> None:
    value, rolls = seen_of("wrong"), seen_of("rolls")
    assert Rule().outcome(rolls).kind == "bad"
    assert Rule().like_first(value).outcome(rolls) == Outcome("skip", "another failure: roll: differs")
    assert Rule(like="copy roll conv_state").like_first(value).outcome(rolls).kind == "bad"
    by_ratio = Rule(threshold=20.0)
    assert by_ratio.like_first(value) == by_ratio
    assert by_ratio.outcome(rolls).kind == "good"
    assert by_ratio.outcome(Seen((Run("", float("nan")),))).kind == "bad"
    assert by_ratio.outcome(seen_of("raises")) == Outcome("skip", "no ratio: raised: RuntimeError")
    assert by_ratio.outcome(seen_of("flaky")).why == "mixed: 1 of 3 runs have a ratio above 20"


def logged(path: Path, asked: Asked, judge: Callable[[int], Seen]) -> Result:
    """A bisection with a log, begun or gone on with."""
    past = read_log(path)[1] if path.exists() else None
    record = Log(path, asked, past)

    def ask(phase: Phase, place: int) -> Seen:
        return record.past.get((phase, place)) or judge(place)

    try:
        found = bisect(
            asked.history, asked.rule, ask, lambda p, at, seen, o, _: record.judged(p, at, seen, o)
        )
        record.ended(found)
    finally:
        record.close()
    return found


def test_a_log_goes_on_after_any_end(tmp_path: Path, steps: tuple[Path, list[str]]) -> None:
    history = revisions(steps[0], steps[1][0], "main")
    asked = Asked(load(CASE).case, history, repeats=3)
    judged: list[int] = []

    def judge(place: int) -> Seen:
        judged.append(place)
        return seen_of(behaviour(history.items[place]))

    whole = logged(tmp_path / "whole.jsonl", asked, judge)
    count = len(judged)
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines[1:-1]]
    assert len(entries) == count == whole.steps + 4
    assert {"phase", "item", "verdict", "why", "ratio", "signature", "seconds"} <= entries[0].keys()
    assert read_log(tmp_path / "whole.jsonl")[0] == asked
    for kept in (1, 4, 9, len(lines) - 1, len(lines)):
        cut = tmp_path / f"cut{kept}.jsonl"
        cut.write_bytes(b"".join(lines[:kept]) + b'{"half a li')
        judged.clear()
        assert logged(cut, asked, judge) == whole
        assert len(judged) == max(0, count - (kept - 1))
        assert cut.read_bytes().splitlines()[: len(lines) - 1] == [line.rstrip(b"\n") for line in lines[:-1]]


@pytest.mark.parametrize("text", ["", "[1]\n", '{"kdafuzz": 1}\n', '{"kdafuzz-bisect": 1}\n', "{\n"])
def test_what_is_no_log(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(UnavailableError, match="cannot resume"):
        read_log(tmp_path / "log")


def test_the_picture() -> None:
    """One mark for each judged item, higher for a larger ratio; names do not overlap."""
    points = [
        Point(0, "r0", "good", 0.5),
        Point(400, "r400", "good", 5.0),
        Point(401, "r401", "bad", float("inf")),
        Point(402, "r402", "skip", None),
        Point(999, "r999", "bad", 300.0),
    ]
    picture = ET.fromstring(svg("a < b", 1000, points, (401,), 20.0))  # noqa: S314 (our own)
    marks = {child[0].text: child for child in picture.iter() if child.get("class") and len(child)}
    assert [str(text).partition(":")[0] for text in marks] == [point.name for point in points]
    height = {str(text).partition(":")[0]: float(mark.get("cy", 0)) for text, mark in marks.items()}
    assert height["r401"] < height["r999"] < height["r400"] < height["r0"]
    assert marks["r402: skip"].get("class") == "skip"
    words = [child.text for child in picture.iter() if child.get("transform")]
    assert sorted(map(str, words)) == ["r0", "r401", "r999"]
    assert "a < b" in [child.text for child in picture.iter()]


@pytest.fixture
def at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """``kdafuzz bisect`` in this process."""
    return lambda *arguments: here(monkeypatch, capsys, tmp_path, "bisect", *arguments)


def test_the_command(tmp_path: Path, at_home: Callable[..., Ended]) -> None:
    """Real judgements in processes of their own, a log, a picture; then the same from the log alone."""
    made = [Revision(b) for b in ("right", "right", "right", "wrong", "wrong")]
    names = write_history(tmp_path / "repo", made)
    ends = ("--repo", "repo", "--good", names[-1], "--bad", names[0])
    done = at_home(str(CASE), *ends, "--repeats", "2", "--plot", "plot.svg")
    assert (done.code, done.err) == (0, "")
    assert f"note: {names[0][:12]} was given as bad; it is good" in done.out
    assert f"\nbroken in {names[3]} (2023-11-14 T: revision 3: wrong): {names[2][:12]} (good)" in done.out
    (log,) = (tmp_path / ".kdafuzz/bisect").glob("*.jsonl")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert entries[0]["asked"]["history"]["items"][0]["name"] == names[0]
    assert [entry["phase"] for entry in entries[1:-1]] == ["end"] * 2 + ["search"] * 2 + ["again"] * 2
    assert {entry["signature"] for entry in entries[1:-1]} == {"", "value conv out"}
    assert all(len(entry["seen"]["runs"]) == 2 for entry in entries[1:-1])
    assert entries[-1]["candidates"] == [names[3]]
    picture = ET.parse(tmp_path / "plot.svg").getroot()  # noqa: S314 (our own)
    marks = [child.get("class") for child in picture.iter() if child.get("class")]
    assert sorted(filter(None, marks)) == ["bad"] * 2 + ["found"] + ["good"] * 2
    log.write_text(log.read_text().replace("repo@", "gone@"))  # nothing can be judged any more
    again = at_home("--resume", "latest", "--plot", "other.svg")
    assert (again.code, again.err) == (0, "")
    assert again.out.replace("other.svg", "plot.svg") == done.out
    assert (tmp_path / "other.svg").read_bytes() == (tmp_path / "plot.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'CASE'"),
        ((str(CASE),), "needs one of --repo, --versions, --wheels and --package"),
        ((str(CASE), "--versions", "1..2", "--wheels", "."), "needs one of"),
        ((str(CASE), "--repo", "."), "--repo, --good and --bad go together"),
        ((str(CASE), "--versions", "1..2", "--bad", "x"), "--repo, --good and --bad go together"),
        ((str(CASE), "--versions", "1..2", "--first-parent"), "go with --repo"),
        ((str(CASE), "--versions", "1..2", "--metric", "ratio"), "go together"),
        ((str(CASE), "--wheels", ".", "--threshold", "2"), "go together"),
        ((str(CASE), "--wheels", ".", "--impl", "triton"), "needs --impl vllm or vllm:cute"),
        ((str(CASE), "--wheels", "."), "needs two wheels"),
        ((str(CASE), "--package", "triton"), "must be NAME=A..B"),
        (("00000000", "--wheels", "."), "no case of this id"),
        (("--resume", "latest"), "no bisection to resume"),
        (("--resume", "x", "--repeats", "2"), "leave out --repeats"),
    ],
)
def test_bad_calls(at_home: Callable[..., Ended], arguments: Sequence[str], said: str) -> None:
    done = at_home(*arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1
