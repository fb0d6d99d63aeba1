"""An API server calls its cache from a pool of threads: counts add up, and no request gets the item of another."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shmstore import CacheMissError, ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreClosedError
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ShmObjectStoreSenderCache,
)
from shmstore.serde import MsgpackSerde
from tests.multimodal.helpers import MIB, config, features, in_threads, item, shm_sender, shm_worker, update

BATCHES = 250


pytestmark = pytest.mark.usefixtures("often")


def sizes(mm_hash: str) -> int:
    return 1 + int(mm_hash) * 37 % 190


def truth(mm_hash: str) -> MultiModalKwargsItem:
    return item(sizes(mm_hash), int(mm_hash))


def everything(mm_hashes: list[str]) -> list[Any]:
    return [(truth(h), [update(h)]) for h in mm_hashes]


def what_seems_needed(sender: BaseMultiModalProcessorCache, mm_hashes: list[str]) -> list[Any]:
    cached = sender.is_cached(mm_hashes)
    return [None if hit else given for hit, given in zip(cached, everything(mm_hashes), strict=True)]


def send(sender: BaseMultiModalProcessorCache, mm_hashes: list[str], counted: list[int]) -> list[Any]:
    """Return one request's outputs; another thread may evict an item between the question and the call."""
    try:
        outputs = sender.get_and_update(what_seems_needed(sender, mm_hashes), mm_hashes)
    except CacheMissError:
        outputs = sender.get_and_update(everything(mm_hashes), mm_hashes)
    counted.append(len(mm_hashes))
    assert [[update(h)] for h in mm_hashes] == [updates for _, updates in outputs]
    return [sent for sent, _ in outputs]


def hashes(rng: random.Random) -> list[str]:
    return [str(rng.randrange(30)) for _ in range(rng.randint(1, 4))]


def test_lru_pair() -> None:
    settings = config(MIB, 1000)
    sender, receiver = MultiModalProcessorSenderCache(settings), MultiModalReceiverCache(settings)

    def work(rng: random.Random) -> int:
        counted: list[int] = []
        for _ in range(BATCHES):
            mm_hashes = hashes(rng)
            while True:
                batch = features(mm_hashes, send(sender, mm_hashes, counted))
                try:
                    receiver.get_and_update_features(batch)
                    break
                except CacheMissError as miss:
                    sender.invalidate(miss.mm_hashes)
            assert [truth(h) for h in mm_hashes] == [feature.data for feature in batch]
        return sum(counted)

    assert sum(in_threads(work)) == sender.make_stats().total
    assert 0 < sender.make_stats().hits < sender.make_stats().total
    assert receiver.nbytes <= 1000
    assert sum(sizes(h) for h in receiver.order) == receiver.nbytes


@pytest.mark.parametrize("make", [MultiModalProcessorSenderCache, MultiModalProcessorOnlyCache])
def test_the_senders_books_agree_after_many_threads_sent_the_same_items(make: Callable[..., Any]) -> None:
    sender = make(config(2000, 60))

    def work(rng: random.Random) -> int:
        counted: list[int] = []
        for _ in range(4 * BATCHES):
            mm_hashes = [str(rng.randrange(5)) for _ in range(3)]
            send(sender, mm_hashes, counted)
            sender.invalidate(mm_hashes[:2])
            sender.touch_sender_cache_item(mm_hashes[2])
        return sum(counted)

    assert sum(in_threads(work)) == sender.make_stats().total
    shadow, kept = sender._shadow, sender._kept
    assert set(kept.entries) <= set(shadow.entries)
    for held in (shadow, kept):
        assert sum(size for _, size in held.entries.values()) == held.nbytes


def test_shm_pair() -> None:
    settings = config(MIB, 4 << 10, cache_type="shm", world_size=2)
    with shm_sender(settings) as sender:
        workers = [shm_worker(settings, rank, sender.handle) for rank in range(2)]

        def work(rng: random.Random) -> int:
            counted: list[int] = []
            for _ in range(BATCHES):
                mm_hashes = hashes(rng)
                sent = send(sender, mm_hashes, counted)
                if rng.random() < 0.1:
                    sender.invalidate(hashes(rng))
                if rng.random() < 0.2:
                    sender.release(sent)
                    continue
                for worker in workers:
                    batch = worker.get_and_update_features(features(mm_hashes, sent))
                    assert [truth(h) for h in mm_hashes] == [feature.data for feature in batch]
            return sum(counted)

        assert sum(in_threads(work)) == sender.make_stats().total
        assert 0 < sender.make_stats().hits < sender.make_stats().total
        assert sender.writer.stats().evictions > 0
        nearly_all = torch.zeros(sender.writer.stats().max_object_size - 128, dtype=torch.uint8)
        sender.release([sender.writer.put("whole", nearly_all)])  # nothing is held any more
        sender.writer.check_valid()
        for worker in workers:
            worker.close()


