"""Failing examples are remembered between runs and machines, come what may."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import SkipTest

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase, InMemoryExampleDatabase

from ci.database import (
    PREFIX,
    DatabaseWarning,
    open_database,
    redacted,
)
from impl.contract import UnavailableError
from tests.meta.commands import CI_VARIABLES
from tests.meta.redis_server import Server
from tests.profiles import dev, repro


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("redis", reason="needs the extra kdafuzz[redis]")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server; found none")
    for _ in range(5):  # somebody else may take the port in between
        made = Server(program, tmp_path_factory.mktemp("redis"))
        try:
            if made.ready():
                yield made
                return
        finally:
            made.kill()
    pytest.fail(f"{program} does not start")


@pytest.fixture(params=["folder", "redis"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database for several runs, by name."""
    if request.param == "folder":
        return str(tmp_path / "shared")
    found: Server = request.getfixturevalue("server")
    return found.url


def remembered(profile: hypothesis.settings, limit: int, on_example: Callable[[int], None]) -> list[int]:
    """What a property of integers is asked for under a profile: it holds below the limit."""
    asked: list[int] = []

    @profile
    @hypothesis.given(st.integers(0, 5000))
    def holds(x: int) -> None:
        asked.append(x)
        on_example(x)
        assert x < limit

    with suppress(AssertionError, SkipTest):
        holds()
    return asked


def found(database: ExampleDatabase, limit: int) -> list[int]:
    """Search till something fails, and remember it."""
    return remembered(hypothesis.settings(dev(database), max_examples=1000), limit, lambda _: None)


def replayed(database: ExampleDatabase, limit: int) -> list[int]:
    """What is replayed."""
    return remembered(repro(database), limit, lambda _: None)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Hypothesis's own folder, another one than that of these tests."""
    set_hypothesis_home_dir(tmp_path / "home")
    yield tmp_path / "home"
    set_hypothesis_home_dir(None)


def test_without_a_name_it_is_hypothesis_s_own(home: Path) -> None:
    own = open_database("")
    assert isinstance(own, DirectoryBasedExampleDatabase)
    assert own.path == home / "examples"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{tmp}/file", "database '.*/file' is no folder; a database is a folder, or redis://"),
        ("{tmp}/file/below", "database .*/file/below: cannot write to .*/file"),
        ("readonly:{tmp}/none", "database .*/none: there is no such folder to read"),
        ("readonly:", "database '' is no folder"),
        ("http://host/x", "unknown database 'http://host/x'; a database is a folder, or redis://"),
        ("readonly:redus://u:secret@host", "unknown database 'redus://host'"),
        (
            "redis://me:secret@127.0.0.1:1/0",
            "database redis://127.0.0.1:1/0 needs a Redis server that answers",
        ),
        ("redis://me:secret@host:port/0", "database redis://host:port/0 needs a Redis server that answers"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(tmp_path: Path, text: str, sentence: str) -> None:
    if "redis://" in text:
        pytest.importorskip("redis", reason="needs the extra kdafuzz[redis]")
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match=f"^{sentence}") as refused:
        open_database(text.format(tmp=tmp_path))
    assert "secret" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hypothesis.extra.redis", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UnavailableError, match=r"needs the package redis; found none: pip install -e"):
        open_database("redis://127.0.0.1:1/0")


def test_a_header_shows_no_password() -> None:
    assert redacted("readonly:rediss://me:a@b@host:1/0") == "readonly:rediss://host:1/0"
    assert redacted("redis://host:1/0?password=a") == "redis://host:1/0"
    assert redacted("some@folder?x") == "some@folder?x"
    assert redacted("") == ".hypothesis/examples"


PROCESS = """
import sys

import hypothesis
from hypothesis import strategies as st

from ci.database import KeyedDatabase, open_database

database = open_database(sys.argv[1])


def search(name, phases):
    asked = []

    @hypothesis.settings(database=KeyedDatabase(database, name), max_examples=1000, phases=phases)
    @hypothesis.given(st.integers(0, 5000))
    def holds(x):
        asked.append(x)
        assert x < int(name)

    try:
        holds()
    except AssertionError:
        pass
    return asked


print(search(sys.argv[2], list(hypothesis.Phase))[-1], flush=True)
sys.stdin.readline()
print(search(sys.argv[3], [hypothesis.Phase.reuse])[0], flush=True)
"""


