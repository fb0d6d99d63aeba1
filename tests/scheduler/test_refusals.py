"""What is refused, by a typed error that names the argument, item or block and what was expected; nothing changes."""

from __future__ import annotations

import logging
import types
from functools import partial
from typing import Any

import numpy as np
import pytest

from shmstore.scheduler import (
    BlockHasher,
    BlockPool,
    CachingMetrics,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheMetricsCollector,
    KVCacheSpec,
    MambaSpec,
    MultiModalBudget,
    Request,
    SlidingWindowSpec,
    compute_encoder_budget,
    make_kv_cache_config,
)
from tests.scheduler.helpers import admit, config, features, manager, pool_state, request, state

ATTENTION: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"}
LAYER = FullAttentionSpec(**ATTENTION)
FULL, WINDOW = ("full", 4), ("sw", 4, 8)
BUDGET: dict[str, Any] = {"max_num_encoder_input_tokens": 8, "encoder_cache_size": 8, "max_num_batched_tokens": 8}
ITEMS: dict[str, Any] = {
    "compute_budget": 8, "cache_size": 8, "max_model_len": 8, "max_num_seqs": 8, "max_num_batched_tokens": 8,
}  # fmt: skip


class Empty(KVCacheSpec):
    """A spec of one's own whose pages are empty."""

    @property
    def page_size_bytes(self) -> int:
        return 0


def pool(**options: Any) -> BlockPool:
    return BlockPool(**{"num_blocks": 4, "enable_caching": True, **options})


def built(**options: Any) -> KVCacheManager:
    return KVCacheManager(config(9, FULL), **{"max_model_len": 64, "hash_block_size": 4, **options})


def budget(modalities: Any = None, **changed: Any) -> tuple[int, int]:
    return compute_encoder_budget(modalities, **BUDGET | changed)


def items(tokens: int = 4, limit: int = 1, **changed: Any) -> MultiModalBudget:
    return MultiModalBudget({"image": tokens}, {"image": limit}, **ITEMS | changed)


def memory(layers: Any, memory_bytes: Any = 1 << 20) -> KVCacheConfig:
    return make_kv_cache_config(layers, memory_bytes)


NAMED: list[tuple[type[Exception], Any, dict[str, list[Any]]]] = [
    (ValueError, pool, {"num_blocks": [0], "free_order": ["lifo"], "hash_block_size": [0]}),
    (ValueError, built, {
        "max_model_len": [0, 2**63], "max_in_flight_tokens": [-1], "watermark": [-0.1, 1.1, float("nan")],
        "dcp_world_size": [0], "pcp_world_size": [2**31],
    }),
    (ValueError, partial(built, enable_caching=False), {"hash_block_size": [2**31]}),
    (TypeError, built, {"max_model_len": [64.0]}),
    (TypeError, partial(KVCacheManager, max_model_len=64, hash_block_size=4), {"config": [None]}),
    (ValueError, partial(manager, 9, WINDOW), {"retention_interval": [-1, 6]}),
    (ValueError, partial(BlockHasher, block_size=4), {
        "block_size": [-1, 0, 2**31], "algorithm": ["sha256"], "extra_keys": ["both"], "seed": ["\ud800"],
    }),
    (TypeError, partial(Request, prompt_token_ids=[1]), {"request_id": [None, 1]}),
    (ValueError, partial(Request, "r", range(4), block_hasher=BlockHasher(4)), {"cache_salt": ["\ud800"]}),
    (ValueError, partial(Request, "r", range(4), block_hasher=BlockHasher(4), lora_name="a"), {
        "lora_name": ["a\udfff"], "lora_path": ["\ud800"],
    }),
    (ValueError, CachingMetrics, {"max_recent_requests": [0]}),
    (ValueError, KVCacheMetricsCollector, {"sample_rate": [-0.1, 1.1]}),
    (ValueError, partial(FullAttentionSpec, **ATTENTION), {
        "block_size": [0], "num_kv_heads": [0], "head_size": [-8], "dtype": ["none such", "V0"],
    }),
    (ValueError, partial(SlidingWindowSpec, **ATTENTION, sliding_window=8), {"sliding_window": [0]}),
    (ValueError, partial(ChunkedLocalAttentionSpec, **ATTENTION), {"attention_chunk_size": [0]}),
    (ValueError, partial(MambaSpec, block_size=4, shapes=((4,),), dtypes=("float16",)), {
        "shapes": [((4, 0),), ((-4, -4),)], "dtypes": [("none such",)], "num_speculative_blocks": [-1],
    }),
    (ValueError, partial(memory, {"l0": LAYER}), {"memory_bytes": [2**63, -1]}),
    (ValueError, budget, {name: [-1] for name in BUDGET}),
    (ValueError, items, {name: [-1] for name in ITEMS}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "make", "wrong"), NAMED)
