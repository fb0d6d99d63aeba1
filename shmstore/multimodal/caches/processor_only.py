"""`MultiModalProcessorOnlyCache`: without an IPC cache, P0 keeps the items; nothing is preprocessed twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache
from shmstore.multimodal.caches.checks import check_batch, check_config, check_hash, check_input
from shmstore.multimodal.caches.lru import Bounded, CacheInfo, Change, HitCounter, Journal, most_entries
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.items import MultiModalKwargsItem, ResolvedPromptUpdate, own_memory
from shmstore.multimodal.values.sizes import item_size, updates_size
from shmstore.multimodal.values.types import ProcessorInput, ProcessorOutput, PromptUpdates

__all__ = ["MultiModalProcessorOnlyCache"]


class _Stored(NamedTuple):
    item: MultiModalKwargsItem
    updates: tuple[ResolvedPromptUpdate, ...]  # not the caller's list, which the caller may change


class _Offer(NamedTuple):
    stored: _Stored
    size: int
    output: ProcessorOutput


class MultiModalProcessorOnlyCache(BaseMultiModalProcessorCache):
    """Items and prompt updates in P0, up to `processor_cache_gb` of both together; thread-safe.

    Hit: the stored item and updates. Miss: stored, and the input comes back; so does an input that is larger
    than the whole cache, which is not stored. A tensor that is a view into a larger one is replaced by a copy where it
    is stored, so that no more is kept than is counted.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        check_config(config)
        self._journal = Journal()
        self._lock = self._journal.lock
        capacity = config.processor_cache_bytes
        self._held: Bounded[str, _Stored] = Bounded(capacity, most_entries(capacity))
        self._counts = HitCounter()

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, least recently used first."""
        with self._lock:
            self._journal.finish()
            return tuple(self._held.entries)

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the item is cached; changes neither order nor counts."""
        if type(mm_hash) is not str:
            check_hash(mm_hash)
        self._journal.finish()
        if mm_hash in self._held.entries:
            return True
        check_hash(mm_hash)
        return False

    def get_and_update_item(self, mm_item: ProcessorInput, mm_hash: str) -> ProcessorOutput:
        """The item and its updates, stored from now on if they were not; CacheMissError for None and nothing cached."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        """`get_and_update_item` of each, all or nothing; what is cached is touched before anything is stored.

        ValueError where the lengths differ, TypeError for an input or a hash that is none, CacheMissError with all
        missing hashes of the batch.
        """
        with self._lock:
            check_batch(mm_items, mm_hashes, self.is_cached_item, check_input)
            offers = [
                None if mm_item is None else self._offer(mm_item, mm_hash)
                for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True)
            ]
            change = Change(self._held)
            held = {mm_hash: entry[0] for mm_hash in mm_hashes if (entry := change.use(mm_hash)) is not None}
            given: dict[str, _Offer] = {}
            outputs: list[ProcessorOutput] = []
            hits = 0
            for offer, mm_hash in zip(offers, mm_hashes, strict=True):
                stored = held.get(mm_hash)
                if stored is not None:
                    hits += 1
                    change.use(mm_hash)
                    outputs.append((stored.item, list(stored.updates)))
                else:
                    new = given.setdefault(mm_hash, offer) if offer is not None else given[mm_hash]
                    if new.size <= self._held.capacity:
                        change.put(mm_hash, new.stored, new.size)
                        held[mm_hash] = new.stored
                    outputs.append(new.output)
            self._journal.commit(change.apply, self._counts.adding(hits, len(outputs)))
            return outputs

    def _offer(self, mm_item: tuple[MultiModalKwargsItem, PromptUpdates], mm_hash: str) -> _Offer:
        item, updates = mm_item
        size = item_size(item, mm_hash) + updates_size(updates, mm_hash)
        if size <= self._held.capacity and mm_hash not in self._held.entries:
            item = own_memory(item)
        output = mm_item if item is mm_item[0] else (item, updates)
        return _Offer(_Stored(item, tuple(updates)), size, output)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        check_hash(mm_hash)
        with self._lock:
            self._journal.finish()
            self._held.touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts."""
        with self._lock:
            self._journal.finish()
            self._journal.commit(self._held.clear, self._counts.clear)

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        with self._lock:
            self._journal.finish()
            return self._counts.stat(delta)
