"""`shmstore top`: watches stores at work."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, EXIT_WRONG, Command, number_argument, positive_argument
from shmstore.cli.commands.common import (
    add_dir,
    add_json,
    complain,
    counted,
    file_argument,
    hit_ratio,
    one_writer,
    print_json,
    ratio,
    shown,
    size,
    span,
    store_argument,
    tier_line,
    writers,
)
from shmstore.cli.commands.ls import owner
from shmstore.cli.commands.tables import (
    kinds_table,
    make_console,
    make_fitting_table,
    make_picture,
    make_table,
    readers_table,
    save_picture,
    writers_table,
)
from shmstore.errors import ShmStoreError
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import ReaderInfo, SegmentInfo, StoreFacts
from shmstore.inspect.segments import Verdicts, find_segments, look_at
from shmstore.store.stats import MORE_HITS, Counts, KindStats

_RATES = (
    *("puts", "put_bytes", "hits", "remote_hits", "misses", "finds", "find_misses", "evictions", "refusals"),
    *MORE_HITS.values(),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One store at one moment, and the growth of its counts since the previous sample."""

    segment: SegmentInfo
    readers: tuple[ReaderInfo, ...]
    """Its ranks; empty if the store cannot be read."""
    kinds: dict[str, KindStats]
    taken_at: float
    """Seconds of the monotonic clock."""
    per_second: dict[str, float]
    """The counts in `_RATES` per second; zeros in the first sample."""
    recent_hit_ratio: float | None
    """Hit ratio since the previous sample; None if there were no calls, or nobody asks a writer."""
    oldest_lease_seconds: float | None
    """Age of the oldest lease that a rank has not acknowledged."""


def take_sample(info: SegmentInfo, before: Sample | None, allow_uid: int | None = None) -> Sample:
    """Return a sample of a store; `before` is the previous one, and is ignored if it is of another segment."""
    readers: tuple[ReaderInfo, ...] = ()
    kinds: dict[str, KindStats] = {}
    if info.facts is not None:
        # It may just have been removed, as the next sample will find.
        with suppress(ShmStoreError, OSError), StoreInspector.open(info.name, info.dir, allow_uid) as inspector:
            readers, kinds = inspector.readers(), inspector.kinds()
    now = time.monotonic()
    facts = info.facts
    old = before.segment.facts if before and before.segment.inode == info.inode else None
    elapsed = max(now - before.taken_at, 1e-9) if before else 1.0
    per_second = _rates(facts, old, elapsed)
    oldest = max((reader.lag_seconds for reader in readers if reader.lag_seconds is not None), default=None)
    return Sample(info, readers, kinds, now, per_second, _recent_hit_ratio(facts, per_second), oldest)


def _rates(new: Counts | None, old: Counts | None, elapsed: float) -> dict[str, float]:
    if new is None or old is None:
        return dict.fromkeys(_RATES, 0.0)
    return {name: max(0, getattr(new, name) - getattr(old, name)) / elapsed for name in _RATES}


def _recent_hit_ratio(counts: Counts | None, rate: dict[str, float], more: str | None = None) -> float | None:
    """Return the hit ratio of this rate, with the hits that a larger store would have had; None without look-ups."""
    found = rate["hits"] + rate["finds"]
    given = found + rate["puts"]
    if counts is None or not given or not counts.lookups:
        return None
    return (found + (rate[more] if more else 0)) / given


class Watcher:
    """Takes samples of one store or of all stores, and keeps the previous ones."""

    def __init__(self, name: str | None, dir: str | None = None, allow_uid: int | None = None) -> None:
        """Watch the store `name`, or all stores of the folder if it is None; those of user `allow_uid`, too."""
        self._name, self._dir, self._allow_uid = name, dir, allow_uid
        self._before: dict[str, Sample] = {}
        self._verdicts: Verdicts = {}

    def sample(self) -> list[Sample]:
        """Return a sample of each store. Raises StoreNotFoundError if the named store does not exist."""
        given = self._verdicts, self._dir, self._allow_uid
        infos = find_segments(*given) if self._name is None else [look_at(self._name, *given)]
        samples = [take_sample(info, self._before.get(info.name), self._allow_uid) for info in infos]
        self._before = {sample.segment.name: sample for sample in samples}
        return samples

    def wrong(self) -> list[str]:
        """Return the problems of the last samples: one store that cannot be read, or damaged ones of all stores."""
        infos = [sample.segment for sample in self._before.values()]
        return [
            f"{info.name}: {info.problem or info.state}"
            for info in infos
            if info.state == "damaged" or (info.facts is None and self._name is not None)
        ]


