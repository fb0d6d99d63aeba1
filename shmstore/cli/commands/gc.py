"""`shmstore gc`: shows and removes the segments of dead writers in a folder."""

import argparse
from dataclasses import dataclass

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, Command
from shmstore.cli.commands.common import add_dir, add_json, age, complain, print_json, size, store_argument
from shmstore.cli.commands.ls import owner
from shmstore.cli.commands.tables import cell, make_console, make_table
from shmstore.errors import ShmStoreError
from shmstore.files import holders
from shmstore.frontdoor.queue import dead_queues
from shmstore.inspect.records import SegmentInfo
from shmstore.inspect.segments import find_segments, look_at, remove_segment, settled

_RECOVERABLE = "could be recovered"
_KEPT = {  # of these states: why instead
    "other version": "another version may recover it",
    "sparse": "sparse, so nothing opens it until `fallocate -l BYTES FILE` fills its holes",
}
_ADD = "add --yes to remove"
_EPHEMERAL = "ephemeral: its name was generated; the next `create` removes it"

_RULE = """\
A segment whose writer is alive is never touched, not even with --force.

If the writer is dead, --yes removes a segment unless a process still maps it, or ObjectStoreWriter.open(NAME, ...)
could recover it. So it removes unfinished creations, damaged segments, stores with generated names, and
without NAME the folders of queues without a name.

--yes --force NAME also removes a store that is mapped or could be recovered: a process that maps it keeps its pages
until it ends. A NAME that is not a store ends the command before anything is removed."""


@dataclass(slots=True)
class _Candidate:
    segment: SegmentInfo
    mapped_by: tuple[int, ...]
    """Other processes that map it or have it open, as far as this user may see."""
    kept_because: list[str]
    """The reasons to keep it; without any, it may be removed."""
    removed: bool = False


def _judge(info: SegmentInfo, force: bool) -> _Candidate:
    mapped_by = holders(info.device, info.inode)
    reasons = []
    if not force:
        if mapped_by:
            reasons.append("mapped by " + ", ".join(map(str, mapped_by)))
        elif info.ranks_alive:
            reasons.append(f"readers attached: {info.ranks_alive}")
        if info.recoverable or (info.facts and not info.ephemeral):  # of a damaged one: an arena is sound
            reasons.append(_KEPT.get(info.state, _RECOVERABLE))
    return _Candidate(info, mapped_by, reasons)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{COMMAND.summary}\n\n{_RULE}"
    parser.add_argument(
        "names", metavar="NAME", type=store_argument, nargs="*", help="the stores to check (default: all)"
    )
    parser.add_argument("--yes", action="store_true", help="remove segments; without it, gc only shows them")
    parser.add_argument(
        "--force", action="store_true", help="with --yes NAME: even if it is mapped or could be recovered"
    )
    add_dir(parser)
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.force and not arguments.names:
        return complain("gc", "--force needs the names of the stores to remove", EXIT_USAGE)
    named = [look_at(name, dir=arguments.dir) for name in arguments.names]
    segments = settled(named or find_segments(dir=arguments.dir))
    alive = [info for info in segments if info.writer_alive]
    candidates = [_judge(info, arguments.force) for info in segments if not info.writer_alive]
    status = EXIT_OK
    for info in alive if arguments.names else []:
        who = "owner" if info.writers_alive == 0 else "writer"
        why = "its creation is not over" if info.state == "being created" else f"its {who} is alive"
        status = complain("gc", f"{info.name}: {why}, so it stays")
    for candidate in candidates:
        if not arguments.yes or candidate.kept_because:
            continue
        try:
            remove_segment(candidate.segment, force=arguments.force)
            candidate.removed = True
        except (ShmStoreError, OSError) as error:
            status = complain("gc", f"{candidate.segment.name}: {error}")
    queues = [] if arguments.names else dead_queues(arguments.dir, remove=arguments.yes)
    if arguments.json:
        print_json({"ok": status == EXIT_OK, "segments": candidates, "queues": queues})
        return status
    for folder in queues:
        print(f"{folder}: a queue whose processes are dead, {'removed' if arguments.yes else 'would be removed'}")
    if candidates:
        _print(candidates, arguments)
    elif not queues and not arguments.names:
        print("no segments of dead writers")
    if not arguments.yes and (queues or any(not candidate.kept_because for candidate in candidates)):
        print(_ADD)
    return status


def _verdict(candidate: _Candidate, asked: bool) -> str:
    if candidate.removed:
        return "removed"
    if candidate.kept_because:
        return f"kept: {'; '.join(candidate.kept_because)}"
    verdict = "NOT removed" if asked else "would be removed"
    return f"{verdict}: {_EPHEMERAL}" if candidate.segment.ephemeral else verdict


def _print(candidates: list[_Candidate], arguments: argparse.Namespace) -> None:
    console = make_console()
    table = make_table(
        console, "", "name", "owner", "size", "age", "state", "verdict", left=("name", "owner", "state", "verdict")
    )
    for candidate in candidates:
        info = candidate.segment
        since = info.facts.created_at if info.facts else info.modified_at
        verdict = _verdict(candidate, arguments.yes)
        table.add_row(cell(info.name), owner(info), size(info.allocated_bytes), age(since), info.state, verdict)
    console.print(table)
    if any(_RECOVERABLE in candidate.kept_because for candidate in candidates):
        print("could be recovered: ObjectStoreWriter.open(NAME, ...) takes it over, gc --yes --force NAME removes it")


COMMAND = Command(
    name="gc",
    summary="show the segments of dead writers, and with --yes remove the useless ones",
    example="shmstore gc --yes",
    add_arguments=_add_arguments,
    run=_run,
)
