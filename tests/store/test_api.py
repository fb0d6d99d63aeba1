"""The store's public names: signatures, results, errors, and that a refusal changes nothing."""

import dataclasses
import gc
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import shmstore
from shmstore import (
    LayoutMismatchError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    ObjectTooLargeError,
    StaleRefError,
    StoreClosedError,
    StoreExistsError,
    StoreFullError,
    StoreNotFoundError,
    TensorSpec,
)
from tests.support import (
    Stores,
    crowd,
    raises,
    random_tensor,
    run_all,
    segments,
    span_of,
    state,
    store_name,
)

# ---- puts and their errors


def refusals(writer: ObjectStoreWriter) -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    """Every call on a writer that must be refused: the error, what it says, the call."""
    big = torch.zeros(3000, dtype=torch.uint8)
    ref = writer.put("there", torch.zeros(100, dtype=torch.uint8))
    return {
        "exists": (ObjectExistsError, "already exists in the storage", lambda: writer.put("there", 1)),
        "exists, reserved": (ObjectExistsError, "already exists", lambda: writer.reserve("there", 1).__enter__()),
        "too large": (ObjectTooLargeError, "2000", lambda: writer.put("x", big)),
        "too large, reserved": (ObjectTooLargeError, "2000", lambda: writer.reserve("x", big).__enter__()),
        "larger than anything": (
            ObjectTooLargeError,
            "exceed",
            lambda: writer.reserve("x", TensorSpec((2**40,), torch.int64)).__enter__(),
        ),
        "metadata too large": (ObjectTooLargeError, "exceed", lambda: writer.put("x", "x" * 3000)),
        "not found": (ObjectNotFoundError, "no object of this key", lambda: writer.get_cached("absent")),
        "type": (
            TypeError,
            r"value\['a'\]\[2\]: no serializer for object",
            lambda: writer.put("x", {"a": [1, 2, object()]}),
        ),
        "template": (TypeError, "no serializer", lambda: writer.reserve("x", [object()]).__enter__()),
        "key bytes": (TypeError, "a key must be a str, not bytes", lambda: writer.put(b"x", 1)),  # type: ignore[arg-type]
        "key None": (TypeError, "not NoneType", lambda: writer.get_cached(None)),  # type: ignore[arg-type]
        "key int": (TypeError, "not int", lambda: writer.is_cached(3)),  # type: ignore[arg-type]
        "key empty": (ValueError, "empty", lambda: writer.put("", 1)),
        "key surrogate": (ValueError, "surrogates", lambda: writer.put("\ud800", 1)),
        "protect int": (TypeError, "not int", lambda: writer.protect(["there", 3]).__enter__()),  # type: ignore[list-item]
        "protect empty": (ValueError, "empty", lambda: writer.protect(["there", ""]).__enter__()),
        "cancel bytes": (TypeError, "expected an ObjectRef, not bytes", lambda: writer.cancel(ref.to_bytes())),  # type: ignore[arg-type]
        "cancel None": (TypeError, "not NoneType", lambda: writer.cancel(None)),  # type: ignore[arg-type]
    }


def test_every_refusal_has_its_error_and_changes_nothing(stores: Stores) -> None:
    writer = stores.create(4096, n_readers=2, max_object_size=2000)
    for name, (error, text, call) in refusals(writer).items():
        before = state(writer)
        with pytest.raises(error, match=text):
            call()
        after = state(writer)
        if name == "not found":
            before = before[0], dataclasses.replace(before[1], misses=before[1].misses + 1)
        assert before == after, name
        writer.check_valid()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_put_that_fails_while_the_bytes_are_written_leaves_the_store_as_it_was(
    stores: Stores, error: type[BaseException]
) -> None:
    class Failing(shmstore.MsgpackSerde):
        def fill(self, dst: Any, source: Any) -> None:
            memoryview(dst)[:1] = b"x"
            raise error

    writer = stores.create(n_readers=1, serde=Failing())
    writer.put("a", torch.ones(10))
    before = state(writer)
    for protected in ([], ["b"]):
        with writer.protect(protected), pytest.raises(error):
            writer.put("b", torch.arange(100).reshape(10, 10).T)
        after = state(writer)
        assert before[0] == after[0]
        assert dataclasses.replace(before[1], next_id=after[1].next_id) == after[1]
        writer.check_valid()
    assert writer.put("b", torch.ones(10)).monotonic_id > before[1].next_id


# ---- looking


