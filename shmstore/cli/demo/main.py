"""`shmstore demo`: real photographs through a real processor to every worker, with each kind of cache between."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shmstore.cli.command import (
    EXIT_OK,
    EXIT_USAGE,
    EXIT_WRONG,
    Command,
    positive_argument,
    size_argument,
)
from shmstore.cli.commands.common import complain
from shmstore.cli.demo import messages
from shmstore.cli.demo.images import SHIPPING_PACKAGES, ImageError, folder_photographs, shipped_photographs
from shmstore.cli.demo.modes import MODES
from shmstore.cli.demo.processing import PROCESSING_PACKAGES, PhotographSource, PictureSource, usable_photographs
from shmstore.cli.demo.records import MAX_WORKERS, RunSettings
from shmstore.cli.demo.report import DemoReport, make_report, print_report
from shmstore.cli.demo.supervisor import DemoError, Observer, SilentObserver, run_mode

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

    Raises as `run_mode` does.
    """
    watching = observer or SilentObserver()
    return make_report(settings, [run_mode(mode, settings, source, watching) for mode in modes])


def missing_packages(packages: Sequence[str]) -> list[str]:
    """Return those of `packages` that cannot be imported here."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


class ProgressBar:
    """An `Observer` that draws one bar for each mode and stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def started(self, mode: str, pids: dict[str, int]) -> None:
        """Nothing to draw yet: how many items there are is still to be said."""

    def progressed(self, mode: str, progress: messages.Progress) -> None:
        """Move the bar of this mode and stage."""
        key = (mode, progress.stage)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(f"{mode}: {progress.stage}")
        self._progress.update(self._tasks[key], completed=progress.done, total=progress.total)


def _workers_argument(text: str) -> int:
    number = positive_argument(text)
    if number > MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"at most {MAX_WORKERS}, each a process of some 150 MB: {text!r}")
    return number


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=(*MODES, ALL),
        default=ALL,
        help=f"{'; '.join(f'{mode.name}: {mode.summary}' for mode in MODES.values())} (default {ALL}, one by one)",
    )
    parser.add_argument(
        "--workers",
        type=_workers_argument,
        default=2,
        metavar="N",
        help=f"worker processes (default 2, at most {MAX_WORKERS})",
    )
    parser.add_argument(
        "--capacity",
        type=size_argument,
        metavar="SIZE",
        help="bytes of items that each mode may keep, e.g. 64M or 1GiB (default: too few for all, so that it evicts)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_argument,
        default=5,
        metavar="N",
        help="times that each image is asked for (default 5)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the requests (default 0)")
    parser.add_argument(
        "--in-flight", type=positive_argument, default=4, metavar="N", help="requests under way at a time (default 4)"
    )
    parser.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="your own images; one that cannot be used is skipped, with a warning (default: photographs that "
        "scikit-image and scikit-learn ship)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else, on stdout")


def _run(arguments: argparse.Namespace) -> int:
    settings = RunSettings(
        workers=arguments.workers,
        capacity=arguments.capacity,
        rounds=arguments.rounds,
        seed=arguments.seed,
        in_flight=arguments.in_flight,
    )
    try:
        paths = folder_photographs(arguments.images) if arguments.images else None
        missing = missing_packages(PROCESSING_PACKAGES if paths else PROCESSING_PACKAGES + SHIPPING_PACKAGES)
        if missing:
            return complain(
                "demo", f"{', '.join(missing)} not installed; in the source tree: pip install '.[demo]'", EXIT_USAGE
            )
        paths = _usable(arguments.images, paths) if paths else shipped_photographs()
    except ImageError as error:
        return complain("demo", error, EXIT_USAGE)
    except KeyboardInterrupt:
        return complain("demo", "interrupted", EXIT_INTERRUPTED)
    modes = tuple(MODES) if arguments.mode == ALL else (arguments.mode,)
    return execute(settings, PhotographSource(paths), modes=modes, as_json=arguments.json)


def _usable(folder: Path, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return those of somebody's own images that can be used, and warn of each of the others."""
    with _terminated_as_interrupted(), _progress_bar() as bar:
        usable, errors = usable_photographs(
            paths, lambda done: bar.progressed("images", messages.Progress("looking at them", done, len(paths)))
        )
    for error in errors:
        complain("demo", f"skipped {error}")
    if not usable:
        raise ImageError(f"{folder}: none of its {len(paths)} images can be used")
    return usable


def execute(
    settings: RunSettings,
    source: PictureSource,
    *,
    modes: Sequence[str] = tuple(MODES),
    as_json: bool = False,
    observer: Observer | None = None,
) -> int:
    """Run each of `modes`, print the report on stdout, and return the exit status; errors become a line on stderr.

    Without an `observer` a progress bar is drawn on stderr, where that is a terminal.
    """
    try:
        with _terminated_as_interrupted(), _progress_bar() as bar:
            report = run(settings, source, modes=modes, observer=observer or bar)
    except ImageError as error:
        return complain("demo", error, EXIT_USAGE)
    except DemoError as error:
        if as_json:
            print(json.dumps({"ok": False, "error": str(error)}))
        return complain("demo", error, EXIT_WRONG)
    except KeyboardInterrupt:
        return complain("demo", "interrupted", EXIT_INTERRUPTED)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        print_report(report, Console())
    return EXIT_OK if report.ok else EXIT_WRONG


@contextmanager
def _progress_bar() -> Iterator[Observer]:
    """Yield an observer that draws on stderr where that is a terminal, and a silent one where it is not."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield SilentObserver()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBar(progress)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C inside, so that it leaves as little behind."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


COMMAND = Command(
    name="demo",
    summary="send real photographs to every worker, with each kind of cache between, side by side",
    example="shmstore demo --mode shm --workers 4 --capacity 64M --rounds 10",
    add_arguments=_add_arguments,
    run=_run,
)
