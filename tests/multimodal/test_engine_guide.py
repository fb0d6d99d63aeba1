"""What the pages for engine authors claim of restarts and sizes is true."""

import multiprocessing
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmstore import ObjectStoreWriter
from shmstore.multimodal import MultiModalCacheConfig, ResolvedPromptUpdate, factories
from tests.multimodal.helpers import item, processor_cache
from tests.support import bytes_needed

ROOT = Path(__file__).parents[2]
DETAILS = ROOT / "docs" / "reference" / "multimodal-caches.md"
MIB = 1 << 20


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
    assert rows
    for items, ranks, taken, length, percent in rows:
        needed = bytes_needed(int(items) * MIB, int(ranks))
        assert (int(length) * MIB, percent) == (needed, f"{100 * (int(length) / int(items) - 1):.1f}")
        if int(items) <= 64:
            with ObjectStoreWriter.create(capacity=int(items) * MIB, n_readers=int(ranks)) as writer:
                status = os.stat(f"/dev/shm/{writer.name}")
            assert (int(length) * MIB, taken) == (status.st_size, f"{status.st_blocks * 512 / MIB:.1f}")
