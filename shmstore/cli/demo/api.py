"""The API process: hashes each request's image, processes what is not cached, sends, and measures.

It sends requests in steps of a few, as an engine schedules them: the workers take every item of a step, then check
every byte of it (where an engine would run its model), then report; only then comes the next step. So at most one
step is in flight, and its items are leased and pinned together.

What a step needs is processed before its first request goes. So the clock of a request, which runs from asking the
API process's cache until the last worker has the tensors at hand, times the transport alone: never the image
processor, which is shown by itself, and never the checking. A step is made of attempts. A request goes into the next
one where

* its item was cached when the step was prepared, and gone when its turn came (an earlier request of the step pushed it
  out): it is processed after all;
* the engine or a worker rejected it, because what it counts on is not there: its leases are given back, what they miss
  is invalidated, and it starts anew. Its clock goes on.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from shmstore import CacheMissError
from shmstore.cli.demo.memory import resident_memory
from shmstore.cli.demo.messages import (
    Account,
    FeatureCodec,
    Finish,
    Link,
    Opening,
    Progress,
    Ready,
    Rejected,
    Request,
    StepEnd,
    StepReport,
    Tally,
    guarded,
)
from shmstore.cli.demo.modes import MODES
from shmstore.cli.demo.processing import Picture, PictureSource, Processed, item_bytes, item_digest
from shmstore.cli.demo.records import SHARE_OF_DATA, Measured, ProcessMemory, RunSettings
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    MultiModalFeatureSpec,
    PlaceholderRange,
    processor_cache_from_config,
)
from shmstore.multimodal.values.types import ProcessorOutput, PromptUpdates, ReceiverInput

_Result = TypeVar("_Result")

SHARE_OF_SHM = 0.8
"""The default capacity takes no more than this part of what is free in shared memory."""
MAX_ATTEMPTS = 10
"""Of one step. A rejected request heals in one more, two requests that push each other out in another."""


class Expected(NamedTuple):
    """One image and what its workers must get: made once before the run, the item itself not kept."""

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
    engine: Link,
    status: Connection,
) -> None:
    """Load the images, send every request through the engine, and tell the supervisor what was `Measured`."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        ignore_termination()  # a second one must not cut the way out short
        sys.exit(128 + number)  # as an exception, so that the store is closed on the way out

    def ignore_termination() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def load_and_send(supervisor: Link) -> Measured:
        expected: list[Expected] = []
        for picture in source:
            expected.append(_expect(picture))
            supervisor.send(Progress("processing", len(expected), len(source)))
        capacity = settings.capacity or default_capacity([one.nbytes for one in expected], free_shm)
        config = MODES[mode].config(workers=settings.workers, capacity=capacity, store_name=store_name)
        cache = processor_cache_from_config(config)
        if cache is None:
            raise TypeError(f"no cache to compare: {config.describe()}")
        try:
            engine.send(Opening(config, cache.handle))
            return _Run(settings, expected, cache, engine, supervisor).measure(mode, capacity)
        finally:
            ignore_termination()
            cache.close()

    def body() -> None:
        supervisor = Link(status, status)
        try:
            measured = load_and_send(supervisor)
        finally:
            ignore_termination()  # it is on its way out already, and Python's own exit must not be interrupted
        supervisor.send(measured)

    signal.signal(signal.SIGTERM, stop)
    guarded("the API process", status, body)


def default_capacity(sizes: Sequence[int], free_shm: int) -> int:
    """Return a capacity that does not hold all items, yet the largest of them, as far as `free_shm` bytes allow."""
    wanted = max(int(sum(sizes) * SHARE_OF_DATA), max(sizes) + (1 << 20))
    return max(1, min(wanted, int(free_shm * SHARE_OF_SHM)))


def request_order(items: int, rounds: int, seed: int) -> list[int]:
    """Return the index of the image of each request: each image once a round, every round in an order of its own."""
    chooser = random.Random(seed)
    order: list[int] = []
    for _ in range(rounds):
        once = list(range(items))
        chooser.shuffle(once)
        order += once
    return order


def _expect(picture: Picture) -> Expected:
    item, _ = picture.process()
    return Expected(picture, picture.mm_hash(), item_digest(item), item_bytes(item))


