"""The benchmark against peers: its exchanges are what they are said to be, and what fails is told."""

from collections.abc import Iterator
from typing import Any

import pytest

from bench import peers
from bench.peers import LIMITS, OURS, caches, interface, pipelines
from bench.peers.harness import Measurement, Results
from bench.peers.host import HIT, PUT
from tests.support import FRESH


@pytest.fixture(scope="module", autouse=True)
def _starts_fast() -> Iterator[None]:
    """Let processes of this one have torch loaded; those of a host process load it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "CONTEXT", FRESH)
        yield


@pytest.fixture(scope="module")
def results() -> Results:
    """The whole harness once, small: the limits, shmstore, and a peer that cannot be had."""
    peers.PEERS["absent"] = "bench.peers.nowhere:Nothing"
    try:
        session = Measurement([*LIMITS, OURS, "absent"], 1, idle_seconds=0.1)
        session.measure(4096, 1, budget=10.0, batches=2, at_most=8)
        return session.stop()
    finally:
        del peers.PEERS["absent"]


def test_a_session_has_a_cell_for_each_peer_and_path(results: Results) -> None:
    expected = {(name, 4096, 1, path) for name in (*LIMITS, OURS) for path in (PUT, HIT)}
    assert expected == {(cell.peer, cell.nbytes, cell.n_readers, cell.path) for cell in results.cells}
    for cell in results.cells:
        assert (8, 2) == (cell.samples, len(cell.batches))
        assert 0 < cell.median <= cell.p99
        assert cell.memory > 1 << 20
    assert set(results.idle_memory) == set(results.idle_cpu) == {*LIMITS, OURS}


def test_a_peer_that_cannot_be_imported_is_told_with_the_reason(results: Results) -> None:
    assert ["absent"] == list(results.missing)
    assert "No module named 'bench.peers.nowhere'" in results.missing["absent"]


def test_a_pipeline_carries_its_arrays_in_every_way_and_tells_the_page_beside_reserve(tmp_path: Any) -> None:
    size = pipelines.Size(producers=1, arrays=6, nbytes=1 << 16, ahead=2)
    ways = pipelines.measured(size, 3)
    assert [3, 3, 3, 3] == [len(way.seconds) for way in ways]
    for way, seconds in zip(ways, (1.0, 21.0, 5.0, 2.0), strict=True):
        way.seconds = [seconds * size.total / 1e9] * 3
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- pipelines: begin -->\nold\n<!-- pipelines: end -->\nz\n")
    pipelines.write(page, pipelines.table(ways, size, 3))
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("a\n<!-- pipelines: begin -->\n| way")
    assert text.endswith(".\n<!-- pipelines: end -->\nz\n")
    assert "| `multiprocessing.Queue` | 21.00 | 20.00 | 10.5 times |" in text


def test_a_cache_makes_each_value_once_beside_others_and_tells_the_page(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "`shmstore.Cache`"
    monkeypatch.setitem(caches.WAYS, "absent", lambda folder: __import__("nowhere"))
    found = caches.measured([ours, "absent"], processes=2, values=10, rounds=2)
    assert ([ours], 10) == (list(found), found[ours][2])
    assert 0 < found[ours][0] < found[ours][1]
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- caches: begin -->\nold\n<!-- caches: end -->\nz\n")
    caches.write(page, caches.table({ours: (7e-6, 30e-6, 10)}, 2, 10, 2))
    assert page.read_text().startswith(
        "a\n<!-- caches: begin -->\n| cache | a hit | and all bytes read | values made |\n"
    )
    assert f"| {ours} | 7 µs | 30 µs | 10 |" in page.read_text()
    assert page.read_text().endswith(".\n<!-- caches: end -->\nz\n")
