"""The settings of a run and its figures: plain values that travel between the processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, which are the same for each mode."""

    workers: int = 2
    capacity: int | None = None
    """Bytes of items that each mode may keep; None: see `default_capacity`."""
    rounds: int = 5
    """Number of times that each image is requested."""
    in_flight: int = 4
    """Requests of one step; all of them are sent before the first one is reported."""
    kill: bool = False
    """Whether to kill the API process when half of the requests are answered; new processes send the other half."""


@dataclass(frozen=True)
class ModeFigures:
    """The figures of one mode, from its API process."""

    requests: int
    items_per_s: float
    """Requests per second of transport, which excludes processing and checking."""
    latency_median_us: float
    """From the lookup in the API process's cache until the last worker has the tensors."""
    hit_ratio: float
    """Hit ratio of the API process's cache; a hit needs no processing."""
    sent_inline: int
    """Items that found no room in the store and travelled through the pipes instead."""
    checked: int
    """Items compared byte for byte, counted for each worker."""
    mismatches: int
    """Compared items with a wrong byte."""
    mismatched_names: tuple[str, ...]
    processed: int
    """Requests for which the image processor ran, because their item was not cached."""
    total_s: float
    """Wall time of all requests, with processing and checking."""


@dataclass(frozen=True)
class Restart:
    """What the processes that were started after a kill found in the store; their other figures are their mode's."""

    opened_s: float
    """From the kill until the API process had opened the store."""
    answered_s: float
    """From the kill until each worker had the item of the first request."""
    recovered: int
    """Objects that were in the store when it was opened."""
    hits_kept: int
    """Images whose first request was a hit; before the kill all of them were cached."""


@dataclass(frozen=True)
class DemoReport:
    """The figures of one mode or of several."""

    settings: RunSettings
    distinct_items: int
    distinct_bytes: int
    capacity: int
    """Bytes of items that each mode may keep."""
    modes: dict[str, ModeFigures]
    restart: Restart | None = None
    """None if no process was killed."""

    @property
    def ok(self) -> bool:
        """Whether every byte that a worker checked was right, and no image was processed again after a kill."""
        kept = self.restart is None or all(figures.processed == 0 for figures in self.modes.values())
        return kept and all(figures.mismatches == 0 for figures in self.modes.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report as values that `json.dumps` takes."""
        return {"ok": self.ok, **asdict(self)}
