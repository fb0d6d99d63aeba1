"""`DirectoryTier`: the contract, and what a directory adds to it."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmstore.errors import TierError, TierFullError
from shmstore.tiers import table
from shmstore.tiers.directory import DirectoryTier
from tests.support import Child, Signal, alive, in_child
from tests.tiers.contract import Contract, checked, fetch, random_bytes, verifies, views

HOURS = 3600.0


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    return DirectoryTier(tmp_path, timeout=30)


class TestContract(Contract):
    whole = True


def files(path: Path) -> list[Path]:
    return sorted(one for one in path.rglob("*") if not one.is_dir())


def publish(tier: DirectoryTier, key: str, *values: bytes) -> None:
    tier.publish(key, views(list(values)))


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * HOURS
    os.utime(path, (then, then))


# ---- the file


def test_a_file_that_was_cut_or_goes_on_is_a_miss_and_can_be_replaced(tier: DirectoryTier, tmp_path: Path) -> None:
    publish(tier, "key", b"meta", random_bytes(1, 3000))
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    header = len(whole) - 3004
    for length in (0, 1, 16, 17, header - 1, header, header + 1, header + 2000, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert fetch(tier, "key") is None, length
    path.write_bytes(whole + b"x")
    assert fetch(tier, "key") is None
    publish(tier, "key", b"again")
    assert [b"again"] == fetch(tier, "key")


@pytest.mark.parametrize(
    "forged",
    [
        b"shmstore tier 1\n" + table.packed([memoryview(b"meta")]) + b"meta",
        b"shmstore tier 2\n" + bytes(4),
        b"shmstore tier 2\n\x41\0\0\0" + bytes(8 * 65),
        b"shmstore tier 2\n" + b"\xff" * 100_000,
    ],
    ids=["version 1", "no spans", "65 spans", "more spans"],
)
def test_a_forged_file_is_a_miss(tier: DirectoryTier, tmp_path: Path, forged: bytes) -> None:
    publish(tier, "key", b"meta")
    (path,) = files(tmp_path)
    assert b"shmstore tier 2\n" + table.packed([memoryview(b"meta")]) + b"meta" == path.read_bytes()
    path.write_bytes(forged)
    assert tier.fetch("key", lambda size: pytest.fail("no memory is needed")) is None


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        folder = os.open(path.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{folder}/{path.name}")  # the path itself is too long
        os.close(folder)


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, make_socket, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)],
    ids=["folder", "pipe", "socket", "device", "loop"],
)
def test_what_is_not_a_file_is_a_miss_and_blocks_nobody(
    tier: DirectoryTier, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    publish(tier, "key", b"meta")
    (path,) = files(tmp_path)
    path.unlink()
    make(path)
    assert tier.fetch("key", lambda size: pytest.fail("there is no value")) is None  # and not False: damaged
    assert [False] == tier.has(["key"])


@pytest.mark.parametrize(("number", "is_miss"), [(errno.ESTALE, True), (errno.EIO, False)])
@pytest.mark.parametrize("call", ["fstat", "open"])
def test_a_file_that_another_host_has_replaced_is_a_miss_and_a_broken_disk_an_error(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch, call: str, number: int, is_miss: bool
) -> None:
    publish(tier, "key", b"meta")

    def fail(*arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if is_miss:
            found = fetch(tier, "key")
        else:
            with pytest.raises(TierError, match="Input/output error"):
                fetch(tier, "key")
            found = None
    assert found is None


# ---- processes


def test_a_process_that_is_killed_in_a_publish_leaves_the_older_value(tier: DirectoryTier, tmp_path: Path) -> None:
    publish(tier, "key", b"older")

    def half_a_publish(half_written: Signal) -> None:
        write = os.write

        def slow_write(file: int, data: memoryview) -> int:
            if data.nbytes < 1000:
                return write(file, data)
            write(file, data[: data.nbytes // 2])
            os.write = write
            half_written.send()
            signal.pause()
            return 0

        os.write = slow_write  # type: ignore[assignment]
        publish(DirectoryTier(tmp_path, timeout=30), "key", b"newer", bytes(100_000))

    with alive(half_a_publish):
        pass
    assert [b"older"] == fetch(tier, "key")
    assert [".shmstore", ".tmp"] == sorted(path.suffix for path in files(tmp_path))


def test_processes_share_a_directory_and_see_whole_values(tier: DirectoryTier, tmp_path: Path) -> None:
    sizes = [100, 200_000, 3_000_000]

    def write() -> None:
        own = DirectoryTier(tmp_path, timeout=30)
        for n in range(40):
            own.publish("key", views(checked(random_bytes(n, sizes[n % 3]))))

    publish(tier, "key", *checked(b"first"))
    child = Child(write)
    try:
        last = checked(random_bytes(39, sizes[0]))
        while (value := fetch(tier, "key")) != last:
            assert value is not None
            assert verifies(value)
    finally:
        child.join()
    tier.remove(["key"])
    assert in_child(lambda: DirectoryTier(tmp_path).has(["key"])) == [False]


# ---- room


def test_a_fetch_of_a_file_that_has_aged_makes_it_young(tier: DirectoryTier, tmp_path: Path) -> None:
    publish(tier, "key", b"value")
    (path,) = files(tmp_path)
    for hours, noted in ((0.001, False), (1, True)):
        age(path, hours)
        assert [b"value"] == fetch(tier, "key")
        assert noted == (path.stat().st_mtime > time.time() - 1), hours


def test_the_job_of_the_guide_removes_what_nobody_uses_and_nothing_else(tier: DirectoryTier, tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "beyond-one-host.md"
    (job,) = [line for line in guide.read_text().splitlines() if line.startswith("find ")]
    publish(tier, "old", b"value")
    (old,) = files(tmp_path)
    half_written = old.with_name(f"{old.name}.0123456789abcdef.tmp")
    mine = tmp_path / "notes"
    for path in (half_written, mine):
        path.touch()
    for path in (old, half_written, mine):
        age(path, 30)
    publish(tier, "used", b"value")
    for path in set(files(tmp_path)) - {old, half_written, mine}:
        age(path, 30)
    assert [b"value"] == fetch(tier, "used")
    subprocess.run(["sh", "-c", job.replace("/mnt/tier", str(tmp_path))], check=True)
    assert [False, True] == tier.has(["old", "used"])
    assert (False, True) == (half_written.exists(), mine.exists())
    publish(tier, "old", b"value")
    assert [b"value"] == fetch(tier, "old")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_full_file_system_is_no_room_and_the_older_value_stays(small: Path) -> None:
    tier = DirectoryTier(small, timeout=30)
    publish(tier, "key", b"older", bytes(300_000))
    for _ in range(2):
        with pytest.raises(TierFullError, match="No space left") as caught:
            publish(tier, "key", b"newer", bytes(900_000))
        assert "remove" in caught.value.hint
    assert 1 == len(files(small)), "half a file remains"
    assert [b"older", bytes(300_000)] == fetch(tier, "key")
    publish(tier, "key", b"newer", bytes(400_000))
    assert [b"newer", bytes(400_000)] == fetch(tier, "key")


# ---- what the file system refuses


@pytest.mark.parametrize(
    ("directory", "folder", "file"), [(0o700, 0o700, 0o600), (0o755, 0o750, 0o640), (0o2777, 0o2770, 0o640)], ids=oct
)
def test_files_are_open_to_those_who_may_use_the_directory_but_not_to_others(
    tier: DirectoryTier, tmp_path: Path, directory: int, folder: int, file: int
) -> None:
    tmp_path.chmod(directory)
    mask = os.umask(0o022)
    try:
        publish(tier, "key", b"value")
    finally:
        os.umask(mask)
    (path,) = files(tmp_path)
    assert (folder, file) == (path.parent.stat().st_mode & 0o7777, path.stat().st_mode & 0o7777)


CALLS: dict[str, Callable[[DirectoryTier], object]] = {
    "publish": lambda tier: publish(tier, "key", b"value"),
    "fetch": lambda tier: fetch(tier, "key"),
    "has": lambda tier: tier.has(["key"]),
    "remove": lambda tier: tier.remove(["key"]),
}


@pytest.mark.parametrize("call", ["publish", "fetch", "has"])
def test_a_directory_that_is_not_there_is_an_error_until_it_comes(tmp_path: Path, call: str) -> None:
    path = tmp_path / "mounted later"
    tier = DirectoryTier(path)
    with pytest.raises(TierError, match="No such file or directory") as caught:
        CALLS[call](tier)
    assert str(path) in str(caught.value)
    assert "mount" in caught.value.hint
    assert not path.exists()
    path.mkdir()
    CALLS[call](tier)


def test_a_directory_that_is_not_there_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for name, expected in {"": 0, "mounted later": 1, "file": 1}.items():
        caplog.clear()
        DirectoryTier(tmp_path / name)
        assert expected == sum(f"no directory {tmp_path / name}" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("call", CALLS)
def test_a_directory_of_another_user_is_an_error(tmp_path: Path, call: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    publish(DirectoryTier(path), "key", b"value")
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)

    def as_another_user() -> str:
        os.setgid(65534)
        os.setuid(65534)
        tier = DirectoryTier(path)
        with pytest.raises(TierError) as caught:
            CALLS[call](tier)
        return str(caught.value)

    assert "Permission denied" in in_child(as_another_user)


def test_what_takes_too_long_is_an_error_and_leaves_nothing(tier: DirectoryTier, tmp_path: Path) -> None:
    publish(tier, "key", b"value")
    hasty = DirectoryTier(tmp_path, timeout=1e-9)
    for call in ("fetch", "publish"):
        with pytest.raises(TierError, match="more than 1e-09 s"):
            CALLS[call](hasty)
    assert [b"value"] == fetch(tier, "key")
    assert 1 == len(files(tmp_path))


def test_a_file_that_is_cut_while_it_is_read_is_a_miss(tier: DirectoryTier, tmp_path: Path) -> None:
    publish(tier, "key", b"meta", random_bytes(1, 100_000))
    (path,) = files(tmp_path)

    def into(size: int) -> memoryview:
        os.truncate(path, 50_000)
        return memoryview(bytearray(size))

    assert tier.fetch("key", into) is None
