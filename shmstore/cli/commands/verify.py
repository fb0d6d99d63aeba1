"""`shmstore verify`: checks whether a store is sound, or only whether it and its writer are there."""

import argparse
from collections import Counter
from contextlib import suppress

from shmstore.cli.command import EXIT_OK, EXIT_WRONG, Command
from shmstore.cli.commands.common import add_json, add_name, complain, print_json, shown, size
from shmstore.files import NO_STORE_HINT, another_user, classify
from shmstore.inspect.host import look_at_host
from shmstore.places import place_of

_ALIKE = 8
"""Findings of one kind that are listed; the others are counted."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser, instead="check whether this host removes stores of this user, its room, and its core dumps")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check only, in milliseconds, that its superblock is intact and a writer alive: for probes",
    )
    add_json(parser)


def _run_quick(arguments: argparse.Namespace) -> int:
    file = classify(place_of(arguments.name, arguments.dir))
    if file.state == "unreadable":
        raise another_user(file.place)
    problem = file.problem
    several = f"{file.writers_alive} of {file.writers} writers are alive" if file.writers != 1 else None
    if file.state == "being created":
        problem = "its creation is not over (hint: wait for its writer)"
    elif file.state in ("foreign", "blank"):
        problem = f"{problem} (hint: {NO_STORE_HINT})"
    elif file.state == "ok" and not file.writers_alive:
        next_one = "open takes the store over, or creates it again if `shmstore verify NAME` finds damage"
        if file.writer_alive:  # of an owner without an arena
            next_one = "join(NAME) makes a process a writer; the owner is alive"
        problem = f"{several or 'no writer is alive'} (hint: ObjectStoreWriter.{next_one})"
    if arguments.json:
        print_json({"ok": problem is None, "problem": problem, "file": file})
    elif problem is None:
        print(f"{shown(file.name)}: {several or 'its writer is alive'}; readers attached: {file.ranks_alive}")
    else:
        complain("verify", f"{file.name}: {problem}")
    return EXIT_OK if problem is None else EXIT_WRONG


def _run_host(arguments: argparse.Namespace) -> int:
    host = look_at_host(arguments.dir)
    if arguments.json:
        print_json({"ok": not host.problems, "host": host})
    else:
        for problem in host.problems:
            print(f"WRONG  {problem}")
        for note in host.notes:
            print(f"note   {note}")
        print(f"{shown(host.dir)}: {size(host.free_bytes)} of {size(host.folder_bytes)} are free")
    return EXIT_WRONG if host.problems else EXIT_OK


def _run(arguments: argparse.Namespace) -> int:
    if arguments.host:
        return _run_host(arguments)
    if arguments.quick:
        return _run_quick(arguments)
    from shmstore.inspect.verify import verify  # not at the top, because it loads numpy

    report = verify(arguments.name, arguments.dir, arguments.allow_uid)
    if arguments.json:
        print_json({"ok": report.ok, "report": report})
        return EXIT_OK if report.ok else EXIT_WRONG
    what = f"{report.objects} objects; checksums of {report.checked_objects} ({size(report.checked_bytes)})"
    wrong = sum(finding.wrong for finding in report.findings)
    verdict = "sound" if not wrong else "1 thing is wrong" if wrong == 1 else f"{wrong} things are wrong"
    with suppress(BrokenPipeError):  # a reader of only the first lines still gets the exit status
        alike: Counter[tuple[str, str]] = Counter()
        for finding in report.findings:
            mark = "WRONG" if finding.wrong else "note "
            alike[mark, finding.kind] += 1
            if alike[mark, finding.kind] <= _ALIKE:
                print(f"{mark}  {finding.text}")
        for (mark, kind), count in alike.items():
            if count > _ALIKE:
                print(f"{mark}  {count - _ALIKE} more of this kind ({kind}), which --json lists")
        print(f"{shown(report.name)}: {verdict}; checked {what}")
    return EXIT_OK if report.ok else EXIT_WRONG


COMMAND = Command(
    name="verify",
    summary="check every invariant of a store and, with checksums, every byte; exit status 1: it is not sound",
    example="shmstore verify mm-cache",
    add_arguments=_add_arguments,
    run=_run,
)
