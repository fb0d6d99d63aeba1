"""The sender caches of two hosts with one tier: what one has processed, the other need not."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter
from shmstore.multimodal import CacheTypes, ShmObjectStoreReceiverCache, ShmObjectStoreSenderCache, factories
from shmstore.multimodal.values.types import MULTIMODAL
from shmstore.tiers import StoreTier
from tests.multimodal.helpers import MIB, config, shm_sender, three_tensors, update
from tests.multimodal.test_stored_updates import ATTACKS
from tests.support import raises
from tests.tiers.memory import MemoryTier, late

SETTINGS = config(4 * MIB, 4 * MIB, cache_type="shm")


class Host:
    """A sender with a tier, and a worker."""

    def __init__(self, memory: MemoryTier, stack: ExitStack, types: CacheTypes[Any, Any] = MULTIMODAL) -> None:
        writer = ObjectStoreWriter.create(capacity=4 * MIB, n_readers=1, max_object_size=4 * MIB)
        self.tier = StoreTier(writer, memory)
        self.sender: Any = ShmObjectStoreSenderCache(SETTINGS, writer, tier=self.tier, types=types)
        stack.callback(self.sender.close)
        reader = stack.enter_context(ObjectStoreReader.attach(writer.handle, 0))
        self.worker: Any = ShmObjectStoreReceiverCache(reader)
        self.processed: list[str] = []

    def request(self, *names: str) -> list[Any]:
        """Do what an engine does with these photographs, and return what its worker reads."""
        known = [self.sender.is_cached_item(name) for name in names]
        inputs = [None if found else self.process(name) for name, found in zip(names, known, strict=True)]
        outputs = self.sender.get_and_update(inputs, names)
        assert [updates for _, updates in outputs] == [[update(name)] for name in names]
        return [self.worker.get_and_update_item(sent, name) for (sent, _), name in zip(outputs, names, strict=True)]

    def process(self, name: str) -> Any:
        self.processed.append(name)
        return three_tensors(100_000), [update(name)]


@pytest.fixture
def memory() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def hosts(memory: MemoryTier) -> Iterator[list[Host]]:
    with ExitStack() as stack:
        yield [Host(memory, stack) for _ in range(2)]


NAMES = [f"photograph-{number}" for number in range(6)]


def test_the_second_host_processes_nothing(hosts: list[Host]) -> None:
    here, there = hosts
    first = here.request(*NAMES)
    assert here.tier.flush(10)
    second = there.request(*NAMES)
    assert (here.processed, there.processed) == (NAMES, [])
    assert first == second == [three_tensors(100_000)] * 6
    stats = there.sender.make_stats()
    assert (stats.hits, stats.total) == (6, 6)
    assert there.tier.stats().published == 0  # it came from there
    there.sender.writer.check_valid()


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_updates_with_right_checksums_are_a_miss_once(
    hosts: list[Host], memory: MemoryTier, attack: str
) -> None:
    with ExitStack() as stack:
        attacker = Host(memory, stack, replace(MULTIMODAL, encode_updates=lambda _: ATTACKS[attack]))
        attacker.request(NAMES[0])
        assert attacker.tier.flush(10)
        here, there = hosts
        here.request(NAMES[0])
        here.request(NAMES[0])
        assert here.tier.flush(10)
        there.request(NAMES[0])  # what `here` has processed
        assert (here.processed, there.processed) == ([NAMES[0]], [])
        assert (here.tier.stats().damaged, there.tier.stats().damaged) == (1, 0)


def test_a_hit_does_not_ask_the_tier(hosts: list[Host], memory: MemoryTier) -> None:
    here, _ = hosts
    here.request(*NAMES)
    assert here.tier.flush(10)
    memory.calls.clear()
    memory.fail = late()
    for _ in range(3):
        here.request(*NAMES)
    assert here.processed == NAMES
    assert memory.calls == []


def test_an_item_without_stored_updates_is_not_published(memory: MemoryTier) -> None:
    with ExitStack() as stack:
        host = Host(memory, stack)
        host.sender._updates._encode = None
        host.request(*NAMES)
        assert host.tier.flush(10)
        assert memory.values == {}


def test_an_item_whose_name_hosts_do_not_share_never_meets_the_tier(memory: MemoryTier) -> None:
    with ExitStack() as stack:
        host = Host(memory, stack, replace(MULTIMODAL, shares=lambda name: name == NAMES[0]))
        host.request(*NAMES)
        assert host.tier.flush(10)
        assert len(memory.values) == memory.calls.count("publish") == memory.calls.count("fetch") == 1


def test_an_invalid_item_is_removed_from_the_tier(hosts: list[Host], memory: MemoryTier) -> None:
    here, there = hosts
    here.request(*NAMES)
    assert here.tier.flush(10)
    here.sender.invalidate([NAMES[0]])
    assert here.tier.flush(10)
    assert len(memory.values) == 5
    there.request(*NAMES)
    assert there.processed == NAMES[:1]


def test_a_cleared_cache_processes_again_and_the_tier_keeps_it_for_other_hosts(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = hosts
    monkeypatch.setattr(here.tier._costs, "worth", lambda _: True)
    here.request(*NAMES)
    assert here.tier.flush(10)
    here.sender.clear_cache()
    there.request(*NAMES)
    here.request(*NAMES)
    assert (here.processed, there.processed) == (NAMES * 2, [])
    assert here.tier.flush(10)
    there.sender.clear_cache()
    there.request(*NAMES)
    assert there.processed == NAMES, "its clear came after"


def test_an_invalid_item_is_processed_again_though_the_tier_is_down(
    hosts: list[Host], memory: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = hosts
    monkeypatch.setattr(here.tier._costs, "worth", lambda _: True)
    here.request(*NAMES)
    assert here.tier.flush(10)
    memory.fail = late()
    here.sender.invalidate(NAMES[:2])
    assert here.tier.flush(10)
    memory.fail = None
    here.request(*NAMES)
    assert here.processed == NAMES + NAMES[:2]


def test_what_is_stored_and_published_comes_before_a_clear_or_after_it(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an old item would have a moment after the clear, and be fetched again."""
    here, _ = hosts
    free: list[bool] = []

    def look(*_: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(here.sender._storing.acquire, False).result())

    for name in ("publish", "remove", "clear"):
        monkeypatch.setattr(here.tier, name, look)
    here.request("a")
    here.sender.invalidate("a")
    here.sender.clear_cache()
    assert [False] * 3 == free


