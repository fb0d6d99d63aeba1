"""`Cache`: one process makes a value and all find it, whatever the others do and however they end."""

import asyncio
import inspect
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

import shmstore
from shmstore import Cache, ObjectStoreWriter
from tests.support import FRESH, SHM, Child, Signal, alive, frozen, in_child, raises, run_all, until

SIZE = 64 << 10
Opens = Callable[..., Any]


@pytest.fixture
def opens(name: str) -> Iterator[Opens]:
    """Open one cache as often as asked; all are closed in the end."""
    made: list[Cache] = []

    def opened(capacity: Any = "64 MiB", **options: Any) -> Cache:
        made.append(Cache(name, capacity, **options))
        return made[-1]

    yield opened
    for cache in made:
        cache.close()


def filled(number: int, nbytes: int = SIZE) -> np.ndarray[Any, Any]:
    return np.full(nbytes, number % 251, np.uint8)


def use_all(cache: Cache, count: int, first: int = 0) -> int:
    """Ask for `count` values, from `first` on; return how many of them this call made."""
    before = cache.stats().made
    for number in [*range(first, count), *range(first)]:
        assert number % 251 == cache.get_or_make(str(number), partial(filled, number))[-1]
    return cache.stats().made - before


def test_a_cache_is_a_mapping_of_trees_of_arrays(opens: Opens) -> None:
    cache = opens()
    value = {"x": filled(3), "meta": ("a", 1, None)}
    assert (0, [], None, 7) == (len(cache), list(cache), cache.get("a"), cache.pop("a", 7))
    cache["a"] = value
    cache.put("b", None)
    assert frozen(value) == frozen(cache["a"]) == frozen(cache.get("a")) == frozen(dict(cache.items())["a"])
    assert "a" in cache
    assert "c" not in cache
    assert None not in cache
    assert {"a", "b"} == set(cache) == set(cache.keys())
    assert 2 == len(cache) == len(list(cache.values()))
    assert cache["b"] is None
    cache["a"] = 1
    assert 1 == cache["a"] == cache.setdefault("a", 2) == cache.pop("a")
    del cache["b"]
    for absent in (lambda: cache["b"], lambda: cache.pop("b"), lambda: cache.__delitem__("b"), cache.popitem):
        with pytest.raises(KeyError):
            absent()
    cache.update(a=1, b=2)
    cache.clear()
    assert [] == list(cache)
    assert cache == cache
    assert cache != opens()
    assert hash(cache)
    for call in (cache.get, cache.pop, lambda key: cache.put(key, 1), lambda key: cache.get_or_make(key, int)):
        with raises(TypeError, ["int"]):
            call(1)


def test_a_view_is_read_only_and_a_copy_and_a_private_value_are_not(opens: Opens) -> None:
    cache = opens()
    for number, get in enumerate((cache.get, lambda key, **how: cache.get_or_make(key, lambda: filled(7), **how))):
        cache[str(number)] = filled(7)
        view, copy, private = (get(str(number), **how) for how in ({}, {"copy": True}, {"private": True}))
        assert (False, True, True) == (view.flags.writeable, copy.flags.writeable, private.flags.writeable)
        copy[:] = private[:] = 1
        assert 7 == view[0] == cache[str(number)][0]
    made = cache.get_or_make("new", lambda: filled(9), copy=True)
    made[:] = 1
    assert 9 == cache["new"][0]
    assert not cache.get_or_make("newer", lambda: filled(9)).flags.writeable
    with pytest.raises(TypeError):
        cache.get_or_make("2", lambda: 1, copy="no")


def test_processes_that_want_the_same_values_make_each_once(opens: Opens) -> None:
    cache = opens(processes=4)
    children = [Child(use_all, cache, 60, first) for first in (0, 15, 30, 45)]
    assert 60 == sum(child.join() for child in children)
    assert (60, 0) == (len(cache), use_all(cache, 60))


