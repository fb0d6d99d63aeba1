"""The `shm` pair on a real store: rows of the tables, the ring case, batches, leases, prompt updates."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Self
from unittest.mock import Mock

import pytest
import torch

from shmstore import CacheMissError, ObjectRef, ObjectStoreWriter, StoreClosedError
from shmstore.bindings.batch import Batch
from shmstore.multimodal import (
    CacheInfo,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    ShmObjectStoreSenderCache,
)
from shmstore.multimodal.values.types import ProcessorInput, ProcessorOutput
from tests.multimodal.helpers import MIB, config, features, item, shm_sender, shm_worker, three_tensors, update
from tests.support import in_child, is_held, segments

KIB = 1 << 10


class Engine:
    """A sender and its workers, in one process."""

    def __init__(self, capacity: int, *, workers: int = 1, **more: Any) -> None:
        self.config = config(MIB, capacity, cache_type="shm", world_size=workers, **more)
        self.sender = shm_sender(self.config)
        self.workers = [shm_worker(self.config, rank, self.sender.handle) for rank in range(workers)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self.workers:
            worker.close()
        self.sender.close()

    def send(self, **sizes: int) -> list[ProcessorOutput]:
        """Return the sender's outputs for a request of items of these sizes."""
        cached = self.sender.is_cached(list(sizes))
        inputs = [
            None if hit else (item(size), [update(h)]) for (h, size), hit in zip(sizes.items(), cached, strict=True)
        ]
        return self.sender.get_and_update(inputs, list(sizes))

    def read(self, outputs: Iterable[ProcessorOutput], mm_hashes: Iterable[str]) -> list[object]:
        """Read what was sent in every worker; return what the last one has."""
        for worker in self.workers:
            batch = worker.get_and_update_features(features(list(mm_hashes), [sent for sent, _ in outputs]))
        return [feature.data for feature in batch]


def refs(outputs: Iterable[ProcessorOutput]) -> list[ObjectRef]:
    return [sent for sent, _ in outputs if isinstance(sent, ObjectRef)]


def kinds(outputs: Iterable[ProcessorOutput]) -> list[str]:
    return ["ref" if isinstance(sent, ObjectRef) else "inline" for sent, _ in outputs]


# --- rows of the tables --------------------------------------------------------------------------------------------


def test_hit_and_miss_give_a_reference_with_a_lease_of_its_own_and_the_updates() -> None:
    with Engine(MIB) as engine:
        mine = three_tensors(4 * KIB)
        updates = [update("a")]
        miss = engine.sender.get_and_update_item((mine, updates), "a")
        hit = engine.sender.get_and_update_item(None, "a")
        again = engine.sender.get_and_update_item((mine, [update("b")]), "a")
        assert ["ref"] * 3 == kinds([miss, hit, again])
        assert 3 == len({ref.lease for ref in refs([miss, hit, again])})
        assert 1 == len({ref.monotonic_id for ref in refs([miss, hit, again])})
        assert all(got == updates for _, got in (miss, hit, again))
        assert CacheInfo(2, 3) == engine.sender.make_stats()
        views = engine.workers[0].reader.stats().live_views
        for ref, _ in (miss, hit, again):
            got = engine.workers[0].get_and_update_item(ref, "a")
            assert (mine, list(mine)) == (got, list(got))
            assert mine["pixel_values"].field == got["pixel_values"].field
            assert views + 1 == engine.workers[0].reader.stats().live_views, "no copy"
            del got


