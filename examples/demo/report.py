"""Shows the figures of the modes as a table, or what a restart after a kill has kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.demo.memory import Memory
from examples.demo.modes import MODES
from examples.demo.records import MEGABYTE, DemoReport, ModeFigures, Restart

_ROWS: tuple[tuple[str, Callable[[ModeFigures], float], str], ...] = (
    ("wall time, all included, s", lambda figures: figures.total_s, ",.2f"),
    ("transport only, items/s", lambda figures: figures.items_per_s, ",.1f"),
    ("transport only, MB/s", lambda figures: figures.megabytes_per_s, ",.0f"),
    ("API to last worker, median µs", lambda figures: figures.latency_median_us, ",.0f"),
    ("API to last worker, p99 µs", lambda figures: figures.latency_p99_us, ",.0f"),
    ("hit ratio", lambda figures: figures.hit_ratio, ".1%"),
    ("sent between processes, MB", lambda figures: figures.bytes_piped / MEGABYTE, ",.1f"),
    ("copied, MB", lambda figures: figures.bytes_copied / MEGABYTE, ",.1f"),
    ("sent inline", lambda figures: figures.sent_inline, ",d"),
    ("checked byte for byte", lambda figures: figures.checked, ",d"),
    ("wrong", lambda figures: figures.mismatches, ",d"),
    ("images processed", lambda figures: figures.processed, ",d"),
    ("image processor, ms each", lambda figures: figures.processing_ms, ",.1f"),
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
    for mode, figures in report.modes.items():
        if figures.sent_inline:
            console.print(
                f"{mode}: {figures.sent_inline} of {figures.requests} requests found no room and went inline, through "
                "the pipes: raise --capacity, and the room in /dev/shm (containers: --shm-size).",
                style="yellow",
                highlight=False,
            )
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


def _print_restart(report: DemoReport, restart: Restart, console: Console) -> None:
    ((mode, figures),) = report.modes.items()
    settings = report.settings
    console.print(
        f"{report.distinct_items} images, {report.distinct_bytes / MEGABYTE:.0f} MB, all of them in the store; "
        f"{settings.rounds} rounds, {settings.workers} workers, {settings.in_flight} in flight\n"
        "Halfway, SIGKILL ended the API process; then the others ended, and new ones were started.",
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


def _memory_cell(processes: Sequence[Memory]) -> str:
    """Return the sums over the processes, short enough for a cell."""
    own, growth, segment = (
        sum(getattr(one, name) for one in processes) / MEGABYTE for name in ("own", "growth", "segment")
    )
    return f"{own:,.0f} ({growth:+,.0f})" + (f" + {segment:,.0f}" if segment else "")
