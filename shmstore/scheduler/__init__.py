"""The scheduler's state: what stays in the KV cache and in the encoder cache. The workers hold the bytes.

Start with `KVCacheManager`, `EncoderCacheManager` and `compute_encoder_budget`; ``docs/guides/schedulers.md`` shows a
whole step loop. Nothing here uses shared memory, and nothing here is thread-safe.
"""

from shmstore.bindings.hashlist import BlockHashes
from shmstore.scheduler.block_hasher import BlockHasher
from shmstore.scheduler.block_pool import BlockPool
from shmstore.scheduler.budget import MultiModalBudget, compute_encoder_budget
from shmstore.scheduler.encoder_cache import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    RequestEncoderCacheManager,
)
from shmstore.scheduler.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from shmstore.scheduler.kv_cache_blocks import KVCacheBlock, KVCacheBlocks
from shmstore.scheduler.kv_cache_config import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from shmstore.scheduler.kv_cache_groups import make_kv_cache_config
from shmstore.scheduler.kv_cache_manager import KVCacheManager
from shmstore.scheduler.metrics import BlockLifetime, CachingMetrics, KVCacheMetricsCollector, PrefixCacheStats
from shmstore.scheduler.request import Request, RequestLike

__all__ = [
    "AllBlocksCleared",
    "AttentionSpec",
    "BlockHasher",
    "BlockHashes",
    "BlockLifetime",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "CachingMetrics",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderCacheManager",
    "EncoderDecoderCacheManager",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVCacheSpec",
    "KVEventBatch",
    "MLAAttentionSpec",
    "MambaSpec",
    "MultiModalBudget",
    "PrefixCacheStats",
    "Request",
    "RequestEncoderCacheManager",
    "RequestLike",
    "SlidingWindowSpec",
    "compute_encoder_budget",
    "make_kv_cache_config",
]
