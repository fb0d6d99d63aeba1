"""Stores that several API servers have, after each other or at once, without an engine."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from vllm.multimodal.cache import factories
from vllm.utils.async_utils import make_async

import shmstore
from shmstore.bindings.inspect import probe
from shmstore.integrations.vllm import register, shared
from shmstore.integrations.vllm import sender as sender_module
from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.requests import follow_refusals
from shmstore.integrations.vllm.sender import SenderCache
from shmstore.integrations.vllm.shared import HANDLE, RUN, SHARE_UUIDS, STORE, TIER, WAIT
from shmstore.metrics import ShmStoreCollector
from tests.support import segments
from tests.vllm.parts import FIELDS, HASH, Desk, config, item, plain, prompt_updates, received, same


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a store that outlives its caches."""
    name = f"vllm-plugin-{os.getpid()}"
    monkeypatch.setenv(STORE, name)
    yield name
    shmstore.ObjectStoreWriter.unlink(name)


def test_the_next_api_server_has_the_items_and_their_updates(named: str) -> None:
    first = SenderCache(config())
    sent = first.get_and_update_item((item(*FIELDS), prompt_updates()), "a")[0]
    first.get_and_update_item((item(*FIELDS), ["not data"]), "b")
    first.close()
    second = SenderCache(config())
    assert (2, 0) == (second.writer.recovered, second.writer.stats().open_leases)
    del sent  # the dead server's
    assert [True, False] == [second.is_cached_item("a"), second.is_cached_item("b")]
    for _ in range(2):
        sent, updates = second.get_and_update_item(None, "a")
        assert plain(prompt_updates()) == plain(updates)
        assert same(item(*FIELDS), received(ReceiverCache(None, None), sent))
    second.close()


def test_a_process_ends_in_peace_if_the_folder_of_its_store_became_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(shared, "folder_of", lambda: str(tmp_path / "file"))
    shared._remove("a", os.getpid())


def test_a_store_that_was_removed_is_said_once(named: str, caplog: pytest.LogCaptureFixture) -> None:
    cache, path = SenderCache(config()), Path("/dev/shm", named)
    for number in range(3):
        cache.get_and_update_item((item(*FIELDS), prompt_updates()), f"item {number}")
        assert (number > 0) == any("was removed" in record.message for record in caplog.records)
        if number == 0:
            moved = path.rename(path.with_name(f"{named}-moved"))
    assert 1 == sum("was removed" in record.message for record in caplog.records)
    assert 1 == REGISTRY.get_sample_value("shmstore_in_use", {"reason": ""})
    moved.rename(path)
    cache.close()


def test_what_came_along_is_not_cleared_before_the_first_request(named: str, desk: Desk) -> None:
    first = SenderCache(config())
    first.get_and_update_item((item(*FIELDS), prompt_updates()), "a")
    first.close()
    desk.request("of the first server")
    second = SenderCache(config())
    second.clear_cache()  # as vLLM does at its start
    assert second.is_cached_item("a")
    desk.request("a")
    second.clear_cache()
    assert not second.is_cached_item("a")
    second.close()


@pytest.mark.parametrize("share_uuids", [False, True])
def test_a_name_that_a_client_chose_ends_with_the_run_of_its_server(
    named: str, share_uuids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARE_UUIDS, str(int(share_uuids)))
    names = ["image-0", HASH.upper(), "", HASH, 2 * HASH]
    for run in ("shmstore-1-first", "shmstore-1-second"):
        monkeypatch.setenv(RUN, run)
        sender = SenderCache(config())
        found = sender.is_cached(names)
        for name in names:
            sender.get_and_update_item((item(*FIELDS), []), name)
        assert [True] * 5 == sender.is_cached(names)
        sender.close()
    assert [share_uuids, share_uuids, False, True, True] == found


@pytest.mark.parametrize("by", [STORE, TIER])
def test_a_server_with_other_options_of_the_processor_has_its_own_items(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"vllm-options-{os.getpid()}"
    monkeypatch.setenv(by, name if by == STORE else tmp_path.as_uri())
    found = []
    for options in ({}, {"max_pixels": 50000}, {}):
        sender = SenderCache(config(processor_kwargs=options))
        found.append(sender.is_cached_item(HASH))
        sender.get_and_update_item((item(*FIELDS), prompt_updates()), HASH)
        sender.close()
    if by == STORE:
        shmstore.ObjectStoreWriter.unlink(name)
    assert [False, False, True] == found


def test_a_server_of_another_host_has_by_the_tier_what_no_client_has_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIER, tmp_path.as_uri())
    first, stranger, second = SenderCache(config()), SenderCache(config(name="another")), SenderCache(config())
    for name in ("image-0", HASH):
        first.get_and_update_item((item(*FIELDS), prompt_updates()), name)
    assert first._sender.tier.flush(10)
    second.clear_cache()  # as vLLM does at its start
    assert [True, False] == [second.is_cached_item(HASH), stranger.is_cached_item(HASH)]
    assert not second.is_cached_item("image-0")
    assert (1, 1) == (first._sender.tier.stats().published, second._sender.tier.stats().hits)
    sent, updates = second.get_and_update_item(None, HASH)
    assert plain(prompt_updates()) == plain(updates)
    assert same(item(*FIELDS), received(ReceiverCache(None, None), sent))
    for cache in (first, second, stranger):
        cache.close()


