"""The demo: sends real photographs through a real processor to every worker, with each kind of cache."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.demo import messages
from examples.demo.images import SHIPPING_PACKAGES, ImageError, folder_photographs, shipped_photographs
from examples.demo.modes import MODES
from examples.demo.processing import PROCESSING_PACKAGES, PhotographSource, PictureSource
from examples.demo.records import MAX_WORKERS, DemoReport, RunSettings
from examples.demo.report import print_report
from examples.demo.supervisor import DemoError, Observer, run_mode
from shmstore.cli.command import (
    EXIT_OK,
    EXIT_USAGE,
    EXIT_WRONG,
    number_argument,
    parse_size,
    positive_argument,
)
from shmstore.cli.commands.common import add_json, print_json, shown

ALL = "all"
EXIT_INTERRUPTED = 128 + signal.SIGINT


def run(
    settings: RunSettings,
    source: PictureSource,
    *,
    modes: Sequence[str] = tuple(MODES),
    observer: Observer | None = None,
) -> DemoReport:
    """Run the same requests in each of `modes`, one after the other, and return the figures.

    Raises the errors of `run_mode`.
    """
    reports = [run_mode(mode, settings, source, observer or Observer()) for mode in modes]
    return replace(reports[0], modes={mode: one for report in reports for mode, one in report.modes.items()})


class ProgressBar(Observer):
    """Draws one bar for each mode and stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def progressed(self, mode: str, progress: messages.Progress) -> None:
        """Move the bar of this mode and stage."""
        key = (mode, progress.stage)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"{mode}: {progress.stage}")
        self._progress.update(self._tasks[key], completed=progress.done, total=progress.total)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=(*MODES, ALL),
        default=ALL,
        help=f"{'; '.join(f'{mode.name}: {mode.summary}' for mode in MODES.values())} (default {ALL}, in turn)",
    )
    parser.add_argument(
        "--workers",
        type=number_argument(int, 1, MAX_WORKERS),
        default=2,
        metavar="N",
        help=f"worker processes, of some 150 MB each (default 2, at most {MAX_WORKERS})",
    )
    parser.add_argument(
        "--capacity",
        type=parse_size,
        metavar="SIZE",
        help="bytes of items that each mode may keep, such as 64M or 1GiB (default: too small for all, so it evicts)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_argument,
        default=5,
        metavar="N",
        help="number of times that each image is requested (default 5)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the order of the requests (default 0)"
    )
    parser.add_argument(
        "--in-flight", type=positive_argument, default=4, metavar="N", help="requests in flight at a time (default 4)"
    )
    parser.add_argument(
        "--kill",
        choices=("api",),
        help="kill the API process halfway, start all again, and show that the store kept every hit (mode shm only)",
    )
    parser.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="folder of your own images (default: photographs of scikit-image and scikit-learn)",
    )
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    settings = RunSettings(
        workers=arguments.workers,
        capacity=arguments.capacity,
        rounds=arguments.rounds,
        seed=arguments.seed,
        in_flight=arguments.in_flight,
        kill=arguments.kill is not None,
    )
    if settings.kill and (problem := _misfit(arguments)):
        return complain(f"--kill api {problem}", EXIT_USAGE)
    try:
        paths = folder_photographs(arguments.images) if arguments.images else None
        needed = PROCESSING_PACKAGES if paths else PROCESSING_PACKAGES + SHIPPING_PACKAGES
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            return complain(
                f"{', '.join(missing)} not installed; in the source tree: pip install '.[demo]'", EXIT_USAGE
            )
        paths = paths or shipped_photographs()
    except ImageError as error:
        return complain(error, EXIT_USAGE)
    mode = "shm" if settings.kill else arguments.mode
    modes = tuple(MODES) if mode == ALL else (mode,)
    return execute(settings, PhotographSource(paths), modes=modes, as_json=arguments.json)


def _misfit(arguments: argparse.Namespace) -> str | None:
    """Return which option does not go with --kill, and what to do; None if all do."""
    if arguments.mode not in (ALL, "shm"):
        return f"needs the mode whose items survive, not --mode {arguments.mode}: use --mode shm"
    if arguments.capacity is not None:
        return "needs a store that holds all images: leave out --capacity"
    if arguments.rounds < 2:
        return "needs each image before and after the kill, not --rounds 1: use --rounds 2 or more"
    return None


def execute(
    settings: RunSettings,
    source: PictureSource,
    *,
    modes: Sequence[str] = tuple(MODES),
    as_json: bool = False,
    observer: Observer | None = None,
) -> int:
    """Run each of `modes`, print the report on stdout, and return the exit status; print an error as a line on stderr.

    Without an `observer`, draw a progress bar on stderr if that is a terminal.
    """
    try:
        with _terminated_as_interrupted(), _progress_bar() as bar:
            report = run(settings, source, modes=modes, observer=observer or bar)
    except ImageError as error:
        return complain(error, EXIT_USAGE)
    except DemoError as error:
        if as_json:
            print_json({"ok": False, "error": str(error)})
        return complain(error, EXIT_WRONG)
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_INTERRUPTED)
    if as_json:
        print_json(report.as_json())
    else:
        print_report(report, Console())
    return EXIT_OK if report.ok else EXIT_WRONG


@contextmanager
def _progress_bar() -> Iterator[Observer]:
    """Yield an observer that draws on stderr if that is a terminal, and otherwise does nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Observer()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBar(progress)


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


def complain(error: object, status: int = EXIT_WRONG) -> int:
    """Print an error on stderr and return the exit status."""
    print(f"demo: {shown(str(error))}", file=sys.stderr)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status: 0, 1 (something was wrong) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    _add_arguments(parser)
    try:
        return _run(parser.parse_args(argv))
    except SystemExit as stop:  # argparse has printed the reason
        return EXIT_OK if stop.code is None else EXIT_USAGE
