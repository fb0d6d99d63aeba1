"""Every worked example of the description, and what its sentences say, by numbers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from shmstore.scheduler import (
    AllBlocksCleared,
    BlockHasher,
    BlockPool,
    BlockRemoved,
    BlockStored,
    KVCacheBlocks,
    KVCacheEvent,
    KVCacheManager,
    KVEventBatch,
    Request,
)
from tests.scheduler import model
from tests.scheduler.helpers import admit, features, manager, request


def nums(a: int, b: int) -> list[int]:
    return list(range(a, b + 1))


def test_full_attention_and_a_window_of_8() -> None:
    kv = manager(20, ("full", 4), ("sw", 4, 8), free_order="tail")
    r = request("a", range(24))
    assert (0, (nums(1, 6), nums(7, 12))) == admit(kv, r)
    r.append_output_token_ids(99)
    got = kv.allocate_slots(r, 1)
    assert got is not None
    assert ([13], [14]) == got.get_block_ids()
    assert ([1, 2, 3, 4, 5, 6, 13], [0, 0, 0, 0, 11, 12, 14]) == kv.get_block_ids("a")
    assert [*nums(15, 19), 10, 9, 8, 7] == kv.block_pool.free_block_ids()
    kv.free(r)
    assert [*nums(15, 19), 10, 9, 8, 7, 13, 6, 5, 4, 3, 2, 1, 14, 12, 11] == kv.block_pool.free_block_ids()
    blocks, tokens = kv.get_computed_blocks(request("b", range(24)))
    assert (([1, 2, 3, 4, 5], [0, 0, 0, 10, 11]), 20) == (blocks.get_block_ids(), tokens)


def test_a_prompt_of_12_tokens_sent_again() -> None:
    kv = manager(20, ("full", 4), free_order="tail")
    assert (0, ([1, 2, 3],)) == admit(kv, request("a", range(12)))
    b = request("b", range(12))
    assert [1, 2] == kv.get_computed_blocks(b)[0].get_block_ids()[0]
    assert (8, ([4],)) == admit(kv, b)


def test_mamba_finds_the_rightmost_state() -> None:
    kv = manager(20, ("mamba", 4, 0), free_order="tail")
    a = request("a", range(20))
    assert (0, (nums(1, 5),)) == admit(kv, a)
    a.append_output_token_ids(77)
    got = kv.allocate_slots(a, 1)
    assert got is not None
    assert ([6],) == got.get_block_ids()
    b = request("b", [*range(16), 50, 51])
    blocks, tokens = kv.get_computed_blocks(b)
    assert (([0, 0, 0, 4],), 16) == (blocks.get_block_ids(), tokens)
    assert (16, ([7],)) == admit(kv, b)


def test_a_mamba_state_counts_only_where_a_block_of_the_other_group_ends() -> None:
    kv = manager(30, ("full", 8), ("mamba", 4), free_order="tail")
    assert (0, ([1, 2, 3], nums(4, 9))) == admit(kv, request("a", range(21)))
    kv.evict_blocks([7])  # the state after 16 tokens; that after 12 is no help
    blocks, tokens = kv.get_computed_blocks(request("b", range(21)))
    assert (([1], [0, 5]), 8) == (blocks.get_block_ids(), tokens)


def test_lookahead_takes_room_that_the_next_step_uses() -> None:
    kv = manager(20, ("full", 4), free_order="tail")
    r = request("a", range(6))
    assert (0, ([1, 2, 3, 4],)) == admit(kv, r, num_lookahead_tokens=7)
    r.append_output_token_ids(9)
    assert kv.empty_kv_cache_blocks is kv.allocate_slots(r, 1, num_lookahead_tokens=7)
    assert [1] == kv.block_pool.cached_block_ids()


def test_tokens_that_the_request_does_not_have_yet_are_never_cached() -> None:
    kv = manager(20, ("full", 4), free_order="tail")
    r = request("a", range(6))
    got = kv.allocate_slots(r, 6 + 3)
    assert got is not None
    assert (([1, 2, 3],), [1]) == (got.get_block_ids(), kv.block_pool.cached_block_ids())


def test_eagle_drops_in_each_type() -> None:
    kv = manager(30, ("full", 4), ("sw", 4, 5), use_eagle=True, free_order="tail")
    r = request("a", range(25))
    admit(kv, r)
    kv.free(r)
    blocks, tokens = kv.get_computed_blocks(request("b", range(25)))
    assert (([1, 2, 3, 4], [0, 0, 0, 11]), 16) == (blocks.get_block_ids(), tokens)


def cached(kv: KVCacheManager, tokens: int) -> None:
    """Have the contents of a prompt cached and free."""
    r = request("a", range(tokens))
    admit(kv, r)
    kv.free(r)


def found(kv: KVCacheManager, tokens: int) -> tuple[tuple[list[int], ...], int]:
    blocks, hit = kv.get_computed_blocks(request("b", range(tokens)))
    return blocks.get_block_ids(), hit


def test_groups_of_a_draft_model_drop_one_block_between_them() -> None:
    kv = manager(30, ("full", 4), ("sw", 4, 5), marked=[0, 1], free_order="tail")
    cached(kv, 25)
    assert (([1, 2, 3, 4, 5], [0, 0, 0, 0, 12]), 20) == found(kv, 25)
    assert (([1, 2, 3, 4, 5], [0, 0, 0, 0, 12]), 20) == found(kv, 24)  # the sixth block is full and may be dropped
    assert 16 == found(kv, 23)[1]


def test_the_largest_block_that_a_draft_model_drops_is_the_gap() -> None:
    groups = ("full", 8), ("sw", 4, 17)
    for marked, hit in (((0,), 32), ((1,), 40), ((0, 1), 32), ((), 40)):
        kv = manager(60, *groups, marked=marked)
        cached(kv, 45)
        assert hit == found(kv, 45)[1], marked


def test_a_state_of_mamba_is_whole_and_nothing_of_it_is_dropped() -> None:
    kv = manager(30, ("mamba", 4), use_eagle=True)
    cached(kv, 25)
    assert 24 == found(kv, 25)[1]


def test_each_kind_may_shorten_the_prefix_and_the_others_are_asked_again() -> None:
    kv = manager(60, ("sw", 4, 5), ("full", 4), ("mamba", 4), ("sw", 4, 9), ("full", 4), free_order="tail")
    cached(kv, 25)  # group g has blocks 6 * g + g + 1 and the next five, and one that is not full
    assert 24 == found(kv, 25)[1]
    kv.evict_blocks([7 * 2 + 6])  # the state after 24 tokens: 20 are left
    assert 20 == found(kv, 25)[1]
    kv.evict_blocks([7 * 0 + 5])  # the first window wants the block that ends there: 16
    assert 16 == found(kv, 25)[1]
    kv.evict_blocks([7 * 3 + 3])  # the second window wants two blocks, so neither 16 nor 12: 8
    assert (([0, 2], [8, 9], [0, 16], [22, 23], [29, 30]), 8) == found(kv, 25)


def test_blocks_without_contents_are_reused_first() -> None:
    kv = manager(8, ("full", 4))
    r = request("a", range(10))
    admit(kv, r)
    kv.free(r)
    assert [3, 4, 5, 6, 7, 2, 1] == kv.block_pool.free_block_ids()


def test_the_pool_keeps_the_given_order_at_the_head_and_at_the_tail() -> None:
    for order, want in (("tail", [7, 2, 4, 1, 3]), ("uncached_first", [4, 1, 3, 7, 2])):
        pool = BlockPool(8, True, free_order=order)
        blocks = pool.get_new_blocks(6)
        assert nums(1, 6) == [block.block_id for block in blocks]
        pool.cache_full_blocks(request("r", range(8)), blocks[1:2], 0, 1, 4, 0)
        pool.free_blocks([blocks[1], blocks[3], blocks[0], blocks[2]])
        assert want == pool.free_block_ids()
        assert {5: 1, 6: 1} == pool.ref_counts()
        pool.check_valid()


def test_the_first_of_equal_contents_is_found_until_it_goes() -> None:
    pool = BlockPool(9, True)
    r = request("r", range(4))
    one, two, three = pool.get_new_blocks(3)
    for block in (two, one, three):
        pool.cache_full_blocks(r, [block], 0, 1, 4, 0)
    key = r.block_hashes[0]
    assert ([two], 1, [1, 2, 3]) == (pool.get_cached_block(key, [0]), pool.num_cached_keys, pool.cached_block_ids())
    assert (key, 0) == two.block_hash
    pool.evict_blocks([2])
    assert [None, [one]] == [two.block_hash, pool.get_cached_block(key, [0])]
    pool.evict_blocks([3, 1])
    assert (None, 0) == (pool.get_cached_block(key, [0]), pool.num_cached_keys)


def test_a_look_up_over_groups_misses_where_one_misses() -> None:
    pool = BlockPool(9, True)
    r = request("r", range(4))
    a, b = pool.get_new_blocks(2)
    pool.cache_full_blocks(r, [a], 0, 1, 4, 0)
    assert None is pool.get_cached_block(r.block_hashes[0], [0, 1])
    pool.cache_full_blocks(r, [b], 0, 1, 4, 1)
    assert [a, b] == pool.get_cached_block(r.block_hashes[0], [0, 1])


def test_too_many_blocks_are_refused_with_their_number() -> None:
    pool = BlockPool(4, True)
    with pytest.raises(ValueError, match=r"^Cannot get 4 free blocks from the pool$"):
        pool.get_new_blocks(4)
    assert [1, 2, 3] == pool.free_block_ids()


def test_usage_is_a_share_without_the_null_block() -> None:
    pool = BlockPool(5, True)
    pool.get_new_blocks(1)
    assert (0.25, 0.0, 3) == (pool.get_usage(), BlockPool(1, True).get_usage(), pool.get_num_free_blocks())


def test_touched_blocks_leave_the_queue_and_null_blocks_are_left_alone() -> None:
    pool = BlockPool(5, True)
    a, b = pool.get_new_blocks(2)
    pool.free_blocks([b, a])
    pool.touch(([pool.null_block, a], [a]))
    assert ({1: 2}, [2, 3, 4]) == (pool.ref_counts(), pool.free_block_ids())
    assert (2, 0, False, True) == (a.ref_cnt, pool.null_block.ref_cnt, a.is_null, pool.null_block.is_null)
    pool.check_valid()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pool, r, b: pool.evict_blocks([1, 0]), "null block"),
        (lambda pool, r, b: pool.evict_blocks([1, 9]), "outside"),
        (lambda pool, r, b: pool.evict_blocks([1, -1]), "outside"),
        (lambda pool, r, b: pool.evict_blocks([1, 1 << 40]), "outside"),
        (lambda pool, r, b: pool.free_blocks([b[0], b[0]]), "no request holds"),
        (lambda pool, r, b: pool.get_new_blocks(-1), "^n must be"),
        (lambda pool, r, b: pool.cache_full_blocks(r, b, 0, 1, 4, 0), "has a key"),
        (lambda pool, r, b: pool.cache_full_blocks(r, b, 1, 4, 4, 0), "blocks 1 to 4 of 3"),
        (lambda pool, r, b: pool.cache_full_blocks(r, b, 1, 3, 4, 0), "fewer block hashes"),
        (lambda pool, r, b: pool.cache_full_blocks(r, [b[0], b[1], pool.null_block], 1, 3, 4, 0), "only lead"),
        (lambda pool, r, b: pool.cache_full_blocks(r, b, 1, 2, 6, 0), "multiple"),
    ],
)
def test_what_the_pool_refuses_changes_nothing(wrong: Any, message: str) -> None:
    pool = BlockPool(9, True, hash_block_size=4, events=True)
    r = request("r", range(8))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(r, blocks, 0, 1, 4, 0)
    before = (pool.free_block_ids(), pool.ref_counts(), pool.cached_block_ids(), len(pool.take_events()))
    with pytest.raises(ValueError, match=message):
        wrong(pool, r, blocks)
    assert before[:3] == (pool.free_block_ids(), pool.ref_counts(), pool.cached_block_ids())
    assert [] == pool.take_events()
    pool.check_valid()


def test_a_pool_that_cannot_be_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"num_blocks": 0}, {"free_order": "lifo"}, {"hash_block_size": 0}]
    for options in wrong:
        with pytest.raises(ValueError, match=r"num_blocks|free_order|hash_block_size"):
            BlockPool(**{"num_blocks": 4, "enable_caching": True, **options})
    pool = BlockPool(4, False)
    blocks = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="enable_caching"):
        pool.cache_full_blocks(request("r", range(4)), blocks, 0, 1, 4, 0)


# ---- events ----


FULL: tuple[str | None, int | None] = ("full_attention", None)


def stored(
    r: Request, a: int, b: int, group: int = 0, size: int = 4, factor: int = 1,
    spec: tuple[str | None, int | None] = FULL,
) -> BlockStored:  # fmt: skip
    own: list[bytes | int] = [r.block_hashes[(i + 1) * factor - 1] for i in range(a, b)]
    parent = r.block_hashes[a * factor - 1] if a else None
    keys: list[list[Any] | None] = [[r.lora_name] if r.lora_name else None for _ in own]
    return BlockStored(
        own, parent, r.all_token_ids[a * size : b * size], size, r.lora_id, "GPU", group, lora_name=r.lora_name,
        extra_keys=keys, kv_cache_spec_kind=spec[0], kv_cache_spec_sliding_window=spec[1],
    )  # fmt: skip


def test_events_of_several_groups_come_removed_first_and_then_stored_in_order() -> None:
    kv = manager(7, ("full", 8), ("sw", 4, 5), enable_kv_cache_events=True, free_order="tail")
    a = request("a", range(16), lora_name="L", lora_id=3)
    assert (0, ([1, 2], [3, 4, 5, 6])) == admit(kv, a)
    window = ("sliding_window", 5)
    assert [stored(a, 0, 2, 0, 8, 2), stored(a, 0, 4, 1, spec=window)] == kv.take_events()
    kv.free(a)
    assert [2, 1, 6, 5, 4, 3] == kv.block_pool.free_block_ids()
    b = request("b", range(50, 59))
    assert (0, ([2, 1], [6, 5, 4])) == admit(kv, b)
    h = a.block_hashes
    removed = [(h[3], 0), (h[1], 0), (h[3], 1), (h[2], 1), (h[1], 1)]
    assert [
        *(BlockRemoved([x], "GPU", g) for x, g in removed),
        stored(b, 0, 1, 0, 8, 2),
        stored(b, 0, 2, 1, spec=window),
    ] == kv.take_events()
    assert [] == kv.take_events()


def test_a_stored_event_begins_behind_leading_null_blocks() -> None:
    pool = BlockPool(9, True, events=True)
    r = request("r", range(16))
    blocks = [pool.null_block, pool.null_block, *pool.get_new_blocks(2)]
    pool.cache_full_blocks(r, blocks, 0, 2, 4, 0)
    assert [] == pool.take_events()
    pool.cache_full_blocks(r, blocks, 1, 4, 4, 5)
    assert [stored(r, 2, 4, 5, spec=(None, None))] == pool.take_events()


def test_a_window_that_passed_uncached_blocks_stores_only_the_rest() -> None:
    kv = manager(20, ("sw", 4, 4), enable_kv_cache_events=True, free_order="tail")
    r = request("a", range(17))
    assert kv.allocate_slots(r, 13, delay_cache_blocks=True) is not None
    r.num_computed_tokens = 13
    assert [] == kv.take_events()
    assert kv.allocate_slots(r, 4) is not None
    assert [[0, 0, 3, 4, 5]] == list(kv.get_block_ids("a"))
    assert [stored(r, 2, 4, spec=("sliding_window", 4))] == kv.take_events()


def test_evicting_tells_each_key_once_in_the_given_order_and_moves_nothing() -> None:
    kv = manager(9, ("full", 4), enable_kv_cache_events=True, free_order="tail")
    a = request("a", range(12))
    admit(kv, a)
    kv.take_events()
    kv.evict_blocks([3, 8, 1, 3])
    assert [
        BlockRemoved([a.block_hashes[2]], "GPU", 0),
        BlockRemoved([a.block_hashes[0]], "GPU", 0),
    ] == kv.take_events()
    assert ([2], {1: 1, 2: 1, 3: 1}, nums(4, 8)) == (
        kv.block_pool.cached_block_ids(), kv.block_pool.ref_counts(), kv.block_pool.free_block_ids(),
    )  # fmt: skip


def test_reset_waits_until_nothing_is_in_use(caplog: pytest.LogCaptureFixture) -> None:
    kv = manager(9, ("full", 4), enable_kv_cache_events=True, log_stats=True, free_order="tail")
    a = request("a", range(9))
    admit(kv, a)
    with caplog.at_level(logging.WARNING):
        assert kv.reset_prefix_cache() is False
    assert ["WARNING"] == [record.levelname for record in caplog.records]
    kv.free(a)
    queue = kv.block_pool.free_block_ids()
    assert kv.reset_prefix_cache() is True
    assert ([], 0, queue) == (
        kv.block_pool.cached_block_ids(),
        kv.block_pool.num_cached_keys,
        kv.block_pool.free_block_ids(),
    )
    assert [stored(a, 0, 2), AllBlocksCleared()] == kv.take_events()
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (True, 1, 9, 0) == (stats.reset, stats.requests, stats.queries, stats.hits)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (False, 0) == (stats.reset, stats.requests)


@pytest.mark.parametrize("prompt", [8, 400])
def test_integers_in_events_are_the_low_64_bits_of_the_hash(prompt: int) -> None:
    kv = manager(200, ("full", 4), enable_kv_cache_events=True, int_event_hashes=True)
    a = request("a", range(prompt))
    kv.allocate_slots(a, 5)
    a.num_computed_tokens = 5
    kv.allocate_slots(a, prompt - 5)
    want: list[bytes | int] = [int.from_bytes(h[24:], "big") for h in a.block_hashes]
    first, second = kv.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (want[:1], want[1:], want[0]) == (first.block_hashes, second.block_hashes, second.parent_block_hash)
    kv.evict_blocks([1])
    assert [BlockRemoved(want[:1], "GPU", 0)] == kv.take_events()


def test_events_have_two_msgpack_forms_and_come_back_from_each() -> None:
    events: list[Any] = [
        BlockStored(
            [b"a" * 32, 7], None, [1, 2], 1, 4, "GPU", 0, lora_name="L", extra_keys=[["L", ["img", -2], b"d"], None],
            kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8,
        ),
        BlockRemoved([7], "GPU", 1),
        AllBlocksCleared(),
    ]  # fmt: skip
    assert {
        "type": "BlockStored", "block_hashes": [b"a" * 32, 7], "parent_block_hash": None, "token_ids": [1, 2],
        "block_size": 1, "lora_id": 4, "medium": "GPU", "group_idx": 0, "lora_name": "L",
        "extra_keys": [["L", ["img", -2], b"d"], None], "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 8,
    } == msgpack.unpackb(events[0].to_msgpack())  # fmt: skip
    assert [
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 1},
        {"type": "AllBlocksCleared"},
    ] == [msgpack.unpackb(event.to_msgpack()) for event in events[1:]]
    arrays = [
        ["BlockStored", [b"a" * 32, 7], None, [1, 2], 1, 4, "GPU", 0],
        ["BlockRemoved", [7], "GPU", 1],
        ["AllBlocksCleared"],
    ]
    assert arrays == [event.to_list() for event in events]
    assert arrays == [msgpack.unpackb(event.to_msgpack(format="array")) for event in events]
    assert events == [KVCacheEvent.from_msgpack(event.to_msgpack()) for event in events]
    older = [BlockStored([b"a" * 32, 7], None, [1, 2], 1, 4, "GPU", 0), *events[1:]]
    assert older == [KVCacheEvent.from_msgpack(event.to_msgpack("array")) for event in events]
    batch = KVEventBatch(1.5, events, 3)
    assert [1.5, [event.to_dict() for event in events], 3] == msgpack.unpackb(batch.to_msgpack())
    assert [1.5, arrays, 3] == msgpack.unpackb(batch.to_msgpack("array"))
    assert batch == KVEventBatch.from_msgpack(batch.to_msgpack())
    assert KVEventBatch(1.5, older, 3) == KVEventBatch.from_msgpack(batch.to_msgpack("array"))
    for call in (events[1].to_msgpack, batch.to_msgpack, KVEventBatch(0, []).to_msgpack):
        with pytest.raises(ValueError, match="list"):
            call("list")


@pytest.mark.parametrize("embeds", [None, np.arange(60, dtype=np.float32).reshape(30, 2)])
def test_a_stored_event_has_the_extra_keys_of_each_of_its_blocks(embeds: Any) -> None:
    """In two steps, for a group whose blocks are twice as long as those that the hashes are of."""
    kv = manager(50, ("full", 8), ("sw", 4, 9), enable_kv_cache_events=True)
    items = features(("a", 1, 2), ("b", 2, 9), ("none", 4, 0), ("c", 11, 1), ("d", 12, 100))
    prompt = cast(Any, range(30) if embeds is None else None)
    r = request("r", prompt, mm_features=items, prompt_embeds=embeds,
                cache_salt="s", lora_name="L", lora_id=3)  # fmt: skip
    r.append_output_token_ids([1, 2, 3])
    told: list[tuple[int, int]] = []
    for step in (9, 24):
        assert kv.allocate_slots(r, step) is not None
        at = {0: r.num_computed_tokens // 8 * 8, 1: r.num_computed_tokens // 4 * 4}
        r.num_computed_tokens += step
        for event in kv.take_events():
            assert isinstance(event, BlockStored)
            assert event.group_id is not None
            start, size = at[event.group_id], event.block_size
            tagged = [
                model.extra_keys(r, s, s + size) or []
                for s in range(start, start + size * len(event.block_hashes), size)
            ]
            want = [[values if kind == "mm" else values[0] for kind, *values in keys] for keys in tagged]
            assert (want, "L", 3) == (event.extra_keys, event.lora_name, event.lora_id)
            told.append((size, start))
    assert [(8, 0), (4, 0), (8, 8), (4, 8)] == told


def test_a_requests_adapter_is_told_also_as_vllm_has_it() -> None:
    kv, r = manager(9, ("mla", 4), enable_kv_cache_events=True), request("r", range(8))
    r.lora_request = SimpleNamespace(lora_name="L", lora_int_id=7, lora_path="/l")  # type: ignore[attr-defined]
    assert kv.allocate_slots(r, 8) is not None
    (event,) = kv.take_events()
    assert isinstance(event, BlockStored)
    assert (7, "L", [["L"], ["L"]], "mla_attention") == (
        event.lora_id, event.lora_name, event.extra_keys, event.kv_cache_spec_kind,
    )  # fmt: skip


def test_a_request_whose_adapter_cannot_be_read_changes_nothing() -> None:
    kv, r = manager(9, ("full", 4), enable_kv_cache_events=True), request("r", range(8))
    r.lora_request = "L"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        kv.allocate_slots(r, 8)
    assert ([], []) == (kv.get_block_ids("r")[0], kv.take_events())


def test_what_is_no_event_is_refused_and_what_others_add_is_not() -> None:
    theirs = {"type": "BlockRemoved", "block_hashes": [7], "medium": None, "locality": "LOCAL"}
    assert BlockRemoved([7], None) == KVCacheEvent.from_msgpack(msgpack.packb(theirs))
    assert KVEventBatch(2, []) == KVEventBatch.from_msgpack(msgpack.packb([2, []]))
    forms: tuple[Any, ...] = (
        {},
        {"type": "abc"},
        {"type": []},
        {"type": "BlockRemoved"},
        ["abc"],
        [],
        ["BlockRemoved"],
        1,
        None,
        "ab",
    )
    encoded = [msgpack.packb(form) for form in forms]
    for bad in (b"", b"\xc1", *encoded, AllBlocksCleared().to_msgpack() + b"x"):
        with pytest.raises(ValueError, match="not a KV-cache event"):
            KVCacheEvent.from_msgpack(bad)
    for bad in (b"", b"\xc1", *encoded, *(msgpack.packb([1, [form]]) for form in forms), msgpack.packb([1, [], 2, 3])):
        with pytest.raises(ValueError, match="not a batch of KV-cache events"):
            KVEventBatch.from_msgpack(bad)


def test_an_event_is_a_value() -> None:
    events: list[Any] = [AllBlocksCleared(), BlockRemoved([7], "GPU", 1)]
    with pytest.raises(AttributeError):
        events[1].medium = "CPU"


# ---- the manager ----


def test_num_new_tokens_must_be_greater_than_0() -> None:
    kv = manager(9, ("full", 4))
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=r"^num_new_tokens must be greater than 0$"):
            kv.allocate_slots(request("a", range(4)), wrong)


def test_a_refused_first_allocation_leaves_no_table() -> None:
    kv = manager(5, ("full", 4), free_order="tail")
    small, large = request("a", range(4)), request("b", range(40))
    assert admit(kv, small)[1] is not None
    assert None is kv.allocate_slots(large, 40)
    assert ([1], ([],)) == (kv.get_num_common_prefix_blocks("a"), kv.get_block_ids("b"))
    assert [0] == kv.get_num_common_prefix_blocks("b")
    kv.free(large)
    kv.check_valid()


def test_common_prefix_counts_blocks_that_every_request_with_blocks_uses() -> None:
    kv = manager(30, ("full", 4), ("sw", 4, 8), free_order="tail")
    a, b = request("a", range(21)), request("b", [*range(12), *range(90, 99)])
    admit(kv, a)
    admit(kv, b)
    assert ([3, 0], [3, 0], [0, 0]) == tuple(map(kv.get_num_common_prefix_blocks, ("a", "b", "nobody")))
    kv.free(b)
    assert [6, 0] == kv.get_num_common_prefix_blocks("a")


def test_blocks_that_the_window_has_passed_go_also_when_the_call_fails() -> None:
    kv = manager(6, ("sw", 4, 4), free_order="tail")
    r = request("a", range(40))
    assert kv.allocate_slots(r, 20) is not None
    r.num_computed_tokens = 20
    assert None is kv.allocate_slots(r, 20)
    assert ([[0, 0, 0, 0, 5]], [4, 3, 2, 1]) == (list(kv.get_block_ids("a")), kv.block_pool.free_block_ids())


def test_computed_blocks_cannot_be_taken_by_the_call_that_brings_them() -> None:
    kv = manager(5, ("full", 4), free_order="tail")
    a = request("a", range(16))
    admit(kv, a)
    kv.free(a)
    assert [4, 3, 2, 1] == kv.block_pool.free_block_ids()
    b = request("b", [*range(12), 70, 71, 72, 73, 74])
    blocks, hit = kv.get_computed_blocks(b)
    assert 12 == hit
    assert None is kv.allocate_slots(b, 5, hit, blocks)
    assert ([4, 3, 2, 1], [1, 2, 3, 4]) == (kv.block_pool.free_block_ids(), kv.block_pool.cached_block_ids())
    got = kv.allocate_slots(b, 4, hit, blocks)
    assert got is not None
    assert ([4],) == got.get_block_ids()


@pytest.mark.parametrize("case", ["table", "caching off", "groups", "hashes", "lookahead", "far block"])
def test_what_the_manager_refuses_changes_nothing(case: str) -> None:
    kv = manager(30, ("full", 4), enable_caching=case != "caching off", free_order="tail")
    other = manager(30, ("full", 4), ("sw", 4, 8))
    a, b = request("a", range(16)), request("b", range(17))
    admit(kv, a)
    foreign = KVCacheBlocks.from_ids(kv.block_pool, (1).to_bytes(4, "little"), (1,))
    calls: dict[str, Any] = {
        "table": lambda: kv.allocate_slots(a, 1, 4, foreign),
        "caching off": lambda: kv.allocate_slots(b, 1, 4, foreign),
        "groups": lambda: other.allocate_slots(b, 1, 4, foreign),
        "hashes": lambda: kv.allocate_slots(Request("c", range(17)), 17),
        "lookahead": lambda: kv.allocate_slots(a, 1, num_lookahead_tokens=-1),
        "far block": lambda: kv.allocate_slots(b, 1, 4, KVCacheBlocks.from_ids(kv.block_pool, b"\xff\0\0\0", (1,))),
    }
    a.num_computed_tokens = 3
    before = (kv.block_pool.free_block_ids(), kv.block_pool.ref_counts(), kv.block_pool.cached_block_ids())
    with pytest.raises(
        ValueError, match=r"computed_blocks|computed blocks|groups|fewer block hashes|num_lookahead_tokens|outside"
    ):
        calls[case]()
    assert before == (
        kv.block_pool.free_block_ids(),
        kv.block_pool.ref_counts(),
        kv.block_pool.cached_block_ids(),
    )
    assert ([], []) == (*kv.get_block_ids("b"), *kv.get_block_ids("c"))
    kv.check_valid()


def test_delayed_blocks_are_cached_when_their_contents_have_come() -> None:
    kv = manager(9, ("full", 4), enable_kv_cache_events=True)
    a = request("a", range(10))
    assert kv.allocate_slots(a, 10, delay_cache_blocks=True) is not None
    a.num_computed_tokens = 10
    assert ([], []) == (kv.block_pool.cached_block_ids(), kv.take_events())
    kv.cache_blocks(a, 7)
    assert ([1], [stored(a, 0, 1)]) == (kv.block_pool.cached_block_ids(), kv.take_events())
    kv.cache_blocks(a, 10)
    kv.cache_blocks(a, 10)
    assert ([1, 2], [stored(a, 1, 2)]) == (kv.block_pool.cached_block_ids(), kv.take_events())
    with pytest.raises(ValueError, match="fewer blocks"):
        kv.cache_blocks(a, 100)
    with pytest.raises(ValueError, match="no blocks to cache"):
        kv.cache_blocks(request("b", range(4)), 4)


def test_a_delayed_step_leaves_its_block_to_the_next_one() -> None:
    kv = manager(9, ("full", 4), free_order="tail")
    a = request("a", range(8))
    assert kv.allocate_slots(a, 3) is not None
    a.num_computed_tokens = 3
    assert kv.allocate_slots(a, 1, delay_cache_blocks=True) is not None
    assert [] == kv.block_pool.cached_block_ids()
    assert kv.allocate_slots(a, 1) is kv.empty_kv_cache_blocks
    assert [1] == kv.block_pool.cached_block_ids()


def test_tables_stop_at_max_model_len_and_mamba_adds_its_speculative_blocks_behind() -> None:
    full = manager(30, ("full", 4), max_model_len=10)
    r = request("a", range(9))
    assert (0, ([1, 2, 3],)) == admit(full, r, num_lookahead_tokens=20)
    mamba = manager(30, ("mamba", 4, 2), max_model_len=10)
    r = request("a", range(9))
    assert (0, (nums(1, 5),)) == admit(mamba, r, num_lookahead_tokens=20)
    assert [1, 2] == mamba.block_pool.cached_block_ids()


def test_cross_attention_counts_encoder_tokens() -> None:
    kv = manager(30, ("full", 4), ("cross", 4), enable_caching=False)
    r = Request("a", range(6))
    got = kv.allocate_slots(r, 6, num_encoder_tokens=9)
    assert got is not None
    assert ([1, 2], [3, 4, 5]) == got.get_block_ids()
    r.num_computed_tokens = 6
    assert kv.allocate_slots(r, 1, num_encoder_tokens=9) is kv.empty_kv_cache_blocks


def test_skipping_the_cache_reads_nothing_records_nothing_and_still_fills_it() -> None:
    kv = manager(30, ("full", 4), log_stats=True)
    admit(kv, request("a", range(9)))
    b = request("b", range(9), skip_reading_prefix_cache=True)
    assert (kv.empty_kv_cache_blocks, 0) == kv.get_computed_blocks(b)
    admit(kv, b)
    assert ([1, 2, 4, 5], 2) == (kv.block_pool.cached_block_ids(), kv.block_pool.num_cached_keys)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (1, 9) == (stats.requests, stats.queries)


def test_statistics_keep_preempted_requests_apart() -> None:
    kv = manager(30, ("full", 4), log_stats=True)
    a = request("a", range(9))
    admit(kv, a)
    kv.free(a)
    a.num_preemptions += 1
    a.num_computed_tokens = 0
    admit(kv, a)
    s = kv.make_prefix_cache_stats()
    assert s is not None
    assert (1, 9, 0, 1, 9, 8) == (
        s.requests,
        s.queries,
        s.hits,
        s.preempted_requests,
        s.preempted_queries,
        s.preempted_hits,
    )
    assert None is manager(30, ("full", 4)).make_prefix_cache_stats()


def test_context_parallelism_multiplies_the_block_size() -> None:
    kv = manager(30, ("full", 4), hash_block_size=16, dcp_world_size=2, pcp_world_size=2, free_order="tail")
    a = request("a", range(40), block_size=16)
    assert (0, ([1, 2, 3],)) == admit(kv, a)
    assert (32, ([4],)) == admit(kv, request("b", range(40), block_size=16))


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([("full", 4)], {"hash_block_size": 2}, "must be the hash block size"),
        ([("full", 4), ("sw", 6, 8)], {}, "multiples"),
        ([("full", size) for size in (2**31 - 1, 2**31 - 2, 2**31 - 3)], {"hash_block_size": 1}, "common multiple"),
        ([("chunk", 4, 8)], {"use_eagle": True}, "EAGLE"),
        ([("full", 4), ("chunk", 4, 8)], {"marked": [1]}, "is_eagle_group"),
        ([("cross", 4)], {}, "cross attention cannot be cached"),
        ([("full", 4), ("cross", 4)], {}, "cross attention cannot be cached"),
        ([("full", 4), ("sw", 4, 8)], {"dcp_world_size": 2, "hash_block_size": 8}, "context parallelism"),
        ([("sw", 4, 8)], {"pcp_world_size": 2, "hash_block_size": 8}, "context parallelism"),
        ([("full", 4)], {"max_model_len": 0}, "max_model_len"),
        ([("full", 4)], {"free_order": "x"}, "free_order"),
    ],
)
def test_managers_that_cannot_work_are_refused_when_built(groups: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manager(30, *groups, **options)


def test_with_caching_off_any_groups_go_together() -> None:
    kv = manager(30, ("full", 4), ("full", 4), ("sw", 6, 8), ("mamba", 4), enable_caching=False)
    r = Request("a", range(9))
    assert (kv.empty_kv_cache_blocks, 0) == kv.get_computed_blocks(r)
    assert (0, ([1, 2, 3], [4, 5, 6], [7, 8], [9, 10, 11])) == admit(kv, r)
    assert [] == kv.block_pool.cached_block_ids()


def test_any_object_with_the_attributes_serves_as_a_request() -> None:
    class Own:
        request_id = "own"
        num_computed_tokens = 0
        num_preemptions = 0
        skip_reading_prefix_cache = False
        all_token_ids = tuple(range(9))
        num_tokens = 9
        block_hashes = tuple(Request("x", range(9), block_hasher=BlockHasher(4)).block_hashes)

    kv = manager(30, ("full", 4), enable_kv_cache_events=True)
    assert (0, ([1, 2, 3],)) == admit(kv, Own())  # type: ignore[arg-type]
    assert [list(range(8))] == [event.token_ids for event in kv.take_events() if isinstance(event, BlockStored)]
    assert (8, ([4],)) == admit(kv, request("b", range(9)))


# ---- KVCacheBlocks ----


def test_blocks_are_values_with_ids_at_hand_and_objects_on_demand() -> None:
    kv = manager(30, ("full", 4), ("sw", 4, 8), free_order="tail")
    r = request("a", range(10))
    got = kv.allocate_slots(r, 10)
    assert got is not None
    assert (([1, 2, 3], [4, 5, 6]), (3, 3)) == (got.get_block_ids(), tuple(map(len, got.blocks)))
    block = got.blocks[1][0]
    assert (4, 1, (r.block_hashes[0], 1), False) == (block.block_id, block.ref_cnt, block.block_hash, block.is_null)
    assert None is got.blocks[0][2].block_hash
    assert got == kv.get_blocks("a")
    assert got == kv.create_kv_cache_blocks(got.blocks)
    assert [2, 3] == [b.block_id for b in got.blocks[0][1:]]
    twice = got + got
    assert ([1, 2, 3, 1, 2, 3], [4, 5, 6, 4, 5, 6]) == twice.get_block_ids(allow_none=True)
    kv.free(r)
    assert ([1, 2, 3], [4, 5, 6]) == got.get_block_ids()


def test_there_is_one_empty_instance() -> None:
    kv = manager(30, ("full", 4), ("sw", 4, 8))
    empty = kv.empty_kv_cache_blocks
    got = kv.allocate_slots(request("a", range(4)), 4)
    assert got is not None
    same = (
        kv.get_blocks("nobody"),
        got.new_empty(),
        kv.create_kv_cache_blocks(([], [])),
        empty + empty,
        empty.new_empty(),
    )
    assert [True] * 5 == [blocks is empty for blocks in same]
    assert got is got + empty
    assert got is empty + got
    assert (([], []), None) == (empty.get_block_ids(), empty.get_block_ids(allow_none=True))


def test_unhashed_blocks_are_those_without_a_key_in_one_group() -> None:
    kv = manager(30, ("sw", 4, 4), free_order="tail")
    r = request("a", range(18))
    kv.allocate_slots(r, 17)
    r.num_computed_tokens = 17
    kv.allocate_slots(r, 1)
    assert ([0, 0, 0, 4, 5],) == kv.get_block_ids("a")
    assert [5] == kv.get_blocks("a").get_unhashed_block_ids()
    kv.evict_blocks([4])
    assert [4, 5] == kv.get_blocks("a").get_unhashed_block_ids()
    with pytest.raises(ValueError, match="one group"):
        manager(30, ("full", 4), ("sw", 4, 8)).empty_kv_cache_blocks.get_unhashed_block_ids()


def test_blocks_of_unlike_groups_or_pools_do_not_add_up() -> None:
    one, two = manager(9, ("full", 4)), manager(9, ("full", 4))
    a, b = (kv.allocate_slots(request("a", range(4)), 4) for kv in (one, two))
    assert a is not None
    assert b is not None
    with pytest.raises(ValueError, match="pools"):
        a + b
    with pytest.raises(ValueError, match="groups"):
        a + manager(9, ("full", 4), ("sw", 4, 8)).empty_kv_cache_blocks
    with pytest.raises(ValueError, match="groups"):
        one.create_kv_cache_blocks(([], []))


def test_the_pool_takes_at_most_80_bytes_a_block() -> None:
    assert 80 >= BlockPool(100_000, True).nbytes / 100_000


def test_a_preempted_request_begins_anew_and_tokens_from_elsewhere_need_room() -> None:
    kv = manager(20, ("full", 4), free_order="tail")
    r = request("a", range(6))
    admit(kv, r)
    kv.free(r)
    r.num_computed_tokens = 0
    got = kv.allocate_slots(r, 2)
    assert got is not None
    assert ([3],) == got.get_block_ids()
    r.num_computed_tokens = 2
    got = kv.allocate_slots(r, 1, num_new_computed_tokens=2)
    assert got is not None
    assert ([4],) == got.get_block_ids()
