"""Shows the figures of the modes as a table, or what a restart after a kill has kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.demo.fleet import APART, FLEET_MODES, HOST_MODES
from examples.demo.memory import Memory
from examples.demo.modes import MODES
from examples.demo.records import (
    HOSTS,
    MEGABYTE,
    SHARE_OF_DATA,
    TIER,
    DemoReport,
    FleetFigures,
    FleetReport,
    ModeFigures,
    Restart,
)
from examples.demo.tier_server import TIMEOUT_S

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
    """Print the modes side by side with warnings and explanations, or the figures of a restart."""
    settings = report.settings
    if report.restart is not None:
        _print_restart(report, report.restart, console)
        return
    too_small = ", too small for all of them, so it evicts" if settings.capacity is None else ""
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / MEGABYTE:.0f} MB, "
        f"{report.capacity / MEGABYTE:.0f} MB for the cache{too_small}; "
        f"{settings.rounds} rounds, {settings.workers} workers, {settings.in_flight} in flight",
        highlight=False,
    )
    wanted = int(report.distinct_bytes * SHARE_OF_DATA)
    if settings.capacity is None and report.capacity < wanted:
        console.print(
            f"/dev/shm has no room for the {wanted / MEGABYTE:.0f} MB that the demo wants (containers: --shm-size). "
            "Items that find no room travel inline.",
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
    modes = list(report.modes.values())
    for process in modes[0].memory:
        table.add_row(f"memory of {process}, MB", *(_memory_cell([figures.memory[process]]) for figures in modes))
    table.add_row("together", *(_memory_cell(list(figures.memory.values())) for figures in modes))
    console.print(table)
    for mode in report.modes:
        console.print(f"{mode}: {MODES[mode].summary}", style="dim", highlight=False)
    for warning in _too_small(report):
        console.print(warning, style="yellow", highlight=False)
    console.print(
        "Wall time is the time of all requests, with processing and checking, which every mode does in the same way; "
        "it excludes the start of the processes. Transport excludes processing and checking: its clock runs from the "
        "lookup in the API process's cache until the last worker has the tensors. Every byte is checked after that. "
        "A hit of lru saves the pipe to the engine, but not the pipes to the workers.\n"
        "The modes get the same requests and keep the same number of bytes, but evict differently. So hits and images "
        "processed differ: none and lru evict the least recently used item, shm the next one in its ring that was not "
        "used since the last lap.\n"
        "Memory is in use at the end: a process's own, in brackets its growth during the requests, plus its share of "
        "the store's segment.",
        style="dim",
        highlight=False,
    )
    for mode, figures in report.modes.items():
        _print_wrong(mode, figures, console)


_Rows: TypeAlias = tuple[tuple[str, Callable[[FleetFigures], float | None], str], ...]
_FLEET_ROWS: _Rows = (
    ("images processed", lambda figures: figures.processed, ",d"),
    ("bytes stored, MB", lambda figures: figures.stored_bytes / MEGABYTE, ",.1f"),
    ("sent between processes, MB", lambda figures: figures.sent_bytes / MEGABYTE, ",.1f"),
    ("server to last worker, median µs", lambda figures: figures.latency_median_us, ",.0f"),
    ("server to last worker, p99 µs", lambda figures: figures.latency_p99_us, ",.0f"),
    ("an image's first request, median ms", lambda figures: figures.first_median_ms, ",.1f"),
    ("wall time, all included, s", lambda figures: figures.total_s, ",.2f"),
    ("requests dealt again", lambda figures: figures.dealt_again, ",d"),
    ("checked byte for byte", lambda figures: figures.checked, ",d"),
    ("wrong", lambda figures: figures.mismatches, ",d"),
)
_HOST_ROWS: _Rows = (
    ("requests", lambda figures: figures.requests, ",d"),
    ("images processed", lambda figures: figures.processed, ",d"),
    ("  wait for each, median ms", lambda figures: figures.processing_ms, ",.1f"),
    ("images fetched from the tier", lambda figures: figures.tier.hits, ",d"),
    ("  wait for each, median ms", lambda figures: figures.fetching_ms, ",.1f"),
    ("  together, MB", lambda figures: figures.tier.hit_bytes / MEGABYTE, ",.1f"),
    ("longest wait for an image, ms", lambda figures: figures.longest_ms, ",.1f"),
    ("offered to the tier, MB", lambda figures: figures.tier.offered_bytes / MEGABYTE, ",.1f"),
    ("calls of the tier that failed", lambda figures: figures.tier.errors, ",d"),
    ("calls left out after that", lambda figures: figures.tier.skipped, ",d"),
    *(row for row in _FLEET_ROWS if row[0].startswith(("server to", "wall time"))),
    ("images compared byte for byte", lambda figures: figures.checked, ",d"),
    ("  of these wrong", lambda figures: figures.mismatches, ",d"),
)


def print_fleet(report: FleetReport, console: Console) -> None:
    """Print the modes of several servers or hosts side by side, and what became of a killed process."""
    settings = report.settings
    hosts = settings.hosts > 1
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / MEGABYTE:.0f} MB, "
        f"{report.capacity / MEGABYTE:.0f} MB for each server's cache; {settings.rounds} rounds, "
        f"{settings.in_flight} in flight, dealt at random over {_counted(settings.api_servers, 'API server')} and "
        f"{_counted(settings.engines, 'engine')} of {_counted(settings.workers, 'worker')}"
        f"{' on each of two hosts' if hosts else ''}",
        highlight=False,
    )
    table = Table()
    table.add_column("")
    for mode in report.modes:
        table.add_column(mode.replace(", ", ",\n"), justify="right")
    for label, value, form in _HOST_ROWS if hosts else _FLEET_ROWS:
        values = [value(figures) for figures in report.modes.values()]
        table.add_row(label, *("-" if one is None else format(one, form) for one in values))
    console.print(table)
    for mode, summary in (FLEET_MODES | HOST_MODES).items():
        if any(name.partition(", ")[0] == mode for name in report.modes):
            console.print(f"{mode}: {summary}", style="dim", highlight=False)
    if report.successor is not None:
        recovered = report.successor.recovered
        found = f" and found {recovered} objects in its part of the store" if recovered else ""
        console.print(
            f"Halfway, SIGKILL ended one process ({settings.kill}), and the others went on. Its successor was there "
            f"after {report.successor.back_s:.2f} s{found}. What the dead one had "
            "not answered is not counted.",
            highlight=False,
        )
    if hosts:
        _print_hosts(report, console)
    console.print(
        'Each image is requested once a round. "Server to last worker" runs from the lookup in the server\'s cache '
        "until the last worker of the engine has the tensors; it excludes processing and checking. "
        + (
            "What a request waited for its image comes before that: a lookup, and a tier or the processor."
            if hosts
            else "An image's first request also has what the server waited for the item."
        ),
        style="dim",
        highlight=False,
    )
    for mode, figures in report.modes.items():
        if figures.mismatches:
            message = f"{mode}: {figures.mismatches} of {figures.checked} arrived wrong"
            console.print(Text(message, style="bold red"))


def _print_hosts(report: FleetReport, console: Console) -> None:
    for mode, words in ((APART, "Without a tier"), (TIER, "With the tier")):
        if figures := report.modes.get(f"{mode}, {HOSTS[1]}"):
            fetched = f" and fetched {figures.tier.hits}, {figures.tier.hit_bytes / MEGABYTE:.0f} MB" * (mode == TIER)
            console.print(
                f"{words} host 2 processed {figures.processed} of {report.distinct_items} images{fetched}.",
                highlight=False,
            )
    if report.processed_again:
        message = f"Host 2 has processed {report.processed_again} images that the tier should have had."
        console.print(Text(message, style="bold red"))
    checked = sum(figures.checked for figures in report.modes.values())
    wrong = sum(figures.mismatches for figures in report.modes.values())
    nbytes = len(report.modes) * report.settings.rounds * report.settings.workers * report.distinct_bytes
    console.print(
        "Each worker compared every byte of each image that it got with what the image processor gives, by SHA-256: "
        f"{checked:,d} images, {nbytes / MEGABYTE:,.0f} MB, {wrong} wrong.\n"
        f"The tier was {report.tier}. {report.network} Host 2 got its requests when host 1 had answered all of its "
        "own, and when the tier had all that host 1 had offered (write-behind).",
        highlight=False,
    )
    if report.settings.kill:
        console.print(
            "When host 2 had requested half of the images, SIGKILL ended the tier's servers. The requests went on, and "
            f"host 2 processed the other images. A call of the tier may take {TIMEOUT_S} s here, and 1 s by default.",
            highlight=False,
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _print_restart(report: DemoReport, restart: Restart, console: Console) -> None:
    ((mode, figures),) = report.modes.items()
    settings = report.settings
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / MEGABYTE:.0f} MB, all of them in the store; "
        f"{settings.rounds} rounds, {settings.workers} workers, {settings.in_flight} in flight\n"
        f"Halfway, SIGKILL ended one process ({settings.kill}); then the others ended, and new ones were started.",
        highlight=False,
    )
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in (
        ("kill to store open, s", f"{restart.opened_s:.2f}"),
        ("  of that: opening the store, ms", f"{restart.opening_ms:.1f}"),
        ("kill to first answer, s", f"{restart.answered_s:.2f}"),
        ("objects recovered", f"{restart.recovered:,d}"),
        ("hits kept", f"{restart.hits_kept:,d} of {report.distinct_items:,d}"),
        ("images processed again", f"{figures.processed:,d}"),
        ("checked byte for byte", f"{figures.checked:,d}"),
        ("wrong", f"{figures.mismatches:,d}"),
    ):
        table.add_row(label, value)
    console.print(table)
    console.print(
        "Both times contain the end of the old processes, the start of a Python for each new one, its imports of torch "
        "and transformers, and the decoding of all images; an engine would also load its model. The first answer is "
        "the first item in the last worker. A hit is kept if the first request for the image after the kill was one.",
        style="dim",
        highlight=False,
    )
    if figures.processed:
        console.print(Text(f"{figures.processed} images were processed again: hits were lost", style="bold red"))
    _print_wrong(mode, figures, console)


def _print_wrong(mode: str, figures: ModeFigures, console: Console) -> None:
    if figures.mismatches:
        names = ", ".join(figures.mismatched_names)
        message = f"{mode}: {figures.mismatches} of {figures.checked} arrived wrong: {names}"
        console.print(Text(message, style="bold red"))


def _too_small(report: DemoReport) -> Iterator[str]:
    """Yield a warning for each way in which the capacity is too small."""
    small, large, capacity = (
        f"{nbytes / MEGABYTE:,.1f} MB" for nbytes in (report.smallest_bytes, report.largest_bytes, report.capacity)
    )
    if report.smallest_bytes > report.capacity:
        yield f"No image fits into the cache of {capacity}: the smallest has {small}. Raise --capacity."
    for mode, figures in report.modes.items():
        if figures.inline_fallbacks:
            yield (
                f"{mode}: {figures.inline_fallbacks} of {figures.requests} requests found no room and went inline, "
                f"through the pipes; images have {small} to {large}, the cache has {capacity}. Raise --capacity."
            )


def _memory_cell(processes: Sequence[Memory]) -> str:
    """Return the sums over the processes, short enough for a cell."""
    own, growth, segment = (
        sum(getattr(one, name) for one in processes) / MEGABYTE for name in ("own", "growth", "segment")
    )
    return f"{own:,.0f} ({growth:+,.0f})" + (f" + {segment:,.0f}" if segment else "")
