"""Specs, grouping of layers, and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shmstore.scheduler import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    make_kv_cache_config,
)


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
    assert 16 * 656 == MLAAttentionSpec(16, 1, 576, "uint8", cache_dtype="fp8_ds_mla").page_size_bytes
    assert 16 * 352 == MLAAttentionSpec(16, 1, 576, "uint8", cache_dtype="nvfp4_ds_mla").page_size_bytes
    assert (3 * 5 * 2 + 7 * 4) == MambaSpec(16, ((3, 5), (7,)), (dtype, "float32")).page_size_bytes


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


def test_a_mamba_page_is_padded_because_it_does_not_grow_with_its_block() -> None:
    small = MambaSpec(16, ((8,),), ("float16",))
    page = full().page_size_bytes
    config = make_kv_cache_config({"m": small, "f": full()}, 1 << 20)
    assert [replace(small, page_size_padded=page), full()] == [group.kv_cache_spec for group in config.kv_cache_groups]
    assert page == config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    already = replace(small, page_size_padded=2 * page)
    config = make_kv_cache_config({"m": already, "f": full()}, 1 << 20)
    assert [already, full(32)] == [group.kv_cache_spec for group in config.kv_cache_groups]


def test_a_large_mamba_page_grows_to_blocks_of_the_attention() -> None:
    page = full().page_size_bytes
    large = MambaSpec(16, ((2 * page + 1,),), ("uint8",))
    config = make_kv_cache_config({"m": large, "f": full()}, 1 << 20)
    assert [replace(large, page_size_padded=3 * page), full(48)] == [g.kv_cache_spec for g in config.kv_cache_groups]


def test_one_group_with_all_layers_divides_the_memory_by_all_of_them() -> None:
    page = full().page_size_bytes
    assert [0, 1, 1, 2] == [make_kv_cache_config(layers(a=(4, full())), n * page).num_blocks for n in (3, 4, 7, 8)]
