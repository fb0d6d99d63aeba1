"""What goes first, what `protect` keeps, and space that is reserved and filled in place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shmstore
from shmstore import ObjectStoreWriter, TensorSpec
from tests.support import Stores, bits, crowd, frozen, random_tensor, state

# ---- order of eviction


def hits_decide(stores: Stores, eviction: Any, use: Callable[[ObjectStoreWriter, str], Any]) -> list[str]:
    writer = stores.create(8 * 1024, n_readers=1, eviction=eviction)
    writer.retire(0)
    for i in range(8):
        writer.put(f"k{i}", random_tensor(i, 900))
    use(writer, "k0")
    use(writer, "k2")
    for i in range(3):
        writer.put(f"n{i}", random_tensor(i, 900))
    keys = writer.keys()
    return [key for key in keys if key.startswith("k")]


@pytest.mark.parametrize("use", [ObjectStoreWriter.touch, ObjectStoreWriter.get_cached])
def test_what_was_used_since_the_last_lap_gets_a_second_chance(stores: Stores, use: Any) -> None:
    assert ["k0", "k2", "k5", "k6", "k7"] == hits_decide(stores, "clock", use)


def test_in_insertion_order_a_use_gives_no_second_chance(stores: Stores) -> None:
    assert ["k3", "k4", "k5", "k6", "k7"] == hits_decide(stores, "fifo", ObjectStoreWriter.touch)


def test_asking_whether_a_key_is_cached_is_no_use(stores: Stores) -> None:
    assert ["k3", "k4", "k5", "k6", "k7"] == hits_decide(stores, "clock", ObjectStoreWriter.is_cached)


# ---- protect


class Failing(shmstore.MsgpackSerde):
    def fill(self, dst: Any, source: Any) -> None:
        raise ZeroDivisionError


def test_what_is_protected_stays_inside_the_block_and_goes_after_it(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    writer.retire(0)
    writer.put("kept", 1)
    writer.put("other", 1)
    with writer.protect(["kept", "absent"]):
        crowd(writer)
        assert "kept" in writer
        assert "other" not in writer
    crowd(writer)
    assert "kept" not in writer
    writer.check_valid()


def test_a_block_that_is_over_protects_nothing_however_long_its_exception_is_kept(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1, serde=Failing())
    writer.retire(0)
    writer.put("a", 1)
    with pytest.raises(ZeroDivisionError) as kept, writer.protect(["a", "b"]):
        writer.put("b", torch.arange(100).reshape(10, 10).T)
    writer.put("b", 1)
    crowd(writer)
    assert not {"a", "b"} & set(writer.keys())
    assert kept.tb is not None


def test_what_is_deleted_inside_the_block_is_free_at_its_end(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    writer.retire(0)
    writer.put("a", random_tensor(0, 5000))
    with writer.protect(["a"]):
        with writer.protect(["a"]):
            writer.delete("a")
        assert 1 == writer.stats().objects
    assert (0, 0) == (writer.stats().objects, writer.stats().used_bytes)
    writer.check_valid()


def test_the_plain_values_of_a_template_are_stored_whatever_their_type(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    template = {"scale": np.float32(1.5), "size": torch.Size([2, 3]), "a": TensorSpec((10,), torch.uint8)}
    with writer.reserve("k", template) as views:
        views["a"][:] = 7
    value = stores.attach(writer).get(writer.get_cached("k"))
    assert (np.float32, 1.5, torch.Size([2, 3]), 70) == (
        type(value["scale"]),
        value["scale"],
        value["size"],
        int(value["a"].sum()),
    )


@pytest.mark.parametrize("reserved", [False, True])
def test_a_failed_put_or_reservation_protects_no_slot_that_is_another_objects_later(
    stores: Stores, reserved: bool
) -> None:
    writer = stores.create(8192, n_readers=1, max_objects=1, serde=Failing())
    writer.retire(0)
    with writer.protect(["a"]):
        with pytest.raises(ZeroDivisionError):
            if reserved:
                with writer.reserve("a", TensorSpec((10,), torch.uint8)):
                    raise ZeroDivisionError
            writer.put("a", torch.arange(100).reshape(10, 10).T)
        writer.put("b", 1)  # the one slot
        writer.put("c", 1)
        assert ["c"] == writer.keys()


def test_a_store_closed_inside_a_block_ends_the_block_in_peace(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    writer.put("a", 1)
    with writer.protect(["a"]):
        writer.close()


# ---- reserve


def test_reserved_views_are_filled_in_place_and_handed_out_by_get_cached(stores: Stores) -> None:
    writer = stores.create(n_readers=1)
    reader = stores.attach(writer)
    template = {
        "t": TensorSpec((2, 3), torch.float32),
        "a": np.zeros((4,), dtype=np.int16),
        "note": "as it is",
        "n": [1],
    }
    with writer.reserve("k", template) as views:
        assert "k" not in writer
        assert (torch.float32, (2, 3)) == (views["t"].dtype, tuple(views["t"].shape))
        views["t"].copy_(torch.arange(6).reshape(2, 3))
        views["a"][:] = [1, 2, 3, 4]
    stats = writer.stats()
    assert (1, 0) == (stats.puts, stats.open_leases)
    value = reader.get(writer.get_cached("k"))
    expected = {
        "t": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "a": np.array([1, 2, 3, 4], dtype=np.int16),
        "note": "as it is",
        "n": [1],
    }
    assert frozen(expected) == frozen(value)


def test_a_reservation_that_raises_gives_everything_back(stores: Stores) -> None:
    writer = stores.create(4096, n_readers=1)
    before = state(writer)
    with pytest.raises(ZeroDivisionError), writer.reserve("k", TensorSpec((3000,), torch.uint8)) as view:
        view.fill_(7)
        raise ZeroDivisionError
    after = state(writer)
    assert before[0] == after[0]
    assert dataclasses.replace(before[1], next_id=2) == after[1]
    writer.check_valid()
    with writer.reserve("k", TensorSpec((4000,), torch.uint8)):
        pass
    assert ["k"] == writer.keys()


def test_space_that_is_being_written_is_nobody_elses(stores: Stores) -> None:
    writer = stores.create(8192, n_readers=1)
    reader = stores.attach(writer)
    with writer.reserve("k", TensorSpec((3000,), torch.uint8)) as view:
        view.fill_(7)
        crowd(writer)
        assert bytes([7]) * 3000 == bits(view)
    assert bytes([7]) * 3000 == bits(reader.get(writer.get_cached("k")))
