"""Encoder cache managers: the worked example, what they refuse, and any story against a model that counts."""

from __future__ import annotations

import copy
import types
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shmstore.errors import ShmStoreError, StoreFullError
from shmstore.scheduler import EncoderCacheManager, EncoderDecoderCacheManager, Request, RequestEncoderCacheManager
from tests.scheduler.helpers import Feature, Place

UNLIMITED = 1 << 60
KINDS: list[Any] = [EncoderCacheManager, RequestEncoderCacheManager, EncoderDecoderCacheManager]
EACH = pytest.mark.parametrize("kind", KINDS)


def req(request_id: str, *items: tuple[str, int]) -> Request:
    """A request whose items (identifier, size) stand one after the other."""
    at, made = 0, []
    for identifier, size in items:
        made.append(Feature(identifier, Place(at, size)))
        at += size
    return Request(request_id, range(at or 1), mm_features=made)


def state(cache: Any) -> dict[str, Any]:
    cache.check_valid()
    return copy.deepcopy(vars(cache))


def asked(cache: Any, r: Request, i: int) -> bool:
    """Whether an item fits, however this manager is asked."""
    budget = () if isinstance(cache, RequestEncoderCacheManager) else (UNLIMITED, 0)
    fits: bool = cache.can_allocate(r, i, *budget)
    return fits


def test_a_size_is_what_the_mask_selects_or_the_length_per_request() -> None:
    place = types.SimpleNamespace(offset=0, length=6, get_num_embeds=lambda: 2)
    masked = [Feature("A", Place(0, 6, (True, False, True, False, False, True))), Feature("B", place)]  # type: ignore[arg-type]
    r = Request("r", range(6), mm_features=masked)
    sizes = []
    for kind in KINDS:
        for i in range(2):
            cache = kind(10)
            cache.allocate(r, i)
            sizes.append(10 - cache.num_free_slots)
    assert [3, 2, 6, 6, 3, 2] == sizes


def test_an_image_that_a_request_has_twice_is_used_until_both_are_freed() -> None:
    cache, r = EncoderCacheManager(10), req("r", ("A", 4), ("A", 4))
    for i in range(2):
        cache.allocate(r, i)
    cache.free_encoder_input(r, 0)
    assert {"r"} == cache.cached["A"]
    cache.free_encoder_input(r, 1)
    assert set() == cache.cached["A"]
    cache.check_valid()


# ---- refusals ----


