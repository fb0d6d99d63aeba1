"""The `lru` pair: P0 keeps keys, sizes and prompt updates, P1 keeps the items, and both evict alike.

The memory of the tensors is paid once. How the two stay in step, and what happens when they don't, is argued in
`shmstore.multimodal.caches.shadow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shmstore.errors import shown
from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache, BaseMultiModalReceiverCache
from shmstore.multimodal.caches.checks import (
    check_batch,
    check_config,
    check_hash,
    check_input,
    check_item,
    checked_hashes,
)
from shmstore.multimodal.caches.lru import Bounded, CacheInfo, Change, Journal, most_entries
from shmstore.multimodal.caches.shadow import Offer, SentKeys
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.items import MultiModalKwargsItem, ResolvedPromptUpdate, own_memory
from shmstore.multimodal.values.sizes import item_size, updates_size
from shmstore.multimodal.values.types import ProcessorInput, ProcessorOutput, PromptUpdates, ReceiverInput
from shmstore.refs import ObjectRef

__all__ = ["MultiModalProcessorSenderCache", "MultiModalReceiverCache"]


class MultiModalProcessorSenderCache(BaseMultiModalProcessorCache):
    """P0 of `lru`: hit `(None, updates)`, nothing is sent; miss the input, recorded as sent. Thread-safe.

    Item sizes count against `ipc_cache_gb`, as they do in P1; prompt updates against `processor_cache_gb`, since P1
    has none. Where these don't fit, the least recently used items count as not cached and are sent again.
    A tensor that is a view into a larger one is sent as a copy of its own: pickling it would send the whole.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        check_config(config)
        self._sent: SentKeys[_Kept, ProcessorOutput] = SentKeys(config.ipc_cache_bytes, config.processor_cache_bytes)

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes that P1 is taken to hold, least recently used first."""
        return self._sent.order

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether P1 is taken to hold the item; changes neither order nor counts."""
        if type(mm_hash) is not str:
            check_hash(mm_hash)
        if mm_hash in self._sent:
            return True
        check_hash(mm_hash)
        return False

    def get_and_update_item(self, mm_item: ProcessorInput, mm_hash: str) -> ProcessorOutput:
        """`(None, updates)` where P1 has the item, else the input; CacheMissError for None and nothing cached."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        """`get_and_update_item` of each, all or nothing; what is cached is touched before anything is stored.

        ValueError where the lengths differ, TypeError for an input or a hash that is none, CacheMissError with all
        missing hashes of the batch. To stay in step P1 has to take the same batch as one (`get_and_update_features`).
        """
        with self._sent.journal.lock:
            check_batch(mm_items, mm_hashes, self._sent.__contains__, check_input)
            offers = [
                None if mm_item is None else _offer(mm_item, mm_hash, sent=mm_hash not in self._sent)
                for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True)
            ]
            return self._sent.exchange(offers, mm_hashes, _nothing_to_send)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        check_hash(mm_hash)
        self._sent.touch(mm_hash)

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """P1 has rejected a request with `CacheMissError`: send these, and what it brought, again when next asked."""
        self._sent.invalidate(checked_hashes(mm_hashes))

    def clear_cache(self) -> None:
        """Forget all keys, prompt updates and counts; P1's `clear_cache` is to be called, too."""
        self._sent.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        return self._sent.stat(delta)


_Kept: TypeAlias = tuple[ResolvedPromptUpdate, ...]  # never the caller's list, which the caller may change


def _offer(
    mm_item: tuple[MultiModalKwargsItem, PromptUpdates], mm_hash: str, *, sent: bool
) -> Offer[_Kept, ProcessorOutput]:
    item, updates = mm_item
    size = item_size(item, mm_hash)  # first: it refuses what contains itself, which cannot be walked by `own_memory`
    # What is not sent, for it is a hit, need not be copied.
    alone = own_memory(item) if sent else item
    output = mm_item if alone is item else (alone, updates)
    return Offer(size, tuple(updates), updates_size(updates, mm_hash), output)


def _nothing_to_send(updates: _Kept) -> ProcessorOutput:
    return None, list(updates)


class MultiModalReceiverCache(BaseMultiModalReceiverCache):
    """P1 of `lru`: the items, up to `ipc_cache_gb` of them. Thread-safe.

    None: the stored item. An item: stored, replacing one that is known, and returned; a tensor in it that is a view
    into a larger one is replaced by a copy first, so that no more is kept than is counted.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        check_config(config)
        self._journal = Journal()
        capacity = config.ipc_cache_bytes
        self._held: Bounded[str, MultiModalKwargsItem] = Bounded(capacity, most_entries(capacity))

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, least recently used first."""
        with self._journal.lock:
            self._journal.finish()
            return tuple(self._held.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the items held."""
        self._journal.finish()
        return int(self._held.nbytes)

    def get_and_update_item(self, mm_item: ReceiverInput, mm_hash: str) -> MultiModalKwargsItem:
        """The item, stored from now on if it came; CacheMissError for None where nothing is cached."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(self, mm_items: Sequence[ReceiverInput], mm_hashes: Sequence[str]) -> list[MultiModalKwargsItem]:
        """`get_and_update_item` of each, all or nothing; what is cached is touched before anything is stored.

        ValueError where the lengths differ, TypeError for what is no item or hash (a reference is for the workers),
        CacheMissError with all missing hashes of the batch.
        """
        with self._journal.lock:
            self._journal.finish()
            check_batch(mm_items, mm_hashes, self._held.entries.__contains__, _check_arrived)
            arrived = [
                self._arrived(mm_item, mm_hash) if isinstance(mm_item, MultiModalKwargsItem) else None
                for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True)
            ]
            change = Change(self._held)
            found = {mm_hash: entry[0] for mm_hash in mm_hashes if (entry := change.use(mm_hash)) is not None}
            items: list[MultiModalKwargsItem] = []
            for new, mm_hash in zip(arrived, mm_hashes, strict=True):
                if new is None:
                    change.use(mm_hash)
                else:
                    found[mm_hash], size = new
                    if size <= self._held.capacity:
                        change.put(mm_hash, *new)
                    else:  # which P0 knows
                        change.drop(mm_hash)
                items.append(found[mm_hash])
            self._journal.commit(change.apply)
            return items

    def _arrived(self, item: MultiModalKwargsItem, mm_hash: str) -> tuple[MultiModalKwargsItem, int]:
        size = item_size(item, mm_hash)
        return own_memory(item) if size <= self._held.capacity else item, size

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: ReceiverInput = None) -> None:
        """Mark the item as just used; absent: nothing, also where `mm_item` is yet to be stored."""
        check_hash(mm_hash)
        with self._journal.lock:
            self._journal.finish()
            self._held.touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items; P0's `clear_cache` is to be called, too."""
        with self._journal.lock:
            self._journal.finish()
            self._journal.commit(self._held.clear)


def _check_arrived(item: ReceiverInput, mm_hash: str) -> None:
    if isinstance(item, ObjectRef):
        raise TypeError(
            f"item of {shown(mm_hash)}: a reference is read by the workers' cache; "
            "with 'shm' the engine core forwards it as it is"
        )
    check_item(item, mm_hash)
