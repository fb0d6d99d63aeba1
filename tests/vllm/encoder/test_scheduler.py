"""vLLM's schedulers with the connector, and a stand-in that encodes: what they hold, claim, share and let go."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, Gauge, Histogram
from prometheus_client import Counter as Counted
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ECConnectorOutput

from shmstore.inspect.inspector import StoreInspector
from shmstore.integrations.vllm.encoder import ShmstoreECConnector, worker
from shmstore.integrations.vllm.encoder_cache import EncoderManager
from shmstore.serde import PickleSerde
from shmstore.store import ObjectStoreReader, ObjectStoreWriter
from tests.support import store_name
from tests.vllm import lockstep
from tests.vllm.encoder.engine import connector
from tests.vllm.test_scheduler import ENCODER

WIDTH = 4
RIGHT = torch.ones(20, WIDTH)
WRONG = (
    *(None, 7, "text", b"bytes", (), [RIGHT], {"output": RIGHT}, RIGHT.numpy(), RIGHT.double(), RIGHT.int()),
    *(RIGHT[1:], torch.ones(21, WIDTH), RIGHT[:, 0], RIGHT[None], RIGHT[:, :0], RIGHT[:, 1:]),
)
"""What some program may store under the key of an output."""


def sent(**fields: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(value, MultiModalBatchedField()) for name, value in fields.items()}
    )


PIXELS = sent(pixel_values=torch.ones(1), image_grid_thw=torch.ones(3))


def named(picture: int | str) -> str:
    """Return what vLLM's hash of a picture looks like."""
    return hashlib.sha256(str(picture).encode()).hexdigest()


def encoded(identifier: str, embeds: int) -> torch.Tensor:
    number = int(hashlib.md5(f"{identifier} {embeds}".encode(errors="replace")).hexdigest()[:6], 16)
    return torch.full((embeds, WIDTH), float(number))


