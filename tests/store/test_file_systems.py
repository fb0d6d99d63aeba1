"""Which file systems serve, and what is said of those that do not."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter
from shmstore.cli import main as cli
from shmstore.errors import CorruptStoreError, LayoutMismatchError, SharedMemoryError, StoreSpaceError
from shmstore.inspect.inspector import StoreInspector
from shmstore.places import file_system
from shmstore.store import opening
from tests.layout import FIELDS
from tests.support import mount_alone, on

MIB = 1 << 20
VALUE = np.arange(300_000)


def store_and_read(folder: Path) -> list[str]:
    """Use a store of two writers in every way, and return the warnings."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shmstore").addHandler(handler)
    opening._warn_of_disk.cache_clear()
    for _ in range(2):
        options: dict[str, Any] = {"capacity": 6 * MIB, "n_readers": 2, "n_writers": 2, "dir": folder}
        with ObjectStoreWriter.create("a", prefault=True, huge_pages=True, **options) as writer:
            with ObjectStoreWriter.join(writer.handle) as other, ObjectStoreReader.attach(writer.handle) as reader:
                for one, key in ((writer, "mine"), (other, "its")):
                    assert np.array_equal(VALUE, reader.get(one.put(key, VALUE)))
                assert writer.find_or_claim("c") is not None
                assert 0 == cli.main(["verify", "a", "--dir", str(folder)])
            writer.close(unlink=False)
        with ObjectStoreWriter.recover("a", dir=folder) as heir:
            assert ["mine"] == heir.keys()
        assert [] == os.listdir(folder)
    return records


def test_a_tmpfs_serves_without_a_word(tmp_path: Path) -> None:
    assert [] == on("tmpfs", tmp_path, "size=64m", lambda: store_and_read(tmp_path))


def test_a_file_system_on_a_disk_is_warned_of_once(tmp_path: Path) -> None:
    kind = file_system(str(tmp_path))
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"the folder of temporary files is a {kind}")
    (said,) = store_and_read(tmp_path)
    assert str(tmp_path) in said
    assert kind in said


