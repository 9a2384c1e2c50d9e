"""The command refuses bad input in one line and with exit 2, before it changes anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from impl.contract import UnavailableError
from impl.registry import resolve, split
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.codec import dumps
from tests.meta.commands import CALL, Result, entry, here, kdafuzz, plug_in, tree

Here = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Here:
    """The command in this process, in a fresh folder."""
    return lambda *arguments: here(monkeypatch, capsys, tmp_path, *arguments)


def refused(run: Here, folder: Path, *arguments: str) -> str:
    """The one line with which the command refuses; nothing in ``folder`` may change."""
    before = tree(folder)
    result = run(*arguments)
    assert result.code == 2, result
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("kdafuzz: ")
    assert result.err.strip().isprintable()
    assert len(result.err) < 1100
    assert "Traceback" not in result.out + result.err
    assert tree(folder) == before
    return result.err


def changed(text: bytes = b"", **fields: Any) -> bytes:
    """The sound file's bytes with JSON fields of its envelope or of its call replaced."""
    whole = json.loads(dumps(entry()))
    for name, value in fields.items():
        (whole["case"]["call"] if name in CALL else whole)[name] = value
    return text or json.dumps(whole).encode()


NO_FILE = "not a case file"
NO_CASE = "not a valid case"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param(b"", NO_FILE, id="empty"),
        pytest.param(dumps(entry())[:-40], NO_FILE, id="truncated"),
        pytest.param(b"\xff\xfe{}", NO_FILE, id="not-text"),
        pytest.param(b" " * 2_000_000, "no case file", id="2-MB"),
        pytest.param(b"[" * 500_000, NO_FILE, id="deep"),
        pytest.param(changed(kdafuzz=99), "written by a newer kdafuzz", id="newer"),
        pytest.param(changed(kdafuzz="1"), NO_FILE, id="version-of-another-type"),
        pytest.param(changed(unheard=1), NO_CASE, id="unknown-field"),
        pytest.param(changed(heads=10**9), NO_CASE, id="huge-number"),
        pytest.param(changed(heads=4096, key_dim=4096, value_dim=4096), "the limit is", id="huge-memory"),
        pytest.param(changed(heads="1"), NO_CASE, id="wrong-type"),
        pytest.param(changed(slots=(1, 1)), "two live rows share a slot", id="outside-the-contract"),
        pytest.param(changed(checksum="0" * 16), "makes other values", id="drifted"),
        pytest.param(changed(found={"device": 3}), NO_CASE, id="found-of-another-type"),
        pytest.param(
            dumps(entry(case=Case(call=Verify(**CALL), regimes={"q": "unheard"}), checksum="")),
            "unheard",
            id="unknown-regime",
        ),
        pytest.param(
            dumps(entry()).replace(b'"call"', b'"relation": {"kind": "permute", "order": [0, 0]}, "call"'),
            "name every row once",
            id="no-such-image",
        ),
        pytest.param(
            dumps(entry()).replace(
                b'"call"',
                b'"relation": {"kind": "relayout", "layouts": {"A_log": {"gaps": [3]}}}, "call"',
            ),
            "must be dense",
            id="no-such-relayout",
        ),
    ],
)
def test_replay_of_a_bad_file(run: Here, tmp_path: Path, data: bytes, sentence: str) -> None:
    (tmp_path / "case.json").write_bytes(data)
    assert sentence in refused(run, tmp_path, "replay", "case.json")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing.json", "no such file"),
        ("deadbeef", "no case of this id"),
        ("folder", "no case files"),
        ("holds-a-folder.json/..", "no case files"),
        ("/proc/self/mem", "cannot read"),
        ("x" * 5000, "too long"),
        ("\udcff[/red].json", "no such file"),
        ("", "no case files"),
    ],
)
def test_replay_of_nothing(run: Here, tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "holds-a-folder.json").mkdir()
    assert sentence in refused(run, tmp_path, "replay", name)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bogus",), "No such command"),
        (("fuzz", "--bogus"), "No such option"),
        (("fuzz", "--device", "tpu"), "--device"),
        (("fuzz", "--op", "verify,dance"), "unknown operation"),
        (("fuzz", "--op", ","), "unknown operation"),
        (("fuzz", "--impl", " , "), "--impl names nothing"),
        (("fuzz", "--impl", ""), "--impl names nothing"),
        (("fuzz", "--impl", "\udcff"), "cannot be printed"),
        (("fuzz", "--impl", "a\x1b[31m:b"), "cannot be printed"),
        (("fuzz", "--impl", "x" * 2000), "a name of more than 1000 letters"),
        (("fuzz", "--examples", "0"), "--examples"),
        (("fuzz", "--examples", "1e3"), "--examples"),
        (("fuzz", "--minutes", "0"), "--minutes"),
        (("fuzz", "--minutes", "nan"), "not a number"),
        (("fuzz", "--minutes", "inf"), "--minutes"),
        (("fuzz", "--timeout", "nan"), "not a number"),
        (("fuzz", "--timeout", "-1"), "--timeout"),
        (("fuzz", "--jobs", "-1"), "--jobs"),
        (("fuzz", "--seed", "-1"), "--seed"),
        (("fuzz", "--seed", "99999999999999999999"), "--seed"),
        (("fuzz", "--palette", "-1"), "--palette"),
        (("fuzz", "--save", "file"), "--save"),
        (("fuzz", "--save", "file/below"), "cannot write"),
        (("fuzz", "--save", "/proc/here"), "cannot write"),
        (("fuzz", "--json", "/proc/here.json"), "cannot write"),
        (("fuzz", "--json", "folder"), "--json"),
        (("fuzz", "--json", "file/below.json"), "cannot write"),
        (("doctor", "--impl", ","), "--impl names nothing"),
        (("replay", "case.json", "--device", "tpu"), "--device"),
        (("replay",), "Missing argument"),
        (("corpus", "check", "nowhere"), "no such folder"),
        (("corpus", "check", "file"), "no such folder"),
    ],
)
def test_bad_options(run: Here, tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    assert sentence in refused(run, tmp_path, *arguments)


MODULE = """
from impl.contract import Domain, Implementation
number = 3
def raising(): raise RuntimeError("first\\nsecond")
def leaving(): raise SystemExit(7)
def lacking(): import no_such_package
def none(): return None
def odd(): return Implementation("odd", {"verify": 3})
def unsigned(): return Implementation("odd", {"verify": lambda q: q})
def flat(): return Implementation("odd", ["verify"])
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("bogus", "unknown implementation"),
        (":factory", "unknown implementation"),
        ("module:", "unknown implementation"),
        ("[/red]", "unknown implementation"),
        ("no_such_module:factory", "cannot import no_such_module"),
        ("..bad:factory", "relative"),
        ("broken_outside:factory", "failed: SyntaxError"),
        ("leaves_outside:factory", "failed: SystemExit: bye"),
        ("module_outside:absent", "has no attribute 'absent'"),
        ("module_outside:number", "not callable"),
        ("module_outside:raising", "raising() failed: RuntimeError: first second"),
        ("module_outside:leaving", "failed: SystemExit: 7"),
        ("module_outside:lacking", "no_such_package"),
        ("module_outside:none", "must return an impl.contract.Implementation"),
        ("module_outside:odd", "is not usable"),
        ("module_outside:unsigned", "neither a parameter 'records'"),
        ("module_outside:flat", "is not usable"),
        ("vllm:", "cannot read"),
        ("vllm:/no/such/path", "there is no /no/such/path"),
        ("vllm@not-a-version", "is not a version"),
        ("vllm@0.1", "needs vLLM >= 0.29"),
        ("vllm:.@no-such-revision", ""),
    ],
)
def test_implementations_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, sentence: str
) -> None:
    (tmp_path / "module_outside.py").write_text(MODULE)
    (tmp_path / "broken_outside.py").write_text("def factory(:")
    (tmp_path / "leaves_outside.py").write_text("raise SystemExit('bye')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnavailableError) as caught:
        resolve(split(name)[0])
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()


SLY = """
from impl.contract import Domain, Implementation
import atexit, os
print("loading", flush=True)
os.write(1, b"\\xff" * 100000)
atexit.register(print, "leaving")
def domain(): return Implementation("sly", {"conv_update": print}, domain=Domain(records=("diagonal",)))
def crash(): os.abort()
"""


def test_doctor_never_fails(tmp_path: Path) -> None:
    """Nor does an implementation that prints, dies or lies when it is asked what it offers."""
    (tmp_path / "sly_outside.py").write_text(SLY)
    plug_in(tmp_path)
    names = "sly_outside:domain,sly_outside:crash,zoo_outside:right,[/red]"
    result = kdafuzz("doctor", "--impl", names, cwd=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("Implementation is wrong") == 1
    assert "crash: loading failed: the process died of SIGABRT" in result.out
    assert "unknown implementation '[/red]'" in result.out
    assert "available" in result.out


def test_unknown_implementations_of_runs(run: Here, tmp_path: Path) -> None:
    (tmp_path / "case.json").write_bytes(
        dumps(entry(found={"implementation": "[/x]:\x1b", "device": "[/x]"}))
    )
    for arguments in (("fuzz", "--impl", "bogus,triton"), ("replay", "case.json", "--impl", "bogus")):
        result = run(*arguments)
        assert result.code == 2
        assert result.err.startswith("kdafuzz: unknown implementation 'bogus'")
        assert result.err.count("\n") == 1
    # What a file names is skipped where it cannot be had.
    names = (
        "[/x]:\x1b",
        "vllm:\0",
        "vllm@" + "9" * 5000,
        "vllm:" + "x" * 500,
        "a\nb",
        "",
        "vllm:~nobody-here",
    )
    for name in names:
        (tmp_path / "case.json").write_bytes(
            dumps(entry(found={"implementation": name, "device": "cpu" if name[:4] == "vllm" else "[/x]"}))
        )
        result = run("replay", "case.json")
        assert result.code == 2
        assert result.out.startswith("SKIP")
        assert result.out.rstrip("\n").isprintable()
        assert len(result.out) < 1200
        assert result.err == "kdafuzz: nothing was run: every case was skipped\n"
    assert set(tree(tmp_path)) == {"case.json"}


def test_help_and_version(run: Here) -> None:
    assert run("--version").code == 0
    assert "replay" in run("--help").out
    assert run().code == 2
