"""What survives: each way to share tensors on a host, with its reader killed, and with its writer killed.

    make survival                                 # a minute; prints the table of docs/concepts/reliability.md

Of each way there are a writer and two readers, processes of their own. The objects have 4 MiB, and a store has room for
eight. Both readers hold the first object.

* A reader is killed. The writer stores 24 objects, which the other reader gets and lets go. Then all end normally.
* The writer is killed. A reader looks at what it holds, and asks for a second object, stored but never asked for. A new
  writer starts, and is asked for the first object. Then all end normally.

What lies in /dev/shm and in the folder of the way before and after says what has leaked.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch.multiprocessing

SIZE, ROOM, ROUNDS = 4 << 20, 8, 24
PATIENCE = 20.0
"""Seconds until a step that does not end counts as hung."""
CONTEXT: Any = multiprocessing.get_context("spawn")
Array = Any


def payload(number: int) -> Array:
    return np.full(SIZE // 8, number * 2654435761 + 1, np.uint64)


def right(array: Array, number: int) -> bool:
    return bool((np.asarray(array).view(np.uint64) == number * 2654435761 + 1).all())


class Way:
    """The writer's side and the reader's; each process makes its own, with the folder of the way."""

    title = ""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def serve(self, stack: ExitStack) -> None:
        """Start what runs beside, in the parent."""

    def write(self) -> None:
        """Become the writer."""

    def put(self, number: int) -> Any:
        """Store the object of that number, or find it there; return what a reader needs, or None if it is not there."""

    def find(self, number: int) -> Any:
        """Return what a reader needs of an object that an earlier writer has stored, or None."""
        return None

    def read(self, rank: int) -> None:
        """Become a reader."""

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        """Return the object, and what lets it go."""
        raise TypeError(f"{type(self).__name__} has no get")

    def end(self) -> None:
        """End normally."""


class Shmstore(Way):
    title = "shmstore"

    def write(self) -> None:
        from shmstore import ObjectStoreWriter

        name = Path(self.folder).name
        self._writer = ObjectStoreWriter.open(name, capacity=(ROOM + 1) * SIZE, n_readers=2)

    def put(self, number: int) -> Any:
        return self._writer.handle, self._writer.put(str(number), payload(number))

    def find(self, number: int) -> Any:
        if str(number) in self._writer:
            return self._writer.handle, self._writer.get_cached(str(number))
        return None

    def read(self, rank: int) -> None:
        self._rank, self._reader = rank, None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        from shmstore import ObjectStoreReader

        if self._reader is None:
            self._reader = ObjectStoreReader.attach(ticket[0], self._rank)
        return self._reader.get(ticket[1]), lambda: None

    def end(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close(unlink=True)


class Blocks(Way):
    title = "multiprocessing.shared_memory"

    def write(self) -> None:
        self._blocks: list[SharedMemory] = []

    def put(self, number: int) -> Any:
        if len(self._blocks) == ROOM:
            old = self._blocks.pop(1)
            old.close()
            old.unlink()
        self._blocks.append(SharedMemory(f"{Path(self.folder).name}-{number}", create=True, size=SIZE))
        np.frombuffer(self._blocks[-1].buf, np.uint64)[:] = payload(number)
        return self._blocks[-1].name

    def find(self, number: int) -> Any:
        with suppress(FileNotFoundError):
            self._blocks.append(SharedMemory(f"{Path(self.folder).name}-{number}"))
            return self._blocks[-1].name
        return None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        block = SharedMemory(ticket)
        return np.frombuffer(block.buf, np.uint64), lambda: None

    def end(self) -> None:
        for block in getattr(self, "_blocks", ()):
            with suppress(BufferError, FileNotFoundError):
                block.unlink()


class TorchDescriptors(Way):
    title = "torch.multiprocessing, file_descriptor"
    strategy = "file_descriptor"

    def write(self) -> None:
        torch.multiprocessing.set_sharing_strategy(self.strategy)
        self._kept: list[torch.Tensor] = []

    def put(self, number: int) -> Any:
        del self._kept[: -ROOM + 1]
        self._kept.append(torch.from_numpy(payload(number).view(np.int64)))
        return self._kept[-1]

    def read(self, rank: int) -> None:
        torch.multiprocessing.set_sharing_strategy(self.strategy)

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        return ticket.numpy(), lambda: None


class TorchNames(TorchDescriptors):
    title = "torch.multiprocessing, file_system"
    strategy = "file_system"


class Redis(Way):
    title = "Redis, over a Unix socket"

    def serve(self, stack: ExitStack) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", f"{self.folder}/redis", "--save", "", "--dir"]
        limits = ["--maxmemory", str((ROOM + 1) * SIZE), "--maxmemory-policy", "allkeys-lru"]
        server = subprocess.Popen([*command, self.folder, *limits], stdout=subprocess.DEVNULL)
        stack.callback(server.wait)
        stack.callback(server.kill)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not Path(self.folder, "redis").exists():
            time.sleep(0.02)

    def write(self) -> None:
        import redis

        self._client = redis.Redis(unix_socket_path=f"{self.folder}/redis")

    read = lambda self, rank: self.write()  # noqa: E731 - both sides are clients

    def put(self, number: int) -> Any:
        self._client.set(str(number), payload(number).tobytes())
        return str(number)

    def find(self, number: int) -> Any:
        return str(number) if self._client.exists(str(number)) else None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        return np.frombuffer(self._client.get(ticket), np.uint64), lambda: None


class Lmdb(Way):
    title = "lmdb on /dev/shm"

    def write(self) -> None:
        import lmdb

        size = (ROOM + 2) * SIZE
        self._where = f"/dev/shm/{Path(self.folder).name}"
        self._env = lmdb.open(self._where, map_size=size, writemap=True, sync=False, metasync=False)

    def put(self, number: int) -> Any:
        with self._env.begin(write=True) as transaction:
            transaction.delete(str(number - ROOM // 2).encode()) if number > ROOM else None
            transaction.put(str(number).encode(), payload(number).tobytes())
        return str(number)

    def find(self, number: int) -> Any:
        with self._env.begin() as transaction:
            return str(number) if transaction.get(str(number).encode()) is not None else None

    def read(self, rank: int) -> None:
        self.write()

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        transaction = self._env.begin(buffers=True)
        return np.frombuffer(transaction.get(ticket.encode()), np.uint64), transaction.abort

    def end(self) -> None:
        self._env.close()
        shutil.rmtree(self._where, ignore_errors=True)


class Iceoryx(Way):
    title = "iceoryx2, publish and subscribe"

    def write(self) -> None:
        self._publisher = self._service().publisher_builder().initial_max_slice_len(SIZE).create()

    def _service(self) -> Any:
        import ctypes

        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
        self._bytes = ctypes.c_uint8 * SIZE
        node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        builder = node.service_builder(iceoryx2.ServiceName.new(Path(self.folder).name))
        builder = builder.publish_subscribe(iceoryx2.Slice[ctypes.c_uint8]).payload_alignment(
            iceoryx2.Alignment.new(64)
        )
        return builder.subscriber_max_buffer_size(2).subscriber_max_borrowed_samples(2).open_or_create()

    def put(self, number: int) -> Any:
        sample = self._publisher.loan_slice_uninit(SIZE)
        np.frombuffer(self._bytes.from_address(sample.payload_ptr), np.uint64)[:] = payload(number)
        sample.assume_init().send()
        return number

    def read(self, rank: int) -> None:
        self._subscriber = self._service().subscriber_builder().create()

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        if (sample := self._subscriber.receive()) is None:
            raise LookupError("no sample")
        return np.frombuffer(self._bytes.from_address(sample.payload_ptr), np.uint64), sample.delete


WAYS: list[type[Way]] = [Shmstore, Blocks, TorchDescriptors, TorchNames, Redis, Lmdb, Iceoryx]


def writer_main(way: Way, orders: Connection, readers: list[Connection]) -> None:
    way.write()
    orders.send("ready")
    while (order := orders.recv())[0] != "end":
        what, number, ranks = order
        ticket = way.put(number) if what == "put" else way.find(number)
        for rank in ranks:
            readers[rank].send(ticket)
        orders.send(ticket is not None)
    way.end()
    orders.send("ended")


def reader_main(way: Way, rank: int, orders: Connection, tickets: Connection) -> None:
    way.read(rank)
    held: dict[int, Any] = {}
    orders.send("ready")
    while (order := orders.recv())[0] != "end":
        what, number = order
        try:
            if what == "get":
                held[number] = way.get(tickets.recv())
            answer: Any = right(held[number][0], number)
            if what == "let go":
                held.pop(number)[1]()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        orders.send(answer)
    for _, let_go in held.values():
        let_go()
    held.clear()
    if rank == 0 and not isinstance(way, Lmdb):
        way.end()
    orders.send("ended")


class HungError(Exception):
    """A step that did not end in time."""


def said(orders: Connection, patience: float = PATIENCE) -> Any:
    if not orders.poll(patience):
        raise HungError
    try:
        return orders.recv()
    except EOFError:
        raise HungError from None


def taken(folder: str) -> int:
    """Return the bytes in /dev/shm and in the folder of the way."""
    total = 0
    for root in ("/dev/shm", folder):
        for path in Path(root).rglob("*"):
            with suppress(OSError):
                total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total


class Cast:
    """A writer and two readers of one way."""

    def __init__(self, kind: type[Way], stack: ExitStack) -> None:
        self.folder = tempfile.mkdtemp(prefix="survival-")
        stack.callback(shutil.rmtree, self.folder, True)
        self.way, self.kind, self.stack = kind(self.folder), kind, stack
        self.way.serve(stack)
        self.before = taken(self.folder)
        self._pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        self.readers = [self._start(reader_main, rank, self._pipes[rank][0]) for rank in range(2)]
        self.writer = self.start_writer()

    def _start(self, main: Any, *more: Any) -> tuple[Any, Connection]:
        ours, theirs = CONTEXT.Pipe()
        arguments = (self.way, more[0], theirs, *more[1:]) if main is reader_main else (self.way, theirs, *more)
        process = CONTEXT.Process(target=main, args=arguments)
        process.start()
        self.stack.callback(process.join)
        self.stack.callback(process.kill)
        assert said(ours, 10 * PATIENCE) == "ready"  # it imports torch
        return process, ours

    def start_writer(self) -> tuple[Any, Connection]:
        return self._start(writer_main, [sending for _, sending in self._pipes])

    def order(self, to: tuple[Any, Connection], *order: Any) -> Any:
        to[1].send(order)
        return said(to[1])

    def end(self, *parts: tuple[Any, Connection]) -> str:
        """End these normally, and return what is left."""
        for process, orders in parts:
            with suppress(HungError, OSError):
                orders.send(("end",))
                said(orders)
            process.join(PATIENCE)
        time.sleep(0.5)
        left = taken(self.folder) - self.before
        return f"{left / 2**20:.0f} MiB" if left > 2**19 else "nothing"


def kill(part: tuple[Any, Connection]) -> None:
    os.kill(part[0].pid, signal.SIGKILL)
    part[0].join()


def reader_killed(kind: type[Way]) -> tuple[str, str]:
    """Return how the others go on, and what leaks."""
    with ExitStack() as stack:
        cast = Cast(kind, stack)
        cast.order(cast.writer, "put", 0, [0, 1])
        assert [cast.order(reader, "get", 0) for reader in cast.readers] == [True, True]
        kill(cast.readers[1])
        start, how = time.monotonic(), "go on"
        try:
            for number in range(1, ROUNDS):
                cast.order(cast.writer, "put", number, [0])
                if (answer := cast.order(cast.readers[0], "get", number)) is not True:
                    how = f"wrong bytes or an error after {number} objects ({answer})"
                    break
                cast.order(cast.readers[0], "let go", number)
        except HungError:
            how = f"writer ended or hung after {time.monotonic() - start:.0f} s"
        return how, cast.end(cast.readers[0], cast.writer)


def writer_killed(kind: type[Way]) -> tuple[str, str, str, str]:
    """Return whether what is held, what was stored and what a new writer finds is right, and what leaks."""
    with ExitStack() as stack:
        cast = Cast(kind, stack)
        cast.order(cast.writer, "put", 0, [0, 1])
        assert [cast.order(reader, "get", 0) for reader in cast.readers] == [True, True]
        cast.order(cast.writer, "put", 1, [0])
        kill(cast.writer)
        answers = []
        for order in (("check", 0), ("get", 1)):
            try:
                answer = cast.order(cast.readers[0], *order)
                answers.append("whole" if answer is True else str(answer).partition(":")[0])
            except HungError:
                answers.append("hangs")
        try:
            writer = cast.start_writer()
            found = cast.order(writer, "find", 0, [0])
            answers.append("there" if found and cast.order(cast.readers[0], "get", 0) is True else "lost")
            return answers[0], answers[1], answers[2], cast.end(*cast.readers, writer)
        except (HungError, AssertionError):
            return answers[0], answers[1], "no new writer", cast.end(*cast.readers)


def main() -> None:
    columns = ["", "reader killed: the others", "left", "writer killed: what is held", "stored, not read yet"]
    print("|", " | ".join([*columns, "after a restart", "left"]), "|")
    print("|---" * 7 + "|")
    for kind in WAYS:
        if sys.argv[1:] and kind.__name__ not in sys.argv[1:]:
            continue
        row = [*reader_killed(kind), *writer_killed(kind)]
        print("|", kind.title, "|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    socket.setdefaulttimeout(PATIENCE)
    main()
