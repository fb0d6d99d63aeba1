"""`LRUCache` and sizes, compared with a list as the model."""

import copy
import math
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmstore.errors import NestingError
from shmstore.multimodal import (
    CacheInfo,
    LRUCache,
    MultiModalCache,
    MultiModalKwargsItems,
    ResolvedPromptUpdate,
)
from shmstore.multimodal.caches import lru
from shmstore.multimodal.values.sizes import updates_size
from tests.multimodal.helpers import in_threads, item
from tests.test_interrupts import interrupted_at


def filled(capacity: float = 6, **sizes: int) -> tuple[LRUCache[str, int], list[tuple[str, int]]]:
    gone: list[tuple[str, int]] = []
    cache: LRUCache[str, int] = LRUCache(
        capacity, lambda value: value, on_remove=lambda key, value: gone.append((key, value))
    )
    for key, size in sizes.items():
        cache[key] = size
    return cache, gone


def test_get_counts_lookups_and_in_counts_nothing() -> None:
    cache, _ = filled(a=1)
    assert "a" in cache
    assert "b" not in cache
    assert CacheInfo(0, 0) == cache.stat()
    assert 1 == cache.get("a")
    assert cache.get("b") is None
    assert 7 == cache.get("b", 7)
    assert CacheInfo(1, 3) == cache.stat()
    assert CacheInfo(1, 3) == cache.stat(delta=True)
    assert CacheInfo(0, 0) == cache.stat(delta=True)
    assert 1 == cache["a"]
    assert CacheInfo(1, 1) == cache.stat(delta=True)
    assert CacheInfo(2, 4) == cache.stat()
    assert (0.5, 0.0) == (cache.stat().hit_ratio, CacheInfo(0, 0).hit_ratio)


def test_clear_forgets_counts_and_pins_and_tells_the_hook() -> None:
    cache, gone = filled(a=2, b=2)
    cache.pin("a")
    cache.get("a")
    cache.clear()
    assert ([("b", 2), ("a", 2)], 0, CacheInfo(0, 0)) == (gone, len(cache), cache.stat())
    assert CacheInfo(0, 0) == cache.stat(delta=True)
    cache["c"] = 6
    assert ("c",) == cache.order


def test_by_default_each_value_counts_one() -> None:
    cache: LRUCache[str, int] = LRUCache(2)
    cache.update(a=10, b=20, c=30)
    assert ("b", "c") == cache.order
    assert 0.0 == LRUCache(0).usage


@pytest.mark.parametrize("wrong", [-1, -0.5, math.nan, math.inf])
def test_a_capacity_or_size_that_cannot_be_is_refused_and_evicts_nothing(wrong: float) -> None:
    if wrong != math.inf:
        with pytest.raises(ValueError, match="capacity"):
            LRUCache(wrong)
    cache: LRUCache[str, float] = LRUCache(math.inf, float)
    cache["a"] = 2
    with pytest.raises(ValueError, match="size"):
        cache["a"] = wrong
    assert (2, ("a",)) == (cache.currsize, cache.order)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_cache_is_not_copied_with_its_lock(make: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="update"):
        make(LRUCache(1))


class Key(str):
    """Calls a function when it is looked for, as a finalizer or a signal handler might at that place."""

    meanwhile: Callable[[], object] = int

    def __hash__(self) -> int:
        self.meanwhile()
        return str.__hash__(self)


@pytest.mark.parametrize("use", [len, lambda cache: cache.update(x=1)])
@pytest.mark.parametrize("number", [1, 2])
def test_what_uses_the_cache_within_an_eviction_leaves_the_sum_right(use: Callable[[Any], Any], number: int) -> None:
    cache, _ = filled()
    cache.update({(first := Key("a")): 2, "b": 2, "c": 2})
    uses: list[Any] = []

    def meanwhile() -> None:
        if sys._getframe(2).f_code.co_name == "pop":
            uses.append(len(uses) + 1 == number and use(cache))

    first.meanwhile = meanwhile
    cache["new"] = 3
    assert len(uses) >= number
    cache["newer"] = 1
    assert sum(cache.values()) == cache.currsize <= cache.capacity


