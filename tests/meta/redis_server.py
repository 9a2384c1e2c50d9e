"""A Redis server for tests."""

import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis import Redis


class Server:
    """A Redis server on a free port of this machine, that keeps nothing."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": folder}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)

    def client(self) -> "Redis":
        """A connection."""
        from redis import Redis

        return Redis.from_url(self.url)

    def ready(self) -> bool:
        """Whether it answers, after waiting for it if need be."""
        from redis import RedisError

        end = time.monotonic() + 20
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(RedisError):
                return bool(self.client().ping())
            time.sleep(0.02)
        return False

    def kill(self) -> None:
        """End it, as a crash would."""
        self._process.kill()
        self._process.wait()
