"""Metrics: hit rates, the lives of blocks, and what a collector of one's own hears and may do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from shmstore.scheduler import (
    BlockPool,
    CachingMetrics,
    KVCacheManager,
    KVCacheMetricsCollector,
    PrefixCacheStats,
)
from tests.scheduler.helpers import admit, manager, request, state


def test_the_hit_rate_is_that_of_the_most_recent_requests() -> None:
    metrics = CachingMetrics(max_recent_requests=5)
    rates = [metrics.hit_rate]
    for requests, queries, hits in ((3, 100, 100), (0, 0, 0), (2, 100, 0), (1, 100, 50), (99, 10, 9)):
        metrics.observe(PrefixCacheStats(requests=requests, queries=queries, hits=hits))
        rates.append(metrics.hit_rate)
    for stats in (PrefixCacheStats(reset=True, requests=1, queries=4, hits=1), PrefixCacheStats(reset=True)):
        metrics.observe(stats)
        rates.append(metrics.hit_rate)
    assert [0.0, 1.0, 1.0, 0.5, 0.25, 0.9, 0.25, 0.0] == rates


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
    for block in BlockPool(9, True, metrics=metrics).get_new_blocks(4):
        metrics.on_block_accessed(block)
        metrics.on_block_evicted(block)
    assert 2 == len(metrics.drain_events())


# ---- collectors of one's own ----


class Meddler:
    """A collector that notes what it hears, and then does something of its own."""

    def __init__(self, meddle: Callable[[], Any] = list) -> None:
        self.meddle = meddle
        self.heard: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def note(block: Any = None) -> None:
            self.heard.append((name.removeprefix("on_block_"), block.block_id if block else 0))
            self.meddle()

        return note


def story(meddle: Callable[[KVCacheManager], Any]) -> tuple[list[Any], list[tuple[str, int]]]:
    """Return what a manager with such a collector answers, and what the collector hears."""
    collector = Meddler(lambda: meddle(kv))
    kv = manager(
        9, ("full", 4), ("sw", 4, 8), free_order="tail", enable_kv_cache_events=True, metrics_collector=collector
    )
    answers: list[Any] = []
    a, b = request("a", range(12)), request("b", [*range(8), *range(70, 75)])
    for req in (a, b):
        answers += [admit(kv, req), kv.get_block_ids(req.request_id)]
        kv.free(req)
    a.num_computed_tokens = 0
    assert kv.allocate_slots(a, 9, delay_cache_blocks=True) is not None
    kv.cache_blocks(a, 8)
    answers += [kv.get_block_ids("a"), kv.take_events()]
    kv.evict_blocks(range(1, 9))
    kv.free(a)
    return [*answers, kv.reset_prefix_cache(), kv.take_events(), state(kv)], collector.heard


def ask_everything(kv: KVCacheManager) -> None:
    kv.get_num_common_prefix_blocks("a")
    for request_id in ("a", "b", "probe"):
        kv.get_block_ids(request_id)
    kv._tables.find(request("probe", range(8)).block_hashes, 7)  # a look-up that no statistics count
    kv.check_valid()


def fail(_: KVCacheManager) -> None:
    raise RuntimeError("a collector's own mistake")


def test_a_collector_that_asks_or_fails_spoils_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    want = story(lambda kv: None)
    assert {"allocated", "accessed", "evicted", "reset"} == {what for what, _ in want[1]}
    with caplog.at_level(logging.ERROR):
        assert want == story(ask_everything)
        assert [] == caplog.records
        assert want == story(fail)
    assert 5 == len(caplog.records)  # one for each call: three allocations, one eviction, one reset


def test_a_pool_tells_what_was_touched_and_never_of_the_null_block() -> None:
    collector = Meddler()
    pool = BlockPool(9, True, metrics=collector)
    one = pool.get_new_blocks(1)
    pool.touch([[pool.null_block, *one]])
    assert [("evicted", 1), ("allocated", 1), ("accessed", 1)] == collector.heard
    kv = manager(9, ("sw", 4, 4), metrics_collector=collector, free_order="tail")
    admit(kv, request("a", range(13)))
    collector.heard.clear()
    assert (12, ([5],)) == admit(kv, request("b", range(13)))
    assert [("accessed", 3), ("evicted", 5), ("allocated", 5)] == collector.heard
