"""Every subcommand of `shmstore`, by the module that has it; a module is loaded when its command is used."""

from collections.abc import Iterable
from importlib import import_module
from typing import cast

from shmstore.cli.command import Command

__all__ = ["NAMES", "load"]

_MODULES = {
    "demo": "demo.main",
    "ls": "commands.ls",
    "dump": "commands.dump",
    "top": "commands.top",
    "verify": "commands.verify",
    "gc": "commands.gc",
    "bench": "commands.bench",
    "completion": "commands.completion",
}
NAMES = tuple(_MODULES)


def load(names: Iterable[str] = NAMES) -> tuple[Command, ...]:
    """Return these commands."""
    return tuple(cast(Command, import_module(f"shmstore.cli.{_MODULES[name]}").COMMAND) for name in names)
