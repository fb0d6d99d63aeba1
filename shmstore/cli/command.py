"""The record of a subcommand of `shmstore`, and the argument types that several subcommands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_USAGE = 2


@dataclass(frozen=True)
class Command:
    """One subcommand: its name, its help, and the two functions that the command line calls."""

    name: str
    summary: str
    """One line for the list of commands."""
    example: str
    """Shown below the options in `--help`."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit status: 0, 1 (found something wrong) or 2 (usage).

    The command line prints a ShmStoreError, ValueError, OSError, LookupError or MemoryError as one line, and exits with
    status 1.
    """


def number_argument(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], Any]:
    """Return an argparse type for numbers of this kind from `least` to `most`."""

    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            name = "a whole number" if kind is int else "a number"
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {name} {limits}, not {text!r}")
        return number

    return parse


positive_argument = number_argument(int, 1)
