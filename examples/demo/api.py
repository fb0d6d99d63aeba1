"""The API process: hashes the image of each request, processes it if it is not cached, sends it, and measures.

It sends requests in steps of a few, as an engine schedules them. The workers take every item of a step, then check
every byte (where an engine would run its model), then report. The next step begins after that. So at most one step is
in flight, and its items are leased and pinned together.

All items of a step are processed before its first request is sent. The clock of a request starts at the lookup in the
API process's cache, and stops when the last worker has the tensors. So it times the transport alone, without image
processor and checking. An item may be cached when its step is prepared, and evicted by an earlier request of the step:
then it is processed, and sent in a second attempt.

With `RunSettings.kill` there are two API processes, one after the other. The first one repeats the first half of the
requests until it is killed. The second one takes the store over and sends the other half.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import mean, median
from types import FrameType
from typing import NamedTuple, NoReturn

from examples.demo.messages import (
    FeatureCodec,
    Halfway,
    Killed,
    Link,
    Opening,
    Progress,
    Request,
    Signal,
    Taken,
    Tally,
    guarded,
    tally,
)
from examples.demo.modes import MODES
from examples.demo.processing import Picture, PictureSource, Processed, item_bytes, item_digest
from examples.demo.records import MEGABYTE, SHARE_OF_DATA, DemoReport, ModeFigures, Restart, RunSettings
from shmstore import CacheMissError
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    MultiModalFeatureSpec,
    PlaceholderRange,
    processor_cache_from_config,
)

SHARE_OF_SHM = 0.8
"""The default capacity is at most this share of the free shared memory."""
OVERHEAD = 1 << 16
"""More bytes than the key, the metadata and the prompt updates of one item take."""


class Expected(NamedTuple):
    """One image and what its workers must get; computed once before the run, without keeping the item.

    The last three are an entry of `Halfway.known`.
    """

    picture: Picture
    mm_hash: str
    digest: bytes
    nbytes: int


def api_process(
    mode: str,
    settings: RunSettings,
    source: PictureSource,
    store_name: str,
    free_shm: int,
    killed: Killed | None,
    engine: Link,
    status: Connection,
) -> None:
    """Load the images, send every request through the engine, and send the supervisor the `DemoReport`."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore_termination()  # a second signal must not interrupt the cleanup
        sys.exit(128 + number)  # as an exception, so that the store is closed

    def ignore_termination() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def load_and_send(supervisor: Link) -> DemoReport:
        expected: list[Expected] = []
        for picture in source:
            expected.append(Expected(picture, *killed.known[len(expected)]) if killed else _expect(picture))
            supervisor.send(Progress("loading" if killed else "processing", len(expected), len(source)))
        sizes = [one.nbytes for one in expected]
        capacity = settings.capacity or (room_for_all(sizes) if settings.kill else default_capacity(sizes, free_shm))
        config = MODES[mode].config(workers=settings.workers, capacity=capacity, store_name=store_name)
        opening_ns = time.monotonic_ns()
        cache = processor_cache_from_config(config)
        opened_ns = time.monotonic_ns()
        if cache is None:
            raise TypeError(f"this configuration has no cache to compare: {config.describe()}")
        try:
            engine.send(Opening(config, cache.handle))
            run = _Run(settings, expected, cache, engine, supervisor, second=killed is not None)
            report = run.measure(mode, capacity)
            if killed and cache.writer:
                report = replace(
                    report,
                    restart=Restart(
                        opened_s=(opened_ns - killed.at_ns) / 1e9,
                        opening_ms=(opened_ns - opening_ns) / 1e6,
                        answered_s=(run.answered_ns - killed.at_ns) / 1e9,
                        recovered=cache.writer.recovered,
                        hits_kept=run.hits_kept,
                    ),
                )
            return report
        finally:
            ignore_termination()
            if cache.writer:
                cache.writer.close(unlink=True)  # one that is killed leaves it to the next
            cache.close()

    def body() -> None:
        supervisor = Link(status, status)
        try:
            report = load_and_send(supervisor)
        finally:
            ignore_termination()  # the process is about to end, and Python's own exit must not be interrupted
        supervisor.send(report)

    signal.signal(signal.SIGTERM, stop)
    guarded(status, body)


