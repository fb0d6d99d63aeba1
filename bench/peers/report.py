"""The page of a session's results."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers import COMMON, LIMITS, OURS
from bench.peers.harness import KIB, MIB, Cell, Results
from bench.peers.host import HIT, PUT
from bench.peers.interface import Peer, UnavailableError, load
from bench.peers.plots import SHOWN, draw, plot_of

AHEAD, MOSTLY = 0.95, 0.75
"""A peer is ahead where its median is below this part of shmstore's, and it was faster in this part of the batches."""

TWICE = 2.0
REST = "An object is kept for the next hit, and what a killed reader held is free again."

INTRODUCTION = """\
# Benchmarks

shmstore compared with what people use today for the same work, on the same machine, in one session.
`make peers` writes this page; it takes some minutes.
All its figures are in `build/peers.json` then: percentiles, CPU time, memory, more readers.
`make bench` has the figures of the single operations, and [A full store](full-store.md) those of a store without room.

**One exchange.** A writer has a dict of three tensors, which it has just made.
They are float32, int64 and uint8; the sizes below are of all three together.
The writer puts them where the readers can find them, and sends each reader a message.
Every reader gets the tree as tensors, and reads a byte of every 4 KiB page of every tensor.
Then it drops the tree and acknowledges.
The time is from before the put until the last acknowledgement has come.
The sum of the bytes read is checked each time.
**A hit** is the same for the object of the last exchange, which is where it is already.
A peer that keeps no objects sends it again.

**The same for all.** Writer and readers are spawned processes, a set of them for each peer.
Batches of the peers' exchanges take turns, so that a disturbance of the machine affects all of them.
Only one peer is at work at a time.
All acknowledge over a `multiprocessing.Pipe`.
They also send their messages over it, unless they have a channel of their own (Queue, pyzmq, iceoryx2).
Ray also acknowledges in its own way.
Memory is warm if the peer allows it.

**The bases.** *A plain memcpy* copies the same three tensors once into warm shared memory, and sends no message.
*An empty message* is one byte to each reader and its acknowledgement, over that pipe, with nothing read.
Any way would take at least as much, with one exception.
From 1 MiB on `put` stores past the caches, so that the destination is not read first.
So a large object takes less than the plain copy.
"""


