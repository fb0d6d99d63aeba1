"""Many threads on one writer and one reader, and that copying holds nobody up."""

import random
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from shmstore import (
    ObjectNotFoundError,
    ObjectRef,
    StaleRefError,
    StoreFullError,
)
from tests.support import Stores, bits, run_all

CAPACITY = 256 * 1024


def value_of(number: int) -> dict[str, torch.Tensor]:
    """Every value says by itself whether it is whole."""
    size = 100 + number * 7919 % 9000
    return {
        "n": torch.tensor(number),
        "x": torch.full((size,), number % 251, dtype=torch.uint8),
        "y": torch.full((7, size % 50), number).T,
    }


def check(value: dict[str, torch.Tensor], expected: int | None = None) -> None:
    number = int(value["n"])
    assert expected is None or expected == number
    whole = value_of(number)
    assert {name: bits(tensor) for name, tensor in whole.items()} == {
        name: bits(tensor) for name, tensor in value.items()
    }


@pytest.mark.usefixtures("often")
def test_puts_hits_gets_drops_and_deletes_from_many_threads_at_once(stores: Stores) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    given: list[ObjectRef] = []
    recent: list[tuple[ObjectRef, int]] = []
    read = refused = 0
    stop = threading.Event()

    def put(base: int) -> None:
        nonlocal refused
        i = 0
        while i < 120 or read < 100:  # the readers' turns come when they come
            i += 1
            number = base * 100_000 + i
            try:
                ref = writer.put(f"k{number}", value_of(number))
                given.append(ref)
                recent.append((ref, number))
            except StoreFullError:
                refused += 1
                writer.cancel(recent[0][0])
            for ref, _ in recent[:-40]:  # requests that were aborted
                writer.cancel(ref)
            del recent[:-40]

    def hit(seed: int) -> None:
        generator = random.Random(seed)
        while not stop.is_set():
            _, number = generator.choice(recent[-20:] or [(None, 0)])
            try:
                ref = writer.get_cached(f"k{number}")
            except (ObjectNotFoundError, StoreFullError):
                continue
            check(reader.get(ref), number)  # what is promised is there

    def get(seed: int) -> None:
        nonlocal read
        generator = random.Random(seed)
        views: list[dict[str, torch.Tensor]] = []
        while not stop.is_set():
            if recent:
                ref, number = generator.choice(recent[-20:])
                try:
                    value = reader.get(ref, copy=generator.random() < 0.2)
                except StaleRefError:
                    continue
                check(value, number)
                views.append(value)
                read += 1
            if len(views) > 5:
                check(views.pop(generator.randrange(len(views))))

    def abort(seed: int) -> None:
        generator = random.Random(seed)
        while not stop.is_set():
            if recent:
                ref, number = generator.choice(recent)
                if generator.random() < 0.1:
                    writer.delete(f"k{number}")
                else:
                    reader.release(ref)
                    writer.cancel(ref)
            writer.check_valid()
            writer.stats()
            writer.keys()

    def puts() -> None:
        try:
            run_all(*(lambda base=base: put(base) for base in range(1, 4)))
        finally:
            stop.set()

    run_all(puts, lambda: hit(1), lambda: hit(2), lambda: get(3), lambda: get(4), lambda: abort(5))
    stats = writer.stats()
    assert stats.puts + refused >= 360
    assert stats.puts == len(given)
    assert stats.evictions > 20
    assert 0 == reader.stats().live_views
    writer.check_valid()
    keys = writer.keys()
    for key in keys:
        check(reader.get(writer.get_cached(key)), int(key[1:]))
    for ref in given:
        writer.cancel(ref)
    writer.put("all", torch.zeros(CAPACITY - 1024, dtype=torch.uint8))  # nothing is stuck


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("private", [False, True])
def test_values_of_one_object_may_die_on_any_thread(stores: Stores, private: bool) -> None:
    writer = stores.create(CAPACITY)
    reader = stores.attach(writer)
    ref = writer.put("k", value_of(7))
    box: list[dict[str, torch.Tensor]] = []

    def make() -> None:
        for _ in range(200):
            value = reader.get(ref, private=private)
            if private:
                value["x"].fill_(1)  # which no other value shows
                value["x"].fill_(7)
            box.append(value)  # from here on it is the other thread's
            del value

    def drop() -> None:
        for _ in range(200):
            while not box:
                pass
            check(box.pop(), 7)

    run_all(make, drop, make, drop)
    assert (400, 0) == (reader.stats().gets, reader.stats().live_views)
    writer.put("all", torch.zeros(CAPACITY - 1024, dtype=torch.uint8))


SOURCES: dict[str, Callable[[], object]] = {
    "one piece": lambda: torch.ones(96 << 20, dtype=torch.uint8),
    "strided": lambda: torch.ones(9800, 9800, dtype=torch.uint8).T,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_another_thread_counts_while_bytes_are_copied(stores: Stores, kind: str) -> None:
    """With turns of 100 s a thread runs only where the other lets go of the interpreter by itself."""
    writer = stores.create(200 << 20)
    writer.retire(0)
    value = SOURCES[kind]()
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        counted_during_a_put = 0
        for attempt in range(10):  # a busy machine may not have run the other thread in time
            counted = 0
            go = threading.Event()
            ready = threading.Event()

            def count(go: threading.Event = go, ready: threading.Event = ready) -> None:
                nonlocal counted
                ready.set()
                go.wait()
                for _ in range(10_000):
                    counted += 1

            thread = threading.Thread(target=count)
            thread.start()
            ready.wait()
            go.set()
            assert counted == 0
            writer.put(f"k{attempt}", value)
            counted_during_a_put = counted
            thread.join()
            if counted_during_a_put:
                break
        assert 10_000 == counted_during_a_put
    finally:
        sys.setswitchinterval(before)
