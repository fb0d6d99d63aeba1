"""The records of an inspection: frozen plain values, with times in seconds since the epoch."""

from dataclasses import dataclass
from typing import Literal

from shmstore.files import SegmentFile
from shmstore.store.stats import Counts, KindStats, ReaderCounters, TierStats

ReaderState = Literal["alive", "closed", "dead", "retired", "awaited"]
WriterState = Literal["alive", "closed", "dead", "free"]


@dataclass(frozen=True, slots=True)
class SeenCounts(Counts):
    """The counts as they are seen from outside."""

    hand: int
    """Offset in the data region where the next search for room begins."""
    moving: bool
    """Whether the writer was faster than the read, so that the counts may be from two moments."""
    tier: TierStats | None
    """Since the writer's process has a tier; None if it has none."""


@dataclass(frozen=True, slots=True)
class WriterInfo(SeenCounts):
    """One writer of a store, and its arena."""

    index: int
    state: WriterState
    """What is in the arena of a "dead" or "closed" one is still read and handed out; "free": there was no writer."""
    pid: int | None
    """The process of a living or dead writer, as numbered in its PID namespace."""
    recoveries: int
    """Number of times that a new writer has taken the arena over."""


@dataclass(frozen=True, slots=True)
class StoreFacts(SeenCounts):
    """The superblock of a store: its size, its writers, and its counts since it was created.

    With several writers, sizes and counts are their sums; `next_id` is the largest, and `hand` is that of writer 0.
    """

    store_id: int
    """The store's random number, which its references contain."""
    created_at: float
    file_size: int
    control_bytes: int
    """Bytes of the file before the data region."""
    max_object_size: int
    finds: int
    """Calls of `find` of all readers that found their key."""
    find_misses: int
    """Calls of `find` of all readers that did not."""
    n_readers: int
    """Number of ranks that a hand-out expects, if it names no group."""
    groups: tuple[int, ...]
    """Number of ranks of each group."""
    options: tuple[str, ...]
    """The options that are on, of prefault, huge_pages and checksums."""
    writer_alive: bool
    """Whether a process holds the lock of a writer; a stopped process does."""
    writer_pid: int
    """The process of the current or last writer, as numbered in its PID namespace; of several: the first alive."""
    owner_pid: int | None
    """The living process that owns the store without an arena (`writes=False`); None if there is none."""
    recoveries: int
    """Number of times that a new writer has taken the store or an arena over."""
    writers: tuple[WriterInfo, ...]

    @property
    def found(self) -> int:
        """Keys that a writer or a reader found."""
        return self.hits + self.finds

    @property
    def lookups(self) -> int:
        """Keys that writers and readers asked for."""
        return self.hits + self.misses + self.finds + self.find_misses


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo(SegmentFile):
    """A file in /dev/shm that is a store or the remains of one."""

    facts: StoreFacts | None
    """The superblock; None unless `state` is "ok", or "damaged" and the arena of a writer is sound."""


@dataclass(frozen=True, slots=True)
class ReaderInfo(ReaderCounters):
    """One rank: its process, and the memory that it holds."""

    rank: int
    group: int
    state: ReaderState
    """"awaited": no process has attached, and leases wait for it; "retired": it is not alive and was retired.

    "closed": no lease waits for it, but its views, counted in `pins`, still hold their objects.
    """
    retired: bool
    """Whether the writer has retired the rank since it last attached, so that no lease waits for it."""
    pid: int | None
    """Process of the last attachment, as numbered in its PID namespace; None before the first."""
    attachments: int
    """Number of times that a process has attached as this rank."""
    attached_at: float | None
    """When the last process attached; None before the first."""
    pins: int
    """Values that are still referenced; 0 if the rank is not alive."""
    pins_left: int
    """Pins that a dead process left, which hold nothing; 0 if the rank is alive."""
    pinned_objects: int
    pinned_bytes: int
    """Bytes of the data region under pinned objects."""
    unacknowledged: int
    """Number of leases that wait for this rank."""
    unacknowledged_bytes: int
    """Bytes of the data region under the objects of these leases."""
    lag_seconds: float | None
    """Age of the oldest of these leases in seconds; None if there are none."""
    held_bytes: int
    """Bytes that this rank keeps from reuse by pins and leases; each object counts once."""
    moving: bool
    """Whether a process was attaching, so that the fields may be from two processes."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One object, or the space of an unfinished put."""

    slot: int
    """Index in the slot tables of all arenas."""
    writer: int
    """Number of the writer whose arena the object is in."""
    state: str
    """"live", "writing" (not committed), "evicting" (the writer is deciding, or died deciding), or a number."""
    object_id: int
    """Id of the object; a store never uses an id twice."""
    key: str | None
    """Key of the object; None if the object was evicted or the key cannot be read."""
    namespace: str | None
    kind: str | None
    offset: int
    """Offset of the key in the data region of the arena."""
    length: int
    """Bytes from `offset` to the end of the payload and of the extra bytes."""
    span: int
    """Bytes of the data region that the object takes."""
    key_len: int
    meta_len: int
    """Bytes of the metadata, which follow the key."""
    extra_len: int
    """Bytes after the payload that only the writer reads, such as the prompt updates of an item."""
    stored_at: float | None
    deleted: bool
    """Whether it was deleted; its space is free once it is no longer held."""
    crc: int | None
    """CRC-32C of the object's bytes; None if the store has no checksums."""
    pinned_by: tuple[int, ...]
    """Live ranks that still reference the object."""
    leased_to: tuple[int, ...]
    """Ranks that have not yet read a reference to the object."""
    held: bool
    """Whether a writer holds a lease of the object, which no reading ends."""
    leased_by: tuple[int, ...]
    """Other writers, alive, that have open leases of the object."""
    bounded: bool
    """Whether the object's lengths stay inside the data region."""
    moving: bool
    """Whether it was changing during the read, so that the other fields are a hint."""

    @property
    def payload_at(self) -> int:
        """Offset of the payload from the object's start."""
        return (self.key_len + self.meta_len + 63) & ~63

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return max(0, self.length - self.payload_at - self.extra_len)


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One open hand-out."""

    entry: int
    """Index in the lease tables of all arenas."""
    writer: int
    """Number of the writer that handed the object out."""
    number: int
    """Number of the hand-out; a writer never uses a number twice."""
    slot: int
    object_id: int
    opened_at: float
    age_seconds: float
    waiting_for: tuple[int, ...]
    """Ranks that have not read it. Without any, and if it is not held, the lease is over; the writer will see that."""
    held: bool
    """Whether only the writer ends it."""
    group: int | None
    """The group whose ranks it waits for; None if for all."""
    remote_owner: int | None
    """The writer whose object it is; None if it is the lease's own writer."""
    void: bool
    """Whether it holds nothing, because it is on another writer's object and its own writer is dead."""
    moving: bool
    """Whether it was changing during the read."""


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """A store at about one moment: each record is consistent, and all are from the same few milliseconds."""

    name: str
    taken_at: float
    facts: StoreFacts
    readers: tuple[ReaderInfo, ...]
    slots: tuple[SlotInfo, ...]
    """The occupied slots, in the order of the arenas and of their addresses."""
    leases: tuple[LeaseInfo, ...]
    """The open leases, oldest first."""
    kinds: dict[str, KindStats]
