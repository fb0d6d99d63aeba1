"""Several API servers: each shows the sums of the store, whichever of its writers is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import Stores

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed; `make test` installs it")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from shmstore import ObjectStoreWriter
from shmstore.integrations.totals import show_totals


def scrape() -> str:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def test_a_scrape_sums_over_the_writers_of_the_last_store(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(MultiProcessCollector, "collect", MultiProcessCollector.collect)  # it comes back after the test
    (tmp_path / "file").touch()
    for gone in ("another-store", f"{tmp_path}/file/store"):
        show_totals(gone)
        assert "shmstore" not in scrape()
    first = stores.create(n_writers=2)
    with ObjectStoreWriter.join(first.handle) as second:
        first.put("a", b"1", kind="image")
        second.put("b", b"2", kind="image")
        second.get_cached("a")
        show_totals(first.name)
        shown = scrape()
    for name, value in {"puts": 2, "leases": 3, "hits": 1}.items():
        assert [f'shmstore_{name}_total{{store="{first.name}"}} {value}.0'] == [
            line for line in shown.splitlines() if line.startswith(f"shmstore_{name}_total")
        ]
    assert f'shmstore_kind_objects{{kind="image",store="{first.name}"}} 2.0' in shown
    first.close()
    assert "shmstore" not in scrape()
