"""One scene: a writer and two readers of one way, of which one process is killed while the others work.

    python -m bench.survival.scene WAY VICTIM FOLDER      # in namespaces of its own; see `bench.survival`

Both readers hold object 0, and two more are stored for them that they have not read. The victim
is killed: the second reader, the writer, or a process that the way has beside them. The last line says how it went.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import count
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

SIZE, ROOM, ROUNDS = 4 << 20, 8, 24
PATIENCE = 120.0
"""Seconds until a call that does not return counts as hung."""
RETRY = 20.0
"""Seconds in which calls that fail are tried again, and in which what is left may still go."""
KILLS = 10
"""How often a writer is killed inside a put."""
HANGS, ENDS = f"hangs, {PATIENCE:.0f} s and more", "the process ends"
THEN = ", then "
CONTEXT: Any = multiprocessing.get_context("forkserver")  # which imports what takes long once
Array = Any
Report = dict[str, str]


class LostError(LookupError):
    """The object is not there."""


def payload(number: int) -> Array:
    return np.full(SIZE // 8, number * 2654435761 + 1, np.uint64)


def right(array: Array, number: int) -> bool:
    return bool((np.asarray(array).view(np.uint64) == number * 2654435761 + 1).all())


class Part(Protocol):
    """A writer or a reader, seen from outside."""

    pid: int

    def ask(self, *order: Any) -> Any:
        """Return its answer to an order: True, or a text that says what is wrong."""

    def tell(self, *order: Any) -> None:
        """Give an order, and wait for nothing."""


class Way:
    """The writer's side and the reader's; each process makes its own, with the folder of the way."""

    title = ""
    venv = ""
    """The variable that names the environment to run in; none for this one."""
    servers: tuple[str, ...] = ()
    """What runs beside: its program."""
    imports: tuple[str, ...] = ()
    """Modules that take long to import."""
    started: ClassVar[list["subprocess.Popen[bytes]"]] = []
    """What of it the scene has started itself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def serve(self, server: str = "") -> bool:
        """Start what runs beside, or one of them after its death. False if that cannot be."""
        return not server

    def settle(self, victim: str) -> float:
        """Return the seconds in which everybody is to notice a death."""
        return 5.0

    def stop(self) -> None:
        """End what runs beside."""
        for process in self.started:
            process.kill()
            process.wait()

    def start(self) -> "Cast":
        """Start a writer and two readers."""
        return Cast(self)

    def write(self) -> None:
        """Become the writer."""

    def put(self, number: int) -> Any:
        """Store the object of that number; return what a reader needs."""

    def find(self, number: int) -> Any:
        """Return what a reader needs of an object that is stored, perhaps by an earlier writer, or None."""
        return None

    def read(self, rank: int) -> None:
        """Become a reader."""

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        """Return the object, and what lets it go."""
        raise TypeError(f"{type(self).__name__} has no get")

    def end(self) -> None:
        """End normally, as a writer."""

    def leave(self) -> None:
        """End normally, as a reader."""


class Writer:
    """What a writer does with an order; `send` gives a reader what it needs."""

    def __init__(self, way: Way, send: list[Callable[[Any], Any]]) -> None:
        self._way, self._send = way, send
        way.write()

    def do(self, what: str, number: int = 0, ranks: Iterable[int] = ()) -> Any:
        if what == "end":
            return self._way.end()
        try:
            ticket = self._way.put(number) if what == "put" else self._way.find(number)
            if ticket is None:
                raise LostError
            for rank in ranks:
                self._send[rank](ticket)
        except Exception as error:
            return named(error)
        return True


class Reader:
    """What a reader does with an order; `receive` returns what the writer has sent."""

    def __init__(self, way: Way, rank: int, receive: Callable[[], Any]) -> None:
        self._way, self._receive = way, receive
        self._held: dict[int, Any] = {}
        way.read(rank)

    def do(self, what: str, number: int = 0) -> Any:
        try:
            if what == "end":
                for release_all in [release_all for _, release_all in self._held.values()]:
                    release_all()
                self._held.clear()
                return self._way.leave()
            if what == "get":
                self._held[number] = self._way.get(self._receive())
            answer = right(self._held[number][0], number) or "wrong bytes"
            if what == "let go":
                self._held.pop(number)[1]()
        except Exception as error:
            return named(error)
        return answer


def named(error: Exception) -> str:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return "lost" if isinstance(error, LostError) else type(error).__name__


