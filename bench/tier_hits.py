"""Time hits of a sender cache with a tier whose server is well, stopped, or killed; part of `make tiers`.

A sender cache without a tier takes turns with it, in short blocks and random order. Each has a process of its own, so
threads of the tier slow only one. Each has a miss after 100 hits, and its image takes 5 ms. So the tier is asked all
the time, and what is new is published.
"""

import itertools
import logging
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from shmstore import ObjectStoreWriter
from shmstore.multimodal import ShmObjectStoreSenderCache
from shmstore.tiers import StoreTier, open_tier
from tests.multimodal.helpers import MIB, config, three_tensors, update
from tests.tiers.redis_server import RedisServer

STORE, ITEM, HOT, BLOCKS, SECONDS = 256 * MIB, 600_000, 20, 20, 0.5


class Times(NamedTuple):
    """The nanoseconds of the hits and of the look-ups that miss of one sender cache."""

    hits: list[int]
    misses: list[int]

    def hit(self, share: float) -> float:
        """Return the microseconds within which this share of the hits was done."""
        return sorted(self.hits)[int(len(self.hits) * share)] / 1e3


def serve(orders: Connection, url: str | None) -> None:
    """Make a sender cache, and time a block of its calls at each order, until the orders end."""
    logging.getLogger("shmstore").setLevel(logging.ERROR)  # the tier says that it is left alone
    writer = ObjectStoreWriter.create(capacity=STORE, n_readers=1, prefault=True)
    writer.retire(0)  # nobody reads, so leases end at once
    tier = StoreTier(writer, open_tier(url)) if url else None
    cache: Any = ShmObjectStoreSenderCache(config(STORE, STORE, cache_type="shm"), writer, tier=tier)
    item, new = three_tensors(ITEM), itertools.count()
    with closing(cache), suppress(EOFError):
        for number in range(HOT):
            cache.get_and_update_item((item, [update(f"hot-{number}")]), f"hot-{number}")
        while True:
            orders.recv()
            orders.send(block(cache, item, new))


def block(cache: Any, item: Any, new: Iterator[int]) -> Times:
    clock, times, end = time.perf_counter_ns, Times([], []), time.monotonic() + SECONDS
    while time.monotonic() < end:
        for number in range(100):
            key, begin = f"hot-{number % HOT}", clock()
            if not cache.is_cached_item(key):
                raise ValueError("an item in use was evicted")
            cache.get_and_update_item(None, key)
            times.hits.append(clock() - begin)
        key, begin = f"new-{next(new)}", clock()
        cache.is_cached_item(key)
        times.misses.append(clock() - begin)
        cache.get_and_update_item((item, [update(key)]), key)
        time.sleep(0.005)
    return times


def sender(end: ExitStack, url: str | None) -> Connection:
    """Start a process with a sender cache; return what takes orders to it."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(theirs, url), daemon=True)
    process.start()
    theirs.close()
    end.callback(process.join)
    end.enter_context(ours)
    return ours


def run(senders: list[Connection]) -> list[Times]:
    found = [Times([], []) for _ in senders]
    turns = list(zip(senders, found, strict=True))
    for _ in range(BLOCKS):
        random.shuffle(turns)
        for orders, times in turns:
            orders.send(None)
            for all_, more in zip(times, orders.recv(), strict=True):
                all_ += more
    return found


def table() -> Iterator[str]:
    """Yield the lines; raises ImportError without what a Redis server needs."""
    import redis  # noqa: F401  # the test's server would skip, which is no ImportError

    if shutil.which("redis-server") is None:
        raise ImportError("redis-server")
    yield "| server | hit without a tier, us: median, p99 | with it | p99, with / without | slowest miss, ms |"
    yield "|---|---|---|---|---|"
    with ExitStack() as end:
        server = end.enter_context(closing(RedisServer()))
        senders = [sender(end, None), sender(end, server.url)]
        for state, change in (
            ("well", lambda: None),
            ("stopped", lambda: server.signal(signal.SIGSTOP)),
            ("well again", lambda: server.signal(signal.SIGCONT)),
            ("killed", server.kill),
        ):
            change()
            none, tier = run(senders)
            yield (
                f"| {state} | {none.hit(0.5):.1f}, {none.hit(0.99):.1f} | {tier.hit(0.5):.1f}, {tier.hit(0.99):.1f} "
                f"| {tier.hit(0.99) / none.hit(0.99):.2f} | {max(tier.misses) / 1e6:.1f} |"
            )
