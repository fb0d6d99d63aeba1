"""Every worked example of the description, and what its sentences say, by numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from shmstore.scheduler import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from tests.scheduler import model
from tests.scheduler.helpers import admit, features, manager, request


def test_a_stored_event_begins_after_leading_null_blocks() -> None:
    pool = BlockPool(9, True, events=True)
    r = request("r", range(16))
    blocks = [pool.null_block, pool.null_block, *pool.get_new_blocks(2)]
    assert 6 == pool.get_num_free_blocks()
    assert BlockPool(10_000, True).core.nbytes <= 80 * 10_000
    pool.cache_full_blocks(r, blocks, 0, 2, 4, 0)
    assert [] == pool.take_events()
    pool.cache_full_blocks(r, blocks, 1, 4, 4, 5)
    (event,) = pool.take_events()
    assert ["BlockStored", r.block_hashes[2:], r.block_hashes[1], [*range(8, 16)], 4, None, "GPU", 5] == event.to_list()
    assert blocks[2:3] == pool.get_cached_block(r.block_hashes[2], [5])
    assert None is pool.get_cached_block(r.block_hashes[2], [5, 0])


def test_events_have_two_msgpack_forms_and_come_back_from_each() -> None:
    names = "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "group_idx"
    stored: list[Any] = ["BlockStored", [b"a" * 32, 7], None, [1, 2], 1, 4, "GPU", 0]
    more: dict[str, Any] = {
        "lora_name": "L", "extra_keys": [["L", ["img", -2], b"d"], None],
        "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8,
    }  # fmt: skip
    arrays = [stored, ["BlockRemoved", [7], "GPU", 1], ["AllBlocksCleared"]]
    maps = [
        dict(zip(names, stored, strict=True)) | more,
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 1},
        {"type": "AllBlocksCleared"},
    ]
    others: list[KVCacheEvent] = [BlockRemoved([7], "GPU", 1), AllBlocksCleared()]
    batch = KVEventBatch(1.5, [BlockStored(*stored[1:], **more), *others], 3)
    older = KVEventBatch(1.5, [BlockStored(*stored[1:]), *others], 3)
    for format, forms, back in (("map", maps, batch), ("array", arrays, older)):
        assert [1.5, forms, 3] == msgpack.unpackb(batch.to_msgpack(format))
        assert back == KVEventBatch.from_msgpack(batch.to_msgpack(format))
        for event, form, alone in zip(batch.events, forms, back.events, strict=True):
            assert form == msgpack.unpackb(event.to_msgpack(format))
            assert alone == KVCacheEvent.from_msgpack(event.to_msgpack(format))
    for call in (others[0].to_msgpack, batch.to_msgpack, KVEventBatch(0, []).to_msgpack):
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
    r.lora_request = "L"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        kv.allocate_slots(r, 8)
    assert ([], []) == (kv.get_block_ids("r")[0], kv.take_events())
    r.lora_request = SimpleNamespace(lora_name="L", lora_int_id=7, lora_path="/l")  # type: ignore[attr-defined]
    assert kv.allocate_slots(r, 8) is not None
    (event,) = kv.take_events()
    assert isinstance(event, BlockStored)
    assert (7, "L", [["L"], ["L"]], "mla_attention") == (
        event.lora_id, event.lora_name, event.extra_keys, event.kv_cache_spec_kind,
    )  # fmt: skip


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


STORED = BlockStored([b"a", 7], None, [1, True], 4, 1, "GPU", 0, extra_keys=[["salt", [b"a", 1]], None])
WRONG: dict[str, list[Any]] = {
    "block_hashes": ["a", ["a"], [None], None, b"a", 7, {}],
    "parent_block_hash": ["a", 1.5, []],
    "token_ids": [["a"], [1.5], [[1]], "ab", None, {1: 1}],
    "block_size": ["4", None, 4.5, [4]],
    "lora_id": ["1", 1.5],
    "medium": [b"GPU", 1, ["GPU"]],
    "group_idx": ["0", 0.5],
    "lora_name": [b"a", 1],
    "extra_keys": [["a"], [1], "a", [{}]],
    "kv_cache_spec_kind": [b"full", 1],
    "kv_cache_spec_sliding_window": ["8", 8.5],
}


@pytest.mark.parametrize("field", WRONG)
def test_an_event_with_a_field_of_another_type_is_refused(field: str) -> None:
    for value in WRONG[field]:
        wrong = STORED.to_dict() | {field: value}
        for form in (wrong, list(wrong.values())[: len(STORED.to_list())]):
            if form is wrong or field in list(wrong)[: len(form)]:
                with pytest.raises(ValueError, match="not a KV-cache event"):
                    KVCacheEvent.from_msgpack(msgpack.packb(form))
                with pytest.raises(ValueError, match="not a batch of KV-cache events"):
                    KVEventBatch.from_msgpack(msgpack.packb([1, [form]]))


@pytest.mark.parametrize("form", [["1", []], [None, []], [1, {}], [1, ""], [1, [], "0"], [1, [], 0.5], [True, []]])
def test_a_batch_with_a_field_of_another_type_is_refused(form: Any) -> None:
    with pytest.raises(ValueError, match="not a batch of KV-cache events"):
        KVEventBatch.from_msgpack(msgpack.packb(form))


# ---- the manager ----


def test_context_parallelism_multiplies_the_block_size() -> None:
    kv = manager(30, ("full", 4), hash_block_size=16, dcp_world_size=2, pcp_world_size=2, free_order="tail")
    a = request("a", range(40), block_size=16)
    assert (0, ([1, 2, 3],)) == admit(kv, a)
    assert (32, ([4],)) == admit(kv, request("b", range(40), block_size=16))


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
    empty, got = kv.empty_kv_cache_blocks, kv.allocate_slots(request("a", range(1)), 1)
    assert got is not None
    assert got is not empty
    for same in (kv.get_blocks("nobody"), got.new_empty(), kv.create_kv_cache_blocks(([], [])), empty + empty):
        assert same is empty
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
