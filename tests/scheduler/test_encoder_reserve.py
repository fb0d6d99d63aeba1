"""`reserve`: a scheduler may ask about all items of a request before it allocates the first."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shmstore.errors import StoreFullError
from shmstore.scheduler import EncoderCacheManager, EncoderDecoderCacheManager, Request
from tests.scheduler.test_encoder_cache import UNLIMITED, req, state

BOTH = pytest.mark.parametrize("kind", [EncoderCacheManager, EncoderDecoderCacheManager])
SIZES = {"A": 4, "B": 3, "C": 5, "D": 0, "E": 6}


def unused(cache: EncoderCacheManager, *items: tuple[str, int]) -> None:
    """Cache these for a request that is gone."""
    gone = req("gone", *items)
    for i in range(len(items)):
        cache.allocate(gone, i)
    cache.free(gone)


def test_a_later_hit_voids_can_allocate_and_not_reserve() -> None:
    r = req("r", ("A", 6), ("B", 6))
    for asks in ("can_allocate", "reserve"):
        cache = EncoderCacheManager(10)
        unused(cache, ("B", 6))
        assert getattr(cache, asks)(r, 0, UNLIMITED, 0) is True
        hit = cache.check_and_update_cache(r, 1)
        if asks == "can_allocate":
            assert hit is True
            with pytest.raises(StoreFullError):
                cache.allocate(r, 0)
        else:
            assert (False, False) == (hit, cache.reserve(r, 1, UNLIMITED, 6))
            cache.allocate(r, 0)
            assert (4, ["B"], {0}) == (
                cache.num_free_slots, cache.get_freed_mm_hashes(), cache.get_cached_input_ids(r),
            )  # fmt: skip


def refused(seed: int, asks: str) -> bool:
    """Whether a scheduler is refused that asks about all items of a request, and then allocates them."""
    rng, cache, live = Random(seed), EncoderCacheManager(12), []
    for step in range(12):
        names = rng.choices(list(SIZES), k=rng.randint(1, 4))
        r = req(f"r{step}", *((name, SIZES[name]) for name in names))
        wanted, embeds = [], 0
        for i, name in enumerate(names):
            if cache.check_and_update_cache(r, i):
                continue
            if not getattr(cache, asks)(r, i, UNLIMITED, embeds):
                break
            wanted.append(i)
            embeds += SIZES[name]
        live.append(r)
        if rng.random() < 0.8:  # else the KV cache has no blocks for it
            try:
                for i in wanted:
                    cache.allocate(r, i)
            except StoreFullError:
                return True
        else:
            cache.free(live.pop())
        cache.check_valid()
        while live and rng.random() < 0.5:
            cache.free(live.pop(rng.randrange(len(live))))
    for r in live:
        cache.free(r)
    assert cache.cache_size == cache.num_freeable_slots
    return False


def test_random_schedulers_are_never_refused_what_they_reserved() -> None:
    assert 0 == sum(refused(seed, "reserve") for seed in range(300))
    assert 0 < sum(refused(seed, "can_allocate") for seed in range(300))


@BOTH
def test_what_is_reserved_is_taken_by_no_one_else(kind: Any) -> None:
    cache = kind(10)
    one, two = req("1", ("A", 6)), req("2", ("B", 6), ("C", 4))
    assert cache.reserve(one, 0, UNLIMITED, 0) is True
    before = state(cache)
    assert (False, False, False) == (
        cache.reserve(two, 0, UNLIMITED, 0),
        cache.can_allocate(two, 0, UNLIMITED, 0),
        cache.check_and_update_cache(one, 0),
    )
    with pytest.raises(StoreFullError, match="6 embeddings and 4 are left"):
        cache.allocate(two, 0)
    assert before == state(cache)
    cache.allocate(two, 1)
    cache.allocate(one, 0)
    assert (0, {0}) == (cache.num_free_slots, cache.get_cached_input_ids(one))


@BOTH
@pytest.mark.parametrize("call", ["unreserve", "free"])
def test_what_is_not_allocated_is_given_back(kind: Any, call: str) -> None:
    cache = kind(10)
    one, two = req("1", ("A", 4), ("B", 2)), req("2", ("A", 4))
    fresh = state(cache)
    assert [True] * 3 == [cache.reserve(r, i, UNLIMITED, 0) for r, i in ((one, 0), (one, 1), (two, 0))]
    getattr(cache, call)(one)
    alone = kind(10)
    alone.reserve(two, 0, UNLIMITED, 0)
    assert state(alone) == state(cache)
    getattr(cache, call)(two)
    getattr(cache, call)(two)
    assert fresh == state(cache)
    cache.reserve(one, 0, UNLIMITED, 0)
    cache.reset()
    assert fresh == state(cache)


@BOTH
def test_unreserve_leaves_what_was_allocated(kind: Any) -> None:
    cache = kind(10)
    r = req("r", ("A", 4), ("B", 2))
    for i in range(2):
        assert cache.reserve(r, i, UNLIMITED, 0) is True
    cache.allocate(r, 0)
    cache.unreserve(r)
    assert (6, {0}) == (cache.num_free_slots, cache.get_cached_input_ids(r))


@BOTH
def test_a_refusal_changes_nothing_not_even_an_earlier_promise(kind: Any) -> None:
    cache = kind(10)
    r = req("r", ("A", 6), ("B", 5))
    assert cache.reserve(r, 0, 6, 0) is True
    before = state(cache)
    for i, budget, scheduled in ((0, 5, 6), (1, 5, 6), (1, 5, 0), (1, 4, 6)):
        assert cache.reserve(r, i, budget, scheduled) is False
    with pytest.raises(IndexError):
        cache.reserve(r, 2, UNLIMITED, 0)
    assert before == state(cache)
    cache.allocate(r, 0)


@BOTH
def test_a_reservation_repeated_takes_its_room_once(kind: Any) -> None:
    cache = kind(10)
    r = req("r", ("A", 6))
    assert [True] * 3 == [cache.reserve(r, 0, UNLIMITED, scheduled) for scheduled in (0, 0, 6)]
    assert 4 == cache.num_free_slots
    cache.allocate(r, 0)
    assert 4 == cache.num_free_slots
    cache.unreserve(r)
    assert 4 == cache.num_free_slots


@BOTH
def test_what_is_scheduled_and_reserved_counts_once(kind: Any) -> None:
    cache = kind(10)
    r = req("r", ("A", 4), ("B", 4), ("C", 2), ("D", 1))
    assert [True, True, False] == [cache.reserve(r, 0, UNLIMITED, n) for n in (0, 10, 11)]  # others have 6 of the 10
    assert [True, True, True, False] == [cache.reserve(r, i, UNLIMITED, n) for i, n in enumerate((0, 4, 8, 10))]
    assert [True, True, False] == [cache.can_allocate(r, i, UNLIMITED, 10) for i in (0, 2, 3)]
    for i in range(3):
        cache.allocate(r, i)
    assert 0 == cache.num_free_slots


@BOTH
def test_an_item_that_is_held_can_be_reserved_and_loses_nothing(kind: Any) -> None:
    cache = kind(10)
    r = req("r", ("A", 4))
    cache.allocate(r, 0)
    assert cache.reserve(r, 0, UNLIMITED, 0) is True
    cache.allocate(r, 0)
    assert (6, {0}) == (cache.num_free_slots, cache.get_cached_input_ids(r))
    cache.free(r)
    assert cache.can_allocate(req("s", ("B", 10)), 0, UNLIMITED, 0) is True


# ---- shared by content hash ----


def test_room_is_made_at_once_oldest_first_and_no_more_than_needed() -> None:
    cache = EncoderCacheManager(10)
    unused(cache, ("A", 3), ("B", 3), ("C", 3))
    r = req("r", ("X", 4))
    assert cache.reserve(r, 0, UNLIMITED, 0) is True
    assert (["A"], ["B", "C"], 0, 6) == (
        cache.get_freed_mm_hashes(), list(cache.freeable), cache.num_free_slots, cache.num_freeable_slots,
    )  # fmt: skip
    cache.allocate(r, 0)
    assert ([], ["B", "C"], 0) == (cache.get_freed_mm_hashes(), list(cache.freeable), cache.num_free_slots)
    cache.check_valid()


def test_a_cached_entry_that_is_reserved_stays_until_it_is_allocated() -> None:
    cache = EncoderCacheManager(10)
    unused(cache, ("A", 4), ("B", 4))
    r, other = req("r", ("A", 4)), req("o", ("X", 7))
    assert cache.reserve(r, 0, UNLIMITED, 0) is True
    assert ({"B": 4}, 6, set()) == (cache.freeable, cache.num_freeable_slots, cache.get_cached_input_ids(r))
    assert cache.can_allocate(other, 0, UNLIMITED, 0) is False
    cache.check_valid()
    cache.allocate(r, 0)
    assert ({"A": {"r"}, "B": set()}, []) == (cache.cached, cache.get_freed_mm_hashes())
    cache.check_valid()


def test_a_reserved_entry_stays_when_its_last_user_leaves() -> None:
    cache = EncoderCacheManager(10)
    one, two = req("1", ("A", 6)), req("2", ("A", 6))
    cache.allocate(one, 0)
    assert cache.reserve(two, 0, UNLIMITED, 0) is False  # like can_allocate, which does not look whether it is cached
    roomy = EncoderCacheManager(12)
    roomy.allocate(one, 0)
    assert roomy.reserve(two, 0, UNLIMITED, 0) is True
    roomy.unreserve(two)
    assert ({}, 6) == (roomy.freeable, roomy.num_freeable_slots)
    assert roomy.reserve(two, 0, UNLIMITED, 0) is True
    roomy.free(one)
    assert ({}, 6) == (roomy.freeable, roomy.num_freeable_slots)
    roomy.check_valid()
    roomy.unreserve(two)
    assert ({"A": 6}, 12) == (roomy.freeable, roomy.num_freeable_slots)
    roomy.check_valid()


def test_the_room_of_equal_contents_is_reserved_once() -> None:
    cache = EncoderCacheManager(10)
    twice, other = req("r", ("A", 6), ("A", 6)), req("o", ("A", 6))
    assert [True, True] == [cache.reserve(twice, i, UNLIMITED, 6 * i) for i in range(2)]
    assert 4 == cache.num_free_slots
    cache.allocate(other, 0)  # the same content, so it takes nothing from the other request
    cache.free(other)
    cache.check_valid()
    assert 4 == cache.num_freeable_slots
    cache.allocate(twice, 0)
    cache.free_encoder_input(twice, 0)
    assert 4 == cache.num_freeable_slots
    cache.allocate(twice, 1)
    assert (4, {1}) == (cache.num_free_slots, cache.get_cached_input_ids(twice))
    cache.check_valid()


def test_a_hit_on_what_was_reserved_uses_the_promise_up() -> None:
    cache = EncoderCacheManager(10)
    one, two = req("1", ("A", 6)), req("2", ("A", 6))
    assert cache.reserve(one, 0, UNLIMITED, 0) is True
    cache.allocate(two, 0)
    cache.free(two)
    assert cache.check_and_update_cache(one, 0) is True
    cache.free_encoder_input(one, 0)
    assert ({"A": 6}, 10) == (cache.freeable, cache.num_freeable_slots)


def test_another_item_or_size_under_a_reserved_name_is_refused() -> None:
    cache = EncoderCacheManager(20)
    assert cache.reserve(req("r", ("A", 4)), 0, UNLIMITED, 0) is True
    cache.allocate(req("s", ("B", 4)), 0)
    before = state(cache)
    again, larger = req("r", ("B", 4)), req("t", ("A", 5))
    for call in (cache.check_and_update_cache, cache.allocate, lambda r, i: cache.reserve(r, i, UNLIMITED, 0)):
        with pytest.raises(ValueError, match="free it before"):
            call(again, 0)
        with pytest.raises(ValueError, match="5 embeddings"):
            call(larger, 0)
    assert before == state(cache)
    cache.free(again)
    assert cache.reserve(again, 0, UNLIMITED, 0) is True


class Counted:
    """The same rules, with each figure counted from who has what."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cached: list[str] = []
        self.freeable: list[str] = []
        self.held: dict[tuple[str, int], str] = {}
        self.reserved: dict[tuple[str, int], str] = {}
        self.freed: list[str] = []

    def free_slots(self) -> int:
        return self.capacity - sum(SIZES[name] for name in {*self.cached, *self.reserved.values()})

    def freeable_slots(self) -> int:
        return self.free_slots() + sum(SIZES[name] for name in self.freeable)

    def of(self, request: str, table: dict[tuple[str, int], str]) -> dict[int, str]:
        return {i: name for (owner, i), name in sorted(table.items()) if owner == request}

    def take(self, table: dict[tuple[str, int], str], request: str, i: int, name: str) -> None:
        if name in self.freeable:
            self.freeable.remove(name)
        elif name not in {*self.cached, *self.reserved.values()}:
            while self.free_slots() < SIZES[name]:
                evicted = self.freeable.pop(0)
                self.cached.remove(evicted)
                self.freed.append(evicted)
        table[request, i] = name

    def drop(self, table: dict[tuple[str, int], str], request: str, i: int) -> None:
        table.pop((request, i), None)
        kept = {*self.held.values(), *self.reserved.values(), *self.freeable}
        self.freeable += [name for name in self.cached if name not in kept]

    def fits(self, request: str, name: str, budget: int, scheduled: int) -> bool:
        mine = self.of(request, self.reserved).values()
        others = max(0, scheduled - sum(SIZES[other] for other in mine))
        return SIZES[name] <= budget and (name not in mine) * SIZES[name] + others <= self.freeable_slots()

    def allocate(self, request: str, i: int, name: str) -> bool:
        if name not in {*self.cached, *self.reserved.values()} and SIZES[name] > self.freeable_slots():
            return False
        self.take(self.held, request, i, name)
        self.reserved.pop((request, i), None)
        if name not in self.cached:
            self.cached.append(name)
            self.freed = [other for other in self.freed if other != name]
        return True


