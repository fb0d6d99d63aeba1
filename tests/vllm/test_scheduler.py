"""vLLM's scheduler with the managers of shmstore does, step by step, what it does with its own."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import DiffusionConfig, KVEventsConfig, KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.config.ec_manager_config import EncoderCacheManagerConfig
from vllm.distributed.kv_events import BlockStored
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import RSWASpec, SlidingWindowSpec

from shmstore.integrations.vllm import scheduler as ours
from shmstore.integrations.vllm.encoder_cache import EncoderManager
from tests.vllm.conftest import change
from tests.vllm.lockstep import SHAPE, Engine, Images, full, kv_cache_config, vllm_config, window

ENCODER = EncoderCacheManagerConfig("shmstore.integrations.vllm.encoder_cache.EncoderManager")

GROUPS: dict[str, tuple[int, list[Any]]] = {
    "full": (40, [full()]),
    "window": (40, [window(40)]),
    "two groups": (60, [full(), window(40)]),
    "three groups": (90, [full(), window(24), window(24)]),
}
"""Blocks, few enough for requests to be preempted, and what the groups keep."""

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "short of blocks": {"scheduler_reserve_full_isl": False},
    "asynchronous": {"async_scheduling": True},
    "asynchronous, short of blocks": {"async_scheduling": True, "scheduler_reserve_full_isl": False},
    "n-gram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    "watermark": {"watermark": 0.1, "scheduling_policy": "priority"},
    "dense windows": {"prefix_cache_retention_interval": None, "scheduler_reserve_full_isl": False},
    "sparse windows": {"prefix_cache_retention_interval": 64, "scheduler_reserve_full_isl": False},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.model import make_text_config

    return make_text_config(tmp_path_factory.mktemp("text"), "full")


def two(
    text: Path, blocks: int, specs: list[Any], eagle: tuple[int, ...] = (), **settings: Any
) -> tuple[Engine, Engine]:
    """Return an engine with vLLM's managers and one with ours."""
    engines = []
    for mine in (False, True):
        config = vllm_config(text, blocks, **settings)
        # On CPUs vLLM turns this off; its scheduler does not know on what the model runs.
        config.scheduler_config.async_scheduling = is_async = settings.get("async_scheduling", False)
        config.ec_manager_config = ENCODER if mine else EncoderCacheManagerConfig()
        cls = ours.Scheduler if mine else AsyncScheduler if is_async else Scheduler
        interval = config.cache_config.prefix_cache_retention_interval
        made = kv_cache_config(blocks, *specs, eagle=eagle, prefix_cache_retention_interval=interval)
        engines.append(Engine(cls, config, made))
    assert isinstance(engines[1].scheduler.kv_cache_manager, ours.KVManager)
    return engines[0], engines[1]


def images_in(length: int, rng: random.Random) -> Images:
    images: list[tuple[str, int, int]] = []
    at = 0
    while True:
        kind = rng.randrange(12)
        at += rng.randrange(10)
        if at + 5 + 4 * kind >= length:
            return images
        images.append((f"image {kind}", at, 5 + 4 * kind))
        at += 5 + 4 * kind


