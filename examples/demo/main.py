"""The demo: sends real photographs through a real processor to every worker, with each kind of cache."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from rich.console import Console

from examples.demo.messages import Progress
from examples.demo.modes import MODES
from examples.demo.processing import PACKAGES, PhotographSource, PictureSource, shipped_photographs
from examples.demo.records import DemoReport, RunSettings
from examples.demo.report import print_report
from examples.demo.supervisor import DemoError, Observer, run_mode
from shmstore.cli.command import EXIT_OK, EXIT_USAGE, EXIT_WRONG, number_argument, positive_argument
from shmstore.cli.commands.common import add_json, print_json, shown, size_argument

EXIT_INTERRUPTED = 128 + signal.SIGINT


def run(
    settings: RunSettings, source: PictureSource, *, modes: Sequence[str] = tuple(MODES), observer: Observer
) -> DemoReport:
    """Run the same requests in each of `modes`, one after the other; return the figures, or raise `DemoError`."""
    reports = [run_mode(mode, settings, source, observer) for mode in modes]
    return replace(reports[0], modes={mode: one for report in reports for mode, one in report.modes.items()})


class _Teller(Observer):
    """Prints a line on stderr when a stage of a mode begins."""

    def progressed(self, mode: str, progress: Progress) -> None:
        """Say so at the first step of a stage."""
        if progress.first:
            print(f"{mode}: {progress.stage} {progress.total}", file=sys.stderr)


def execute(
    settings: RunSettings,
    source: PictureSource,
    *,
    modes: Sequence[str] = tuple(MODES),
    as_json: bool = False,
    observer: Observer | None = None,
) -> int:
    """Run each of `modes`, print the report on stdout, and return the exit status; print an error as a line on stderr.

    Without an `observer`, say on stderr how far it is.
    """
    try:
        with _terminated_as_interrupted():
            report = run(settings, source, modes=modes, observer=observer or _Teller())
    except DemoError as error:
        if as_json:
            print_json({"ok": False, "error": str(error)})
        return complain(error, EXIT_WRONG)
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_INTERRUPTED)
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report, Console(highlight=False))
    return EXIT_OK if report.ok else EXIT_WRONG


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C in the block, so that it leaves nothing behind either."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice, and the second must not interrupt the cleanup
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def complain(error: object, status: int) -> int:
    """Print an error on stderr and return the exit status."""
    print(f"demo: {shown(str(error))}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    modes = "; ".join(f"{name}: {mode.summary}" for name, mode in MODES.items())
    parser.add_argument("--mode", choices=MODES, help=f"{modes} (default: all of them, in turn)")
    workers = "worker processes, of some 150 MB each (default 2)"
    parser.add_argument("--workers", type=number_argument(int, 1, 64), default=2, metavar="N", help=workers)
    capacity = "bytes of items that each mode may keep, such as 64M (default: too small for all, so it evicts)"
    parser.add_argument("--capacity", type=size_argument, metavar="SIZE", help=capacity)
    rounds = "number of times that each image is requested (default 5)"
    parser.add_argument("--rounds", type=positive_argument, default=5, metavar="N", help=rounds)
    kill = "kill the API process halfway, start all again, and show that the store kept every hit (mode shm only)"
    parser.add_argument("--kill", choices=("api",), help=kill)
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status: 0, 1 (something was wrong) or 2 (usage)."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason
        return EXIT_OK if stop.code is None else EXIT_USAGE
    kills = arguments.kill is not None
    if kills and (arguments.mode not in (None, "shm") or arguments.capacity is not None or arguments.rounds < 2):
        return complain("--kill api needs mode shm, room for all images (no --capacity), and --rounds 2", EXIT_USAGE)
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        said = f"{', '.join(missing)} not installed; in the source tree: pip install '.[demo]'"
        return complain(said, EXIT_USAGE)
    settings = RunSettings(arguments.workers, arguments.capacity, arguments.rounds, kill=kills)
    one = "shm" if kills else arguments.mode
    source = PhotographSource(shipped_photographs())
    return execute(settings, source, modes=[one] if one else [*MODES], as_json=arguments.json)
