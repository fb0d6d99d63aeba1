"""`shmstore dump`: everything in one store, and who holds it."""

import argparse
import io
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from rich.tree import Tree

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, Command
from shmstore.cli.commands.common import (
    add_json,
    add_name,
    age,
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
    when,
)
from shmstore.inspect import (
    ReaderInfo,
    SlotInfo,
    StoreFacts,
    StoreInspector,
    StoreSnapshot,
    TreeNode,
    load_tensor,
    parse_tree,
    ring_map,
)
from shmstore.inspect.ring import LEGEND, mark_of

__all__ = ["COMMAND", "draw_ring", "draw_snapshot", "readers_table"]

_ROWS = 20
_RING_ROWS = 8
_SVG_WIDTH = 120
_STYLES = {"o": "green", "w": "yellow", "x": "dim green", ".": "dim", "!": "bold white on red"}


def _style(mark: str) -> str:
    """Return the colour of a mark of the ring: pinned on red, leased on blue."""
    if mark in _STYLES:
        return _STYLES[mark]
    return "bold white on red" if mark.isdigit() or mark == "P" else "bold white on blue"


def draw_ring(console: Console, snapshot: StoreSnapshot) -> None:
    """Print the map of the ring with its legend."""
    width = max(16, min(console.width, 120) - 12)
    ring = ring_map(snapshot, width * _RING_ROWS)
    console.print(f"[bold]ring[/]  {size(snapshot.facts.capacity)}, {size(ring.cell_bytes)} a cell")
    for row in range(0, len(ring.cells), width):
        if row <= ring.hand < row + width:
            console.print(Text(" " * (12 + ring.hand - row) + "v", style="bold"))
        line = Text(f"{size(row * ring.cell_bytes):>10}  ")
        for mark, run in groupby(ring.cells[row : row + width]):
            line.append("".join(run), style=_style(mark))
        console.print(line, no_wrap=True, crop=True)
    legend = Text("  ")
    for mark, meaning in LEGEND:
        first = mark[0] if len(mark) > 1 else mark
        legend.append(mark, style="bold" if mark == "v" else _style(first))
        legend.append(f" {meaning}   ")
    console.print(legend, soft_wrap=not console.is_terminal)
    console.print()


def _state(reader: ReaderInfo) -> str:
    return f"{reader.state}, retired" if reader.retired and reader.state != "retired" else reader.state


def readers_table(
    console: Console, readers: "tuple[ReaderInfo, ...] | list[ReaderInfo]", title: str = "readers"
) -> Any:
    """Return the table of the ranks."""
    columns = (
        "rank",
        "process",
        "state",
        "holds",
        "pins",
        "pinned",
        "unacknowledged",
        "leased",
        "lag",
        "gets",
        "stale",
    )
    rows = [
        (
            (
                str(reader.rank),
                "-" if reader.pid is None else str(reader.pid),
                _state(reader),
                size(reader.held_bytes),
                f"{reader.pins} ({reader.pins_left} left)" if reader.pins_left else str(reader.pins),
                size(reader.pinned_bytes),
                str(reader.unacknowledged),
                size(reader.unacknowledged_bytes),
                "-" if reader.lag_seconds is None else span(reader.lag_seconds),
                str(reader.gets),
                str(reader.stale),
            ),
            "red" if reader.state == "dead" else "yellow" if reader.state == "awaited" else "",
        )
        for reader in readers
    ]
    spare = ("stale", "gets", "pinned", "leased")
    return make_fitting_table(console, title, columns, rows, left=("state",), spare=spare)


def _by_use(snapshot: StoreSnapshot) -> list[tuple[str, int, int]]:
    """Return (what, objects, bytes) of the ring by who keeps it, held first; together they are the capacity."""
    groups = {"pinned": [0, 0], "leased": [0, 0], "being written": [0, 0], "held by nobody": [0, 0], "deleted": [0, 0]}
    for slot in snapshot.slots:
        mark = mark_of(slot)
        name = {"w": "being written", "o": "held by nobody", "x": "deleted"}.get(mark)
        name = name or ("pinned" if slot.pinned_by else "leased")
        groups[name][0] += 1
        groups[name][1] += slot.span
    taken = sum(nbytes for _, nbytes in groups.values())
    return [
        *((name, n, nbytes) for name, (n, nbytes) in groups.items() if n),
        ("free", 0, snapshot.facts.capacity - taken),
    ]


