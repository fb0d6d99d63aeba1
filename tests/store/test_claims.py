"""The right to make an object: one process or thread has it, and it ends with its holder, however that ends."""

import asyncio
import contextvars
import gc
import os
import pickle
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shmstore import (
    Claim,
    LeasedRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    PinnedRef,
    StoreClosedError,
)
from tests.store.test_system import with_descriptors_left
from tests.support import SHM, Signal, Stores, alive, in_child

Process = ObjectStoreReader | ObjectStoreWriter


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    return stores.create(n_readers=2)


@pytest.fixture
def reader(stores: Stores, writer: ObjectStoreWriter) -> ObjectStoreReader:
    return stores.attach(writer, 0)


def claim(by: Process, key: str = "a") -> Claim:
    """Claim what is neither stored nor claimed."""
    got = by.find_or_claim(key)
    assert isinstance(got, Claim)
    return got


def test_one_of_several_has_the_right_until_it_ends(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    with claim(reader) as first:
        assert [None, None] == [by.find_or_claim("a") for by in (reader, writer)]
        assert reader.claimed("a")
        assert writer.claimed("a")
        assert not writer.claimed("b")
        other = claim(writer, "b")
        assert isinstance(writer.find_or_claim("a", namespace="another"), Claim)
    first.end()
    assert not reader.claimed("a")
    claim(writer).end()
    del other
    gc.collect()
    assert not reader.claimed("b")
    with pytest.raises(TypeError):
        pickle.dumps(first)


def test_what_was_stored_meanwhile_is_found(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    made = claim(writer)
    writer.put("a", b"1")
    assert isinstance(writer.find_or_claim("a"), LeasedRef)  # also while the claim is there
    made.end()
    found = reader.find_or_claim("a")
    assert isinstance(found, PinnedRef)
    assert b"1" == reader.get(found.ref)
    assert not reader.claimed("a")


def test_after_a_grant_it_looks_again(
    writer: ObjectStoreWriter, reader: ObjectStoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = reader._has, list[bool]()

    def stored_behind_the_first_look(packed: bytes) -> bool:
        looks.append(look(packed))
        if len(looks) == 2:  # after whether it is open, and whether it is stored
            writer.put("a", b"1")
        return looks[-1]

    monkeypatch.setattr(reader, "_has", stored_behind_the_first_look)
    assert isinstance(reader.find_or_claim("a"), PinnedRef)
    assert [False, False, True] == looks
    assert not reader.claimed("a")


def test_a_claim_ends_with_a_process_that_is_killed_and_who_waits_takes_it(
    writer: ObjectStoreWriter, reader: ObjectStoreReader
) -> None:
    def hold(ready: Signal) -> None:
        with ObjectStoreReader.attach(writer.handle, 1, finds_only=True) as other, claim(other):
            ready.send()
            signal.pause()

    got: list[object] = []
    with alive(hold):
        assert reader.find_or_claim("a", wait=0.05) is None
        waiter = threading.Thread(target=lambda: got.append(reader.find_or_claim("a", wait=60)))
        waiter.start()
    waiter.join()
    assert isinstance(got[0], Claim)


def test_a_wait_ends_with_what_is_stored(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    made = claim(writer)
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(reader.find_or_claim("a", wait=60)))
    waiter.start()
    writer.put("a", b"1")
    waiter.join()
    assert isinstance(got[0], PinnedRef)
    made.end()


def test_a_close_gives_back_the_store_and_a_wait_counts_no_miss(
    stores: Stores, writer: ObjectStoreWriter, reader: ObjectStoreReader
) -> None:
    with claim(reader):
        assert writer.find_or_claim("a", wait=0.05) is None
    assert 0 == writer.stats().misses
    opened = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    assert f"/dev/shm/{writer.name}" in opened
    for one in (reader, writer):
        one.close()
        with pytest.raises(StoreClosedError):
            one.find_or_claim("a")
        with pytest.raises(StoreClosedError):
            one.claimed("a")
    left = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [file for file in left if writer.name in file]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_thread_that_holds_a_claim_must_not_wait(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    with claim(reader, "b"), claim(writer):
        with pytest.raises(RuntimeError, match="wait=0"):
            reader.find_or_claim("a", wait=1)
        assert reader.find_or_claim("a") is None
    claim(reader)


def test_a_claim_of_a_thread_that_has_ended_is_not_that_of_a_new_one(reader: ObjectStoreReader) -> None:
    """Python gives a thread's number again, and so does the system once it has given all."""
    kept: list[object] = []
    threads: list[int] = []

    def work() -> None:
        threads.append(threading.get_native_id())
        kept.append(reader.find_or_claim(f"k{len(kept)}", wait=0.01))

    for _ in range(20):
        thread = threading.Thread(target=work)
        with suppress(OSError, IndexError):  # only root may choose it
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(threads[0] - 1))
        thread.start()
        thread.join()
    assert [Claim] * 20 == [type(one) for one in kept]


def test_threads_that_claim_first_at_once_know_of_each_other(
    reader: ObjectStoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, both, waited = reader._open_claims, threading.Barrier(2), list[object]()

    def open_beside_the_other() -> Any:
        both.wait(60)
        return opens()

    def hold_and_wait(key: str) -> None:
        with claim(reader, key):
            both.wait(60)
            try:
                waited.append(reader.find_or_claim("c", wait=0.01))
            except RuntimeError:
                waited.append(RuntimeError)

    monkeypatch.setattr(reader, "_open_claims", open_beside_the_other)
    threads = [threading.Thread(target=hold_and_wait, args=(key,)) for key in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [RuntimeError] * 2 == waited


def test_a_loop_goes_on_while_its_tasks_wait_for_one_of_them(
    writer: ObjectStoreWriter, reader: ObjectStoreReader
) -> None:
    made = list[str]()

    async def find_or_make(by: Process) -> bytes:
        got = await by.afind_or_claim("a", wait=60)
        if isinstance(got, Claim):
            with got:
                made.append("a")
                await asyncio.sleep(0.02)  # the others wait
                writer.put("a", b"made", lease=False)
            got = reader.find("a")
        assert isinstance(got, (PinnedRef, LeasedRef))
        with got:
            return bytes(reader.get(got.ref))

    async def all_at_once() -> list[bytes]:
        return await asyncio.gather(*(find_or_make((reader, writer)[n % 2]) for n in range(20)))

    assert [b"made"] * 20 == asyncio.run(all_at_once())
    assert ["a"] == made


def test_a_waiting_task_makes_what_its_maker_gave_up_or_gets_none(reader: ObjectStoreReader) -> None:
    async def give_up(first: Claim) -> None:
        await asyncio.sleep(0)
        first.end()

    async def both() -> None:
        first = await reader.afind_or_claim("a")
        assert isinstance(first, Claim)
        first.end()  # though this task remembers it
        second = await reader.afind_or_claim("a", wait=60)
        assert isinstance(second, Claim)
        waits = asyncio.create_task(reader.afind_or_claim("a", wait=0.01), context=contextvars.Context())
        assert await waits is None
        waits = asyncio.create_task(reader.afind_or_claim("a", wait=60), context=contextvars.Context())
        await give_up(second)
        assert isinstance(await waits, Claim)

    asyncio.run(both())


def test_a_task_that_holds_a_claim_must_not_wait_but_others_may(reader: ObjectStoreReader) -> None:
    async def hold_and_wait() -> None:
        with claim(reader):
            for key in "ab":
                with pytest.raises(RuntimeError, match="this task holds a claim"):
                    await reader.afind_or_claim(key, wait=1)
            with pytest.raises(RuntimeError, match="this task"):
                await asyncio.create_task(reader.afind_or_claim("b", wait=1))
            assert await reader.afind_or_claim("a") is None

    async def beside_it() -> None:
        holds = asyncio.create_task(hold_and_wait())
        await asyncio.sleep(0)
        assert isinstance(await reader.afind_or_claim("a", wait=60), Claim)
        await holds

    asyncio.run(beside_it())


def test_a_forked_child_keeps_no_claim(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    mine = claim(reader)
    pid = os.fork()
    if not pid:
        mine.end()
        signal.pause()
        os._exit(0)
    try:
        assert writer.claimed("a")  # the child has ended none of its parent's
        mine.end()
        assert not writer.claimed("a")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_task_of_a_forked_child_may_wait_while_its_parent_holds_a_claim(writer: ObjectStoreWriter) -> None:
    def claims_in_a_task() -> bool:
        with ObjectStoreReader.attach(writer.handle, 0) as reader:
            return isinstance(asyncio.run(reader.afind_or_claim("b", wait=1)), Claim)

    with claim(writer):
        assert in_child(claims_in_a_task)


def test_beyond_64_of_a_process_a_claim_excludes_nobody(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    many = [claim((reader, writer)[n % 2], f"k{n}") for n in range(65)]
    assert isinstance(writer.find_or_claim("k64"), Claim)
    assert writer.find_or_claim("k63") is None
    assert reader.find_or_claim("k0") is None
    many.clear()
    gc.collect()
    with claim(reader, "k64"):
        assert writer.find_or_claim("k64") is None


def test_no_close_of_a_descriptor_ends_a_claim(writer: ObjectStoreWriter, reader: ObjectStoreReader) -> None:
    def close_all(ready: Signal) -> None:
        with ObjectStoreReader.attach(writer.handle, 1) as other, claim(other), (SHM / writer.name).open() as stranger:
            for fd in {int(fd) for fd in os.listdir("/proc/self/fd")} - {0, 1, 2, stranger.fileno()}:
                if _is_open(str(fd)) and writer.name in os.readlink(f"/proc/self/fd/{fd}"):
                    os.dup2(stranger.fileno(), fd)  # the number names another opening from now on
                    os.close(fd)
            assert other.find_or_claim("a") is None
            with claim(other, "b"):
                ready.send()
                signal.pause()

    with alive(close_all):
        assert (None, None) == (reader.find_or_claim("a"), writer.find_or_claim("b"))
    assert isinstance(reader.find_or_claim("a"), Claim)


def test_what_could_not_be_claimed_for_want_of_a_descriptor_is_claimed_later(writer: ObjectStoreWriter) -> None:
    def claim_without() -> tuple[bool, bool]:
        with ObjectStoreReader.attach(writer.handle) as reader, ObjectStoreReader.attach(writer.handle, 1) as other:
            with with_descriptors_left(0, lambda: claim(reader)):
                before = other.claimed("a")
            with claim(reader):
                return before, other.claimed("a")

    assert (False, True) == in_child(claim_without)


@pytest.mark.parametrize("another", [False, True])
def test_in_a_store_that_was_removed_a_claim_excludes_nobody(
    stores: Stores, writer: ObjectStoreWriter, reader: ObjectStoreReader, another: bool
) -> None:
    writer.close(unlink=True)
    if another:
        claim(stores.create(name=writer.name))
    with claim(reader):
        claim(reader).end()
