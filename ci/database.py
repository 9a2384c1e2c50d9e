"""Where Hypothesis remembers examples that failed: a folder or a Redis server, of one machine or of many.

What is remembered is the example in Hypothesis's own encoding, of use to the same test at about
the same revision, and forgotten once it passes. What should last is a case in a corpus.
"""

import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import hypothesis
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from ci.failures import require_writable
from impl.contract import UnavailableError

if TYPE_CHECKING:
    from redis import Redis

T = TypeVar("T")

READONLY = "readonly:"
SCHEMES = ("redis", "rediss", "unix")
FORMS = f"a folder, or {', '.join(f'{scheme}://..' for scheme in SCHEMES)}, with {READONLY} before it or not"
PREFIX = b"kdafuzz:"
"""What our keys in a Redis server begin with."""
KEPT = timedelta(days=30)
"""How long a Redis server keeps examples of a test that nobody runs."""
PATIENCE = 5.0
"""Seconds to wait for a Redis server's answer."""


class DatabaseWarning(UserWarning):
    """A shared database went away during a run."""


def open_database(text: str) -> ExampleDatabase:
    """The database that ``text`` names (``FORMS``); without a text Hypothesis's own, in ``.hypothesis``.

    ``readonly:`` is for machines that must not write, such as those that test what strangers
    propose: they keep what they find in ``.hypothesis``, and take what the shared one has.
    Raises ``UnavailableError`` if it cannot be used. If that happens later, during the run, it is
    a ``DatabaseWarning``, and the run goes on without.
    """
    own = hypothesis.settings.get_profile("default").database
    assert own is not None
    if not text:
        return own
    where = text.removeprefix(READONLY)
    readonly = where != text
    shared = (_redis if "://" in where else _folder)(where, readonly)
    return MultiplexedDatabase(own, shared) if readonly else shared


def redacted(text: str) -> str:
    """A database's name without the password that may stand in it."""
    scheme, found, rest = text.partition("://")
    if not found:
        return text or ".hypothesis/examples"
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _folder(where: str, readonly: bool) -> ExampleDatabase:
    path = Path(where).absolute()
    if not where or (path.exists() and not path.is_dir()):
        raise UnavailableError(f"database {where!r} is no folder; a database is {FORMS}")
    if readonly:
        if not path.is_dir():
            raise UnavailableError(f"database {where}: there is no such folder to read")
        return ReadOnlyDatabase(DirectoryBasedExampleDatabase(path))
    try:
        require_writable(path, "database")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(str(error)) from None
    return TolerantDatabase(SharedFolder(path), where, OSError)


def _redis(where: str, readonly: bool) -> ExampleDatabase:
    if urlsplit(where).scheme not in SCHEMES:
        raise UnavailableError(f"unknown database {redacted(where)!r}; a database is {FORMS}")
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis, RedisError
        from redis.backoff import ConstantBackoff
        from redis.retry import Retry
    except ImportError:
        raise UnavailableError(
            f"database {redacted(where)} needs the package redis; found none: pip install -e '.[redis]'"
        ) from None
    try:
        client = Redis.from_url(
            where,
            socket_timeout=PATIENCE,
            socket_connect_timeout=PATIENCE,
            retry=Retry(ConstantBackoff(0.1), 1),
        )
        client.ping()
    except (RedisError, ValueError) as error:
        raise UnavailableError(
            f"database {redacted(where)} needs a Redis server that answers there; found: {error}"
        ) from None
    if readonly:
        return TolerantDatabase(_RedisReader(client), redacted(where), RedisError)
    database = RedisExampleDatabase(client, expire_after=KEPT, key_prefix=PREFIX)
    return TolerantDatabase(database, redacted(where), RedisError)


class KeyedDatabase(ExampleDatabase):
    """The part of a database that belongs to one test on one subject.

    Hypothesis's keys are digests of a test function's source. Properties that share a function
    need a name beside it, or each would replay, and throw away, the others' examples.
    """

    def __init__(self, database: ExampleDatabase, name: str) -> None:
        super().__init__()
        self._database, self._name = database, name.encode() + b"\0"

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """The values of a key."""
        return self._database.fetch(self._name + key)

    def save(self, key: bytes, value: bytes) -> None:
        """Add a value to a key."""
        self._database.save(self._name + key, value)

    def delete(self, key: bytes, value: bytes) -> None:
        """Take a value from a key."""
        self._database.delete(self._name + key, value)

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        """Take a value from one key and add it to another."""
        self._database.move(self._name + src, self._name + dest, value)


class TolerantDatabase(ExampleDatabase):
    """A shared database that may go away: a run that has begun goes on without it, and says so once."""

    def __init__(self, database: ExampleDatabase, where: str, errors: type[Exception]) -> None:
        super().__init__()
        self._database, self._where, self._errors = database, where, errors
        self._lost = False

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """The values of a key."""
        return self._ask(lambda: list(self._database.fetch(key))) or ()

    def save(self, key: bytes, value: bytes) -> None:
        """Add a value to a key."""
        self._ask(lambda: self._database.save(key, value))

    def delete(self, key: bytes, value: bytes) -> None:
        """Take a value from a key."""
        self._ask(lambda: self._database.delete(key, value))

    def move(self, src: bytes, dest: bytes, value: bytes) -> None:
        """Take a value from one key and add it to another."""
        self._ask(lambda: self._database.move(src, dest, value))

    def _ask(self, call: Callable[[], T]) -> T | None:
        if self._lost:
            return None
        try:
            return call()
        except self._errors as error:
            self._lost = True
            lost = f"database {self._where} went away, the run goes on without it: {error}"
            warnings.warn(DatabaseWarning(lost), stacklevel=3)
            return None


class SharedFolder(DirectoryBasedExampleDatabase):
    """Hypothesis's folder of examples, for several machines.

    Hypothesis writes a file in the folder for temporary files and renames it. Across file systems
    that becomes a copy, which a reader may see in part and a killed run leaves in part; and the
    file stays readable by its owner alone. Here the last rename is within the shared folder.
    """

    def save(self, key: bytes, value: bytes) -> None:
        """Add a value to a key."""
        with tempfile.TemporaryDirectory() as name:
            stage = Path(name)
            # What Hypothesis calls the files, and which it makes, is its own affair.
            DirectoryBasedExampleDatabase(stage).save(key, value)
            for file in stage.glob("*/*"):
                self._place(file.read_bytes(), self.path / file.relative_to(stage))

    def _place(self, data: bytes, path: Path) -> None:
        if path.exists():
            return
        temporary = self.path / f".{secrets.token_hex(8)}"
        try:
            temporary.write_bytes(data)
            try:
                path.parent.mkdir(exist_ok=True)
                temporary.replace(path)
            except FileNotFoundError:  # between the two another run found the folder empty, and removed it
                path.parent.mkdir(exist_ok=True)
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


class _RedisReader(ExampleDatabase):
    """A Redis server's examples, for one who only reads; Hypothesis's own class also delays their expiry."""

    def __init__(self, client: "Redis") -> None:
        super().__init__()
        self._client = client

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """The values of a key."""
        return [value for value in self._client.smembers(PREFIX + key) if isinstance(value, bytes)]

    def save(self, key: bytes, value: bytes) -> None:
        """Nothing."""

    def delete(self, key: bytes, value: bytes) -> None:
        """Nothing."""
