"""Counts of lookups: `CacheInfo` shows them, a `HitCounter` keeps them."""

from __future__ import annotations

import dataclasses

from shmstore.errors import check_flags


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """Number of lookups in a cache, and of those that found something."""

    hits: int = 0
    total: int = 0

    @property
    def hit_ratio(self) -> float:
        """hits / total; 0.0 before the first lookup."""
        return self.hits / self.total if self.total else 0.0


class HitCounter:
    """Counts lookups; the owner holds the lock. All counts are one tuple, so that they change together."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from 0."""
        self.counts = 0, 0, 0, 0  # hits and lookups, now and at the last report

    @property
    def total(self) -> int:
        """All lookups."""
        return self.counts[1]

    def add(self, hits: int, total: int) -> None:
        """Add hits and lookups at once; negative numbers take them back."""
        now_hits, now_total, reported_hits, reported_total = self.counts
        self.counts = now_hits + hits, now_total + total, reported_hits, reported_total

    def stat(self, delta: bool = False) -> CacheInfo:
        """Return all counts; with `delta`, those since the last call with `delta`."""
        hits, total, reported_hits, reported_total = self.counts
        if delta is False:
            return CacheInfo(hits, total)
        if delta is not True:
            check_flags(delta=delta)
        self.counts = hits, total, hits, total
        return CacheInfo(hits - reported_hits, total - reported_total)
