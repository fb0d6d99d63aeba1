"""Generations of writers that are killed at random moments: each opens what the one before left, and loses nothing."""

import itertools
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter
from tests.store.test_processes import kill_at_random
from tests.support import SHM, Child, Stores, bits, random_tensor, segments, store_name

CAPACITY = 2 << 20
KEYS = 60
"""Keys that come and go; the store has room for many more, so that none is evicted."""


def value_of(key: str) -> Any:
    seed = int(key)
    return random_tensor(seed, 300 + seed * 7919 % 4000)


def open_it(name: str) -> ObjectStoreWriter:
    return ObjectStoreWriter.open(name, capacity=CAPACITY, n_readers=2, max_objects=400)


def live(name: str, generation: int, pipe: int) -> None:
    """Open the store, say what is there, and go on until killed; says before each change what it will be."""

    def say(*message: Any) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())  # whole or not at all: less than PIPE_BUF

    writer = open_it(name)
    stats = writer.stats()
    say("opened", writer.recovered, writer.keys(), stats.open_leases, stats.heap_bytes, os.stat(SHM / name).st_size)
    writer.check_valid()
    generator = random.Random(generation)
    for number in itertools.count():
        key = str(generator.randrange(KEYS))
        if not writer.is_cached(key):
            say("put", key)
            say("handed", key, writer.put(key, value_of(key)).to_bytes().hex())
        elif number % 4:
            say("handed", key, writer.get_cached(key, hold=number % 8 == 1).to_bytes().hex())
        else:
            writer.cancel_all()  # so that the deleted object goes at once
            say("delete", key)
            writer.delete(key)
            say("deleted", key)


class Committed:
    """What the writers have said that they did."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.unsure: set[str] = set()
        """Of the change that the kill has interrupted."""
        self.handed: dict[str, str] = {}
        """The last reference to each key."""

    def check(self, found: list[str]) -> None:
        """Compare with what is there, of which the interrupted change may be a part."""
        assert self.keys <= set(found) <= self.keys | self.unsure
        self.keys = set(found)
        self.unsure.clear()

    def note(self, message: list[Any]) -> None:
        kind, said = message[0], message[1:]
        self.unsure.clear()
        if kind in ("put", "delete"):
            self.unsure.add(said[0])
            self.keys.discard(said[0])
        elif kind == "handed":
            self.keys.add(said[0])
            self.handed[said[0]] = said[1]


def lives(name: str, generation: int, generator: random.Random) -> list[list[Any]]:
    """Run one generation, kill it at a random moment, and return what it has said."""
    reading, writing = os.pipe()
    child = Child(live, name, generation, writing)
    os.close(writing)
    try:
        return kill_at_random(child, reading, generator)
    finally:
        child.kill()
        os.close(reading)


@pytest.fixture
def name() -> Iterator[str]:
    """Return a name for a store, and remove the store even if the test fails without a writer."""
    made = store_name()
    yield made
    (SHM / made).unlink(missing_ok=True)


@pytest.mark.parametrize("generations", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_generations_of_killed_writers_keep_every_hit_and_leave_one_store(
    stores: Stores, name: str, generations: int
) -> None:
    open_it(name).close(unlink=False)
    epochs: list[int] = []
    reader = stores.keep(ObjectStoreReader.attach(name, 0, on_takeover=epochs.append))
    committed, generator = Committed(), random.Random(3)
    sizes, opened, changes, read = set(), 0, 0, 0
    for generation in range(1, generations + 1):
        said = lives(name, generation, generator)
        assert {name} == {made for made in segments() if made.startswith(name)}
        for message in said:
            if message[0] == "opened":
                opened += 1
                _, recovered, keys, leases, heap, size = message
                assert (len(keys), 0) == (recovered, leases)
                committed.check(keys)
                sizes.add((heap, size))
            else:
                changes += 1
                committed.note(message)
        for key, packed in committed.handed.items():  # while there is no writer
            if key in committed.keys:
                assert bits(value_of(key)) == bits(reader.get(ObjectRef.from_bytes(bytes.fromhex(packed))))
                read += 1
        committed.handed.clear()
    writer = stores.keep(open_it(name))
    committed.check(writer.keys())
    for key in writer.keys():
        assert bits(value_of(key)) == bits(reader.get(writer.get_cached(key)))
    writer.cancel_all()
    writer.check_valid()
    assert 1 == len(sizes), "the file or the writer's memory grows"
    assert (0, True) == (writer.stats().evictions, writer.stats().used_bytes < KEYS * 5000)
    assert sorted(set(epochs)) == epochs
    assert opened + 2 <= reader.writer_epoch == epochs[-1] <= generations + 2
    assert (True, True) == (changes > 10 * generations, read > generations)
    print(
        f"{generations} generations: {opened} opened, {changes} changes, {read} read, {sizes}, {writer.recovered} kept"
    )
