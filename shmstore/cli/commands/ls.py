"""`shmstore ls`: lists the stores of this host."""

import argparse
import os
from fnmatch import fnmatchcase

from shmstore.cli.command import EXIT_OK, EXIT_WRONG, Command
from shmstore.cli.commands.common import add_dir, add_json, age, complain, hit_ratio, print_json, shown, size, writers
from shmstore.cli.commands.tables import make_console, make_fitting_table
from shmstore.files import another_user
from shmstore.inspect.records import SegmentInfo
from shmstore.inspect.segments import find_segments
from shmstore.places import folder_of


def owner(info: SegmentInfo) -> str:
    """Return whether a segment's writer is alive, and its process or user; of several, how many are alive."""
    if info.state == "unreadable":
        return f"user {info.owner_uid}"
    if info.facts:
        return writers(info.facts)
    whose = "" if info.owner_uid == os.geteuid() else f"user {info.owner_uid}, "
    return f"{whose}{'alive' if info.writer_alive else 'dead'}"


def _state(info: SegmentInfo) -> str:
    return f"{info.state}, ephemeral" if info.ephemeral else info.state


def _row(info: SegmentInfo) -> list[str]:
    facts, memory = info.facts, size(info.allocated_bytes)
    if facts is None:
        sizes, since = (size(info.file_bytes), memory), age(info.modified_at)
        return [info.name, owner(info), *sizes, "-", "-", "-", since, "-", _state(info)]
    return [
        info.name,
        owner(info),
        size(facts.capacity),
        memory,
        f"{size(facts.used_bytes)} ({100 * facts.used_bytes / facts.capacity:.0f} %)",
        str(facts.objects),
        f"{info.ranks_alive} of {'+'.join(map(str, facts.groups))}",
        age(facts.created_at),
        hit_ratio(facts),
        _state(info),
    ]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="only stores whose name matches, such as 'mm-*'")
    add_dir(parser, or_pid=True)
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    found = find_segments(dir=arguments.dir, allow_uid=arguments.allow_uid)
    segments = [info for info in found if fnmatchcase(info.name, arguments.pattern)]
    damaged = [info for info in segments if info.state == "damaged"]
    if arguments.json:
        print_json({"ok": not damaged, "segments": segments})
    elif found and not segments:
        print(f"no store's name matches {shown(arguments.pattern)}; without a pattern there are {len(found)}")
    elif not segments:
        print(f"no stores in {folder_of(arguments.dir)}, of those whose files this user may read")
    else:
        console = make_console()
        columns = ("name", "owner", "size", "memory", "used", "objects", "readers", "age", "hit ratio", "state")
        rows = [
            (_row(info), "red" if info.state == "damaged" else "dim" if not info.writer_alive else "")
            for info in segments
        ]
        left, spare = ("name", "owner", "state"), ("hit ratio", "age", "readers", "size", "objects")
        console.print(make_fitting_table(console, "", columns, rows, left=left, spare=spare))
    for info in segments:
        if info.state == "unreadable":
            complain("ls", another_user(info.place))
        elif info.problem and info.state in ("ok", "damaged"):
            complain("ls", f"{info.name}: {info.problem}")
    return EXIT_WRONG if damaged else EXIT_OK


COMMAND = Command(
    name="ls",
    summary="list the stores of this host, alive and dead; exit status 1: one is damaged",
    example="shmstore ls --json",
    add_arguments=_add_arguments,
    run=_run,
)
