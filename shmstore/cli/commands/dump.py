"""`shmstore dump`: shows everything in one store, and who holds it."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, Command
from shmstore.cli.commands.common import (
    add_json,
    add_name,
    age,
    complain,
    counted,
    file_argument,
    hit_ratio,
    new_file,
    one_writer,
    print_json,
    shown,
    size,
    span,
    tier_line,
    when,
    writers,
)
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
from shmstore.errors import ObjectNotFoundError, listed
from shmstore.errors import shown as short
from shmstore.files import of_other_namespaces
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import LeaseInfo, SlotInfo, StoreFacts, StoreSnapshot
from shmstore.inspect.ring import DELETED, LEGEND, LIVE, mark_of, ring_map
from shmstore.inspect.verify import damage
from shmstore.places import place_of
from shmstore.serde.decode import Leaf, Named, describe
from shmstore.store.stats import MORE_HITS

_ROWS = 20
_RING_ROWS = 8
_STYLES = {"o": "green", "w": "yellow", "x": "dim green", ".": "dim", "!": "bold white on red"}


def _style(mark: str) -> str:
    """Return the style of a mark of the ring: red for pinned, blue for leased."""
    if mark in _STYLES:
        return _STYLES[mark]
    return "bold white on red" if mark.isdigit() or mark == "P" else "bold white on blue"


def draw_ring(console: Console, snapshot: StoreSnapshot) -> None:
    """Print the map of the ring with its legend."""
    width = max(16, min(console.width, 120) - 12)
    ring = ring_map(snapshot, width * _RING_ROWS)
    console.print(f"[bold]ring[/]  {size(snapshot.facts.capacity)}, {size(ring.cell_bytes)} a cell")
    if (arenas := len(snapshot.facts.writers)) > 1:
        console.print(
            f"  the arenas of writers 0 to {arenas - 1}, {size(snapshot.facts.capacity // arenas)} each, one after the "
            "other; an object's offset is the one in its writer's arena",
            style="dim",
        )
    for row in range(0, len(ring.cells), width):
        hands = {hand - row for hand in ring.hands if row <= hand < row + width}
        if hands:
            marks = "".join("v" if cell in hands else " " for cell in range(max(hands) + 1))
            console.print(Text(" " * 12 + marks, style="bold"))
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


def _by_use(snapshot: StoreSnapshot) -> list[tuple[str, int, int]]:
    """Return (use, objects, bytes) of the ring, held objects first; the bytes add up to the capacity."""
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
    state = facts.writers[0].state
    style = "green" if facts.writer_alive else "red" if state == "dead" else "dim"
    console.print(
        f"[bold]{escape(shown(name))}[/]  store {facts.store_id:08x}, "
        f"created {when(facts.created_at)}, {age(facts.created_at)} ago"
    )
    one = len(facts.writers) == 1
    alone = one and facts.owner_pid is None
    who = f"[{style}]{one_writer(facts.writers[0])}[/]" if alone else f"writers [{style}]{writers(facts)}[/]"
    console.print(
        f"  {who}, {counted(facts.recoveries, 'recovery', 'recoveries')}; options: {', '.join(facts.options) or 'none'}"
    )
    console.print(
        f"  {size(facts.used_bytes)} of {size(facts.capacity)} used by {counted(facts.objects, 'object')} "
        f"(slots: {facts.max_objects}); {counted(facts.open_leases, 'lease')} open (entries: {facts.max_leases}); "
        f"{counted(facts.n_readers, 'rank')} expected"
        f"{f', in groups of {_ranks(facts.groups)}' if len(facts.groups) > 1 else ''}"
    )
    console.print(
        f"  {counted(facts.puts, 'put')}, {counted(facts.hits, 'hit')}"
        f"{'' if one else f' ({facts.remote_hits} remote)'}, {counted(facts.misses, 'miss', 'misses')}, "
        f"{counted(facts.finds, 'find')} by readers, {counted(facts.find_misses, 'find miss', 'find misses')} "
        f"(hit ratio {hit_ratio(facts)}), {counted(facts.evictions, 'eviction')}, {counted(facts.deletes, 'delete')}, "
        f"{counted(facts.refusals, 'refusal')}, {counted(facts.cancels, 'cancel')}; "
        f"next id {facts.next_id}, next lease {facts.next_lease}"
    )
    larger = ", ".join(f"{hit_ratio(facts, factor)} at {factor}x" for factor in MORE_HITS)
    console.print(f"  hit ratio with a larger capacity, estimated: {larger}")
    for writer in facts.writers:
        if writer.tier is not None:
            console.print(f"  tier{'' if one else f' of writer {writer.index}'}: {tier_line(writer.tier)}")
    console.print()


def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks)) or "-"


def _flags(slot: SlotInfo) -> str:
    words = [slot.state, *(["deleted"] if slot.deleted else []), *(["moving"] if slot.moving else [])]
    return " ".join(words if slot.bounded or slot.moving else [*words, "OUT OF BOUNDS"])


def _short_key(key: str | None) -> str:
    if key is None:
        return "?"
    text = shown(key)
    return text if len(text) <= 40 else text[:37] + "..."


def _title(slot: SlotInfo) -> str:
    """Return the key of an object, and its namespace and kind if it has them."""
    more = (("namespace", slot.namespace), ("kind", slot.kind))
    parts = [("key", slot.key), *(pair for pair in more if pair[1] is not None)]
    return ", ".join(f"{what} {_short_key(name)}" for what, name in parts)


def _lessees(slot: SlotInfo) -> str:
    """Return the ranks that have not read the object, and the writer if it holds a lease."""
    ranks = _ranks(slot.leased_to) if slot.leased_to or not slot.held else ""
    return f"{ranks} writer".lstrip() if slot.held else ranks


_SLOT_COLUMNS: dict[str, Callable[[SlotInfo], str]] = {
    "writer": lambda slot: str(slot.writer),
    "slot": lambda slot: str(slot.slot),
    "id": lambda slot: str(slot.object_id),
    "offset": lambda slot: str(slot.offset),
    "bytes": lambda slot: str(slot.length),
    "age": lambda slot: "-" if slot.stored_at is None else age(slot.stored_at),
    "pinned by": lambda slot: _ranks(slot.pinned_by),
    "leased to": _lessees,
    "leased by": lambda slot: _ranks(slot.leased_by),
    "state": _flags,
    "kind": lambda slot: _short_key(slot.kind or ""),
    "namespace": lambda slot: _short_key(slot.namespace or ""),
    "key": lambda slot: _short_key(slot.key),
}


def _slots_table(console: Console, snapshot: StoreSnapshot, everything: bool) -> Table:
    title, slots = "objects", snapshot.slots
    if not everything and len(slots) > _ROWS:
        title = f"objects: {_ROWS} of {len(slots)} (--all: all), held ones first, then the largest"
        slots = tuple(sorted(slots, key=lambda slot: (mark_of(slot) in (LIVE, DELETED), -slot.span))[:_ROWS])
    optional = {"leased by": "leased_by", "kind": "kind", "namespace": "namespace"}
    left_out = {name for name, field in optional.items() if not any(getattr(slot, field) for slot in slots)}
    if len(snapshot.facts.writers) == 1:
        left_out.add("writer")
    names = [name for name in _SLOT_COLUMNS if name not in left_out]
    rows = [([_SLOT_COLUMNS[name](slot) for name in names], "") for slot in slots]
    spare, left = ("slot", "offset", "age"), ("state", "kind", "namespace", "key")
    return make_fitting_table(console, title, names, rows, left=left, spare=spare)


def _draw_leases(console: Console, leases: Sequence[LeaseInfo], everything: bool, several: bool) -> None:
    unread = [lease for lease in leases if (lease.waiting_for or lease.held) and not lease.void]
    listed = leases if everything else unread[:_ROWS]
    columns = (*(("writer",) if several else ()), "lease", "entry", "slot", "object", "age", "waiting for")
    table = make_table(console, "leases" if everything else "unread and held leases", *columns, left=("waiting for",))
    for lease in listed:
        waiting = "the writer" if lease.held else _ranks(lease.waiting_for) if lease.waiting_for else "nobody (over)"
        waiting += "" if lease.group is None else f" of group {lease.group}"
        waiting = "nobody (its writer has ended)" if lease.void else waiting
        waiting += "" if lease.remote_owner is None else f", of writer {lease.remote_owner}"
        numbers = (lease.number, lease.entry, lease.slot, lease.object_id)
        table.add_row(*map(str, (lease.writer, *numbers) if several else numbers), span(lease.age_seconds), waiting)
    console.print(table)
    if everything:
        return
    notes = []
    if len(listed) < len(unread):
        notes.append(f"the {len(listed)} oldest of {len(unread)} such leases (--all: all)")
    if len(unread) < len(leases):
        notes.append(f"{len(leases) - len(unread)} more leases are over, which their writer has not noticed yet")
    console.print("; ".join(notes), style="dim")


def draw_snapshot(
    console: Console, snapshot: StoreSnapshot, everything: bool = False, damaged: Sequence[str] = ()
) -> None:
    """Print a store: superblock, ring, holders, readers, objects, leases."""
    _facts(console, snapshot.name, snapshot.facts)
    if len(snapshot.facts.writers) > 1:
        console.print(writers_table(console, snapshot.facts.writers))
        console.print()
    for text in damaged:
        console.print(f"damaged: {text}", style="red", markup=False)
    draw_ring(console, snapshot)
    table = make_table(console, "memory", "what", "objects", "bytes", "share", left=("what",))
    for what, count, nbytes in _by_use(snapshot):
        table.add_row(
            what, str(count) if what != "free" else "", size(nbytes), f"{100 * nbytes / snapshot.facts.capacity:.1f} %"
        )
    console.print(table)
    console.print()
    if snapshot.kinds:
        console.print(kinds_table(console, snapshot.kinds))
        console.print()
    console.print(readers_table(console, snapshot.readers, everything=everything))
    console.print()
    console.print(_slots_table(console, snapshot, everything))
    console.print()
    _draw_leases(console, snapshot.leases, everything, len(snapshot.facts.writers) > 1)


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves, values and registered types in a stored value, each with its path; "." is the root."""
    if isinstance(value, Named):
        yield path or ".", value
        yield from _parts(value.tree, path)
    elif isinstance(value, (dict, list, tuple)) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            step = key if isinstance(key, str) else short(key)
            yield from _parts(inner, f"{path}/{step}" if path else step)
    else:
        yield path or ".", value


