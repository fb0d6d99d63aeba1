"""The `shmstore` command: one parser, one subcommand a module.

A subcommand is a `Command` in a module of its own; naming it in `COMMANDS` is all it takes to add it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shmstore.command import EXIT_OK, EXIT_USAGE, Command
from shmstore.demo.main import COMMAND as DEMO

COMMANDS: tuple[Command, ...] = (DEMO,)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="shmstore", description="A shared-memory object store for the tensors of inference engines."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
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
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why; a caller wants the number, not the exception
        return EXIT_OK if stop.code is None else stop.code if isinstance(stop.code, int) else EXIT_USAGE
    command: Command = arguments.command
    return command.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
