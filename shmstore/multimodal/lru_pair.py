"""The `lru` pair: P0 keeps keys, sizes and prompt updates, P1 keeps the items, and both evict alike.

The memory of the tensors is paid once. How the two stay in step, and what happens when they don't, is argued in
`shmstore.multimodal.lockstep`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.interfaces import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    ProcessorInput,
    ProcessorOutput,
    PromptUpdates,
    ReceiverInput,
    check_batch,
    check_hashes,
    check_input,
    check_item,
)
from shmstore.multimodal.items import MultiModalKwargsItem
from shmstore.multimodal.lockstep import Offer, SentKeys
from shmstore.multimodal.lru import CacheInfo, HitCounter, LRUCache
from shmstore.multimodal.sizes import MultiModalCache, updates_size
from shmstore.refs import ObjectRef

__all__ = ["MultiModalProcessorSenderCache", "MultiModalReceiverCache"]


class MultiModalProcessorSenderCache(BaseMultiModalProcessorCache):
    """P0 of `lru`: hit `(None, updates)`, nothing is sent; miss the input, recorded as sent. Thread-safe.

    Item sizes count against `ipc_cache_gb`, as they do in P1; prompt updates against `processor_cache_gb`, since P1
    has none. Where these don't fit, the least recently used items count as not cached and are sent again.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        self._lock = threading.RLock()
        self._counts = HitCounter()
        self._sent: SentKeys[PromptUpdates, ProcessorOutput] = SentKeys(
            config.ipc_cache_bytes, config.processor_cache_bytes, self._counts
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes that P1 is taken to hold, least recently used first."""
        return self._sent.order

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether P1 is taken to hold the item; changes neither order nor counts."""
        return mm_hash in self._sent

    def get_and_update_item(self, mm_item: ProcessorInput, mm_hash: str) -> ProcessorOutput:
        """`(None, updates)` where P1 has the item, else the input; CacheMissError for None and nothing cached."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        """`get_and_update_item` of each, all or nothing; what is cached is touched before anything is stored.

        ValueError where the lengths differ, TypeError for an input or a hash that is none, CacheMissError with all
        missing hashes of the batch. To stay in step P1 has to take the same batch as one (`get_and_update_features`).
        """
        with self._lock:
            check_batch(mm_items, mm_hashes, self.is_cached_item, check_input)
            offers = [None if mm_item is None else _offer(mm_item, *mm_item) for mm_item in mm_items]
            return self._sent.exchange(offers, mm_hashes, _nothing_to_send)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        with self._lock:
            self._sent.touch(mm_hash)

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """P1 has rejected a request with `CacheMissError`: send these, and what it brought, again when next asked."""
        check_hashes(mm_hashes)
        with self._lock:
            self._sent.invalidate(mm_hashes)

    def clear_cache(self) -> None:
        """Forget all keys, prompt updates and counts; P1's `clear_cache` is to be called, too."""
        with self._lock:
            self._sent.clear()
            self._counts.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        with self._lock:
            return self._counts.stat(delta)


def _offer(
    mm_item: ProcessorOutput, item: MultiModalKwargsItem, updates: PromptUpdates
) -> Offer[PromptUpdates, ProcessorOutput]:
    return Offer(MultiModalCache.get_item_size(item), updates, updates_size(updates), mm_item)


def _nothing_to_send(updates: PromptUpdates) -> ProcessorOutput:
    return None, updates


class _Held(NamedTuple):
    item: MultiModalKwargsItem
    size: int


def _size(entry: _Held) -> int:
    return entry.size


class MultiModalReceiverCache(BaseMultiModalReceiverCache):
    """P1 of `lru`: the items, up to `ipc_cache_gb` of them. Thread-safe.

    None: the stored item. An item: stored, replacing one that is known, and returned.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        self._lock = threading.RLock()
        self._cache: LRUCache[str, _Held] = LRUCache(config.ipc_cache_bytes, _size)

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, least recently used first."""
        return self._cache.order

    @property
    def nbytes(self) -> int:
        """Bytes of the items held."""
        return int(self._cache.currsize)

    def get_and_update_item(self, mm_item: ReceiverInput, mm_hash: str) -> MultiModalKwargsItem:
        """The item, stored from now on if it came; CacheMissError for None where nothing is cached."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(self, mm_items: Sequence[ReceiverInput], mm_hashes: Sequence[str]) -> list[MultiModalKwargsItem]:
        """`get_and_update_item` of each, all or nothing; what is cached is touched before anything is stored.

        ValueError where the lengths differ, TypeError for what is no item or hash (a reference is for the workers),
        CacheMissError with all missing hashes of the batch.
        """
        with self._lock:
            check_batch(mm_items, mm_hashes, self._cache.__contains__, _check_arrived)
            arrived = [_held(mm_item) if isinstance(mm_item, MultiModalKwargsItem) else None for mm_item in mm_items]
            # From here on nothing fails.
            found: dict[str, _Held] = {}
            for mm_hash in mm_hashes:
                entry = self._cache.peek(mm_hash)
                if entry is not None:
                    found[mm_hash] = entry
                    self._cache.touch(mm_hash)
            items: list[MultiModalKwargsItem] = []
            for new, mm_hash in zip(arrived, mm_hashes, strict=True):
                if new is None:
                    self._cache.touch(mm_hash)
                else:
                    found[mm_hash] = new
                    try:
                        self._cache[mm_hash] = new
                    except ValueError:  # too large, which P0 knows
                        self._cache.pop(mm_hash, None)
                items.append(found[mm_hash].item)
            return items

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: ReceiverInput = None) -> None:
        """Mark the item as just used; absent: nothing, also where `mm_item` is yet to be stored."""
        self._cache.touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items; P0's `clear_cache` is to be called, too."""
        self._cache.clear()


def _check_arrived(item: ReceiverInput, mm_hash: str) -> None:
    if isinstance(item, ObjectRef):
        raise TypeError(
            f"item of {mm_hash!r}: a reference is read by the workers' cache; "
            "with 'shm' the engine core forwards it as it is"
        )
    check_item(item, mm_hash)


def _held(item: MultiModalKwargsItem) -> _Held:
    return _Held(item, MultiModalCache.get_item_size(item))
