"""`RespTier`: the contract on a real Redis, and what a server over a network adds to it."""

import mmap
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shmstore.errors import TierError, TierFullError
from tests.support import raises, store_name
from tests.tiers.contract import MIB, Contract, checked, fetch, random_bytes, values_of, verifies, views
from tests.tiers.redis_server import RedisServer
from tests.tiers.servers import free_port

pytest.importorskip("redis", reason="redis-py is not installed: pip install '.[redis]'")

from shmstore.tiers.resp import _AHEAD, RespTier

SOON = 5.0
"""Seconds that a call with a short time-out may take on a busy machine; what these tests catch takes longer."""


@contextmanager
def serving(*options: str, unix: bool = False) -> Iterator[RedisServer]:
    server = RedisServer(*options, unix=unix)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def opened(url: str, **options: Any) -> Iterator[RespTier]:
    tier = RespTier(url, **({"timeout": 30} | options))
    try:
        yield tier
    finally:
        tier.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), 10**400])
def test_a_timeout_that_cannot_be_is_refused_at_once(timeout: float) -> None:
    with raises(ValueError, ["timeout"]):
        RespTier("redis://localhost", timeout=timeout)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """A server on TCP that its tests do not end."""
    shared_server.ask("FLUSHALL")
    return shared_server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server for one test, which may do with it what it likes."""
    with serving() as server:
        yield server


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RespTier]:
    with opened(server.url) as tier:
        yield tier


@pytest.fixture
def key() -> str:
    return store_name()


class TestContract(Contract):
    pass


def test_a_unix_socket_a_user_a_password_and_a_database_are_taken_from_the_url(key: str) -> None:
    with serving("--user", "someone", "on", ">secret", "~*", "+@all", unix=True) as server:
        with opened(server.url.replace("unix://", "unix://someone:secret@") + "?db=3") as tier:
            values = values_of([300, 3 * MIB])
            tier.publish(key, views(values))
            assert values == fetch(tier, key)
        assert b":0" in server.ask("DBSIZE"), "nothing is in database 0"


# ---- what lies on the server


def test_values_expire(server: RedisServer, key: str) -> None:
    with opened(server.url, expire=100) as tier:
        tier.publish(key, views(values_of([5, 60_000])))
    assert 90 <= int(server.ask("TTL", key)[1:]) <= 100
    with opened(server.url) as tier:
        tier.publish(key, views(values_of([5, 60_000])))
    assert b":-1\r\n" == server.ask("TTL", key)


def test_a_declined_payload_is_not_transferred(tier: RespTier, server: RedisServer, key: str) -> None:
    tier.publish(key, views(values_of([300, 8 * MIB])))
    sent, connections = server.count("total_net_output_bytes"), server.count("total_connections_received")
    for _ in range(10):
        memory = iter([memoryview(bytearray(300)), None])
        assert not tier.fetch(key, lambda size, memory=memory: next(memory))  # type: ignore[misc]
    assert server.count("total_net_output_bytes") - sent < 1 * MIB
    assert server.count("total_connections_received") - connections == 2, "those of the two questions"


@pytest.mark.parametrize(
    "command",
    [
        ("DEL",),
        ("LPUSH", "x"),
        ("SET", "x"),
        ("SET", r'"\x00\x00\x00\x00"'),
        ("SET", r'"\x01\x00\x00\x00aaaa"'),
        ("SET", r'"\x41\x00\x00\x00' + r"\x00" * 8 * 65 + '"'),
        ("SET", r'"\xff\xff\xff\xff' + "a" * 80 + '"'),
    ],
    ids=["nothing", "a list", "no table", "no spans", "half a table", "65 spans", "more spans"],
)
def test_what_is_no_value_of_a_tier_is_a_miss_and_can_be_replaced(
    tier: RespTier, server: RedisServer, key: str, command: tuple[str, ...]
) -> None:
    server.ask(command[0], key, *command[1:])
    assert not tier.fetch(key, lambda size: pytest.fail("there is no value"))
    tier.publish(key, [memoryview(b"")] * 64)
    assert [b""] * 64 == fetch(tier, key)
    server.ask("DEL", key)
    server.ask(command[0], key, *command[1:])
    tier.remove([key])
    assert [False] == tier.has([key])


@pytest.mark.parametrize("change", [("DEL",), ("SET", "x" * 999), ("SETRANGE", "101000", "x"), ("LPUSH", "x")], ids=str)
def test_a_value_that_changes_while_it_is_fetched_is_a_miss(
    tier: RespTier, server: RedisServer, key: str, change: tuple[str, ...]
) -> None:
    values = values_of([300, 100_000])
    tier.publish(key, views(values))

    def into(size: int) -> memoryview:
        if change[0] == "LPUSH":
            server.ask("DEL", key)
        server.ask(change[0], key, *change[1:])
        return memoryview(bytearray(size))

    if change[0] == "LPUSH":
        with raises(TierError, ["does not speak RESP", "WRONGTYPE"]):
            tier.fetch(key, into)
    else:
        assert not tier.fetch(key, into)
    tier.publish(key, views(values))
    assert values == fetch(tier, key)


@pytest.mark.parametrize("size", [0, 1, 5000, _AHEAD - 4 - 16 - 5, _AHEAD - 4 - 16 - 5 + 1, 100_000])
@pytest.mark.parametrize("more", ["x", "x" * 20_000])
def test_a_value_that_goes_on_is_not_the_one_that_was_put(
    tier: RespTier, server: RedisServer, key: str, size: int, more: str
) -> None:
    values = values_of([5, size])
    tier.publish(key, views(values))
    assert values == fetch(tier, key)
    server.ask("APPEND", key, more)
    assert tier.fetch(key, lambda size: memoryview(bytearray(size))) is None
    tier.publish(key, views(values))
    assert values == fetch(tier, key)  # the connection is in step


# ---- a server that refuses


def test_a_full_server_keeps_the_old_value(key: str) -> None:
    with serving("--maxmemory", "20mb", "--maxmemory-policy", "noeviction") as server:
        with opened(server.url) as tier:
            old = checked(random_bytes(1, 2 * MIB))
            tier.publish(key, views(old))
            # Room for the small first span, but not for the payload.
            server.ask("CONFIG", "SET", "maxmemory", str(server.count("used_memory", "memory") + 1 * MIB))
            for _ in range(3):
                with raises(TierFullError, ["OOM", "command not allowed"]):
                    tier.publish(key, views(checked(random_bytes(2, 4 * MIB))))
            assert old == fetch(tier, key)
            server.ask("CONFIG", "SET", "maxmemory", "20mb")
            tier.publish(key, views(values_of([1, 2])))
            assert values_of([1, 2]) == fetch(tier, key)


def test_a_value_larger_than_redis_takes_is_refused_before_it_is_sent(key: str) -> None:
    with mmap.mmap(-1, (512 << 20) + 1) as mapping, memoryview(mapping) as large:
        with opened("redis://127.0.0.1:1") as tier:  # nobody is asked
            with raises(TierFullError, [str(512 << 20)]):
                tier.publish(key, [memoryview(b"meta"), large])


def test_a_wrong_password_is_told_with_a_hint(key: str) -> None:
    with serving("--requirepass", "secret") as server:
        with opened(server.url) as tier:
            with raises(TierError, ["NOAUTH", "Authentication required"], ["correct user and password in the URL"]):
                tier.has([key])
        with opened(server.url.replace("//", "//:guess@")) as tier:
            for _ in range(2):
                with raises(TierError, ["WRONGPASS"], ["correct user and password"]) as caught:
                    tier.has([key])
                assert "guess" not in str(caught.value)
        with opened(server.url.replace("//", "//:secret@")) as tier:
            assert [False] == tier.has([key])


def test_a_name_with_many_dead_addresses_takes_one_time_out(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        with socket.create_connection(full.getsockname()):  # the kernel answers no more
            address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", full.getsockname())
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 20)
            with opened("redis://name", timeout=0.5) as tier:
                begin = time.monotonic()
                with raises(TierError, ["in time"]):
                    tier.has([key])
                assert 0.4 < time.monotonic() - begin < SOON


def test_over_tls(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, private = str(tmp_path / "certificate"), str(tmp_path / "private")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", private, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", private]
    with serving(*options, "--tls-ca-cert-file", certificate, "--tls-auth-clients", "no") as server:
        with opened(f"rediss://localhost:{port}/1?ssl_ca_certs={certificate}") as tier:
            values = values_of([300, 3 * MIB])
            for _ in range(3):
                tier.publish(key, views(values))
                assert values == fetch(tier, key)
            assert server.count("total_connections_received") <= 2, "the tier's and that of the question"
        with opened(f"rediss://localhost:{port}") as tier:
            with raises(TierError, ["cannot be reached"], ["ssl_ca_certs="]):
                tier.has([key])


# ---- a server that dies or stops


def calls_of(tier: RespTier, key: str, size: int = 9 * MIB) -> dict[str, Callable[[], object]]:
    return {
        "publish": lambda: tier.publish(key, views(values_of([300, size]))),
        "fetch": lambda: fetch(tier, key),
        "has": lambda: tier.has([key]),
        "remove": lambda: tier.remove([key]),
    }


@pytest.mark.parametrize("call", ["publish", "fetch", "has", "remove"])
@pytest.mark.parametrize("connected", [True, False])
def test_a_stopped_server_costs_the_time_out_and_works_again_after_it(
    own_server: RedisServer, key: str, call: str, connected: bool
) -> None:
    with opened(own_server.url, timeout=0.5) as tier:
        if connected:
            tier.has([key])
        own_server.signal(signal.SIGSTOP)
        started = time.monotonic()
        with raises(TierError, ["in time"]):
            calls_of(tier, key)[call]()
        assert 0.4 < time.monotonic() - started < SOON
        own_server.signal(signal.SIGCONT)
        while True:  # it first does what was sent to it while it was stopped
            try:
                assert len(tier.has([key])) == 1
                break
            except TierError:
                assert time.monotonic() - started < 30


def test_the_first_call_after_a_restart_works(own_server: RedisServer, key: str) -> None:
    with opened(own_server.url) as tier:
        for _ in range(2):
            tier.publish(key, views(values_of([5, 6])))
            own_server.kill()
            own_server.start()
            assert [False] == tier.has([key])


def test_a_server_killed_at_any_moment_costs_only_tier_errors(own_server: RedisServer, key: str) -> None:
    """Publishes and fetches run all the time; what arrives verifies, and both work after each restart."""
    over = threading.Event()
    done = {"publish": 0, "fetch": 0, "errors": 0}

    def publish(tier: RespTier) -> None:
        n = 0
        while not over.is_set():
            n += 1
            try:
                tier.publish(key, views(checked(random_bytes(n % 4, 3 * MIB))))
                done["publish"] += 1
            except TierError:
                done["errors"] += 1

    def read(tier: RespTier) -> None:
        while not over.is_set():
            try:
                value = fetch(tier, key)
                done["fetch"] += value is not None and verifies(value)
            except TierError:
                done["errors"] += 1

    def wait_for(name: str, number: int) -> None:
        limit = time.monotonic() + 60
        while done[name] < number:
            assert time.monotonic() < limit, f"no {name} has worked since"
            time.sleep(0.001)

    with opened(own_server.url) as tier, ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(publish, tier), pool.submit(read, tier)]
        try:
            for n in range(12):
                wait_for("publish", done["publish"] + 1)
                wait_for("fetch", done["fetch"] + 1)
                time.sleep(0.0013 * n)  # at any moment
                errors = done["errors"]
                own_server.kill()
                wait_for("errors", errors + 1)
                own_server.start()
        finally:
            over.set()
        for thread in threads:
            thread.result()


def test_a_port_on_which_nobody_listens_is_an_error(key: str) -> None:
    with opened(f"redis://127.0.0.1:{free_port()}") as tier:
        for call in calls_of(tier, key).values():
            with raises(TierError, ["cannot be reached"]):
                call()


# ---- a server that talks nonsense


class FakeServer:
    """Answers the first command of each connection with `said`, the second with `then`; keeps silent, or ends it."""

    def __init__(self, said: bytes, then: bytes, ends: bool, pause: float) -> None:
        self._said, self._then, self._ends, self._pause = said, then, ends, pause
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connected: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            connected, _ = self._listening.accept()
            if self._over.is_set():
                connected.close()
                return
            self._connected.append(connected)
            while b"SETINFO" in connected.recv(1 << 16):
                connected.sendall(b"+OK\r\n")
            try:
                for at in range(len(self._said) if self._pause else 1):
                    connected.sendall(self._said[at : at + 1] if self._pause else self._said)
                    self._over.wait(self._pause)
                if self._then:
                    connected.recv(1 << 16)
                    connected.sendall(self._then)
            except OSError:
                pass  # the client has given up
            if self._ends:
                connected.close()

    def close(self) -> None:
        self._over.set()
        socket.create_connection(self._listening.getsockname()).close()
        self._thread.join()
        for one in (*self._connected, self._listening):
            one.close()


@contextmanager
def faking(said: bytes, then: bytes = b"", ends: bool = False, pause: float = 0.0) -> Iterator[FakeServer]:
    server = FakeServer(said, then, ends, pause)
    try:
        yield server
    finally:
        server.close()


NONSENSE = [b"\0" * 100 + b"\r\n", b":1x\r\n", b"-MOVED\r\n", b"$-1\r\n"]


@pytest.mark.parametrize("said", NONSENSE, ids=lambda said: repr(said[:30]))
@pytest.mark.parametrize("call", ["publish", "fetch", "remove"])
def test_nonsense_is_an_error(said: bytes, call: str, key: str) -> None:
    with faking(said) as server, opened(server.url, timeout=20) as tier:
        started = time.monotonic()
        for _ in range(2):
            with raises(TierError, ["does not speak RESP"]):
                calls_of(tier, key, size=10)[call]()
        assert time.monotonic() - started < SOON


ANSWER = b"$16\r\n" + b"\1\0\0\0\4" + bytes(7) + b"abcd\r\n"
HALVES = [b"", ANSWER[:4], ANSWER[:-4], ANSWER[:-1]]


@pytest.mark.parametrize("said", HALVES, ids=repr)
@pytest.mark.parametrize("ends", [False, True])
def test_half_an_answer_is_an_error_in_time(said: bytes, ends: bool, key: str) -> None:
    with faking(said, ends=ends) as server, opened(server.url, timeout=0.3) as tier:
        for _ in range(2):
            started = time.monotonic()
            with raises(TierError, ["it ended the connection" if ends else "in time"]):
                fetch(tier, key)
            assert time.monotonic() - started < SOON


def test_a_whole_answer_of_the_fake_server_is_read(key: str) -> None:
    """The halves above are halves of this."""
    with faking(HALVES[-1] + b"\n") as server, opened(server.url) as tier:
        assert [b"abcd"] == fetch(tier, key)


AHEAD = b"$16384\r\n\1\0\0\0" + (70_000 + 16_372).to_bytes(8, "little") + bytes(16_372) + b"\r\n"
"""Its table says 70,000 bytes more than came with it."""


@pytest.mark.parametrize(
    "said", [b":1\r\n", b"$\r\n", b"-ERR no\r\n", b"$70000\r\n" + b"x" * 70_002], ids=lambda b: repr(b[:9])
)
def test_a_span_that_does_not_come_as_it_must_is_an_error(said: bytes, key: str) -> None:
    with faking(AHEAD, said) as server, opened(server.url) as tier:
        with raises(TierError, ["does not speak RESP"]):
            fetch(tier, key)


def test_a_server_that_ends_inside_a_span_is_an_error(key: str) -> None:
    with faking(AHEAD, b"$70000\r\n" + b"x" * 69_999, ends=True) as server, opened(server.url) as tier:
        with raises(TierError, ["it ended the connection"]):
            fetch(tier, key)


def test_a_server_that_says_without_end_costs_no_memory(key: str) -> None:
    for said in (b"x" * (8 << 20), b"$99999999\r\n" + b"x" * (8 << 20)):
        with faking(said) as server, opened(server.url) as tier, raises(TierError, ["it says too much"]):
            fetch(tier, key)


@pytest.mark.parametrize("greeting", [False, True])
def test_the_time_out_is_for_the_call_and_not_for_each_byte(greeting: bool, key: str) -> None:
    """The server says something every 50 ms, also in answer to AUTH."""
    with faking(b"+OK" * 300, pause=0.05) as server:
        url = server.url.replace("//", "//:secret@") if greeting else server.url
        with opened(url, timeout=0.3) as tier:
            started = time.monotonic()
            with raises(TierError, ["in time"]):
                tier.has([key])
            assert time.monotonic() - started < SOON


# ---- threads and connections


def test_a_call_waits_for_a_connection_no_longer_than_its_time_out(
    tier: RespTier, server: RedisServer, key: str
) -> None:
    tier.publish(key, views(values_of([5, 60_000])))
    with opened(server.url, connections=1, timeout=0.3) as small:

        def into(size: int) -> memoryview:
            with ThreadPoolExecutor(1) as pool, raises(TierError, ["all 1 connections"]):
                pool.submit(small.has, [key]).result()
            return memoryview(bytearray(size))

        with pytest.raises(TierError):  # the first call is late now
            small.fetch(key, into)
        assert [True] == small.has([key])


def test_a_call_that_runs_while_the_tier_is_closed_leaves_no_connection(server: RedisServer, key: str) -> None:
    with opened(server.url) as tier:
        tier.publish(key, views(values_of([5, 60_000])))

        def into(size: int) -> memoryview:
            tier.close()
            return memoryview(bytearray(size))

        with suppress(TierError):
            tier.fetch(key, into)
        limit = time.monotonic() + 30
        while server.clients() > 0:  # before the tier is closed once more
            assert time.monotonic() < limit, "a connection is left"


# ---- arguments


def test_a_late_answer_is_not_taken_for_that_of_another_call(own_server: RedisServer, key: str) -> None:
    with opened(own_server.url, timeout=0.5) as tier:
        tier.publish(key, views(values_of([5, 6])))
        own_server.signal(signal.SIGSTOP)
        with raises(TierError, ["in time"]):
            tier.has([key])
        timer = threading.Timer(0.2, own_server.signal, [signal.SIGCONT])
        timer.start()
        limit = time.monotonic() + 30
        while True:
            try:
                assert [False] == tier.has(["absent"])
                break
            except TierError:
                assert time.monotonic() < limit
        timer.join()


def test_each_call_has_the_whole_time_out(server: RedisServer, key: str) -> None:
    with opened(server.url, timeout=1) as tier:
        tier.has([key])
        time.sleep(1.1)
        assert [False] == tier.has([key])
