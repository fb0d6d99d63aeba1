"""Configurations for several workers: groups, buffers, numbers of blocks, and the longest request that fits."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from shmstore.errors import KVCacheMemoryError
from shmstore.scheduler import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SlidingWindowSpec,
    UniformTypeSpec,
    make_kv_cache_config,
    make_kv_cache_configs,
    merge_specs,
)

SHAPE: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
FULL = FullAttentionSpec(**SHAPE)
WIDE = replace(FULL, num_kv_heads=4)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=8)
CHUNK = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=8)
CROSS = CrossAttentionSpec(**SHAPE)
PAGE = FULL.page_size_bytes


def names(config: KVCacheConfig) -> list[tuple[str, ...]]:
    return [tuple(group.layer_names) for group in config.kv_cache_groups]


def specs(config: KVCacheConfig) -> list[KVCacheSpec]:
    return [group.kv_cache_spec for group in config.kv_cache_groups]


# ---- several workers ----


def test_workers_of_one_model_get_the_groups_of_all_its_layers() -> None:
    stages = [{"f0": FULL, "w0": WINDOW, "w1": WINDOW}, {"f1": FULL, "w2": WINDOW, "w3": WINDOW}]
    first, second = make_kv_cache_configs(stages, [20 * PAGE, 30 * PAGE])
    assert [("f0",), ("w0",), ("w1",)] == names(first)
    assert [("f1",), ("w2",), ("w3",)] == names(second)
    assert [FULL, WINDOW, WINDOW] == specs(first) == specs(second)


def test_the_worker_that_holds_the_fewest_blocks_counts_for_all() -> None:
    configs = make_kv_cache_configs(
        [{"a": FULL, "b": FULL}, {"c": FULL}, {"d": FULL}], [20 * PAGE, 11 * PAGE, 9 * PAGE]
    )
    assert [9, 9, 9] == [config.num_blocks for config in configs]
    assert [[9 * PAGE, 9 * PAGE], [9 * PAGE], [9 * PAGE]] == [[t.size for t in c.kv_cache_tensors] for c in configs]


def test_workers_that_share_all_layers_get_equal_configurations() -> None:
    one, other = make_kv_cache_configs([{"a": FULL, "b": WINDOW}] * 2, [20 * PAGE, 30 * PAGE])
    assert one == other == make_kv_cache_config({"a": FULL, "b": WINDOW}, 20 * PAGE)


def test_a_worker_without_layers_of_a_group_has_the_group_all_the_same() -> None:
    first, second, third = make_kv_cache_configs([{"a": FULL}, {"b": WINDOW}, {}], [20 * PAGE, 30 * PAGE, 0])
    assert [[("a",), ()], [(), ("b",)], [(), ()]] == [names(first), names(second), names(third)]
    assert [FULL, WINDOW] == specs(first) == specs(second) == specs(third)
    assert [20, 20, 20] == [first.num_blocks, second.num_blocks, third.num_blocks]
    assert () == third.kv_cache_tensors


@pytest.mark.parametrize(
    ("workers", "memory", "error", "named"),
    [
        ([{"a": FULL}], [], ValueError, "1"),
        ([], [], ValueError, "memory_bytes"),
        ([{"a": FULL}, {"a": WIDE}], [1, 1], ValueError, "'a'"),
        ([{"a": FULL}, {}], [1, -1], ValueError, r"memory_bytes\[1\]"),
        ([{"a": FULL}, {}], [1, 0.5], TypeError, r"memory_bytes\[1\]"),
    ],
)
def test_workers_that_do_not_fit_together_are_refused(
    workers: Any, memory: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        make_kv_cache_configs(workers, memory)


# ---- buffers ----


def test_the_first_layers_of_all_groups_share_a_buffer_then_the_second_ones() -> None:
    layers = {"f0": FULL, "f1": FULL, "w0": WINDOW, "w1": WINDOW, "w2": WINDOW}
    config = make_kv_cache_config(layers, 10 * 2 * PAGE + 1)
    assert [("f0", "f1"), ("w0", "w2"), ("w1",)] == names(config)
    assert (
        KVCacheTensor(10 * PAGE, ("f0", "w0", "w1")),
        KVCacheTensor(10 * PAGE, ("f1", "w2")),
    ) == config.kv_cache_tensors


def test_layers_of_one_type_are_one_group_with_a_buffer_each() -> None:
    config = make_kv_cache_config({"a": FULL, "b": WIDE}, 10 * 3 * PAGE + PAGE)
    (group,) = config.kv_cache_groups
    assert KVCacheGroupSpec(("a", "b"), UniformTypeSpec(4, {"a": FULL, "b": WIDE})) == group
    assert (3 * PAGE, 10) == (group.kv_cache_spec.page_size_bytes, config.num_blocks)
    assert (KVCacheTensor(10 * PAGE, ("a",)), KVCacheTensor(20 * PAGE, ("b",))) == config.kv_cache_tensors


def test_each_worker_has_its_own_layers_of_one_type() -> None:
    first, second, third = make_kv_cache_configs([{"a": FULL, "b": WIDE}, {"c": WIDE}, {}], [30 * PAGE, 22 * PAGE, 0])
    assert [UniformTypeSpec(4, {"a": FULL, "b": WIDE})] == specs(first)
    assert [UniformTypeSpec(4, {"c": WIDE})] == specs(second)
    assert [UniformTypeSpec(4, {"a": FULL, "b": WIDE, "c": WIDE})] == specs(third)
    assert [10, 10, 10] == [first.num_blocks, second.num_blocks, third.num_blocks]


@pytest.mark.parametrize(
    ("one", "other", "uniform"),
    [
        (FULL, MLAAttentionSpec(**SHAPE), True),
        (WINDOW, replace(WINDOW, head_size=16), True),
        (WINDOW, replace(WINDOW, head_size=16, sliding_window=9), False),
        (CHUNK, replace(CHUNK, head_size=16), True),
        (CHUNK, replace(CHUNK, head_size=16, attention_chunk_size=9), False),
        (CROSS, replace(CROSS, head_size=16), True),
        (FULL, replace(WIDE, block_size=8), False),
        (FULL, replace(WINDOW, head_size=16), False),
    ],
)
def test_a_type_is_what_decides_the_blocks_of_a_request(one: KVCacheSpec, other: KVCacheSpec, uniform: bool) -> None:
    assert uniform is isinstance(specs(make_kv_cache_config({"a": one, "b": other}, 1 << 20))[0], UniformTypeSpec)
    if not uniform:
        with pytest.raises(ValueError, match="layers"):
            UniformTypeSpec(4, {"a": one, "b": other})


def test_a_uniform_spec_is_a_value_whose_blocks_are_those_of_its_layers() -> None:
    spec = UniformTypeSpec(4, {"a": FULL, "b": WIDE})
    assert (FULL.type_key, FULL.max_blocks(99, 9, 0)) == (spec.type_key, spec.max_blocks(99, 9, 0))
    windows = UniformTypeSpec(4, {"a": replace(WINDOW, block_size=4)})
    assert replace(WINDOW, block_size=4).max_blocks(99, 9, 0) == windows.max_blocks(99, 9, 0)
    assert {spec} == {UniformTypeSpec(4, {"a": FULL, "b": WIDE})}
    assert spec != UniformTypeSpec(4, {"a": FULL})
    for wrong in ({}, {"a": replace(FULL, block_size=8)}):
        with pytest.raises(ValueError, match="layers"):
            UniformTypeSpec(4, wrong)


def test_a_manager_takes_a_uniform_spec_as_it_takes_one_of_its_layers() -> None:
    tables = []
    for wide in (WINDOW, replace(WINDOW, num_kv_heads=4)):
        config = make_kv_cache_config({"a": WINDOW, "b": wide}, 1 << 16)
        manager = KVCacheManager(config, 64, 4)
        request = Request("r", range(20), block_hasher=BlockHasher(4))
        manager.allocate_slots(request, 20)
        request.num_computed_tokens = 20
        manager.allocate_slots(request, 1)
        tables.append(manager.get_block_ids("r"))
    assert tables[0] == tables[1] == ([0, 0, 0, 4, 5, 6],)


def test_full_attention_with_blocks_of_several_sizes_is_one_group_of_the_largest() -> None:
    config = make_kv_cache_config({"a": replace(FULL, sliding_window=5), "b": replace(FULL, block_size=8)}, 1 << 20)
    assert [replace(FULL, block_size=8, sliding_window=5)] == specs(config)


# ---- merging, and one group for all ----


def test_full_attention_merges_with_a_recorded_window_or_chunk() -> None:
    window, chunk = replace(FULL, sliding_window=8), replace(FULL, attention_chunk_size=8)
    assert window == merge_specs([FULL, window, FULL])
    assert chunk == merge_specs([FULL, chunk])
    assert WINDOW == merge_specs([WINDOW, WINDOW])
    mla = MLAAttentionSpec(**SHAPE)
    packed = replace(mla, cache_dtype="fp8_ds_mla")
    recorded = [window, replace(FULL, sliding_window=9)], [chunk, replace(FULL, attention_chunk_size=9)]
    for apart in ([], [window, chunk], [FULL, WIDE], [FULL, WINDOW], [FULL, mla], [mla, packed], *recorded):
        with pytest.raises(ValueError, match=r"specs|windows"):
            merge_specs(apart)


def test_without_hybrid_groups_windows_and_chunks_become_full_attention() -> None:
    window, chunk = replace(FULL, sliding_window=8), replace(FULL, attention_chunk_size=8)
    config = make_kv_cache_configs([{"a": FULL, "b": WINDOW}], [20 * PAGE], hybrid=False)[0]
    assert ([("a", "b")], [window], 10) == (names(config), specs(config), config.num_blocks)
    config = make_kv_cache_configs([{"a": FULL, "b": WINDOW, "c": CHUNK}], [30 * PAGE], hybrid=False)[0]
    assert [UniformTypeSpec(4, {"a": FULL, "b": window, "c": chunk})] == specs(config)
    config = make_kv_cache_configs([{"a": WINDOW, "b": WINDOW}], [20 * PAGE], hybrid=False)[0]
    assert [WINDOW] == specs(config)  # one group as they are


@pytest.mark.parametrize("other", [CROSS, MambaSpec(4, ((PAGE,),), ("uint8",)), replace(WINDOW, block_size=8)])
def test_layers_that_cannot_be_one_group_are_refused_without_hybrid_groups(other: KVCacheSpec) -> None:
    assert 2 == len(make_kv_cache_configs([{"a": FULL, "b": other}], [1 << 20])[0].kv_cache_groups)
    with pytest.raises(ValueError, match="FullAttentionSpec"):
        make_kv_cache_configs([{"a": FULL, "b": other}], [1 << 20], hybrid=False)


# ---- numbers of blocks ----


def test_a_given_number_of_blocks_replaces_what_fits() -> None:
    for config in make_kv_cache_configs([{"a": FULL}, {"b": FULL, "c": FULL}], [0, 5 * PAGE], num_blocks=7):
        assert 7 == config.num_blocks
        assert {7 * PAGE} == {tensor.size for tensor in config.kv_cache_tensors}
    with pytest.raises(ValueError, match="num_blocks"):
        make_kv_cache_configs([{"a": FULL}], [0], num_blocks=0)


def test_a_model_without_layers_has_a_configuration_that_works(caplog: pytest.LogCaptureFixture) -> None:
    config = make_kv_cache_config({}, 0)
    assert KVCacheConfig(1, [], ()) == config
    assert [config, config] == make_kv_cache_configs([{}, {}], [0, 0], max_model_len=64, hybrid=False)
    assert (0, 64, math.inf) == (
        config.blocks_per_request(64),
        config.estimate_max_model_len(64),
        config.max_concurrency(64),
    )
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
    assert [] == caplog.records


# ---- the longest request ----


def test_memory_for_less_than_one_request_is_refused_with_what_is_needed() -> None:
    need = 16 + 1  # blocks of 64 tokens, and the null block
    stages = [{"a": FULL, "b": FULL}, {"c": FULL}]
    assert need == make_kv_cache_configs(stages, [need * 2 * PAGE, need * PAGE], max_model_len=64)[0].num_blocks
    with pytest.raises(KVCacheMemoryError) as caught:
        make_kv_cache_configs(stages, [100 * PAGE, need * PAGE - 1], max_model_len=64)
    error = caught.value
    assert (need * PAGE, need * PAGE - 1, 60) == (error.needed, error.available, error.fitting_model_len)
    with pytest.raises(KVCacheMemoryError) as caught:
        make_kv_cache_configs(stages, [0, 0], num_blocks=4, max_model_len=64)
    error = caught.value
    assert (need * 2 * PAGE, 4 * 2 * PAGE, 12) == (error.needed, error.available, error.fitting_model_len)
    with pytest.raises(KVCacheMemoryError) as caught:
        make_kv_cache_configs(stages, [PAGE, PAGE], max_model_len=64)
    assert 0 == caught.value.fitting_model_len


def test_a_check_that_fails_says_what_the_engine_is_to_do() -> None:
    assert "60" in KVCacheMemoryError(needed=5, available=4, fitting_model_len=60).hint
    assert all(number in str(KVCacheMemoryError(needed=50, available=40)) for number in ("50", "40"))


def test_a_window_needs_only_what_it_sees_and_what_is_in_flight() -> None:
    config = make_kv_cache_config({"a": FULL, "b": WINDOW}, 100 * PAGE)
    assert 64 // 4 + (8 - 1 + 5) // 4 + 1 == config.blocks_per_request(64, max_in_flight_tokens=5)
    assert 64 // 4 + 64 // 4 + 1 == config.blocks_per_request(64)
    assert 99 / 20 == config.max_concurrency(64, max_in_flight_tokens=5)
    crossed = make_kv_cache_config({"a": FULL, "x": CROSS}, 100 * PAGE)
    assert 16 + 3 == crossed.blocks_per_request(64, max_encoder_tokens=9)


@pytest.mark.parametrize("wrong", [{"num_tokens": 0}, {"num_tokens": 2**60}, {"max_in_flight_tokens": 0},
                                   {"max_encoder_tokens": -1}])  # fmt: skip
def test_a_request_of_an_impossible_size_is_refused_by_name(wrong: dict[str, int]) -> None:
    config = make_kv_cache_config({"a": FULL}, 100 * PAGE)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config.blocks_per_request(**{"num_tokens": 4} | wrong)


def test_the_estimate_is_the_longest_request_that_fits() -> None:
    rng = random.Random(1)
    for _ in range(300):
        some: list[KVCacheSpec] = [FULL, WINDOW, CHUNK, MambaSpec(4, ((PAGE,),), ("uint8",), 2), CROSS]
        layers = {f"l{i}": spec for i, spec in enumerate(rng.sample(some, rng.randint(1, 5)))}
        config = make_kv_cache_configs([layers], [0], num_blocks=rng.randint(1, 60))[0]
        asked: dict[str, Any] = {"max_in_flight_tokens": rng.randint(1, 40), "max_encoder_tokens": rng.randint(0, 20)}
        longest = config.estimate_max_model_len(100, **asked)
        fitting = [n for n in range(1, 101) if config.blocks_per_request(n, **asked) < config.num_blocks]
        assert max(fitting, default=0) == longest


@pytest.mark.parametrize("seed", range(60))
def test_a_pool_that_passes_the_check_serves_the_longest_request_in_any_steps(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 4])
    shape = SHAPE | {"block_size": size}
    layers: dict[str, KVCacheSpec] = {
        "window": SlidingWindowSpec(**shape, sliding_window=rng.randint(1, 20)),
        "chunk": ChunkedLocalAttentionSpec(**shape, attention_chunk_size=rng.randint(1, 20)),
        "full": FullAttentionSpec(**shape),
        "mamba": MambaSpec(size, ((8,),), ("uint8",), rng.randint(0, 2)),
        "cross": CrossAttentionSpec(**shape),
    }
    layers = {name: layers[name] for name in rng.sample(list(layers), rng.randint(1, 5))}
    longest, in_flight, encoder = rng.randint(1, 120), rng.randint(1, 30), rng.randint(0, 9)
    probe = make_kv_cache_configs([layers], [0], num_blocks=1)[0]
    need = probe.blocks_per_request(longest, max_in_flight_tokens=in_flight, max_encoder_tokens=encoder)
    config = make_kv_cache_configs(
        [layers], [0], num_blocks=need + 1,
        max_model_len=longest, max_in_flight_tokens=in_flight, max_encoder_tokens=encoder,
    )[0]  # fmt: skip
    for _ in range(8):
        manager = KVCacheManager(config, longest, size, enable_caching=False)
        request = Request("r", range(longest))
        while request.num_computed_tokens < longest:
            new = min(rng.choice([1, in_flight, rng.randint(1, in_flight)]), longest - request.num_computed_tokens)
            assert manager.allocate_slots(request, new, num_encoder_tokens=encoder) is not None
            request.num_computed_tokens += new
