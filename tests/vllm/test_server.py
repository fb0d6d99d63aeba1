"""What happens to a server: clients that err or hang up, processes that die, and a cache that is too small."""

from __future__ import annotations

import http.client
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmstore.inspect.segments import find_segments
from tests.support import until
from tests.vllm.inputs import photograph
from tests.vllm.server import Server, server

ROUNDS = 3
LONG = "w" * 8140
"""A text that fits, but not together with a picture, which is stored when that is found."""


@pytest.fixture(scope="module")
def expected(lru: dict[str, list[list[int]]]) -> list[list[int]]:
    """The tokens of the photographs 0 to 11."""
    return lru["photographs"]


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without Python's collector: a stream that is cancelled leaves its items in a cycle."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "sitecustomize.py").write_text("import gc\ngc.disable()\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        settings = ("--max-num-seqs", "2", "--mm-processor-cache-gb", "0.02")  # some 40 photographs
        with server(model, folder / "log", *settings) as one:
            yield one


def hits_of_four(server: Server, expected: list[list[int]]) -> list[int]:
    """Ask about four photographs in three rounds, and return how many were hits in each."""
    found = []
    for _ in range(ROUNDS):
        before = server.metric("shmstore_hits_total")
        for number in range(4):
            assert (200, [expected[number]]) == server.ask(photograph(number))
        found.append(int(server.metric("shmstore_hits_total") - before))
    until(lambda: 0 == server.store().facts.open_leases)
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
    until(lambda: 6 == running.store().facts.open_leases)
    for connection in waiting:
        connection.close()
    running.worker().resume()
    until(lambda: 0 == running.metric("vllm:num_requests_waiting") + running.metric("vllm:num_requests_running"))
    assert [4, 4] == hits_of_four(running, expected)[1:]


def test_clients_that_hang_up_in_a_stream_leave_no_lease(running: Server, expected: list[list[int]]) -> None:
    for number in range(12):
        connection = running.send(photograph(500 + number), max_tokens=4000, stream=True)
        assert connection.getresponse().read(200)
        connection.close()
    until(lambda: 0 == running.metric("vllm:num_requests_running"))
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


def test_a_hundred_requests_at_random_leave_no_lease(running: Server, expected: list[list[int]]) -> None:
    """One or several pictures, three answers, rejections, and clients that hang up; the cache is too small for all."""
    luck = random.Random(13)
    opened: list[http.client.HTTPConnection] = []
    for _ in range(100):
        several = range(luck.choice((1, 1, 1, 2, 3)))
        numbers = [luck.randrange(12) if luck.random() < 0.5 else luck.randrange(400, 520) for _ in several]
        pictures = [photograph(number) for number in numbers]
        what = luck.random()
        if what < 0.1:
            assert 400 == running.ask(*pictures, text=LONG)[0]
        elif what < 0.3:
            opened.append(running.send(*pictures, max_tokens=200))
        elif what < 0.4:
            assert 200 == running.ask(*pictures, n=3, temperature=1, top_k=1)[0]
        else:
            status, tokens = running.ask(*pictures)
            assert 200 == status
            assert len(numbers) > 1 or numbers[0] >= 12 or [expected[numbers[0]]] == tokens
        if len(opened) > 3:
            opened.pop(luck.randrange(4)).close()
    for connection in opened:
        connection.close()
    assert 0 < running.store().facts.evictions
    assert [4, 4] == hits_of_four(running, expected)[1:]


def test_a_worker_that_is_killed_takes_the_server_with_it_and_nothing_stays(running: Server) -> None:
    # The last test of this file: it ends the server that all of them share.
    name = running.store().name
    running.worker().send_signal(signal.SIGKILL)
    running.process.wait(60)
    running.stop()
    assert name not in {info.name for info in find_segments()}
