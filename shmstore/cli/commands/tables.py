"""Consoles of the commands that draw, and the tables that several of them show."""

import io
import re
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shmstore.cli.commands.common import hit_ratio, new_file, shown, size, span
from shmstore.inspect.records import ReaderInfo, WriterInfo
from shmstore.store.stats import KindStats

_PLAIN_WIDTH = 200
_PICTURE_WIDTH = 120
_IDLE = 8
"""Ranks without a process that get a line each."""
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
    drawn = picture.export_svg(title=f"shmstore {shown(title)}")
    # Without rich's two fonts, which a browser would fetch from the network. Any monospaced font fits.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, count=2, flags=re.DOTALL)
    with new_file(file) as out:
        out.write(drawn.encode())
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


def _state(reader: ReaderInfo) -> str:
    return f"{reader.state}, retired" if reader.retired and reader.state != "retired" else reader.state


def _pins(reader: ReaderInfo) -> str:
    return f"{reader.pins} ({reader.pins_left} left)" if reader.pins_left else str(reader.pins)


_READER_COLUMNS: dict[str, Callable[[ReaderInfo], str]] = {
    "rank": lambda reader: str(reader.rank),
    "group": lambda reader: str(reader.group),
    "process": lambda reader: "-" if reader.pid is None else str(reader.pid),
    "state": _state,
    "holds": lambda reader: size(reader.held_bytes),
    "pins": _pins,
    "pinned": lambda reader: size(reader.pinned_bytes),
    "unacknowledged": lambda reader: str(reader.unacknowledged),
    "leased": lambda reader: size(reader.unacknowledged_bytes),
    "lag": lambda reader: "-" if reader.lag_seconds is None else span(reader.lag_seconds),
    "gets": lambda reader: str(reader.gets),
    "stale": lambda reader: str(reader.stale),
    "finds": lambda reader: str(reader.finds),
}
_READER_STYLES = {"dead": "red", "awaited": "yellow"}


def readers_table(
    console: Console, readers: Sequence[ReaderInfo], title: str = "readers", *, everything: bool = False
) -> Table:
    """Return the table of the ranks; if many were never attached, and nothing waits for them, only how many."""
    used = [reader for reader in readers if reader.attachments or reader.unacknowledged]
    if (idle := len(readers) - len(used)) > _IDLE and not everything:
        readers, title = used, f"{title}; no process was ever one of the other {idle}, and no lease waits for them"
    names = [name for name in _READER_COLUMNS if name != "group" or any(reader.group for reader in readers)]
    rows = [
        ([_READER_COLUMNS[name](reader) for name in names], _READER_STYLES.get(reader.state, "")) for reader in readers
    ]
    spare = ("stale", "finds", "gets", "pinned", "leased")
    return make_fitting_table(console, title, names, rows, left=("state",), spare=spare)


_WRITER_COLUMNS: dict[str, Callable[[WriterInfo], str]] = {
    "writer": lambda writer: str(writer.index),
    "process": lambda writer: "-" if writer.pid is None else str(writer.pid),
    "state": lambda writer: writer.state,
    "used": lambda writer: size(writer.used_bytes),
    "of": lambda writer: size(writer.capacity),
    "objects": lambda writer: str(writer.objects),
    "leases": lambda writer: str(writer.open_leases),
    "puts": lambda writer: str(writer.puts),
    "hits": lambda writer: str(writer.hits),
    "remote": lambda writer: str(writer.remote_hits),
    "hit ratio": lambda writer: hit_ratio(writer),
    "evictions": lambda writer: str(writer.evictions),
    "refusals": lambda writer: str(writer.refusals),
    "recoveries": lambda writer: str(writer.recoveries),
}


def writers_table(console: Console, writers: Sequence[WriterInfo]) -> Table:
    """Return the table of the writers."""
    rows = [
        ([column(writer) for column in _WRITER_COLUMNS.values()], "" if writer.state == "alive" else "dim")
        for writer in writers
    ]
    spare = ("of", "recoveries", "refusals", "evictions", "hit ratio")
    return make_fitting_table(console, "writers", list(_WRITER_COLUMNS), rows, left=("state",), spare=spare)


def kinds_table(console: Console, kinds: Mapping[str, KindStats]) -> Table:
    """Return the table of the kinds of objects."""
    table = make_table(console, "kinds", "kind", "objects", "bytes", "quota", left=("kind",))
    for kind, has in kinds.items():
        quota = "-" if has.quota is None else f"{size(has.quota)} ({100 * has.bytes / has.quota:.0f} % used)"
        table.add_row(cell(kind), str(has.objects), size(has.bytes), quota)
    return table
