"""Groups of ranks: a lease waits for one group, named at the hand-out or once later, and for all ranks otherwise."""

from typing import Any

import pytest
import torch

from shmstore import (
    LayoutMismatchError,
    ObjectRef,
    ObjectStoreWriter,
    StaleRefError,
    TensorSpec,
)
from shmstore.inspect.inspector import StoreInspector
from tests.support import Stores, random_tensor, store_name

SIZE = 900


def value(seed: int) -> Any:
    return random_tensor(seed, SIZE)


def evictable(writer: ObjectStoreWriter, key: str) -> bool:
    """Delete the key, and say whether its object went at once."""
    before = writer.stats().used_bytes
    assert writer.delete(key)
    return writer.stats().used_bytes < before


# ---- creating


def test_the_groups_of_a_store_are_known_to_its_writers(stores: Stores) -> None:
    writer = stores.create(n_readers=8, groups=[4, 3, 1])
    assert (4, 3, 1) == writer.groups
    writer.close(unlink=False)
    assert (4, 3, 1) == stores.recover(writer.name).groups
    assert (5,) == stores.create(n_readers=5).groups
    assert (5,) == stores.create(n_readers=5, groups=[5]).groups
    assert (1,) * 255 == stores.create(n_readers=255, groups=(1,) * 255).groups
    with pytest.raises(ValueError, match="is 256 groups of 256 ranks"):
        stores.create(n_readers=256, groups=(1,) * 256)


def test_a_store_with_other_groups_is_another_store(stores: Stores) -> None:
    options: dict[str, Any] = {"name": store_name(), "capacity": 1 << 16, "n_readers": 8}
    writer = stores.keep(ObjectStoreWriter.open(**options, groups=[4, 4]))
    writer.put("k", value(1))
    writer.close(unlink=False)
    for other in (None, [8], [4, 3, 1], [3, 5]):
        with pytest.raises(LayoutMismatchError, match=r"groups is \(4, 4\), not "):
            ObjectStoreWriter.open(**options, groups=other, on_mismatch="raise")
    again = stores.keep(ObjectStoreWriter.open(**options, groups=(4, 4), on_mismatch="raise"))
    assert 1 == again.recovered
    again.close(unlink=False)
    made_again = stores.keep(ObjectStoreWriter.open(**options, groups=[2, 6]))
    assert ((2, 6), 0) == (made_again.groups, made_again.recovered)


# ---- handing out


def test_every_way_to_hand_out_takes_a_group(stores: Stores) -> None:
    writer = stores.create(n_readers=3, groups=[2, 1])
    reader = stores.attach(writer, 2)

    with writer.reserve("cached", TensorSpec((SIZE,), torch.uint8)) as view:
        view[:] = value(1)
    strided = value(2).reshape(30, 30).T  # it is gathered: begin and commit, instead of one call
    assert writer._serde.encode(strided).fills
    refs = {
        "put": writer.put("put", value(3), group=1),
        "filled": writer.put("filled", strided, group=1),
        "held": writer.put("held", value(4), group=1, hold=True),
        "cached": writer.get_cached("cached", group=1),
    }
    with StoreInspector.open(writer.name) as inspector:
        assert [((2,), 1)] * 4 == [(lease.waiting_for, lease.group) for lease in inspector.leases()]
    for ref in refs.values():
        reader.get(ref)
    assert writer.cancel(refs["held"])
    assert all(evictable(writer, key) for key in refs)


def test_a_store_of_one_group_has_that_group(stores: Stores) -> None:
    writer = stores.create(n_readers=2)
    assert writer.assign_group(writer.put("k", value(1), group=0), 0)


# ---- assign_group


def test_a_lease_gets_its_group_once_and_the_error_says_how_to_go_on(stores: Stores) -> None:
    writer = stores.create(n_readers=3, groups=[1, 1, 1])
    ref = writer.put("k", value(1))
    assert writer.assign_group(ref, 1)
    assert writer.assign_group(ref, 1)
    with pytest.raises(ValueError, match=r"waits for another group than 2 already; get_cached\(key, group=\.\.\.\)"):
        writer.assign_group(ref, 2)
    with pytest.raises(TypeError, match="group must be an int, not NoneType"):
        writer.assign_group(ref, None)  # type: ignore[arg-type]
    other = writer.get_cached("k", group=2)
    assert writer.assign_group(other, 2)
    assert writer.cancel(ref)
    assert not writer.assign_group(ref, 1)
    with pytest.raises(TypeError, match="expected an ObjectRef, not bytes"):
        writer.assign_group(ref.to_bytes(), 1)  # type: ignore[arg-type]
    forged = ObjectRef.from_bytes(other.to_bytes()[:-1] + bytes([other.to_bytes()[-1] ^ 1]))
    with pytest.raises(StaleRefError):
        writer.assign_group(forged, 2)
