"""Stands in for what the store does not have yet: goes as soon as it has."""

from __future__ import annotations

import threading
from typing import Any

from shmstore.errors import CacheMissError, ObjectNotFoundError, ObjectTooLargeError, StoreFullError
from shmstore.multimodal import CacheInfo
from shmstore.store import ObjectStoreWriter


class Sender:
    """The generic sender cache."""

    inline_full = inline_too_large = 0

    def __init__(self, writer: ObjectStoreWriter) -> None:
        self.writer, self.handle = writer, writer.handle
        self.lock = threading.Lock()
        self.clear_cache()

    def is_cached_item(self, mm_hash: str) -> bool:
        """Cached?"""
        return mm_hash in self.book and self.writer.is_cached(mm_hash)

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        """Hand out or put."""
        with self.lock:
            self.counts[1] += 1
            try:
                ref, updates = self.writer.get_cached(mm_hash), self.book[mm_hash]
                self.counts[0] += 1
                return ref, updates
            except (KeyError, ObjectNotFoundError):
                pass
            if mm_item is None:
                raise CacheMissError([mm_hash])
            try:
                ref = self.writer.put(mm_hash, mm_item[0])
            except (StoreFullError, ObjectTooLargeError):
                self.inline_full += 1
                return mm_item
            self.book[mm_hash] = mm_item[1]
            return ref, mm_item[1]

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Touch."""
        self.writer.touch(mm_hash)

    def invalidate(self, mm_hash: str) -> None:
        """Drop."""
        self.writer.delete(mm_hash)

    def clear_cache(self) -> None:
        """Clear."""
        self.book: dict[str, Any] = {}
        self.counts, self.last = [0, 0], [0, 0]
        self.writer.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Stats."""
        hits, total = self.counts
        if delta:
            hits, total, self.last = hits - self.last[0], total - self.last[1], [hits, total]
        return CacheInfo(hits=hits, total=total)

    def close(self) -> None:
        """Close."""
        self.writer.close()
