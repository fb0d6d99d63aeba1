"""The cache of vLLM's API server: it puts each item once into a store, and sends a reference with a lease."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import cache
from typing import Any

from prometheus_client import REGISTRY
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.utils.cache import CacheInfo

from shmstore.errors import ObjectNotFoundError, WriterActiveError
from shmstore.integrations.vllm.items import ReferenceItem, modality_of, ref_of, register_items
from shmstore.integrations.vllm.receiver import HANDLE
from shmstore.integrations.vllm.requests import RequestLeases
from shmstore.integrations.vllm.updates import decode_updates, encode_updates
from shmstore.metrics import ShmStoreCollector
from shmstore.multimodal import CacheTypes, MultiModalCacheConfig, processor_cache_from_config
from shmstore.refs import ObjectRef

__all__ = ["STORE", "SenderCache"]

STORE = "SHMSTORE_VLLM_STORE"
"""The variable with a name for the store, which then outlives its server."""

_log = logging.getLogger("vllm.shmstore")


class SenderCache(BaseMultiModalProcessorCache):  # type: ignore[misc]
    """The cache of the API server; made by vLLM's factory in the place of its own.

    It creates the store, whose handle the workers find in their environment.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        register_items()
        self._named = bool(os.environ.get(STORE))
        self._sender = _make_sender(vllm_config)
        self._requests_before = RequestLeases.total
        # 0.13 never says that a request is merged: then a key stays protected until 64 others are.
        merges = hasattr(BaseMultiModalProcessorCache, "release_sender_touches")
        self._protection = self.writer.protection(limit=4096 if merges else 64)
        self._warned = False
        os.environ[HANDLE] = self._sender.handle.to_json()
        _collector().watch(self._sender, self.writer.name)
        came = self.writer.recovered
        _log.info("multi-modal items go through store %s of shmstore, with %d from before", self.writer.name, came)

    @property
    def writer(self) -> Any:
        """The store's writer, for its statistics."""
        return self._sender.writer

    def is_cached_item(self, mm_hash: str) -> bool:
        """Return whether the store has the item; if so, it stays until it is taken, or until the request is merged."""
        if not self._sender.is_cached_item(mm_hash):
            return False
        self._protection.add(mm_hash)
        return bool(self._sender.is_cached_item(mm_hash))  # it may have been evicted before the line above

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> tuple[Any, Any]:
        """Return a reference to the item, or the item if it does not fit, and its prompt updates."""
        given = None if mm_item is None else (mm_item[0], (mm_item[1], modality_of(mm_item[0])))
        try:
            sent, (updates, modality) = self._sender.get_and_update_item(given, mm_hash)
        except TypeError as error:  # of a field or a value that the store does not know
            if not self._warned:
                self._warned = True
                _log.warning("items are sent inline, because the store cannot keep them: %s", error)
            return tuple(mm_item)
        if isinstance(sent, ObjectRef):
            sent = ReferenceItem(self.writer.hold(sent), modality)
        return sent, updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Count a use of the item."""
        self._sender.touch_sender_cache_item(mm_hash)

    def release_sender_touches(self) -> None:
        """Let go of what was found and not taken; 0.13 has no such call."""
        self._protection.end()

    def validate_input_item(self, mm_item: Any, mm_hash: str) -> None:
        """Give a reference that a client has sent a lease; ValueError if it is not one to the stored item."""
        ref = ref_of(mm_item)
        if ref is None:
            return
        try:
            if self.writer.validate(ref, mm_hash):
                ReferenceItem.adopt(mm_item, self.writer.hold(self.writer.get_cached(mm_hash)))
                return
        except ObjectNotFoundError:  # deleted, and readable as long as somebody holds it
            pass
        raise ValueError(f"the reference is not one to the stored item {mm_hash!r}; send the item itself")

    def invalidate(self, mm_hash: str) -> None:
        """Take the item out: the next request sends it again."""
        self._sender.invalidate(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items and counts; what a request still needs stays until it is over.

        A store that was taken over keeps its items until the first request: vLLM clears its caches at its start.
        """
        if not self.writer.recovered or RequestLeases.total > self._requests_before:
            self._sender.clear_cache()

    def make_stats(self, *, delta: bool = False) -> Any:
        """Return hits and total so far, or with `delta` since the last call with `delta`."""
        stats = self._sender.make_stats(delta=delta)
        return CacheInfo(hits=stats.hits, total=stats.total)

    def close(self) -> None:
        """Remove the store, or leave it to the next server if it has a chosen name; idempotent."""
        _collector().forget(self._sender)
        self._sender.close(unlink=not self._named)


def _make_sender(vllm_config: Any) -> Any:
    settings = vllm_config.model_config.get_multimodal_config()
    config = MultiModalCacheConfig(
        cache_type="shm",
        processor_cache_gb=settings.mm_processor_cache_gb,
        shm_max_object_size_mb=settings.mm_shm_cache_max_object_size_mb,
        world_size=vllm_config.parallel_config.world_size,
        shm_prefault=True,
        shm_name=os.environ.get(STORE) or None,
    )
    types: CacheTypes[Any, Any] = CacheTypes(
        MultiModalKwargsItem, encode_updates=encode_updates, decode_updates=decode_updates
    )
    try:
        return processor_cache_from_config(config, types=types)
    except WriterActiveError as error:
        hint = f"stop that server, or wait until it has ended; a second server needs another {STORE}"
        raise WriterActiveError(error.message, hint=hint) from None


@cache
def _collector() -> ShmStoreCollector:
    """Return what shows the stores of this process beside vLLM's own metrics."""
    collector = ShmStoreCollector()
    with suppress(ValueError):  # the application shows stores by a collector of its own
        REGISTRY.register(collector)
    return collector
