"""The cache of vLLM's worker: it turns references into items.

A worker keeps the items of a request until the request ends, though the encoder needs them once. It cannot drop them
earlier: vLLM does not tell this cache when the encoder has used one, and after a preemption a worker may encode what it
has again. vLLM 0.33 drops what its engine core can send again, which excludes references. The lease of the API server
keeps the item in the store as long anyway. Hence three ways:

    copy     a private copy, the default; nothing of the store is held, and models may write to it
    views    read-only views, which hold the item in the store until the request has ended; a write is a fault
    private  writable tensors that nobody else sees, which hold the item like views; only what is written is copied
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from vllm.multimodal.cache import BaseMultiModalReceiverCache

from shmstore.integrations.vllm.items import ref_of, register_items
from shmstore.integrations.vllm.shared import HANDLE, store_name
from shmstore.multimodal.caches.shm_receiver import get_patiently
from shmstore.refs import StoreHandle
from shmstore.store import ObjectStoreReader

POLICIES = ("copy", "views", "private")


def policy() -> str:
    """Return how workers read; ValueError if SHMSTORE_VLLM_READ says anything else."""
    chosen = os.environ.get("SHMSTORE_VLLM_READ", "copy")
    if chosen not in POLICIES:
        raise ValueError(f"SHMSTORE_VLLM_READ must be one of {', '.join(POLICIES)}, not {chosen!r}")
    return chosen


class ReceiverCache(BaseMultiModalReceiverCache):  # type: ignore[misc]
    """The cache of a worker; made by vLLM's factory in the place of its own. It attaches as any rank that is free.

    A worker of several API servers may start before the store, and one of another host has none. So only a worker that
    has a handle attaches now; the others do when the first reference comes.
    """

    def __init__(self, vllm_config: Any, shared_worker_lock: Any) -> None:
        super().__init__()
        register_items()
        self._policy = policy()
        if HANDLE in os.environ:
            _ = self.reader

    @cached_property
    def reader(self) -> ObjectStoreReader:
        """The reader of the store whose handle the API server has left, or of the one that all know by name."""
        handle = os.environ.get(HANDLE)
        return ObjectStoreReader.attach(store_name() if handle is None else StoreHandle.from_json(handle), rank=None)

    def get_and_update_features(self, mm_features: list[Any]) -> list[Any]:
        """Put the item in the place of each reference; vLLM sends no data of an item that no encoder will need."""
        for feature in mm_features:
            if feature.data is not None:
                feature.data = self.get_and_update_item(feature.data, feature.identifier)
        return mm_features

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        """Return the stored item of a reference; an item that came itself passes through."""
        ref = ref_of(mm_item)
        if ref is None:
            return mm_item
        return get_patiently(self.reader, ref, copy=self._policy == "copy", private=self._policy == "private")

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: Any = None) -> None:
        """Do nothing: the API server's lease keeps what is sent."""

    def clear_cache(self) -> None:
        """Do nothing: a worker keeps no items."""