def writer_main(way: Way, orders: Connection, pipes: list[Connection]) -> None:
    obey(Writer(way, [pipe.send for pipe in pipes]), orders)


def reader_main(way: Way, orders: Connection, rank: int, pipe: Connection) -> None:
    obey(Reader(way, rank, pipe.recv), orders)


def obey(part: Writer | Reader, orders: Connection) -> None:
    orders.send("ready")
    order = [""]
    while order[0] != "end":
        order = orders.recv()
        orders.send(part.do(*order))


class Process:
    """A part that is a process of ours."""

    def __init__(self, main: Callable[..., None], way: Way, *more: Any) -> None:
        self._orders, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=main, args=(way, theirs, *more))
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def is_ready(self) -> "Process":
        """Wait until it has imported what it needs."""
        if not self._orders.poll(10 * PATIENCE):
            raise RuntimeError("a process does not start")
        self._orders.recv()
        return self

    def tell(self, *order: Any) -> None:
        """Give an order, and wait for nothing."""
        self._orders.send(order)

    def ask(self, *order: Any) -> Any:
        try:
            self.tell(*order)
            answer = self._answer()
        except (EOFError, OSError):
            return ENDS
        if order[0] == "end":
            self._process.join(PATIENCE)
        return answer

    def _answer(self) -> Any:
        return self._orders.recv() if self._orders.poll(PATIENCE) else HANGS


class Cast:
    """A writer and two readers."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        readers = [Process(reader_main, way, rank, receiving) for rank, (receiving, _) in enumerate(self._pipes)]
        self.writer = self.new_writer()
        self.readers: list[Part] = [reader.is_ready() for reader in readers]

    def new_writer(self) -> Part:
        return Process(writer_main, self._way, [sending for _, sending in self._pipes]).is_ready()


class Scene:
    """The scenes of one way; each returns what to say about it."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._before = used(way.folder)
        CONTEXT.set_forkserver_preload(list(way.imports))
        way.serve()
        self._cast = way.start()
        self._numbers = count(3)
        self._alive = [0, 1]  # readers
        for number in range(3):
            answers = [self._cast.writer.ask("put", number, self._alive)]
            if number == 0:
                answers += [reader.ask("get", 0) for reader in self._cast.readers]
            if answers != [True] * len(answers):
                raise RuntimeError(f"{way.title} does not work: {answers}")

    def reader(self) -> Report:
        """Kill the second reader: how do the others go on?"""
        reader, other = self._cast.readers
        kill(other.pid)
        self._alive = [0]
        seen = [self._unread("reader"), self._held()]
        reader.ask("let go", 0)  # what the dead one holds is to be what counts
        others = together(*seen, self._go_on())
        return {"others": others, "left": self._end(reader, self._cast.writer)}

    def writer(self) -> Report:
        """Kill the writer: what of its objects is there, for a reader and for a new writer?"""
        reader = self._cast.readers[0]
        kill(self._cast.writer.pid)
        report = {"stored": together(self._unread("writer"), self._held())}
        try:
            writer = self._cast.new_writer()
        except Exception as error:
            return report | {"again": named(error), "left": self._end(*self._cast.readers)}
        found = writer.ask("find", 0, [0])
        report["again"] = "there" if found is True and reader.ask("get", 0) is True else "lost"
        return report | {"left": self._end(*self._cast.readers, writer)}

    def midway(self) -> Report:
        """Kill the writer inside a put, and ask a new one for that object, again and again."""
        for reader in self._cast.readers:
            reader.ask("let go", 0)
        for number in (1, 2):
            self._read(number)
        answers: Counter[str] = Counter()
        for _ in range(KILLS):
            writer = self._cast.writer
            begun = time.monotonic()
            writer.ask("put", next(self._numbers), [])
            took, number = time.monotonic() - begun, next(self._numbers)
            writer.tell("put", number, [])
            time.sleep(random.random() * took)
            kill(writer.pid)
            self._cast.writer = self._cast.new_writer()
            found = self._cast.writer.ask("find", number, self._alive)
            answer = self._read(number) if found is True else found
            answers["not stored" if answer == "lost" else answer] += 1
        said = ", ".join(f"{often} {answer}" for answer, often in sorted(answers.items()))
        return {"midway": said}

    def server(self, name: str) -> Report:
        """Kill what runs beside, and start it again."""
        reader, writer = self._cast.readers[0], self._cast.writer
        tell({"others": f"all end within {self._way.settle(name):.0f} s"})  # this stands if it takes us along
        for pid in processes(name):
            kill(pid)
        report = {"others": together(self._unread(name), self._go_on(), self._held())}
        if self._way.serve(name):
            found = any(writer.ask("find", 0, [0]) is True for _ in range(2))  # the first may meet the old connection
            there = found and reader.ask("get", 0) is True
            report["again"] = f"{self._go_on()}, {'nothing' if there else 'all'} lost"
        return report | {"left": self._end(*self._cast.readers, writer)}

    def _held(self) -> str:
        """Look at what the first reader holds."""
        answer = self._cast.readers[0].ask("check", 0)
        return "whole" if answer is True else str(answer)

    def _read(self, number: int) -> str:
        """Have all readers that live read what was sent, and let it go."""
        answers = []
        for reader in (self._cast.readers[rank] for rank in self._alive):
            answer = reader.ask("get", number)
            answers.append(reader.ask("let go", number) if answer is True else answer)
        return together(*("whole" if answer is True else str(answer) for answer in answers))

    def _unread(self, victim: str) -> str:
        """Read what is stored and was not read, at once and later."""
        at_once = self._read(1)
        time.sleep(self._way.settle(victim))
        return together(at_once, self._read(2))

    def _go_on(self) -> str:
        """Store objects that the first reader reads and lets go."""
        done, longest, last = 0, 0.0, time.monotonic()
        while done < ROUNDS:
            answer = self._round(next(self._numbers))
            now = time.monotonic()
            if answer == "whole":
                done, longest, last = done + 1, max(longest, now - last), now
            elif HANGS in answer or ENDS in answer or now - last > RETRY:
                return f"{answer} after {done} objects" if done else answer
            else:
                time.sleep(0.1)
        return "go on" if longest < 2 else f"go on after {longest:.0f} s"

    def _round(self, number: int) -> str:
        answer = self._cast.writer.ask("put", number, self._alive)
        return self._read(number) if answer is True else str(answer)

    def _end(self, *parts: Part) -> str:
        """End all that live normally, and return what is left: bytes and processes."""
        for part in parts:
            part.ask("end")
        self._way.stop()
        left = [wait_while(self._bytes_left), ""]
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
        if (later := self._bytes_left()) != left[0]:
            left[0] += f" until the parent ends, then {later}" if later else " until the parent ends"
        if alive := wait_while(lambda: list(processes(""))):
            left[1] = f"{len(alive)} processes" if len(alive) > 1 else "a process"
        return " and ".join(filter(None, left))

    def _bytes_left(self) -> str:
        left = used(self._way.folder) - self._before
        return f"{left / 2**20:.0f} MiB" if left > 2**19 else ""


