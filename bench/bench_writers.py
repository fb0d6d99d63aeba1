"""Measure several writers of one store: look-ups over eight arenas, remote hits, puts, and writers side by side.

The writers of the first figures are in one process, but in arenas of their own, so they share no lock.
"""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from shmstore import ObjectStoreReader, ObjectStoreWriter

MIB = 1 << 20
WRITERS, KEYS = 8, 2000
SECONDS = 1.0


@pytest.fixture(scope="module")
def eight() -> Iterator[list[ObjectStoreWriter]]:
    """Writers with 2,000 small objects each."""
    first = ObjectStoreWriter.create(capacity=64 * MIB, n_readers=1, n_writers=WRITERS, max_objects=8192, prefault=True)
    writers = [first, *(ObjectStoreWriter.join(first.handle) for _ in range(WRITERS - 1))]
    for writer in writers:
        writer.retire(0)
        for number in range(KEYS):
            writer.put(f"{writer.index}-{number:060}", torch.ones(64))
    yield writers
    for writer in writers:
        writer.close()


@pytest.fixture(scope="module")
def one() -> Iterator[ObjectStoreWriter]:
    with ObjectStoreWriter.create(capacity=64 * MIB, n_readers=1, max_objects=8192, prefault=True) as writer:
        writer.retire(0)
        for number in range(KEYS):
            writer.put(f"0-{number:060}", torch.ones(64))
        yield writer


def test_a_look_up_that_misses_in_eight_arenas(figure, eight, one):
    here, there = (itertools.cycle(f"x-{number:060}" for number in range(KEYS)) for _ in range(2))
    figure.against(
        "look-up that misses in 8 arenas",
        lambda: [eight[0].is_cached(next(here)) for _ in range(100)],
        lambda: [one.is_cached(next(there)) for _ in range(100)],
        rounds=2000,
        difference_us=30.0,  # of 100
    )


def test_a_remote_hit(figure, eight):
    keys = itertools.cycle(f"5-{number:060}" for number in range(KEYS))
    figure.alone("get_cached of another's object", lambda: eight[0].get_cached(next(keys)), limit_us=2.0)


def test_a_put_beside_seven_other_writers(figure):
    value = torch.ones(6 * MIB // 4)
    keys = (f"put-{number}" for number in itertools.count())
    with (
        ObjectStoreWriter.create(capacity=256 * MIB, n_readers=1, prefault=True) as alone,
        ObjectStoreWriter.create(
            capacity=256 * MIB, n_readers=1, n_writers=WRITERS, max_objects=alone.stats().max_objects, prefault=True
        ) as writer,
    ):
        others = [ObjectStoreWriter.join(writer.handle) for _ in range(WRITERS - 1)]
        for one in (alone, writer, *others):
            one.retire(0)
        figure.against(
            "put of 6 MiB, 8 writers",
            lambda: writer.put(next(keys), value),
            lambda: alone.put(next(keys), value),
            rounds=300,
            ratio=1.1,
        )
        for one in others:
            one.close()


HITS = """
import sys, time
from shmstore import ObjectStoreReader, ObjectStoreWriter, StoreHandle
handle, number = StoreHandle.from_json(sys.argv[1]), int(sys.argv[2])
writer = ObjectStoreWriter.join(handle, number)
keys = [f"0-{n:060}" for n in range(2000)]
print("ready", flush=True)
sys.stdin.readline()
end, hits = time.perf_counter() + float(sys.argv[3]), 0
while time.perf_counter() < end:
    for key in keys:
        writer.get_cached(key)
    hits += len(keys)
print(hits, flush=True)
writer.close(unlink=False)
"""


def hits_per_second(handle, numbers):
    """Return the hits that processes with these arenas have together in a second, all on objects of writer 0."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", HITS, handle.to_json(), str(number), str(SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in numbers
    ]
    for child in children:
        assert child.stdout.readline().strip() == "ready"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    found = [int(child.stdout.readline()) for child in children]
    for child in children:
        child.wait()
    return sum(found) / SECONDS


def test_hits_of_several_processes(figure):
    """As many as there are cores, at most eight; the writer of the objects is idle."""
    cores = min(WRITERS - 1, len(os.sched_getaffinity(0)))
    with ObjectStoreWriter.create(
        capacity=64 * MIB, n_readers=1, n_writers=WRITERS, max_objects=8192, prefault=True
    ) as writer:
        with ObjectStoreReader.attach(writer.handle):
            pass  # a rank that has gone: leases are complete at once
        for number in range(KEYS):
            writer.put(f"0-{number:060}", torch.ones(64))
        ratios = []
        for _ in range(5):
            alone = hits_per_second(writer.handle, [1])
            together = hits_per_second(writer.handle, range(1, cores + 1))
            ratios.append(together / alone / cores)
            time.sleep(0.1)
        figure.value(
            f"hits a second, {cores} writers compared with one, of linear", 1 / sorted(ratios)[2], limit=1 / 0.9
        )
