"""A call of the `shm` sender that fails leaves everything as it was; tests/test_interrupts.py interrupts each."""

from collections.abc import Sequence
from typing import Any

import pytest

from shmstore import (
    CacheMissError,
    ObjectBusyError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
)
from shmstore.multimodal import (
    MultiModalKwargsItem,
    ShmObjectStoreSenderCache,
    factories,
    processor_cache_from_config,
    worker_receiver_cache_from_config,
)
from tests.multimodal.helpers import MIB, config, item, shm_sender, update
from tests.multimodal.test_shm_pair import unknown
from tests.support import SHM, Child


def _sender() -> ShmObjectStoreSenderCache:
    """Return a sender that has cached a, b and c."""
    sender = processor_cache_from_config(config(MIB, MIB, cache_type="shm", shm_max_object_size_mb=1))
    assert isinstance(sender, ShmObjectStoreSenderCache)
    for mm_hash in "cab":
        sender.release([sender.get_and_update_item(_given(mm_hash), mm_hash)[0]])
    return sender


def _given(mm_hash: str) -> tuple[MultiModalKwargsItem, list[Any]]:
    return item(30), [update(mm_hash * 1000)]


def _state(sender: ShmObjectStoreSenderCache) -> dict[str, Any]:
    return {
        "leases": sender.writer.stats().open_leases,
        "keys": sender.writer.keys(),
        "counts": sender.make_stats(),
        "inline": (sender.inline_full, sender.inline_too_large),
        "cached": sender.is_cached(list("abcd")),
    }


def _leases(sender: ShmObjectStoreSenderCache, left: int = 0) -> list[ObjectRef]:
    """Take all lease entries except this many."""
    return [sender.writer.get_cached("a") for _ in range(sender.writer.stats().max_leases - left)]


def test_a_batch_that_fails_keeps_the_updates_of_an_item_whose_lease_was_refused() -> None:
    with _sender() as sender:
        held = _leases(sender)
        before = _state(sender)
        with pytest.raises(TypeError, match="no serializer"):
            sender.get_and_update([_given("a"), (unknown(), [])], ["a", "bad"])
        assert before == _state(sender)
        assert sender.is_cached_item("a")
        assert len(held) == sender.release(held)


@pytest.mark.parametrize("left", [0, 1])
def test_where_leases_run_out_all_that_is_missing_is_named_and_nothing_dropped(left: int) -> None:
    with _sender() as sender:
        held = _leases(sender, left)
        before = _state(sender)
        inputs: Sequence[Any] = [None, None, _given("d"), None, None, None]
        hashes = ["a", "b", "d", "c", "d", "b"]
        with pytest.raises(CacheMissError) as caught:
            sender.get_and_update(inputs, hashes)
        assert ("a", "b", "c")[left:] == caught.value.mm_hashes
        assert before == _state(sender)
        assert [True, True, True] == sender.is_cached(list("abc"))
        sent = sender.get_and_update([_given(mm_hash) for mm_hash in hashes], hashes)
        assert 6 - left == sum(isinstance(what, MultiModalKwargsItem) for what, _ in sent)
        assert [update(mm_hash * 1000) for mm_hash in hashes] == [updates[0] for _, updates in sent]
        sender.release(held)


@pytest.mark.parametrize(("busy", "comes"), [(2, True), (3, False)])
def test_a_worker_asks_again_for_an_item_whose_writer_was_stopped(
    busy: int, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    get = ObjectStoreReader.get

    def stopped(self: ObjectStoreReader, *arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked <= busy:
            raise ObjectBusyError
        return get(self, *arguments)

    settings = config(MIB, MIB, cache_type="shm")
    with shm_sender(settings) as sender:
        worker = worker_receiver_cache_from_config(settings, 0, sender.handle)
        assert worker is not None
        sent, _ = sender.get_and_update_item((item(8), [update("a")]), "a")
        monkeypatch.setattr(ObjectStoreReader, "get", stopped)
        if comes:
            assert item(8).get_data().keys() == worker.get_and_update_item(sent, "a").get_data().keys()
        else:
            with pytest.raises(ObjectBusyError):
                worker.get_and_update_item(sent, "a")
        assert 3 == asked
        worker.close()


def test_a_sender_that_cannot_be_made_keeps_what_it_took_over_and_creates_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(MIB, MIB, cache_type="shm", shm_name=name)
    with monkeypatch.context() as patch:
        patch.setattr(factories, "ShmObjectStoreSenderCache", None)
        with pytest.raises(TypeError):
            shm_sender(settings)
        assert not (SHM / name).exists()
    Child(lambda: len(shm_sender(settings).get_and_update([_given("a")], ["a"]))).join()  # it ends without a close
    monkeypatch.setattr(factories, "ShmObjectStoreSenderCache", None)
    with pytest.raises(TypeError):
        shm_sender(settings)
    with ObjectStoreWriter.recover(name) as writer:
        assert ["a"] == writer.keys()