@EACH
@pytest.mark.parametrize(("size", "error"), [(1.5, TypeError), (None, TypeError), (-1, ValueError)])
def test_a_cache_of_no_whole_size_is_refused(kind: Any, size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^cache_size must"):
        kind(size)


@EACH
def test_an_item_that_the_request_does_not_have_is_named(kind: Any) -> None:
    cache, r = kind(10), req("r", ("A", 4), ("B", 4))
    fresh = state(cache)
    for i, message in ((2, "item 2: the request has 2 items, counted from 0"), (-1, "item -1")):
        for call in (cache.allocate, lambda r, i: asked(cache, r, i)):
            with pytest.raises(IndexError, match=message):
                call(r, i)
    assert fresh == state(cache)


@EACH
def test_an_item_of_negative_size_is_refused_and_takes_no_space(kind: Any) -> None:
    cache = kind(10)
    place = types.SimpleNamespace(offset=0, length=-4, get_num_embeds=-4)
    odd: Any = types.SimpleNamespace(
        request_id="r", mm_features=[Feature("A", place)], get_num_encoder_tokens=lambda i: -4,  # type: ignore[arg-type]
    )  # fmt: skip
    fresh = state(cache)
    for call in (cache.allocate, lambda r, i: asked(cache, r, i)):
        with pytest.raises(ValueError, match=r"item 0.*-4"):
            call(odd, 0)
    assert fresh == state(cache)


@EACH
def test_what_does_not_fit_changes_nothing_and_is_told_whether_it_ever_will(kind: Any) -> None:
    cache, r = kind(10), req("r", ("A", 11), ("B", 8), ("C", 8))
    cache.allocate(r, 1)
    before = state(cache)
    for i, message, hint in (
        (0, "item 0 .*of request 'r' needs 11 .* and the whole cache has 10", "never fits"),
        (2, "item 2 .*of request 'r' needs 8 .* and 2 are left", "free a request"),
    ):
        assert asked(cache, r, i) is False
        with pytest.raises(StoreFullError, match=message) as caught:
            cache.allocate(r, i)
        assert hint in str(caught.value.hint)
        assert (True, True) == (isinstance(caught.value, ShmStoreError), isinstance(caught.value, MemoryError))
    assert before == state(cache)


@pytest.mark.parametrize("held", ["in use", "unused", "reserved"])
def test_another_size_or_item_under_a_known_name_is_refused(held: str) -> None:
    cache = EncoderCacheManager(20)
    one, other, larger, again = req("r", ("A", 4)), req("s", ("B", 4)), req("t", ("A", 5)), req("r", ("B", 4))
    if held == "reserved":
        cache.reserve(one, 0, UNLIMITED, 0)
    else:
        cache.allocate(one, 0)
    cache.allocate(other, 0)
    if held == "unused":
        cache.free(one)
    before = state(cache)
    calls: list[Any] = [cache.check_and_update_cache, cache.allocate, lambda r, i: cache.reserve(r, i, UNLIMITED, 0)]
    for call in (*calls, lambda r, i: cache.can_allocate(r, i, UNLIMITED, 0)):
        with pytest.raises(ValueError, match="5 embeddings, the entry cached under its hash 4"):
            call(larger, 0)
    for call in calls if held != "unused" else ():
        with pytest.raises(ValueError, match="free it before"):
            call(again, 0)
    assert before == state(cache)
    cache.free(again)
    assert cache.reserve(again, 0, UNLIMITED, 0) is True


# ---- any story ----

SIZES = {"A": 4, "B": 3, "C": 5, "D": 0, "E": 6}


class Counted:
    """The rules of all three managers, with each figure counted from who has what."""

    def __init__(self, kind: Any, capacity: int) -> None:
        self.shares, self.per_request = kind is EncoderCacheManager, kind is RequestEncoderCacheManager
        self.capacity = capacity
        self.cached: list[Any] = []
        self.freeable: list[Any] = []
        self.held: dict[tuple[str, int], Any] = {}
        self.reserved: dict[tuple[str, int], Any] = {}
        self.freed: list[Any] = []
        self.allocated: list[str] = []

    def size(self, entry: Any) -> int:
        return SIZES[entry if self.shares else entry[2]]

    def free_slots(self) -> int:
        return self.capacity - sum(map(self.size, {*self.cached, *self.reserved.values()}))

    def freeable_slots(self) -> int:
        return self.free_slots() + sum(map(self.size, self.freeable))

    def of(self, request: str, table: dict[tuple[str, int], Any]) -> dict[int, Any]:
        return {i: entry for (owner, i), entry in sorted(table.items()) if owner == request}

    def take(self, table: dict[tuple[str, int], Any], request: str, i: int, entry: Any) -> None:
        if entry in self.freeable:
            self.freeable.remove(entry)
        elif entry not in {*self.cached, *self.reserved.values()}:
            while self.free_slots() < self.size(entry):
                evicted = self.freeable.pop(0)
                self.cached.remove(evicted)
                self.freed.append(evicted)
        table[request, i] = entry

    def drop(self, table: dict[tuple[str, int], Any], request: str, i: int) -> None:
        gone = table.pop((request, i), None)
        kept = {*self.held.values(), *self.reserved.values(), *self.freeable}
        unused = [entry for entry in self.cached if entry not in kept]
        if self.shares:
            self.freeable += unused
        else:
            self.cached = [entry for entry in self.cached if entry not in unused]
            if self.per_request and gone:
                self.freed.append((request, i))

    def fits(self, request: str, entry: Any, budget: int, scheduled: int) -> bool:
        mine = self.of(request, self.reserved).values()
        others = max(0, scheduled - sum(map(self.size, mine)))
        return self.size(entry) <= budget and (entry not in mine) * self.size(entry) + others <= self.freeable_slots()

    def allocate(self, request: str, i: int, entry: Any) -> bool:
        if entry not in {*self.cached, *self.reserved.values()} and self.size(entry) > self.freeable_slots():
            return False
        if (request, i) not in self.held and not self.shares and not self.per_request:
            self.allocated += [] if entry[2] in self.allocated else [entry[2]]
        self.take(self.held, request, i, entry)
        self.reserved.pop((request, i), None)
        if entry not in self.cached:
            self.cached.append(entry)
            self.freed = [other for other in self.freed if other != entry]
        return True

    def take_freed(self) -> list[Any]:
        freed, self.freed, self.allocated = self.freed, self.allocated, []
        return freed


ITEM_CALLS = ("check_and_update_cache", "can_allocate", "reserve", "allocate", "free_encoder_input")
STORIES = st.lists(
    st.tuples(
        st.sampled_from((*ITEM_CALLS, "reserve", "unreserve", "free", "get_freed")),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from((0, 4, UNLIMITED)),
        st.integers(0, 9),
    ),
    min_size=20,  # else most are too short for two requests to meet
    max_size=60,
)


@EACH
@settings(max_examples=120, deadline=None)
@given(story=STORIES, capacity=st.integers(0, 16))
def test_any_story_comes_out_as_counted(kind: Any, story: list[Any], capacity: int) -> None:
    cache, counted = kind(capacity), Counted(kind, capacity)
    names = ["A", "B", "A", "C", "D", "E"]
    requests = [req(str(n), *((name, SIZES[name]) for name in names[n:] + names[:n])) for n in range(4)]
    get_freed = "get_freed_ids" if counted.per_request else "get_freed_mm_hashes"
    for call, n, i, *budget in story:
        r, who = requests[n], str(n)
        name = r.mm_features[i].identifier
        entry = name if counted.shares else (who, i, name)
        if counted.per_request and call in ("reserve", "unreserve", "check_and_update_cache"):
            continue
        given: tuple[Any, ...] = (r, i) if call in ITEM_CALLS else () if call == "get_freed" else (r,)
        if call in ("can_allocate", "reserve"):
            if counted.per_request:
                budget = [UNLIMITED, 0]
            else:
                given = (r, i, *budget)
        expected: Any = None
        match call:
            case "check_and_update_cache":
                expected = counted.shares and entry in counted.cached and counted.allocate(who, i, entry)
            case "can_allocate" | "reserve":
                expected = counted.fits(who, entry, *budget)
                if call == "reserve" and expected:
                    counted.take(counted.reserved, who, i, entry)
            case "allocate":
                promised = (who, i) in counted.reserved
                expected = None if counted.allocate(who, i, entry) else StoreFullError
                assert not promised or expected is None
            case "free_encoder_input":
                counted.drop(counted.held, who, i)
            case "unreserve" | "free":
                for at in counted.of(who, counted.reserved):
                    counted.drop(counted.reserved, who, at)
                for at in counted.of(who, counted.held) if call == "free" else ():
                    counted.drop(counted.held, who, at)
            case "get_freed":
                expected = counted.take_freed()
        try:
            answer = getattr(cache, get_freed if call == "get_freed" else call)(*given)
        except StoreFullError:
            answer = StoreFullError
        assert expected == answer
        assert (counted.free_slots(), counted.freeable_slots()) == (cache.num_free_slots, cache.num_freeable_slots)
        holds = [set(counted.of(str(n), counted.held)) for n in range(4)]
        assert holds == [cache.get_cached_input_ids(one) for one in requests]
        if counted.shares:
            assert [*counted.freeable] == [*cache.freeable]
            users = {name: {who for (who, _), held in counted.held.items() if held == name} for name in counted.cached}
            assert users == cache.cached
        if counted.per_request:
            assert (i in holds[n]) is cache.has_cache(r, i)
        cache.get_cached_input_ids(r).add(7)  # the set is the caller's own
        cache.check_valid()
    cache.reset()
    assert state(kind(capacity)) == state(cache)
