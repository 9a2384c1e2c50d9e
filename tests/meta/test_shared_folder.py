"""Files of examples in a folder that several machines use."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis.database import DirectoryBasedExampleDatabase

from ci.database import SharedFolder
from tests.meta.commands import tree


def test_a_value_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the folder is on another file system than temporary files, and while one writes."""
    seen: list[bytes] = []
    whole = Path.write_bytes

    def slow(path: Path, data: bytes) -> int:
        whole(path, data[:3])
        for folder in ("ours", "plain"):
            seen.extend(DirectoryBasedExampleDatabase(tmp_path / folder).fetch(b"key"))
        return whole(path, data)

    def crossing(path: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "write_bytes", slow)
    monkeypatch.setattr(Path, "rename", crossing)
    (tmp_path / "ours").mkdir()
    ours, plain = SharedFolder(tmp_path / "ours"), DirectoryBasedExampleDatabase(tmp_path / "plain")
    ours.save(b"key", b"value")
    assert seen == []
    assert list(ours.fetch(b"key")) == [b"value"]
    plain.save(b"key", b"value")
    assert b"val" in seen  # so the test would see it


def test_what_lies_there_is_hypothesis_s_own(tmp_path: Path) -> None:
    """The same names and bytes, and nothing else is left."""
    (tmp_path / "ours").mkdir()
    for database in (SharedFolder(tmp_path / "ours"), DirectoryBasedExampleDatabase(tmp_path / "plain")):
        for key, value in [(b"a", b"1"), (b"a", b"2"), (b"a", b"1"), (b"b", b"3")]:
            database.save(key, value)
        database.move(b"b", b"c", b"3")
        database.delete(b"a", b"2")
    assert tree(tmp_path / "ours") == tree(tmp_path / "plain")


def test_others_may_read_it(tmp_path: Path) -> None:
    """As far as the writer's umask lets them."""
    before = os.umask(0o022)
    try:
        SharedFolder(tmp_path).save(b"key", b"value")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {path: 0o755 if path.is_dir() else 0o644 for path in modes}


def test_a_folder_that_another_run_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis removes the folder of a key with its last value."""
    real, times = Path.replace, 0

    def raced(path: Path, target: Path) -> Path:
        nonlocal times
        times += 1
        if times == 1:
            target.parent.rmdir()
        return real(path, target)

    monkeypatch.setattr(Path, "replace", raced)
    database = SharedFolder(tmp_path)
    database.save(b"key", b"value")
    assert list(database.fetch(b"key")) == [b"value"]
    assert times > 1