class Engine(lockstep.Engine):
    """A scheduler with the connector, and a worker that checks what it would gather."""

    def __init__(self, model: Path, config: Any, blocks: int) -> None:
        cls = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.connector = ShmstoreECConnector(config, ECConnectorRole.WORKER)
        super().__init__(cls, config, lockstep.kv_cache_config(blocks, lockstep.full()))
        self.side = self.scheduler.ec_connector._scheduler
        self.cache: dict[str, torch.Tensor] = {}
        self.encodes = self.loads = self.freed = 0
        self.figures: Counter[str] = Counter()
        self.during: Callable[[], object] = lambda: None

    def ask(
        self, name: str, *pictures: int | str, size: int = 20, tokens: int = 3, start: int = 5, **about: Any
    ) -> None:
        images = [
            (what if isinstance(what, str) else named(what), start + i * (size + 3), size)
            for i, what in enumerate(pictures)
        ]
        prompt = list(range(5 + start + len(pictures) * (size + 3)))
        self.add(name, prompt, tokens, images, **{"data": PIXELS} | about)

    def run(self, limit: int = 400) -> None:
        """Step until no request is left."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("requests are left")

    def step(self) -> tuple[Any, Any]:
        said, out = super().step()
        self.figures.update(self.stats or {})
        if not said["tokens"]:
            time.sleep(0.001)  # as vLLM's engine does
        return said, out

    def encode(self, output: Any) -> Any:
        for identifier in output.free_encoder_mm_hashes:
            self.freed += 1
            self.cache.pop(identifier, None)
        if not output.total_num_scheduled_tokens:
            return None  # as a worker, which returns at once
        self.connector.bind_connector_metadata(output.ec_connector_metadata)
        self.connector.start_load_caches(self.cache)
        self.loads += len(output.ec_connector_metadata.loads)
        self.during()
        for request_id, inputs in output.scheduled_encoder_inputs.items():
            for index in inputs:
                feature = self.features[request_id][index]
                self.encodes += 1
                self.cache[feature.identifier] = encoded(feature.identifier, feature.mm_position.get_num_embeds())
                self.connector.save_caches(self.cache, feature.identifier)
        for request_id, (start, count) in self.windows(output).items():
            for feature in self.features[request_id]:
                place = feature.mm_position
                if place.offset < start + count and place.offset + place.length > start:
                    right = encoded(feature.identifier, place.get_num_embeds())
                    assert torch.equal(right, self.cache[feature.identifier]), "the engine would be dead"
        report = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return ECConnectorOutput(ec_connector_worker_meta=report)

    def add(self, name: str, *given: Any, **about: Any) -> None:
        super().add(name, *given, **about)
        self.features = getattr(self, "features", {}) | {name: self.scheduler.requests[name].mm_features}

    def windows(self, output: Any) -> dict[str, tuple[int, int]]:
        """Return where each request computes in this step, and how many tokens."""
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {name: (starts[name], count) for name, count in output.num_scheduled_tokens.items()}


class Host:
    """Engines that share a store, and a look at it from outside."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.name = store_name()
        self.engines: list[Engine] = []
        self._outside: ObjectStoreReader | None = None

    def engine(
        self, blocks: int = 100, settings: dict[str, Any] | None = None, role: str = "ec_both", **options: Any
    ) -> Engine:
        transfer = ECTransferConfig(**connector(self.name, **options) | {"ec_role": role})
        about = settings or {}
        config = lockstep.vllm_config(
            self.model, blocks, skip_tokenizer_init=False, dtype="float32", ec_transfer_config=transfer, **about
        )
        transfer.mm_encoder_output_widths = {"image": WIDTH}  # as vLLM measures them
        config.scheduler_config.async_scheduling = about.get("async_scheduling", False)
        self.engines.append(Engine(self.model, config, blocks))
        return self.engines[-1]

    @property
    def outside(self) -> ObjectStoreReader:
        if self._outside is None:
            self._outside = ObjectStoreReader.attach(self.name, None, finds_only=True)
        return self._outside

    def claimed(self, engine: Engine, picture: int | str, size: int = 20) -> bool:
        identifier = picture if isinstance(picture, str) else named(picture)
        return self.outside.claimed(f"{identifier}/{size}", namespace=engine.side._scope.name)

    def stored(self, engine: Engine, picture: int | str, size: int = 20) -> bool:
        identifier = picture if isinstance(picture, str) else named(picture)
        return self.outside.has(f"{identifier}/{size}", namespace=engine.side._scope.name)

    def holds(self) -> int:
        """Return how many pins there are in the store."""
        with StoreInspector.open(self.name) as inspector:
            return sum(len(slot.pinned_by) for slot in inspector.slots())

    def close(self) -> None:
        for engine in self.engines:
            engine.scheduler.ec_connector.shutdown()
            engine.connector.shutdown()
        if self._outside is not None:
            self._outside.close()
        ObjectStoreWriter.unlink(self.name)


