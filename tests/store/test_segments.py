"""Names, numbers, foreign files and damaged segments: a typed error each, no crash, and no file left."""

import contextlib
import mmap
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmstore
from shmstore import (
    CorruptStoreError,
    LayoutMismatchError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    StaleRefError,
    StoreExistsError,
    StoreFullError,
    StoreHandle,
    StoreNotFoundError,
    StoreSpaceError,
)
from shmstore.bindings.store import MAX_NAME, MAX_READERS
from tests.inspect.cases import peek, poke
from tests.layout import FIELDS
from tests.support import (
    SHM,
    Stores,
    bits,
    frozen,
    in_child,
    mount_alone,
    on,
    raises,
    random_tensor,
    segments,
    store_name,
)

# ---- creation


def test_a_process_with_too_many_mappings_creates_a_store_whole_or_not_at_all(stores: Stores) -> None:
    """Whole: nothing but the writer's own arena is writable. The kernel refuses to split a mapping at its limit."""

    def create() -> tuple[int, int]:
        spare = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(mmap.mmap(-1, mmap.PAGESIZE))
        made, refused = 0, 0
        for _ in range(20):
            spare.pop()
            try:
                writer = ObjectStoreWriter.create(name, capacity=1 << 16, n_readers=1, n_writers=3)
            except OSError:
                refused += 1
                assert not (SHM / name).exists()
                continue
            with open("/proc/self/maps") as maps:  # line by line: there is no room for all of it
                assert 2 == sum("w" in line.split()[1] for line in maps if name in line)  # its tables and its data
            writer.close()
            made += 1
        return made, refused

    name = store_name()
    made, refused = in_child(create)
    assert made > 0
    assert refused > 0


# ---- names


def test_names_of_every_other_kind_are_taken(stores: Stores) -> None:
    base = store_name()
    for end in (" ", "...", "%s", "é", "-" * (MAX_NAME - len(base))):
        writer = stores.create(4096, name=base + end)
        assert (SHM / (base + end)).exists()
        stores.attach(writer.name)
        writer.close()
    assert not {made for made in segments() if made.startswith(base)}


def test_a_store_that_is_not_there_is_not_found() -> None:
    for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover):
        with pytest.raises(StoreNotFoundError, match="no-such-store"):
            call("no-such-store")
        with pytest.raises(FileNotFoundError):
            call(StoreHandle("no-such-store", 1, 1))


# ---- numbers