def test_a_worker_names_all_that_is_missing_and_reads_nothing() -> None:
    with Engine(MIB) as engine:
        outputs = engine.send(a=10, b=10, c=10)
        sent = refs(outputs)
        engine.sender.release([sent[1]])
        engine.sender.writer.delete("b")
        before = engine.workers[0].reader.stats()
        batch = features(["a", "b", "x"], [sent[0], sent[1], None])
        with pytest.raises(CacheMissError) as caught:
            engine.workers[0].get_and_update_features(batch)
        assert ("b", "x") == caught.value.mm_hashes
        assert before.gets == engine.workers[0].reader.stats().gets
        assert [sent[0], sent[1], None] == [feature.data for feature in batch]
        for given in (None, sent[1]):
            with pytest.raises(CacheMissError):
                engine.workers[0].get_and_update_item(given, "b")
        assert item(10) == engine.workers[0].get_and_update_item(sent[0], "a")


def test_clear_forgets_items_updates_and_counts() -> None:
    with Engine(MIB) as engine:
        engine.send(a=10, b=10)
        engine.sender.clear_cache()
        assert ([False, False], CacheInfo(0, 0)) == (engine.sender.is_cached(["a", "b"]), engine.sender.make_stats())
        assert [] == engine.sender.writer.keys()
        engine.workers[0].clear_cache()
        engine.send(a=10)
        assert CacheInfo(0, 1) == engine.sender.make_stats(delta=True)


# --- the case of the specification ---------------------------------------------------------------------------------


def test_ring_of_three_a_hit_is_protected_and_the_new_item_takes_the_room_of_another() -> None:
    with Engine(int(15.2 * MIB), shm_max_object_size_mb=6) as engine:
        engine.read(engine.send(A=5 * MIB, B=5 * MIB, C=5 * MIB), "ABC")
        outputs = engine.send(G=2 * MIB, A=5 * MIB)
        assert ["ref", "ref"] == kinds(outputs)
        assert CacheInfo(1, 5) == engine.sender.make_stats()
        assert [item(2 * MIB), item(5 * MIB)] == engine.read(outputs, "GA")
        cached = engine.sender.is_cached(list("ABCG"))
        assert cached in ([True, True, False, True], [True, False, True, True])


