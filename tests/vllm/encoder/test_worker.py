"""The workers' side of the connector: who stores, who loads, and what a store that is full or taken costs."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import shutil
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmstore import device
from shmstore.errors import ForeignStoreError, RankInUseError, StoreNotFoundError, StoreSpaceError
from shmstore.integrations.encoder import KIND, attaching, outputs
from shmstore.integrations.vllm.encoder import worker
from shmstore.integrations.vllm.encoder.messages import Report, Step
from shmstore.integrations.vllm.encoder.settings import Settings
from shmstore.integrations.vllm.encoder.worker import WorkerSide
from shmstore.refs import ObjectRef, trusted_ref
from shmstore.store import ObjectStoreReader, ObjectStoreWriter
from tests.store.test_users import GROUP, MEMBER, OUTSIDER, OWNER, as_user
from tests.support import SHM, in_child, mount_alone, store_name

MIB = 1 / 1024
"""In the unit of `capacity_gb`."""
Worker = Callable[..., WorkerSide]


def settings_of(**options: Any) -> Settings:
    return Settings(**{"capacity_gb": 4 * MIB, "readers": 4} | options)


@pytest.fixture
def name() -> Iterator[str]:
    name = store_name()
    yield name
    ObjectStoreWriter.unlink(name)


@pytest.fixture
def make(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = []

    def work(
        rank: int = 0, first_stage: bool = True, stores: bool = True, device: str = "cpu", **options: Any
    ) -> WorkerSide:
        group = SimpleNamespace(rank_in_group=rank, is_first_rank=first_stage)
        monkeypatch.setattr(worker, "get_tp_group", lambda: group)
        monkeypatch.setattr(worker, "get_pp_group", lambda: group)
        made.append(WorkerSide(settings_of(**{"store": name} | options), device, stores=stores))
        return made[-1]

    yield work
    for one in made:
        one.close()


def reader(one: WorkerSide) -> ObjectStoreReader:
    assert one._reader is not None
    return one._reader


def writer(one: WorkerSide) -> ObjectStoreWriter:
    assert one._writer is not None
    return one._writer


def stored(one: WorkerSide, key: str) -> ObjectRef:
    found = reader(one).find(key, namespace="scope")
    assert found is not None
    with found:
        return found.ref


def saves(**keys: str) -> Step:
    return Step("scope", saves=keys)


def test_the_first_rank_stores_whole_outputs_and_others_load_them(make: Worker) -> None:
    first, second = make(), make(rank=1)
    batch = torch.arange(60, dtype=torch.bfloat16).reshape(10, 6)
    for one in (first, second):
        one.save(saves(a="a/10"), "a", batch[:, 2:5])  # not contiguous
        one.save(saves(a="a/10"), "b", batch)  # not wanted
    assert second.report() is None
    report = first.report()
    assert report is not None
    assert {"stored": 1, "stored_bytes": 60} == report.figures
    assert first.report() is None
    ref = stored(first, "a/10")
    cache: dict[str, Any] = {"a": torch.ones(3)}  # another picture that had this name
    second.load(Step("scope", loads={"a": ref}), cache)
    assert torch.equal(batch[:, 2:5], cache["a"])
    cache["a"] += 1  # a copy
    assert 1 == writer(first).stats().kinds[KIND].objects


def test_a_store_has_no_entries_for_objects_smaller_than_outputs(make: Worker) -> None:
    assert 256 == writer(make(capacity_gb=8 * MIB)).stats().max_objects  # by default twice as many


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which root alone may")
def test_engines_of_two_users_of_a_group_share_a_store_and_a_third_is_refused() -> None:
    name = store_name()
    settings = settings_of(store=name, gid=GROUP, allow_uid=OWNER)

    def use() -> int:
        made = outputs.open_store(settings)
        assert made is not None
        with made, attaching.attach(settings) as reader:
            made.put(f"{os.getuid()}", torch.ones(3))
            return sum(reader.has(f"{uid}") for uid in (OWNER, MEMBER))

    def refused() -> None:
        for door in (outputs.open_store, attaching.attach):
            with pytest.raises(ForeignStoreError):
                door(settings)

    assert [1, 2] == [as_user(uid, use) for uid in (OWNER, MEMBER)]
    as_user(OUTSIDER, refused)
    (SHM / name).unlink()


def test_an_engine_without_room_says_what_to_set(tmp_path: Path) -> None:
    def open_it() -> None:
        mount_alone("tmpfs", tmp_path, "size=8m")
        with pytest.raises(StoreSpaceError) as caught:
            outputs.open_store(settings_of(store="a", capacity_gb=1.0, dir=str(tmp_path)))
        assert 1 << 30 < (caught.value.needed or 0)
        assert all(part in caught.value.hint for part in ("capacity_gb", str(tmp_path), "sizeLimit"))

    in_child(open_it)


def test_the_store_is_in_the_folder_of_the_settings(make: Worker, name: str, tmp_path: Path) -> None:
    (tmp_path / "shm").symlink_to("/dev/shm")
    one = make(dir=str(tmp_path / "shm"))
    assert {str(tmp_path / "shm")} == {writer(one).handle.dir, os.path.dirname(reader(one)._place)}


def test_another_device_than_a_gpu_gets_a_copy(make: Worker) -> None:
    one = make(device="meta")
    one.save(saves(a="a/1"), "a", torch.ones(1))
    cache: dict[str, Any] = {}
    one.load(Step("scope", loads={"a": stored(one, "a/1")}), cache)
    assert torch.device("meta") == cache["a"].device


def test_views_are_of_the_store(make: Worker) -> None:
    one = make(read="views")
    one.save(saves(a="a/1"), "a", torch.ones(1, 4))
    cache: dict[str, Any] = {}
    one.load(Step("scope", loads={"a": stored(one, "a/1")}), cache)
    assert reader(one).stats().live_views == 1
    del cache["a"]
    assert reader(one).stats().live_views == 0


def test_what_does_not_fit_is_counted_and_said_once(make: Worker, caplog: pytest.LogCaptureFixture) -> None:
    one = make(quota_gb=1 * MIB)
    for number in range(2):
        one.save(saves(a=f"a/{number}"), "a", torch.ones(3 << 20, dtype=torch.uint8))
    one.save(saves(a="a/small"), "a", torch.ones(1))
    one.save(saves(a="a/small"), "a", torch.ones(1))  # another request's, at the same time
    other = make()
    other.save(saves(a="a/small"), "a", torch.ones(1))  # another engine's
    assert other.report() is None
    report = one.report()
    assert report is not None
    assert {"refused": 2, "stored": 1, "stored_bytes": 4} == dict(report.figures)
    assert 1 == sum("not stored" in record.message for record in caplog.records)


def test_what_is_evicted_from_an_engine_s_part_is_counted(make: Worker) -> None:
    one = make()
    for number in range(3):
        one.save(saves(a=f"a/{number}"), "a", torch.ones(5 << 19, dtype=torch.uint8))  # of 4 MiB
    report = one.report()
    assert report is not None
    assert (3, 2) == (report.figures["stored"], report.figures["evicted"])


def test_what_is_too_large_is_said_in_the_settings_of_the_connector(
    make: Worker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    one.save(saves(a="a/1"), "a", torch.ones(5 << 20, dtype=torch.uint8))
    (said,) = (record.getMessage() for record in caplog.records if "not stored" in record.message)
    assert all(part in said for part in ("capacity_gb", f"shmstore gc {name} --yes --force"))
    assert "max_object_size" not in said


def test_a_store_that_was_removed_is_said_once(make: Worker, name: str, caplog: pytest.LogCaptureFixture) -> None:
    one = make()
    for number in range(3):
        one.save(saves(a=f"a/{number}"), "a", torch.ones(1))
        assert (number > 0) == any("was removed" in record.message for record in caplog.records)
        Path("/dev/shm", name).unlink()
        make(engines=2)  # another engine makes another one
    assert 1 == sum("was removed" in record.message for record in caplog.records)


def test_a_folder_that_cannot_be_looked_into_ends_no_worker(make: Worker, caplog: pytest.LogCaptureFixture) -> None:
    make()
    folder, moved = SHM / store_name(), SHM / store_name()
    folder.mkdir()
    one = make(dir=str(folder))
    folder.rename(moved)
    folder.touch()
    try:
        one.save(saves(a="a/1"), "a", torch.ones(1))
    finally:
        folder.unlink()
        shutil.rmtree(moved)
    assert reader(one).has("a/1", namespace="scope")
    assert any("was removed" in record.message for record in caplog.records)


def test_a_consumer_without_a_store_says_who_makes_it(make: Worker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "START", 0)
    with pytest.raises(StoreNotFoundError) as caught:
        make(stores=False)
    assert name in caught.value.message
    assert "ec_producer" in caught.value.hint
    make()  # so that there is one to remove


@pytest.mark.parametrize("folder", [None, "/dev/shm"])
def test_without_a_free_rank_the_error_names_readers_and_how_the_store_is_made_again(
    make: Worker, name: str, folder: str | None
) -> None:
    make(readers=1, dir=folder)
    with pytest.raises(RankInUseError) as caught:
        make(rank=1, readers=64, dir=folder)
    assert f"all 1 ranks of store '{name}'" in caught.value.message
    where = "" if folder is None else f" --dir {folder}"
    assert all(part in caught.value.hint for part in ("readers in", f"`shmstore gc {name} --yes --force{where}`"))


def test_one_engine_more_than_the_store_has_parts_only_reads(make: Worker, caplog: pytest.LogCaptureFixture) -> None:
    first, more = make(engines=1), make(engines=1)
    first.save(saves(a="a/1"), "a", torch.ones(1))
    more.save(saves(b="b/1"), "b", torch.ones(1))
    assert any("none are stored" in record.message for record in caplog.records)
    assert reader(more).has("a/1", namespace="scope")
    assert not reader(more).has("b/1", namespace="scope")
    assert Report(Counter(stored=1, stored_bytes=4)) == first.report()
    assert Report(Counter(unstored=1)) == more.report()


def test_a_later_engine_takes_the_store_as_it_is_and_the_log_of_vllm_says_what_differs(make: Worker) -> None:
    make(engines=2)
    handler = logging.StreamHandler(said := io.StringIO())
    logging.getLogger("vllm").addHandler(handler)
    later = make(engines=4, capacity_gb=8 * MIB, quota_gb=6 * MIB)
    logging.getLogger("vllm").removeHandler(handler)
    assert "n_writers is 2, not 4" in said.getvalue()
    stats = writer(later).stats()
    assert (2, 4 << 20, 3 << 20) == (writer(later).n_writers, stats.capacity, stats.kinds[KIND].quota)


def test_a_store_that_another_engine_makes_is_waited_for_as_long_as_readers_wait(
    make: Worker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attaching, outputs):
        monkeypatch.setattr(module, "START", 0.05)
    begun = time.monotonic()
    with (SHM / name).open("xb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        with pytest.raises(StoreNotFoundError):
            make()
    assert time.monotonic() - begun < 30
    (SHM / name).unlink()
    assert writer(make())


def test_a_consumer_does_not_store_and_stages_behind_the_first_have_nothing(make: Worker, name: str) -> None:
    make()
    consumer, behind = make(stores=False), make(first_stage=False)
    consumer.save(saves(a="a/1"), "a", torch.ones(1))
    assert [None] * 3 == [consumer._writer, behind._writer, behind._reader]
    cache: dict[str, Any] = {}
    behind.load(Step("scope", loads={"a": trusted_ref(bytes(40))}), cache)
    assert {} == cache
    with ObjectStoreReader.attach(name, None) as reader:
        assert not reader.has("a/1", namespace="scope")


class Gpu:
    """A device that makes its copies when it is told to."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.copies: list[Callable[[], object]] = []
        self.locked: list[tuple[int, int]] = []

    def is_available(self) -> bool:
        return True

    def device(self, device: Any) -> Any:
        return nullcontext()

    def Event(self) -> Gpu:  # noqa: N802 - torch's name
        return self

    def record(self) -> None: ...

    def synchronize(self) -> None:
        assert self.told.wait(30)
        while self.copies:
            self.copies.pop()()

    def cudart(self) -> Gpu:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.locked.append((nbytes, flags))
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802 - CUDA's name
        self.locked.clear()


