"""Tokenizer processes that share what they make of images, with SGLang's own functions around a small processor."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.multimodal.cache import MultimodalPreprocessCache
from sglang.srt.multimodal.media_artifacts.base import MediaArtifactCacheMixin, MediaArtifactInput

from shmstore.integrations.sglang import PREPROCESS, preprocess
from shmstore.store import ObjectStoreReader, ObjectStoreWriter
from tests.layout import make_of_another_version
from tests.support import Child, Signal, alive

Make = Callable[..., "Processor"]
THEIRS = {name: getattr(MediaArtifactCacheMixin, name) for name in ("_get_cached_artifact", "_compute_cache_misses")}


@dataclasses.dataclass(frozen=True)
class Artifact:
    content_digest: str
    artifact_key: str
    feature_hash: int
    feature: Any
    more: dict[str, Any]
    device: str = "cpu"

    @property
    def has_feature(self) -> bool:
        return self.feature is not None

    def cache_value(self) -> Artifact:
        return self if self.device == "cpu" else dataclasses.replace(self, feature=None)

    def cache_size_items(self) -> tuple[Any, ...]:
        return (self.feature, self.more)


class Processor(MediaArtifactCacheMixin):  # type: ignore[misc]
    """A processor of SGLang that counts what it makes, and then waits for `until` if there is one."""

    artifact_modality, processor_fingerprint, trust_mm_content_hashes = Modality.IMAGE, "f", False
    mm_processor_executor = None
    shmstore: asyncio.Future[Any]

    def __init__(self, **fields: Any) -> None:
        self.mm_preprocess_cache = MultimodalPreprocessCache(1 << 24)
        self.io_executor = ThreadPoolExecutor(2)
        self.fields: dict[str, Any] = {"more": {"grid": torch.tensor([[1, 4, 4]])}} | fields
        self.made = 0
        self.until: asyncio.Event | None = None

    def _get_cached_artifact(self, *args: Any, **more: Any) -> Any:
        return preprocess._cached(THEIRS["_get_cached_artifact"], self, *args, **more)

    async def _compute_cache_misses(self, *args: Any) -> None:
        await preprocess._compute(THEIRS["_compute_cache_misses"], self, *args)

    async def _run_preprocess_and_build_artifact_batch(self, entries: Any) -> list[Artifact]:
        self.made += len(entries)
        if self.until is not None:
            await self.until.wait()
        return [
            Artifact(one.content_digest, one.artifact_key, 7, torch.as_tensor(one.media).float() / 2, **self.fields)
            for one in entries
        ]

    async def ask(self, *numbers: int) -> list[Artifact]:
        made: list[Artifact] = await self.prepare_media_artifacts([picture(number) for number in numbers])
        for number, one in zip(numbers, made, strict=True):
            assert torch.equal(torch.as_tensor(picture(number)).float() / 2, one.feature)
        return made


def picture(number: int) -> Any:
    return np.full((64, 64), number, np.uint8)


def entry(one: Processor, number: int) -> MediaArtifactInput:
    digest = one.snapshot_media_source(picture(number), Modality.IMAGE).content_digest
    return MediaArtifactInput(digest, one._artifact_key(digest, picture(number)), Modality.IMAGE, None)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found = Counter[str]()
    figures = {
        name: SimpleNamespace(inc=lambda n, name=name: found.update({name: int(n)})) for name in preprocess.FIGURES
    }
    monkeypatch.setattr(preprocess, "_metrics", lambda: figures)
    return found


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang says of an engine."""
    config = SimpleNamespace(to_json_string=lambda **_: "{}")
    given = SimpleNamespace(model_path=str(tmp_path), tokenizer_path=str(tmp_path), revision=None, hf_config=config)
    given.dtype = torch.float32
    for what in ("get_model", "get_server_args", "get_serving", "process_model_config"):
        monkeypatch.setattr(preprocess, what, lambda: given)
    return given


@pytest.fixture
def make(name: str, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]) -> Iterator[Make]:
    """Make a tokenizer process."""
    made: list[Processor] = []

    def work(fields: dict[str, Any] | None = None, **options: Any) -> Processor:
        options = {"store": name, "capacity_gb": 0.001, "wait_s": 60.0, **options}
        monkeypatch.setenv(PREPROCESS, json.dumps(options))
        made.append(one := Processor(**(fields or {})))
        one.shmstore = asyncio.Future(loop=asyncio.new_event_loop())
        one.shmstore.set_result(preprocess._open(one))
        return one

    yield work
    for one in made:
        if (artifacts := one.shmstore.result()) is not None:
            artifacts.close()
        one.io_executor.shutdown()
    if Path("/dev/shm", name).exists():
        ObjectStoreWriter.unlink(name)


def run(*asked: Any) -> Any:
    async def all_of() -> Any:
        return await asyncio.wait_for(asyncio.gather(*asked), 60)

    return asyncio.run(all_of())


