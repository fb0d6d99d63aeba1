"""Helpers of the commands: readable numbers, JSON, and errors in one line. Each of them loads in no time."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, BinaryIO

from shmstore.cli.command import EXIT_WRONG, number_argument
from shmstore.files import classify
from shmstore.places import DIRECTORY, VARIABLE, descriptors_of, place_of

if TYPE_CHECKING:
    from shmstore.inspect.records import StoreFacts, WriterInfo
    from shmstore.store.stats import Counts, TierStats

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown(text: str) -> str:
    """Return `text` with characters that are not printable in ASCII form.

    Other processes choose the names of files, keys and types, so these may contain escape sequences.
    """
    return text if text.isprintable() else repr(text)[1:-1]


def size(count: float) -> str:
    """Return a number of bytes as "1.5 MiB"."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def size_argument(text: str) -> int:
    """Return the bytes that a text such as "64M" says; an argparse type."""
    from shmstore.store.arguments import size_of  # not before it is needed: it takes long

    try:
        return size_of("a size", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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


def hit_ratio(counts: "Counts", factor: float = 1) -> str:
    """Return the hit ratio so far, or with so many times the capacity; a dash if nobody ever asked for a key."""
    if not counts.lookups:
        return ratio(None)
    return ratio(counts.hit_ratio if factor == 1 else counts.hit_ratio_at(factor))


def one_writer(info: "WriterInfo") -> str:
    """Return the process of a writer, and whether it is alive; no process if it has closed."""
    state = "DEAD" if info.state == "dead" else info.state
    return f"writer {state}" if info.pid is None else f"writer {info.pid} {state}"


def writers(facts: "StoreFacts") -> str:
    """Return whether the writers of a store are alive: of one, also its process; and the owner without an arena.

    Several are "closed" if each that there was has closed.
    """
    states = [info.state for info in facts.writers]
    said = f"{states.count('alive')} of {len(states)} alive"
    if len(states) == 1:
        said = states[0] if (pid := facts.writers[0].pid) is None else f"{states[0]} {pid}"
    elif {*states} - {"free"} == {"closed"}:
        said = "closed"
    return said if facts.owner_pid is None else f"{said}, owner {facts.owner_pid}"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 hit", "2 hits"; `many` is the plural if it has more than an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def tier_line(tier: "TierStats") -> str:
    """Return the figures of a tier in one line."""
    return (
        f"{counted(tier.hits, 'hit')} ({size(tier.hit_bytes)}), {counted(tier.misses, 'miss', 'misses')}, "
        f"{tier.declined} declined, {tier.damaged} damaged, {span(tier.saved_seconds)} saved; "
        f"{tier.published} published ({size(tier.published_bytes)}), {tier.queued} queued, {tier.dropped} dropped, "
        f"{tier.refused} refused; {counted(tier.errors, 'error')}, {tier.skipped} skipped"
        f"{'; circuit open' if tier.open else ''}"
    )


def print_json(value: Any) -> None:
    """Print records, lists and dicts as one JSON document on one line."""
    print(json.dumps(value, default=asdict), flush=True)


def complain(command: str, error: object, status: int = EXIT_WRONG) -> int:
    """Print an error on stderr and return the exit status."""
    print(f"shmstore {command}: {shown(str(error))}", file=sys.stderr)
    return status


TIER_VARIABLE = "SHMSTORE_TIER"
"""The environment variable with the URL of a tier, whose password `ps` would show on a command line."""
NO_TIER = f"the URL of the tier is missing: pass it, or set {TIER_VARIABLE}, which keeps a password out of `ps`"


def tier_url(given: str | None) -> str | None:
    """Return the URL of the command line, else that of the environment, None without both."""
    return given or os.environ.get(TIER_VARIABLE) or None


def store_argument(text: str) -> str:
    """Return the store's name, or the path of its file, from the root on: an argparse type."""
    return os.path.abspath(text) if "/" in text[1:] else text.removeprefix("/")


def _descriptors(pid: str) -> str:
    """Return the folder of a process's descriptors: an argparse type."""
    folder = descriptors_of(pid)
    if not (pid.isdecimal() and os.access(folder, os.R_OK)):
        raise argparse.ArgumentTypeError(f"{pid!r} is not the number of a process that this user may look into")
    return folder


def add_name(parser: argparse.ArgumentParser, instead: str | None = None) -> None:
    """Add the argument NAME, and `--host` if the command can do that, which `instead` describes, in the place of it."""
    what = "the store's name, as in `shmstore ls`, or its file; the file of a name that starts with a dash"
    if instead is None:
        parser.add_argument("name", metavar="NAME", type=store_argument, help=what)
    else:
        one = parser.add_mutually_exclusive_group(required=True)
        one.add_argument("name", metavar="NAME", type=store_argument, nargs="?", help=what)
        one.add_argument("--host", action="store_true", help=instead)
    add_dir(parser, or_pid=True)


def add_dir(parser: argparse.ArgumentParser, or_pid: bool = False) -> None:
    """Add `--dir`, and for commands that only look `--pid`: the folder of a process's descriptors."""
    places = parser.add_mutually_exclusive_group()
    places.add_argument(
        "--dir", metavar="DIR", help=f"the folder of the stores (default: {VARIABLE}, without it {DIRECTORY})"
    )
    if or_pid:
        what = "look at the stores without a name (memfd=True) that this process has open; `ls` says their numbers"
        places.add_argument("--pid", metavar="PID", dest="dir", type=_descriptors, help=what)
        trusted = "look into the stores of this user, too, who can end the command by cutting a file short"
        parser.add_argument("--allow-uid", metavar="UID", type=number_argument(int, 0, 2**32 - 2), help=trusted)


def file_argument(text: str) -> str:
    """Return the path of a file to write, which `new_file` takes: an argparse type."""
    if not text:
        raise argparse.ArgumentTypeError("must be the path of a file, and is empty")
    return text


@contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of the one at `path` when the block ends; what is not a file is written itself.

    The old file is not changed, since a process may have mapped it; the new one has its mode. ValueError if it is a
    store; an OSError has `path`.
    """
    target, old = os.path.realpath(path), os.path.isfile(path)
    special = os.path.exists(path) and not old
    if old and classify(place_of(target)).state not in ("foreign", "blank", "unreadable"):
        raise ValueError(f"{path} is a store (hint: pass the path of another file, or of none)")
    file = path if special else os.path.join(os.path.dirname(target), f".shmstore.{os.urandom(4).hex()}")
    try:
        with open(file, "wb" if special else "xb") as out:
            if old:  # which may be for nobody else
                os.fchmod(out.fileno(), os.stat(target).st_mode & 0o777)
            yield out
        if not special:
            os.replace(file, target)
    except BaseException as error:
        if not special:
            with suppress(OSError):
                os.unlink(file)
        if isinstance(error, OSError):
            error.filename = path
        raise


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
