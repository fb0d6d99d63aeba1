"""An interrupt (Ctrl-C, a timeout's signal) after any call within a cache: it goes on working, within its bounds."""

import cachetools
import pytest

from shmstore import CacheMissError
from shmstore.multimodal import (
    CacheInfo,
    LRUCache,
    MirroredProcessingCache,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    lockstep,
    lru,
    lru_pair,
    mirrored,
    processor_only,
)
from shmstore.multimodal.lockstep import ValueBook
from tests.interrupts import interrupted_at
from tests.multimodal.helpers import config, item, update

FILES = [module.__file__ for module in (cachetools, lockstep, lru, lru_pair, mirrored, processor_only)]


def consistent(cache):
    sizes = [cache.getsizeof(value) for value in cache.values()]
    return sum(sizes) == cache.currsize <= cache.capacity and len(cache) == len(sizes)


class Receiver:
    def __init__(self):
        self.cache = MultiModalReceiverCache(config(6))
        self.give = self.cache.get_and_update
        self.stats = CacheInfo

    @property
    def order(self):
        return self.cache.order

    def check(self):
        assert consistent(self.cache._cache)


class Only:
    def __init__(self):
        self.cache = MultiModalProcessorOnlyCache(config(6))
        self.stats = self.cache.make_stats

    def give(self, items, mm_hashes):
        return self.cache.get_and_update([one and (one, []) for one in items], mm_hashes)

    @property
    def order(self):
        return self.cache.order

    def check(self):
        assert consistent(self.cache._cache)


class Sender(Only):
    def __init__(self):
        self.cache = MultiModalProcessorSenderCache(config(1000, 6))
        self.stats = self.cache.make_stats

    def give(self, items, mm_hashes):
        pairs = [one and (one, [update(h)]) for one, h in zip(items, mm_hashes, strict=True)]
        return self.cache.get_and_update(pairs, mm_hashes)

    def check(self):
        check_sent(self.cache._sent)


class Mirrored(Only):
    def __init__(self):
        self.cache = MirroredProcessingCache(config(6))
        self.stats = self.cache.make_stats
        self.give = self.cache.get_and_update_p0

    @property
    def order(self):
        return self.cache._p0.order

    def check(self):
        check_sent(self.cache._p0)


def check_sent(sent):
    assert consistent(sent._shadow)
    assert set(sent._book._entries) <= set(sent.order)
    assert sum(size for _, size in sent._book._entries.values()) == sent._book.nbytes


@pytest.mark.parametrize("make", [Receiver, Only, Sender, Mirrored])
def test_a_cache_that_is_interrupted_within_a_batch_lives_on(make):
    number, forgot = 0, 0
    while True:
        number += 1
        side = make()
        side.give([item(2), item(2), item(2)], list("abc"))
        before, counted = side.order, side.stats()
        if not interrupted_at(number, lambda side=side: side.give([item(3), None, item(2)], ["d", "c", "e"]), *FILES):
            break
        side.check()
        assert side.order in (before, (), ("d", "c", "e")[-2:]), f"interrupt {number}"
        assert side.order != () or counted == side.stats()
        forgot += side.order == ()
        for n in range(12):
            side.give([item(3)], [f"n{n}"])
            side.check()
        assert ("n10", "n11") == side.order
    assert forgot > 20


def test_a_sender_that_is_interrupted_and_its_receiver_agree_again():
    number = 0
    while True:
        number += 1
        settings = config(1000, 6)
        sender, receiver = MultiModalProcessorSenderCache(settings), MultiModalReceiverCache(settings)

        def send(mm_hashes, sender=sender):
            inputs = [None if sender.is_cached_item(h) else (item(2), [update(h)]) for h in mm_hashes]
            return [sent for sent, _ in sender.get_and_update(inputs, mm_hashes)]

        for mm_hash in "abc":
            receiver.get_and_update(send([mm_hash]), [mm_hash])
        mm_hashes = ["d", "c"]
        interrupted = interrupted_at(
            number, lambda send=send, receiver=receiver: receiver.get_and_update(send(["d", "c"]), ["d", "c"]), *FILES
        )
        for attempt in range(3):
            try:
                assert [item(2), item(2)] == receiver.get_and_update(send(mm_hashes), mm_hashes)
                break
            except CacheMissError as miss:
                assert attempt < 2, f"interrupt {number}"
                sender.invalidate(miss.mm_hashes)
        if not interrupted:
            break
    assert number > 100


