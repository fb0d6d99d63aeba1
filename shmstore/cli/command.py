"""The record of a subcommand of `shmstore`, and the argument types that several subcommands share."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_USAGE = 2

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<suffix>i?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


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


def parse_size(text: str) -> int:
    """Return a size in bytes: "4096", "64M" and "64MiB" (powers of 1024), "64MB" (powers of 1000); an argparse type."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 4096, 64M or 1GiB, not {text!r}")
    decimal = match["suffix"].lower() == "b" and match["unit"] != ""
    size = int(float(match["number"]) * (1000 if decimal else 1024) ** _POWERS[match["unit"].lower()])
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size of at least one byte, not {text!r}")
    return size


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