def test_an_argument_that_cannot_be_is_refused_by_name(
    error: type[Exception], make: Any, wrong: dict[str, list[Any]]
) -> None:
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(error, match=rf"\b{name}\b"):
                make(**{name: value})


@pytest.mark.parametrize(
    ("part", "make"),
    [
        ("hash block size", lambda: manager(9, FULL, hash_block_size=2)),
        ("multiples", lambda: manager(9, FULL, ("sw", 6, 8))),
        ("common multiple",
         lambda: manager(9, *[("full", size) for size in (2**31 - 1, 2**31 - 2, 2**31 - 3)], hash_block_size=1)),
        ("EAGLE", lambda: manager(9, ("chunk", 4, 8), use_eagle=True)),
        ("cross attention", lambda: manager(9, ("cross", 4))),
        ("Empty", lambda: KVCacheManager(KVCacheConfig(9, [KVCacheGroupSpec(["a"], Empty(4))]), 64, 4)),
        ("context parallelism", lambda: manager(9, FULL, WINDOW, dcp_world_size=2, hash_block_size=8)),
        ("context parallelism", lambda: manager(9, WINDOW, pcp_world_size=2, hash_block_size=8)),
        ("^block_size must", lambda: manager(9, ("full", 2**31), enable_caching=False)),
        ("world sizes", lambda: manager(9, ("full", 2**20), dcp_world_size=2**11, enable_caching=False)),
        ("sliding_window", lambda: manager(9, ("sw", 4, 2**63))),
        ("is_eagle_group", lambda: manager(9, FULL, WINDOW, retention_interval=0, use_eagle=True)),
        ("prompt_token_ids is empty", lambda: Request("r", [])),
        ("prompt_token_ids or prompt_embeds", lambda: Request("r", None)),
        ("prompt_embeds is empty", lambda: Request("e", None, prompt_embeds=np.zeros((0, 8)))),
        ("item 2", lambda: Request("r", range(9), mm_features=features(("a", 0, 1), ("b", 5, 1), ("c", 3, 1)))),
        ("identifier of an item must be encodable",
         lambda: Request("r", range(4), mm_features=features(("\ud800", 0, 1)), block_hasher=BlockHasher(4))),
        ("1 shapes and 0 dtypes", lambda: MambaSpec(4, ((1,),), ())),
        ("^shapes", lambda: MambaSpec(16, (), ())),
        ("'l0'.*page_size_bytes", lambda: memory({"l1": LAYER, "l0": Empty(4)})),
        ("different windows", lambda: memory({str(w): FullAttentionSpec(4, 1, 8, "float16", w) for w in (4, 5)})),
        (r"max_tokens_by_modality\['image'\]", lambda: budget({"video": 4, "image": -4})),
        (r"max_tokens_by_modality\['image'\]", lambda: items(-4)),
        (r"limits_per_prompt\['image'\]", lambda: items(4, -1)),
        ("'image'", lambda: MultiModalBudget({"image": 1}, {}, **ITEMS)),
        ("no modalities", lambda: MultiModalBudget({}, {}, **ITEMS).get_modality_with_max_tokens()),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_when_made(part: str, make: Any) -> None:
    with pytest.raises(ValueError, match=part):
        make()


def test_too_little_memory_is_said_with_what_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    need = LAYER.page_size_bytes
    with caplog.at_level(logging.WARNING):
        assert [2, 1] == [memory({"l0": LAYER}, n).num_blocks for n in (2 * need, 2 * need - 1)]
    (record,) = caplog.records
    assert f"{2 * need - 1} bytes" in record.getMessage()
    assert f"{2 * need} bytes" in record.getMessage()
    assert int is type(memory({"l0": LAYER}, np.int64(need)).num_blocks)


# ---- the pool ----


def own(block_id: int) -> Any:
    return types.SimpleNamespace(block_id=block_id)


def keys(num_cached: int, num_full: int, size: int = 4, group: int = 0) -> Any:
    return lambda pool, req, blocks, other: pool.cache_full_blocks(req, blocks, num_cached, num_full, size, group)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"^Cannot get 6 free blocks from the pool$", lambda pool, req, blocks, other: pool.get_new_blocks(6)),
        ("^n must be", lambda pool, req, blocks, other: pool.get_new_blocks(-1)),
        ("no request holds", lambda pool, req, blocks, other: pool.free_blocks([blocks[0], blocks[0]])),
        ("^block id 9 is outside the pool", lambda pool, req, blocks, other: pool.touch([[own(9)]])),
        ("^block id 0 names the null", lambda pool, req, blocks, other: pool.evict_blocks([1, 0])),
        ("^block id 9 is outside", lambda pool, req, blocks, other: pool.evict_blocks([1, 9])),
        ("group", lambda pool, req, blocks, other: pool.get_cached_block(b"x" * 32, [0, 2**31])),
        ("enable_caching", lambda pool, req, blocks, other: BlockPool(4, False).cache_full_blocks(req, [], 0, 0, 4, 0)),
        ("has a key", keys(0, 1)),
        ("fewer block hashes", keys(1, 3)),
        ("only lead", lambda pool, req, blocks, other:
            pool.cache_full_blocks(req, [*blocks[:2], pool.null_block], 1, 3, 4, 0)),
        ("multiple", keys(1, 2, 6)),
        *(("^blocks ", keys(first, end)) for first, end in ((-1, 1), (0, -1), (1, 4))),
        ("block_size", keys(0, 2, 0)),
        ("group_id", keys(0, 2, 4, -1)),
        ("another pool", lambda pool, req, blocks, other: pool.touch([[blocks[0], other[1]]])),
        ("another pool", lambda pool, req, blocks, other: KVCacheBlocks([[blocks[0], other[1]]])),
    ],
)  # fmt: skip
def test_what_a_pool_refuses_changes_nothing(message: str, call: Any) -> None:
    made = BlockPool(9, True, hash_block_size=4, events=True)
    req, blocks = request("r", range(8)), made.get_new_blocks(3)
    made.cache_full_blocks(req, blocks, 0, 1, 4, 0)
    made.take_events()
    before = pool_state(made)
    with pytest.raises(ValueError, match=message):
        call(made, req, blocks, BlockPool(9, True).get_new_blocks(3))
    assert (before, []) == (pool_state(made), made.take_events())


