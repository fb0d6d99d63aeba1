"""The pages for engine authors: the example and the fragment run, and the claims about pipes and sizes are true."""

import faulthandler
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, WriterActiveError
from shmstore.bindings.store import space
from shmstore.multimodal import MultiModalCacheConfig, ResolvedPromptUpdate, factories
from tests.multimodal.helpers import item, processor_cache, shm_sender

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "engine.md"
DETAILS = ROOT / "docs" / "reference" / "multimodal-caches.md"
MIB = 1 << 20


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
    )


def test_the_example_runs_and_prints_what_it_should(tmp_path: Path) -> None:
    code = GUIDE.read_text().split("```python\n")[-1].split("```")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) < 60
    script = tmp_path / "example.py"
    script.write_text(code)
    done = run(script)
    assert done.returncode == 0, done.stderr
    saw = f"the model saw [{3 * 224 * 224 * 0.2:.1f}"[:19]
    assert [True, True, True] == [
        done.stdout.splitlines()[0].startswith(saw),
        done.stdout.splitlines()[1] == done.stdout.splitlines()[0],
        done.stdout.splitlines()[2] == "CacheInfo(hits=1, total=2)",
    ], done.stdout
    assert done.stderr == ""


def die_with(config: MultiModalCacheConfig) -> None:
    sender = processor_cache(config)
    updates = [ResolvedPromptUpdate("image", 0, "insert", "a", "b")]
    sender.get_and_update([(item(1 << 10), updates)], ["a"])
    os._exit(0)


@pytest.fixture(name="name")
def _name() -> Iterator[str]:
    """Return a name for a store, and remove the store even if the test fails without a writer."""
    name = f"shmstore-docs-{os.getpid()}"
    yield name
    Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def test_a_restarted_api_server_takes_over_the_store_as_the_page_says(name: str) -> None:
    config = MultiModalCacheConfig(cache_type="shm", processor_cache_gb=0.01, ipc_cache_gb=0.01, shm_name=name)
    process = multiprocessing.get_context("fork").Process(target=die_with, args=(config,))
    process.start()
    process.join()
    with shm_sender(config) as sender:
        assert [1, 0, 0] == [sender.writer.recovered, sender.writer.stats().open_leases, sender.make_stats().total]
        with pytest.raises(WriterActiveError):
            processor_cache(config)
        assert sender.is_cached_item("a")
        copied = sender.writer.stats().put_bytes
        (ref, _), *_ = sender.get_and_update([None], ["a"])
        assert copied == sender.writer.stats().put_bytes
        with ObjectStoreReader.attach(sender.handle, rank=0) as reader:
            assert isinstance(ref, ObjectRef)
            assert item(1 << 10) == reader.get(ref, copy=True)
    with shm_sender(config) as sender:  # also after a clean end
        assert ["a"] == sender.writer.keys()


def test_a_sender_that_cannot_be_made_keeps_what_it_took_over_and_creates_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MultiModalCacheConfig(cache_type="shm", processor_cache_gb=0.01, ipc_cache_gb=0.01, shm_name=name)
    with monkeypatch.context() as patch:
        patch.setattr(factories, "ShmObjectStoreSenderCache", None)
        with pytest.raises(TypeError):
            processor_cache(config)
        assert not Path(f"/dev/shm/{name}").exists()
    process = multiprocessing.get_context("fork").Process(target=die_with, args=(config,))
    process.start()
    process.join()
    monkeypatch.setattr(factories, "ShmObjectStoreSenderCache", None)
    with pytest.raises(TypeError):
        processor_cache(config)
    with ObjectStoreWriter.recover(name) as writer:
        assert ["a"] == writer.keys()


def test_the_table_of_sizes_is_what_stores_take() -> None:
    row = re.compile(r"^\| (\d+) MiB \| (\d+) \| ([\d.]+) MiB \| (\d+) MiB \| ([\d.]+) % \|$", re.M)
    rows = row.findall(DETAILS.read_text())
    assert len(rows) == 6
    for items, ranks, taken, length, percent in rows:
        needed, _ = space(int(items) * MIB, int(ranks), 0, 0)
        assert (int(length) * MIB, percent) == (needed, f"{100 * (int(length) / int(items) - 1):.1f}")
        if int(items) <= 64:
            with ObjectStoreWriter.create(capacity=int(items) * MIB, n_readers=int(ranks)) as writer:
                status = os.stat(f"/dev/shm/{writer.name}")
            assert (int(length) * MIB, taken) == (status.st_size, f"{status.st_blocks * 512 / MIB:.1f}")


def test_a_write_into_an_item_that_was_read_by_reference_ends_the_process() -> None:
    with ObjectStoreWriter.create(capacity=MIB, n_readers=1) as writer:
        ref = writer.put("a", torch.zeros(4))

        def write() -> None:
            faulthandler.disable()  # it dies on purpose
            with ObjectStoreReader.attach(writer.handle, rank=0) as reader:
                reader.get(ref).mul_(2)

        process = multiprocessing.get_context("fork").Process(target=write)
        process.start()
        process.join()
    assert -signal.SIGSEGV == process.exitcode
