"""Specs, grouping of layers, and metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shmstore.scheduler import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
    make_kv_cache_config,
)
from tests.support import raises


def full(block_size: int = 16, heads: int = 4, window: int | None = None) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, heads, 8, "bfloat16", window)


def sliding(block_size: int = 16, heads: int = 4, window: int = 128) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, heads, 8, "bfloat16", window)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "torch.bfloat16", "float16", torch.bfloat16, np.float16, np.dtype("float16")]
)
def test_pages_are_keys_and_values_of_a_block(dtype: Any) -> None:
    itemsize = 2
    assert 2 * 16 * 4 * 8 * itemsize == FullAttentionSpec(16, 4, 8, dtype).page_size_bytes
    assert 16 * 4 * 8 * itemsize == MLAAttentionSpec(16, 4, 8, dtype).page_size_bytes
    assert 2 * 16 * 4 * 8 * itemsize == SlidingWindowSpec(16, 4, 8, dtype, 32).page_size_bytes
    assert (3 * 5 * 2 + 7 * 4) == MambaSpec(16, ((3, 5), (7,)), (dtype, "float32")).page_size_bytes


def test_a_dtype_that_is_none_is_refused_with_an_example() -> None:
    with raises(ValueError, names=("dtype", "'bf17'", "'bfloat16'")):
        FullAttentionSpec(16, 4, 8, "bf17")


def test_specs_are_frozen_values() -> None:
    assert full() == full()
    assert full() != full(window=4)
    assert MambaSpec(4, [[2]], ["float32"]) == MambaSpec(4, ((2,),), ("float32",))  # type: ignore[arg-type]
    assert 1 == len({full(), full()})
    with pytest.raises(AttributeError):
        full().block_size = 3  # type: ignore[misc]


def layers(**counts: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {f"{name}{i}": spec for name, (n, spec) in counts.items() for i in range(n)}


def test_equal_layers_make_one_group_with_all_of_them() -> None:
    config = make_kv_cache_config(layers(a=(3, full())), 10 * 3 * full().page_size_bytes + 5)
    assert (10, [KVCacheGroupSpec(("a0", "a1", "a2"), full())]) == (config.num_blocks, config.kv_cache_groups)


def test_full_attention_with_a_recorded_window_merges() -> None:
    config = make_kv_cache_config(layers(a=(2, full()), b=(2, full(window=64))), 1 << 20)
    assert [KVCacheGroupSpec(("a0", "a1", "b0", "b1"), full(window=64))] == config.kv_cache_groups


def test_groups_hold_as_many_layers_as_the_rarest_spec_has() -> None:
    config = make_kv_cache_config(layers(w=(5, sliding()), f=(2, full())), 7 * 2 * full().page_size_bytes)
    assert [
        KVCacheGroupSpec(("w0", "w3"), sliding()),
        KVCacheGroupSpec(("w1", "w4"), sliding()),
        KVCacheGroupSpec(("w2",), sliding()),
        KVCacheGroupSpec(("f0", "f1"), full()),
    ] == config.kv_cache_groups
    assert 7 == config.num_blocks


def test_nearly_equal_counts_make_groups_of_the_larger_one() -> None:
    config = make_kv_cache_config(layers(w=(11, sliding()), f=(9, full())), 1 << 20)
    assert [11, 9] == [len(group.layer_names) for group in config.kv_cache_groups]
    config = make_kv_cache_config(layers(w=(5, sliding()), f=(4, full())), 1 << 20)
    assert [3, 2, 4] == [len(group.layer_names) for group in config.kv_cache_groups]


def test_pages_are_made_equal_by_larger_blocks() -> None:
    config = make_kv_cache_config(
        layers(f=(1, full(16, heads=2)), w=(1, sliding(16, heads=8))), 100 * sliding(16, 8).page_size_bytes
    )
    assert [full(64, heads=2), sliding(16, heads=8)] == [group.kv_cache_spec for group in config.kv_cache_groups]
    assert 100 == config.num_blocks


def test_layers_of_one_kind_and_another_shape_are_groups_of_their_own() -> None:
    config = make_kv_cache_config({"a": full(16, heads=2), "b": full(16, heads=4)}, 10 * full().page_size_bytes)
    assert [full(32, heads=2), full(16, heads=4)] == [group.kv_cache_spec for group in config.kv_cache_groups]
    assert 10 == config.num_blocks


def test_full_attention_with_blocks_of_several_sizes_is_one_group_of_the_largest() -> None:
    config = make_kv_cache_config({"a": full(8, window=5), "b": full(16)}, 1 << 20)
    assert [full(16, window=5)] == [group.kv_cache_spec for group in config.kv_cache_groups]


def test_a_mamba_page_that_does_not_fit_the_others_is_refused() -> None:
    small = MambaSpec(16, ((8,),), ("float16",))
    with pytest.raises(ValueError, match="no block size"):
        make_kv_cache_config({"m": small, "f": full()}, 1 << 20)


def test_one_group_with_all_layers_divides_the_memory_by_all_of_them() -> None:
    page = full().page_size_bytes
    assert [0, 1, 1, 2] == [make_kv_cache_config(layers(a=(4, full())), n * page).num_blocks for n in (3, 4, 7, 8)]


def test_a_model_without_layers_has_a_configuration_that_works() -> None:
    config = make_kv_cache_config({}, 0)
    assert KVCacheConfig(1, []) == config
    manager = KVCacheManager(config, 64, 4, log_stats=True)
    requests = [Request(f"r{i}", range(9), block_hasher=BlockHasher(4)) for i in range(200)]
    for request in requests:
        assert (manager.empty_kv_cache_blocks, 0) == manager.get_computed_blocks(request)
        for new in (9, 1):
            assert manager.allocate_slots(request, new) is manager.empty_kv_cache_blocks
            request.num_computed_tokens += new
        manager.cache_blocks(request, 8)
        manager.check_valid()
    assert ((), [], 0.0) == (manager.get_block_ids("r7"), manager.get_num_common_prefix_blocks("r7"), manager.usage)
    for request in requests:
        manager.free(request)
    manager.check_valid()
