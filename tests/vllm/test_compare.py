"""The plug-in goes on only in a vLLM whose sources are as it knows them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shmstore.integrations.compare import _METHOD
from shmstore.integrations.vllm import compare, receiver, register, seams, sender
from shmstore.integrations.vllm.known import CACHES, ENCODER_CACHE, ENCODER_CONNECTOR, KV_CACHE
from tests.vllm.conftest import change

BASE, ENGINE = "multimodal/cache/base.py", "v1/engine"
DIFFERENCES = [
    (BASE, "def touch_sender_cache_item(self, mm_hash: str)", "def touch_sender_cache_item(self, mm_hash, lease)"),
    (BASE, "def touch_sender_cache_item(", "def rotate(self): ...\n    def touch_sender_cache_item("),
    (BASE, "def touch_receiver_cache_item(", "def rotate(self): ...\n    def touch_receiver_cache_item("),
    (BASE, "def is_cached_item(self, mm_hash: str)", "def has_item(self, mm_hash: str)"),
    (
        "multimodal/cache/shm.py",
        "def __init__(self, vllm_config: VllmConfig)",
        "def __init__(self, config, vllm_config)",
    ),
    ("multimodal/cache/factories.py", "return ShmObjectStoreSenderCache(", "return Sender("),
    ("multimodal/cache/factories.py", "return ShmObjectStoreReceiverCache(", "return Receiver("),
    ("multimodal/cache/factories.py", "_get_cache_type", "_choose"),
    ("multimodal/inputs.py", '    field: "BaseMultiModalField"', '    place: int\n    field: "BaseMultiModalField"'),
    ("multimodal/inputs.py", "    identifier: str", "    name: str"),
    (f"{ENGINE}/output_processor.py", "def add_request(\n        self,\n", "def add_request(\n        self, first,\n"),
    (f"{ENGINE}/output_processor.py", "def abort_requests(self, ", "def abort_requests(self, why, "),
    (f"{ENGINE}/output_processor.py", "request_states", "requests"),
    (
        f"{ENGINE}/core_client.py",
        "        engine: EngineIdentity | None = None,",
        "        to: EngineIdentity | None = None,",
    ),
    (f"{ENGINE}/__init__.py", "    def finished(self)", "    def ended(self)"),
    ("config/parallel.py", "enable_elastic_ep", "elastic"),
]


def test_this_vllm_is_known() -> None:
    assert compare.difference(compare.installed(), CACHES) is None
    assert compare.difference(compare.installed(), ENCODER_CACHE) is None
    assert compare.difference(compare.installed(), KV_CACHE) is None


def test_the_caches_of_the_plugin_answer_every_call_that_is_known() -> None:
    inherited = {"is_cached", "get_and_update", "cache_if_fits"}
    for known, cls in zip(CACHES, (sender.SenderCache, receiver.ReceiverCache), strict=False):
        named = {name for name, _ in _METHOD.findall(known.methods)}
        assert named - inherited <= vars(cls).keys()


@pytest.mark.parametrize(("file", "old", "new"), DIFFERENCES, ids=[new.strip()[:40] for _, _, new in DIFFERENCES])
def test_what_differs_keeps_the_plugin_out(
    file: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seams, "install", lambda: pytest.fail("it was changed"))
    change(monkeypatch, file, old, new)
    monkeypatch.setenv("SHMSTORE_VLLM", "1")
    register()
    assert 1 == len([record for record in caplog.records if record.name == "vllm.shmstore"])
    monkeypatch.setenv("SHMSTORE_VLLM", "strict")
    with pytest.raises(RuntimeError):
        register()


def test_the_command_says_of_wheels_what_is_known(tmp_path: Path) -> None:
    sources = compare.installed()
    wheels = []
    for name, remove in (("known", None), ("other", BASE)):
        wheels.append(tmp_path / f"{name}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as wheel:
            wheel.writestr("vllm-9.9.dist-info/METADATA", "Name: vllm\nVersion: 9.9\n")
            for file in {known.file for known in (*CACHES, *KV_CACHE, *ENCODER_CACHE, *ENCODER_CONNECTOR)} - {remove}:
                wheel.writestr(f"vllm/{file}", sources.read(file))
    command = [sys.executable, "-m", "shmstore.integrations.vllm.compare"]
    known, both = (
        subprocess.run([*command, *given], capture_output=True, text=True, check=False)
        for given in (wheels[:1], wheels)
    )
    assert (0, 1) == (known.returncode, both.returncode)
    assert "| 9.9 | as known | as known | as known | as known |" == known.stdout.splitlines()[-1]
    assert BASE in both.stdout.splitlines()[-1]
    assert 2 == subprocess.run([*command, str(tmp_path)], capture_output=True, check=False).returncode
