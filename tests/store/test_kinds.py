"""Kinds and quotas: what each kind has is counted, and a kind at its quota evicts objects of its own."""

from typing import Any

import pytest
import torch

from shmstore import KindStats, ObjectStoreWriter, ObjectTooLargeError, StoreFullError
from tests.support import Stores, crowd, raises, random_tensor, span_of, store_name

KIB = 1 << 10


def put_free(writer: ObjectStoreWriter, key: str, nbytes: int, **options: Any) -> None:
    """Put an object that nobody holds."""
    writer.cancel(writer.put(key, torch.zeros(nbytes, dtype=torch.uint8), **options))


def test_bytes_and_objects_are_counted_by_kind(stores: Stores) -> None:
    writer = stores.create()
    value = random_tensor(1, 5000)
    writer.put("a", value, kind="image")
    writer.put("b", value, kind="image")
    writer.put("c", value, kind="encoder")
    writer.put("d", value)
    with writer.reserve("e", {"x": value}, kind="encoder"):
        assert 2 == writer.stats().kinds["encoder"].objects
    span = span_of("a", value)
    reserved = span_of("e", {"x": value})
    assert {"image": KindStats(2 * span, 2, None), "encoder": KindStats(span + reserved, 2, None)} == (
        writer.stats().kinds
    )
    assert 4 * span + reserved == writer.stats().used_bytes
    writer.delete("e")
    with pytest.raises(ZeroDivisionError), writer.reserve("e", value, kind="image"):
        1 / 0  # noqa: B018
    writer.clear()
    stats = writer.stats()
    assert 0 == len(writer)
    assert 3 * span == stats.kinds["image"].bytes + stats.kinds["encoder"].bytes, "what is held stays counted"
    writer.cancel_all()
    crowd(writer)
    assert {"image": KindStats(0, 0, None), "encoder": KindStats(0, 0, None)} == writer.stats().kinds
    writer.check_valid()


def test_a_sixteenth_kind_is_a_value_error_that_names_the_others(stores: Stores) -> None:
    writer = stores.create()
    for number in range(15):
        writer.put(f"key-{number}", torch.ones(1), kind=f"kind-{number}")
    with raises(ValueError, ["'one more'", "15", "'kind-0'"]):
        writer.put("new", torch.ones(1), kind="one more")
    assert "new" not in writer
    writer.put("new", torch.ones(1), kind="kind-14")


def test_own_objects_that_are_held_refuse_by_name_and_evict_nothing(stores: Stores) -> None:
    writer = stores.create(1 << 20, n_readers=2, quotas={"encoder": 0.25})
    writer.retire(1)
    reader = stores.attach(writer, 0)
    put_free(writer, "image", 64 * KIB, kind="image")
    refs = [writer.put(str(i), random_tensor(i, 60 * KIB), kind="encoder") for i in range(4)]
    held = writer.stats().kinds["encoder"].bytes
    for _ in range(3):
        with raises(StoreFullError, ["'encoder'", str(1 << 18), str(held)]) as caught:
            writer.put("new", random_tensor(9, 60 * KIB), kind="encoder")
        assert "quota" == caught.value.resource
        assert {0: held} == caught.value.held_bytes_by_rank
        assert "quota" in caught.value.hint
    with raises(StoreFullError, ["'encoder'"]), writer.reserve("new", random_tensor(9, 60 * KIB), kind="encoder"):
        pass
    assert ["image", "0", "1", "2", "3"] == writer.keys()
    assert 4 == writer.stats().refusals
    writer.put("another", random_tensor(9, 60 * KIB), kind="image")
    view = reader.get(refs[2])
    with raises(StoreFullError, ["'encoder'"]):  # a view holds it, too
        writer.put("new", random_tensor(9, 60 * KIB), kind="encoder")
    del view
    writer.put("new", random_tensor(9, 60 * KIB), kind="encoder")
    assert "2" not in writer
    assert 4 == writer.stats().kinds["encoder"].objects


def test_an_object_above_the_quota_is_too_large_and_says_so(stores: Stores) -> None:
    writer = stores.create(1 << 20, quotas={"encoder": 1 << 16})
    with raises(ObjectTooLargeError, ["quota", "'encoder'", str(1 << 16)]):
        writer.put("a", random_tensor(1, 1 << 16), kind="encoder")
    with raises(ObjectTooLargeError, [str(1 << 20)]) as caught:
        writer.put("a", random_tensor(1, 1 << 20), kind="image")
    assert "quota" not in str(caught.value)
    writer.put("a", random_tensor(1, 1 << 16))


def test_a_successor_keeps_the_quotas_or_sets_others(stores: Stores) -> None:
    first = stores.create(1 << 20, name=store_name(), quotas={"encoder": 0.25, "audio": 0.5})
    for i in range(4):
        put_free(first, str(i), 50 * KIB, kind="encoder")
    figures = first.stats().kinds
    first.close(unlink=False)
    second = stores.recover(first.handle)
    assert figures == second.stats().kinds
    for i in range(4, 20):
        put_free(second, str(i), 50 * KIB, kind="encoder")
    assert 5 == second.stats().kinds["encoder"].objects
    second.close(unlink=False)
    with raises(ValueError, ["'encoder'"]):
        ObjectStoreWriter.recover(first.name, quotas={"encoder": 2.0})
    third = stores.keep(ObjectStoreWriter.recover(first.name, quotas={"encoder": 0.125, "video": 0.75}))
    kinds = third.stats().kinds
    assert {"encoder": 1 << 17, "audio": None, "video": 3 << 18} == {kind: has.quota for kind, has in kinds.items()}
    put_free(third, "new", 50 * KIB, kind="encoder")
    assert 2 == third.stats().kinds["encoder"].objects
    third.check_valid()


def test_open_sets_the_quotas_of_a_new_store_and_of_one_that_it_takes_over(stores: Stores) -> None:
    name = store_name()
    for quota in (0.25, 0.5):
        writer = stores.keep(ObjectStoreWriter.open(name, capacity=1 << 20, n_readers=1, quotas={"encoder": quota}))
        assert int(quota * (1 << 20)) == writer.stats().kinds["encoder"].quota
        writer.close(unlink=False)
    writer = stores.keep(ObjectStoreWriter.open(name, capacity=1 << 20, n_readers=1))
    assert 1 << 19 == writer.stats().kinds["encoder"].quota
