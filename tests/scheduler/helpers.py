"""Small stand-ins and builders that the scheduler tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmstore.scheduler import (
    BlockHasher,
    BlockPool,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
)


@dataclass(frozen=True)
class Place:
    """Stands in for a placeholder range."""

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    @property
    def get_num_embeds(self) -> int:
        return self.length if self.is_embed is None else sum(self.is_embed)


@dataclass(frozen=True)
class Feature:
    """Stands in for a multi-modal feature."""

    identifier: str
    mm_position: Place


def features(*items: Sequence[Any]) -> list[Feature]:
    return [Feature(identifier, Place(offset, length)) for identifier, offset, length in items]


def hasher(block_size: int, library: str = "auto", **options: Any) -> BlockHasher:
    """A hasher as on this host, or with `library` "hashlib" as on one without libcrypto."""
    made = BlockHasher(block_size, **options)
    made._in_c = made._in_c and library == "auto"
    return made


def spec(kind: str, block_size: int, parameter: int = 0) -> KVCacheSpec:
    attention: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
    match kind:
        case "full":
            return FullAttentionSpec(**attention)
        case "mla":
            return MLAAttentionSpec(**attention)
        case "sw":
            return SlidingWindowSpec(**attention, sliding_window=parameter)
        case "chunk":
            return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=parameter)
        case "mamba":
            return MambaSpec(block_size, ((4, 4),), ("float32",), parameter)
        case "cross":
            return CrossAttentionSpec(**attention)
    raise ValueError(kind)


def config(num_blocks: int, *groups: Sequence[Any], marked: Sequence[int] = ()) -> KVCacheConfig:
    """A configuration of these groups, of which those with the numbers in `marked` are the draft model's."""
    made = [KVCacheGroupSpec([f"layer{i}"], spec(*group), i in marked) for i, group in enumerate(groups)]
    return KVCacheConfig(num_blocks, made)


def manager(num_blocks: int, *groups: Sequence[Any], hash_block_size: int = 4, **options: Any) -> KVCacheManager:
    made = config(num_blocks, *groups, marked=options.pop("marked", ()))
    return KVCacheManager(made, options.pop("max_model_len", 1 << 20), hash_block_size, **options)


def request(request_id: str, tokens: Sequence[int], block_size: int = 4, **options: Any) -> Request:
    return Request(request_id, tokens, block_hasher=BlockHasher(block_size), **options)


def admit(kv: KVCacheManager, req: Request, **options: Any) -> tuple[int, tuple[list[int], ...] | None]:
    """Look the prefix up and allocate the rest of the prompt; (hit tokens, new ids of each group or None)."""
    blocks, hit = kv.get_computed_blocks(req)
    new = kv.allocate_slots(req, req.num_tokens - hit, hit, blocks, **options)
    if new is None:
        return hit, None
    req.num_computed_tokens = req.num_tokens
    return hit, new.get_block_ids()


def pool_state(pool: BlockPool) -> Any:
    pool.check_valid()
    return pool.free_block_ids(), pool.ref_counts(), pool.cached_block_ids(), pool.num_cached_keys


def state(kv: KVCacheManager) -> Any:
    """Everything that a refused call must leave as it was, of requests "a", "b" and "c"."""
    kv.check_valid()
    return pool_state(kv.block_pool), *map(kv.get_block_ids, "abc")
