"""Caches of preprocessed multi-modal items: don't preprocess twice, don't send twice.

The API server has a processor cache, the engine core or the workers a receiver cache; `MultiModalCacheConfig` says
which, and the factories build them. It needs torch, which the extra ``torch`` brings.
"""

from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache, BaseMultiModalReceiverCache
from shmstore.multimodal.caches.counts import CacheInfo
from shmstore.multimodal.caches.lru import LRUCache, MultiModalCache
from shmstore.multimodal.caches.lru_pair import (
    MirroredProcessingCache,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from shmstore.multimodal.caches.shm_receiver import ShmObjectStoreReceiverCache
from shmstore.multimodal.caches.shm_sender import ShmObjectStoreSenderCache
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.factories import (
    engine_receiver_cache_from_config,
    processor_cache_from_config,
    processor_only_cache_from_config,
    worker_receiver_cache_from_config,
)
from shmstore.multimodal.values import codec as _codec  # noqa: F401 it registers the types with the serializer
from shmstore.multimodal.values.fields import (
    MultiModalBatchedField,
    MultiModalField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from shmstore.multimodal.values.hashing import hash_item
from shmstore.multimodal.values.items import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
    ResolvedPromptUpdate,
)
from shmstore.multimodal.values.types import CacheTypes
from shmstore.multimodal.values.updates import decode_updates, encode_updates

__all__ = [
    "BaseMultiModalProcessorCache",
    "BaseMultiModalReceiverCache",
    "CacheInfo",
    "CacheTypes",
    "LRUCache",
    "MirroredProcessingCache",
    "MultiModalBatchedField",
    "MultiModalCache",
    "MultiModalCacheConfig",
    "MultiModalFeatureSpec",
    "MultiModalField",
    "MultiModalFieldConfig",
    "MultiModalFieldElem",
    "MultiModalFlatField",
    "MultiModalKwargsItem",
    "MultiModalKwargsItems",
    "MultiModalProcessorOnlyCache",
    "MultiModalProcessorSenderCache",
    "MultiModalReceiverCache",
    "MultiModalSharedField",
    "PlaceholderRange",
    "ResolvedPromptUpdate",
    "ShmObjectStoreReceiverCache",
    "ShmObjectStoreSenderCache",
    "decode_updates",
    "encode_updates",
    "engine_receiver_cache_from_config",
    "hash_item",
    "processor_cache_from_config",
    "processor_only_cache_from_config",
    "worker_receiver_cache_from_config",
]
