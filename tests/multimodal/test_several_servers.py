"""Several API servers and engine cores with one store: processes of their own, one of them killed."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from shmstore import LayoutMismatchError, ObjectRef, ObjectStoreWriter, WriterActiveError
from shmstore.multimodal import ShmObjectStoreSenderCache, processor_cache_from_config
from shmstore.multimodal.values.types import MULTIMODAL
from tests.multimodal import server, worker
from tests.multimodal.helpers import GIB, MIB, config, item, shm_sender, shm_worker, update
from tests.support import FRESH, raises, segments, store_name


@pytest.fixture(autouse=True)
def _named_stores_go() -> Iterator[None]:
    yield
    for left in segments():
        ObjectStoreWriter.unlink(left)


ENGINES, WORKERS = 2, 2


def settings_of(servers: int, **more: Any) -> Any:
    """Return a configuration of so many API servers, with a store of its own."""
    return config(
        4 * MIB, 4 * MIB, cache_type="shm", shm_name=store_name(), api_process_count=servers, **{"world_size": 1} | more
    )


class Server:
    """An API server in a process of its own."""

    def __init__(self, settings: Any, stack: ExitStack) -> None:
        self.pipe, theirs = FRESH.Pipe()
        self.process = FRESH.Process(target=server.main, args=(theirs, settings))
        self.process.start()
        theirs.close()
        stack.callback(self.end)

    def attached(self) -> "Server":
        self.index, self.recovered, self.handle = self.pipe.recv()
        return self

    def __call__(self, *message: Any) -> Any:
        self.pipe.send(message)
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


@contextmanager
def workers_of(settings: Any, handle: Any) -> Iterator[list[Any]]:
    """Yield the pipes of all workers of all engine cores, by rank."""
    pipes, processes = [], []
    try:
        for rank in range(settings.n_readers):
            mine, theirs = FRESH.Pipe()
            processes.append(FRESH.Process(target=worker.main, args=(theirs, settings, rank, handle)))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        assert ["attached"] * len(pipes) == [pipe.recv() for pipe in pipes]
        yield pipes
        for pipe in pipes:
            pipe.send(None)
            assert pipe.recv() == "done"
    finally:
        for pipe, process in zip(pipes, processes, strict=False):
            pipe.close()
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()


def test_three_servers_store_each_image_once_also_after_a_kill() -> None:
    rng = random.Random(5)
    settings = settings_of(3, world_size=WORKERS, data_parallel_size=ENGINES)
    images = [f"{n}:{rng.choice([100, 5_000, 60_000])}" for n in range(12)]
    with ExitStack() as stack:
        servers = [Server(settings, stack) for _ in range(3)]
        for one in servers:
            one.attached()
        assert [0, 1, 2] == sorted(one.index for one in servers)
        assert 1 == len({one.handle for one in servers})
        pipes = stack.enter_context(workers_of(settings, servers[0].handle))

        def request(to: Server, mm_hashes: list[str]) -> list[bool]:
            """Send it through this server to some engine core; every byte must be right in each of its workers."""
            engine = rng.randrange(ENGINES)
            cached, outputs = to("request", mm_hashes, engine)
            assert [[update(mm_hash)] for mm_hash in mm_hashes] == [updates for _, updates in outputs]
            sent = [piece for piece, _ in outputs]
            assert all(isinstance(piece, ObjectRef) for piece in sent)
            ranks = range(engine * WORKERS, (engine + 1) * WORKERS)
            for rank in ranks:
                pipes[rank].send((0, mm_hashes, sent))
            assert [(0, True)] * WORKERS == [pipes[rank].recv() for rank in ranks]
            return list(cached)

        def stored() -> int:
            return sum(one("stats").puts for one in servers)

        for n, image in enumerate(images):
            assert [False] == request(servers[n % 3], [image])
        for _ in range(3):  # a hit, whichever server is asked
            rng.shuffle(images)
            for first in range(0, len(images), 3):
                assert [True] * 3 == request(rng.choice(servers), images[first : first + 3])
        assert len(images) == stored(), "one copy of each on the host"

        victim = servers[1]
        theirs = victim("stats").puts
        victim("request", images[:3], 0)  # its leases end with it
        victim.kill()
        for image in images:  # its arena stays readable
            assert [True] == request(servers[0], [image])
        servers[1] = Server(settings, stack).attached()
        assert (victim.index, theirs) == (servers[1].index, servers[1].recovered)
        for image in images:
            assert [True] == request(servers[1], [image])
        assert len(images) == stored()
        for one in servers:  # nothing waits for the workers of the other core, or for the dead
            one("clear_cache")
        assert [0] * 3 == [one("stats").objects for one in servers]
    ObjectStoreWriter.unlink(settings.shm_name)  # it stays for the next start, and no process has it


@contextmanager
def two(**more: Any) -> Iterator[tuple[ShmObjectStoreSenderCache, ShmObjectStoreSenderCache]]:
    """Yield the senders of two servers, both in this process."""
    settings = settings_of(2, **more)
    with shm_sender(settings) as one, shm_sender(settings) as other:
        yield one, other


def test_the_first_server_creates_the_store_and_the_others_join() -> None:
    settings = settings_of(2, data_parallel_size=2, world_size=3)
    with shm_sender(settings) as one, shm_sender(settings) as other:
        assert (0, 1, one.handle) == (one.writer.index, other.writer.index, other.handle)
        assert ((3, 3), 2, 4 * MIB) == (one.writer.groups, one.writer.n_writers, other.writer.stats().capacity)
        with raises(WriterActiveError, names=[settings.shm_name, "n_writers=2"], hint=["api_process_count"]):
            processor_cache_from_config(settings)
        with raises(ValueError, names=("rank", "from 0 to 5", "6")):
            shm_worker(settings, 6, one.handle)
        with shm_worker(settings, 5, one.handle) as last:
            assert 5 == last.reader.rank
        one.close()
        again = shm_sender(settings)  # `other` still has the store, with its name
        assert (0, one.handle) == (again.writer.index, again.handle)
        again.close()


def test_a_server_of_another_configuration_hears_what_differs() -> None:
    settings = settings_of(3)
    other = replace(settings, ipc_cache_gb=8 * MIB / GIB, api_process_count=4, data_parallel_size=2)
    with shm_sender(settings) as one:
        differ = ["n_writers is 3, not 4", f"capacity is {4 * MIB}, not {8 * MIB}", "n_readers is 1, not 2"]
        with raises(
            LayoutMismatchError,
            names=[settings.shm_name, *differ],
            hint=["world_size", "ipc_cache_gb", "api_process_count"],
        ):
            processor_cache_from_config(other)
        assert one.get_and_update_item((item(10), []), "a")
    with shm_sender(other) as later:
        assert 4 == later.writer.n_writers


def test_a_hit_on_another_server_s_item_brings_the_prompt_updates() -> None:
    with two() as (one, other):
        ref, _ = one.get_and_update_item((item(1000), [update("a")]), "a")
        assert [True] == other.is_cached(["a"])
        [(again, updates)] = other.get_and_update([None], ["a"])
        assert isinstance(ref, ObjectRef)
        assert isinstance(again, ObjectRef)
        assert ([update("a")], ref.monotonic_id) == (updates, again.monotonic_id)
        assert ref.lease != again.lease or ref.tag != again.tag
        assert (1, 0, 1) == (other.make_stats().hits, other.writer.stats().puts, other.writer.stats().remote_hits)


def test_what_two_servers_miss_at_once_is_stored_twice_and_either_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with two() as (one, other):
        given = (item(1000), [update("a")])
        first, _ = one.get_and_update_item(given, "a")
        with monkeypatch.context() as before:  # it asked before `one` had stored it
            before.setattr(other, "_hit", lambda batch, mm_hash: None)
            second, _ = other.get_and_update_item(given, "a")
        assert [1, 1] == [cache.writer.stats().puts for cache in (one, other)]
        with shm_worker(settings_of(2), 0, one.handle) as worker_of:
            assert [item(1000)] * 2 == worker_of.get_and_update([first, second], ["a", "a"])
        one.writer.delete("a")
        assert [False, False] == [cache.is_cached_item("a") for cache in (one, other)], "both copies"


@pytest.mark.parametrize("codec", [False, True], ids=["without a codec", "that the codec refuses"])
def test_an_item_whose_updates_are_not_stored_is_a_miss_elsewhere(codec: bool) -> None:
    without: dict[str, Any] = {"encode_updates": None, "decode_updates": None}
    types = replace(MULTIMODAL, **({"encode_updates": lambda updates: None} if codec else without))
    settings = settings_of(2)
    with ExitStack() as stack:
        one, other = (stack.enter_context(shm_sender(settings, types)) for _ in range(2))
        given = (item(1000), [update("a")])
        one.get_and_update_item(given, "a")
        assert [[True], [False]] == [cache.is_cached(["a"]) for cache in (one, other)]
        ref, updates = other.get_and_update_item(given, "a")
        assert ([update("a")], [True]) == (updates, other.is_cached(["a"]))
        assert [(0, 1), (0, 1)] == [(cache.make_stats().hits, cache.writer.stats().puts) for cache in (one, other)]
        assert other.writer.stats().open_leases == 1, "none on what `one` has stored"
        assert isinstance(ref, ObjectRef)
        assert [given[1]] * 2 == [cache.get_and_update_item(None, "a")[1] for cache in (one, other)]
        assert [1, 1] == [cache.make_stats().hits for cache in (one, other)]


def test_what_one_server_removes_is_gone_for_it_at_once_and_soon_for_its_owner() -> None:
    with two() as (one, other):
        for mm_hash in "abc":
            one.release([one.get_and_update_item((item(100), [update(mm_hash)]), mm_hash)[0]])
        assert [True] * 3 == other.is_cached(["a", "b", "c"])
        other.invalidate("a")
        assert [False, True, True] == other.is_cached(["a", "b", "c"])
        assert [False, True, True] == one.is_cached(["a", "b", "c"]), "its owner has heard of it"
        ref, updates = other.get_and_update_item((item(100), [update("again")]), "a")
        assert ([update("again")], 1) == (updates, other.writer.stats().puts)
        assert [update("again")] == one.get_and_update_item(None, "a")[1]
        other.release([ref])
        other.clear_cache()
        assert [[False] * 3] * 2 == [cache.is_cached(["a", "b", "c"]) for cache in (other, one)]


def test_a_lease_with_a_group_waits_for_its_engine_core_and_another_one_for_all() -> None:
    with two(data_parallel_size=2) as (one, other), ExitStack() as stack:
        settings = settings_of(2, data_parallel_size=2)
        workers = [stack.enter_context(shm_worker(settings, rank, one.handle)) for rank in range(2)]
        outputs = [one.get_and_update_item((item(100), []), "a"), other.get_and_update_item(None, "a")]
        to_first, to_second = ([sent] for sent, _ in outputs)
        assert (1, 1) == (one.assign_group([*to_first, item(3), None], 0), other.assign_group(to_second, 1))
        assert 1 == one.assign_group(to_first, 0)
        for wrong in (-1, 2):
            with raises(ValueError, names=("engine", "data_parallel_size", "from 0 to 1", str(wrong))):
                other.assign_group(to_second, wrong)
        with raises(ValueError, names=("another group than 0",)):
            other.assign_group(to_second, 0)
        with pytest.raises(TypeError):
            other.assign_group([outputs[1]], 1)  # type: ignore[list-item]
        one.clear_cache()
        stats = [one.writer.stats]
        assert workers[0].get_and_update(to_first, ["a"]) == [item(100)]
        one.clear_cache()
        assert 1 == stats[0]().objects, "`other` has a lease on it for the second core"
        assert workers[1].get_and_update(to_second, ["a"]) == [item(100)]
        one.clear_cache()
        assert 0 == stats[0]().objects
