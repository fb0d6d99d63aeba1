"""Two hosts: real processes, a tier between them, and its server killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from examples.demo.processing import item_bytes
from examples.demo.supervisor import DemoError
from shmstore.errors import TierError
from shmstore.tiers import open_tier
from tests.demo.items import NotedItems, RandomItems
from tests.demo.test_demo import _leaves_nothing_behind
from tests.fleet import servers
from tests.fleet.fleet import HOST_MODES
from tests.fleet.network import Network, two_hosts
from tests.fleet.records import HOSTS, TIER, FleetSettings
from tests.fleet.test_fleet import ROWS, run
from tests.fleet.tier_server import fleet_tier
from tests.support import children

assert _leaves_nothing_behind  # a fixture of every test here, too

SIZE = sum(item_bytes(picture.process()[0]) for picture in RandomItems(rows=ROWS))
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason="redis-server or redis-py is not installed",
)
needs_mooncake = pytest.mark.skipif(
    servers.missing_for_mooncake() is not None, reason=servers.missing_for_mooncake() or ""
)


def test_the_second_host_processes_nothing_that_the_first_has(
    tmp_path: Path,
) -> None:
    source = NotedItems(rows=ROWS, notes=tmp_path / "processed")
    folder = tmp_path / "tier"
    folder.mkdir()
    settings = FleetSettings(workers=1, rounds=2, api_servers=2, hosts=2, tier=f"file://{folder}")
    modes = run(settings, source, *HOST_MODES).modes
    assert [f"{mode}, {host}" for mode in HOST_MODES for host in HOSTS] == list(modes)
    for figures in modes.values():
        assert (16, 16, 0, 0) == (figures.requests, figures.checked, figures.mismatches, figures.dealt_again)
        assert 0 < figures.latency_median_us < 1e3 * figures.first_median_ms
    assert [8, 8, 8, 0] == [figures.processed for figures in modes.values()]
    assert [SIZE, SIZE, SIZE, 0] == [figures.stored_bytes for figures in modes.values()]
    names = ("hits", "hit_bytes", "misses", "published", "published_bytes", "errors")
    assert [(0, 0, 8, 8, SIZE, 0), (8, SIZE, 0, 0, 0, 0)] == [
        tuple(getattr(modes[f"{TIER}, {host}"].tier, name) for name in names) for host in HOSTS
    ]
    assert 8 + sum(figures.processed for figures in modes.values()) == len(source.notes.read_text().split())
    assert [] == list(folder.rglob("*.shmstore"))


def test_without_a_tier_it_makes_a_folder_and_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fleet_tier(None) as tier:
        assert "nothing goes over a network" in tier.network.words
        with closing(open_tier(tier.url)) as opened:
            opened.publish("key", [memoryview(b"value")], {})
        assert 1 == len(list(tmp_path.rglob("*.shmstore")))
    assert [] == list(tmp_path.iterdir())


SERVED = [pytest.param("redis", marks=needs_redis), pytest.param("mooncake", marks=needs_mooncake)]


@pytest.mark.parametrize("tier", SERVED)
def test_every_request_is_served_when_the_tier_is_killed(tier: str) -> None:
    settings = FleetSettings(workers=1, rounds=2, hosts=2, tier=tier, kill=TIER)
    report = run(settings, RandomItems(rows=ROWS), TIER)
    first, second = report.modes.values()
    assert (16, 16, 16, 16) == (first.requests, first.checked, second.requests, second.checked)
    assert (0, 0) == (first.mismatches, second.mismatches)
    assert 8 == second.processed + second.tier.hits, "what the tier does not give any more is processed"
    assert 0 < second.processed < 8
    assert 0 < second.tier.errors
    assert first.fetching_ms is None
    assert second.fetching_ms is not None
    assert 0 < second.fetching_ms < second.longest_ms
    assert ("namespace" in report.network) != ("loopback" in report.network)
    assert report.tier.startswith(f"{tier}://")


@pytest.mark.parametrize("cable", [True, False], ids=["cable", "loopback"])
@pytest.mark.parametrize("tier", SERVED)
def test_the_servers_of_a_tier_serve_the_second_host_until_they_are_ended(
    tier: str, cable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cable:
        monkeypatch.setattr("tests.fleet.tier_server.two_hosts", lambda: nullcontext(Network("Loopback.")))
    for killed in (False, True):
        with fleet_tier(tier) as served:
            started = children()
            with served.network.entered(1), closing(open_tier(served.url)) as opened:
                opened.publish("key", [memoryview(b"value"), memoryview(bytes(1 << 20))], {})
                assert [True] == opened.has(["key"])
                if killed:
                    assert served.kill is not None
                    served.kill()
                    with pytest.raises(TierError):
                        opened.has(["key"])
            assert (set() if killed else started) == children()
        assert started
        assert set() == children()


@pytest.mark.parametrize("tier", SERVED)
def test_the_servers_of_a_tier_end_with_the_process_that_started_them(tier: str) -> None:
    program = (
        "import sys; from tests.fleet.tier_server import fleet_tier; from tests.support import children\n"
        "with fleet_tier(sys.argv[1]): print(*children(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tier], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        servers = [int(number) for number in process.stdout.readline().split()]
        process.kill()
    assert servers
    deadline = time.monotonic() + 30
    while any(lives(server) for server in servers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()  # its new parent may not wait for it
    except FileNotFoundError:
        return False


def test_what_is_missing_is_a_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(tier: str) -> str:
        with pytest.raises(DemoError, match=f"^tier {tier}: ") as caught:
            run(FleetSettings(hosts=2, tier=tier), RandomItems(rows=()), TIER)
        return str(caught.value)

    monkeypatch.setenv("PATH", "")
    assert "install Debian's package redis-server, or Valkey" in said("redis")
    monkeypatch.setattr(servers, "find_spec", lambda name: object())
    monkeypatch.setattr(servers, "_LIBRARIES", {"libc.so.6": "libc6", "libnothing.so.7": "libnothing7"})
    assert "libnothing.so.7: install Debian's packages libc6, libnothing7" in said("mooncake")
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    assert "pip install 'mooncake-transfer-engine-non-cuda" in said("mooncake")


def test_a_server_that_does_not_get_ready_is_gone_and_its_last_words_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for script, words in (("echo first; echo 'no port'; exit 3", "no port"), ("exit 0", "it said nothing")):
        with pytest.raises(DemoError, match=words):
            servers.start(["sh", "-c", script], "ready")
    before = children()
    monkeypatch.setattr(servers, "_READY_S", 0.1)
    with pytest.raises(DemoError, match="did not get ready"):
        servers.start(["sleep", "1000"], "ready")
    assert before == children()


@pytest.mark.parametrize(("tier", "said"), [("redis://127.0.0.1:1", "tier: "), ("nothing://here", "must start")])
def test_a_tier_that_is_not_there_ends_it_before_it_starts(tier: str, said: str) -> None:
    with pytest.raises(DemoError, match=said):
        run(FleetSettings(hosts=2, tier=tier), RandomItems(rows=()), TIER)


def namespace() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def test_two_hosts_reach_each_other_by_a_cable_and_nothing_else() -> None:
    before, files = namespace(), os.listdir("/proc/self/fd")
    with two_hosts() as network:
        if "loopback" in network.words:
            pytest.skip(f"namespaces are not allowed here: {network.words}")
        seen = []
        for host in range(2):
            with network.entered(host):
                assert namespace() != before
                child = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True)
                seen.append(child.stdout)
        assert namespace() == before
        assert [f"cable{host}" in seen[host] and network.address(host) in seen[host] for host in range(2)] == [True] * 2
        assert [2, 2] == [len(one.splitlines()) for one in seen], "and the loopback of the namespace"
        with network.entered(0):
            server = socket.create_server((network.address(0), 0))
        with server, network.entered(1):
            socket.create_connection(server.getsockname(), timeout=10).close()
    assert files == os.listdir("/proc/self/fd")


def test_without_the_right_or_the_program_both_hosts_use_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    before, files = namespace(), os.listdir("/proc/self/fd")
    monkeypatch.setenv("PATH", "")
    with two_hosts() as network:
        assert network.words.startswith("Both hosts use loopback: ")
        assert ["127.0.0.1"] * 2 == [network.address(host) for host in range(2)]
        with network.entered(1):
            assert namespace() == before
    assert (before, files) == (namespace(), os.listdir("/proc/self/fd"))