def test_a_second_server_of_the_same_name_is_told_what_to_do(named: str) -> None:
    first = SenderCache(config())
    with pytest.raises(shmstore.WriterActiveError) as caught:
        SenderCache(config())
    assert str(os.getpid()) in caught.value.message
    assert STORE in caught.value.hint
    first.close()


def test_a_store_of_encoder_outputs_is_not_replaced_by_a_processor_cache(named: str) -> None:
    def encoder(put: bool) -> int:
        with shmstore.ObjectStoreWriter.open(named, capacity=1 << 20, n_readers=2) as writer:
            if put:
                writer.put("a", torch.ones(1), kind="encoder", namespace="model")
            return len(writer)

    encoder(put=True)
    with pytest.raises(shmstore.LayoutMismatchError) as caught:
        SenderCache(config())
    assert all(part in caught.value.hint for part in (STORE, f"shmstore gc {named} --yes --force"))
    assert 1 == encoder(put=False)


ENGINES: dict[str, Any] = {"data_parallel_size": 2, "data_parallel_size_local": 2}


@pytest.mark.parametrize(
    ("kind", "parallel", "expected"),
    [
        ("shm", {}, "shm"),
        ("shm", ENGINES, "shm"),
        ("lru", ENGINES, "processor_only"),
        ("shm", ENGINES | {"data_parallel_size_local": 1}, "processor_only"),
        ("shm", ENGINES | {"data_parallel_size_local": 1, "data_parallel_external_lb": True}, "shm"),
        ("shm", ENGINES | {"data_parallel_size": 4, "data_parallel_hybrid_lb": True}, "shm"),
        ("shm", ENGINES | {"data_parallel_backend": "ray"}, "processor_only"),
        ("shm", {"_api_process_count": 2}, "shm"),
        ("shm", ENGINES | {"_api_process_count": 2}, "shm"),
        ("shm", {"data_parallel_size": 4, "_api_process_count": 2}, "processor_only"),
    ],
)
def test_engines_on_one_host_share_the_store_of_their_api_server(kind: str, parallel: Any, expected: str) -> None:
    register()
    assert expected == factories._get_cache_type(config(kind=kind, **parallel))


def test_each_worker_of_each_engine_is_a_reader_of_the_store() -> None:
    for parallel, readers in ((ENGINES, 6), ({**ENGINES, "data_parallel_size": 4, "data_parallel_hybrid_lb": True}, 6)):
        cache = SenderCache(config(workers=3, **parallel))
        try:
            assert readers == cache.writer.handle.n_readers
        finally:
            cache.close()


