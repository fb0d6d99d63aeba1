"""`MirroredProcessingCache`: the earlier form of `lru`, in which both sides store everything.

Kept because engines still use it. It costs the memory of every item twice; new code takes the `lru` pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shmstore.multimodal.caches.checks import check_batch, check_config, check_item, checked_hashes
from shmstore.multimodal.caches.lru import CacheInfo
from shmstore.multimodal.caches.lru_pair import MultiModalReceiverCache
from shmstore.multimodal.caches.shadow import Offer, SentKeys
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.items import MultiModalKwargsItem, own_memory
from shmstore.multimodal.values.sizes import item_size

__all__ = ["MirroredProcessingCache"]


class MirroredProcessingCache:
    """One side of a mirrored pair: make one in each process, and call the method of that side. Thread-safe.

    Both sides hold up to `ipc_cache_gb` of items, their tensors without what these may be views into.
    """

    def __init__(self, config: MultiModalCacheConfig) -> None:
        check_config(config)
        self._p1 = MultiModalReceiverCache(config)
        self._journal = self._p1._journal  # one for both halves, so that `reset` is one step
        capacity = config.ipc_cache_bytes
        self._p0: SentKeys[MultiModalKwargsItem, MultiModalKwargsItem | None] = SentKeys(
            capacity, capacity, self._journal
        )

    def get_and_update_p0(
        self, mm_items: Sequence[MultiModalKwargsItem | None], mm_hashes: Sequence[str]
    ) -> list[MultiModalKwargsItem | None]:
        """What to send of each item: None where the other side has it, else the item, stored here, too.

        ValueError where the lengths differ, TypeError for what is no item or hash, CacheMissError with all hashes for
        which nothing is given or stored; the batch has then changed nothing.
        """
        with self._journal.lock:
            check_batch(mm_items, mm_hashes, self._p0.__contains__, check_item)
            offers = [
                None if item is None else _offer(item, mm_hash, sent=mm_hash not in self._p0)
                for item, mm_hash in zip(mm_items, mm_hashes, strict=True)
            ]
            return self._p0.exchange(offers, mm_hashes, _nothing_to_send)

    def get_and_update_p1(
        self, mm_items: Sequence[MultiModalKwargsItem | None], mm_hashes: Sequence[str]
    ) -> list[MultiModalKwargsItem]:
        """Each item: what arrived, stored, or what is stored already; errors as in `get_and_update_p0`."""
        return self._p1.get_and_update(mm_items, mm_hashes)

    def get_item(self, mm_hash: str) -> MultiModalKwargsItem | None:
        """The item stored on the P0 side, so that it need not be preprocessed again; None where there is none."""
        return self._p0.peek(mm_hash)

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """P1 has rejected a request with `CacheMissError`: P0 sends these, and what it brought, again."""
        self._p0.invalidate(checked_hashes(mm_hashes))

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total on the P0 side; with `delta` since the last call with `delta`."""
        return self._p0.stat(delta)

    def reset(self) -> bool:
        """Forget everything on this side; True."""
        with self._journal.lock:
            self._journal.finish()
            self._journal.commit(*self._p0.clearing(), self._p1._held.clear)
        return True


def _offer(
    item: MultiModalKwargsItem, mm_hash: str, *, sent: bool
) -> Offer[MultiModalKwargsItem, MultiModalKwargsItem | None]:
    size = item_size(item, mm_hash)
    alone = own_memory(item) if sent else item
    return Offer(size, alone, size, alone)


def _nothing_to_send(_: MultiModalKwargsItem) -> None:
    return None
