"""What crosses processes: spawn and fork, death by SIGKILL at any moment, and processes that are merely stopped."""

import gc
import itertools
import json
import os
import random
import time
from typing import Any

import pytest
import torch

from shmstore import (
    LayoutMismatchError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    StoreClosedError,
    StoreFullError,
    StoreNotFoundError,
)
from tests.store.children import digest, read_what_comes
from tests.store.test_api import every_call
from tests.support import (
    FRESH,
    SHM,
    Child,
    Signal,
    Stores,
    bits,
    in_child,
    random_tensor,
    segments,
    store_name,
)

CAPACITY = 64 * 1024
ALL = random_tensor(0, CAPACITY - 1024)
VALUE = random_tensor(1, 5000)


# ---- spawn and fork


def test_spawned_children_attach_and_read_in_place(stores: Stores) -> None:
    writer = stores.create(1 << 20, n_readers=2)
    started = []
    for rank in range(2):
        ours, theirs = FRESH.Pipe()
        process = FRESH.Process(target=read_what_comes, args=(writer.handle, rank, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    for _, pipe in started:
        assert "attached" == pipe.recv()
    expected = []
    for i in range(10):
        value = {"x": random_tensor(i, 50_000), "y": torch.full((i, 3), float(i), dtype=torch.bfloat16)}
        expected.append({name: digest(tensor) for name, tensor in value.items()})
        ref = writer.put(f"k{i}", value)
        for _, pipe in started:
            pipe.send(ref.to_bytes())
            assert expected[-1] == pipe.recv()
    with pytest.raises(StoreFullError) as caught:  # both keep everything
        writer.put("all", torch.zeros(900_000, dtype=torch.uint8))
    assert {0, 1} == set(caught.value.held_bytes_by_rank or ())
    for process, pipe in started:
        pipe.send(None)
        assert expected == pipe.recv()
        process.join()
        assert 0 == process.exitcode
        process.close()
        pipe.close()
    writer.put("all", torch.zeros(900_000, dtype=torch.uint8))


def use_what_was_inherited(writer: Any, reader: Any, ref: ObjectRef) -> list[str]:
    said = []
    with writer, reader:  # of a pre-fork server, whose children leave the block of their parent
        pass
    for number, call in enumerate(every_call(writer, reader, ref)):
        try:
            call()
            said.append(f"call {number} returned")
        except StoreClosedError as error:
            told = "inherited through fork" in error.message and "attach in the child" in error.hint
            said.append("refused" if told else str(error))
    return said


def test_what_was_inherited_through_fork_raises_and_changes_nothing(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    ref = writer.put("k", VALUE)
    view = reader.get(ref)
    before = writer.stats(), reader.stats(), writer.keys()
    assert {"refused"} == set(in_child(use_what_was_inherited, writer, reader, ref))
    assert before == (writer.stats(), reader.stats(), writer.keys())
    assert bits(VALUE) == bits(view)
    assert bits(VALUE) == bits(reader.get(ref))
    assert writer.name in segments()


def test_what_was_inherited_dies_without_unlinking_or_unpinning(stores: Stores) -> None:
    writer = ObjectStoreWriter.create(store_name(), capacity=CAPACITY, n_readers=1)
    name = writer.name
    reader = ObjectStoreReader.attach(writer.handle)
    things: list[Any] = [writer, reader, reader.get(writer.put("k", VALUE)), reader.get(writer.get_cached("k"))[5:]]
    del writer, reader

    def let_everything_die() -> list[str]:
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            things.clear()
            gc.collect()
        return [str(warning.message) for warning in caught]

    try:
        assert [] == in_child(let_everything_die)
        assert name in segments()
        assert 2 == things[1].stats().live_views
        with pytest.raises(StoreFullError):
            things[0].put("all", ALL)
        assert bits(VALUE) == bits(things[2])
    finally:
        things[1].close()
        things[0].close()


# ---- the writer


def value_of(seed: int) -> torch.Tensor:
    return random_tensor(seed, 300 + seed * 7919 % 4000)


def write_for_ever(name: str, generation: int, leases: dict[str, str], pipe: int) -> None:
    """Takes the store over and changes it at random; says before each step what it is, after it what came of it."""

    def say(*message: Any) -> None:
        os.write(pipe, (json.dumps(message) + "\n").encode())  # whole or not at all: less than PIPE_BUF

    generator = random.Random(generation)
    writer = ObjectStoreWriter.recover(name)
    there = writer.keys()
    keys = list(there)
    refs = list(leases)
    say("recovered")
    for number in itertools.count():
        kind = generator.choices(["put", "hit", "cancel", "delete"], [6, 3, 5 + len(refs), 1])[0]
        if kind == "put":
            seed = generation * 1000 + number
            key = f"k{seed}"
            value = value_of(seed) if seed % 3 else value_of(seed)[None].T.contiguous().T  # by span and by fill
            say("put", key, seed)
            try:
                ref = writer.put(key, value).to_bytes().hex()
            except StoreFullError:
                say("refused")
                continue
            keys.append(key)
            refs.append(ref)
            before, there = there, writer.keys()
            say("stored", ref, [key for key in before if key not in there])
        elif kind == "hit" and keys:
            key = generator.choice(keys[-10:])
            say("hit", key)
            if not writer.is_cached(key):
                say("missed")
                continue
            refs.append(writer.get_cached(key).to_bytes().hex())
            say("handed", refs[-1])
        elif kind == "cancel" and refs:
            ref = refs.pop(generator.randrange(len(refs)))
            say("cancel", ref)
            writer.cancel(ObjectRef.from_bytes(bytes.fromhex(ref)))
            say("cancelled")
        elif kind == "delete" and keys:
            key = generator.choice(keys[-10:])
            say("delete", key)
            writer.delete(key)
            there = writer.keys()
            say("deleted")


class Book:
    """What a writer has said that it did."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.leases: dict[str, str] = {}
        self.seeds: dict[str, int] = {}
        self.doing: list[Any] = []

    def note(self, message: list[Any]) -> None:
        kind, said = message[0], message[1:]
        doing = self.doing
        if kind in ("put", "hit", "cancel", "delete"):
            self.doing = message
            if kind == "put":
                self.seeds[said[0]] = said[1]
            if kind == "cancel":
                self.leases.pop(said[0], None)
            return
        self.doing = []
        if kind == "stored":
            for key in said[1]:
                del self.live[key]
            self.live[doing[1]] = doing[2]
            self.leases[said[0]] = doing[1]
        elif kind == "handed":
            self.leases[said[0]] = doing[1]
        elif kind == "deleted":
            self.live.pop(doing[1], None)

    def check(self, writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
        """Compare with what is there, and take over what the last step did without having said so."""
        writer.check_valid()
        found = writer.keys()
        kind, what = [*self.doing, "", ""][:2]
        missing = self.live.keys() - set(found)
        more = set(found) - self.live.keys()
        assert more <= ({what} if kind == "put" else set())
        if kind == "put":
            assert not missing & set(self.leases.values()), "an object with open leases was evicted"
        else:
            assert missing <= ({what} if kind == "delete" else set())
        assert [key for key in self.live if key not in missing] == [key for key in found if key not in more]
        for key in missing:
            del self.live[key]
        for key in more:
            self.live[key] = self.seeds[key]
        assert len(self.leases) <= writer.stats().open_leases
        for packed, key in self.leases.items():
            assert reader.validate(ObjectRef.from_bytes(bytes.fromhex(packed))), f"{key} is promised and has gone"
        for key, seed in self.live.items():
            ref = writer.get_cached(key)
            assert bits(value_of(seed)) == bits(reader.get(ref)), key
            assert writer.cancel(ref)
        for packed in list(self.leases)[:2]:
            assert writer.cancel(ObjectRef.from_bytes(bytes.fromhex(packed))), "a lease was lost"
            del self.leases[packed]


def kill_at_random(life: Child, pipe: int, generator: random.Random) -> list[list[Any]]:
    """Kill the writer after a random number of messages and a random moment more; returns all that it said."""
    text, wanted = b"", generator.choice([0, 0, 1, 5, 20, 60, 150])
    while text.count(b"\n") < wanted:
        text += os.read(pipe, 4096)
    end = time.perf_counter() + generator.random() * (0.002 if wanted else 0.02)
    while time.perf_counter() < end:
        pass
    life.kill()
    while part := os.read(pipe, 65536):
        text += part
    return [json.loads(line) for line in text.splitlines()]


def test_a_writer_killed_at_any_moment_leaves_all_committed_objects(stores: Stores) -> None:
    writer = stores.create(CAPACITY, n_readers=2, max_objects=40)
    handle = writer.handle
    reader, idle = stores.attach(handle, 0), stores.attach(handle, 1)
    writer.retire(0)  # so that a lease ends by cancel alone: rank 0 is not waited for, and rank 1 reads nothing
    book = Book()
    views: list[tuple[torch.Tensor, bytes]] = []
    generator = random.Random(4)
    interrupted, heaps = 0, set()
    for generation in range(1, 61):
        writer.close(unlink=False)
        reading, writing = os.pipe()
        life = Child(write_for_ever, handle.name, generation, dict(book.leases), writing)
        os.close(writing)
        try:
            said = kill_at_random(life, reading, generator)
        finally:
            life.kill()
            os.close(reading)
        for message in said:
            book.note(message)
        interrupted += bool(book.doing)
        for view, expected in views:  # those who were attached to the dead one's store go on
            assert expected == bits(view)
        for packed, key in list(book.leases.items())[-2:]:
            ref = ObjectRef.from_bytes(bytes.fromhex(packed))
            seen = reader.get(ref)  # while there is no writer
            assert bits(value_of(book.seeds[key])) == bits(seen)
            views = [*views[-5:], (seen, bits(seen))]
        writer = stores.recover(handle if generation % 2 else handle.name)
        heaps.add(writer.stats().heap_bytes)
        book.check(writer, reader)
        if book.doing and book.doing[0] in ("put", "hit"):
            # A lease may be open whose reference was lost with the writer: the rank that it waits for restarts.
            idle.close()
            idle = stores.attach(handle, 1)
            book.leases.clear()
        book.doing = []
    assert interrupted > 10, "hardly ever killed in the middle"
    assert 1 == len(heaps), "the writer's memory grows"
    stats = writer.stats()
    assert stats.evictions > 25
    assert stats.puts > 250
    reader.close()
    idle.close()
    writer.close()
    assert handle.name not in segments()
    for view, expected in views:
        assert expected == bits(view)


def test_a_writer_killed_while_it_creates_leaves_a_store_or_nothing() -> None:
    generator = random.Random(1)
    outcomes = set()
    for _ in range(30):
        name = store_name()
        ready = Signal()

        def create(name: str = name, ready: Signal = ready) -> None:
            ready.send()
            writer = ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=2, prefault=True)
            writer.put("k", VALUE)
            while writer:
                time.sleep(60)

        child = Child(create)
        ready.wait()
        end = time.perf_counter() + generator.random() * 0.004
        while time.perf_counter() < end:
            pass
        child.kill()
        ready.close()
        try:
            with ObjectStoreReader.attach(name):
                pass
            with ObjectStoreWriter.recover(name) as writer:
                writer.check_valid()
                assert writer.keys() in ([], ["k"])
                outcomes.add("store")
        except StoreNotFoundError:  # or an empty file, as in the first instant of a creation
            outcomes.add("nothing")
            (SHM / name).unlink(missing_ok=True)
        except LayoutMismatchError:
            outcomes.add("unpublished")
            (SHM / name).unlink()
    assert "store" in outcomes
    assert len(outcomes) > 1