def _described(path: str, part: Any) -> dict[str, Any]:
    """Return what is shown of a part."""
    if isinstance(part, Leaf):
        return {"path": path, "kind": part.kind, "text": part.dtype, "shape": part.shape, "nbytes": part.nbytes}
    kind, text = (part.name, "") if isinstance(part, Named) else ("value", short(part))
    return {"path": path, "kind": kind, "text": text, "shape": None, "nbytes": 0}


def _copy_tensor(
    inspector: StoreInspector, slot: SlotInfo, parts: Sequence[tuple[str, Any]], path: str, file: str
) -> Leaf:
    """Copy the tensor or array at `path` to a file, and return it; ObjectNotFoundError unless there is exactly one."""
    leaves = [(where, part) for where, part in parts if isinstance(part, Leaf)]
    found = [leaf for where, leaf in leaves if where == path]
    if len(found) != 1:
        there = f"there are {len(found)} tensors at" if found else "there is no tensor at"
        hint = f"pass one of {listed(where for where, _ in leaves)}" if leaves else "the object has none"
        raise ObjectNotFoundError(f"{there} {short(path)}", hint=hint)
    (leaf,) = found
    data = inspector.payload(slot, leaf.offset, leaf.nbytes) if leaf.nbytes else bytearray()
    with new_file(file) as out:  # np.save asks a plain file for its position, and a pipe has none
        np.save(SimpleNamespace(write=out.write), np.ndarray(leaf.shape, leaf.carrier, data), allow_pickle=False)
    return leaf