# Names of orders, and the value by which each sorts, largest first; equal ones stay as they are.
_Orders = dict[str, Callable[[Any], float]]
_STORE_ORDERS: _Orders = {
    "name": lambda sample: 0,
    "used": lambda sample: sample.segment.facts.used_bytes if sample.segment.facts else 0,
    "puts": lambda sample: sample.per_second["puts"],
    "evictions": lambda sample: sample.per_second["evictions"],
    "refusals": lambda sample: sample.per_second["refusals"],
    "lag": lambda sample: sample.oldest_lease_seconds or 0,
}
_RANK_ORDERS: _Orders = {
    "rank": lambda reader: 0,
    "holds": lambda reader: reader.held_bytes,
    "lag": lambda reader: reader.lag_seconds or 0,
    "gets": lambda reader: reader.gets,
}


def draw_all(console: Console, samples: Sequence[Sample], order: str) -> RenderableType:
    """Return the sorted table of all stores."""
    columns = (
        *("name", "owner", "used", "of", "objects", "readers", "put/s", "B/s", "hit/s", "hit ratio", "evict/s"),
        *("refusal/s", "oldest lease"),
    )
    rows: list[tuple[list[str], str]] = []
    for sample in sorted(samples, key=_STORE_ORDERS[order], reverse=True):
        facts, rate = sample.segment.facts, sample.per_second
        if facts is None:
            other = sample.segment.state == "ok"  # another user's
            what, style = (owner(sample.segment), "dim") if other else (sample.segment.state, "red")
            rows.append(([sample.segment.name, what, *["-"] * (len(columns) - 2)], style))
            continue
        oldest = sample.oldest_lease_seconds
        alive = facts.writers[0].state
        cells = [
            sample.segment.name,
            writers(facts) if len(facts.writers) > 1 or facts.owner_pid else alive,
            size(facts.used_bytes),
            size(facts.capacity),
            str(facts.objects),
            f"{sample.segment.ranks_alive} of {facts.n_readers}",
            f"{rate['puts']:.1f}",
            size(rate["put_bytes"]),
            f"{rate['hits']:.1f}",
            hit_ratio(facts) if sample.recent_hit_ratio is None else ratio(sample.recent_hit_ratio),
            f"{rate['evictions']:.1f}",
            f"{rate['refusals']:.1f}",
            "-" if oldest is None else span(oldest),
        ]
        rows.append((cells, "" if sample.segment.writer_alive else "dim"))
    spare = ("of", "objects", "hit/s", "evict/s", "readers", "hit ratio", "B/s")
    table = make_fitting_table(console, "", columns, rows, left=("name", "owner"), spare=spare)
    return Group(
        table, *(line for sample in samples for line in _tier(sample, f"tier of {shown(sample.segment.name)}"))
    )


def _tier(sample: Sample, title: str) -> list[Text]:
    """Return the line of a store that has a tier; of several writers' tiers the sum."""
    tier = sample.segment.facts and sample.segment.facts.tier
    return [Text(f"{title}: {tier_line(tier)}")] if tier else []


def _bar(facts: StoreFacts, width: int) -> Text:
    full = min(width, round(width * facts.used_bytes / facts.capacity))  # the count is a writer's, so it may be any
    return Text("#" * full, style="green") + Text("-" * (width - full), style="dim")


