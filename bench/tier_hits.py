"""Time hits of a sender cache beside a tier whose server is well, stopped, or killed; part of `make tiers`.

A sender cache without a tier takes turns with it, in random order. Each has a miss after 100 hits, and its image takes
5 ms. So the tier is asked all the time, and what is new is offered.
"""

import itertools
import logging
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

from shmstore import ObjectStoreWriter
from shmstore.multimodal import ShmObjectStoreSenderCache
from shmstore.tiers import StoreTier, open_tier
from tests.multimodal.helpers import MIB, config, three_tensors, update
from tests.tiers.redis_server import RedisServer

STORE, ITEM, HOT, SECONDS = 256 * MIB, 600_000, 20, 20.0


class Times:
    """The nanoseconds of the hits and of the look-ups that miss of one sender cache."""

    def __init__(self) -> None:
        self.hits: list[int] = []
        self.misses: list[int] = []

    def hit(self, share: float) -> float:
        """Return the microseconds within which this share of the hits was done."""
        return sorted(self.hits)[int(len(self.hits) * share)] / 1e3


def sender(end: ExitStack, url: str | None) -> Any:
    writer = ObjectStoreWriter.create(capacity=STORE, n_readers=1, prefault=True)
    writer.retire(0)  # nobody reads, so leases end at once
    tier = StoreTier(writer, open_tier(url)) if url else None
    cache: Any = ShmObjectStoreSenderCache(config(STORE, STORE, cache_type="shm"), writer, tier=tier)
    end.callback(cache.close)
    return cache


def run(caches: list[Any], supply: Iterator[int]) -> list[Times]:
    clock, item, found = time.perf_counter_ns, three_tensors(ITEM), [Times() for _ in caches]
    turns = list(zip(caches, found, strict=True))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for number in range(100):
            random.shuffle(turns)
            for cache, times in turns:
                key, begin = f"hot-{number % HOT}", clock()
                if not cache.is_cached_item(key):
                    raise ValueError("an item in use was evicted")
                cache.get_and_update_item(None, key)
                times.hits.append(clock() - begin)
        key = f"new-{next(supply)}"
        for cache, times in turns:
            begin = clock()
            cache.is_cached_item(key)
            times.misses.append(clock() - begin)
            cache.get_and_update_item((item, [update(key)]), key)
        time.sleep(0.005)
    return found


def table() -> Iterator[str]:
    """Yield the lines; raises ImportError without what a Redis server needs."""
    yield "| server | hit without a tier, us: median, p99 | with it | p99, with / without | slowest miss, ms |"
    yield "|---|---|---|---|---|"
    logging.getLogger("shmstore").setLevel(logging.ERROR)  # the tier says that it is left alone
    if shutil.which("redis-server") is None:
        raise ImportError("redis-server")
    with ExitStack() as end:
        server = end.enter_context(closing(RedisServer()))
        caches, supply = [sender(end, None), sender(end, server.url)], itertools.count()
        for cache in caches:
            for number in range(HOT):
                key = f"hot-{number}"
                cache.get_and_update_item((three_tensors(ITEM), [update(key)]), key)
        for state, change in (
            ("well", lambda: None),
            ("stopped", lambda: server.signal(signal.SIGSTOP)),
            ("well again", lambda: server.signal(signal.SIGCONT)),
            ("killed", server.kill),
        ):
            change()
            none, tier = run(caches, supply)
            yield (
                f"| {state} | {none.hit(0.5):.1f}, {none.hit(0.99):.1f} | {tier.hit(0.5):.1f}, {tier.hit(0.99):.1f} "
                f"| {tier.hit(0.99) / none.hit(0.99):.2f} | {max(tier.misses) / 1e6:.1f} |"
            )