def default_capacity(sizes: Sequence[int], free_shm: int) -> int:
    """Return a capacity that holds the largest item but not all items, as far as `free_shm` bytes allow."""
    wanted = max(int(sum(sizes) * SHARE_OF_DATA), max(sizes) + (1 << 20))
    return max(1, min(wanted, int(free_shm * SHARE_OF_SHM)))


def room_for_all(sizes: Sequence[int]) -> int:
    """Return a capacity that holds all items, even if a part of it is for small ones only."""
    return int(sum(sizes) * 1.05) + len(sizes) * OVERHEAD


def request_order(items: int, rounds: int, seed: int) -> list[int]:
    """Return the index of each request's image: each image once a round, and each round in another order."""
    chooser = random.Random(seed)
    order: list[int] = []
    for _ in range(rounds):
        once = list(range(items))
        chooser.shuffle(once)
        order += once
    return order


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest of `values` that at least `percent` of a hundred of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)  # rounded up, in integers
    return ordered[max(rank, 1) - 1]


def _supervisor_lives() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and parent.is_alive()


def _expect(picture: Picture) -> Expected:
    item, _ = picture.process()
    return Expected(picture, picture.mm_hash(), item_digest(item), item_bytes(item))


class _Run:
    """The requests of one API process: their order, their steps, and their figures."""

    def __init__(
        self,
        settings: RunSettings,
        expected: list[Expected],
        cache: BaseMultiModalProcessorCache,
        engine: Link,
        supervisor: Link,
        *,
        second: bool,
    ) -> None:
        self._settings = settings
        self._expected = expected
        self._cache = cache
        self._engine = engine
        self._supervisor = supervisor
        self._order = request_order(len(expected), settings.rounds, settings.seed)
        self._numbers = range(len(self._order))
        self._to_be_killed = bool(settings.kill) and not second
        if settings.kill:
            half = len(self._order) // 2
            self._numbers = self._numbers[half:] if second else self._numbers[:half]
        self._codec = FeatureCodec()
        self._processing_s: list[float] = []
        self._started: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._transport_ns = 0
        self._mismatched: list[str] = []
        self._checked = 0
        self._first_hits: dict[str, bool] = {}

    @property
    def answered_ns(self) -> int:
        """When each worker had the item of the first request, as `Taken.taken_ns`."""
        return self._taken[self._numbers.start]

    @property
    def hits_kept(self) -> int:
        """Images that were cached when they were requested for the first time."""
        return sum(self._first_hits.values())

    def measure(self, mode: str, capacity: int) -> DemoReport:
        """Send all steps, end the other processes, and return the figures."""
        for _ in range(self._settings.workers):
            self._engine.receive()  # READY
        before = self._accounts()
        requests, length = len(self._numbers), self._settings.in_flight
        steps = [self._numbers[first : first + length] for first in range(0, requests, length)]
        start = time.perf_counter()
        for step in steps:
            self._run_step(step)
            self._supervisor.send(Progress("sending", step.stop, len(self._order)))
        if self._to_be_killed:
            self._supervisor.send(Halfway(tuple(one[1:] for one in self._expected)))
            while _supervisor_lives():  # so the kill comes amid requests
                for step in steps:
                    self._run_step(step)
        total_s = time.perf_counter() - start
        after = self._accounts()
        sizes = {one.mm_hash: one.nbytes for one in self._expected}
        lookups = self._cache.make_stats()
        inline = self._cache.inline_full + self._cache.inline_too_large + self._cache.inline_late
        self._engine.send(Signal.FINISH)
        latencies_ns = [self._taken[number] - self._started[number] for number in self._numbers]
        transport_s = self._transport_ns / 1e9
        figures = ModeFigures(
            requests=requests,
            items_per_s=requests / transport_s,
            megabytes_per_s=sum(self._of(number).nbytes for number in self._numbers) / MEGABYTE / transport_s,
            latency_median_us=median(latencies_ns) / 1e3,
            latency_p99_us=percentile(latencies_ns, 99) / 1e3,
            hit_ratio=lookups.hits / lookups.total,
            hits=lookups.hits,
            bytes_piped=sum(after[name].piped - before[name].piped for name in after),
            bytes_copied=sum(after[name].copied - before[name].copied for name in after),
            sent_inline=inline,
            checked=self._checked,
            mismatches=len(self._mismatched),
            mismatched_names=tuple(sorted(set(self._mismatched))),
            processed=len(self._processing_s),
            processing_ms=mean(self._processing_s) * 1e3 if self._processing_s else 0,
            total_s=total_s,
            memory={
                name: replace(now.memory, growth=now.memory.own - before[name].memory.own)
                for name, now in after.items()
            },
        )
        return DemoReport(
            settings=self._settings,
            distinct_items=len(sizes),
            distinct_bytes=sum(sizes.values()),
            capacity=capacity,
            modes={mode: figures},
        )

    def _accounts(self) -> dict[str, Tally]:
        """Return the tally of each process by its name, while all of them have everything open."""
        stored = self._cache.writer.stats().put_bytes if self._cache.writer else 0
        tallies = [tally("API", (self._engine,), self._codec, stored)]
        self._engine.send(Signal.ACCOUNT)
        tallies += [self._engine.receive() for _ in range(self._settings.workers + 1)]
        return {one.process: one for one in sorted(tallies, key=lambda one: (len(one.process), one.process))}

    def _run_step(self, step: range) -> None:
        pending: list[int] = list(step)
        while pending:
            pending = self._attempt(pending)

    def _attempt(self, numbers: Sequence[int]) -> list[int]:
        """Send these requests and wait for the reports; return those whose item must be processed first."""
        inputs = {number: self._prepare(self._of(number)) for number in numbers}
        sent: list[int] = []
        start = time.monotonic_ns()
        for number in numbers:
            if self._send_one(number, inputs.pop(number)):
                sent.append(number)
        self._engine.send(Signal.STEP_END)
        self._collect()
        self._transport_ns += max((self._taken[number] - start for number in sent), default=0)
        return [number for number in numbers if number not in sent]

    def _prepare(self, one: Expected) -> Processed | None:
        """Return the item and its prompt updates, or None if they are cached."""
        known = self._cache.is_cached_item(one.picture.mm_hash())  # a request brings its image, not the hash
        self._first_hits.setdefault(one.mm_hash, known)
        if known:
            return None
        start = time.perf_counter()
        processed = one.picture.process()
        self._processing_s.append(time.perf_counter() - start)
        return processed

    def _send_one(self, number: int, given: Processed | None) -> bool:
        """Send one request, and start its clock; return False if its item was evicted since `_prepare`."""
        one = self._of(number)
        started = time.monotonic_ns()
        try:
            data, updates = self._cache.get_and_update_item(given, one.mm_hash)
        except CacheMissError:
            return False
        self._started[number] = started
        update = updates[0].with_item_idx(0)
        place = PlaceholderRange(0, len(update.content))  # the only item of a prompt
        self._engine.send(Request(number, one.digest))
        feature = MultiModalFeatureSpec(data, update.modality, one.mm_hash, place)
        self._engine.send_bytes(self._codec.encode([feature]))
        return True

    def _collect(self) -> None:
        """Wait until each worker has reported on this step."""
        for _ in range(self._settings.workers):
            report: list[Taken] = self._engine.receive()
            for taken in report:
                self._taken[taken.number] = max(self._taken.get(taken.number, 0), taken.taken_ns)
                self._checked += 1
                if not taken.equal:
                    self._mismatched.append(self._of(taken.number).picture.name)

    def _of(self, number: int) -> Expected:
        return self._expected[self._order[number]]
