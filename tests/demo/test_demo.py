"""The demo: what it counts, what it notices, how it ends. Real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.demo.api import default_capacity, room_for_all
from examples.demo.main import execute, main
from examples.demo.messages import Progress
from examples.demo.modes import MODES
from examples.demo.processing import (
    PACKAGES,
    PhotographSource,
    item_bytes,
    item_digest,
    load_processor,
    shipped_photographs,
)
from examples.demo.records import ModeFigures, RunSettings
from examples.demo.supervisor import Observer
from shmstore import ObjectStoreWriter
from shmstore.multimodal import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from tests.demo.items import LosesTheStore, NotedItems, RandomItems, SpoiltItems
from tests.support import FRESH

ROOT = Path(__file__).resolve().parents[2]
ROW = 1176 * 4
needs_extra = pytest.mark.skipif(
    any(find_spec(package) is None for package in PACKAGES),
    reason="the demo extra (transformers, Pillow, scikit-image, scikit-learn) is not installed",
)


def segments(of_pid: int) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if f"shmstore-demo-{of_pid}-" in name]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    yield
    assert segments(os.getpid()) == []


@pytest.fixture
def _starts_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a run in this one have nothing to load; what they inherit of signals is not the supervisor's."""
    monkeypatch.setattr("examples.demo.supervisor.CONTEXT", FRESH)


starts_fast = pytest.mark.usefixtures("_starts_fast")


class Recorder(Observer):
    """Notes the processes of each start and the stages of each mode, and acts once, when the first step is through."""

    def __init__(self, act: Callable[[dict[str, int]], None] | None = None) -> None:
        self.pids: list[dict[str, int]] = []
        self.stages: list[tuple[str, str]] = []
        self._act = act

    def started(self, mode: str, pids: dict[str, int]) -> None:
        self.pids.append(pids)

    def progressed(self, mode: str, progress: Progress) -> None:
        if (mode, progress.stage) not in self.stages:
            self.stages.append((mode, progress.stage))
        if progress.stage == "sending" and self._act is not None:
            self._act(self.pids[-1])
            self._act = None


