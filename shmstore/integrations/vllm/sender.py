"""The cache of vLLM's API server: it puts each item once into a store, and sends a reference with a lease."""

from __future__ import annotations

import logging
import os
from asyncio import _get_running_loop
from contextlib import suppress
from functools import cache, partial
from typing import Any

from prometheus_client import REGISTRY
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.utils.cache import CacheInfo
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor

from shmstore.errors import CacheMissError, ObjectBusyError, ObjectNotFoundError, WriterActiveError
from shmstore.integrations.encoder import file_of
from shmstore.integrations.encoder.namespace import digest
from shmstore.integrations.totals import show_totals, show_use
from shmstore.integrations.vllm.items import ReferenceItem, ref_of, register_items
from shmstore.integrations.vllm.names import Names, processing
from shmstore.integrations.vllm.requests import RequestLeases, follow, follow_engines
from shmstore.integrations.vllm.shared import (
    HANDLE,
    RUN,
    SHARE_UUIDS,
    STORE,
    TIER,
    WAIT,
    check_not_of_encoder,
    engines,
    store_name,
)
from shmstore.integrations.vllm.updates import decode_updates, encode_updates
from shmstore.metrics import ShmStoreCollector
from shmstore.multimodal import CacheTypes, MultiModalCacheConfig, processor_cache_from_config
from shmstore.refs import ObjectRef
from shmstore.store import LeasedRef

_log = logging.getLogger("vllm.shmstore")


