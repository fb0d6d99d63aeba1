"""Metrics: hit rates, the lives of blocks, and what a collector of one's own hears and may do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from shmstore.scheduler import (
    BlockPool,
    CachingMetrics,
    KVCacheBlocks,
    KVCacheManager,
    KVCacheMetricsCollector,
    PrefixCacheStats,
)
from tests.scheduler.helpers import admit, manager, request, state


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


# ---- collectors of one's own ----


class Meddler:
    """A collector that does something of its own whenever it is told anything."""

    def __init__(self, meddle: Callable[[], Any]) -> None:
        self.meddle = meddle
        self.heard: list[tuple[str, int]] = []

    def note(self, what: str, block_id: int) -> None:
        self.heard.append((what, block_id))
        self.meddle()

    def on_block_allocated(self, block: Any) -> None:
        self.note("allocated", block.block_id)

    def on_block_accessed(self, block: Any) -> None:
        self.note("accessed", block.block_id)

    def on_block_evicted(self, block: Any) -> None:
        self.note("evicted", block.block_id)

    def reset(self) -> None:
        self.note("reset", 0)


def story(meddle: Callable[[KVCacheManager], Any] | None) -> tuple[list[Any], list[tuple[str, int]]]:
    """What a manager with such a collector answers; without one for None."""
    collector = Meddler(lambda: meddle(kv) if meddle is not None else None)
    kv = manager(
        9, ("full", 4), ("sw", 4, 8), free_order="tail", enable_kv_cache_events=True, log_stats=True,
        metrics_collector=None if meddle is None else collector,
    )  # fmt: skip
    answers: list[Any] = []
    a, b = request("a", range(12)), request("b", [*range(8), *range(70, 75)])
    for req in (a, b):
        answers += [admit(kv, req), kv.get_block_ids(req.request_id)]
        kv.free(req)
    a.num_computed_tokens = 0
    answers.append(kv.allocate_slots(a, 9, delay_cache_blocks=True))
    kv.cache_blocks(a, 8)
    answers += [kv.get_block_ids("a"), [event.to_list() for event in kv.take_events()]]
    kv.evict_blocks([1, 2, 3, 4, 5, 6, 7, 8])
    kv.free(a)
    answers += [kv.reset_prefix_cache(), kv.take_events(), kv.make_prefix_cache_stats(), state(kv)]
    return [x.get_block_ids() if isinstance(x, KVCacheBlocks) else x for x in answers], collector.heard


def ask_everything(kv: KVCacheManager) -> None:
    probe = request("probe", range(8))
    kv.get_computed_blocks(request("probe", range(8), skip_reading_prefix_cache=True))
    kv.get_num_common_prefix_blocks("a")
    for request_id in ("a", "b", "probe"):
        kv.get_block_ids(request_id)
    kv._tables.find(probe.block_hashes, 7)  # a look-up that no statistics count
    kv.check_valid()


def test_a_collector_that_asks_the_manager_spoils_no_answer() -> None:
    want, _ = story(None)
    got, heard = story(ask_everything)
    assert want == got
    assert {"allocated", "accessed", "evicted", "reset"} == {what for what, _ in heard}


def test_a_collector_that_raises_loses_nothing_and_each_call_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: KVCacheManager) -> None:
        raise RuntimeError("a collector's own mistake")

    want, _ = story(None)
    with caplog.at_level(logging.ERROR):
        got, heard = story(fail)
    assert want == got
    _, undisturbed = story(lambda kv: None)
    assert undisturbed == heard
    # three allocations, one eviction, one reset
    assert 5 == len(caplog.records)
    assert {"RuntimeError"} == {record.exc_info[0].__name__ for record in caplog.records}  # type: ignore[index, union-attr]


def test_a_pool_tells_what_was_touched_and_never_of_the_null_block() -> None:
    collector = Meddler(lambda: None)
    pool = BlockPool(9, True, metrics=collector)
    one = pool.get_new_blocks(1)
    pool.touch([[pool.null_block, *one]])
    assert [("evicted", 1), ("allocated", 1), ("accessed", 1)] == collector.heard
    kv = manager(9, ("sw", 4, 4), metrics_collector=collector, free_order="tail")
    admit(kv, request("a", range(13)))
    collector.heard.clear()
    b = request("b", range(13))
    found, hit = kv.get_computed_blocks(b)
    assert ([0, 0, 3],) == found.get_block_ids()
    assert kv.allocate_slots(b, 13 - hit, hit, found) is not None
    assert [("accessed", 3), ("evicted", 5), ("allocated", 5)] == collector.heard
