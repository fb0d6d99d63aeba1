"""`shmstore verify`: checks whether a store is sound."""

import argparse
from contextlib import suppress

from shmstore.cli.command import EXIT_OK, EXIT_WRONG, Command
from shmstore.cli.commands.common import add_json, add_name, print_json, shown, size
from shmstore.inspect import verify


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    report = verify(arguments.name)
    if arguments.json:
        print_json({"ok": report.ok, "report": report})
        return EXIT_OK if report.ok else EXIT_WRONG
    what = f"{report.objects} objects; checksums of {report.checked_objects} ({size(report.checked_bytes)})"
    wrong = sum(finding.wrong for finding in report.findings)
    verdict = "sound" if not wrong else "1 thing is wrong" if wrong == 1 else f"{wrong} things are wrong"
    with suppress(BrokenPipeError):  # a reader of only the first lines still gets the exit status
        for finding in report.findings:
            print(f"{'WRONG' if finding.wrong else 'note '}  {finding.text}")
        print(f"{shown(report.name)}: {verdict}; checked {what}")
    return EXIT_OK if report.ok else EXIT_WRONG


COMMAND = Command(
    name="verify",
    summary="check every invariant of a store and, with checksums, every byte; exit status 1: it is not sound",
    example="shmstore verify mm-cache",
    add_arguments=_add_arguments,
    run=_run,
)