def _one_object(console: Console, slot: SlotInfo, parts: Sequence[dict[str, Any]], several: bool) -> None:
    arena = f"writer {slot.writer}, " if several else ""
    place = f"{arena}slot {slot.slot}, offset {slot.offset}"
    console.print(f"[bold]object {slot.object_id}[/]  {escape(_title(slot))}, {place}")
    crc = "none" if slot.crc is None else f"{slot.crc:08x}"
    stored = "" if slot.stored_at is None else f", stored {when(slot.stored_at)}"
    sizes = f"payload {size(slot.payload_bytes)}, metadata {slot.meta_len} B, extra {slot.extra_len} B"
    console.print(f"  {_flags(slot)}; {sizes}, checksum {crc}{stored}")
    console.print(f"  pinned by {_ranks(slot.pinned_by)}; leased to {_lessees(slot)}")
    for part in parts:
        line = Text(f"  {shown(part['path'])}: ", style="bold")
        what = part["text"] if part["kind"] == "value" else f"{part['kind']} {part['text']}".strip()
        line.append(shown(what if part["shape"] is None else f"{what} {part['shape']}"), style="cyan")
        line.append("" if part["shape"] is None else f"  {size(part['nbytes'])}", style="dim")
        console.print(line)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--key", metavar="K", help="only the object with this key, and its shapes and dtypes")
    which.add_argument("--object", type=int, metavar="ID", help="only the object with this id, and its shapes")
    parser.add_argument("--namespace", metavar="S", help="namespace of --key, if it has one")
    parser.add_argument("--tensor", metavar="PATH", help="tensor to copy to --out; PATH as shown, . for an array")
    parser.add_argument("--out", type=file_argument, metavar="FILE.npy", help="file for --tensor")
    parser.add_argument("--all", action="store_true", help="all ranks, objects and leases, not only some")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--svg", type=file_argument, metavar="FILE", help="write the output as a picture, for a ticket")
    add_json(form)