def actions(cache):
    return {
        "store": lambda: cache.__setitem__("new", 3),
        "store what grows": lambda: cache.__setitem__("a", 4),
        "store what shrinks": lambda: cache.__setitem__("a", 1),
        "pop": lambda: cache.pop("a"),
        "popitem": lambda: cache.popitem(),
        "clear": lambda: cache.clear(),
    }


@pytest.mark.parametrize("name", actions(None))
def test_an_lru_cache_whose_own_step_was_interrupted_evicts_and_clears(name):
    number = 0
    while True:
        number += 1
        cache = LRUCache(6, lambda value: value)
        cache.update(a=2, b=2, c=2)
        interrupted = interrupted_at(number, actions(cache)[name], lru.__file__)
        for key in ("a", "b", "c", "new"):
            assert (cache.peek(key) is not None) == (key in cache) == (key in cache.order)
            cache.touch(key)
        assert dict(cache.items()) == {key: cache.peek(key) for key in cache}
        for n in range(9):
            cache[f"n{n}"] = 3
        assert ("n7", "n8") == cache.order, f"interrupt {number}"
        assert consistent(cache)
        assert list(cache) == list(cache._order), "a key without a value is dropped for good"
        if not interrupted:
            break
    assert number > 3


@pytest.mark.parametrize("name", actions(None))
def test_a_key_that_an_interrupt_has_left_without_a_value_is_absent(name):
    number = 0
    while True:
        number += 1
        cache = LRUCache(6, lambda value: value)
        cache.update(a=2, b=2, c=2)
        interrupted = interrupted_at(number, actions(cache)[name], lru.__file__)
        for key in {"a", "b", "c", "new"} - set(cache):
            with pytest.raises(ValueError, match="cannot pin"):
                cache.pin(key)
            if number % 2:
                assert cache.pop(key, None) is None
                with pytest.raises(KeyError):
                    cache.pop(key)
            assert 0 == cache.setdefault(key, 0)
        assert consistent(cache)
        if not interrupted:
            break
    assert number > 3


def test_a_pinned_entry_whose_removal_was_interrupted_holds_no_room():
    number = 0
    while True:
        number += 1
        cache = LRUCache(6, lambda value: value)
        cache.update(a=2, b=2, c=2)
        cache.pin("a")
        cache.pin("b")
        interrupted = interrupted_at(number, lambda cache=cache: cache.pop("a"), lru.__file__)
        if "a" not in cache:
            cache["whole"] = 4
            assert {"b", "whole"} == set(cache), f"interrupt {number}"
        if not interrupted:
            break
    assert number > 3


@pytest.mark.parametrize("name", actions(None))
def test_clear_mends_whatever_an_interrupt_within_cachetools_has_left(name):
    number = 0
    while True:
        number += 1
        cache = LRUCache(6, lambda value: value)
        cache.update(a=2, b=2, c=2)
        interrupted = interrupted_at(number, actions(cache)[name], lru.__file__, cachetools.__file__)
        cache.clear()
        assert ((), 0, 0) == (cache.order, len(cache), cache.currsize)
        cache.update(a=3, b=3, c=3)
        assert ("b", "c") == cache.order
        assert consistent(cache)
        if not interrupted:
            break
    assert number > 3


@pytest.mark.parametrize("name", ["put", "put again", "drop", "clear"])
def test_a_book_that_is_interrupted_still_counts_what_it_holds(name):
    number = 0
    while True:
        number += 1
        book = ValueBook(6)
        for key in "abc":
            book.put(key, key, 2)
        steps = {
            "put": lambda book=book: book.put("new", "new", 5),
            "put again": lambda book=book: book.put("a", "a", 3),
            "drop": lambda book=book: book.drop("b"),
            "clear": lambda book=book: book.clear(),
        }
        interrupted = interrupted_at(number, steps[name], lockstep.__file__)
        assert sum(size for _, size in book._entries.values()) == book.nbytes, f"interrupt {number}"
        if not interrupted:
            break
    assert number > 1
