"""An interrupt (Ctrl-C, a timeout's signal) may come after any call in the store's Python, and leaves nothing."""

import gc
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, refs, store
from shmstore.bindings import inspect as native_inspect
from shmstore.bindings import store as native
from tests.interrupts import Second, interrupted_at
from tests.support import is_mapped, segments, store_name

BINDINGS = native.__file__
STORE = store.__file__
REFS = refs.__file__


@pytest.mark.parametrize("size", [3, 300])
def test_evicted_keys_whose_taking_is_interrupted_come_with_the_next(size: int) -> None:
    number, taken = 0, list[str]()
    with ObjectStoreWriter.create(store_name(), capacity=64 * 1024, n_readers=1) as writer:
        writer.track_evictions()
        while True:
            number += 1
            expected = [f"{number}-{i}".ljust(size, ".") for i in range(3)]
            for key in expected:
                writer.put(key, 1)
                writer.delete(key)
            taken.clear()
            interrupted = interrupted_at(number, lambda: taken.extend(writer._writer.take_evicted()), BINDINGS)
            assert [] == taken or not interrupted
            taken.extend(writer.take_evicted())
            assert expected == taken, f"interrupt {number}"
            assert [] == writer.take_evicted()
            writer.cancel_all()
            if not interrupted:
                break
    assert number > 5


def test_evicted_keys_come_once_though_who_interrupts_their_taking_takes_some_too() -> None:
    number, taken = 0, list[str]()
    with ObjectStoreWriter.create(store_name(), capacity=64 * 1024, n_readers=1) as writer:
        writer.track_evictions()

        def leave(key: str) -> None:
            writer.put(key, 1)
            writer.delete(key)

        def handler() -> None:
            leave("meanwhile")
            taken.extend(writer.take_evicted())

        while True:
            number += 1
            leave("first")
            taken.clear()
            take = lambda: taken.extend(writer._writer.take_evicted())  # noqa: E731
            if not interrupted_at(number, take, BINDINGS, only=("take_evicted",), handler=handler):
                break
            taken.extend(writer.take_evicted())
            assert ["first", "meanwhile"] == sorted(taken), f"interrupt {number}"
            writer.cancel_all()
    assert number > 3


def test_evicted_keys_whose_taking_was_interrupted_are_forgotten_with_the_others() -> None:
    with ObjectStoreWriter.create(store_name(), capacity=64 * 1024, n_readers=1) as writer:
        for number in range(1, 8):
            writer.track_evictions()
            writer.put("gone", 1)
            writer.delete("gone")
            assert interrupted_at(number, writer._writer.take_evicted, BINDINGS)
            writer.track_evictions(False)
            assert [] == writer.take_evicted(), f"interrupt {number}"
            writer.cancel_all()


def _reserve(writer: ObjectStoreWriter) -> None:
    with writer.reserve("new", np.zeros(9, np.uint8)) as views:
        views[:] = 1


ACTIONS: dict[str, Callable[[ObjectStoreWriter], Any]] = {
    "put": lambda writer: writer.put("new", np.zeros(9, np.uint8)),
    "put of a strided array": lambda writer: writer.put("new", np.zeros(9, np.uint8)[::2]),
    "reserve": _reserve,
    "get_cached": lambda writer: writer.get_cached("old"),
}


def what_stands(writer: ObjectStoreWriter) -> tuple[int, int, int, list[str]]:
    stats = writer.stats()
    return stats.objects, stats.used_bytes, stats.open_leases, writer.keys()


@pytest.mark.parametrize("name", ACTIONS)
def test_a_put_that_is_interrupted_leaves_the_store_as_it_was(name: str) -> None:
    number = 0
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        writer.put("old", np.zeros(9, np.uint8))
        while True:
            number += 1
            before = what_stands(writer)
            if not interrupted_at(number, lambda: ACTIONS[name](writer), BINDINGS, REFS):
                break
            assert before == what_stands(writer), f"interrupt {number}"
            writer.check_valid()
    assert number > 3


