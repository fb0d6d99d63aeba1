"""The plug-in goes on only in a vLLM that was tested, and whose calls are as it knows them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import vllm
from prometheus_client import REGISTRY

from shmstore.integrations.compare import Has, Uses
from shmstore.integrations.vllm import compare, receiver, register, seams, sender
from shmstore.integrations.vllm.encoder_cache import EncoderManager
from shmstore.integrations.vllm.scheduler import KVManager
from tests.vllm.conftest import change

ROWS = [(f"{part}: {row.of}", row) for part, rows in compare.PARTS.items() for row in rows]


@pytest.mark.parametrize("part", compare.PARTS)
def test_this_vllm_is_known(part: str) -> None:
    assert compare.difference(compare.PARTS[part]) is None


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[name for name, _ in ROWS])
def test_a_row_that_said_anything_else_would_differ(name: str, row: Has | Uses) -> None:
    for word in re.finditer(r"\w+\b(?!\?)", row.names):
        other = f"{row.names[: word.end()]}_{row.names[word.end() :]}"
        assert compare.difference([replace(row, names=other)]), f"{word.group()} is not compared"
    if isinstance(row, Has) and (row.only or row.asked_by):
        for word in re.finditer(r"(?<![(\w])\w+(\([^)]*\))?(?=\s|$)", row.names):
            assert compare.difference([replace(row, names=row.names.replace(word.group(), "", 1))]), word.group()


OURS = [sender.SenderCache, receiver.ReceiverCache, KVManager, EncoderManager(9, None)]


@pytest.mark.parametrize(
    ("row", "ours"),
    list(zip((*compare.CACHES[:2], *compare.KV_CACHE, *compare.ENCODER_CACHE), OURS, strict=False)),
)
def test_our_class_answers_each_call_whose_parameters_are_known(row: Has, ours: Any) -> None:
    of_vllm = {name for base in getattr(ours, "__mro__", ()) if base.__module__[:5] == "vllm." for name in vars(base)}
    answers = set(dir(ours)) - (of_vllm - {name for name in of_vllm if name in vars(ours)})
    assert set() == set(re.findall(r"(\w+)\(", row.names)) - answers


@pytest.mark.parametrize(
    ("path", "gone"),
    [
        ("multimodal.processing.processor:BaseMultiModalProcessor", "release_sender_touches"),
        ("multimodal.cache.factories:processor_cache_from_config", "ShmObjectStoreSenderCache"),
        ("multimodal.cache.shm:ShmObjectStoreReceiverCache.__init__", "shared_worker_lock"),
        ("v1.engine.output_processor:OutputProcessor.abort_requests", "pop"),
        ("v1.engine.output_processor:OutputProcessor._finish_request", "request_states"),
        ("v1.engine.core_client:AsyncMPClient._send_input", "engine"),
        ("v1.engine.core_client:DPAsyncMPClient.add_request_async", "ADD"),
        ("v1.engine.async_llm:AsyncLLM", "abort_requests"),
    ],
)
def test_what_differs_keeps_the_plugin_out(
    path: str, gone: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seams, "install", lambda: pytest.fail("it was changed"))
    change(monkeypatch, path, gone)
    monkeypatch.setenv("SHMSTORE_VLLM", "1")
    register()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "vllm.shmstore"]
    assert 0 == REGISTRY.get_sample_value("shmstore_in_use", {"reason": said.partition(": ")[2]})
    monkeypatch.setenv("SHMSTORE_VLLM", "strict")
    with pytest.raises(RuntimeError, match=gone):
        register()


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.34.0.dev1+gabc", "dev"])
def test_a_version_that_was_not_tested_keeps_every_part_out(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert all(version in str(compare.difference(rows)) for rows in compare.PARTS.values())


def test_the_command_shows_what_is_known_of_this_vllm() -> None:
    command = [sys.executable, "-m", "shmstore.integrations.vllm.compare"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"as known"} == {line.split(" | ")[-1].strip(" |") for line in shown[2:]}
    assert len(ROWS) + 3 == len(shown)
