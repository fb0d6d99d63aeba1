"""One call for a process that restarts: what it takes over, what it replaces, and what it leaves alone."""

import dataclasses
import logging
import os
import stat
import struct
import time
from collections.abc import Callable
from functools import partial
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
from tests.support import SHM, Child, Signal, Stores, alive, bits, raises, random_tensor, segments, store_name

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


def test_options_are_compared_as_rounded_and_prefault_is_not(stores: Stores, name: str) -> None:
    left(name, capacity=64 * 1024 - 5, max_objects=None, max_object_size=None, prefault=True)
    for same in ({"capacity": 64 * 1024 - 60}, {"max_objects": 256, "max_object_size": 64 * 1024}):
        with reopened(stores, name, **same) as writer:
            assert 1 == writer.recovered


OTHER: dict[str, Any] = {
    "capacity": 32 * 1024,
    "n_readers": 3,
    "max_object_size": 4096,
    "max_objects": 7,
    "huge_pages": True,
    "checksums": True,
    "n_writers": 2,
    "groups": (1, 1),
}


@pytest.mark.parametrize("option", OTHER)
def test_another_option_is_named_accepted_or_replaced(
    stores: Stores, name: str, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle, other = left(name), {option: OTHER[option]}
    said = f"{option} is False" if OTHER[option] is True else f"not {OTHER[option]}"
    with raises(LayoutMismatchError, names=[repr(name), option, said]):
        reopened(stores, name, **other, on_mismatch="raise")
    with reopened(stores, name, on_mismatch="accept", quotas={"image": 1.0}, **other) as writer:
        figures = writer.stats()
        assert (handle, 1, ["k"]) == (writer.handle, writer.recovered, writer.keys())
        assert (64 * 1024, 64 * 1024, 0) == (figures.capacity, figures.kinds["image"].quota, figures.open_leases)
    assert handle.store_id != reopened(stores, name, **other).handle.store_id, "it was opened, so closing keeps it"
    accepted, replaced = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert all(part in text for text in (accepted, replaced) for part in (name, option, said))


def test_a_store_is_accepted_beside_living_writers_as_long_as_there_is_a_place(stores: Stores, name: str) -> None:
    first = stores.keep(ObjectStoreWriter.create(name, **OPTIONS, n_writers=2))
    first.put("k", VALUE)
    second = reopened(stores, name, capacity=4096, on_mismatch="accept")
    assert (1, 2, True) == (second.index, second.n_writers, second.is_cached("k"))
    for options in ({"capacity": 4096}, {"n_writers": 3}):
        with raises(WriterActiveError, names=[name]):
            reopened(stores, name, on_mismatch="accept", **options)


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


def other_options(path: Path) -> None:
    path.unlink()
    left(path.name, capacity=8192)


# What is done to a store, and what `open` with on_mismatch="raise" says of it: None if it takes it over.
STORES: dict[Callable[[Path], None] | None, type[ShmStoreError] | None] = {
    None: None,
    other_options: LayoutMismatchError,
    make_version_old: LayoutMismatchError,
    leave_creation: LayoutMismatchError,
    truncate: LayoutMismatchError,
    empty: LayoutMismatchError,
    spoil_superblock: CorruptStoreError,
    spoil_tables: CorruptStoreError,
}
# Files that no call may remove.
OTHERS: dict[str, Callable[[Path], Any]] = {
    **{kind: partial(Path.write_bytes, data=FOREIGN[kind]) for kind in ("text", "random", "zeros", "one byte")},
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/passwd"),
}


def file_at(path: Path) -> Any:
    """Return which file is there, and its contents."""
    seen = path.lstat()
    return seen.st_ino, seen.st_mode, path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""


WHOSE = ("mine", "another user's", "a living writer's")
# Who maps a file that is cut dies.
CASES = [(done, whose) for done in STORES for whose in WHOSE if whose != WHOSE[2] or done not in (truncate, empty)]


@pytest.mark.parametrize("on_mismatch", ["recreate", "raise", "accept"])
@pytest.mark.parametrize(("done", "whose"), CASES)
def test_open_takes_replaces_or_refuses_a_store(
    stores: Stores, name: str, done: Any, whose: str, on_mismatch: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is taken over with its options, replaced only by "recreate", and never if it is another's."""
    left(name)
    if done is other_options:
        done(SHM / name)
    if whose == "a living writer's":
        stores.recover(name)
    if done not in (None, other_options):
        done(SHM / name)
    error, names = STORES[done], [name]
    if whose == "another user's":
        if os.geteuid() != 0:
            pytest.skip("gives a file to another user, which root alone may")
        os.chown(SHM / name, 65534, 65534)
        error = ForeignStoreError
    elif whose == "a living writer's":
        error, names = WriterActiveError, [name, *([] if STORES[done] else [f"process {os.getpid()}"])]
    elif on_mismatch == "recreate" or (on_mismatch == "accept" and done is other_options):
        error = None
    before = file_at(SHM / name)
    caplog.clear()
    if error:
        with raises(error, names):
            reopened(stores, name, on_mismatch=on_mismatch, wait=0)
        assert (before, []) == (file_at(SHM / name), caplog.records)
        return
    writer, taken = reopened(stores, name, on_mismatch=on_mismatch), done is None or on_mismatch == "accept"
    assert (taken, taken) == (writer.recovered, "k" in writer)
    assert taken == (before[0] == file_at(SHM / name)[0])
    assert [logging.WARNING] * (done is not None) == [record.levelno for record in caplog.records]


@pytest.mark.parametrize("on_mismatch", ["recreate", "raise", "accept"])
def test_open_creates_where_nothing_is(
    stores: Stores, name: str, on_mismatch: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = reopened(stores, name, on_mismatch=on_mismatch)
    assert (0, [], name, []) == (writer.recovered, writer.keys(), writer.name, caplog.records)


@pytest.mark.parametrize("kind", OTHERS)
def test_open_never_removes_what_is_not_a_store(name: str, kind: str) -> None:
    OTHERS[kind](SHM / name)
    before = file_at(SHM / name)
    with raises(LayoutMismatchError, names=["not a store"]):
        ObjectStoreWriter.open(name, **OPTIONS)
    assert before == file_at(SHM / name)
    if kind == "folder":
        (SHM / name).rmdir()


def leave_nothing(name: str) -> None:
    pass


def leave_other(name: str) -> None:
    left(name, capacity=8192)


def leave_empty(name: str) -> None:
    (SHM / name).touch(0o600)
    os.utime(SHM / name, (0, 0))


def replace(stores: Stores, name: str) -> StoreHandle:
    """Replace it, put, and end."""
    (SHM / name).unlink()
    return left(name)


def replace_and_live(stores: Stores, name: str) -> StoreHandle:
    (SHM / name).unlink()
    return stores.keep(ObjectStoreWriter.create(name, **OPTIONS, n_writers=2)).handle


def go_on_creating(stores: Stores, name: str) -> StoreHandle:
    """In the first instant of a creation no lock tells of it; the file keeps device and inode."""
    handle = left(store_name())
    (SHM / name).write_bytes((SHM / handle.name).read_bytes())
    (SHM / handle.name).unlink()
    return dataclasses.replace(handle, name=name)


@pytest.mark.parametrize(
    ("moment", "leave", "other", "n_writers"),
    [
        ("classify", leave_other, replace, 1),
        ("native.remove", leave_other, replace, 1),
        ("native.remove", leave_empty, go_on_creating, 1),
        ("classify", leave_other, replace_and_live, 2),
    ],
)
def test_what_has_taken_the_place_of_a_refused_file_is_not_removed(
    stores: Stores, name: str, monkeypatch: pytest.MonkeyPatch, moment: str, leave: Any, other: Any, n_writers: int
) -> None:
    """Another process does that just before that call; the slower one takes its store over, or joins."""
    leave(name)
    call: Callable[..., Any] = classify if moment == "classify" else native.remove
    made: list[StoreHandle] = []

    def late(*which: Any) -> Any:
        if not made:
            made.append(other(stores, name))
        return call(*which)

    monkeypatch.setattr(f"shmstore.store.orphans.{moment}", late)
    with ObjectStoreWriter.open(name, **OPTIONS, n_writers=n_writers) as writer:
        assert (made, n_writers - 1, 2 - n_writers) == ([writer.handle], writer.index, writer.recovered)


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


# ---- two at once


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