@pytest.mark.parametrize("kept", [False, True], ids=["for one run", "of a chosen name"])
def test_api_servers_share_what_either_has_stored_and_the_last_one_ends_their_store(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    name = f"shmstore-{os.getpid()}-shared"
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setenv(STORE if kept else RUN, name)
    monkeypatch.setattr(sender_module, "_collector", ShmStoreCollector)  # each is in a process of its own
    whole = item(*FIELDS)
    one, other = (SenderCache(config(_api_process_count=2)) for _ in range(2))
    cache = ReceiverCache(None, None)
    try:
        assert one.writer.handle == other.writer.handle
        assert kept != probe(name)["ephemeral"]  # else it goes if they are killed
        one.get_and_update_item((whole, []), "a")
        other.clear_cache()  # as vLLM does at its start
        assert other.is_cached_item("a")
        one.close()
        sent, updates = other.get_and_update_item(None, "a")
        assert [] == list(updates)
        assert same(whole, received(cache, sent))
        assert (0, 1) == (other.writer.stats().puts, other.writer.stats().remote_hits)
    finally:
        one.close()
        other.close()
    assert kept == (name in segments())
    if kept:
        with shmstore.ObjectStoreWriter.join(name) as again:
            assert 1 == again.recovered
            again.close(unlink=True)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SenderCache]]:
    """Two API servers of one store, which wait for each other for ever."""
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setenv(RUN, f"shmstore-{os.getpid()}-both")
    monkeypatch.setenv(WAIT, "inf")
    monkeypatch.setattr(sender_module, "_collector", ShmStoreCollector)
    made = [SenderCache(config(_api_process_count=2)) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def test_an_item_that_two_servers_miss_at_once_is_processed_by_one(servers: list[SenderCache]) -> None:
    one, other = servers
    asked = one.is_cached(["b", "a"])
    assert [False, False] == asked
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(other.is_cached, ["a", "b", "c"])
        one.get_and_update_item((item(*FIELDS), []), "b")
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        one.get_and_update_item((item(*FIELDS), []), "a")
        assert [True, True, False] == waiting.result(60)
    one.invalidate("a")  # `other` has been handed it
    assert [] == list(other.get_and_update_item(None, "a")[1])
    assert (2, 2) == (other.make_stats().hits, other.make_stats().total)


def test_the_claims_of_a_processor_that_fails_end_with_its_request(servers: list[SenderCache]) -> None:
    one, other = servers

    def process() -> None:
        mm_is_cached = {"image": one.is_cached(["a"])}
        raise AssertionError(mm_is_cached)

    async def request() -> None:
        with pytest.raises(AssertionError):
            await make_async(process)()

    asyncio.run(request())
    gc.collect()
    assert not other.writer.claimed(one._key("a"))


@pytest.mark.parametrize("merged", [False, True])
def test_what_a_refused_request_had_ends_at_once_whoever_keeps_its_error(
    servers: list[SenderCache], merged: bool
) -> None:
    one, other = servers
    one.get_and_update_item((item(*FIELDS), []), "a")

    class Renderer:
        _mm_processor_cache = one

        def _process_multimodal(self, prompt: str, *, skip_mm_cache: bool) -> None:
            mm_is_cached = one.is_cached(["a", "a", "b"])
            kept = [one.get_and_update_item(None, "a") for _ in range(2 * merged)]
            assert (2, True) == (one.writer.stats().open_leases, other.writer.claimed(one._key("b")))
            raise ValueError(mm_is_cached == kept)

    follow_refusals(Renderer)
    follow_refusals(Renderer)
    errors = []
    for _ in range(5):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            Renderer()._process_multimodal("prompt", skip_mm_cache=False)
        errors.append(caught.value)
        assert (0, False) == (one.writer.stats().open_leases, other.writer.claimed(one._key("b")))


@pytest.mark.parametrize(("value", "seconds"), [(None, 1.0), ("0", 0.0), ("2.5", 2.5)])
def test_it_waits_as_long_as_the_setting_says(
    value: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT, raising=False)
    if value is not None:
        monkeypatch.setenv(WAIT, value)
    cache, waits = SenderCache(config()), list[float]()

    def begin(mm_hashes: list[str], *, wait: float) -> list[None]:
        waits.append(wait)
        return [None]

    monkeypatch.setattr(cache._sender, "begin", begin)
    assert [False] == cache.is_cached(["a"])
    cache.close()
    assert [seconds] == waits


def test_on_the_thread_of_an_event_loop_nobody_waits(servers: list[SenderCache]) -> None:
    one, other = servers

    async def both() -> list[list[bool]]:
        kept = [cache.is_cached(["a"]) for cache in servers]
        assert other.writer.claimed(one._key("a"))
        return kept

    assert [[False], [False]] == asyncio.run(both())
    assert not one.writer.claimed(one._key("a"))


def test_processes_of_one_server_know_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (RUN, STORE, HANDLE):
        monkeypatch.setenv(variable, "of the process that started this one")
    monkeypatch.delenv(STORE)
    shared.agree.cache_clear()
    monkeypatch.setattr(multiprocessing, "parent_process", os.getpid)
    shared.agree()
    assert "of the process that started this one" == shared.store_name() == os.environ[HANDLE]
    monkeypatch.delenv(RUN)
    shared.agree.cache_clear()
    shared.agree()
    assert shared.store_name().startswith(f"shmstore-{os.getpid()}-")  # of a process that uses no vLLM itself
    monkeypatch.setenv(HANDLE, "of the process that started this one")
    shared.agree.cache_clear()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    shared.agree()
    chosen = shared.store_name()
    shared.agree()
    assert chosen == shared.store_name() != "of the process that started this one"
    assert HANDLE not in os.environ
    monkeypatch.setenv(STORE, "mine")
    assert "mine" == shared.store_name()