CALLS = ("check_and_update_cache", "can_allocate", "reserve", "allocate", "free_encoder_input", "unreserve", "free")
STORIES = st.lists(
    st.tuples(
        st.sampled_from((*CALLS, "reserve", "get_freed_mm_hashes")),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from((0, 4, UNLIMITED)),
        st.integers(0, 9),
    ),
    min_size=20,  # else most are too short for two requests to meet
    max_size=60,
)


def told(cache: Any, requests: list[Request], story: list[Any]) -> Iterator[tuple[str, Request, int, str, Any, Any]]:
    """Make each call; yield it with its answer, and StoreFullError as one."""
    for call, who, i, budget, scheduled in story:
        r = requests[who]
        given = {"unreserve": (r,), "free": (r,), "get_freed_mm_hashes": ()}.get(call, (r, i))
        if call in ("can_allocate", "reserve"):
            given = (r, i, budget, scheduled)
        try:
            answer = getattr(cache, call)(*given)
        except StoreFullError:
            answer = StoreFullError
        yield call, r, i, r.mm_features[i].identifier, (budget, scheduled), answer


@settings(max_examples=100, deadline=None)
@given(STORIES, st.integers(0, 16))
def test_any_story_comes_out_as_counted(story: list[Any], capacity: int) -> None:
    cache, counted = EncoderCacheManager(capacity), Counted(capacity)
    names = ["A", "B", "A", "C", "D", "E"]
    requests = [req(str(n), *((name, SIZES[name]) for name in names[n:] + names[:n])) for n in range(4)]
    for call, r, i, name, asked, answer in told(cache, requests, story):
        who = r.request_id
        expected: Any = None
        match call:
            case "check_and_update_cache":
                expected = name in counted.cached and counted.allocate(who, i, name)
            case "can_allocate" | "reserve":
                expected = counted.fits(who, name, *asked)
                if call == "reserve" and expected:
                    counted.take(counted.reserved, who, i, name)
            case "allocate":
                promised = (who, i) in counted.reserved
                expected = None if counted.allocate(who, i, name) else StoreFullError
                assert not promised or expected is None
            case "free_encoder_input":
                counted.drop(counted.held, who, i)
            case "unreserve" | "free":
                for at in counted.of(who, counted.reserved):
                    counted.drop(counted.reserved, who, at)
                for at in counted.of(who, counted.held) if call == "free" else ():
                    counted.drop(counted.held, who, at)
            case "get_freed_mm_hashes":
                expected, counted.freed = counted.freed, []
        assert expected == answer
        assert (counted.free_slots(), counted.freeable_slots()) == (cache.num_free_slots, cache.num_freeable_slots)
        assert [*counted.freeable] == [*cache.freeable]
        users = {name: {who for (who, _), held in counted.held.items() if held == name} for name in counted.cached}
        assert users == cache.cached
        assert [set(counted.of(str(n), counted.held)) for n in range(4)] == [*map(cache.get_cached_input_ids, requests)]
        cache.check_valid()


