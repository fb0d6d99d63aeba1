"""Statistics of the prefix cache: hit counts, the hit rate, and how long blocks live."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shmstore.scheduler.checks import check_range
from shmstore.scheduler.kv_cache_blocks import KVCacheBlock


@dataclass(slots=True)
class PrefixCacheStats:
    """Look-ups in the prefix cache since the last record was taken.

    Requests that were preempted before are counted apart, because they look up tokens that they had before.
    """

    reset: bool = False
    """Whether the cache was emptied during this time."""
    requests: int = 0
    """Number of look-ups."""
    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

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
    """Hit rate over the most recent requests: at most `max_recent_requests` of them, but at least one record."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        check_range(1, max_recent_requests=max_recent_requests)
        self.max_recent_requests = max_recent_requests
        self._records: deque[tuple[int, int, int]] = deque()
        self._requests = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add one record; drop the oldest ones while there are more requests than the limit."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._records.append((stats.requests, stats.queries, stats.hits))
        self._requests += stats.requests
        while len(self._records) > 1 and self._requests > self.max_recent_requests:
            self._requests -= self._records.popleft()[0]

    def reset(self) -> None:
        """Forget all records."""
        self._records.clear()
        self._requests = 0

    @property
    def hit_rate(self) -> float:
        """Tokens found per token looked up; 0 without look-ups."""
        queries = sum(record[1] for record in self._records)
        return sum(record[2] for record in self._records) / queries if queries else 0.0


@dataclass(frozen=True, slots=True)
class BlockLifetime:
    """The life of one sampled block, from its hand-out to the loss of its contents."""

    lifetime_seconds: float
    """From the hand-out to the loss of its contents."""
    idle_seconds: float
    """From the last access, or the hand-out, to the loss of its contents."""
    reuse_gaps_seconds: tuple[float, ...]
    """The last gaps between accesses: at most three, oldest first."""


@dataclass(slots=True)
class _Sample:
    born: float
    accesses: deque[float] = field(default_factory=lambda: deque(maxlen=4))


class KVCacheMetricsCollector:
    """Samples blocks; when a sampled block loses its contents, records its `BlockLifetime`.

    A block that is handed out is sampled with probability `sample_rate` (ValueError outside 0 … 1). `clock` returns
    seconds, and `rng` numbers in [0, 1).
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
        """Sample the block with probability `sample_rate`."""
        if self._rng() < self.sample_rate:
            self._samples[block.block_id] = _Sample(self._clock())

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """Note a prefix-cache hit on the block."""
        sample = self._samples.get(block.block_id)
        if sample is not None:
            sample.accesses.append(self._clock())

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """Record the lifetime of a sampled block, because its contents are lost."""
        sample = self._samples.pop(block.block_id, None)
        if sample is not None:
            now, seen = self._clock(), list(sample.accesses)
            gaps = tuple(later - earlier for earlier, later in itertools.pairwise(seen))
            last = seen[-1] if seen else sample.born
            self._events.append(BlockLifetime(now - sample.born, now - last, gaps))

    def drain_events(self) -> list[BlockLifetime]:
        """Return the lifetimes recorded since the last call."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget the open samples; keep the recorded lifetimes for `drain_events`."""
        self._samples.clear()
