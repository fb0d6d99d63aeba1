"""Blocks for what a KV connector brings, for steps in flight, and what an admission leaves free."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import pytest

from shmstore.bindings import kvcache
from shmstore.scheduler import BlockHashes, KVCacheManager, PrefixCacheStats, Request
from tests.scheduler.helpers import admit, manager, request
from tests.test_interrupts import interrupted_at


def two_groups(**options: Any) -> KVCacheManager:
    return manager(40, ("full", 4), ("sw", 4, 8), free_order="tail", **options)


def test_each_number_of_a_step_is_where_c_reads_it() -> None:
    tables = two_groups()._tables
    assert sorted(kvcache._STEP) == dir(tables._step)
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


def test_found_blocks_that_external_tokens_put_after_the_window_are_not_taken() -> None:
    kv = two_groups()
    admit(kv, request("a", range(17)))
    kv.free(request("a", range(17)))
    b = request("b", range(40))
    found, hit = kv.get_computed_blocks(b)
    assert (([1, 2, 3, 4], [0, 0, 8, 9]), 16) == (found.get_block_ids(), hit)
    assert kv.allocate_slots(b, 0, hit, found, num_external_computed_tokens=4, delay_cache_blocks=True) is not None
    full, window = kv.get_block_ids("b")
    assert ([1, 2, 3, 4], [0, 0, 0, 9], 5, 5) == (full[:4], window[:4], len(full), len(window))
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
    kv, a, nulls = manager(20, ("sw", 4, 5)), request("a", range(20)), []
    admit(kv, a)
    for in_flight in (20, 12, 8, 7, 4, None):
        a.num_in_flight_tokens = in_flight  # type: ignore[assignment]
        if in_flight is None:  # an engine that has no step in flight
            del a.num_in_flight_tokens
        assert kv.allocate_slots(a, 1) is not None
        nulls.append(kv.get_block_ids("a")[0].count(0))
    assert [0, 1, 2, 2, 3, 4] == nulls


def test_an_admission_leaves_reserved_blocks_and_the_watermark_free() -> None:
    kv = manager(11, ("full", 4), watermark=0.3)  # 10 blocks to hand out; the watermark is 3

    def fits(blocks: int, **options: Any) -> bool:
        a = request("a", range(4 * blocks))
        fits = kv.allocate_slots(a, 4 * blocks, **options) is not None
        kv.free(a)
        return fits

    for most, options in (
        (10, {}), (7, {"admission": True}), (9, {"reserved_blocks": 1}), (4, {"reserved_blocks": 3, "admission": True}),
    ):  # fmt: skip
        assert (True, False) == (fits(most, **options), fits(most + 1, **options))


def test_a_step_that_needs_no_block_is_asked_the_same_questions() -> None:
    kv, a = manager(11, ("full", 4), watermark=1.0), request("a", range(80))
    assert kv.allocate_slots(a, 2) is not None
    a.num_computed_tokens = 2
    assert kv.allocate_slots(a, 1) is not None
    for option in ({"reserved_blocks": 10}, {"full_sequence_must_fit": True}, {"admission": True}):
        assert kv.allocate_slots(a, 1, **option) is None


@pytest.mark.parametrize(
    ("group", "options", "fits"),
    [
        (("full", 4), {}, False),
        (("full", 4), {"max_model_len": 40}, True),
        (("sw", 4, 9), {}, False),
        (("sw", 4, 9), {"max_in_flight_tokens": 28}, True),  # with 8 of the window: 9 blocks, and one more
        (("sw", 4, 9), {"max_in_flight_tokens": 29}, False),
        (("chunk", 4, 12), {"max_in_flight_tokens": 28}, True),
        (("chunk", 4, 12), {"max_in_flight_tokens": 29}, False),
        (("chunk", 4, 10), {"max_in_flight_tokens": 26}, True),  # 9 blocks, and one more: chunks begin inside blocks
        (("chunk", 4, 10), {"max_in_flight_tokens": 27}, False),
    ],
)
def test_a_sequence_that_must_fit_counts_what_a_window_holds_at_a_time(group: Any, options: Any, fits: bool) -> None:
    kv = manager(11, group, **options)
    assert fits is (kv.allocate_slots(request("a", range(80)), 4, full_sequence_must_fit=True) is not None)


def test_popped_blocks_stay_in_use_until_they_are_freed(caplog: pytest.LogCaptureFixture) -> None:
    kv, a = two_groups(), request("a", range(18))
    admit(kv, a)
    blocks = kv.pop_blocks_for_free(a)
    assert list(range(1, 11)) == [block.block_id for block in blocks]
    assert ([], []) == kv.get_block_ids("a")
    assert dict.fromkeys(range(1, 11), 1) == kv.block_pool.ref_counts()
    assert kv.reset_prefix_cache() is False
    assert ["WARNING"] == [record.levelname for record in caplog.records]
    assert [] == list(kv.pop_blocks_for_free(a))
    kv.block_pool.free_blocks(reversed(blocks))
    assert {} == kv.block_pool.ref_counts()
    kv.check_valid()


def test_a_look_up_is_counted_once_when_the_caller_says_so() -> None:
    kv, b = manager(20, ("full", 4), log_stats=True), request("b", range(9))
    kv.get_computed_blocks(b, record_stats=False)
    kv.record_prefix_cache_stats(b, 8)
    kv.record_prefix_cache_stats(Request("c", range(9), skip_reading_prefix_cache=True), 0)
    b.num_preemptions = 1
    kv.record_prefix_cache_stats(b, 4)
    assert PrefixCacheStats(False, 1, 9, 8, 1, 9, 4) == kv.make_prefix_cache_stats()
