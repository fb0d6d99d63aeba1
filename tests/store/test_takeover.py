"""What a reader notices: another writer, a store that was removed, and one that comes while it waits."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from shmstore import (
    ObjectStoreReader,
    ObjectStoreWriter,
    RankInUseError,
    StaleRefError,
    StoreClosedError,
    StoreHandle,
    StoreNotFoundError,
)
from shmstore.cli.main import main
from shmstore.multimodal import ShmObjectStoreReceiverCache
from tests.store.test_segments import MAGIC
from tests.support import SHM, Child, Signal, Stores, bits, raises, random_tensor, segments

OPTIONS: dict[str, Any] = {"capacity": 64 * 1024, "n_readers": 2}
LARGE: dict[str, Any] = OPTIONS | {"capacity": 128 << 20}
VALUE = random_tensor(1, 5000)


# ---- another writer


def test_the_epoch_of_a_reader_grows_by_one_with_each_takeover(stores: Stores) -> None:
    writer = stores.create(**OPTIONS)
    reader = stores.attach(writer)
    for epoch in (1, 2, 3):
        ref = writer.put(f"k{epoch}", epoch)
        assert (epoch, epoch) == (reader.get(ref), reader.writer_epoch)
        writer.close(unlink=False)
        writer = stores.keep(ObjectStoreWriter.open(writer.name, **OPTIONS))


# ---- a store that was removed


@pytest.mark.parametrize("again", [False, True])
def test_a_reader_of_a_removed_store_is_told_so_and_reads_what_is_left(stores: Stores, again: bool) -> None:
    writer = stores.create(**OPTIONS)
    reader = stores.attach(writer)
    ref = writer.put("k", VALUE)
    gone = writer.put("gone", 1)
    writer.cancel(gone)
    writer.delete("gone")
    with pytest.raises(StaleRefError):
        reader.get(gone)
    writer.close()
    if again:
        writer = stores.keep(ObjectStoreWriter.open(writer.name, **OPTIONS))
        gone = writer.put("k", VALUE)
    assert bits(VALUE) == bits(reader.get(ref))
    for call in (reader.get, *([reader.release] if again else [])):
        with raises(StoreClosedError if again else StoreNotFoundError, names=[repr(writer.name)], hint=["attach"]):
            call(gone)
    cache: ShmObjectStoreReceiverCache[Any] = ShmObjectStoreReceiverCache(reader)
    for deliver in (lambda: cache.get_and_update([gone], ["h"]), lambda: cache.get_and_update_item(gone, "h")):
        with pytest.raises(StoreClosedError if again else StoreNotFoundError):
            deliver()
    assert bits(VALUE) == bits(reader.get(ref))


# ---- a store that comes


def attach_late(name: str, ready: Signal, seconds: float) -> tuple[int, float]:
    """Wait for a store; return its number, and the processor time that this took."""
    ready.send()
    before = time.process_time()
    with ObjectStoreReader.attach(name, wait=seconds) as reader:
        return reader.store_id, time.process_time() - before


def test_a_reader_waits_for_its_store_without_spinning(stores: Stores, name: str) -> None:
    ready = Signal()
    child = Child(attach_late, name, ready, 60)
    try:
        ready.wait()
        time.sleep(1)  # in which it has nothing to do
        writer = stores.keep(ObjectStoreWriter.open(name, **OPTIONS))
        store_id, spent = child.join()
    finally:
        child.kill()
        ready.close()
    assert writer.handle.store_id == store_id
    assert spent < 0.3


def test_a_creation_that_is_going_on_is_waited_for(stores: Stores, name: str) -> None:
    """The creator is stopped after its first word, so what wakes the reader is the end of the creation."""

    def create() -> None:
        with ObjectStoreWriter.open(name, capacity=256 << 20, n_readers=2, prefault=True) as writer:
            writer.put("k", 5)
            signal.pause()

    child = Child(create)
    try:
        while not (SHM / name).exists() or (SHM / name).stat().st_size < 1 << 20:
            pass
        child.signal(signal.SIGSTOP)
        with pytest.raises(StoreNotFoundError, match="creation is not over"):
            ObjectStoreReader.attach(name, wait=0.1)
        threading.Timer(0.2, child.signal, (signal.SIGCONT,)).start()
        reader = stores.keep(ObjectStoreReader.attach(name, wait=60))
        assert 1 == reader.writer_epoch
    finally:
        child.kill()


def test_a_reader_waits_for_who_creates_the_store_again_after_a_death_in_its_creation(
    stores: Stores, name: str
) -> None:
    (SHM / name).write_bytes(MAGIC + bytes(1 << 16))  # as a killed creator leaves it
    with raises(StoreNotFoundError, [name, "creation"]):
        ObjectStoreReader.attach(name)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ObjectStoreReader.attach, name, wait=60)
        writer = stores.keep(ObjectStoreWriter.open(name, **OPTIONS))
        assert writer.handle.store_id == stores.keep(waiting.result()).store_id


def test_the_time_is_over_at_its_end_and_a_free_rank_is_found_too(
    stores: Stores, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait that takes long is logged once: the name may be wrong."""
    begin = time.monotonic()
    with raises(StoreNotFoundError, [name, "after 0.2 seconds"]):
        ObjectStoreReader.attach(name, wait=0.2)
    assert 0.2 <= time.monotonic() - begin < 10
    assert not caplog.messages
    monkeypatch.setattr("shmstore.store.reader._SILENT", 0.05)
    with pytest.raises(StoreNotFoundError):
        ObjectStoreReader.attach(name, wait=0.2)
    assert 1 == len(caplog.messages)
    assert name in caplog.messages[0]
    with pytest.raises(StoreNotFoundError):
        ObjectStoreReader.attach(name, wait=0)
    writer = stores.keep(ObjectStoreWriter.open(name, **OPTIONS))
    stores.attach(writer, 0)
    assert 1 == stores.keep(ObjectStoreReader.attach(name, None, wait=60)).rank
    with pytest.raises(RankInUseError):  # it is there, so nothing is waited for
        ObjectStoreReader.attach(name, 0, wait=3600)


