"""`StoreTier` between two stores: what is published comes back whole or not at all, and no error gets out."""

import gc
import itertools
import math
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shmstore import MsgpackSerde, ObjectStoreReader, ObjectStoreWriter, PickleSerde
from shmstore.errors import ObjectExistsError, StoreClosedError, TierFullError
from shmstore.tiers import StoreTier, open_tier, store_tier, write_behind
from shmstore.tiers.breaker import Costs
from shmstore.tiers.objects import Incoming, spans_of, tier_key
from tests.support import until
from tests.test_interrupts import interrupted_at
from tests.tiers.memory import MemoryTier, late
from tests.tiers.redis_server import RedisServer

PIXELS = torch.arange(5000).reshape(50, 100)
VALUE = {"pixels": PIXELS, "grid": (1, 2), "name": "x"}
KEY = "photograph"
NAME = tier_key(KEY, None, "msgpack1")


def store(**more: object) -> ObjectStoreWriter:
    writer = ObjectStoreWriter.create(capacity=1 << 20, n_readers=1, **more)  # type: ignore[arg-type]
    writer.retire(0)
    return writer


@pytest.fixture
def memory() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def here(memory: MemoryTier) -> Iterator[tuple[ObjectStoreWriter, StoreTier]]:
    with store() as writer:
        tier = StoreTier(writer, memory)
        yield writer, tier
        tier.close()


@pytest.fixture
def there(memory: MemoryTier) -> Iterator[tuple[ObjectStoreWriter, StoreTier]]:
    with store() as writer:
        tier = StoreTier(writer, memory)
        yield writer, tier
        tier.close()


Side = tuple[ObjectStoreWriter, StoreTier]


def put(side: Side, key: str = KEY, namespace: str | None = None) -> None:
    side[0].put(key, VALUE, namespace=namespace)
    side[1].publish(key, namespace=namespace)
    assert side[1].flush(10)


def read(writer: ObjectStoreWriter, key: str = KEY, namespace: str | None = None) -> Any:
    with ObjectStoreReader.attach(writer.handle, 0) as reader:
        value = reader.get(writer.get_cached(key, namespace=namespace), copy=True)
    writer.retire(0)
    return value


@pytest.mark.parametrize("namespace", [None, "a model/1"])
def test_what_one_store_publishes_another_of_the_same_namespace_fetches(
    here: Side, there: Side, memory: MemoryTier, namespace: str | None
) -> None:
    put(here, namespace=namespace)
    assert there[1].fetch(KEY, namespace=namespace)
    found = read(there[0], namespace=namespace)
    assert found["pixels"].tolist() == PIXELS.tolist()
    assert (found["grid"], found["name"]) == ((1, 2), "x")
    stats = there[1].stats()
    assert (stats.hits, stats.hit_bytes, stats.misses) == (1, 40000, 0)
    assert (here[1].stats().published, here[1].stats().published_bytes) == (1, 40000)
    there[0].check_valid()
    here[0].put("no tensor", [1, "two"])
    here[1].publish("no tensor")
    assert here[1].flush(10)
    assert there[1].fetch("no tensor")
    assert read(there[0], "no tensor") == [1, "two"]
    with store() as writer:
        other = StoreTier(writer, memory, namespace="v2")
        assert not other.fetch(KEY, namespace=namespace)
        assert other.stats().misses == 1
        other.close()
        other.close()
    assert memory.closed


def test_keys_of_other_namespaces_and_serializers_differ() -> None:
    parts = [("k", None, "m", ""), ("k", "s", "m", ""), ("s", "k", "m", ""), ("k", None, "n", "")]
    parts += [
        ("k", None, "m", "v2"),
        ("k", None, "m", "s"),
        ("k:", None, "m", ""),
        ("k", ":", "m", ""),
        ("k" * 300, None, "m", ""),
    ]
    names = [tier_key(*each) for each in parts] + [tier_key("k" * 299 + "j", None, "m", "")]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and name.isprintable() and len(name) <= 200 for name in names)


