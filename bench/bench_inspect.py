"""Measure what an inspection costs a writer and a reader that work at full speed.

Run with ``python bench/bench_inspect.py``. A process on another core takes snapshots without a pause, of the store
under load or of an idle twin. The two alternate in ABBA order. The result is the ratio of the operations of the load.
So the result contains only the inspection of this store: its cache misses and its system calls. The cost of a busy
second core (power, memory, a shared core of a virtual machine) is in both windows. In some lines both windows inspect
the twin: these show how much of a result is noise. Writer and reader share one process and one core.
"""

import argparse
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import torch

from shmstore import ObjectStoreReader, ObjectStoreWriter
from shmstore.inspect.inspector import StoreInspector

WINDOW = 0.03
SETTLE = 0.03
OBJECTS = 2000


@contextmanager
def looking(ours: str, twin: str, core: int) -> Iterator[Callable[[bool], None]]:
    """Fork an inspector that takes snapshots without a pause; yield a function that selects our store or the twin."""
    switch = mmap.mmap(-1, 1)
    pid = os.fork()
    if pid == 0:
        os.sched_setaffinity(0, {core})
        with StoreInspector.open(ours) as a, StoreInspector.open(twin) as b:
            while True:
                (a if switch[0] else b).snapshot()
    try:
        yield lambda at_ours: switch.__setitem__(0, int(at_ours))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def loads(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> dict[str, Callable[[], None]]:
    """Return one operation of each kind."""
    small, large = torch.ones(256), torch.ones(1 << 18)
    count = iter(range(10**12))

    def put_get(tensor: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            reader.get(writer.put(f"bench-{next(count)}", tensor))

        return work

    ref = writer.put("read", small)
    return {
        "put + get, 1 KiB": put_get(small),
        "put + get, 1 MiB": put_get(large),
        "get": lambda: (reader.get(ref), None)[1],
    }


def operations(work: Callable[[], None], seconds: float) -> float:
    """Return the calls of `work` per second."""
    done, start = 0, time.perf_counter()
    end = start + seconds
    while time.perf_counter() < end:
        work()
        done += 1
    return done / (time.perf_counter() - start)


def slowdown(work: Callable[[], None], turn: Callable[[bool], None], rounds: int, noise: bool) -> tuple[float, float]:
    """Return by how many percent an inspection slows `work` down: the median, and its error."""
    lost = []
    for _ in range(rounds):
        rates: dict[bool, list[float]] = {True: [], False: []}
        for looked_at in (False, True, True, False):
            turn(looked_at and not noise)
            time.sleep(SETTLE)
            rates[looked_at].append(operations(work, WINDOW))
        lost.append(100 * (1 - sum(rates[True]) / sum(rates[False])))
    low, _, high = quantiles(lost, n=4)
    error = 0.93 * (high - low) / len(lost) ** 0.5  # of a median, from the quartiles, as other processes cause outliers
    return median(lost), error


@contextmanager
def filled() -> Iterator[tuple[ObjectStoreWriter, ObjectStoreReader]]:
    """Create a warm store whose ring has wrapped twice."""
    with ObjectStoreWriter.create(capacity=64 << 20, n_readers=2, max_objects=OBJECTS, prefault=True) as writer:
        writer.retire(1)
        with ObjectStoreReader.attach(writer.handle, 0) as reader:
            tensor = torch.ones(256)
            for i in range(OBJECTS * 2):
                reader.release(writer.put(f"fill-{i}", tensor))
            yield writer, reader


def for_ranks(n_readers: int) -> float:
    """Return the seconds that one list of the ranks takes when each has 5000 unread references."""
    unread = 5000
    with ObjectStoreWriter.create(capacity=16 << 20, n_readers=n_readers, max_objects=1 << 16) as writer:
        tensor = torch.ones(1)
        for i in range(unread):
            writer.put(f"unread-{i}", tensor)
        with StoreInspector.open(writer.name) as inspector:
            inspector.readers()
            start = time.perf_counter()
            assert all(reader.unacknowledged == unread for reader in inspector.readers())
            return time.perf_counter() - start


def main() -> None:
    """Print the time of an inspection, and two lines for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="ABBA rounds of each line (default 60)")
    rounds = max(2, parser.parse_args().rounds)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    for n_readers in (1, 4, 16, 64):
        print(f"one list of {n_readers} ranks with 5000 unread leases: {1e3 * for_ranks(n_readers):.1f} ms")
    with filled() as (writer, reader), filled() as (twin, _):
        with StoreInspector.open(twin.name) as inspector:
            inspector.snapshot()
            start = time.perf_counter()
            inspector.snapshot()
            print(f"one snapshot of {len(inspector.slots())} objects: {1e3 * (time.perf_counter() - start):.0f} ms")
        for name, work in loads(writer, reader).items():
            with looking(writer.name, twin.name, cores[-1]) as turn:
                for noise in (True, False):
                    lost, error = slowdown(work, turn, rounds, noise)
                    what = "the twin in both windows (noise)" if noise else "snapshots without a pause"
                    print(f"{name:18} {what:32} {lost:+6.2f} % slower (+- {error:.2f})", flush=True)


if __name__ == "__main__":
    main()
