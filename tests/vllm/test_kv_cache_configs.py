"""KV-cache configurations beside vLLM's own, for many generated models; where ours differ, a test says how."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface as theirs
from vllm.v1.core import kv_cache_utils

from shmstore.errors import KVCacheMemoryError
from shmstore.scheduler import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeSpec,
    make_kv_cache_config,
    make_kv_cache_configs,
    merge_specs,
)

pytestmark = pytest.mark.skipif(
    not hasattr(kv_cache_utils, "get_kv_cache_configs"), reason="the rules are those of 0.32; 0.33 plans in another way"
)
Layers = dict[str, KVCacheSpec]
LIMIT = 400
"""The most tokens of a request in these tests; a Mamba layer has blocks of so many, as in vLLM without its cache."""
BASE = VllmConfig()


def vllm_config(max_model_len: int, in_flight: int, encoder: int, hybrid: bool, num_blocks: int | None) -> VllmConfig:
    config = copy.deepcopy(BASE)
    config.model_config = SimpleNamespace(max_model_len=max_model_len, original_max_model_len=max_model_len)
    config.scheduler_config.max_num_batched_tokens = in_flight
    config.scheduler_config.max_num_encoder_input_tokens = encoder
    config.scheduler_config.disable_hybrid_kv_cache_manager = not hybrid
    config.cache_config.num_gpu_blocks_override = num_blocks
    config.cache_config.kv_cache_layout = "LBHNC"  # one buffer after another, as ours are
    assert in_flight == config.max_in_flight_tokens
    return config


def as_theirs(spec: KVCacheSpec) -> Any:
    if isinstance(spec, MambaSpec):
        return theirs.MambaSpec(
            block_size=spec.block_size, shapes=spec.shapes, dtypes=spec.dtypes,
            page_size_padded=spec.page_size_padded, num_speculative_blocks=spec.num_speculative_blocks,
        )  # fmt: skip
    assert isinstance(spec, AttentionSpec)
    given: dict[str, Any] = {
        "block_size": spec.block_size, "num_kv_heads": spec.num_kv_heads, "head_size": spec.head_size,
        "dtype": spec.dtype,
    }  # fmt: skip
    match spec:
        case MLAAttentionSpec():
            size = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get(spec.cache_dtype or "")  # what its layer publishes
            return theirs.MLAAttentionSpec(**given, cache_dtype_str=spec.cache_dtype, state_content_bytes=size)
        case FullAttentionSpec():
            recorded = {"sliding_window": spec.sliding_window, "attention_chunk_size": spec.attention_chunk_size}
            return theirs.FullAttentionSpec(**given, **recorded)
        case SlidingWindowSpec():
            return theirs.SlidingWindowSpec(**given, sliding_window=spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return theirs.ChunkedLocalAttentionSpec(**given, attention_chunk_size=spec.attention_chunk_size)
        case CrossAttentionSpec():
            return theirs.CrossAttentionSpec(**given)
    raise TypeError(type(spec))


def ask_vllm(
    workers: Sequence[Layers], memory: Sequence[int], max_model_len: int, in_flight: int, encoder: int,
    hybrid: bool = True, num_blocks: int | None = None,
) -> tuple[list[Any], VllmConfig]:  # fmt: skip
    config = vllm_config(max_model_len, in_flight, encoder, hybrid, num_blocks)
    given = [{name: as_theirs(spec) for name, spec in layers.items()} for layers in workers]
    return kv_cache_utils.get_kv_cache_configs(config, given, list(memory)), config


def passes(*arguments: Any) -> bool:
    try:
        ask_vllm(*arguments)
    except ValueError:
        return False
    return True


def spec_shape(spec: Any) -> Any:
    """What can be compared of a spec of either side."""
    if isinstance(spec, UniformTypeSpec | theirs.UniformTypeKVCacheSpecs):
        layers: Mapping[str, Any] = spec.layers if isinstance(spec, UniformTypeSpec) else spec.kv_cache_specs
        return spec.block_size, spec.page_size_bytes, {name: spec_shape(layer) for name, layer in layers.items()}
    recorded = [getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return type(spec).__name__, spec.block_size, spec.page_size_bytes, recorded


def their_buffers(config: Any) -> list[tuple[int, set[str]]]:
    """The regions of the one allocation, in order of address, with the layers whose pages are in each."""
    regions: dict[tuple[int, int], set[str]] = {}
    for tensor in config.kv_cache_tensors:
        for i, layer in enumerate(tensor.layers):
            start = tensor.offset + i * tensor.layer_stride
            regions.setdefault((start, tensor.block_stride * config.num_blocks), set()).add(layer)
    ends = [start + size for start, size in sorted(regions)]
    assert [0, *ends[:-1]] == [start for start, _ in sorted(regions)]  # they neither overlap nor leave gaps
    assert {ends[-1]} == {tensor.size for tensor in config.kv_cache_tensors}
    return [(size, names) for (_, size), names in sorted(regions.items())]


def compare(ours: list[KVCacheConfig], their: list[Any]) -> None:
    assert len(their) == len(ours)
    for mine, other in zip(ours, their, strict=True):
        assert other.num_blocks == mine.num_blocks
        assert [g.layer_names for g in other.kv_cache_groups] == [list(g.layer_names) for g in mine.kv_cache_groups]
        for group, their_group in zip(mine.kv_cache_groups, other.kv_cache_groups, strict=True):
            assert spec_shape(their_group.kv_cache_spec) == spec_shape(group.kv_cache_spec)
        buffers = sorted((tensor.size, sorted(tensor.shared_by)) for tensor in mine.kv_cache_tensors)
        assert sorted((size, sorted(names)) for size, names in their_buffers(other)) == buffers


# ---- generated models ----


def attention(heads: int) -> dict[str, Any]:
    return {"block_size": 16, "num_kv_heads": heads, "head_size": 8, "dtype": torch.bfloat16}


def several_types(rng: random.Random) -> list[KVCacheSpec]:
    """Layers of several types; their pages can be made equal."""
    heads = rng.choice([[2], [1, 2, 4]])
    kinds: list[KVCacheSpec] = [
        FullAttentionSpec(**attention(rng.choice(heads))),
        SlidingWindowSpec(**attention(rng.choice(heads)), sliding_window=rng.randint(1, 90)),
        SlidingWindowSpec(**attention(rng.choice(heads)), sliding_window=128),
        ChunkedLocalAttentionSpec(**attention(rng.choice(heads)), attention_chunk_size=rng.choice([64, 128])),
        MambaSpec(LIMIT, ((rng.randint(1, 9), 5), (7,)), (torch.bfloat16, torch.float32), rng.randint(0, 2)),
        CrossAttentionSpec(**attention(rng.choice(heads))),
    ]
    chosen = rng.sample(kinds, rng.randint(2, 3))
    most = rng.randint(1, 6)
    made = [spec for spec in chosen for _ in range(rng.randint(1, 3) * most + rng.randint(0, 1))]
    rng.shuffle(made)
    return made


def one_type(rng: random.Random) -> list[KVCacheSpec]:
    """Layers of one type, equal or not."""
    window, chunk, recorded = rng.randint(1, 90), rng.choice([64, 128]), rng.randint(4, 9)
    family = rng.choice(["full", "window", "chunk", "cross", "mamba"])
    made: list[KVCacheSpec] = []
    for _ in range(rng.randint(1, 6)):
        shape = attention(rng.choice([2, 3, 5]))
        match family:
            case "full":
                made += [
                    rng.choice(
                        [
                            FullAttentionSpec(**shape, sliding_window=rng.choice([None, recorded])),
                            FullAttentionSpec(**shape, attention_chunk_size=rng.choice([None, recorded])),
                            MLAAttentionSpec(**shape | {"num_kv_heads": 1}),
                            MLAAttentionSpec(16, 1, 576, torch.uint8, cache_dtype="fp8_ds_mla"),
                            MLAAttentionSpec(16, 1, 576, torch.uint8, cache_dtype="nvfp4_ds_mla"),
                        ]
                    )
                ]
            case "window":
                made += [SlidingWindowSpec(**shape, sliding_window=window)]
            case "chunk":
                made += [ChunkedLocalAttentionSpec(**shape, attention_chunk_size=chunk)]
            case "cross":
                made += [CrossAttentionSpec(**shape)]
            case "mamba":
                made += [MambaSpec(LIMIT, ((rng.randint(1, 9), 5),), (torch.bfloat16,), 1)]
    return made


def spread(rng: random.Random, specs: Sequence[KVCacheSpec]) -> list[Layers]:
    """The layers on workers: each has all of them, or a stage of its own."""
    layers = {f"layers.{i}": spec for i, spec in enumerate(specs)}
    if rng.random() < 0.4 or len(specs) < 2:
        return [layers] * rng.randint(1, 2)
    cut = rng.randint(1, len(specs) - 1)
    names = list(layers)
    return [{name: layers[name] for name in part} for part in (names[:cut], names[cut:])]


def ask_ours(
    workers: Sequence[Layers], memory: Sequence[int], **options: Any
) -> list[KVCacheConfig] | KVCacheMemoryError:
    try:
        return make_kv_cache_configs(workers, memory, **options)
    except KVCacheMemoryError as error:
        return error


def largest_and_smallest(configs: list[KVCacheConfig]) -> float:
    """The largest number of layers of a spec, by the smallest."""
    counts: dict[Any, int] = {}
    for config in configs[:1] if configs[0] == configs[-1] else configs:
        for group in config.kv_cache_groups:
            key = "uniform" if isinstance(group.kv_cache_spec, UniformTypeSpec) else group.kv_cache_spec
            counts[key] = counts.get(key, 0) + len(group.layer_names)
    return max(counts.values()) / min(counts.values())


@pytest.mark.parametrize("seed", range(400))
def test_groups_buffers_blocks_and_limits_are_vllms(seed: int) -> None:
    rng = random.Random(seed)
    workers = spread(rng, (several_types if seed % 2 else one_type)(rng))
    length, in_flight, encoder = rng.randint(1, LIMIT), rng.randint(1, 100), rng.randint(1, 60)
    request: dict[str, Any] = {"max_in_flight_tokens": in_flight, "max_encoder_tokens": encoder}
    probe = make_kv_cache_configs(workers, [0] * len(workers), num_blocks=1)
    if 1.25 <= largest_and_smallest(probe) < 1.5:
        return  # the one difference in grouping: see below
    of_block = [max(1, sum(tensor.size for tensor in config.kv_cache_tensors)) for config in probe]
    need = probe[0].blocks_per_request(length, **request) + 1
    memory = [int(rng.uniform(0.5, 3) * need * size) for size in of_block]
    override = rng.choice([None, None, None, max(1, need + rng.randint(-3, 3))])
    asked = (length, in_flight, encoder, True, override)
    ours = ask_ours(workers, memory, num_blocks=override, max_model_len=length, **request)
    if isinstance(ours, KVCacheMemoryError):
        error = ours
        assert error.needed is not None
        assert error.available is not None
        assert error.fitting_model_len is not None
        assert error.needed > error.available
        assert not passes(workers, memory, *asked)
        if error.fitting_model_len:
            assert passes(workers, memory, error.fitting_model_len, *asked[1:])
        assert not passes(workers, memory, error.fitting_model_len + 1, *asked[1:])
        enough = [error.needed * size for size in of_block]  # more than enough for all but one
        tight = next(i for i, size in enumerate(of_block) if error.needed == need * size)
        for missing in (0, 1):
            enough[tight] = error.needed - missing
            assert (not missing) is passes(workers, enough, *asked[:4], None)
        return
    their, config = ask_vllm(workers, memory, *asked)
    compare(ours, their)
    # vLLM's concurrency has the null block, which no request can have.
    n = ours[0].num_blocks
    expected = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, their[0]) * (n - 1) / n
    assert pytest.approx(expected) == ours[0].max_concurrency(length, **request)


@pytest.mark.parametrize("seed", range(100))
def test_one_group_for_all_layers_is_vllms_without_its_hybrid_manager(seed: int) -> None:
    rng = random.Random(seed)
    window, chunk, wide = rng.randint(1, 90), rng.choice([64, 128]), rng.choice([2, 4])
    kinds: list[KVCacheSpec] = [
        SlidingWindowSpec(**attention(2), sliding_window=window),
        SlidingWindowSpec(**attention(wide), sliding_window=window),
        ChunkedLocalAttentionSpec(**attention(2), attention_chunk_size=chunk),
        FullAttentionSpec(**attention(wide)),
    ]
    if rng.random() < 0.2:
        kinds.append(MambaSpec(LIMIT, ((4,),), (torch.bfloat16,)))
    specs = [FullAttentionSpec(**attention(2)), *(rng.choice(kinds) for _ in range(rng.randint(1, 5)))]
    workers, length = spread(rng, specs), rng.randint(1, LIMIT)
    memory = [1 << 20] * len(workers)
    try:
        ours = make_kv_cache_configs(workers, memory, hybrid=False, max_model_len=length, max_in_flight_tokens=64)
    except ValueError:
        assert any(isinstance(spec, MambaSpec) for spec in specs)
        assert not passes(workers, memory, length, 64, 1, False)
        return
    compare(ours, ask_vllm(workers, memory, length, 64, 1, False)[0])


@pytest.mark.parametrize("seed", range(50))
def test_the_longest_request_of_one_group_is_what_vllm_estimates(seed: int) -> None:
    rng = random.Random(seed)
    layers: Layers = {f"layers.{i}": spec for i, spec in enumerate(one_type(rng))}
    blocks, in_flight = rng.randint(2, 30), rng.randint(1, 100)
    config = make_kv_cache_configs([layers], [0], num_blocks=blocks)[0]
    if 1 < len(config.kv_cache_groups):
        return  # vLLM's estimate knows no groups
    their = vllm_config(LIMIT, in_flight, 40, True, None)
    without_null = sum(tensor.size for tensor in config.kv_cache_tensors) // blocks * (blocks - 1)
    given = {name: as_theirs(spec) for name, spec in layers.items()}
    longest = kv_cache_utils.estimate_max_model_len(their, given, without_null)
    assert longest == config.estimate_max_model_len(LIMIT, max_in_flight_tokens=in_flight, max_encoder_tokens=40)
    page = without_null // (blocks - 1)
    need = config.blocks_per_request(LIMIT, max_in_flight_tokens=in_flight, max_encoder_tokens=40)
    for memory in ((need + 1) * page, (need + 1) * page - 1, without_null):
        try:
            kv_cache_utils.check_enough_kv_cache_memory(their, given, memory)
            enough = True
        except ValueError:
            enough = False
        assert enough is (need + 1 <= memory // page)  # the check has the null block


def test_specs_merge_as_vllms_do() -> None:
    full = FullAttentionSpec(**attention(2))
    some: list[KVCacheSpec] = [
        full, FullAttentionSpec(**attention(2), sliding_window=4), FullAttentionSpec(**attention(2), sliding_window=5),
        FullAttentionSpec(**attention(2), attention_chunk_size=4), FullAttentionSpec(**attention(3)),
        FullAttentionSpec(**attention(2), attention_chunk_size=6),
    ]  # fmt: skip
    for one in some:
        for other in some:
            try:
                merged = spec_shape(theirs.FullAttentionSpec.merge([as_theirs(one), as_theirs(other)]))
            except (ValueError, AssertionError):
                with pytest.raises(ValueError, match=r"specs|windows"):
                    merge_specs([one, other])
            else:
                assert merged == spec_shape(merge_specs([one, other]))


# ---- where ours differ ----


def their_groups(layers: Layers, max_model_len: int = 16) -> list[tuple[Any, list[str]]]:
    (config,), _ = ask_vllm([layers], [1 << 30], max_model_len, 16, 1)
    return [(spec_shape(group.kv_cache_spec), group.layer_names) for group in config.kv_cache_groups]


def our_groups(layers: Layers) -> list[tuple[Any, list[str]]]:
    groups = make_kv_cache_config(layers, 1 << 30).kv_cache_groups
    return [(spec_shape(group.kv_cache_spec), list(group.layer_names)) for group in groups]


def test_vllm_pads_groups_up_to_a_half_more_and_ours_up_to_a_quarter() -> None:
    full, window = FullAttentionSpec(**attention(2)), SlidingWindowSpec(**attention(2), sliding_window=32)
    for fulls, windows, same in ((5, 6, True), (4, 5, False), (5, 7, False), (4, 6, True)):
        layers: Layers = {f"f{i}": full for i in range(fulls)} | {f"w{i}": window for i in range(windows)}
        assert same is (their_groups(layers) == our_groups(layers))


def test_vllm_pads_attention_where_ours_pad_mamba_alone() -> None:
    full = FullAttentionSpec(**attention(4))
    odd = SlidingWindowSpec(**attention(3), sliding_window=32)
    assert {full.page_size_bytes} == {shape[2] for shape, _ in their_groups({"a": full, "b": odd})}
    with pytest.raises(ValueError, match="pages"):
        make_kv_cache_config({"a": full, "b": odd}, 1 << 30)
    large = MambaSpec(16, ((full.page_size_bytes + 1,),), (torch.uint8,))
    assert {large.page_size_bytes} == {shape[2] for shape, _ in their_groups({"a": full, "m": large})}
    assert {2 * full.page_size_bytes} == {shape[2] for shape, _ in our_groups({"a": full, "m": large})}


def test_vllm_counts_no_block_for_chunks_that_begin_within_one() -> None:
    chunk = ChunkedLocalAttentionSpec(**attention(2), attention_chunk_size=24)
    need = make_kv_cache_config({"a": chunk}, 1 << 20).blocks_per_request(LIMIT, max_in_flight_tokens=40)
    page = chunk.page_size_bytes
    assert passes([{"a": chunk}], [need * page], LIMIT, 40, 1)
    assert not passes([{"a": chunk}], [(need - 1) * page], LIMIT, 40, 1)


def test_only_ours_has_a_configuration_for_a_worker_without_layers() -> None:
    layers: Layers = {"a": FullAttentionSpec(**attention(2))}
    with pytest.raises(ZeroDivisionError):
        ask_vllm([layers, {}], [1 << 20, 1 << 20], 16, 16, 1)
    assert [1, 0] == [len(c.kv_cache_tensors) for c in make_kv_cache_configs([layers, {}], [1 << 20, 1 << 20])]


def test_a_model_without_layers_has_one_block_in_both() -> None:
    (other,), _ = ask_vllm([{}], [1 << 20], 16, 16, 1)
    config = make_kv_cache_config({}, 1 << 20)
    assert (1, [], []) == (other.num_blocks, other.kv_cache_groups, other.kv_cache_tensors)
    assert (1, [], ()) == (config.num_blocks, config.kv_cache_groups, config.kv_cache_tensors)
