"""From the configuration to the cache that each process needs; None where it needs none."""

from __future__ import annotations

import os
from numbers import Integral

from shmstore.errors import StoreExistsError
from shmstore.multimodal.caches.shm_receiver import ShmObjectStoreReceiverCache
from shmstore.multimodal.caches.shm_sender import ShmObjectStoreSenderCache
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.interfaces import BaseMultiModalProcessorCache, BaseMultiModalReceiverCache, check_config
from shmstore.multimodal.lru_pair import MultiModalProcessorSenderCache, MultiModalReceiverCache
from shmstore.multimodal.processor_only import MultiModalProcessorOnlyCache
from shmstore.refs import StoreHandle
from shmstore.store import ObjectStoreReader, ObjectStoreWriter

__all__ = [
    "HANDLE_VARIABLE",
    "engine_receiver_cache_from_config",
    "processor_cache_from_config",
    "processor_only_cache_from_config",
    "worker_receiver_cache_from_config",
]

HANDLE_VARIABLE = "SHMSTORE_HANDLE"
"""The environment variable in which a worker finds the store's handle, as JSON, where it is not given one."""


def processor_cache_from_config(config: MultiModalCacheConfig) -> BaseMultiModalProcessorCache | None:
    """The cache of the API server: none, processor-only, or the sender of `lru` or `shm`.

    The sender of `shm` creates the store; its `handle` is for the workers, and it is to be closed. StoreExistsError
    where there is one of that `shm_name`, such as another replica's.
    """
    check_config(config)
    if not config.ipc_cache_enabled:
        return processor_only_cache_from_config(config)
    if config.cache_type == "lru":
        return MultiModalProcessorSenderCache(config)
    try:
        writer = ObjectStoreWriter.create(
            config.shm_name,
            capacity=config.ipc_cache_bytes,
            n_readers=config.world_size,
            max_object_size=config.max_object_bytes,
            max_objects=config.shm_max_objects,
            prefault=config.shm_prefault,
        )
    except StoreExistsError as error:
        hint = "shm_name is one segment of a host: give each replica (data_parallel_external_lb) its own, or none; or "
        raise StoreExistsError(error.message, hint=hint + error.hint.partition("; ")[2]) from None
    try:
        return ShmObjectStoreSenderCache(config, writer)
    except BaseException:
        writer.close()
        raise


def processor_only_cache_from_config(config: MultiModalCacheConfig) -> MultiModalProcessorOnlyCache | None:
    """A cache for an API server that does not send: profiling, or a processor of its own; None where it is off."""
    check_config(config)
    return MultiModalProcessorOnlyCache(config) if config.processor_cache_enabled else None


def engine_receiver_cache_from_config(config: MultiModalCacheConfig) -> BaseMultiModalReceiverCache | None:
    """The cache of the engine core: the receiver of `lru`; else None: with `shm` it forwards references."""
    check_config(config)
    if config.ipc_cache_enabled and config.cache_type == "lru":
        return MultiModalReceiverCache(config)
    return None


def worker_receiver_cache_from_config(
    config: MultiModalCacheConfig, rank: int, handle: StoreHandle | None = None
) -> BaseMultiModalReceiverCache | None:
    """The cache of the worker of this rank: the receiver of `shm`, which is to be closed; None otherwise.

    The handle is the sender's, as an argument or as JSON in the environment variable `SHMSTORE_HANDLE`; ValueError
    where there is neither, or `rank` is none of 0 .. world_size - 1. TypeError, in any mode, for a rank that is no
    integer and a handle that is none.
    """
    check_config(config)
    if isinstance(rank, bool) or not isinstance(rank, Integral):
        raise TypeError(f"rank must be an int, not {type(rank).__name__}")
    if handle is not None and not isinstance(handle, StoreHandle):
        more = "; StoreHandle.from_json reads its to_json()" if isinstance(handle, str) else ""
        raise TypeError(f"handle must be a StoreHandle, not {type(handle).__name__}{more}")
    if not config.ipc_cache_enabled or config.cache_type != "shm":
        return None
    if not 0 <= rank < config.world_size:
        raise ValueError(f"rank {rank} is none of 0 .. {config.world_size - 1} (world_size)")
    if handle is None:
        text = os.environ.get(HANDLE_VARIABLE)
        if not text:
            raise ValueError(f"no store to attach to: pass the sender's handle, or its to_json() in {HANDLE_VARIABLE}")
        handle = StoreHandle.from_json(text)
    return ShmObjectStoreReceiverCache(ObjectStoreReader.attach(handle, rank=int(rank)))
