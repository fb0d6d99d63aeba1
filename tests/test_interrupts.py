"""An interrupt (Ctrl-C, a timeout's signal) may come anywhere in the package's Python, and leaves no change half done.

Each case is a call, done again and again, interrupted one place later each time, until it is not interrupted any more.
"""

import dis
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import shmstore
from shmstore import ObjectStoreReader, ObjectStoreWriter
from shmstore.bindings import inspect as native_inspect
from shmstore.bindings import store as native
from shmstore.multimodal import (
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from shmstore.multimodal.caches import lru_pair
from shmstore.multimodal.values.sizes import updates_size
from shmstore.scheduler import BlockHasher, Request
from tests.multimodal.helpers import MIB, config, item, update
from tests.scheduler.helpers import manager, request
from tests.support import is_mapped, segments, store_name

_CALLS = ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
"""Python looks for signals when a function begins, after a call and where a loop goes back: a trace raises there."""


class Interrupt(BaseException):
    """What a signal's handler may raise."""


@cache
def _steps(code: CodeType) -> dict[int, str]:
    return {step.offset: step.opname for step in dis.get_instructions(code)}


def interrupted_at(number: int, action: Callable[[], Any], *files: str | None, only: Iterable[str] = ()) -> bool:
    """Interrupt `action` at that check within `files`, or `only` these functions; return False if it ended before."""
    seen = 0
    done: dict[FrameType, str] = {}  # the step that a frame has just done

    def due(frame: FrameType) -> bool:
        before, done[frame] = done.get(frame), _steps(frame.f_code)[frame.f_lasti]
        return before is not None and (before in _CALLS or "JUMP_BACKWARD" in before)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        name = frame.f_code.co_name
        if event == "call" and frame.f_back in done and not name.startswith("__"):  # those are called through C
            done[frame.f_back] = "a call of Python"
        if frame.f_code.co_filename not in files or name == "_keep" or (only and name not in only):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and due(frame):
            seen += 1
            if seen == number:
                sys.settrace(None)
                raise Interrupt(f"{name}, line {frame.f_lineno}")
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupt:
        return True
    finally:
        sys.settrace(outer)
    return False


def files(folder: str, *names: str) -> list[str]:
    return [str(Path(shmstore.__file__).parent / folder / f"{name}.py") for name in names]


BINDINGS = files("bindings", "store", "batch", "handles", "hidden")
OPENS = [*BINDINGS, *files("store", "opening", "orphans")]
STORE = [*BINDINGS, *files("store", "opening", "writer", "reader", "leases"), *files("", "refs")]
STORE += files("multimodal/caches", "shm_sender", "shm_receiver", "stored_updates")
LRU = files("multimodal/caches", "shadow", "lru", "lru_pair")
MANAGERS = files("bindings", "blockhash", "hashlist", "kvcache")
MANAGERS += files("scheduler", "block_hasher", "kv_cache_manager", "request")
VALUE = np.zeros(9, np.uint8)


def interrupts(make: Callable[[], Any], call: Callable[[Any], object], where: list[str]) -> Iterator[tuple[int, Any]]:
    """Yield a subject after an interrupt at each place of the call, with its number; 0 if there was no interrupt."""
    for number in count(1):
        subject = make()
        again = interrupted_at(number, partial(call, subject), *where)
        yield number if again else 0, subject
        if not again:
            assert number > 1, "nothing was interrupted"
            return


class Engine:
    """A store with "old", a reader that has it, and an `shm` sender and receiver of "a" and "b"."""

    def __init__(self) -> None:
        self.writer = ObjectStoreWriter.create(capacity=MIB, n_readers=1)
        settings = config(MIB, MIB, cache_type="shm", shm_max_object_size_mb=1)
        self.sender = ShmObjectStoreSenderCache(settings, self.writer)
        self.sent = [self.sender.get_and_update_item(given(h), h)[0] for h in "ab"]
        self.writer.cancel(self.writer.put("c", given("c")[0]))  # without updates
        self.ref = self.writer.put("old", VALUE)
        self.reader = ObjectStoreReader.attach(self.writer.handle)
        self.receiver = ShmObjectStoreReceiverCache(self.reader)

    def state(self) -> Any:
        stats = self.writer.stats()
        return (
            *(stats.objects, stats.used_bytes, stats.open_leases, self.writer.keys()),
            *(self.sender.is_cached(list("abd")), self.sender.make_stats(), self.reader.stats().live_views),
            *(self.sender.inline_full, self.sender.inline_too_large),
        )

    def close(self) -> None:
        self.writer.check_valid()
        self.receiver.close()
        self.sender.close()

    def batch(self, *pairs: tuple[str, Any]) -> Any:
        return self.sender.get_and_update([one for _, one in pairs], [mm_hash for mm_hash, _ in pairs])

    def reserve(self) -> None:
        with self.writer.reserve("new", VALUE, timeout=1, unless_stored=True) as views:
            views[:] = 1

    def hold(self) -> None:
        with self.writer.hold(self.writer.get_cached("old")) as leased:
            leased.sent()


def given(mm_hash: str, nbytes: int = 30) -> Any:
    content = frozenset((mm_hash,)) if mm_hash == "b" else mm_hash * 1000  # a set is not data
    return item(nbytes), [replace(update(mm_hash), content=content)]


MIXED: Any = (("a", None), ("d", given("d")), ("c", given("c")), ("b", None), ("e", given("e", 2 * MIB)), ("d", None))
UNDONE: dict[str, Callable[[Engine], object]] = {
    "put": lambda s: s.writer.put("new", VALUE),
    "get_cached": lambda s: s.writer.get_cached("old"),
    "reserve": Engine.reserve,
    "touch": lambda s: s.writer.touch("old"),
    "get": lambda s: s.reader.get(s.ref),
    "sender batch": lambda s: s.batch(*MIXED),
    "receiver": lambda s: s.receiver.get_and_update(s.sent, ["a", "b"]),
}
READS = ("get", "receiver")
SOUND: dict[str, Callable[[Engine], object]] = {
    "hold": Engine.hold,
    "cancel": lambda s: s.writer.cancel(s.ref),
    "delete": lambda s: s.writer.delete("old"),
    "clear": lambda s: s.writer.clear(),
    "sender invalidate": lambda s: s.sender.invalidate(["a", "b"]),
    "sender release": lambda s: s.sender.release(s.sent),
}


@pytest.mark.parametrize("name", UNDONE)
def test_an_interrupted_call_is_undone(name: str) -> None:
    untouched = Engine()
    before = untouched.state()
    untouched.writer.delete("c")  # which the sender replaces
    replaced = untouched.state()
    untouched.close()
    for number, subject in interrupts(Engine, UNDONE[name], STORE):
        if name in READS:
            gc.collect()  # of the interrupted frames, which a trace has kept; writes are undone without
        if number:
            after = subject.state()
            if name in READS:  # no pin is left; the lease is over once C has acknowledged it
                assert after[2] <= before[2]
                after = (*after[:2], before[2], *after[3:])
            assert after == before or (name == "sender batch" and after == replaced), f"interrupt {number}"
            UNDONE[name](subject)  # no lock is left
        subject.close()


@pytest.mark.parametrize("name", SOUND)
def test_an_interrupted_removal_leaves_the_store_sound(name: str) -> None:
    for number, subject in interrupts(Engine, SOUND[name], STORE):
        gc.collect()
        if number and name not in ("hold", "delete", "clear"):
            SOUND[name](subject)
        subject.writer.cancel_all()
        subject.writer.cancel(subject.writer.put("whole", np.zeros(MIB - 256, np.uint8)))  # nothing is kept
        assert ["whole"] == subject.writer.keys(), f"interrupt {number}"
        subject.close()


OPENING = ("create", "_create", "open", "_recover", "recover", "cancel_all", "make_room", "__init__")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("there", [None, 6400, 64])
def test_an_interrupted_open_leaves_what_was_there_or_nothing(there: int | None) -> None:
    """A store that fits stays whole and without a writer; one that does not is there or gone, and no other is."""
    writers: list[ObjectStoreWriter] = []
    for number in count(1):
        name, made = store_name(), 0
        if there is not None:
            with ObjectStoreWriter.create(name, capacity=there, n_readers=1) as writer:
                writer.put("old", 1)
                made = writer.handle.store_id
                writer.close(unlink=False)
        again = lambda name=name: writers.append(ObjectStoreWriter.open(name, capacity=6400, n_readers=1))  # noqa: E731
        if not interrupted_at(number, again, *OPENS, only=OPENING):
            break
        gc.collect()
        left = name in segments()
        assert left or there != 6400, f"interrupt {number}"
        assert there is not None or not left, f"interrupt {number}"
        if left:
            with ObjectStoreWriter.recover(name) as heir:
                assert (made, ["old"]) == (heir.handle.store_id, heir.keys()), f"interrupt {number}"
                heir.close(unlink=True)
    assert (there == 6400) == writers[0].recovered
    writers[0].close(unlink=True)
    assert number > 4


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupted_open_or_close_leaves_no_lock_and_nothing_mapped() -> None:
    writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
    name, reader = writer.name, ObjectStoreReader.attach(writer.handle)
    for close in (reader.close, partial(writer.close, unlink=False)):
        assert interrupted_at(1, close, *BINDINGS, only=["close"])
        close()
    del close, reader, writer
    openings: list[Callable[[], Any]] = [
        lambda: native.Writer.recover(name, native.ANY_STORE),
        lambda: native.Reader.attach(name, 0, native.ANY_STORE),
        lambda: native_inspect.Inspector(name),
    ]
    descriptors = len(os.listdir("/proc/self/fd"))
    for take in openings:
        number = 1
        while interrupted_at(number, take, *BINDINGS, native_inspect.__file__):
            gc.collect()
            assert not is_mapped(name), f"interrupt {number}"
            ObjectStoreWriter.recover(name).close(unlink=False)
            assert descriptors == len(os.listdir("/proc/self/fd")), f"interrupt {number}"
            number += 1
        assert number > 2
        gc.collect()
    ObjectStoreWriter.recover(name).close()


def send(cache: Any, items: list[Any], mm_hashes: str) -> None:
    cache.get_and_update([one and (one, [update(h)]) for one, h in zip(items, mm_hashes, strict=True)], [*mm_hashes])


UPDATES = updates_size([update("a")], "a")
GIVE: dict[Any, Callable[..., object]] = {
    lru_pair.MultiModalProcessorSenderCache: send,
    lru_pair.MultiModalReceiverCache: lambda c, items, hashes: c.get_and_update(items, [*hashes]),
}


def filled(kind: Any) -> Any:
    cache = kind(config(6 + 3 * UPDATES, 6))
    GIVE[kind](cache, [item(2)] * 3, "abc")
    GIVE[kind](cache, [None, None], "ca")
    return cache


def full_batch(cache: Any) -> object:
    return GIVE[type(cache)](cache, [item(3), None, item(2)], "dce")


CACHE_CALLS: list[tuple[Any, str, Callable[[Any], object]]] = [
    *((kind, "batch", full_batch) for kind in GIVE),
    (lru_pair.MultiModalProcessorSenderCache, "clear", lambda c: c.clear_cache()),
    (lru_pair.MultiModalProcessorSenderCache, "touch", lambda c: c.touch_sender_cache_item("b")),
    (lru_pair.MultiModalProcessorSenderCache, "invalidate", lambda c: c.invalidate(["c"])),
    (lru_pair.MultiModalReceiverCache, "clear", lambda c: c.clear_cache()),
]


def state(one: Any) -> tuple[list[Any], Any]:
    """Return the contents, in order, and the counts; check that they are whole."""
    held, shadow = one._guard.held(), getattr(one, "_shadow", None)
    books = [held] if shadow is None else [held, shadow]
    for book in books:
        assert sum(size for _, size in book.entries.values()) == book.nbytes <= book.capacity
    assert shadow is None or held.entries.keys() <= shadow.entries.keys()
    counts = getattr(one, "_counts", None)
    return [list(book.entries.items()) for book in books], counts and counts.counts


@pytest.mark.parametrize(("kind", "name", "call"), CACHE_CALLS)
def test_an_interrupted_call_of_a_cache_is_done_or_not_begun_or_empties_it(
    kind: Any, name: str, call: Callable[[Any], object]
) -> None:
    done = filled(kind)
    call(done)
    ends = state(filled(kind)), state(done)
    for number, left in interrupts(partial(filled, kind), call, LRU):
        contents, counts = state(left)
        assert not any(contents) or contents in [end[0] for end in ends], f"interrupt {number} of {name}"
        assert counts in [end[1] for end in ends], f"interrupt {number}"


def test_a_thread_makes_the_value_after_an_interrupt_of_get_or_make() -> None:
    name = store_name()
    with shmstore.Cache(name, MIB) as cache:
        cache["a"] = 1
        call = partial(cache.get_or_make, "new", lambda: 2)
        for number in count(1):
            again = interrupted_at(number, call, *files("frontdoor", "cache"))
            gc.collect()
            assert call() == cache.pop("new") == 2, f"interrupt {number}"
            if not again:
                break
        assert number > 9
    shmstore.Cache.unlink(name)


OLD, NEW, NEXT = request("old", range(6)), request("new", range(9)), request("next", range(9))
HASHER = BlockHasher(4)


def tables(*held: Request) -> Any:
    made = manager(20, ("full", 4))
    assert all(made.allocate_slots(req, req.num_tokens) is not None for req in held)
    return made


BOOKS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "append": (lambda: Request("r", range(7), block_hasher=HASHER), lambda req: req.append_output_token_ids(7)),
    "allocate_slots": (lambda: tables(OLD), lambda made: made.allocate_slots(NEW, 9)),
    "free blocks": (lambda: tables(NEW, OLD), lambda made: made.free(NEW)),
}


@pytest.mark.parametrize("name", BOOKS)
def test_an_interrupted_call_leaves_the_books_whole(name: str) -> None:
    make, action = BOOKS[name]
    for _, left in interrupts(make, action, MANAGERS):
        if isinstance(left, Request):  # its tokens are there with their hashes, or not at all
            assert Request("again", left.all_token_ids[:], block_hasher=HASHER).block_hashes == left.block_hashes
        else:  # no block is lost, and no table is another request's
            assert len(left.get_block_ids("new")[0]) in (0, 3)
            assert left.allocate_slots(NEXT, 9) is not None
            action(left)
            left.free(NEW)
            lengths = [len(left.get_block_ids(one)[0]) for one in ("old", "next")]
            assert [2, 3, 5] == [*lengths, len(left.block_pool.ref_counts())]
            left.check_valid()
