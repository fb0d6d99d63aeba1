"""What a store, and a rank of one, say about themselves: frozen records."""

from dataclasses import dataclass

__all__ = ["ReaderStats", "StoreStats"]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, and what its writers have done with it since it was created (also before a `recover`)."""

    capacity: int
    """Bytes of the data region."""
    max_object_size: int
    """Bytes that one object may have: key, metadata and tensors together."""
    max_objects: int
    """Slots; one an object."""
    n_readers: int
    """Ranks that each hand-out expects."""
    objects: int
    """Objects stored, deleted ones that somebody still holds among them."""
    used_bytes: int
    """Bytes of the data region under objects and unfinished puts, with their padding."""
    next_id: int
    """`monotonic_id` of the next object."""
    next_lease: int
    """Number of the next hand-out."""
    open_leases: int
    """Hand-outs not known to be over. The writer looks only when it needs room, so that some of them may be."""
    max_leases: int
    """Lease entries; one an open hand-out."""
    puts: int
    """Objects stored."""
    put_bytes: int
    """Bytes of tensors copied in."""
    hits: int
    """Calls of `get_cached` that found their key."""
    misses: int
    """Calls of `get_cached` that did not."""
    evictions: int
    """Objects reclaimed for another's sake."""
    evicted_bytes: int
    """Bytes of the data region that they had."""
    deletes: int
    """Objects taken out by `delete` and `clear`."""
    refusals: int
    """Puts and hand-outs answered with StoreFullError."""
    cancels: int
    """Leases ended by `cancel`."""
    control_bytes: int
    """Bytes of the segment besides the data region."""
    heap_bytes: int
    """Bytes of the writer's private books."""

    @property
    def hit_ratio(self) -> float:
        """Hits per item handed out, put or hit; 0 where there was none. (Who asks `is_cached` first never misses.)"""
        given = self.hits + self.puts
        return self.hits / given if given else 0.0


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """What the processes of one rank have done; the counts survive them."""

    gets: int
    """References turned into values."""
    stale: int
    """References refused."""
    releases: int
    """Leases ended unread by `release`."""
    live_views: int
    """Values of this reader that somebody still looks at."""
