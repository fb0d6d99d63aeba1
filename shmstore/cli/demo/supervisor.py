"""Starts the processes of one run, watches them, and leaves nothing behind whatever happens to them.

A process's end shows on its sentinel, without a timeout. A process that stops only because another has gone does so in
silence, so that what is reported is the one that went first. On the way out, after an error or Ctrl-C too, every
process is ended and reaped, and the segment of an API process that could not unlink it is unlinked from here.
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
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from shmstore.cli.demo.api import api_process
from shmstore.cli.demo.images import ImageError
from shmstore.cli.demo.messages import Failure, Link, Progress
from shmstore.cli.demo.modes import MODES
from shmstore.cli.demo.processes import engine_process, worker_process
from shmstore.cli.demo.processing import PictureSource
from shmstore.cli.demo.records import Measured, RunSettings

_SHM = Path("/dev/shm")
GRACE_S = 10.0
"""How long a process that was asked to end may take before it is killed."""


class DemoError(RuntimeError):
    """The run could not be finished; the message names the process that failed, and how."""


class Observer(Protocol):
    """Is told what happens while a run goes on, in the supervisor's own process."""

    def started(self, mode: str, pids: dict[str, int]) -> None:
        """All processes of this mode were started; `pids` by their names, e.g. "worker 0"."""
        ...

    def progressed(self, mode: str, progress: Progress) -> None:
        """The API process has come this far."""
        ...


class SilentObserver:
    """Lets everything pass."""

    def started(self, mode: str, pids: dict[str, int]) -> None:
        """Nothing to do."""

    def progressed(self, mode: str, progress: Progress) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class _Child:
    name: str
    process: BaseProcess
    status: Connection
    """Read end; what the process tells the supervisor."""


def run_mode(mode: str, settings: RunSettings, source: PictureSource, observer: Observer) -> Measured:
    """Run one mode from start to end in processes of its own, and return its figures.

    Raises `DemoError` where a process failed or died, and `ImageError` where the images are to blame. When it returns
    or raises, all its processes are reaped and its segment is gone.
    """
    store_name = f"shmstore-demo-{os.getpid()}-{secrets.token_hex(4)}"
    children: list[_Child] = []
    clean = False
    try:
        with _interrupts_held_back(), _refusals_told():
            _start(mode, settings, source, store_name, children)
        observer.started(mode, {child.name: _pid(child.process) for child in children})
        measured = _watch(mode, children, observer)
        clean = True
        return measured
    finally:
        with _interrupts_held_back():  # a second Ctrl-C must not cut this short
            _end(children, in_order=clean)
            if MODES[mode].keeps_segment:
                # That of an API process killed before it could do so, perhaps half made; nobody is left to use it.
                (_SHM / store_name).unlink(missing_ok=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C wait until the end of the block; processes started inside never see it.

    Ctrl-C goes to all processes of the terminal; only the supervisor is to act on it, and the others inherit its mask.
    """
    resource_tracker.ensure_running()  # it would unblock the signal when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Make what the system refuses to a start, e.g. one more process or file descriptor, a `DemoError`."""
    try:
        yield
    except OSError as error:
        raise DemoError(f"the processes could not be started: {error} (fewer --workers need less)") from error


def _start(mode: str, settings: RunSettings, source: PictureSource, store_name: str, children: list[_Child]) -> None:
    """Start API, engine and workers, appending each to `children` as soon as it runs."""
    context = multiprocessing.get_context("spawn")
    mine: list[Link] = []

    def link_pair() -> tuple[Link, Link]:
        (one_in, two_out), (two_in, one_out) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        pair = Link(one_in, one_out), Link(two_in, two_out)
        mine.extend(pair)
        return pair

    try:
        api_side, engine_to_api = link_pair()
        worker_links = [link_pair() for _ in range(settings.workers)]
        stat = os.statvfs(_SHM)
        api_arguments = (mode, settings, source, store_name, stat.f_bavail * stat.f_frsize, api_side)
        _start_one(context, "the API process", api_process, api_arguments, children)
        engine_arguments = (tuple(mine for mine, _ in worker_links), engine_to_api)
        _start_one(context, "the engine process", engine_process, engine_arguments, children)
        for rank, (_, worker_side) in enumerate(worker_links):
            _start_one(context, f"worker {rank}", worker_process, (rank, worker_side), children)
    finally:
        for link in mine:
            link.close()  # a copy kept here would hide from each process that its peer has gone


def _start_one(
    context: SpawnContext, name: str, target: Any, arguments: tuple[Any, ...], children: list[_Child]
) -> None:
    status, childs_end = context.Pipe(duplex=False)
    try:
        process = context.Process(target=target, args=(*arguments, childs_end), name=f"shmstore demo: {name}")
        process.start()
    except BaseException:
        status.close()
        raise
    finally:
        childs_end.close()
    children.append(_Child(name, process, status))


def _watch(mode: str, children: list[_Child], observer: Observer) -> Measured:
    """Return the API process's figures once every process has ended as it should."""
    by_handle: dict[Any, _Child] = {}
    for child in children:
        by_handle[child.status] = by_handle[child.process.sentinel] = child
    measured: Measured | None = None
    while by_handle:
        for handle in wait(list(by_handle)):
            child = by_handle[handle]
            if handle is child.status:
                message = _next_message(child.status)
                if message is None:
                    del by_handle[handle]
                elif isinstance(message, Failure):
                    raise ImageError(message.text) if message.usage else DemoError(f"{child.name}: {message.text}")
                elif isinstance(message, Progress):
                    observer.progressed(mode, message)
                else:
                    measured = message
            elif child.status not in by_handle:  # what it said comes first
                child.process.join()
                del by_handle[handle]
                if child.process.exitcode != 0:
                    raise DemoError(f"{child.name} (pid {child.process.pid}) {_how_it_ended(child.process)}")
    if measured is None:
        raise DemoError("every process ended, and none said why")
    return measured


def _next_message(status: Connection) -> Any:
    """Return what the process says next, or None where it has closed its end."""
    try:
        return status.recv()
    except (EOFError, OSError):
        return None


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def _pid(process: BaseProcess) -> int:
    return process.pid or 0


def _end(children: list[_Child], *, in_order: bool) -> None:
    """Reap every process; unless the run ended in order, ask those that still run to end first."""
    if not in_order:
        for child in children:
            child.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        child.process.join(max(0.0, deadline - time.monotonic()))
        if child.process.exitcode is None:
            child.process.kill()
            child.process.join()
        child.process.close()
        child.status.close()
