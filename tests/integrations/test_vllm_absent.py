"""shmstore and its plug-ins can be imported where their engines cannot."""

from __future__ import annotations

import logging
from importlib.metadata import distributions, entry_points

import pytest

from shmstore.integrations import vllm

pytestmark = pytest.mark.skipif("vllm" in {one.name for one in distributions()}, reason="vLLM is here")


def test_the_entry_point_is_the_plugins_function() -> None:
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "shmstore"]
    assert "shmstore.integrations.vllm:register" == found.value


def test_without_vllm_the_plugin_stays_out_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SHMSTORE_VLLM", raising=False)
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert ["vllm.shmstore"] == [record.name for record in caplog.records]
    monkeypatch.setenv("SHMSTORE_VLLM", "strict")
    with pytest.raises(RuntimeError):
        vllm.register()


def test_a_plugin_that_is_off_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM", "0")
    vllm.register()
    assert [] == caplog.records
