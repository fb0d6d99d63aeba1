"""`MultiModalProcessorOnlyCache`: without an IPC cache, P0 keeps the items, to preprocess none of them twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache
from shmstore.multimodal.caches.checks import check_batch, check_config, check_hash, checked_types
from shmstore.multimodal.caches.counts import CacheInfo, HitCounter
from shmstore.multimodal.caches.lru import Bounded, Guard, most_entries
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.types import MULTIMODAL, CacheTypes, ItemT, ProcessorInput, ProcessorOutput, UpdatesT

__all__ = ["MultiModalProcessorOnlyCache"]


class _Stored(NamedTuple):
    item: Any
    updates: Any  # as they are kept


class _Offer(NamedTuple):
    stored: _Stored
    size: int
    output: ProcessorOutput[Any, Any]


class MultiModalProcessorOnlyCache(BaseMultiModalProcessorCache[ItemT, UpdatesT]):
    """Items and prompt updates in P0, up to `processor_cache_gb` of both together; thread-safe.

    A hit returns the stored item and updates. A miss stores the input and returns it. An input that is larger than the
    whole cache is returned but not stored. A tensor that is a view of a larger one is stored as a copy, so that the
    cache keeps no more than it counts.
    """

    def __init__(self, config: MultiModalCacheConfig, *, types: CacheTypes[ItemT, UpdatesT] = MULTIMODAL) -> None:
        check_config(config)
        self.types = checked_types(types)
        capacity = config.processor_cache_bytes
        held: Bounded[str, _Stored] = Bounded(capacity, most_entries(capacity))
        self._guard = Guard(held, held.clear)
        self._lock = self._guard.lock
        self._counts = HitCounter()

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, least recently used first."""
        with self._lock:
            return tuple(self._guard.held().entries)

    def is_cached_item(self, mm_hash: str) -> bool:
        """Return whether the item is cached; changes neither order nor counts."""
        entries = self._guard.held().entries
        if type(mm_hash) is str and mm_hash in entries:
            return True
        check_hash(mm_hash)
        return mm_hash in entries

    def get_and_update_item(
        self, mm_item: ProcessorInput[ItemT, UpdatesT], mm_hash: str
    ) -> ProcessorOutput[ItemT, UpdatesT]:
        """Return the item and its updates, and store them if they are new; CacheMissError for None if not cached."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(
        self, mm_items: Sequence[ProcessorInput[ItemT, UpdatesT]], mm_hashes: Sequence[str]
    ) -> list[ProcessorOutput[ItemT, UpdatesT]]:
        """Do `get_and_update_item` for each, all or nothing; cached items are touched before anything is stored.

        Raises ValueError if the lengths differ, TypeError for a wrong input or hash, and CacheMissError with all
        missing hashes of the batch.
        """
        with self._lock:
            held = self._guard.held()
            check_batch(mm_items, mm_hashes, held.entries.__contains__, self.types.check_input)
            offers = [
                None if mm_item is None else self._offer(mm_item, mm_hash, held)
                for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True)
            ]
            found = {h: entry[0] for h in mm_hashes if (entry := held.entries.get(h)) is not None}
            given: dict[str, _Offer] = {}
            outputs: list[ProcessorOutput[ItemT, UpdatesT]] = []
            news: list[tuple[_Stored, float] | None] = []
            for offer, mm_hash in zip(offers, mm_hashes, strict=True):
                stored = found.get(mm_hash)
                if stored is not None:
                    outputs.append((stored.item, self.types.give_updates(stored.updates)))
                    news.append(None)
                else:
                    new = given.setdefault(mm_hash, offer) if offer is not None else given[mm_hash]
                    if new.size <= held.capacity:
                        found[mm_hash] = new.stored
                    outputs.append(new.output)
                    news.append((new.stored, new.size))
            self._guard.change(partial(held.exchange, mm_hashes, news))
            self._counts.add(news.count(None), len(news))
            return outputs

    def _offer(self, mm_item: tuple[ItemT, UpdatesT], mm_hash: str, held: Bounded[str, _Stored]) -> _Offer:
        item, updates = mm_item
        size = self.types.item_size(item, mm_hash) + self.types.updates_size(updates, mm_hash)
        if size <= held.capacity and mm_hash not in held.entries:
            item = self.types.own_memory(item)
        output = mm_item if item is mm_item[0] else (item, updates)
        return _Offer(_Stored(item, self.types.keep_updates(updates)), size, output)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; ignore an absent one."""
        check_hash(mm_hash)
        with self._lock:
            self._guard.held().touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts."""
        with self._lock:
            self._guard.held().clear()
            self._counts.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""
        with self._lock:
            return self._counts.stat(delta)