def compare(engines: tuple[Engine, Engine], seed: int = 0, steps: int = 200, with_images: bool = False) -> int:
    """Let requests come, go, be aborted and find each other's prefixes; return how many were preempted in all."""
    theirs, mine = engines
    rng, preempted = random.Random(seed), set()
    beginnings = [[rng.randrange(8) for _ in range(300)] for _ in range(3)]
    hits = 0
    for step in range(steps):
        for _ in range(rng.choice((0, 0, 1, 2)) if len(theirs.scheduler.requests) < 12 else 0):
            prompt = rng.choice(beginnings)[: rng.randrange(1, 200)] + rng.choices(range(8), k=rng.randrange(60))
            about: dict[str, Any] = {"max_tokens": rng.randrange(1, 60), "priority": rng.randrange(3)}
            about["images"] = images_in(len(prompt), rng) if with_images else ()
            about["cache_salt"] = rng.choice((None, None, None, "salt"))
            for engine in engines:
                engine.add(f"r{len(engine.tokens)}", prompt, **about)
        if rng.random() < 0.05 and theirs.scheduler.requests:
            name = rng.choice(sorted(theirs.scheduler.requests))
            for engine in engines:
                engine.abort(name)
        if rng.random() < 0.02:
            running = rng.random() < 0.5
            assert theirs.scheduler.reset_prefix_cache(running) == mine.scheduler.reset_prefix_cache(running)
        expected, actual = theirs.step(), mine.step()
        assert expected == actual, f"step {step}"
        mine.scheduler.kv_cache_manager.check_valid()
        mine.scheduler.encoder_cache_manager._ours.check_valid()
        preempted |= {name for name, request in mine.scheduler.requests.items() if request.num_preemptions}
        if actual[1] and "stats" in actual[1]:
            hits += actual[1]["stats"][1]["hits"]
    assert theirs.tokens == mine.tokens
    if mine.scheduler.cache_config.enable_prefix_caching and not with_images:
        assert 0 < hits
    return len(preempted)


EACH = {
    "full": ("no prefix cache", "asynchronous", "watermark"),
    "window": ("defaults", "n-gram", "dense windows", "asynchronous, short of blocks"),
    "two groups": ("short of blocks", "watermark", "asynchronous"),
    "three groups": ("defaults", "no prefix cache", "n-gram", "sparse windows"),
}
"""Each group has some of the settings, and each setting some of the groups."""


@pytest.mark.parametrize(("groups", "settings"), [(groups, one) for groups, some in EACH.items() for one in some])
def test_every_step_is_the_same(text: Path, groups: str, settings: str) -> None:
    blocks, specs = GROUPS[groups]
    preempted = compare(two(text, blocks, specs, **SETTINGS[settings]))
    if "short of blocks" in settings:
        assert 0 < preempted


@pytest.mark.skipif(hasattr(VllmConfig, "num_hash_lookahead_tokens"), reason="0.33 keeps its own manager for EAGLE")
@pytest.mark.parametrize(
    ("groups", "marked"), [("full", ()), ("window", (0,)), ("two groups", ()), ("three groups", (0,))]
)
def test_every_step_with_a_draft_model_is_the_same(
    text: Path, groups: str, marked: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler believes that it has a draft model, whose layers are in the first group, or in any."""
    for name in ("use_eagle", "use_eagle_block_drop"):
        monkeypatch.setattr(SpeculativeConfig, name, lambda self: True)
    blocks, specs = GROUPS[groups]
    engines = two(text, blocks, specs, eagle=marked, **SETTINGS["n-gram"])
    assert engines[1].scheduler.kv_cache_manager.use_eagle
    compare(engines)


@pytest.mark.parametrize(
    ("settings", "whole"), [("defaults", True), ("no prefix cache", False), ("asynchronous, short of blocks", False)]
)
def test_every_step_with_images_is_the_same(text: Path, settings: str, whole: bool) -> None:
    blocks = 140 if whole else 40
    engines = two(text, blocks, [full()], disable_chunked_mm_input=whole, **SETTINGS[settings])
    for engine in engines:
        engine.take_images(cache=60, budget=90)
    compare(engines, with_images=True)


def test_groups_of_unequal_blocks_give_the_same_tokens(text: Path) -> None:
    """vLLM gives keys to fewer blocks here, which no hit could use; so blocks are evicted in another order."""
    engines = two(text, 90, [full(32), window(40)])
    for engine in engines:
        for number in range(12):
            engine.add(f"r{number}", [number % 3] * 100, 20)
        while engine.scheduler.has_requests():
            engine.step()
    theirs, mine = engines
    assert theirs.tokens == mine.tokens


def fall_back(text: Path, specs: list[Any], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """Return what the log says about a configuration for which vLLM's manager stays; without a log it is an error."""
    with pytest.raises(RuntimeError, match="vLLM's own stays"):
        Engine(ours.Scheduler, vllm_config(text, 40, **settings), kv_cache_config(40, *specs))
    monkeypatch.setenv("SHMSTORE_VLLM", "1")
    said: list[str] = []
    monkeypatch.setattr(ours._log, "warning", lambda line, *about: said.append(line % about))
    engine = Engine(ours.Scheduler, vllm_config(text, 40, **settings), kv_cache_config(40, *specs))
    assert KVCacheManager is type(engine.scheduler.kv_cache_manager)
    engine.add("a", [1] * 40, 4)
    for _ in range(4):
        engine.step()
    assert 4 == len(engine.tokens["a"])
    return said


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (RSWASpec(block_size=16, rswa_window=32, **SHAPE), "RSWAManager"),
        (SlidingWindowSpec(block_size=16, sliding_window=32, extra_retained_tokens=3, **SHAPE), "SlidingWindowSpec"),
    ],
    ids=["RSWA", "retained tokens"],
)
def test_what_ours_does_not_serve_is_named_once(
    text: Path, spec: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = fall_back(text, [spec], monkeypatch)
    assert named in line


def test_a_kv_connector_keeps_the_manager_of_vllm(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(text / "kv")},
    )
    (line,) = fall_back(text, [full()], monkeypatch, kv_transfer_config=connector)
    assert "connector" in line


