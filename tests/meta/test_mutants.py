"""Mutants: what operators propose, what names a mutant, how it is judged, and how a run goes on."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click import UsageError
from click.testing import CliRunner

from ci.cli import cli
from ci.mutants import command, listed
from ci.mutants.judging import SOUND, Outcome, Task
from ci.mutants.listed import Listed, read_listed
from ci.mutants.plan import plan, sample
from ci.mutants.reach import Tree
from ci.mutants.running import execute
from ci.mutants.sites import OPERATORS, Mutant, function_text, mutants_of, planted
from ci.mutants.subjects import OWN, Subject, subject
from ci.mutants.tally import report
from ci.query import Offer
from impl.contract import Domain, UnavailableError

GATE = "impl/triton/gate.py"
Found = set[tuple[str, str]]

# fmt: off
SNIPPETS: list[tuple[str, str, Found]] = [
    ("mask-term", "m = (a < n) & live", {("without-left", "live"), ("without-right", "(a < n)")}),
    ("mask-term", "if a and b: pass", {("without-left", "b"), ("without-right", "a")}),
    ("or-term", "m = a | b", {("without-left", "b"), ("without-right", "a"), ("and", "a & b")}),
    ("access-mask", "tl.store(p, x, mask=m)", {("store", "tl.store(p, x)")}),
    ("access-mask", "x = tl.load(p, mask=m, other=0.0)", {("load", "tl.load(p)")}),
    ("load-other", "x = tl.load(p, mask=m, other=0.0)", {("one", "other=1.0")}),
    ("comparison-edge", "m = ks < K", {("1", "ks <= K")}),
    ("comparison-edge", "m = 2 <= w <= 6", {("1", "2 < w <= 6"), ("2", "2 <= w < 6")}),
    ("comparison-opposite", "m = row == 0", {("1", "row != 0")}),
    ("comparison-opposite", "m = b is not None", {("1", "b is None")}),
    ("null-test", "m = slot <= NULL",
     {("exact", "slot == NULL"), ("never", "slot != slot"), ("always", "slot == slot")}),
    ("null-test", "m = slot > 0",
     {("exact", "slot != 0"), ("never", "slot == slot"), ("always", "slot != slot")}),
    ("null-test", "m = count > 0", set()),
    ("clamp", "n = tl.minimum(a, b)", {("first", "a"), ("second", "b"), ("maximum", "tl.maximum(a, b)")}),
    ("select", "x = tl.where(c, a, b)",
     {("first", "a"), ("second", "b"), ("swapped", "tl.where(c, b, a)")}),
    ("select", "r = slot if BY_SLOT else row", {("first", "slot"), ("second", "row")}),
    ("flag", "if FLAG: pass", {("opposite", "not FLAG")}),
    ("flag", "if cutlass.const_expr(self.wide): pass",
     {("opposite", "cutlass.const_expr(not self.wide)")}),
    ("flag", "launch(x, wide=True)", {("literal", "False")}),
    ("loop-bound", "for t in range(n): pass",
     {("late-start", "range(1, n)"), ("early-end", "range(n - 1)"), ("late-end", "range(n + 1)")}),
    ("loop-bound", "for t in range(0, n, GROUP): pass",
     {("early-start", "range(0 - 1, n, GROUP)"), ("late-start", "range(0 + 1, n, GROUP)"),
      ("early-end", "range(0, n - 1, GROUP)"), ("late-end", "range(0, n + 1, GROUP)"),
      ("step", "range(0, n, 1)")}),
    ("eps", "x = tl.rsqrt(s + 1e-6)", {("tenfold", "1e-05"), ("none", "0.0")}),
    ("constant", "m = x > 20.0", {("half", "10.0")}),
    ("constant", "p = base + 2 * pitch", {("one-more", "3")}),
    ("factor", "p = row * step", {("without-left", "step"), ("without-right", "row")}),
    ("factor", "p = multiply(a, b)", {("without-left", "b"), ("without-right", "a")}),
    ("factor", "p = c ** (a * b)", {("without-left", "b"), ("without-right", "a")}),
    ("term", "p = base + row * step", {("without-left", "(row * step)"), ("without-right", "base")}),
    ("offset", "p = row + 1", {("dropped", "row"), ("one-more", "row + 2")}),
    ("offset", "p = n - 1", {("dropped", "n"), ("one-more", "n - 2")}),
    ("operands", "d = end - first", {("swapped", "first - end"), ("other", "end + first")}),
    ("operands", "b = at // blocks", {("other", "at % blocks")}),
    ("operands", "x = -a", {("sign", "a")}),
    ("ceiling", "n = -(-v // b)", {("floor", "(v // b)")}),
    ("ceiling", "n = triton.cdiv(v, b)", {("floor", "(v // b)")}),
    ("ceiling", "n = (v + b - 1) // b", {("floor", "v // b")}),
    ("function", "x = tl.exp(a)", {("dropped", "a"), ("exp2", "tl.exp2(a)")}),
    ("axis", "x = tl.sum(a * k[None, :], axis=1)", {("other", "axis=0"), ("other", "k[:, None]")}),
    ("cast", "y = x.to(tl.float32)", {("dropped", "x")}),
    ("cast", "y = x.to(tl.int64)", set()),
    ("index-width", "y = x.to(tl.int64)", {("narrow", "x.to(tl.int32)")}),
    ("rounding", "u = tl.sum(a)", {("bf16", "u = (tl.sum(a)).to(tl.bfloat16).to(tl.float32)")}),
    ("rounding", "u = a + b", set()),
    ("grid-axis", "r = tl.program_id(2)", {("next", "tl.program_id(0)")}),
    ("host-check", "if not x.ok or y: raise ValueError('no')", set()),
    ("subscript", "n = x.shape[1]", {("next", "x.shape[2]"), ("previous", "x.shape[0]")}),
    ("argument", "g(a, b, 3, key=c)", {("1", "g(b, a, 3, key=c)"), ("2", "g(a, 3, b, key=c)")}),
    ("barrier", "tl.debug_barrier()", {("debug_barrier", "pass")}),
    ("call", "tl.store(p, x)", {("dropped", "pass")}),
    ("early-return", "if n == 0: return", set()),
    ("update", "x += y * 2", {("dropped", "pass"), ("opposite", "x = x - (y * 2)")}),
]
# fmt: on


def kernel(*lines: str, before: str = "") -> str:
    """A module with one function, of parameters that have names of strides, indices and constants."""
    head = "def f(a, row, slot, x_token, x_row, out_token, K: tl.constexpr, V: tl.constexpr):"
    return "\n".join((before, head, *(f"    {line}" for line in lines), ""))


def found(source: str, operator: str = "", *, device: bool = True) -> list[Mutant]:
    """Mutants of its functions."""
    mutants = mutants_of("m.py", source, {"f": (device, ("verify",)), "g": (device, ("verify",))})
    return [each for each in mutants if operator in ("", each.operator)]


def proposals(source: str, operator: str, *, device: bool = True) -> Found:
    return {(each.variant, each.new) for each in found(source, operator, device=device)}


@pytest.mark.parametrize(("operator", "line", "wanted"), SNIPPETS)
def test_operator_proposes(operator: str, line: str, wanted: Found) -> None:
    # Which of two operators comes upon a change first is settled by their order, not by this test.
    alone = {operator: OPERATORS[operator]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ci.mutants.sites.OPERATORS", alone)
        assert proposals(kernel(line), operator) == wanted


def test_names_are_taken_from_the_function() -> None:
    source = kernel("p = row * x_token + K * V")
    assert proposals(source, "stride-swap") == {("x_row", "x_row"), ("out_token", "out_token")}
    assert proposals(source, "index-source") == {("slot", "slot")}
    assert proposals(source, "constexpr-swap") == {("V", "V"), ("K", "K")}


def test_return_and_order_of_statements() -> None:
    source = kernel("u = g(a)", "a += u", "b = 3", "if b:", "    return", "c = 4")
    swapped = found(source, "order")
    assert [planted(source, each) for each in swapped] == [
        kernel("a += u", "u = g(a)", "b = 3", "if b:", "    return", "c = 4")
    ]
    assert proposals(source, "early-return") == {("dropped", "pass")}


def test_checks_of_the_host_are_only_made_stricter() -> None:
    line = "if x.n < 2 or not 3 <= x.m: raise ValueError('few')"
    source = kernel(*line.replace(": raise", ":\n        raise").split("\n"))
    assert proposals(source, "comparison-edge", device=False) == {("1", "x.n <= 2"), ("1", "3 < x.m")}
    assert proposals(source, "or-term", device=False) == set()
    assert proposals(source, "host-check", device=False) == {("opposite", "not (x.n < 2 or not 3 <= x.m)")}


def test_strides_are_the_hosts() -> None:
    source = kernel("launch(x.stride(0), *y.stride(), z.stride(1))")
    wanted = {
        ("dense", "x.contiguous().stride(0)"),
        ("dense", "z.contiguous().stride(1)"),
        ("other", "z.stride(0)"),
        ("dense", "y.contiguous().stride()"),
    }
    assert proposals(source, "host-stride", device=False) == wanted
    assert proposals(source, "host-stride") == set()


def test_what_is_no_code_stays() -> None:
    source = "\n".join(
        (
            "@decorated(1 + 2)",
            "def f(x: a + b = 3 * 4) -> c[1]:",
            '    """Docs 1 + 2."""',
            "    import os.path",
            "    y: d[0] = f'{x + 1}'",
            "    raise ValueError(x + 1, 'a' + 'b')",
            "def untouched(x):",
            "    return x + 1",
            "",
        )
    )
    assert found(source) == []


def test_every_operator_has_a_snippet_and_classes() -> None:
    here = {name for name, _, wanted in SNIPPETS if wanted}
    elsewhere = {"stride-swap", "index-source", "constexpr-swap", "order", "early-return", "host-check"}
    assert here | elsewhere | {"host-stride"} == OPERATORS.keys()
    assert all(set(each.classes) <= set(range(1, 31)) and each.classes for each in OPERATORS.values())


def test_ids_are_the_same_each_time_and_keys_survive_other_lines() -> None:
    lines = ("p = row * x_token", "q = row * x_token", "tl.store(p, a, mask=row < K)")
    first, again = found(kernel(*lines)), found(kernel(*lines))
    assert [each.id for each in first] == [each.id for each in again]
    assert len({each.id for each in first}) == len({each.key for each in first}) == len(first)
    shifted = found(kernel(*lines, before="# a line\n\nONE = 1"))
    assert [each.key for each in shifted] == [each.key for each in first]
    assert not {each.id for each in shifted} & {each.id for each in first}
    assert {each.ordinal for each in first if each.operator == "factor"} == {1, 2}


def test_what_begins_at_one_place_has_ids_of_its_own() -> None:
    """The parts of a chain do: the verdict on one must not stand for the other."""
    chain = [each for each in found(kernel("m = a & b & c")) if each.variant == "without-right"]
    assert [each.old for each in chain] == ["a & b", "a & b & c"]
    assert chain[1].id == f"{chain[0].id}:2"


def test_a_change_is_made_once() -> None:
    # Both operators would drop the left side.
    mutants = found(kernel("x = multiply(a, b)"))
    texts = [planted(kernel("x = multiply(a, b)"), each) for each in mutants]
    assert len(set(texts)) == len(texts)


def test_text_that_has_changed_is_refused() -> None:
    source = kernel("p = row * x_token")
    mutant = found(source, "factor")[0]
    assert function_text(source, mutant)[1:3] == ["-     p = row * x_token", "+     p = x_token"]
    with pytest.raises(ValueError, match="has changed"):
        planted("# a line more\n" + source, mutant)


TREE = {
    "impl/one.py": "\n".join(
        (
            "from impl.two import helper",
            "def entry(x):",
            "    _kernel[1](x)",
            "@triton.jit(do_not_specialize=[])",
            "def _kernel(x):",
            "    helper(x)",
            "def other(x):",
            "    return Box().get()",
            "class Box:",
            "    def get(self):",
            "        return 1",
        )
    ),
    "impl/two.py": "def helper(x):\n    inner(x)\ndef inner(x):\n    pass\ndef unused(x):\n    pass",
}


def test_operations_reach_what_they_call() -> None:
    tree = Tree(TREE)
    one, two = "impl/one.py", "impl/two.py"
    entry = {(one, "entry"), (one, "_kernel"), (two, "helper"), (two, "inner")}
    assert tree.reached([(one, "entry")]) == entry
    assert tree.device() == entry - {(one, "entry")}
    assert tree.reached([(one, "other")]) == {(one, "other"), (one, "Box.get")}
    assert tree.imported([one]) == {one, two}
    assert tree.imported([two]) == {two}
    assert tree.present([(one, "entry"), (one, "absent"), (two, "*")]) == ((one, "entry"), (two, "*"))


def test_a_sample_takes_turns() -> None:
    mutants = [
        replace(each, function=function, module=function)
        for function in ("f", "g", "h")
        for each in found(kernel("p = row * x_token + slot * x_row", "m = (row < K) & a"))
    ]
    operators = {each.operator for each in mutants}
    chosen = sample(mutants, len(operators))
    assert {each.operator for each in chosen} == operators
    factors = [each for each in sample(mutants, len(operators) * 3) if each.operator == "factor"]
    assert {each.function for each in factors} == {"f", "g", "h"}
    assert sample(mutants, None) == mutants
    assert sample(mutants[::-1], 7)[::-1] == sample(mutants, 7)


def toy(**texts: str) -> Subject:
    """A subject whose one kernel is a snippet."""
    source = kernel("p = row * x_token", "tl.store(p, a, mask=row < K)")
    files = {"m.py": f"import triton\n@triton.jit\n{source.lstrip()}", **texts}
    return Subject("toy", "cpu", Path(), files, {"verify": (("m.py", "f"),)})


def entries(tmp_path: Path, text: str) -> Listed:
    (tmp_path / "list.toml").write_text(text)
    return read_listed(tmp_path / "list.toml")


def test_listed_mutants_are_set_aside_and_stale_ones_told(tmp_path: Path) -> None:
    first = toy().mutants()[0]
    known = entries(
        tmp_path,
        f"[[equivalent]]\nwhy = 'so'\nkeys = [{json.dumps(first.key)}, 'm.py g gone', 'other.py g x']",
    )
    planned = plan(toy(), ("verify",), known)
    assert [each.key for each, _ in planned.aside] == [first.key]
    assert first.key not in {each.key for each in planned.mutants}
    assert planned.stale == ("m.py g gone",)
    assert len(planned.every) == len(toy().mutants())
    assert not plan(toy(), ("verify",), known, with_listed=True).aside
    assert [each.key for each in plan(toy(), ("verify",), known, only=(first.id,)).mutants] == [first.key]
    assert not plan(toy(), ("commit",), known).every
    with pytest.raises(UnavailableError, match="there is no mutant 'm:9'"):
        plan(toy(), ("verify",), known, only=("m:9",))


def test_a_fault_of_spelling_is_none() -> None:
    subject = toy()
    first = next(each for each in subject.mutants() if each.operator == "factor")
    spelled = replace(first, new=f"({first.old})")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "mutants", lambda self: (spelled, first))
        assert [each.new for each in plan(subject, ("verify",), Listed()).mutants] == [first.new]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[equal]]\nwhy = 'x'", "found 'equal'"),
        ("[[equivalent]]\nkeys = ['a']", "needs a text as why"),
        ("[[equivalent]]\nwhy = 'x'", "names no mutant"),
        ("[[equivalent]]\nwhy = 'x'\nkeys = [1]", "needs a list of texts as keys"),
        ("[[equivalent]]\nwhy = 'x'\nkeys = ['a', 'a']", "lists 'a' twice"),
        ("[[equivalent]]\nwhy = 'x'\nkeys = ['a']\ncaught = 'y'", "unknown field 'caught'"),
        ("[[beyond]]\nwhy = 'x'\nkeys = ['a']", "needs a text as caught"),
        ("[[beyond]]\nwhy = 'x'\ncaught = 'y'\noperators = ['nothing']", "names no operator: 'nothing'"),
        ("[[beyond", "cannot read"),
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        entries(tmp_path, text)


def test_own_list_names_mutants_that_there_are() -> None:
    own = read_listed(listed.LIST)
    modules = {key.partition(" ")[0] for each in own.entries for key in each.keys}
    for name in ("triton", "cute"):
        here = subject(name, None)
        if modules & here.texts.keys():
            assert own.stale(here.mutants(modules), modules & here.texts.keys()) == []


def outcome(mutant: Mutant, **given: Any) -> Outcome:
    return Outcome(mutant.id, mutant.key, **given)


def test_report_counts_and_warns(tmp_path: Path) -> None:
    mutants = [toy().mutants()[i] for i in (0, 2, 4, 6, 7, 8)]
    known = entries(
        tmp_path,
        f"[[equivalent]]\nwhy = 'so'\nkeys = [{json.dumps(mutants[0].key)}]\n"
        f"[[beyond]]\nwhy = 'far'\ncaught = 'GPU'\noperators = ['{mutants[4].operator}']",
    )
    planned = plan(toy(), ("verify",), known, with_listed=True)
    given: list[dict[str, Any]] = [
        {"status": "killed", "example": 9, "baseline": "survived"},
        {"status": "killed", "example": 3, "baseline": "killed"},
        {"status": "survived", "baseline": "survived"},
        {"status": "stillborn"},
        {"status": "survived", "baseline": "survived"},
        {"status": "broken", "text": "no verdict"},
    ]
    assert len({each.operator for each in mutants}) == len(mutants)
    outcomes = {("toy", each.id): outcome(each, **told) for each, told in zip(mutants, given, strict=False)}
    whole = report([planned], outcomes, known)
    row = whole.total()
    assert (row.mutants, row.killed, row.survived, row.stillborn, row.beyond, row.broken) == (
        6,
        2,
        1,
        1,
        1,
        1,
    )
    assert (row.rate, row.median, row.usual, row.asked) == (2 / 3, 6, 1, 3)
    assert [each.mutant.id for each in whole.survivors] == [mutants[2].id, mutants[5].id]
    assert whole.warnings == [f"equivalents.toml: lists as equivalent what was killed: {mutants[0].key}"]
    assert whole.total("toy", "commit").rate is None


# ---- The command, with processes that only say what they are told to.


def fake(statuses: Callable[[Task], dict[str, Any]], judged: list[str]) -> Callable[..., None]:
    def execute(tasks: Iterable[Task], jobs: int, done: Callable[[Task, Outcome], None]) -> None:
        for task in tasks:
            judged.append(task.id)
            key = task.mutant.key if task.mutant is not None else task.id
            done(task, Outcome(task.id, key, **statuses(task)))

    return execute


def run_command(
    patch: pytest.MonkeyPatch, statuses: Callable[[Task], dict[str, Any]], *arguments: str
) -> tuple[int, str, list[str]]:
    judged: list[str] = []
    patch.setattr(command, "execute", fake(statuses, judged))
    patch.setattr(command, "subject", lambda name, device: toy())
    patch.setattr(command, "probe", lambda name, device: Offer(domains={"verify": Domain()}))
    patch.setattr(command, "read_listed", Listed)
    result = CliRunner().invoke(cli, ["mutants", *arguments], standalone_mode=False)
    if isinstance(result.exception, UnavailableError):
        return 2, str(result.exception), judged
    assert result.exception is None or isinstance(result.exception, SystemExit | UsageError), result.exc_info
    return result.exit_code, result.output, judged


def all_killed(task: Task) -> dict[str, Any]:
    if task.mutant is None:
        return {"status": "survived"}
    return {"status": "killed", "operation": "verify", "example": 2, "kind": "value", "stage": "output"}


def test_exit_code_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = toy().mutants()[-1]
    out = ["--save", str(tmp_path / "logs"), "--json", str(tmp_path / "out.json")]
    code, text, judged = run_command(monkeypatch, all_killed, *out)
    assert code == 0
    assert judged[0] == f"{SOUND}:verify"
    assert f"{len(judged) - 1} │" in text

    def one_survives(task: Task) -> dict[str, Any]:
        return {"status": "survived"} if task.id == last.id else all_killed(task)

    code, text, _ = run_command(monkeypatch, one_survives, *out)
    assert code == 1
    assert last.id in text
    assert f"key: {last.key}" in text
    data = msgspec.json.decode((tmp_path / "out.json").read_bytes())
    assert [each["key"] for each in data["survivors"]] == [last.key]
    assert len(data["outcomes"]) == len(judged)


def test_a_subject_that_fails_by_itself_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(task: Task) -> dict[str, Any]:
        return {"status": "killed", "operation": "verify", "text": "raised: no"}

    code, text, judged = run_command(monkeypatch, fails, "--save", str(tmp_path))
    assert (code, text) == (2, "toy fails without a fault, verify: raised: no")
    assert judged == [f"{SOUND}:verify"]


def test_a_run_goes_on_where_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, judged = run_command(monkeypatch, all_killed, "--save", str(tmp_path), "--examples", "7")
    assert code == 0
    (log,) = tmp_path.glob("*.jsonl")
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join(whole[:-2]) + whole[-1][:20])
    code, text, again = run_command(monkeypatch, all_killed, "--save", str(tmp_path), "--resume", "latest")
    assert code == 0
    assert again == judged[-2:]
    assert f"{len(judged) - 1} │" in text
    assert [json.loads(line)["outcome"]["id"] for line in log.read_text().splitlines()[1:]] == judged
    code, text, _ = run_command(monkeypatch, all_killed, "--resume", str(log), "--seed", "3")
    assert code != 0
    monkeypatch.setattr(Subject, "digest", "another")
    code, text, _ = run_command(monkeypatch, all_killed, "--resume", str(log))
    assert code == 2
    assert "the kernels have changed" in text
    log.write_text("{}\n")
    code, text, _ = run_command(monkeypatch, all_killed, "--resume", str(log))
    assert (code, "not the log of a run of mutants" in text) == (2, True)


def test_unknown_operations_and_subjects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run_command(monkeypatch, all_killed, "--op", "verify,nothing")
    assert code == 2
    assert "found 'nothing'" in text
    with pytest.raises(UnavailableError, match="found 'module:factory'"):
        subject("module:factory", None)


def test_without_libcst_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, text, _ = run_command(monkeypatch, all_killed)
    assert (code, text) == (2, "kdafuzz mutants needs libcst; install kdafuzz[mutants]")


# ---- Real processes.


def test_mutants_are_judged_in_processes_of_their_own() -> None:
    here = subject("triton", None)
    source = here.texts[GATE]
    mutants = mutants_of(GATE, source, {"log_decay": (True, ("verify",))})
    wrong = next(each for each in mutants if each.operator == "function" and each.variant == "dropped")
    whole = replace(wrong, start=0, end=len(source), old=source)
    same = replace(whole, new=source + "\n")
    unloadable = replace(whole, new="import absent_module\n" + source)
    unparsable = replace(whole, new=source + "\n)")
    told: list[Outcome] = []
    common: dict[str, Any] = {"domains": {"verify": Domain()}, "seed": 0, "timeout": 60.0}
    tasks = [
        Task(here, mutant, ("verify",), examples=examples, baseline=usual, **common)
        for mutant, examples, usual in (
            (wrong, 20, True),
            (same, 2, False),
            (unloadable, 2, True),
            (unparsable, 2, False),
        )
    ]
    execute(tasks, 1, lambda task, outcome: told.append(outcome))
    assert [each.status for each in told] == ["killed", "survived", "stillborn", "stillborn"]
    assert [each.baseline for each in told] == ["killed", "", "", ""]
    assert told[0].operation == "verify"
    assert 1 <= told[0].example <= 20
    assert told[1].judged == {"verify": 2}
    assert "absent_module" in told[2].text
    assert (OWN / GATE).read_text() == source
