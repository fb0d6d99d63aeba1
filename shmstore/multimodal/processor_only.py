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
    check_config,
    check_hash,
    check_input,
)
from shmstore.multimodal.items import MultiModalKwargsItem, ResolvedPromptUpdate, own_memory
from shmstore.multimodal.lru import CacheInfo, HitCounter, LRUCache, most_entries
from shmstore.multimodal.sizes import item_size, updates_size

__all__ = ["MultiModalProcessorOnlyCache"]


class _Stored(NamedTuple):
    item: MultiModalKwargsItem
    updates: tuple[ResolvedPromptUpdate, ...]  # not the caller's list, which the caller may change
    size: int


class _Offer(NamedTuple):
    stored: _Stored
    output: ProcessorOutput


def _size(entry: _Stored) -> int:
    return entry.size


class MultiModalProcessorOnlyCache(BaseMultiModalProcessorCache):
    """Items and prompt updates in P0, up to `processor_cache_gb` of both together; thread-safe.

    Hit: the stored item and updates. Miss: stored, and the input comes back; so does an input that is larger
    than the whole cache, which is not stored. A tensor that is a view into a larger one is replaced by a copy where it
    is stored, so that no more is kept than is counted.
    """

    _cache: LRUCache[str, _Stored]

    def __init__(self, config: MultiModalCacheConfig) -> None:
        check_config(config)
        self._lock = threading.RLock()
        self._capacity = config.processor_cache_bytes
        self._counts = HitCounter()
        self._start_empty()

    def _start_empty(self) -> None:
        self._cache = LRUCache(self._capacity, _size, max_entries=most_entries(self._capacity))

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, least recently used first."""
        return self._cache.order

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the item is cached; changes neither order nor counts."""
        if type(mm_hash) is not str:
            check_hash(mm_hash)
        if mm_hash in self._cache:
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
            before = self._counts.hits, self._counts.total
            try:
                return self._take(offers, mm_hashes)
            except BaseException:  # an interrupt, half-way: forget all
                self._counts.hits, self._counts.total = before
                self._start_empty()
                raise

    def _offer(self, mm_item: tuple[MultiModalKwargsItem, PromptUpdates], mm_hash: str) -> _Offer:
        item, updates = mm_item
        size = item_size(item, mm_hash) + updates_size(updates, mm_hash)
        if size <= self._capacity and mm_hash not in self._cache:
            item = own_memory(item)
        output = mm_item if item is mm_item[0] else (item, updates)
        return _Offer(_Stored(item, tuple(updates), size), output)

    def _take(self, offers: Sequence[_Offer | None], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        held: dict[str, _Stored] = {}
        for mm_hash in mm_hashes:
            entry = self._cache.peek(mm_hash)
            if entry is not None:
                held[mm_hash] = entry
                self._cache.touch(mm_hash)
        given: dict[str, _Offer] = {}
        outputs: list[ProcessorOutput] = []
        for offer, mm_hash in zip(offers, mm_hashes, strict=True):
            self._counts.total += 1
            entry = held.get(mm_hash)
            if entry is not None:
                self._counts.hits += 1
                self._cache.touch(mm_hash)
                outputs.append((entry.item, list(entry.updates)))
            else:
                new = given.setdefault(mm_hash, offer) if offer is not None else given[mm_hash]
                if new.stored.size <= self._capacity:
                    self._cache[mm_hash] = held[mm_hash] = new.stored
                outputs.append(new.output)
        return outputs

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        check_hash(mm_hash)
        with self._lock:
            self._cache.touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts."""
        with self._lock:
            self._start_empty()
            self._counts.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        with self._lock:
            return self._counts.stat(delta)
