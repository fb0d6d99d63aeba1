"""A store that a group may use: its mode and group, and who is refused."""

import ctypes
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter, StoreHandle
from shmstore.cli import main as cli
from shmstore.errors import ForeignStoreError, LayoutMismatchError, SharedMemoryError, ShmStoreError, StoreNotFoundError
from shmstore.files import PREFIX, of_other_namespaces
from shmstore.multimodal import MultiModalCacheConfig
from shmstore.store import orphans
from tests.multimodal.helpers import item, shm_sender, shm_worker
from tests.support import Child, raises, store_name

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which root alone may")

OWNER, MEMBER, OUTSIDER, GROUP = 61001, 61002, 61003, 61000
NO_PROCESS = 1 << 30
VALUE = np.arange(1000)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _open_to_all(folder: Path) -> None:
    """Let everybody create and remove files in the folder."""
    folder.chmod(0o777)
    cli.build_parser()  # loads modules, which another user may not be allowed to read


def start_as(uid: int, act: Callable[[], Any]) -> Child:
    """Run `act` in a child as that user, who is in the group unless it is the outsider."""

    def become() -> Any:
        os.setgroups([] if uid == OUTSIDER else [GROUP])
        os.setgid(uid)
        os.setuid(uid)
        return act()

    return Child(become)


def as_user(uid: int, act: Callable[[], T]) -> T:
    """Do `act` as that user."""
    return start_as(uid, act).join()  # type: ignore[no-any-return]


def left_open(folder: Path, name: str, **options: Any) -> None:
    """Create a store of two writers with one object, and leave it."""
    writer = ObjectStoreWriter.create(name, capacity=1 << 16, n_readers=2, n_writers=2, dir=folder, **options)
    writer.put("a", VALUE)
    writer.close(unlink=False)


@pytest.mark.parametrize(
    ("mode", "gid", "setgid", "umask"),
    [(None, None, True, 0o000), (0o660, GROUP, False, 0o077), (0o660, None, True, 0o077), (0o666, GROUP, False, 0o000)],
)
def test_a_store_has_its_mode_and_group_whatever_umask_and_folder_say(
    folder: Path, mode: int | None, gid: int | None, setgid: bool, umask: int
) -> None:
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2777 if setgid else 0o777)

    def create() -> tuple[int, int, int]:
        os.umask(umask)
        options: dict[str, Any] = {} if mode is None else {"mode": mode, "gid": gid}
        with ObjectStoreWriter.create(capacity=4096, n_readers=1, dir=folder, **options) as writer:
            found = os.stat(writer.handle.path)
            return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid

    expected = mode or 0o600, OWNER, GROUP if gid is not None or setgid else OWNER
    assert expected == as_user(OWNER, create)


def test_a_member_reads_writes_and_takes_over_and_an_outsider_is_refused_at_every_door(folder: Path) -> None:
    name = store_name()
    as_user(OWNER, lambda: left_open(folder, name, mode=0o660, gid=GROUP))

    def use(key: str) -> list[Any]:
        with ObjectStoreWriter.join(name, allow_uid=OWNER, dir=folder) as first:
            with ObjectStoreWriter.join(name, allow_uid=OWNER, dir=folder) as second:
                ref = second.put(key, VALUE)
                with ObjectStoreReader.attach(name, allow_uid=OWNER, dir=folder) as reader:
                    assert np.array_equal(VALUE, reader.get(ref))
                    view = reader.get(first.get_cached("a"))
                    with pytest.raises(ValueError, match="read-only"):
                        view[0] = 1
                second.close(unlink=False)
            keys = [*first.keys(), "a" in first]
            first.close(unlink=False)
        return keys

    assert ["a", True] == as_user(MEMBER, lambda: use("b"))
    assert ["a", True] == as_user(OWNER, lambda: use("c")), "the owner passes allow_uid, too"
    doors: list[Callable[..., Any]] = [
        ObjectStoreReader.attach,
        partial(ObjectStoreReader.attach, finds_only=True),
        ObjectStoreWriter.join,
        ObjectStoreWriter.recover,
        partial(ObjectStoreWriter.open, capacity=1 << 16, n_readers=2, n_writers=2),
    ]

    def refused(**options: Any) -> list[str]:
        said = []
        for door in doors:
            with pytest.raises(ForeignStoreError) as caught:
                door(name, dir=folder, **options)
            said.append(caught.value.hint)
        with pytest.raises(ForeignStoreError):
            ObjectStoreWriter.unlink(name, dir=folder)
        return said

    def send() -> None:
        one, other = socket.socketpair()
        with one, other, pytest.raises(ForeignStoreError):
            StoreHandle(name, 1, 2, str(folder)).send(one)

    as_user(OUTSIDER, send)
    (hint,) = set(as_user(OUTSIDER, lambda: refused(allow_uid=OWNER)))
    assert f"group {GROUP}" in hint
    assert all(f"allow_uid={OWNER}, or --allow-uid {OWNER} to a command," in hint for hint in as_user(MEMBER, refused))


