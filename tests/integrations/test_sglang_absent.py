"""The plug-in for SGLang where there is none: what it decides, and that the processes below agree."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path

import pytest

from shmstore.integrations import sglang
from shmstore.integrations.sglang import AGREED, ENCODER, GIB, capacity, compare

pytestmark = pytest.mark.skipif("sglang" in {one.name for one in distributions()}, reason="SGLang is here")


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGREED, "")  # so that it is as before when the test ends
    for name in (AGREED, "SHMSTORE_SGLANG", GIB, ENCODER):
        monkeypatch.delenv(name, raising=False)


def test_the_entry_point_is_the_plugins_function() -> None:
    (found,) = [point for point in entry_points(group="sglang.srt.plugins") if point.name == "shmstore"]
    assert "shmstore.integrations.sglang:register" == found.value


def test_without_sglang_the_plugin_stays_out_says_so_once_and_processes_below_agree(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        sglang.register()
        sglang.register()
    assert ["sglang.shmstore"] == [record.name for record in caplog.records]
    assert "out" == os.environ[AGREED]


@pytest.mark.parametrize(("word", "imported"), [("in", True), ("out", False)])
def test_a_process_below_does_what_the_one_at_the_top_has_decided(
    word: str, imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AGREED, word)
    if imported:
        with pytest.raises(ModuleNotFoundError):
            sglang.register()
    else:
        sglang.register()


def test_a_plugin_that_is_off_says_and_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHMSTORE_SGLANG", "0")
    sglang.register()
    assert ([], False) == (caplog.records, AGREED in os.environ)


@pytest.mark.parametrize("size", ["", "0", "-1", "much", "nan", "inf"])
def test_a_wrong_setting_is_an_error_at_once(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GIB, size)
    with pytest.raises(ValueError, match=GIB):
        sglang.register()
    monkeypatch.delenv(GIB)
    monkeypatch.setenv("SHMSTORE_SGLANG", "yes")
    with pytest.raises(ValueError, match="SHMSTORE_SGLANG"):
        sglang.register()


@pytest.mark.parametrize("options", ["mm-encoder", "[]", "{}", '{"store": "a", "capacity_gb": 0}', '{"read": "views"}'])
def test_wrong_options_of_encoder_outputs_are_an_error_at_once(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pydantic", reason="each engine brings it")
    monkeypatch.setenv(ENCODER, options)
    with pytest.raises(ValueError, match=ENCODER):
        sglang.register()


def test_the_size_is_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 4 << 30 == capacity()
    monkeypatch.setenv(GIB, "0.5")
    assert 1 << 29 == capacity()


def test_the_command_says_which_versions_are_known_and_what_is_missing_here() -> None:
    command = [sys.executable, "-m", "shmstore.integrations.sglang.compare"]
    for given, status, said in (
        (["0.5.22", "0.5.23"], 0, "| 0.5.23 | >=0.5.22,<0.5.24 | as known |"),
        (["0.5.22", "0.5.24"], 1, "| 0.5.24 | >=0.5.22,<0.5.24 | not tested |"),
        ([], 1, "ModuleNotFoundError: No module named 'sglang' |"),
    ):
        done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
        assert (status, True) == (done.returncode, done.stdout.rstrip().endswith(said)), done


def test_where_sglang_is_known_what_a_killed_server_has_left_is_removed_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "from shmstore import ObjectStoreWriter as W; print(W.create(capacity=4096, n_readers=1).name); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as server:
        assert server.stdout
        left = Path("/dev/shm", server.stdout.readline().strip())
        server.kill()
    assert left.exists()
    monkeypatch.setattr(compare, "difference", lambda known: None)
    with pytest.raises(ModuleNotFoundError):  # of SGLang, after the decision
        sglang.register()
    assert ("in", False) == (os.environ[AGREED], left.exists())
