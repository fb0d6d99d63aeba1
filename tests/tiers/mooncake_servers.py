"""A real Mooncake Store for tests: a master and a node, on free ports of this host."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

MIB = 1 << 20

_NODE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print("ready", code, flush=True)
sys.stdin.read()
os._exit(0)
"""


def missing() -> str | None:
    """Return what keeps Mooncake from running here, None if nothing does."""
    if find_spec("mooncake") is None:
        return "needs Mooncake: pip install mooncake-transfer-engine-non-cuda"
    for library in ("libcurl.so.4", "libibverbs.so.1", "libnuma.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"Mooncake needs {library}, from Debian's packages libcurl4, libibverbs1 and libnuma1"
    return None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Servers:
    """A master and a node that gives it `size` bytes; close it."""

    def __init__(self, size: int) -> None:
        spec = find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        self._program = str(Path(spec.submodule_search_locations[0]) / "mooncake_master")
        os.chmod(self._program, 0o755)
        self._size = size
        self._running: list[subprocess.Popen[bytes]] = []
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        try:
            self.start_master()
            self.start_node()
        except BaseException:
            self.close()
            raise

    def start_master(self) -> None:
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._port,
            "metrics_host": "127.0.0.1",
            "metrics_port": free_port(),
            "client_ttl": 3,  # seconds until a dead node's memory is no longer given out
        }
        command = [self._program, *(f"--{name}={value}" for name, value in flags.items())]
        self.master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._running.append(self.master)
        deadline = time.monotonic() + 30
        while True:
            with suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self._port), 5).close()
                return
            assert self.master.poll() is None, "the master has ended"
            assert time.monotonic() < deadline, "the master does not listen"
            time.sleep(0.02)

    def start_node(self) -> None:
        self.node = subprocess.Popen(
            [sys.executable, "-c", _NODE, self.address, str(self._size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._running.append(self.node)
        assert self.node.stdout is not None
        assert b"ready 0\n" in iter(self.node.stdout.readline, b""), "the node did not reach its master"

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)  # also a stopped one
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        for process in reversed(self._running):
            self.kill(process)
