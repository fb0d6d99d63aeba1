"""Measure the store: put and get by size, hits, many objects, refusals, attach, recover, open, bookkeeping.

Run with ``make bench``, which prints the table. The reference of a put is numpy.copyto of the same bytes into warm
shared memory of the same size. It cycles through that memory, so its destination is as cold as that of the ring.
"""

import itertools
import mmap
import os
import random
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreFullError

KIB, MIB = 1 << 10, 1 << 20
RING = 512 * MIB
SIZES = [KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 6 * MIB, 64 * MIB]
MANY, FEW = 100_000, 100
SMALL = 256  # elements of a small object (1 KiB)


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


@pytest.fixture(scope="module")
def ring() -> Iterator[ObjectStoreWriter]:
    """A warm store whose ranks are retired, so that an object may be evicted at once."""
    with ObjectStoreWriter.create(capacity=RING, n_readers=2, prefault=True) as writer:
        writer.retire(0)
        writer.retire(1)
        yield writer


@pytest.fixture(scope="module")
def shared() -> Iterator[np.ndarray]:
    """Warm shared memory as large as the ring."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, RING)
        memory = np.frombuffer(mmap.mmap(file.fileno(), RING), np.uint8)
        memory[:] = 1
        yield memory


@pytest.mark.parametrize("size", SIZES, ids=size_name)
def test_put(figure, ring, shared, size):
    tensor = torch.ones(size // 4)
    source = tensor.numpy().view(np.uint8)
    places = itertools.cycle(shared[at : at + size] for at in range(0, RING - size + 1, size))
    keys = (f"{size}-{i}" for i in itertools.count())
    limit = {6 * MIB: {"ratio": 1.05}, 64 * MIB: {"ratio": 0.7}}.get(size, {"difference_us": 4.0})
    figure.against(
        f"put, {size_name(size)}",
        lambda: ring.put(next(keys), tensor),
        lambda: np.copyto(next(places), source),
        rounds=3000 if size < MIB else 400 if size < 64 * MIB else 60,
        **limit,
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[ObjectStoreWriter, ObjectStoreReader]]:
    with ObjectStoreWriter.create(capacity=RING, n_readers=1, prefault=True) as writer:
        with ObjectStoreReader.attach(writer.handle) as reader:
            yield writer, reader


@pytest.mark.parametrize("size", SIZES, ids=size_name)
def test_get(figure, pair, size):
    writer, reader = pair
    ref = writer.put(f"get-{size}", torch.ones(size // 4))
    figure.alone(f"get, {size_name(size)}", lambda: reader.get(ref), limit_us=4.0)
    writer.delete(f"get-{size}")


def test_get_four(figure, pair):
    writer, reader = pair
    ref = writer.put("four", {name: torch.ones(MIB // 4) for name in ("pixels", "grid", "mask", "ids")})
    figure.alone("get, dict of four tensors", lambda: reader.get(ref), limit_us=9.0)


def test_hit(figure, ring):
    key = "a" * 64
    ring.put(key, torch.ones(SMALL))
    figure.alone("get_cached (hit)", lambda: ring.get_cached(key), limit_us=1.5)


def test_is_cached(figure, ring):
    key = "b" * 64
    ring.put(key, torch.ones(SMALL))
    figure.alone("is_cached", lambda: ring.is_cached(key), limit_us=0.5)


class Populated:
    """A store full of `count` small objects; leases expect ranks that never read, unless they are retired."""

    def __init__(self, count: int, *, retired: bool) -> None:
        self.count = count
        self.options = {"capacity": count * 1216, "n_readers": 2, "max_objects": count}
        self.writer = ObjectStoreWriter.create(**self.options, prefault=True)
        if retired:
            self.writer.retire(1)
            self.writer.retire(0)
        tensor = torch.ones(SMALL)
        self.refs: list[ObjectRef] = [self.writer.put(f"{i:032x}", tensor) for i in range(count)]
        self.fresh = itertools.count(count)


@pytest.fixture(scope="module")
def populations() -> Iterator[tuple[Populated, Populated]]:
    stores = Populated(FEW, retired=True), Populated(MANY, retired=True)
    yield stores
    for store in stores:
        store.writer.close()


def test_get_fixed_of_many(figure, populations):
    few, many = populations
    with ObjectStoreReader.attach(few.writer.handle) as small, ObjectStoreReader.attach(many.writer.handle) as large:
        a, b = few.refs[FEW // 2], many.refs[MANY // 2]
        figure.against(
            f"get, one of {MANY} objects against one of {FEW}",
            lambda: large.get(b),
            lambda: small.get(a),
            rounds=20000,
            ratio=1.2,
        )


def test_get_random_of_many(figure, populations):
    few, many = populations
    with ObjectStoreReader.attach(few.writer.handle) as small, ObjectStoreReader.attach(many.writer.handle) as large:
        choose = random.Random(1)
        picks_few = itertools.cycle([choose.choice(few.refs) for _ in range(50000)])
        picks_many = itertools.cycle([choose.choice(many.refs) for _ in range(50000)])
        figure.against(
            f"get, random of {MANY} objects against of {FEW}",
            lambda: large.get(next(picks_many)),
            lambda: small.get(next(picks_few)),
            rounds=20000,
            ratio=2.0,
        )


def test_put_fixed_of_many(figure, populations):
    few, many = populations
    tensor = torch.ones(SMALL)
    figure.against(
        f"put, one object again, {MANY} live against {FEW}",
        lambda: many.writer.put("fixed", tensor),
        lambda: few.writer.put("fixed", tensor),
        setup=lambda: many.writer.delete("fixed"),
        reference_setup=lambda: few.writer.delete("fixed"),
        rounds=20000,
        ratio=1.2,
    )


def test_put_random_of_many(figure, populations):
    few, many = populations
    tensor = torch.ones(SMALL)
    figure.against(
        f"put that evicts, {MANY} live against {FEW}",
        lambda: many.writer.put(f"{next(many.fresh):032x}", tensor),
        lambda: few.writer.put(f"{next(few.fresh):032x}", tensor),
        rounds=20000,
        ratio=2.0,
    )


@pytest.fixture(scope="module")
def held() -> Iterator[Populated]:
    store = Populated(MANY, retired=False)
    yield store
    store.writer.close(unlink=True)  # `open` keeps it


def test_refused_put(figure, held):
    tensor = torch.ones(SMALL)

    def refused() -> None:
        with pytest.raises(StoreFullError):
            held.writer.put("one too many", tensor)

    refused()
    figure.alone(f"put refused again, {MANY} objects held", refused, limit_us=1000.0)


def test_attach(figure, held):
    def attach() -> None:
        ObjectStoreReader.attach(held.writer.handle, rank=1).close()

    figure.alone(f"attach to {MANY} objects", attach, limit_us=5000.0)


def test_recover(figure, held):
    def recover() -> None:
        held.writer = ObjectStoreWriter.recover(held.writer.name)

    figure.rounds(
        f"recover {MANY} objects", recover, limit_us=150_000.0, rounds=11, setup=lambda: held.writer.close(unlink=False)
    )
    assert len(held.writer) == MANY


def test_open(figure, held):
    """With a lease on each object, which it ends."""

    def leave() -> None:
        for number in range(MANY - held.writer.stats().open_leases):
            held.writer.get_cached(f"{number:032x}")
        held.writer.close(unlink=False)

    def open_it() -> None:
        held.writer = ObjectStoreWriter.open(held.writer.name, **held.options, prefault=True)

    figure.rounds(f"open {MANY} objects", open_it, limit_us=150_000.0, rounds=11, setup=leave)
    assert (held.writer.recovered, held.writer.stats().open_leases) == (MANY, 0)


@pytest.mark.parametrize("n_readers", [1, 8, 64, 256])
def test_bookkeeping(figure, n_readers):
    with ObjectStoreWriter.create(capacity=MIB, n_readers=n_readers, max_objects=MANY) as writer:
        stats = writer.stats()
        figure.value(
            f"bookkeeping an object, {n_readers} readers, bytes",
            (stats.control_bytes + stats.heap_bytes) / MANY,
            limit=256 + 4 * n_readers,
        )
