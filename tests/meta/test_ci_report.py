"""What a run tells CI: a report in which nothing from outside is markup, taken to where CI shows it."""

import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ci.query import _gpu
from ci.reporting.demands import MIN_EXAMPLES, REQUIRE_GPU, Demands
from ci.reporting.publish import BUILDKITE, GITHUB, Outlets
from ci.reporting.record import Ledger, Record
from ci.reporting.summary import COLUMNS, SHOWN, Failed, Line, Summary, markdown, text
from impl.contract import UnavailableError
from oracle.judge import Problem, Verdict
from tests.meta.ci_reports import fences, inline, install_agent, plain, rows, told

NASTY = (
    "a | b\n\n# c `d` *e* __f__ ~~g~~ <script>alert(1)</script> &amp; [i](http://j) ![k](l) :tada: @m #1 "
    "\\| \x1b[31m"
)
"""Everything that a kernel might say to break out of its place."""


@pytest.mark.parametrize("words", [NASTY, "fused_verify", "_x_", "a:b: c", "```", "|", "-", "12. a", "3) -"])
def test_text_is_never_markup(words: str) -> None:
    check_text(words)


@given(st.text(max_size=40))
def test_no_text_is_markup(words: str) -> None:
    check_text(words)


def check_text(words: str) -> None:
    line = Line(words, words, words, 3, 1.0, 0.5, 0, [Failed(words, words, words)], Counter({words: 2}))
    report = markdown(Summary("t", False, (words,), (line,), (words,), (Failed(words, words),), (words,)))
    shown = plain(words)
    assert {len(row) for row in rows(report)} == {len(COLUMNS)}
    assert len(rows(report)) == 2
    assert rows(report)[1][0].strip() == shown
    if shown:
        kept = inline(report)
        for title in ("Problems", "Failures", "Other failures", "Skipped", "Stale known findings"):
            assert title in kept
        assert kept.count(shown) >= 5  # facts, problem, two failures, stale finding
        assert plain(f"{words} {words}: {words} (2 times)") in kept
    assert len(fences(report)) == 2


def test_what_github_makes_links_and_emoji_of_is_not_left() -> None:
    """Which a reader of plain Markdown does not know of."""
    shown = text(NASTY)
    assert not [markup for markup in ("http:", ":tada", "@m", "~~") if markup in shown]
    assert text("a: fused_verify, 0.5 (x)") == "a: fused_verify, 0.5 (x)"


def test_a_failure_is_shown_as_it_stands() -> None:
    said = "first ``` line\n  <b>second</b> | ````\n\x1b[31mthird"
    (shown,) = fences(markdown(Summary("t", False, others=[Failed("x", said, "kdafuzz replay x")])))
    assert shown == f"{said}\nkdafuzz replay x\n".replace("\x1b", "?")


def test_what_is_said_of_a_line() -> None:
    line = Line(
        "vllm", "commit", "0.33.0", 250, 12.34, 0.5031, 7, [Failed("a", "b")], Counter({"needs c": 2})
    )
    absent = Line("vllm@0.33.0", "packed_conv", "0.33.0", skipped=Counter({"absent": 1}))
    report = markdown(Summary("t", False, lines=(line, absent)))
    assert rows(report) == [
        list(COLUMNS),
        ["vllm (0.33.0)", "commit", "250", "12.3", "0.503", "7", "1", "2"],
        ["vllm@0.33.0", "packed_conv", "-", "-", "-", "-", "-", "1"],
    ]
    assert "vllm commit: needs c (2 times)" in inline(report)
    assert "t: failed" in inline(report)
    assert "t: passed" in inline(markdown(Summary("t", True)))


def test_a_report_is_never_too_large() -> None:
    failed = [Failed("x" * 100_000, "`" * 100_000, "kdafuzz replay x")] * 1000
    words = ["y" * 100_000] * 1000
    line = Line("a", "b", failures=failed, skipped=Counter({f"{n}{words[0]}": 1 for n in range(1000)}))
    report = markdown(Summary("t", False, lines=(line,), problems=words, others=failed, stale=words))
    assert len(report.encode()) < 400_000
    assert inline(report).count(f"and {1000 - SHOWN} more") == 5
    assert len(fences(report)) == 2 * SHOWN
    assert all("kdafuzz replay x" in shown for shown in fences(report))


# Where it goes


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install_agent(tmp_path, monkeypatch)


def test_outlets_are_claimed_once(agent: Path) -> None:
    environment = {GITHUB: "x.md", BUILDKITE: "true", "BUILDKITE_STEP_KEY": "h200", "HOME": "y"}
    assert Outlets.claimed(environment) == Outlets("x.md", "kdafuzz-h200")
    assert environment == {"BUILDKITE_STEP_KEY": "h200", "HOME": "y"}
    assert Outlets.claimed(environment) == Outlets()
    assert Outlets.claimed({BUILDKITE: "true"}) == Outlets("", "kdafuzz")
    assert Outlets.claimed({BUILDKITE: "false"}) == Outlets()
    agent.unlink()
    assert Outlets.claimed({BUILDKITE: "true"}) == Outlets()


