"""Turns the figures of the modes into a table for people and a JSON object for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shmstore.cli.demo.modes import MODES
from shmstore.cli.demo.records import SHARE_OF_DATA, Measured, ProcessMemory, RunSettings

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class MemoryFigures:
    """What one process has resident when all requests are done and everything is still open, in bytes."""

    own: int
    """Its heap and stacks: what no other process sees."""
    growth: int
    """By so much has `own` grown since before the first request; libraries and pictures were there already."""
    segment: int
    """Its part of the store's segment: what several processes map is divided by their number."""
    total: int
    """Own, segment, and its part of what else is shared, such as libraries (PSS)."""
    slack: int
    """What its allocator had kept free besides, in none of the others."""


@dataclass(frozen=True)
class ModeFigures:
    """What the report says about one mode."""

    requests: int
    items_per_s: float
    """Requests per second of transport; processing, hashing and checking are not in it."""
    megabytes_per_s: float
    """10^6 bytes of tensors per second of transport, each item counted once however many workers it went to."""
    latency_median_us: float
    """From asking the API process's cache until the last worker has the tensors at hand."""
    latency_p99_us: float
    hit_ratio: float
    """Of the API process's cache; a hit needs no processing."""
    hits: int
    bytes_piped: int
    """By all processes: written to pipes."""
    bytes_copied: int
    """By all processes: into and out of pipes, the store, and pickles."""
    evictions: int
    inline_fallbacks: int
    rejected: int
    """Times that a request was sent again because the engine or a worker lacked what it counted on."""
    leases_released: int
    """Leases given back because their request was aborted or rejected."""
    held_at_end: int
    """Objects that somebody held in the store when all was over; anything but 0 is a leak."""
    checked: int
    """Items compared byte for byte, one count for each worker."""
    mismatches: int
    mismatched_names: tuple[str, ...]
    processed: int
    """Images that the image processor was run on for a request."""
    processing_ms: float
    """Its mean time for one of them; not in the transport's time."""
    hashing_ms: float
    """The content hash's mean time for one request; not in the transport's time."""
    total_s: float
    """Wall time of all requests, processing and checking included."""
    memory: dict[str, MemoryFigures]
    """Of each process: "API", "engine", "worker 0", ..."""


@dataclass(frozen=True)
class DemoReport:
    """A whole run of the demo."""

    settings: RunSettings
    distinct_items: int
    distinct_bytes: int
    smallest_bytes: int
    """Of the smallest image's item."""
    largest_bytes: int
    """Of the largest one's."""
    capacity: int
    """Bytes of items that each mode may keep."""
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
            "smallest_bytes": self.smallest_bytes,
            "largest_bytes": self.largest_bytes,
            "capacity": self.capacity,
            "modes": {mode: asdict(figures) for mode, figures in self.modes.items()},
        }


def make_report(settings: RunSettings, measured: Sequence[Measured]) -> DemoReport:
    """Return the report of at least one mode."""
    return DemoReport(
        settings=settings,
        distinct_items=measured[0].distinct,
        distinct_bytes=measured[0].distinct_bytes,
        smallest_bytes=measured[0].smallest_bytes,
        largest_bytes=measured[0].largest_bytes,
        capacity=measured[0].capacity,
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
        hit_ratio=measured.hits / measured.lookups,
        hits=measured.hits,
        bytes_piped=measured.piped_bytes,
        bytes_copied=measured.copied_bytes,
        evictions=measured.evictions,
        inline_fallbacks=measured.inline_fallbacks,
        rejected=measured.rejected,
        leases_released=measured.leases_released,
        held_at_end=measured.held_at_end,
        checked=measured.checked,
        mismatches=measured.mismatches,
        mismatched_names=measured.mismatched_names,
        processed=measured.processed,
        processing_ms=measured.processing_s * 1e3 / measured.processed,
        hashing_ms=measured.hashing_s * 1e3 / measured.hashed,
        total_s=measured.total_s,
        memory={memory.process: _memory(memory) for memory in measured.memory},
    )


def _memory(memory: ProcessMemory) -> MemoryFigures:
    after = memory.after
    return MemoryFigures(after.own, after.own - memory.before.own, after.segments, after.total, after.slack)


