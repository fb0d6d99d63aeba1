"""The three kinds of process, as functions for `multiprocessing` to start.

The API process sends items in steps of a few, as an engine schedules them: the workers take every item of a step, then
check every byte of it (where an engine would run its model), then report; only then comes the next step. So
at most one step is in flight, its items are leased and pinned together, and the clock of an item, which runs from
the moment the API process takes it up until the last worker has its tensors at hand, never includes the checking.

Any process that sees another's end of a pipe closed stops too, so that one death ends them all; the API process closes
and unlinks the store on the way out.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import NoReturn, TypeVar, cast

from shmstore.demo.images import ImageError
from shmstore.demo.messages import (
    Failure,
    Finish,
    Link,
    Opening,
    PeerLostError,
    Progress,
    Ready,
    Request,
    StepReport,
    Taken,
    Tally,
)
from shmstore.demo.processing import Item, ItemSource, PreparedItem, item_bytes, item_digest
from shmstore.demo.transports import TRANSPORTS, Receiver, Sender, TransportSettings

_Message = TypeVar("_Message")

SHARE_OF_DATA = 0.6
"""The default capacity, as a part of the bytes of all distinct items: too small for them, by design."""
SHARE_OF_SHM = 0.8
"""The default capacity takes no more than this part of what is free in shared memory."""


@dataclass(frozen=True)
class RunSettings:
    """What one run is to do; the same for each mode that is compared."""

    workers: int = 2
    capacity: int | None = None
    """Bytes of the store's data region; None: `SHARE_OF_DATA` of the items."""
    rounds: int = 5
    """How many times every item is asked for."""
    seed: int = 0
    """Of the order of the requests."""
    in_flight: int = 4
    """Requests of one step: sent before the first of them must be reported."""
    spoil: int | None = None
    """Number of a request whose digest is sent with one bit wrong, to show that a wrong byte would be seen."""


@dataclass(frozen=True)
class Measured:
    """Figures of one mode, from its API process."""

    mode: str
    distinct: int
    """Distinct items."""
    distinct_bytes: int
    capacity: int | None
    """Bytes of the store's data region; None where there is none."""
    requests: int
    payload_bytes: int
    """Bytes of the tensors of all requests, each counted once however many workers it went to."""
    checked: int
    """Items that a worker took and compared with their digest: requests times workers."""
    mismatches: int
    """Of these, those with a byte that differed."""
    mismatched_names: tuple[str, ...]
    processing_s: float
    """Of the Hugging Face processor, once for each distinct item, before the clock of the transport starts."""
    hashing_s: float
    """Of the content hashes, likewise."""
    transport_s: float
    """Sum over the steps: from taking up its first item until the last worker has its last item at hand."""
    total_s: float
    """Wall time of all steps, checking included."""
    latencies_ns: tuple[int, ...]
    """Of each request, from taking up the item until the last worker has its tensors at hand."""
    hits: int
    evictions: int
    inline_fallbacks: int
    copied_bytes: int
    """By all processes: into and out of pipes, the store, and pickles."""
    piped_bytes: int
    """By all processes: written to pipes."""


