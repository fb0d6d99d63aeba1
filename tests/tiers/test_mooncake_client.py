"""`MooncakeTier` and a process in the place of its client, which says anything; Mooncake itself is not needed."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from mmap import PAGESIZE
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO
from unittest.mock import Mock

import pytest

from shmstore.errors import TierError
from shmstore.tiers import mooncake, mooncake_client
from shmstore.tiers.mooncake import LANES, MooncakeTier, _Lane
from tests.support import Child
from tests.tiers.contract import views

TIMEOUT = 0.5
PROGRAM = """
import json, os, signal, sys, time
from multiprocessing.connection import Connection

given = json.loads(sys.argv[1])
lanes = [Connection(fd) for fd in given["pipes"]]
lane = lanes[0]
"""
CONNECTS = 'lane.send_bytes(json.dumps({"addresses": [1 << 40] * len(given["places"])}).encode())\n'
ASKED = """
import select
asked = select.poll()
for one in lanes:
    asked.register(one.fileno(), select.POLLIN)
def call():
    global lane
    lane = next(one for one in lanes if one.fileno() == asked.poll()[0][0])
    return json.loads(lane.recv_bytes())
call()
"""
STOPS = "os.kill(os.getpid(), signal.SIGSTOP)\n"
HALF = r'os.write(lane.fileno(), b"\0\0\0\5[1")' + "\ntime.sleep(60)\n"
GARBAGE = r'lane.send_bytes(b"\xff not JSON"); time.sleep(60)' + "\n"
SAYS = {
    "stopped at the start": STOPS,
    "half a greeting": HALF,
    "garbage as a greeting": GARBAGE,
    "stopped": CONNECTS + ASKED + STOPS,
    "half an answer": CONNECTS + ASKED + HALF,
    "garbage": CONNECTS + ASKED + GARBAGE,
    "too long an answer": CONNECTS + ASKED + 'lane.send_bytes(b"1" * (2 << 20)); time.sleep(60)\n',
    "its end": CONNECTS + ASKED,
}
REFUSES = """
while True:
    answer = {"get_into": 0, "upsert_from": -9}.get(call()[0], [-9])
    lane.send_bytes(json.dumps(answer).encode())
"""


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeTier]:
    monkeypatch.setattr(mooncake, "find_spec", lambda name: name)
    made = MooncakeTier("127.0.0.1:1", timeout=TIMEOUT)
    yield made
    made.close()


def played(says: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    program = folder / "client.py"
    program.write_text(PROGRAM + says)
    monkeypatch.setattr(mooncake, "_PROGRAM", str(program))


@pytest.mark.parametrize("call", ["publish", "fetch", "has", "remove"])
@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
def test_a_client_that_is_late_or_talks_nonsense_is_an_error_in_time(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, call: str
) -> None:
    played(says, monkeypatch, tmp_path)
    calls: dict[str, Callable[[], object]] = {
        "publish": lambda: tier.publish("key", views([b"meta"])),
        "fetch": lambda: tier.fetch("key", lambda size: memoryview(bytearray(size))),
        "has": lambda: tier.has(["key"]),
        "remove": lambda: tier.remove(["key"]),
    }
    begun = time.monotonic()
    with pytest.raises(TierError):
        while time.monotonic() - begun < 30:  # a start takes more than the time-out on a busy machine
            try:
                calls[call]()
            except TierError as error:
                if "still connecting" not in str(error) or says == STOPS:
                    raise
    assert time.monotonic() - begun < 30


def connected(tier: MooncakeTier, stack: ExitStack) -> _Lane:
    """Return a lane of the tier's client, which has connected."""
    while True:
        with suppress(TierError):
            return stack.enter_context(tier._lane())


def test_a_refusal_is_an_error_with_its_number(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played(CONNECTS + ASKED.replace("\ncall()", "") + REFUSES, monkeypatch, tmp_path)
    with ExitStack() as stack:
        connected(tier, stack)
    for call in (lambda: tier.has(["a"]), lambda: tier.remove(["a"]), lambda: tier.publish("a", views([b"b"]))):
        with pytest.raises(TierError, match="-9"):
            call()


def test_a_lane_is_waited_for_until_a_late_or_interrupted_call_ends_all(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played(CONNECTS + STOPS, monkeypatch, tmp_path)
    with ExitStack() as stack:
        lanes = [connected(tier, stack) for _ in range(LANES)]
        client = lanes[0].client
        with pytest.raises(TierError, match="other calls"):
            client.take(0)
        with client._connecting, pytest.raises(TierError, match="still connecting"):
            client.take(0)
        monkeypatch.setattr(lanes[0].pipe, "poll", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            lanes[0].ask("batch_is_exist", [])
        assert client._process.returncode == -signal.SIGKILL
        with pytest.raises(TierError, match="another call"):
            client.take(0)


def test_a_client_that_cannot_be_started_is_an_error(tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/none")
    with pytest.raises(TierError, match="cannot be started"):
        tier.has(["a"])


def test_memory_registered_late_is_mapped_by_the_next_client(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played(CONNECTS + STOPS, monkeypatch, tmp_path)
    with ExitStack() as stack:
        client = connected(tier, stack).client
    with pytest.raises(ValueError, match="shorter"):
        tier.register(memoryview(bytes(1)), os.devnull)
    assert not client.dead
    (tmp_path / "memory").write_bytes(bytes(1))
    tier.register(memoryview(bytes(1)), tmp_path / "memory")
    assert client.dead


def started(ours: Connection, theirs: Connection, memory: BinaryIO, host: str) -> Child:
    """Start the client's program in a child, which has the place of its first page."""
    settings = {"local_hostname": host, "master_server_addr": "nowhere"}

    def client() -> None:
        ours.close()
        places, pipes = [[memory.fileno(), 0, PAGESIZE]], [theirs.fileno()]
        given = {"parent": os.getppid(), "pipes": pipes, "places": places, "settings": settings}
        sys.argv = ["client", json.dumps(given)]
        mooncake_client.main()

    child = Child(client)
    theirs.close()
    return child


@pytest.mark.parametrize(
    ("setup", "register", "host", "says"),
    [(-7, 0, "h", "cannot reach its master nowhere (-7)"), (0, -8, "h", "(-8)"), (0, 0, "", "no way to")],
)
def test_a_client_that_cannot_begin_says_why(
    monkeypatch: pytest.MonkeyPatch, setup: int, register: int, host: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", fake := Mock())
    made = fake.MooncakeDistributedStore.return_value
    made.setup.return_value, made.register_buffer.return_value = setup, register
    ours, theirs = Pipe()
    with ours, TemporaryFile() as memory:
        memory.truncate(PAGESIZE)
        child = started(ours, theirs, memory, host)
        assert says in json.loads(ours.recv_bytes())["error"]
        child.join()


def test_a_client_ends_when_a_call_raises_or_its_parent_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", fake := Mock())
    made = fake.MooncakeDistributedStore.return_value
    made.setup.return_value, made.register_buffer.return_value, made.get.side_effect = 0, 0, ZeroDivisionError
    ours, theirs = Pipe()
    with ours, TemporaryFile() as memory:
        memory.truncate(PAGESIZE)
        child = started(ours, theirs, memory, "h")
        assert 1 == len(json.loads(ours.recv_bytes())["addresses"])
        ours.send_bytes(b'["get", "key"]')
        with pytest.raises(EOFError):
            ours.recv_bytes()
        assert 1 == child._wait()
    assert 1 == Child(lambda: mooncake_client._end_with(os.getpid()))._wait()
