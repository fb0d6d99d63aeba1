"""`shmstore bench`: the main figures on this machine, compared with numpy.copyto of the same bytes."""

import argparse
import itertools
import mmap
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from shmstore.cli.command import EXIT_OK, Command
from shmstore.cli.commands.common import add_dir, add_json, print_json, size
from shmstore.cli.commands.tables import make_console, make_table
from shmstore.store import ObjectStoreReader, ObjectStoreWriter

_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (_KIB, 64 * _KIB, _MIB, 6 * _MIB, 64 * _MIB)
_RING = 256 * _MIB
_SECONDS_EACH = 2.0
"""For the puts and copies of one size; its gets and hits take a quarter each."""
_MOST_ROUNDS = 4000


@dataclass(frozen=True, slots=True)
class Figure:
    """The medians of one size, in microseconds."""

    nbytes: int
    put_us: float
    """`put` into a full ring, so it evicts."""
    copy_us: float
    """`numpy.copyto` of the same bytes into warm shared memory that is as cold in the caches."""
    get_us: float
    """`get`: a read-only view."""
    hit_us: float
    """`get_cached`: another reference to a stored object."""

    @property
    def put_ratio(self) -> float:
        """Cost of a put, in copies."""
        return self.put_us / self.copy_us


def _interleaved(
    operations: list[Callable[[], Any]], seconds: float, undo: Callable[[Any], object] = lambda result: None
) -> list[float]:
    """Return the median time of each operation in microseconds; they take turns, and `undo` is not timed."""
    for operation in operations:
        undo(operation())
    times: list[list[float]] = [[] for _ in operations]
    end = time.perf_counter() + seconds
    for _ in range(_MOST_ROUNDS):
        for operation, taken in zip(operations, times, strict=True):
            start = time.perf_counter()
            result = operation()
            taken.append(time.perf_counter() - start)
            undo(result)
        if time.perf_counter() > end and len(times[0]) >= 5:
            break
    return [median(taken) * 1e6 for taken in times]


def _measure_size(
    nbytes: int, writer: ObjectStoreWriter, reader: ObjectStoreReader, shared: Any, seconds: float
) -> Figure:
    source = np.ones(nbytes, np.uint8)
    keys = (f"bench-{nbytes}-{i}" for i in itertools.count())
    places = itertools.cycle(shared[at : at + nbytes] for at in range(0, len(shared) - nbytes + 1, nbytes))
    put_us, copy_us = _interleaved(
        [lambda: writer.put(next(keys), source), lambda: np.copyto(next(places), source)], seconds
    )
    writer.clear()
    ref = writer.put("bench-read", source)
    (get_us,) = _interleaved([lambda: reader.get(ref)], seconds / 4)
    (hit_us,) = _interleaved([lambda: writer.get_cached("bench-read")], seconds / 4, writer.cancel)
    writer.clear()
    return Figure(nbytes, put_us, copy_us, get_us, hit_us)


def measure(
    seconds_each: float = _SECONDS_EACH, sizes: tuple[int, ...] = _SIZES, *, dir: str | None = None
) -> list[Figure]:
    """Return a figure for each size; it makes its own store, and as much shared memory for the copies."""
    shared = np.frombuffer(mmap.mmap(-1, _RING), np.uint8)
    shared[:] = 1
    with ObjectStoreWriter.create(capacity=_RING, n_readers=1, prefault=True, dir=dir) as writer:
        with ObjectStoreReader.attach(writer.handle) as reader:
            writer.retire(0)  # or its objects could not be evicted
            return [_measure_size(nbytes, writer, reader, shared, seconds_each) for nbytes in sizes]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dir(parser)
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    figures = measure(dir=arguments.dir)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    if arguments.json:
        print_json({"ok": True, "machine": machine, "ring": _RING, "figures": figures})
        return EXIT_OK
    console = make_console()
    table = make_table(console, "", "array", "put", "numpy.copyto", "put / copy", "get", "hit")
    for figure in figures:
        table.add_row(
            size(figure.nbytes),
            f"{figure.put_us:.1f} us",
            f"{figure.copy_us:.1f} us",
            f"{figure.put_ratio:.2f}",
            f"{figure.get_us:.1f} us",
            f"{figure.hit_us:.1f} us",
        )
    console.print(table)
    print(f"medians; ring of {size(_RING)}; {machine}")
    return EXIT_OK


COMMAND = Command(
    name="bench",
    summary="compare put, get and hit on this machine with a plain copy, in less than half a minute",
    example="shmstore bench --json",
    add_arguments=_add_arguments,
    run=_run,
)
