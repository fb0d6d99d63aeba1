"""An arena takes memory from its first writer on, and a writer for which there is none says so and harms nobody."""

import faulthandler
import mmap
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter, StoreSpaceError
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.segments import find_segments
from shmstore.inspect.verify import verify
from shmstore.store import orphans
from tests.inspect.cases import piped, poke
from tests.layout import FIELDS
from tests.store.test_segments import free_bytes
from tests.support import SHM, Signal, Stores, alive, bits, in_child, on, raises, random_tensor, store_name

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"capacity": 2 * MIB, "n_readers": 1, "n_writers": 4, "max_objects": 16}


def taken(name: str) -> int:
    """Return the bytes of memory that a store takes."""
    return (SHM / name).stat().st_blocks * 512


def fill_up(left: int) -> Path:
    """Leave that many bytes of the file system free."""
    filler = SHM / "filler"
    filler.write_bytes(bytes(free_bytes() - left))
    return filler


def refused(name: str) -> None:
    """Ask for an arena that does not fit, in each way; all are refused, and take nothing."""
    free = free_bytes()
    fd = os.open(SHM / name, os.O_RDWR)
    calls: list[Callable[[], object]] = [
        lambda: ObjectStoreWriter.join(name),
        lambda: ObjectStoreWriter.join(fd=fd),
        lambda: ObjectStoreWriter.open(name, **OPTIONS),
    ]
    for call in calls:
        with pytest.raises(StoreSpaceError) as caught:
            call()
        assert (2 * MIB, free) == (caught.value.needed, caught.value.free)
        assert all(part in str(caught.value) for part in ("/dev/shm", "2 MiB needed", f"{free >> 20} MiB free"))
        assert "ls -ls /dev/shm" in caught.value.hint
        assert free == free_bytes()
    os.close(fd)


def use(writer: ObjectStoreWriter, seed: int) -> None:
    """Put an object that fills the arena, and read it."""
    value = random_tensor(seed, 2 * MIB - 4096)
    writer.clear()
    with ObjectStoreReader.attach(writer.handle) as reader:
        assert bits(value) == bits(reader.get(writer.put("k", value)))
    writer.check_valid()


def die(name: str, index: int | None = None) -> None:
    """Join, put an object and be killed."""
    writer = ObjectStoreWriter.join(name, index)
    writer.put("left", random_tensor(7, 1000))
    os.kill(os.getpid(), signal.SIGKILL)


def share_a_small_file_system() -> int:
    name = store_name()
    with ObjectStoreWriter.open(name, **OPTIONS) as first:  # the data of four and the tables are more than there is
        use(first, 1)
        filler = fill_up(2 * MIB - 4096)
        refused(name)
        use(first, 2)
        assert [("ok", 1)] == [(info.state, info.writers_alive) for info in find_segments()]
        assert verify(name).ok
        filler.unlink()
        with pytest.raises(AssertionError, match="SIGKILL"):
            in_child(die, name, 2)
        filler = fill_up(0)
        with ObjectStoreWriter.join(name) as second:  # in its predecessor's memory, past one that has none
            assert (2, ["left"]) == (second.index, second.keys())
            use(second, 3)
            refused(name)
            filler.unlink()
            with ObjectStoreWriter.join(name) as third:
                fill_up(0)
                use(third, 4)
                use(second, 5)
    with ObjectStoreWriter.recover(name) as again:
        use(again, 6)
    with ObjectStoreWriter.open(name, **OPTIONS) as again:
        use(again, 7)
    return taken(name)


def test_only_arenas_that_fit_are_taken_and_the_others_wait_for_room() -> None:
    result = on("tmpfs", SHM, "size=8m", share_a_small_file_system)
    assert 6 * MIB < result < 7 * MIB


def resize_in_a_full_volume() -> None:
    name = store_name()

    def is_killed(capacity: int) -> None:
        with ObjectStoreWriter.open(name, capacity=capacity, n_readers=1) as writer:
            writer.put("k", random_tensor(1, MIB))
            os.kill(os.getpid(), signal.SIGKILL)

    for capacity in (4 * MIB, 5 * MIB, 4 * MIB):  # the old one makes room for the new one
        with pytest.raises(AssertionError, match="SIGKILL"):
            in_child(is_killed, capacity)
    with alive(attach_until_killed, name) as worker:
        with ObjectStoreWriter.open(name, capacity=5 * MIB, n_readers=1) as writer:
            assert (["k"], 4 * MIB) == (writer.keys(), writer.stats().capacity)
        with raises(StoreSpaceError, hint=["use less capacity"]):
            ObjectStoreWriter.open(name, capacity=16 * MIB, n_readers=1)
        other: list[dict[str, Any]] = [{"n_readers": 2}, {"checksums": True}, {"next_id": 1}, {"stamp": 1}]
        for change in other:
            for field in FIELDS.keys() & change.keys() - {"n_readers"}:
                poke(SHM / name, FIELDS[field], change.pop(field))  # damage, and another version
            with raises(StoreSpaceError, hint=[f"end process {worker.pid} ("]):
                ObjectStoreWriter.open(name, **{"capacity": 5 * MIB, "n_readers": 1} | change)
    with ObjectStoreWriter.open(name, capacity=5 * MIB, n_readers=1) as writer:
        assert 0 == writer.recovered