@pytest.fixture
def host(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    group = SimpleNamespace(rank_in_group=0, is_first_rank=True)
    monkeypatch.setattr(worker, "get_tp_group", lambda: group)
    monkeypatch.setattr(worker, "get_pp_group", lambda: group)
    made = Host(model)
    yield made
    made.close()


def test_what_one_engine_has_encoded_another_loads(host: Host) -> None:
    one, two = host.engine(), host.engine()
    one.ask("a", 1, 2)
    one.run()
    two.ask("b", 2, 1, 3)
    two.run()
    assert (2, 0) == (one.encodes, one.loads)
    assert (1, 2) == (two.encodes, two.loads)
    assert 0 == host.holds()
    assert not any(host.claimed(engine, picture) for engine in (one, two) for picture in (1, 2, 3))


def test_an_item_is_claimed_while_its_step_runs_and_others_wait(host: Host) -> None:
    one, two = host.engine(), host.engine()
    one.ask("a", 1)
    two.ask("b", 1)
    seen = []

    def meanwhile() -> None:
        seen.append(host.claimed(one, 1))
        said, _ = two.step()
        seen.append(said["tokens"])

    one.during = meanwhile
    one.step()
    assert [True, {}] == seen
    assert not host.claimed(one, 1)
    two.run()
    one.during = lambda: None
    one.run()
    assert (0, 1) == (two.encodes, two.loads)


def test_all_items_of_a_request_are_claimed_or_none(host: Host) -> None:
    one, two = host.engine(), host.engine()
    one.ask("a", 2)
    two.ask("b", 1, 2, 3)

    def meanwhile() -> None:
        two.step()
        assert not two.scheduler.running
        assert [False, True, False] == [host.claimed(one, picture) for picture in (1, 2, 3)]

    one.during = meanwhile
    one.step()
    two.run()
    assert (2, 1) == (two.encodes, two.loads)


def test_a_request_waits_only_so_long_and_then_its_engine_encodes(host: Host) -> None:
    one, two = host.engine(), host.engine(wait_s=0.05)
    one.ask("a", 1)
    two.ask("b", 1)
    one.during = two.run
    one.step()
    assert 1 == two.encodes
    assert (1, 1) == (two.figures["deferred"], two.figures["unclaimed"])


def test_without_single_flight_nobody_waits_or_claims(host: Host) -> None:
    one, two = host.engine(single_flight=False), host.engine(single_flight=False)
    one.ask("a", 1)
    two.ask("b", 1)
    claims: list[bool] = []

    def meanwhile() -> None:
        claims.append(host.claimed(one, 1))
        two.step()

    one.during = meanwhile
    one.step()
    assert [False] == claims
    assert (1, 1) == (one.encodes, two.encodes)


def test_nobody_waits_for_an_engine_that_only_reads_once_it_has_noticed(host: Host) -> None:
    host.engine(engines=1)
    reads = host.engine(engines=1)
    claims: list[bool] = []
    reads.during = lambda: claims.append(host.claimed(reads, 1) or host.claimed(reads, 2))
    for picture in (1, 2):
        reads.ask(f"r{picture}", picture, tokens=1)
        reads.run()
    assert ([True, False], 2) == (claims, reads.encodes)
    assert 2 == reads.figures["unstored"]


def test_what_was_found_and_is_not_scheduled_is_let_go(host: Host) -> None:
    one, two = host.engine(), host.engine(blocks=9)  # of 16 tokens; one request fits
    for picture in (1, 2):
        one.ask(f"p{picture}", picture)
    one.run()
    two.add("large", list(range(100)), 20)
    two.ask("b", 1, 2, tokens=30)
    two.step()
    assert "b" in {request.request_id for request in two.scheduler.waiting}
    assert 0 == host.holds()
    two.run()
    assert (0, 2) == (two.encodes, two.loads)
    assert 0 == host.holds()


def test_claims_of_what_is_not_scheduled_are_given_back(host: Host) -> None:
    one = host.engine(blocks=9)
    one.add("large", list(range(100)), 20)
    one.ask("b", 1, 2, tokens=30)
    one.step()
    assert "b" in {request.request_id for request in one.scheduler.waiting}
    assert not host.claimed(one, 1)


def test_a_request_may_end_at_any_time(host: Host) -> None:
    one, two = host.engine(), host.engine()
    one.ask("stored", 1)
    one.run()
    for steps in range(4):
        two.ask(f"a{steps}", 1, 10 + steps, tokens=9)
        for _ in range(steps):
            two.step()
        two.abort(f"a{steps}")
        two.step()
        two.step()
        assert 0 == host.holds()
        assert not host.claimed(two, 10 + steps)
    one.ask("waits", 20)

    def meanwhile() -> None:
        two.ask("w", 20)
        two.step()
        two.abort("w")
        one.during = lambda: None

    one.during = meanwhile
    one.run()
    two.run()
    assert {} == two.side._since


def test_only_what_the_hash_of_its_content_names_is_shared(host: Host) -> None:
    one, two = host.engine(), host.engine()
    one.ask("a", "kitten-1")
    one.run()
    two.ask("b", "kitten-1")
    two.run()
    assert (1, 0) == (two.encodes, two.loads)
    assert not host.stored(one, "kitten-1")


def test_a_client_s_name_that_has_no_utf_8_is_not_shared(host: Host) -> None:
    one = host.engine(settings={"enable_prefix_caching": False}, share_uuids=True)
    for request, name in {"a": "kitten-\ud800", "b": "kitten-1"}.items():
        one.ask(request, name)
        one.run()
    assert (2, 1, 0) == tuple(one.figures[figure] for figure in ("encoded", "stored", "unclaimed"))


def test_a_client_s_name_for_another_picture_is_not_found(host: Host) -> None:
    one, two = (host.engine(share_uuids=True) for _ in range(2))
    one.ask("a", "kitten-1", size=20)
    one.run()
    two.ask("b", "kitten-1", size=30)
    two.run()
    assert (1, 0) == (two.encodes, two.loads)  # the worker has checked the sizes
    two.ask("c", "kitten-2", size=30)
    one.ask("d", "kitten-1", size=20)
    two.run()
    one.run()
    assert 1 == one.encodes


def test_a_name_for_two_pictures_of_one_request_is_that_of_the_first_first(host: Host) -> None:
    one, two = (host.engine(share_uuids=True) for _ in range(2))
    one.ask("a", "kitten-1", size=30)
    one.run()
    two.add("b", list(range(240)), 1, [("kitten-1", 5, 20), ("kitten-1", 200, 30)], PIXELS)
    two.run()


def test_what_is_not_an_output_is_no_hit_is_counted_and_made_anew(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = host.engine(), host.engine()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    store, namespace = one.connector._worker._writer, one.side._scope.name
    with ObjectStoreWriter.join(store.handle, serde=PickleSerde()) as pickles:
        for number, value in enumerate((*WRONG, RIGHT)):
            (pickles if value is RIGHT else store).put(f"{named(number)}/20", value, namespace=namespace)
    for number in range(len(WRONG) + 1):
        for engine in (one, two) if number % 2 else (two, one):
            engine.ask(f"r{number}", number)
            engine.run()
    figures = one.figures + two.figures
    del figures["stored_bytes"]
    assert dict.fromkeys(("wrong", "encoded", "stored", "hits"), len(WRONG) + 1) == figures
    assert 2 == len({record.args for record in caplog.records if "something other" in record.msg})  # once an engine
    assert set() == one.side._wrong | two.side._wrong


def test_prompt_embeddings_are_not_stored(host: Host) -> None:
    one = host.engine()
    one.ask("a", 1)
    one.scheduler.requests["a"].mm_features[0].modality = "prompt_embeds"
    one.run()
    assert not host.stored(one, 1)


@pytest.mark.parametrize("nothing", [None, sent(image_grid_thw=torch.ones(3))], ids=["no data", "only its size"])
def test_a_request_without_content_fails_if_the_store_has_lost_its_item(host: Host, nothing: Any) -> None:
    one, two = host.engine(), host.engine()
    one.ask("a", 1)
    one.run()
    two.ask("b", 1, data=nothing)  # its client has the output made elsewhere
    two.run()
    assert 3 == len(two.tokens["b"])
    two.ask("c", 2, data=nothing)
    two.ask("d", 3)
    two.ask("unshared", "kitten-1", data=nothing)
    one.connector._worker._writer.put(f"{named(9)}/20", "text", namespace=one.side._scope.name)
    two.ask("wrong", 9, data=nothing)
    two.run()
    assert [] == two.tokens["c"] == two.tokens["unshared"] == two.tokens["wrong"]
    assert 1 == two.figures["wrong"]
    assert 3 == len(two.tokens["d"])
    assert not host.claimed(two, 2)
    one.ask("e", 4)
    two.ask("f", 4, data=nothing)  # it waits for the one who makes it
    two.ask("g", 5, 6)
    two.ask("h", 5, data=nothing)  # also if that is a request of its own engine
    one.during = two.step
    one.step()
    assert [] == two.tokens["f"]
    two.ask("twice", 7, 7)
    two.scheduler.requests["twice"].mm_features[1].data = nothing  # the first one is encoded
    two.run()
    assert [3, 3, 3, 3] == [len(two.tokens[name]) for name in ("f", "g", "h", "twice")]


def test_a_consumer_waits_for_what_it_cannot_encode_and_for_nothing_else(host: Host) -> None:
    one, two = host.engine(), host.engine(role="ec_consumer")
    for picture in (1, 2):
        one.ask(f"p{picture}", picture)
    two.ask("without", 1, data=None)
    two.ask("with", 2)
    one.during = two.step
    one.step()
    assert ([], 1) == (two.tokens["without"], len(two.tokens["with"]))
    one.during = lambda: None
    two.ask("new", 3)
    claims: list[bool] = []
    two.during = lambda: claims.append(host.claimed(two, 3))
    two.run()
    assert [3, 3, 3] == [len(tokens) for tokens in two.tokens.values()]
    assert ({False}, 2, 1) == (set(claims), two.encodes, two.loads)
    assert not host.stored(two, 3)


def test_a_picture_that_a_step_needs_twice_is_claimed_once(host: Host) -> None:
    one = host.engine()
    one.ask("a", 1, 1)
    one.ask("b", 1)
    one.step()
    assert (1, 0) == (one.encodes, one.figures["deferred"])


def test_a_close_lets_go_what_steps_hold_that_are_under_way(host: Host) -> None:
    one, two = host.engine(settings={"async_scheduling": True}), host.engine()
    two.ask("stored", 2)
    two.run()
    one.ask("a", 1, 2)
    one.step()
    assert (True, 1) == (host.claimed(two, 1), host.holds())
    one.scheduler.ec_connector.shutdown()
    assert (False, 0) == (host.claimed(two, 1), host.holds())


def test_an_item_without_content_that_vllm_s_own_cache_loses_in_the_same_step_is_not_encoded(host: Host) -> None:
    one = host.engine(settings={"enable_prefix_caching": False})
    one.take_images(cache=60, budget=200)
    for picture in ("x", "z"):
        one.ask(picture, named(picture))
        one.run()
    one.connector._worker._writer.clear()
    one.ask("y", named("y"), size=30)  # x goes for it
    one.ask("c", named("x"), data=None)
    one.run()
    assert [] == one.tokens["c"]


def test_a_name_that_another_picture_had_in_the_worker_s_cache_is_loaded_again(host: Host) -> None:
    one, two = (host.engine(settings={"enable_prefix_caching": False}, share_uuids=True) for _ in range(2))
    one.ask("a", "kitten", size=30)
    one.run()
    two.take_images(cache=80, budget=200)
    for name in ("kitten", "z"):
        two.ask(name, name, size=20)
        two.run()
    two.ask("large", "y", size=45)
    two.add("new", list(range(60)), 3, [("kitten", 5, 30)], PIXELS)
    two.run()
    assert 3 == len(two.tokens["new"])


def test_no_question_about_what_is_computed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one = host.engine()
    asked: Any = []
    key = one.side._key
    monkeypatch.setattr(one.side, "_key", lambda feature: asked.append(feature) or key(feature))
    one.ask("a", 1, tokens=20)
    one.run()
    assert 2 == len(asked)  # before its prefill, and when it has a place


@pytest.mark.parametrize("prefix_caching", [True, False])  # it hides the items from the connector, or not
def test_a_hot_item_of_the_engine_s_own_cache_stays_in_the_store(host: Host, prefix_caching: bool) -> None:
    one = host.engine(settings={"enable_prefix_caching": prefix_caching}, capacity_gb=40 * 20 * WIDTH * 4 / 2**30)
    one.take_images(cache=200, budget=200)
    one.ask("hot", named("hot"))
    one.run()
    for picture in range(100):
        one.ask(f"cold{picture}", picture)
        one.ask(f"again{picture}", named("hot"))
        one.run()
    assert host.stored(one, named("hot"))
    assert not host.stored(one, 1)
    assert 101 == one.encodes


def test_what_vllm_asks_for_is_looked_up_even_if_its_own_cache_should_have_it(host: Host) -> None:
    one, two = host.engine(), host.engine()
    one.ask("a", 1)
    one.run()
    two.side._local.add(named(1))
    two.ask("b", 1)
    two.run()
    assert (0, 1) == (two.encodes, two.loads)


def test_what_vllm_s_own_cache_has_lost_is_claimed_again(host: Host) -> None:
    one = host.engine(settings={"enable_prefix_caching": False})
    one.take_images(cache=25, budget=100)
    for picture in (1, 2):
        one.ask(f"p{picture}", picture)
        one.run()
    one.connector._worker._writer.clear()
    one.ask("again", 1)
    claims: Any = []
    one.during = lambda: claims.append(host.claimed(one, 1))
    one.run()
    assert (3, True) == (one.encodes, claims[0])


def test_new_weights_begin_a_namespace(host: Host) -> None:
    one = host.engine(settings={"enable_prefix_caching": False})
    one.ask("a", 1)
    one.run()
    one.scheduler.reset_encoder_cache()
    one.cache.clear()
    one.ask("b", 1)
    claims: Any = []
    one.during = lambda: claims.append(host.claimed(one, 1))
    one.run()
    assert 2 == one.encodes
    assert claims[0]


@pytest.mark.parametrize("settings", [{}, {"ec_manager_config": ENCODER}], ids=["vllm's", "ours"])
def test_an_engine_that_is_reset_parts_from_others_and_says_so_once(
    host: Host, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = host.engine(settings=settings), host.engine(settings=settings)
    one.take_images(100, 100)
    one.ask("a", 1, 2)
    one.run()
    for start in (6, 7):
        one.scheduler.vllm_config.instance_id = f"{start}"  # as vLLM does when it has sized the KV cache
        one.scheduler.reset_encoder_cache()
        one.cache.clear()
        one.ask(f"from {start}", 1, start=start)
        one.run()
    two.ask("b", 2)
    two.run()
    assert (4, 0) == (one.encodes, two.encodes)
    assert (1, 0) == (one.figures["apart"] > 0, two.figures["apart"])
    assert 1 == sum("until its restart" in record.message for record in caplog.records)


def test_the_gauge_of_an_engine_that_shares_with_no_other_is_1() -> None:
    engines = {number: [str(number)] for number in range(2)}
    shown = ShmstoreECConnector.build_prom_metrics(
        SimpleNamespace(ec_transfer_config=None), {one: one for one in (Counted, Gauge, Histogram)}, ["engine"], engines
    )
    shown.observe({"hits": 2, "apart": 1}, 1)
    names = ("shmstore_encoder_hits_total", "shmstore_encoder_apart")
    assert [(0, 0), (2, 1)] == [
        tuple(REGISTRY.get_sample_value(name, {"engine": str(number)}) for name in names) for number in engines
    ]


def test_engines_whose_weights_follow_the_files_meet_again_after_a_reset(host: Host, tmp_path: Path) -> None:
    """A pause without new files ends nothing; engines that have loaded the same new files share what they make."""
    host.model = shutil.copytree(host.model, tmp_path / "model")
    one, two = (host.engine(weights="files", single_flight=False) for _ in range(2))
    made = []
    for number, new_files in enumerate((False, True)):
        if new_files:
            os.utime(next(host.model.glob("*.safetensors")))
        for engine in (one, two):
            engine.ask(f"before {number}", 1, start=5 + 2 * number)
            engine.run()
            engine.scheduler.reset_encoder_cache()
            engine.cache.clear()
        for engine in (one, two):
            engine.ask(f"after {number}", 1, start=6 + 2 * number)
            engine.run()
        made.append((one.encodes, two.encodes))
    assert [(1, 0), (2, 0)] == made
    assert not any(engine.figures["apart"] for engine in (one, two))


def test_a_load_of_a_step_without_tokens_is_sent_with_the_next(host: Host) -> None:
    one, two = host.engine(), host.engine()
    one.ask("a", 1, 2)
    one.run()
    two.ask("b", 1, 2)
    request = two.scheduler.requests["b"]
    assert two.side.ensure(request, 0)
    for index in (0, 1):
        assert two.side.has(request.mm_features[index].identifier)
        two.side.allocate(request, index)
    empty = {"scheduled_encoder_inputs": {}, "free_encoder_mm_hashes": [], "total_num_scheduled_tokens": 0}
    assert {} == two.side.build(SimpleNamespace(**empty)).loads
    assert 2 == host.holds()
    freed = empty | {"free_encoder_mm_hashes": [named(1)], "total_num_scheduled_tokens": 1}
    step = two.side.build(SimpleNamespace(**freed))
    assert {named(2)} == step.loads.keys()
    two.side.lost()
    assert 1 == host.holds()  # the output of the empty step has come
    two.side.lost()
    assert 0 == host.holds()


@pytest.mark.parametrize("calls", [0, 2])
def test_an_engine_that_tells_of_no_output_or_of_each_twice_goes_on(
    host: Host, calls: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What its steps hold is released, if late, and the log says so once."""
    one = host.engine(settings={"enable_prefix_caching": False})
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    lost = one.side.lost
    monkeypatch.setattr(one.side, "lost", lambda: set().union(*(lost() for _ in range(calls))))
    for picture in range(50):
        one.ask(f"r{picture}", picture)
        one.run()
    assert 50 == one.encodes == sum(len(tokens) == 3 for tokens in one.tokens.values())
    assert (0 if calls else 64) == len(one.side._under_way)
    assert not host.claimed(one, 1)
    assert 1 == len({record.created for record in caplog.records if "than steps" in record.msg})


def test_a_claim_on_an_item_that_a_preemption_has_taken_out_of_its_step_ends(host: Host) -> None:
    one = host.engine()
    one.ask("a", 1)
    request = one.scheduler.requests["a"]
    assert one.side.ensure(request, 0)
    assert not one.side.has(named(1))
    assert host.claimed(one, 1)
    one.side.allocate(request, 0)
    without = {"scheduled_encoder_inputs": {}, "free_encoder_mm_hashes": [], "total_num_scheduled_tokens": 1}
    assert {} == one.side.build(SimpleNamespace(**without)).saves
    assert not host.claimed(one, 1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": True}, {"scheduling_policy": "priority"}, {"ec_manager_config": ENCODER}],
    ids=lambda settings: " ".join(settings),
)
def test_two_engines_that_are_asked_at_random_share_and_leave_nothing(host: Host, settings: dict[str, Any]) -> None:
    rng = random.Random(" ".join(settings))
    engines = [host.engine(30, settings | {"scheduler_reserve_full_isl": False}, wait_s=0.01) for _ in range(2)]
    for engine in engines:
        engine.take_images(cache=50, budget=100)
        assert ("ec_manager_config" in settings) == isinstance(engine.scheduler.encoder_cache_manager, EncoderManager)
    for number in range(300):
        engine = rng.choice(engines)
        if rng.random() < 0.5:
            pictures = [rng.randrange(30) for _ in range(rng.randrange(4))]
            about = {"priority": rng.randrange(3)} if "scheduling_policy" in settings else {}
            start = rng.choice((5, 5, 140))  # in a later step than its first
            engine.ask(f"r{number}", *pictures, tokens=rng.randrange(1, 60), start=start, **about)
        if rng.random() < 0.1 and (names := list(engine.scheduler.requests)):
            engine.abort(rng.choice(names))
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
        other = engines[1 - engines.index(engine)]
        engine.during = other.step if rng.random() < 0.3 else lambda: None
        engine.step()
        engine.during = lambda: None
    for engine in engines:
        engine.run(4000)
        assert {} == engine.side._held | engine.side._loads
        assert not any(engine.side._under_way)
    assert 0 == host.holds()
    assert sum(engine.freed for engine in engines) > 10
    assert sum(engine.loads for engine in engines) > 10
    assert not any(host.claimed(engines[0], picture) for picture in range(30))
