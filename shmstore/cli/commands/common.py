"""What the commands share: consoles, numbers for people, JSON, and errors as one line."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shmstore.cli.command import EXIT_WRONG

__all__ = [
    "add_json",
    "add_name",
    "age",
    "cell",
    "complain",
    "make_console",
    "make_fitting_table",
    "make_table",
    "print_json",
    "ratio",
    "reporting",
    "shown",
    "size",
    "span",
    "when",
]

_PLAIN_WIDTH = 200
_GAP = 3
"""Between two columns, at most."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class _Console(Console):
    """A console that leaves a pipe cut short to the command line, as `print` does."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console on stdout: the terminal's width and colours, or wide plain text in a pipe."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)


def shown(text: str) -> str:
    """Return `text` as it can be shown anywhere: what is not printable (an escape, half a character) in its ASCII form.

    Names of files, keys and types are whatever another process made them.
    """
    return text if text.isprintable() else repr(text)[1:-1]


def cell(text: str | Text) -> Text:
    """Return `text` for a table, which would take a plain string for markup."""
    return text if isinstance(text, Text) else Text(shown(text))


def make_table(console: Console, title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    """Return a table, ruled on a terminal and plain elsewhere; columns are right-aligned but those of `left`."""
    lines = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(title=title or None, title_justify="left", title_style="bold", box=lines, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def make_fitting_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[tuple[Sequence[str | Text], str]],
    *,
    left: tuple[str, ...] = (),
    spare: tuple[str, ...] = (),
) -> Table:
    """Return a table of rows, each with its style; on a narrow screen without columns of `spare`, the first first.

    A name that is folded can be neither read nor copied.
    """
    made = [([cell(text) for text in texts], style) for texts, style in rows]
    widths = {
        column: max(len(column), *(len(cells[i]) for cells, _ in made)) if made else len(column)
        for i, column in enumerate(columns)
    }
    for column in spare:
        if sum(widths.values()) + _GAP * len(widths) <= console.width:
            break
        del widths[column]
    table = make_table(console, title, *widths, left=left)
    for cells, style in made:
        table.add_row(*(text for text, column in zip(cells, columns, strict=True) if column in widths), style=style)
    return table


def size(count: float) -> str:
    """Return a number of bytes for people: "1.5 MiB"."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def span(duration: float) -> str:
    """Return a time in seconds for people: "42 s", "3 h 12 min"."""
    if duration < 60:
        return f"{duration:.0f} s" if duration >= 10 else f"{duration:.1f} s"
    minutes = int(duration // 60)
    if minutes < 60:
        return f"{minutes} min {int(duration % 60)} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def age(since: float) -> str:
    """Return how long ago a time was."""
    return span(max(0.0, time.time() - since))


def when(moment: float) -> str:
    """Return a time in local time, to the second."""
    return datetime.fromtimestamp(moment).astimezone().isoformat(sep=" ", timespec="seconds")


def ratio(value: float | None) -> str:
    """Return a ratio in percent; a dash for none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"not for JSON: {type(value).__name__}")  # pragma: no cover - every record is a dataclass


def print_json(value: Any) -> None:
    """Print records, lists and dicts as one JSON document on one line."""
    print(json.dumps(value, default=_plain), flush=True)


def complain(command: str, error: object, status: int = EXIT_WRONG) -> int:
    """Say on stderr what went wrong; returns the exit status."""
    print(f"shmstore {command}: {shown(str(error))}", file=sys.stderr)
    return status


def reporting(command: str, run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return `run` with the errors that an operator can cause or meet as a line on stderr and exit status 1."""

    def guarded(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        # The store's errors are all ShmStoreErrors of these kinds; each is one line with a hint.
        except (ValueError, OSError, LookupError, MemoryError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            if getattr(arguments, "json", False):
                print_json({"ok": False, "error": str(error)})
            return complain(command, error)

    return guarded


_DIRECTORY = Path("/dev/shm")


def store_argument(text: str) -> str:
    """Return the store's name, also where the path of its file is given: an argparse type.

    A path that is there and not in /dev/shm is refused.
    """
    name = text.removeprefix(f"{_DIRECTORY}/").removeprefix("/")
    if "/" in text and "\0" not in text and not os.path.lexists(_DIRECTORY / name) and os.path.lexists(text):
        raise argparse.ArgumentTypeError(f"{text} is no store: stores are files of {_DIRECTORY}, see shmstore ls")
    return name


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a store."""
    parser.add_argument(
        "name", metavar="NAME", type=store_argument, help="the store, as `shmstore ls` names it, or its file"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
