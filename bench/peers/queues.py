"""Time `shmstore.Queue` and other queues: ``python -m bench.peers.queues``.

A producer process puts one array again and again, and this process gets each. The queues take turns, in rounds; the
result is the median. Each queue holds up to `AHEAD` values at a time. The table goes into docs/guides/queue.md.

*The first 20* are those of a new queue and a new producer, which has put one byte before: the first put of
`shmstore.Queue` reserves its room.

Each size has processes of its own, as in most programs. Once a process has freed 16 MiB, malloc keeps the pages of
10 MB; until then a value by `multiprocessing.Queue` meets some 3,500 cold pages in the consumer alone.
"""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from shmstore import Queue

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "queue.md"
SIZES = {"1 KiB": 1 << 10, "100 KiB": 100 << 10, "1 MiB": 1 << 20, "10 MB": 10_000_000, "16 MiB": 16 << 20}
AHEAD, FIRST = 4, 20
CONTEXT: Any = multiprocessing.get_context("forkserver")  # which imports what takes long once
CONTEXT.set_forkserver_preload([__spec__.name])
OURS = "`shmstore.Queue`"


def ours() -> tuple[Any, Any]:
    made = Queue("256 MiB", maxsize=AHEAD)
    return made, made


def standard() -> tuple[Any, Any]:
    made = CONTEXT.Queue(AHEAD)
    return made, made


def of_torch() -> tuple[Any, Any]:
    import torch.multiprocessing

    made = torch.multiprocessing.get_context("forkserver").Queue(AHEAD)
    return made, made


def of_py_sharedmemory() -> tuple[Any, Any]:
    from py_sharedmemory import create_shared_memory_pair

    made: tuple[Any, Any] = create_shared_memory_pair(capacity=AHEAD, ctx=CONTEXT)
    return made


WAYS: dict[str, Callable[[], tuple[Any, Any]]] = {
    OURS: ours,
    "`multiprocessing.Queue`": standard,
    "`torch.multiprocessing.Queue`": of_torch,
    "py-sharedmemory": of_py_sharedmemory,
}


def produce(sender: Any, orders: Connection, torch: bool) -> None:
    """Put an array so often at each order, (bytes, times)."""
    shared: Callable[[Any], Any] = lambda array: array  # noqa: E731 - what the queue takes
    if torch:
        from torch import from_numpy as shared
    sender.put(b"x")
    orders.send("here")
    while order := orders.recv():
        value = shared(np.ones(order[0], np.uint8))
        for _ in range(order[1]):
            sender.put(value)
    with suppress(AttributeError):
        sender.wait_for_all_ack()
    sender.close()


class Way:
    """A queue, and the process that puts into it."""

    def __init__(self, name: str) -> None:
        self.name = name
        sender, self._receiver = WAYS[name]()
        self._orders, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=produce, args=(sender, theirs, "torch" in name))
        self._process.start()
        theirs.close()
        self._orders.recv()
        self._receiver.get()

    def seconds(self, nbytes: int, times: int, read: bool) -> float:
        """Return what it takes to get an array so often, and to read every byte of it, if asked."""
        begin = perf_counter()
        self._orders.send((nbytes, times))
        for _ in range(times):
            found = self._receiver.get()
            if read:
                np.asarray(found).view(np.uint64).sum()
            del found
        return perf_counter() - begin

    def end(self) -> None:
        self._orders.send(None)
        self._process.join(60)
        self._receiver.close()


def times_of(nbytes: int) -> int:
    """Return how many values a round has."""
    return max(FIRST, min(2000, (256 << 20) // nbytes))


def measured(sizes: dict[str, int], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return microseconds a value by column and way: of each size, taken alone and read."""
    taken: dict[tuple[str, str], list[float]] = {}

    def measure(way: Way, column: str, nbytes: int, times: int, read: bool) -> None:
        taken.setdefault((column, way.name), []).append(way.seconds(nbytes, times, read) / times * 1e6)

    ways = [Way(name) for name in WAYS]
    for number in range(rounds + 1):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            for size, nbytes in sizes.items():
                if number == 0:
                    way.seconds(nbytes, FIRST, True)
                    continue
                measure(way, size, nbytes, times_of(nbytes), False)
                if nbytes >= 1 << 20:
                    measure(way, f"{size}, read", nbytes, times_of(nbytes), True)
        for size, nbytes in sizes.items():
            if nbytes >= 1 << 20 and number:
                for name in WAYS:
                    new = Way(name)
                    measure(new, f"{size}, the first {FIRST}", nbytes, FIRST, False)
                    new.end()
        print(f"round {number} of {rounds}", file=sys.stderr)
    for way in ways:
        way.end()
    return taken


def table(taken: dict[tuple[str, str], list[float]], rounds: int) -> str:
    """Return the table of the page: microseconds a value, and how many times those of ours."""
    from bench.peers.harness import machine  # with torch, which the producers do without

    lines = ["| values | " + " | ".join(WAYS) + " |", "|---" + "|---:" * len(WAYS) + "|"]
    for column in dict.fromkeys(column for column, _ in taken):
        each = {name: median(taken[column, name]) for name in WAYS if (column, name) in taken}
        cells = [
            f"{us:,.0f} µs" + ("" if name == OURS else f", {us / each[OURS]:.1f} times") for name, us in each.items()
        ]
        lines.append(f"| {column} | " + " | ".join(cells) + " |")
    found = ", ".join(f"{name} {value}" for name, value in machine().items())
    return "\n".join([*lines, "", f"Medians of {rounds} rounds, in which all queues took turns; {found}.", ""])


def main(sizes: dict[str, int] = SIZES, rounds: int = 5, page: Path = GUIDE) -> None:
    """Measure, print the table, and write it into the page."""
    taken: dict[tuple[str, str], list[float]] = {}
    for size, nbytes in sizes.items():
        with ProcessPoolExecutor(1, CONTEXT) as alone:
            taken |= alone.submit(measured, {size: nbytes}, rounds).result()
    said = table(taken, rounds)
    print(said)
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- queues: begin -->\n")
    page.write_text(before + begin + said + "".join(rest.partition("<!-- queues: end -->")[1:]), encoding="utf-8")


if __name__ == "__main__":
    main(rounds=int(sys.argv[1]) if sys.argv[1:] else 5)
