"""Segments in every condition, and the command line as a user runs it: into a pipe, or on a terminal."""

import fcntl
import json
import os
import pty
import random
import signal
import struct
import sys
import termios
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shmstore import ObjectStoreReader, ObjectStoreWriter
from shmstore.cli import main as cli
from tests.layout import FIELDS
from tests.support import SHM, Child, store_name

WIDTH = 2000  # so that no store of another program is too wide


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def piped(*arguments: str) -> Ran:
    """Run the command line in a child whose stdout and stderr are pipes."""
    return Ran(*_in_child(arguments))


def _in_child(arguments: tuple[str, ...]) -> tuple[int, str, str]:
    ends = [os.pipe(), os.pipe()]
    pid = os.fork()
    if pid == 0:
        for (_, writing), target in zip(ends, (1, 2), strict=True):
            os.dup2(writing, target)
        _be_the_command(arguments)
    texts: list[bytes] = [b"", b""]

    def drain(which: int) -> None:
        with os.fdopen(ends[which][0], "rb") as end:
            texts[which] = end.read()

    for _, writing in ends:
        os.close(writing)
    readers = [threading.Thread(target=drain, args=(which,)) for which in (0, 1)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, texts[0].decode(), texts[1].decode()


def _be_the_command(arguments: tuple[str, ...]) -> None:
    # pytest has replaced these; the command must see the descriptors themselves.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    status = 70
    try:
        status = cli.main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


class Terminal:
    """The command line on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        os.environ["TERM"] = "xterm-256color"
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
            _be_the_command(arguments)
        self.shown = ""

    def read_until(self, text: str) -> None:
        """Read what is shown until `text` is among it."""
        seen = len(self.shown)
        while text not in self.shown[seen:]:
            self.shown += self._read()

    def _read(self) -> str:
        data = os.read(self._fd, 65536)
        if not data:
            raise EOFError(self.shown)
        return data.decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def end(self) -> Ran:
        """Read the rest and return how it ended."""
        while True:
            try:
                self.shown += self._read()
            except (OSError, EOFError):  # EIO: the last holder of the other side has gone
                break
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._fd)
        return Ran(status, self.shown, "")


def on_terminal(*arguments: str) -> Ran:
    """Run the command line on a pseudo-terminal, to its end."""
    return Terminal(*arguments).end()


# ---- segments


def fill(writer: ObjectStoreWriter) -> None:
    """Put six objects: 1 is read by rank 0, 2 to 4 by nobody, 5 is hit, 6 deleted."""
    for number in range(1, 7):
        writer.put(f"key-{number}", {"pixels": torch.full((number, 100), number, dtype=torch.int32), "n": number})
    writer.get_cached("key-5")
    writer.delete("key-6")


OPTIONS: dict[str, Any] = {"capacity": 1 << 16, "n_readers": 2, "max_objects": 16, "checksums": True}


def _serve(name: str, ready: int) -> None:
    writer = ObjectStoreWriter.create(name, **OPTIONS)
    fill(writer)
    reader = ObjectStoreReader.attach(name, 0)
    kept = reader.get(writer.get_cached("key-1"))
    os.write(ready, b"r")
    signal.pause()
    del kept


@contextmanager
def running(name: str, function: Callable[[str, int], object] = _serve) -> Iterator[Child]:
    """Run a child, which says when it is ready; killed at the end, and the segment that it made removed."""
    existed = (SHM / name).exists()
    reading, writing = os.pipe()
    child = Child(function, name, writing)
    os.close(writing)
    try:
        if os.read(reading, 1) != b"r":
            child.join()  # raises what went wrong
        yield child
    finally:
        os.close(reading)
        child.kill()
        if not existed:
            (SHM / name).unlink(missing_ok=True)


def _join(name: str, ready: int) -> None:
    """Put one object, and open leases on two of writer 0: one for group 1, and a held one."""
    writer = ObjectStoreWriter.join(name)
    writer.put(f"own-{writer.index}", torch.ones(100), kind="image")
    writer.get_cached("key-1", group=1)
    writer.get_cached("key-2", hold=True)
    os.write(ready, b"r")
    signal.pause()


@contextmanager
def three_writers() -> Iterator[tuple[ObjectStoreWriter, tuple[Child, Child]]]:
    """Yield writer 0 of a store, with what `fill` puts, and the children that are writers 1 and 2."""
    options = {**OPTIONS, "n_readers": 4, "groups": [2, 2], "n_writers": 3}
    with ObjectStoreWriter.create(store_name(), **options) as writer:
        fill(writer)
        with running(writer.name, _join) as one, running(writer.name, _join) as two:
            yield writer, (one, two)


def stop(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


@contextmanager
def case(condition: str) -> Iterator[str]:
    """Yield the name of a segment in one of CONDITIONS."""
    name = store_name()
    path = SHM / name
    if condition == "foreign":
        path.write_bytes(b"not a store" * 1000)
        try:
            yield name
        finally:
            path.unlink()
        return
    with running(name) as child:
        if condition == "stopped":
            stop(child.pid)
        elif condition != "live":
            child.kill()
        if condition == "damaged":
            poke(path, 32, 12345)  # the capacity
        elif condition == "spoiled":  # the superblock is intact, the tables are not
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(random.Random(1).randbytes(40_000))
        elif condition == "cut":
            os.truncate(path, 8192)
        elif condition == "other version":
            poke(path, 8, 12345)  # the stamp
        elif condition == "unfinished":
            poke(path, 8, 0)
        elif condition == "ephemeral":
            poke(path, FIELDS["stays"], 1)
        yield name


CONDITIONS = (
    *("live", "stopped", "dead", "ephemeral"),
    *("damaged", "spoiled", "cut", "unfinished", "other version", "foreign"),
)


def peek(path: Path, offset: int) -> int:
    """Return the word at `offset`."""
    with path.open("rb") as file:
        file.seek(offset)
        word: int = struct.unpack("<Q", file.read(8))[0]
        return word


def poke(path: Path, offset: int, value: int) -> None:
    """Overwrite the word at `offset`."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(struct.pack("<Q", value % 2**64))
