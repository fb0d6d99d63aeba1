"""Events: what a router learns of a store, from which position, and what a slow one is told."""

import random
import threading
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest

from shmstore import EventsLostError, ObjectStoreWriter, StoreEvent
from tests.support import Stores, raises, run_all, store_name

VALUE = np.zeros(900, np.uint8)


class Router:
    """Keeps the keys of a store up to date, as a router would."""

    def __init__(self, writer: ObjectStoreWriter) -> None:
        self.writer = writer
        self.position: int | None = None
        self.stored: dict[str, int] = {}
        self.restarts = 0

    def poll(self) -> None:
        try:
            self.use(self.writer.events(self.position))
        except EventsLostError:
            self.restarts += 1
            self.position, self.stored = None, {}
            self.use(self.writer.events())

    def use(self, events: Iterable[StoreEvent]) -> None:
        for event in events:
            if event.kind == "put":
                self.stored[event.key] = event.object_id
            elif self.stored.get(event.key) == event.object_id:
                del self.stored[event.key]
            self.position = event.position


def small(stores: Stores, capacity: int = 8192) -> ObjectStoreWriter:
    writer = stores.create(capacity, n_readers=1)
    writer.retire(0)
    return writer


def told(events: Iterable[StoreEvent]) -> list[tuple[str, str, int]]:
    return [(event.kind, event.key, event.object_id) for event in events]


def test_what_is_stored_comes_first_and_then_what_comes_and_goes(stores: Stores) -> None:
    writer = small(stores, 3072)
    ids = {key: writer.put(key, VALUE).monotonic_id for key in "abc"}
    first = list(writer.events())
    assert [("put", key, ids[key]) for key in "abc"] == told(first)
    at = first[-1].position
    assert {at} == {event.position for event in first}
    assert [] == list(writer.events(at))
    ids["d"] = writer.put("d", VALUE).monotonic_id
    assert writer.delete("c")
    writer.clear()
    expected = [("evicted", "a"), ("put", "d"), ("deleted", "c"), ("deleted", "b"), ("deleted", "d")]
    found = list(writer.events(at))
    assert sorted((kind, key, ids[key]) for kind, key in expected) == sorted(told(found))
    assert [("evicted", "a"), ("put", "d"), ("deleted", "c")] == [(e.kind, e.key) for e in found[:3]]
    assert list(range(at + 1, at + 6)) == [event.position for event in found]
    for number in range(5):  # from each position, as often as one likes
        assert found[number:] == list(writer.events(at + number))


def test_a_put_that_is_not_committed_is_no_event_and_an_undone_one_is_deleted(stores: Stores) -> None:
    writer = small(stores)
    writer.track_events()
    with pytest.raises(ZeroDivisionError), writer.reserve("rolled back", VALUE):
        raise ZeroDivisionError
    batch = writer._writer.batch()
    batch.put(b"undone", b"m", 0, [])
    batch.undo()
    at = next(writer.events(), None)
    assert at is None
    put = writer.put("kept", VALUE).monotonic_id
    end = next(writer.events()).position
    found = list(writer.events(end - 3))
    assert ["put", "deleted", "put"] == [event.kind for event in found]
    assert ["undone", "undone", "kept"] == [event.key for event in found]
    assert (found[0].object_id, put) == (found[1].object_id, found[2].object_id)


@pytest.mark.parametrize("log_bytes", [1, 4 << 20])
def test_routers_at_any_pace_know_what_is_stored(stores: Stores, log_bytes: int) -> None:
    """Of two logs, a small one loses events to the slow routers, and a large one does not."""
    writer = small(stores, 64 << 10)
    writer.track_events(log_bytes)
    routers = [Router(writer) for _ in range(4)]
    choose = random.Random(3)
    for number in range(8000):
        key = f"{choose.randrange(200):064d}"
        if key not in writer:
            writer.put(key, VALUE)
        elif choose.random() < 0.1:
            writer.delete(key)
        else:
            writer.get_cached(key)
        for router, pace in zip(routers, (1, 10, 500, 7999), strict=True):
            if number % pace == 0:
                router.poll()
    for router in routers:
        router.poll()
        assert set(writer.keys()) == set(router.stored)
        for key, object_id in router.stored.items():
            assert object_id == writer.get_cached(key).monotonic_id
    assert (log_bytes == 1) == (routers[-1].restarts > 0)
    assert 0 == routers[0].restarts


def test_a_slow_listener_is_told_how_much_it_has_lost(stores: Stores) -> None:
    writer = small(stores)
    writer.track_events(1)  # at least 128 KiB
    writer.put("first", VALUE)
    at = next(writer.events()).position
    for number in range(3000):
        writer.put(f"{number:064d}", VALUE)
    with raises(EventsLostError, names=["lost"], hint=["events()"]) as caught:
        list(writer.events(at))
    lost = caught.value.lost
    assert lost is not None
    rest = list(writer.events(at + lost))
    end = list(writer.events())[-1].position
    assert end - at - lost == len(rest) < 3000
    events = writer.events(end - len(rest))
    next(events)
    for number in range(3000):
        writer.put(f"{number:064d}", VALUE)
    with pytest.raises(EventsLostError):  # also in the middle of an iteration
        list(events)


def test_a_successor_tells_the_listeners_of_the_dead_writer(stores: Stores) -> None:
    writer = small(stores)
    writer.put("a", VALUE)
    router = Router(writer)
    router.poll()
    writer.close(unlink=False)
    router.writer = stores.recover(writer.name)
    router.poll()
    assert (1, ["a"]) == (router.restarts, list(router.stored))
    router.writer.put("b", VALUE)
    router.poll()
    assert (1, ["a", "b"]) == (router.restarts, list(router.stored))


def test_nothing_is_recorded_until_somebody_asks_and_after_a_stop(stores: Stores) -> None:
    writer = small(stores)
    writer.put("before", VALUE)
    assert [("put", "before", 1)] == told(writer.events())
    at = next(writer.events()).position
    writer.track_events(0)
    writer.put("unseen", VALUE)
    with pytest.raises(EventsLostError) as caught:
        list(writer.events(at))
    assert 1 == caught.value.lost


def test_a_listener_of_a_store_that_was_created_again_is_told() -> None:
    name = store_name()
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1) as writer:
        writer.track_events()
        for number in range(100):
            writer.put(str(number), VALUE)
        old = list(writer.events())[-1].position
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1) as writer:
        writer.track_events()
        for number in range(200):
            writer.put(str(number), VALUE)
        with pytest.raises(EventsLostError):
            list(writer.events(old))
        assert 200 == len(list(writer.events()))


def test_a_namespaced_key_comes_in_two_parts(stores: Stores) -> None:
    writer = small(stores)
    batch = writer._writer.batch()
    batch.put(b"\xff\x07tenant1" + "ключ".encode(), b"m", 0, [])
    batch.record.keep = 1
    event = next(writer.events())
    assert ("tenant1", "ключ") == (event.namespace, event.key)


def test_listeners_and_writers_in_many_threads(stores: Stores) -> None:
    writer = small(stores, 64 << 10)
    done = threading.Event()
    routers = [Router(writer) for _ in range(2)]

    def route(router: Router) -> None:
        while not done.is_set():
            router.poll()

    def write(number: int) -> None:
        for i in range(1500):
            writer.put(f"{number}-{i}", VALUE)

    def writes() -> None:
        try:
            run_all(partial(write, 0), partial(write, 1))
        finally:
            done.set()

    run_all(writes, *(partial(route, router) for router in routers))
    for router in routers:
        router.poll()
        assert set(writer.keys()) == set(router.stored)
