"""What goes first, what `protect` keeps, and space that is reserved and filled in place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shmstore
from shmstore import ObjectStoreWriter, TensorSpec
from shmstore.inspect.inspector import StoreInspector
from tests.support import Stores, crowd, random_tensor

# ---- order of eviction


@pytest.mark.parametrize(
    ("use", "left"),
    [
        (ObjectStoreWriter.touch, ["k0", "k2", "k5", "k6", "k7"]),
        (ObjectStoreWriter.get_cached, ["k0", "k2", "k5", "k6", "k7"]),
        (ObjectStoreWriter.is_cached, ["k3", "k4", "k5", "k6", "k7"]),
    ],
)
def test_a_use_gives_a_second_chance_and_a_look_is_no_use(
    stores: Stores, use: Callable[[ObjectStoreWriter, str], Any], left: list[str]
) -> None:
    writer = stores.create(8 * 1024, n_readers=1)
    writer.retire(0)
    for i in range(8):
        writer.put(f"k{i}", random_tensor(i, 900))
    use(writer, "k0")
    use(writer, "k2")
    for i in range(3):
        writer.put(f"n{i}", random_tensor(i, 900))
    assert left == [key for key in writer.keys() if key.startswith("k")]


# ---- protect


class Failing(shmstore.MsgpackSerde):
    def fill(self, dst: Any, source: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("sizes", [(20_000, 8), (8, 20_000)])
def test_a_full_table_takes_the_slot_of_an_old_object_whatever_its_size(stores: Stores, sizes: tuple[int, int]) -> None:
    writer = stores.create(16 << 20, n_readers=1, max_objects=256)  # space enough, which is divided by sizes
    newest, other = (np.zeros(size, np.uint8) for size in sizes)
    gone = 0
    for number in range(2000):
        writer.delete("newest")
        writer.put("newest", newest, lease=False)
        writer.put(f"{number}", other, lease=False)
        gone += not writer.is_cached("newest")
    assert gone == 0


@pytest.mark.parametrize(("old", "new"), [(20_000, 8), (8, 20_000), (8, 8)])
@pytest.mark.parametrize("hold", [True, False])
def test_in_a_full_table_an_object_that_stays_costs_no_younger_one_its_turn(
    stores: Stores, old: int, new: int, hold: bool
) -> None:
    """The hand of its area stands in front of it, since no other object of its size comes."""
    writer = stores.create(16 << 20, n_readers=1, max_objects=256)
    writer.put("stays", np.zeros(old, np.uint8), hold=hold, lease=hold)
    for number in range(3000):
        writer.touch("stays")
        writer.put(f"{number}", np.zeros(new, np.uint8), lease=False)
        oldest = max(0, number - 254)
        assert writer.is_cached(f"{oldest}")
    assert writer.is_cached("stays")


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


# ---- lease entries


def test_leases_that_every_rank_has_read_are_not_open_and_never_fill_the_table(stores: Stores) -> None:
    writer = stores.create(1 << 16, n_readers=2, max_objects=16)
    readers = [stores.attach(writer, rank) for rank in range(2)]
    entries = writer.stats().max_leases
    with StoreInspector.open(writer.name) as inspector:
        for key in "abcdefghijkl":
            refs = [writer.put(key, 1), *(writer.get_cached(key) for _ in range(entries // 4))]
            for expected, reader in zip((len(refs), 0), readers, strict=True):
                for ref in refs:
                    reader.release(ref)
                assert expected == writer.stats().open_leases == inspector.facts().open_leases
    assert 0 == writer.stats().refusals
