"""`shmstore top`: stores at work, again and again."""

import argparse
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from shmstore.cli.command import EXIT_OK, EXIT_WRONG, Command, positive_argument
from shmstore.cli.commands.common import (
    add_json,
    complain,
    make_console,
    make_fitting_table,
    make_table,
    print_json,
    ratio,
    reporting,
    shown,
    size,
    span,
    store_argument,
)
from shmstore.cli.commands.dump import readers_table
from shmstore.errors import ShmStoreError
from shmstore.inspect import ReaderInfo, SegmentInfo, StoreFacts, StoreInspector, find_segments, look_at

__all__ = ["COMMAND"]

_RATES = ("puts", "put_bytes", "hits", "misses", "evictions", "refusals")
_ORDERS = {"n": "name", "u": "used", "p": "puts", "e": "evictions", "f": "refusals", "l": "lag"}
_RANK_ORDERS = {"r": "rank", "h": "holds", "l": "lag", "g": "gets"}
_KEYS_OF = {"store": _RANK_ORDERS, "all": _ORDERS}


@dataclass(frozen=True, slots=True)
class Sample:
    """One store at one moment, and how fast its counts grew since the sample before."""

    name: str
    """The store's name."""
    info: SegmentInfo
    """Its file and superblock."""
    readers: tuple[ReaderInfo, ...]
    """Its ranks; empty where it cannot be read."""
    taken_at: float
    """By the monotonic clock, in seconds."""
    per_second: dict[str, float]
    """Puts, put_bytes, hits, misses, evictions and refusals a second; zeros in the first sample."""
    recent_hit_ratio: float | None
    """Of the calls since the sample before; None where there was none."""

    @property
    def oldest_lease_seconds(self) -> float | None:
        """Age of the oldest lease that some rank has not acknowledged."""
        return max((r.lag_seconds for r in self.readers if r.lag_seconds is not None), default=None)


def take_sample(info: SegmentInfo, before: Sample | None) -> Sample:
    """Look at a store now; `before` is the sample to compare with, of the same segment or ignored."""
    readers: tuple[ReaderInfo, ...] = ()
    if info.facts is not None:
        try:
            with StoreInspector.open(info.name) as inspector:
                readers = inspector.readers()
        except (ShmStoreError, OSError):  # removed in this moment; the next sample knows
            readers = ()
    now = time.monotonic()
    per_second = dict.fromkeys(_RATES, 0.0)
    recent = None
    old = before.info.facts if before and before.info.inode == info.inode else None
    if before and old and info.facts:
        elapsed = max(now - before.taken_at, 1e-9)
        grown = {name: max(0, getattr(info.facts, name) - getattr(old, name)) for name in _RATES}
        per_second = {name: grown[name] / elapsed for name in _RATES}
        given = grown["hits"] + grown["puts"]
        recent = grown["hits"] / given if given else None
    return Sample(info.name, info, readers, now, per_second, recent)


class Watcher:
    """Takes samples of one store or of all, and remembers the ones before."""

    def __init__(self, name: str | None) -> None:
        """Watch the store `name`; None watches all."""
        self._name = name
        self._before: dict[str, Sample] = {}

    def sample(self) -> list[Sample]:
        """Return a sample of each store; raises StoreNotFoundError where the named one is not there."""
        infos = find_segments() if self._name is None else [look_at(self._name)]
        samples = [take_sample(info, self._before.get(info.name)) for info in infos]
        self._before = {sample.name: sample for sample in samples}
        return samples

    def wrong(self) -> list[str]:
        """Return what the last look found wrong: its store cannot be read, as for `dump`; or one of all is damaged."""
        infos = [sample.info for sample in self._before.values() if sample.info.facts is None]
        return [
            f"{info.name}: {info.problem or info.state}"
            for info in infos
            if self._name is not None or info.state == "damaged"
        ]


def _sorted_samples(samples: list[Sample], order: str) -> list[Sample]:
    def value(sample: Sample) -> Any:
        if order == "used":
            return -(sample.info.facts.used_bytes if sample.info.facts else 0)
        if order == "lag":
            return -(sample.oldest_lease_seconds or 0.0)
        return -sample.per_second[order] if order in sample.per_second else 0

    return sorted(samples, key=lambda sample: (value(sample), sample.name))


