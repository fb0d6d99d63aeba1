"""What one subcommand of `shmstore` is made of, and the argument types that several of them share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass

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
    """One line, for the list of commands."""
    example: str
    """Shown below the options in `--help`."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Does the work and returns the exit status: 0, 1 (found something wrong) or 2 (usage)."""


def parse_size(text: str) -> int:
    """Return the number of bytes that `text` names: "4096", "64M" and "64MiB" (powers of 1024), "64MB" (of 1000).

    Raises `ValueError` for anything else, zero included.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r} (examples: 4096, 64M, 1GiB)")
    decimal = match["suffix"].lower() == "b" and match["unit"] != ""
    size = int(float(match["number"]) * (1000 if decimal else 1024) ** _POWERS[match["unit"].lower()])
    if size < 1:
        raise ValueError(f"a size must be at least one byte: {text!r}")
    return size


def size_argument(text: str) -> int:
    """`parse_size` as an argparse type."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_argument(text: str) -> int:
    """Return `text` as an integer of at least 1: an argparse type."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"not a whole number of at least 1: {text!r}")
    return number
