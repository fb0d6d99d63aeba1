"""Consoles and tables of the commands that draw."""

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shmstore.cli.commands.common import shown

_PLAIN_WIDTH = 200
_PICTURE_WIDTH = 120
_GAP = 3
"""Maximum width of the space between two columns."""


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