def wait_for_ends(pids: Iterable[int]) -> None:
    """Wait until all have ended."""
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@starts_fast
def test_every_mode_delivers_every_byte_under_pressure_and_says_in_json_what_it_did(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = RandomItems(rows=(100, 120, 140, 160, 180, 200, 220, 240, 2000))
    settings = RunSettings(workers=2, capacity=700 * ROW, rounds=4, in_flight=2)
    observer = Recorder()
    status = execute(settings, source, as_json=True, observer=observer)
    captured = capfd.readouterr()
    report = json.loads(captured.out)

    payload = sum(item_bytes(picture.process()[0]) for picture in source)
    assert (status, captured.err) == (0, "")
    assert report["ok"] is True
    assert asdict(settings) == report["settings"]
    assert (report["distinct_items"], report["distinct_bytes"]) == (9, payload)
    assert list(report["modes"]) == ["none", "lru", "shm"]
    assert observer.stages == [(mode, stage) for mode in report["modes"] for stage in ("processing", "sending")]
    none, lru, shm = (ModeFigures(**figures) for figures in report["modes"].values())
    for figures in (none, lru, shm):
        assert [figures.requests, figures.checked, figures.mismatches, figures.mismatched_names] == [36, 72, 0, []]
        assert figures.hit_ratio == (36 - figures.processed) / 36, "a hit, and only a hit, skips the processor"
        assert 0 < figures.latency_median_us
        assert 9 < figures.processed < 36, "it evicts"
    assert (none.sent_inline, lru.sent_inline) == (0, 0)
    assert shm.sent_inline >= 4, "the item larger than the store, once each round"


@starts_fast
def test_one_wrong_bit_is_seen_and_exits_1(capfd: pytest.CaptureFixture[str]) -> None:
    settings = RunSettings(workers=1, capacity=200 * ROW, rounds=2)
    assert 1 == execute(settings, SpoiltItems(rows=(10,) * 8))
    said = capfd.readouterr().out
    for mode in MODES:
        assert f"{mode}: 2 of 16 arrived wrong: item 0" in said


@starts_fast
@pytest.mark.parametrize("victim", ["worker 1", "the API process"])
def test_a_killed_process_ends_the_run_with_its_name_and_exit_status_1(
    victim: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = RunSettings(workers=2 if victim == "worker 1" else 1, rounds=100_000)

    def kill(pids: dict[str, int]) -> None:
        os.kill(pids[victim], signal.SIGKILL)
        wait_for_ends(pids.values())  # so that the supervisor finds them all ended, and has to tell who was first

    observer = Recorder(kill)
    status = execute(settings, RandomItems(rows=(10, 20, 30)), modes=["shm"], as_json=True, observer=observer)
    captured = capfd.readouterr()
    expected = f"{victim} (pid {observer.pids[0][victim]}) was ended by SIGKILL"
    assert (1, f"demo: {expected}\n") == (status, captured.err)
    assert {"ok": False, "error": expected} == json.loads(captured.out)


@starts_fast
def test_after_a_kill_new_processes_process_no_image_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[tuple[str, int | None]] = []
    really_kill = BaseProcess.kill

    def kill_and_note(process: BaseProcess) -> None:
        process.join(0.5)  # it must not end by itself
        really_kill(process)
        process.join()
        killed.append((process.name, process.exitcode))

    monkeypatch.setattr(BaseProcess, "kill", kill_and_note)
    settings = RunSettings(workers=1, rounds=3, in_flight=2, kill=True)
    observer = Recorder()
    source = NotedItems(rows=(10, 20, 300), notes=tmp_path / "processed")
    status = execute(settings, source, modes=["shm"], as_json=True, observer=observer)
    captured = capfd.readouterr()
    assert (0, "") == (status, captured.err)
    assert [("demo: the API process", -signal.SIGKILL)] == killed, "the others end by themselves"
    first, second = observer.pids
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())
    assert [str(first["the API process"])] * 6 == source.notes.read_text().split(), "once to know it, once to store it"
    report = json.loads(captured.out)
    assert (True, 3) == (report["ok"], report["distinct_items"])
    (figures,), restart = report["modes"].values(), report["restart"]
    assert (3, 3) == (restart["recovered"], restart["hits_kept"])
    assert 0 < restart["opened_s"] < restart["answered_s"]
    assert (5, 1, 0) == (figures["requests"], figures["hit_ratio"], figures["processed"]), (
        "of 9 requests the other half"
    )
    assert (5, 0) == (figures["checked"], figures["mismatches"])


@starts_fast
def test_a_hit_that_a_restart_has_lost_exits_1(capfd: pytest.CaptureFixture[str]) -> None:
    settings = RunSettings(workers=1, rounds=2, kill=True)
    assert execute(settings, LosesTheStore(rows=(10, 20, 30)), modes=["shm"]) == 1
    said = capfd.readouterr().out
    rows = dict([cell.strip() for cell in line.split("│")[1:3]] for line in said.splitlines() if line.startswith("│"))
    labels = ("objects recovered", "hits kept", "images processed again", "checked byte for byte", "wrong")
    assert ["0", "0 of 3", "3", "3", "0"] == [rows[label] for label in labels]
    assert "3 images were processed again: hits were lost" in said.splitlines()


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground, wherever the tests run
sys.path.insert(0, ".")
from tests.demo.items import RandomItems
from examples.demo.main import execute
from examples.demo.records import RunSettings
from examples.demo.supervisor import Observer

class Teller(Observer):
    def progressed(self, mode, progress):
        if progress.stage == "sending" and progress.done == 4:
            print("under way", flush=True)

source = RandomItems(rows=(10, 20, 30))
settings = RunSettings(workers=1, rounds=100_000)
sys.exit(execute(settings, source, modes=["shm"], observer=Teller()))
"""


def processes_of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked
    return found


@pytest.mark.parametrize(
    ("number", "whole_group", "status", "said"),
    [(signal.SIGINT, True, 130, "demo: interrupted\n"), (signal.SIGKILL, False, -signal.SIGKILL, "")],
    ids=["ctrl_c", "kill"],
)
def test_a_signal_to_the_demo_leaves_no_process_and_no_segment(
    number: int, whole_group: bool, status: int, said: str
) -> None:
    """Ctrl-C reaches every process, as from a terminal; SIGKILL only the first, and the others find out."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, as by tests that a shell runs in the background
    try:
        demo = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert demo.stdout is not None
    try:
        assert demo.stdout.readline() == "under way\n"
        if whole_group:
            os.killpg(demo.pid, number)
        else:
            demo.send_signal(number)
        _, errors = demo.communicate(timeout=60)
        assert (demo.returncode, errors) == (status, said)
        deadline = time.monotonic() + 30
        while processes_of_session(demo.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert processes_of_session(demo.pid) == []
        assert segments(demo.pid) == []
    finally:
        for pid in processes_of_session(demo.pid):
            os.kill(pid, signal.SIGKILL)


@needs_extra
def test_the_processor_is_qwen2_vls_and_its_items_are_named_by_content() -> None:
    (photograph,) = [path for path in shipped_photographs() if path.name == "china.jpg"]
    (picture,) = PhotographSource((photograph,))
    item, (update,) = picture.process()
    assert {"pixel_values": torch.float32, "image_grid_thw": torch.int64} == {
        name: elem.data.dtype for name, elem in item.items()
    }
    assert item["image_grid_thw"].data.tolist() == [1, 30, 46]  # 640 x 427 pixels in patches of 14
    assert item["pixel_values"].data.shape == (30 * 46, 1176)
    assert (update.modality, len(update.content)) == ("image", 15 * 23)
    changed = picture.image.copy()
    changed.putpixel((0, 0), tuple(value ^ 1 for value in np.asarray(changed)[0, 0].tolist()))
    other = load_processor()
    other.image_mean = [0.5, 0.5, 0.5]
    different = [replace(picture, image=changed), replace(picture, processor=other)]
    assert picture.mm_hash() == replace(picture, path=Path("elsewhere.jpg")).mm_hash()
    assert 3 == len({one.mm_hash() for one in [picture, *different]})


def test_a_missing_extra_is_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "demo: transformers, PIL, skimage, sklearn not installed; in the source tree: pip install '.[demo]'\n"
    )
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    ["--workers 0", "--capacity lots", "--mode pickle", "--kill engine", "--kill api --mode lru",
     "--kill api --capacity 1G", "--kill api --rounds 1"],
)  # fmt: skip
def test_a_usage_error_is_exit_status_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert arguments.split()[0] in capsys.readouterr().err.splitlines()[-1]