def _facts(console: Console, name: str, facts: StoreFacts) -> None:
    state = "alive" if facts.writer_alive else "DEAD"
    style = "green" if facts.writer_alive else "red"
    console.print(
        f"[bold]{escape(shown(name))}[/]  store {facts.store_id:08x}, "
        f"created {when(facts.created_at)}, {age(facts.created_at)} ago"
    )
    console.print(
        f"  writer {facts.writer_pid} [{style}]{state}[/], {facts.recoveries} recoveries; "
        f"options: {', '.join(facts.options) or 'none'}"
    )
    console.print(
        f"  {size(facts.used_bytes)} of {size(facts.capacity)} used by {facts.objects} objects "
        f"(slots: {facts.max_objects}); "
        f"{facts.open_leases} leases open (entries: {facts.max_leases}); {facts.n_readers} ranks expected"
    )
    console.print(
        f"  {facts.puts} puts, {facts.hits} hits, {facts.misses} misses (hit ratio {ratio(facts.hit_ratio)}), "
        f"{facts.evictions} evictions, {facts.deletes} deletes, {facts.refusals} refusals, {facts.cancels} cancels; "
        f"next id {facts.next_id}, next lease {facts.next_lease}"
    )
    console.print()


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) or "-"


def _flags(slot: SlotInfo) -> str:
    words = [slot.state, *(["deleted"] if slot.deleted else []), *(["moving"] if slot.moving else [])]
    return " ".join(words if slot.bounded or slot.moving else [*words, "OUT OF BOUNDS"])


def _slots_table(console: Console, slots: list[SlotInfo], total: int) -> Any:
    title = (
        "objects"
        if len(slots) == total
        else f"objects, the {len(slots)} held first or largest of {total} (--all: every one)"
    )
    columns = ("slot", "id", "offset", "bytes", "age", "pinned by", "leased to", "state", "key")
    rows = [
        (
            (
                str(slot.slot),
                str(slot.object_id),
                str(slot.offset),
                str(slot.length),
                "-" if slot.stored_at is None else age(slot.stored_at),
                _ranks(slot.pinned_by),
                _ranks(slot.leased_to),
                _flags(slot),
                Text(_short_key(slot.key)),
            ),
            "",
        )
        for slot in slots
    ]
    return make_fitting_table(console, title, columns, rows, left=("state", "key"), spare=("slot", "offset", "age"))


def _short_key(key: str | None) -> str:
    if key is None:
        return "?"
    text = shown(key)
    return text if len(text) <= 40 else text[:37] + "..."


def draw_snapshot(console: Console, snapshot: StoreSnapshot, everything: bool = False) -> None:
    """Print a store: superblock, ring, who holds it, readers, objects, leases."""
    _facts(console, snapshot.name, snapshot.facts)
    draw_ring(console, snapshot)
    table = make_table(console, "memory", "what", "objects", "bytes", "share", left=("what",))
    for what, count, nbytes in _by_use(snapshot):
        table.add_row(
            what, str(count) if what != "free" else "", size(nbytes), f"{100 * nbytes / snapshot.facts.capacity:.1f} %"
        )
    console.print(table)
    console.print()
    console.print(readers_table(console, snapshot.readers))
    console.print()
    slots, leases = list(snapshot.slots), list(snapshot.leases)
    if not everything and len(slots) > _ROWS:
        slots = sorted(slots, key=lambda s: (not (s.pinned_by or s.leased_to), -s.span))[:_ROWS]
    console.print(_slots_table(console, slots, len(snapshot.slots)))
    console.print()
    unread = [lease for lease in leases if lease.waiting_for]
    listed = leases if everything else unread[:_ROWS]
    table = make_table(
        console,
        "unread leases" if not everything else "leases",
        "lease",
        "entry",
        "slot",
        "object",
        "age",
        "waiting for",
        left=("waiting for",),
    )
    for lease in listed:
        waiting = _ranks(lease.waiting_for) if lease.waiting_for else "nobody (over)"
        table.add_row(
            str(lease.number), str(lease.entry), str(lease.slot), str(lease.object_id), span(lease.age_seconds), waiting
        )
    console.print(table)
    if not everything:
        over = len(leases) - len(unread)
        older = (
            f"the {len(listed)} oldest of {len(unread)} unread (--all: every one)" if len(listed) < len(unread) else ""
        )
        closed = f"{over} more are over, which the writer has not looked at yet" if over else ""
        console.print("; ".join(note for note in (older, closed) if note), style="dim")


