"""Stores that are reached by a descriptor: passed over a socket, and memory that no folder names."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstore import Claim, ObjectStoreReader, ObjectStoreWriter, StoreHandle
from shmstore.cli.main import main
from shmstore.errors import LayoutMismatchError, RankInUseError, StoreNotFoundError, WriterActiveError
from tests.support import SHM, Child, Signal, Stores, alive, in_child, raises, segments

VALUE = np.arange(1000)


def received(connection: socket.socket) -> tuple[StoreHandle, int]:
    """What StoreHandle.send has sent, as the docstring says that one gets it."""
    data, descriptors, *_ = socket.recv_fds(connection, 65536, 1, socket.MSG_CMSG_CLOEXEC)
    return StoreHandle.from_json(data.decode()), descriptors[0]


def passed(handle: StoreHandle) -> tuple[StoreHandle, int]:
    here, there = socket.socketpair()
    with here, there:
        handle.send(here)
        return received(there)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        *(("store_id", wrong, ValueError) for wrong in (-1, 1 << 32, 1 << 64)),
        *(("name", wrong, StoreNotFoundError) for wrong in ("a\0b", "\ud800")),
    ],
)
def test_a_handle_that_no_store_has_is_not_sent(field: str, value: Any, error: Any, stores: Stores) -> None:
    with pytest.raises(error):
        passed(replace(stores.create().handle, **{field: value}))


def has(reader: ObjectStoreReader, key: str) -> bool:
    found = reader.find(key)
    return found is not None and np.array_equal(VALUE, reader.get(found.ref))


def openings() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("memfd", [False, True])
def test_a_passed_descriptor_is_all_that_another_process_needs(memfd: bool, stores: Stores) -> None:
    options: dict[str, Any] = {"memfd": True} if memfd else {}
    writer = stores.create(n_readers=2, n_writers=2, **options)
    writer.put("a", VALUE)
    here, there = socket.socketpair()
    claimed, looked = Signal(), Signal()

    def child() -> None:
        handle, fd = received(there)
        with (
            ObjectStoreReader.attach(handle, rank=None, fd=fd, wait=1) as reader,
            ObjectStoreWriter.join(fd=fd) as other,
        ):
            os.close(fd)  # nothing needs it any longer
            assert has(reader, "a")
            claim = reader.find_or_claim("b")
            assert isinstance(claim, Claim)
            with claim:
                claimed.send()
                looked.wait()
                other.cancel(other.put("b", VALUE))
            assert other.index == 1

    writer.handle.send(here)
    with here, there:
        process = Child(child)
        claimed.wait()
        assert writer.claimed("b")
        looked.send()
        process.join()
    claimed.close()
    looked.close()
    assert writer.is_cached("b")
    writer.close(unlink=True)
    assert not segments()


def test_the_openings_of_one_descriptor_exclude_each_other(stores: Stores) -> None:
    writer = stores.create(memfd=True, n_readers=2, n_writers=2)
    handle, fd = passed(writer.handle)
    stores.attach(handle, 0)
    with raises(RankInUseError, ["0"]):
        ObjectStoreReader.attach(handle, 0, fd=fd)
    other = stores.keep(ObjectStoreWriter.join(fd=fd))
    with raises(WriterActiveError):
        ObjectStoreWriter.join(fd=fd)
    claim = other.find_or_claim("a")
    assert isinstance(claim, Claim)
    with claim:
        assert in_child(lambda: ObjectStoreReader.attach(handle, 1, fd=fd).find_or_claim("a")) is None
    os.close(fd)


def test_a_writer_that_was_killed_is_followed_by_descriptor(stores: Stores) -> None:
    owner = stores.create(memfd=True, writes=False, n_readers=1)

    def first(stored: Signal) -> None:
        writer = ObjectStoreWriter.join(owner.handle)
        writer.put("a", VALUE)
        stored.send()
        Signal().wait()

    with alive(first), raises(WriterActiveError):
        ObjectStoreWriter.join(owner.handle)
    following = stores.keep(ObjectStoreWriter.join(owner.handle))
    assert following.recovered == 1
    assert has(stores.attach(owner.handle), "a")


def test_memory_without_a_name_is_in_no_folder_keeps_its_size_and_goes_with_its_processes(stores: Stores) -> None:
    before, descriptors = set(SHM.iterdir()), openings()
    writer = stores.create(memfd=True, name="own")
    assert "own" not in {path.name for path in set(SHM.iterdir()) - before}
    fd = os.open(writer.handle.path, os.O_RDWR)
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    reader = stores.attach(writer)
    reader.get(writer.put("a", VALUE))
    path = writer.handle.path
    writer.close()
    with raises(StoreNotFoundError):
        ObjectStoreReader.attach(writer.handle)
    reader.close()
    assert (descriptors, False) == (openings(), Path(path).exists())


def test_the_commands_look_at_memory_without_a_name(stores: Stores, capsys: pytest.CaptureFixture[str]) -> None:
    writer = stores.create(memfd=True)
    writer.put("a", VALUE)
    stores.attach(writer).find("a")  # opens it twice more
    pid = ["--pid", str(os.getpid())]
    assert main(["ls", *pid]) == 0
    assert 1 == capsys.readouterr().out.count("alive")
    for command in (["dump"], ["verify"], ["verify", "--quick"], ["top", "--iterations", "1"]):
        assert main([*command, writer.name, *pid]) == 0
        assert writer.name in capsys.readouterr().out
    for wrong in ("x", "-1", str(2**22 + 1)):
        assert main(["ls", "--pid", wrong]) == 2


@pytest.mark.parametrize("call", [ObjectStoreReader.attach, ObjectStoreWriter.join])
def test_what_is_wrong_with_a_descriptor_is_said(call: Callable[..., Any], stores: Stores, tmp_path: Path) -> None:
    writer = stores.create(memfd=True, n_writers=2)
    other = stores.create()
    _, fd = passed(writer.handle)
    reading, writing = os.pipe()
    descriptors = openings()
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        *((TypeError, {"fd": fd} | more) for more in ({"handle_or_name": "name"}, {"dir": "/tmp"})),
        *((TypeError, {"fd": kind}) for kind in (True, "3")),
        *((ValueError, {"fd": number}) for number in (-1, 1 << 20)),
    ]
    for error, options in wrong:
        with raises(error, ["fd"]):
            call(**options)
    with raises(StoreNotFoundError):
        call(other.handle, fd=fd)
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(8192))
        file.flush()
        for no_store in (file.fileno(), reading, writing):
            with raises(LayoutMismatchError, hint=["handle.send"]):
                call(fd=no_store)
    with raises(TypeError, ["handle_or_name"]):
        call()
    assert descriptors == openings()
    for each in (fd, reading, writing):
        os.close(each)


def test_a_handle_goes_over_unix_sockets_only_and_memory_takes_no_folder(stores: Stores) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with (
            socket.create_connection(listening.getsockname()) as connection,
            raises(ValueError, ["connection", "Unix"]),
        ):
            stores.create().handle.send(connection)
    with raises(TypeError, ["dir"]):
        ObjectStoreWriter.create(capacity=4096, n_readers=1, memfd=True, dir="/dev/shm")


def test_only_the_store_itself_is_sent(stores: Stores, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"SHMSTOR1" + bytes(8192))
    writer, memory, other = stores.create(), stores.create(memfd=True), stores.create()
    path = Path(writer.handle.path)

    def refused(handle: StoreHandle) -> None:
        here, there = socket.socketpair()
        with here, there, raises(StoreNotFoundError):
            handle.send(here)

    writer.close(unlink=True)
    refused(writer.handle)
    others: list[Callable[[], Any]] = [
        partial(path.symlink_to, other.handle.path),
        partial(os.mkfifo, path),
        path.mkdir,
    ]
    for put in others:
        put()
        refused(writer.handle)
        path.rmdir() if put == path.mkdir else path.unlink()
    refused(replace(other.handle, store_id=memory.handle.store_id))
    memory.close()
    number = os.open(secret, os.O_RDWR)
    os.dup2(number, int(memory.name))
    refused(memory.handle)
    for each in {number, int(memory.name)}:
        os.close(each)


def test_a_folder_below_proc_is_a_folder(stores: Stores) -> None:
    before = openings()
    with stores.create(dir="/proc/self/root/dev/shm") as writer:
        assert stores.attach(writer.name).store_id == writer.handle.store_id
    assert not (SHM / writer.name).exists()
    stores.close()
    assert before == openings()


def test_in_a_namespace_of_processes_whose_proc_is_the_outer_one_memory_is_reached_too() -> None:
    isolate = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*isolate, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no namespace of processes")
    program = """
