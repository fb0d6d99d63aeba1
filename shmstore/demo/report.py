"""Turns the figures of the modes into a table for people and a JSON object for machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shmstore.demo.processes import Measured, RunSettings

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class ModeFigures:
    """What the report says about one mode."""

    requests: int
    items_per_s: float
    """Requests per second of transport; checking and processing are not in it."""
    megabytes_per_s: float
    """10^6 bytes of tensors per second of transport, each item counted once however many workers it went to."""
    latency_median_us: float
    """From the API process taking up an item until the last worker has its tensors at hand."""
    latency_p99_us: float
    bytes_copied: int
    """By all processes: into and out of pipes, the store, and pickles."""
    bytes_piped: int
    """By all processes: written to pipes."""
    hits: int
    evictions: int
    inline_fallbacks: int
    checked: int
    """Items compared byte for byte, one count for each worker."""
    mismatches: int
    mismatched_names: tuple[str, ...]
    processing_ms: float
    """The image processor's mean time for one distinct image; not in the transport's time."""
    hashing_ms: float
    """The content hash's mean time for one distinct image; not in the transport's time."""
    total_s: float
    """Wall time of all requests, checking included."""


@dataclass(frozen=True)
class DemoReport:
    """A whole run of the demo."""

    settings: RunSettings
    distinct_items: int
    distinct_bytes: int
    capacity: int | None
    """Bytes of the store's data region, None where no mode had a store."""
    modes: dict[str, ModeFigures]

    @property
    def ok(self) -> bool:
        """Whether every byte that any worker checked was right."""
        return all(figures.mismatches == 0 for figures in self.modes.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report as values that `json.dumps` takes."""
        return {
            "ok": self.ok,
            "workers": self.settings.workers,
            "rounds": self.settings.rounds,
            "seed": self.settings.seed,
            "in_flight": self.settings.in_flight,
            "distinct_items": self.distinct_items,
            "distinct_bytes": self.distinct_bytes,
            "capacity": self.capacity,
            "modes": {mode: asdict(figures) for mode, figures in self.modes.items()},
        }


def make_report(settings: RunSettings, measured: Sequence[Measured]) -> DemoReport:
    """Return the report of at least one mode."""
    return DemoReport(
        settings=settings,
        distinct_items=measured[0].distinct,
        distinct_bytes=measured[0].distinct_bytes,
        capacity=next((mode.capacity for mode in measured if mode.capacity is not None), None),
        modes={mode.mode: _figures(mode) for mode in measured},
    )


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest of `values` that at least `percent` of a hundred of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)  # rounded up, in integers
    return ordered[max(rank, 1) - 1]


def _figures(measured: Measured) -> ModeFigures:
    return ModeFigures(
        requests=measured.requests,
        items_per_s=measured.requests / measured.transport_s,
        megabytes_per_s=measured.payload_bytes / MEGABYTE / measured.transport_s,
        latency_median_us=median(measured.latencies_ns) / 1e3,
        latency_p99_us=percentile(measured.latencies_ns, 99) / 1e3,
        bytes_copied=measured.copied_bytes,
        bytes_piped=measured.piped_bytes,
        hits=measured.hits,
        evictions=measured.evictions,
        inline_fallbacks=measured.inline_fallbacks,
        checked=measured.checked,
        mismatches=measured.mismatches,
        mismatched_names=measured.mismatched_names,
        processing_ms=measured.processing_s * 1e3 / measured.distinct,
        hashing_ms=measured.hashing_s * 1e3 / measured.distinct,
        total_s=measured.total_s,
    )


_ROWS: tuple[tuple[str, Callable[[ModeFigures], float], str], ...] = (
    ("items/s", lambda figures: figures.items_per_s, ",.1f"),
    ("MB/s", lambda figures: figures.megabytes_per_s, ",.0f"),
    ("API to last worker, median µs", lambda figures: figures.latency_median_us, ",.0f"),
    ("API to last worker, p99 µs", lambda figures: figures.latency_p99_us, ",.0f"),
    ("copied, MB", lambda figures: figures.bytes_copied / MEGABYTE, ",.1f"),
    ("through pipes, MB", lambda figures: figures.bytes_piped / MEGABYTE, ",.1f"),
    ("hits", lambda figures: figures.hits, ",d"),
    ("evictions", lambda figures: figures.evictions, ",d"),
    ("inline fallbacks", lambda figures: figures.inline_fallbacks, ",d"),
    ("checked byte for byte", lambda figures: figures.checked, ",d"),
    ("wrong", lambda figures: figures.mismatches, ",d"),
    ("before: image processor, ms/image", lambda figures: figures.processing_ms, ",.1f"),
    ("before: content hash, ms/image", lambda figures: figures.hashing_ms, ",.1f"),
    ("wall, checking included, s", lambda figures: figures.total_s, ",.2f"),
)


def print_report(report: DemoReport, console: Console) -> None:
    """Print the modes side by side."""
    settings = report.settings
    store = "" if report.capacity is None else f", a store of {report.capacity / MEGABYTE:.0f} MB"
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / MEGABYTE:.0f} MB{store}, "
        f"{settings.rounds} rounds, {settings.workers} workers, {settings.in_flight} in flight",
        highlight=False,
    )
    table = Table()
    table.add_column("")
    for mode in report.modes:
        table.add_column(mode, justify="right")
    for label, value, form in _ROWS:
        table.add_row(label, *(format(value(figures), form) for figures in report.modes.values()))
    console.print(table)
    console.print(
        "The clock runs from the API process taking up an item until the last worker has its tensors at hand. "
        "In every mode each image is processed once, before that; every byte is checked after it.",
        style="dim",
    )
    for mode, figures in report.modes.items():
        if figures.mismatches:
            names = ", ".join(figures.mismatched_names)
            message = f"{mode}: {figures.mismatches} of {figures.checked} arrived wrong: {names}"
            console.print(Text(message, style="bold red"))
