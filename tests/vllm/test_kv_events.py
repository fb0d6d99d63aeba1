"""What a scheduler publishes is read by vLLM's own types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events as vllm
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

from shmstore.scheduler import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVEventBatch,
    Request,
    SlidingWindowSpec,
)


def some_batch(int_event_hashes: bool) -> tuple[KVEventBatch, Request]:
    """Every kind of event, of two groups and of a request with every kind of extra key but embeddings."""
    shape: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=9)]
    config = KVCacheConfig(20, [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)])
    manager = KVCacheManager(config, 64, 4, enable_kv_cache_events=True, int_event_hashes=int_event_hashes)
    items = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for name, offset, length in (("a", 1, 2), ("b", 3, 7))
    ]
    request = Request("r", range(13), mm_features=items, cache_salt="s")
    request.lora_request = LoRARequest("L", 3, "/adapters/L")  # type: ignore[attr-defined]
    request.block_hashes.extend(BlockHasher(4)(request))
    for step in (5, 8):
        manager.allocate_slots(request, step)
        request.num_computed_tokens += step
    manager.evict_blocks(manager.get_block_ids("r")[1][1:2])
    manager.free(request)
    manager.reset_prefix_cache()
    return KVEventBatch(12.5, manager.take_events(), 1), request


@pytest.mark.parametrize("int_event_hashes", [False, True])
def test_maps_are_read_by_the_types_of_this_vllm(int_event_hashes: bool) -> None:
    ours, request = some_batch(int_event_hashes)
    theirs = msgspec.msgpack.decode(ours.to_msgpack(), type=vllm.KVEventBatch)
    assert (12.5, 1) == (theirs.ts, theirs.data_parallel_rank)

    def shown(i: int) -> bytes | int:
        block_hash = request.block_hashes[i]
        return int.from_bytes(block_hash[-8:], "big") if int_event_hashes else block_hash

    def stored(first: int, end: int, group: int) -> Any:
        keys = [generate_block_hash_extra_keys(request, s, s + 4, 0)[0] for s in range(4 * first, 4 * end, 4)]
        return vllm.BlockStored(
            block_hashes=[shown(i) for i in range(first, end)],
            parent_block_hash=shown(first - 1) if first else None,
            token_ids=list(range(4 * first, 4 * end)),
            block_size=4,
            lora_id=3,
            medium="GPU",
            lora_name="L",
            # msgpack knows one kind of sequence, so that pairs within a key arrive as lists
            extra_keys=[
                tuple(list(key) if isinstance(key, tuple) else key for key in own) for own in to_event_extra_keys(keys)
            ],
            group_idx=group,
            kv_cache_spec_kind=("full_attention", "sliding_window")[group],
            kv_cache_spec_sliding_window=(None, 9)[group],
        )

    removed = vllm.BlockRemoved([shown(1)], "GPU", 1)
    assert [
        stored(0, 1, 0), stored(0, 1, 1), stored(1, 3, 0), stored(1, 3, 1), removed, vllm.AllBlocksCleared(),
    ] == theirs.events  # fmt: skip
    assert theirs.events == [
        msgspec.convert(event.to_dict(), type(own)) for event, own in zip(ours.events, theirs.events, strict=True)
    ]


def test_what_this_vllm_publishes_is_read_as_a_batch() -> None:
    ours, _ = some_batch(False)
    theirs = msgspec.msgpack.decode(ours.to_msgpack(), type=vllm.KVEventBatch)
    assert ours == KVEventBatch.from_msgpack(msgspec.msgpack.encode(theirs))
