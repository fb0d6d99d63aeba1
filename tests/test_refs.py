"""References, bit by bit: whatever arrives in their place, a reader shows the right object or raises."""

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StaleRefError
from tests.support import Stores, bits, raises, random_tensor, store_name

SIZE = 40


def flipped(ref: ObjectRef, bit: int) -> ObjectRef:
    packed = bytearray(ref.to_bytes())
    packed[bit // 8] ^= 1 << bit % 8
    return ObjectRef.from_bytes(bytes(packed))


def refuse(reader: ObjectStoreReader, ref: ObjectRef) -> None:
    assert not reader.validate(ref)
    with pytest.raises(StaleRefError, match="has been modified or is invalid"):
        reader.get(ref)


def test_each_of_the_320_bits_counts_and_a_forged_reference_ends_no_lease(stores: Stores) -> None:
    writer = stores.create(1 << 16, n_readers=1)
    reader = stores.attach(writer)
    value = random_tensor(1, 500)
    refs = [writer.put(f"k{i}", value) for i in range(5)]  # neighbours that a forged reference might hit
    refs.append(writer.get_cached("k2"))
    ref = refs[2]
    for bit in range(8 * SIZE):
        forged = flipped(ref, bit)
        refuse(reader, forged)
        for end in (reader.release, writer.cancel):
            try:
                assert not end(forged), f"bit {bit}"
            except StaleRefError:
                continue
        assert 0 == reader.stats().live_views
    assert 8 * SIZE == reader.stats().stale
    stats = writer.stats()
    assert (6, 0) == (stats.open_leases, stats.cancels)
    writer.check_valid()
    for i in range(200):  # nothing was acknowledged: all of them are still promised
        writer.cancel(writer.put(f"n{i}", random_tensor(i, 2000)))
    for each in refs:
        assert bits(value) == bits(reader.get(each))


@settings(max_examples=100, deadline=None)
@given(packed=st.binary(min_size=SIZE, max_size=SIZE), keep=st.integers(0, 4), parts=st.data())
def test_forged_bytes_with_some_true_fields_are_stale(packed: bytes, keep: int, parts: Any) -> None:
    with ObjectStoreWriter.create(store_name(), capacity=1 << 14, n_readers=1) as writer:
        with ObjectStoreReader.attach(writer.handle) as reader:
            refs = [writer.put(f"k{i}", i).to_bytes() for i in range(3)]
            forged = bytearray(packed)
            for _ in range(keep):  # fields of one or several true ones
                start, end = parts.draw(
                    st.sampled_from([(0, 4), (4, 7), (7, 10), (10, 16), (16, 24), (24, 32), (32, 40)])
                )
                forged[start:end] = parts.draw(st.sampled_from(refs))[start:end]
            ref = ObjectRef.from_bytes(bytes(forged))
            if bytes(forged) in refs:
                return
            refuse(reader, ref)
            for end_lease in (reader.release, writer.cancel):
                try:
                    assert not end_lease(ref)
                except StaleRefError:
                    continue
            assert 3 == writer.stats().open_leases


@pytest.mark.parametrize("size", [0, 39, 41])
def test_bytes_of_another_length_are_refused(size: int) -> None:
    with raises(StaleRefError, names=("40 bytes", f"{size}")):
        ObjectRef.from_bytes(b"\1" * size)


@pytest.mark.parametrize("thing", [None, 3, "x" * 40, [0] * 40])
def test_a_packed_reference_that_is_not_bytes_is_a_type_error(thing: Any) -> None:
    with raises(TypeError, names=("packed reference", "bytes", type(thing).__name__)):
        ObjectRef.from_bytes(thing)


def test_other_buffers_of_forty_bytes_are_as_good_as_bytes(stores: Stores) -> None:
    ref = stores.create().put("a", 1)
    for kind in (bytearray, memoryview):
        other = kind(ref.to_bytes())
        assert ref == ObjectRef.from_bytes(other)  # type: ignore[arg-type]
    changing = bytearray(ref.to_bytes())
    kept = ObjectRef.from_bytes(changing)  # type: ignore[arg-type]
    changing[0] ^= 1
    assert ref == kept


@pytest.mark.parametrize("thing", [None, b"x" * 40, "x", 3, object(), ObjectRef.__new__(ObjectRef)])
def test_get_release_and_validate_take_references_only(stores: Stores, thing: Any) -> None:
    reader = stores.attach(stores.create())
    for call in (reader.get, reader.release, reader.validate):
        with raises(TypeError, names=["ObjectRef"]):
            call(thing)


def test_a_reference_is_a_frozen_hashable_value(stores: Stores) -> None:
    writer = stores.create()
    ref, other = writer.put("a", 1), writer.put("b", 1)
    twin = ObjectRef.from_bytes(ref.to_bytes())
    assert (twin, hash(twin), {twin}) == (ref, hash(ref), {ref})
    assert ref != other
    assert ref != ref.to_bytes()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert ref == pickle.loads(pickle.dumps(ref, protocol))
    assert (ref, ref) == (copy.copy(ref), copy.deepcopy(ref))
    for name in ("_packed", "tag", "address", "new"):
        with pytest.raises(AttributeError, match="frozen"):
            setattr(ref, name, b"x")
    with pytest.raises(AttributeError, match="frozen"):
        del ref._packed
    assert twin == ref


def test_references_of_another_store_are_stale(stores: Stores) -> None:
    one, two = stores.create(), stores.create()
    ref, same = one.put("a", 1), two.put("a", 1)
    reader = stores.attach(two)
    assert (ref.address, ref.monotonic_id, ref.lease) == (same.address, same.monotonic_id, same.lease)
    refuse(reader, ref)
    for call in (reader.release, two.cancel):
        with pytest.raises(StaleRefError):
            call(ref)
    packed = two.handle.store_id.to_bytes(4, "little") + ref.to_bytes()[4:]  # with the right number, too
    refuse(reader, ObjectRef.from_bytes(packed))
    assert 1 == two.stats().open_leases


def test_an_old_reference_answers_for_no_later_lease_in_its_entry(stores: Stores) -> None:
    writer = stores.create(8192, max_objects=1)  # few entries: the stack gives the freed one out next
    reader = stores.attach(writer)
    old = writer.put("a", random_tensor(0, 100))
    writer.cancel(old)
    new = writer.get_cached("a")
    assert old.to_bytes()[4:10] == new.to_bytes()[4:10], "slot and entry are the same, or this tests nothing"
    reader.get(old)
    assert not reader.release(old)
    with pytest.raises(MemoryError):
        writer.put("b", 1)  # the one slot is promised still
    assert reader.release(new)
    writer.put("b", 1)