def test_the_hook_hears_of_what_an_interrupted_call_empties() -> None:
    cache, gone = filled(a=2, b=2, c=2)
    assert interrupted_at(1, lambda: cache.update(d=1), lru.__file__, only=["pop"])
    assert (0, 0) == (len(cache), cache.currsize)
    assert [("b", 2), ("c", 2)] == gone  # it misses the one that was being removed
    cache["e"] = 6
    assert ("e",) == cache.order


class AgainstAList(RuleBasedStateMachine):
    """Do the same to the cache and to a list of [key, size, pinned] in order of use, and compare."""

    keys = st.sampled_from("abcdef")
    sizes = st.integers(0, 7)

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []
        self.cache: LRUCache[str, tuple[int, int]] = LRUCache(
            6, lambda value: value[0], on_remove=lambda key, value: self.gone.append(key)
        )
        self.model: list[list[Any]] = []
        self.model_gone: list[str] = []
        self.stamp = 0

    def find(self, key: str) -> Any:
        return next((entry for entry in self.model if entry[0] == key), None)

    @rule(key=keys, size=sizes)
    def put(self, key: str, size: int) -> None:
        self.stamp += 1
        old = self.find(key)
        others = [entry for entry in self.model if entry is not old]
        pinned = sum(entry[1][0] for entry in others if entry[2])
        if size > 6:
            with pytest.raises(ValueError, match="value too large"):
                self.cache[key] = (size, self.stamp)
        elif pinned + size > 6:
            with pytest.raises(RuntimeError, match="no room"):
                self.cache[key] = (size, self.stamp)
        else:
            self.cache[key] = (size, self.stamp)
            while sum(entry[1][0] for entry in others) + size > 6:
                victim = next(entry for entry in others if not entry[2])
                others.remove(victim)
                self.model_gone.append(victim[0])
            self.model = [*others, [key, (size, self.stamp), bool(old and old[2])]]

    @rule(key=keys)
    def get(self, key: str) -> None:
        entry = self.find(key)
        assert (entry and entry[1]) == self.cache.get(key)
        if entry:
            self.model.remove(entry)
            self.model.append(entry)

    @rule(key=keys)
    def touch(self, key: str) -> None:
        self.cache.touch(key)
        entry = self.find(key)
        if entry:
            self.model.remove(entry)
            self.model.append(entry)

    @rule(key=keys, pinned=st.booleans())
    def pin(self, key: str, pinned: bool) -> None:
        entry = self.find(key)
        if not pinned:
            self.cache.unpin(key)
        elif entry is None:
            with pytest.raises(ValueError, match="cannot pin"):
                self.cache.pin(key)
        else:
            self.cache.pin(key)
        if entry:
            entry[2] = pinned

    @rule(key=keys)
    def pop(self, key: str) -> None:
        entry = self.find(key)
        assert (entry and entry[1]) == self.cache.pop(key, None)
        if entry:
            self.model.remove(entry)
            self.model_gone.append(key)

    @rule()
    def popitem(self) -> None:
        victim = next((entry for entry in self.model if not entry[2]), None)
        if victim is None:
            with pytest.raises(RuntimeError if self.model else KeyError, match=r"all entries are pinned|is empty"):
                self.cache.popitem()
        else:
            assert (victim[0], victim[1]) == self.cache.popitem()
            self.model.remove(victim)
            self.model_gone.append(victim[0])

    @invariant()
    def same(self) -> None:
        assert [(key, value) for key, value, _ in self.model] == list(self.cache.items())
        assert sum(value[0] for _, value, _ in self.model) == self.cache.currsize
        assert self.model_gone == self.gone


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.usefixtures("often")
def test_threads_leave_order_sizes_and_hook_consistent() -> None:
    gone: list[int] = []
    cache: LRUCache[int, int] = LRUCache(50, lambda value: value, on_remove=lambda key, _: gone.append(key))

    def work(rng: random.Random) -> int:
        stored = 0
        for _ in range(2000):
            key, action = rng.randrange(40), rng.randrange(4)
            if action == 0:
                cache[key] = 1 + key % 7
                stored += 1
            elif action == 1:
                cache.get(key)
            elif action == 2:
                cache.pop(key, None)
            else:
                assert all(value == 1 + key % 7 for key, value in cache.items())
        return stored

    assert sum(in_threads(work)) >= len(gone) + len(cache)
    assert sum(cache.values()) == cache.currsize <= 50
    assert set(cache.order) == {key for key in range(40) if key in cache}