def test_a_store_on_a_disk_is_none_after_the_host_has_started_again(tmp_path: Path) -> None:
    if file_system(str(tmp_path)) not in ("ext2", "ext3", "ext4", "xfs"):
        pytest.skip("the folder of temporary files is on another file system")
    options: dict[str, Any] = {"capacity": MIB, "n_readers": 1, "dir": tmp_path}
    with ObjectStoreWriter.open("a", **options) as writer:
        writer.put("k", VALUE[:100])
    file = bytearray((tmp_path / "a").read_bytes())
    words = np.frombuffer(file, np.uint64)
    now = int(Path("/proc/sys/kernel/random/boot_id").read_text()[:8], 16)
    assert now == words[FIELDS["boot"] // 8]
    words[FIELDS["boot"] // 8] ^= 1
    words[FIELDS["check"] // 8] = checked(words)
    (tmp_path / "a").write_bytes(file)
    with pytest.raises(LayoutMismatchError, match="before this host was started"):
        ObjectStoreWriter.recover("a", dir=tmp_path)
    assert 0 == cli.main(["verify", "a", "--dir", str(tmp_path)])
    with ObjectStoreWriter.open("a", **options) as writer:
        assert 0 == writer.recovered
        writer.close(unlink=True)


def checked(words: Any) -> int:
    """Return the check word of a superblock: FNV-1a over the words before it, from the layout on."""
    value = 0xCBF29CE484222325
    for word in words[FIELDS["page"] // 8 : FIELDS["check"] // 8]:
        value = (value ^ int(word)) * 0x100000001B3 % (1 << 64)
    return value


def test_an_overlay_is_refused_since_a_mapping_there_keeps_no_lock(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    refused_on("overlay", tmp_path / "merged", options)


def test_a_file_system_without_fallocate_is_refused(tmp_path: Path) -> None:
    refused_on("ramfs", tmp_path, "")


def refused_on(kind: str, folder: Path, options: str) -> None:
    """See that `create` there is an error that names the file system, and leaves no file."""

    def create() -> tuple[str, list[str]]:
        with pytest.raises(SharedMemoryError) as caught:
            ObjectStoreWriter.create(capacity=MIB, n_readers=1, dir=folder)
        return str(caught.value), os.listdir(folder)

    said, left = on(kind, folder, options, create)
    assert [] == left
    assert all(part in said for part in (str(folder), kind, "lacks", "tmpfs", "SHMSTORE_DIR")), said


def test_a_mount_over_a_mount_and_odd_names_are_understood(tmp_path: Path) -> None:
    odd = tmp_path / "a b\\c"
    odd.mkdir()

    def kinds() -> list[str]:
        mount_alone("ramfs", odd, "")
        return [file_system(str(odd)), file_system(str(odd / "none")), file_system(f"{tmp_path}/a")]

    below = file_system(str(tmp_path))
    assert ["ramfs", "ramfs", below] == on("tmpfs", odd, "", kinds)


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """See that 24 huge pages are free, or skip."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = int(setting.read_text())

    def free() -> int:
        return int(re.findall(r"HugePages_Free: *(\d+)", Path("/proc/meminfo").read_text())[0])

    with suppress(OSError):
        if free() < 24:
            setting.write_text(str(before + 24))
    try:
        if free() < 24:
            pytest.skip("this machine has no 24 free huge pages, and gives none (/proc/sys/vm/nr_hugepages)")
        yield
    finally:
        with suppress(OSError):
            setting.write_text(str(before))


@pytest.mark.usefixtures("huge_pages")
def test_hugetlbfs_serves_in_its_pages_and_says_when_there_are_none(tmp_path: Path) -> None:
    def use() -> tuple[list[str], int, str, list[str], Any]:
        said = store_and_read(tmp_path)
        with ObjectStoreWriter.create(
            capacity=7 * MIB, n_readers=1, n_writers=4, dir=tmp_path, max_objects=9
        ) as writer:
            size = os.stat(writer.handle.path).st_size
        with pytest.raises(StoreSpaceError) as caught:
            ObjectStoreWriter.create(capacity=1 << 40, n_readers=1, dir=tmp_path)
        return said, size, str(caught.value), os.listdir(tmp_path), (caught.value.needed or 1) % (2 * MIB)

    def look_at_a_hole() -> None:
        path = tmp_path / "hole"
        path.touch(0o600)
        os.truncate(path, 2 << 40)
        for look in (ObjectStoreReader.attach, ObjectStoreWriter.recover, StoreInspector.open):
            with pytest.raises((LayoutMismatchError, CorruptStoreError)):
                look("hole", dir=tmp_path)
        path.unlink()

    def map_until_there_are_no_pages() -> None:
        options: dict[str, Any] = {"capacity": 8 * MIB, "n_readers": 1, "dir": tmp_path, "max_objects": 9}
        with ObjectStoreWriter.create(**options) as writer, ObjectStoreReader.attach(writer.handle) as reader:
            ref, kept = writer.put("a", VALUE), []
            with pytest.raises(SharedMemoryError):
                while True:
                    kept.append(reader.get(ref, private=True))
            assert 0 < len(kept) < 12, "each takes two pages of 2 MiB"
            kept[0][:] = 0
            kept[-1][:] = 1
            assert np.array_equal(VALUE, reader.get(ref, copy=True))

    on("hugetlbfs", tmp_path, "pagesize=2M,size=0", look_at_a_hole)
    on("hugetlbfs", tmp_path, "pagesize=2M", map_until_there_are_no_pages)
    said, size, full, left, rest = on("hugetlbfs", tmp_path, "pagesize=2M", use)
    assert ([], 0, [], 0) == (said, size % (2 * MIB), left, rest)
    assert "nr_hugepages" in full
