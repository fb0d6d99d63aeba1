"""`MooncakeTier` and a process in the place of its client, which says anything; Mooncake itself is not needed."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmstore.errors import TierError
from shmstore.tiers import mooncake
from shmstore.tiers.mooncake import MooncakeTier
from tests.tiers.contract import views

TIMEOUT = 0.5
PROGRAM = """
import json, os, signal, sys, time
from multiprocessing.connection import Connection

given = json.loads(sys.argv[1])
lane = Connection(given["pipes"][0])
lanes = [Connection(fd) for fd in given["pipes"]]
"""
CONNECTS = 'lane.send_bytes(json.dumps({"addresses": [1 << 40] * len(given["places"])}).encode())\n'
ASKED = """
import select
asked = select.poll()
for one in lanes:
    asked.register(one.fileno(), select.POLLIN)
lane = next(one for one in lanes if one.fileno() == asked.poll()[0][0])
lane.recv_bytes()
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


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeTier]:
    monkeypatch.setattr(mooncake, "find_spec", lambda name: name)
    made = MooncakeTier("127.0.0.1:1", timeout=TIMEOUT)
    yield made
    made.close()


@pytest.mark.parametrize("call", ["publish", "fetch", "has", "remove"])
@pytest.mark.parametrize("says", SAYS.values(), ids=SAYS)
def test_a_client_that_is_late_or_talks_nonsense_is_an_error_in_time(
    tier: MooncakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, call: str
) -> None:
    program = tmp_path / "client.py"
    program.write_text(PROGRAM + says)
    monkeypatch.setattr(mooncake, "_PROGRAM", str(program))
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