def test_questions_change_no_order_and_no_count(stores: Stores) -> None:
    writer = stores.create(4096, n_readers=1)
    reader = stores.attach(writer)
    assert writer, "an empty store is a store"
    ref = writer.put("a", 1)
    before, read_before = state(writer), reader.stats()
    for _ in range(3):
        assert writer.is_cached("a")
        assert not writer.is_cached("b")
        assert "a" in writer
        assert "b" not in writer
        assert [False] * 4 == [key in writer for key in ("", 5, None, "x" * 100_000)]
        assert 1 == len(writer)
        assert reader.validate(ref)
        assert ["a"] == writer.keys()
    assert (before, read_before) == (state(writer), reader.stats())


def test_every_figure_counts_what_its_docstring_says(stores: Stores) -> None:
    writer = stores.create(8000, n_readers=2, max_object_size=6000, max_objects=50)
    first = writer.stats()
    assert (8000, 6000, 50, 2) == (first.capacity, first.max_object_size, first.max_objects, first.n_readers)
    assert (1, 1, 0, 0, 0.0) == (first.next_id, first.next_lease, first.objects, first.used_bytes, first.hit_ratio)
    value = torch.zeros(3000, dtype=torch.uint8)
    a = writer.put("a", value)
    writer.get_cached("a")
    with pytest.raises(ObjectNotFoundError):
        writer.get_cached("b")
    assert writer.cancel(a)
    stats = writer.stats()
    expected = {
        "objects": 1,
        "used_bytes": span_of("a", value),
        "next_id": 2,
        "next_lease": 3,
        "open_leases": 1,
        "puts": 1,
        "put_bytes": 3000,
        "hits": 1,
        "misses": 1,
        "cancels": 1,
    }
    assert dataclasses.asdict(first) | expected == dataclasses.asdict(stats)
    assert 0.5 == stats.hit_ratio
    with pytest.raises(StoreFullError):
        writer.put("c", torch.zeros(5500, dtype=torch.uint8))
    writer.retire(0)
    writer.retire(1)
    writer.put("c", torch.zeros(5500, dtype=torch.uint8))
    assert writer.delete("c")
    last = writer.stats()
    assert (1, 1, span_of("a", value), 1) == (last.refusals, last.evictions, last.evicted_bytes, last.deletes)
    assert (0, 0, 0) == (last.objects, last.used_bytes, last.open_leases)
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.puts = 0  # type: ignore[misc]


def test_a_reader_counts_gets_stale_references_releases_and_views(stores: Stores) -> None:
    writer = stores.create(n_readers=1)
    reader = stores.attach(writer)
    a, b = writer.put("a", torch.ones(3)), writer.put("b", torch.ones(3))
    view = reader.get(a)
    assert reader.release(b)
    assert not reader.release(b)
    with pytest.raises(StaleRefError):
        reader.get(ObjectRef.from_bytes(a.to_bytes()[:-1] + bytes([a.to_bytes()[-1] ^ 1])))
    assert (1, 1, 1, 0, 0, 1) == dataclasses.astuple(reader.stats())
    del view
    assert 0 == reader.stats().live_views
    reader.close()
    again = stores.attach(writer)
    assert (1, 1, 1, 0, 0, 0) == dataclasses.astuple(again.stats())  # the rank's, not the process's


# ---- serializers of the user's own


def test_pickle_stores_any_object_and_only_where_both_sides_ask_for_it(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1, serde=shmstore.PickleSerde())
    ref = writer.put("a", {"set": {1, 2}, "type": ZeroDivisionError, "t": torch.arange(3)})
    plain = stores.attach(writer)
    with pytest.raises(shmstore.CorruptStoreError):
        plain.get(ref)
    assert 0 == plain.stats().live_views
    plain.close()
    value = stores.attach(writer, serde=shmstore.PickleSerde()).get(ref)
    assert ({1, 2}, ZeroDivisionError, [0, 1, 2]) == (value["set"], value["type"], value["t"].tolist())


# ---- handles


def test_a_handle_whose_number_of_ranks_or_store_lies_is_refused(stores: Stores) -> None:
    handle = stores.create(8192, n_readers=2, n_writers=2).handle
    for call in (ObjectStoreReader.attach, ObjectStoreWriter.join):
        with raises(LayoutMismatchError, names=[handle.name, "2 ranks", "100"]):
            call(dataclasses.replace(handle, n_readers=100))
        with pytest.raises(StoreNotFoundError):
            call(dataclasses.replace(handle, store_id=handle.store_id ^ 1))
    with raises(LayoutMismatchError, names=["2 ranks", "100"]):
        ObjectStoreReader.attach(dataclasses.replace(handle, n_readers=100), rank=50)
    assert 1 == stores.keep(ObjectStoreWriter.join(handle)).index
    for rank in (0, 1):
        stores.attach(handle, rank)  # none of them has taken a rank


