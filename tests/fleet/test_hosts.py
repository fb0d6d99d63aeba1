"""Two hosts with a tier between them: real processes, in network namespaces where that is allowed; some are killed."""

import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from shmstore import ObjectRef, ObjectStoreWriter
from shmstore.store.stats import TierStats
from tests.fleet.network import Network, two_hosts
from tests.fleet.servers import MooncakeServers, end, free_port, missing_for_mooncake, redis_server
from tests.multimodal import worker
from tests.multimodal.test_several_servers import Server, settings_of
from tests.support import FRESH, children

IMAGES = [f"{seed}:{size}" for seed, size in enumerate([0, 100, 5_000, 20_000, 60_000, 100_000, 200_000, 600_000])]
missing = missing_for_mooncake()


def start_redis(address: str) -> tuple[str, Callable[[], None]]:
    port = free_port(address)
    server = redis_server(address, port)
    return f"redis://{address}:{port}?timeout=10", lambda: end(server)


def start_mooncake(address: str) -> tuple[str, Callable[[], None]]:
    servers = MooncakeServers(address, 1 << 30)
    return f"mooncake://{servers.address}?timeout=10", servers.close


TIERS = [
    pytest.param(
        start_redis,
        id="redis",
        marks=pytest.mark.skipif(
            shutil.which("redis-server") is None or find_spec("redis") is None,
            reason="redis-server or redis-py is not installed",
        ),
    ),
    pytest.param(start_mooncake, id="mooncake", marks=pytest.mark.skipif(missing is not None, reason=missing or "")),
]


class Worker:
    """The only worker of an engine."""

    def __init__(self, settings: Any, rank: int, handle: Any, stack: ExitStack) -> None:
        self._pipe, theirs = FRESH.Pipe()
        self._process = FRESH.Process(target=worker.main, args=(theirs, settings, rank, handle))
        self._process.start()
        stack.callback(self.end)
        theirs.close()
        assert "attached" == self._pipe.recv()

    def read(self, images: list[str], sent: list[Any]) -> None:
        """Have it read these images, of which it must get every byte."""
        self._pipe.send((0, images, sent))
        assert (0, True) == self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Host:
    """An API server and a worker, which have a store of their own and a tier."""

    def __init__(self, number: int, network: Network, url: str, stack: ExitStack) -> None:
        settings = settings_of(1, tier_url=url, tier_namespace="model/1")
        stack.callback(ObjectStoreWriter.unlink, settings.shm_name)  # it stays for the next start
        with network.entered(number):  # which a process of the fork server would not be in
            self.server = Server(settings, stack, multiprocessing.get_context("spawn")).attached()
        self.worker = Worker(settings, 0, self.server.handle, stack)
        self.processed = 0

    def request(self, image: str) -> None:
        """Do what an engine does with an image."""
        (cached,), ((sent, _),) = self.server("request", [image], 0)
        assert isinstance(sent, ObjectRef)
        self.processed += not cached
        self.worker.read([image], [sent])

    def tier(self) -> TierStats:
        figures: TierStats = self.server("stats").tier
        return figures

    def published(self) -> None:
        """Wait until the tier has all images."""
        limit = time.monotonic() + 60
        while self.tier().published < len(IMAGES):
            assert time.monotonic() < limit, self.tier()
            time.sleep(0.01)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    before = children()
    with ExitStack() as made:
        yield made
    assert before == children()


@pytest.mark.parametrize("start", TIERS)
def test_the_second_host_processes_only_what_a_killed_tier_no_longer_gives(
    start: Callable[[str], tuple[str, Callable[[], None]]], stack: ExitStack
) -> None:
    network = stack.enter_context(two_hosts())
    with network.entered(0):
        url, kill = start(network.address(0))
    stack.callback(kill)
    first, second = (Host(number, network, url, stack) for number in range(2))
    for image in IMAGES:
        first.request(image)
    assert len(IMAGES) == first.processed
    first.published()
    half = len(IMAGES) // 2
    for image in IMAGES[:half]:
        second.request(image)
    assert (0, half, 0) == (second.processed, second.tier().hits, second.tier().errors)
    kill()
    for image in IMAGES:
        second.request(image)
    assert (half, half) == (second.processed, second.tier().hits), "each request is served, and the rest is processed"
    assert second.tier().errors > 0


def test_the_others_go_on_when_a_worker_is_killed_and_its_successor_gets_every_image(stack: ExitStack) -> None:
    settings = settings_of(1, data_parallel_size=2)
    stack.callback(ObjectStoreWriter.unlink, settings.shm_name)
    server = Server(settings, stack).attached()
    workers = [Worker(settings, rank, server.handle, stack) for rank in range(2)]

    def request(engine: int, *, hit: bool) -> None:
        cached, outputs = server("request", IMAGES, engine)
        assert [hit] * len(IMAGES) == cached
        workers[engine].read(IMAGES, [sent for sent, _ in outputs])

    request(0, hit=False)
    server("request", IMAGES, 1)  # its leases are of the worker that is killed
    workers[1].end()
    request(0, hit=True)
    workers[1] = Worker(settings, 1, server.handle, stack)
    for engine in range(2):
        request(engine, hit=True)
    server("clear_cache")
    assert 0 == server("stats").objects, "nothing waits for the dead"
