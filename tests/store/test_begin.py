"""An object that is begun now and committed later: `begin`, in any order, however it ends; and `unless_stored`."""

import gc
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from shmstore import (
    ObjectExistsError,
    ObjectStoreReader,
    ObjectStoreWriter,
    Reservation,
    ReservationEndedError,
    StoreClosedError,
    StoreFullError,
    TensorSpec,
    WriterActiveError,
)
from shmstore.inspect.verify import verify
from tests.support import Stores, crowd, in_child, is_held, raises, run_all

CAPACITY = 1 << 16
HALF = TensorSpec((30_000,), np.dtype(np.uint8))


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    return stores.create(CAPACITY)


def begun(writer: ObjectStoreWriter, key: str = "a", mark: int = 7) -> Reservation:
    """Begin and fill half a store."""
    reservation = writer.begin(key, HALF)
    reservation.value[:] = mark
    return reservation


def read(writer: ObjectStoreWriter, reader: ObjectStoreReader, key: str) -> set[int]:
    return set(reader.get(writer.get_cached(key)).tolist())


# ---- begin, commit, abort


def test_it_ends_once(stores: Stores, writer: ObjectStoreWriter) -> None:
    committed = begun(writer)
    committed.commit()
    committed.abort()
    assert ["a"] == writer.keys()
    aborted = begun(writer, "b")
    aborted.abort()
    aborted.abort()
    assert aborted.value is None
    for reservation, key in ((committed, "a"), (aborted, "b")):
        with raises(ReservationEndedError, names=[key]):
            reservation.commit()
    assert ["a"] == writer.keys()
    writer.check_valid()


def test_two_of_one_thread_end_in_any_order_while_the_ring_turns(stores: Stores, writer: ObjectStoreWriter) -> None:
    small = TensorSpec((10_000,), np.dtype(np.uint8))
    first, second = writer.begin("first", small), writer.begin("second", small)
    crowd(writer, 20)
    first.value[:], second.value[:] = 1, 2
    crowd(writer, 20)
    assert 0 == writer.stats().refusals
    report = verify(writer.name)
    assert report.ok
    second.commit()
    first.commit()
    reader = stores.attach(writer)
    assert [{1}, {2}] == [read(writer, reader, key) for key in ("first", "second")]
    writer.check_valid()


def test_its_bytes_are_nobody_elses_until_it_ends(writer: ObjectStoreWriter) -> None:
    reservations = [begun(writer, key) for key in "ab"]
    with pytest.raises(StoreFullError):
        writer.begin("c", HALF)
    threading.Timer(0.05, reservations[0].abort).start()
    with writer.begin("c", HALF, timeout=60):  # the abort wakes it
        pass
    reservations[1].abort()
    assert not is_held(writer)


def test_a_block_commits_on_a_clean_exit_and_aborts_on_an_exception(writer: ObjectStoreWriter) -> None:
    with begun(writer, "a"):
        pass
    with pytest.raises(ZeroDivisionError), begun(writer, "b"):
        raise ZeroDivisionError
    with begun(writer, "b") as reservation:
        reservation.abort()
    with begun(writer, "c") as reservation:
        reservation.commit()
    assert ["c"] == [key for key in writer.keys() if key != "a"]
    with pytest.raises(TypeError):
        pickle.dumps(reservation)


