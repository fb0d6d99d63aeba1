"""One call for a process that restarts: what it takes over, what it replaces, and what it leaves alone."""

import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmstore import (
    CorruptStoreError,
    ForeignStoreError,
    LayoutMismatchError,
    ObjectStoreReader,
    ObjectStoreWriter,
    ShmStoreError,
    StoreHandle,
    StoreNotFoundError,
    StoreSpaceError,
    WriterActiveError,
)
from shmstore.bindings import inspect as native
from shmstore.files import classify
from tests.inspect.cases import poke
from tests.layout import FIELDS
from tests.store.test_segments import FOREIGN
from tests.support import SHM, Child, Signal, Stores, alive, bits, in_child, raises, random_tensor, segments, store_name

VALUE = random_tensor(1, 5000)
OPTIONS: dict[str, Any] = {"capacity": 64 * 1024, "n_readers": 2}


def reopened(stores: Stores, name: str, **options: Any) -> ObjectStoreWriter:
    return stores.keep(ObjectStoreWriter.open(name, **OPTIONS | options))


def left(name: str, **options: Any) -> StoreHandle:
    """Leave a store of one object, which has an open lease and a held one, by a clean end."""
    writer = ObjectStoreWriter.create(name, **OPTIONS | options)
    writer.put("k", VALUE)
    writer.get_cached("k", hold=True)
    writer.close(unlink=False)
    return writer.handle


def left_by_kill(name: str) -> StoreHandle:
    """Leave the same by SIGKILL."""

    def live(ready: Signal) -> None:
        writer = ObjectStoreWriter.create(name, **OPTIONS)
        writer.put("k", VALUE)
        writer.get_cached("k", hold=True)
        ready.send()
        while writer:
            time.sleep(60)

    with alive(live):
        pass
    with ObjectStoreWriter.recover(name) as writer:
        writer.close(unlink=False)
        return writer.handle


def test_where_nothing_is_it_creates(stores: Stores, name: str, caplog: pytest.LogCaptureFixture) -> None:
    writer = reopened(stores, name)
    assert (0, [], name) == (writer.recovered, writer.keys(), writer.name)
    assert 0 == stores.create().recovered
    assert [] == caplog.records


@pytest.mark.parametrize("leave", [left, left_by_kill])
def test_it_takes_over_what_a_dead_or_closed_writer_left(
    stores: Stores, name: str, leave: Callable[[str], StoreHandle], caplog: pytest.LogCaptureFixture
) -> None:
    handle = leave(name)
    reader = stores.attach(handle)
    writer = reopened(stores, name)
    assert (handle, 1, ["k"]) == (writer.handle, writer.recovered, writer.keys())
    assert 0 == writer.stats().open_leases
    assert bits(VALUE) == bits(reader.get(writer.get_cached("k")))
    assert [] == caplog.records
    writer.check_valid()


def test_leases_stay_where_they_are_wanted(stores: Stores, name: str) -> None:
    left(name)
    assert 2 == reopened(stores, name, keep_leases=True).stats().open_leases


