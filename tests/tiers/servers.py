"""Servers of tiers: Redis, and a Mooncake Store.

A server ends with the thread that has started it, so also with a process that is killed.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_READY_S = 60.0
_REDIS = ("redis-server", "valkey-server")
_LIBRARIES = {"libcurl.so.4": "libcurl4", "libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}


def free_port(address: str = LOOPBACK) -> int:
    """Return a port that nobody listens at."""
    with socket.create_server((address, 0)) as free:
        port: int = free.getsockname()[1]
        return port


def start(command: Sequence[str], ready: str) -> subprocess.Popen[bytes]:
    """Start a server, and return when it has said `ready`. RuntimeError with its last words if it ends before."""
    with tempfile.TemporaryFile() as output:  # not a pipe, which would be full at some time
        server: subprocess.Popen[bytes] | None = None
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_this_thread,
            )
            deadline = time.monotonic() + _READY_S
            while True:
                is_over = server.poll() is not None or time.monotonic() > deadline  # before the look
                output.seek(0)
                said = output.read().decode(errors="replace")
                if ready in said:
                    return server
                if is_over:
                    last = (said.strip().splitlines() or ["it said nothing"])[-1]
                    raise RuntimeError(f"the server `{' '.join(command)}` did not get ready: {last}")
                time.sleep(0.02)
        except BaseException:
            if server is not None:
                end(server)
            raise


def end(server: subprocess.Popen[bytes]) -> None:
    """Kill a server, also a stopped one or one that has ended, and wait until it is gone."""
    server.kill()
    server.wait()


def _end_with_this_thread() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def redis_server(address: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    """Start Redis or Valkey, which keeps nothing on disk. RuntimeError if neither is installed."""
    program = next((path for name in _REDIS if (path := shutil.which(name))), None)
    if program is None:
        raise RuntimeError(
            f"{' or '.join(_REDIS)} is not in the PATH: install Debian's package redis-server, or Valkey"
        )
    command = [program, "--bind", address, "--port", str(port), "--save", "", "--protected-mode", "no", *options]
    return start(command, "eady to accept connections")


def missing_for_mooncake() -> str | None:
    """Return what keeps Mooncake from running here and what to install, None if nothing does."""
    if find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'mooncake-transfer-engine-non-cuda>=0.3.13'"
    for library in _LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            return f"Mooncake needs {library}: install Debian's packages {', '.join(_LIBRARIES.values())}"
    return None


class MooncakeServers:
    """A Mooncake Store: a master, and a node that gives it `size` bytes. RuntimeError if it cannot run; close it."""

    def __init__(self, address: str, size: int) -> None:
        if problem := missing_for_mooncake():
            raise RuntimeError(problem)
        self._host, self._port, self._size = address, free_port(address), size
        self.address = f"{address}:{self._port}"
        self.start_master()
        try:
            self.start_node()
        except BaseException:
            end(self.master)
            raise

    def start_master(self) -> None:
        """Start the master; after its end, one that knows nothing at the same place."""
        self.master = self._start(
            "cli",
            "admin server started",
            rpc_address=self._host,
            rpc_port=self._port,
            metrics_host=self._host,
            metrics_port=free_port(self._host),
            client_ttl=3,  # seconds until a dead node's memory is no longer given out
        )

    def start_node(self) -> None:
        """Start the node, which tries until it reaches the master."""
        self.node = self._start(
            "cli_client",
            "Starting real client service",
            host=self._host,
            port=free_port(self._host),
            master_server_address=self.address,
            metadata_server="P2PHANDSHAKE",
            global_segment_size=self._size,  # memory that is taken as it is used
        )

    def _start(self, module: str, ready: str, **flags: object) -> subprocess.Popen[bytes]:
        # -P: a folder `mooncake` in the current one would be imported for Mooncake's.
        command = [sys.executable, "-P", "-m", f"mooncake.{module}"]
        return start([*command, *(f"--{name}={value}" for name, value in flags.items())], ready)

    def close(self) -> None:
        """Kill both; idempotent."""
        end(self.node)
        end(self.master)
