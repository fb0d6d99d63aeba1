"""Blocks for what a KV connector brings, for steps in flight, and what an admission leaves free."""

from __future__ import annotations

import random
from functools import partial
from itertools import count
from typing import Any

import pytest

from shmstore.bindings import kvcache
from shmstore.scheduler import BlockHashes, KVCacheManager, KVCacheMetricsCollector, Request
from tests.scheduler.helpers import admit, manager, request
from tests.test_interrupts import interrupted_at


def two_groups(**options: Any) -> KVCacheManager:
    return manager(40, ("full", 4), ("sw", 4, 8), free_order="tail", **options)


def test_each_number_of_a_step_is_where_c_reads_it() -> None:
    tables = two_groups()._tables
    numbers = {name: 1000 + i for i, name in enumerate(kvcache._STEP)}
    assert tables.allocate("a", BlockHashes(), b"", None, **numbers) is None  # so many tokens do not fit
    assert numbers == {name: getattr(tables._step, name) for name in numbers}


def test_external_tokens_get_blocks_in_all_groups_before_new_tokens_do() -> None:
    kv = two_groups()
    got = kv.allocate_slots(request("a", range(30)), 4, num_external_computed_tokens=16)
    assert got is not None
    # 16 external tokens, of which the window of the 17th reaches back to the 10th, in the third block
    assert ([1, 2, 3, 4, 7], [5, 6, 8]) == got.get_block_ids()
    assert ([1, 2, 3, 4, 7], [0, 0, 5, 6, 8]) == kv.get_block_ids("a")
    assert [1, 2, 3, 4, 5, 6, 7, 8] == kv.block_pool.cached_block_ids()
    kv.check_valid()


def test_found_blocks_that_external_tokens_put_behind_the_window_are_not_taken() -> None:
    kv = two_groups()
    admit(kv, request("a", range(17)))
    kv.free(request("a", range(17)))
    b = request("b", range(40))
    found, hit = kv.get_computed_blocks(b)
    assert (([1, 2, 3, 4], [0, 0, 8, 9]), 16) == (found.get_block_ids(), hit)
    free = kv.block_pool.get_num_free_blocks()
    assert kv.allocate_slots(b, 0, hit, found, num_external_computed_tokens=4, delay_cache_blocks=True) is not None
    full, window = kv.get_block_ids("b")
    assert ([1, 2, 3, 4], [0, 0, 0, 9]) == (full[:4], window[:4])
    assert (5, 5, free - 7) == (len(full), len(window), kv.block_pool.get_num_free_blocks())
    assert 16 == kv.estimate_cached_tokens(b)  # what is to come is not cached
    kv.cache_blocks(b, 20)
    assert 20 == kv.estimate_cached_tokens(b)
    kv.check_valid()


def test_a_refused_step_after_an_interrupted_free_leaves_no_record_of_the_request() -> None:
    for number in count(1):
        kv = two_groups()
        admit(kv, request("a", range(8)))
        if not interrupted_at(number, partial(kv._tables.release, "a"), kvcache.__file__, only=["release"]):
            assert number > 1
            break
        if "a" not in kv._tables:
            assert kv.allocate_slots(request("a", range(400)), 400) is None
            assert not kv._tables._requests, number


def test_a_window_keeps_what_a_step_in_flight_still_reads() -> None:
    kv = manager(20, ("sw", 4, 5))
    a = request("a", range(20))
    admit(kv, a)
    tables = []
    for in_flight in (20, 12, 8, 7, 4, 0):
        a.num_in_flight_tokens = in_flight
        assert kv.allocate_slots(a, 1) is not None
        tables.append(kv.get_block_ids("a")[0].count(0))
    assert [0, 1, 2, 2, 3, 4] == tables


def test_a_request_without_the_attribute_has_no_step_in_flight() -> None:
    kv = manager(20, ("sw", 4, 5))
    a = request("a", range(20))
    admit(kv, a)
    del a.num_in_flight_tokens
    assert kv.allocate_slots(a, 1) is not None
    assert [0, 0, 0, 0] == kv.get_block_ids("a")[0][:4]


def test_an_admission_leaves_reserved_blocks_and_the_watermark_free() -> None:
    def largest(**options: Any) -> int:
        kv = manager(11, ("full", 4), watermark=0.3)  # 10 blocks to hand out; the watermark is 3
        return max(n for n in range(1, 11) if kv_fits(kv, n, **options))

    def kv_fits(kv: KVCacheManager, blocks: int, **options: Any) -> bool:
        a = request("a", range(4 * blocks))
        fits = kv.allocate_slots(a, 4 * blocks, **options) is not None
        kv.free(a)
        return fits

    assert [10, 7, 9, 4] == [
        largest(), largest(admission=True), largest(reserved_blocks=1), largest(reserved_blocks=3, admission=True),
    ]  # fmt: skip
    with pytest.raises(TypeError, match="reserved_blocks"):
        largest(reserved_blocks=1.5)