def test_a_look_up_with_another_argument_keeps_the_manager_of_vllm(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second argument, which 0.33 has, came with a default: nothing failed."""
    theirs = KVCacheManager.get_computed_blocks

    def with_another(self: Any, request: Any, max_cache_hit_length: Any = None, hits: Any = None) -> Any:
        return theirs(self, request)

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", with_another)
    (line,) = fall_back(text, [full()], monkeypatch)
    assert "get_computed_blocks has the parameters (request, max_cache_hit_length, hits)" in line


@pytest.mark.parametrize(("name", "value"), [("aux_output_connector", object()), ("use_eagle", True)])
def test_what_is_new_in_033_keeps_the_manager_of_vllm(
    text: Path, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has it with models that are not here, so the scheduler believes that it does."""
    said: list[str] = []
    monkeypatch.setenv("SHMSTORE_VLLM", "1")
    monkeypatch.setattr(ours._log, "warning", lambda line, *about: said.append(line % about))
    monkeypatch.setattr(ours.Scheduler, "num_hash_lookahead_tokens", 0, raising=False)
    own = property(lambda self: value, lambda self, other: None)
    monkeypatch.setattr(ours.Scheduler, name, own, raising=False)
    engine = Engine(ours.Scheduler, vllm_config(text, 40), kv_cache_config(40, full()))
    assert KVCacheManager is type(engine.scheduler.kv_cache_manager)
    assert 1 == len([line for line in said if "vLLM's own stays" in line])


def test_an_unknown_encoder_manager_stays(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(monkeypatch, "v1.core.sched.scheduler:Scheduler._free_request", "free")
    config = vllm_config(text, 40, ec_manager_config=ENCODER)
    with pytest.raises(RuntimeError, match="is asked for other"):
        Engine(Scheduler, config, kv_cache_config(40, full()))
    monkeypatch.setenv("SHMSTORE_VLLM", "1")
    engine = Engine(Scheduler, config, kv_cache_config(40, full()))
    assert isinstance(engine.scheduler.encoder_cache_manager, EncoderCacheManager)
    assert "is asked for other" in caplog.text


def test_the_encoder_manager_comes_by_vllms_own_setting(text: Path) -> None:
    for wanted, cls in ((EncoderCacheManagerConfig(), EncoderCacheManager), (ENCODER, EncoderManager)):
        engine = Engine(Scheduler, vllm_config(text, 40, ec_manager_config=wanted), kv_cache_config(40, full()))
        assert cls is type(engine.scheduler.encoder_cache_manager)


def test_an_encoder_decoder_model_keeps_the_encoder_manager_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM", "1")
    about = SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=True))
    made = EncoderManager.create_manager(cache_size=12, vllm_config=about)
    assert EncoderDecoderCacheManager is type(made)


