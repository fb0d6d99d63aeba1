"""An interrupt (Ctrl-C, a timeout's signal) in a call of a cache: it is done or not begun, or empties the cache."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shmstore import CacheMissError
from shmstore.multimodal import LRUCache
from shmstore.multimodal.caches import lru, lru_pair, mirrored, processor_only, shadow
from shmstore.multimodal.caches.lru import Bounded, Guard
from shmstore.multimodal.values.sizes import updates_size
from tests.interrupts import interrupted_at
from tests.multimodal.helpers import config, item, update

FILES = [module.__file__ for module in (shadow, lru, lru_pair, mirrored, processor_only)]
Give = Callable[[Any, list[Any], str], object]
Make = Callable[[], Any]
Action = Callable[[Any], object]
UPDATES = updates_size([update("a")], "a")


def plain() -> LRUCache[str, int]:
    cache: LRUCache[str, int] = LRUCache(6, lambda value: value)
    cache.update(a=2, b=2, c=2)
    cache.pin("a")
    cache.get("b")
    return cache


def filled(make: Action, give: Give) -> tuple[Make, Action]:
    """Return a function that makes a full cache, and one that gives it a hit and two misses, which evict the rest."""

    def ready() -> Any:
        cache = make(config(6 + 3 * UPDATES, 6))
        give(cache, [item(2)] * 3, "abc")
        give(cache, [None, None], "ca")
        return cache

    return ready, lambda cache: give(cache, [item(3), None, item(2)], "dce")


def send(cache: Any, items: list[Any], mm_hashes: str) -> None:
    cache.get_and_update([one and (one, [update(h)]) for one, h in zip(items, mm_hashes, strict=True)], [*mm_hashes])


ONLY = filled(processor_only.MultiModalProcessorOnlyCache, send)
SENDER = filled(lru_pair.MultiModalProcessorSenderCache, send)
RECEIVER = filled(lru_pair.MultiModalReceiverCache, lambda c, items, hashes: c.get_and_update(items, [*hashes]))
MIRRORED = filled(mirrored.MirroredProcessingCache, lambda c, items, hashes: c.get_and_update_p0(items, [*hashes]))
CASES: dict[str, tuple[Make, Action]] = {
    "store": (plain, lambda c: c.update(new=3)),
    "grow": (plain, lambda c: c.update(b=4)),
    "shrink": (plain, lambda c: c.update(a=1)),
    "pop": (plain, lambda c: c.pop("a")),
    "popitem": (plain, lambda c: c.popitem()),
    "get": (plain, lambda c: c.get("a")),
    "touch": (plain, lambda c: c.touch("a")),
    "stat": (plain, lambda c: c.stat(delta=True)),
    "clear": (plain, lambda c: c.clear()),
    **{"only": ONLY, "sender": SENDER, "receiver": RECEIVER, "mirrored": MIRRORED},
    "only, clear": (ONLY[0], lambda c: c.clear_cache()),
    "sender, clear": (SENDER[0], lambda c: c.clear_cache()),
    "sender, touch": (SENDER[0], lambda c: c.touch_sender_cache_item("b")),
    "sender, invalidate": (SENDER[0], lambda c: c.invalidate(["c"])),
    "receiver, clear": (RECEIVER[0], lambda c: c.clear_cache()),
    "mirrored, reset": (MIRRORED[0], lambda c: c.reset()),
}


def halves(cache: Any) -> list[Any]:
    """Return the cache, or its parts that have a lock of their own."""
    return [one for one in (cache, *vars(cache).values()) if any(isinstance(x, Guard) for x in vars_of(one))]


def vars_of(one: Any) -> list[Any]:
    return list(getattr(one, "__dict__", {}).values())


def state(half: Any) -> tuple[list[Any], Any]:
    """Return the contents, in order, and the counts; check that they are whole."""
    next(part for part in vars_of(half) if isinstance(part, Guard)).check()
    for part in vars_of(half):
        if isinstance(part, Bounded):
            assert sum(size for _, size in part.entries.values()) == part.nbytes <= part.capacity
            assert part.pinned <= part.entries.keys()
    if isinstance(half, shadow.SentKeys):
        assert half._kept.entries.keys() <= half._shadow.entries.keys() == half._sendings.keys()
    contents = [part.entries if isinstance(part, Bounded) else part for part in vars_of(half)]
    counts = getattr(half, "_counts", None)
    return [list(part.items()) for part in contents if isinstance(part, OrderedDict)], counts and counts.counts


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("make", "action"), CASES.values(), ids=CASES)
def test_an_interrupted_call_is_done_or_not_begun_or_empties_the_cache(make: Make, action: Action, twice: bool) -> None:
    done = make()
    action(done)
    before, after = [[*map(state, halves(cache))] for cache in (make(), done)]
    for number in itertools.count(1):
        cache = make()
        if not interrupted_at(number, partial(action, cache), *FILES):
            break
        if twice:  # also within the call that empties it
            interrupted_at(1 + number % 3, lambda cache=cache: [*map(state, halves(cache))], *FILES)  # type: ignore[misc]
        for half, *ends in zip(halves(cache), before, after, strict=True):
            contents, counts = state(half)
            assert not any(contents) or contents in [end[0] for end in ends], f"interrupt {number}"
            assert counts in [end[1] for end in ends], f"interrupt {number}"
    assert number > 1 + (before != after)


@pytest.mark.parametrize("full", [SENDER, RECEIVER, ONLY, MIRRORED])
def test_an_empty_batch_after_an_interrupt_finds_the_cache_emptied(full: tuple[Make, Action]) -> None:
    cache = full[0]()
    assert interrupted_at(1, partial(full[1], cache), lru.__file__, only=["put"])
    getattr(cache, "get_and_update_p0", getattr(cache, "get_and_update", None))([], [])  # type: ignore[misc]
    assert not any(any(state(half)[0]) for half in halves(cache)[:1])


class Lru:
    """Both halves, with the calls that an engine makes."""

    def __init__(self) -> None:
        settings = config(2000, 12)
        self.p0: Any = lru_pair.MultiModalProcessorSenderCache(settings)
        self.p1: Any = lru_pair.MultiModalReceiverCache(settings)
        self.sender, self.receiver = self.p0._sent, self.p1

    def send(self, items: list[Any], mm_hashes: list[str]) -> list[Any]:
        pairs = zip(items, self.p0.is_cached(mm_hashes), strict=True)
        inputs = [None if cached else (one, [update("a")]) for one, cached in pairs]
        return [sent for sent, _ in self.p0.get_and_update(inputs, mm_hashes)]

    def receive(self, sent: list[Any], mm_hashes: list[str]) -> Any:
        return self.p1.get_and_update(sent, mm_hashes)


class Mirrored(Lru):
    """The same in the earlier form."""

    def __init__(self) -> None:
        self.p0, self.p1 = (mirrored.MirroredProcessingCache(config(2000, 12)) for _ in range(2))
        self.sender, self.receiver = self.p0._p0, self.p1._p1

    def send(self, items: list[Any], mm_hashes: list[str]) -> list[Any]:
        pairs = zip(items, mm_hashes, strict=True)
        inputs = [None if self.p0.get_item(mm_hash) else one for one, mm_hash in pairs]
        return self.p0.get_and_update_p0(inputs, mm_hashes)  # type: ignore[no-any-return]

    def receive(self, sent: list[Any], mm_hashes: list[str]) -> Any:
        return self.p1.get_and_update_p1(sent, mm_hashes)


def request(pair: Lru, mm_hashes: list[str]) -> int:
    """Send a request until P1 does not reject it, and return how often it did."""
    items = [item(1 + int(h) % 5, int(h)) for h in mm_hashes]
    for rejected in range(len(mm_hashes) + 2):
        sent = pair.send(items, mm_hashes)
        try:
            assert items == pair.receive(sent, mm_hashes)
            return rejected
        except CacheMissError as missed:
            pair.p0.invalidate(missed.mm_hashes)
    raise AssertionError(f"{mm_hashes} did not get through")


@pytest.mark.parametrize("emptied", ["sender", "receiver"])
@pytest.mark.parametrize("kind", [Lru, Mirrored])
def test_an_emptied_half_beside_a_full_one_claims_no_wrong_hit(kind: Callable[[], Lru], emptied: str) -> None:
    for seed in range(30):
        rng, pair = random.Random(seed), kind()
        draw = partial(rng.choices, "0123456789", k=3)
        for _ in range(10):
            assert not request(pair, draw())
        last = pair.sender.order[-1]
        call = partial(pair.send if emptied == "sender" else pair.receive, [item(1)], ["10"])
        assert interrupted_at(2, call, lru.__file__, only=["put"])
        assert (emptied == "sender", emptied == "receiver") == (not pair.sender.order, not pair.receiver.order)
        assert (emptied == "receiver") == request(pair, [last])  # P0 counts on it, or P1 has it without need
        for _ in range(10):
            rejections = request(pair, draw())
            if emptied == "sender":  # P0 counts on nothing that P1 does not have
                assert not rejections
                assert pair.receiver.order[-len(pair.sender.order) :] == pair.sender.order
        for mm_hash in "0123456789":  # as much as both hold, and more
            request(pair, [mm_hash])
        assert pair.sender.order == pair.receiver.order, f"seed {seed}"


@pytest.mark.parametrize("kind", [Lru, Mirrored])
@pytest.mark.parametrize("side", ["send", "receive"])
def test_after_an_interrupt_of_one_side_both_mirror_each_other_again(kind: Callable[[], Lru], side: str) -> None:
    for number in itertools.count(1):
        rng, pair = random.Random(number), kind()
        draw = partial(rng.choices, "0123456789", k=3)
        for _ in range(10):
            request(pair, draw())
        lost = draw()
        items = [item(1 + int(h) % 5, int(h)) for h in lost]
        first = pair.send if side == "send" else pair.receive
        call = partial(first, items if side == "send" else pair.send(items, lost), lost)
        interrupted = interrupted_at(number, call, *FILES)
        for _ in range(10):
            request(pair, draw())
        for mm_hash in "0123456789":
            request(pair, [mm_hash])
        assert pair.sender.order == pair.receiver.order, f"interrupt {number}"
        if not interrupted:
            break
    assert number > 20
