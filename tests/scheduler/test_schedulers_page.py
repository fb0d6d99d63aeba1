"""What docs/guides/schedulers.md says in prose; its programs check themselves, and test_docs.py runs them."""

from __future__ import annotations

from shmstore.scheduler import PrefixCacheStats
from tests.scheduler.helpers import admit, manager, request


def test_beyond_max_model_len_success_is_no_room() -> None:
    kv = manager(20, ("full", 4), max_model_len=8)
    req = request("a", range(12))
    assert kv.allocate_slots(req, 8) is not None
    req.num_computed_tokens = 8
    assert kv.empty_kv_cache_blocks is kv.allocate_slots(req, 4)
    assert 2 == len(kv.get_block_ids("a")[0])


def test_claims_of_computed_tokens_are_believed() -> None:
    for claim in ("call", "request"):
        kv, req = manager(20, ("full", 4)), request("a", range(12))
        req.num_computed_tokens = 8 if claim == "request" else 0
        assert kv.allocate_slots(req, 1, 8 if claim == "call" else 0) is not None
        assert (8, 2) == (kv.get_computed_blocks(request("b", range(12)))[1], kv.block_pool.num_cached_keys)


def test_a_look_up_repeated_counts_again_and_preempted_ones_apart() -> None:
    kv, req = manager(20, ("full", 4), log_stats=True), request("a", range(12))
    for _ in range(3):
        kv.get_computed_blocks(req)
    req.num_preemptions = 1
    kv.get_computed_blocks(req)
    stats = kv.make_prefix_cache_stats()
    assert PrefixCacheStats(False, 3, 36, 0, 1, 12, 0) == stats


def test_usage_does_not_count_contents_that_are_only_kept() -> None:
    kv, req = manager(9, ("full", 4)), request("a", range(12))
    admit(kv, req)
    assert (3 / 8, [3]) == (kv.usage, kv.get_num_common_prefix_blocks("a"))
    kv.free(req)
    assert (0.0, 3) == (kv.usage, kv.block_pool.num_cached_keys)


def test_what_an_abandoned_step_was_to_compute_is_found_unless_it_is_evicted() -> None:
    found = []
    for evicts in (False, True):
        kv = manager(20, ("full", 4))
        victim = request("victim", range(13))
        assert kv.allocate_slots(victim, 5) is not None
        victim.num_computed_tokens = 5
        assert kv.allocate_slots(victim, 8) is not None
        if evicts:
            kv.evict_blocks(kv.get_block_ids("victim")[0][victim.num_computed_tokens // 4 :])
        kv.free(victim)
        found.append(kv.get_computed_blocks(request("next", range(13)))[1])
    assert [12, 4] == found
