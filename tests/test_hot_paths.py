"""The calls, of Python and of C, on the paths that every request takes: one more is some percent of the time."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmstore import ObjectStoreReader, ObjectStoreWriter
from shmstore.multimodal import MultiModalCacheConfig
from shmstore.scheduler import BlockHasher, KVCacheManager, Request
from tests.multimodal.helpers import shm_sender, three_tensors, update
from tests.scheduler.helpers import config


def calls_of(path: Callable[[], Any], *kinds: str) -> int:
    """Return how many calls the second run of `path` makes, and itself; with "call" only frames of Python."""
    path()
    calls: Counter[str] = Counter()
    gc.disable()  # finalizers would be counted
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        path()
    finally:
        sys.setprofile(None)
        gc.enable()
    calls["c_call"] -= 1  # the last is setprofile itself
    return sum(calls[kind] for kind in kinds or ("call", "c_call"))


@pytest.mark.parametrize(("value", "most"), [(7, 13), (torch.ones(16), 14)], ids=["scalar", "tensor"])
def test_a_get_makes_no_more_calls(value: Any, most: int) -> None:
    with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        ref = writer.put("a", value)
        with ObjectStoreReader.attach(writer.handle, rank=0) as reader:
            assert calls_of(lambda: reader.get(ref)) <= most


@pytest.mark.parametrize(("value", "most"), [(7, 26), (torch.ones(16), 22)], ids=["scalar", "tensor"])
def test_a_put_makes_no_more_calls(value: Any, most: int) -> None:
    keys = iter("ab")
    with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        assert calls_of(lambda: writer.put(next(keys), value)) <= most


@pytest.mark.parametrize("events", [False, True])
def test_a_look_up_that_misses_makes_no_more_calls(events: bool) -> None:
    manager = KVCacheManager(config(100, ("full", 16)), 1024, 16, log_stats=True, enable_kv_cache_events=events)
    request = Request("r", list(range(64)), block_hasher=BlockHasher(16))
    assert calls_of(lambda: manager.get_computed_blocks(request)) <= 7


def test_a_sender_s_hit_makes_no_more_calls() -> None:
    with shm_sender(MultiModalCacheConfig(cache_type="shm", world_size=1, ipc_cache_gb=0.01)) as sender:
        sender.get_and_update_item((three_tensors(1024), [update("a")]), "a")
        assert calls_of(lambda: sender.get_and_update_item(None, "a")) <= 14


def test_more_containers_in_a_value_take_no_more_calls() -> None:
    with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        values = ({"pixels": torch.ones(16), "boxes": [{"box": [i]} for i in range(n)]} for n in (1000, 2000))
        refs = [writer.put(str(n), value, hold=True) for n, value in enumerate(values)]
        with ObjectStoreReader.attach(writer.handle, rank=0) as reader:
            few, many = (calls_of(lambda ref=ref: reader.get(ref)) for ref in refs)  # type: ignore[misc]
    assert few == many < 80


def test_a_sender_s_miss_makes_no_more_frames() -> None:
    hashes, new = iter("ab"), (three_tensors(1024), [update("a")])
    with shm_sender(MultiModalCacheConfig(cache_type="shm", world_size=1, ipc_cache_gb=0.01)) as sender:
        assert calls_of(lambda: sender.get_and_update_item(new, next(hashes)), "call") <= 26
