"""The configuration: what is checked, what it switches, which cache each process gets."""

import dataclasses
import os
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from shmstore import LayoutMismatchError, ObjectStoreReader, StoreNotFoundError, WriterActiveError
from shmstore.bindings import store as native
from shmstore.errors import shown
from shmstore.inspect.inspector import StoreInspector
from shmstore.multimodal import (
    MirroredProcessingCache,
    MultiModalCacheConfig,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
    engine_receiver_cache_from_config,
    processor_cache_from_config,
    processor_only_cache_from_config,
    worker_receiver_cache_from_config,
)
from tests.multimodal.helpers import GIB, MIB, config, item, processor_cache, shm_sender
from tests.support import SHM as SHM_FOLDER
from tests.support import Child, Signal, raises

SMALL = MIB / GIB


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("processor_cache_gb", [-1, float("nan"), float("inf"), "4", None, True, 10**400, 10**5000, 1e308]),
        ("ipc_cache_gb", [-0.5, float("nan"), "4", 10**400, 2**18 + 1]),
        ("processor_cache_gb", [1e-12, 4e-10, 5e-324, np.float64("nan"), np.bool_(True), 1j]),
        ("ipc_cache_gb", [1e-12]),
        ("cache_type", ["disk", None, ""]),
        ("shm_name", ["a/b", "", 3, "a\0", ".", "..", "x" * 300, "é" * 101, "\ud800"]),
        ("shm_dir", ["", 3, "a\0", "x" * 4000]),
        ("shm_gid", [-1, "users", True, 2**32 - 1]),
        ("shm_allow_uid", [-1, "root", 1.0]),
        ("shm_max_objects", [0, -1, 10**400]),
        ("world_size", [0, -1]),
        ("api_process_count", [0]),
        ("data_parallel_size", [0]),
        *((flag, ["false", 0, None]) for flag in ("shm_prefault", "supports_multimodal")),
    ],
)
def test_a_wrong_value_is_refused_and_the_field_named(field: str, values: list[Any]) -> None:
    for value in values:
        with raises(ValueError, names=(field, shown(value))):
            MultiModalCacheConfig(**{field: value})


def test_a_group_without_the_owner_of_the_segment_is_refused() -> None:
    with raises(ValueError, names=("shm_gid", "shm_allow_uid")):
        MultiModalCacheConfig(cache_type="shm", shm_name="a", shm_gid=0)


@pytest.mark.parametrize("field", ["shm_max_objects", "world_size", "api_process_count", "shm_max_object_size_mb"])
def test_a_number_that_is_not_an_integer_is_refused(field: str) -> None:
    wrongs: list[Any] = [1.0, True, "7"]
    for value in wrongs:
        with raises(ValueError, names=(field, type(value).__name__)):
            MultiModalCacheConfig(**{field: value})


def test_numbers_of_other_libraries_are_numbers_and_kept_as_our_own() -> None:
    numbers: dict[str, Any] = {
        "processor_cache_gb": np.float32(0.1),
        "ipc_cache_gb": Fraction(1, 3),
        "world_size": np.int64(2),
        "shm_max_objects": np.int32(7),
    }
    settings = MultiModalCacheConfig(cache_type="shm", **numbers)
    assert (round(float(np.float32(0.1)) * GIB), round(GIB / 3)) == (
        settings.processor_cache_bytes,
        settings.ipc_cache_bytes,
    )
    assert [float, float, int, int] == [
        type(number)
        for number in (
            settings.processor_cache_gb,
            settings.ipc_cache_gb,
            settings.world_size,
            settings.shm_max_objects,
        )
    ]
    assert 1 == MultiModalCacheConfig(processor_cache_gb=1 / GIB).processor_cache_bytes


def test_a_second_replica_of_the_same_name_is_told_that_it_needs_its_own(name: str) -> None:
    settings = config(MIB, cache_type="shm", shm_name=name, data_parallel_external_lb=True)
    with shm_sender(settings):
        hint = ("shm_name", "each replica")
        with raises(WriterActiveError, names=[repr(settings.shm_name), f"process {os.getpid()}"], hint=hint):
            processor_cache_from_config(settings)