def test_a_new_item_goes_inline_while_all_three_places_are_leased(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Engine(int(15.2 * MIB), shm_max_object_size_mb=6) as engine:
        outputs = engine.send(A=5 * MIB, B=5 * MIB, C=5 * MIB)
        with caplog.at_level(logging.WARNING):
            more = engine.send(G=2 * MIB, A=5 * MIB)
        assert ["inline", "ref"] == kinds(more)
        assert [update("G")] == more[0][1]
        assert (1, 0) == (engine.sender.inline_full, engine.sender.inline_too_large)
        assert "ipc_cache_gb" in caplog.text
        assert [True, True, True, False] == engine.sender.is_cached(list("ABCG"))
        assert [item(5 * MIB)] * 3 == engine.read(outputs, "ABC")
        assert [item(2 * MIB), item(5 * MIB)] == engine.read(more, "GA")
        assert CacheInfo(1, 5) == engine.sender.make_stats()


def test_who_holds_a_full_store_is_found_out_only_for_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Mock(wraps=Batch.refusal)
    monkeypatch.setattr(Batch, "refusal", lambda batch: refusal(batch))
    with Engine(int(15.2 * MIB), shm_max_object_size_mb=6) as engine:
        engine.send(A=5 * MIB, B=5 * MIB, C=5 * MIB)
        with caplog.at_level(logging.WARNING):
            for name in "DEFGH":
                assert ["inline"] == kinds(engine.send(**{name: 2 * MIB}))
        told = [record.message for record in caplog.records]
        assert 3 == refusal.call_count == len(told)  # 1st, 2nd, 4th
        assert all("held by rank 0" in message for message in told)


# --- inline --------------------------------------------------------------------------------------------------------


def test_an_item_larger_than_the_store_takes_goes_inline_and_the_setting_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Engine(4 * MIB, shm_max_object_size_mb=1) as engine:
        for _ in range(4):
            with caplog.at_level(logging.WARNING):
                assert ["inline", "ref"] == kinds(engine.send(big=MIB + 1, small=1))
        assert (0, 4) == (engine.sender.inline_full, engine.sender.inline_too_large)
        assert 3 == sum("shm_max_object_size_mb" in record.message for record in caplog.records)  # 1st, 2nd, 4th
        assert {int, str} == {type(arg) for record in caplog.records for arg in record.args or ()}, "no item is kept"
        assert not engine.sender.is_cached_item("big")
        engine.sender.clear_cache()
        assert 0 == engine.sender.inline_too_large


@pytest.mark.parametrize("what", ["slots", "leases"])
def test_where_entries_run_out_the_warning_names_their_setting(caplog: pytest.LogCaptureFixture, what: str) -> None:
    with Engine(MIB, shm_max_objects=2) as engine:
        engine.send(a=KIB)
        writer = engine.sender.writer
        leases = writer.stats().max_leases - 1 if what == "leases" else 0
        held = [writer.get_cached("a") for _ in range(leases)]
        with caplog.at_level(logging.WARNING):
            assert "inline" == kinds(engine.send(b=KIB, c=KIB))[-1]
        assert ("lease entries" if what == "leases" else "slots are taken") in caplog.messages[0]
        assert caplog.messages[0].endswith("shm_max_objects)")
        assert len(held) == engine.sender.release(held)


def test_the_same_item_twice_in_a_batch_is_one_miss_and_one_hit() -> None:
    with Engine(MIB) as engine:
        given: ProcessorInput
        for given in (None, (item(10), [])):
            outputs = engine.sender.get_and_update([(item(10), [update("a")]), given], ["a", "a"])
            assert ["ref", "ref"] == kinds(outputs)
            assert 2 == len({ref.lease for ref in refs(outputs)})
            assert [[update("a")]] * 2 == [updates for _, updates in outputs]
            assert CacheInfo(1, 2) == engine.sender.make_stats(delta=True)
            assert [item(10), item(10)] == engine.read(outputs, "aa")
            engine.sender.clear_cache()
        assert not is_held(engine.sender.writer)


# --- all or nothing ------------------------------------------------------------------------------------------------


def unknown() -> MultiModalKwargsItem:
    """Return an item of a type that the serializer does not know."""
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", object(), MultiModalBatchedField())])


def test_a_batch_in_which_one_item_fails_leaves_no_lease_and_no_item() -> None:
    with Engine(MIB) as engine:
        engine.read(engine.send(old=10), ["old"])
        before = engine.sender.make_stats()
        with pytest.raises(TypeError, match="no serializer"):
            engine.sender.get_and_update(
                [(item(5), []), None, (unknown(), []), (item(6), [])], ["new", "old", "bad", "later"]
            )
        assert before == engine.sender.make_stats()
        assert [True, False, False, False] == engine.sender.is_cached(["old", "new", "bad", "later"])
        assert ["old"] == engine.sender.writer.keys()
        assert not is_held(engine.sender.writer)


def test_a_batch_that_fails_gives_back_what_it_counted_inline() -> None:
    with Engine(4 * MIB, shm_max_object_size_mb=1) as engine:
        with pytest.raises(TypeError, match="no serializer"):
            engine.sender.get_and_update([(item(2 * MIB), []), (unknown(), [])], ["big", "bad"])
        assert (0, CacheInfo(0, 0)) == (engine.sender.inline_too_large, engine.sender.make_stats())
        big = (item(2 * MIB), [update("a")])
        assert [big, big] == engine.sender.get_and_update([big, None], ["a", "a"])
        assert (2, CacheInfo(0, 2)) == (engine.sender.inline_too_large, engine.sender.make_stats())


# --- leases --------------------------------------------------------------------------------------------------------


def test_a_request_that_ends_early_gives_its_leases_back_once_and_safely() -> None:
    with Engine(MIB, workers=2) as engine:
        outputs = engine.send(a=10, b=10)
        sent = [*(ref for ref, _ in outputs), item(1), None]
        assert is_held(engine.sender.writer)
        assert 2 == engine.sender.release(sent)
        assert 0 == engine.sender.release(sent)
        assert not is_held(engine.sender.writer)
        after = engine.send(c=10)
        engine.read(after, "c")
        engine.sender.release(ref for ref, _ in after)  # after they have read


# --- healing -------------------------------------------------------------------------------------------------------


def test_a_closed_sender_says_so_and_not_that_items_are_missing() -> None:
    with Engine(MIB) as engine:
        outputs = engine.send(a=10)
        engine.sender.close()
        calls: list[Callable[[], object]] = [
            lambda: engine.sender.is_cached(["a"]),
            lambda: engine.sender.is_cached_item("b"),
            lambda: engine.sender.get_and_update_item(None, "a"),
            lambda: engine.sender.get_and_update([None], ["a"]),
            lambda: engine.sender.get_and_update([None, None], ["a", "b"]),
            lambda: engine.sender.get_and_update([(item(1), []), None], ["a", "b"]),
            lambda: engine.sender.get_and_update([(item(1), [])] * 2, ["x", "y"]),
            lambda: engine.sender.invalidate(["a"]),
            lambda: engine.sender.touch_sender_cache_item("a"),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError, match="closed"):
                call()
        assert CacheInfo(0, 1) == engine.sender.make_stats()
        assert [item(10)] == engine.read(outputs, "a")


def test_a_worker_that_is_closed_reads_no_more_and_its_rank_is_free() -> None:
    with Engine(MIB) as engine:
        ref, _ = engine.sender.get_and_update_item((item(3), []), "a")
        worker = engine.workers[0]
        worker.close()
        worker.close()
        with pytest.raises(StoreClosedError):
            worker.get_and_update_item(ref, "a")
        with shm_worker(engine.config, 0, engine.sender.handle) as successor:
            ref, _ = engine.sender.get_and_update_item(None, "a")
            assert item(3) == successor.get_and_update_item(ref, "a")


def test_a_writer_that_does_not_fit_is_refused_and_stays_its_owners() -> None:
    with ObjectStoreWriter.create(capacity=MIB, n_readers=2) as writer:
        for settings, said in (
            (config(MIB), r"^config: expected one of cache_type='shm', got cache_type='lru'$"),
            (config(MIB, cache_type="shm"), r"has groups of \[2\] ranks, and config has 1 engine cores of 1 workers"),
            (
                config(MIB, cache_type="shm", data_parallel_size=2),
                r"^writer: <.*>.* 2 engine cores of 1 workers \(hint: ",
            ),
        ):
            with pytest.raises(ValueError, match=said):
                ShmObjectStoreSenderCache(settings, writer)
        writer.cancel(writer.put("mine", 1))
        assert ["mine"] == writer.keys()


def test_items_are_counted_by_modality_which_never_refuses_one() -> None:
    def of(modality: str) -> MultiModalKwargsItem:
        return MultiModalKwargsItem.from_elems(
            [MultiModalFieldElem(modality, "k", torch.zeros(100), MultiModalBatchedField())]
        )

    names = ["image", "audio", "audio", "m" * 24, *(f"kind {n}" for n in range(14))]  # one too long, one too many
    with shm_sender(config(4 * MIB, cache_type="shm")) as sender:
        for at, name in enumerate(names):
            ref, _ = sender.get_and_update_item((of(name), []), str(at))
            assert isinstance(ref, ObjectRef)
        kinds = sender.writer.stats().kinds
    assert (1, 2, 15) == (kinds["image"].objects, kinds["audio"].objects, len(kinds))


def closed(sender: ShmObjectStoreSenderCache) -> Any:
    sender.tier = Mock()
    sender.close(unlink=True)
    return sender.tier.close.call_count


def test_a_forked_child_closes_neither_store_nor_tier_of_its_parent() -> None:
    with Engine(MIB) as engine:
        assert 0 == in_child(closed, engine.sender)
        assert engine.sender.writer.name in segments()
        assert 1 == closed(engine.sender)
