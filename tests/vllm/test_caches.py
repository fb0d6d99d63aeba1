"""Both caches of the plug-in, without an engine."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, generate_latest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor

import shmstore
from shmstore.inspect.inspector import StoreInspector
from shmstore.integrations.vllm import sender as sender_module
from shmstore.integrations.vllm.items import ref_of
from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.requests import follow, follow_engines
from shmstore.integrations.vllm.sender import SenderCache
from shmstore.integrations.vllm.shared import HANDLE, RUN
from tests.support import segments
from tests.vllm.parts import FIELDS, config, item, received, same

METHODS = ("add_request", "abort_requests", "process_outputs")


@pytest.fixture
def sender() -> Iterator[SenderCache]:
    made = SenderCache(config(workers=3))
    yield made
    made.close()


def followed() -> list[Any]:
    return [AsyncMPClient._send_input, *(getattr(OutputProcessor, name) for name in METHODS)]


def test_a_sender_follows_the_requests_of_its_process(sender: SenderCache) -> None:
    before = followed()
    assert all(hasattr(method, "__wrapped__") for method in before)
    follow(OutputProcessor)
    follow_engines(AsyncMPClient)
    assert before == followed()


def test_a_miss_and_a_hit_give_a_reference_and_the_prompt_updates(sender: SenderCache) -> None:
    whole, updates = item(*FIELDS), ["update"]
    assert not sender.is_cached_item("a")
    sent = [sender.get_and_update_item((whole, updates), "a")]
    assert sender.is_cached_item("a")
    sent.append(sender.get_and_update_item(None, "a"))
    assert [updates, updates] == [list(found) for _, found in sent]
    cache = ReceiverCache(None, None)
    for reference, _ in sent:
        assert same(whole, received(cache, reference))
        assert same(whole, received(cache, reference))
    assert (1, 2) == (sender.make_stats().hits, sender.make_stats(delta=True).total)
    assert (0, 0) == (sender.make_stats(delta=True).hits, sender.make_stats(delta=True).total)
    del sent, reference
    assert 0 == sender.writer.stats().open_leases


def test_items_are_counted_by_the_modality_of_their_updates(sender: SenderCache) -> None:
    for mm_hash, modality in (("a", "image"), ("b", "audio"), ("c", "audio")):
        sender.get_and_update_item((item(*FIELDS), [SimpleNamespace(modality=modality)]), mm_hash)
    assert {"audio": 2, "image": 1} == {kind: has.objects for kind, has in sender.writer.stats().kinds.items()}


def test_an_item_whose_owner_was_stopped_is_sent_inline(sender: SenderCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: shmstore.ObjectStoreWriter, ref: shmstore.ObjectRef) -> None:
        raise shmstore.ObjectBusyError

    monkeypatch.setattr(shmstore.ObjectStoreWriter, "hold", stopped)
    whole = item(*FIELDS)
    sent, updates = sender.get_and_update_item((whole, ["update"]), "a")
    assert sent is whole
    assert ["update"] == list(updates)
    assert not sender.is_cached_item("a")
    assert 0 == sender.writer.stats().open_leases


def test_a_reference_gets_no_lease_on_another_item_of_its_name(sender: SenderCache) -> None:
    first, second = item(*FIELDS), item(FIELDS[0])
    sent, _ = sender.get_and_update_item((first, ["first"]), "a")
    outside = pickle.loads(pickle.dumps(sent))
    again, updates = sender.get_and_update_item((second, ["second"]), "a")
    assert ["second"] == list(updates)
    assert same(second, received(ReceiverCache(None, None), again))
    assert same(first, received(ReceiverCache(None, None), sent))
    sent.users = 1
    sent.release_all()
    for call in (sent.renew, lambda: sender.validate_input_item(outside, "a")):
        with pytest.raises(ValueError, match="send the item itself"):
            call()
    del again
    assert 0 == sender.writer.stats().open_leases


def test_what_a_worker_holds_is_as_its_setting_says(sender: SenderCache, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = item(*FIELDS)
    sent, _ = sender.get_and_update_item((whole, []), "a")
    for setting, pinned in (("copy", 0), ("views", 1), ("private", 1)):
        monkeypatch.setenv("SHMSTORE_VLLM_READ", setting)
        cache = ReceiverCache(None, None)
        found = received(cache, sent)
        assert same(whole, found)
        assert pinned == cache.reader.stats().live_views
        assert same(whole, pickle.loads(pickle.dumps(found)))
        if setting in ("copy", "private"):
            found["key 0"].data.zero_()
            assert same(whole, received(cache, sent))
        del found
        gc.collect()
        assert 0 == cache.reader.stats().live_views


def test_the_settings_of_vllm_are_those_of_the_store() -> None:
    cache = SenderCache(config(gib=2**-8, workers=3))
    try:
        with StoreInspector.open(cache.writer.name) as inspector:
            facts = inspector.facts()
        assert (1 << 22, 1 << 20, 3, ("prefault",)) == (
            *(facts.capacity, facts.max_object_size, facts.n_readers, facts.options),
        )
    finally:
        cache.close()


def test_a_worker_that_is_older_than_its_store_attaches_when_it_gets_a_reference(
    sender: SenderCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HANDLE)
    monkeypatch.setenv(RUN, "not-there-yet")
    cache = ReceiverCache(None, None)
    whole = item(*FIELDS)
    assert whole is received(cache, whole)
    monkeypatch.setenv(RUN, sender.writer.name)
    assert same(whole, received(cache, sender.get_and_update_item((whole, []), "a")[0]))


def test_a_touch_counts_as_a_use(sender: SenderCache) -> None:
    big = MultiModalKwargsItem({"data": MultiModalFieldElem(data=torch.zeros(100 << 10), field=FIELDS[0])})  # 400 KiB
    for name in "ab":
        sender.get_and_update_item((big, []), name)
    sender.touch_sender_cache_item("a")
    sender.get_and_update_item((big, []), "c")
    assert sender.is_cached_item("a")


def test_what_was_found_stays_until_it_is_taken(sender: SenderCache) -> None:
    big = MultiModalKwargsItem({"data": MultiModalFieldElem(data=torch.zeros(100 << 10), field=FIELDS[0])})  # 400 KiB
    sender.get_and_update_item((big, []), "a")
    assert sender.is_cached_item("a")
    for name in "bcde":  # each of them is let go at once, and two fit
        sender.get_and_update_item((big, []), name)
    assert sender.get_and_update_item(None, "a")[1] == []
    assert sender.is_cached_item("e")
    sender.release_sender_touches()
    for name in "fghi":
        sender.get_and_update_item((big, []), name)
    assert not sender.is_cached_item("e")


def test_an_item_that_a_request_has_twice_is_found_and_taken_twice(sender: SenderCache) -> None:
    sender.get_and_update_item((item(*FIELDS), []), "a")
    assert [True, True] == sender.is_cached(["a", "a"])
    assert 2 == sender.writer.stats().open_leases
    sent = [sender.get_and_update_item(None, "a")[0] for _ in range(3)]
    assert 3 == sender.writer.stats().open_leases
    assert (3, 4) == (sender.make_stats().hits, sender.make_stats().total)
    assert sender.is_cached_item("a")
    sender.release_sender_touches()
    assert 3 == len({ref_of(one) for one in sent}) == sender.writer.stats().open_leases


def test_what_is_evicted_before_it_is_taken_counts_as_absent(
    sender: SenderCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.get_and_update_item((item(*FIELDS), []), "a")
    sender.invalidate("a")
    monkeypatch.setattr(sender._sender, "is_cached_item", lambda mm_hash: True)  # as it was a moment ago
    assert not sender.is_cached_item("a")


def test_what_cannot_be_handed_out_counts_as_absent(sender: SenderCache) -> None:
    sender.get_and_update_item((item(*FIELDS), []), "a")
    kept = []
    while sender.is_cached_item("a"):
        kept.append(sender.get_and_update_item(None, "a"))
    assert len(kept) == sender.writer.stats().open_leases


def test_the_store_shows_beside_the_metrics_of_the_process(sender: SenderCache) -> None:
    assert f'"{sender.writer.name}"' in generate_latest(REGISTRY).decode()
    sender_module._collector.__wrapped__()  # of an application that shows them by a collector of its own


def test_what_cannot_be_stored_is_sent_inline(sender: SenderCache, caplog: pytest.LogCaptureFixture) -> None:
    class OtherField(MultiModalBatchedField):  # type: ignore[misc]
        pass

    OtherField.__name__ = MultiModalBatchedField.__name__
    large = MultiModalKwargsItem({"data": MultiModalFieldElem(data=torch.zeros(1 << 20), field=FIELDS[0])})
    for given in (item(OtherField()), item(OtherField()), large):
        assert given is sender.get_and_update_item((given, ["update"]), "a")[0]
        assert given is received(ReceiverCache(None, None), given)
        assert not sender.is_cached_item("a")
    assert 1 == len([record for record in caplog.records if record.name == "vllm.shmstore"])


def test_a_reference_that_comes_from_outside_gets_a_lease_if_it_is_one_to_its_item(sender: SenderCache) -> None:
    whole = item(*FIELDS)
    came, other = (pickle.loads(pickle.dumps(sender.get_and_update_item((whole, []), name)[0])) for name in "ab")
    assert 0 == sender.writer.stats().open_leases
    for wrong in (other, {"address": MultiModalFieldElem(data=[1, 2, 3, 4, 5], field=FIELDS[0])}):
        with pytest.raises(ValueError):  # noqa: PT011
            sender.validate_input_item(wrong, "a")
    sender.validate_input_item(whole, "a")
    assert 0 == sender.writer.stats().open_leases
    sender.validate_input_item(came, "a")
    assert 1 == sender.writer.stats().open_leases
    assert same(whole, received(ReceiverCache(None, None), came))
    assert came._lease.ref == ref_of(came) == ref_of(pickle.loads(pickle.dumps(came)))
    del came
    assert 0 == sender.writer.stats().open_leases
    kept = sender.get_and_update_item(None, "b")[0]
    sender.invalidate("b")
    assert same(whole, received(ReceiverCache(None, None), kept))
    assert not sender.is_cached_item("b")
    with pytest.raises(ValueError):  # noqa: PT011
        sender.validate_input_item(other, "b")


def test_clear_and_close_forget_everything(sender: SenderCache) -> None:
    sent, _ = sender.get_and_update_item((item(*FIELDS), []), "a")
    sender.clear_cache()
    assert not sender.is_cached_item("a")
    assert (0, 0) == (sender.make_stats().hits, sender.make_stats().total)
    name = sender.writer.name
    sender.close()
    assert name not in segments()
    del sent  # late
