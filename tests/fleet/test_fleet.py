"""Several API servers and engines: real processes, one of them killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.demo.images import ImageError
from examples.demo.processing import item_bytes
from examples.demo.supervisor import DemoError, Observer
from tests.demo.items import BrokenImage, FailingProcessor, NotedItems, RandomItems
from tests.demo.test_demo import _leaves_nothing_behind
from tests.fleet.fleet import FLEET_MODES, SHARED, run_fleet
from tests.fleet.records import FleetReport, FleetSettings

assert _leaves_nothing_behind  # a fixture of every test here, too

ROWS = (10, 20, 30, 40, 50, 60, 70, 300)


def run(settings: FleetSettings, source: Any, *modes: str) -> FleetReport:
    return run_fleet(settings, source, modes=modes, observer=Observer())


def test_only_one_store_for_all_servers_processes_each_image_once(
    tmp_path: Path,
) -> None:
    source = NotedItems(rows=ROWS, notes=tmp_path / "processed")
    report = run(FleetSettings(workers=1, rounds=4, api_servers=2, engines=2), source, *FLEET_MODES)
    sizes = [item_bytes(picture.process()[0]) for picture in RandomItems(rows=ROWS)]
    assert (8, sum(sizes)) == (report.distinct_items, report.distinct_bytes)
    pickle, own, shared = report.modes.values()
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
    assert 8 + sum(figures.processed for figures in report.modes.values()) == len(lines), "and once to know each"
    assert 2 == len(set(lines))


@pytest.mark.parametrize(("kill", "recovered"), [("api:1", True), ("worker:1", False), ("engine", False)])
def test_the_others_go_on_when_a_process_is_killed_and_its_successor_loses_nothing(kill: str, recovered: bool) -> None:
    settings = FleetSettings(workers=1, rounds=3, api_servers=2, engines=2, kill=kill)
    report = run(settings, RandomItems(rows=ROWS), SHARED)
    figures = report.modes[SHARED]
    assert report.successor is not None
    assert (24, 24, 0) == (figures.requests, figures.checked, figures.mismatches)
    assert figures.processed <= 8, "what was processed before the kill is a hit after it"
    assert recovered == (report.successor.recovered > 0)
    assert 0 < report.successor.back_s < figures.total_s


def test_a_defect_and_a_broken_image_end_it_as_they_end_a_run_of_one_server() -> None:
    settings = FleetSettings(workers=1, api_servers=2)
    with pytest.raises(DemoError, match="API server 0: ZeroDivisionError: a defect"):
        run(settings, FailingProcessor(), SHARED)
    with pytest.raises(ImageError, match=r"broken\.png: truncated"):
        run(settings, BrokenImage(), SHARED)
