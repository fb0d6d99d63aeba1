"""What the pages for engine authors claim of restarts is true."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmstore import ObjectStoreWriter
from shmstore.multimodal import MultiModalCacheConfig, ResolvedPromptUpdate, factories
from tests.multimodal.helpers import item, processor_cache


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
