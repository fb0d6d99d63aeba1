"""Mooncake Store: a master, and clients, of which the writer gives the store its memory."""

import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bench.survival.scene import PATIENCE, ROOM, SIZE, Array, LostError, Way, payload


class RefusedError(Exception):
    """Mooncake's master or the writer's client says no."""


class Mooncake(Way):
    title = "Mooncake's store (copies)"
    servers = ("mooncake_master",)
    _address = "127.0.0.1"

    def serve(self, server: str = "") -> bool:
        import mooncake.store

        if not server:
            with socket.create_server((self._address, 0)) as one, socket.create_server((self._address, 0)) as other:
                self._port, self._metrics = one.getsockname()[1], other.getsockname()[1]
        flags = {
            "rpc_address": self._address,
            "rpc_port": self._port,
            "metrics_host": self._address,
            "metrics_port": self._metrics,
            "default_kv_lease_ttl": 100,  # milliseconds in which what was read cannot be removed
        }
        program = Path(mooncake.store.__file__).with_name("mooncake_master")
        command = [program, *(f"--{name}={value}" for name, value in flags.items())]
        self.started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection((self._address, self._port)):
                break
            time.sleep(0.02)
        return True

    def write(self) -> None:
        self._connect((ROOM + 3) * SIZE)

    def read(self, rank: int) -> None:
        self._connect(0)

    def _connect(self, gives: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        master = f"{self._address}:{self._port}"
        if code := self._store.setup(self._address, "P2PHANDSHAKE", gives, 16 * SIZE, "tcp", "", master):
            raise RefusedError(code)

    def put(self, number: int) -> Any:
        if number > ROOM:
            self._store.remove(str(number - ROOM // 2))
        if code := self._store.put(str(number), payload(number).tobytes()):
            raise RefusedError(code)
        return str(number)

    def find(self, number: int) -> Any:
        return str(number) if self._store.is_exist(str(number)) == 1 else None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        if not (found := self._store.get(ticket)):
            raise LostError
        return np.frombuffer(found, np.uint64), lambda: None

    def end(self) -> None:
        self._store.close()

    leave = end
