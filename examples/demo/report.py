"""Shows the figures of the modes as a table, or what a restart after a kill has kept."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from examples.demo.modes import MODES
from examples.demo.records import DemoReport, ModeFigures, Restart

_ROWS: tuple[tuple[str, Callable[[ModeFigures], float], str], ...] = (
    ("wall time, all included, s", lambda figures: figures.total_s, ",.2f"),
    ("transport only, items/s", lambda figures: figures.items_per_s, ",.1f"),
    ("API to last worker, median µs", lambda figures: figures.latency_median_us, ",.0f"),
    ("hit ratio", lambda figures: figures.hit_ratio, ".1%"),
    ("sent inline, for lack of room", lambda figures: figures.sent_inline, ",d"),
    ("checked byte for byte", lambda figures: figures.checked, ",d"),
    ("wrong", lambda figures: figures.mismatches, ",d"),
    ("images processed", lambda figures: figures.processed, ",d"),
)


def print_report(report: DemoReport, console: Console) -> None:
    """Print the modes side by side with warnings and explanations, or the figures of a restart."""
    settings = report.settings
    if report.restart is not None:
        _print_restart(report, report.restart, console)
        return
    too_small = ", too small for all of them, so it evicts" if settings.capacity is None else ""
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / 1e6:.0f} MB, "
        f"{report.capacity / 1e6:.0f} MB for the cache{too_small}; "
        f"{settings.rounds} rounds, {settings.workers} workers, {settings.in_flight} in flight",
    )
    table = Table("", *(Column(mode, justify="right") for mode in report.modes))
    for label, value, form in _ROWS:
        table.add_row(label, *(format(value(figures), form) for figures in report.modes.values()))
    console.print(table)
    for mode in report.modes:
        console.print(f"{mode}: {MODES[mode].summary}", style="dim")
    console.print(
        "Wall time is the time of all requests, with processing and checking, which every mode does in the same way; "
        "it excludes the start of the processes. Transport excludes processing and checking: its clock runs from the "
        "lookup in the API process's cache until the last worker has the tensors. Every byte is checked after that. "
        "A hit of lru saves the pipe to the engine, but not the pipes to the workers.\n"
        "The modes get the same requests and keep the same number of bytes, but evict differently. So hits and images "
        "processed differ: none and lru evict the least recently used item, shm the next one in its ring that was not "
        "used since the last lap.",
        style="dim",
    )
    for mode, figures in report.modes.items():
        _print_wrong(mode, figures, console)


def _print_restart(report: DemoReport, restart: Restart, console: Console) -> None:
    ((mode, figures),) = report.modes.items()
    settings = report.settings
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / 1e6:.0f} MB, all of them in the store; "
        f"{settings.rounds} rounds, {settings.workers} workers, {settings.in_flight} in flight\n"
        "Halfway, SIGKILL ended the API process; then the others ended, and new ones were started.",
    )
    table = Table("", Column(justify="right"), show_header=False)
    for label, value in (
        ("kill to store open, s", f"{restart.opened_s:.2f}"),
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
    )
    if figures.processed:
        console.print(Text(f"{figures.processed} images were processed again: hits were lost", style="bold red"))
    _print_wrong(mode, figures, console)


def _print_wrong(mode: str, figures: ModeFigures, console: Console) -> None:
    if figures.mismatches:
        names = ", ".join(figures.mismatched_names)
        message = f"{mode}: {figures.mismatches} of {figures.checked} arrived wrong: {names}"
        console.print(Text(message, style="bold red"))
