"""Files that another user has planted in a folder, and goes on changing: no process may die of one."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shmstore import ObjectStoreReader, ObjectStoreWriter
from shmstore.cli import main as cli
from shmstore.cli.commands.ls import owner
from shmstore.errors import ShmStoreError
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.segments import find_segments
from tests.store.test_users import OUTSIDER, OWNER, as_user, start_as
from tests.support import Child

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, which root alone may")
PLANTED = "shmstore-1-x"
SIZES: dict[str, Any] = {"capacity": 4096, "n_readers": 1}


@pytest.fixture
def planted(folder: Path) -> Path:
    """Return a sound store of the outsider that every user may read and write."""
    folder.chmod(0o777)
    cli.build_parser()  # loads modules, which another user may not be allowed to read

    def plant() -> None:
        with ObjectStoreWriter.create(PLANTED, dir=folder, mode=0o666, **SIZES) as writer:
            writer.put("a", b"x")
            writer.close(unlink=False)

    as_user(OUTSIDER, plant)
    return folder / PLANTED


@pytest.fixture
def attacker(planted: Path) -> Iterator[Child]:
    """Have the outsider cut the file and restore it, without an end."""
    whole = planted.read_bytes()

    def attack() -> None:
        with planted.open("r+b", buffering=0) as file:
            while True:
                file.truncate(0)
                os.pwrite(file.fileno(), whole, 0)

    child = start_as(OUTSIDER, attack)
    yield child
    child.kill()


def attach_descriptor(folder: Path) -> None:
    fd = os.open(folder / PLANTED, os.O_RDWR)
    try:
        ObjectStoreReader.attach(fd=fd).close()
    finally:
        os.close(fd)


def open_own(folder: Path) -> None:
    ObjectStoreWriter.open(f"own{os.getpid()}", dir=folder, **SIZES).close(unlink=True)


def run(command: str, folder: Path) -> None:
    cli.main([*command.split(), "--dir", str(folder)])


COMMANDS = (
    *("ls", "gc", "top --iterations=1", f"top {PLANTED} --iterations=1"),
    *(f"dump {PLANTED}", f"verify {PLANTED}", f"verify --quick {PLANTED}"),
)
VICTIMS: dict[str, Callable[[Path], Any]] = {
    "create": lambda folder: ObjectStoreWriter.create(dir=folder, **SIZES).close(),
    "open": open_own,
    "open it": lambda folder: ObjectStoreWriter.open(PLANTED, dir=folder, **SIZES),
    "recover": lambda folder: ObjectStoreWriter.recover(PLANTED, dir=folder),
    "join": lambda folder: ObjectStoreWriter.join(PLANTED, dir=folder),
    "attach": lambda folder: ObjectStoreReader.attach(PLANTED, dir=folder),
    "attach fd": attach_descriptor,
    "unlink": lambda folder: ObjectStoreWriter.unlink(PLANTED, dir=folder),
    "inspect": lambda folder: StoreInspector.open(PLANTED, folder),
    **{command: partial(run, command) for command in COMMANDS},
}


@pytest.mark.usefixtures("attacker")
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_file_that_is_cut_and_restored_kills_nobody(folder: Path, victim: str) -> None:
    def suffer() -> None:
        for _ in range(40):
            with suppress(ShmStoreError):
                VICTIMS[victim](folder)

    as_user(OWNER, suffer)


def test_thousands_of_planted_files_cost_a_create_no_time(planted: Path) -> None:
    def plant() -> None:
        for number in range(3000):
            os.link(planted, f"{planted}{number}")

    def create() -> float:
        before = time.process_time()
        ObjectStoreWriter.create(dir=planted.parent, **SIZES).close()
        return time.process_time() - before

    as_user(OUTSIDER, plant)
    assert as_user(OWNER, create) < 0.1


@pytest.mark.parametrize("command", ["top --iterations=1", "dump", "verify"])
def test_an_operator_looks_into_the_stores_of_a_user_that_it_names(
    planted: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    words = [*command.split(), PLANTED, "--dir", str(planted.parent)]
    assert 1 == cli.main(words)
    assert f"belongs to user {OUTSIDER}" in (said := "".join(capfd.readouterr()))
    assert f"allow_uid={OUTSIDER}" in said
    assert 1 == cli.main([*words, f"--allow-uid={OWNER}"])
    capfd.readouterr()
    assert 0 == cli.main([*words, f"--allow-uid={OUTSIDER}"])
    assert "belongs" not in "".join(capfd.readouterr())


def test_a_list_shows_the_stores_of_all_users_and_more_of_those_it_names(
    planted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (seen,) = find_segments(dir=planted.parent)
    assert (OUTSIDER, "ok", 1, 0, None) == (seen.owner_uid, seen.state, seen.writers, seen.writers_alive, seen.facts)
    assert f"belongs to user {OUTSIDER}" in (seen.problem or "")
    assert (f"user {OUTSIDER}, dead", True) == (owner(seen), seen.recoverable)
    assert 0 == cli.main(["top", "--iterations=1", "--dir", str(planted.parent)])
    assert f"user {OUTSIDER}, dead" in capfd.readouterr().out
    (seen,) = find_segments(dir=planted.parent, allow_uid=OUTSIDER)
    assert seen.problem is None
    assert seen.facts
    assert 1 == seen.facts.objects
