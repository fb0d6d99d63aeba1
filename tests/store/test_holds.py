"""Leases that only the writer ends, references that end by themselves, and protected keys."""

import gc
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import (
    LeasedRef,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    RankInUseError,
    StaleRefError,
    StoreClosedError,
)
from shmstore.bindings import store as native
from tests.support import Stores, in_child, is_held, raises

KIB = 1 << 10


def open_leases(writer: ObjectStoreWriter) -> int:
    return writer.stats().open_leases


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    return stores.create(capacity=48 * KIB, n_readers=2)


@pytest.fixture
def readers(stores: Stores, writer: ObjectStoreWriter) -> list[ObjectStoreReader]:
    return [stores.attach(writer, rank) for rank in range(2)]


def read(readers: list[ObjectStoreReader], ref: ObjectRef) -> None:
    for reader in readers * 3:
        assert torch.ones(16 * KIB, dtype=torch.uint8).equal(reader.get(ref))
        reader.release(ref)


VALUE = torch.ones(16 * KIB, dtype=torch.uint8)


@pytest.mark.parametrize("value", [VALUE, torch.ones(32 * KIB, dtype=torch.uint8)[::2]], ids=["spans", "fills"])
def test_a_held_reference_is_read_any_number_of_times_until_the_writer_cancels_it(
    writer: ObjectStoreWriter, readers: list[ObjectStoreReader], value: torch.Tensor
) -> None:
    ways: list[Callable[[], ObjectRef]] = [
        lambda: writer.put("a", value, hold=True),
        lambda: writer.get_cached("a", hold=True),
    ]
    for way in ways:
        ref = way()
        read(readers, ref)
        assert is_held(writer)
        read(readers, ref)
        assert writer.cancel(ref)
        assert not writer.cancel(ref)
    assert not is_held(writer)


def test_garbage_before_it_was_sent_ends_the_lease_and_after_it_does_not(writer: ObjectStoreWriter) -> None:
    unsent, sent = writer.hold(writer.put("a", VALUE)), writer.hold(writer.get_cached("a"))
    sent.sent()
    ref = sent.ref
    del unsent, sent
    gc.collect()
    assert 1 == open_leases(writer)
    assert writer.cancel(ref)
    assert 0 == open_leases(writer)


def test_a_leased_reference_ends_once_whether_sent_or_not(writer: ObjectStoreWriter) -> None:
    for send in (False, True):
        leased = writer.hold(writer.put("a", VALUE) if not send else writer.get_cached("a"))
        if send:
            leased.sent()
        assert [True, False] == [leased.end(), leased.end()]
        leased.sent()
    with writer.hold(writer.get_cached("a")) as leased:
        leased.sent()
        assert 1 == open_leases(writer)
    assert 0 == open_leases(writer)
    assert repr(leased.ref) in repr(leased)
    with raises(TypeError, names=["`ref`"]):
        pickle.dumps(leased)


def test_a_leased_reference_outlives_its_writer(stores: Stores, writer: ObjectStoreWriter) -> None:
    kept, sent, ended = (writer.hold(writer.put(key, 1)) for key in "abc")
    sent.sent()
    ended.end()
    writer.close(unlink=False)
    assert [False, False, False] == [kept.end(), sent.end(), ended.end()]
    ref = kept.ref
    del kept
    heir = stores.recover(writer.name)
    assert 2 == open_leases(heir)
    assert heir.cancel(ref)
    assert 1 == heir.cancel_all()


def test_a_forked_child_ends_no_lease_of_its_parent(writer: ObjectStoreWriter) -> None:
    leased = [writer.hold(writer.put("a", VALUE))]

    def forget() -> bool:
        closed = False
        try:
            leased[0].end()
        except StoreClosedError:
            closed = True
        leased.clear()
        gc.collect()
        return closed

    in_child(forget)
    assert 1 == open_leases(writer)
    assert leased[0].end()