def _sorted_readers(readers: tuple[ReaderInfo, ...], order: str) -> list[ReaderInfo]:
    def value(reader: ReaderInfo) -> float:
        values = {"holds": reader.held_bytes, "lag": reader.lag_seconds or 0.0, "gets": reader.gets}
        return -values.get(order, 0)

    return sorted(readers, key=lambda reader: (value(reader), reader.rank))


def draw_all(console: Console, samples: list[Sample], order: str) -> RenderableType:
    """Return the table of all stores, sorted."""
    columns = (
        *("name", "owner", "used", "of", "objects", "readers", "put/s", "B/s", "hit/s", "hit ratio", "evict/s"),
        *("fallback/s", "oldest lease"),
    )
    rows: list[tuple[list[str], str]] = []
    for sample in _sorted_samples(samples, order):
        facts, rate = sample.info.facts, sample.per_second
        if facts is None:
            rows.append(([sample.name, sample.info.state, *["-"] * (len(columns) - 2)], "red"))
            continue
        oldest = sample.oldest_lease_seconds
        cells = [
            sample.name,
            "alive" if sample.info.writer_alive else "dead",
            size(facts.used_bytes),
            size(facts.capacity),
            str(facts.objects),
            f"{sample.info.ranks_alive} of {facts.n_readers}",
            f"{rate['puts']:.1f}",
            size(rate["put_bytes"]),
            f"{rate['hits']:.1f}",
            ratio(facts.hit_ratio if sample.recent_hit_ratio is None else sample.recent_hit_ratio),
            f"{rate['evictions']:.1f}",
            f"{rate['refusals']:.1f}",
            "-" if oldest is None else span(oldest),
        ]
        rows.append((cells, "" if sample.info.writer_alive else "dim"))
    spare = ("of", "objects", "hit/s", "evict/s", "readers", "hit ratio", "B/s")
    return make_fitting_table(console, "", columns, rows, left=("name", "owner"), spare=spare)


def _bar(facts: StoreFacts, width: int) -> Text:
    full = round(width * facts.used_bytes / facts.capacity)
    return Text("#" * full, style="green") + Text("-" * (width - full), style="dim")


def draw_one(console: Console, sample: Sample, order: str) -> RenderableType:
    """Return the screen of one store: counts and rates, then a line a rank, sorted."""
    facts, rate = sample.info.facts, sample.per_second
    if facts is None:
        return Text(
            f"{shown(sample.name)}: {sample.info.state}, {sample.info.problem or 'no superblock yet'}", style="red"
        )
    owner = "alive" if sample.info.writer_alive else "DEAD"
    oldest = sample.oldest_lease_seconds
    head = Text(shown(sample.name), style="bold")
    head.append(f"  writer {facts.writer_pid} {owner}, {facts.objects} objects, {facts.open_leases} leases open, ")
    head.append(f"oldest unread {'-' if oldest is None else span(oldest)}")
    used = Text(f"{size(facts.used_bytes)} of {size(facts.capacity)}  ") + _bar(facts, 40)
    table = make_table(console, "", "", "a second", "in all", left=("",))
    for name, label in (("puts", "puts"), ("put_bytes", "bytes put"), ("hits", "hits"), ("misses", "misses")):
        per_second = size if name == "put_bytes" else "{:.1f}".format
        table.add_row(
            label, per_second(rate[name]), size(facts.put_bytes) if name == "put_bytes" else str(getattr(facts, name))
        )
    table.add_row("hit ratio", ratio(sample.recent_hit_ratio), ratio(facts.hit_ratio))
    table.add_row("evictions", f"{rate['evictions']:.1f}", str(facts.evictions))
    table.add_row("fallbacks (refusals)", f"{rate['refusals']:.1f}", str(facts.refusals))
    ranks = readers_table(console, _sorted_readers(sample.readers, order), "ranks")
    return Group(head, used, Text(), table, Text(), ranks)


def _as_json(sample: Sample) -> dict[str, Any]:
    return {
        "segment": sample.info,
        "readers": sample.readers,
        "per_second": sample.per_second,
        "recent_hit_ratio": sample.recent_hit_ratio,
        "oldest_lease_seconds": sample.oldest_lease_seconds,
    }