def test_a_block_of_a_pool_may_be_anything_that_has_its_id() -> None:
    made = pool()
    blocks = made.get_new_blocks(2)
    before = pool_state(made)
    made.touch([[], [own(1)]])
    made.free_blocks(iter([own(1)]))
    for num_cached, num_full in ((0, 0), (2, 1)):
        made.cache_full_blocks(request("r", range(12)), blocks, num_cached, num_full, 4, 0)
    assert before == pool_state(made)
    made.free_blocks(reversed(blocks))
    assert [2, 1, 3] == made.free_block_ids()


# ---- the manager ----


class Case:
    """A manager in which a request has blocks and another has none, and managers next to it."""

    def __init__(self) -> None:
        self.kv, self.other = (manager(30, FULL) for _ in range(2))
        self.off, self.two = manager(30, FULL, enable_caching=False), manager(30, FULL, WINDOW)
        self.a, self.b = request("a", range(16)), request("b", range(17))
        for each in (self.kv, self.other):
            admit(each, self.a)
        self.a.num_computed_tokens = 3

    def changed(self, **attributes: int) -> Request:
        vars(self.a).update(attributes)
        return self.a

    def found(self, counts: tuple[int, ...] = (1,), of: Any = None) -> KVCacheBlocks:
        return KVCacheBlocks.from_ids((of or self.kv).block_pool, b"\1\0\0\0", counts)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("num_new_tokens", lambda c: c.kv.allocate_slots(c.b, 0)),
        ("num_new_tokens", lambda c: c.kv.allocate_slots(c.b, -1, num_external_computed_tokens=4)),
        ("'a'.*unique", lambda c: c.kv.allocate_slots(c.a, 1, 4, c.found())),
        ("need caching", lambda c: c.off.allocate_slots(c.b, 1, 4, c.found(of=c.off))),
        ("1 groups, the manager 2", lambda c: c.two.allocate_slots(c.b, 1, 4, c.found(of=c.two))),
        ("another manager", lambda c: c.kv.allocate_slots(c.b, 9, 8, c.other.get_computed_blocks(c.b)[0])),
        ("counts", lambda c: c.kv.allocate_slots(c.b, 1, 4, c.found(counts=(2,)))),
        ("reserved_blocks", lambda c: c.kv.allocate_slots(c.b, 4, reserved_blocks=-1)),
        (r"num_computed_tokens \+ num_new_computed_tokens", lambda c:
            c.kv.allocate_slots(c.changed(num_computed_tokens=2**59), 1, 2**59)),
        ("num_in_flight_tokens", lambda c: c.kv.allocate_slots(c.changed(num_in_flight_tokens=-1), 40)),
        (r"blocks.*\b25 are needed and 4 there", lambda c: c.kv.cache_blocks(c.a, 100)),
        ("no blocks to cache", lambda c: c.kv.cache_blocks(c.b, 4)),
        ("2 sequences of blocks for 1 groups", lambda c: c.kv.create_kv_cache_blocks(([], []))),
        ("another manager", lambda c: c.kv.create_kv_cache_blocks(c.found(of=c.other).blocks)),
        ("different pools", lambda c: c.found() + c.found(of=c.other)),
        ("1 and 2 groups", lambda c: c.found() + c.two.empty_kv_cache_blocks),
        ("only one group", lambda c: c.two.empty_kv_cache_blocks.get_unhashed_block_ids()),
    ],
)  # fmt: skip
def test_what_a_manager_refuses_changes_nothing(message: str, call: Any) -> None:
    case = Case()
    managers = (case.kv, case.other, case.off, case.two)
    before = [state(each) for each in managers]
    with pytest.raises(ValueError, match=message):
        call(case)
    assert before == [state(each) for each in managers]