def test_what_one_has_processed_the_other_finds_and_keeps_no_copy_of(make: Make, counts: Counter[str]) -> None:
    one, two = make(), make()
    run(one.ask(1, 2, 1))
    (found,) = run(two.ask(2, 1))
    assert [2, 0] == [one.made, two.made]
    assert torch.equal(found[0].more["grid"], one.fields["more"]["grid"])
    run(one.ask(1))
    assert [0, 0] == [len(each.mm_preprocess_cache) for each in (one, two)]
    assert {"hits": 3, "processed": 2, "stored": 2} == {k: v for k, v in counts.items() if v and k != "stored_bytes"}


def test_an_image_whose_trusted_hash_is_known_is_not_even_read(make: Make) -> None:
    one, two = make(), make()
    run(one.ask(1))
    two.trust_mm_content_hashes = True
    (found,) = run(two.prepare_media_artifacts([object()], content_hashes=[entry(one, 1).content_digest]))[0]
    assert torch.equal(torch.as_tensor(picture(1)).float() / 2, found.feature)


def test_what_is_found_is_held_until_the_request_has_gone(make: Make, name: str) -> None:
    one, two = make(), make()
    run(one.ask(1))
    (found,) = run(two.ask(1))
    for number in range(2, 99):
        run(one.ask(number))
    assert torch.equal(torch.as_tensor(picture(1)).float() / 2, found[0].feature)
    reader = two.shmstore.result().reader
    assert 1 == reader.stats().live_views
    del found
    assert 0 == reader.stats().live_views


def test_two_that_ask_at_once_process_each_image_once(make: Make) -> None:
    one, two = make(), make()
    run(one.ask(1, 2), two.ask(2, 1, 3), one.ask(3), two.ask(1))
    assert 3 == one.made + two.made