def _dump_object(arguments: argparse.Namespace, inspector: StoreInspector, console: Console) -> None:
    slot = inspector.find(key=arguments.key, object_id=arguments.object, namespace=arguments.namespace)
    parts = list(_parts(describe(inspector.metadata(slot), slot.payload_bytes)))
    described = [_described(*part) for part in parts]
    if arguments.tensor is not None:
        leaf = _copy_tensor(inspector, slot, parts, arguments.tensor, arguments.out)
        if arguments.json:
            print_json({"ok": True, "file": arguments.out, **_described(arguments.tensor, leaf)})
        else:
            print(f"{arguments.out}: {leaf.dtype} {leaf.shape}, object {slot.object_id}")
    elif arguments.json:
        print_json({"ok": True, "object": slot, "tree": described})
    else:
        _one_object(console, slot, described, len(inspector.facts().writers) > 1)


def _run(arguments: argparse.Namespace) -> int:
    one = arguments.key is not None or arguments.object is not None
    if arguments.tensor is None and arguments.out is not None:
        return complain("dump", "--out needs --tensor PATH, and --key or --object", EXIT_USAGE)
    if arguments.tensor is not None and (arguments.out is None or arguments.svg or not one):
        return complain("dump", "--tensor needs --out and --key or --object, and draws no --svg", EXIT_USAGE)
    if arguments.namespace is not None and arguments.key is None:
        return complain("dump", "--namespace needs --key", EXIT_USAGE)
    console = make_picture() if arguments.svg else make_console()
    damaged: dict[int, str] = {}
    with StoreInspector.open(arguments.name, arguments.dir, arguments.allow_uid) as inspector:
        if one:
            _dump_object(arguments, inspector, console)
        else:
            snapshot, damaged = inspector.snapshot(), damage(inspector)
            pids = [writer.pid for writer in snapshot.facts.writers if writer.state == "alive"]
            pids += [reader.pid for reader in snapshot.readers if reader.state == "alive"]
            others = of_other_namespaces(place_of(arguments.name, arguments.dir), filter(None, pids))
            if arguments.json:
                print_json({"ok": not damaged, "snapshot": snapshot, "damaged": damaged, "elsewhere": others})
            else:
                draw_snapshot(console, snapshot, arguments.all, list(damaged.values()))
            if others and not arguments.json:
                console.print(f"of another PID namespace: process {listed(others)}", style="dim")
    if arguments.svg:
        save_picture(console, arguments.svg, f"dump {arguments.name}")
    for text in damaged.values():  # the first: all are in the picture
        return complain("dump", f"{arguments.name}: {text}")
    return EXIT_OK


COMMAND = Command(
    name="dump",
    summary="show a store: superblock, ring, holders, readers, objects and leases; or one object's shapes",
    example="shmstore dump mm-cache --object 17 --tensor pixel_values --out pixels.npy",
    add_arguments=_add_arguments,
    run=_run,
)
