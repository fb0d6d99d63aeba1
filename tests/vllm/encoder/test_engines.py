"""Real engines with the connector: what is encoded, over meetings, deaths and restarts; tokens are those without it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmstore.cli.main import main as shmstore
from shmstore.inspect.inspector import StoreInspector
from shmstore.store import ObjectStoreWriter
from tests.support import store_name
from tests.vllm.encoder import counting
from tests.vllm.encoder.counting import calls
from tests.vllm.encoder.engine import Engine, connector, engines
from tests.vllm.inputs import photograph
from tests.vllm.server import server

IMAGES = 8
Lru = Callable[..., dict[str, list[list[int]]]]


class Host:
    """A folder in which calls are counted, and the name of a store."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.name = model, folder, store_name()

    def engines(self, *settings: dict[str, Any], **options: Any) -> Any:
        config = connector(self.name, **options)
        return engines(self.model, self.folder, *({"ec_transfer_config": config} | each for each in settings))

    def calls_during(self, work: Callable[[], Any]) -> int:
        before = calls(self.folder)
        work()
        return calls(self.folder) - before


@pytest.fixture(scope="module")
def host(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(model, tmp_path_factory.mktemp("encoder"))
    yield made
    if Path("/dev/shm", made.name).exists():
        ObjectStoreWriter.unlink(made.name)


def ask_each(engine: Engine, expected: list[list[int]]) -> None:
    assert expected == [tokens for number in range(len(expected)) for tokens in engine.ask([number])]


def test_three_engines_that_meet_each_image_twice_encode_it_once(host: Host, lru: Lru) -> None:
    expected = lru()["photographs"][:IMAGES]
    prompts = [[number] for number in range(IMAGES)] * 2
    with host.engines({}, {}, {}) as three:

        def all_at_once() -> None:
            for one in three:
                one.send({"ask": prompts})
            assert [expected * 2] * 3 == [one.wait() for one in three]

        assert IMAGES == host.calls_during(all_at_once)
        for one in three:
            one.kill()  # with all of its processes, as when power fails


def test_after_the_death_of_all_two_engines_encode_only_what_is_new(host: Host, lru: Lru) -> None:
    tp = {"tensor_parallel_size": 2}
    with host.engines({}, tp, share_uuids=True) as (one, two):
        assert 0 == host.calls_during(lambda: ask_each(one, lru()["photographs"][:IMAGES]))
        assert 0 == host.calls_during(lambda: ask_each(two, lru(**tp)["photographs"][:IMAGES]))
        new = len(lru(**tp)["photographs"]) - IMAGES
        assert 2 * new == host.calls_during(lambda: ask_each(two, lru(**tp)["photographs"]))  # in both ranks
        assert 0 == host.calls_during(lambda: ask_each(one, lru()["photographs"]))

        # One name for two pictures, in either order: each engine answers about its own.
        small, large = (224, 168), (448, 336)
        for name, first, second in (("kitten-1", large, small), ("kitten-2", small, large)):
            own = one.ask([31], size=second)
            two.ask([30], size=first, uuids=[[name]])
            assert own == one.ask([31], size=second, uuids=[[name]])
            assert own == one.ask([31], size=second)

        # New weights: what was stored before is not found, by this engine.
        assert 1 == host.calls_during(lambda: one.ask([0], reset=True))
        assert 0 == host.calls_during(lambda: one.ask([0]))
        assert 0 == host.calls_during(lambda: two.ask([0]))


def test_only_the_store_stays_and_a_command_removes_it(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreInspector.open(host.name) as inspector:
        assert not any(reader.state == "alive" for reader in inspector.readers())
        assert not any(slot.pinned_by or slot.leased_to for slot in inspector.slots())
    assert 0 == shmstore(["gc", host.name, "--yes", "--force"])
    assert not Path("/dev/shm", host.name).exists()


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_killed_in_its_encoder_is_replaced_by_the_one_that_waits(
    host: Host, lru: Lru, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--ec-transfer-config", json.dumps(connector(host.name)), "--mm-processor-cache-gb", "0.02")
    for name, value in counting.environment(host.folder, "hold-one").items():
        monkeypatch.setenv(name, value)
    with server(host.model, host.folder / "one.log", *settings) as one:
        monkeypatch.setenv(counting.HOLD, str(host.folder / "none"))
        with server(host.model, host.folder / "two.log", *settings) as two:
            (host.folder / "hold-one").touch()
            before = calls(host.folder)
            lost = one.send(photograph(3))
            until(lambda: calls(host.folder) == before + 1)
            waits = two.send(photograph(3))
            until(lambda: two.metric("shmstore_encoder_deferred_total") == 1)
            assert 200 == two.ask(text="and without a picture")[0]
            one.stop(signal.SIGKILL)
            answer = waits.getresponse()
            said = json.loads(answer.read())
            assert (200, lru()["photographs"][3]) == (answer.status, said["choices"][0]["token_ids"])
            assert calls(host.folder) == before + 2
            shown = [two.metric(f"shmstore_encoder_{name}_total") for name in ("encoded", "stored", "unclaimed")]
            assert [1, 1, 0] == shown
            lost.close()
            waits.close()
    os.unlink(host.folder / "hold-one")
    ObjectStoreWriter.unlink(host.name)