def draw_one(console: Console, sample: Sample, order: str) -> RenderableType:
    """Return the screen of one store: counts and rates, then a line for each rank, sorted."""
    facts, rate = sample.segment.facts, sample.per_second
    if facts is None:
        problem = sample.segment.problem or "no superblock yet"
        return Text(f"{shown(sample.segment.name)}: {sample.segment.state}, {problem}", style="red")
    owner = one_writer(facts.writers[0])
    if (several := len(facts.writers) > 1) or facts.owner_pid:
        owner = f"writers {writers(facts)}"
    oldest = sample.oldest_lease_seconds
    head = Text(shown(sample.segment.name), style="bold")
    head.append(f"  {owner}, {counted(facts.objects, 'object')}, {counted(facts.open_leases, 'lease')} open, ")
    head.append(f"oldest unread {'-' if oldest is None else span(oldest)}")
    used = Text(f"{size(facts.used_bytes)} of {size(facts.capacity)}  ") + _bar(facts, 40)
    table = make_table(console, "", "", "per second", "total", left=("",))
    remote = (("remote_hits", "remote hits"),) if several else ()
    labels = (("puts", "puts"), ("put_bytes", "bytes put"), ("hits", "hits"), *remote, ("misses", "misses"))
    labels += (("finds", "finds by readers"), ("find_misses", "find misses"))
    for name, label in labels:
        per_second = size if name == "put_bytes" else "{:.1f}".format
        table.add_row(
            label, per_second(rate[name]), size(facts.put_bytes) if name == "put_bytes" else str(getattr(facts, name))
        )
    table.add_row("hit ratio", ratio(sample.recent_hit_ratio), hit_ratio(facts))
    for factor, name in MORE_HITS.items():
        recent = ratio(_recent_hit_ratio(facts, rate, name))
        table.add_row(f"hit ratio at {factor}x capacity", recent, hit_ratio(facts, factor))
    table.add_row("evictions", f"{rate['evictions']:.1f}", str(facts.evictions))
    table.add_row("refusals", f"{rate['refusals']:.1f}", str(facts.refusals))
    ranks = readers_table(console, sorted(sample.readers, key=_RANK_ORDERS[order], reverse=True), "ranks")
    kinds: list[RenderableType] = [Text(), kinds_table(console, sample.kinds)] if sample.kinds else []
    arenas: list[RenderableType] = [Text(), writers_table(console, facts.writers)] if several else []
    return Group(head, used, *_tier(sample, "tier"), Text(), table, *arenas, *kinds, Text(), ranks)


def _draw(console: Console, samples: Sequence[Sample], one: bool, order: str) -> RenderableType:
    return draw_one(console, samples[0], order) if one else draw_all(console, samples, order)


def _live(console: Console, watcher: Watcher, arguments: argparse.Namespace, order: str) -> None:
    one = arguments.name is not None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for _ in itertools.count() if arguments.iterations is None else range(arguments.iterations):
            live.update(_draw(console, watcher.sample(), one, order), refresh=True)
            time.sleep(arguments.interval)


def _plain(console: Console, watcher: Watcher, arguments: argparse.Namespace, order: str) -> None:
    """Print every sample, or only the last one as a picture."""
    rounds = arguments.iterations or (2 if arguments.svg else None)
    for number in itertools.count() if rounds is None else range(rounds):
        if number:
            time.sleep(arguments.interval)
        samples = watcher.sample()
        if arguments.json:
            print_json({"ok": not watcher.wrong(), "stores": samples})
        elif not arguments.svg or number + 1 == rounds:
            console.print(_draw(console, samples, arguments.name is not None, order))
            console.print()
            sys.stdout.flush()
    if arguments.svg:
        save_picture(console, arguments.svg, f"top {arguments.name or ''}".strip())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        type=store_argument,
        nargs="?",
        help="the store to show with its ranks (default: a line for each store)",
    )
    interval = number_argument(float, 0.05, 86400)
    parser.add_argument(
        "--interval", type=interval, default=1.0, metavar="S", help="seconds between samples (default 1)"
    )
    parser.add_argument("--iterations", type=positive_argument, metavar="N", help="number of samples (default: no end)")
    orders = f"largest first: of stores {', '.join(_STORE_ORDERS)}; of the ranks of NAME {', '.join(_RANK_ORDERS)}"
    parser.add_argument("--sort", choices=sorted({*_STORE_ORDERS, *_RANK_ORDERS}), help=orders)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--svg", type=file_argument, metavar="FILE", help="write the last sample as a picture")
    add_json(form)
    add_dir(parser, or_pid=True)


def _run(arguments: argparse.Namespace) -> int:
    orders = _RANK_ORDERS if arguments.name else _STORE_ORDERS
    if arguments.sort not in (None, *orders):
        whose = "the ranks of NAME" if arguments.name else "stores"
        return complain("top", f"--sort must be one of {', '.join(orders)} for {whose}", EXIT_USAGE)
    watcher = Watcher(arguments.name, arguments.dir, arguments.allow_uid)
    console = make_picture() if arguments.svg else make_console()
    order = arguments.sort or next(iter(orders))
    try:
        if console.is_terminal and not (arguments.json or arguments.svg):
            _live(console, watcher, arguments, order)
        else:
            _plain(console, watcher, arguments, order)
    except KeyboardInterrupt:
        pass
    wrong = watcher.wrong()
    for text in wrong:
        complain("top", text)
    return EXIT_WRONG if wrong else EXIT_OK


COMMAND = Command(
    name="top",
    summary="watch one store, or all: rates, hit ratio, evictions, refusals, oldest lease, lag of each rank; exit "
    "status 1: the last sample found a damaged one",
    example="shmstore top mm-cache --interval 0.5",
    add_arguments=_add_arguments,
    run=_run,
)
