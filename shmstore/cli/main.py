"""The `shmstore` command: one parser, one subcommand a module.

To add a subcommand, make a `Command` in its own module and add that to `all_commands`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from shmstore import __version__
from shmstore.cli.command import EXIT_OK, EXIT_USAGE, Command
from shmstore.cli.commands.common import complain, print_json
from shmstore.cli.commands.verify import COMMAND as VERIFY
from shmstore.errors import ShmStoreError


class _Parser(argparse.ArgumentParser):
    """A parser whose messages have no password: they repeat arguments, such as the URL of a tier in a wrong place."""

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"(?<=://)\S*@|(?<=password=)[^&\s]*", "...", message))


def all_commands() -> Sequence[Command]:
    """Return every subcommand."""
    from shmstore.cli.commands import bench, dump, gc, ls, tier, top, verify  # here: they load numpy

    return [module.COMMAND for module in (ls, dump, top, verify, gc, bench, tier)]


def build_parser(commands: Sequence[Command] | None = None) -> argparse.ArgumentParser:
    """Return the parser of these commands, by default of all."""
    if commands is None:
        commands = all_commands()
    parser = _Parser(prog="shmstore", description="A shared-memory object store for the tensors of inference engines.")
    parser.add_argument("--version", action="version", version=f"shmstore {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in commands:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            epilog=f"example: {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (found something wrong) or 2 (usage)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "demo":
        return complain("demo", "the demo is in the source tree, in examples/demo: run `make demo` there", EXIT_USAGE)
    try:
        parser = build_parser((VERIFY,) if argv and argv[0] == VERIFY.name else None)
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason; a caller expects a status, not an exception
        return EXIT_OK if stop.code is None else stop.code if isinstance(stop.code, int) else EXIT_USAGE
    if arguments.command is None:
        parser.print_help(sys.stderr)
        print("\nshmstore: error: name a COMMAND", file=sys.stderr)
        return EXIT_USAGE
    command: Command = arguments.command
    status = EXIT_OK
    try:
        status = command.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it exits
    except (ShmStoreError, ValueError, OSError, LookupError, MemoryError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # of a path that the caller has given
            said = f"{error.filename}: {error.strerror}"
            if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)):
                said += " (hint: pass another path: its folder must exist, and this user must have access)"
        with suppress(OSError):  # of an output that is full
            if getattr(arguments, "json", False):
                print_json({"ok": False, "error": said})
        return complain(command.name, said)
    return status
