"""`MultiModalProcessorOnlyCache`: without an IPC cache, P0 keeps the items; nothing is preprocessed twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.interfaces import (
    BaseMultiModalProcessorCache,
    ProcessorInput,
    ProcessorOutput,
    PromptUpdates,
    check_batch,
    check_input,
)
from shmstore.multimodal.items import MultiModalKwargsItem
from shmstore.multimodal.lru import CacheInfo, HitCounter, LRUCache
from shmstore.multimodal.sizes import MultiModalCache, updates_size

__all__ = ["MultiModalProcessorOnlyCache"]


class _Stored(NamedTuple):
    item: MultiModalKwargsItem
    updates: PromptUpdates
    size: int


def _size(entry: _Stored) -> int:
    return entry.size


class MultiModalProcessorOnlyCache(BaseMultiModalProcessorCache):
    """Items and prompt updates in P0, up to `processor_cache_gb` of both together; thread-safe.

    Hit: the stored item and updates. Miss: stored, and the input comes back; so does an input that is larger
    than the whole cache, which is not stored.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        self._lock = threading.RLock()
        self._cache: LRUCache[str, _Stored] = LRUCache(config.processor_cache_bytes, _size)
        self._counts = HitCounter()

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, least recently used first."""
        return self._cache.order

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the item is cached; changes neither order nor counts."""
        return mm_hash in self._cache

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
            offers = [None if mm_item is None else _offer(*mm_item) for mm_item in mm_items]
            # From here on nothing fails.
            held: dict[str, _Stored] = {}
            for mm_hash in mm_hashes:
                entry = self._cache.peek(mm_hash)
                if entry is not None:
                    held[mm_hash] = entry
                    self._cache.touch(mm_hash)
            given: dict[str, _Stored] = {}
            outputs: list[ProcessorOutput] = []
            for offer, mm_hash in zip(offers, mm_hashes, strict=True):
                self._counts.total += 1
                entry = held.get(mm_hash)
                if entry is not None:
                    self._counts.hits += 1
                    self._cache.touch(mm_hash)
                else:
                    entry = given.setdefault(mm_hash, offer) if offer is not None else given[mm_hash]
                    if entry.size <= self._cache.capacity:
                        self._cache[mm_hash] = held[mm_hash] = entry
                outputs.append((entry.item, entry.updates))
            return outputs

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        self._cache.touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts."""
        with self._lock:
            self._cache.clear()
            self._counts.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        with self._lock:
            return self._counts.stat(delta)


def _offer(item: MultiModalKwargsItem, updates: PromptUpdates) -> _Stored:
    return _Stored(item, updates, MultiModalCache.get_item_size(item) + updates_size(updates))