@pytest.mark.parametrize("wait_s", [0.05, 60.0])
def test_who_waits_takes_what_the_other_makes_or_makes_it_after_its_time(
    wait_s: float, make: Make, counts: Counter[str]
) -> None:
    one, two = make(), make(wait_s=wait_s)

    async def meet() -> None:
        one.until = asyncio.Event()
        asked = [asyncio.create_task(one.ask(1))]
        while not one.made:
            await asyncio.sleep(0)
        asked.append(asyncio.create_task(two.ask(1, 2)))
        while not two.made:
            await asyncio.sleep(0)
        if wait_s < 1:
            await asked[1]
        one.until.set()
        await asyncio.gather(*asked)

    run(meet())
    late = wait_s < 1
    assert 0 == len(two.mm_preprocess_cache)
    assert (1, 1 + late, int(late)) == (one.made, two.made, counts["unclaimed"])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which images were to wait for another process, in order."""
    found: list[float] = []
    theirs = preprocess.Artifacts.take

    def take(artifacts: Any, entry: Any, wait: float) -> Any:
        found.append(wait)
        return theirs(artifacts, entry, wait)

    monkeypatch.setattr(preprocess.Artifacts, "take", take)
    return found


def claim(name: str, keys: list[str], namespace: str, ready: Signal) -> None:
    with ObjectStoreReader.attach(name, None, finds_only=True) as reader:
        held = [reader.find_or_claim(key, namespace=namespace) for key in keys]
        ready.send()
        signal.pause()
        del held


def test_what_a_process_that_died_was_making_the_next_one_makes(make: Make, name: str, waits: list[float]) -> None:
    one = make()

    async def meet(other: Child) -> None:
        asked = asyncio.create_task(one.ask(1))
        while not any(waits):
            await asyncio.sleep(0)
        assert 0 == one.made
        other.kill()
        await asked

    with alive(claim, name, [entry(one, 1).artifact_key], one.shmstore.result()._namespace) as other:
        run(meet(other))
    assert 1 == one.made


def test_the_images_of_a_request_wait_for_others_once_and_not_one_after_the_other(
    make: Make, name: str, waits: list[float], counts: Counter[str]
) -> None:
    one = make(wait_s=0.2)
    keys = [entry(one, number).artifact_key for number in (1, 2, 3)]
    with alive(claim, name, keys, one.shmstore.result()._namespace):
        run(one.ask(1, 2, 3))
    assert (3, 3) == (one.made, counts["unclaimed"])
    assert 0 < sum(waits) <= 0.2


def test_a_store_that_is_opened_late_keeps_no_image_waiting(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, there, opening = make(), threading.Event(), preprocess._open
    monkeypatch.setattr(preprocess, "_OPENING", 0.01)
    monkeypatch.setattr(preprocess, "_open", lambda processor: there.wait(60) and opening(processor))
    late = Processor()

    async def meet() -> None:
        await late.ask(1)
        assert (1, 1) == (late.made, len(late.mm_preprocess_cache))
        there.set()
        await late.shmstore
        await one.ask(2)
        await late.ask(2)

    run(meet())
    assert 1 == late.made
    late.shmstore.result().close()
    late.io_executor.shutdown()


def test_processors_that_were_loaded_with_other_settings_share_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for loaded in ("a", "b", "a"):
        images = SimpleNamespace(to_json_string=lambda loaded=loaded: loaded)
        monkeypatch.setattr(Processor, "_processor", SimpleNamespace(image_processor=images), raising=False)
        one = make()
        run(one.ask(1))
        made.append(one.made)
    assert [1, 1, 0] == made


def test_an_error_is_for_all_who_wait_and_the_next_request_is_answered(make: Make) -> None:
    one, two = make(), make()
    claim = run(two.shmstore.result().take(entry(two, 2), 0.0))[0]
    fields, one.fields = one.fields, {}  # of which no record can be made

    async def meet() -> list[Any]:
        one.until = asyncio.Event()
        asked = [asyncio.create_task(one.ask(1, 2))]
        while not one.made:
            await asyncio.sleep(0)
        asked.append(asyncio.create_task(one.ask(2)))
        while not one.mm_preprocess_cache.singleflight_joins:
            await asyncio.sleep(0)
        one.until.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [TypeError, TypeError] == [type(error) for error in run(meet())[0]]
    claim.end()
    one.fields = fields
    run(one.ask(1, 2))


@pytest.mark.parametrize(
    "stored",
    ["text", ("Artifact", {}), ("Claim", {}), ("Artifact", {"feature": 3}), ("Artifact", {"artifact_key": "other"})],
)
def test_something_else_under_the_key_is_made_again_and_replaced(
    stored: Any, make: Make, name: str, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    one, two, there = make(), make(), entry(make(), 1)
    if isinstance(stored, tuple) and stored[1]:
        fields = {"content_digest": there.content_digest, "artifact_key": there.artifact_key, "feature_hash": 1}
        stored = (stored[0], {**fields, "feature": torch.ones(1), "more": {}, **stored[1]})
    with ObjectStoreWriter.join(name) as other:
        other.put(there.artifact_key, stored, lease=False, namespace=one.shmstore.result()._namespace)
    run(one.ask(1))
    assert (1, 1) == (one.made, counts["wrong"])
    assert 1 == sum("something other" in record.message for record in caplog.records)
    run(two.ask(1))
    assert 0 == two.made


@dataclasses.dataclass
class Deferred:
    """What a record of another family has."""


@pytest.mark.parametrize(
    ("fields", "why"), [({"more": {"deferred": Deferred()}}, "serializer"), ({"device": "cuda"}, "on a device")]
)
def test_records_that_are_not_plain_stay_in_the_cache_of_sglang(
    fields: dict[str, Any], why: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = make(fields), make(fields)
    for number in (1, 2, 1):
        run(one.ask(number), two.ask(number))
    assert [2, 2] == [len(each.mm_preprocess_cache) for each in (one, two)]
    with run(make().shmstore.result().take(entry(one, 3), 0.0))[0]:
        run(one.ask(3))  # which waits for nobody
    said = [record.message for record in caplog.records if "stay in SGLang's own cache" in record.message]
    assert [True, True] == [why in text for text in said]


def test_a_full_store_and_one_that_was_removed_cost_no_answer_and_one_line_each(
    make: Make, name: str, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    one = make(capacity_gb=4e-5)
    held = run(one.ask(1), one.ask(2))
    run(one.ask(1), one.ask(2))
    with ObjectStoreReader.attach(name, None, finds_only=True) as reader:
        pins = [
            reader.find(key, namespace=one.shmstore.result()._namespace)
            for key in (entry(one, 1).artifact_key, entry(one, 2).artifact_key)
        ]
        for number in range(3, 9):
            run(one.ask(number), one.ask(number))
        assert 8 == one.made
        assert counts["refused"] == 6
        del pins
    assert 1 == sum("were not stored" in record.message for record in caplog.records)
    Path("/dev/shm", name).unlink()
    run(one.ask(1), one.ask(11), one.ask(12))
    assert 1 == sum("was removed" in record.message for record in caplog.records)
    del held


@pytest.mark.parametrize("why", ["no room in", "not a store", "another version", "--tokenizer-path"])
def test_a_store_that_cannot_be_opened_costs_no_answer_and_one_line(
    why: str, make: Make, name: str, given: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "not a store":
        Path("/dev/shm", name).write_bytes(b"something else" * 9999)
    if why == "another version":
        make_of_another_version(Path("/dev/shm", name))
    if why == "--tokenizer-path":
        given.tokenizer_path = "other"
    one = make(capacity_gb=1000.0 if why == "no room in" else 0.001)
    run(one.ask(1), one.ask(2))
    assert 2 == one.made
    (said,) = (record.message for record in caplog.records if "are not shared" in record.message)
    assert why in said
    Path("/dev/shm", name).unlink(missing_ok=True)