def test_a_lease_that_has_ended_cannot_be_held(
    stores: Stores, writer: ObjectStoreWriter, readers: list[ObjectStoreReader]
) -> None:
    ref = writer.put("a", VALUE)
    writer.cancel(ref)
    with raises(StaleRefError, hint=["hold=True"]):
        writer.hold(ref)
    with (
        stores.create(capacity=KIB, n_readers=1) as other,
        raises(StaleRefError, hint=[f"{other.handle.store_id:08x}"]),
    ):
        other.hold(ref)
    with pytest.raises(TypeError):
        writer.hold("a")  # type: ignore[arg-type]
    late = writer.get_cached("a")
    read(readers, late)
    assert isinstance(writer.hold(late), LeasedRef), "read by all, but not yet ended"


def test_a_reference_is_validated_with_and_without_its_key(stores: Stores, writer: ObjectStoreWriter) -> None:
    ref = writer.put("a", VALUE)
    before = writer.stats()
    assert [True, True, False] == [writer.validate(ref), writer.validate(ref, "a"), writer.validate(ref, "b")]
    assert before == writer.stats()
    writer.cancel(ref)
    assert writer.validate(ref, "a")
    assert not is_held(writer)
    assert not writer.validate(ref, "a")
    with stores.create(capacity=KIB, n_readers=1) as other, pytest.raises(StaleRefError):
        other.validate(ref)


def test_a_reference_travels_as_five_words(writer: ObjectStoreWriter) -> None:
    ref = writer.put("a", VALUE)
    words = ref.to_words()
    assert [int] * 5 == [type(word) for word in words]
    assert all(0 <= word < 1 << 64 for word in words)
    assert ref == ObjectRef.from_words(words) == ObjectRef.from_words(np.array(words, dtype=np.uint64).tolist())
    assert words == pickle.loads(pickle.dumps(words))
    for wrong in (words[:4], (*words, 0), (-1, *words[1:]), (1 << 64, *words[1:]), ("a", *words[1:])):
        with pytest.raises(StaleRefError):
            ObjectRef.from_words(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("by_name", [False, True])
def test_rank_none_is_the_first_free_one(stores: Stores, writer: ObjectStoreWriter, by_name: bool) -> None:
    where = writer.name if by_name else writer.handle
    first, second = (ObjectStoreReader.attach(where, None) for _ in range(2))
    with raises(RankInUseError, ["2", writer.name, f"process {os.getpid()}"]):
        ObjectStoreReader.attach(where, None)
    first.close()
    with second, ObjectStoreReader.attach(where, None) as again:
        assert [0, 1] == [again.rank, second.rank]


def test_rank_none_waits_for_one_of_an_ended_process_when_all_are_in_use(
    writer: ObjectStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []
    attach = native.Reader.attach

    def in_use_at_once(place: str, number: int, *rest: Any) -> Any:
        asked.append((number, rest[-1]))
        if len(asked) < 3:
            raise RankInUseError("its process ends")
        return attach(place, number, *rest)

    monkeypatch.setattr(native.Reader, "attach", in_use_at_once)
    with ObjectStoreReader.attach(writer.handle, None) as reader:
        assert 0 == reader.rank
    assert [(0, True), (1, True), (2, True), (0, True)] == asked


def test_a_key_that_is_too_long_is_hashed(writer: ObjectStoreWriter, readers: list[ObjectStoreReader]) -> None:
    keys = ["é" * 40_000, "é" * 40_001]
    for number, key in enumerate(keys):
        ref = writer.put(key, number)
        assert writer.is_cached(key)
        assert [number] * 2 == [reader.get(ref) for reader in readers]
        assert number == readers[0].get(writer.get_cached(key))
        assert writer.validate(ref, key)
    assert [71, 71] == [len(key) for key in writer.keys()]
    assert writer.delete(keys[0])
    assert [False, True] == [key in writer for key in keys]
