"""A store in any folder: `dir=`, SHMSTORE_DIR, handles and commands."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter, StoreHandle
from shmstore.cli import main as cli
from shmstore.errors import SharedMemoryError, StoreNotFoundError, StoreSpaceError
from shmstore.metrics import ShmStoreCollector
from tests.support import SHM, Stores, raises, segments, store_name

VALUE = np.arange(1000)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_store_is_a_file_of_its_folder_and_every_call_finds_it_there(stores: Stores, folder: Path) -> None:
    name = store_name()
    writer = stores.create(name=name, dir=folder, n_writers=2)
    assert (str(folder), name, {name}) == (writer.handle.dir, writer.name, names(folder))
    assert name not in segments()
    ref = writer.put("a", VALUE)
    assert np.array_equal(VALUE, stores.attach(writer).get(ref))
    other = stores.keep(ObjectStoreWriter.join(name, dir=str(folder)))
    assert other.get_cached("a") is not None
    with pytest.raises(StoreNotFoundError):
        ObjectStoreReader.attach(name)
    claim = writer.find_or_claim("b")
    assert other.find_or_claim("b") is None, "the two look at different files"
    claim.end()  # type: ignore[union-attr]
    other.close()
    writer.close(unlink=False)
    with ObjectStoreWriter.recover(name, dir=folder) as again:
        assert ["a"] == again.keys()
        again.close(unlink=False)
    with ObjectStoreWriter.open(name, dir=folder, capacity=1 << 20, n_readers=1, n_writers=2) as again:
        assert 1 == again.recovered
    ObjectStoreWriter.unlink(name, dir=folder)
    assert set() == names(folder)


def test_the_argument_comes_before_the_handle_and_that_before_the_variable(
    stores: Stores, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = stores.create()
    monkeypatch.setenv("SHMSTORE_DIR", str(folder))
    writer = stores.create(name=usual.name)
    assert {usual.name} == names(folder)
    assert [str(SHM), str(folder)] == [one.handle.dir for one in (usual, writer)]
    with ObjectStoreReader.attach(usual.handle) as by_handle, ObjectStoreReader.attach(usual.name) as by_name:
        assert (usual.handle.store_id, writer.handle.store_id) == (by_handle.store_id, by_name.store_id)
    with ObjectStoreReader.attach(usual.name, dir="/dev/shm") as given:
        assert usual.handle.store_id == given.store_id
    elsewhere = folder.with_name(f"{folder.name}-mount")
    elsewhere.symlink_to(folder)
    try:
        moved = replace(writer.handle, dir="/nowhere")
        with raises(SharedMemoryError, ["/nowhere"], ["dir="]):
            ObjectStoreReader.attach(moved)
        with ObjectStoreReader.attach(moved, dir=elsewhere) as given:
            assert writer.handle.store_id == given.store_id
    finally:
        elsewhere.unlink()


def test_a_handle_says_its_folder_and_one_that_does_not_means_the_usual_one(stores: Stores, folder: Path) -> None:
    handle = stores.create(dir=folder).handle
    assert handle == StoreHandle.from_json(handle.to_json())
    assert f"{folder}/{handle.name}" == handle.path
    assert StoreHandle("a", 1, 2, "/dev/shm") == StoreHandle.from_json('{"name":"a","store_id":1,"n_readers":2}')
    with raises(ValueError, ["dir"]):
        StoreHandle.from_json('{"name":"a","store_id":1,"n_readers":2,"dir":3}')


_LEAVE = """
import os, signal, sys
from shmstore import ObjectStoreWriter
kept = [ObjectStoreWriter.create(capacity=4096, n_readers=1, dir=sys.argv[1]) for _ in range(2)]
kept.pop().__del__ = None
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["exit", "killed"])
def test_what_a_process_left_is_removed_at_exit_or_by_a_create_in_its_folder(
    stores: Stores, folder: Path, how: str
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _LEAVE, str(folder), how]
    assert (0 if how == "exit" else -signal.SIGKILL) == subprocess.run(command, check=False, timeout=60).returncode
    assert (0 if how == "exit" else 2) == len(left := names(folder))
    stores.create()
    assert left == names(folder)
    assert {stores.create(dir=folder).name} == names(folder)


def test_metrics_of_an_owner_are_those_of_its_store(stores: Stores, folder: Path) -> None:
    with stores.create(dir=folder, writes=False) as owner:
        found = [sample for metric in ShmStoreCollector(owner).collect() for sample in metric.samples]
        assert {owner.name} == {sample.labels["store"] for sample in found}


def test_errors_name_the_folder(stores: Stores, folder: Path) -> None:
    name = store_name()
    with raises(SharedMemoryError, [f"{folder}/none"], ["dir="]):
        ObjectStoreWriter.create(name, capacity=4096, n_readers=1, dir=folder / "none")
    with raises(StoreSpaceError, [f"no room in {folder}:"], [str(folder)]):
        ObjectStoreWriter.create(name, capacity=1 << 46, n_readers=1, dir=folder)
    with raises(StoreNotFoundError, [f"'{folder}/{name}'"]):
        ObjectStoreReader.attach(name, dir=folder)
    assert set() == names(folder)


@pytest.mark.parametrize("how", ["--dir", "variable", "path", "usual"])
def test_commands_look_where_they_are_told(
    how: str, stores: Stores, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = SHM if how == "usual" else folder
    with stores.create(dir=chosen) as writer:
        writer.put("a", VALUE)
        name = f"{folder}/{writer.name}" if how == "path" else writer.name
        more = ["--dir", str(chosen)] if how in ("--dir", "usual") else []
        if how in ("variable", "usual"):
            monkeypatch.setenv("SHMSTORE_DIR", str(folder))
        assert 0 == cli.main(["top", name, "--iterations=1", "--json", *more])
        assert 1 == len(json.loads(capsys.readouterr().out)["stores"][0]["readers"])
        for command in (["dump", name], ["verify", name], ["verify", name, "--quick"], ["top", name, "--iterations=1"]):
            assert 0 == cli.main([*command, *more]), command
            assert writer.name in capsys.readouterr().out
        if how != "path":
            for command in (["ls"], ["top", "--iterations=1"]):
                status = cli.main([*command, *more])
                assert 0 == status or how == "usual"  # others' stores there may be damaged
                assert writer.name in capsys.readouterr().out
        writer.close(unlink=False)
        assert 0 == cli.main(["gc", "--yes", "--force", name, *more])
    assert set() == names(folder)


@pytest.mark.parametrize("same", ["/dev/shm/", "//dev/shm", "/dev/./shm", "/dev/../dev/shm"])
def test_a_folder_is_the_usual_one_however_it_is_written(same: str, stores: Stores) -> None:
    writer = stores.create(dir=same)
    assert "/dev/shm" == writer.handle.dir
    assert writer.handle.store_id == stores.attach(writer.name).store_id
