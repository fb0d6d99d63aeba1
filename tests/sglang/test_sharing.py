"""Two engines that share encoder outputs, without a model: what is rare, and so not met by real engines in a test."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import prometheus_client
import pytest
import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.multimodal_cache import MultiModalStaticCache
from sglang.srt.plugins.hook_registry import HookRegistry

from shmstore.integrations.encoder.outputs import Outputs
from shmstore.integrations.encoder.settings import Settings
from shmstore.integrations.sglang import ENCODER, encoder
from shmstore.integrations.sglang.compare import UPDATES
from shmstore.integrations.sglang.encoder import Ranks, Sharing
from shmstore.store import ObjectStoreWriter
from shmstore.store.claims import Claim
from shmstore.store.leases import PinnedRef

WIDTH = 8
Make = Callable[..., "Engine"]


class Engine(Sharing):
    """One rank with an encoder that counts its items."""

    def __init__(self, name: str, ranks: Ranks, **options: Any) -> None:
        settings = Settings.parse({"store": name, "capacity_gb": 0.001} | options, "test")
        super().__init__(settings, ranks, Outputs(settings, "cpu"), "scope", WIDTH)
        self.encoded = 0
        self.shown: dict[str, int] = {}

    def _show(self) -> None:
        for figure, count in self._outputs.figures().items():
            self.shown[figure] = self.shown.get(figure, 0) + count

    def encode(self, items: list[Any]) -> Any:
        self.encoded += len(items)
        return torch.cat([item.feature[:, :WIDTH] * 2 for item in items])

    def ask(self, *items: Any) -> Any:
        return self.embed(self.encode, list(items), [one.feature for one in items])


def picture(number: int, tokens: int = 4) -> Any:
    feature = torch.full((tokens, 16), float(number))
    data = {"image_grid_thw": torch.tensor([[1, 4, tokens]])}
    place = [(3, tokens + 2)]
    return MultimodalDataItem(modality=Modality.IMAGE, feature=feature, offsets=place, model_specific_data=data)


def request(*items: Any) -> Any:
    return SimpleNamespace(multimodal_inputs=SimpleNamespace(mm_items=list(items)) if items else None)


@pytest.fixture
def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(encoder, "_metrics", dict)
    mm_schedule.embedding_cache = MultiModalStaticCache(0)
    made: list[Engine] = []
    alone = Ranks(SimpleNamespace(rank_in_group=0, world_size=1))

    def work(ranks: Ranks = alone, **options: Any) -> Engine:
        made.append(Engine(name, ranks, **options))
        return made[-1]

    yield work
    for one in made:
        one._outputs.close()
    ObjectStoreWriter.unlink(name)


def claim(one: Engine, item: Any) -> Claim:
    held = one._outputs.reader.find_or_claim(one._key(item, item.feature), namespace="scope")
    assert isinstance(held, Claim)
    return held


def test_what_one_has_encoded_the_other_loads_and_twice_in_a_call_is_once(make: Make) -> None:
    one, two = make(), make()
    made = one.ask(picture(1), picture(2), picture(1))
    found = two.ask(picture(1), picture(2))
    assert [2, 0] == [one.encoded, two.encoded]
    assert all(torch.equal(a, b) for a, b in zip(made, [*found, found[0]], strict=True))
    assert {"hits": 1, "encoded": 2, "stored": 2} == {k: v for k, v in one.shown.items() if v and k != "stored_bytes"}


def test_who_has_waited_long_enough_encodes(make: Make) -> None:
    one, two = make(), make(wait_s=0.05)
    with claim(one, picture(1)):
        two.ask(picture(1))
    assert (1, 1) == (two.encoded, two.shown["unclaimed"])


@pytest.mark.parametrize("wrong", [torch.ones(3, WIDTH), torch.ones(4, WIDTH + 1), "text"])
def test_something_else_under_the_key_is_made_anew(wrong: Any, make: Make) -> None:
    one, two = make(), make()
    item = picture(1)
    with ObjectStoreWriter.join(one._settings.store) as other:
        other.cancel(other.put(one._key(item, item.feature), wrong, namespace="scope"))
    assert torch.equal(item.feature[:, :WIDTH] * 2, one.ask(item)[0])
    assert (1, 1) == (one.encoded, one.shown["wrong"])
    two.ask(picture(1))
    assert 0 == two.encoded


def test_what_the_encoder_makes_of_a_pruned_video_is_passed_on(make: Make) -> None:
    def prunes(items: list[Any]) -> Any:
        return len(items)

    one = make()
    one.ask(picture(1))
    for items in ([picture(2)], [picture(1), picture(2)]):
        assert len(items) == one.embed(prunes, items, [item.feature for item in items])
    assert 1 == one.shown["stored"]


def test_what_one_rank_cannot_load_all_ranks_encode(make: Make) -> None:
    class Poor(Ranks):
        def agree(self, *flags: bool) -> list[bool]:
            return [False for _ in flags]

    one, two = make(), make(Poor(SimpleNamespace(rank_in_group=0, world_size=1)))
    assert torch.equal(one.ask(picture(1))[0], two.ask(picture(1))[0])
    assert (1, 0) == (two.encoded, two.shown["hits"])


def test_the_first_rank_counts_a_hit_for_all_ranks(make: Make) -> None:
    item = picture(1)
    (made,) = make().ask(item)
    for rank in (0, 1):
        one = make(Ranks(SimpleNamespace(rank_in_group=rank, world_size=1)))
        found = one._take(one._key(item, item.feature), 0.0)
        assert isinstance(found, PinnedRef)
        outputs: list[Any] = [None]
        assert [] == one._load(outputs, {0: found.ref.to_bytes()})
        assert torch.equal(made, outputs[0])
        assert 1 - rank == one._outputs.figures()["hits"]


def test_metrics_name_the_model_and_the_engine_as_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "get_parallel", lambda: SimpleNamespace(dp_rank=1))
    monkeypatch.setattr(encoder, "get_serving", lambda: SimpleNamespace(served_model_name="some"))
    encoder._metrics.__wrapped__()
    for name in ("hits_total", "apart"):
        labels = {"model_name": "some", "engine": "1"}
        assert 0 == prometheus_client.REGISTRY.get_sample_value(f"shmstore_encoder_{name}", labels)


def test_a_request_stays_in_the_queue_while_another_engine_makes_its_picture(make: Make) -> None:
    one, two, hasty = make(), make(), make(wait_s=0.0)
    queue = [request(), request(picture(1)), request(picture(2), picture(1)), request(picture(2))]
    with claim(one, picture(1)):
        for _ in range(2):
            assert [1, 2] == two.held_back(queue)
        assert [] == hasty.held_back(queue)
    assert [] == two.held_back(queue)
    assert [2, 0] == [one.shown.get("deferred", 0) for one in (two, hasty)]


def test_however_many_requests_wait_none_behind_them_stalls_a_step(make: Make) -> None:
    one, two = make(), make()
    queue = [request(picture(1)) for _ in range(100)] + [request() for _ in range(100)] + [request(picture(2))]
    with claim(one, picture(1)), claim(one, picture(2)):
        assert [*range(100), 200] == two.held_back(queue)


@pytest.mark.parametrize(
    "more", [{}, {"chunked_req": 1}, {"enable_priority_preemption": True}, {"is_hybrid_swa": True}]
)
def test_no_rank_asks_the_first_one_while_the_batch_is_full(
    more: dict[str, Any], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make(), make()
    monkeypatch.setattr(encoder, "_sharing", two)
    flags = {"chunked_req": None, "enable_priority_preemption": False, "is_hybrid_swa": False} | more
    scheduler = SimpleNamespace(waiting_queue=[request(picture(1))], **flags)
    with claim(one, picture(1)):
        for full, empty in ((True, False), (True, True), (False, False)):
            batch = SimpleNamespace(batch_is_full=full, is_empty=lambda empty=empty: empty)
            left = encoder._prefill(lambda scheduler, _: len(scheduler.waiting_queue), scheduler, batch)
            assert int(full and not empty and not more) == left
            assert 1 == len(scheduler.waiting_queue)


def test_no_chunk_of_a_request_that_has_waited_in_the_queue_waits_in_a_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, items = make(), make(wait_s=0.05), [picture(1), picture(2)]
    waits: list[float] = []
    with claim(one, items[0]), claim(one, items[1]):
        while two.held_back([request(*items)]):
            pass
        monkeypatch.setattr(two, "_take", lambda key, wait: waits.append(wait))
        for item in items:  # a chunk has one
            assert [] == two.held_back([request(picture(3))])
            two.ask(item)
    assert [0.0, 0.0] == waits
    assert (2, 2, 1) == (two.encoded, two.shown["unclaimed"], two.shown["deferred"])


def test_a_step_waits_shorter_than_the_watchdog_of_sglang(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_STEP", 0.05)
    one, two = make(), make(wait_s=1e6)
    with claim(one, picture(1)):
        two.ask(picture(1))
    assert 1 == two.encoded


def test_with_new_weights_an_engine_shares_with_no_other(make: Make) -> None:
    one, two = make(), make()
    one.ask(picture(1))
    for expected in (2, 3):
        one.begin_apart()
        one.ask(picture(1))
        assert expected == one.encoded
    two.ask(picture(1))
    assert 0 == two.encoded


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """What SGLang says of an engine that starts; its store is removed at the end."""
    flags = {"attn_dp_enabled": False, "encoder_only": False, "language_only": False, "enable_lora": False}
    ranks = {"pp_rank": 0, "pp_size": 2, "tp_group": SimpleNamespace(rank_in_group=0, world_size=1)}
    config = SimpleNamespace(to_json_string=lambda **_: "{}")
    model = {"model_path": str(tmp_path), "hf_config": config, "dtype": torch.float32, "hidden_size": WIDTH}
    engine = SimpleNamespace(
        **flags, **ranks, **model, is_multimodal=True, device="cpu", load_format="auto", revision=None
    )
    for what in ("get_parallel", "get_server_args", "process_model_config"):
        monkeypatch.setattr(encoder, what, lambda: engine)
    monkeypatch.setattr(encoder, "_metrics", dict)
    monkeypatch.setattr(encoder, "_sharing", None)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setenv(ENCODER, json.dumps({"store": name, "capacity_gb": 0.001}))
    yield engine
    if encoder._sharing is not None:
        encoder._sharing._outputs.close()
        ObjectStoreWriter.unlink(name)


UNSERVED: dict[str, dict[str, Any]] = {
    "data-parallel attention": {"attn_dp_enabled": True},
    "an encoder only": {"encoder_only": True},
    "no encoder": {"language_only": True},
    "adapters": {"enable_lora": True},
    "weights of another engine": {"load_format": "remote_instance"},
    "unknown weights": {"model_path": "s3://bucket/model"},
    "a configuration that is not JSON": {"hf_config": SimpleNamespace(to_json_string=lambda **_: json.dumps({1j}))},
}


@pytest.mark.parametrize("why", UNSERVED)
def test_an_engine_whose_outputs_cannot_be_shared_goes_on_alone_and_says_so_once(
    why: str, given: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    vars(given).update(UNSERVED[why])
    encoder._start()
    assert encoder._sharing is None
    assert 1 == sum("not shared" in record.message for record in caplog.records)


@pytest.mark.parametrize("option", ["model_impl", "custom_weight_loader", "download_dir"])
def test_an_option_that_changes_outputs_changes_the_namespace(option: str, given: SimpleNamespace) -> None:
    before = encoder._namespace(given, given)
    setattr(given, option, "another")
    assert before != encoder._namespace(given, given)


def test_each_commit_of_a_model_from_a_hub_has_a_namespace(
    given: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    given.model_path, cache = "some/model", tmp_path / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    found = set()
    for commit in ("1", "2"):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "refs" / "main").write_text(commit)
        found.add(encoder._namespace(given, given))
    assert 2 == len(found)


def test_after_whatever_may_have_changed_the_weights_an_engine_shares_with_no_other(
    given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for update in UPDATES:
        monkeypatch.setattr(SchedulerWeightUpdaterManager, update, lambda self, recv_req: "half done")
    monkeypatch.setattr(mm_schedule, "embedding_cache", MultiModalStaticCache(0))
    encoder._start()
    assert encoder._sharing is not None
    namespaces = {encoder._sharing._namespace}
    for update in UPDATES:
        assert "half done" == getattr(SchedulerWeightUpdaterManager, update)(None, None)
        namespaces.add(encoder._sharing._namespace)
    assert 1 + len(UPDATES) == len(namespaces)
