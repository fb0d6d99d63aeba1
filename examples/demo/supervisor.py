"""Starts the processes of one run, watches them, and leaves nothing behind, whatever happens to them.

The sentinel of a process shows its end, without a timeout. A process that stops only because another one is gone says
nothing, so the error names the process that ended first. At the end, also after an error or Ctrl-C, every process is
ended and reaped, and the segment is unlinked if the API process could not do so.

With `RunSettings.kill` a run has two generations of processes and one store. The supervisor kills the first API
process, waits until the others have ended because of it, and starts the second generation.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from examples.demo.api import api_process
from examples.demo.messages import Failure, Halfway, Link, Progress
from examples.demo.processes import engine_process, worker_process
from examples.demo.processing import PictureSource
from examples.demo.records import DemoReport, RunSettings

CONTEXT: Any = multiprocessing.get_context("spawn")
"""Starts the processes."""
SHM = Path("/dev/shm")


class DemoError(RuntimeError):
    """The run failed; the message names the process that failed, and how it failed."""


class Observer:
    """Gets the events of a run in the supervisor's own process; this one ignores them."""

    def started(self, mode: str, pids: dict[str, int]) -> None:
        """Note that all processes of this mode run; `pids` by their names, such as "worker 0"."""

    def progressed(self, mode: str, progress: Progress) -> None:
        """Note how far the API process is."""


@dataclass(frozen=True)
class Child:
    """A process of a run."""

    name: str
    process: BaseProcess
    status: Connection
    """Read end of the pipe from the process to the supervisor."""


def run_mode(mode: str, settings: RunSettings, source: PictureSource, observer: Observer) -> DemoReport:
    """Run one mode from start to end in its own processes, and return its figures.

    Raises `DemoError` if a process failed or died. When it returns or raises, all its processes are reaped and its
    segment is gone.
    """
    store_name = f"shmstore-demo-{os.getpid()}-{secrets.token_hex(4)}"
    children: list[Child] = []
    killed: Halfway | None = None
    clean = False
    try:
        while True:  # twice if a process is to be killed
            with interrupts_held_back():
                _start(mode, settings, source, store_name, killed, children)
            observer.started(mode, {child.name: child.process.pid or 0 for child in children})
            outcome = _watch(mode, children, observer)
            if isinstance(outcome, DemoReport):
                clean = True
                return outcome
            killed = Halfway(outcome.known, time.monotonic_ns())
            children[0].process.kill()
            end_all(children, in_order=True)  # the others end because their peer is gone
    finally:
        with interrupts_held_back():  # a second Ctrl-C must not interrupt this
            end_all(children, in_order=clean)
            (SHM / store_name).unlink(missing_ok=True)  # of an API process that was killed


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes started inside never see it.

    Ctrl-C goes to all processes of the terminal. Only the supervisor may act on it, so the others inherit its mask.
    """
    resource_tracker.ensure_running()  # its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    mode: str,
    settings: RunSettings,
    source: PictureSource,
    store_name: str,
    killed: Halfway | None,
    children: list[Child],
) -> None:
    """Start API, engine and workers, and append each to `children` as soon as it runs."""
    mine: list[Link] = []

    def link_pair() -> tuple[Link, Link]:
        (one_in, two_out), (two_in, one_out) = CONTEXT.Pipe(duplex=False), CONTEXT.Pipe(duplex=False)
        pair = Link(one_in, one_out), Link(two_in, two_out)
        mine.extend(pair)
        return pair

    try:
        api_side, engine_to_api = link_pair()
        worker_links = [link_pair() for _ in range(settings.workers)]
        api_arguments = (mode, settings, source, store_name, killed, api_side)
        start_one("the API process", api_process, api_arguments, children)
        engine_arguments = (tuple(mine for mine, _ in worker_links), engine_to_api)
        start_one("the engine process", engine_process, engine_arguments, children)
        for rank, (_, worker_side) in enumerate(worker_links):
            start_one(f"worker {rank}", worker_process, (rank, worker_side), children)
    finally:
        for link in mine:
            link.close()  # a copy here would hide from each process that its peer is gone


def start_one(name: str, target: Any, arguments: tuple[Any, ...], children: list[Child]) -> None:
    """Start a process with these arguments and its end of a status pipe, and append it to `children`."""
    status, childs_end = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=target, args=(*arguments, childs_end), name=f"demo: {name}")
    process.start()
    childs_end.close()
    children.append(Child(name, process, status))


def _watch(mode: str, children: list[Child], observer: Observer) -> DemoReport | Halfway:
    """Return the figures of the API process when every process has ended normally, or its `Halfway` at once."""
    by_handle: dict[Any, Child] = {}
    for child in children:
        by_handle[child.status] = by_handle[child.process.sentinel] = child
    report: DemoReport | None = None
    while by_handle:
        for handle in wait(list(by_handle)):
            child = by_handle[handle]
            if handle is child.status:
                try:
                    message = child.status.recv()
                except (EOFError, OSError):  # it has closed its end
                    del by_handle[handle]
                    continue
                if isinstance(message, Failure):
                    raise DemoError(f"{child.name}: {message.text}")
                if isinstance(message, Progress):
                    observer.progressed(mode, message)
                elif isinstance(message, Halfway):
                    return message
                else:
                    report = message
            elif child.status not in by_handle:  # its messages come first
                child.process.join()
                del by_handle[handle]
                if code := child.process.exitcode:
                    end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                    raise DemoError(f"{child.name} (pid {child.process.pid}) {end}")
    if report is None:
        raise DemoError("every process ended normally, but the API process sent no figures")
    return report


def end_all(children: list[Child], *, in_order: bool) -> None:
    """Reap every process and forget it; unless the run ended in order, kill it first."""
    if not in_order:
        for child in children:
            child.process.kill()
    while children:
        children[0].process.join()
        child = children.pop(0)
        child.process.close()
        child.status.close()
