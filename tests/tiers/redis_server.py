"""A Redis server for a test, on a free port or on a Unix socket."""

import os
import re
import shutil
import socket
import subprocess
import tempfile

import pytest

from tests.tiers.servers import LOOPBACK, end, free_port, redis_server


class RedisServer:
    """Runs the server; `start` after `kill` runs an empty one at the same place."""

    def __init__(self, *options: str, unix: bool = False) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed")
        pytest.importorskip("redis", reason="redis-py is not installed: pip install '.[redis]'")
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")  # a short path, for the socket
        self.port = 0 if unix else free_port()
        self.address: str | tuple[str, int] = f"{self._folder.name}/socket" if unix else (LOOPBACK, self.port)
        self.url = f"unix://{self.address}" if unix else f"redis://{LOOPBACK}:{self.port}"
        more = ("--unixsocket", f"{self.address}") if unix else ()
        self.options = ["--dir", self._folder.name, "--maxmemory", "1gb", *options, *more]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = redis_server(LOOPBACK, self.port, *self.options)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL and wait until it has gone; also a stopped one, also twice."""
        assert self._process is not None
        end(self._process)

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def ask(self, *words: str) -> bytes:
        """Return the server's answer to a command, as it is sent."""
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        with socket.socket(family) as client:
            client.settimeout(10)
            client.connect(self.address)
            client.sendall((" ".join(words) + "\r\n").encode())
            return client.recv(1 << 16)

    def count(self, name: str, section: str = "stats") -> int:
        """Return a number of the server's statistics."""
        match = re.search(rf"^{name}:(\d+)", self.ask("INFO", section).decode(), flags=re.M)
        assert match is not None
        return int(match[1])

    def clients(self) -> int:
        """Return the number of connections, without the one that asks."""
        return self.count("connected_clients", "clients") - 1
