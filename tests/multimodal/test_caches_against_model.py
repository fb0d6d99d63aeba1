"""10,000 items in random requests through every mode: the model gets the same items as without a cache.

Several requests are in flight at a time. They overtake each other, are dropped or aborted, fail in P0 or between two
workers, or meet a P1 that has restarted. Items and caches have all sizes. If P1 or a worker rejects a request, it is
tried again, as in an engine. It must succeed within one attempt more than it has items.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shmstore import CacheMissError
from shmstore.multimodal import (
    MirroredProcessingCache,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from tests.multimodal.helpers import config, features, shm_sender, shm_worker, update

BATCHED = MultiModalBatchedField()


class FailsError(Exception):
    """Raised by an item that cannot be handled."""


class Failing:
    """A value without a size and a serializer."""

    def __sizeof__(self) -> int:
        raise FailsError


def make(data: object) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", data, BATCHED)])


class Only:
    """Processor cache only: every item is sent."""

    p0: Any

    def __init__(self, rng: random.Random) -> None:
        self.p0 = MultiModalProcessorOnlyCache(config(rng.choice([1, 200, 2000, 100_000])))

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        return list(self.p0.is_cached(mm_hashes))

    def send(self, inputs: list[Any], mm_hashes: list[str]) -> list[Any]:
        outputs = self.p0.get_and_update(inputs, mm_hashes)
        assert [[update(h)] for h in mm_hashes] == [updates for _, updates in outputs]
        return [sent for sent, _ in outputs]

    def receive(self, sent: list[Any], mm_hashes: list[str]) -> list[Any]:
        return sent

    def receive_partly(self, sent: list[Any], mm_hashes: list[str]) -> None:
        pass

    def abort(self, sent: list[Any]) -> None:
        pass

    def lose(self, sent: list[Any], mm_hashes: list[str]) -> None:
        pass

    def heal(self, mm_hashes: Sequence[str]) -> None:
        raise AssertionError("nothing can be missing here")

    def shake(self, rng: random.Random, mm_hash: str) -> None:
        self.p0.touch_sender_cache_item(mm_hash)
        if rng.random() < 0.02:
            self.p0.clear_cache()

    def end(self) -> None:
        stats = self.p0.make_stats()
        assert 0 <= stats.hits <= stats.total

    def close(self) -> None:
        pass


class Lru(Only):
    """Keys in P0, items in P1."""

    def __init__(self, rng: random.Random) -> None:
        settings = config(rng.choice([1, 1000, 100_000]), rng.choice([1, 50, 300, 1000, 100_000]))
        self.p0 = MultiModalProcessorSenderCache(settings)
        self.p1 = MultiModalReceiverCache(settings)

    def receive(self, sent: list[Any], mm_hashes: list[str]) -> list[Any]:
        return [feature.data for feature in self.p1.get_and_update_features(features(mm_hashes, sent))]

    def heal(self, mm_hashes: Sequence[str]) -> None:
        self.p0.invalidate(mm_hashes)

    def shake(self, rng: random.Random, mm_hash: str) -> None:
        super().shake(rng, mm_hash)
        self.p1.touch_receiver_cache_item(rng.choice(["missing", mm_hash]))
        if rng.random() < 0.02:
            self.p1.clear_cache()


class Mirrored(Only):
    """Items on both sides."""

    def __init__(self, rng: random.Random) -> None:
        settings = config(rng.choice([1, 50, 300, 1000, 100_000]))
        self.p0, self.p1 = MirroredProcessingCache(settings), MirroredProcessingCache(settings)

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        return [self.p0._p0.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def send(self, inputs: list[Any], mm_hashes: list[str]) -> list[Any]:
        return list(self.p0.get_and_update_p0([given and given[0] for given in inputs], mm_hashes))

    def receive(self, sent: list[Any], mm_hashes: list[str]) -> list[Any]:
        return self.p1.get_and_update_p1(sent, mm_hashes)

    def heal(self, mm_hashes: Sequence[str]) -> None:
        self.p0.invalidate(mm_hashes)

    def shake(self, rng: random.Random, mm_hash: str) -> None:
        if rng.random() < 0.02:
            rng.choice([self.p0, self.p1]).reset()


class Shm(Only):
    """Items in shared memory; the model in the last worker keeps some of them."""

    def __init__(self, rng: random.Random) -> None:
        workers = rng.randint(1, 3)
        settings = config(
            rng.choice([1, 1000, 100_000]), rng.choice([2, 8, 40, 200]) * 1024, cache_type="shm", world_size=workers
        )
        self.p0 = shm_sender(settings)
        self.workers = [shm_worker(settings, rank, self.p0.handle) for rank in range(workers)]

    def receive(self, sent: list[Any], mm_hashes: list[str]) -> list[Any]:
        for worker in self.workers:
            batch = worker.get_and_update_features(features(mm_hashes, sent))
        return [feature.data for feature in batch]

    def receive_partly(self, sent: list[Any], mm_hashes: list[str]) -> None:
        for worker in self.workers[:-1]:
            worker.get_and_update(sent, mm_hashes)
        self.p0.release(sent)

    def abort(self, sent: list[Any]) -> None:
        self.p0.release(sent)
        assert 0 == self.p0.release(sent)

    def lose(self, sent: list[Any], mm_hashes: list[str]) -> None:
        self.p0.release(sent)  # too early: its workers are still to read
        for mm_hash in mm_hashes:
            self.p0.writer.delete(mm_hash)

    def heal(self, mm_hashes: Sequence[str]) -> None:
        self.p0.invalidate(mm_hashes)

    def shake(self, rng: random.Random, mm_hash: str) -> None:
        super().shake(rng, mm_hash)
        if rng.random() < 0.1:
            self.p0.writer.delete(mm_hash)  # without the sender

    def end(self) -> None:
        super().end()
        self.abort(self.send([(make(torch.zeros(1)), [update("last")])], ["last"]))
        nearly_all = torch.zeros(self.p0.writer.stats().max_object_size - 128, dtype=torch.uint8)
        self.p0.release([self.p0.writer.put("whole", nearly_all)])  # nothing is held any more
        self.p0.writer.check_valid()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.p0.close()


class Driver:
    """Requests of one run, each a list of hashes."""

    def __init__(self, mode: type[Only], seed: int) -> None:
        self.rng = random.Random(seed)
        self.mode = mode(self.rng)
        largest = self.rng.choice([20, 200, 5000])
        self.truth = {}
        for n in range(self.rng.choice([3, 12, 60])):
            size = self.rng.randint(0, largest)
            self.truth[f"h{n}"] = torch.tensor(list(self.rng.randbytes(size + 1)), dtype=torch.uint8)
        self.in_flight: list[tuple[list[str], list[Any]]] = []
        self.looking_at: list[tuple[list[str], list[Any]]] = []
        self.reached = 0
        self.attempts = 0

    def inputs(self, mm_hashes: list[str]) -> list[Any]:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            cached = self.mode.is_cached(mm_hashes)
        lazy = rng.random() < 0.8  # some API servers preprocess everything
        inputs: list[Any] = []
        for mm_hash, hit in zip(mm_hashes, cached, strict=True):
            first = mm_hash not in mm_hashes[: len(inputs)]
            if lazy and (hit or (not first and rng.random() < 0.5)):
                inputs.append(None)
            else:
                inputs.append((make(self.truth[mm_hash].clone()), [update(mm_hash)]))
        return inputs

    def start(self) -> None:
        rng = self.rng
        mm_hashes = rng.choices(list(self.truth), k=rng.randint(1, 5))
        inputs = self.inputs(mm_hashes)
        if rng.random() < 0.05:
            inputs[rng.randrange(len(inputs))] = (make(Failing()), [])
            new = [h for h in mm_hashes if not self.mode.is_cached([h])[0]]
            try:
                self.mode.abort(self.mode.send(inputs, mm_hashes))
            except (FailsError, TypeError):
                assert not any(self.mode.is_cached(new))
            return
        if rng.random() < 0.1:
            self.mode.shake(rng, rng.choice(mm_hashes))
        try:
            sent = self.mode.send(inputs, mm_hashes)
        except CacheMissError as miss:
            # The item was evicted after `is_cached` had found it, so the API server preprocesses it after all.
            self.missed(miss, mm_hashes)
            sent = self.mode.send([(make(self.truth[h].clone()), [update(h)]) for h in mm_hashes], mm_hashes)
        self.in_flight.append((mm_hashes, sent))

    def finish(self) -> None:
        rng = self.rng
        mm_hashes, sent = self.in_flight.pop(rng.choice([0, 0, rng.randrange(len(self.in_flight))]))
        fate = rng.random()
        if fate < 0.1:
            self.mode.abort(sent)
            return
        if fate < 0.15:
            try:
                self.mode.receive_partly(sent, mm_hashes)
            except CacheMissError as miss:
                self.mode.abort(sent)
                self.mode.heal(miss.mm_hashes)
            return
        if fate < 0.2:
            self.mode.lose(sent, mm_hashes)
        for attempt in range(len(mm_hashes) + 2):
            self.attempts += attempt > 0
            try:
                got = self.mode.receive(sent, mm_hashes)
                break
            except CacheMissError as miss:
                self.missed(miss, mm_hashes)
                self.mode.abort(sent)
                self.mode.heal(miss.mm_hashes)
            sent = self.mode.send(self.inputs(mm_hashes), mm_hashes)
        else:
            raise AssertionError(f"{mm_hashes} did not get through")
        self.check(mm_hashes, got)
        self.reached += len(mm_hashes)
        if rng.random() < 0.2:
            self.looking_at.append((mm_hashes, got))

    def missed(self, miss: CacheMissError, mm_hashes: list[str]) -> None:
        assert set(miss.mm_hashes) <= set(mm_hashes)
        assert len(set(miss.mm_hashes)) == len(miss.mm_hashes) > 0

    def check(self, mm_hashes: list[str], got: list[Any]) -> None:
        for mm_hash, item in zip(mm_hashes, got, strict=True):
            data = item["k"].data
            assert data.dtype == torch.uint8
            assert torch.equal(self.truth[mm_hash], data), mm_hash

    def run(self, items: int) -> None:
        try:
            self.drive(items)
        finally:
            self.looking_at.clear()
            self.mode.close()

    def drive(self, items: int) -> None:
        while self.reached < items:
            if len(self.in_flight) < 6 and (not self.in_flight or self.rng.random() < 0.5):
                self.start()
            elif self.looking_at and self.rng.random() < 0.2:
                self.check(*self.looking_at.pop(0))
            else:
                self.finish()
        while self.in_flight:
            self.finish()
        while self.looking_at:
            self.check(*self.looking_at.pop())
        self.mode.end()


MODES = {mode.__name__.lower(): mode for mode in (Only, Lru, Mirrored, Shm)}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_reaches_the_model_is_what_reaches_it_without_a_cache(mode: type[Only]) -> None:
    attempts = 0
    for seed in range(20):
        driver = Driver(mode, seed)
        driver.run(500)
        attempts += driver.attempts
    assert mode is Only or attempts > 20  # the sides differed at times, and recovered