def test_another_users_symbolic_link_is_named_as_theirs(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    os.lchown(folder / "link", OWNER, GROUP)
    with raises(ForeignStoreError, names=(f"user {OWNER}",)):
        ObjectStoreWriter.open("link", capacity=1 << 16, n_readers=2, dir=folder)


@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize(
    "command", ["ls", "dump", "verify", "verify --quick", "top --iterations=1", "gc --yes --force"]
)
def test_commands_show_and_remove_nothing_of_a_store_to_an_outsider(
    folder: Path, command: str, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name = prefix + store_name()
    as_user(OWNER, lambda: left_open(folder, name, mode=0o660, gid=GROUP))
    words = [*command.split(), *([] if command == "ls" else [name]), "--dir", str(folder)]
    assert (command != "ls") == as_user(OUTSIDER, lambda: cli.main(words))
    said = "".join(capfd.readouterr())
    assert (command, prefix, name in said) == ("ls", "", False) or f"user {OWNER}" in said, said
    assert (folder / name).exists()


def test_two_users_share_images_by_their_configuration(folder: Path) -> None:
    """Each has an API server and a worker; the third user has the same configuration."""
    settings = MultiModalCacheConfig(
        processor_cache_gb=1 / 1024,
        cache_type="shm",
        shm_name="images",
        shm_dir=str(folder),
        shm_gid=GROUP,
        shm_allow_uid=OWNER,
        api_process_count=2,
        data_parallel_size=2,
    )

    def share(rank: int, images: range) -> int:
        hits = 0
        with shm_sender(settings) as sender, shm_worker(settings, rank) as worker:
            for number in images:
                hit = sender.is_cached_item(f"{number}")
                sent, _ = sender.get_and_update_item(None if hit else (item(5000, number), []), f"{number}")
                assert item(5000, number) == worker.get_and_update_item(sent, f"{number}")
                hits += hit
        return hits

    def refused() -> None:
        for wait_or_open in (lambda: shm_sender(settings), lambda: shm_worker(settings, 0)):
            with pytest.raises(ForeignStoreError):
                wait_or_open()

    assert 0 == as_user(OWNER, lambda: share(0, range(5)))
    as_user(OUTSIDER, refused)
    assert 5 == as_user(MEMBER, lambda: share(1, range(9)))
    assert 9 == as_user(OWNER, lambda: share(0, range(9)))


def test_a_store_of_another_user_is_opened_and_never_made_or_replaced(folder: Path) -> None:
    """Else the owner, who names itself as owner, would refuse what a member has made."""
    name = store_name()

    def open_it(capacity: int = 1 << 16, **options: Any) -> int:
        given: dict[str, Any] = {
            "capacity": capacity,
            "n_readers": 2,
            "dir": folder,
            "mode": 0o660,
            "gid": GROUP,
        } | options
        with ObjectStoreWriter.open(name, **given) as writer:
            return writer.recovered + bool(writer.put(f"{os.getpid()}", VALUE))

    def in_vain(error: type[Exception], capacity: int, names: Iterable[str] = (), hint: Iterable[str] = ()) -> None:
        with raises(error, names, hint):
            open_it(capacity, allow_uid=OWNER, wait=0.01)

    as_user(MEMBER, lambda: in_vain(StoreNotFoundError, 1 << 16, [name, "0.01 seconds"], [f"user {OWNER}"]))
    assert 1 == as_user(OWNER, open_it)
    assert 2 == as_user(MEMBER, lambda: open_it(allow_uid=OWNER))
    as_user(MEMBER, lambda: in_vain(LayoutMismatchError, 1 << 17))
    assert 3 == as_user(OWNER, open_it), "by default the owner is who lets others in"
    found = (folder / name).stat()
    assert (0o660, OWNER, GROUP) == (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


def test_what_an_outsider_planted_is_refused_though_its_group_is_right(folder: Path) -> None:
    """A setgid folder gives each file its group, whoever makes it."""
    name = store_name()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o3777)
    as_user(OUTSIDER, lambda: left_open(folder, name, mode=0o666))
    assert (OUTSIDER, GROUP) == ((found := (folder / name).stat()).st_uid, found.st_gid)

    def attach() -> None:
        for uid in (None, OWNER):
            with raises(ForeignStoreError, [f"user {OUTSIDER}"]):
                ObjectStoreReader.attach(name, dir=folder, allow_uid=uid)

    as_user(MEMBER, attach)


def in_user_namespace(uids: str, gids: str, act: Callable[[], T]) -> T:
    """Run `act` in a child that is user 0 of a user namespace with these maps."""
    ready, mapped = os.pipe(), os.pipe()

    def become() -> T:
        if ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER
            pytest.skip("no user namespaces here")
        os.write(ready[1], b"x")
        os.read(mapped[0], 1)
        os.setgroups([])
        os.setgid(0)
        os.setuid(0)
        return act()

    child = Child(become)
    os.read(ready[0], 1)
    for kind, lines in (("uid", uids), ("gid", gids)):
        Path(f"/proc/{child.pid}/{kind}_map").write_text(lines)
    os.write(mapped[1], b"x")
    return child.join()  # type: ignore[no-any-return]


def test_in_a_user_namespace_the_owner_has_the_number_that_is_seen_there(folder: Path) -> None:
    name = store_name()
    as_user(OWNER, lambda: left_open(folder, name, mode=0o660, gid=GROUP))

    def attach() -> list[int]:
        taken = []
        for uid in (None, 0, 7, OWNER, 65534):
            with suppress(ForeignStoreError):
                ObjectStoreReader.attach(name, dir=folder, allow_uid=uid).close()
                taken.append(-1 if uid is None else uid)
        return taken

    member = f"0 {MEMBER} 1\n"
    assert [7] == in_user_namespace(f"{member}7 {OWNER} 1\n", f"0 {GROUP} 1\n", attach)
    assert [65534] == in_user_namespace(member, f"0 {GROUP} 1\n", attach), "whom the namespace does not know"
    assert [] == in_user_namespace(f"0 {OUTSIDER} 1\n7 {OWNER} 1\n", f"0 {OUTSIDER} 1\n", attach)


@pytest.mark.parametrize("sticky", [False, True])
def test_gc_by_a_member_removes_a_store_where_the_folder_lets_it(
    folder: Path, sticky: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    name = store_name()
    folder.chmod(0o1777 if sticky else 0o777)
    as_user(OWNER, lambda: left_open(folder, name, mode=0o660, gid=GROUP))
    assert int(sticky) == as_user(MEMBER, lambda: cli.main(["gc", "--yes", "--force", name, "--dir", str(folder)]))
    assert sticky == (folder / name).exists() == (f"belongs to user {OWNER}" in capfd.readouterr().err)


def test_gc_counts_the_ranks_of_processes_that_it_may_not_look_into(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = store_name()
    as_user(OWNER, lambda: left_open(folder, name, mode=0o660, gid=GROUP))

    def look() -> list[int]:
        cli.main(["gc", name, "--dir", str(folder)])
        return of_other_namespaces(str(folder / name), [os.getppid(), NO_PROCESS])

    with ObjectStoreReader.attach(name, dir=folder, allow_uid=OWNER):
        assert [NO_PROCESS] == as_user(MEMBER, look)
    assert "kept: readers attached: 1" in capfd.readouterr().out


def test_an_exit_and_a_create_leave_what_a_dead_user_of_the_group_left(folder: Path) -> None:
    def die() -> str:
        writer = ObjectStoreWriter.create(capacity=4096, n_readers=1, dir=folder, mode=0o660, gid=GROUP)
        orphans._open.discard(writer)
        return writer.name

    name = as_user(OWNER, die)
    as_user(MEMBER, lambda: ObjectStoreWriter.create(capacity=4096, n_readers=1, dir=folder).close())
    assert (folder / name).exists()
    as_user(OWNER, lambda: ObjectStoreWriter.create(capacity=4096, n_readers=1, dir=folder).close())
    assert not (folder / name).exists()


def test_a_group_of_others_is_a_typed_error_and_leaves_no_file(folder: Path) -> None:
    def create() -> tuple[int | None, str]:
        with pytest.raises(SharedMemoryError) as caught:
            ObjectStoreWriter.create(capacity=4096, n_readers=1, dir=folder, mode=0o660, gid=GROUP + 500)
        return caught.value.errno, caught.value.hint

    number, hint = as_user(OWNER, create)
    assert (errno.EPERM, True) == (number, "gid" in hint)
    assert [] == os.listdir(folder)


def test_a_member_that_is_early_waits_until_the_store_is_opened_to_it(folder: Path) -> None:
    """Between its creation and its mode, a file is its owner's alone, and empty."""
    name = store_name()
    path = folder / name
    path.touch(0o600)
    os.chown(path, OWNER, GROUP)

    def attach(wait: float) -> str:
        with pytest.raises(ShmStoreError) as caught:
            ObjectStoreReader.attach(name, dir=folder, allow_uid=OWNER, wait=wait)
        return f"{type(caught.value).__name__}: {caught.value}"

    said = as_user(MEMBER, lambda: attach(0.01))
    assert said.startswith("StoreNotFoundError")
    assert "creation" in said

    def refused() -> None:
        with pytest.raises(ForeignStoreError):
            ObjectStoreReader.attach(name, dir=folder)

    as_user(MEMBER, refused)