def test_a_put_waits_for_a_fetch_of_its_key_and_is_a_hit(hosts: list[Host], memory: MemoryTier) -> None:
    here, there = hosts
    name = NAMES[0]
    processed = there.process(name)
    here.request(name)
    assert here.tier.flush(10)
    memory.pause = threading.Event()
    fetching = threading.Thread(target=there.sender.is_cached_item, args=(name,))
    fetching.start()
    assert memory.waiting.wait(10)
    outputs: list[Any] = []
    putting = threading.Thread(target=lambda: outputs.append(there.sender.get_and_update_item(processed, name)))
    putting.start()
    putting.join(0.1)
    assert outputs == []
    memory.pause.set()
    for thread in (fetching, putting):
        thread.join(10)
    assert isinstance(outputs[0][0], ObjectRef)
    assert there.worker.get_and_update_item(outputs[0][0], name) == three_tensors(100_000)
    assert there.sender.writer.stats().puts == 1


def test_an_item_goes_inline_while_a_late_tier_may_still_write_it(memory: MemoryTier) -> None:
    kept: list[Any] = []

    class Late(MemoryTier):
        def fetch(self, key: str, into: Any) -> bool:
            for span in memory.values[key]:
                kept.append(into(len(span)))
                kept[-1][:] = span
            raise late()

    with ExitStack() as stack:
        here, there = Host(memory, stack), Host(Late(), stack)
        here.request(NAMES[0])
        assert here.tier.flush(10)
        item, updates = there.process(NAMES[0])
        assert not there.sender.is_cached_item(NAMES[0])
        output = there.sender.get_and_update_item((item, updates), NAMES[0])
        assert output[0] == item
        assert (there.sender.inline_full, there.sender.inline_late, there.sender.make_stats().total) == (0, 1, 1)
        kept.clear()
        there.sender.clear_cache()
        assert there.sender.inline_late == 0
        assert isinstance(there.sender.get_and_update_item((item, updates), NAMES[0])[0], ObjectRef)


def test_a_sender_that_cannot_be_made_leaves_neither_store_nor_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(factories, "ShmObjectStoreSenderCache", Mock(side_effect=MemoryError))
    monkeypatch.setattr(StoreTier, "close", closed := Mock())
    with pytest.raises(MemoryError):
        shm_sender(config(MIB, cache_type="shm", tier_url=f"file://{tmp_path}", tier_namespace="m"))
    closed.assert_called_once()


def test_close_sends_what_is_queued(memory: MemoryTier) -> None:
    with ExitStack() as stack:
        host = Host(memory, stack)
        host.request(*NAMES)
    assert len(memory.values) == 6
    assert memory.closed


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("tier_url", {"tier_url": "file:///x", "tier_namespace": "m", "cache_type": "lru"}),
        ("tier_url", {"tier_url": 5}),
        ("tier_url", {"tier_url": "redis://:secret@x?expire=secret", "tier_namespace": "m"}),
        ("tier_namespace", {"tier_namespace": None}),
        ("tier_namespace", {"tier_url": "file:///x", "tier_namespace": ""}),  # two models would share their items
    ],
)
def test_a_configuration_that_no_tier_can_have_is_refused_by_name(named: str, fields: dict[str, Any]) -> None:
    with raises(ValueError, [named]) as caught:
        config(MIB, MIB, **{"cache_type": "shm"} | fields)
    assert ":secret" not in str(caught.value)