def test_a_step_that_needs_no_block_is_asked_the_same_questions() -> None:
    kv, a = manager(11, ("full", 4), watermark=1.0), request("a", range(80))
    assert kv.allocate_slots(a, 2) is not None
    a.num_computed_tokens = 2
    assert kv.allocate_slots(a, 1) is not None
    for option in ({"reserved_blocks": 10}, {"full_sequence_must_fit": True}, {"admission": True}):
        assert kv.allocate_slots(a, 1, **option) is None


def test_a_sequence_that_must_fit_counts_what_a_window_holds_at_a_time() -> None:
    def fits(*groups: tuple[Any, ...], **options: Any) -> bool:
        kv, a = manager(11, *groups, **options), request("a", range(80))
        return kv.allocate_slots(a, 4, full_sequence_must_fit=True) is not None

    assert not fits(("full", 4))
    assert not fits(("sw", 4, 9))
    assert fits(
        ("sw", 4, 9), max_in_flight_tokens=28
    )  # 8 tokens of the window and 28 in flight: 9 blocks, and one more
    assert not fits(("sw", 4, 9), max_in_flight_tokens=29)
    assert fits(("chunk", 4, 12), max_in_flight_tokens=28)
    assert not fits(("chunk", 4, 12), max_in_flight_tokens=29)
    assert fits(("full", 4), max_model_len=40)


@pytest.mark.parametrize("kind", ["sw", "chunk"])
def test_a_sequence_that_fits_when_it_is_admitted_fits_in_any_steps(kind: str) -> None:
    rng = random.Random(15)
    for _ in range(100):
        size, parameter, in_flight = rng.choice((1, 2, 4, 8)), rng.randint(1, 20), rng.randint(1, 20)
        for blocks in range(2, 300):  # the smallest pool in which it fits
            kv = manager(blocks, (kind, size, parameter), hash_block_size=size, max_in_flight_tokens=in_flight)
            made = request("a", range(150), size)
            if kv.allocate_slots(made, 1, full_sequence_must_fit=True) is not None:
                break
        made.num_computed_tokens = 1
        while made.num_computed_tokens < 150:
            new = min(rng.randint(1, in_flight), 150 - made.num_computed_tokens)
            assert kv.allocate_slots(made, new) is not None, (size, parameter, in_flight)
            made.num_computed_tokens += new


def test_popped_blocks_stay_in_use_until_they_are_freed() -> None:
    kv, a = two_groups(), request("a", range(18))
    admit(kv, a)
    blocks = kv.pop_blocks_for_free(a)
    assert list(range(1, 11)) == [block.block_id for block in blocks]
    assert ([], []) == kv.get_block_ids("a")
    assert dict.fromkeys(range(1, 11), 1) == kv.block_pool.ref_counts()
    assert [] == list(kv.pop_blocks_for_free(a))
    kv.check_valid()
    assert kv.allocate_slots(a, 1) is not None  # the id is free for a new request
    kv.free(a)
    kv.block_pool.free_blocks(reversed(blocks))
    assert {} == kv.block_pool.ref_counts()
    kv.check_valid()


def test_a_look_up_is_counted_once_when_the_caller_says_so() -> None:
    kv, a = manager(20, ("full", 4), log_stats=True), request("a", range(9))
    admit(kv, a)
    b = request("b", range(9))
    kv.make_prefix_cache_stats()
    for _ in range(3):
        _, hit = kv.get_computed_blocks(b, record_stats=False)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (0, 0) == (stats.requests, stats.queries)
    kv.record_prefix_cache_stats(b, hit)
    kv.record_prefix_cache_stats(Request("c", range(9), skip_reading_prefix_cache=True), 0)
    b.num_preemptions = 1
    kv.record_prefix_cache_stats(b, 4)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert (1, 9, 8) == (stats.requests, stats.queries, stats.hits)
    assert (1, 9, 4) == (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits)


def test_metrics_hear_of_the_blocks_for_external_tokens() -> None:
    heard: list[int] = []

    class Collector(KVCacheMetricsCollector):
        def on_block_allocated(self, block: Any) -> None:
            heard.append(block.block_id)

    kv = manager(40, ("full", 4), metrics_collector=Collector())
    kv.allocate_slots(request("a", range(30)), 1, num_external_computed_tokens=8)
    assert [1, 2, 3] == heard
