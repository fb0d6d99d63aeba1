"""What an inspection returns: frozen records of plain values, with times in seconds since the epoch."""

from dataclasses import dataclass
from typing import Literal

from shmstore.files import SegmentFile

__all__ = ["LeaseInfo", "ReaderInfo", "SegmentInfo", "SlotInfo", "StoreFacts", "StoreSnapshot"]
ReaderState = Literal["alive", "closed", "dead", "retired", "awaited"]


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The superblock of a store: its size, its writer, its counts since it was created."""

    store_id: int
    """The store's random number, as in its references."""
    created_at: float
    """When it was created."""
    file_size: int
    """Bytes of the segment's file."""
    control_bytes: int
    """Bytes of it before the data region."""
    capacity: int
    """Bytes of the data region."""
    max_object_size: int
    """Bytes that one object may have."""
    max_objects: int
    """Slots."""
    max_leases: int
    """Lease entries."""
    n_readers: int
    """Ranks that each hand-out expects."""
    options: tuple[str, ...]
    """Those of prefault, huge_pages, fifo and checksums that are on."""
    writer_alive: bool
    """Whether some process holds the writer's lock; a stopped one does."""
    writer_pid: int
    """The writer's process, or that of the last one, in its own PID namespace."""
    recoveries: int
    """How often a new writer has taken it over."""
    next_id: int
    """The next object's id."""
    next_lease: int
    """The next hand-out's number."""
    hand: int
    """Offset in the data region where the next search for room begins."""
    used_bytes: int
    """Bytes under objects and unfinished puts."""
    objects: int
    """Objects, deleted ones that somebody holds among them."""
    open_leases: int
    """Hand-outs not known to be over."""
    puts: int
    """Objects stored."""
    put_bytes: int
    """Bytes of tensors copied in."""
    hits: int
    """Hand-outs of what was there."""
    misses: int
    """Calls of `get_cached` that found nothing."""
    evictions: int
    """Objects reclaimed for another's sake."""
    evicted_bytes: int
    """Bytes of the data region that they had."""
    deletes: int
    """Objects taken out by `delete` and `clear`."""
    refusals: int
    """Puts and hand-outs answered with StoreFullError: each is an item that the engine had to send another way."""
    cancels: int
    """Leases ended by `cancel`."""
    moving: bool
    """The writer was faster than the reading: the counts may be of two moments."""

    @property
    def hit_ratio(self) -> float | None:
        """Hits per item handed out, put or hit; None where there was none."""
        given = self.hits + self.puts
        return self.hits / given if given else None


@dataclass(frozen=True, slots=True)
class SegmentInfo(SegmentFile):
    """A file of /dev/shm that is ours, or what is left of one."""

    facts: StoreFacts | None
    """The superblock; None unless `state` is "ok"."""


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """One rank: its process, and what it holds."""

    rank: int
    """Its number."""
    state: ReaderState
    """"awaited": has never attached, so that leases wait for it; "retired": not alive, and was retired.

    "closed": no lease waits for it, but its views, counted in `pins`, still hold their objects.
    """
    retired: bool
    """Whether the writer has retired it, alive or not, since it last attached: no lease waits for it."""
    pid: int | None
    """Process of the last attachment, in its own PID namespace; None before the first."""
    attachments: int
    """How often a process has attached as this rank."""
    attached_at: float | None
    """When the last one did."""
    gets: int
    """References turned into values."""
    stale: int
    """References refused."""
    released: int
    """Leases ended unread."""
    pins: int
    """Values that somebody looks at; 0 where the rank is not alive."""
    pins_left: int
    """Pins that a dead process left behind, which hold nothing; 0 where the rank is alive."""
    pinned_objects: int
    """Objects pinned."""
    pinned_bytes: int
    """Bytes of the data region under them."""
    unacknowledged: int
    """Leases that wait for this rank."""
    unacknowledged_bytes: int
    """Bytes of the data region under their objects."""
    lag_seconds: float | None
    """Age of the oldest of these leases; None where there is none."""
    held_bytes: int
    """Bytes kept from reuse by this rank, pinned or leased, each object once."""
    moving: bool
    """A process was attaching: the words may be of two processes."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One object, or space that is being written."""

    slot: int
    """Its place in the slot table."""
    state: str
    """"live"; "writing": not committed yet; "evicting": the writer is deciding, or died deciding; or a number."""
    object_id: int
    """The object's id; never used twice."""
    key: str | None
    """The object's key; None where it has gone, or cannot be read."""
    offset: int
    """Of the key, in the data region."""
    length: int
    """Bytes from there to the end of the payload."""
    span: int
    """Bytes of the data region that it takes."""
    key_len: int
    """Bytes of the key."""
    meta_len: int
    """Bytes of the metadata, which follow the key."""
    stored_at: float | None
    """When it was committed."""
    deleted: bool
    """Taken out of the index: goes when nobody holds it."""
    crc: int | None
    """CRC-32C of its bytes; None where the store has no checksums."""
    pinned_by: tuple[int, ...]
    """Ranks alive that look at it."""
    leased_to: tuple[int, ...]
    """Ranks that have been handed it and have not read it."""
    bounded: bool
    """Whether its lengths stay inside the data region."""
    moving: bool
    """Half-made, or faster than the reading: the other fields are a hint."""

    @property
    def payload_at(self) -> int:
        """Offset of the payload from the object's start."""
        return (self.key_len + self.meta_len + 63) & ~63

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return max(0, self.length - self.payload_at)


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One hand-out that is not over."""

    entry: int
    """Its place in the lease table."""
    number: int
    """Its number; never used twice."""
    slot: int
    """The slot of its object."""
    object_id: int
    """The object's id."""
    opened_at: float
    """When it was handed out."""
    age_seconds: float
    """How long ago that was."""
    waiting_for: tuple[int, ...]
    """Ranks that have not read it; none: it is over, and the writer has not looked yet."""
    moving: bool
    """Faster than the reading."""


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """A store at about one moment: each record is true of one, the whole is of the milliseconds it took."""

    name: str
    """The store's name."""
    taken_at: float
    """When."""
    facts: StoreFacts
    """The superblock."""
    readers: tuple[ReaderInfo, ...]
    """One a rank."""
    slots: tuple[SlotInfo, ...]
    """The occupied ones, in address order."""
    leases: tuple[LeaseInfo, ...]
    """The open ones, oldest first."""