def test_two_processes_find_each_other_s_example(shared: str) -> None:
    """At the same time, in one database."""
    numbers = ("1234", "70")
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", PROCESS, shared, *order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k not in CI_VARIABLES},
        )
        for order in (numbers, numbers[::-1])
    ]
    found = []
    for process in processes:
        assert process.stdout is not None
        found.append(process.stdout.readline().strip())
    assert tuple(found) == numbers
    theirs = [process.communicate("go on\n", timeout=60)[0].strip() for process in processes]
    assert tuple(theirs) == numbers[::-1]


@pytest.mark.parametrize("limit", [1000, 3000])
def test_a_shared_database_replays_what_was_found(shared: str, limit: int) -> None:
    """Two openings of one database, as two runs have; what passes by now is forgotten by both."""
    one, two = open_database(shared), open_database(shared)
    assert found(one, limit)[-1] == limit
    assert set(replayed(two, limit)) == {limit}
    assert limit in replayed(two, 9999)
    assert replayed(one, limit) == []


def test_a_reader_takes_and_leaves_nothing(shared: str, home: Path) -> None:
    """What a reader finds stays in its own folder; what passes for it is not forgotten by others."""
    writer = open_database(shared)
    reader = open_database(f"readonly:{shared}")
    assert found(reader, 70)[-1] == 70
    assert replayed(writer, 70) == []
    assert set(replayed(open_database(""), 70)) == {70}
    assert found(writer, 1000)[-1] == 1000
    assert {70, 1000} <= set(replayed(reader, 9999))
    assert set(replayed(writer, 1000)) == {1000}
    assert replayed(open_database(""), 70) == []


def test_redis_lets_one_read_who_may_not_write(server: Server) -> None:
    client = server.client()
    client.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~*", "+@read", "+ping", "+client")
    found(open_database(server.url), 1000)
    reader = open_database("readonly:" + server.url.replace("//", "//reader:word@"))
    assert set(replayed(reader, 1000)) == {1000}


def test_redis_forgets_tests_that_nobody_runs(server: Server) -> None:
    found(open_database(server.url), 1000)
    client = server.client()
    lives = [client.ttl(key) for key in client.keys(PREFIX + b"*")]
    assert lives
    assert all(29 * 86400 < int(life) <= 30 * 86400 for life in lives)


def test_a_run_goes_on_without_a_server_that_died(server: Server) -> None:
    """Every example is run, and the loss is said once, as a warning that fails nothing."""
    database = open_database(server.url)
    count = 0

    def kill(_: int) -> None:
        nonlocal count
        count += 1
        if count == 10:
            server.kill()

    with warnings.catch_warnings(record=True) as said:
        asked = remembered(hypothesis.settings(dev(database), max_examples=30), 9999, kill)
        assert len(asked) == 30
        assert found(database, 1000)[-1] == 1000
        assert replayed(database, 1000) == []
    assert [str(each.message).partition(", ")[0] for each in said] == [f"database {server.url} went away"]
    assert said[0].category is DatabaseWarning


def test_a_run_goes_on_without_a_folder_that_is_gone(tmp_path: Path) -> None:
    database = open_database(str(tmp_path / "shared"))
    shutil.rmtree(tmp_path / "shared")
    with warnings.catch_warnings(record=True) as said:
        assert found(database, 1000)[-1] == 1000
    assert [each.category for each in said] == [DatabaseWarning]
    assert not (tmp_path / "shared").exists()


def test_what_another_version_left_does_no_harm(shared: str) -> None:
    """Bytes that mean nothing are thrown away, and those that mean something else are only examples."""
    keys = InMemoryExampleDatabase()
    found(keys, 1000)
    database = open_database(shared)
    junk = [b"", b"\xff", b"\x00\x01", b"garbage" * 99, bytes(range(256)), b"\x03abc", b"\x20" + b"\xff" * 40]
    for key in keys.data:
        for value in junk:
            database.save(key, value)
    assert len({value for key in keys.data for value in database.fetch(key)}) == len(junk)
    assert found(database, 1000)[-1] >= 1000
    assert max(replayed(database, 1000)) >= 1000
    replayed(database, 9999)
    own = min(keys.data, key=len)  # Hypothesis does not clear what lies beside it, under longer keys
    assert list(database.fetch(own)) == []


def test_another_program_s_key_in_redis_does_no_harm(server: Server) -> None:
    keys = InMemoryExampleDatabase()
    found(keys, 1000)
    for key in keys.data:
        server.client().set(PREFIX + key, "a text, where we have sets")
    with warnings.catch_warnings(record=True) as said:
        assert found(open_database(server.url), 1000)[-1] == 1000
    assert [each.category for each in said] == [DatabaseWarning]