def item_of(tensors: dict[str, torch.Tensor]) -> MultiModalKwargsItem:
    field = MultiModalBatchedField()
    return MultiModalKwargsItem({key: MultiModalFieldElem("image", key, data, field) for key, data in tensors.items()})


def test_the_digest_sees_every_bit_the_dtype_the_shape_and_the_names() -> None:
    item = {"a": torch.arange(6, dtype=torch.int32).reshape(2, 3), "b": torch.tensor(1.0), "c": torch.empty(0)}
    flipped = item["a"].clone()
    flipped[1, 2] ^= 1
    others = [
        {**item, "a": flipped},
        {**item, "a": item["a"].reshape(3, 2)},
        {**item, "a": item["a"].view(torch.float32)},
        {**item, "b": torch.tensor([1.0])},
        {"x": item["a"], "b": item["b"], "c": item["c"]},
        {"a": item["a"], "b": item["b"]},
    ]
    transposed = {**item, "a": item["a"].t().contiguous().t()}
    assert item_digest(item_of(item)) == item_digest(item_of(transposed))
    assert len(others) + 1 == len({item_digest(item_of(other)) for other in [item, *others]})


def test_the_default_capacity_is_less_than_the_data_and_holds_its_largest_item() -> None:
    one = 5_000_000
    assert int(10 * one * 0.6) == default_capacity([one] * 10, free_shm=1 << 40)
    assert one < default_capacity([one], free_shm=1 << 40)
    assert default_capacity([one] * 10, free_shm=1_000_000) == 800_000


def test_a_run_with_a_kill_has_room_for_all_items_also_if_some_are_small() -> None:
    sizes = [20_000_000] * 8 + [10] * 3
    with ObjectStoreWriter.create(None, capacity=room_for_all(sizes), n_readers=1) as writer:
        for number, size in enumerate(sorted(sizes)):
            writer.cancel(writer.put(f"{number:064x}", torch.zeros(size, dtype=torch.uint8)))
        assert len(sizes) == len(writer.keys())