def test_one_greedy_maker_fills_half_of_the_arenas_before_it_evicts(opens: Opens) -> None:
    cache = opens("32 MiB", processes=8)  # 32 arenas, with room for 15 values each
    assert (200, 0) == (use_all(cache, 200), use_all(cache, 200))
    assert 14 << 20 == cache.stats().reserved_bytes
    for number in range(200, 300):
        cache[str(number)] = filled(number)
    assert 16 << 20 == cache.stats().reserved_bytes
    assert 220 < len(cache) <= 240
    assert 17 << 20 == in_child(lambda: (cache.put("another", 1), cache.stats().reserved_bytes)[1])


def test_a_full_cache_looks_once_a_second_for_another_arena(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, looks, start = opens("2 MiB", processes=2), Mock(), time.monotonic()
    use_all(cache, 32)
    looks.side_effect = cache._arenas._may_have
    monkeypatch.setattr(cache._arenas, "_may_have", looks)
    views = [cache.get_or_make(str(number), partial(filled, number)) for number in range(32, 96)]
    assert 64 == len(views) > cache.stats().not_stored["full"] > 0
    assert looks.call_count <= 1 + time.monotonic() - start


def test_as_many_makers_as_asked_for_fill_all_arenas_and_more_of_them_only_read(
    opens: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    def maker(first: int, done: Signal) -> None:
        use_all(cache, 200, first)
        done.send()
        threading.Event().wait()

    cache = opens("8 MiB", processes=2)  # room for 120 values
    with alive(maker, 0), alive(maker, 0):
        assert 8 << 20 == cache.stats().reserved_bytes == cache.stats().capacity
        assert 112 <= len(cache) <= 120
        stored = next(iter(cache))
        values = [cache.get_or_make(key, lambda: filled(250)) for key in ("new", stored, "newer")]
        assert [250, int(stored), 250] == [value[0] for value in values]
        assert 2 == cache.stats().not_stored["reads only"]
        assert 1 == caplog.text.count("the cache is for (2) make values: this one only reads")
        with raises(shmstore.WriterActiveError, ["only reads"], ["processes"]):
            cache["new"] = 1
    cache["new"] = 1  # now there is an arena


def test_more_readers_than_ranks_miss_and_go_on(opens: Opens, caplog: pytest.LogCaptureFixture) -> None:
    readers = [opens() for _ in range(130)]
    readers[0]["a"] = 1
    found = [cache.get("a") for cache in readers]
    assert [1] * 128 + [None] * 2 == found
    assert [2, 2] == [cache.get_or_make("a", lambda: 2) for cache in readers[128:]]
    assert 2 == caplog.text.count("rank")
    assert 1 == readers[0]["a"]  # what was made without looking has replaced nothing
    readers[0].close()
    readers[1].close()
    until(lambda: [1, 1] == [cache.get("a") for cache in readers[128:]])


def test_an_eviction_takes_what_was_not_used_and_never_what_is_viewed(opens: Opens) -> None:
    cache = opens("4 MiB", processes=1)
    kept, views = cache.get_or_make("kept", lambda: filled(5)), []
    for number in range(300):
        cache[str(number)] = filled(number)
        views.append(cache[str(number)])
        views = views[-5:]
    assert [5] * 2 == [kept[0], cache["kept"][0]]
    assert [number % 251 for number in range(295, 300)] == [view[9] for view in views]
    assert 40 < len(cache) < 64
    views += [cache.get_or_make(str(number), lambda: filled(1)) for number in range(300, 400)]
    assert 0 < cache.stats().not_stored["full"] < 60  # what is viewed fills the cache
    with pytest.raises(shmstore.StoreFullError):
        cache["400"] = filled(1)


def test_what_cannot_be_stored_is_returned_as_it_was_made_and_counted(opens: Opens) -> None:
    cache = opens("4 MiB", processes=1)
    odd, large = object(), filled(1, 2 << 20)
    for key, value, error in (("odd", odd, TypeError), ("large", large, shmstore.ObjectTooLargeError)):
        assert cache.get_or_make(key, lambda value=value: value) is value
        with pytest.raises(error):
            cache[key] = value
    with raises(shmstore.UnsupportedValueError, ["value[0]"]):
        cache["odd"] = [odd]
    counts = cache.stats().not_stored
    assert {"unsupported": 1, "too large": 1} == {why: count for why, count in counts.items() if count}
    assert [] == list(cache)


def test_the_host_may_lack_the_room_or_the_folder_and_the_value_is_returned(tmp_path: Path, name: str) -> None:
    room = os.statvfs(SHM)
    with Cache(name, 64 * room.f_blocks * room.f_frsize, processes=1) as cache:
        assert (3, 1) == (cache.get_or_make("a", lambda: 3), cache.stats().not_stored["full"])
        with pytest.raises(shmstore.StoreSpaceError):
            cache["a"] = 3
    with Cache(name, "1 MiB", dir=tmp_path / "none") as cache:
        assert (3, 1) == (cache.get_or_make("a", lambda: 3), cache.stats().not_stored["failed"])


def test_an_error_of_make_reaches_the_caller_and_the_next_one_makes(opens: Opens) -> None:
    cache = opens()

    def fail() -> None:
        raise StopIteration("here")

    with pytest.raises(StopIteration, match="here"):
        cache.get_or_make("a", fail)
    assert 1 == in_child(cache.get_or_make, "a", lambda: 1) == cache.get_or_make("a", fail)
    for later in (partial(asyncio.sleep, 1), lambda: asyncio.sleep(1)):
        with raises(TypeError, ["make"], ["aget_or_make"]):
            cache.get_or_make("b", later)
    with raises(TypeError, ["make", "None"]):
        cache.get_or_make("b", None)
    assert 1 == cache.get_or_make("b", lambda: 1)  # no claim is left


@dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that a context manager of contextlib replaces by another one."""

    why: str


def test_a_frozen_error_of_make_reaches_the_caller_as_it_is(opens: Opens) -> None:
    cache = opens()

    def fail() -> None:
        raise FrozenError("here")

    async def afail() -> None:
        fail()

    with pytest.raises(FrozenError):
        cache.get_or_make("a", fail)
    for make in (fail, afail):
        with pytest.raises(FrozenError):
            asyncio.run(cache.aget_or_make("a", make))


def test_the_claim_of_a_killed_maker_falls_and_the_next_one_makes(opens: Opens) -> None:
    cache = opens()

    def stuck(begun: Signal) -> None:
        def make() -> None:
            begun.send()
            threading.Event().wait()

        cache.get_or_make("a", make)

    with alive(stuck) as maker:
        waiting = Child(cache.get_or_make, "a", lambda: "second")
        assert "own" == cache.get_or_make("a", lambda: "own", wait=0.05)  # and that is stored now
        cache.pop("a")
        maker.kill()
        assert waiting.join() in ("second", "own")
    assert 1 == cache.stats().made


def hold(cache: Cache, ready: Signal) -> None:
    """Make values until killed."""
    cache["a"] = 1
    ready.send()
    threading.Event().wait()


def test_of_two_that_join_at_once_no_more_stay_than_may_make(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, real = opens(processes=1), ObjectStoreWriter.open

    def after_another(*arguments: Any, **options: Any) -> ObjectStoreWriter:
        monkeypatch.undo()
        end.enter_context(alive(hold, cache))
        return real(*arguments, **options)

    with ExitStack() as end:
        monkeypatch.setattr(ObjectStoreWriter, "open", after_another)
        for call in (lambda: cache.put("b", 1), lambda: cache.pop("a"), cache.clear):
            with raises(shmstore.WriterActiveError, ["only reads"], ["larger number of processes"]):
                call()
        assert 1 == cache["a"]
    cache["b"] = 2  # at once, now that the other one has gone


def test_of_two_that_join_at_once_and_leave_one_joins_again(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, looks = opens(processes=1), Mock(side_effect=[True, False, True, True])
    monkeypatch.setattr(cache._arenas, "_may_have", looks)
    cache["a"] = 1
    assert (1, 4) == (cache["a"], looks.call_count)


def test_a_process_that_only_reads_looks_once_a_second_for_a_free_arena(opens: Opens) -> None:
    cache, begin = opens(processes=1), time.monotonic()
    looks = Mock(side_effect=cache._arenas.seen)
    with alive(hold, opens(processes=1)), patch.object(cache._arenas, "seen", looks):
        assert list(range(200)) == [cache.get_or_make(f"b{number}", lambda n=number: n) for number in range(200)]
        assert 1 <= looks.call_count <= 1 + time.monotonic() - begin
        assert 200 == cache.stats().not_stored["reads only"]


def test_what_was_put_while_a_value_was_made_stays(opens: Opens) -> None:
    cache = opens()
    assert "put" == cache.get_or_make("a", lambda: in_child(cache.put, "a", "put") or "made") == cache["a"]


def test_a_value_that_asks_for_itself_is_an_error_and_for_another_is_not(opens: Opens) -> None:
    cache = opens()
    with raises(RuntimeError, ["'a'"], ["call what computes it"]):
        cache.get_or_make("a", lambda: cache.get_or_make("b", lambda: opens().get_or_make("a", lambda: 1)))
    assert 3 == cache.get_or_make("a", lambda: 1 + cache.get_or_make("b", lambda: 2))
    assert [2, 3] == [cache["b"], cache["a"]]


def test_two_that_make_one_value_of_the_others_key_do_not_wait_for_each_other(opens: Opens) -> None:
    cache, both = opens(), threading.Barrier(2)

    def make(own: str, other: str) -> None:
        cache.get_or_make(own, lambda: (both.wait(), cache.get_or_make(other, lambda: "inner")))

    begin = time.monotonic()
    run_all(lambda: make("a", "b"), lambda: make("b", "a"))
    assert time.monotonic() - begin < 30  # not the 60 s of a wait
    assert {"a", "b"} == set(cache)


def test_an_expired_value_is_a_miss_for_everybody_and_is_made_once_again(opens: Opens) -> None:
    cache = opens()
    cache.put("a", "old", expire=0)
    cache.put("b", "new", expire=1000)
    seen = in_child(lambda: ("a" in cache, cache.get("a"), cache.pop("a", 0), cache["b"]))
    assert (False, None, 0, "new") == seen
    cache.put("a", "old", expire=0.05)
    assert "old" == cache["a"]
    until(lambda: "a" not in cache)
    made = [Child(lambda: (cache.get_or_make("a", os.getpid), cache.stats().made)) for _ in range(4)]
    found = [child.join() for child in made]
    assert (1, 1) == (len({value for value, _ in found}), sum(count for _, count in found))
    with raises(ValueError, ["expire"]):
        cache.put("a", 1, expire=-1)


def test_of_processes_that_put_and_pop_the_same_key_one_is_the_last(opens: Opens) -> None:
    cache = opens(processes=4)

    def put(number: int) -> int:
        for turn in range(100):
            cache["a"] = (number, turn)
            cache.get_or_make("a", int)
        return 0

    def pop(_: int) -> int:
        return sum(cache.pop("b", 0) for _ in range(50))

    for child in [Child(put, number) for number in range(4)]:
        child.join()
    assert ["a"] == list(cache)
    assert 99 == cache["a"][1]
    cache["b"] = 1
    assert 1 == sum(child.join() for child in [Child(pop, number) for number in range(4)])
    assert "b" not in cache


@pytest.mark.parametrize("call", [lambda cache: cache.put("a", 2), lambda cache: cache.pop("a")])
def test_a_put_or_pop_waits_for_the_one_of_the_same_key_and_no_other(opens: Opens, call: Any) -> None:
    cache = opens()
    cache["a"] = 1
    waiting = threading.Thread(target=call, args=(cache,))
    with cache._alone_with("a"):
        waiting.start()
        cache["b"] = 1
        waiting.join(0.2)
        assert waiting.is_alive()
        assert 1 == cache["a"]
    waiting.join()
    assert cache.get("a") in (2, None)


def spawned(cache: Cache) -> Any:
    return cache.get_or_make("a", lambda: 0), cache.get_or_make("b", lambda: os.getpid()) == os.getpid()


def test_a_cache_goes_to_a_spawned_process_and_through_a_fork(opens: Opens) -> None:
    cache = opens(processes=3, prefault=True)
    cache["a"] = view = 1
    with FRESH.Pool(1) as pool:
        assert (1, True) == pool.apply(spawned, (cache,))
    assert (1, "child") == in_child(lambda: (cache["a"], cache.get_or_make("c", lambda: "child")))
    assert [1, "child", 1] == [cache["a"], cache["c"], view]  # the child has closed nothing of this process
    again = pickle.loads(pickle.dumps(cache))
    assert again["a"] == 1
    assert repr(again) == repr(cache)
    again.close()


def test_what_is_closed_says_so_and_the_values_stay(opens: Opens) -> None:
    cache = opens()
    cache["a"] = filled(4)
    view = cache["a"]
    with cache:
        pass
    calls = (cache.get, cache.pop, lambda key: cache.put(key, 1), lambda key: cache.get_or_make(key, int))
    for call in (*calls, lambda _: len(cache), lambda _: list(cache.items()), lambda _: cache.popitem()):
        with raises(shmstore.StoreClosedError, hint=["make another Cache"]):
            call("a")
    assert 4 == view[0] == opens()["a"][0]


def test_an_unclosed_cache_lets_go_as_garbage(name: str, recwarn: pytest.WarningsRecorder) -> None:
    cache = Cache(name, "1 MiB")
    cache["a"] = 1
    del cache
    Cache.unlink(name)
    with pytest.raises(FileNotFoundError):
        Cache.unlink(name)
    assert [] == list(recwarn)


def test_a_process_that_only_reads_finds_what_is_made_after_the_cache_was_removed(opens: Opens, name: str) -> None:
    cache = opens()
    with alive(hold, cache), raises(shmstore.WriterActiveError, hint=["close the cache"]):
        Cache.unlink(name)
    in_child(cache.put, "a", "old")
    assert "old" == cache["a"]
    Cache.unlink(name)
    in_child(cache.put, "a", "new")
    assert "new" == cache["a"]
    Cache.unlink(name)
    assert (None, 0) == (cache.get("a"), len(cache))
    in_child(cache.put, "a", "newer")
    cache["b"] = 1
    assert "newer" == cache["a"]


def test_another_capacity_is_made_anew_or_refused_while_one_makes_values(opens: Opens) -> None:
    first, second = opens("2 MiB"), opens("4 MiB")
    first["a"] = 1
    with raises(shmstore.LayoutMismatchError, ["capacity"], ["processes"]):
        second["b"] = 2
    assert (3, 1) == (second.get_or_make("b", lambda: 3), second["a"])
    first.close()
    second["b"] = 2
    assert ["b"] == list(second)


def test_an_event_loop_goes_on_while_a_value_is_made_or_awaited(opens: Opens) -> None:
    cache, made = opens(), []

    def slow(key: str) -> Any:
        until(lambda: ticks > 3)  # which takes for ever if the loop does not go on
        made.append(key)
        return filled(6)

    async def slowly(key: str) -> Any:
        await asyncio.to_thread(slow, key)
        return filled(6)

    ticks = 0

    async def main() -> None:
        nonlocal ticks

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        makers = {"a": lambda: slow("a"), "b": lambda: slowly("b")}
        asked = [cache.aget_or_make(key, make) for key, make in makers.items() for _ in range(40)]
        values = await asyncio.gather(*asked)
        assert {(6, False)} == {(value[0], value.flags.writeable) for value in values}
        assert ["a", "b"] == sorted(made)
        cancelled = asyncio.create_task(cache.aget_or_make("c", lambda: asyncio.sleep(100)))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        assert 1 == await cache.aget_or_make("c", lambda: 1)  # the claim has ended
        with pytest.raises(RuntimeError, match="asks the cache for it"):
            await cache.aget_or_make("d", lambda: cache.aget_or_make("d", lambda: 1))
        ticking.cancel()

    asyncio.run(main())


def test_what_a_cancelled_task_makes_in_a_thread_is_stored_and_not_made_again(opens: Opens) -> None:
    cache, made, go = opens(), [], threading.Event()

    def slow() -> Any:
        made.append(1)
        go.wait(60)
        return filled(6)

    async def main() -> None:
        for _ in range(6):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(cache.aget_or_make("a", slow), 0.05)
        go.set()
        assert 6 == (await cache.aget_or_make("a", slow))[-1]

    asyncio.run(main())
    assert [1] == made


def test_a_task_that_is_cancelled_before_its_thread_begins_leaves_no_claim(opens: Opens, name: str) -> None:
    cache, go = opens(), threading.Event()
    cache["a"] = 1
    assert 1 == cache["a"]
    cache._threads = ThreadPoolExecutor(1)

    async def main() -> None:
        busy = asyncio.get_running_loop().run_in_executor(cache._threads, go.wait, 20)
        waiting = asyncio.create_task(cache.aget_or_make("b", lambda: 2))
        with shmstore.ObjectStoreReader.attach(name, None, finds_only=True) as reader:
            while not reader.claimed("b", namespace="make"):
                await asyncio.sleep(0.001)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not reader.claimed("b", namespace="make")
        go.set()
        await busy

    asyncio.run(main())
    assert "b" not in cache


def test_a_cancelled_task_whose_thread_returns_an_awaitable_leaves_no_claim(opens: Opens, name: str) -> None:
    cache, go = opens(), threading.Event()
    cache["a"] = 1

    class Later:
        def __await__(self) -> Any:
            raise AssertionError

    async def main() -> None:
        with pytest.raises(TimeoutError) as kept:
            await asyncio.wait_for(cache.aget_or_make("b", lambda: (go.wait(20), Later())[1]), 0.05)
        go.set()
        with shmstore.ObjectStoreReader.attach(name, None, finds_only=True) as reader:
            for _ in range(100):
                await asyncio.sleep(0.01 * reader.claimed("b", namespace="make"))
            assert not reader.claimed("b", namespace="make")
        assert kept.value  # and with it the frames of the task

    asyncio.run(main())


def test_a_coroutine_that_returns_an_awaitable_made_what_cannot_be_stored(opens: Opens) -> None:
    cache = opens()

    async def main() -> None:
        async def forgets() -> Any:
            return asyncio.ensure_future(asyncio.sleep(0, 5))

        assert 5 == await (await cache.aget_or_make("a", forgets))

    asyncio.run(main())
    assert (1, 1) == (cache.stats().made, cache.stats().not_stored["unsupported"])


def test_a_value_is_stored_while_all_threads_of_the_loop_wait_for_it(opens: Opens) -> None:
    cache, begun = opens(), threading.Event()

    def wait_for_it() -> Any:
        begun.set()
        return cache.get_or_make("a", lambda: 2, wait=60)

    async def make() -> int:
        making.set()
        while not begun.is_set():
            await asyncio.sleep(0.001)
        return 1

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        first = asyncio.create_task(cache.aget_or_make("a", make))
        await making.wait()
        assert (1, 1) == tuple(await asyncio.gather(asyncio.to_thread(wait_for_it), first))

    making = asyncio.Event()
    asyncio.run(asyncio.wait_for(main(), 30))


def test_functions_that_ask_for_other_values_in_loops_of_their_own_may_take_all_threads(opens: Opens) -> None:
    cache, threads = opens(), min(32, (os.cpu_count() or 1) + 4)
    all_run = threading.Barrier(threads)
    cache["a"] = 1
    assert 1 == cache["a"]

    def make(number: int) -> Any:
        all_run.wait(20)
        return asyncio.run(asyncio.wait_for(cache.aget_or_make(f"part-{number}", lambda: number), 10))

    async def main() -> Any:
        made = (cache.aget_or_make(f"{number}", partial(make, number)) for number in range(threads))
        return await asyncio.gather(*made)

    assert list(range(threads)) == asyncio.run(main())


def test_what_a_coroutine_has_made_is_stored_however_early_its_task_is_cancelled(opens: Opens) -> None:
    cache, go, made = opens(), threading.Event(), asyncio.Event()
    cache["b"] = 1
    assert 1 == cache["b"]
    cache._threads = ThreadPoolExecutor(1)

    async def make() -> int:
        made.set()
        return 1

    async def main() -> None:
        busy = asyncio.get_running_loop().run_in_executor(cache._threads, go.wait, 20)
        task = asyncio.create_task(cache.aget_or_make("a", make))
        await made.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await busy
        while "a" not in cache:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_what_a_function_raises_in_a_thread_reaches_the_task(opens: Opens) -> None:
    cache = opens()
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(cache.aget_or_make("a", lambda: next(iter([]))), 20))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(cache.aget_or_make("a", lambda: 1 // 0))
    assert 1 == cache.get_or_make("a", lambda: 1)


def test_memoize_keeps_the_results_of_a_function_by_its_arguments(opens: Opens) -> None:
    cache = opens()
    calls: list[Any] = []

    @cache.memoize  # type: ignore[untyped-decorator]
    def add(x: int, y: int = 0) -> int:
        return x + y

    @cache.memoize(  # type: ignore[untyped-decorator]
        key=lambda x: f"twice-{len(x)}", expire=1000
    )
    async def twice(x: Any) -> Any:
        calls.append("twice")
        return x * 2

    assert [3, 3, 5] == [add(1, 2), add(1, 2), add(5)]
    assert 2 == cache.stats().made
    assert 4 == asyncio.run(twice(filled(2)))[0] == asyncio.run(twice(filled(2)))[0] == cache[f"twice-{SIZE}"][0]
    assert ["twice"] == calls
    assert "add" == add.__name__
    with raises(TypeError, ["ndarray"], ["key="]):
        add(filled(1))
    for no_name in (lambda x: x, lambda: calls, partial(filled, 1), 3):
        with raises(TypeError, ["memoize"]):
            cache.memoize(no_name)
    with raises(TypeError, ["variables"], ["key="]):
        cache.memoize(twice.__wrapped__)  # of this test
    cached = type("", (), {"method": wraps(use_all)(lambda self: self)})()
    for method in (cache.stats, cached.method, filled(1).sum, "a".count, dict.fromkeys):
        with raises(TypeError, ["is a method"], ["key="]):
            cache.memoize(method)
    assert 3 == cache.memoize(len)("abc")  # of a module
    with raises(TypeError, ["ttl"], ["memoize"]):
        cache.memoize(ttl=3)


def test_inner_functions_of_other_defaults_have_other_results(opens: Opens) -> None:
    cache = opens()

    def scaled_by(n: int) -> Callable[[int], int]:
        def scaled(x: int, n: int = n) -> int:
            return x * n

        return cache.memoize(scaled)  # type: ignore[no-any-return]

    assert [20, 30, 20] == [scaled_by(n)(10) for n in (2, 3, 2)]
    assert 2 == cache.stats().made


def test_no_value_is_in_a_cache_by_what_is_no_key(opens: Opens) -> None:
    cache = opens()
    cache["a"] = 1
    assert [] == [key for key in ("", "\ud800", None, 3) if key in cache]
    for key in ("", "\ud800"):
        with raises(ValueError, ["key"]):
            cache.get(key)


def test_what_is_no_cache_of_this_user_is_refused_with_what_to_do(opens: Opens, name: str) -> None:
    cache, path = opens(), SHM / name
    path.write_bytes(b"a text\n" * 4096)
    for call in (partial(cache.get, "a"), partial(cache.put, "a", 1)):
        with raises(shmstore.LayoutMismatchError, [name], ["another name"]):
            call()
    path.unlink()
    cache["a"] = 1
    cache.close()
    if os.geteuid() == 0:  # else there is no second user
        os.chown(path, 65534, 65534)
        calls: list[Callable[[], Any]] = [
            partial(opens().get, "a"),
            partial(opens().put, "a", 1),
            partial(list, opens()),
        ]
        for foreign in calls:
            with raises(shmstore.ForeignStoreError, [name], ["another name"]):
                foreign()
        os.chown(path, 0, 0)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"capacity": 1 << 20, "maxsize": 3}, TypeError, r"no option 'maxsize' \(hint: pass capacity"),
        ({"capacity": 1 << 20, "ttl": 3}, TypeError, r"no option 'ttl' \(hint: pass expire"),
        ({"capacity": 1 << 20, "colour": 3}, TypeError, "no option 'colour'$"),
        ({"capacity": "4 gallons"}, ValueError, "1 GiB"),
        ({"capacity": "1.2.3 GiB"}, ValueError, "1 GiB"),
        ({"capacity": 0}, ValueError, "capacity"),
        ({"capacity": 1 << 20, "processes": 33}, ValueError, "from 1 to 32"),
        ({"capacity": 1 << 20, "prefault": "yes"}, TypeError, "prefault"),
        ({"capacity": 1 << 20, "name": "a/b"}, ValueError, "name"),
    ],
)
def test_what_a_cache_does_not_take_is_refused_with_a_hint(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Cache(**{"name": "unused"} | options)


@pytest.mark.parametrize(("text", "nbytes"), [("4 GiB", 4 << 30), ("1.5mib", 3 << 19), ("2GB", 2 * 10**9), ("9", 9)])
def test_a_capacity_is_bytes_or_a_text(text: str, nbytes: int) -> None:
    assert repr(Cache("unused", nbytes)) == repr(Cache("unused", text))


def test_the_pages_of_an_arena_are_touched_before_they_are_filled(opens: Opens, name: str) -> None:
    cache = opens("64 MiB", processes=1)
    cache["a"] = 1

    def resident() -> int:
        maps = Path("/proc/self/smaps").read_text()
        found = re.findall(rf"/{name}\n(?:[^-]*?\n)*?Rss: +(\d+) kB", maps)
        return sum(map(int, found)) << 10

    until(lambda: resident() >= 16 << 20)


def test_a_value_is_there_while_another_thread_replaces_it(opens: Opens) -> None:
    writes, reads = opens(), opens()
    writes["a"] = filled(0, 1 << 20)
    over = threading.Event()

    def replace() -> None:
        for number in range(300):
            writes["a"] = filled(number, 1 << 20)
        over.set()

    thread = threading.Thread(target=replace)
    thread.start()
    absent = 0
    while not over.is_set():
        absent += "a" not in reads
    thread.join()
    assert 0 == absent


def test_an_arena_without_a_large_enough_gap_leaves_the_next_one_to_a_value(opens: Opens) -> None:
    cache, unit = opens("8 MiB", processes=2), 1 << 10
    for number in range(150):
        cache[f"{number}"] = filled(1, 100 * unit)
    first = cache._arenas.writers[0]
    views = [cache[key] for key in first.keys()[::2]]
    count = 0
    while first.stats().capacity - first.stats().used_bytes < 200 * unit:
        cache[f"small{count}"] = filled(1, 60 * unit)  # leaves a gap of forty
        count += 1
    for number in range(30):
        cache[f"large{number}"] = filled(1, 150 * unit)
    assert views


def test_a_cache_that_was_being_made_by_a_killed_process_is_empty_and_is_made_again(opens: Opens) -> None:
    cache = opens()
    Path(cache._arenas.path).write_bytes(b"SHMSTOR1" + bytes(1 << 16))
    assert (None, False, 0) == (cache.get("a"), "a" in cache, len(cache))
    assert 1 == cache.get_or_make("a", lambda: 1)
    assert 1 == cache["a"]


def test_popitem_passes_by_what_has_expired(opens: Opens) -> None:
    cache = opens()
    cache.put("a", 1, expire=0)
    cache["b"] = 2
    assert ("b", 2) == cache.popitem()
    with pytest.raises(KeyError):
        cache.popitem()


def test_a_coroutine_function_stays_one_when_memoized(opens: Opens) -> None:
    @opens().memoize  # type: ignore[untyped-decorator]
    async def made() -> int:
        return 1

    assert inspect.iscoroutinefunction(made)


@pytest.mark.parametrize("main", ["__main__", "__mp_main__"])
def test_functions_of_programs_are_told_apart_by_their_file(opens: Opens, main: str) -> None:
    cache, found = opens(), []
    for program, result in (("/a/main.py", 1), ("/b/main.py", 2)):
        names: dict[str, Any] = {"__name__": main}
        exec(compile(f"def call(): return {result}", program, "exec"), names)
        found.append(cache.memoize(names["call"])())
    assert [1, 2] == found


def test_a_forked_child_keeps_no_mapping_of_an_arena_that_is_being_touched(opens: Opens, name: str) -> None:
    opens("1 GiB", processes=1)["a"] = 1
    assert [] == in_child(lambda: [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line])
