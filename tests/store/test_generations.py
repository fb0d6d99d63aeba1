"""Generations of writers that are killed at random moments: each opens what the one before left, and loses nothing."""

import itertools
import json
import os
import random
import time
from typing import Any

import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter
from tests.support import SHM, Child, Stores, bits, random_tensor, segments, store_name

CAPACITY = 512 * 1024
KEYS = 60
"""Keys in turn; the store has room for more, so that none is evicted."""


def value_of(key: str) -> Any:
    seed = int(key)
    return random_tensor(seed, 300 + seed * 7919 % 4000)


def open_it(name: str) -> ObjectStoreWriter:
    return ObjectStoreWriter.open(name, capacity=CAPACITY, n_readers=2, max_objects=200)


def live(name: str, generation: int, committed: list[str], pipe: int) -> None:
    """Open the store, check that all is there, and go on until killed; says before each change what it will be."""

    def say(*message: Any) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())  # whole or not at all: less than PIPE_BUF

    writer = open_it(name)
    stats = writer.stats()
    missing = [key for key in committed if not writer.is_cached(key)]
    say("opened", writer.recovered, missing, stats.open_leases, stats.heap_bytes, os.stat(SHM / name).st_size)
    writer.check_valid()
    generator = random.Random(generation)
    for number in itertools.count():
        key = str(generator.randrange(KEYS))
        if not writer.is_cached(key):
            say("put", key)
            say("handed", key, writer.put(key, value_of(key)).to_bytes().hex())
        elif number % 4:
            say("handed", key, writer.get_cached(key, hold=number % 8 == 1).to_bytes().hex())
            if writer.stats().open_leases > 100:
                writer.cancel_all()
        else:
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

    def note(self, message: list[Any]) -> None:
        kind, said = message[0], message[1:]
        self.unsure.clear()
        if kind in ("put", "delete"):
            self.unsure.add(said[0])
            self.keys.discard(said[0])
        elif kind == "handed":
            self.keys.add(said[0])
            self.handed[said[0]] = said[1]


def lives(name: str, generation: int, committed: Committed, pause: float) -> list[list[Any]]:
    """Run one generation, kill it after `pause` seconds more than it takes to begin, and return what it has said."""
    reading, writing = os.pipe()
    child = Child(live, name, generation, sorted(committed.keys), writing)
    os.close(writing)
    text = b""
    try:
        if generation % 5:  # else it may be killed before it has opened
            text = os.read(reading, 65536)
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            pass
        child.kill()
        while part := os.read(reading, 65536):
            text += part
    finally:
        child.kill()
        os.close(reading)
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("generations", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_generations_of_killed_writers_keep_every_hit_and_leave_one_store(stores: Stores, generations: int) -> None:
    name = store_name()
    open_it(name).close(unlink=False)
    epochs: list[int] = []
    reader = stores.keep(ObjectStoreReader.attach(name, 0, on_takeover=epochs.append))
    committed, generator = Committed(), random.Random(generations)
    sizes, opened, changes, read = set(), 0, 0, 0
    for generation in range(1, generations + 1):
        said = lives(name, generation, committed, generator.random() * 0.02)
        assert {name} == {made for made in segments() if made.startswith(name)}
        for message in said:
            if message[0] == "opened":
                opened += 1
                _, recovered, missing, leases, heap, size = message
                assert ([], 0) == (missing, leases)
                assert len(committed.keys) <= recovered <= len(committed.keys | committed.unsure)
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
    assert committed.keys <= set(writer.keys()) <= committed.keys | committed.unsure
    for key in writer.keys():
        assert bits(value_of(key)) == bits(reader.get(writer.get_cached(key)))
    writer.cancel_all()
    writer.check_valid()
    assert 1 == len(sizes), "the file or the writer's memory grows"
    assert writer.stats().used_bytes < KEYS * 5000
    assert sorted(set(epochs)) == epochs
    assert opened + 2 <= reader.writer_epoch == epochs[-1] <= generations + 2
    assert (True, True) == (changes > 10 * generations, read > generations)
    print(
        f"{generations} generations: {opened} opened, {changes} changes, {read} read, {sizes}, {writer.recovered} kept"
    )
