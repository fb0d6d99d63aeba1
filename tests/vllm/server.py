"""`vllm serve` with the plug-in, as a process of its own, and its clients."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.segments import find_segments
from tests.support import until
from tests.tiers.servers import free_port
from tests.vllm.inputs import message

START, END = 420.0, 60.0
"""Seconds within which a server is up, or gone."""


class Server:
    """One server, and the store that it has made; `within` is a command that runs the server's, such as unshare."""

    def __init__(self, model: Path, log: Path, *settings: str, within: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.log = log
        options = (
            f"--host 127.0.0.1 --port {self.port} --served-model-name tiny --dtype float32 --enforce-eager --seed 0 "
            "--max-model-len 8192 --mm-processor-cache-type shm"
        )
        command = [*within, str(Path(sys.executable).parent / "vllm"), "serve", str(model), *options.split(), *settings]
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def wait(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"no server: {self.log.read_text()[-3000:]}")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def get(self, path: str) -> tuple[int, str]:
        connection = self.connect()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def send(
        self,
        *pictures: Image.Image,
        text: str = "what is this",
        door: http.client.HTTPConnection | None = None,
        **settings: Any,
    ) -> http.client.HTTPConnection:
        """Send one request, and return the connection on which its answer will come: a new one, or `door`."""
        connection = door or self.connect()
        self.post(connection, self.body(*pictures, text=text, **settings))
        return connection

    def body(self, *pictures: Image.Image, text: str = "what is this", **settings: Any) -> str:
        """Return a request."""
        body = {"model": "tiny", "messages": message(*pictures, text=text), "temperature": 0, "ignore_eos": True}
        return json.dumps(body | {"max_tokens": 8, "return_token_ids": True} | settings)

    def post(self, connection: http.client.HTTPConnection, body: str) -> None:
        """Send a request."""
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})

    def ask(
        self, *pictures: Image.Image, door: http.client.HTTPConnection | None = None, **settings: Any
    ) -> tuple[int, list[list[int]]]:
        """Return the status, and the tokens of each choice."""
        connection = self.send(*pictures, door=door, **settings)
        try:
            return self.answer(connection)
        finally:
            if door is None:
                connection.close()

    def answer(self, connection: http.client.HTTPConnection) -> tuple[int, list[list[int]]]:
        """Return what comes on a connection on which a request was sent, as `ask` does."""
        answer = connection.getresponse()
        said = json.loads(answer.read())
        return answer.status, [choice["token_ids"] for choice in said.get("choices", [])]

    @contextmanager
    def doors(self, count: int) -> Iterator[list[http.client.HTTPConnection]]:
        """Yield a connection to each of `count` API servers, which listen on one port.

        An API server that has fewer connections than the others takes the next one. So all stay open until each server
        has one. They fail when the server closes them: a new one might go to another server.
        """
        found: dict[int, http.client.HTTPConnection] = {}
        deadline = time.monotonic() + START
        with ExitStack() as opened:
            while len(found) < count:
                assert time.monotonic() < deadline, f"{len(found)} of {count} API servers take connections"
                door = opened.enter_context(closing(self.connect()))
                door.connect()
                door.auto_open = 0
                while (pid := self.behind(door)) is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                if pid in found:
                    time.sleep(0.2)  # another server may still be starting
                elif pid is not None:
                    found[pid] = door
            yield list(found.values())

    def behind(self, door: http.client.HTTPConnection) -> int | None:
        """Return the process that has accepted a connection; None if it waits still."""
        port = door.sock.getsockname()[1]
        for one in self.family():
            with suppress(psutil.NoSuchProcess):  # a server that is starting asks short-lived processes
                if any(other.raddr and other.raddr.port == port for other in one.net_connections("tcp")):
                    return int(one.pid)
        return None

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series; KeyError without one."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        if not values:
            raise KeyError(name)
        return sum(map(float, values))

    def engines(self) -> set[str]:
        """Return which engines have finished a request."""
        ended = r'^vllm:request_success_total\{engine="(\d+)".*\} (?!0\.0$)'
        return set(re.findall(ended, self.get("/metrics")[1], re.MULTILINE))

    def images_processed(self, queries: int) -> int:
        """Return how many images its API servers have processed for so many queries; it waits until all are counted.

        The servers count together, and each image is processed that its server's cache does not have.
        """
        until(lambda: queries == self.metric("vllm:mm_cache_queries_total"))
        return queries - int(self.metric("vllm:mm_cache_hits_total"))

    def store(self) -> Any:
        """Return what can be seen of its store from outside."""
        pids = {one.pid for one in self.family()}
        (found,) = [info for info in find_segments() if info.facts and info.facts.writer_pid in pids]
        return found

    def keys(self) -> list[str | None]:
        """Return the key of each object in the stores that its processes have mapped."""
        mapped = {part.path for one in self.family() for part in one.memory_maps()}
        found: list[str | None] = []
        for info in find_segments():
            if f"/dev/shm/{info.name}" in mapped:
                with StoreInspector.open(info.name) as inspector:
                    found += [slot.key for slot in inspector.slots() if slot.state == "live"]
        return found

    def claimed(self) -> bool:
        """Return whether one of its processes has a claim: a lock on a byte far past the end of the store's file."""
        any_byte = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 1 << 61, 0, 0)
        with open(f"/dev/shm/{self.store().name}", "rb+") as file:
            kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_OFD_GETLK, any_byte))
        return bool(kind != fcntl.F_UNLCK)

    def family(self) -> list[psutil.Process]:
        """Return its processes, the API server first."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def worker(self) -> psutil.Process:
        """Return one of its workers: a process that has the store mapped, and is not its writer."""
        path = f"/dev/shm/{self.store().name}"
        mapped = [one for one in self.family()[1:] if path in {part.path for part in one.memory_maps()}]
        return mapped[-1]

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End it, and wait for all of its processes; those of a server that was killed do not go by themselves."""
        family = self.family() if self.process.poll() is None else []
        if family:
            os.kill(self.process.pid, how)
        self.process.wait(END)
        _, alive = psutil.wait_procs(family[1:], END if how == signal.SIGTERM else 0)
        for one in alive:
            one.kill()
        psutil.wait_procs(alive)
        assert how == signal.SIGKILL or [] == alive


@contextmanager
def server(model: Path, log: Path, *settings: str) -> Iterator[Server]:
    running = Server(model, log, *settings)
    try:
        running.wait()
        yield running
    finally:
        running.stop()
