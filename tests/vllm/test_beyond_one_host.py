"""Two `vllm serve` with stores of their own, as on two hosts, and one tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.inputs import photograph
from tests.vllm.server import END, Server, server

IMAGES = 4


def asked(running: Server) -> list[list[int]]:
    return [running.ask(photograph(number))[1][0] for number in range(IMAGES)]


def test_the_second_host_processes_nothing_that_the_first_has_seen(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lru: Callable[[], dict[str, list[list[int]]]],
) -> None:
    (tmp_path / "tier").mkdir()
    monkeypatch.setenv("SHMSTORE_TIER", (tmp_path / "tier").as_uri())
    settings = ("--mm-processor-cache-gb", "0.1", "--max-num-seqs", "2")
    with server(model, tmp_path / "first", *settings) as first:
        tokens = asked(first)
        assert IMAGES == first.images_processed(IMAGES)
        deadline = time.monotonic() + END
        while first.metric("shmstore_tier_published_total") < IMAGES:  # a thread sends them
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with server(model, tmp_path / "second", *settings) as second:
        assert tokens == asked(second) == lru()["photographs"][:IMAGES]
        assert 0 == second.images_processed(IMAGES)
        assert IMAGES == second.metric("shmstore_tier_hits_total")