@pytest.mark.usefixtures("often")
def test_threads_that_store_a_default_agree_on_one_and_count_no_miss() -> None:
    cache: LRUCache[int, float] = LRUCache(9999)

    def work(rng: random.Random) -> list[float]:
        return [cache.setdefault(key, rng.random()) for key in range(2000)]

    first, *others = in_threads(work)
    assert all(first == other for other in others)
    assert CacheInfo(2000 * len(others), 2000 * len(others)) == cache.stat()


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "size", "leaves"),
    [
        (torch.zeros(3, 4), 48, 1),
        (torch.zeros(100)[:2], 8, 1),
        (np.zeros(3), 24, 1),
        ({"a": torch.zeros(2), "b": [np.zeros(1), (torch.zeros(1),)]}, 20, 3),
        ([], 0, 0),
        ({"a": {}, "b": [(), []]}, 0, 0),
        ("text", 49 + 4, 1),
        ("жé\ud800", 49 + 2 + 2 + 3, 1),
        (b"four", 33 + 4, 1),
        (bytearray(b"four"), 33 + 4, 1),
        ([1, None], sys.getsizeof(1) + sys.getsizeof(None), 2),
        (item(5), 5, 1),
        (MultiModalKwargsItems.from_seq([item(5), item(7)]), 12, 2),
        (item(5)["pixels"], 5, 1),
    ],
)
def test_the_size_is_the_sum_over_the_leaves(value: Any, size: int, leaves: int) -> None:
    assert (size, leaves) == (MultiModalCache.get_item_size(value), MultiModalCache.get_item_complexity(value))


def grown() -> bytearray:
    data = bytearray()
    for n in range(1001):
        data.append(n % 256)
    return data


def joined() -> str:
    text = "".join(["é" * 1000, "ж"])
    text.encode()
    return text


@pytest.mark.parametrize("make", [grown, joined, lambda: "a" * 99, lambda: 2**70, lambda: b"raw", lambda: None])
def test_both_sides_of_a_pickle_come_to_the_same_size(make: Callable[[], object]) -> None:
    data = [make(), torch.zeros(9)[3:]]
    there = pickle.loads(pickle.dumps(data, 5))
    assert MultiModalCache.get_item_size(data) == MultiModalCache.get_item_size(there)


def test_a_cache_of_gib_is_bounded_by_item_sizes() -> None:
    cache = MultiModalCache.get_lru_cache(6 / 2**30, type(item(1)))
    assert 6 == cache.capacity
    cache["a"], cache["b"] = item(4), item(3)
    assert (("b",), 3) == (cache.order, cache.currsize)


def test_prompt_updates_of_other_types_count_what_they_hold() -> None:
    ids = list(range(1000))
    held = {
        "list": (ids, 8 * 1000),
        "tuple": (tuple(ids), 8 * 1000),
        "tensor": (torch.arange(1000), 8 * 1000),
        "array": (np.arange(1000), 8 * 1000),
        "tree": ({"full": [torch.arange(500), torch.arange(500)]}, 8 * 1000),
    }
    least = updates_size([ResolvedPromptUpdate("image", 0, "insert", "", [])], "h")
    for name, (content, nbytes) in held.items():
        for pair in (("", content), (content, "")):
            size = updates_size([ResolvedPromptUpdate("image", 0, "insert", *pair)], "h")
            assert nbytes <= size - least + 56 <= nbytes + 500, name


@pytest.mark.timeout(20)
def test_a_value_that_contains_itself_is_an_error_and_a_deep_one_is_not() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(NestingError):
        MultiModalCache.get_item_complexity(endless)
    deep: list[object] = []
    for _ in range(150):
        deep = [deep, "a"]
    assert 150 == MultiModalCache.get_item_complexity(deep)
