"""The one answer to what a file of /dev/shm is."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shmstore import StoreNotFoundError
from shmstore.files import PREFIX, classify
from tests.inspect.cases import case
from tests.support import SHM, store_name

ANSWERS = {  # state, writer alive, recoverable, ephemeral
    "live": ("ok", True, True, False),
    "stopped": ("ok", True, True, False),
    "dead": ("ok", False, True, False),
    "ephemeral": ("ok", False, False, True),
    "damaged": ("damaged", False, False, False),
    "cut": ("damaged", False, False, False),
    "unfinished": ("unfinished", False, False, False),
    "other version": ("other version", False, True, False),
    "foreign": ("foreign", False, False, False),
}


@pytest.mark.parametrize("condition", ANSWERS)
def test_every_condition_has_its_answer(condition: str) -> None:
    with case(condition) as name:
        file = classify(name)
        assert ANSWERS[condition] == (file.state, file.writer_alive, file.recoverable, file.ephemeral)
        assert (file.state == "ok") == (file.problem is None)
        stat = os.stat(SHM / name)
        assert (stat.st_size, stat.st_ino, stat.st_uid) == (file.file_bytes, file.inode, file.owner_uid)


@pytest.mark.parametrize(("prefix", "state"), [("", "blank"), (PREFIX, "unfinished")])
def test_an_empty_file_may_be_an_unfinished_store_if_its_name_was_generated(prefix: str, state: str) -> None:
    path = SHM / f"{prefix}{store_name()}"
    path.touch()
    try:
        young = classify(path.name)
        assert ((prefix and "being created") or "blank", True) == (young.state, young.writer_alive)
        os.utime(path, (0, 0))
        assert state == classify(path.name).state
    finally:
        path.unlink()


@pytest.mark.parametrize("length", [64, 4096])
def test_create_does_not_remove_a_truncated_named_store(length: int) -> None:
    with case("dead") as name:
        os.truncate(SHM / name, length)
        file = classify(name)
        assert ("damaged", False) == (file.state, file.ephemeral)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, make_socket, lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_not_a_regular_file_is_foreign(make: Callable[[Path], None]) -> None:
    path = SHM / store_name()
    with pytest.raises(StoreNotFoundError):
        classify(path.name)
    make(path)
    try:
        file = classify(path.name)
        assert ("foreign", False) == (file.state, file.recoverable)
        assert "not a regular file" in str(file.problem)
    finally:
        path.rmdir() if path.is_dir() else path.unlink()