def test_what_counts_as_an_int_is_one(stores: Stores) -> None:
    import numpy as np

    writer = stores.create(np.int64(5000), n_readers=np.uint8(2))  # type: ignore[arg-type]
    assert (5056, 2) == (writer.stats().capacity, writer.stats().n_readers)  # rounded up to 64
    stores.attach(writer, np.int32(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_readers", "max_objects"), [(1, 1), (MAX_READERS, 3), (MAX_READERS, None)])
def test_the_smallest_and_the_widest_store_work(stores: Stores, n_readers: int, max_objects: int | None) -> None:
    writer = stores.create(1, n_readers=n_readers, max_objects=max_objects)
    assert 64 == writer.stats().capacity
    reader = stores.attach(writer, n_readers - 1)
    assert 5 == reader.get(writer.put("k", 5))
    writer.check_valid()


# ---- space


def free_bytes() -> int:
    fs = os.statvfs(SHM)
    return fs.f_bavail * fs.f_frsize


def test_a_store_that_does_not_fit_says_what_is_needed_and_free_and_leaves_no_file() -> None:
    before, free = segments(), free_bytes()
    capacity = free + (1 << 40)
    with raises(StoreSpaceError, ["/dev/shm", "MiB needed", "MiB free"], ["less capacity"]) as caught:
        ObjectStoreWriter.create(store_name(), capacity=capacity, n_readers=2, max_objects=10)
    error = caught.value
    assert error.needed is not None
    assert error.free is not None
    assert capacity <= error.needed <= capacity + (4 << 20)
    assert abs(free - error.free) < 1 << 30  # others write to it as well
    assert before == segments()
    assert abs(free - free_bytes()) < 1 << 30


def mount_small(size: int) -> None:
    """Give this process a file system of shared memory of its own, of `size` bytes; OSError where it may not."""
    mount_alone("tmpfs", "/dev/shm", f"size={size}")


def fill_a_small_file_system() -> list[Any]:
    results: list[Any] = []
    with ObjectStoreWriter.create("fits", capacity=2 << 20, n_readers=1, max_objects=10) as writer:
        writer.put("a", random_tensor(1, 2 << 20 >> 1))
        # From far too large through "data fits, tables do not" to what fits.
        for capacity in range(6 << 20, 0, -100_000):
            free = free_bytes()
            try:
                with ObjectStoreWriter.create("more", capacity=capacity, n_readers=1, max_objects=10):
                    results.append((capacity, "fits"))
                    break
            except StoreSpaceError as error:
                results.append((capacity, error.needed, error.free))
                hint = error.hint
            assert ["fits"] == os.listdir(SHM), "a file was left"
            _, needed, said_free = results[-1]
            others = "shmstore gc" in hint
            assert others == (needed <= 4 << 20), "else it would not fit without others either"
            assert others == ("--shm-size" not in hint)
            assert (free, free) == (said_free, free_bytes())
            assert needed > capacity
        with pytest.raises(StoreSpaceError):  # the tables alone are too many
            ObjectStoreWriter.create("tables", capacity=64, n_readers=250, max_objects=100_000)
        with ObjectStoreReader.attach(writer.handle) as reader:
            value = random_tensor(1, 2 << 20 >> 1)
            assert bits(value) == bits(reader.get(writer.get_cached("a")))
            # Every byte was reserved: what is put later cannot meet a full file system.
            (SHM / "filler").write_bytes(b"x" * free_bytes())
            assert 0 == free_bytes()
            writer.retire(0)
            for i in range(10):
                writer.put(f"k{i}", random_tensor(i, 500_000))
    assert ["filler"] == os.listdir(SHM)
    return results


def test_a_nearly_full_file_system_refuses_at_create_and_never_later() -> None:
    results = on("tmpfs", SHM, "size=4m", fill_a_small_file_system)
    assert "fits" == results[-1][1]
    assert len(results) > 10


def test_a_file_system_without_a_limit_takes_a_store() -> None:
    def create() -> list[str]:
        with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
            writer.put("a", b"x")
            return writer.keys()

    assert ["a"] == on("tmpfs", SHM, "size=0", create)


# ---- foreign files


MAGIC = b"SHMSTOR1"

FOREIGN: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"x",
    "text": b"a foreign file\n" * 1000,
    "zeros": bytes(1 << 16),
    "almost a superblock": MAGIC + bytes(4000),
    "random": random.Random(1).randbytes(1 << 16),
    "magic, no stamp": MAGIC + bytes(1 << 16),
    "magic, wrong stamp": MAGIC + b"\xff" * (1 << 16),
}


# What some of them are said to be, and what is advised.
WHAT_IT_IS = {
    "empty": ("empty: its creation was not completed", "another name"),
    "text": ("not a store", "another name"),
    "magic, no stamp": ("its creation was not completed", "gc"),
    "magic, wrong stamp": ("laid out by another version", "the same version"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_no_store_is_named_as_what_it_is_and_is_left_alone(name: str, kind: str) -> None:
    foreign = SHM / name
    foreign.write_bytes(FOREIGN[kind])
    os.utime(foreign, (0, 0))  # an empty file that is young is being created
    what, hint = WHAT_IT_IS.get(kind, ("", ""))
    for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover):
        # What a dead creator leaves; only a writer must know better: it creates the store again.
        unfinished = kind in ("empty", "almost a superblock", "magic, no stamp") and call == ObjectStoreReader.attach
        with raises(StoreNotFoundError if unfinished else LayoutMismatchError) as caught:
            call(foreign.name)
        assert unfinished or what in caught.value.message
        assert unfinished or hint in caught.value.hint
    with raises(StoreExistsError, [f"/dev/shm/{foreign.name}"]):
        ObjectStoreWriter.create(foreign.name, capacity=4096, n_readers=1)
    assert FOREIGN[kind] == foreign.read_bytes()


# ---- damaged segments


@pytest.fixture
def segment(stores: Stores) -> Path:
    """A closed store of three objects with open leases, and one deleted."""
    writer = stores.create(1 << 16, n_readers=2, max_objects=8)
    for key in "abcd":
        writer.put(key, random_tensor(ord(key), 1000))
    writer.cancel(writer.get_cached("a"))
    writer.delete("d")
    writer.close(unlink=False)
    return SHM / writer.name


@pytest.fixture(autouse=True)
def _remove_segments() -> Iterator[None]:
    before = segments()
    yield
    for name in segments() - before:
        (SHM / name).unlink()


def try_everything(name: str) -> dict[str, str]:
    """Attach to and recover a damaged store and use what opens; returns what came of each."""
    outcome = {}
    try:
        with ObjectStoreReader.attach(name) as reader:
            outcome["attach"] = "opened"
            for packed in (bytes(40), b"\xff" * 40, reader.store_id.to_bytes(4, "little") + bytes(36)):
                with contextlib.suppress(StaleRefError, CorruptStoreError):
                    reader.get(ObjectRef.from_bytes(packed))
            reader.stats()
    except shmstore.ShmStoreError as error:
        outcome["attach"] = type(error).__name__
    try:
        writer = ObjectStoreWriter.recover(name)
    except shmstore.ShmStoreError as error:
        outcome["recover"] = type(error).__name__
        return outcome
    outcome["recover"] = "opened"
    try:
        writer.check_valid()
        outcome["valid"] = "yes"
    except CorruptStoreError:
        outcome["valid"] = "no"
    with ObjectStoreReader.attach(name) as reader:
        try:
            keys = writer.keys()
        except CorruptStoreError:
            keys = []
        for key in keys:
            try:
                value = reader.get(writer.get_cached(key))
            except (StaleRefError, CorruptStoreError) as error:
                outcome[key] = type(error).__name__
            else:
                outcome[key] = str(frozen(random_tensor(ord(key[0]), 1000)) == frozen(value))
        for rank in (0, 1):
            writer.retire(rank)
        for i in range(50):
            try:
                writer.cancel(writer.put(f"new{i}", random_tensor(i, 3000)))
            except (StoreFullError, shmstore.ObjectTooLargeError):
                continue
        writer.stats()
    writer.close(unlink=False)
    return outcome


def under_each(path: Path, offset: int, values: Iterable[int]) -> dict[int, dict[str, str]]:
    """Return what comes of a copy of the store with each of these values there."""
    found = {}
    for value in values:
        copied = SHM / store_name()
        shutil.copy(path, copied)
        poke(copied, offset, value)
        found[value] = try_everything(copied.name)
        copied.unlink()
    return found


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


STRANGE = (0, 1, 4097, 2**32, 2**64 - 1)
GEOMETRY = [
    *("magic", "stamp", "page", "file_size", "capacity", "n_readers", "max_objects", "max_leases", "n_writers"),
    *("writer_at", "slots_at", "leases_at", "index_at", "holds_at", "counts_at", "arena_stride", "readers_at"),
    *("reader_stride", "data_at", "data_stride", "group_of", "zone_shift", "n_groups", "created_ns", "boot", "owner"),
    "check",
]
# Fields that can be any number: only people read them, or recover computes them again.
FREE_FIELDS = [
    *("pid", "used_bytes", "objects", "open_leases", "hand", "small_hand", "stays", "pinning", "releases"),
    *("retirements", "drops", "more", "tier", "cleared", "reserved", "epoch", "counters"),
]
# Some of their values contradict what is stored; the others can be any.
OTHER_FIELDS = [
    *("flags", "max_object_size", "store", "secret", "next_id", "next_lease", "published", "retired"),
    "kinds",
]
# Values that contradict what is stored.
CONTRADICTIONS: dict[str, tuple[int, ...]] = {
    "next_id": (0, 1, 4),
    "next_lease": (0, 1, 4, 2**64 - 1),
    "published": (0, 1, 2**32, 2**64 - 1),
    "flags": (8, 2**32, 2**63),
    "store": (2**32,),
    "max_object_size": (2**16 + 1,),
}


def test_every_field_of_the_two_tables_is_in_one_of_the_tests() -> None:
    assert set(FIELDS) == {*GEOMETRY, *FREE_FIELDS, *OTHER_FIELDS}
    page = mmap.PAGESIZE
    assert (8, 448, 160, page, page + 128, page + 320) == tuple(
        FIELDS[name] for name in ("stamp", "store", "data_at", "pid", "counters", "retired")
    )


@pytest.mark.parametrize("field", GEOMETRY)
def test_a_damaged_geometry_is_refused_by_both_sides(segment: Path, field: str) -> None:
    error = "LayoutMismatchError" if field in ("magic", "stamp") else "CorruptStoreError"
    true = peek(segment, FIELDS[field])
    values = {*STRANGE, true + 1, true * 2, true ^ 2**40} - {true}
    refused = {value: {"attach": error, "recover": error} for value in values}
    if field == "stamp":  # it is stored last: nobody has created the store to its end
        refused[0]["attach"] = "StoreNotFoundError"
    assert refused == in_child(under_each, segment, FIELDS[field], values)
    assert "yes" == in_child(try_everything, segment.name)["valid"]


@pytest.mark.parametrize("field", [*FREE_FIELDS, *OTHER_FIELDS])
def test_other_damage_to_the_two_tables_is_an_error_or_does_no_harm(segment: Path, field: str) -> None:
    corrupt = CONTRADICTIONS.get(field, ())
    for value, outcome in in_child(under_each, segment, FIELDS[field], {*STRANGE, *corrupt}).items():
        if field in FREE_FIELDS:
            assert ("opened", "opened") == (outcome["attach"], outcome["recover"]), hex(value)
        if outcome["recover"] == "opened" and value not in corrupt:
            assert ["True"] * 3 == [outcome[key] for key in "abc"], f"{value:#x}: {outcome}"
            assert "yes" == outcome["valid"], f"{value:#x}"
        else:
            assert outcome["recover"] == "CorruptStoreError", hex(value)


@pytest.mark.parametrize("change", [-1, 4096])
def test_a_truncated_or_extended_segment_is_refused(segment: Path, change: int) -> None:
    size = segment.stat().st_size
    os.truncate(segment, size + change)
    expected = {"attach": "LayoutMismatchError", "recover": "LayoutMismatchError"}
    assert expected == in_child(try_everything, segment.name)
    os.truncate(segment, 0)
    expected |= dict.fromkeys(expected, "StoreNotFoundError")  # as in the first instant of a creation
    assert expected == in_child(try_everything, segment.name)


# Offsets in a slot, and values that none may have.
SLOT = {"state": 0, "id": 8, "offset": 24, "length": 32, "head": 40, "flags": 48}
BAD_SLOT = {
    "state": (4, 2**32, 2**64 - 1),
    "id": (0, 2, 1000, 2**64 - 1),  # 2 is its neighbour's
    "offset": (1, 63, 2**16, 2**63, 2**64 - 64),
    "length": (0, 1, 2**16 + 1, 2**63, 2**64 - 1),
    "head": (0, 2**32 - 1, 2**64 - 1, 2**63, 1 << 32, 1024 | 1 << 60),
    "flags": (4, 1 << 32, 1 | 1 << 32, 2**64 - 1),
}


def all_slots(path: Path) -> list[int]:
    start, end = peek(path, FIELDS["slots_at"]), peek(path, FIELDS["leases_at"])
    return list(range(start, end, 64))


@pytest.mark.parametrize("field", SLOT)
def test_a_damaged_slot_is_corrupt_to_recover_and_kills_no_reader(segment: Path, field: str) -> None:
    slot = next(at for at in all_slots(segment) if peek(segment, at + SLOT["id"]) == 1)
    corrupt = {"attach": "opened", "recover": "CorruptStoreError"}
    found = in_child(under_each, segment, slot + SLOT[field], BAD_SLOT[field])
    assert dict.fromkeys(BAD_SLOT[field], corrupt) == found
    assert "yes" == in_child(try_everything, segment.name)["valid"]


def test_a_reader_believes_a_slot_only_inside_the_data_region(stores: Stores) -> None:
    writer = stores.create(1 << 16, n_readers=2, max_objects=8)
    refs = [writer.put(key, random_tensor(ord(key), 1000)) for key in "ab"]
    path = SHM / writer.name
    slot = next(at for at in all_slots(path) if peek(path, at + SLOT["id"]) == 1)
    # Not "flags", which is the writer's, and not a head that is another good one.
    damages = [
        (slot + SLOT[field], value) for field in ("state", "id", "offset", "length") for value in BAD_SLOT[field]
    ]
    damages += [(slot + SLOT["head"], value) for value in BAD_SLOT["head"] if value not in (0, 1 << 32)]
    damages += [(slot + 16, 12345), (slot + SLOT["state"], 0), (slot + SLOT["state"], 1)]

    def read_while_damaged() -> None:
        with ObjectStoreReader.attach(writer.handle) as reader:
            for offset, value in damages:
                true = peek(path, offset)
                poke(path, offset, value)
                reader.validate(refs[0])
                with pytest.raises((StaleRefError, CorruptStoreError)):
                    reader.get(refs[0])
                assert reader.validate(refs[1]), "the neighbour suffered"
                reader.get(refs[1])
                poke(path, offset, true)
            reader.get(refs[0])

    in_child(read_while_damaged)


def test_one_key_twice_is_corrupt(segment: Path) -> None:
    data = peek(segment, FIELDS["data_at"])
    two = next(at for at in all_slots(segment) if peek(segment, at + 8) == 2)
    damage(segment, data + peek(segment, two + SLOT["offset"]), b"a")
    assert "CorruptStoreError" == in_child(try_everything, segment.name)["recover"]


def test_random_damage_to_the_tables_is_a_typed_error_or_none_and_never_a_crash(segment: Path) -> None:
    whole = segment.read_bytes()
    start, end = peek(segment, FIELDS["slots_at"]), peek(segment, FIELDS["data_at"])
    generator = random.Random(7)
    kinds = set()
    for _ in range(25):
        segment.write_bytes(whole)
        for _ in range(generator.randint(1, 8)):
            at = generator.choice([generator.randrange(start, start + 8 * 64), generator.randrange(start, end)])
            damage(segment, at, generator.randbytes(generator.choice([1, 8])))
        outcome = in_child(try_everything, segment.name)
        kinds.add(outcome["recover"])
    assert {"opened", "CorruptStoreError"} <= kinds
