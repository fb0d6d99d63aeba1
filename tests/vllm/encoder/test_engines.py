"""Real engines with the connector: what is encoded, over meetings, deaths and restarts; tokens are those without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmstore.cli.main import main as shmstore
from shmstore.inspect.inspector import StoreInspector
from shmstore.integrations.vllm.shared import STORE
from shmstore.store import ObjectStoreWriter
from tests.support import store_name
from tests.vllm.encoder.counting import calls, processed
from tests.vllm.encoder.engine import Engine, connector, engines

IMAGES = 8
Lru = dict[str, list[list[int]]]


class Host:
    """A folder in which calls are counted, the name of the connector's store, and that of the first engine's cache."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.name, self.cache = model, folder, store_name(), store_name()
        self.first = {"cache": "shm", "env": {"SHMSTORE_VLLM": "strict", STORE: self.cache}}

    def engines(self, *settings: dict[str, Any]) -> Any:
        config = connector(self.name, share_uuids=True)
        return engines(self.model, self.folder, *({"ec_transfer_config": config} | each for each in settings))

    def encodes_during(self, work: Callable[[], Any]) -> int:
        before = calls(self.folder)
        work()
        return calls(self.folder) - before


@pytest.fixture(scope="module")
def host(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(model, tmp_path_factory.mktemp("encoder"))
    yield made
    for name in (made.name, made.cache):
        if Path("/dev/shm", name).exists():
            ObjectStoreWriter.unlink(name)


def ask_each(engine: Engine, expected: list[list[int]]) -> None:
    assert expected == [tokens for number in range(len(expected)) for tokens in engine.ask([number])]


def test_two_engines_that_meet_each_image_twice_encode_it_once(host: Host, lru: Lru) -> None:
    prompts = [[number] for number in range(IMAGES)] * 2
    with host.engines(host.first, {"tensor_parallel_size": 2}) as (one, two):

        def both_at_once() -> None:
            for each in (one, two):
                each.send({"ask": prompts})
            assert [lru["photographs"][:IMAGES] * 2] * 2 == [each.wait() for each in (one, two)]

        assert IMAGES == host.encodes_during(both_at_once)

        # One name for two pictures, in either order: each engine answers about its own.
        small, large = (224, 168), (448, 336)
        for name, first, second in (("kitten-1", large, small), ("kitten-2", small, large)):
            own = one.ask([31], size=second)
            two.ask([30], size=first, uuids=[[name]])
            assert own == one.ask([31], size=second, uuids=[[name]])
            assert own == one.ask([31], size=second)

        # New weights: what was stored before is not found, by this engine.
        assert 1 == host.encodes_during(lambda: one.ask([0], reset=True))
        assert 0 == host.encodes_during(lambda: one.ask([0]))
        assert 0 == host.encodes_during(lambda: two.ask([0]))
        for each in (one, two):
            each.kill()  # with all of its processes, as when power fails


def test_after_the_death_of_all_an_engine_processes_and_encodes_only_what_is_new(host: Host, lru: Lru) -> None:
    expected = lru["photographs"]
    with host.engines(host.first) as (one,):
        before = processed(host.folder)
        assert 0 == host.encodes_during(lambda: ask_each(one, expected[:IMAGES]))
        assert before == processed(host.folder)
        assert len(expected) - IMAGES == host.encodes_during(lambda: ask_each(one, expected))
        assert len(expected) - IMAGES == processed(host.folder) - before


def test_only_the_store_stays_and_a_command_removes_it(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreInspector.open(host.name) as inspector:
        assert not any(reader.state == "alive" for reader in inspector.readers())
        assert not any(slot.pinned_by or slot.leased_to for slot in inspector.slots())
    assert 0 == shmstore(["gc", host.name, "--yes", "--force"])
    assert not Path("/dev/shm", host.name).exists()