class SenderCache(BaseMultiModalProcessorCache):  # type: ignore[misc]
    """The cache of an API server; made by vLLM's factory in the place of its own.

    It creates the store, or joins it. The engines that this process starts find the handle in their environment.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__()
        register_items()
        follow(OutputProcessor)
        follow_engines(AsyncMPClient)
        namespace = digest(processing(vllm_config))
        names = Names(namespace, os.environ[RUN], share_uuids())
        self._key = names.key
        self._sender = _make_sender(vllm_config, namespace, names)
        self._has_others = self.writer.n_writers > 1 or self._sender.tier is not None
        self._requests_before = RequestLeases.total
        self._found: dict[str, list[Any]] = {}
        self._warned = False
        self._file = file_of(self.writer)
        self._wait = wait_seconds()
        os.environ[HANDLE] = self._sender.handle.to_json()
        _collector().watch(self._sender, self.writer.name)
        if self.writer.n_writers > 1:
            show_totals(self.writer.name)
        show_use()
        came = self.writer.recovered
        _log.info("multi-modal items go through store %s of shmstore, with %d from before", self.writer.name, came)

    @property
    def writer(self) -> Any:
        """The store's writer, for its statistics."""
        return self._sender.writer

    def is_cached(self, mm_hashes: list[str]) -> Any:
        """Do `is_cached_item` for each, and claim the rest while the list lives: until the request is merged, or fails.

        vLLM asks in a thread of its renderer. On the thread of an event loop this does not wait.
        """
        keys = [self._key(mm_hash) for mm_hash in mm_hashes]
        begun = self._sender.begin(keys, wait=0 if _get_running_loop() else self._wait)
        asked = zip(begun, mm_hashes, keys, strict=True)
        begun[:] = [bool(cached) and self._find(mm_hash, key) for cached, mm_hash, key in asked]
        return begun

    def is_cached_item(self, mm_hash: str) -> bool:
        """Return whether the store has the item; if so, it is handed out now, so that nobody evicts it before."""
        key = self._key(mm_hash)
        return self._sender.is_cached_item(key) and self._find(mm_hash, key)

    def _find(self, mm_hash: str, key: str) -> bool:
        try:
            found = self._exchange(None, mm_hash, key)
        except CacheMissError:  # evicted meanwhile, or every lease is open
            return False
        self._found.setdefault(mm_hash, []).append(found)
        return True

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> tuple[Any, Any]:
        """Return a reference to the item, or the item if it does not fit, and its prompt updates."""
        if mm_item is None and (found := self._found.get(mm_hash)):
            return found.pop()  # type: ignore[no-any-return]
        if mm_item is not None and self._file is not None and file_of(self.writer) != self._file:
            self._file = None
            name = self.writer.name
            _log.warning("store %s, or its folder, was removed, and no other server finds its items: restart it", name)
        try:
            return self._exchange(mm_item, mm_hash, self._key(mm_hash))
        except TypeError as error:  # of a field or a value that the store does not know
            if not self._warned:
                self._warned = True
                _log.warning("items are sent inline, because the store cannot keep them: %s", error)
            return tuple(mm_item)

    def _exchange(self, given: Any, mm_hash: str, key: str) -> tuple[Any, Any]:
        sent, updates = self._sender.get_and_update_item(given, key)
        if isinstance(sent, ObjectRef):
            try:
                return ReferenceItem(self._held(sent), partial(self._lease_again, mm_hash, sent)), updates
            except ObjectBusyError as busy:
                if given is None:
                    raise CacheMissError([mm_hash]) from busy
                sent = given[0]
        return sent, updates

    def _held(self, ref: ObjectRef) -> LeasedRef:
        try:
            return self.writer.hold(ref)  # type: ignore[no-any-return]
        except ObjectBusyError:  # the object is another writer's, which was stopped
            self.writer.cancel(ref)
            raise

    def _lease_again(self, mm_hash: str, ref: ObjectRef) -> LeasedRef:
        """Open another lease on the item of `ref`, and on no other one: a request has the prompt updates of that."""
        try:
            again = self.writer.get_cached(self._key(mm_hash))
            if again.monotonic_id == ref.monotonic_id:
                return self._held(again)
            self.writer.cancel(again)
            raise ObjectNotFoundError
        except (ObjectNotFoundError, ObjectBusyError):
            raise ValueError(f"the item {mm_hash!r} is not in the store any more; send the item itself") from None

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Count a use of the item, unless it was handed out just now, which is one."""
        if mm_hash not in self._found:
            self._sender.touch_sender_cache_item(self._key(mm_hash))

    def release_sender_touches(self) -> None:
        """Release what was found and not taken: vLLM has merged a request, or failed to."""
        self._found.clear()

    def validate_input_item(self, mm_item: Any, mm_hash: str) -> None:
        """Give a reference that a client has sent a lease; ValueError if it is not one to the stored item."""
        ref = ref_of(mm_item)
        if ref is None:
            return
        if not self.writer.validate(ref, self._key(mm_hash)):
            raise ValueError(f"the reference is not one to the stored item {mm_hash!r}; send the item itself")
        ReferenceItem.adopt(mm_item, self._lease_again(mm_hash, ref), partial(self._lease_again, mm_hash, ref))

    def invalidate(self, mm_hash: str) -> None:
        """Take the item out: the next request sends it again."""
        self._sender.invalidate(self._key(mm_hash))

    def clear_cache(self) -> None:
        """Forget all items and counts; what a request still needs stays until it is over.

        Before this server's first request, what comes from others stays: a store that was taken over or is shared, and
        a tier. vLLM clears its caches at its start.
        """
        if not (self.writer.recovered or self._has_others) or RequestLeases.total > self._requests_before:
            self._sender.clear_cache()

    def make_stats(self, *, delta: bool = False) -> Any:
        """Return hits and total so far, or with `delta` since the last call with `delta`."""
        stats = self._sender.make_stats(delta=delta)
        return CacheInfo(hits=stats.hits, total=stats.total)

    def close(self) -> None:
        """Remove the store if no other server has it, or leave one with a chosen name to the next; idempotent."""
        _collector().forget(self._sender)
        self._sender.close()


def wait_seconds() -> float:
    """Return how long to wait for what another API server makes; ValueError if SHMSTORE_VLLM_WAIT says no seconds."""
    chosen = os.environ.get(WAIT, "1")
    with suppress(ValueError):
        if (seconds := float(chosen)) >= 0:
            return seconds
    raise ValueError(f"{WAIT} must be a number of seconds from 0, not {chosen!r}")


def share_uuids() -> bool:
    """Return whether names that clients choose are shared as well; ValueError if the variable says neither 0 nor 1."""
    chosen = os.environ.get(SHARE_UUIDS, "0")
    if chosen not in ("0", "1"):
        raise ValueError(f"{SHARE_UUIDS} must be 0 or 1, not {chosen!r}")
    return chosen == "1"


def _make_sender(vllm_config: Any, namespace: str, names: Names) -> Any:
    named = bool(os.environ.get(STORE))
    if named:
        check_not_of_encoder(store_name())
    model = vllm_config.model_config
    settings = model.get_multimodal_config()
    parallel = vllm_config.parallel_config
    config = MultiModalCacheConfig(
        cache_type="shm",
        processor_cache_gb=settings.mm_processor_cache_gb,
        shm_max_object_size_mb=settings.mm_shm_cache_max_object_size_mb,
        world_size=parallel.world_size,
        data_parallel_size=engines(parallel),
        api_process_count=parallel._api_process_count,
        shm_prefault=True,
        shm_name=store_name() if named or parallel._api_process_count > 1 else None,
        tier_url=os.environ.get(TIER) or None,
        tier_namespace=f"vllm {model.model} {namespace}",
    )
    types: CacheTypes[Any, Any] = CacheTypes(
        MultiModalKwargsItem,
        encode_updates=encode_updates,
        decode_updates=decode_updates,
        modality=_modality,
        shares=names.is_shared,
    )
    try:
        return processor_cache_from_config(config, types=types, keep=named)
    except WriterActiveError as error:
        hint = f"stop that server, or wait until it has ended; a second server needs another {STORE}"
        raise WriterActiveError(error.message, hint=hint) from None


def _modality(item: MultiModalKwargsItem, updates: Any) -> str | None:
    return next((getattr(update, "modality", None) for update in updates), None)


@cache
def _collector() -> ShmStoreCollector:
    """Return what shows the stores of this process next to vLLM's own metrics."""
    collector = ShmStoreCollector()
    with suppress(ValueError):  # the application shows stores by a collector of its own
        REGISTRY.register(collector)
    return collector