class SlowSerde(MsgpackSerde):
    """Copies tensors that are not contiguous, when the test lets it."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def fill(self, dst: Any, source: Any) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        super().fill(dst, source)


def slow_item() -> MultiModalKwargsItem:
    data = torch.arange(64, dtype=torch.uint8)[::2]
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "pixels", data, MultiModalBatchedField())])


Storing = tuple[ShmObjectStoreSenderCache, ThreadPoolExecutor, Future[Any], SlowSerde]


@pytest.fixture
def storing() -> Iterator[Storing]:
    """Yield a sender that has "0" and "1", while a thread is copying "slow"."""
    serde = SlowSerde()
    writer = ObjectStoreWriter.create(capacity=16 << 10, n_readers=1, serde=serde)
    with (
        ShmObjectStoreSenderCache(config(MIB, 16 << 10, cache_type="shm"), writer) as sender,
        ThreadPoolExecutor(3) as pool,
    ):
        sender.get_and_update(everything(["0", "1"]), ["0", "1"])
        storing = pool.submit(sender.get_and_update_item, (slow_item(), [update("slow")]), "slow")
        try:
            assert serde.begun.wait(60)
            yield sender, pool, storing, serde
        finally:
            serde.go_on.set()


def test_a_hit_waits_for_no_other_threads_copy(storing: Storing) -> None:
    sender, pool, stored, _ = storing

    def hits() -> list[int]:
        sent = [sender.get_and_update_item(None, "0"), *sender.get_and_update([None, None], ["1", "0"])]
        with pytest.raises(CacheMissError):
            sender.get_and_update_item(None, "slow")
        sender.touch_sender_cache_item("1")
        return [*sender.is_cached(["0", "slow"]), sender.make_stats().hits, sender.release([ref for ref, _ in sent])]

    assert [True, False, 3, 3] == pool.submit(hits).result(timeout=30)
    assert not stored.done()


def test_two_threads_storing_one_key_store_it_once(storing: Storing) -> None:
    sender, pool, stored, serde = storing
    twice = pool.submit(sender.get_and_update_item, (slow_item(), [update("slow")]), "slow")
    gone = pool.submit(sender.invalidate, ["0"])
    serde.go_on.set()
    first, second = stored.result(timeout=30)[0], twice.result(timeout=30)[0]
    gone.result(timeout=30)
    assert isinstance(first, ObjectRef)
    assert isinstance(second, ObjectRef)
    assert (first.monotonic_id, False) == (second.monotonic_id, first.lease == second.lease)
    assert (1, 4) == (sender.make_stats().hits, sender.make_stats().total)
    assert {"1", "slow"} == set(sender.writer.keys())


def test_what_a_batch_has_found_is_sent_even_if_it_goes_while_the_batch_waits(
    storing: Storing, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _, stored, serde = storing
    serde.go_on.set()
    stored.result(timeout=30)
    sender.release([stored.result()[0]])
    put, leases = sender._put, sender.writer.stats().open_leases

    def overtaken(*args: Any) -> Any:
        sender.invalidate(["0"])
        return put(*args)

    monkeypatch.setattr(sender, "_put", overtaken)
    outputs = sender.get_and_update([(item(15 << 10), []), None, None, None], ["new", "0", "1", "slow"])
    assert not sender.is_cached_item("0")
    with ObjectStoreReader.attach(sender.handle) as reader:
        assert all(reader.validate(ref) for ref, _ in outputs[1:] if isinstance(ref, ObjectRef))
        assert set(sender.writer.keys()) >= {"1", "slow"}
        sender.release([sent for sent, _ in outputs])
        with pytest.raises(CacheMissError):
            sender.get_and_update([None, None], ["0", "1"])
        assert leases == sender.writer.stats().open_leases  # before the reader closes, which ends them all


def test_close_waits_for_no_other_threads_copy(storing: Storing) -> None:
    """Otherwise a signal handler during a hit would wait forever for a put that waits for this hit."""
    sender, pool, stored, serde = storing
    pool.submit(sender.close).result(timeout=10)
    assert not stored.done()
    serde.go_on.set()
    with pytest.raises(StoreClosedError):
        stored.result(timeout=30)
    with pytest.raises(StoreClosedError):
        sender.get_and_update_item(None, "0")


def test_two_senders_of_one_writer_send_nothing_inline_that_the_other_is_storing() -> None:
    settings = config(200 * MIB, cache_type="shm")
    with shm_sender(settings) as one, ThreadPoolExecutor(2) as pool:
        senders = one, ShmObjectStoreSenderCache(settings, one.writer)
        given = item(16 * MIB), [update("a")]
        for number in range(10):
            both = [pool.submit(each.get_and_update_item, given, str(number)) for each in senders]
            assert [ObjectRef, ObjectRef] == [type(future.result()[0]) for future in both]
