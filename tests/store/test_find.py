"""What a rank finds by key stays as long as it holds it, whoever stored it, and however the finder ends."""

import gc
import pickle
from typing import Any

import numpy as np
import pytest

from shmstore import (
    ObjectExistsError,
    ObjectStoreReader,
    ObjectStoreWriter,
    PinnedRef,
    RankInUseError,
    StaleRefError,
    StoreClosedError,
)
from shmstore.inspect.inspector import StoreInspector
from tests.support import Stores, is_held

HALF = 500_000
"""Bytes of an object; the store has room for two."""


def value(mark: int) -> np.ndarray:
    return np.full(HALF, mark, np.uint8)


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    return stores.create(n_readers=2)


@pytest.fixture
def reader(stores: Stores, writer: ObjectStoreWriter) -> ObjectStoreReader:
    return stores.attach(writer, 0)


@pytest.fixture
def finder(stores: Stores, writer: ObjectStoreWriter) -> ObjectStoreReader:
    return stores.attach(writer, 1, finds_only=True)


def put(writer: ObjectStoreWriter, reader: ObjectStoreReader, key: str, mark: int) -> None:
    """Store an object that only a pin can keep."""
    reader.release(writer.put(key, value(mark)))


def found(reader: ObjectStoreReader, key: str, namespace: str | None = None) -> PinnedRef:
    pinned = reader.find(key, namespace=namespace)
    assert pinned is not None
    return pinned


def test_without_a_lease_no_rank_is_awaited_and_the_object_is_found_by_key(
    stores: Stores, writer: ObjectStoreWriter, finder: ObjectStoreReader
) -> None:
    for mark in range(5):  # rank 0 never comes, and there is room for two
        ref = writer.put(f"k{mark}", value(mark), lease=False, namespace="n", kind="image")
        assert 0 == ref.lease == writer.stats().open_leases
        with found(finder, f"k{mark}", "n") as pinned:
            assert ref == pinned.ref
            np.testing.assert_array_equal(value(mark), finder.get(ref))
        assert [True, True, False] == [finder.validate(ref), writer.validate(ref), writer.cancel(ref)]
    with pytest.raises(StaleRefError):
        writer.hold(ref)
    assert writer.get_cached("k4", namespace="n").lease > 0
    with writer.begin("begun", value(0)) as begun:
        ref = begun.commit()
    assert ref == found(finder, "begun").ref
    with pytest.raises(ObjectExistsError):
        writer.put("begun", 1, lease=False)


@pytest.mark.parametrize("more", [{"hold": True}, {"group": 0}])
def test_without_a_lease_nobody_holds_it_and_it_is_for_no_group(writer: ObjectStoreWriter, more: Any) -> None:
    with pytest.raises(TypeError, match="lease=False excludes hold and group"):
        writer.put("a", 1, lease=False, **more)
    assert 0 == len(writer)


def test_an_object_is_found_by_key_and_read_by_its_reference(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, finder: ObjectStoreReader
) -> None:
    put(writer, reader, "a", 7)
    assert finder.find("b") is None
    assert [True, False] == [finder.has("a"), finder.has("b")]
    with found(finder, "a") as pinned:
        assert 0 == pinned.ref.lease
        assert is_held(writer)
        assert (finder.get(pinned.ref) == value(7)).all()
        assert (reader.get(pinned.ref) == value(7)).all()
        assert 0 == writer.stats().open_leases
    pinned.end()
    assert not is_held(writer)
    with pytest.raises(StaleRefError):
        reader.get(pinned.ref)


def test_what_ranks_find_and_do_not_find_is_counted_and_in_the_hit_ratio(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, finder: ObjectStoreReader
) -> None:
    put(writer, reader, "a", 7)
    with StoreInspector.open(writer.name) as seen:
        assert 0 == seen.facts().lookups
        for key in ("a", "a", "b"):
            finder.find(key)
        found(reader, "a").end()
        facts = seen.facts()
        assert [(1, 0), (2, 1)] == [(rank.finds, rank.find_misses) for rank in seen.readers()]
    assert (3, 1, 4, 3 / 4) == (facts.finds, facts.find_misses, facts.lookups, facts.hit_ratio)
    assert (2, 1) == (finder.stats().finds, finder.stats().find_misses)


def test_namespaces_are_told_apart(writer: ObjectStoreWriter, finder: ObjectStoreReader) -> None:
    writer.put("a", b"1", namespace="one")
    assert finder.find("a") is None
    assert not finder.has("a", namespace="two")
    assert b"1" == finder.get(found(finder, "a", "one").ref)


def test_garbage_ends_the_pin_and_views_hold_for_themselves(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, finder: ObjectStoreReader
) -> None:
    put(writer, reader, "a", 7)
    pinned = found(finder, "a")
    view = finder.get(pinned.ref)
    del pinned
    gc.collect()
    assert is_held(writer)
    assert (view == value(7)).all()
    del view
    gc.collect()
    assert not is_held(writer)


def test_a_pin_outlives_its_reader_and_belongs_to_its_process(
    stores: Stores, writer: ObjectStoreWriter, reader: ObjectStoreReader, finder: ObjectStoreReader
) -> None:
    put(writer, reader, "a", 7)
    pinned = found(finder, "a")
    with pytest.raises(TypeError):
        pickle.dumps(pinned)
    finder.close()
    with pytest.raises(StoreClosedError):
        finder.find("a")
    with pytest.raises(RankInUseError):
        stores.attach(writer, 1)
    assert is_held(writer)
    pinned.end()
    stores.attach(writer, 1)
    assert not is_held(writer)


def test_each_writers_objects_are_found_and_a_writer_finds_what_others_stored(stores: Stores) -> None:
    first = stores.create(n_writers=2)
    second = stores.keep(ObjectStoreWriter.join(first.handle))
    reader = stores.attach(first)
    second.put("a", b"1")
    first.put("b", b"2")
    assert [b"1", b"2"] == [reader.get(found(reader, key).ref) for key in "ab"]
    assert first.find("c") is None
    before = first.stats().open_leases
    leased = first.find("a")
    assert leased is not None
    assert b"1" == reader.get(leased.ref)
    assert before + 1 == first.stats().open_leases
    del leased
    gc.collect()
    assert before == first.stats().open_leases