@settings(max_examples=100, deadline=None)
@given(STORIES, st.integers(0, 16))
def test_any_story_without_sharing_comes_out_as_counted(story: list[Any], capacity: int) -> None:
    cache = EncoderDecoderCacheManager(capacity)
    requests = [req(str(n), ("A", 4), ("B", 3), ("C", 5), ("D", 0)) for n in range(4)]
    held: dict[tuple[str, int], int] = {}
    reserved: dict[tuple[str, int], int] = {}
    for call, r, i, name, (budget, scheduled), answer in told(cache, requests, story):
        at, size, who = (r.request_id, i), SIZES[name], r.request_id
        room = capacity - sum(held.values()) - sum(reserved.values())
        mine = {i: size for (owner, i), size in reserved.items() if owner == who}
        match call:
            case "can_allocate" | "reserve":
                fits = size - mine.get(i, 0) + max(0, scheduled - sum(mine.values())) <= room and size <= budget
                assert fits == answer
                if call == "reserve" and fits and at not in held:
                    reserved[at] = size
            case "allocate":
                assert (at not in held and i not in mine and size > room) == (answer is StoreFullError)
                if answer is None and at not in held:
                    reserved.pop(at, None)
                    held[at] = size
            case "free_encoder_input":
                held.pop(at, None)
            case "unreserve" | "free":
                for table in (reserved, held) if call == "free" else (reserved,):
                    for mine_at in [key for key in table if key[0] == who]:
                        del table[mine_at]
        assert capacity - sum(held.values()) - sum(reserved.values()) == cache.num_free_slots