def test_the_handle_of_a_store_that_was_replaced_finds_nothing_and_disturbs_nobody(stores: Stores) -> None:
    old = stores.create(8192, n_readers=1)
    old.close()
    new = stores.create(8192, n_readers=1, name=old.name)
    new.put("promised", 1)
    with pytest.raises(StoreNotFoundError, match="now another store"):
        ObjectStoreReader.attach(old.handle)
    crowd(new)
    assert "promised" in new, "the rank counts as dead after an attachment that was none of its"
    stores.attach(new)
    with pytest.raises(StoreNotFoundError, match="now another store"):
        ObjectStoreReader.attach(old.handle)
    with pytest.raises(StoreNotFoundError, match="now another store"):
        ObjectStoreWriter.recover(old.handle)
    new.close(unlink=False)
    with pytest.raises(StoreNotFoundError, match="now another store"):
        ObjectStoreWriter.recover(old.handle)
    assert "promised" in stores.recover(new.handle)


# ---- create, close


def test_a_name_that_is_taken_is_left_alone(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    writer.put("a", 1)
    before = state(writer)
    with pytest.raises(StoreExistsError, match=writer.name):
        ObjectStoreWriter.create(writer.name, capacity=4096, n_readers=1)
    assert before == state(writer)
    assert "a" in writer


def every_call(writer: ObjectStoreWriter, reader: ObjectStoreReader, ref: ObjectRef) -> list[Callable[[], Any]]:
    return [
        lambda: writer.put("x", 1),
        lambda: writer.get_cached("a"),
        lambda: writer.is_cached("a"),
        lambda: writer.touch("a"),
        lambda: writer.protect(["a"]).__enter__(),
        lambda: writer.reserve("x", 1).__enter__(),
        lambda: writer.begin("x", 1),
        lambda: writer.cancel(ref),
        lambda: writer.retire(0),
        lambda: writer.delete("a"),
        lambda: writer.clear(),
        lambda: writer.keys(),
        lambda: len(writer),
        lambda: "a" in writer,
        lambda: writer.stats(),
        lambda: writer.check_valid(),
        lambda: reader.get(ref),
        lambda: reader.release(ref),
        lambda: reader.validate(ref),
        lambda: reader.stats(),
    ]


def test_every_call_after_close_is_a_store_closed_error(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    reader = stores.attach(writer)
    ref = writer.put("a", 1)
    writer.close()
    reader.close()
    calls = every_call(writer, reader, ref)
    calls.append(lambda: reader.writer_epoch)
    for number, call in enumerate(calls):
        with pytest.raises(StoreClosedError, match="closed"):
            call()
            pytest.fail(f"call {number}")
    assert "closed" in repr(writer)
    assert "closed" in repr(reader)
    assert (0, writer.handle.store_id) == (reader.rank, ref.store_id)


def test_close_is_idempotent_and_unlinks_once(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    reader = stores.attach(writer)
    reader.close()
    reader.close()
    writer.close()
    assert writer.name not in segments()
    other = stores.create(8192, n_readers=1, name=writer.name)
    writer.close()
    assert other.name in segments()


def test_forgetting_to_close_is_a_resource_warning() -> None:
    writer = ObjectStoreWriter.create(store_name(), capacity=8192, n_readers=1)
    name = writer.name
    reader = ObjectStoreReader.attach(writer.handle)
    with pytest.warns(ResourceWarning, match="ObjectStoreReader.*was not closed"):
        del reader
        gc.collect()
    with pytest.warns(ResourceWarning, match="ObjectStoreWriter.*was not closed"):
        del writer
        gc.collect()
    with ObjectStoreWriter.recover(name) as again:  # it stays in /dev/shm, and nobody has it
        assert [] == again.keys()


def test_writers_and_readers_do_not_pickle(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    for thing in (writer, stores.attach(writer)):
        with pytest.raises(TypeError, match="cannot be pickled; send the writer's `handle`"):
            pickle.dumps(thing)


def test_a_writer_may_be_closed_while_other_threads_use_it(stores: Stores) -> None:
    writer = stores.create(1 << 20, n_readers=1)
    writer.retire(0)

    def work(number: int) -> None:
        value = random_tensor(number, 20000)
        with suppress(StoreClosedError):
            for i in range(10**6):
                writer.put(f"{number}-{i}", value)

    def close() -> None:
        while writer.stats().puts < 200:
            pass
        writer.close()

    run_all(close, *(partial(work, number) for number in range(4)))


@pytest.mark.parametrize(("made", "call"), [("ObjectStoreWriter", "create"), ("ObjectStoreReader", "attach")])
def test_a_class_that_is_called_names_the_call_that_makes_one(made: str, call: str) -> None:
    with raises(TypeError, names=(call,)):
        getattr(shmstore, made)("a", capacity=1)
