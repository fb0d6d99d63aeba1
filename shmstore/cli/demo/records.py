"""What a run is to do, and what was measured in it: plain values that travel between the processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from shmstore.cli.demo.memory import Memory

SHARE_OF_DATA = 0.6
"""The default capacity, as a part of the bytes of all distinct items: too small for them, by design."""

MAX_WORKERS = 64
"""A store takes more, but each is a process here, with an interpreter and torch of its own, some 150 MB."""


@dataclass(frozen=True)
class Faults:
    """Numbers of requests that something happens to, to show that it would be seen, or heals; None: none."""

    spoil: int | None = None
    """Its digest is sent with one bit wrong."""
    abort: int | None = None
    """Given up after the API process's cache has recorded it and before it is sent; then asked for again."""
    stale: int | None = None
    """Before its workers read, its lease is given back, as an aborted request's is, and its item invalidated."""


@dataclass(frozen=True)
class RunSettings:
    """What one run is to do; the same for each mode that is compared."""

    workers: int = 2
    capacity: int | None = None
    """Bytes of items that each mode may keep; None: see `default_capacity`."""
    rounds: int = 5
    """How many times every image is asked for."""
    seed: int = 0
    """Of the order of the requests."""
    in_flight: int = 4
    """Requests of one step: sent before the first of them must be reported."""
    faults: Faults = field(default_factory=Faults)


@dataclass(frozen=True)
class ProcessMemory:
    """Of one process, before the first request and after the last one, everything still open."""

    process: str
    before: Memory
    after: Memory


@dataclass(frozen=True)
class Measured:
    """Figures of one mode, from its API process."""

    mode: str
    distinct: int
    """Distinct images."""
    distinct_bytes: int
    """Of their items."""
    capacity: int
    """Bytes of items that the mode may keep."""
    smallest_bytes: int
    """Of the smallest of their items."""
    largest_bytes: int
    """Of the largest."""
    requests: int
    payload_bytes: int
    """Bytes of the tensors of all requests, each counted once however many workers it went to."""
    checked: int
    """Items that a worker took and compared with their digest: requests times workers."""
    mismatches: int
    """Of these, those with a byte that differed."""
    mismatched_names: tuple[str, ...]
    processed: int
    """Times that the image processor ran for a request: the others found their item cached."""
    processing_s: float
    """Of these; not in the clocks of the transport."""
    hashed: int
    """Times that a request's image was hashed."""
    hashing_s: float
    """Of these; not in the clocks of the transport."""
    rejected: int
    """Times that the engine or a worker lacked what a request counted on, so that it was sent again."""
    transport_s: float
    """Sum over the steps: from taking up its first request until the last worker has its last item at hand."""
    total_s: float
    """Wall time of all steps, processing and checking included."""
    latencies_ns: tuple[int, ...]
    """Of each request, from asking the API process's cache until the last worker has its tensors at hand."""
    hits: int
    """Lookups that the API process's cache answered."""
    lookups: int
    evictions: int
    """Items that were cached and are not any more, when all requests have been sent."""
    inline_fallbacks: int
    """Items that found no room in the store and travelled through the pipes instead."""
    leases_released: int
    """Leases that were given back because their request was aborted or rejected."""
    held_at_end: int
    """Objects in the store that somebody held when all was over: anything but 0 is a leak."""
    copied_bytes: int
    """By all processes: into and out of pipes, the store, and pickles."""
    piped_bytes: int
    """By all processes: written to pipes."""
    memory: tuple[ProcessMemory, ...]
