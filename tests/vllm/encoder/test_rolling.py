"""The guide's recipes: a server ends when its last request has, and several are restarted one after another."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from shmstore.integrations.vllm.shared import STORE
from shmstore.store import ObjectStoreWriter
from tests.support import store_name, until
from tests.vllm.encoder import counting
from tests.vllm.encoder.engine import connector
from tests.vllm.inputs import photograph
from tests.vllm.server import Server

DRAIN = ("--shutdown-timeout", "120")
LONG = 3000
"""Tokens of a request that runs for seconds: meanwhile its server may answer nothing else for half a second."""


def first_token(server: Server, before: float) -> bool:
    return server.metric("vllm:prompt_tokens_total") > before


def test_servers_that_are_drained_and_restarted_one_by_one_make_nothing_again(
    model: Path, tmp_path: Path, lru: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, caches = store_name(), [store_name(), store_name()]
    transfer = ("--ec-transfer-config", json.dumps(connector(outputs, engines=2)))
    for name, value in counting.environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def start(number: int) -> Server:
        monkeypatch.setenv(STORE, caches[number])
        settings = (*transfer, *DRAIN, "--mm-processor-cache-gb", "0.02", "--max-num-seqs", "2")
        return Server(model, tmp_path / f"{number}.log", *settings)

    def made_for(server: Server) -> tuple[int, int]:
        """Return how many images are processed and encoded when the server is asked about one."""
        before = counting.processed(tmp_path), counting.calls(tmp_path)
        assert (200, [lru["photographs"][0]]) == server.ask(photograph(0))
        return counting.processed(tmp_path) - before[0], counting.calls(tmp_path) - before[1]

    servers = [start(number) for number in range(2)]
    try:
        for one in servers:
            one.wait()
        assert [(1, 1), (1, 0)] == [made_for(one) for one in servers]
        for number, one in enumerate(servers):
            before = one.metric("vllm:prompt_tokens_total")
            connection = one.send(photograph(0), max_tokens=LONG)
            until(partial(first_token, one, before))
            os.kill(one.process.pid, signal.SIGTERM)
            status, (tokens,) = one.answer(connection)
            assert (200, LONG) == (status, len(tokens))
            one.process.wait(60)
            assert (0, 0) == made_for(servers[1 - number])
            servers[number] = start(number)
            servers[number].wait()
            assert (0, 0) == made_for(servers[number])
    finally:
        for one in servers:
            one.stop(signal.SIGKILL)
        for name in (outputs, *caches):
            ObjectStoreWriter.unlink(name)
