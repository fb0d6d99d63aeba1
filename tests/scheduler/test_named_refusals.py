"""What a refusal says: which argument, item or block it means, and what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from shmstore.errors import StoreFullError
from shmstore.scheduler import (
    BlockPool,
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    FullAttentionSpec,
    KVCacheManager,
    MultiModalBudget,
    Request,
    RequestEncoderCacheManager,
    compute_encoder_budget,
    make_kv_cache_config,
)
from tests.scheduler.helpers import admit, config, features, manager, request

LAYER = FullAttentionSpec(4, 1, 8, "float16")
CACHES: list[Any] = [EncoderCacheManager, RequestEncoderCacheManager, EncoderDecoderCacheManager]


@pytest.mark.parametrize(
    ("memory", "error"), [(0.9 * 10000, TypeError), ("64G", TypeError), (None, TypeError), (2**80, ValueError),
                          (2**63, ValueError), (-1, ValueError)],
)  # fmt: skip
def test_memory_that_is_no_number_of_bytes_is_refused_by_name(memory: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^memory_bytes must"):
        make_kv_cache_config({"l0": LAYER}, memory)


def test_a_number_of_blocks_is_a_plain_integer() -> None:
    import numpy as np

    num_blocks = make_kv_cache_config({"l0": LAYER}, np.int64(10 * LAYER.page_size_bytes)).num_blocks  # type: ignore[arg-type]
    assert (10, int) == (num_blocks, type(num_blocks))


BUDGET: dict[str, Any] = {"max_num_encoder_input_tokens": 8, "encoder_cache_size": 8, "max_num_batched_tokens": 8}
ITEMS: dict[str, Any] = {
    "compute_budget": 8, "cache_size": 8, "max_model_len": 8, "max_num_seqs": 8, "max_num_batched_tokens": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGET)
@pytest.mark.parametrize("modalities", [None, {}, {"image": 4}])
def test_a_budget_of_negative_numbers_is_refused_by_name(name: str, modalities: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*-1"):
        compute_encoder_budget(modalities, **BUDGET | {name: -1})
    with pytest.raises(TypeError, match=rf"^{name} must be an integer, not 1.5"):
        compute_encoder_budget(modalities, **BUDGET | {name: 1.5})


@pytest.mark.parametrize("name", ITEMS)
def test_items_of_a_negative_budget_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*-1"):
        MultiModalBudget({"image": 4}, {"image": 1}, **ITEMS | {name: -1})


def test_a_modality_of_negative_size_or_limit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^max_tokens_by_modality\['image'\] .*-4"):
        compute_encoder_budget({"video": 4, "image": -4}, **BUDGET)
    with pytest.raises(ValueError, match=r"^max_tokens_by_modality\['image'\] .*-4"):
        MultiModalBudget({"image": -4}, {"image": 1}, **ITEMS)
    with pytest.raises(ValueError, match=r"^limits_per_prompt\['image'\] .*-1"):
        MultiModalBudget({"image": 4}, {"image": -1}, **ITEMS)


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize(("size", "error"), [(1.5, TypeError), (None, TypeError), (-1, ValueError)])
def test_a_cache_of_no_whole_size_is_refused(make: Any, size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^cache_size must"):
        make(size)


@pytest.mark.parametrize("make", CACHES)
def test_an_item_that_the_request_does_not_have_is_named(make: Any) -> None:
    cache, req = make(10), Request("r", range(8), mm_features=features(("A", 0, 4), ("B", 4, 4)))
    for i, message in ((2, "item 2: the request has 2 items, counted from 0"), (-1, "item -1")):
        with pytest.raises(IndexError, match=message):
            cache.allocate(req, i)
    assert (10, set()) == (cache.num_free_slots, cache.get_cached_input_ids(req))


@pytest.mark.parametrize("make", CACHES)
def test_an_item_larger_than_the_cache_is_not_told_to_wait_for_room(make: Any) -> None:
    cache, req = make(10), Request("r", range(40), mm_features=features(("A", 0, 11), ("B", 11, 8), ("C", 20, 8)))
    with pytest.raises(StoreFullError, match=r"needs 11 .* and the whole cache has 10") as never:
        cache.allocate(req, 0)
    assert "never fits" in str(never.value.hint)
    cache.allocate(req, 1)
    with pytest.raises(StoreFullError, match=r"needs 8 .* and 2 are left") as later:
        cache.allocate(req, 2)
    assert "free a request" in str(later.value.hint)


@pytest.mark.parametrize("collector", [False, True])
@pytest.mark.parametrize("bad", [0, -1, 9, 2**31, -(2**70)])
def test_a_block_id_outside_the_pool_is_named(bad: int, collector: bool) -> None:
    class Deaf:
        def __getattr__(self, name: str) -> Any:
            return lambda *about: None

    kv = manager(9, ("full", 4), metrics_collector=Deaf() if collector else None)
    admit(kv, request("a", range(9)))
    with pytest.raises(ValueError, match=rf"^block id {bad} (is outside the pool|names the null block): .* 1 to 8"):
        kv.evict_blocks([1, bad, 2])
    assert [1, 2] == kv.block_pool.cached_block_ids()
    with pytest.raises(TypeError, match=r"^a block id must be an integer, not 1\.5"):
        kv.evict_blocks([1, 1.5])  # type: ignore[list-item]
    assert [1, 2] == kv.block_pool.cached_block_ids()


def test_a_block_of_ones_own_outside_the_pool_is_named() -> None:
    import types

    pool = BlockPool(9, True)
    for call in (pool.free_blocks, lambda blocks: pool.touch([blocks])):
        with pytest.raises(ValueError, match=r"^block id 9 is outside the pool"):
            call([types.SimpleNamespace(block_id=9)])  # type: ignore[list-item]
    pool.check_valid()


def test_a_manager_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"config must be a KVCacheConfig .*not None"):
        KVCacheManager(None, 64, 4)  # type: ignore[arg-type]
    for name in ("max_model_len", "hash_block_size"):
        for wrong in (None, 64.0):
            with pytest.raises(TypeError, match=rf"^{name} must be an integer, not {wrong}"):
                KVCacheManager(config(9, ("full", 4)), **{"max_model_len": 64, "hash_block_size": 4} | {name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, "a"])
def test_what_is_no_request_is_refused_with_what_is_expected(wrong: Any) -> None:
    kv = manager(9, ("full", 4))
    admit(kv, request("a", range(9)))
    before = kv.get_block_ids("a")
    calls: list[Any] = [
        lambda: kv.free(wrong), lambda: kv.get_computed_blocks(wrong), lambda: kv.allocate_slots(wrong, 1),
        lambda: kv.cache_blocks(wrong, 4),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"request must have the attributes of a Request.*: " + repr(wrong)):
            call()
    assert before == kv.get_block_ids("a")


def test_a_refusal_says_how_many_hashes_or_blocks_are_missing() -> None:
    kv, req = manager(9, ("full", 4)), Request("a", range(9))
    with pytest.raises(ValueError, match=r"hashes.*\b2 are needed and 0 there"):
        kv.allocate_slots(req, 9)
    assert kv.allocate_slots(req, 9, delay_cache_blocks=True) is not None
    with pytest.raises(ValueError, match=r"blocks.*\b5 are needed and 3 there"):
        kv.cache_blocks(req, 20)
