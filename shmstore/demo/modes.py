"""What the demo compares: a configuration for each mode, from which every process builds its part by the factories.

The processes know no mode: what a factory gives, they use, and where it gives None, things pass as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shmstore import StoreHandle
from shmstore.multimodal import (
    MultiModalCacheConfig,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    ShmObjectStoreSenderCache,
    processor_cache_from_config,
)
from shmstore.multimodal.values.types import ProcessorInput, ProcessorOutput, ReceiverInput

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Mode:
    """One way in which items reach the workers."""

    name: str
    summary: str
    """For the report: who keeps what, and what travels."""
    ipc_cache: bool
    cache_type: Literal["lru", "shm"] = "lru"

    @property
    def keeps_segment(self) -> bool:
        """Whether there is a segment in shared memory, which must not outlive the run."""
        return self.cache_type == "shm"

    def config(self, *, workers: int, capacity: int, store_name: str) -> MultiModalCacheConfig:
        """Return the configuration: `capacity` bytes of items wherever this mode keeps them."""
        return MultiModalCacheConfig(
            processor_cache_gb=capacity / _GIB,
            ipc_cache_gb=capacity / _GIB if self.ipc_cache else 0,
            cache_type=self.cache_type,
            world_size=workers,
            shm_max_object_size_mb=-(-capacity // _MIB) if self.keeps_segment else 128,
            shm_name=store_name if self.keeps_segment else None,
            # So that the clock sees a store in use and not the kernel clearing its pages for the first time.
            shm_prefault=self.keeps_segment,
        )


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("none", "the API process keeps items, which are pickled through every pipe", False),
        Mode("lru", "the API process keeps keys, the engine items, which are pickled to each worker", True),
        Mode("shm", "each item once in shared memory; a reference through the pipes", True, "shm"),
    )
}
"""Every mode, in the order in which they run and are shown."""


@dataclass(frozen=True)
class CacheCounts:
    """What the API process's cache did so far."""

    hits: int
    asked: int
    evictions: int
    inline_fallbacks: int
    """Items that found no room in the store and travelled through the pipes instead."""
    copied: int
    """Bytes of tensors copied into the store."""
    released: int
    """Leases that were given back because their request was aborted or rejected."""


class ApiCache:
    """The API process's cache, whichever it is, one item a request."""

    def __init__(self, config: MultiModalCacheConfig) -> None:
        cache = processor_cache_from_config(config)
        if not isinstance(
            cache, MultiModalProcessorOnlyCache | MultiModalProcessorSenderCache | ShmObjectStoreSenderCache
        ):
            raise TypeError(f"no cache to compare: {config.describe()}")
        self._cache = cache
        self._entered = 0
        self._released = 0

    @property
    def handle(self) -> StoreHandle | None:
        """The store's, for the workers."""
        return self._cache.handle if isinstance(self._cache, ShmObjectStoreSenderCache) else None

    def is_cached(self, mm_hash: str) -> bool:
        """Return whether `exchange` will do without the item."""
        return self._cache.is_cached([mm_hash])[0]

    def exchange(self, mm_input: ProcessorInput, mm_hash: str) -> ProcessorOutput:
        """Return what to send; raises `CacheMissError` where the item was cached when asked, and is no more."""
        cache = self._cache
        if mm_input is None or isinstance(cache, ShmObjectStoreSenderCache):
            return cache.get_and_update([mm_input], [mm_hash])[0]
        known = mm_hash in cache.order
        output = cache.get_and_update([mm_input], [mm_hash])[0]
        self._entered += not known and mm_hash in cache.order
        return output

    def release(self, sent: Iterable[ReceiverInput]) -> None:
        """Give back the leases of requests that end before their workers have read."""
        if isinstance(self._cache, ShmObjectStoreSenderCache):
            self._released += self._cache.release(sent)

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """Take it that the other side has none of these."""
        if not isinstance(self._cache, MultiModalProcessorOnlyCache):
            self._cache.invalidate(mm_hashes)

    def counts(self) -> CacheCounts:
        """Return what was done so far."""
        asked = self._cache.make_stats()
        if isinstance(self._cache, ShmObjectStoreSenderCache):
            stats = self._cache.writer.stats()
            evictions, copied = stats.evictions, stats.put_bytes
            inline = self._cache.inline_full + self._cache.inline_too_large
        else:
            evictions, copied, inline = self._entered - len(self._cache.order), 0, 0
        return CacheCounts(asked.hits, asked.total, evictions, inline, copied, self._released)

    def clear(self) -> int:
        """Forget everything; return how many objects stay in the store because somebody still holds them."""
        self._cache.clear_cache()
        return self._cache.writer.stats().objects if isinstance(self._cache, ShmObjectStoreSenderCache) else 0

    def close(self) -> None:
        """Give everything back; the store's segment, too."""
        if isinstance(self._cache, ShmObjectStoreSenderCache):
            self._cache.close()