_ROWS: tuple[tuple[str, Callable[[ModeFigures], float], str], ...] = (
    ("wall time, all included, s", lambda figures: figures.total_s, ",.2f"),
    ("transport only, items/s", lambda figures: figures.items_per_s, ",.1f"),
    ("transport only, MB/s", lambda figures: figures.megabytes_per_s, ",.0f"),
    ("API to last worker, median µs", lambda figures: figures.latency_median_us, ",.0f"),
    ("API to last worker, p99 µs", lambda figures: figures.latency_p99_us, ",.0f"),
    ("hit ratio", lambda figures: figures.hit_ratio, ".1%"),
    ("sent between processes, MB", lambda figures: figures.bytes_piped / MEGABYTE, ",.1f"),
    ("copied, MB", lambda figures: figures.bytes_copied / MEGABYTE, ",.1f"),
    ("evictions", lambda figures: figures.evictions, ",d"),
    ("inline fallbacks", lambda figures: figures.inline_fallbacks, ",d"),
    ("checked byte for byte", lambda figures: figures.checked, ",d"),
    ("wrong", lambda figures: figures.mismatches, ",d"),
    ("images processed", lambda figures: figures.processed, ",d"),
    ("image processor, ms each", lambda figures: figures.processing_ms, ",.1f"),
    ("content hash, ms a request", lambda figures: figures.hashing_ms, ",.1f"),
)


def print_report(report: DemoReport, console: Console) -> None:
    """Print the modes side by side."""
    settings = report.settings
    too_few = ", too few for all so that it evicts" if settings.capacity is None else ""
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / MEGABYTE:.0f} MB, "
        f"{report.capacity / MEGABYTE:.0f} MB for the cache{too_few}; "
        f"{settings.rounds} rounds, {settings.workers} workers, {settings.in_flight} in flight",
        highlight=False,
    )
    wanted = int(report.distinct_bytes * SHARE_OF_DATA)
    if settings.capacity is None and report.capacity < wanted:
        console.print(
            f"/dev/shm has room for no more; {wanted / MEGABYTE:.0f} MB were wanted (containers: --shm-size). "
            "What finds no place goes inline.",
            style="yellow",
            highlight=False,
        )
    table = Table()
    table.add_column("")
    for mode in report.modes:
        table.add_column(mode, justify="right")
    for label, value, form in _ROWS:
        table.add_row(label, *(format(value(figures), form) for figures in report.modes.values()))
    table.add_section()
    _add_memory(table, list(report.modes.values()))
    console.print(table)
    for mode in report.modes:
        console.print(f"{mode}: {MODES[mode].summary}", style="dim", highlight=False)
    for warning in _too_small(report):
        console.print(warning, style="yellow", highlight=False)
    console.print(
        "Wall time is that of all requests, with processing and checking, which every mode does alike; the processes "
        "have been started before. Transport leaves both out: its clock runs from the item, processed if it was not "
        "cached, being given to the API process's cache until the last worker has its tensors at hand. Every byte is "
        "checked after that. A hit of lru saves the pipe to the engine, not those to the workers.\n"
        "The modes get the same requests and keep as many bytes, but choose differently what to evict, so that hits, "
        "and with them images processed, differ: none and lru evict what was used least recently, shm what lies "
        "next in its ring and was not used since the last time round.\n"
        "Memory is what a process has in use at the end: its own, in brackets what of this the requests added, "
        "plus its part of the store's segment.",
        style="dim",
        highlight=False,
    )
    for mode, figures in report.modes.items():
        if figures.mismatches:
            names = ", ".join(figures.mismatched_names)
            message = f"{mode}: {figures.mismatches} of {figures.checked} arrived wrong: {names}"
            console.print(Text(message, style="bold red"))


def _too_small(report: DemoReport) -> Iterator[str]:
    """Yield a line for each way in which the capacity is too small to show anything."""
    small, large, capacity = (
        f"{nbytes / MEGABYTE:,.1f} MB" for nbytes in (report.smallest_bytes, report.largest_bytes, report.capacity)
    )
    if report.smallest_bytes > report.capacity:
        yield f"No image fits into the cache of {capacity}: the smallest has {small}. Raise --capacity."
    for mode, figures in report.modes.items():
        if figures.inline_fallbacks:
            yield (
                f"{mode}: {figures.inline_fallbacks} of {figures.requests} requests found no room and went inline, "
                f"through the pipes; images have {small} to {large}, the cache {capacity}. Raise --capacity."
            )


def _add_memory(table: Table, modes: list[ModeFigures]) -> None:
    for process in modes[0].memory:
        table.add_row(f"memory of {process}, MB", *(_memory_cell([figures.memory[process]]) for figures in modes))
    table.add_row("together", *(_memory_cell(list(figures.memory.values())) for figures in modes))


def _memory_cell(processes: list[MemoryFigures]) -> str:
    """Return the sum over the processes, in words that fit a cell."""
    own, growth, segment = (
        sum(values) / MEGABYTE
        for values in zip(*((one.own, one.growth, one.segment) for one in processes), strict=True)
    )
    return f"{own:,.0f} ({growth:+,.0f})" + (f" + {segment:,.0f}" if segment else "")
