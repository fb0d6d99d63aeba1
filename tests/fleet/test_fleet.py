"""The demo with several API servers and engines: real processes, one of them killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.demo.fleet import FLEET_MODES, SHARED
from examples.demo.main import execute, main
from examples.demo.processing import item_bytes
from examples.demo.records import SHOWN_SETTINGS, FleetFigures, FleetReport, RunSettings
from examples.demo.supervisor import Observer
from tests.demo.items import BrokenImage, FailingProcessor, NotedItems, RandomItems
from tests.demo.test_demo import _leaves_nothing_behind, needs_extra

assert _leaves_nothing_behind  # a fixture of every test here, too

ROWS = (10, 20, 30, 40, 50, 60, 70, 300)


def run_json(
    settings: RunSettings, source: Any, modes: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], dict[str, FleetFigures]]:
    assert 0 == execute(settings, source, modes=modes, as_json=True, observer=Observer())
    captured = capfd.readouterr()
    assert "" == captured.err
    report = json.loads(captured.out)
    assert {name: getattr(settings, name) for name in SHOWN_SETTINGS} == {name: report[name] for name in SHOWN_SETTINGS}
    return report, {mode: FleetFigures(**figures) for mode, figures in report["modes"].items()}


def test_one_store_for_all_servers_processes_each_image_once_and_a_store_for_each_as_often_as_pickle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = NotedItems(rows=ROWS, notes=tmp_path / "processed")
    settings = RunSettings(workers=1, rounds=4, api_servers=2, engines=2)
    report, modes = run_json(settings, source, tuple(FLEET_MODES), capfd)
    sizes = [item_bytes(picture.process()[0]) for picture in RandomItems(rows=ROWS)]
    assert (True, 8, sum(sizes)) == (report["ok"], report["distinct_items"], report["distinct_bytes"])
    pickle, own, shared = modes.values()
    for figures in (pickle, own, shared):
        assert (32, 32, 0, 0) == (figures.requests, figures.checked, figures.mismatches, figures.dealt_again)
        assert 0 < figures.latency_median_us <= figures.latency_p99_us
    assert (8, sum(sizes)) == (shared.processed, shared.stored_bytes)
    assert 8 < own.processed == pickle.processed <= 16, "the same requests reach the same servers"
    assert sum(sizes) < own.stored_bytes == pickle.stored_bytes < 2 * sum(sizes) + 1
    assert 4 * 2 * sum(sizes) < pickle.sent_bytes < 1.1 * 4 * 2 * sum(sizes), "to the engine, and on to its worker"
    assert 0 < own.sent_bytes == pytest.approx(shared.sent_bytes, rel=0.05)
    assert shared.sent_bytes < pickle.sent_bytes / 50
    lines = source.notes.read_text().split()
    assert 8 + sum(figures.processed for figures in modes.values()) == len(lines), "and once to know each"
    assert 2 == len(set(lines))


@pytest.mark.parametrize(("kill", "recovered"), [("api:1", True), ("worker:1", False), ("engine", False)])
def test_the_others_go_on_when_a_process_is_killed_and_its_successor_loses_nothing(
    kill: str, recovered: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = RunSettings(workers=1, rounds=3, api_servers=2, engines=2, kill=kill)
    report, modes = run_json(settings, RandomItems(rows=ROWS), (SHARED,), capfd)
    figures = modes[SHARED]
    assert (24, 24, 0) == (figures.requests, figures.checked, figures.mismatches)
    assert figures.processed <= 8, "what was processed before the kill is a hit after it"
    assert recovered == (report["successor"]["recovered"] > 0)
    assert 0 < report["successor"]["back_s"] < figures.total_s


def test_a_defect_and_a_broken_image_end_it_as_they_end_a_run_of_one_server(capfd: pytest.CaptureFixture[str]) -> None:
    settings = RunSettings(workers=1, api_servers=2)
    for source, status, said in (
        (FailingProcessor(), 1, "API server 0: ZeroDivisionError: a defect"),
        (BrokenImage(), 2, "broken.png: truncated"),
    ):
        assert status == execute(settings, source, modes=(SHARED,))
        assert f"demo: {said}\n" == capfd.readouterr().err


def test_wrong_bytes_are_said_and_counted_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = FleetFigures(9, 3, 100, 10, 1.0, 2.0, 3.0, 18, 1, 0, 0.5)
    settings = RunSettings(api_servers=2)
    report = FleetReport(settings, 3, 100, 1000, {SHARED: figures})
    monkeypatch.setattr("examples.demo.main.run_fleet", lambda *_, **__: report)
    assert 1 == execute(settings, RandomItems(rows=()))
    assert "shared: 1 of 18 arrived wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mode", "shm"], "--mode shm is for one API server and one engine: leave it out"),
        (["--workers", "40"], "--workers times --engines must be at most 64"),
        (["--kill", "api:4"], "--kill api:4 needs a process of this run: use api:0 to api:3, engine:0 to engine:1"),
        (["--kill", "worker:-1"], "worker:0 to worker:3"),
        (["--kill", "store:0"], "--kill store:0 needs a process of this run"),
    ],
)
def test_options_that_do_not_go_with_several_servers_are_a_usage_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["--api-servers", "4", "--engines", "2", *arguments])
    assert said in capsys.readouterr().err


@needs_extra
@pytest.mark.parametrize(
    ("arguments", "modes"),
    [([], tuple(FLEET_MODES)), (["--kill", "api:2"], (SHARED,)), (["--kill", "engine"], (SHARED,))],
)
def test_the_command_compares_all_modes_of_several_servers_but_with_kill_only_the_shared_store(
    arguments: list[str], modes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute_(settings: RunSettings, source: object, **options: object) -> int:
        assert (3, 2, modes) == (settings.api_servers, settings.engines, options["modes"])
        return 7

    monkeypatch.setattr("examples.demo.main.execute", execute_)
    assert 7 == main(["--api-servers", "3", "--engines", "2", *arguments])