def write_past_the_room() -> None:
    faulthandler.disable()
    with (SHM / "sparse").open("w+b") as file:
        file.truncate(16 * MIB)
        with mmap.mmap(file.fileno(), 0) as memory:
            memory[:] = bytes(16 * MIB)


def use_a_small_file_system() -> None:
    with pytest.raises(AssertionError, match="the child died of SIGBUS"):
        in_child(write_past_the_room)
    (SHM / "sparse").unlink()
    before = free_bytes()
    with pytest.raises(StoreSpaceError):
        ObjectStoreWriter.create(capacity=16 * MIB, n_readers=1)
    assert before == free_bytes()


def test_a_store_is_a_typed_error_where_a_sparse_file_is_a_bus_error() -> None:
    on("tmpfs", SHM, "size=8m", use_a_small_file_system)


def attach_until_killed(name: str, ready: Signal) -> None:
    with ObjectStoreReader.attach(name):
        ready.send()
        signal.pause()


def test_a_store_of_another_size_waits_for_no_worker_of_the_old_one() -> None:
    on("tmpfs", SHM, "size=8m", resize_in_a_full_volume)


def replace_what_was_to_be_taken(theirs: dict[str, Any], recovered: int) -> None:
    """Let another process replace the old store between `open`'s decision to take that and the taking."""
    name, real = store_name(), orphans.make_room
    asked: dict[str, Any] = {"capacity": 5 * MIB, "n_readers": 1}
    ObjectStoreWriter.open(name, capacity=4 * MIB, n_readers=1).close()
    with alive(attach_until_killed, name) as worker:

        def replaced(*arguments: Any) -> Any:
            said = real(*arguments)
            if said:
                worker.kill()
                with ObjectStoreWriter.open(name, **asked | theirs) as writer:
                    writer.put("theirs", 1)
            return said

        with mock.patch.object(orphans, "make_room", replaced), ObjectStoreWriter.open(name, **asked) as writer:
            assert (recovered, 5 * MIB) == (writer.recovered, writer.stats().capacity)
            assert 1 == writer.handle.n_readers


@pytest.mark.parametrize(("theirs", "recovered"), [({"n_readers": 2}, 0), ({"capacity": MIB}, 0), ({}, 1)])
def test_only_the_old_store_is_taken_though_its_size_differs(theirs: dict[str, Any], recovered: int) -> None:
    on("tmpfs", SHM, "size=8m", partial(replace_what_was_to_be_taken, theirs, recovered))


@pytest.mark.parametrize("options", [{}, {"prefault": True}, {"huge_pages": True}])
def test_an_arena_that_nobody_has_taken_takes_no_memory(stores: Stores, options: Any) -> None:
    with ObjectStoreWriter.create(store_name(), **OPTIONS, **options, writes=False) as owner:
        tables = taken(owner.name)
        assert tables < MIB
        assert tables == next(info.allocated_bytes for info in find_segments() if info.name == owner.name)
        assert (SHM / owner.name).stat().st_size > 8 * MIB
        for number in (1, 2):
            writer = stores.keep(ObjectStoreWriter.join(owner.handle))
            use(writer, number)
            assert tables + number * 2 * MIB == taken(owner.name)
        if not options:
            look_everywhere(owner.name)
        assert tables + 4 * MIB == taken(owner.name)


def look_everywhere(name: str) -> None:
    """Let every command look at the store."""
    assert name in piped("ls").out
    piped("gc")
    for command in (("dump", name, "--all"), ("top", name, "--iterations", "1"), ("verify", name)):
        assert 0 == piped(*command).status
    with StoreInspector.open(name) as inspector:
        assert [0, 1] == [writer.index for writer in inspector.facts().writers if writer.state == "alive"]


@pytest.mark.alone
def test_ls_and_gc_say_how_much_memory_a_store_takes(stores: Stores) -> None:
    with ObjectStoreWriter.open(store_name(), **OPTIONS) as writer:
        memory = f"{taken(writer.name) / MIB:.1f} MiB"
    try:
        listed, offered = (
            next(row for row in piped(command).out.splitlines() if writer.name in row) for command in ("ls", "gc")
        )
    finally:
        ObjectStoreWriter.unlink(writer.name)
    assert "8 MiB" in listed
    assert 2 == listed.count(memory) + offered.count(memory)
