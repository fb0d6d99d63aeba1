"""`Queue`: order, bounds, ends, and what is left when a process is killed anywhere."""

import asyncio
import fcntl
import multiprocessing
import os
import pickle
import queue as standard
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shmstore import (
    CorruptStoreError,
    ObjectStoreWriter,
    ObjectTooLargeError,
    PickleSerde,
    Queue,
    RankInUseError,
    SharedMemoryError,
    StoreClosedError,
    StoreNotFoundError,
    WriterActiveError,
)
from shmstore.cli.main import main
from shmstore.frontdoor import queue as module
from tests.frontdoor import killed
from tests.frontdoor.killed import consume, number_of, produce, value
from tests.support import FRESH, raises, run_all
from tests.test_interrupts import interrupted_at

FORK = multiprocessing.get_context("fork")
ROOM = 1 << 20


@pytest.fixture
def queue(folder: Path) -> Iterator[Queue]:
    """Return a queue in a folder of its own, which must be empty in the end."""
    with Queue(ROOM, dir=folder, processes=3) as made:
        yield made
    assert [] == os.listdir(folder)


class Child:
    """A process that tells what it does."""

    def __init__(self, act: Any, queue: Queue, *args: Any, context: Any = FRESH) -> None:
        self._said, said = context.Pipe(duplex=False)
        self.process = context.Process(target=act, args=(queue, said, *args))
        self.process.start()
        said.close()

    def heard(self) -> list[Any]:
        """Return what it says until it ends."""
        found = []
        with suppress(EOFError):
            while self._said.poll(60):
                found.append(self._said.recv())
        self.process.join(60)
        assert self.process.exitcode is not None, "it hangs"
        self._said.close()
        return found


def drained(queue: Queue) -> list[int]:
    """Return the numbers of all that comes, also of what a dead consumer had in its hands."""
    found = []
    with suppress(standard.Empty):
        while True:
            found.append(number_of(queue.get(timeout=0 if queue.empty() else 10)))
    return found


def free_bytes(queue: Queue) -> int:
    """Return the bytes that this producer's values take, once it has looked what is gone."""
    queue._free(queue._writer)  # type: ignore[arg-type]
    return queue._writer.stats().used_bytes  # type: ignore[union-attr]


# ---- what comes


def test_values_come_in_order_in_place_and_read_only(queue: Queue) -> None:
    tree = {"a": np.arange(12).reshape(3, 4), "b": [b"bytes", None, 1.5]}
    for number in range(3):
        queue.put((number, tree))
    assert 3 == queue.qsize()
    for number in range(3):
        found = queue.get()
        assert (number, tree["b"]) == (found[0], found[1]["b"])
        np.testing.assert_array_equal(tree["a"], found[1]["a"])
        assert not found[1]["a"].flags.writeable
    assert queue.empty()
    with pytest.raises(standard.Empty):
        queue.get_nowait()
    assert 3 * 64 > free_bytes(queue) - len(pickle.dumps(tree))  # `found` holds the last one


@pytest.mark.parametrize("context", [FORK, FRESH])
def test_several_consumers_share_what_several_producers_put(queue: Queue, context: Any) -> None:
    producers = [Child(produce, queue, first, 150, context=context) for first in (0, 1000)]
    consumers = [Child(consume, queue, context=context) for _ in range(2)]
    here = [number_of(found) for found in queue]
    lists = [here, *(child.heard() for child in consumers)]
    assert sorted([*range(150), *range(1000, 1150)]) == sorted(number for one in lists for number in one)
    for one in lists:
        for low in (0, 1000):
            lane = [number for number in one if low <= number < low + 1000]
            assert sorted(lane) == lane
    assert [150, 150] == [len(child.heard()) for child in producers]


