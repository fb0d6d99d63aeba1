"""An interrupt (Ctrl-C, a timeout's signal) may come at any place in the package's Python, and leaves nothing behind.

Each case is a call of a subject. It is done again and again, interrupted one place later each time, until it is not
interrupted any more. A case that is *undone* leaves its subject as it was; any other one leaves it sound. Then the call
works. Who has another subject adds it to `CASES`.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmstore import CacheMissError, ObjectStoreReader, ObjectStoreWriter, refs
from shmstore.bindings import batch, handles, hidden
from shmstore.bindings import inspect as native_inspect
from shmstore.bindings import store as native
from shmstore.multimodal import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from shmstore.multimodal.caches import shm_receiver, shm_sender, stored_updates
from shmstore.store import holds, leftovers, opening
from shmstore.store import reader as reader_module
from shmstore.store import writer as writer_module
from tests.interrupts import Second, interrupted_at
from tests.multimodal.helpers import MIB, config, item, update
from tests.support import is_mapped, segments, store_name

BINDINGS = [module.__file__ for module in (native, batch, handles, hidden)]
STORE = [*BINDINGS, opening.__file__, writer_module.__file__, reader_module.__file__, holds.__file__, refs.__file__]
SENDER = [*STORE, shm_sender.__file__, shm_receiver.__file__, stored_updates.__file__]
VALUE = np.zeros(9, np.uint8)


class StoreOfOne:
    """A store with the object "old", and a reader."""

    files = STORE

    def __init__(self) -> None:
        self.writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
        self.reader = ObjectStoreReader.attach(self.writer.handle)
        self.ref = self.writer.put("old", VALUE)

    def close(self) -> None:
        self.reader.close()
        self.writer.close()

    def state(self) -> Any:
        stats = self.writer.stats()
        return stats.objects, stats.used_bytes, stats.open_leases, self.writer.keys()

    def check(self) -> None:
        self.writer.check_valid()

    def reserve(self) -> None:
        with self.writer.reserve("new", VALUE) as views:
            views[:] = 1

    def protect(self) -> None:
        with self.writer.protect(["old", "absent"]):
            self.writer.is_cached("old")


class StoreThatIsRead(StoreOfOne):
    """The same, and how many views there are."""

    def state(self) -> Any:
        gc.collect()  # of the interrupted frames, which a trace has kept
        return *super().state(), self.reader.stats().live_views


class StoreWithABlock(StoreOfOne):
    """One in which nothing is protected any more after an interrupt."""

    def check(self) -> None:
        gc.collect()  # of the interrupted frames
        self.writer.cancel_all()
        self.writer.cancel(self.writer.put("whole", np.zeros(6272, np.uint8)))
        assert ["whole"] == self.writer.keys()
        self.writer.delete("whole")
        self.writer.cancel(self.writer.put("old", VALUE))
        super().check()


class StoreOfAHold(StoreOfOne):
    """One whose hand-outs end: an interrupted `hold` ends the lease that it was to hold."""

    def hold(self) -> None:
        with self.writer.hold(self.writer.get_cached("old")) as leased:
            leased.sent()

    def hold_unsent(self) -> None:
        self.writer.hold(self.writer.get_cached("old", hold=True))

    def check(self) -> None:
        gc.collect()  # of the interrupted frames
        super().check()


class Sender:
    """An `shm` sender that has "a" and "b", whose updates are beside; "c" is stored without updates."""

    files = SENDER

    def __init__(self) -> None:
        writer = ObjectStoreWriter.create(capacity=MIB, n_readers=1)
        settings = config(MIB, MIB, cache_type="shm", shm_max_object_size_mb=1)
        self.cache = ShmObjectStoreSenderCache(settings, writer)
        self.writer = writer
        self.writer.cancel(self.writer.put("c", given("c")[0]))
        for mm_hash in "ab":
            self.cache.release([self.cache.get_and_update_item(given(mm_hash), mm_hash)[0]])

    def close(self) -> None:
        self.cache.close()

    def state(self) -> Any:
        cache = self.cache
        return (
            *(self.writer.stats().open_leases, self.writer.keys(), cache.is_cached(list("abd"))),
            *(cache.make_stats(), cache.inline_full, cache.inline_too_large),
        )

    def check(self) -> None:
        self.writer.check_valid()
        assert 0 <= self.cache.make_stats(delta=True).total

    def batch(self, *pairs: tuple[str, Any]) -> Any:
        return self.cache.get_and_update([one for _, one in pairs], [mm_hash for mm_hash, _ in pairs])


class Receiver:
    """A worker of `shm`, and what was sent to it."""

    files = SENDER

    def __init__(self) -> None:
        self.sender = Sender()
        self.sent = [self.sender.cache.get_and_update_item(None, mm_hash)[0] for mm_hash in "ab"]
        self.reader = ObjectStoreReader.attach(self.sender.writer.handle)
        self.cache = ShmObjectStoreReceiverCache(self.reader)

    def close(self) -> None:
        self.cache.close()
        self.sender.close()

    def state(self) -> Any:
        gc.collect()  # of the interrupted frames
        return self.reader.stats().live_views

    def check(self) -> None:
        self.sender.check()


def given(mm_hash: str, nbytes: int = 30) -> Any:
    content = frozenset((mm_hash,)) if mm_hash == "b" else mm_hash * 1000  # a set is not data
    return item(nbytes), [replace(update(mm_hash), content=content)]


class Case(NamedTuple):
    subject: Callable[[], Any]
    call: Callable[[Any], Any]
    undone: bool = False


MIXED: Any = (("a", None), ("d", given("d")), ("c", given("c")), ("b", None), ("e", given("e", 2 * MIB)), ("d", None))
BAD: Any = MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", object(), MultiModalBatchedField())]), []
CASES: dict[str, Case] = {
    "put": Case(StoreOfOne, lambda s: s.writer.put("new", VALUE), True),
    "put of a strided array": Case(StoreOfOne, lambda s: s.writer.put("new", VALUE[::2]), True),
    "get_cached": Case(StoreOfOne, lambda s: s.writer.get_cached("old"), True),
    "reserve": Case(StoreOfOne, StoreOfOne.reserve, True),
    "protect": Case(StoreWithABlock, StoreOfOne.protect),
    "hold": Case(StoreOfAHold, StoreOfAHold.hold),
    "hold that is not sent": Case(StoreOfAHold, StoreOfAHold.hold_unsent),
    "put with a hold": Case(StoreOfOne, lambda s: s.writer.put("new", VALUE, hold=True), True),
    "is_cached": Case(StoreOfOne, lambda s: s.writer.is_cached("old"), True),
    "touch": Case(StoreOfOne, lambda s: s.writer.touch("old"), True),
    "keys": Case(StoreOfOne, lambda s: s.writer.keys(), True),
    "stats": Case(StoreOfOne, lambda s: s.writer.stats(), True),
    "cancel": Case(StoreOfOne, lambda s: s.writer.cancel(s.ref)),
    "delete": Case(StoreOfOne, lambda s: s.writer.delete("old")),
    "clear": Case(StoreOfOne, lambda s: s.writer.clear()),
    "get": Case(StoreThatIsRead, lambda s: s.reader.get(s.ref), True),
    "get of a copy": Case(StoreThatIsRead, lambda s: s.reader.get(s.ref, copy=True), True),
    "release": Case(StoreOfOne, lambda s: s.reader.release(s.ref)),
    "validate": Case(StoreOfOne, lambda s: s.reader.validate(s.ref), True),
    "sender hit": Case(Sender, lambda s: s.cache.get_and_update_item(None, "a"), True),
    "sender hits": Case(Sender, lambda s: s.cache.get_and_update([None, None], ["a", "b"]), True),
    "sender miss": Case(Sender, lambda s: s.cache.get_and_update_item(given("d"), "d"), True),
    "sender miss of updates only": Case(Sender, lambda s: s.cache.get_and_update_item(given("c"), "c"), True),
    "sender too large": Case(Sender, lambda s: s.cache.get_and_update_item(given("d", 2 * MIB), "d"), True),
    "sender batch": Case(Sender, lambda s: s.batch(*MIXED), True),
    "sender is_cached": Case(Sender, lambda s: s.cache.is_cached(["a", "d"]), True),
    "sender make_stats": Case(Sender, lambda s: s.cache.make_stats(delta=True)),
    "sender touch": Case(Sender, lambda s: s.cache.touch_sender_cache_item("a"), True),
    "sender invalidate": Case(Sender, lambda s: s.cache.invalidate(["a", "b"])),
    "sender clear_cache": Case(Sender, lambda s: s.cache.clear_cache()),
    "sender release": Case(Sender, lambda s: s.cache.release([s.writer.get_cached("a")])),
    "receiver": Case(Receiver, lambda s: s.cache.get_and_update(s.sent, ["a", "b"]), True),
    "receiver release": Case(Receiver, lambda s: s.cache.release(s.sent)),
}


@contextmanager
def made(subject: Callable[[], Any]) -> Iterator[Any]:
    one = subject()
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_is_interrupted_leaves_nothing(name: str) -> None:
    case = CASES[name]
    number, again = 0, True
    while again:
        number += 1
        with made(case.subject) as subject:
            before = subject.state() if case.undone else None
            again = interrupted_at(number, partial(case.call, subject), *subject.files, exact=True)
            if again and case.undone:
                assert before == subject.state(), f"interrupt {number}"
            if again or not case.undone:
                subject.check()
                case.call(subject)  # no lock is left, and no protection
    assert number > 1, "nothing was interrupted"


@pytest.mark.timeout(method="thread")  # the other way has the same timer
@pytest.mark.parametrize("name", ["put", "put of a strided array", "reserve", "get_cached", "sender hit"])
def test_a_call_whose_interrupt_is_interrupted_leaves_nothing(name: str) -> None:
    case = CASES[name]
    number, again = 0, True
    with made(case.subject) as subject:
        before = subject.state()
        while again:
            number += 1
            for delay in range(1, 101):  # it comes when it comes
                with Second(delay // 2 + 1, *subject.files) as second:
                    again = interrupted_at(
                        number, lambda: case.call(subject), *subject.files, exact=True, handler=second.start
                    )
                if not again:
                    break
                assert before == subject.state(), f"interrupt {number}, and {delay} us later"
                subject.check()
    assert number > 3


def test_a_batch_that_fails_and_whose_undoing_is_interrupted_leaves_nothing_that_can_be_seen() -> None:
    number, again = 0, True
    while again:
        number += 1
        with made(Sender) as subject:
            before = subject.state()
            try:
                again = interrupted_at(number, partial(subject.batch, *MIXED, ("bad", BAD)), *SENDER, exact=True)
            except TypeError:
                again = False
            after = subject.state()
            assert (before[:2], before[4:7]) == (after[:2], after[4:7]), f"interrupt {number}"
            subject.batch(("x", given("x")))
            subject.check()
    assert number > 50


def test_a_batch_that_nobody_undoes_is_undone_when_it_goes() -> None:
    with made(StoreOfOne) as subject:
        before = subject.state()
        forgotten = subject.writer._writer.batch()
        forgotten.hit(b"old")
        forgotten.put(b"new", b"", 0, ())
        assert before != subject.state()
        del forgotten
        assert before == subject.state()


def test_a_sender_whose_making_is_interrupted_leaves_the_writer_to_the_next_though_its_traceback_is_kept() -> None:
    settings = config(MIB, cache_type="shm")
    kept: list[BaseException] = []

    def make(writer: ObjectStoreWriter) -> None:
        try:
            ShmObjectStoreSenderCache(settings, writer)
        except BaseException as error:
            kept.append(error)
            raise

    again = True
    while again:
        with ObjectStoreWriter.create(capacity=MIB, n_readers=1) as writer:
            number = len(kept) + 1
            again = interrupted_at(number, partial(make, writer), shm_sender.__file__, exact=True)
            if again:
                ShmObjectStoreSenderCache(settings, writer)
    assert len(kept) > 5


OPENING = ("create", "_create", "open", "_recover", "recover", "cancel_all", "make_room", "__init__")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("files", [BINDINGS, [opening.__file__]], ids=["bindings", "store"])
@pytest.mark.parametrize("make", [ObjectStoreWriter.create, ObjectStoreWriter.open])
def test_a_creation_that_is_interrupted_leaves_no_store(files: list[str], make: Callable[..., Any]) -> None:
    number, writers = 0, list[ObjectStoreWriter]()
    while not writers:
        number += 1
        name = store_name()
        create = lambda name=name: writers.append(make(name, capacity=6400, n_readers=1))  # noqa: E731
        if interrupted_at(number, create, *files, exact=True, only=OPENING):
            gc.collect()  # of the interrupted frames
            assert name not in segments(), f"interrupt {number}"
    writers[0].close()
    assert number > 4


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("fits", [True, False])
def test_an_open_that_is_interrupted_leaves_what_was_there_or_nothing(fits: bool) -> None:
    """A store that fits stays whole and without a writer; one that does not is there or gone, and no other is."""
    files = [*BINDINGS, opening.__file__, leftovers.__file__]
    number, writers = 0, list[ObjectStoreWriter]()
    while not writers:
        number += 1
        name = store_name()
        with ObjectStoreWriter.create(name, capacity=6400 if fits else 64, n_readers=1) as writer:
            writer.put("old", 1)
            made = writer.handle.store_id
            writer.close(unlink=False)
        again = lambda name=name: writers.append(ObjectStoreWriter.open(name, capacity=6400, n_readers=1))  # noqa: E731
        if interrupted_at(number, again, *files, exact=True, only=OPENING):
            gc.collect()
            assert fits <= (name in segments()), f"interrupt {number}"
            if name in segments():
                with ObjectStoreWriter.recover(name) as heir:
                    assert (made, ["old"]) == (heir.handle.store_id, heir.keys()), f"interrupt {number}"
    assert fits == writers[0].recovered
    writers[0].close()
    assert number > 10


def test_a_handle_whose_opening_is_interrupted_leaves_no_lock_and_nothing_mapped() -> None:
    with made(StoreOfOne) as subject:
        name = subject.writer.name
        subject.close = lambda: None
        subject.reader.close()
        subject.writer.close(unlink=False)
        gc.collect()
        openings: dict[str, Callable[[], Any]] = {
            "takeover": lambda: native.Writer.recover(name, native.ANY_STORE),
            "attachment": lambda: native.Reader.attach(name, 0, native.ANY_STORE),
            "inspection": lambda: native_inspect.Inspector(name),
        }
        for kind, opening in openings.items():
            number = 1
            while interrupted_at(number, opening, *BINDINGS, native_inspect.__file__, exact=True):
                gc.collect()  # of the interrupted frames
                assert not is_mapped(name), f"{kind}, interrupt {number}"
                ObjectStoreWriter.recover(name).close(unlink=False)
                number += 1
            gc.collect()
            assert number > 5
        ObjectStoreWriter.recover(name).close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_wait_for_a_store_that_is_interrupted_leaves_no_descriptor() -> None:
    def wait() -> None:
        with native.Watch("none") as watch:
            watch.wait(0)

    number, before = 1, len(os.listdir("/proc/self/fd"))
    while interrupted_at(number, wait, *BINDINGS, exact=True):
        gc.collect()  # of the interrupted frames
        assert before == len(os.listdir("/proc/self/fd")), f"interrupt {number}"
        number += 1
    assert number > 5


def test_a_close_that_is_interrupted_gives_the_memory_back_all_the_same() -> None:
    subject = StoreOfOne()
    for opened in (subject.reader, subject.writer):
        assert interrupted_at(1, opened.close, *BINDINGS, exact=True, only=("close",))
        opened.close()
    gc.collect()  # of the interrupted frames
    assert not is_mapped(subject.writer.name)


def test_a_sender_that_failed_goes_on_and_says_what_it_misses() -> None:
    with made(Sender) as subject:
        assert interrupted_at(60, lambda: subject.batch(*MIXED), *SENDER, exact=True)
        with pytest.raises(CacheMissError) as missed:
            subject.batch(("a", None), ("d", None), ("c", None))
        assert ("d", "c") == missed.value.mm_hashes