def test_hashes_of_smaller_blocks_than_the_managers_find_nothing() -> None:
    """The hash of 2 tokens would be the key of 4, of which the other two may differ."""
    kv = manager(20, FULL)
    one, two = (
        Request(name, [1, 2, *rest], block_hasher=BlockHasher(2)) for name, *rest in (("a", 3, 4, 5), ("b", 6, 7, 8))
    )
    assert kv.allocate_slots(one, 6) is not None
    with pytest.raises(ValueError, match="hash_block_size"):
        kv.get_computed_blocks(two)


@pytest.mark.parametrize(
    "field",
    ["num_computed_tokens", "num_new_tokens", "num_new_computed_tokens", "num_lookahead_tokens", "num_encoder_tokens",
     "num_external_computed_tokens"],
)  # fmt: skip
def test_a_number_of_tokens_out_of_range_is_refused_alike_everywhere(field: str) -> None:
    kv, a = manager(20, FULL, WINDOW), request("a", range(21))
    admit(kv, a)
    a.num_computed_tokens = 18
    assert kv.allocate_slots(a, 3) is kv.empty_kv_cache_blocks  # there is nothing to do
    before = state(kv)
    for value in (-1, 2**60, 2**63):
        options: dict[str, Any] = {"num_new_tokens": 1, field: value}
        if field == "num_computed_tokens":
            a.num_computed_tokens = options.pop(field)
            with pytest.raises(ValueError, match=f"^{field} must be"):
                kv.cache_blocks(a, value)
        with pytest.raises(ValueError, match=f"^{field} must be"):
            kv.allocate_slots(a, **options)
        assert before == state(kv)


@pytest.mark.parametrize("value", [-1, 2**60, 2**63, 2**40])
def test_a_request_of_impossible_length_is_refused_and_not_counted(value: int) -> None:
    kv = manager(20, ("chunk", 1, 4), hash_block_size=1, log_stats=True)
    odd: Any = types.SimpleNamespace(num_tokens=value, skip_reading_prefix_cache=False, block_hashes=[])
    with pytest.raises(ValueError, match=r"^num_tokens must be (at least 0|below 2\*\*60|what a block table can hold)"):
        kv.get_computed_blocks(odd)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert 0 == stats.requests
