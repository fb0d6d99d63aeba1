"""Items and configurations in bytes, shared by the tests of the multi-modal caches."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shmstore import StoreHandle
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    CacheInfo,
    MultiModalBatchedField,
    MultiModalCacheConfig,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
    ResolvedPromptUpdate,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
    processor_cache_from_config,
    worker_receiver_cache_from_config,
)
from shmstore.multimodal.values.types import MULTIMODAL


class OwnProcessorCache(BaseMultiModalProcessorCache):
    """A processor cache of another package, with only the methods that it must have."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.log: list[tuple[str, str]] = []

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self.stored

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        self.log.append(("get", mm_hash))
        return self.stored.setdefault(mm_hash, mm_item)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        self.log.append(("touch", mm_hash))

    def clear_cache(self) -> None:
        self.stored.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        return CacheInfo()


class OwnReceiverCache(BaseMultiModalReceiverCache):
    """A receiver of another package, with only the methods that it must have."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.log: list[tuple[str, str]] = []

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        self.log.append(("get", mm_hash))
        return self.stored.setdefault(mm_hash, mm_item)

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: Any = None) -> None:
        self.log.append(("touch", mm_hash))

    def clear_cache(self) -> None:
        self.stored.clear()


GIB = 1 << 30
THREADS = 4
MIB = 1 << 20


def item(nbytes: int, fill: int = 1) -> MultiModalKwargsItem:
    """Return an item of exactly this size."""
    data = torch.full((nbytes,), fill, dtype=torch.uint8)
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "pixels", data, MultiModalBatchedField())])


def three_tensors(nbytes: int) -> MultiModalKwargsItem:
    """Return an item such as a processor makes: pixels of about this size, a grid and token types."""
    pixels = torch.arange(nbytes // 2, dtype=torch.int16).view(torch.bfloat16)
    elems = [
        MultiModalFieldElem("image", "pixel_values", pixels, MultiModalFlatField([slice(0, len(pixels))])),
        MultiModalFieldElem("image", "image_grid_thw", torch.tensor([1, 16, 16]), MultiModalBatchedField()),
        MultiModalFieldElem("image", "token_types", torch.zeros(64, dtype=torch.int32), MultiModalSharedField(1)),
    ]
    return MultiModalKwargsItem.from_elems(elems)


def update(mm_hash: str) -> ResolvedPromptUpdate:
    """Return a prompt update that differs from those of other items."""
    return ResolvedPromptUpdate("image", 0, "replace", "<image>", f"<image:{mm_hash}>")


def config(nbytes: int, ipc: int | None = None, **more: Any) -> MultiModalCacheConfig:
    """Return a configuration from sizes in bytes."""
    ipc_gb = None if ipc is None else ipc / GIB
    return MultiModalCacheConfig(processor_cache_gb=nbytes / GIB, ipc_cache_gb=ipc_gb, **more)


def features(mm_hashes: list[str], data: list[Any]) -> list[MultiModalFeatureSpec]:
    """Return the features that P0 sends."""
    return [
        MultiModalFeatureSpec(piece, "image", mm_hash, PlaceholderRange(0, 4))
        for mm_hash, piece in zip(mm_hashes, data, strict=True)
    ]


def processor_cache(settings: MultiModalCacheConfig) -> BaseMultiModalProcessorCache:
    """Return P0's cache; the configuration must have one."""
    cache = processor_cache_from_config(settings)
    assert cache is not None
    return cache


def shm_sender(settings: MultiModalCacheConfig, types: Any = MULTIMODAL) -> ShmObjectStoreSenderCache:
    """Return P0's cache for `shm`."""
    cache = processor_cache_from_config(settings, types=types)
    assert isinstance(cache, ShmObjectStoreSenderCache)
    return cache


def shm_worker(
    settings: MultiModalCacheConfig, rank: int, handle: StoreHandle | None = None
) -> ShmObjectStoreReceiverCache:
    """Return a worker's cache for `shm`."""
    cache = worker_receiver_cache_from_config(settings, rank, handle)
    assert isinstance(cache, ShmObjectStoreReceiverCache)
    return cache


def in_threads(work: Callable[[random.Random], Any]) -> list[Any]:
    barrier = threading.Barrier(THREADS)

    def run(seed: int) -> Any:
        barrier.wait()
        return work(random.Random(seed))

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result() for future in [pool.submit(run, seed) for seed in range(THREADS)]]
