"""`MirroredProcessingCache`: the earlier form of `lru`, in which both sides store everything.

It keeps every item in memory twice, and is here for engines that still use it. New code uses the `lru` pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shmstore.multimodal.caches.checks import check_config, one_or_more
from shmstore.multimodal.caches.counts import CacheInfo
from shmstore.multimodal.caches.lru_pair import MultiModalReceiverCache
from shmstore.multimodal.caches.shadow import Offer, SentKeys
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.items import MultiModalKwargsItem, own_memory
from shmstore.multimodal.values.sizes import item_size
from shmstore.multimodal.values.types import MULTIMODAL

__all__ = ["MirroredProcessingCache"]


class MirroredProcessingCache:
    """One side of a mirrored pair: make one in each process, and call the methods of that side. Thread-safe.

    Each side holds up to `ipc_cache_gb` of items. A tensor that is a view of a larger one is held as a copy.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        check_config(config)
        capacity = config.ipc_cache_bytes
        self._p0: SentKeys[MultiModalKwargsItem, MultiModalKwargsItem | None] = SentKeys(capacity, capacity)
        self._p1: MultiModalReceiverCache[MultiModalKwargsItem] = MultiModalReceiverCache(config)

    def get_and_update_p0(
        self, mm_items: Sequence[MultiModalKwargsItem | None], mm_hashes: Sequence[str]
    ) -> list[MultiModalKwargsItem | None]:
        """Return what to send of each item: None if the other side has it, else the item, which is stored here, too.

        Raises ValueError if the lengths differ, TypeError for a wrong item or hash, and CacheMissError with all hashes
        that have no item, given or stored. The batch has then changed nothing.
        """
        return self._p0.send(mm_items, mm_hashes, MULTIMODAL.check_item, _offer, lambda item: None)

    def get_and_update_p1(
        self, mm_items: Sequence[MultiModalKwargsItem | None], mm_hashes: Sequence[str]
    ) -> list[MultiModalKwargsItem]:
        """Return each item as it came or is stored, and store what came. Raises the errors of `get_and_update_p0`."""
        return self._p1.get_and_update(mm_items, mm_hashes)

    def get_item(self, mm_hash: str) -> MultiModalKwargsItem | None:
        """Return the item stored on the P0 side, which need not be preprocessed again, or None if there is none."""
        return self._p0.peek(mm_hash)

    def invalidate(self, mm_hashes: str | Iterable[str]) -> None:
        """Send these, and what their request brought, again: P1 has rejected it with `CacheMissError`."""
        self._p0.invalidate(one_or_more(mm_hashes))

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Return hits and total on the P0 side; with `delta`, since the last call with `delta`."""
        return self._p0.stat(delta)

    def reset(self) -> bool:
        """Forget everything on this side and return True."""
        self._p0.clear()
        self._p1.clear_cache()
        return True


def _offer(item: MultiModalKwargsItem, mm_hash: str) -> Offer[MultiModalKwargsItem, MultiModalKwargsItem | None]:
    size = item_size(item, mm_hash)
    alone = own_memory(item)
    return Offer(size, alone, size, alone)
