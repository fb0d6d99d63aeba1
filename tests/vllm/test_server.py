"""What happens to a server: clients that err or hang up, processes that die, and a cache that is too small."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shmstore import ObjectStoreWriter, StoreNotFoundError
from shmstore.inspect.segments import find_segments
from tests.vllm.inputs import photograph
from tests.vllm.server import Server, server
from tests.vllm.traffic import LONG, Traffic

ROUNDS = 3
SMALL = ("--mm-processor-cache-gb", "0.02")  # some 40 photographs


@pytest.fixture(scope="module")
def expected(lru: Callable[[], dict[str, list[list[int]]]]) -> list[list[int]]:
    """The tokens of the photographs 0 to 11."""
    return lru()["photographs"]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without Python's collector: a stream that is cancelled leaves its items in a cycle."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "sitecustomize.py").write_text("import gc\ngc.disable()\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        with server(model, folder / "log", "--max-num-seqs", "2", *SMALL) as one:
            yield one


def until(holds: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


def hits_of_four(server: Server, expected: list[list[int]]) -> list[int]:
    """Ask about four photographs in three rounds, and return how many were hits in each."""
    found = []
    for _ in range(ROUNDS):
        before = server.metric("shmstore_hits_total")
        for number in range(4):
            assert (200, [expected[number]]) == server.ask(photograph(number))
        found.append(int(server.metric("shmstore_hits_total") - before))
    assert until(lambda: 0 == server.store().facts.open_leases)
    return found


def test_tokens_over_http_are_those_of_lru_offline(running: Server, expected: list[list[int]]) -> None:
    assert [[tokens] for tokens in expected] == [running.ask(photograph(number))[1] for number in range(12)]


def test_requests_that_are_rejected_after_their_item_was_stored_leave_no_lease(
    running: Server, expected: list[list[int]]
) -> None:
    puts = running.store().facts.puts
    for number in range(12):
        assert 400 == running.ask(photograph(100 + number), text=LONG)[0]
    assert puts + 12 == running.store().facts.puts
    assert [4, 4] == hits_of_four(running, expected)[1:]


def test_clients_that_hang_up_while_they_wait_leave_no_lease(running: Server, expected: list[list[int]]) -> None:
    running.worker().suspend()
    waiting = [running.send(photograph(300 + number)) for number in range(6)]
    assert until(lambda: 6 == running.store().facts.open_leases)
    for connection in waiting:
        connection.close()
    running.worker().resume()
    assert until(lambda: 0 == running.metric("vllm:num_requests_waiting") + running.metric("vllm:num_requests_running"))
    assert [4, 4] == hits_of_four(running, expected)[1:]


def test_clients_that_hang_up_in_a_stream_leave_no_lease(running: Server, expected: list[list[int]]) -> None:
    for number in range(12):
        connection = running.send(photograph(500 + number), max_tokens=4000, stream=True)
        assert connection.getresponse().read(200)
        connection.close()
    assert until(lambda: 0 == running.metric("vllm:num_requests_running"))
    assert 200 == running.ask()[0]  # its token says that the worker is past them
    assert [4, 4] == hits_of_four(running, expected)[1:]


def test_the_store_shows_beside_vllms_own_metrics_and_in_the_command_line(running: Server) -> None:
    assert 0 < running.metric("vllm:mm_cache_queries_total")
    assert running.store().facts.puts == running.metric("shmstore_puts_total")
    shmstore = Path(sys.executable).parent / "shmstore"
    shown = subprocess.run(
        [shmstore, "top", running.store().name, "--iterations", "1"], capture_output=True, text=True, check=True
    )
    assert running.store().name in shown.stdout


def test_two_hundred_requests_at_random_leave_no_lease(running: Server, expected: list[list[int]]) -> None:
    """One or several pictures, three answers, rejections, and clients that hang up; the cache is too small for all."""
    traffic = Traffic(running, 13)
    for _ in range(200):
        if found := traffic.send():
            assert [expected[found[0]]] == found[1]
    traffic.hang_up()
    assert 0 < running.store().facts.evictions
    assert [4, 4] == hits_of_four(running, expected)[1:]


def test_a_worker_that_is_killed_takes_the_server_with_it_and_nothing_stays(
    model: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    one = Server(model, tmp_path / "log", "--tensor-parallel-size", "2", *SMALL)
    try:
        one.wait()
        assert [[tokens] for tokens in expected] == [one.ask(photograph(number))[1] for number in range(12)]
        assert 2 == one.store().facts.n_readers
        name = one.store().name
        one.worker().send_signal(signal.SIGKILL)
        one.process.wait(60)
    finally:
        one.stop()
    assert name not in {info.name for info in find_segments()}


def change_processor(model: Path) -> None:
    """Make the images that are processed from now on smaller."""
    path = model / "preprocessor_config.json"
    small = {"max_pixels": 112**2, "size": {"shortest_edge": 56**2, "longest_edge": 112**2}}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a store that outlives its servers."""
    name = f"vllm-server-{os.getpid()}"
    monkeypatch.setenv("SHMSTORE_VLLM_STORE", name)
    yield name
    with suppress(StoreNotFoundError):
        ObjectStoreWriter.unlink(name)


def test_a_server_that_is_killed_leaves_its_items_to_the_next_one_of_its_name(
    model: Path, tmp_path: Path, expected: list[list[int]], named: str
) -> None:
    own = shutil.copytree(model, tmp_path / "model")
    one = Server(own, tmp_path / "log", *SMALL)
    try:
        one.wait()
        for number in range(11):
            assert (200, [expected[number]]) == one.ask(photograph(number))
        puts = one.store().facts.puts
        assert until(lambda: 0 == one.store().facts.open_leases)
        one.worker().suspend()  # a busy engine may leave this process no processor until the request is over
        lost = one.send(photograph(0))
        assert until(lambda: 1 == one.store().facts.open_leases)
        change_processor(own)
    finally:
        one.stop(signal.SIGKILL)
    lost.close()
    with server(own, tmp_path / "log", *SMALL) as two:
        assert (named, 0) == (two.store().name, two.store().facts.open_leases)
        for number in range(11):
            assert (200, [expected[number]]) == two.ask(photograph(number))
        assert puts == two.store().facts.puts
        assert (11, 11) == (two.metric("vllm:mm_cache_queries_total"), two.metric("vllm:mm_cache_hits_total"))
        assert [expected[11]] != two.ask(photograph(11))[1]
        assert puts + 1 == two.store().facts.puts
        assert until(lambda: 0 == two.store().facts.open_leases)
    with ObjectStoreWriter.recover(named) as left:  # it stays at a clean stop, too
        assert 12 == left.recovered