def test_options_are_compared_as_rounded(stores: Stores, name: str) -> None:
    left(name, capacity=64 * 1024 - 5, max_objects=None, max_object_size=None)
    assert 1 == reopened(stores, name, capacity=64 * 1024 - 60).recovered
    stores.close()
    left(name)
    assert 1 == reopened(stores, name, max_objects=256, max_object_size=64 * 1024).recovered


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("capacity", 128 * 1024, ("capacity", "65536", "131072")),
        ("n_readers", 3, ("n_readers", "2", "3")),
        ("max_object_size", 4096, ("max_object_size", "65536", "4096")),
        ("max_objects", 7, ("max_objects", "256", "7")),
        ("huge_pages", True, ("huge_pages", "False")),
        ("checksums", True, ("checksums", "False")),
    ],
)
def test_a_store_of_other_options_is_replaced_or_named(
    stores: Stores, name: str, option: str, value: Any, named: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    handle = left(name)
    before = (SHM / name).read_bytes()
    with raises(LayoutMismatchError, names=(repr(name), *named)):
        ObjectStoreWriter.open(name, **OPTIONS | {option: value}, on_mismatch="raise")
    assert before == (SHM / name).read_bytes()
    assert [] == caplog.records
    writer = reopened(stores, name, **{option: value})
    assert (0, []) == (writer.recovered, writer.keys())
    assert handle.store_id != writer.handle.store_id
    (record,) = caplog.records
    assert (logging.WARNING, True) == (record.levelno, all(part in record.getMessage() for part in (name, *named)))


ACCEPTED: dict[str, Any] = {
    "capacity": 32 * 1024,
    "n_readers": 3,
    "max_object_size": 4096,
    "max_objects": 7,
    "checksums": True,
    "n_writers": 2,
    "groups": [1, 1],
}


@pytest.mark.parametrize("option", ACCEPTED)
def test_a_store_of_other_options_is_accepted_with_its_own(
    stores: Stores, name: str, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = left(name)
    writer = reopened(stores, name, on_mismatch="accept", quotas={"image": 1.0}, **{option: ACCEPTED[option]})
    assert (handle, 1, ["k"]) == (writer.handle, writer.recovered, writer.keys())
    figures = writer.stats()
    assert (64 * 1024, 64 * 1024, 0) == (figures.capacity, figures.kinds["image"].quota, figures.open_leases)
    (record,) = caplog.records
    assert (logging.WARNING, True) == (record.levelno, all(s in record.getMessage() for s in (name, option)))
    writer.close()
    assert (SHM / name).exists(), "it was opened, so closing keeps it"


def test_a_store_is_accepted_beside_living_writers_as_long_as_there_is_a_place(stores: Stores, name: str) -> None:
    first = stores.keep(ObjectStoreWriter.create(name, **OPTIONS, n_writers=2))
    first.put("k", VALUE)
    second = reopened(stores, name, capacity=4096, on_mismatch="accept")
    assert (1, 2, True) == (second.index, second.n_writers, second.is_cached("k"))
    for options in ({"capacity": 4096}, {"n_writers": 3}):
        with raises(WriterActiveError, names=[name]):
            reopened(stores, name, on_mismatch="accept", **options)


def test_accept_creates_where_nothing_is_and_says_nothing_of_the_same_options(
    stores: Stores, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for recovered in (0, 1):
        writer = reopened(stores, name, on_mismatch="accept")
        assert recovered == writer.recovered
        if not recovered:
            writer.put("k", VALUE)
        writer.close()
    assert [] == caplog.records


def test_a_call_that_fails_does_not_change_what_the_last_close_does(stores: Stores, name: str) -> None:
    """Quotas of one kind too many are known only from what the store has."""
    first = stores.keep(ObjectStoreWriter.create(name, **OPTIONS, n_writers=2))
    second = stores.keep(ObjectStoreWriter.join(name))
    for number in range(15):
        second.put(str(number), number, kind=str(number))
    second.close()
    with pytest.raises(ValueError, match="one too many"):
        reopened(stores, name, n_writers=2, quotas={"another": 0.5})
    first.close()
    assert not (SHM / name).exists()


@pytest.mark.alone
@pytest.mark.parametrize("fails", [True, False])
def test_only_a_recovery_that_succeeds_keeps_an_ephemeral_store_from_the_next_create(
    stores: Stores, name: str, fails: bool
) -> None:
    chosen = f"shmstore-{name}"

    def kill_one_that(takes: Callable[[], ObjectStoreWriter]) -> None:
        def live(ready: Signal) -> None:
            writer = takes()
            for number in range(15):
                writer.put(f"{number} {writer.recovered}", number, kind=str(number))
            ready.send()
            while writer:
                time.sleep(60)

        with alive(live):
            pass

    kill_one_that(lambda: ObjectStoreWriter.open(chosen, **OPTIONS, keep=False))
    if fails:
        with pytest.raises(ValueError, match="one too many"):
            ObjectStoreWriter.recover(chosen, quotas={"another": 0.5})
    else:
        kill_one_that(lambda: ObjectStoreWriter.recover(chosen))
    assert (SHM / chosen).exists()
    stores.create()
    assert fails != (SHM / chosen).exists()
    if not fails:
        ObjectStoreWriter.unlink(chosen)


def test_a_store_is_taken_over_whatever_it_says_of_prefault(stores: Stores, name: str) -> None:
    left(name, prefault=True)
    assert 1 == reopened(stores, name).recovered


def test_a_store_stays_if_there_is_no_room_for_the_one_that_would_replace_it(stores: Stores, name: str) -> None:
    left(name)
    before = (SHM / name).read_bytes()
    with pytest.raises(StoreSpaceError) as caught:
        ObjectStoreWriter.open(name, capacity=1 << 45, n_readers=2)
    assert (caught.value.free or 0) < (1 << 45) < (caught.value.needed or 0)
    assert before == (SHM / name).read_bytes()
    assert 1 == reopened(stores, name).recovered


def spoil_superblock(path: Path) -> None:
    poke(path, FIELDS["capacity"], 12345)


def spoil_tables(path: Path) -> None:
    poke(path, FIELDS["next_id"], 1)


def make_version_old(path: Path) -> None:
    poke(path, FIELDS["stamp"], 12345)


def leave_creation(path: Path) -> None:
    poke(path, FIELDS["stamp"], 0)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def empty(path: Path) -> None:
    os.truncate(path, 0)
    os.utime(path, (0, 0))  # long ago


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (spoil_superblock, CorruptStoreError),
        (spoil_tables, CorruptStoreError),
        (make_version_old, LayoutMismatchError),
        (leave_creation, LayoutMismatchError),
        (truncate, LayoutMismatchError),
        (empty, LayoutMismatchError),
    ],
)
def test_a_store_that_is_damaged_or_of_another_version_is_replaced_or_named(
    stores: Stores,
    name: str,
    damage: Callable[[Path], None],
    error: type[ShmStoreError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    left(name)
    damage(SHM / name)
    before = (SHM / name).read_bytes()
    for on_mismatch in ("raise", "accept"):
        with pytest.raises(error):
            reopened(stores, name, on_mismatch=on_mismatch)
    assert before == (SHM / name).read_bytes()
    assert 0 == reopened(stores, name).recovered
    assert [logging.WARNING] == [record.levelno for record in caplog.records]


@pytest.mark.parametrize("kind", ["text", "random", "zeros", "one byte"])
def test_a_file_that_is_not_a_store_is_never_removed(name: str, kind: str) -> None:
    (SHM / name).write_bytes(FOREIGN[kind])
    with pytest.raises(LayoutMismatchError):
        ObjectStoreWriter.open(name, **OPTIONS)
    assert FOREIGN[kind] == (SHM / name).read_bytes()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_not_a_regular_file_is_never_removed(name: str, make: Callable[[Path], None]) -> None:
    path = SHM / name
    make(path)
    try:
        with raises(LayoutMismatchError, names=["not a store"]):
            ObjectStoreWriter.open(name, **OPTIONS)
        assert path.is_symlink() or path.exists()
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()


def test_a_store_of_a_living_writer_stays_and_its_process_is_named(stores: Stores) -> None:
    writer = stores.create(**OPTIONS)
    writer.put("k", VALUE)

    def attempts() -> None:
        other = OPTIONS | {"n_readers": 1}
        calls: list[Callable[[], Any]] = [
            lambda: ObjectStoreWriter.recover(writer.name),
            lambda: ObjectStoreWriter.open(writer.name, **OPTIONS),
            lambda: ObjectStoreWriter.open(writer.name, **other),
            lambda: ObjectStoreWriter.open(writer.name, **other, on_mismatch="raise"),
        ]
        for attempt in calls:
            with raises(WriterActiveError, names=(repr(writer.name), f"process {os.getppid()}")):
                attempt()

    in_child(attempts)
    spoil_superblock(SHM / writer.name)  # its process is alive all the same
    with pytest.raises(WriterActiveError):
        ObjectStoreWriter.open(writer.name, **OPTIONS)
    assert writer.name in segments()
    writer.put("k2", VALUE)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which root alone may")
@pytest.mark.parametrize("damage", [None, make_version_old, spoil_superblock])
def test_a_store_of_another_user_is_never_removed(name: str, damage: Callable[[Path], None] | None) -> None:
    left(name, n_readers=1)
    if damage:
        damage(SHM / name)
    os.chown(SHM / name, 65534, 65534)
    with pytest.raises(ForeignStoreError):
        ObjectStoreWriter.open(name, **OPTIONS)
    assert (SHM / name).exists()


@pytest.mark.parametrize("moment", ["classify", "native.remove"])
def test_a_file_that_took_the_place_of_the_refused_one_is_not_removed(
    stores: Stores, name: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another process replaces it, puts, and ends, just before that call."""
    left(name, n_readers=1)
    call: Callable[..., Any] = classify if moment == "classify" else native.remove
    replaced: list[StoreHandle] = []

    def late(*which: Any) -> Any:
        if not replaced:
            (SHM / name).unlink()
            replaced.append(left(name))
        return call(*which)

    monkeypatch.setattr(f"shmstore.store.orphans.{moment}", late)
    writer = reopened(stores, name)
    assert (replaced, 1) == ([writer.handle], writer.recovered)


def test_of_two_writers_that_replace_a_store_of_other_options_the_slower_one_joins(
    stores: Stores, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(name, n_readers=1)
    both = OPTIONS | {"n_writers": 2}
    faster: list[ObjectStoreWriter] = []

    def late(which: str) -> Any:
        if which == name and not faster:
            (SHM / name).unlink()
            faster.append(stores.keep(ObjectStoreWriter.create(name, **both)))
        return classify(which)

    monkeypatch.setattr("shmstore.store.orphans.classify", late)
    with ObjectStoreWriter.open(name, **both) as slower:
        assert (1, faster[0].handle) == (slower.index, slower.handle)


def test_an_empty_file_whose_creator_goes_on_is_not_removed(
    stores: Stores, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first instant of a creation no lock tells that somebody goes on; the file keeps device and inode."""
    leave_empty(name)
    remove = native.remove
    finished: list[StoreHandle] = []

    def late(*which: Any) -> None:
        if not finished:
            source = store_name()
            finished.append(StoreHandle(name, left(source).store_id, OPTIONS["n_readers"]))
            (SHM / name).write_bytes((SHM / source).read_bytes())
            (SHM / source).unlink()
        remove(*which)

    monkeypatch.setattr(native, "remove", late)
    writer = reopened(stores, name)
    assert (finished, 1) == ([writer.handle], writer.recovered)


def test_a_file_that_is_empty_and_young_is_being_created(stores: Stores, name: str) -> None:
    """In the first instant of a creation its file has neither a size nor a lock."""
    (SHM / name).touch(0o600)
    inode = (SHM / name).stat().st_ino
    for call in (ObjectStoreWriter.join, ObjectStoreWriter.recover, ObjectStoreReader.attach):
        with raises(StoreNotFoundError, ["its creation is not over"]):
            call(name)
    with raises(WriterActiveError, ["is still being created"]):
        ObjectStoreWriter.open(name, **OPTIONS, wait=0.1)
    with raises(WriterActiveError, [name, "is still being created"], ["try again"]):
        ObjectStoreWriter.unlink(name)
    assert inode == (SHM / name).stat().st_ino
    assert 0 == reopened(stores, name).recovered  # nobody has gone on creating it
    other = name + "-of-a-clock-that-was-set-back"
    (SHM / other).touch(0o600)
    os.utime(SHM / other, (time.time() + 3600,) * 2)
    with raises(LayoutMismatchError, [other]):
        ObjectStoreWriter.join(other)
    (SHM / other).unlink()


@pytest.mark.parametrize("wrong", [{"on_mismatch": "keep"}, {"capacity": 0}, {"max_objects": -1}])
def test_wrong_options_are_refused_before_anything_is_looked_at(name: str, wrong: dict[str, Any]) -> None:
    left(name)
    before = (SHM / name).read_bytes()
    with raises(ValueError, names=wrong):
        ObjectStoreWriter.open(name, **OPTIONS | wrong)
    assert before == (SHM / name).read_bytes()


# ---- two at once


def leave_nothing(name: str) -> None:
    pass


def leave_other(name: str) -> None:
    left(name, capacity=8192)


def leave_empty(name: str) -> None:
    (SHM / name).touch(0o600)
    os.utime(SHM / name, (0, 0))


def race(name: str, go: Signal, told: Signal, end: Signal) -> str:
    """Open when told to `go`, and hold what was opened until the `end`; return the key that was put."""
    go.wait()
    try:
        writer = ObjectStoreWriter.open(name, **OPTIONS)
    except WriterActiveError:
        told.send()
        return ""
    writer.put(f"by {os.getpid()}", VALUE)
    told.send()
    end.wait()
    writer.close(unlink=False)
    return f"by {os.getpid()}"


@pytest.mark.parametrize("leave", [leave_nothing, left, leave_other, leave_empty])
def test_of_two_that_open_at_once_one_gets_the_store_and_the_other_is_refused(
    stores: Stores, leave: Callable[[str], Any]
) -> None:
    for _ in range(5):
        name = store_name()
        leave(name)
        signals = go, told, end = Signal(), Signal(), Signal()
        racers = [Child(race, name, *signals) for _ in range(2)]
        try:
            for step in (go.send, told.wait, end.send):
                step()
                step()
            (winner,) = filter(None, [racer.join() for racer in racers])
        finally:
            for racer in racers:
                racer.kill()
            for signal in signals:
                signal.close()
        writer = stores.recover(name)
        assert [*(["k"] if leave is left else []), winner] == writer.keys()
        assert 1 == sum(made.startswith(name) for made in segments())
        writer.close(unlink=True)


def test_what_a_creator_left_in_its_first_moments_is_replaced(stores: Stores, name: str) -> None:
    (SHM / name).write_bytes(struct.pack("8s", b"SHMSTOR1"))
    (SHM / name).chmod(0o600)
    assert 0 == reopened(stores, name).recovered
    stores.attach(name)
