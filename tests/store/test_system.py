"""Where the store meets the operating system: strangers' closes, core dumps, crashes, limits, other users."""

import contextlib
import errno
import logging
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter, StoreExistsError, errors
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.segments import find_segments, look_at
from shmstore.inspect.verify import verify
from tests.inspect.cases import poke
from tests.layout import FIELDS
from tests.store.test_segments import mount_small
from tests.support import SHM, Stores, in_child, raises, random_tensor, segments, store_name

pytestmark = pytest.mark.alone
VALUE = random_tensor(1, 5000)
NOBODY = 65534


@pytest.fixture
def leftovers() -> Iterator[list[str]]:
    """Names of stores that other processes have left, to be removed."""
    names: list[str] = []
    yield names
    for name in names:
        (SHM / name).unlink(missing_ok=True)


def run(script: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """Start a process of its own that runs a script."""
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


WITH_A_CHILD = """
    import subprocess, sys
    from shmstore import ObjectStoreReader, ObjectStoreWriter
    writer = ObjectStoreWriter.create(sys.argv[1], capacity=65536, n_readers=1)
    reader = ObjectStoreReader.attach(writer.handle)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=sys.argv[2] == "close")
    print(child.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("descriptors", ["close", "keep"])
def test_a_program_that_a_dead_writer_started_keeps_no_lock_of_it(
    stores: Stores, leftovers: list[str], descriptors: str
) -> None:
    name = store_name()
    leftovers.append(name)
    with run(WITH_A_CHILD, name, descriptors) as dead:
        assert dead.stdin is not None
        assert dead.stdout is not None
        pid = int(dead.stdout.readline())
        watched = os.pidfd_open(pid)  # `cat` ends when its pipe does: stopped, it does not
        signal.pidfd_send_signal(watched, signal.SIGSTOP)
        dead.kill()
        dead.wait()
        try:
            stores.recover(name)
            stores.attach(name)
        finally:
            signal.pidfd_send_signal(watched, signal.SIGKILL)
            os.close(watched)


# ---- core dumps


def test_no_byte_of_a_segment_goes_into_a_core_dump(stores: Stores) -> None:
    writer = stores.create(4 << 20)
    private = stores.attach(writer).get(writer.put("k", VALUE), private=True)
    private += 1  # the kernel leaves out a private page that was not written
    flags = []
    for entry in Path("/proc/self/smaps").read_text().split("VmFlags:"):
        lines = entry.splitlines()
        flags.append((lines[0].split(), any(f"/dev/shm/{writer.name}" in line for line in lines)))
    # Each piece of text begins with the flags of the mapping before.
    ours = [flags[i + 1][0] for i, (_, is_ours) in enumerate(flags) if is_ours]
    assert len(ours) >= 5
    assert all("dd" in found for found in ours)


# ---- what a process leaves

LEAVES_OPEN = """
    import os, sys
    from shmstore import ObjectStoreWriter
    writer = ObjectStoreWriter.create(sys.argv[1] or None, capacity=65536, n_readers=1)
    print(writer.name, flush=True)
    exec(sys.argv[2])
"""


def create_and_tell(tell: Connection) -> None:
    """In a child: make a store without a name, and leave it open."""
    tell.send(ObjectStoreWriter.create(capacity=4096, n_readers=1).name)


def acknowledged_by(end: str, name: str = "") -> str:
    """Return the name of a store whose process has come to its end."""
    with run(LEAVES_OPEN, name, end) as process:
        said, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        return said.split()[0]


@pytest.mark.parametrize("end", ["sys.exit()", "writer.me = writer; del writer", "del writer"])
def test_a_store_of_a_generated_name_that_is_open_at_a_normal_exit_goes(leftovers: list[str], end: str) -> None:
    leftovers.append(acknowledged_by(end))
    assert not (SHM / leftovers[0]).exists()


@pytest.mark.parametrize("end", ["writer.close(unlink=False)", "os._exit(0)"])
def test_a_store_stays_where_its_process_said_so_or_could_not_remove_it(leftovers: list[str], end: str) -> None:
    leftovers.append(acknowledged_by(end))
    assert (SHM / leftovers[0]).exists()


def test_a_store_whose_name_was_chosen_stays_at_exit(leftovers: list[str]) -> None:
    leftovers.append(acknowledged_by("pass", store_name()))
    assert (SHM / leftovers[0]).exists()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_store_that_a_child_of_multiprocessing_leaves_open_goes_with_it(leftovers: list[str], method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    names, tell = context.Pipe(duplex=False)
    child = context.Process(target=create_and_tell, args=(tell,))
    child.start()
    leftovers.append(names.recv())
    child.join()
    assert 0 == child.exitcode
    assert not (SHM / leftovers[0]).exists()


def test_a_forked_child_s_normal_exit_removes_nothing(leftovers: list[str]) -> None:
    end = """
pid = os.fork()
if pid == 0: sys.exit(0)
os.waitpid(pid, 0)
print(os.path.exists('/dev/shm/' + writer.name))
"""
    with run(LEAVES_OPEN, "", end) as process:
        name, there = process.communicate()[0].split()
        leftovers.append(name)
    assert "True" == there


KILLED = "os.kill(os.getpid(), 9)"


def test_create_removes_what_killed_writers_left_under_generated_names(
    stores: Stores, leftovers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = acknowledged_by(KILLED)
    leftovers.append(name)
    assert (SHM / name).exists()
    with caplog.at_level(logging.WARNING, "shmstore"):
        stores.create(4096)
    assert not (SHM / name).exists()
    assert [True] == [name in record.getMessage() for record in caplog.records]


def test_create_leaves_what_was_meant_to_stay(stores: Stores, leftovers: list[str]) -> None:
    chosen = [
        acknowledged_by(KILLED, f"shmstore-chosen-{store_name()}"),
        acknowledged_by("writer.close(unlink=False);" + KILLED),
    ]
    leftovers.extend(chosen)
    stores.create(4096)
    assert chosen == [name for name in chosen if (SHM / name).exists()]


def test_create_leaves_what_somebody_reads(stores: Stores, leftovers: list[str]) -> None:
    name = acknowledged_by(KILLED)
    leftovers.append(name)
    reader = stores.attach(name)
    stores.create(4096)
    assert (SHM / name).exists()
    reader.close()
    stores.create(4096)
    assert not (SHM / name).exists()


def test_create_leaves_what_has_been_recovered_and_what_has_a_writer(stores: Stores, leftovers: list[str]) -> None:
    recovered = acknowledged_by(KILLED)
    leftovers.append(recovered)

    def take_over_and_die() -> None:
        ObjectStoreWriter.recover(recovered)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError, match="SIGKILL"):
        in_child(take_over_and_die)
    with run(LEAVES_OPEN, "", "sys.stdin.read()") as alive:
        assert alive.stdout is not None
        leftovers.append(alive.stdout.readline().strip())
        stores.create(4096)
        assert (SHM / leftovers[1]).exists()
    assert (SHM / recovered).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_create_leaves_another_user_s_stores(stores: Stores, leftovers: list[str]) -> None:
    name = acknowledged_by(KILLED)
    leftovers.append(name)
    os.chown(SHM / name, NOBODY, NOBODY)
    stores.create(4096)
    with raises(StoreExistsError, [name]) as caught:
        ObjectStoreWriter.create(name, capacity=4096, n_readers=1)
    assert f"user {NOBODY}" in caught.value.hint
    assert "unlink" not in caught.value.hint
    assert (SHM / name).exists()


# ---- descriptors run out


def with_descriptors_left(spare: int, act: Callable[[], Any]) -> Any:
    """Run `act` with so many descriptors to open; in a child, since it changes a limit."""
    limit = 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(spare):
        os.close(taken.pop())
    try:
        return act()
    finally:
        for number in taken:
            os.close(number)


@pytest.mark.parametrize("n_writers", [1, 2])
def test_a_store_is_removed_also_by_a_process_without_descriptors(n_writers: int) -> None:
    def close_without() -> bool:
        writer = ObjectStoreWriter.create(name, capacity=4096, n_readers=1, n_writers=n_writers)
        with_descriptors_left(0, writer.close)
        return (SHM / name).exists()

    name = store_name()
    assert not in_child(close_without)


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_creation_without_descriptors_leaves_no_file(spare: int) -> None:
    def create_without() -> Any:
        def create() -> Any:
            try:
                ObjectStoreWriter.create(name, capacity=4096, n_readers=1).close()
            except errors.SharedMemoryError as error:
                return error.errno
            return None

        said = with_descriptors_left(spare, create)
        return said, (SHM / name).exists()

    name = store_name()
    assert (None if spare == 2 else errno.EMFILE, False) == in_child(create_without)


# ---- other users


def adopt(name: str, **options: Any) -> None:
    """Attach to a store and take it over, both of which must do the same."""
    ObjectStoreReader.attach(name, **options).close()
    ObjectStoreWriter.recover(name, **options).close(unlink=False)


@pytest.fixture
def planted(stores: Stores, leftovers: list[str]) -> Path:
    writer = stores.create(4096)
    writer.close(unlink=False)
    leftovers.append(writer.name)
    return SHM / writer.name


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o644])
def test_a_store_that_others_may_only_read_or_only_write_is_refused(planted: Path, mode: int) -> None:
    """Whoever may only read it could still lock its bytes against all others."""
    with raises(ValueError, [f"{mode:#o}", "0o660"]):
        ObjectStoreWriter.create(capacity=4096, n_readers=1, mode=mode)
    planted.chmod(mode)
    for uid in (None, os.geteuid()):
        for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover, ObjectStoreWriter.join):
            with raises(errors.ForeignStoreError, [f"{mode:04o}"], ["chmod 600"]):
                call(planted.name, allow_uid=uid)


@pytest.mark.parametrize("mode", [0o660, 0o606])
def test_a_store_that_others_may_open_is_not_adopted_unasked(planted: Path, mode: int) -> None:
    planted.chmod(mode)
    for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover):
        with pytest.raises(errors.ForeignStoreError, match=planted.name) as caught:
            call(planted.name)
        assert errno.EACCES == caught.value.errno
        assert f"allow_uid={os.geteuid()}" in caught.value.hint
    with raises(errors.ForeignStoreError, [f"{mode:04o}"], ["chmod 600", f"allow_uid={os.geteuid()}"]):
        ObjectStoreWriter.open(planted.name, capacity=4096, n_readers=1)
    adopt(planted.name, allow_uid=os.geteuid())
    with StoreInspector.open(planted.name) as inspector:
        assert 1 == inspector.facts().n_readers


def test_a_store_of_ones_own_is_not_another_user_s(planted: Path) -> None:
    for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover):
        with raises(errors.ForeignStoreError, [f"this user, {os.geteuid()}"], ["omit allow_uid"]) as refused:
            call(planted.name, allow_uid=os.geteuid() + 1)
        assert "chmod" not in refused.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_who_sends_a_descriptor_of_another_user_s_store_is_named(planted: Path) -> None:
    """The link to a descriptor is always one's own, and has a mode of its own."""
    number = os.open(planted, os.O_RDWR)
    try:
        planted.chmod(0o644)
        with raises(errors.ForeignStoreError, ["0644"], ["chmod 600"]):
            ObjectStoreReader.attach(fd=number)
        planted.chmod(0o600)
        os.chown(planted, NOBODY, NOBODY)
        for call in (ObjectStoreReader.attach, ObjectStoreWriter.join):
            with raises(errors.ForeignStoreError, [f"user {NOBODY}"], [f"as user {NOBODY}", f"allow_uid={NOBODY}"]):
                call(fd=number)
    finally:
        os.close(number)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
def test_another_user_s_store_is_adopted_only_if_that_user_is_named(planted: Path) -> None:
    os.chown(planted, NOBODY, NOBODY)
    wanted: list[dict[str, Any]] = [{}, {"allow_uid": 0}, {"allow_uid": NOBODY - 1}]
    for options in wanted:
        for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover):
            with raises(errors.ForeignStoreError, [f"user {NOBODY}"], [f"as user {NOBODY}", f"allow_uid={NOBODY}"]):
                call(planted.name, **options)
    with raises(errors.ForeignStoreError, [f"user {NOBODY}"], [f"as user {NOBODY}", f"allow_uid={NOBODY}"]):
        ObjectStoreWriter.open(planted.name, capacity=4096, n_readers=1)
    adopt(planted.name, allow_uid=NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("options", [{}, {"allow_uid": 0}])
def test_a_store_that_may_not_be_opened_is_said_to_be_another_user_s(planted: Path, options: dict[str, Any]) -> None:
    def attach_as_nobody() -> list[errors.ForeignStoreError]:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        said = []
        for call in (ObjectStoreReader.attach, ObjectStoreWriter.recover):
            with pytest.raises(errors.ForeignStoreError, match="user 0") as caught:
                call(planted.name, **options)
            said.append(caught.value)
        return said

    for error in in_child(attach_as_nobody):
        assert (errno.EACCES, "run this as user 0") == (error.errno, error.hint), "allow_uid cannot help"


# ---- numbers at their end


@pytest.mark.parametrize("field", ["next_id", "next_lease"])
def test_a_number_that_no_store_counts_to_is_damage(stores: Stores, planted: Path, field: str) -> None:
    largest = 2**61 - 1

    def plant(number: int) -> None:
        poke(planted, FIELDS[field], number)
        if field == "next_lease":
            poke(planted, FIELDS["published"], number)

    plant(largest)
    writer = stores.recover(planted.name)
    for number in range(10):
        writer.put(f"k{number}", number)
        writer.get_cached(f"k{number}")
    writer.check_valid()
    writer.close(unlink=False)
    for number in (largest + 1, 2**63 - 3, 2**64 - 1):
        plant(number)
        assert [finding for finding in verify(planted.name).findings if finding.wrong]
        with raises(errors.CorruptStoreError, names=[planted.name], hint=["gc --yes --force"]):
            stores.recover(planted.name)
    again = stores.keep(ObjectStoreWriter.open(planted.name, capacity=4096, n_readers=1))
    assert 0 == again.recovered
    again.put("k", 1)


# ---- files with holes


def test_looking_at_a_planted_file_takes_no_memory(planted: Path, stores: Stores) -> None:
    """All it needs is a superblock that says how large the tables are."""
    writer = stores.create(1 << 20, n_readers=200, max_objects=100_000)
    path = SHM / writer.name
    writer.close(unlink=False)
    first = path.read_bytes()[:4096]
    size = path.stat().st_size
    path.unlink()
    planted.write_bytes(first)
    os.truncate(planted, size)
    planted.chmod(stat.S_IRUSR | stat.S_IWUSR)
    before = planted.stat().st_blocks
    with pytest.raises(errors.SparseStoreError, match=planted.name):
        StoreInspector.open(planted.name)
    info = look_at(planted.name)
    assert ("sparse", True, None) == (info.state, info.recoverable, info.facts)
    assert planted.name in {found.name for found in find_segments()}
    assert before == planted.stat().st_blocks


def test_a_sparse_copy_is_refused_until_it_has_its_space(stores: Stores) -> None:
    writer = stores.create(1 << 20)
    writer.put("k", VALUE)
    writer.close(unlink=False)
    path = SHM / writer.name
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(0)
        for at in range(0, len(whole), 4096):
            if any(whole[at : at + 4096]):
                file.seek(at)
                file.write(whole[at : at + 4096])
        file.truncate(len(whole))
        for call in (StoreInspector.open, ObjectStoreWriter.recover, ObjectStoreWriter.join, ObjectStoreReader.attach):
            with raises(errors.SparseStoreError, [writer.name], ["fallocate"]):
                call(writer.name)
        os.posix_fallocate(file.fileno(), 0, len(whole))
    assert ["k"] == stores.recover(writer.name).keys()


# ---- no shared memory here


def failures(prepare: Callable[[], None]) -> Any:
    """Return how create, attach and recover fail after `prepare`; or why it could not be done here."""
    try:
        prepare()
    except OSError as error:
        return f"not to be had here: {error}"
    calls: list[Callable[[], Any]] = [
        lambda: ObjectStoreWriter.create("x", capacity=1 << 20, n_readers=1),
        lambda: ObjectStoreReader.attach("x"),
        lambda: ObjectStoreWriter.recover("x"),
    ]
    said = []
    for call in calls:
        try:
            call()
        except OSError as error:
            said.append((type(error).__name__, error.errno))
    return said


def read_only() -> None:
    mount_small(1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", "/dev/shm"], check=True, capture_output=True)


def missing() -> None:
    import ctypes

    mount_small(1 << 20)
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", b"/dev", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")


@pytest.mark.parametrize(
    ("prepare", "number"), [(read_only, errno.EROFS), (missing, errno.ENOENT)], ids=["read-only", "missing"]
)
def test_a_directory_of_shared_memory_that_is_no_use_is_said_to_be_that(
    prepare: Callable[[], None], number: int
) -> None:
    said = in_child(failures, prepare)
    if isinstance(said, str):
        pytest.skip(said)
    assert ("SharedMemoryError", number) == said[0]
    assert {"SharedMemoryError", "StoreNotFoundError"} >= {name for name, _ in said}
    if number == errno.ENOENT:
        assert {("SharedMemoryError", number)} == set(said)


def test_a_limit_on_the_size_of_files_is_not_a_small_file_system() -> None:
    def create_limited() -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            ObjectStoreWriter.create(name, capacity=4 << 20, n_readers=1)
        except errors.ShmStoreError as error:
            return type(error).__name__, getattr(error, "errno", None), "RLIMIT_FSIZE" in str(error)
        return None

    name = store_name()
    assert ("SharedMemoryError", errno.EFBIG, True) == in_child(create_limited)
    assert name not in segments()


@pytest.mark.skipif(os.geteuid() != 0, reason="root may open every file, and become somebody who may not")
def test_a_file_of_one_s_own_that_may_not_be_opened_is_said_to_be_that() -> None:
    def attach_to_own() -> Any:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        writer = ObjectStoreWriter.create(name, capacity=4096, n_readers=1)
        path = SHM / name
        path.chmod(0)
        try:
            ObjectStoreReader.attach(name)
        except errors.ShmStoreError as error:
            return type(error).__name__, getattr(error, "errno", None)
        finally:
            writer.close()
        return None

    name = store_name()
    assert ("SharedMemoryError", errno.EACCES) == in_child(attach_to_own)