import os
from shmstore import ObjectStoreReader, ObjectStoreWriter
with ObjectStoreWriter.create(memfd=True, capacity=4096, n_readers=1) as writer:
    writer.put("a", b"x")
    if (child := os.fork()) == 0:
        with ObjectStoreReader.attach(writer.handle) as reader:
            os._exit(not reader.has("a"))
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([*isolate, sys.executable, "-c", program], check=True, timeout=60)


# ---- what other code of the process writes


_PRINTS = """
import os, sys, threading
from shmstore import ObjectStoreReader, ObjectStoreWriter
for number in 0, 1, 2:
    os.close(number)
def print_always():
    while not done.is_set():
        for number in 0, 1, 2:
            try:
                os.write(number, b"a line of a library")
            except OSError:
                pass
done = threading.Event()
printing = threading.Thread(target=print_always, daemon=True)
printing.start()
name, memfd = sys.argv[1], sys.argv[2] == "memfd"
with ObjectStoreWriter.create(**({"memfd": True} if memfd else {"name": name}), capacity=65536, n_readers=1,
                              n_writers=2) as first:
    first.put("k", b"value")
    for _ in range(300):
        with ObjectStoreWriter.join(first.handle) as writer, ObjectStoreReader.attach(first.handle) as reader:
            assert reader.get(reader.find("k").ref) == b"value"
            with reader.find_or_claim("a"), writer.find_or_claim("b"):
                assert reader.claimed("b")
            writer.check_valid()
    first.check_valid()
    kept = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    assert min(kept) > 2, kept
done.set()
printing.join()
"""


@pytest.mark.parametrize("where", ["folder", "memfd"])
def test_a_process_without_standard_streams_writes_into_no_store(name: str, where: str) -> None:
    subprocess.run([sys.executable, "-c", _PRINTS, name, where], check=True, timeout=60)


@pytest.mark.parametrize("options", [{}, {"memfd": True}, {"writes": False}])
def test_what_is_kept_of_a_store_cannot_be_written_through(stores: Stores, options: dict[str, Any]) -> None:
    owner = stores.create(n_writers=2, **options)
    writer, reader = stores.keep(ObjectStoreWriter.join(owner.handle)), stores.attach(owner.handle)
    claims = [reader.find_or_claim("a"), writer.find_or_claim("b")]
    opened = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    kept = [link for link in opened if os.path.exists(link) and os.path.samefile(link, owner.handle.path)]
    assert len(kept) == 3, claims
    for link in kept:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(int(os.path.basename(link)), b"a line of a library")
