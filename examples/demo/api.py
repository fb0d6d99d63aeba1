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
import os
import pickle
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

from examples.demo.messages import Halfway, Link, Opening, Progress, Request, Signal, Taken, guarded
from examples.demo.modes import MODES
from examples.demo.processing import Picture, PictureSource, Processed, item_bytes, item_digest
from examples.demo.records import DemoReport, ModeFigures, Restart, RunSettings
from shmstore import CacheMissError
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    MultiModalFeatureSpec,
    PlaceholderRange,
    processor_cache_from_config,
)

SHARE_OF_DATA = 0.6
"""The default capacity, as a share of the bytes of all distinct items; it is too small for them by design."""
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
    killed: Halfway | None,
    engine: Link,
    status: Connection,
) -> None:
    """Load the images, send every request through the engine, and send the supervisor the `DemoReport`."""

    def body() -> None:
        supervisor = Link(status, status)
        expected: list[Expected] = []
        stage = "loading" if killed else "processing"
        for picture in source:
            expected.append(Expected(picture, *killed.known[len(expected)]) if killed else _expect(picture))
            supervisor.send(Progress(stage, len(expected), len(source), len(expected) == 1))
        sizes = [one.nbytes for one in expected]
        shm = os.statvfs("/dev/shm")
        usual = room_for_all(sizes) if settings.kill else default_capacity(sizes, shm.f_bavail * shm.f_frsize)
        capacity = settings.capacity or usual
        config = MODES[mode].config(workers=settings.workers, capacity=capacity, store_name=store_name)
        cache = processor_cache_from_config(config)
        opened_ns = time.monotonic_ns()
        if cache is None:
            raise TypeError(f"this configuration has no cache to compare: {config.describe()}")
        try:
            engine.send(Opening(config, cache.handle))
            report = _Run(settings, expected, cache, engine, supervisor, killed).measure(mode, capacity, opened_ns)
        finally:
            if cache.writer:
                cache.writer.close(unlink=True)  # one that is killed leaves it to the next
            cache.close()
        supervisor.send(report)

    guarded(status, body)


def default_capacity(sizes: Sequence[int], free_shm: int) -> int:
    """Return a capacity that holds the largest item but not all items, as far as `free_shm` bytes allow."""
    wanted = max(int(sum(sizes) * SHARE_OF_DATA), max(sizes) + (1 << 20))
    return max(1, min(wanted, int(free_shm * SHARE_OF_SHM)))


def room_for_all(sizes: Sequence[int]) -> int:
    """Return a capacity that holds all items, even if a part of it is for small ones only."""
    return int(sum(sizes) * 1.05) + len(sizes) * OVERHEAD


def request_order(items: int, rounds: int) -> list[int]:
    """Return the index of each request's image: each image once a round, and each round in another order."""
    chooser = random.Random(0)  # each mode gets the same requests
    order: list[int] = []
    for _ in range(rounds):
        once = list(range(items))
        chooser.shuffle(once)
        order += once
    return order


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
        killed: Halfway | None,
    ) -> None:
        self._settings = settings
        self._expected = expected
        self._cache = cache
        self._engine = engine
        self._supervisor = supervisor
        self._order = request_order(len(expected), settings.rounds)
        self._numbers = range(len(self._order))
        self._killed = killed
        if settings.kill:
            half = len(self._order) // 2
            self._numbers = self._numbers[half:] if killed else self._numbers[:half]
        self._processed = 0
        self._started: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._transport_ns = 0
        self._mismatched: list[str] = []
        self._checked = 0
        self._first_hits: dict[str, bool] = {}

    def measure(self, mode: str, capacity: int, opened_ns: int) -> DemoReport:
        """Send all steps, end the other processes, and return the figures."""
        for _ in range(self._settings.workers):
            self._engine.receive()  # READY
        requests, length = len(self._numbers), self._settings.in_flight
        steps = [self._numbers[first : first + length] for first in range(0, requests, length)]
        start = time.perf_counter()
        for step in steps:
            self._run_step(step)
            self._supervisor.send(Progress("sending", step.stop, len(self._order), step is steps[0]))
        if self._settings.kill and not self._killed:
            self._supervisor.send(Halfway(tuple(one[1:] for one in self._expected)))
            while (parent := multiprocessing.parent_process()) and parent.is_alive():  # the kill comes amid requests
                for step in steps:
                    self._run_step(step)
        total_s = time.perf_counter() - start
        sizes = {one.mm_hash: one.nbytes for one in self._expected}
        self._engine.send(Signal.FINISH)
        latencies_ns = [self._taken[number] - self._started[number] for number in self._numbers]
        figures = ModeFigures(
            requests=requests,
            items_per_s=requests * 1e9 / self._transport_ns,
            latency_median_us=median(latencies_ns) / 1e3,
            hit_ratio=self._cache.make_stats().hit_ratio,
            sent_inline=self._cache.inline_full + self._cache.inline_too_large + self._cache.inline_late,
            checked=self._checked,
            mismatches=len(self._mismatched),
            mismatched_names=tuple(sorted(set(self._mismatched))),
            processed=self._processed,
            total_s=total_s,
        )
        restart = None
        if self._killed and self._cache.writer:
            moments = opened_ns, self._taken[self._numbers.start]
            opened_s, answered_s = ((moment - self._killed.killed_ns) / 1e9 for moment in moments)
            kept = sum(self._first_hits.values())
            restart = Restart(opened_s, answered_s, self._cache.writer.recovered, kept)
        return DemoReport(self._settings, len(sizes), sum(sizes.values()), capacity, {mode: figures}, restart)

    def _run_step(self, step: Sequence[int]) -> None:
        while step:
            step = self._attempt(step)

    def _attempt(self, numbers: Sequence[int]) -> list[int]:
        """Send these requests and wait for the reports; return those whose item must be processed first."""
        inputs = {number: self._prepare(self._of(number)) for number in numbers}
        sent: list[int] = []
        start = time.monotonic_ns()
        for number in numbers:
            if self._send_one(number, inputs.pop(number)):
                sent.append(number)
        self._engine.send(Signal.STEP_END)
        for _ in range(self._settings.workers):
            self._collect(self._engine.receive())
        self._transport_ns += max((self._taken[number] - start for number in sent), default=0)
        return [number for number in numbers if number not in sent]

    def _prepare(self, one: Expected) -> Processed | None:
        """Return the item and its prompt updates, or None if they are cached."""
        known = self._cache.is_cached_item(one.picture.mm_hash())  # a request brings its image, not the hash
        self._first_hits.setdefault(one.mm_hash, known)
        if known:
            return None
        self._processed += 1
        return one.picture.process()

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
        self._engine.send_bytes(pickle.dumps([feature], pickle.HIGHEST_PROTOCOL))
        return True

    def _collect(self, report: list[Taken]) -> None:
        for taken in report:
            self._taken[taken.number] = max(self._taken.get(taken.number, 0), taken.taken_ns)
            self._checked += 1
            if not taken.equal:
                self._mismatched.append(self._of(taken.number).picture.name)

    def _of(self, number: int) -> Expected:
        return self._expected[self._order[number]]