def _draw(console: Console, samples: list[Sample], one: bool, order: str) -> RenderableType:
    return draw_one(console, samples[0], order) if one else draw_all(console, samples, order)


@contextmanager
def _keys() -> Iterator[int]:
    """Yield stdin's descriptor, set to give keys as they are pressed, unseen."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(fd: int, seconds: float) -> str:
    """Wait for a key, at most so long; returns "" where none came, "q" at the end of the input."""
    ready, _, _ = select.select([fd], [], [], seconds)
    return (os.read(fd, 1).decode("ascii", "ignore") or "q") if ready else ""


def _live(console: Console, watcher: Watcher, arguments: argparse.Namespace) -> None:
    one = arguments.name is not None
    orders = _KEYS_OF["store" if one else "all"]
    order = arguments.sort or next(iter(orders.values()))
    footer = Text("  ".join([*(f"{key} {name}" for key, name in orders.items()), "q leave"]), style="dim")
    left = arguments.iterations
    with _keys() as fd, Live(console=console, screen=True, auto_refresh=False) as live:
        while left is None or left > 0:
            samples = watcher.sample()
            deadline = time.monotonic() + arguments.interval
            key = ""
            while True:
                note = Text(f"sorted by {order}   ", style="dim") + footer
                live.update(Group(_draw(console, samples, one, order), Text(), note), refresh=True)
                key = _pressed(fd, max(0.0, deadline - time.monotonic()))
                if key in ("", "q"):
                    break
                order = orders.get(key, order)
            if key == "q":
                return
            left = None if left is None else left - 1


def _plain(console: Console, watcher: Watcher, arguments: argparse.Namespace) -> None:
    one = arguments.name is not None
    order = arguments.sort or ("rank" if one else "name")
    left = arguments.iterations
    while True:
        samples = watcher.sample()
        if arguments.json:
            print_json({"ok": not watcher.wrong(), "stores": [_as_json(sample) for sample in samples]})
        else:
            console.print(_draw(console, samples, one, order))
            console.print()
            sys.stdout.flush()
        left = None if left is None else left - 1
        if left == 0:
            return
        time.sleep(arguments.interval)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"not a number of seconds from 0.05 on: {text!r}")
    return seconds


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        type=store_argument,
        nargs="?",
        help="this store with its ranks (default: a line each of all)",
    )
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between looks (default 1)"
    )
    parser.add_argument("--iterations", type=positive_argument, metavar="N", help="looks, then end (default: no end)")
    choices = sorted({*_ORDERS.values(), *_RANK_ORDERS.values()})
    parser.add_argument("--sort", choices=choices, help="order to begin with; on a terminal keys change it")
    parser.add_argument("--svg", metavar="FILE", help="write the last look as a picture; not live")
    add_json(parser)


def _picture(watcher: Watcher, arguments: argparse.Namespace) -> None:
    console = Console(record=True, width=120, file=open(os.devnull, "w"), force_terminal=True, highlight=False)  # noqa: SIM115
    with console.file:
        samples = watcher.sample()
        for _ in range((arguments.iterations or 2) - 1):
            time.sleep(arguments.interval)
            samples = watcher.sample()
        one = arguments.name is not None
        console.print(_draw(console, samples, one, arguments.sort or ("rank" if one else "name")))
        console.save_svg(arguments.svg, title=f"shmstore top {shown(arguments.name or '')}".strip())
    print(arguments.svg)


def _run(arguments: argparse.Namespace) -> int:
    watcher = Watcher(arguments.name)
    console = make_console()
    try:
        if arguments.svg:
            _picture(watcher, arguments)
        elif console.is_terminal and sys.stdin.isatty() and not arguments.json:
            _live(console, watcher, arguments)
        else:
            _plain(console, watcher, arguments)
    except KeyboardInterrupt:
        pass
    wrong = watcher.wrong()
    for text in wrong:
        complain("top", text)
    return EXIT_WRONG if wrong else EXIT_OK


COMMAND = Command(
    name="top",
    summary="watch one store, or all: rates, hit ratio, evictions, fallbacks, oldest lease, lag of each rank; exit "
    "status 1: the last look found a damaged one",
    example="shmstore top mm-cache --interval 0.5",
    add_arguments=_add_arguments,
    run=reporting("top", _run),
)