def api_process(
    mode: str,
    settings: RunSettings,
    source: ItemSource,
    store_name: str,
    free_shm: int,
    engine: Link,
    status: Connection,
) -> None:
    """Prepare the items, send every request through the engine, and tell the supervisor what was `Measured`."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore_termination()  # a second one must not cut the way out short
        sys.exit(128 + number)  # as an exception, so that the store is closed on the way out

    def ignore_termination() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def prepare_and_send(supervisor: Link) -> Measured:
        items: list[PreparedItem] = []
        for item in source:
            items.append(item)
            supervisor.send(Progress("processing", len(items), len(source)))
        capacity = settings.capacity or default_capacity(items, free_shm)
        sender = TRANSPORTS[mode].sender(TransportSettings(settings.workers, store_name, capacity))
        try:
            run = _ApiRun(settings, items, sender, engine, supervisor)
            return run.measure(mode, capacity if TRANSPORTS[mode].keeps_segment else None)
        finally:
            ignore_termination()
            sender.close()

    def body() -> None:
        supervisor = Link(status, status)
        try:
            measured = prepare_and_send(supervisor)
        finally:
            ignore_termination()  # it is on its way out already, and Python's own exit must not be interrupted
        supervisor.send(measured)

    signal.signal(signal.SIGTERM, stop)
    _guarded("the API process", status, body)


def engine_process(workers: tuple[Link, ...], api: Link, status: Connection) -> None:
    """Pass each request to every worker and each report to the API process, payloads unseen."""

    def body() -> None:
        by_connection = {worker.incoming: worker for worker in workers}
        tallies = 0
        while tallies < len(workers):
            for ready in wait([api.incoming, *by_connection]):
                if ready is api.incoming:
                    message = api.receive()
                    payload = api.receive_bytes() if isinstance(message, Request) else None
                    for worker in workers:
                        worker.send(message)
                        if payload is not None:
                            worker.send_bytes(payload)
                else:
                    report = by_connection[cast(Connection, ready)].receive()
                    tallies += isinstance(report, Tally)
                    api.send(report)
        links = (api, *workers)
        sent = sum(link.sent for link in links)
        api.send(Tally("engine", copied=sent + sum(link.received for link in links), piped=sent))

    _guarded("the engine process", status, body)


def worker_process(mode: str, rank: int, engine: Link, status: Connection) -> None:
    """Take the items of each step, then compare every byte of them with what was sent."""

    def body() -> None:
        receiver = TRANSPORTS[mode].receiver(cast(Opening, engine.receive()).opening, rank)
        try:
            engine.send(Ready(rank))
            while _take_step(rank, engine, receiver):
                pass
        finally:
            receiver.close()
        copied = engine.sent + engine.received + receiver.copied
        engine.send(Tally(f"worker {rank}", copied=copied, piped=engine.sent))

    _guarded(f"worker {rank}", status, body)


def _take_step(rank: int, engine: Link, receiver: Receiver) -> bool:
    """Take, check and report one step; False where `Finish` came instead."""
    held: list[tuple[Request, Item, int]] = []
    while not held or not held[-1][0].last:
        message = engine.receive()
        if isinstance(message, Finish):
            return False
        item = receiver.unpack(engine.receive_bytes(), message.inline)
        held.append((message, item, time.monotonic_ns()))
    taken = tuple(Taken(request.number, at, item_digest(item) == request.digest) for request, item, at in held)
    del item
    held.clear()  # before the report: whoever reads it may count on the room that these views took
    engine.send(StepReport(rank, taken))
    return True


def default_capacity(items: list[PreparedItem], free_shm: int) -> int:
    """Return a capacity that does not hold all items, yet the largest of them, as far as `free_shm` bytes allow."""
    sizes = [item_bytes(item.tensors) for item in items]
    wanted = max(int(sum(sizes) * SHARE_OF_DATA), max(sizes) + (1 << 20))
    return max(1, min(wanted, int(free_shm * SHARE_OF_SHM)))


def request_order(items: int, rounds: int, seed: int) -> list[int]:
    """Return the index of the item of each request: each item once a round, every round in an order of its own."""
    chooser = random.Random(seed)
    order: list[int] = []
    for _ in range(rounds):
        once = list(range(items))
        chooser.shuffle(once)
        order += once
    return order


class _ApiRun:
    """The requests of one mode: their order, their steps, and what is measured on the way."""

    def __init__(
        self, settings: RunSettings, items: list[PreparedItem], sender: Sender, engine: Link, supervisor: Link
    ) -> None:
        self._settings = settings
        self._items = items
        self._digests = [item_digest(item.tensors) for item in items]  # before anything is sent
        self._sizes = [item_bytes(item.tensors) for item in items]
        self._sender = sender
        self._engine = engine
        self._supervisor = supervisor
        self._order = request_order(len(items), settings.rounds, settings.seed)
        self._mismatched: list[str] = []
        self._checked = 0

    def measure(self, mode: str, capacity: int | None) -> Measured:
        """Open the workers' side, send all steps, end the other processes, and return the figures."""
        self._engine.send(Opening(self._sender.opening))
        for _ in range(self._settings.workers):
            self._expect(Ready)
        latencies: list[int] = []
        transport_ns = 0
        start = time.perf_counter()
        for step in self._steps():
            started, taken = self._run_step(step)
            latencies += [taken[number] - started[number] for number in step]
            transport_ns += max(taken.values()) - started[step.start]
            self._supervisor.send(Progress("sending", step.stop, len(self._order)))
        total_s = time.perf_counter() - start
        self._engine.send(Finish())
        tallies: list[Tally] = [self._expect(Tally) for _ in range(self._settings.workers + 1)]
        counts = self._sender.counts()
        distinct = dict(zip((item.key for item in self._items), self._sizes, strict=True))
        return Measured(
            mode=mode,
            distinct=len(distinct),
            distinct_bytes=sum(distinct.values()),
            capacity=capacity,
            requests=len(self._order),
            payload_bytes=sum(self._sizes[index] for index in self._order),
            checked=self._checked,
            mismatches=len(self._mismatched),
            mismatched_names=tuple(sorted(set(self._mismatched))),
            processing_s=sum(item.processing_s for item in self._items),
            hashing_s=sum(item.hashing_s for item in self._items),
            transport_s=transport_ns / 1e9,
            total_s=total_s,
            latencies_ns=tuple(latencies),
            hits=counts.hits,
            evictions=counts.evictions,
            inline_fallbacks=counts.inline_fallbacks,
            copied_bytes=self._engine.sent
            + self._engine.received
            + counts.copied
            + sum(tally.copied for tally in tallies),
            piped_bytes=self._engine.sent + sum(tally.piped for tally in tallies),
        )

    def _steps(self) -> Iterator[range]:
        total, length = len(self._order), self._settings.in_flight
        return (range(first, min(first + length, total)) for first in range(0, total, length))

    def _run_step(self, step: range) -> tuple[dict[int, int], dict[int, int]]:
        """Send one step and wait for its reports; return when each request began and when its last worker had it."""
        started: dict[int, int] = {}
        for number in step:
            index = self._order[number]
            digest = self._digests[index]
            if number == self._settings.spoil:
                digest = bytes([digest[0] ^ 1]) + digest[1:]
            started[number] = time.monotonic_ns()
            parcel = self._sender.pack(self._items[index].key, self._items[index].tensors)
            self._engine.send(Request(number, digest, parcel.inline, last=number == step[-1]))
            self._engine.send_bytes(parcel.payload)
        taken_by_all: dict[int, int] = dict.fromkeys(step, 0)
        for _ in range(self._settings.workers):
            report = self._expect(StepReport)
            for taken in report.taken:
                taken_by_all[taken.number] = max(taken_by_all[taken.number], taken.taken_ns)
                self._checked += 1
                if not taken.equal:
                    self._mismatched.append(self._items[self._order[taken.number]].name)
        return started, taken_by_all

    def _expect(self, kind: type[_Message]) -> _Message:
        message = self._engine.receive()
        if not isinstance(message, kind):
            raise TypeError(f"expected {kind.__name__} from the engine process, got {message!r}")
        return message


def _guarded(process: str, status: Connection, body: Callable[[], None]) -> None:
    """Run `body`; a failure is told to the supervisor in one line and becomes exit status 1.

    The loss of a peer is none: what is to be reported is how that one went.
    """
    try:
        body()
    except PeerLostError:
        return
    except Exception as error:
        text = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
        with suppress(PeerLostError):
            Link(status, status).send(Failure(process, text, usage=isinstance(error, ImageError)))
        sys.exit(1)