def test_what_a_device_was_loaded_from_is_let_go_when_the_copy_is_done_though_no_step_follows(
    make: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    monkeypatch.setattr(device, "_cuda", lambda: gpu)
    monkeypatch.setattr(device, "_empty", lambda source, there: torch.empty_like(source))
    one, cache = make(device="cuda"), dict[str, Any]()
    writer(one).put("a/4", torch.arange(4.0), namespace="scope")
    one.load(Step("scope", loads={"a": stored(one, "a/4")}), cache)
    assert torch.equal(torch.arange(4.0), cache["a"])
    assert 1 == reader(one).stats().live_views
    gpu.told.set()
    one._pool.submit(int).result(30)
    assert 0 == reader(one).stats().live_views


def test_a_copy_from_a_device_is_stored_when_it_is_done_though_no_step_follows(
    make: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    monkeypatch.setattr(device, "_cuda", lambda: gpu)
    monkeypatch.setattr(device, "_copy", lambda source, place: gpu.copies.append(lambda: place.copy_(source.real)))
    one = make(device="cuda")
    assert [(writer(one).stats().capacity, 0)] == gpu.locked
    real = torch.arange(4.0)
    output = SimpleNamespace(real=real, device=torch.device("cuda"), shape=(4,), dtype=real.dtype, nbytes=16)
    one.save(saves(a="a/4"), "a", output)
    assert not reader(one).has("a/4", namespace="scope")
    gpu.told.set()
    one._pool.submit(int).result(30)
    assert torch.equal(real, reader(one).get(stored(one, "a/4")))
    one.close()
    assert [] == gpu.locked
