"""Helpers of the commands: consoles, readable numbers, JSON, and errors in one line."""

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shmstore.cli.command import EXIT_WRONG

_PLAIN_WIDTH = 200
_PICTURE_WIDTH = 120
_GAP = 3
"""Maximum width of the space between two columns."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class _Console(Console):
    """A console that leaves a closed pipe to the command line, as `print` does."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught."""
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console on stdout: with the terminal's width and colours, or wide and plain in a pipe."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)


def make_picture() -> Console:
    """Return a console that shows nothing and keeps its output for `save_picture`."""
    return Console(record=True, width=_PICTURE_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)


def save_picture(picture: Console, file: str, title: str) -> None:
    """Write the output of a console from `make_picture` as SVG, and print the name of the file."""
    picture.save_svg(file, title=f"shmstore {shown(title)}")
    print(file)


def shown(text: str) -> str:
    """Return `text` with characters that are not printable in ASCII form.

    Other processes choose the names of files, keys and types, so these may contain escape sequences.
    """
    return text if text.isprintable() else repr(text)[1:-1]


def cell(text: str | Text) -> Text:
    """Return `text` for a table, which would read a plain string as markup."""
    return text if isinstance(text, Text) else Text(shown(text))


def make_table(console: Console, title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    """Return a table with rules only on a terminal; its columns are right-aligned, except those in `left`."""
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
    """Return a table of rows, each with its style.

    If the screen is too narrow, it omits columns of `spare`, in that order, because a folded name cannot be copied.
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
    """Return a number of bytes as "1.5 MiB"."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def span(duration: float) -> str:
    """Return a duration in seconds as "42 s" or "3 h 12 min"."""
    if duration < 60:
        return f"{duration:.0f} s" if duration >= 10 else f"{duration:.1f} s"
    minutes = int(duration // 60)
    if minutes < 60:
        return f"{minutes} min {int(duration % 60)} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def age(since: float) -> str:
    """Return the time since a moment, as `span` does."""
    return span(max(0.0, time.time() - since))


def when(moment: float) -> str:
    """Return a moment in local time, to the second."""
    return datetime.fromtimestamp(moment).astimezone().isoformat(sep=" ", timespec="seconds")


def ratio(value: float | None) -> str:
    """Return a ratio in percent, or a dash for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def print_json(value: Any) -> None:
    """Print records, lists and dicts as one JSON document on one line."""
    print(json.dumps(value, default=asdict), flush=True)


def complain(command: str, error: object, status: int = EXIT_WRONG) -> int:
    """Print an error on stderr and return the exit status."""
    print(f"shmstore {command}: {shown(str(error))}", file=sys.stderr)
    return status


_DIRECTORY = Path("/dev/shm")


def store_argument(text: str) -> str:
    """Return the store's name, also from the path of its file: an argparse type.

    Raises ArgumentTypeError for an existing path outside /dev/shm.
    """
    name = text.removeprefix(f"{_DIRECTORY}/").removeprefix("/")
    if "/" in text and "\0" not in text and not os.path.lexists(_DIRECTORY / name) and os.path.lexists(text):
        raise argparse.ArgumentTypeError(f"{text} is not a store: stores are files of {_DIRECTORY}, see shmstore ls")
    return name


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add the argument NAME."""
    parser.add_argument(
        "name", metavar="NAME", type=store_argument, help="the store's name, as in `shmstore ls`, or its file"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
