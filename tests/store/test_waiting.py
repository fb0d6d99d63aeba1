"""A put or a reservation that waits for room: who ends the wait, and that it is in nobody's way."""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreFullError, StoreHandle
from tests.support import Child, Signal, Stores, alive, raises, random_tensor, span_of, state

CAPACITY = 64 * 1024
ALL = random_tensor(0, CAPACITY - 1024)
LONG = 60.0
"""Seconds that a test may need on a busy machine, but never needs."""
CALL = 0.05
"""A put that waits returns from C after this time, for the sake of signals."""


def put(writer: ObjectStoreWriter, key: str, **options: Any) -> None:
    writer.put(key, ALL, **options)


def seen(writer: ObjectStoreWriter) -> Any:
    """Return what a wait must leave as it was: all but leases that are over, which a look closes."""
    keys, stats = state(writer)
    return keys, dataclasses.replace(stats, open_leases=0)


def reserve(writer: ObjectStoreWriter, key: str, **options: Any) -> None:
    with writer.reserve(key, ALL, **options) as view:
        view[:] = ALL


WAYS = pytest.mark.parametrize("way", [put, reserve])


def let_go_later(handle: StoreHandle, packed: bytes, by_view: bool, ready: Signal) -> None:
    with ObjectStoreReader.attach(handle) as reader:
        held = reader.get(ObjectRef.from_bytes(packed)) if by_view else None
        ready.send()
        time.sleep(2 * CALL)
        if held is None:
            reader.release(ObjectRef.from_bytes(packed))


@WAYS
@pytest.mark.parametrize("by_view", [False, True])
def test_a_reader_in_another_process_that_lets_go_ends_the_wait(
    stores: Stores, way: Callable[..., None], by_view: bool
) -> None:
    writer = stores.create(CAPACITY)
    with alive(let_go_later, writer.handle, writer.put("held", ALL).to_bytes(), by_view):
        way(writer, "new", timeout=LONG)
    assert 0 == writer.stats().refusals


def hold(handle: StoreHandle, packed: bytes, ready: Signal) -> None:
    with ObjectStoreReader.attach(handle) as reader:
        held = reader.get(ObjectRef.from_bytes(packed))
        ready.send()
        signal.pause()
        assert held is not None


@pytest.fixture
def holder(stores: Stores) -> Iterator[tuple[ObjectStoreWriter, Child]]:
    """Yield a store and a process that holds all of it."""
    writer = stores.create(CAPACITY)
    with alive(hold, writer.handle, writer.put("held", ALL).to_bytes()) as child:
        yield writer, child


@WAYS
def test_a_reader_that_is_stopped_does_not_stop_the_clock(
    holder: tuple[ObjectStoreWriter, Child], way: Callable[..., None]
) -> None:
    writer, child = holder
    child.signal(signal.SIGSTOP)
    before = seen(writer)
    start = time.monotonic()
    with raises(StoreFullError, ["rank 0", str(span_of("held", ALL)), f"{4 * CALL:g} seconds"]) as caught:
        way(writer, "new", timeout=4 * CALL)
    assert 4 * CALL <= time.monotonic() - start < LONG
    assert {0: span_of("held", ALL)} == caught.value.held_bytes_by_rank
    assert before == (seen(writer)[0], dataclasses.replace(seen(writer)[1], refusals=0))
    assert 1 == writer.stats().refusals
    with pytest.raises(StoreFullError, match=r"^(?!.*seconds)"):
        way(writer, "newer")  # does not wait, though the last one did
    writer.check_valid()


@WAYS
def test_an_interrupt_ends_the_wait_and_leaves_nothing(
    holder: tuple[ObjectStoreWriter, Child], way: Callable[..., None]
) -> None:
    writer, child = holder
    before = seen(writer)
    start = time.monotonic()
    main = threading.main_thread().ident or 0
    timer = threading.Timer(4 * CALL, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        way(writer, "new", timeout=math.inf)
    timer.join()
    assert time.monotonic() - start < LONG
    assert before == seen(writer)
    child.kill()
    way(writer, "new")
    writer.check_valid()