def _draw_node(tree: Tree, node: TreeNode) -> None:
    label = Text("" if node.path == "." else shown(node.path.rpartition("/")[2]) + ": ", style="bold")
    if node.shape is not None:
        label.append(f"{node.kind} {shown(node.text)} {tuple(node.shape)}", style="cyan")
        label.append(f"  {size(node.nbytes)}", style="dim")
        if node.path != ".":
            label.append(f"  {shown(node.path)}", style="dim")
    elif node.kind == "value":
        label.append(node.text, style="green")
    else:
        label.append(f"{shown(node.kind)} of {len(node.children)}", style="magenta")
    branch = tree.add(label)
    for child in node.children:
        _draw_node(branch, child)


def _node_json(node: TreeNode) -> dict[str, Any]:
    return {
        "path": node.path,
        "kind": node.kind,
        "text": node.text,
        "shape": node.shape,
        "offset": node.offset,
        "nbytes": node.nbytes,
        "children": [_node_json(child) for child in node.children],
    }


def _one_object(console: Console, slot: SlotInfo, tree: TreeNode) -> None:
    console.print(
        f"[bold]object {slot.object_id}[/]  key {escape(_short_key(slot.key))}, slot {slot.slot}, offset {slot.offset}"
    )
    crc = "none" if slot.crc is None else f"{slot.crc:08x}"
    stored = "" if slot.stored_at is None else f", stored {when(slot.stored_at)}"
    console.print(
        f"  {_flags(slot)}; payload {size(slot.payload_bytes)}, metadata {slot.meta_len} B, checksum {crc}{stored}"
    )
    console.print(f"  pinned by {_ranks(slot.pinned_by)}; leased to {_ranks(slot.leased_to)}")
    root = Tree("", hide_root=True)
    _draw_node(root, tree)
    console.print(root)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--key", metavar="K", help="only the object of this key, with its tree of shapes and dtypes")
    which.add_argument("--object", type=int, metavar="ID", help="only the object of this id, likewise")
    parser.add_argument("--tensor", metavar="PATH", help="of that object: copy this tensor out, as its tree names it")
    parser.add_argument("--out", type=Path, metavar="FILE.npy", help="where to; with --tensor")
    parser.add_argument("--all", action="store_true", help="every object and lease, not only the first of them")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the screen as a picture, for a ticket")
    add_json(parser)


def _dump_object(arguments: argparse.Namespace, inspector: StoreInspector, console: Console) -> None:
    slot = inspector.find(key=arguments.key, object_id=arguments.object)
    if arguments.tensor is not None:
        array = load_tensor(inspector, slot, arguments.tensor)
        with open(arguments.out, "wb") as file:  # np.save would add a suffix of its own
            np.save(file, array, allow_pickle=False)
        if arguments.json:
            print_json({"ok": True, "file": str(arguments.out), "shape": array.shape, "dtype": str(array.dtype)})
        else:
            print(f"{arguments.out}: {array.dtype} {array.shape}, object {slot.object_id}")
        return
    tree = parse_tree(inspector.metadata(slot), slot.payload_bytes)
    if arguments.json:
        print_json({"ok": True, "object": slot, "tree": _node_json(tree)})
    else:
        _one_object(console, slot, tree)


def _run(arguments: argparse.Namespace) -> int:
    one = arguments.key is not None or arguments.object is not None
    if (arguments.tensor is None) != (arguments.out is None) or (arguments.tensor is not None and not one):
        return complain("dump", "--tensor and --out go together, with --key or --object", EXIT_USAGE)
    if arguments.svg and arguments.json:
        return complain("dump", "--svg and --json are two answers; ask for one", EXIT_USAGE)
    drawing = arguments.svg is not None
    console = (
        Console(record=True, width=_SVG_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
        if drawing
        else make_console()
    )
    with StoreInspector.open(arguments.name) as inspector:
        if one:
            _dump_object(arguments, inspector, console)
        else:
            snapshot = inspector.snapshot()
            if arguments.json:
                print_json({"ok": True, "snapshot": snapshot})
            else:
                draw_snapshot(console, snapshot, arguments.all)
    if drawing:
        console.save_svg(str(arguments.svg), title=f"shmstore dump {shown(arguments.name)}")
        print(arguments.svg)
    return EXIT_OK


COMMAND = Command(
    name="dump",
    summary="show a store: superblock, the ring and who holds it, readers, objects, leases; or one object's tree",
    example="shmstore dump mm-cache --object 17 --tensor pixel_values --out pixels.npy",
    add_arguments=_add_arguments,
    run=reporting("dump", _run),
)