def test_a_listing_that_misses_a_key_of_a_lane_does_not_turn_the_order(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is listed while keys are linked: it may show a key, and not the one before it."""
    real, hidden = os.listdir, [0]
    monkeypatch.setattr(module, "_PART", 0)
    for number in range(3):
        queue.put(value(number))

    def listdir(path: Any) -> list[str]:
        found = sorted(real(path))
        if str(path).endswith("waiting/") and hidden[0] < 2:
            hidden[0] += 1
            return [found[0], *found[2:]] if hidden[0] == 2 else found[:1]
        return found

    monkeypatch.setattr(os, "listdir", listdir)
    assert [0, 1, 2] == [number_of(queue.get()) for _ in range(3)]
    assert hidden[0] == 2


def test_pickle_serde_carries_any_object(folder: Path) -> None:
    with Queue("1 MiB", serde=PickleSerde(), dir=folder) as queue:
        queue.put(Path("/tmp"))
        assert Path("/tmp") == queue.get()


@pytest.mark.parametrize(
    ("wrong", "error", "names"),
    [
        ({"capacity": "much"}, ValueError, ["capacity", "'much'"]),
        ({"capacity": 0}, ValueError, ["capacity"]),
        ({"capacity": ROOM, "maxsize": -1}, ValueError, ["maxsize"]),
        ({"capacity": ROOM, "name": "a/b"}, ValueError, ["name"]),
        ({"capacity": ROOM, "processes": 0}, ValueError, ["processes"]),
    ],
)
def test_a_wrong_argument_leaves_nothing(folder: Path, wrong: Any, error: Any, names: list[str]) -> None:
    with raises(error, names):
        Queue(**wrong, dir=folder)
    assert [] == os.listdir(folder)


def test_the_commands_look_into_a_queue(queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    queue.put(1)
    assert 0 == main(["dump", "values", "--dir", queue._folder])
    assert "writers 1 of 3 alive" in capsys.readouterr().out


@pytest.mark.parametrize("capacity", [1, 100, "4095"])
def test_a_number_of_values_is_no_capacity(folder: Path, capacity: int | str) -> None:
    with raises(ValueError, ["capacity", str(capacity)], ["bytes", "maxsize"]):
        Queue(capacity, dir=folder)
    Queue(4096, dir=folder).close()


@pytest.mark.parametrize("name", [None, "frames"])
def test_a_folder_that_is_missing_is_an_error_of_shared_memory(folder: Path, name: str | None) -> None:
    with raises(SharedMemoryError, ["folder", str(folder / "none")], ["dir="]):
        Queue(ROOM, name=name, dir=folder / "none")


def test_there_is_no_block_and_the_error_says_what_does_not_wait(queue: Queue) -> None:
    for call in (lambda: queue.put(1, True), lambda: queue.get(False)):
        with raises(TypeError, ["timeout", "bool"], ["put_nowait"]):
            call()


def test_what_no_store_takes_is_refused_and_is_not_in_the_queue(queue: Queue) -> None:
    with pytest.raises(TypeError):
        queue.put(object())
    with pytest.raises(ObjectTooLargeError):
        queue.put(value(1, ROOM))
    assert queue.empty()


def test_hints_say_what_to_do_with_a_queue(folder: Path) -> None:
    with Queue(ROOM, processes=1, dir=folder) as one, pickle.loads(pickle.dumps(one)) as other:
        one.put(1)
        assert 1 == one.get()
        for call, error in ((lambda: other.put(1), WriterActiveError), (other.get_nowait, RankInUseError)):
            with pytest.raises(error) as caught:
                call()
            assert "make the queue for more `processes`" in caught.value.hint
        for wrong, left in ((bytes(2 * ROOM), "uint8 array"), (value(1, ROOM), "")):
            with pytest.raises(ObjectTooLargeError) as large:
                one.put(wrong)
            assert "make the queue with a larger capacity" in large.value.hint
            assert left in large.value.hint
            assert "inline" not in large.value.hint
        one.put(2)
        with raises(TypeError, ["Delivery", "pickled"], ["done()"]):
            pickle.dumps(one.get(ack=True))


# ---- bounds


def test_maxsize_bounds_what_several_producers_put_at_once(folder: Path) -> None:
    with Queue(ROOM, maxsize=3, dir=folder) as queue:
        sizes = []

        def put() -> None:
            for _ in range(60):
                queue.put(b"x")

        def get() -> None:
            for _ in range(120):
                sizes.append(queue.qsize())
                queue.get()

        run_all(put, put, get)
        for _ in range(3):
            queue.put(b"x")
        assert queue.full()
        with pytest.raises(standard.Full):
            queue.put_nowait(b"x")
        assert max(sizes) <= 4  # one is linked before it is found to be too much


def test_a_put_beyond_maxsize_by_another_producer_is_taken_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Queue(ROOM, maxsize=1, dir=folder) as queue:
        real = os.link

        def link(*args: Any) -> None:
            real(args[0], args[1] + "another")
            real(*args)

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(standard.Full):
            queue.put(b"x", timeout=0)
        assert 1 == queue.qsize()


def test_a_consumer_wakes_a_producer_that_waits_for_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN", 100.0)
    with Queue(ROOM, maxsize=1, dir=folder) as queue:
        queue.put(1)
        threading.Timer(0.05, queue.get).start()
        begin = time.monotonic()
        queue.put(2, timeout=60)
        assert time.monotonic() - begin < 20


def test_a_full_arena_waits_for_views_and_says_full_until_then(queue: Queue) -> None:
    half = np.ones(ROOM // 2 - 4096, np.uint8)
    queue.put(half)
    queue.put(half)
    held = [queue.get(), queue.get()]
    with pytest.raises(standard.Full):
        queue.put(half, timeout=0.01)
    threading.Timer(0.05, held.clear).start()
    queue.put(half, timeout=30)
    assert 1 == queue.qsize()


def test_a_put_that_waits_for_room_pickles_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Queue(ROOM, serde=PickleSerde(), dir=folder) as queue:
        queue.put(bytes(ROOM // 2))
        pickled = Mock(side_effect=pickle.dumps)
        monkeypatch.setattr(pickle, "dumps", pickled)
        with pytest.raises(standard.Full):
            queue.put(bytes(ROOM // 2), timeout=0.1)
        assert 1 == pickled.call_count


def test_tasks_go_on_while_a_first_put_reserves(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on, real = threading.Event(), ObjectStoreWriter.join
    monkeypatch.setattr(ObjectStoreWriter, "join", lambda *args, **kw: went_on.wait(10) and real(*args, **kw))

    async def both() -> None:
        putting = asyncio.create_task(queue.aput(1))
        await asyncio.sleep(0.01)
        went_on.set()
        await putting

    asyncio.run(both())
    assert 1 == queue.get(timeout=10)


def test_a_get_waits_for_a_put_and_no_longer_than_its_timeout(queue: Queue) -> None:
    begin = time.monotonic()
    with pytest.raises(standard.Empty):
        queue.get(timeout=0.25)
    assert 0.25 <= time.monotonic() - begin < 5
    threading.Timer(0.05, queue.put, (b"late",)).start()
    assert b"late" == queue.get(timeout=30)


def test_tasks_go_on_while_one_waits_and_a_cancelled_one_has_taken_nothing(folder: Path) -> None:
    async def both(queue: Queue) -> None:
        first, second = asyncio.create_task(queue.aget()), asyncio.create_task(queue.aget(timeout=30))
        await asyncio.sleep(0.02)
        first.cancel()
        await queue.aput(1)
        assert 1 == await second
        await queue.aput(2)
        waiting = asyncio.create_task(queue.aput(3))
        await asyncio.sleep(0.02)
        assert 2 == await queue.aget()
        await waiting
        assert 3 == await queue.aget()
        with pytest.raises(standard.Empty):
            await queue.aget(timeout=0.01)
        await queue.aput(4)
        with pytest.raises(standard.Full):
            await queue.aput(5, timeout=0.01)

    with Queue(ROOM, maxsize=1, dir=folder) as queue:
        asyncio.run(both(queue))


# ---- deliveries


def test_a_value_that_is_not_done_comes_again_and_one_that_is_done_does_not(queue: Queue) -> None:
    for number in range(3):
        queue.put(value(number))
    kept = queue.get(ack=True)
    with suppress(ZeroDivisionError), queue.get(ack=True) as found:
        assert 1 == number_of(found)
        raise ZeroDivisionError
    with queue.get(ack=True) as found:
        assert 2 == number_of(found)
    assert 2 == queue.qsize()
    assert 1 == number_of(queue.get(timeout=10))  # and 0 is in the hands of a consumer that lives
    with pytest.raises(standard.Empty):
        queue.get(timeout=0.2)
    assert 0 == number_of(kept.value)
    kept.done()
    kept.done()
    assert queue.empty()


def test_a_producer_keeps_what_a_consumer_has_not_done(queue: Queue) -> None:
    queue.put(value(1))
    taken = queue.get(ack=True)
    assert free_bytes(queue) > 0
    del taken
    assert 1 == number_of(queue.get(timeout=10))


def test_a_value_that_another_consumer_takes_first_is_not_taken_twice(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.put(value(1))
    real = os.unlink

    def unlink(path: str) -> None:
        with suppress(FileNotFoundError):
            real(path)  # the other one
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(standard.Empty):
        queue.get(timeout=0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_forked_child_does_not_end_a_delivery_of_its_parent(queue: Queue, fails: bool) -> None:
    queue.put(1)
    delivery = queue.get(ack=True)

    def child() -> None:
        with suppress(KeyError), delivery:
            if fails:
                raise KeyError
        delivery.done()

    process = FORK.Process(target=child)
    process.start()
    process.join(60)
    assert 0 == process.exitcode
    assert 1 == queue.qsize()
    with pytest.raises(standard.Empty):
        queue.get(timeout=0.2)
    delivery.done()
    assert queue.empty()


def test_more_claims_than_there_are_is_an_error_and_loses_nothing(queue: Queue) -> None:
    for number in range(70):
        queue.put(number)
    taken = []
    with raises(RuntimeError, ["deliveries"], ["done()"]):
        while True:
            taken.append(queue.get(ack=True))
    assert 70 == queue.qsize()
    for delivery in taken:
        delivery.done()
    assert 70 == len(taken) + len([queue.get(timeout=10) for _ in range(queue.qsize())])


@pytest.mark.parametrize(("made_by", "left"), [((int, ("no number",)), 0), ((import_module, ("no.module",)), 1)])
def test_a_value_that_cannot_be_read_is_an_error_once(made_by: Any, left: int, folder: Path) -> None:
    """If a module is missing, another consumer may have it."""
    with Queue(ROOM, serde=PickleSerde(), dir=folder) as queue:
        queue.put(Unpickled(made_by))
        for _ in range(1 + left):
            with pytest.raises(CorruptStoreError):
                queue.get(ack=True)
        assert left == queue.qsize()
        assert left or 0 == free_bytes(queue)


class Unpickled:
    """What raises where it is unpickled."""

    def __init__(self, made_by: Any) -> None:
        self.made_by = made_by

    def __reduce__(self) -> Any:
        return self.made_by


# ---- names, and the end


def test_a_named_queue_is_opened_by_its_name_and_stays_until_it_is_removed(folder: Path) -> None:
    with Queue(ROOM, name="frames", dir=folder) as one, Queue(ROOM, name="frames", dir=folder) as other:
        one.put(b"first")
        assert b"first" == other.get(timeout=10)
        one.put(b"second")
        with raises(WriterActiveError, ["frames.queue"], ["close it"]):
            Queue.unlink("frames", dir=folder)
    with Queue(ROOM, name="frames", dir=folder) as later:
        assert [b"second"] == list(later)
    Queue.unlink("frames", dir=folder)
    with raises(StoreNotFoundError, ["frames.queue"]):
        Queue.unlink("frames", dir=folder)
    assert [] == os.listdir(folder)


def test_many_who_open_one_name_at_once_share_a_queue(folder: Path) -> None:
    opened: list[Queue] = []
    run_all(*[lambda: opened.append(Queue(ROOM, name="one", dir=folder)) for _ in range(6)])
    opened[0].put(7)
    assert 7 == opened[-1].get(timeout=10)
    for queue in opened:
        queue.close()
    assert ["one.queue"] == os.listdir(folder)
    Queue.unlink("one", dir=folder)


def test_an_iteration_over_a_name_waits_for_a_first_producer(folder: Path) -> None:
    with Queue(ROOM, name="n", dir=folder) as consumer:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(consumer))
        thread.start()
        time.sleep(0.3)  # it has looked whether there are producers
        with Queue(ROOM, name="n", dir=folder) as producer:
            producer.put(1)
        thread.join(30)
        assert [1] == found
    Queue.unlink("n", dir=folder)


def test_a_closed_queue_refuses_calls_and_its_views_stay(queue: Queue, folder: Path) -> None:
    other = pickle.loads(pickle.dumps(queue))
    other.put(value(3))
    found = other.get(timeout=10)
    other.put(value(4))
    other.close()
    other.close()
    for call in (other.get, other.qsize, lambda: other.put(1), lambda: next(other), lambda: pickle.dumps(other)):
        with raises(StoreClosedError, ["closed"]):
            call()
    assert (3, 4) == (number_of(found), number_of(queue.get(timeout=10)))
    queue.join_thread()


def test_a_queue_whose_processes_have_ended_cannot_be_opened(folder: Path) -> None:
    with Queue(ROOM, dir=folder) as queue:
        packed = pickle.dumps(queue)
    with raises(StoreNotFoundError, ["ended"]):
        pickle.loads(packed)


class Exits:
    """What a process does that ends without a close, and begins so late that it alone has the queue."""

    def __init__(self, puts: bool) -> None:
        self._puts = puts

    def __setstate__(self, state: Any) -> None:
        time.sleep(0.5)
        vars(self).update(state)

    def __call__(self, queue: Queue, said: Connection) -> None:
        time.sleep(0.5)
        if self._puts:
            queue.put(2)
        said.send(queue.get(timeout=30))


@pytest.mark.parametrize("puts", [True, False])
@pytest.mark.parametrize("context", [FORK, FRESH])
def test_the_last_process_that_exits_removes_the_queue(folder: Path, context: Any, puts: bool) -> None:
    queue = Queue(ROOM, dir=folder)
    for number in (0, 1):
        queue.put(number)
    assert 0 == queue.get()
    child = Child(Exits(puts), queue, context=context)
    queue.close()
    assert [1] == child.heard()
    assert [] == os.listdir(folder)


def test_a_forked_child_closes_its_own_part_and_no_more(queue: Queue) -> None:
    queue.put(1)
    assert 1 == queue.get()
    child = FORK.Process(target=queue.close)
    child.start()
    child.join(60)
    assert 0 == child.exitcode
    queue.put(2)
    assert 2 == queue.get(timeout=10)


def test_a_folder_that_is_removed_while_it_is_opened_is_not_there(folder: Path) -> None:
    (folder / "gone").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda fd, how: (folder / "gone").rmdir())
        with pytest.raises(FileNotFoundError):
            module._locked(str(folder / "gone"))


def test_an_iteration_waits_for_no_consumer_but_for_what_one_has_in_its_hands(queue: Queue) -> None:
    other = pickle.loads(pickle.dumps(queue))
    queue.put(value(1))
    held = [other.get(timeout=10, ack=True)]
    threading.Timer(0.3, held.clear).start()
    assert [1] == [number_of(found) for found in queue]
    assert not other._puts  # it has not put
    other.close()


def test_garbage_closes_and_the_next_queue_removes_those_of_dead_processes(folder: Path) -> None:
    Queue(ROOM, dir=folder)
    assert [] == os.listdir(folder)

    def dies() -> None:
        queue = Queue(ROOM, dir=folder)
        queue.put(1)
        os.kill(os.getpid(), 9)

    process = FORK.Process(target=dies)
    process.start()
    process.join()
    assert 1 == len(os.listdir(folder))
    with Queue(ROOM, dir=folder):
        assert 1 == len(os.listdir(folder))


# ---- deaths

PRODUCER = ["join 1", "keys 1", "mknod 1", "put 1", "link 1", "write 1", "put 3", "link 3", "write 3", "close 1"]
CONSUMER = ["attach 1", "read 2", "listdir 3", "find 2", "unlink 2", "get 2"]
ACKS = ["find_or_claim 2", "claimed 2", "find 2", "rename 2", "get 2", "unlink 2"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", PRODUCER)
def test_what_a_killed_producer_has_put_comes_and_its_room_is_used_again(folder: Path, step: str, when: str) -> None:
    with Queue(ROOM, dir=folder, processes=1) as queue:
        told = Child(produce, queue, 0, 5, f"{when} {step}").heard()
        queue.put(value(100))  # in the arena of the dead one
        found = drained(queue)
        assert [*range(len(found) - 1), 100] == found
        assert len(told) <= len(found) - 1 <= len(told) + 1  # one may be put, and not told
        assert 0 == free_bytes(queue)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("ack", "step"), [*((False, step) for step in CONSUMER), *((True, step) for step in ACKS)])
def test_a_killed_consumer_takes_what_it_has_unlinked_and_no_more(
    queue: Queue, ack: bool, step: str, when: str
) -> None:
    for number in range(6):
        queue.put(value(number))
    module._drop(queue._puts, queue._bell)
    told = Child(consume, queue, ack, f"{when} {step}").heard()
    lost = {*range(6)} - {*told, *(found := drained(queue))}
    may_lose = (not ack and step in ("unlink 2", "get 2")) or (ack and (when, step) == ("after", "unlink 2"))
    assert len(told) + len(found) + len(lost) == 6
    assert len(lost) <= may_lose
    assert sorted(found) == found or ack
    assert 0 == free_bytes(queue)


@pytest.mark.parametrize("step", ["link 1", "mknod 1", "get_cached 1", "get_cached 2", "put 1"])
def test_a_successor_that_is_killed_loses_nothing_of_its_predecessor(folder: Path, step: str) -> None:
    with Queue(ROOM, dir=folder, processes=1) as queue:
        Child(produce, queue, 0, 4, "after write 4").heard()
        Child(produce, queue, 50, 1, f"before {step}").heard()
        for number in range(100, 200):  # more than the arena holds
            queue.put(value(number), timeout=0.2) if number < 110 else None
        assert [0, 1, 2, 3, *range(100, 110)] == drained(queue)
        assert 0 == free_bytes(queue)


def test_who_waits_finds_in_a_moment_what_nobody_rings_for(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ring", lambda fifo: None)
    threading.Timer(0.05, queue.put, (value(1),)).start()
    begin = time.monotonic()
    assert 1 == number_of(queue.get(timeout=30))
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_lose_no_more_than_what_dead_consumers_had(folder: Path, seed: int) -> None:
    rng, count, put, got = random.Random(seed), 400, [], []
    with Queue(ROOM, dir=folder, processes=4) as queue:
        consumers = [Child(killed.spend, queue) for _ in range(2)]
        kills = 0
        first = 0
        while first < 8 * count:
            producer = Child(produce, queue, first, count)
            time.sleep(rng.random() * 0.15)
            victim = rng.choice([producer, *consumers])
            victim.process.kill()
            if victim in consumers:
                kills += 1
                consumers.remove(victim)
                got += victim.heard()
                consumers.append(Child(killed.spend, queue))
            put.append((first, len(producer.heard())))
            first += count
        module._drop(queue._puts, queue._bell)
        got += [number for child in consumers for number in child.heard()]
        assert queue.empty()
        assert len({*got}) == len(got)
        told = {number for first, number_told in put for number in range(first, first + number_told)}
        assert len(told - {*got}) <= kills * 2  # one unlinked, and one told to a pipe that died
        assert {*got} <= told | {first + number_told for first, number_told in put}


def test_done_after_a_failure_takes_nothing_from_the_next_consumer(queue: Queue) -> None:
    queue.put(1)
    first = queue.get(ack=True)
    with suppress(KeyError), first:
        raise KeyError
    second = queue.get(timeout=5, ack=True)
    first.done()
    assert 1 == queue.qsize()
    second.done()
    assert 0 == queue.qsize()


def test_a_first_put_that_fails_takes_no_arena(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Queue, "_there", lambda _: 1 / 0)
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                queue.put(1)
    queue.put(1, timeout=5)


def test_an_iteration_does_not_end_during_a_first_put_whatever_another_thread_gets(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, found, real = pickle.loads(pickle.dumps(queue)), list[Any](), ObjectStoreWriter.join
    iterating = threading.Thread(target=lambda: found.extend(other))

    def join(*args: Any, **options: Any) -> ObjectStoreWriter:
        with ThreadPoolExecutor(1) as another, pytest.raises(standard.Empty):
            another.submit(queue.get_nowait).result()
        iterating.start()
        iterating.join(0.3)
        assert iterating.is_alive()
        return real(*args, **options)

    monkeypatch.setattr(ObjectStoreWriter, "join", join)
    queue.put(1)
    queue.close()
    iterating.join(10)
    other.close()
    assert [1] == found


def test_an_interrupt_of_a_put_leaves_no_lease(queue: Queue) -> None:
    def put() -> None:
        for _ in range(2):
            queue.put(value(1))
            queue.get()
        queue._free(queue._writer)  # type: ignore[arg-type]

    queue.put(value(0))
    number = 1
    while interrupted_at(number, put, module.__file__, only=["_put", "_store", "_free"]):
        drained(queue)
        assert 0 == free_bytes(queue), f"interrupted at {number}"
        number += 1
    assert number > 10


@pytest.mark.parametrize("call", ["put", "get", "close"])
@pytest.mark.parametrize("interrupted", ["put", "get"])
def test_a_signal_handler_is_refused_at_once_what_waits_for_the_call_that_it_interrupts(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, interrupted: str, call: str
) -> None:
    calls = {"put": lambda: queue.put(2), "get": lambda: queue.get(timeout=5), "close": queue.close}
    refused, ring = [], module._ring

    def handle(*_: Any) -> None:
        try:
            calls[call]()
        except RuntimeError as error:
            refused.append(error)

    def interrupt(fifo: int) -> None:
        monkeypatch.setattr(module, "_ring", ring)
        signal.raise_signal(signal.SIGUSR1)

    queue.put(0)
    queue.put(1)
    before = signal.signal(signal.SIGUSR1, handle)
    monkeypatch.setattr(module, "_ring", interrupt)
    try:
        calls[interrupted]()
    finally:
        signal.signal(signal.SIGUSR1, before)
    if call in (interrupted, "close"):
        with raises(RuntimeError, [repr(queue), "already"], ["signal handler"]):
            raise refused[0]
    assert len(refused) == (call in (interrupted, "close"))
    calls[interrupted]()