@pytest.mark.parametrize("span", [0, 1])
@pytest.mark.parametrize("where", [0, 7, 8, 16, 20, 24, 28, 40, -1])
def test_one_changed_bit_is_a_miss_and_logged_once(
    here: Side, there: Side, memory: MemoryTier, caplog: pytest.LogCaptureFixture, span: int, where: int
) -> None:
    put(here)
    memory.values[NAME][span][where] ^= 16
    assert [False] * 2 == [there[1].fetch(KEY) for _ in range(2)]
    assert (2, 0) == (there[1].stats().damaged, there[1].stats().misses)
    (line,) = (record.getMessage() for record in caplog.records)
    assert NAME in line
    assert not there[0].is_cached(KEY)
    there[0].put(KEY, VALUE)  # its space and its key are free
    there[0].check_valid()


@pytest.mark.parametrize(
    "change", ["short head", "no payload", "short payload", "long payload", "swapped", "empty head", "another key's"]
)
def test_spans_of_another_size_or_key_are_a_miss(here: Side, there: Side, memory: MemoryTier, change: str) -> None:
    put(here)
    head, payload = memory.values.pop(NAME)
    key = "other" if change == "another key's" else KEY
    memory.values[tier_key(key, None, "msgpack1")] = {
        "short head": [head[:-1], payload],
        "no payload": [head, bytearray()],
        "short payload": [head, payload[:-1]],
        "long payload": [head, payload + b"\0"],
        "swapped": [payload, head],
        "empty head": [bytearray(), payload],
        "another key's": [head, payload],
    }[change]
    assert not there[1].fetch(key)
    assert there[1].stats().damaged == 1
    assert not there[0].is_cached(key)
    there[0].check_valid()


def test_two_callers_fetch_once(here: Side, there: Side, memory: MemoryTier) -> None:
    put(here)
    memory.pause = threading.Event()
    memory.calls.clear()
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(there[1].fetch(KEY))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert memory.waiting.wait(10)
    memory.pause.set()
    for thread in threads:
        thread.join(10)
    assert found == [True] * 4
    assert memory.calls == ["fetch"]


def test_a_wait_is_for_a_fetch_of_this_key_alone(here: Side, there: Side, memory: MemoryTier) -> None:
    put(here)
    memory.pause = threading.Event()
    fetching = threading.Thread(target=there[1].fetch, args=(KEY,))
    fetching.start()
    assert memory.waiting.wait(10)
    there[1].wait("other")
    waited = threading.Thread(target=there[1].wait, args=(KEY,))
    waited.start()
    waited.join(0.1)
    assert waited.is_alive()
    memory.pause.set()
    fetching.join(10)
    waited.join(10)
    assert not waited.is_alive()
    assert there[0].is_cached(KEY)


def test_memory_of_a_fetch_that_was_given_up_is_not_used_again(here: Side, there: Side, memory: MemoryTier) -> None:
    put(here)
    kept: list[memoryview] = []

    class Late(MemoryTier):
        def fetch(self, key: str, into: object) -> bool:
            for span in memory.values[key]:
                kept.append(into(len(span)))  # type: ignore[operator]
                kept[-1][: len(span)] = span
            raise late()

    tier = StoreTier(there[0], Late())
    assert not tier.fetch(KEY)
    used = there[0].stats().used_bytes
    assert used >= 40000
    assert not there[0].is_cached(KEY)
    with pytest.raises(ObjectExistsError):
        there[0].put(KEY, 1)
    kept.clear()
    assert there[0].stats().used_bytes == used - used
    there[0].put(KEY, 1)
    tier.close()


def test_a_publish_pins_what_is_sent(here: Side, memory: MemoryTier) -> None:
    memory.pause = threading.Event()
    here[0].put(KEY, VALUE)
    here[1].publish(KEY)
    assert memory.waiting.wait(10)
    with pytest.raises(Exception, match="full"):
        for number in range(100):
            here[0].put(f"more-{number}", torch.full((70_000,), number, dtype=torch.uint8), hold=number < 14)
    here[0].delete(KEY)
    memory.pause.set()
    assert here[1].flush(10)
    assert len(memory.values[NAME][1]) == 40000
    with store() as writer:
        tier = StoreTier(writer, memory)
        assert tier.fetch(KEY)  # it verifies
        tier.close()