def test_garbage_aborts_once_nobody_can_write_any_more(writer: ObjectStoreWriter) -> None:
    reservation = begun(writer)
    view = reservation.value[5:]
    del reservation
    assert is_held(writer)
    view[:] = 1
    del view
    assert not is_held(writer)
    cycle: list[Any] = [begun(writer)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert not is_held(writer)


# ---- threads


@pytest.mark.usefixtures("often")
def test_of_threads_that_begin_one_key_or_end_one_reservation_one_succeeds(writer: ObjectStoreWriter) -> None:
    for _ in range(50):
        got: list[Reservation] = []
        ends: list[str] = []

        def begin(got: list[Reservation] = got) -> None:
            with suppress(ObjectExistsError):
                got.append(begun(writer))

        run_all(begin, begin)
        (one,) = got

        def commit(one: Reservation = one, ends: list[str] = ends) -> None:
            try:
                one.commit()
            except ReservationEndedError:
                return
            ends.append("committed")

        run_all(commit, one.abort, commit, one.abort)
        assert (len(ends), ends != []) == (int(ends != []), "a" in writer)
        writer.check_valid()
        writer.delete("a")
        assert not is_held(writer)


# ---- ends of the writer and of processes


def test_a_closed_writer_commits_nothing_and_has_a_successor_once_all_have_ended(
    stores: Stores, writer: ObjectStoreWriter
) -> None:
    first, second = begun(writer, "a"), begun(writer, "b")
    writer.close(unlink=False)
    with pytest.raises(StoreClosedError):
        first.commit()
    with pytest.raises(ReservationEndedError):
        first.commit()
    with pytest.raises(WriterActiveError):
        stores.recover(writer.handle)
    second.abort()
    assert not is_held(stores.recover(writer.handle))


def test_a_forked_child_neither_commits_nor_aborts(stores: Stores, writer: ObjectStoreWriter) -> None:
    reservations = [begun(writer, key) for key in "ab"]

    def child() -> None:
        with pytest.raises(StoreClosedError):
            reservations[0].commit()
        reservations[1].abort()
        reservations.clear()
        gc.collect()

    in_child(child)
    reader = stores.attach(writer)
    for reservation, key in zip(reservations, "ab", strict=True):
        reservation.commit()
        assert {7} == read(writer, reader, key)


def test_a_forked_child_may_leave_the_blocks_that_it_was_forked_in(stores: Stores, writer: ObjectStoreWriter) -> None:
    blocks = begun(writer, "a"), writer.reserve("b", 1)
    with blocks[0], blocks[1]:
        in_child(lambda: [block.__exit__(None, None, None) for block in blocks])
        assert [] == writer.keys()
    assert ["a", "b"] == sorted(writer.keys())


# ---- unless_stored


def _reserve(writer: ObjectStoreWriter, key: str, **options: Any) -> None:
    with writer.reserve(key, HALF, **options):
        pass


WAYS: dict[str, Callable[..., object]] = {
    "put": lambda writer, key, **options: writer.cancel(writer.put(key, 1, **options)),
    "put of a strided array": lambda writer, key, **options: writer.put(key, np.zeros((9, 9)).T, **options),
    "reserve": _reserve,
    "begin": lambda writer, key, **options: writer.begin(key, HALF, **options).commit(),
}


@pytest.mark.parametrize("way", WAYS)
def test_unless_stored_looks_in_all_arenas(stores: Stores, way: str) -> None:
    other = stores.create(CAPACITY, n_writers=2)
    writer = stores.keep(ObjectStoreWriter.join(other.handle))
    store = WAYS[way]
    other.put("a", 1)
    other.put("a", 1, namespace="n")
    unfinished = begun(other, "b")
    for namespace in (None, "n"):
        before = writer.stats()
        with raises(ObjectExistsError, names=["a"]):
            store(writer, "a", unless_stored=True, namespace=namespace)
        assert before == writer.stats()
    store(writer, "a", unless_stored=True, namespace="m")
    store(writer, "a")  # the call before it has left no trace
    store(writer, "b", unless_stored=True)  # not stored yet, so it guards nothing
    unfinished.commit()
    with raises(ObjectExistsError, names=["b"]):
        store(writer, "b", unless_stored=True)
    other.delete("b")
    assert other.is_cached("a")
    store(writer, "b", unless_stored=True)
    writer.check_valid()


def test_who_waits_for_room_is_told_when_another_writer_has_stored_it(stores: Stores) -> None:
    other = stores.create(CAPACITY, n_writers=2)
    writer = stores.keep(ObjectStoreWriter.join(other.handle))
    full = [begun(writer, key) for key in ("x", "y")]
    threading.Timer(0.05, other.put, ("a", 1)).start()
    with pytest.raises(ObjectExistsError):
        writer.put("a", np.zeros(30_000, np.uint8), unless_stored=True, timeout=60)
    del full