def test_a_handle_of_a_store_that_is_gone_for_good_is_not_waited_for(stores: Stores) -> None:
    writer = stores.create(**OPTIONS)
    old = StoreHandle(writer.name, writer.handle.store_id ^ 1, 2)
    with pytest.raises(StoreNotFoundError):
        ObjectStoreReader.attach(old, wait=3600)


def test_an_interrupt_ends_the_waiting(name: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    descriptors = len(os.listdir("/proc/self/fd"))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ObjectStoreReader.attach(name, wait=3600)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert descriptors == len(os.listdir("/proc/self/fd"))


# ---- a process that was killed just now


@contextmanager
def killed_just_now(name: str) -> Iterator[None]:
    """Kill a writer and rank; the block begins while the kernel still takes apart what it has mapped."""

    def have(ready: Signal) -> None:
        writer = ObjectStoreWriter.create(name, **LARGE, prefault=True)
        with ObjectStoreReader.attach(writer.handle):
            ready.send()
            signal.pause()

    ready = Signal()
    child = Child(have, ready)
    try:
        ready.wait()
        child.signal(signal.SIGKILL)
        yield
    finally:
        child.kill()
        ready.close()


def collect(name: str) -> None:
    assert 0 == main(["gc", name, "--yes", "--force"])


@pytest.mark.parametrize(
    "call",
    [
        lambda name: ObjectStoreWriter.open(name, **LARGE),
        lambda name: ObjectStoreWriter.open(name, **OPTIONS),
        ObjectStoreWriter.recover,
        ObjectStoreWriter.join,
        ObjectStoreReader.attach,
        partial(ObjectStoreReader.attach, rank=None, n_readers=2),
        ObjectStoreWriter.unlink,
        collect,
    ],
    ids=["open", "open other", "recover", "join", "attach", "attach any", "unlink", "gc"],
)
def test_what_a_killed_process_had_is_free_at_once(stores: Stores, name: str, call: Callable[[str], Any]) -> None:
    with killed_just_now(name):
        got = call(name)
    if got is not None:
        stores.keep(got)
    else:
        assert name not in segments()