def size_name(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def time_name(seconds: float) -> str:
    """Return a time with two to three digits and a unit."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        if seconds * factor < 1000 or unit == "s":
            value = seconds * factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    raise AssertionError


def ratio_name(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.2g}" if ratio >= 10 else f"{ratio:.2f}"


def sentences(head: str, text: str) -> list[str]:
    """Return an entry of a list, with a line for each sentence."""
    first, *rest = re.split(r"(?<=\.) (?=[A-Z`])", text)
    return [head + first, *(f"  {sentence}" for sentence in rest)]


def is_ahead(cell: Cell, ours: Cell) -> bool:
    """Say whether a peer is faster than shmstore, and not just in a batch that the scheduler was kind to."""
    faster = sum(theirs < mine for theirs, mine in zip(cell.batches, ours.batches, strict=True))
    return cell.median < AHEAD * ours.median and faster >= MOSTLY * len(ours.batches)


def _readers(count: int) -> str:
    return "1 reader" if count == 1 else f"{count} readers"


class Page:
    """The results, looked at by cell."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._cells = {(c.peer, c.nbytes, c.n_readers, c.path): c for c in results.cells}
        self.sizes = sorted({c.nbytes for c in results.cells})
        self.readers = sorted({c.n_readers for c in results.cells})
        self.peers: dict[str, type[Peer]] = {}
        for name in dict.fromkeys(c.peer for c in results.cells):
            self.peers[name] = load(name)

    def cell(self, peer: str, nbytes: int, n_readers: int, path: str) -> Cell | None:
        return self._cells.get((peer, nbytes, n_readers, path))

    def _table(self, path: str, n_readers: int, show: Callable[[Cell], str], names: Sequence[str]) -> list[str]:
        lines = ["| | " + " | ".join(map(size_name, self.sizes)) + " |", "|---|" + "---:|" * len(self.sizes)]
        for name in names:
            row = [self.cell(name, nbytes, n_readers, path) for nbytes in self.sizes]
            title = f"**{self.peers[name].title}**" if name == OURS else self.peers[name].title
            lines.append(f"| {title} | " + " | ".join(show(cell) if cell else "-" for cell in row) + " |")
        return [*lines, ""]

    def ahead(self) -> list[str]:
        """Return where a peer is faster than shmstore, and why."""
        found: dict[str, list[str]] = {}
        for name in self.peers:
            if name in (*LIMITS, OURS):
                continue
            for path in (PUT, HIT):
                for n_readers in self.readers:
                    where = []
                    for nbytes in self.sizes:
                        cell, ours = self.cell(name, nbytes, n_readers, path), self.cell(OURS, nbytes, n_readers, path)
                        if cell and ours and is_ahead(cell, ours):
                            where.append(f"{size_name(nbytes)} {cell.median / ours.median:.2f}")
                    if where:
                        found.setdefault(name, []).append(f"{path}, {_readers(n_readers)} | {', '.join(where)}")
        lines = ["## Where a peer is ahead of shmstore", ""]
        if not found:
            where = f"Nowhere by more than {1 - AHEAD:.0%} of the median in at least {MOSTLY:.0%} of the batches."
            return [*lines, where, ""]
        lines += [
            f"By more than {1 - AHEAD:.0%} of the median, and in at least {MOSTLY:.0%} of the batches, "
            "which took turns.",
            "The figures are the peer's median divided by shmstore's.",
            "",
            "| peer | exchange | ratio by size |",
            "|---|---|---|",
            *(f"| {self.peers[name].title} | {where} |" for name, places in found.items() for where in places),
            "",
        ]
        for name in found:
            lines += sentences(
                f"* **{self.peers[name].title}**: ", self.peers[name].ahead or "The reason is not known."
            )
        return [*lines, ""]

    def pays(self) -> list[str]:
        """Return by size what shmstore saves against the common way, which is to pickle through a pipe."""
        if COMMON not in self.peers:
            return []
        lines = ["## When it pays", "", f"The median of *{self.peers[COMMON].title}* divided by shmstore's:", ""]
        lines += ["| | " + " | ".join(map(size_name, self.sizes)) + " |", "|---|" + "---:|" * len(self.sizes)]
        won = dict.fromkeys(self.sizes, True)
        for path in (PUT, HIT):
            for n in self.readers:
                row = []
                for nbytes in self.sizes:
                    common, ours = self.cell(COMMON, nbytes, n, path), self.cell(OURS, nbytes, n, path)
                    ratio = common.median / ours.median if common and ours else None
                    won[nbytes] &= ratio is not None and ratio >= TWICE
                    row.append(ratio_name(ratio) if ratio else "-")
                lines.append(f"| {path}, {_readers(n)} | " + " | ".join(row) + " |")
        ahead = [at for i, at in enumerate(self.sizes) if all(won[size] for size in self.sizes[i:])]
        if ahead:
            lines += ["", f"From {size_name(ahead[0])} on shmstore takes at most half the time, in every column."]
            if ahead[0] > self.sizes[0]:
                lines += ["Below that its use is not speed.", REST]
        return [*lines, ""]

    def setting(self) -> list[str]:
        results = self._results
        machine = results.machine
        lines = [
            "## Machine and versions",
            "",
            f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['memory']}, "
            f"Linux {machine['kernel']}, Python {machine['python']}.",
            f"Date: {machine['date']}, commit {machine['commit']}.",
            f"Versions: {', '.join(f'{k} {v}' for k, v in results.versions.items())}.",
            "",
        ]
        if int(machine["cores"]) <= max(self.readers):
            lines += [
                f"**{machine['cores']} cores are fewer than the processes at work.**",
                f"With {self.readers[-1]} readers, {self.readers[-1] + 1} processes share them, and the readers of one "
                "object take turns.",
                "This affects all peers, but the figures for several readers say more about the scheduler than those "
                "for one.",
                "Its placement changes small objects' medians by up to a third from one session to the next, in either "
                "direction.",
                "",
            ]
        busy = {name: value for name, value in results.idle_cpu.items() if value > 0.005}
        if busy:
            lines += [
                *(f"Without any exchange, {load(n).title} takes {v:.1%} of a core." for n, v in busy.items()),
                "It goes on while the others are measured.",
                "",
            ]
        return lines

    def missing(self) -> list[str]:
        lines = ["## What could not be measured", ""]
        if not self._results.missing:
            return [*lines, "Nothing: every peer could be installed and ran to the end.", ""]
        for name, why in self._results.missing.items():
            try:
                title = load(name).title
            except UnavailableError:
                title = name
            lines.append(f"* **{title}**: {why}")
        return [*lines, ""]

    def peers_list(self) -> list[str]:
        entries = (sentences(f"* **{peer.title}**: ", peer.how) for peer in self.peers.values())
        return ["## The peers", "", *(line for entry in entries for line in entry), ""]

    def full(self) -> list[str]:
        """Return the tables of one reader, by size."""
        lines: list[str] = []
        n, everyone = self.readers[0], list(self.peers)
        for path, title in ((PUT, "Put"), (HIT, "Hit")):
            lines += [f"## {title}, {_readers(n)}: medians", ""]
            lines += self._table(path, n, lambda c: time_name(c.median), everyone)
        return lines

    def text(self, plots: Sequence[tuple[str, str]]) -> str:
        """Return the whole page, with `plots` as (file, what it shows)."""
        lines = [
            INTRODUCTION,
            *self.setting(),
            *self.missing(),
            *self.pays(),
            *(line for file, shows in plots for line in (f"![{shows}]({file})", "")),
            *self.ahead(),
            *self.peers_list(),
            *self.full(),
        ]
        return "\n".join(lines).rstrip() + "\n"


def write(results: Results, page_file: Path) -> None:
    """Write the page, and its plots next to it."""
    page_file.write_text(Page(results).text([(plot_of(page_file, path).name, shows) for path, shows in SHOWN.items()]))
    draw(page_file)
