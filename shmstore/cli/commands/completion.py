"""`shmstore completion`: lets a shell complete commands, options and names of stores."""

import argparse
import importlib.util

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, Command
from shmstore.cli.commands.common import complain

_PREAMBLE = {
    "bash": '_shmstore_names() { compgen -W "$(command ls /dev/shm 2>/dev/null)" -- "$1"; }\n',
    "zsh": "_shmstore_names() { local -a names; names=(/dev/shm/*(N.:t)); compadd -a names }\n",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(_PREAMBLE), help="the shell")


def _run(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("shtab") is None:
        return complain(
            "completion", "shtab is not installed; in the source tree: pip install '.[completion]'", EXIT_USAGE
        )
    import shtab

    from shmstore.cli.main import build_parser  # not at the top, because it imports this module

    parser = build_parser()
    for action in _name_arguments(parser):
        action.complete = dict.fromkeys(_PREAMBLE, "_shmstore_names")  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=arguments.shell, preamble=_PREAMBLE[arguments.shell]))
    return EXIT_OK


def _name_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                found += _name_arguments(subparser)
        elif action.metavar == "NAME" and not action.option_strings:
            found.append(action)
    return found


COMMAND = Command(
    name="completion",
    summary="print the completion script of a shell",
    example='eval "$(shmstore completion bash)"',
    add_arguments=_add_arguments,
    run=_run,
)
