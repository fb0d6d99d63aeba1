"""A put or a reservation that waits for room: who ends the wait, and that it is in nobody's way."""

import dataclasses
import math
import multiprocessing
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from shmstore import (
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    StoreFullError,
    StoreHandle,
)
from tests.layout import FIELDS
from tests.support import SHM, Child, Signal, Stores, alive, raises, random_tensor, span_of, state

CAPACITY = 64 * 1024
ALL = random_tensor(0, CAPACITY - 1024)
LONG = 60.0
"""Seconds that a test may need on a busy machine, but never needs."""
LOOK = 0.05
"""A put that waits looks again after this time, also if nobody has woken it."""


def waits(name: str) -> bool:
    """Say whether a thread of the store's writer waits for room."""
    with open(SHM / name, "rb") as file:
        file.seek(FIELDS["room_wanted"])
        return any(file.read(8))


def until_waiting(name: str) -> None:
    while not waits(name):
        time.sleep(1e-4)


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


class Thread(threading.Thread):
    """A thread whose `join` returns what its function returned, or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def join(self, timeout: float | None = None) -> Any:
        super().join(timeout)
        if self._error is not None:
            raise self._error
        return self._result


@contextmanager
def meanwhile(name: str, function: Callable[[], Any]) -> Iterator[None]:
    """Run the block, and the function in another thread as soon as the block waits for room."""

    def later() -> None:
        until_waiting(name)
        function()

    other = Thread(later)
    try:
        yield
    finally:
        other.join()


# ---- readers in other processes


def let_go_when_wanted(handle: StoreHandle, by_view: bool, pipe: Connection) -> None:
    """Take each reference that comes, let go of it when the writer waits for room, and say at which moment."""
    with ObjectStoreReader.attach(handle) as reader:
        while (packed := pipe.recv()) is not None:
            ref = ObjectRef.from_bytes(packed)
            held = reader.get(ref) if by_view else None
            pipe.send("ready")
            until_waiting(handle.name)
            time.sleep(LOOK / 10)  # the writer sleeps by now
            moment = time.monotonic()
            if held is None:
                reader.release(ref)
            del held
            pipe.send(moment)


@WAYS
@pytest.mark.parametrize("by_view", [False, True])
def test_a_reader_in_another_process_that_lets_go_wakes_the_put(
    stores: Stores, way: Callable[..., None], by_view: bool
) -> None:
    writer = stores.create(CAPACITY)
    ours, theirs = multiprocessing.Pipe()
    child = Child(let_go_when_wanted, writer.handle, by_view, theirs)
    late = []
    try:
        for i in range(9):
            ours.send(writer.put(f"held{i}", ALL).to_bytes())
            assert ours.recv() == "ready"
            way(writer, f"new{i}", timeout=LONG)
            late.append(time.monotonic() - ours.recv())
            writer.cancel_all()
        ours.send(None)
        child.join()
    finally:
        child.kill()
        ours.close()
        theirs.close()
    assert statistics.median(late) < LOOK / 2
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
    with raises(StoreFullError, ["rank 0", str(span_of("held", ALL)), f"{4 * LOOK:g} seconds"]) as caught:
        way(writer, "new", timeout=4 * LOOK)
    assert 4 * LOOK <= time.monotonic() - start < LONG
    assert {0: span_of("held", ALL)} == caught.value.held_bytes_by_rank
    assert before == (seen(writer)[0], dataclasses.replace(seen(writer)[1], refusals=0))
    assert 1 == writer.stats().refusals
    assert not waits(writer.name)
    writer.check_valid()


# ---- this process


@WAYS
def test_an_interrupt_ends_the_wait_and_leaves_nothing(
    holder: tuple[ObjectStoreWriter, Child], way: Callable[..., None]
) -> None:
    writer, child = holder
    before = seen(writer)
    start = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        meanwhile(writer.name, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)),
    ):
        way(writer, "new", timeout=math.inf)
    assert time.monotonic() - start < LONG
    assert before == seen(writer)
    assert not waits(writer.name)
    child.kill()
    way(writer, "new")
    writer.check_valid()


# ---- what does not wait


@WAYS
def test_a_put_after_one_that_waited_does_not_wait(stores: Stores, way: Callable[..., None]) -> None:
    writer = stores.create(CAPACITY)
    held = writer.put("held", ALL)
    with meanwhile(writer.name, lambda: writer.cancel(held)):
        writer.put("new", ALL, timeout=LONG)
    start = time.monotonic()
    with pytest.raises(StoreFullError, match=r"^(?!.*seconds)"):
        way(writer, "newer")
    assert time.monotonic() - start < LONG / 2
