"""`shmstore demo` with two hosts: real processes, a tier between them, and its server killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from shmstore.cli.demo.fleet import APART, HOST_MODES
from shmstore.cli.demo.main import execute
from shmstore.cli.demo.network import two_hosts
from shmstore.cli.demo.processing import item_bytes
from shmstore.cli.demo.records import HOSTS, TIER, FleetFigures, FleetReport, RunSettings
from shmstore.cli.demo.tier_server import demo_tier
from shmstore.cli.main import main
from shmstore.tiers import open_tier
from tests.cli.items import NotedItems, RandomItems
from tests.cli.test_demo import _leaves_nothing_behind, needs_extra
from tests.cli.test_fleet import ROWS, run_json

assert _leaves_nothing_behind  # a fixture of every test here, too

SIZE = sum(item_bytes(picture.process()[0]) for picture in RandomItems(rows=ROWS))
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason="redis-server or redis-py is not installed",
)


def test_the_second_host_processes_nothing_that_the_first_has_and_a_tier_that_stays_is_empty(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = NotedItems(rows=ROWS, notes=tmp_path / "processed")
    folder = tmp_path / "tier"
    folder.mkdir()
    settings = RunSettings(workers=1, rounds=2, api_servers=2, hosts=2, tier=f"file://{folder}")
    report, modes = run_json(settings, source, tuple(HOST_MODES), capfd)
    assert [f"{mode}, {host}" for mode in HOST_MODES for host in HOSTS] == list(modes)
    for figures in modes.values():
        assert (16, 16, 0, 0) == (figures.requests, figures.checked, figures.mismatches, figures.dealt_again)
        assert 0 < figures.latency_median_us < 1e3 * figures.first_median_ms
    assert [8, 8, 8, 0] == [figures.processed for figures in modes.values()]
    assert [SIZE, SIZE, SIZE, 0] == [figures.stored_bytes for figures in modes.values()]
    names = ("hits", "hit_bytes", "misses", "offered", "offered_bytes", "errors")
    assert [(0, 0, 8, 8, SIZE, 0), (8, SIZE, 0, 0, 0, 0)] == [
        tuple(report["modes"][f"{TIER}, {host}"]["tier"][name] for name in names) for host in HOSTS
    ]
    assert 8 + sum(figures.processed for figures in modes.values()) == len(source.notes.read_text().split())
    assert [] == list(folder.rglob("*.shmstore"))


def test_without_a_tier_it_makes_a_folder_and_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with demo_tier(None) as tier:
        assert "nothing goes over a network" in tier.network.words
        with closing(open_tier(tier.url)) as opened:
            opened.offer("key", [memoryview(b"value")], {})
        assert 1 == len(list(tmp_path.rglob("*.shmstore")))
    assert [] == list(tmp_path.iterdir())


@needs_redis
def test_every_request_is_served_when_the_tier_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    settings = RunSettings(workers=1, rounds=2, hosts=2, tier="redis", kill="tier")
    report, modes = run_json(settings, RandomItems(rows=ROWS), (TIER,), capfd)
    first, second = modes.values()
    assert (16, 16, 16, 16) == (first.requests, first.checked, second.requests, second.checked)
    assert (0, 0) == (first.mismatches, second.mismatches)
    tier = report["modes"][f"{TIER}, {HOSTS[1]}"]["tier"]
    assert 8 == second.processed + tier["hits"], "what the tier does not give any more is processed"
    assert 0 < second.processed < 8
    assert 0 < tier["errors"]
    assert ("namespace" in report["network"]) != ("loopback" in report["network"])


@pytest.mark.parametrize(
    ("tier", "said"), [("redis://127.0.0.1:1", "--tier: "), ("nothing://here", "--tier: the URL of a tier must start")]
)
def test_a_tier_that_is_not_there_ends_it_before_it_starts(
    tier: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 1 == execute(RunSettings(hosts=2, tier=tier), RandomItems(rows=()), modes=(TIER,))
    assert capsys.readouterr().err.startswith(f"shmstore demo: {said}")


def test_images_that_are_processed_again_are_a_failure_unless_the_tier_was_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {f"{mode}, {host}": FleetFigures(9, 3, 100, 10, 1.0, 2.0, 3.0, 18, 0, 0, 0.5) for mode in HOST_MODES
               for host in HOSTS}  # fmt: skip
    for kill, status in ((None, 1), ("tier", 0)):
        report = FleetReport(RunSettings(hosts=2, kill=kill), 3, 100, 1000, figures, network="Somewhere.")
        monkeypatch.setattr("shmstore.cli.demo.main.run_fleet", lambda *_, report=report, **__: report)
        assert status == execute(report.settings, RandomItems(rows=()))
        said = " ".join(capsys.readouterr().out.split())
        assert ("The second host has processed 3 images that the tier should have had." in said) == (kill is None)
        assert ("SIGKILL ended the tier's server" in said) == (kill is not None)
        assert all(summary in said for summary in HOST_MODES.values())
        assert f"{APART}, {HOSTS[0]}" not in said, "the heading of a column has two lines"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tier", "redis"], "--tier is between hosts: use --hosts 2"),
        (["--hosts", "3"], "invalid choice"),
        (["--hosts", "2", "--mode", "shm"], "leave it out"),
        (["--hosts", "2", "--workers", "33"], "--workers times --engines times --hosts must be at most 64"),
        (["--hosts", "2", "--kill", "api"], "--kill api is not for two hosts: use --kill tier --tier redis"),
        (["--hosts", "2", "--kill", "tier"], "use --kill tier --tier redis"),
        (["--kill", "tier"], "--kill tier needs a process of this run: use api, engine, worker"),
    ],
)
def test_options_that_do_not_go_with_hosts_are_a_usage_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["demo", *arguments])
    assert said in capsys.readouterr().err


@needs_extra
def test_the_command_runs_both_modes_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute_(settings: RunSettings, source: object, **options: object) -> int:
        assert (2, "redis", "tier", tuple(HOST_MODES)) == (
            settings.hosts,
            settings.tier,
            settings.kill,
            options["modes"],
        )
        return 7

    monkeypatch.setattr("shmstore.cli.demo.main.execute", execute_)
    assert 7 == main(["demo", "--hosts", "2", "--tier", "redis", "--kill", "tier"])


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
