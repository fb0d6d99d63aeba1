"""What the connector refuses at the start, and what makes two engines share outputs."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.multimodal.parse import AudioProcessorItems, ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer

from shmstore.integrations.encoder import namespace
from shmstore.integrations.vllm import names, register
from shmstore.integrations.vllm.encoder import ShmstoreECConnector, scope
from shmstore.integrations.vllm.encoder.settings import Settings
from shmstore.integrations.vllm.shared import RUN
from shmstore.store import ObjectStoreWriter
from tests.support import store_name
from tests.vllm.conftest import change
from tests.vllm.encoder.engine import connector
from tests.vllm.inputs import photograph
from tests.vllm.lockstep import vllm_config
from tests.vllm.parts import HASH


@pytest.fixture
def config(model: Path) -> Any:
    transfer = ECTransferConfig(**connector("none"))
    return vllm_config(model, 40, skip_tokenizer_init=False, ec_transfer_config=transfer)


def test_a_vllm_that_does_not_ask_for_lost_requests_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, "v1.core.sched.scheduler:Scheduler.update_from_output", "take_unavailable_requests")
    with pytest.raises(RuntimeError, match="take_unavailable_requests"):
        ShmstoreECConnector(config, ECConnectorRole.SCHEDULER)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"store": 1}, "store"),
        ({"dir": 1}, "dir"),
        ({"gid": -1}, "gid"),
        ({"allow_uid": "root"}, "allow_uid"),
        ({"capacity_gb": "16"}, "capacity_gb"),
        ({"capacity_gb": True}, "capacity_gb"),
        ({"capacity_gb": 0}, "capacity_gb"),
        ({"engines": 1.5}, "engines"),
        ({"readers": -1}, "readers"),
        ({"quota_gb": 0}, "quota_gb"),
        ({"engines": 65}, "engines"),
        ({"readers": 257}, "readers"),
        ({"capacity_gb": 1e5}, "capacity_gb"),
        ({"capacity_gb": math.inf}, "capacity_gb"),
        ({"wait_s": -5.0}, "wait_s"),
        ({"wait_s": math.nan}, "wait_s"),
        ({"single_flight": 1}, "single_flight"),
        ({"read": "private"}, "read"),
        ({"weights": "none"}, "weights"),
        ({"capacity": 16}, "capacity"),
    ],
)
def test_a_wrong_option_is_named(config: Any, options: dict[str, Any], named: str) -> None:
    config.ec_transfer_config.ec_connector_extra_config |= options
    with pytest.raises(ValueError, match=rf" {named}: "):
        Settings.of(config)


def test_a_group_without_the_owner_of_the_store_is_refused(config: Any) -> None:
    config.ec_transfer_config.ec_connector_extra_config |= {"gid": 1}
    with pytest.raises(ValueError, match="gid needs allow_uid"):
        Settings.of(config)


@pytest.mark.parametrize("name", ["store", "capacity_gb"])
def test_a_missing_option_is_named(config: Any, name: str) -> None:
    del config.ec_transfer_config.ec_connector_extra_config[name]
    with pytest.raises(ValueError, match=rf" {name}: "):
        Settings.of(config)


def set_to(path: str, value: Any) -> Callable[[Any], None]:
    def work(config: Any) -> None:
        *holders, name = path.split(".")
        for holder in holders:
            config = getattr(config, holder)
        object.__setattr__(config, name, value)

    return work


class _Lora:
    enable_tower_connector_lora = True


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("lora_config", _Lora(), "enable_tower_connector_lora"),
        ("weight_transfer_config", object(), "weight_transfer_config"),
        ("parallel_config.nnodes", 2, "one host"),
        ("parallel_config.distributed_executor_backend", "ray", "ray"),
        ("parallel_config.distributed_executor_backend", "external_launcher", "external_launcher"),
        ("model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("model_config.multimodal_config", None, "no encoder"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(config: Any, path: str, value: Any, named: str) -> None:
    set_to(path, value)(config)
    with pytest.raises(ValueError, match=named):
        Settings.of(config)


@pytest.mark.parametrize(("share_uuids", "plugin", "said"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_media_options_of_a_server_that_make_clients_names_shared_are_said(
    config: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    share_uuids: int,
    plugin: int,
    said: bool,
) -> None:
    monkeypatch.setattr(names, "numbered_by_run", bool(plugin))
    set_to(f"{MEDIA}.media_io_kwargs", {"image": {"rgba_background_color": [0, 0, 0]}})(config)
    name = store_name()
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1):
        config.ec_transfer_config.ec_connector_extra_config |= {"store": name, "share_uuids": bool(share_uuids)}
        ShmstoreECConnector(config, ECConnectorRole.SCHEDULER).shutdown()
    assert said == any("media-io-kwargs" in record.message for record in caplog.records)


def test_an_engine_whose_items_vllm_numbers_as_others_do_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    set_to("cache_config.enable_prefix_caching", False)(config)
    set_to(f"{MEDIA}.mm_processor_cache_gb", 0)(config)
    Settings.of(config)
    monkeypatch.setattr(names, "numbered_by_run", False)
    with pytest.raises(ValueError, match="numbers items as other servers do"):
        Settings.of(config)
    set_to("cache_config.enable_prefix_caching", True)(config)
    Settings.of(config)


def test_numbers_of_items_are_those_of_one_run_and_hashes_stay(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    set_to("cache_config.enable_prefix_caching", False)(config)
    set_to(f"{MEDIA}.mm_processor_cache_gb", 0)(config)
    renderer = SimpleNamespace(model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None)
    items = SimpleNamespace(get_all_counts=lambda: {"image": 2})
    numbered = []
    for run in ("shmstore-1-first", "shmstore-1-second"):
        monkeypatch.setenv(RUN, run)
        found = BaseRenderer._process_mm_uuids(renderer, {}, items, {"image": [None, HASH]}, "renderer0-mm-1")
        assert HASH == found["image"][1]
        numbered.append(found["image"][0])
    assert numbered[0] != numbered[1]
    assert not any(names.may_share(name, share_uuids) for name in numbered for share_uuids in (False, True))
    assert names.may_share(HASH, share_uuids=False)


def test_a_clients_name_that_is_hashed_with_options_is_one_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    items = MultiModalDataItems({"image": ImageProcessorItems([photograph(0)] * 3), "audio": AudioProcessorItems([])})
    uuids = {"image": ["image-0", HASH, None], "video": []}

    def hashed(run: str, **options: Any) -> Any:
        monkeypatch.setenv(RUN, run)
        return ProcessorInputs([], items, uuids, options).get_mm_hashes("model", "blake3")["image"]

    plain = hashed("shmstore-1-first")
    assert ["image-0", HASH] == plain[:2]
    assert plain == hashed("shmstore-1-second")
    first, second = (hashed(run, max_pixels=50000) for run in ("shmstore-1-first", "shmstore-1-second"))
    assert first[1:] == second[1:]
    assert first[0] != second[0]
    assert [False, True, True] == [names.may_share(name, share_uuids=False) for name in first]
    assert not names.may_share(first[0], share_uuids=True)


MEDIA = "model_config.multimodal_config"
DIFFERENT: dict[str, Callable[[Any], None]] = {
    "revision": set_to("model_config.revision", "1234"),
    "code revision": set_to("model_config.code_revision", "1234"),
    "override": set_to("model_config.hf_config.vision_config.depth", 2),
    "quantization": set_to("model_config.quantization", "fp8"),
    "tokenizer": set_to("model_config.tokenizer", "another"),
    "load format": set_to("load_config.load_format", "dummy"),
    "device": set_to("device_config.device_type", "cuda"),
    "processor": set_to(f"{MEDIA}.mm_processor_kwargs", {"max_pixels": 5}),
    "media": set_to(f"{MEDIA}.media_io_kwargs", {"video": {"num_frames": 2}}),
    "hasher": set_to(f"{MEDIA}.mm_hasher_algorithm", "sha256"),
    "attention of the encoder": set_to(f"{MEDIA}.mm_encoder_attn_dtype", "fp8"),
    "pruning": set_to(f"{MEDIA}.video_pruning_rate", 0.5),
    "weights": lambda config: os.utime(next(Path(config.model_config.model).glob("*.safetensors"))),
    "processor's file": lambda config: os.utime(Path(config.model_config.model, "preprocessor_config.json")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_an_engine_whose_outputs_may_differ_has_another_namespace(config: Any, what: str) -> None:
    before = scope._digested(config)
    assert before == scope._digested(copy.copy(config))
    assert before.split()[1] == "bfloat16"
    DIFFERENT[what](config)
    assert before != scope._digested(config)


@pytest.mark.parametrize(("part", "file"), [("model", "config.json"), ("tokenizer", "tokenizer_config.json")])
def test_another_commit_of_a_model_from_a_hub_is_another_namespace(
    part: str, file: str, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    set_to(f"model_config.{part}", "org/name")(config)
    seen = set()
    for commit in ("a" * 40, "b" * 40):
        for place, text in (("refs/main", commit), (f"snapshots/{commit}/{file}", "{}")):
            path = tmp_path / "models--org--name" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        seen.add(namespace.digest(names.processing(config)))
    assert len(seen) == 2


def test_items_are_the_same_on_a_host_whose_files_have_other_times(config: Any) -> None:
    file = Path(config.model_config.model, "preprocessor_config.json")
    before, text = namespace.digest(names.processing(config)), file.read_text()
    for path in file.parent.iterdir():
        os.utime(path)
    assert before == namespace.digest(names.processing(config))
    file.write_text(text + " ")
    assert before != namespace.digest(names.processing(config))
    file.write_text(text)


def test_another_version_has_another_namespace(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = scope._digested(config)
    for module in (vllm, torch, vars(names)["transformers"]):
        with monkeypatch.context() as patch:
            patch.setattr(module, "__version__", "9")
            assert before != scope._digested(config)


def test_what_a_model_changes_while_it_is_built_is_not_seen(config: Any) -> None:
    before = scope.of(config).name
    set_to("model_config.hf_config.vision_config.depth", 2)(config)
    assert before == scope.of(config).name


def test_a_reset_looks_at_no_file_if_any_weights_may_come(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = scope.of(config)
    before = own.name
    monkeypatch.setattr(namespace, "_files", lambda folder: pytest.fail("the folder may be unreadable by now"))
    own.reset()
    assert own.name.startswith(f"{before} ")


def test_what_the_connector_sets_is_for_its_engine_alone(config: Any) -> None:
    """An engine of the same arguments, which has another connector or none, keeps its encoder-cache manager."""
    other, name = config.ec_manager_config, store_name()
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1):
        config.ec_transfer_config.ec_connector_extra_config |= {"store": name}
        ShmstoreECConnector(config, ECConnectorRole.SCHEDULER).shutdown()
    assert (None, True) == (other.encoder_cache_manager_cls, bool(config.ec_manager_config.encoder_cache_manager_cls))


def test_engines_of_another_size_share(config: Any) -> None:
    before = scope._digested(config)
    set_to("parallel_config.tensor_parallel_size", 2)(config)
    assert before == scope._digested(config)


def test_folders_and_links_that_lead_nowhere_are_no_files_of_a_model(config: Any) -> None:
    before = scope._digested(config)
    folder = Path(config.model_config.model)
    (folder / "__pycache__").mkdir()
    (folder / "gone").symlink_to("nowhere")
    try:
        assert before == scope._digested(config)
    finally:
        (folder / "__pycache__").rmdir()
        (folder / "gone").unlink()


@pytest.mark.parametrize("name", ["éé/" * 100, "é" * 300])  # the second one is too long for a folder
def test_a_long_name_fits(config: Any, name: str) -> None:
    set_to("model_config.model", name)(config)
    assert len(scope._digested(config).encode()) <= 255 - len(" 0123456789abcdef")
