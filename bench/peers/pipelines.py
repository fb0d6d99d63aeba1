"""Time a data pipeline by `multiprocessing.Queue`, by `put` and by `reserve`: ``python -m bench.peers.pipelines``.

Some producers make numpy arrays, and this process reads them. Each way has producers of its own, which wait while
another way is at work. The ways take turns, and the result is the median. To make an array is to fill it, the least
that any decoder does; what this takes by itself is measured, too. The table goes into docs/guides/pipelines.md.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.peers import interface
from bench.peers.harness import machine
from bench.peers.interface import PAGE
from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "pipelines.md"
PATIENCE = 60.0
ALONE, QUEUE, PUT, RESERVE = "making alone", "`multiprocessing.Queue`", "`put`", "`reserve`"

Array = NDArray[np.uint8]


@dataclass(frozen=True)
class Size:
    """What one round carries."""

    producers: int = 2
    arrays: int = 32
    """Of each producer."""
    nbytes: int = 16 << 20
    ahead: int = 4
    """How many arrays a producer may have ready."""

    @property
    def total(self) -> int:
        return self.producers * self.arrays * self.nbytes


@dataclass
class Way:
    """One way to carry the arrays, and the seconds of each round."""

    name: str
    receive: Callable[[], Iterator[Array | None]]
    """Yields each array of a round; None for one that stayed in its producer."""
    orders: list[Connection]
    seconds: list[float] = field(default_factory=list)


def touch(array: Array) -> int:
    return int(array[::PAGE].sum(dtype=np.uint64))


def producer(name: str, size: Size, index: int, orders: Connection, channel: Any, handle: Any) -> None:
    """Make the arrays of a round at each order, until the orders end."""
    source = np.random.default_rng(index).integers(0, 256, size.nbytes, dtype=np.uint8)
    with ExitStack() as end:
        writer = end.enter_context(ObjectStoreWriter.join(handle, index)) if handle else None
        orders.send(touch(source))
        while (number := orders.recv()) is not None:
            for key in (f"{number} {at}" for at in range(size.arrays)):
                if writer is not None and name == RESERVE:
                    with writer.reserve(key, source, timeout=PATIENCE) as array:
                        array[:] = source
                    channel.send_bytes(writer.get_cached(key).to_bytes())
                    continue
                array = source.copy()
                if writer is not None:
                    channel.send_bytes(writer.put(key, array, timeout=PATIENCE).to_bytes())
                elif name == QUEUE:
                    channel.put(array)
                else:
                    channel.send_bytes(b"made")


def started(name: str, size: Size, end: ExitStack) -> Way:
    """Start the producers of a way."""
    handle = reader = None
    if name in (PUT, RESERVE):
        owner = end.enter_context(
            ObjectStoreWriter.create(
                capacity=(size.ahead + 1) * (size.nbytes + 1024),
                n_readers=1,
                n_writers=size.producers,
                writes=False,
                prefault=True,
            )
        )
        handle, reader = owner.handle, end.enter_context(ObjectStoreReader.attach(owner.handle, rank=0))
    orders, channels = [], []
    queue = interface.CONTEXT.Queue(size.producers * size.ahead) if name == QUEUE else None
    for index in range(size.producers):
        ours, theirs = interface.CONTEXT.Pipe()
        channel, sent = interface.CONTEXT.Pipe(duplex=False)
        process = interface.CONTEXT.Process(target=producer, args=(name, size, index, theirs, queue or sent, handle))
        process.start()
        end.callback(process.join, PATIENCE)
        orders.append(ours)
        channels.append(channel)
    for one in orders:
        end.callback(one.send, None)  # before the joins

    def from_queue() -> Iterator[Array]:
        for _ in range(size.producers * size.arrays):
            yield queue.get(timeout=PATIENCE)

    def from_pipes() -> Iterator[Array | None]:
        left = size.producers * size.arrays
        while left:
            for channel in wait(channels, PATIENCE):
                message = channel.recv_bytes()
                yield reader.get(ObjectRef.from_bytes(message)) if reader else None
                left -= 1

    return Way(name, from_queue if queue else from_pipes, orders)


def measured(size: Size, rounds: int) -> list[Way]:
    """Return all ways with their times; ValueError if one gave other bytes than it got."""
    with ExitStack() as end:
        ways = [started(name, size, end) for name in (ALONE, QUEUE, PUT, RESERVE)]
        sums = {way.name: size.arrays * sum(one.recv() for one in way.orders) for way in ways}
        for number in range(rounds + 1):  # the first one warms up
            for way in ways:
                begin = perf_counter()
                for one in way.orders:
                    one.send(number)
                found = sum(touch(array) for array in way.receive() if array is not None)
                if number:
                    way.seconds.append(perf_counter() - begin)
                if found != sums[way.name] and way.name != ALONE:
                    raise ValueError(f"{way.name} gave other bytes than it got")
        return ways


def table(ways: list[Way], size: Size, rounds: int) -> str:
    """Return the table of the page, in seconds per GB."""
    each = {way.name: median(way.seconds) / size.total * 1e9 for way in ways}
    lines = ["| way | s per GB | overhead | relative to `reserve` |", "|---|---:|---:|---:|"]
    for name, seconds in each.items():
        carried = "" if name == ALONE else f"{max(seconds - each[ALONE], 0):.2f}"
        ratio = "" if name == ALONE else f"{seconds / each[RESERVE]:.1f} times"
        lines.append(f"| {name} | {seconds:.2f} | {carried} | {ratio} |")
    what = f"{size.producers} producers, {size.producers * size.arrays} arrays of {size.nbytes >> 20} MiB a round"
    found = ", ".join(f"{name} {value}" for name, value in machine().items())
    lines += ["", f"Medians of {rounds} rounds, in which all ways took turns; {what}; {found}."]
    return "\n".join([*lines, ""])


def write(page: Path, said: str) -> None:
    """Write the table between its marks in the page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- pipelines: begin -->\n")
    page.write_text(before + begin + said + "".join(rest.partition("<!-- pipelines: end -->")[1:]), encoding="utf-8")


def main(size: Size = Size(), rounds: int = 7, page: Path = GUIDE) -> None:
    """Measure, print the table, and write it into the page."""
    said = table(measured(size, rounds), size, rounds)
    print(said)
    write(page, said)


if __name__ == "__main__":
    main()
