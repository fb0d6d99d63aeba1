"""An interrupt (Ctrl-C, a timeout's signal) anywhere in a call of a cache: the call is done or was never begun."""

import itertools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shmstore.multimodal import LRUCache
from shmstore.multimodal.caches import lru, lru_pair, mirrored, processor_only, shadow
from shmstore.multimodal.caches.lru import Bounded, HitCounter, Journal
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
    """Return what makes a full cache, and what gives it a hit and two misses that evict the others."""

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


def state(cache: object) -> dict[str, Any]:
    """All that the cache holds, in order, and its counts; the sums of sizes are checked."""
    for part in vars(cache).values():
        if isinstance(part, Journal):
            part.finish()
    found: dict[str, Any] = {}
    for name, part in vars(cache).items():
        if isinstance(part, Bounded):
            assert sum(size for _, size in part.entries.values()) == part.nbytes <= part.capacity
            found[name] = list(part.entries.items())
        elif isinstance(part, (shadow.SentKeys, lru_pair.MultiModalReceiverCache)):
            found[name] = state(part)
        elif isinstance(part, (HitCounter, set)):
            found[name] = part.counts if isinstance(part, HitCounter) else set(part)
        elif isinstance(part, OrderedDict):
            found[name] = list(part.items())
    return found


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("make", "action"), CASES.values(), ids=CASES)
def test_a_call_that_is_interrupted_is_done_or_was_never_begun(make: Make, action: Action, twice: bool) -> None:
    done = make()
    action(done)
    allowed = [state(make()), state(done)]
    if action is CASES["get"][1]:
        allowed.append(allowed[1] | {"_counts": allowed[0]["_counts"]})  # a use that is not counted
    for number in itertools.count(1):
        cache = make()
        if not interrupted_at(number, partial(action, cache), *FILES):
            break
        if twice:  # also within the call that finishes what is left
            interrupted_at(1 + number % 3, partial(state, cache), *FILES)
        assert state(cache) in allowed, f"interrupt {number}"
    assert number > 1 + (allowed[0] != allowed[1])
