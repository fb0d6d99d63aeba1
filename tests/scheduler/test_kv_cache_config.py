"""Specs, grouping of layers, and metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shmstore.scheduler import (
    BlockPool,
    CachingMetrics,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheMetricsCollector,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    PrefixCacheStats,
    SlidingWindowSpec,
    make_kv_cache_config,
)
from tests.scheduler.helpers import admit, manager, request


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: full(0),
        lambda: sliding(window=0),
        lambda: ChunkedLocalAttentionSpec(4, 1, 1, "float16", 0),
        lambda: MambaSpec(4, ((1,),), ()),
        lambda: MambaSpec(4, ((1,),), ("float16",), -1),
        lambda: FullAttentionSpec(4, 1, 1, "no such dtype").page_size_bytes,
        lambda: MambaSpec(4, ((1,),), ("float16",), 0, 1),
        lambda: MLAAttentionSpec(4, 1, 1, "uint8", cache_dtype="no such format"),
        lambda: make_kv_cache_config({"a": full()}, -1),
        lambda: make_kv_cache_config({"a": full(heads=4), "b": sliding(heads=3)}, 1 << 20),
        lambda: make_kv_cache_config({"a": full(window=4), "b": full(window=5)}, 1 << 20),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        make()


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


# ---- metrics ----


def test_the_hit_rate_is_that_of_the_most_recent_requests() -> None:
    metrics = CachingMetrics(max_recent_requests=5)
    assert 0.0 == metrics.hit_rate
    metrics.observe(PrefixCacheStats(requests=3, queries=100, hits=100))
    metrics.observe(PrefixCacheStats())
    metrics.observe(PrefixCacheStats(requests=2, queries=100, hits=0))
    assert 0.5 == metrics.hit_rate
    metrics.observe(PrefixCacheStats(requests=1, queries=100, hits=50))
    assert 0.25 == metrics.hit_rate
    metrics.observe(PrefixCacheStats(requests=99, queries=10, hits=9))
    assert 0.9 == metrics.hit_rate
    metrics.observe(PrefixCacheStats(reset=True, requests=1, queries=4, hits=1))
    assert 0.25 == metrics.hit_rate
    metrics.observe(PrefixCacheStats(reset=True))
    assert 0.0 == metrics.hit_rate
    with pytest.raises(ValueError, match="max_recent_requests"):
        CachingMetrics(0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_sampled_block_tells_its_life_when_it_loses_its_contents() -> None:
    clock = Clock()
    metrics = KVCacheMetricsCollector(1.0, clock=clock)
    kv = manager(4, ("full", 4), metrics_collector=metrics, free_order="tail")
    admit(kv, request("a", range(8)))
    for number, now in enumerate((10.0, 11.0, 13.0, 17.0, 25.0)):
        clock.now = now
        req = request(f"b{number}", range(8))
        assert (4, ([3],)) == admit(kv, req)
        kv.evict_blocks([3])  # its second block has the contents of the first request's
        kv.free(req)
        metrics.drain_events()
    clock.now = 30.0
    kv.evict_blocks([1, 1, 3])
    (event,) = metrics.drain_events()
    assert (30.0, 5.0, (2.0, 4.0, 8.0)) == (event.lifetime_seconds, event.idle_seconds, event.reuse_gaps_seconds)
    assert [] == metrics.drain_events()


def test_a_block_that_is_handed_out_again_ends_its_sample_and_begins_one() -> None:
    clock = Clock()
    metrics = KVCacheMetricsCollector(1.0, clock=clock)
    pool = BlockPool(2, True, metrics=metrics)
    for now in (1.0, 4.0, 9.0):
        clock.now = now
        pool.free_blocks(pool.get_new_blocks(1))
    assert [(3.0, 3.0, ()), (5.0, 5.0, ())] == [
        (e.lifetime_seconds, e.idle_seconds, e.reuse_gaps_seconds) for e in metrics.drain_events()
    ]
    assert pool.reset_prefix_cache() is True
    pool.get_new_blocks(1)
    assert [] == metrics.drain_events()


def test_the_sample_rate_says_how_many() -> None:
    numbers = iter([0.3, 0.1, 0.5, 0.19])
    metrics = KVCacheMetricsCollector(0.2, rng=lambda: next(numbers))
    pool = BlockPool(9, True, metrics=metrics)
    blocks = pool.get_new_blocks(4)
    for block in blocks:
        metrics.on_block_accessed(block)
        metrics.on_block_evicted(block)
    assert 2 == len(metrics.drain_events())
    metrics.on_block_evicted(blocks[1])
    assert [] == metrics.drain_events()
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="sample_rate"):
            KVCacheMetricsCollector(wrong)


def test_a_collector_of_ones_own_hears_of_every_block() -> None:
    class Own:
        def __init__(self) -> None:
            self.heard: list[tuple[str, int]] = []

        def on_block_allocated(self, block: Any) -> None:
            self.heard.append(("allocated", block.block_id))

        def on_block_accessed(self, block: Any) -> None:
            self.heard.append(("accessed", block.block_id))

        def on_block_evicted(self, block: Any) -> None:
            self.heard.append(("evicted", block.block_id))

        def reset(self) -> None:
            self.heard.append(("reset", 0))

    own = Own()
    kv = manager(4, ("full", 4), metrics_collector=own, free_order="tail")
    a = request("a", range(5))
    admit(kv, a)
    admit(kv, request("b", range(5)))
    assert [(w, i) for i in (1, 2) for w in ("evicted",)] == own.heard[:2]
    assert [("allocated", 1), ("allocated", 2), ("accessed", 1), ("evicted", 3), ("allocated", 3)] == own.heard[2:]
    kv.evict_blocks([3, 1])
    assert [("evicted", 1)] == own.heard[7:]
    kv.free(a)
    kv.free(request("b", [1]))
    assert kv.reset_prefix_cache() is True
    assert [("reset", 0)] == own.heard[8:]