def wait_while(holds: Callable[[], Any]) -> Any:
    """Wait until that is nothing, for a while; return what it is then."""
    deadline = time.monotonic() + RETRY
    while (it := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return it


def together(*answers: str) -> str:
    """Return what was said at once and later, each answer once, and nothing that goes without saying."""
    each = dict.fromkeys(part for answer in answers for part in answer.split(THEN))
    return THEN.join(answer for answer in each if answer != "whole") or "whole"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def processes(command: str) -> Iterator[int]:
    """Yield those that live and whose command, to its third word, contains that; our namespace has no others."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = path.joinpath("cmdline").read_bytes().split(b"\0")[:3]
            zombie = not any(words)
            if int(path.name) != os.getpid() and not zombie and command.encode() in b" ".join(words):
                yield int(path.name)


def used(folder: str) -> int:
    """Return the bytes in use in /dev/shm, also by files without a name, and in the folder of the way."""
    total = os.statvfs("/dev/shm")
    files = (path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())
    return (total.f_blocks - total.f_bfree) * total.f_frsize + sum(files)


def tell(report: Report) -> None:
    print(f"\n{json.dumps(report)}", flush=True)


def main(way: str, victim: str, folder: str) -> None:
    module, _, name = way.partition(":")
    try:
        scene = Scene(getattr(import_module(module), name)(folder))
        tell(getattr(scene, victim)() if victim in ("reader", "writer", "midway") else scene.server(victim))
    except Exception:
        traceback.print_exc()
        print("\nno report", flush=True)
    os._exit(0)  # what still runs ends with our namespaces


if __name__ == "__main__":
    main(*sys.argv[1:])
