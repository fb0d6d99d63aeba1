"""The settings of a fleet and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.demo.records import RunSettings
from shmstore.tiers import TierStats

TIER = "tier"
"""What a run of two hosts can kill, and its mode with a tier."""
HOSTS = ("host 1", "host 2")


@dataclass(frozen=True)
class FleetSettings(RunSettings):
    """Those of a run, whose `kill` may have a number, such as api:1; the others go on, and a successor is started.

    With two hosts `kill` is `TIER`, when the second host has requested half of the images.
    """

    api_servers: int = 1
    """Of each host."""
    engines: int = 1
    """Of each host."""
    hosts: int = 1
    """With two, each has a store of its own, and the modes are those of `HOST_MODES`."""
    tier: str | None = None
    """A URL, or a server to start; None: a temporary folder."""


@dataclass(frozen=True)
class FleetFigures:
    """What one mode of several servers did; of two hosts, on one of them."""

    requests: int
    processed: int
    """Times that the image processor ran."""
    stored_bytes: int
    """Bytes of tensors that the servers put into their caches."""
    sent_bytes: int
    """Bytes that went through pipes with the requests."""
    latency_median_us: float
    """From the lookup in the server's cache until the last worker of the engine has the tensors."""
    latency_p99_us: float
    first_median_ms: float
    """The same for the first request of each image, with the time to process it, or to fetch it from a tier."""
    checked: int
    """Items compared byte for byte, counted for each worker."""
    mismatches: int
    dealt_again: int
    """Requests that were lost with a process, and dealt again."""
    total_s: float
    """Wall time of all requests, with processing and checking."""
    tier: TierStats = field(default_factory=TierStats)
    """Of all servers together."""
    processing_ms: float | None = None
    """Median of the time that a request waited for an image that was then processed; None if there was none."""
    fetching_ms: float | None = None
    """The same for an image that came from a tier."""
    longest_ms: float = 0.0
    """The longest time that a request waited for its image."""


@dataclass(frozen=True)
class Successor:
    """The process that took the place of a killed one."""

    recovered: int
    """Objects in the part of the store that a server took over."""
    back_s: float
    """From the kill until requests were dealt to it."""


@dataclass(frozen=True)
class FleetReport:
    """The figures of several servers and engines, in each mode and on each host."""

    settings: RunSettings
    distinct_items: int
    distinct_bytes: int
    capacity: int
    """Bytes of items that each server may keep."""
    modes: dict[str, FleetFigures]
    successor: Successor | None = None
    network: str = ""
    """With two hosts: a sentence on how they reach the tier."""
    tier: str = ""
    """Its URL, without what may be a password."""
