"""`MultiModalProcessorOnlyCache`: without an IPC cache, P0 keeps the items, to preprocess none of them twice."""

from __future__ import annotations

from typing import Any

from shmstore.multimodal.caches.checks import check_config
from shmstore.multimodal.caches.lru_pair import LruProcessorCache
from shmstore.multimodal.caches.shadow import Offer
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.types import MULTIMODAL, CacheTypes, ItemT, ProcessorOutput, UpdatesT

__all__ = ["MultiModalProcessorOnlyCache"]


class MultiModalProcessorOnlyCache(LruProcessorCache[ItemT, UpdatesT]):
    """Items and prompt updates in P0, up to `processor_cache_gb` of both together; thread-safe.

    A hit returns the stored item and updates. A miss stores the input and returns it. An input that is larger than the
    whole cache is returned but not stored. A tensor that is a view of a larger one is stored as a copy, so that the
    cache keeps no more than it counts.
    """

    def __init__(self, config: MultiModalCacheConfig, *, types: CacheTypes[ItemT, UpdatesT] = MULTIMODAL) -> None:
        check_config(config)
        self._capacity = config.processor_cache_bytes
        super().__init__(config, types, self._capacity)

    def _offer(self, mm_item: tuple[ItemT, UpdatesT], mm_hash: str) -> Offer[Any, ProcessorOutput[ItemT, UpdatesT]]:
        item, updates = mm_item
        types = self.types
        size = types.item_size(item, mm_hash) + types.updates_size(updates, mm_hash)
        output = types.alone(mm_item) if size <= self._capacity else mm_item
        return Offer(size, (output[0], types.keep_updates(updates)), size, output)

    def _on_hit(self, kept: Any) -> ProcessorOutput[ItemT, UpdatesT]:
        item, updates = kept
        return item, self.types.give_updates(updates)
