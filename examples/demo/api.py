"""The API process: hashes the image of each request, processes it if it is not cached, sends it, and measures.

It sends requests in steps of a few, as an engine schedules them. The workers take every item of a step, then check
every byte (where an engine would run its model), then report. The next step begins after that. So at most one step is
in flight, and its items are leased and pinned together.

All items of a step are processed before its first request is sent. The clock of a request starts at the lookup in the
API process's cache, and stops when the last worker has the tensors. So it times the transport alone, without image
processor and checking. A step consists of attempts. A request goes into the next attempt in two cases:

* Its item was cached when the step was prepared, but an earlier request of the step evicted it: it is processed.
* The engine or a worker rejected it, because an item is missing there. Its leases are released, the missing items are
  invalidated, and it is repeated. Its clock goes on.

With `RunSettings.kill` there are two API processes, one after the other. The first one repeats the first half of the
requests until a process is killed, and leaves the store. The second one takes the store over and sends the other half.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from types import FrameType
from typing import Literal, NamedTuple, NoReturn, TypeVar

from examples.demo.messages import (
    FeatureCodec,
    Halfway,
    Killed,
    Link,
    Opening,
    Progress,
    Request,
    Signal,
    StepReport,
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
from shmstore.multimodal.values.types import ProcessorOutput, ReceiverInput

_Result = TypeVar("_Result")

SHARE_OF_SHM = 0.8
"""The default capacity is at most this share of the free shared memory."""
OVERHEAD = 1 << 16
"""More bytes than the key, the metadata and the prompt updates of one item take."""
MAX_ATTEMPTS = 10
"""Attempts of one step. A rejected request needs one more; two requests that evict each other need another."""


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
            if cache.writer:  # the next API process has it, or nobody
                cache.writer.close(unlink=not (settings.kill and not killed and _supervisor_lives()))
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


class _Stopwatch:
    """Counts calls, and the seconds that they took together."""

    def __init__(self) -> None:
        self.times = 0
        self.seconds = 0.0

    def time(self, function: Callable[[], _Result]) -> _Result:
        start = time.perf_counter()
        result = function()
        self.seconds += time.perf_counter() - start
        self.times += 1
        return result

    @property
    def mean_ms(self) -> float:
        return self.seconds * 1e3 / max(self.times, 1)


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
        self._hashing = _Stopwatch()
        self._processing = _Stopwatch()
        self._started: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._transport_ns = 0
        self._mismatched: list[str] = []
        self._checked = 0
        self._rejected = 0
        self._entered = sum(cache.is_cached([one.mm_hash for one in expected]))
        self._first_hits: dict[str, bool] = {}
        self._released = 0
        self._to_abort, self._to_go_stale = {settings.faults.abort}, {settings.faults.stale}

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
            self._supervisor.send(Halfway(str(self._settings.kill), tuple(one[1:] for one in self._expected)))
            while _supervisor_lives():  # so the kill comes amid requests
                for step in steps:
                    self._run_step(step)
        total_s = time.perf_counter() - start
        after = self._accounts()
        sizes = {one.mm_hash: one.nbytes for one in self._expected}
        lookups = self._cache.make_stats()
        evictions = self._entered - sum(self._cache.is_cached(list(sizes)))
        inline = self._cache.inline_full + self._cache.inline_too_large + self._cache.inline_late
        self._cache.clear_cache()  # the counts, too
        held_at_end = self._store_stat("objects")  # before the workers end and drop what they hold
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
            evictions=evictions,
            sent_inline=inline,
            rejected=self._rejected,
            leases_released=self._released,
            held_at_end=held_at_end,
            checked=self._checked,
            mismatches=len(self._mismatched),
            mismatched_names=tuple(sorted(set(self._mismatched))),
            processed=self._processing.times,
            processing_ms=self._processing.mean_ms,
            hashing_ms=self._hashing.mean_ms,
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
            smallest_bytes=min(sizes.values()),
            largest_bytes=max(sizes.values()),
            capacity=capacity,
            modes={mode: figures},
        )

    def _accounts(self) -> dict[str, Tally]:
        """Return the tally of each process by its name, while all of them have everything open."""
        tallies = [tally("API", (self._engine,), self._codec, self._store_stat("put_bytes"))]
        self._engine.send(Signal.ACCOUNT)
        tallies += [self._engine.receive() for _ in range(self._settings.workers + 1)]
        return {one.process: one for one in sorted(tallies, key=lambda one: (len(one.process), one.process))}

    def _store_stat(self, name: Literal["objects", "put_bytes"]) -> int:
        """Return a count of the store; 0 if the mode has no store."""
        writer = self._cache.writer
        return 0 if writer is None else getattr(writer.stats(), name)

    def _run_step(self, step: range) -> None:
        pending: list[int] = list(step)
        for _ in range(MAX_ATTEMPTS):
            pending = self._attempt(pending)
            if not pending:
                return
        raise RuntimeError(f"requests {pending} did not go through in {MAX_ATTEMPTS} attempts")

    def _attempt(self, numbers: Sequence[int]) -> list[int]:
        """Send these requests and wait for the reports; return the requests to repeat."""
        inputs = {number: self._prepare(self._of(number)) for number in numbers}
        sent: dict[int, ReceiverInput] = {}
        again: list[int] = []
        start = time.monotonic_ns()
        try:
            for number in numbers:
                if not self._send_one(number, inputs.pop(number), sent):
                    again.append(number)
            self._engine.send(Signal.STEP_END)
            again += self._collect(sent)
        except BaseException:
            self._release(sent.values())
            raise
        self._transport_ns += max((self._taken[number] - start for number in sent if number in self._taken), default=0)
        return sorted(again)

    def _prepare(self, one: Expected) -> Processed | None:
        """Return the item and its prompt updates, or None if they are cached."""
        mm_hash = self._hashing.time(one.picture.mm_hash)
        known = self._cache.is_cached_item(mm_hash)
        self._first_hits.setdefault(mm_hash, known)
        return None if known else self._processing.time(one.picture.process)

    def _send_one(self, number: int, given: Processed | None, sent: dict[int, ReceiverInput]) -> bool:
        """Send one request and record its data in `sent`; return whether it was sent."""
        one = self._of(number)
        self._started.setdefault(number, time.monotonic_ns())
        try:
            data, updates = self._exchange(given, one.mm_hash)
        except CacheMissError:
            del self._started[number]  # its clock starts when it has been processed
            return False
        sent[number] = data
        if number in self._to_abort:
            self._to_abort.clear()
            self._release([sent.pop(number)])
            return False
        if number in self._to_go_stale:
            self._to_go_stale.clear()
            self._release([data])
            self._cache.invalidate([one.mm_hash])
        wrong_bits = number == self._settings.faults.spoil
        update = updates[0].with_item_idx(0)
        place = PlaceholderRange(0, len(update.content))  # the only item of a prompt
        self._engine.send(Request(number, bytes([one.digest[0] ^ wrong_bits]) + one.digest[1:]))
        feature = MultiModalFeatureSpec(data, update.modality, one.mm_hash, place)
        self._engine.send_bytes(self._codec.encode([feature]))
        return True

    def _exchange(self, given: Processed | None, mm_hash: str) -> ProcessorOutput:
        """Return the data to send; raise CacheMissError if the item was cached in `_prepare` and no longer is."""
        known = given is None or self._cache.is_cached_item(mm_hash)
        output = self._cache.get_and_update_item(given, mm_hash)
        self._entered += not known and self._cache.is_cached_item(mm_hash)
        return output

    def _release(self, sent: Iterable[ReceiverInput]) -> None:
        self._released += self._cache.release(sent)

    def _collect(self, sent: dict[int, ReceiverInput]) -> list[int]:
        """Wait for the reports on these requests; return the rejected ones, ready to be repeated."""
        missing: dict[int, set[str]] = {}
        for _ in range(1 + self._settings.workers):
            report: StepReport = self._engine.receive()
            for rejected in report.rejected:
                missing.setdefault(rejected.number, set()).update(rejected.mm_hashes)
            for taken in report.taken:
                self._taken[taken.number] = max(self._taken.get(taken.number, 0), taken.taken_ns)
                self._checked += 1
                if not taken.equal:
                    self._mismatched.append(self._of(taken.number).picture.name)
        for number, mm_hashes in missing.items():
            self._release([sent[number]])
            self._cache.invalidate(mm_hashes)
        self._rejected += len(missing)
        return list(missing)

    def _of(self, number: int) -> Expected:
        return self._expected[self._order[number]]