def test_reports_are_published(agent: Path, tmp_path: Path) -> None:
    outlets = Outlets(str(tmp_path / "sum.md"), "kdafuzz-x")
    first, second = Summary("first \ud800", True), Summary("second", False)
    assert outlets.publish(first) == outlets.publish(second) == []
    written_down = (tmp_path / "sum.md").read_text()
    assert written_down.index("first") < written_down.index("second")
    (yes, report), (no, _) = told(tmp_path)
    assert yes == ["annotate", "--style", "success", "--context", "kdafuzz-x"]
    assert no == ["annotate", "--style", "error", "--context", "kdafuzz-x"]
    assert report == markdown(first)


def test_no_outlet_no_report(agent: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    assert Outlets().publish(Summary("t", True)) == []
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("agent_text", "sentence"),
    [
        (f"#!{sys.executable}\nimport sys\nsys.exit('[31m no\\nbuild')", "ended with 1, said"),
        ("#!/no/such/interpreter", "No such file"),
    ],
)
def test_a_failing_agent_is_a_warning(agent: Path, tmp_path: Path, agent_text: str, sentence: str) -> None:
    agent.write_text(agent_text)
    unwritable, refused = Outlets(str(tmp_path), "kdafuzz").publish(Summary("t", True))
    assert unwritable.startswith(f"{GITHUB}: [Errno 21] Is a directory")
    assert refused.startswith("buildkite-agent")
    assert sentence in refused
    assert refused.isprintable()


# Demands


@pytest.mark.parametrize(
    ("environment", "demands"),
    [
        ({}, Demands()),
        ({REQUIRE_GPU: "1", MIN_EXAMPLES: " 20 "}, Demands(True, 20)),
        ({REQUIRE_GPU: "0", MIN_EXAMPLES: ""}, Demands()),
    ],
)
def test_demands_are_read(environment: dict[str, str], demands: Demands) -> None:
    assert Demands.asked(environment) == demands


@pytest.mark.parametrize(
    "environment", [{REQUIRE_GPU: "yes"}, {MIN_EXAMPLES: "-1"}, {MIN_EXAMPLES: "many"}, {MIN_EXAMPLES: "²"}]
)
def test_demands_that_cannot_be_understood(environment: dict[str, str]) -> None:
    (name,) = environment
    with pytest.raises(UnavailableError, match=f"{name} takes .*; found"):
        Demands.asked(environment)


def test_a_gpu_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Demands().check_device("cpu")
    for device in ("cpu", "cuda"):
        with pytest.raises(UnavailableError, match=r"=1 needs a CUDA GPU; found none .*nvidia-smi"):
            Demands(gpu=True).check_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Demands(gpu=True).check_device("cuda")
    with pytest.raises(UnavailableError, match=r"needs device cuda; found emulator: .*--device cuda"):
        Demands(gpu=True).check_device("emulator")


def test_examples_are_demanded_of_each() -> None:
    judged = {("a", "verify"): 3, ("b", "verify"): 2, ("b", "commit"): 0}
    assert Demands().unmet(judged) == []
    assert Demands(examples=3).unmet(judged) == [
        f"b verify judged 2 examples; {MIN_EXAMPLES} asks for 3",
        f"b commit judged 0 examples; {MIN_EXAMPLES} asks for 3",
    ]


# Records

RIGHT, WRONG = Verdict(0.5), Verdict(7.0, problems=(Problem("value", "out", "output"),))


def test_a_record_counts_up_to_the_first_failure() -> None:
    ledger = Ledger()
    ledger.begin(Record(implementation="a"))
    ledger.needs("verify", "")
    for verdict, known in (
        (RIGHT, False),
        (WRONG, True),
        (WRONG, False),
        (Verdict(0.9), False),
        (WRONG, False),
    ):
        ledger.judged(verdict, 0.25, known=known)
    record = ledger.current
    assert (record.examples, record.known, record.seconds, record.largest_ratio) == (3, 1, 0.75, 0.5)
    with pytest.raises(AssertionError, match="a test is of one operation"):
        ledger.needs("commit", "")
    ledger.begin(Record())
    ledger.needs("commit", "absent in 1.0")
    ledger.judged(RIGHT, 0.0, known=False)
    assert (ledger.current.examples, ledger.current.absent) == (1, "absent in 1.0")


def test_properties_hold_a_record() -> None:
    full = Record(*("x" if item.type is str else 3 for item in fields(Record)))  # type: ignore[arg-type]
    assert Record.of([("foreign", 1), *full.properties()]) == full
    assert {type(value) for _, value in full.properties()} <= {str, int, float}
    bare = Record(implementation="a")
    assert Record.of(bare.properties()) == bare
    assert Record().properties() == []
    assert Record.of([("foreign", "x")]) is None


def test_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _gpu("cpu") == ("", "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name=f"H{index}00 MIG 1g" if index else "H200", uuid="0a-1b"),
    )
    assert _gpu("cuda") == ("H200", "GPU-0a-1b")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert _gpu("cuda") == ("H200 MIG 1g", "MIG-0a-1b")
