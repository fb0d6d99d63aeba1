"""A successor ends the leases of references that its predecessor never sent."""

import torch

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreFullError


def fits(writer: ObjectStoreWriter, key: str) -> bool:
    try:
        writer.put(key, torch.zeros(700, dtype=torch.uint8))
    except StoreFullError:
        return False
    return True


def test_cancel_all_frees_what_nobody_knows_of_and_spares_what_is_looked_at() -> None:
    first = ObjectStoreWriter.create(capacity=2048, n_readers=1)
    with ObjectStoreReader.attach(first.handle) as reader:
        seen: ObjectRef = first.put("seen", torch.ones(700, dtype=torch.uint8))
        view = reader.get(seen)
        first.put("lost", torch.ones(700, dtype=torch.uint8))
        first.close(unlink=False)
        with ObjectStoreWriter.recover(first.name) as successor:
            assert not fits(successor, "new")
            assert successor.cancel_all() == successor.stats().cancels > 0
            assert successor.stats().open_leases == 0
            assert fits(successor, "new")
            assert successor.keys() == ["seen", "new"]
            assert bool((view == 1).all())
            assert successor.cancel_all() == 1
            successor.check_valid()
        del view


def test_what_can_be_no_key_is_in_no_store() -> None:
    with ObjectStoreWriter.create(capacity=2048, n_readers=1) as writer:
        assert [False] * 4 == [key in writer for key in ("", 5, None, "x" * 100_000)]
