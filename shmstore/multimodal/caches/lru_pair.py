"""The `lru` pair: P0 keeps keys, sizes and prompt updates, P1 keeps the items, and both evict alike.

The tensors are in memory once. `shmstore.multimodal.caches.shadow` explains how the two sides stay in step. Without an
IPC cache P0 keeps the items itself, to preprocess none of them twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from shmstore.errors import shown
from shmstore.multimodal.caches.base import BaseMultiModalReceiverCache
from shmstore.multimodal.caches.checks import check_hash, check_known, check_pairs
from shmstore.multimodal.caches.counts import CacheInfo
from shmstore.multimodal.caches.lru import Bounded, Guard, most_entries
from shmstore.multimodal.caches.shadow import LruProcessorCache, NewItem
from shmstore.multimodal.config import MultiModalCacheConfig, checked_config
from shmstore.multimodal.values.items import MultiModalKwargsItem
from shmstore.multimodal.values.nested import nested_equal
from shmstore.multimodal.values.types import (
    MULTIMODAL,
    CacheTypes,
    ItemT,
    ProcessorOutput,
    PromptUpdates,
    ReceiverInput,
    UpdatesT,
)
from shmstore.refs import ObjectRef


class MultiModalProcessorOnlyCache(LruProcessorCache[ItemT, UpdatesT]):
    """Items and prompt updates in P0, up to `processor_cache_gb` of both together; thread-safe.

    A hit returns the stored item and updates. A miss stores the input and returns it. An input that is larger than the
    whole cache is returned but not stored. A tensor that is a view of a larger one, or of another library's memory, is
    stored as a copy, so that the cache keeps no more than it counts.
    """

    def __init__(self, config: MultiModalCacheConfig, *, types: CacheTypes[ItemT, UpdatesT] = MULTIMODAL) -> None:
        super().__init__(types, checked_config(config).processor_cache_bytes, config.processor_cache_bytes)

    def _new(self, mm_item: tuple[ItemT, UpdatesT], mm_hash: str, changed: bool) -> NewItem[ItemT, UpdatesT]:
        item, updates = mm_item
        types = self.types
        size = types.item_size(item, mm_hash) + types.updates_size(updates, mm_hash)
        output = types.alone(mm_item) if size <= self._shadow.capacity else mm_item
        return NewItem(size, (output[0], types.keep_updates(updates)), size, output)

    def _same(self, kept: Any, mm_item: tuple[ItemT, UpdatesT], mm_hash: str) -> bool:
        return nested_equal(kept[0], mm_item[0])

    def _on_hit(self, kept: Any) -> ProcessorOutput[ItemT, UpdatesT]:
        item, updates = kept
        return item, self.types.give_updates(updates)


class MultiModalProcessorSenderCache(LruProcessorCache[ItemT, UpdatesT]):
    """P0 of `lru`: a hit returns `(None, updates)`; a miss returns the input and records it as sent. Thread-safe.

    Sizes of items count against `ipc_cache_gb`, as in P1. Prompt updates count against `processor_cache_gb`. If those
    do not fit, the least recently used items count as not cached, and are sent again. A tensor that is a view of a
    larger one is sent as a copy, because pickle would send the whole storage.
    """

    def __init__(self, config: MultiModalCacheConfig, *, types: CacheTypes[ItemT, UpdatesT] = MULTIMODAL) -> None:
        super().__init__(types, checked_config(config).ipc_cache_bytes, config.processor_cache_bytes)

    def _new(self, mm_item: tuple[ItemT, UpdatesT], mm_hash: str, changed: bool) -> NewItem[ItemT, UpdatesT]:
        item, updates = mm_item
        types = self.types
        size = types.item_size(item, mm_hash)  # first, because it rejects data that contains itself
        kept_size, output = types.updates_size(updates, mm_hash), types.alone(mm_item)
        kept = size, types.keep_updates(updates), output[0] if changed else None
        return NewItem(size, kept, kept_size + size if changed else kept_size, output)

    def _same(self, kept: Any, mm_item: tuple[ItemT, UpdatesT], mm_hash: str) -> bool:
        size, updates, item = kept
        types = self.types
        return (
            size == types.item_size(mm_item[0], mm_hash)
            and types.same_updates(updates, types.keep_updates(mm_item[1]))
            and (item is None or nested_equal(item, mm_item[0]))
        )

    def _on_hit(self, kept: Any) -> ProcessorOutput[ItemT, UpdatesT]:
        _, updates, item = kept
        return item, self.types.give_updates(updates)


class MultiModalReceiverCache(BaseMultiModalReceiverCache[ItemT]):
    """P1 of `lru`: the items, up to `ipc_cache_gb` of them. Thread-safe.

    None returns the stored item. An item is stored, in place of one that is known, and returned. A tensor that is a
    view of a larger one, or of another library's memory, is stored as a copy, so that the cache keeps no more than it
    counts.
    """

    def __init__(self, config: MultiModalCacheConfig, *, types: CacheTypes[ItemT, Any] = MULTIMODAL) -> None:
        self.types = types
        capacity = checked_config(config).ipc_cache_bytes
        held: Bounded[str, ItemT] = Bounded(capacity, most_entries(capacity))
        self._guard = Guard(held, held.clear)

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, least recently used first."""
        with self._guard.lock:
            return tuple(self._guard.held().entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the items held."""
        return int(self._guard.held().nbytes)

    def get_and_update_item(self, mm_item: ReceiverInput[ItemT], mm_hash: str) -> ItemT:
        """Do `get_and_update` for one item."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(self, mm_items: Sequence[ReceiverInput[ItemT]], mm_hashes: Sequence[str]) -> list[ItemT]:
        """Return each item, all or nothing, and store what arrived; cached items are touched before anything is stored.

        Raises CacheMissError for None if nothing is cached, and TypeError for a reference, which is for the workers.
        """
        types = self.types
        with self._guard.lock:
            held = self._guard.held()
            check_pairs(mm_items, mm_hashes, partial(_check_arrived, types))
            check_known(mm_items, mm_hashes, held.entries.__contains__)
            found = {mm_hash: entry[0] for mm_hash in mm_hashes if (entry := held.entries.get(mm_hash)) is not None}
            items: list[ItemT] = []
            news: list[tuple[ItemT, float] | None] = []
            for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
                new = None
                if isinstance(mm_item, types.item_type):
                    size = types.item_size(mm_item, mm_hash)
                    new = (types.own_memory(mm_item) if size <= held.capacity else mm_item), size  # as P0 expects
                    found[mm_hash] = new[0]
                items.append(found[mm_hash])
                news.append(new)
            self._guard.change(partial(held.exchange, mm_hashes, news))
            return items

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: ReceiverInput[ItemT] = None) -> None:
        """Mark the item as just used; ignore an absent one, even if `mm_item` is given."""
        check_hash(mm_hash)
        with self._guard.lock:
            self._guard.held().touch(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items; call P0's `clear_cache`, too."""
        with self._guard.lock:
            self._guard.held().clear()


def _check_arrived(types: CacheTypes[Any, Any], item: ReceiverInput[Any], mm_hash: str) -> None:
    if isinstance(item, ObjectRef):
        raise TypeError(
            f"item of {shown(mm_hash)}: must not be a reference, which a worker's cache reads (hint: with 'shm' the "
            "engine core has no cache; forward references unchanged)"
        )
    types.check_item(item, mm_hash)


class _MirroredSender(LruProcessorCache[MultiModalKwargsItem, PromptUpdates]):
    def _new(
        self, mm_item: tuple[MultiModalKwargsItem, PromptUpdates], mm_hash: str, changed: bool
    ) -> NewItem[MultiModalKwargsItem, PromptUpdates]:
        size, output = self.types.item_size(mm_item[0], mm_hash), self.types.alone(mm_item)
        return NewItem(size, output[0], size, output)

    def _same(self, kept: Any, mm_item: tuple[MultiModalKwargsItem, PromptUpdates], mm_hash: str) -> bool:
        return nested_equal(kept, mm_item[0])

    def _on_hit(self, kept: MultiModalKwargsItem) -> ProcessorOutput[MultiModalKwargsItem, PromptUpdates]:
        return None, ()


class MirroredProcessingCache:
    """The earlier form of `lru`, in which both sides keep every item, for engines that still use it. Thread-safe.

    Make one in each process, and call the methods of that side. Each side holds up to `ipc_cache_gb` of items. A tensor
    that is a view of a larger one, or of another library's memory, is held as a copy.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        self._p0 = _MirroredSender(MULTIMODAL, checked_config(config).ipc_cache_bytes, config.ipc_cache_bytes)
        self._p1: MultiModalReceiverCache[MultiModalKwargsItem] = MultiModalReceiverCache(config)

    def get_and_update_p0(
        self, mm_items: Sequence[MultiModalKwargsItem | None], mm_hashes: Sequence[str]
    ) -> list[MultiModalKwargsItem | None]:
        """Return what to send of each item: None if the other side has it, else the item, which is stored here, too.

        Raises ValueError if the lengths differ, TypeError for a wrong item or hash, and CacheMissError with all hashes
        that have no item, given or stored. The batch has then changed nothing.
        """
        check_pairs(mm_items, mm_hashes, MULTIMODAL.check_item)
        outputs = self._p0.get_and_update([None if item is None else (item, ()) for item in mm_items], mm_hashes)
        return [sent for sent, _ in outputs]  # type: ignore[misc]  # none is a reference

    def get_and_update_p1(
        self, mm_items: Sequence[MultiModalKwargsItem | None], mm_hashes: Sequence[str]
    ) -> list[MultiModalKwargsItem]:
        """Return each item, and store what arrived. Raises the errors of `get_and_update_p0`."""
        return self._p1.get_and_update(mm_items, mm_hashes)

    def invalidate(self, mm_hashes: str | Iterable[str]) -> None:
        """Send these, and what their request brought, again: P1 has rejected it with `CacheMissError`."""
        self._p0.invalidate(mm_hashes)

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Return hits and total on the P0 side; with `delta`, since the last call with `delta`."""
        return self._p0.make_stats(delta)

    def reset(self) -> bool:
        """Forget everything on this side and return True."""
        self._p0.clear_cache()
        self._p1.clear_cache()
        return True
