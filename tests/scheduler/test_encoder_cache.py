"""Encoder cache managers: the worked example, repeated items, size mismatches, double frees, over-allocation."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shmstore.errors import ShmStoreError, StoreFullError
from shmstore.scheduler import EncoderCacheManager, EncoderDecoderCacheManager, Request, RequestEncoderCacheManager
from tests.scheduler.helpers import Feature, Place

UNLIMITED = 1 << 60


def req(request_id: str, *items: tuple[str, int]) -> Request:
    """A request whose items (identifier, size) stand one after the other."""
    at, made = 0, []
    for identifier, size in items:
        made.append(Feature(identifier, Place(at, size)))
        at += size
    return Request(request_id, range(at or 1), mm_features=made)


def state(cache: Any) -> dict[str, Any]:
    return copy.deepcopy(vars(cache))


def test_the_worked_example() -> None:
    cache = EncoderCacheManager(10)
    one, two = req("1", ("A", 4)), req("2", ("A", 4), ("B", 8))
    assert cache.check_and_update_cache(one, 0) is False
    cache.allocate(one, 0)
    assert 6 == cache.num_free_slots
    assert cache.check_and_update_cache(two, 0) is True
    cache.free_encoder_input(one, 0)
    cache.free_encoder_input(two, 0)
    assert (10, 6) == (cache.num_freeable_slots, cache.num_free_slots)
    before = state(cache)
    assert cache.can_allocate(two, 1, UNLIMITED, 0) is True
    assert before == state(cache)
    cache.allocate(two, 1)
    assert (["A"], 2) == (cache.get_freed_mm_hashes(), cache.num_free_slots)
    cache.check_valid()


def test_what_is_cached_again_is_not_named_as_freed() -> None:
    cache = EncoderCacheManager(10)
    one, two = req("1", ("A", 4)), req("2", ("B", 8))
    cache.allocate(one, 0)
    cache.free(one)
    cache.allocate(two, 0)
    cache.free(two)
    cache.allocate(one, 0)
    assert ["B"] == cache.get_freed_mm_hashes()
    assert [] == cache.get_freed_mm_hashes()


def test_what_is_evicted_again_goes_to_the_end_and_stands_there_once() -> None:
    cache = EncoderCacheManager(4)
    a, b = req("a", ("A", 4)), req("b", ("B", 4))
    for request in (a, b, a, b):
        cache.allocate(request, 0)
        cache.free(request)
    assert ["A"] == cache.get_freed_mm_hashes()[-1:]
    for request in (a, b, a):
        cache.allocate(request, 0)
        cache.free(request)
    assert ["B"] == cache.get_freed_mm_hashes()
    c = req("c", ("C", 4))
    cache.allocate(c, 0)
    cache.free(c)
    cache.allocate(b, 0)
    cache.free(b)
    cache.allocate(a, 0)
    assert ["C", "B"] == cache.get_freed_mm_hashes()


def test_an_item_that_occurs_twice_stays_until_both_are_freed() -> None:
    cache = EncoderCacheManager(10)
    r = req("r", ("A", 4), ("A", 4))
    cache.allocate(r, 0)
    assert ({0}, True, {0, 1}) == (
        cache.get_cached_input_ids(r),
        cache.check_and_update_cache(r, 1),
        cache.get_cached_input_ids(r),
    )
    cache.free_encoder_input(r, 0)
    assert ({}, {1}, {"A": {"r"}}) == (cache.freeable, cache.get_cached_input_ids(r), cache.cached)
    cache.free_encoder_input(r, 1)
    assert ({"A": 4}, set(), {"A": set()}) == (cache.freeable, cache.get_cached_input_ids(r), cache.cached)


def test_only_what_this_request_has_taken_is_its_own() -> None:
    cache = EncoderCacheManager(10)
    one, two = req("1", ("A", 4)), req("2", ("A", 4))
    cache.allocate(one, 0)
    assert (set(), {0}) == (cache.get_cached_input_ids(two), cache.get_cached_input_ids(one))


def test_allocating_what_is_cached_takes_its_space_once() -> None:
    cache = EncoderCacheManager(5)
    one, two = req("1", ("A", 4)), req("2", ("A", 4))
    for request in (one, one, two):
        cache.allocate(request, 0)
    assert (1, {"A": {"1", "2"}}) == (cache.num_free_slots, cache.cached)
    cache.free(one)
    cache.free(two)
    assert (1, 5, {"A": 4}) == (cache.num_free_slots, cache.num_freeable_slots, cache.freeable)
    cache.allocate(two, 0)
    assert (1, 1, {}) == (cache.num_free_slots, cache.num_freeable_slots, cache.freeable)
    cache.check_valid()


def test_freeing_twice_or_what_was_never_taken_changes_nothing() -> None:
    cache = EncoderCacheManager(10)
    r, stranger = req("r", ("A", 4), ("B", 2)), req("s", ("A", 4))
    cache.allocate(r, 0)
    before = state(cache)
    cache.free_encoder_input(stranger, 0)
    cache.free_encoder_input(r, 1)
    cache.free(stranger)
    assert before == state(cache)
    cache.free(r)
    after = state(cache)
    cache.free(r)
    cache.free_encoder_input(r, 0)
    assert after == state(cache)


def test_eviction_takes_the_oldest_and_no_more_than_needed() -> None:
    cache = EncoderCacheManager(10)
    requests = [req(str(i), (name, size)) for i, (name, size) in enumerate([("A", 3), ("B", 3), ("C", 3)])]
    for r in requests:
        cache.allocate(r, 0)
    for r in (requests[1], requests[0], requests[2]):
        cache.free(r)
    assert ["B", "A", "C"] == list(cache.freeable)
    assert cache.check_and_update_cache(requests[0], 0) is True
    cache.free(requests[0])
    assert ["B", "C", "A"] == list(cache.freeable)
    cache.allocate(req("n", ("N", 4)), 0)
    assert (["B"], ["C", "A"], 0) == (cache.get_freed_mm_hashes(), list(cache.freeable), cache.num_free_slots)


def test_over_allocation_raises_and_changes_nothing() -> None:
    cache = EncoderCacheManager(10)
    cache.allocate(req("1", ("A", 4)), 0)
    other = req("2", ("B", 3))
    cache.allocate(other, 0)
    cache.free(other)
    big = req("3", ("X", 7))
    before = state(cache)
    assert cache.can_allocate(big, 0, UNLIMITED, 0) is False
    with pytest.raises(StoreFullError, match="7 embeddings and 6 are left") as caught:
        cache.allocate(big, 0)
    assert (True, True) == (isinstance(caught.value, ShmStoreError), isinstance(caught.value, MemoryError))
    assert before == state(cache)


def test_budget_and_what_is_scheduled_count_whether_or_not_the_hash_is_cached() -> None:
    cache = EncoderCacheManager(10)
    r = req("r", ("A", 4))
    answers = [cache.can_allocate(r, 0, budget, scheduled) for budget, scheduled in ((4, 6), (3, 0), (4, 7))]
    assert [True, False, False] == answers
    cache.allocate(r, 0)
    assert [True, False] == [cache.can_allocate(r, 0, 4, scheduled) for scheduled in (2, 3)]


def test_the_size_is_the_number_of_embeddings_that_the_mask_selects() -> None:
    cache = EncoderCacheManager(10)
    masked = Request("r", range(6), mm_features=[Feature("A", Place(0, 6, (True, False, True, False, False, True)))])
    cache.allocate(masked, 0)
    assert 7 == cache.num_free_slots
    method = Place(0, 6)

    class ByMethod:
        offset, length = 0, 6

        def get_num_embeds(self) -> int:
            return 2

    cache.allocate(Request("s", range(6), mm_features=[Feature("B", ByMethod())]), 0)  # type: ignore[arg-type]
    assert (5, 6) == (cache.num_free_slots, method.get_num_embeds)


@pytest.mark.parametrize("call", ["check_and_update_cache", "can_allocate", "allocate"])
@pytest.mark.parametrize("in_use", [True, False])
def test_another_size_under_the_same_hash_is_refused_by_all_three_calls(call: str, in_use: bool) -> None:
    cache = EncoderCacheManager(10)
    one, two = req("1", ("A", 4)), req("2", ("A", 5))
    cache.allocate(one, 0)
    if not in_use:
        cache.free(one)
    before = state(cache)
    with pytest.raises(ValueError, match="5 embeddings, the entry cached under its hash 4"):
        getattr(cache, call)(two, 0, *((UNLIMITED, 0) if call == "can_allocate" else ()))
    assert before == state(cache)


def test_an_evicted_hash_may_come_back_in_another_size() -> None:
    cache = EncoderCacheManager(5)
    one, two, three = req("1", ("A", 4)), req("2", ("B", 5)), req("3", ("A", 5))
    cache.allocate(one, 0)
    cache.free(one)
    cache.allocate(two, 0)
    cache.free(two)
    cache.allocate(three, 0)
    assert (["B"], 0) == (cache.get_freed_mm_hashes(), cache.num_free_slots)


def test_a_request_id_that_comes_again_with_other_items_is_refused_until_freed() -> None:
    cache = EncoderCacheManager(20)
    cache.allocate(req("r", ("A", 4)), 0)
    cache.allocate(req("s", ("B", 4)), 0)
    again = req("r", ("B", 4))
    before = state(cache)
    for call in (cache.check_and_update_cache, cache.allocate):
        with pytest.raises(ValueError, match="free it before"):
            call(again, 0)
    with pytest.raises(ValueError, match="free it before"):
        cache.allocate(req("r", ("C", 4)), 0)
    assert before == state(cache)
    cache.free(again)
    assert cache.check_and_update_cache(again, 0) is True


def test_reset_forgets_everything() -> None:
    cache = EncoderCacheManager(10)
    fresh = state(cache)
    cache.allocate(req("1", ("A", 8)), 0)
    cache.free(req("1"))
    cache.allocate(req("2", ("B", 8)), 0)
    cache.reset()
    assert fresh == state(cache)


@pytest.mark.parametrize("kind", [EncoderCacheManager, RequestEncoderCacheManager, EncoderDecoderCacheManager])
def test_wrong_arguments_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="cache_size"):
        kind(-1)
    cache = kind(10)
    before = state(cache)
    for i in (-1, 1):
        with pytest.raises(IndexError):
            cache.allocate(req("r", ("A", 1)), i)
    assert before == state(cache)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3)), max_size=60), st.integers(0, 14))
def test_any_story_keeps_the_shared_cache_whole(story: list[tuple[int, int, int]], capacity: int) -> None:
    cache = EncoderCacheManager(capacity)
    items = [("A", 4), ("B", 3), ("A", 4), ("C", 5)]
    requests = [req(str(i), *items[i:], *items[:i]) for i in range(4)]
    handed: list[str] = []
    for what, who, i in story:
        r = requests[who]
        match what:
            case 0 | 1:
                known = r.mm_features[i].identifier in cache.cached
                assert known == cache.check_and_update_cache(r, i)
                if not known and cache.can_allocate(r, i, UNLIMITED, 0):
                    cache.allocate(r, i)
            case 2:
                before = state(cache)
                if not cache.can_allocate(r, i, UNLIMITED, 0) and r.mm_features[i].identifier not in cache.cached:
                    with pytest.raises(StoreFullError):
                        cache.allocate(r, i)
                assert before == state(cache)
            case 3:
                cache.free_encoder_input(r, i)
                assert i not in cache.get_cached_input_ids(r)
            case 4:
                cache.free(r)
                assert set() == cache.get_cached_input_ids(r)
            case 5:
                handed = cache.get_freed_mm_hashes()
                assert len(handed) == len(set(handed))
                assert set() == set(handed) & cache.cached.keys()
        cache.check_valid()


# ---- per request ----


def test_per_request_nothing_is_shared_and_twice_counts_once() -> None:
    cache = RequestEncoderCacheManager(10)
    one, two = req("1", ("A", 4)), req("2", ("A", 4), ("B", 3))
    cache.allocate(one, 0)
    cache.allocate(one, 0)
    assert (6, True, False) == (cache.num_free_slots, cache.has_cache(one, 0), cache.has_cache(two, 0))
    cache.allocate(two, 0)
    assert (False, 2) == (cache.can_allocate(two, 1), cache.num_free_slots)
    with pytest.raises(StoreFullError, match="3 encoder tokens and 2 are left"):
        cache.allocate(two, 1)
    assert (2, {0}) == (cache.num_free_slots, cache.get_cached_input_ids(two))
    cache.free(one)
    cache.allocate(two, 1)
    assert (3, {0, 1}) == (cache.num_free_slots, cache.get_cached_input_ids(two))


def test_per_request_the_set_is_the_callers_own() -> None:
    cache = RequestEncoderCacheManager(10)
    r = req("r", ("A", 4))
    assert set() == cache.get_cached_input_ids(r)
    cache.get_cached_input_ids(r).add(7)
    cache.allocate(r, 0)
    cache.get_cached_input_ids(r).clear()
    assert {0} == cache.get_cached_input_ids(r)


def test_per_request_freed_ids_come_in_order_of_freeing_unfiltered() -> None:
    cache = RequestEncoderCacheManager(20)
    r = req("r", ("A", 2), ("B", 2), ("C", 2))
    for i in (2, 0, 1):
        cache.allocate(r, i)
    cache.free_encoder_input(r, 1)
    cache.free_encoder_input(r, 1)
    cache.free(r)
    cache.allocate(r, 1)
    cache.free(r)
    cache.free(r)
    assert ([("r", 1), ("r", 0), ("r", 2), ("r", 1)], 20) == (cache.get_freed_ids(), cache.num_free_slots)
    assert [] == cache.get_freed_ids()


def test_per_request_sizes_are_placeholder_lengths() -> None:
    cache = RequestEncoderCacheManager(10)
    cache.allocate(Request("r", range(6), mm_features=[Feature("A", Place(0, 6, (True,) * 2 + (False,) * 4))]), 0)
    assert 4 == cache.num_free_slots


# ---- encoder-decoder ----


def test_encoder_decoder_never_hits_and_hands_a_hash_out_with_the_second_call_after() -> None:
    cache = EncoderDecoderCacheManager(10)
    one, two = req("1", ("A", 4)), req("2", ("A", 4))
    cache.allocate(one, 0)
    assert (False, 6) == (cache.check_and_update_cache(two, 0), cache.num_free_slots)
    assert [] == cache.get_freed_mm_hashes()
    cache.allocate(two, 0)
    assert ["A"] == cache.get_freed_mm_hashes()
    assert ["A"] == cache.get_freed_mm_hashes()
    assert [] == cache.get_freed_mm_hashes()
    assert ({0}, 2) == (cache.get_cached_input_ids(one), cache.num_free_slots)


def test_encoder_decoder_gives_space_back_once_per_item_held() -> None:
    cache = EncoderDecoderCacheManager(10)
    r = req("r", ("A", 4), ("B", 5))
    cache.allocate(r, 0)
    cache.allocate(r, 0)
    cache.allocate(r, 1)
    cache.free_encoder_input(r, 0)
    cache.free_encoder_input(r, 0)
    assert ({1}, 5) == (cache.get_cached_input_ids(r), cache.num_free_slots)
    cache.free(r)
    cache.free(r)
    assert (set(), 10) == (cache.get_cached_input_ids(r), cache.num_free_slots)


def test_encoder_decoder_checks_budget_and_space() -> None:
    cache = EncoderDecoderCacheManager(10)
    r = req("r", ("A", 4), ("B", 8))
    answers = [cache.can_allocate(r, 0, budget, scheduled) for budget, scheduled in ((4, 6), (3, 0), (4, 7))]
    assert [True, False, False] == answers
    cache.allocate(r, 0)
    with pytest.raises(StoreFullError, match="8 embeddings and 6 are left"):
        cache.allocate(r, 1)
    assert ({0}, 6) == (cache.get_cached_input_ids(r), cache.num_free_slots)
    cache.reset()
    assert (10, set(), [], []) == (
        cache.num_free_slots, cache.get_cached_input_ids(r), cache.get_freed_mm_hashes(), cache.get_freed_mm_hashes(),
    )  # fmt: skip