def test_a_call_that_our_encoder_manager_lacks_is_not_answered_by_another() -> None:
    assert not hasattr(EncoderManager(12, None), "unreserve"), "ours has it, and vLLM may mean something else"


def test_a_diffusion_model_which_needs_a_scheduler_of_its_own_is_refused(text: Path) -> None:
    config = vllm_config(text, 40)
    config.diffusion_config = DiffusionConfig(canvas_length=8)
    with pytest.raises(ValueError, match="diffusion model"):
        Engine(ours.Scheduler, config, kv_cache_config(40, full()))


def test_room_that_was_asked_for_and_not_taken_is_there_for_the_next_request() -> None:
    def request(name: str, *items: str) -> Any:
        places = [MultiModalFeatureSpec(None, "image", item, PlaceholderRange(0, 6)) for item in items]
        return SimpleNamespace(request_id=name, mm_features=places, get_num_encoder_embeds=lambda i: 6)

    one, two_items, other = request("one", "A"), request("two", "B", "C"), request("other", "D")
    for manager in (EncoderCacheManager(12), EncoderManager(12, None)):
        assert manager.can_allocate(one, 0, 100, 0)  # and then blocks are short
        assert manager.can_allocate(two_items, 0, 100, 0)
        assert manager.can_allocate(two_items, 1, 100, 6)
        manager.allocate(two_items, 0)
        manager.allocate(two_items, 1)
        assert not manager.can_allocate(other, 0, 100, 0)
        manager.free(two_items)
        assert manager.can_allocate(other, 0, 100, 0)
        manager.allocate(other, 0)
        assert ["B"] == manager.get_freed_mm_hashes()
        assert (6, None) == tuple(manager.get_cached_num_encoder_embeds(about, 0) for about in (other, one))


def test_events_are_those_of_vllm(text: Path) -> None:
    engines = two(
        text, 20, [full(), window(40)], kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    )
    told: list[list[Any]] = []
    for engine in engines:
        events: list[Any] = []
        engine.scheduler.kv_event_publisher = SimpleNamespace(publish=lambda batch, to=events: to.extend(batch.events))
        for number in range(4):
            images = [("image", 5, 20)] if number == 2 else ()
            engine.take_images(100, 100)
            engine.add(f"r{number}", [number] * 70, 30, images, cache_salt="salt" if number == 1 else None)
            while engine.scheduler.has_unfinished_requests():
                engine.step()
        assert engine.scheduler.reset_prefix_cache()
        engine.add("last", [9] * 20, 2)
        engine.step()
        told.append(events)
    theirs, mine = ([event for event in events if not is_empty(event)] for events in told)
    assert 20 < len(mine)
    assert any(event.extra_keys for event in mine if isinstance(event, BlockStored))
    assert [about(event) for event in theirs] == [about(event) for event in mine]


def is_empty(event: Any) -> bool:
    """Return whether vLLM tells that a window has kept no block of a range."""
    return isinstance(event, BlockStored) and not event.block_hashes


def about(event: Any) -> dict[str, Any]:
    """Return what a router reads of an event; without tokens and parent, which vLLM tells of the whole range."""
    told: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    return {name: value for name, value in told.items() if name not in ("token_ids", "parent_block_hash")}


def test_the_class_follows_the_mode(text: Path) -> None:
    for is_async, cls in ((False, ours.Scheduler), (True, ours.AsyncScheduler)):
        _, mine = two(text, 40, [full()], async_scheduling=is_async)
        assert cls is type(mine.scheduler)
        assert isinstance(mine.scheduler, AsyncScheduler) == is_async


def test_hashes_are_converted_once(text: Path) -> None:
    _, mine = two(text, 40, [full()])
    mine.add("a", [1] * 100, 40)
    hashes = mine.scheduler.requests["a"].block_hashes
    for _ in range(40):
        mine.step()
    assert 0 < len(hashes)
    mine.add("b", [1] * 100, 40)
    assert mine.scheduler.requests["b"].block_hashes == hashes[:6]
