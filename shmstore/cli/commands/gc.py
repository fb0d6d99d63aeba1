"""`shmstore gc`: what dead writers left in /dev/shm."""

import argparse
import time
from dataclasses import dataclass

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, EXIT_WRONG, Command
from shmstore.cli.commands.common import (
    add_json,
    age,
    cell,
    complain,
    make_console,
    make_table,
    print_json,
    reporting,
    size,
    store_argument,
)
from shmstore.cli.commands.ls import owner
from shmstore.errors import ShmStoreError
from shmstore.inspect import Holders, SegmentInfo, find_segments, holders, look_at, remove_segment

__all__ = ["COMMAND"]

_GRACE_SECONDS = 10
"""A creator takes its lock right after it has made the file; a younger file without a lock may be in that instant."""

_NAMED_PIDS = 5
_RECOVERABLE = "could be recovered"
_RECOVERABLE_ELSEWHERE = "another version may recover it"
_NAMELESS = "nobody knows its name; the next create removes it"

_RULE = """\
A segment whose writer is alive is never touched, not even with --force.

Of those whose writer is dead, --yes removes what is of no use to anybody: nothing that a process still maps or has
open, and nothing that could be recovered. What could be recovered is every store whose creation was completed and
whose superblock is intact: ObjectStoreWriter.recover(NAME) would find all its objects. What remains are unfinished
creations, damaged segments, and stores of generated names: nobody knows these, and the next create removes them.

--force, with --yes, removes both of the former, too, of the stores that are named. Only the name goes: a
process that maps a store keeps its pages until it ends, but nobody can attach or recover any more.

Whether a process maps a segment is known from the locks of its readers and, as far as this user may read it, from
/proc."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    info: SegmentInfo
    held: Holders
    kept_because: str | None
    """None: may be removed."""

    @property
    def reasons(self) -> list[str]:
        """`kept_because`, and where that is not about it that the store could be recovered."""
        info, why = self.info, self.kept_because
        if why is None:
            return []
        also = _recoverable(info)
        return [why] if also in (None, why) else [why, str(also)]


def _recoverable(info: SegmentInfo) -> str | None:
    """Return who may recover a segment, in words; None: nobody."""
    if not info.recoverable:
        return None
    return _RECOVERABLE_ELSEWHERE if info.state == "other version" else _RECOVERABLE


def _judge(info: SegmentInfo, force: bool) -> _Candidate:
    held = holders(info.device, info.inode)
    why = None
    if not force:
        if held.pids:
            why = "mapped by " + ", ".join(map(str, held.pids))
        elif info.ranks_alive:
            why = f"{info.ranks_alive} readers are attached"
        elif info.recoverable:
            why = _recoverable(info)
        elif info.state == "unfinished" and time.time() - info.modified_at < _GRACE_SECONDS:
            why = "may be in the making"
    return _Candidate(info, held, why)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{COMMAND.summary}\n\n{_RULE}"
    parser.add_argument("names", metavar="NAME", type=store_argument, nargs="*", help="only these (default: all)")
    parser.add_argument("--yes", action="store_true", help="remove; without it, they are only shown")
    parser.add_argument("--force", action="store_true", help="also what is mapped, or could be recovered")
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.force and not arguments.names:
        return complain("gc", "--force needs the names of the stores that it is meant for", EXIT_USAGE)
    segments = [look_at(name) for name in arguments.names] if arguments.names else find_segments()
    alive = [info for info in segments if info.writer_alive]
    candidates = [_judge(info, arguments.force) for info in segments if not info.writer_alive]
    status, removed = EXIT_OK, set()
    for info in alive if arguments.names else []:
        status = complain("gc", f"{info.name}: its writer is alive; left as it is")
    for candidate in candidates:
        if not arguments.yes or candidate.kept_because:
            continue
        try:
            remove_segment(candidate.info, force=arguments.force)
            removed.add(candidate.info.name)
        except (ShmStoreError, OSError) as error:
            status = complain("gc", f"{candidate.info.name}: {error}")
    if arguments.json:
        print_json({"ok": status == EXIT_OK, "segments": [_as_json(c, removed) for c in candidates]})
    elif not candidates:
        print("no segments of dead writers" if not arguments.names else "nothing to remove")
    else:
        _print(candidates, removed, arguments)
    return status if status == EXIT_OK else EXIT_WRONG


def _verdict(candidate: _Candidate, removed: set[str], asked: bool) -> str:
    if candidate.info.name in removed:
        return "removed"
    if candidate.kept_because:
        return f"kept: {'; '.join(candidate.reasons)}"
    verdict = "NOT removed" if asked else "would be removed"
    return f"{verdict}: {_NAMELESS}" if candidate.info.nameless else verdict


def _as_json(candidate: _Candidate, removed: set[str]) -> dict[str, object]:
    info = candidate.info
    return {
        "name": info.name,
        "state": info.state,
        "problem": info.problem,
        "file_bytes": info.file_bytes,
        "mapped_by": candidate.held.pids,
        "processes_not_readable": len(candidate.held.unreadable),
        "kept_because": candidate.kept_because,
        "recoverable": info.recoverable,
        "nameless": info.nameless,
        "removed": info.name in removed,
    }


def _unseen(pids: list[int]) -> str:
    named = ", ".join(map(str, pids[:_NAMED_PIDS])) + (", ..." if len(pids) > _NAMED_PIDS else "")
    one = len(pids) == 1
    return (
        f"note: {len(pids)} {'process does' if one else 'processes do'} not let this user see what "
        f"{'it maps' if one else 'they map'} ({named}); if {'it' if one else 'one'} has a removed store mapped, "
        "that memory is free when the process ends"
    )


def _print(candidates: list[_Candidate], removed: set[str], arguments: argparse.Namespace) -> None:
    console = make_console()
    table = make_table(
        console, "", "name", "owner", "size", "age", "state", "verdict", left=("name", "owner", "state", "verdict")
    )
    for candidate in candidates:
        info = candidate.info
        since = info.facts.created_at if info.facts else info.modified_at
        verdict = _verdict(candidate, removed, arguments.yes)
        table.add_row(cell(info.name), owner(info), size(info.file_bytes), age(since), info.state, verdict)
    console.print(table)
    # What is kept is kept whoever maps it.
    unreadable = {pid for c in candidates if c.kept_because is None for pid in c.held.unreadable}
    if unreadable:
        print(_unseen(sorted(unreadable)))
    if not arguments.yes and any(c.kept_because is None for c in candidates):
        print("add --yes to remove")
    if any(_RECOVERABLE in c.reasons for c in candidates):
        print("could be recovered: ObjectStoreWriter.recover(NAME) takes it over, gc --yes --force NAME removes it")


COMMAND = Command(
    name="gc",
    summary="show what dead writers left in /dev/shm, and with --yes remove what is of no use to anybody",
    example="shmstore gc --yes",
    add_arguments=_add_arguments,
    run=reporting("gc", _run),
)