@pytest.mark.timeout(method="thread")  # the other way has the same timer
@pytest.mark.parametrize("name", ACTIONS)
def test_a_put_whose_interrupt_is_interrupted_leaves_the_store_as_it_was(name: str) -> None:
    number, interrupted = 0, True
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        writer.put("old", np.zeros(9, np.uint8))
        before = what_stands(writer)
        while interrupted:
            number += 1
            for delay in range(1, 101):  # it comes when it comes
                with Second(delay // 2 + 1, BINDINGS, STORE, REFS) as second:
                    interrupted = interrupted_at(
                        number, lambda: ACTIONS[name](writer), BINDINGS, STORE, REFS, exact=True, handler=second.start
                    )
                if not interrupted:
                    break
                assert before == what_stands(writer), f"interrupt {number}, and {delay} us later"
                writer.check_valid()
    assert number > 3


def test_a_put_whose_late_protection_is_interrupted_leaves_the_store_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 0
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        writer.put("old", np.zeros(9, np.uint8))

        def begins_meanwhile(packed: bytes) -> ObjectRef:
            block.__enter__()  # as another thread may, after the put has looked for blocks
            return refs.trusted_ref(packed)

        monkeypatch.setattr(store, "trusted_ref", begins_meanwhile)
        while True:
            number += 1
            before = writer.stats()
            block = writer.protect(["new"])
            late = ("_protect_late", "guard", "set")
            interrupted = interrupted_at(number, lambda: ACTIONS["put"](writer), BINDINGS, STORE, only=late)
            block.__exit__(None, None, None)
            after = writer.stats()
            if not interrupted:
                break
            assert (before.objects, before.used_bytes, before.open_leases, ["old"]) == (
                after.objects,
                after.used_bytes,
                after.open_leases,
                writer.keys(),
            ), f"interrupt {number}"
            writer.check_valid()
    assert number > 5


def test_a_creation_that_is_interrupted_leaves_no_store() -> None:
    name, number = store_name(), 1
    made: list[ObjectStoreWriter] = []
    while interrupted_at(
        number, lambda: made.append(ObjectStoreWriter.create(name, capacity=6400, n_readers=1)), BINDINGS
    ):
        assert name not in segments(), f"interrupt {number}"
        number += 1
    made[0].close()
    assert number > 5


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_creation_that_is_interrupted_when_the_store_is_there_leaves_none() -> None:
    number = 0
    made: list[ObjectStoreWriter] = []
    while True:
        number += 1
        name = store_name()
        create = lambda name=name: made.append(ObjectStoreWriter.create(name, capacity=6400, n_readers=1))  # noqa: E731
        if not interrupted_at(number, create, STORE, exact=True, only=("create", "__init__")):
            break
        assert name not in segments(), f"interrupt {number}"
    made[0].close()
    assert number > 5


def test_a_takeover_that_is_interrupted_leaves_no_lock() -> None:
    name, number = store_name(), 1
    ObjectStoreWriter.create(name, capacity=6400, n_readers=1).close(unlink=False)
    while interrupted_at(number, lambda: native.Writer.recover(name, native.ANY_STORE), BINDINGS):
        ObjectStoreWriter.recover(name).close(unlink=False)
        number += 1
    ObjectStoreWriter.recover(name).close()
    assert number > 5


def test_an_attachment_that_is_interrupted_leaves_no_lock() -> None:
    number = 1
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        while interrupted_at(number, lambda: native.Reader.attach(writer.name, 0, native.ANY_STORE), BINDINGS):
            ObjectStoreReader.attach(writer.handle).close()
            number += 1
    assert number > 5


def test_an_inspection_whose_opening_is_interrupted_leaves_nothing_mapped() -> None:
    number = 1
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        writer.close(unlink=False)
        while interrupted_at(number, lambda: native_inspect.Inspector(writer.name), native_inspect.__file__, BINDINGS):
            gc.collect()  # of the interrupted frames
            assert not is_mapped(writer.name), f"interrupt {number}"
            number += 1
        ObjectStoreWriter.recover(writer.name).close()
    assert number > 5


def test_a_get_that_is_interrupted_keeps_no_pin() -> None:
    number = 1
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        ref = writer.put("old", np.zeros(9, np.uint8))
        with ObjectStoreReader.attach(writer.handle) as reader:
            while interrupted_at(number, lambda: reader.get(ref), BINDINGS, STORE):
                assert 0 == reader.stats().live_views, f"interrupt {number}"
                number += 1
            assert 0 == reader.stats().live_views
    assert number > 5


def test_a_close_that_is_interrupted_gives_the_memory_back_all_the_same() -> None:
    writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
    reader = ObjectStoreReader.attach(writer.handle)
    for opened in (reader, writer):
        assert interrupted_at(1, opened.close, BINDINGS, exact=True, only=("close",))
        opened.close()
    gc.collect()  # of the interrupted frames
    assert not is_mapped(writer.name)


def test_a_protect_block_that_is_interrupted_protects_no_longer() -> None:
    def protect() -> None:
        with writer.protect(["old", "absent", "new"]):
            writer.put("new", np.zeros(900, np.uint8))

    number = 0
    while True:
        number += 1
        with ObjectStoreWriter.create(store_name(), capacity=2048, n_readers=1) as writer:
            writer.put("old", np.zeros(900, np.uint8))
            writer.cancel_all()
            interrupted = interrupted_at(number, protect, BINDINGS, STORE)
            writer.cancel_all()
            for key in "abc":
                writer.cancel(writer.put(key, np.zeros(900, np.uint8)))  # StoreFullError: still protected
            assert "old" not in writer, f"interrupt {number}"
            assert {} == writer._blocks or interrupted
            with writer.protect(["b"]):
                pass
            assert {} == writer._blocks, "the dead are forgotten at the next occasion"
            writer.check_valid()
        if not interrupted:
            break
    assert number > 20


def _protect_after_a_forgotten_block(writer: ObjectStoreWriter) -> None:
    block = writer.protect(["forgotten"])
    block.__enter__()
    garbage: list[Any] = [block]
    garbage.append(garbage)
    del block, garbage
    with writer.protect(["kept"]):
        pass


def test_a_forgotten_protect_block_may_end_while_another_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collecting(store._Block):
        def __init__(self, keys: Iterable[bytes]) -> None:
            gc.collect()  # as any allocation may
            super().__init__(keys)

    monkeypatch.setattr(store, "_Block", Collecting)
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        thread = threading.Thread(target=_protect_after_a_forgotten_block, args=(writer,), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "the collector waits for a lock that its own thread holds"
        assert {} == writer._blocks
