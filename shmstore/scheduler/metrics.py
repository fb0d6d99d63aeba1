"""How well the prefix cache does: hit counts, hit rate, and how long blocks live."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shmstore.scheduler.checks import check_range
from shmstore.scheduler.kv_cache_blocks import KVCacheBlock

__all__ = ["BlockLifetime", "CachingMetrics", "KVCacheMetricsCollector", "PrefixCacheStats"]


@dataclass(slots=True)
class PrefixCacheStats:
    """Look-ups in the prefix cache since the last record was taken.

    Requests that were preempted before are counted apart: they ask again for what they had themselves.
    """

    reset: bool = False
    """The cache was emptied during this time."""
    requests: int = 0
    """Look-ups."""
    queries: int = 0
    """Tokens asked for."""
    hits: int = 0
    """Tokens found."""
    preempted_requests: int = 0
    """Look-ups of requests that had been preempted."""
    preempted_queries: int = 0
    """Tokens that these asked for."""
    preempted_hits: int = 0
    """Tokens that these found."""

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one look-up."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class CachingMetrics:
    """Hit rate over the most recent requests, at least one record and else at most `max_recent_requests` of them."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        check_range(1, max_recent_requests=max_recent_requests)
        self.max_recent_requests = max_recent_requests
        self._records: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Take in one record; the oldest ones go as far as the others reach the limit without them."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._add(stats.requests, stats.queries, stats.hits)
        self._records.append((stats.requests, stats.queries, stats.hits))
        while len(self._records) > 1 and self._requests > self.max_recent_requests:
            requests, queries, hits = self._records.popleft()
            self._add(-requests, -queries, -hits)

    def _add(self, requests: int, queries: int, hits: int) -> None:
        self._requests += requests
        self._queries += queries
        self._hits += hits

    def reset(self) -> None:
        """Forget all records."""
        self._records.clear()
        self._requests = self._queries = self._hits = 0

    @property
    def hit_rate(self) -> float:
        """Tokens found per token asked for; 0 without any."""
        return self._hits / self._queries if self._queries else 0.0


@dataclass(frozen=True, slots=True)
class BlockLifetime:
    """What became of one sampled block between being handed out and losing its contents."""

    lifetime_seconds: float
    """From being handed out to losing its contents."""
    idle_seconds: float
    """From the last access (or from being handed out) to losing its contents."""
    reuse_gaps_seconds: tuple[float, ...]
    """The last gaps between accesses, at most three, oldest first."""


@dataclass(slots=True)
class _Sample:
    born: float
    accesses: deque[float] = field(default_factory=lambda: deque(maxlen=4))


class KVCacheMetricsCollector:
    """Samples blocks and records how long each lived, lay idle, and between accesses, when it loses its contents.

    A block that is handed out is sampled with probability `sample_rate` (ValueError outside 0 … 1). `clock` gives
    seconds, `rng` numbers in [0, 1).
    """

    def __init__(
        self,
        sample_rate: float = 0.01,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        if not 0.0 <= sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be in 0 … 1, not {sample_rate}")
        self.sample_rate = sample_rate
        self._clock = clock
        self._rng = rng
        self._samples: dict[int, _Sample] = {}
        self._events: list[BlockLifetime] = []

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """Sample the block, or not."""
        self.on_ids_allocated((block.block_id,))

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """Note a prefix-cache hit on the block."""
        self.on_ids_accessed((block.block_id,))

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """Close the block's sample: its contents are gone."""
        self.on_ids_evicted((block.block_id,))

    def on_ids_allocated(self, ids: Iterable[int]) -> None:
        """Like `on_block_allocated`, for many blocks."""
        rate, rng, now = self.sample_rate, self._rng, None
        for block_id in ids:
            if rng() < rate:
                now = self._clock() if now is None else now
                self._samples[block_id] = _Sample(now)

    def on_ids_accessed(self, ids: Iterable[int]) -> None:
        """Like `on_block_accessed`, for many blocks."""
        if self._samples:
            now = self._clock()
            for block_id in self._samples.keys() & ids:
                self._samples[block_id].accesses.append(now)

    def on_ids_evicted(self, ids: Iterable[int]) -> None:
        """Like `on_block_evicted`, for many blocks."""
        if not self._samples:
            return
        now = self._clock()
        for block_id in ids:
            sample = self._samples.pop(block_id, None)
            if sample is None:
                continue
            seen = list(sample.accesses)
            gaps = tuple(later - earlier for earlier, later in itertools.pairwise(seen))
            last = seen[-1] if seen else sample.born
            self._events.append(BlockLifetime(now - sample.born, now - last, gaps))

    def drain_events(self) -> list[BlockLifetime]:
        """Return what was learned since the last call."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget the open samples; what was learned stays to be drained."""
        self._samples.clear()