class _Stopwatch:
    """How often something was done, and the seconds that it took together."""

    def __init__(self) -> None:
        self.times = 0
        self.seconds = 0.0

    def time(self, function: Callable[[], _Result]) -> _Result:
        start = time.perf_counter()
        result = function()
        self.seconds += time.perf_counter() - start
        self.times += 1
        return result


class _Run:
    """The requests of one mode: their order, their steps, and what is measured on the way."""

    def __init__(
        self,
        settings: RunSettings,
        expected: list[Expected],
        cache: BaseMultiModalProcessorCache,
        engine: Link,
        supervisor: Link,
    ) -> None:
        self._settings = settings
        self._expected = expected
        self._cache = cache
        self._engine = engine
        self._supervisor = supervisor
        self._order = request_order(len(expected), settings.rounds, settings.seed)
        self._codec = FeatureCodec()
        self._hashing = _Stopwatch()
        self._processing = _Stopwatch()
        self._started: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._transport_ns = 0
        self._mismatched: list[str] = []
        self._checked = 0
        self._rejected = 0
        self._entered = 0
        self._released = 0
        self._faults_done: set[int] = set()

    def measure(self, mode: str, capacity: int) -> Measured:
        """Send all steps, end the other processes, and return the figures."""
        for _ in range(self._settings.workers):
            self._receive(Ready)
        before = self._accounts()
        start = time.perf_counter()
        for step in self._steps():
            self._run_step(step)
            self._supervisor.send(Progress("sending", step.stop, len(self._order)))
        total_s = time.perf_counter() - start
        after = self._accounts()
        sizes = {one.mm_hash: one.nbytes for one in self._expected}
        lookups = self._cache.make_stats()
        evictions = self._entered - sum(self._cache.is_cached(list(sizes)))
        inline = self._cache.inline_full + self._cache.inline_too_large
        self._cache.clear_cache()  # the counts, too
        held_at_end = self._store_stat("objects")  # before the workers end, and with them what they hold
        self._engine.send(Finish())
        return Measured(
            mode=mode,
            distinct=len(sizes),
            distinct_bytes=sum(sizes.values()),
            smallest_bytes=min(sizes.values()),
            largest_bytes=max(sizes.values()),
            capacity=capacity,
            requests=len(self._order),
            payload_bytes=sum(self._expected[index].nbytes for index in self._order),
            checked=self._checked,
            mismatches=len(self._mismatched),
            mismatched_names=tuple(sorted(set(self._mismatched))),
            processed=self._processing.times,
            processing_s=self._processing.seconds,
            hashed=self._hashing.times,
            hashing_s=self._hashing.seconds,
            rejected=self._rejected,
            transport_s=self._transport_ns / 1e9,
            total_s=total_s,
            latencies_ns=tuple(self._taken[number] - self._started[number] for number in range(len(self._order))),
            hits=lookups.hits,
            lookups=lookups.total,
            evictions=evictions,
            inline_fallbacks=inline,
            leases_released=self._released,
            held_at_end=held_at_end,
            copied_bytes=sum(after[name].copied - before[name].copied for name in after),
            piped_bytes=sum(after[name].piped - before[name].piped for name in after),
            memory=tuple(ProcessMemory(name, before[name].memory, after[name].memory) for name in after),
        )

    def _accounts(self) -> dict[str, Tally]:
        """Return what every process moved and has, by its name; all of them have everything open meanwhile."""
        engine = self._engine
        copied = engine.sent + engine.received + self._codec.copied + self._store_stat("put_bytes")
        tallies = [Tally("API", copied, engine.sent, resident_memory())]
        engine.send(Account())
        tallies += [self._receive(Tally) for _ in range(self._settings.workers + 1)]
        return {
            tally.process: tally for tally in sorted(tallies, key=lambda tally: (len(tally.process), tally.process))
        }

    def _store_stat(self, name: Literal["objects", "put_bytes"]) -> int:
        """Return a count of the store; 0 where the mode has no store."""
        writer = self._cache.writer
        return 0 if writer is None else getattr(writer.stats(), name)

    def _steps(self) -> Iterator[range]:
        total, length = len(self._order), self._settings.in_flight
        return (range(first, min(first + length, total)) for first in range(0, total, length))

    def _run_step(self, step: range) -> None:
        pending: list[int] = list(step)
        for _ in range(MAX_ATTEMPTS):
            pending = self._attempt(pending)
            if not pending:
                return
        raise RuntimeError(f"requests {pending} did not go through in {MAX_ATTEMPTS} attempts")

    def _attempt(self, numbers: Sequence[int]) -> list[int]:
        """Send these requests and wait for the reports; return those that must be sent again."""
        inputs = {number: self._prepare(self._of(number)) for number in numbers}
        sent: dict[int, ReceiverInput] = {}
        again: list[int] = []
        start = time.monotonic_ns()
        try:
            for number in numbers:
                if not self._send_one(number, inputs.pop(number), sent):
                    again.append(number)
            self._engine.send(StepEnd())
            again += self._collect(sent)
        except BaseException:
            self._release(sent.values())
            raise
        self._transport_ns += max((self._taken[number] - start for number in sent if number in self._taken), default=0)
        return sorted(again)

    def _prepare(self, one: Expected) -> Processed | None:
        """Return the item and its prompt updates, or None where they are cached."""
        mm_hash = self._hashing.time(one.picture.mm_hash)
        return None if self._cache.is_cached_item(mm_hash) else self._processing.time(one.picture.process)

    def _send_one(self, number: int, given: Processed | None, sent: dict[int, ReceiverInput]) -> bool:
        """Send one request and note in `sent` what of it; False where it did not go."""
        one, faults = self._of(number), self._settings.faults
        self._started.setdefault(number, time.monotonic_ns())
        try:
            data, updates = self._exchange(given, one.mm_hash)
        except CacheMissError:
            del self._started[number]  # nothing was sent: its clock starts when it has been processed
            return False
        sent[number] = data
        if number == faults.abort and self._first_time(number):
            self._release([sent.pop(number)])
            return False
        if number == faults.stale and self._first_time(number):
            self._release([data])
            self._cache.invalidate([one.mm_hash])
        digest = bytes([one.digest[0] ^ 1]) + one.digest[1:] if number == faults.spoil else one.digest
        self._engine.send(Request(number, digest))
        self._engine.send_bytes(self._codec.encode([_feature(data, updates, one.mm_hash)]))
        return True

    def _exchange(self, given: Processed | None, mm_hash: str) -> ProcessorOutput:
        """Return what to send; CacheMissError where the item was cached when asked, and is not any more."""
        known = given is None or self._cache.is_cached_item(mm_hash)
        output = self._cache.get_and_update_item(given, mm_hash)
        self._entered += not known and self._cache.is_cached_item(mm_hash)
        return output

    def _release(self, sent: Iterable[ReceiverInput]) -> None:
        self._released += self._cache.release(sent)

    def _collect(self, sent: dict[int, ReceiverInput]) -> list[int]:
        """Wait for the reports on what was sent; return the requests that were rejected, made ready to go again."""
        missing: dict[int, set[str]] = {}
        reports = 0
        while reports < self._settings.workers:
            message: StepReport | Rejected = self._receive(StepReport, Rejected)
            if isinstance(message, Rejected):
                missing.setdefault(message.number, set()).update(message.mm_hashes)
                continue
            reports += 1
            for rejected in message.rejected:
                missing.setdefault(rejected.number, set()).update(rejected.mm_hashes)
            for taken in message.taken:
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

    def _first_time(self, number: int) -> bool:
        if number in self._faults_done:
            return False
        self._faults_done.add(number)
        return True

    def _receive(self, *kinds: type[Any]) -> Any:
        """Return what the engine process sends next; TypeError where it is none of these kinds."""
        message = self._engine.receive()
        if not isinstance(message, kinds):
            raise TypeError(f"expected {kinds} from the engine process, got {message!r}")
        return message


def _feature(data: ReceiverInput, updates: PromptUpdates, mm_hash: str) -> MultiModalFeatureSpec:
    """Return the only item of a prompt whose placeholder its update has replaced."""
    update = updates[0].with_item_idx(0)
    return MultiModalFeatureSpec(data, update.modality, mm_hash, PlaceholderRange(0, len(update.content)))