def test_what_waits_when_the_store_is_closed_is_not_published_and_keeps_nobody(
    here: Side, memory: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    writer, tier = here
    memory.pause = threading.Event()
    for key in (KEY, "later"):
        writer.put(key, VALUE)
        tier.publish(key)
    assert memory.waiting.wait(10)
    assert not tier.flush(0.05)
    writer.close()
    memory.pause.set()
    assert all(tier.flush(enough) for enough in (10, math.inf, 1e300, 10**400))
    assert list(memory.values) == [NAME]
    with pytest.raises(StoreClosedError):
        tier.fetch(KEY)
    memory.close = lambda: 1 / 0  # type: ignore[assignment]
    tier.close()
    assert "could not be closed" in caplog.text
    dropped = tier.stats().dropped
    tier.publish(KEY)
    assert dropped + 1 == tier.stats().dropped


def test_a_back_end_that_registers_memory_gets_that_of_the_arena(here: Side) -> None:
    class Registers(MemoryTier):
        def register(self, memory: memoryview, path: str, offset: int) -> None:
            file = Path(path).read_bytes()
            self.same = file[offset : offset + len(memory)] == memory

    back_end = Registers()
    here[0].put(KEY, VALUE)
    StoreTier(here[0], back_end).close()
    assert back_end.same


def test_an_error_of_a_call_is_logged_and_the_next_one_is_made(caplog: pytest.LogCaptureFixture) -> None:
    made, calls = threading.Event(), write_behind.WriteBehind(2)
    calls.add("a", lambda: 1 // 0)
    calls.add("b", made.set)
    assert calls.flush(20)
    assert made.is_set()
    assert "ZeroDivisionError" in caplog.text
    calls.close(20)


def test_the_oldest_publishes_are_dropped(memory: MemoryTier) -> None:
    with store() as writer:
        tier = StoreTier(writer, memory, queue=2)
        memory.pause = threading.Event()
        for number in range(6):
            writer.put(f"k{number}", number)
            tier.publish(f"k{number}")
            if number == 0:
                assert memory.waiting.wait(10)
        assert tier.stats().queued == 2
        memory.pause.set()
        assert tier.flush(10)
        assert sorted(memory.values) == sorted(tier_key(f"k{n}", None, "msgpack1") for n in (0, 4, 5))
        assert (tier.stats().dropped, tier.stats().queued, tier.stats().published) == (3, 0, 3)
        tier.close()


def test_a_publish_of_what_has_gone_is_dropped_and_of_what_is_no_key_refused(here: Side) -> None:
    with pytest.raises(TypeError):
        here[1].publish(3)  # type: ignore[arg-type]
    here[1].publish("gone")
    assert here[1].flush(10)
    assert here[1].stats().dropped == 1


@pytest.mark.parametrize("fail", [late(), ValueError("a mistake of the back end")], ids=["tier", "other"])
def test_errors_are_misses_and_open_the_breaker(there: Side, memory: MemoryTier, fail: Exception) -> None:
    memory.fail = fail
    there[1]._breaker.first = 0.05
    assert [there[1].fetch(f"k{number}") for number in range(6)] == [False] * 6
    stats = there[1].stats()
    assert (stats.errors, stats.skipped, stats.open) == (3, 3, True)
    assert memory.calls == ["fetch"] * 3
    there[0].put(KEY, VALUE)
    there[1].publish(KEY)
    assert there[1].flush(10)
    assert there[1].stats().dropped == 1
    until(lambda: len(memory.calls) == 5)
    memory.fail = None
    until(lambda: not there[1].stats().open)
    assert memory.calls[3:] == ["has"] * (len(memory.calls) - 3)
    put(there, "again")
    assert len(memory.values) == 1


def test_a_full_tier_is_no_failure(here: Side, memory: MemoryTier) -> None:
    memory.fail = TierFullError()
    for number in range(5):
        put(here, f"k{number}")
    stats = here[1].stats()
    assert (stats.refused, stats.errors, stats.open) == (5, 0, False)


def test_an_object_for_which_the_store_has_no_room_is_declined(here: Side, there: Side) -> None:
    put(here)
    there[0].put("all", torch.zeros(1_020_000, dtype=torch.uint8), hold=True)
    assert not there[1].fetch(KEY)
    assert (1, 0) == (there[1].stats().declined, there[1].stats().errors)


def test_what_processing_beats_is_left_there(here: Side, memory: MemoryTier) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()

    class Slow(MemoryTier):
        def fetch(self, key: str, into: object) -> bool:
            clock.now += 0.02
            return memory.fetch(key, into)  # type: ignore[arg-type]

    for number in range(40):
        put(here, f"k{number}")
    with store() as writer:
        tier = StoreTier(writer, Slow(), clock=clock)
        assert tier.fetch("k0")  # nothing is known yet
        assert not tier.fetch("new")
        clock.now += 0.03
        writer.put("new", 1)
        tier.publish("new")  # processed in 30 ms
        assert tier.fetch("k1")
        assert tier.stats().saved_seconds == pytest.approx(0.01)
        assert not tier.fetch("fast")
        for _ in range(40):
            assert not tier.fetch("fast")
            clock.now += 0.001
            writer.delete("fast")
            writer.put("fast", 1)
            tier.publish("fast")
            writer.delete("fast")
        found = [tier.fetch(f"k{number}") for number in range(2, 34)]
        assert found.count(True) == 2  # one of 16 measures again
        assert tier.stats().declined == 30
        tier.close()


def test_of_many_items_that_are_processed_the_oldest_beginnings_are_forgotten() -> None:
    costs = Costs(itertools.count().__next__)
    for number in range(Costs._PENDING + 1):
        costs.missed(str(number))
    costs.processed("0")
    assert 0 == costs.saved(0)
    costs.processed("1")
    assert Costs._PENDING == costs.saved(0)


def test_bytes_of_a_network_are_not_unpickled(memory: MemoryTier) -> None:
    with store(serde=PickleSerde()) as writer, pytest.raises(TypeError, match="format_name"):
        StoreTier(writer, memory)


def test_a_serializer_of_ones_own_names_its_format(here: Side, memory: MemoryTier) -> None:
    class Own(MsgpackSerde):
        format_name = "own2"

    with store(serde=Own()) as writer:
        tier = StoreTier(writer, memory)
        put((writer, tier))
        assert list(memory.values) == [tier_key(KEY, None, "own2")]
        tier.close()


def in_time(call: Callable[[], Any]) -> Any:
    """Return what another thread gets, which must not wait without end."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(10)
    assert found, "it waits"
    return found[0]


@pytest.mark.parametrize("known", [False, True])
def test_an_interrupted_fetch_keeps_nobody_waiting(here: Side, memory: MemoryTier, known: bool) -> None:
    if known:
        put(here)
    for number in itertools.count(1):
        with store() as writer:
            tier = StoreTier(writer, memory)
            interrupted = interrupted_at(number, partial(tier.fetch, KEY), store_tier.__file__)
            gc.collect()  # the unfinished object
            in_time(partial(tier.wait, KEY))
            in_time(partial(tier.fetch, KEY))
            assert in_time(partial(tier.fetch, KEY)) == known
            assert tier._fetching == {}
            tier.close()
        if not interrupted:
            break
    assert number > 10


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("call", ["publish", "remove", "clear", "flush"])
def test_another_thread_can_publish_after_an_interrupt(memory: MemoryTier, call: str, begun: bool) -> None:
    arguments: list[Any] = {"publish": [KEY], "remove": [[KEY]], "clear": [], "flush": [10]}[call]  # type: ignore[assignment]
    # Not in the start of a thread by Python, which leaves a thread.
    files = [store_tier.__file__, write_behind.__file__] + [threading.__file__] * begun
    for number in itertools.count(1):
        with store() as writer:
            tier = StoreTier(writer, memory)
            if begun:
                put((writer, tier))
            interrupted = interrupted_at(number, partial(getattr(tier, call), *arguments), *files)
            writer.put("next", VALUE)
            in_time(partial(tier.publish, "next"))
            assert in_time(partial(tier.flush, 10))
            assert memory.values.pop(tier_key("next", None, "msgpack1"))
            in_time(tier.close)
            assert tier._write_behind._thread is not None
            assert not tier._write_behind._thread.is_alive()
        if not interrupted:
            break
    assert number > 1


def test_where_no_thread_can_be_started_a_publish_is_dropped_and_an_error_a_miss(
    here: Side, memory: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer, tier = here
    writer.put(KEY, VALUE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        tier.publish(KEY)
        tier.remove(["other"])
        assert tier.flush(10)
        memory.fail = late()
        assert [tier.fetch(f"k{number}") for number in range(4)] == [False] * 4
        assert (tier.stats().dropped, tier.stats().queued, tier.stats().errors) == (1, 0, 4)
        assert not tier.stats().open, "nobody would close it again"
    memory.fail = None
    tier.publish(KEY)
    assert tier.flush(10)
    assert tier.stats().published == 1
    assert memory.calls[-2:] == ["remove", "publish"]


def test_a_head_larger_than_any_object_of_the_store_gets_no_memory(here: Side, memory: MemoryTier) -> None:
    memory.values[NAME] = [bytearray(1 << 26), bytearray(1)]
    tracemalloc.start()
    try:
        assert not here[1].fetch(KEY)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("ahead", "found"), [(3000 * 10**9, True), (4000 * 10**9, False), (None, False)])
def test_an_object_from_the_future_is_a_miss_so_that_clear_removes_it(
    here: Side, there: Side, memory: MemoryTier, ahead: int | None, found: bool
) -> None:
    there[0].put(KEY, VALUE)
    moment = (1 << 64) - 1 if ahead is None else time.time_ns() + ahead
    memory.values[NAME] = [bytearray(span) for span in spans_of(there[0], KEY, None, NAME, moment) or ()]
    assert here[1].fetch(KEY) == found
    assert here[1].stats().misses == (not found)


def test_what_was_removed_is_not_fetched_while_the_tier_still_has_it(
    here: Side, memory: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, tier = here
    monkeypatch.setattr(tier._costs, "worth", lambda _: True)
    tier._breaker.first = 0.2
    put(here)
    put(here, "other")
    memory.fail = late()
    for number in range(3):
        assert not tier.fetch(f"k{number}")
    tier.remove([KEY])
    writer.clear()
    assert tier.flush(10)
    assert (tier.stats().open, tier.stats().skipped) == (True, 0)
    memory.calls.clear()
    kept = memory.values[NAME]
    memory.fail = None
    until(lambda: not tier._removed)
    assert memory.calls.count("remove") == 1, "once the tier answers"
    assert list(memory.values) == [tier_key("other", None, "msgpack1")]
    assert tier.fetch("other")
    memory.values[NAME] = kept
    tier._removed[NAME] = tier._moment  # as if it had failed
    assert not tier.fetch(KEY)
    assert tier.stats().misses == 1
    put(here)
    writer.delete(KEY)
    assert tier.fetch(KEY), "what was published again"


def test_what_is_removed_again_while_the_tier_removes_it_is_removed_twice(here: Side) -> None:
    class Again(MemoryTier):
        def remove(self, keys: Sequence[str]) -> None:
            super().remove(keys)
            if len(self.calls) == 1:
                tier.remove([KEY])

    memory = Again()
    tier = StoreTier(here[0], memory)
    tier.remove([KEY])
    assert tier.flush(10)
    assert memory.calls == ["remove", "remove"]
    tier.close()


def test_a_publish_after_a_remove_stays_and_one_before_it_is_dropped(here: Side, memory: MemoryTier) -> None:
    writer, tier = here
    memory.pause = threading.Event()
    put_first = threading.Thread(target=put, args=(here, "busy"))
    put_first.start()
    assert memory.waiting.wait(10)
    for key in ("before", "after"):
        writer.put(key, VALUE)
    tier.publish("before")
    tier.remove(["before", "after"])
    tier.publish("after")
    memory.pause.set()
    put_first.join(10)
    assert tier.flush(10)
    assert sorted(memory.values) == sorted(tier_key(key, None, "msgpack1") for key in ("busy", "after"))


@pytest.mark.parametrize("what", ["remove", "clear"])
def test_an_object_that_is_committed_while_another_writer_clears_does_not_stay(
    here: Side, memory: MemoryTier, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its clear finds no object yet, and the fetch that commits it had looked for a clear before."""
    put(here)
    commit = Incoming.commit

    with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1, n_writers=2) as first:
        second = ObjectStoreWriter.join(first.handle)
        tiers = [StoreTier(writer, memory) for writer in (first, second)]

        def commit_later(self: Incoming) -> None:
            tiers[0].remove([KEY]) if what == "remove" else tiers[1].clear()
            first.delete(KEY) if what == "remove" else second.clear()
            commit(self)

        monkeypatch.setattr(Incoming, "commit", commit_later)
        assert not tiers[0].fetch(KEY)
        assert [False, False] == [writer.is_cached(KEY) for writer in (first, second)]
        for tier in tiers:
            tier.close()
        second.close(unlink=False)


@pytest.mark.parametrize("span", [0, 1])
@pytest.mark.parametrize("what", ["remove", "clear"])
def test_a_fetch_in_which_its_key_is_removed_is_a_miss(
    here: Side, there: Side, memory: MemoryTier, what: str, span: int
) -> None:
    put(here)

    class Interposed(MemoryTier):
        def fetch(self, key: str, into: Any) -> bool:
            for number, each in enumerate(memory.values[key]):
                view = into(len(each))
                if number == span:
                    tier.clear() if what == "clear" else tier.remove([KEY])
                    assert tier.flush(10)  # what was forgotten is confirmed before the object could be committed
                if view is None:
                    return False
                view[:] = each
            return True

    tier = StoreTier(there[0], Interposed())
    assert not tier.fetch(KEY)
    assert (tier.stats().misses, tier.stats().hits) == (1, 0)
    assert not there[0].is_cached(KEY)
    tier.close()


def test_after_a_clear_no_writer_of_the_store_fetches_what_was_published_before(here: Side, memory: MemoryTier) -> None:
    put(here)
    put(here, "other")
    with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1, n_writers=2) as first:
        second = ObjectStoreWriter.join(first.handle)
        tiers = [StoreTier(writer, memory) for writer in (first, second)]
        assert tiers[0].fetch("other")
        tiers[0].clear()
        first.clear()
        assert [tier.fetch("other") for tier in tiers] == [False, False]
        assert [tier.stats().misses for tier in tiers] == [1, 1]
        tiers[1].close()
        second.close(unlink=False)
        second = ObjectStoreWriter.join(first.handle)
        tiers[1] = StoreTier(second, memory)
        assert not tiers[1].fetch(KEY), "also after a restart"
        here[1].publish(KEY)
        assert here[1].flush(10)
        assert [tier.fetch(KEY) for tier in tiers] == [True, True]
        for tier in tiers:
            tier.close()
        second.close(unlink=False)
    assert len(memory.values) == 2


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.mark.parametrize("change", ["a list", "gone", "gone while it is fetched"])
def test_what_has_gone_is_a_miss_and_a_value_of_another_type_is_damaged(redis: RedisServer, change: str) -> None:
    with store() as one, store() as other, closing(StoreTier(one, open_tier(redis.url))) as mine:
        put((one, mine))
        if change != "gone while it is fetched":
            redis.ask("DEL", NAME)
        if change == "a list":
            redis.ask("LPUSH", NAME, "x")
        with closing(StoreTier(other, open_tier(redis.url))) as tier:
            assert not tier.fetch(KEY, accepts=lambda extra: redis.ask("DEL", NAME) == b":1\r\n")
            assert (change == "a list", change != "a list") == (tier.stats().damaged == 1, tier.stats().misses == 1)
        redis.ask("DEL", NAME)


def test_many_are_removed_in_calls_that_a_slow_tier_ends_in_time(here: Side) -> None:
    sizes = []

    class Counting(MemoryTier):
        def remove(self, keys: Sequence[str]) -> None:
            sizes.append(len(keys))

    tier = StoreTier(here[0], Counting())
    tier.remove([str(number) for number in range(100)])
    assert tier.flush(10)
    assert sizes == [32, 32, 32, 4]
    tier.close()


def test_moments_go_on_if_the_clock_is_set_back(
    here: Side, memory: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, tier = here
    tier.clear()
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    put(here)
    writer.delete(KEY)
    assert tier.fetch(KEY)
    successor = StoreTier(writer, memory)
    put((writer, successor), "other")
    writer.delete("other")
    assert successor.fetch("other")
    successor.close()
