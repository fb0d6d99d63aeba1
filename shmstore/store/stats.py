"""The figures of a store, and of one of its ranks, as frozen records."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from shmstore.errors import shown, unnamed

MORE_HITS = {1.5: "more_hits_at_1_5x", 2: "more_hits_at_2x", 4: "more_hits_at_4x"}
"""The fields that say what a larger store would have done, by factors of the capacity."""


@dataclass(frozen=True, slots=True)
class KindStats:
    """What a store holds of one kind of objects."""

    bytes: int
    """Bytes of the data region under its objects and unfinished puts, with their padding."""
    objects: int
    """Its objects and unfinished puts."""
    quota: int | None
    """Bytes that it may have; None without a limit."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of a tier, counted since its `StoreTier` was made; a part of them in the segment, for `shmstore top`."""

    hits: int = 0
    """Objects that came from the tier."""
    hit_bytes: int = 0
    """Their payloads."""
    misses: int = 0
    """Keys that the tier did not have, or only from before `remove` or `clear`."""
    declined: int = 0
    """Objects that were left there: processing takes less than the fetch, or the store had no room."""
    damaged: int = 0
    """Objects that did not verify, or whose prompt updates cannot be decoded; they count as misses for callers."""
    errors: int = 0
    """Calls that failed."""
    skipped: int = 0
    """Calls that were not made because the last ones had failed."""
    published: int = 0
    """Objects that were sent."""
    published_bytes: int = 0
    """Their payloads."""
    refused: int = 0
    """Objects for which the tier had no room."""
    dropped: int = 0
    """Objects that were given up: the queue was full, the object was evicted first, or the tier failed."""
    queued: int = 0
    """Objects that wait now. Each ends as published, refused or dropped."""
    saved_seconds: float = 0.0
    """How much longer processing would have taken than the fetches did."""
    open: bool = False
    """Whether the circuit is open: the tier failed, and is not asked for now."""


def tier_stats(figures: dict[str, Any] | None) -> TierStats | None:
    """Return the record of such figures; None for None."""
    return None if figures is None else TierStats(**figures)


def sum_of_tiers(tiers: Iterable[TierStats | None]) -> TierStats | None:
    """Return the figures of several writers' tiers together; None if none of them has one."""
    there = [tier for tier in tiers if tier is not None]
    sums = {each.name: sum(getattr(tier, each.name) for tier in there) for each in fields(TierStats)}
    return TierStats(**sums | {"open": any(tier.open for tier in there)}) if there else None


@unnamed
@dataclass(frozen=True, slots=True)
class WriterCounters:
    """What a writer has done since its store was created, also before a `recover`; `shms_counters` in C.

    What `shmstore top` shows of another process must be a word in that process's table of the segment. So a new counter
    is a field of the C record, the line that counts, a field here, and wherever it is shown: a column in
    shmstore/cli/commands/tables.py, a metric in shmstore/metrics.py.
    """

    puts: int
    """Objects stored."""
    put_bytes: int
    """Bytes of tensors copied in."""
    hits: int
    """Calls of `get_cached` that found their key."""
    remote_hits: int
    """Those that found it in another writer's arena."""
    misses: int
    """Calls of `get_cached` that did not."""
    evictions: int
    """Objects reclaimed to make room for others."""
    evicted_bytes: int
    """Bytes of the data region that they had."""
    deletes: int
    """Objects taken out by `delete` and `clear`."""
    refusals: int
    """Puts and hand-outs answered with StoreFullError."""
    cancels: int
    """Leases ended by `cancel` and `cancel_all`."""
    more_hits_at_1_5x: int
    """Puts that would have been hits with 1.5 times the capacity, as the store estimates."""
    more_hits_at_2x: int
    """The same for twice the capacity."""
    more_hits_at_4x: int
    """The same for four times the capacity."""

    @property
    def found(self) -> int:
        """Keys that were found."""
        return self.hits

    @property
    def lookups(self) -> int:
        """Keys that were asked for."""
        return self.hits + self.misses

    @property
    def hit_ratio(self) -> float:
        """Found / (found + puts); 0 before the first. Misses do not count: after `is_cached` there are none."""
        given = self.found + self.puts
        return self.found / given if given else 0.0

    def hit_ratio_at(self, factor: float) -> float:
        """Return the hit ratio that a store of 1.5, 2 or 4 times the capacity would have had, as this one estimates."""
        if factor not in MORE_HITS:
            raise ValueError(f"factor must be 1.5, 2 or 4, not {shown(factor)}")
        given = self.found + self.puts
        return (self.found + float(getattr(self, MORE_HITS[factor]))) / given if given else 0.0


@dataclass(frozen=True, slots=True)
class ReaderCounters:
    """What the processes of one rank have done; the counts outlive them. `shms_reader_counters` in C."""

    gets: int
    """References turned into values."""
    stale: int
    """References refused."""
    released: int
    """Leases ended by `release`, without a read."""
    finds: int
    """Calls of `find` that found their key."""
    find_misses: int
    """Calls of `find` that did not."""


@dataclass(frozen=True, slots=True)
class Counts(WriterCounters):
    """What a writer has in its arena and has done since the store was created, or all writers together."""

    capacity: int
    """Bytes of the data region."""
    max_objects: int
    """Slots; each object has one."""
    max_leases: int
    """Lease entries; each open hand-out has one."""
    objects: int
    """Objects stored, including deleted ones that are still held."""
    used_bytes: int
    """Bytes of the data region under objects and unfinished puts, with their padding."""
    next_id: int
    """`monotonic_id` of the next object."""
    next_lease: int
    """Number of the next hand-out."""
    open_leases: int
    """Hand-outs that some rank has still to read, or that are held until the writer ends them."""


@dataclass(frozen=True, slots=True)
class StoreStats(Counts):
    """What a store holds, and what its writers have done with it since it was created (also before a `recover`)."""

    max_object_size: int
    """Bytes that one object may have: key, metadata and tensors together."""
    n_readers: int
    """Ranks that a hand-out expects, if it names no group."""
    control_bytes: int
    """Bytes of the segment besides the data region."""
    heap_bytes: int
    """Bytes of the writer's private memory."""
    kinds: dict[str, KindStats] = field(default_factory=dict)
    """By kind; objects without a kind are in none of them."""
    tier: TierStats | None = None
    """Of the writer's tier; None if it has none."""


@dataclass(frozen=True, slots=True)
class ReaderStats(ReaderCounters):
    """What the processes of one rank have done, and what this one has in use."""

    live_views: int
    """Values of this reader that are still in use."""
