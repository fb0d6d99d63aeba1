"""What sliding windows keep with a `retention_interval`: enough for a request to go on at certain positions."""

from __future__ import annotations

from typing import Any

import pytest

from shmstore.scheduler import BlockStored, KVCacheManager, Request
from tests.scheduler.helpers import manager, request

FULL, WINDOW = ("full", 4), ("sw", 4, 8)
"""A request goes on after two blocks of the window."""
PROMPT = list(range(24))


def kept(kv: KVCacheManager, group: int, name: str = "a") -> list[int]:
    """Return which blocks of a request can be found."""
    cached = set(kv.block_pool.cached_block_ids())
    return [i for i, block in enumerate(kv.get_block_ids(name)[group]) if block in cached]


def prefill(kv: KVCacheManager, name: str, tokens: list[int], **about: Any) -> tuple[Request, int]:
    """Look up and allocate a prompt, and return the request and the tokens found."""
    made = request(name, tokens)
    vars(made).update(about)
    blocks, hit = kv.get_computed_blocks(made)
    assert kv.allocate_slots(made, len(tokens) - hit, hit, blocks) is not None
    made.num_computed_tokens = len(tokens)
    return made, hit


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(None, [0, 1, 2, 3, 4, 5]), (0, [3, 4]), (16, [2, 3, 4]), (12, [1, 2, 3, 4, 5]), (8, [0, 1, 2, 3, 4, 5])],
)
def test_a_window_keeps_what_the_same_prompt_needs_and_a_tail_of_each_interval(
    interval: int | None, expected: list[int]
) -> None:
    kv = manager(20, WINDOW, retention_interval=interval)
    made, _ = prefill(kv, "a", PROMPT)
    assert expected == kept(kv, 0)
    kv.free(made)
    again, hit = prefill(kv, "b", PROMPT)
    assert 20 == hit
    kv.free(again)
    kv.check_valid()


def test_full_attention_keeps_all() -> None:
    kv = manager(20, FULL, WINDOW, retention_interval=0)
    prefill(kv, "a", PROMPT)
    assert list(range(6)) == kept(kv, 0)
    assert [3, 4] == kept(kv, 1)


def test_generated_tokens_are_not_kept_and_their_blocks_are_reused_first() -> None:
    kv = manager(20, WINDOW, retention_interval=0)
    made, _ = prefill(kv, "a", PROMPT)
    for token in range(16):
        made.append_output_token_ids(token)
        assert kv.allocate_slots(made, 1) is not None
        made.num_computed_tokens += 1
    table = kv.get_block_ids("a")[0]
    assert [] == kept(kv, 0)  # the window has passed the blocks of the prompt
    kv.free(made)
    assert set(kv.block_pool.free_block_ids()[: len(table) - 8]) >= set(table[-2:])
    assert 20 == kv.get_computed_blocks(request("b", PROMPT))[1]


def test_what_two_prompts_share_is_kept_from_the_second_on() -> None:
    kv = manager(60, FULL, WINDOW, retention_interval=0)
    parts = [PROMPT[:16] + [100 + i] * 8 for i in range(3)]
    prefill(kv, "a", parts[0])
    second = request("b", parts[1])
    assert ((), 0) == (kv.get_computed_blocks(second)[0].packed_ids or (), kv.get_computed_blocks(second)[1])
    assert 16 == kv.shared_prefix_boundary
    _, hit = prefill(kv, "b", parts[1], shared_prefix_boundary=kv.shared_prefix_boundary)
    assert 0 == hit
    assert [2, 3, 4] == kept(kv, 1, "b")
    _, hit = prefill(kv, "c", parts[2])
    assert 16 == hit
    assert 0 == kv.shared_prefix_boundary


def test_a_look_up_that_reads_nothing_finds_no_boundary() -> None:
    kv = manager(60, FULL, WINDOW, retention_interval=0)
    prefill(kv, "a", PROMPT)
    kv.get_computed_blocks(request("b", PROMPT[:16] + [1] * 8))
    assert 16 == kv.shared_prefix_boundary
    kv.get_computed_blocks(request("c", PROMPT, skip_reading_prefix_cache=True))
    assert 0 == kv.shared_prefix_boundary


@pytest.mark.parametrize(("length", "expected"), [(24, [2, 3, 4, 5]), (25, [3, 4, 5]), (3, [])])
def test_with_eagle_the_block_that_is_computed_again_is_kept_too(length: int, expected: list[int]) -> None:
    kv = manager(20, WINDOW, retention_interval=0, use_eagle=True)
    prompt = list(range(length))
    prefill(kv, "a", prompt)
    assert expected == kept(kv, 0)
    assert max(0, (length - 1) // 4 * 4 - 4) == kv.get_computed_blocks(request("b", prompt))[1]


def test_blocks_that_are_cached_later_are_kept_alike() -> None:
    kv = manager(20, WINDOW, retention_interval=0)
    made = request("a", PROMPT)
    assert kv.allocate_slots(made, 24, delay_cache_blocks=True) is not None
    assert [] == kept(kv, 0)
    kv.cache_blocks(made, 24)
    assert [3, 4] == kept(kv, 0)


def test_an_event_names_the_blocks_that_are_kept() -> None:
    kv = manager(20, WINDOW, retention_interval=16, enable_kv_cache_events=True)
    made, _ = prefill(kv, "a", PROMPT + [7] * 8)
    hashes = list(made.block_hashes)
    assert [2, 3, 5, 6, 7] == kept(kv, 0)
    stored = [event for event in kv.take_events() if isinstance(event, BlockStored)]
    assert [hashes[2:4], hashes[5:8]] == [event.block_hashes for event in stored]
    assert [hashes[1], hashes[4]] == [event.parent_block_hash for event in stored]
    assert [PROMPT[8:16], [20, 21, 22, 23] + [7] * 8] == [event.token_ids for event in stored]


def test_a_window_of_one_token_keeps_a_block_to_go_on_behind() -> None:
    kv = manager(20, ("sw", 4, 1), retention_interval=0)
    made, _ = prefill(kv, "a", PROMPT)
    kv.free(made)
    assert 20 == prefill(kv, "b", PROMPT)[1]


def test_with_a_draft_model_of_several_groups_the_block_that_is_left_out_is_kept() -> None:
    kv = manager(40, FULL, WINDOW, retention_interval=0, marked=(0, 1))
    made, _ = prefill(kv, "a", PROMPT)
    kv.free(made)
    assert 20 == prefill(kv, "b", PROMPT)[1]  # that block is the sixth