def test_what_the_store_would_refuse_the_configuration_refuses() -> None:
    longest: dict[str, Any] = {"shm_name": "x" * native.MAX_NAME, "world_size": native.MAX_READERS}
    longest |= {"cache_type": "shm", "shm_max_objects": native.MAX_OBJECTS}
    MultiModalCacheConfig(**longest)
    for field, most, value in (
        ("shm_max_objects", native.MAX_OBJECTS, native.MAX_OBJECTS + 1),
        ("shm_name", native.MAX_NAME, "x" * (native.MAX_NAME + 1)),
        ("world_size", native.MAX_READERS, native.MAX_READERS + 1),
        ("api_process_count", native.MAX_WRITERS, native.MAX_WRITERS + 1),
    ):
        with raises(ValueError, names=(field, str(most), shown(value))):
            MultiModalCacheConfig(**{**longest, field: value})
    for workers, most in ((1, native.MAX_GROUPS), (100, native.MAX_READERS // 100)):
        MultiModalCacheConfig(cache_type="shm", world_size=workers, data_parallel_size=most)
        with raises(ValueError, names=("data_parallel_size", f"at most {most}", str(most + 1))):
            MultiModalCacheConfig(cache_type="shm", world_size=workers, data_parallel_size=most + 1)
        MultiModalCacheConfig(
            cache_type="shm", world_size=workers, data_parallel_size=most + 1, data_parallel_external_lb=True
        )
    assert "300 workers" in MultiModalCacheConfig(world_size=300).describe(), "without a store there is no bound"


def test_a_named_configuration_can_be_had_in_every_mode() -> None:
    named = config(MIB, cache_type="shm", shm_name="replica-3")
    for other in (dataclasses.replace(named, cache_type="lru"), dataclasses.replace(named, ipc_cache_gb=0)):
        assert "replica-3" == other.shm_name
        assert processor_cache(other).handle is None
    lru = dataclasses.replace(named, cache_type="lru")
    assert named == dataclasses.replace(lru, cache_type="shm")


ONLY, SENDER, SHM = MultiModalProcessorOnlyCache, MultiModalProcessorSenderCache, ShmObjectStoreSenderCache
NAME = f"several-{os.getpid()}"

# fields, cache of the API server without shm and with it, whether `describe` finds an IPC cache
TABLE = [
    ({}, SENDER, SHM),
    ({"ipc_cache_gb": SMALL / 2}, SENDER, SHM),
    ({"ipc_cache_gb": 0}, ONLY, ONLY),
    ({"processor_cache_gb": 0}, type(None), type(None)),
    ({"processor_cache_gb": 0, "ipc_cache_gb": 1.0}, type(None), type(None)),
    ({"supports_multimodal": False}, type(None), type(None)),
    ({"api_process_count": 2, "shm_name": NAME}, ONLY, SHM),
    ({"data_parallel_size": 2}, ONLY, SHM),
    ({"api_process_count": 2, "data_parallel_size": 2, "shm_name": NAME}, ONLY, SHM),
    ({"api_process_count": 2, "ipc_cache_gb": 0}, ONLY, ONLY),
    ({"data_parallel_size": 2, "data_parallel_external_lb": True}, SENDER, SHM),
    ({"api_process_count": 2, "data_parallel_size": 2, "data_parallel_external_lb": True, "shm_name": NAME}, ONLY, SHM),
]


@pytest.mark.parametrize("cache_type", ["lru", "shm"])
@pytest.mark.parametrize(("fields", "lru", "shm"), TABLE)
def test_each_process_gets_the_cache_of_the_table(
    fields: dict[str, Any], lru: type, shm: type, cache_type: Any
) -> None:
    settings = MultiModalCacheConfig(**{"processor_cache_gb": SMALL, "cache_type": cache_type, **fields})
    expected = lru if cache_type == "lru" else shm
    cache = processor_cache_from_config(settings)
    try:
        assert expected is type(cache)
        only = processor_only_cache_from_config(settings)
        assert (type(None) if expected is type(None) else ONLY) is type(only)
        engine = engine_receiver_cache_from_config(settings)
        assert (MultiModalReceiverCache if expected is SENDER else type(None)) is type(engine)
        handle = cache.handle if isinstance(cache, ShmObjectStoreSenderCache) else None
        worker = worker_receiver_cache_from_config(settings, 0, handle)
        assert (ShmObjectStoreReceiverCache if expected is SHM else type(None)) is type(worker)
        if isinstance(worker, ShmObjectStoreReceiverCache):
            worker.close()
    finally:
        if isinstance(cache, ShmObjectStoreSenderCache):
            cache.close(unlink=True)
    text = settings.describe()
    starts = {type(None): "No multi-modal cache", ONLY: "Processor cache only"}
    assert text.startswith(starts.get(expected, "Processor and IPC cache"))


SEVERAL: dict[str, Any] = {"api_process_count": 3, "data_parallel_size": 2, "world_size": 2}
DESCRIBED: list[tuple[dict[str, Any], list[str]]] = [
    ({"ipc_cache_gb": 8}, ["up to 4 GiB of prompt updates; no tensors.", "Engine core: up to 8 GiB of items."]),
    ({"world_size": 4}, ["Each of 4 workers: nothing; items reach them"]),
    (
        {"cache_type": "shm", "ipc_cache_gb": 0.5},
        ["one segment of 512 MiB", "over 128 MiB", "one entry for each 16 KiB"],
    ),
    (
        {"cache_type": "shm", "shm_max_objects": 50},
        ["entries for 50 items", "Engine core: nothing; it forwards", "no copy"],
    ),
    (
        {"cache_type": "shm", "shm_name": NAME, **SEVERAL},
        ["its part, 4 GiB, of one segment of 12 GiB"],
    ),
    (
        SEVERAL,
        ["Each of 3 API servers: up to 4 GiB", "Each of 2 engine cores: nothing.", "Each of 4 workers: nothing."],
    ),
    ({"api_process_count": 3}, ["there are 3 API servers"]),
    ({"ipc_cache_gb": 0, "processor_cache_gb": 7 / GIB}, ["ipc_cache_gb is 0", "7 bytes"]),
    ({"data_parallel_size": 2}, ["2 engine cores share one API server"]),
    ({"processor_cache_gb": 0}, ["processor_cache_gb is 0", "API server: nothing."]),
    ({"supports_multimodal": False}, ["text only"]),
]


@pytest.mark.parametrize(("fields", "parts"), DESCRIBED)
def test_describe_says_which_process_keeps_how_much(fields: dict[str, Any], parts: list[str]) -> None:
    text = MultiModalCacheConfig(**fields).describe()
    assert [] == [part for part in parts if part not in text]
    assert 4 == len(text.splitlines())


def test_api_servers_that_share_a_segment_need_its_name() -> None:
    with raises(ValueError, names=("shm_name", "3 API servers", "api_process_count")):
        MultiModalCacheConfig(cache_type="shm", api_process_count=3)
    MultiModalCacheConfig(cache_type="shm", api_process_count=3, ipc_cache_gb=0)  # there is no segment
    MultiModalCacheConfig(cache_type="shm", data_parallel_size=3)  # one server creates it for all


def test_the_store_has_the_size_the_name_and_the_ranks_of_the_configuration(name: str) -> None:
    settings = config(4 * MIB, 2 * MIB, cache_type="shm", shm_max_object_size_mb=1, shm_name=name, world_size=3)
    settings = dataclasses.replace(settings, shm_max_objects=50)
    with shm_sender(settings) as sender:
        stats = sender.writer.stats()
        assert (2 * MIB, 1 * MIB, 3) == (stats.capacity, stats.max_object_size, stats.n_readers)
        assert (50, name) == (stats.max_objects, sender.handle.name)
        for rank in (-1, 3):
            with raises(ValueError, names=("rank", "world_size", "2", str(rank))):
                worker_receiver_cache_from_config(settings, rank, sender.handle)


@pytest.mark.parametrize("rank", [None, "0", True, 0.0])
def test_a_rank_that_is_not_an_integer_is_a_type_error(rank: Any) -> None:
    with raises(TypeError, names=("rank", type(rank).__name__)):
        worker_receiver_cache_from_config(config(4 * MIB, cache_type="shm"), rank)


def test_a_configuration_says_the_folder_before_a_handle_does(tmp_path: Path, name: str) -> None:
    folder = SHM_FOLDER / f"{name}-folder"
    folder.mkdir()
    try:
        settings = config(4 * MIB, cache_type="shm", shm_dir=str(folder))
        assert f"allocated in {folder} at" in settings.describe()
        (tmp_path / "mount").symlink_to(folder)
        with shm_sender(settings) as sender:
            assert [sender.handle.name] == os.listdir(folder)
            elsewhere = dataclasses.replace(settings, shm_dir=str(tmp_path / "mount"))
            for there in (settings, elsewhere):
                handle = dataclasses.replace(sender.handle, dir="/nowhere")
                with cast(ShmObjectStoreReceiverCache, worker_receiver_cache_from_config(there, 0, handle)) as worker:
                    assert worker.reader.store_id == handle.store_id
    finally:
        folder.rmdir()


@pytest.mark.parametrize("way", ["handle", "name", "SHMSTORE_HANDLE", "shm_name"])
def test_a_worker_finds_its_store_by_handle_name_environment_or_configuration(
    way: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(4 * MIB, cache_type="shm")
    monkeypatch.delenv("SHMSTORE_HANDLE", raising=False)
    with raises(ValueError, names=("store", "SHMSTORE_HANDLE", "shm_name")):
        worker_receiver_cache_from_config(settings, 0)
    if way == "shm_name":
        settings = config(4 * MIB, cache_type="shm", shm_name=name)
    with shm_sender(settings) as sender:
        if way == "SHMSTORE_HANDLE":
            monkeypatch.setenv("SHMSTORE_HANDLE", sender.handle.to_json())
        store: Any = {"handle": sender.handle, "name": sender.handle.name}.get(way)
        with cast(ShmObjectStoreReceiverCache, worker_receiver_cache_from_config(settings, 0, store)) as worker:
            ref, _ = sender.get_and_update_item((item(3), []), "a")
            assert item(3) == worker.get_and_update_item(ref, "a")
            assert isinstance(worker.reader, ObjectStoreReader)


def test_a_worker_waits_for_the_store_of_its_configuration(name: str) -> None:
    """It starts before the API server."""
    settings = config(4 * MIB, cache_type="shm", shm_name=name)
    for named in (None, name):
        with pytest.raises(StoreNotFoundError, match=r"after 0.01 seconds"):
            worker_receiver_cache_from_config(settings, 0, named, wait=0.01)
    waits = Signal()

    def worker() -> Any:
        waits.send()
        with cast(ShmObjectStoreReceiverCache, worker_receiver_cache_from_config(settings, 0)) as cache:
            return cache.reader.store_id

    child = Child(worker)
    try:
        waits.wait()
        with shm_sender(settings) as sender:
            assert sender.handle.store_id == child.join()
    finally:
        child.kill()
        waits.close()


@pytest.mark.parametrize("way", ["handle", "name", "shm_name"])
@pytest.mark.parametrize(("there", "here", "rank"), [(2, 4, 0), (2, 4, 3), (4, 2, 1)])
def test_a_worker_of_another_world_size_hears_both_numbers(
    way: str, there: int, here: int, rank: int, name: str
) -> None:
    settings = config(4 * MIB, cache_type="shm", shm_name=name, world_size=there)
    with shm_sender(settings) as sender:
        store: Any = {"handle": sender.handle, "name": name, "shm_name": None}[way]
        wrong = dataclasses.replace(settings, world_size=here)
        with raises(LayoutMismatchError, names=[name, f"{there} ranks", f"not {here}"], hint=["world_size"]):
            worker_receiver_cache_from_config(wrong, rank, store)
        with StoreInspector.open(name) as inspector:  # it has taken no rank for a moment
            assert {0} == {reader.attachments for reader in inspector.readers()}


def test_a_named_store_is_there_for_the_next_start_and_another_goes(name: str) -> None:
    named, nameless = config(4 * MIB, cache_type="shm", shm_name=name), config(4 * MIB, cache_type="shm")
    with shm_sender(named) as sender, shm_sender(nameless) as other:
        sender.get_and_update_item((item(3), []), "a")
    with shm_sender(named) as again:
        assert ([True], False) == (again.is_cached(["a"]), (SHM_FOLDER / other.handle.name).exists())
        again.close(unlink=True)
    assert not (SHM_FOLDER / name).exists()


@pytest.mark.parametrize("prefault", [False, True])
def test_the_segment_is_mapped_before_its_first_use_only_if_asked_for(prefault: bool) -> None:
    settings = config(4 * MIB, cache_type="shm", shm_prefault=prefault)
    with shm_sender(settings) as sender:
        maps = Path("/proc/self/smaps").read_text()
        mapped = sum(
            int(part.split("Rss:")[1].split()[0]) * 1024
            for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", maps, flags=re.M)
            if sender.handle.name in part
        )
        assert prefault == (mapped >= 4 * MIB)


@pytest.mark.parametrize("config", [None, {"cache_type": "lru"}])
def test_what_is_no_configuration_is_refused_by_name(config: Any) -> None:
    calls: list[Callable[[Any], object]] = [
        processor_cache_from_config,
        processor_only_cache_from_config,
        engine_receiver_cache_from_config,
        lambda config: worker_receiver_cache_from_config(config, 0),
        MultiModalProcessorOnlyCache,
        MultiModalProcessorSenderCache,
        MultiModalReceiverCache,
        MirroredProcessingCache,
    ]
    for call in calls:
        with raises(TypeError, names=["config", "MultiModalCacheConfig"]):
            call(config)
