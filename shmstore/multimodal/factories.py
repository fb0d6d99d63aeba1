"""From the configuration to the cache of each process; None if the process needs no cache."""

from __future__ import annotations

import os
from typing import Any

from shmstore.errors import LayoutMismatchError, WriterActiveError, check_flags
from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache, BaseMultiModalReceiverCache
from shmstore.multimodal.caches.lru_pair import (
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from shmstore.multimodal.caches.shm_receiver import Policy, ShmObjectStoreReceiverCache
from shmstore.multimodal.caches.shm_sender import ShmObjectStoreSenderCache
from shmstore.multimodal.config import MultiModalCacheConfig, checked_config
from shmstore.multimodal.values.types import MULTIMODAL, CacheTypes, ItemT, UpdatesT
from shmstore.refs import StoreHandle
from shmstore.store import ObjectStoreReader, ObjectStoreWriter
from shmstore.store.arguments import int_of
from shmstore.tiers import StoreTier, open_tier

HANDLE_VARIABLE = "SHMSTORE_HANDLE"
"""The environment variable with the store's handle as JSON, for a worker without a `store` argument."""


def processor_cache_from_config(
    config: MultiModalCacheConfig,
    *,
    types: CacheTypes[ItemT, UpdatesT] = MULTIMODAL,
    hold: bool = False,
    keep: bool = True,
) -> BaseMultiModalProcessorCache[ItemT, UpdatesT] | None:
    """Return the cache of the API server: processor-only, the sender of `lru` or `shm`, or None.

    `types` says what the caches must know about an engine's own items. With `hold` the leases of `shm` end only by
    `release`, for engines that read an item more than once.

    The sender of `shm` creates the store. With a `shm_name` it takes over what a dead or closed writer left there, as
    `ObjectStoreWriter.open` does. Each of several API servers calls this: the first one creates the store, and the
    others join. With `keep` False the store ends with its processes, and its name must begin with "shmstore-".
    Give its `handle`, which is the same in all of them, to the workers, and close it at the end. Raises
    WriterActiveError if other processes have the store, for example another replica, and LayoutMismatchError if API
    servers that live have made it with another configuration.
    """
    check_flags(hold=hold, keep=keep)
    if not checked_config(config).ipc_cache_enabled:
        return processor_only_cache_from_config(config, types=types)
    if config.cache_type == "lru":
        return MultiModalProcessorSenderCache(config, types=types)
    writer = _writer_of(config, keep)
    tier = None
    try:
        if config.tier_url is not None:
            tier = StoreTier(writer, open_tier(config.tier_url), namespace=config.tier_namespace)
        return ShmObjectStoreSenderCache(config, writer, types=types, hold=hold, tier=tier)
    except BaseException:
        if tier is not None:
            tier.close()
        writer.close(unlink=not writer.recovered)
        raise


def _writer_of(config: MultiModalCacheConfig, keep: bool) -> ObjectStoreWriter:
    options = config.store_options
    try:
        if config.shm_name is None:
            return ObjectStoreWriter.create(**options)
        return ObjectStoreWriter.open(config.shm_name, keep=keep, allow_uid=config.shm_allow_uid, **options)
    except (WriterActiveError, LayoutMismatchError) as error:
        hint = (
            "all API servers have one configuration: n_writers is api_process_count, n_readers and groups come from "
            "world_size and data_parallel_size, capacity from ipc_cache_gb; each replica (data_parallel_external_lb) "
            f"has its own shm_name, or none; or {error.hint}"
        )
        raise type(error)(error.message, hint=hint) from None


def processor_only_cache_from_config(
    config: MultiModalCacheConfig, *, types: CacheTypes[ItemT, UpdatesT] = MULTIMODAL
) -> MultiModalProcessorOnlyCache[ItemT, UpdatesT] | None:
    """Return a cache for an API server that sends no items, such as a profiling run; None if it is off."""
    return MultiModalProcessorOnlyCache(config, types=types) if checked_config(config).processor_cache_enabled else None


def engine_receiver_cache_from_config(
    config: MultiModalCacheConfig, *, types: CacheTypes[ItemT, Any] = MULTIMODAL
) -> BaseMultiModalReceiverCache[ItemT] | None:
    """Return the cache of the engine core: the receiver of `lru`, or None.

    With `shm` the engine core forwards references and needs no cache.
    """
    if checked_config(config).ipc_cache_enabled and config.cache_type == "lru":
        return MultiModalReceiverCache(config, types=types)
    return None


def worker_receiver_cache_from_config(
    config: MultiModalCacheConfig,
    rank: int,
    store: StoreHandle | str | None = None,
    *,
    types: CacheTypes[ItemT, Any] = MULTIMODAL,
    policy: Policy = "views",
    wait: float = 60.0,
) -> BaseMultiModalReceiverCache[ItemT] | None:
    """Return the cache of the worker with this rank: the receiver of `shm`, or None. Close it at the end.

    With several engine cores that share a store the ranks go on from one to the next: a worker's is `world_size` times
    the number of its core, plus its rank there.

    `policy` says what the worker gets of a reference; see `ShmObjectStoreReceiverCache`. `store` is the sender's handle
    or the store's name. By default it is the handle whose JSON is in the environment variable `SHMSTORE_HANDLE`, or the
    name `shm_name`. The worker waits up to `wait` seconds for a store of that name.

    Raises ValueError if nothing names the store, or if `rank` is not below the number of all workers,
    LayoutMismatchError if the store is for another number of workers (`world_size`), and else as
    `ObjectStoreReader.attach`.
    """
    if not checked_config(config).ipc_cache_enabled or config.cache_type != "shm":
        return None
    all_of = "world_size" if config.n_engines == 1 else "world_size * data_parallel_size"
    rank = int_of(f"rank (below {all_of})", rank, 0, config.n_readers - 1)
    if store is None:
        text = os.environ.get(HANDLE_VARIABLE)
        store = StoreHandle.from_json(text) if text else config.shm_name
    if store is None:
        raise ValueError(
            f"store is missing; pass the sender's handle, set {HANDLE_VARIABLE} to its to_json(), or set shm_name"
        )
    waits = wait if isinstance(store, str) else None  # who has a handle has a store
    reader = ObjectStoreReader.attach(
        store,
        rank=rank,
        n_readers=config.n_readers,
        wait=waits,
        dir=config.shm_dir,
        allow_uid=config.shm_allow_uid,
    )
    try:
        return ShmObjectStoreReceiverCache(reader, types=types, policy=policy)
    except BaseException:
        reader.close()
        raise
