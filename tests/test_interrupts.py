"""An interrupt (Ctrl-C, a timeout's signal) may come anywhere in the package's Python, and leaves no change half done.

Each case is a call, done again and again, interrupted one place later each time, until it is not interrupted any more.
"""

import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from shmstore import CacheMissError, ObjectStoreReader, ObjectStoreWriter, refs
from shmstore.bindings import batch, blockhash, handles, hashlist, hidden, kvcache
from shmstore.bindings import inspect as native_inspect
from shmstore.bindings import store as native
from shmstore.multimodal import (
    LRUCache,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from shmstore.multimodal.caches import lru, lru_pair, shadow, shm_receiver, shm_sender
from shmstore.multimodal.caches import stored_updates as stored
from shmstore.multimodal.values.sizes import updates_size
from shmstore.scheduler import (
    BlockHasher,
    EncoderCacheManager,
    Request,
    block_hasher,
    encoder_cache,
    kv_cache_manager,
)
from shmstore.scheduler import request as requests
from shmstore.store import leases, opening, orphans
from shmstore.store import reader as reader_module
from shmstore.store import writer as writer_module
from tests.interrupts import interrupted_at
from tests.multimodal.helpers import MIB, config, item, update
from tests.scheduler.helpers import features, manager, request
from tests.support import is_mapped, segments, store_name


def files_of(*modules: Any) -> list[str]:
    return [module.__file__ for module in modules]


BINDINGS = files_of(native, batch, handles, hidden)
STORE = [*BINDINGS, *files_of(opening, writer_module, reader_module, leases, refs, shm_sender, shm_receiver, stored)]
LRU = files_of(shadow, lru, lru_pair)
MANAGERS = files_of(block_hasher, blockhash, encoder_cache, hashlist, kv_cache_manager, kvcache, requests)
VALUE = np.zeros(9, np.uint8)


def interrupts(
    make: Callable[[], Any], call: Callable[[Any], object], files: Iterable[str]
) -> Iterator[tuple[int, Any]]:
    """Yield a subject after an interrupt at each place of the call, with its number; 0 if there was no interrupt."""
    for number in count(1):
        subject = make()
        again = interrupted_at(number, partial(call, subject), *files)
        yield number if again else 0, subject
        if not again:
            assert number > 1, "nothing was interrupted"
            return


# ---- a store, and the caches of shm


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
        with self.writer.reserve("new", VALUE) as views:
            views[:] = 1

    def begin(self) -> None:
        begun = self.writer.begin("new", VALUE, timeout=1, unless_stored=True)
        try:
            begun.value[:] = 1
            begun.commit()
        except BaseException:
            begun.abort()
            raise

    def hold(self) -> None:
        with self.writer.hold(self.writer.get_cached("old")) as leased:
            leased.sent()

    def protect(self) -> None:
        with self.writer.protect(["old", "absent"]):
            self.writer.is_cached("old")


def given(mm_hash: str, nbytes: int = 30) -> Any:
    content = frozenset((mm_hash,)) if mm_hash == "b" else mm_hash * 1000  # a set is not data
    return item(nbytes), [replace(update(mm_hash), content=content)]


MIXED: Any = (("a", None), ("d", given("d")), ("c", given("c")), ("b", None), ("e", given("e", 2 * MIB)), ("d", None))
BAD: Any = MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", object(), MultiModalBatchedField())]), []
UNDONE: dict[str, Callable[[Engine], object]] = {
    "put": lambda s: s.writer.put("new", VALUE),
    "put of a strided array": lambda s: s.writer.put("new", VALUE[::2]),
    "get_cached": lambda s: s.writer.get_cached("old"),
    "begin and commit": Engine.begin,
    "reserve": Engine.reserve,
    "touch": lambda s: s.writer.touch("old"),
    "get": lambda s: s.reader.get(s.ref),
    "sender batch": lambda s: s.batch(*MIXED),
    "receiver": lambda s: s.receiver.get_and_update(s.sent, ["a", "b"]),
}
READS = ("get", "receiver")
SOUND: dict[str, Callable[[Engine], object]] = {
    "protect": Engine.protect,
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
    untouched.close()
    for number, subject in interrupts(Engine, UNDONE[name], STORE):
        if name in READS:
            gc.collect()  # of the interrupted frames, which a trace has kept; writes are undone without
        if number:
            after = subject.state()
            if name in READS:  # no pin is left; the lease is over once C has acknowledged it
                assert after[2] <= before[2]
                after = (*after[:2], before[2], *after[3:])
            assert before == after, f"interrupt {number}"
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


def test_a_batch_whose_undoing_is_interrupted_leaves_nothing() -> None:
    def fail(subject: Engine) -> None:
        with pytest.raises(TypeError):
            subject.batch(*MIXED, ("bad", BAD))

    untouched = Engine()
    before = untouched.state()
    untouched.close()
    for number, subject in interrupts(Engine, fail, STORE):
        after = subject.state()
        assert (before[:2], before[3:5]) == (after[:2], after[3:5]), f"interrupt {number}"
        subject.batch(("x", given("x")))
        subject.close()


# ---- what is opened


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
        if not interrupted_at(number, again, *BINDINGS, *files_of(opening, orphans), only=OPENING):
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
        lambda: native.Watch("none").__enter__().__exit__(),
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


# ---- the lru caches: an interrupted change is done, not begun, or empties its cache


def send(cache: Any, items: list[Any], mm_hashes: str) -> None:
    cache.get_and_update([one and (one, [update(h)]) for one, h in zip(items, mm_hashes, strict=True)], [*mm_hashes])


UPDATES = updates_size([update("a")], "a")
GIVE: dict[Any, Callable[..., object]] = {
    lru_pair.MultiModalProcessorOnlyCache: send,
    lru_pair.MultiModalProcessorSenderCache: send,
    lru_pair.MultiModalReceiverCache: lambda c, items, hashes: c.get_and_update(items, [*hashes]),
    lru_pair.MirroredProcessingCache: lambda c, items, hashes: c.get_and_update_p0(items, [*hashes]),
}


def filled(kind: Any) -> Any:
    if kind is LRUCache:
        cache: Any = LRUCache(6, lambda value: value)
        cache.update(a=2, b=2, c=2)
        cache.get("b")
        return cache
    cache = kind(config(6 + 3 * UPDATES, 6))
    GIVE[kind](cache, [item(2)] * 3, "abc")
    GIVE[kind](cache, [None, None], "ca")
    return cache


def full_batch(cache: Any) -> object:
    return GIVE[type(cache)](cache, [item(3), None, item(2)], "dce")


CACHE_CALLS: list[tuple[Any, str, Callable[[Any], object]]] = [
    (LRUCache, "store", lambda c: c.update(new=3)),
    (LRUCache, "grow", lambda c: c.update(b=4)),
    (LRUCache, "pop", lambda c: c.pop("a")),
    (LRUCache, "get", lambda c: c.get("a")),
    (LRUCache, "touch", lambda c: c.touch("a")),
    (LRUCache, "stat", lambda c: c.stat(delta=True)),
    (LRUCache, "clear", lambda c: c.clear()),
    *((kind, "batch", full_batch) for kind in GIVE),
    (lru_pair.MultiModalProcessorOnlyCache, "clear", lambda c: c.clear_cache()),
    (lru_pair.MultiModalProcessorSenderCache, "touch", lambda c: c.touch_sender_cache_item("b")),
    (lru_pair.MultiModalProcessorSenderCache, "invalidate", lambda c: c.invalidate(["c"])),
    (lru_pair.MultiModalReceiverCache, "clear", lambda c: c.clear_cache()),
    (lru_pair.MirroredProcessingCache, "reset", lambda c: c.reset()),
]


def parts_of(one: Any) -> list[Any]:
    return list(getattr(one, "__dict__", {}).values())


def halves(cache: Any) -> list[Any]:
    """Return the cache, or its parts that have a lock of their own."""
    return [one for one in (cache, *parts_of(cache)) if any(isinstance(part, lru.Guard) for part in parts_of(one))]


def guard_of(half: Any) -> lru.Guard[Any]:
    return next(part for part in parts_of(half) if isinstance(part, lru.Guard))


def state(half: Any) -> tuple[list[Any], Any]:
    """Return the contents, in order, and the counts; check that they are whole."""
    held = guard_of(half).held()
    contents = []
    for part in {id(part): part for part in (held, *parts_of(half))}.values():
        if isinstance(part, lru.Bounded):
            assert sum(size for _, size in part.entries.values()) == part.nbytes <= part.capacity
            assert part.pinned <= part.entries.keys()
        entries = part.entries if isinstance(part, lru.Bounded) else part
        if isinstance(entries, OrderedDict):
            contents.append(list(entries.items()))
    if isinstance(half, shadow.LruProcessorCache):
        assert half._kept.entries.keys() <= half._shadow.entries.keys()
    counts = getattr(half, "_counts", None)
    return contents, counts and counts.counts


@pytest.mark.parametrize(("kind", "name", "call"), CACHE_CALLS)
def test_an_interrupted_call_of_a_cache_is_done_or_not_begun_or_empties_it(
    kind: Any, name: str, call: Callable[[Any], object]
) -> None:
    done = filled(kind)
    call(done)
    before, after = [[*map(state, halves(cache))] for cache in (filled(kind), done)]
    for number, cache in interrupts(partial(filled, kind), call, LRU):
        for half, *ends in zip(halves(cache), before, after, strict=True):
            contents, counts = state(half)
            assert not any(contents) or contents in [end[0] for end in ends], f"interrupt {number} of {name}"
            assert counts in [end[1] for end in ends], f"interrupt {number}"


LOOKS: list[tuple[Any, str, Callable[[Any], object]]] = [
    (LRUCache, "contains", lambda c: "c" in c),
    (LRUCache, "item", lambda c: c["c"]),
    *((kind, "is_cached", lambda c: c.is_cached(["c"])) for kind in GIVE if hasattr(kind, "is_cached")),
    (lru_pair.MultiModalReceiverCache, "order", lambda c: c.order),
]


@pytest.mark.parametrize(("kind", "name", "call"), [*(row for row in CACHE_CALLS if row[1] != "stat"), *LOOKS])
def test_the_next_call_after_an_interrupt_finds_the_cache_emptied(
    kind: Any, name: str, call: Callable[[Any], object]
) -> None:
    cache = filled(kind)
    fill = full_batch if kind in GIVE else lambda c: c.update(d=3, e=3)
    assert interrupted_at(1, partial(fill, cache), lru.__file__, only=["put"])
    with suppress(CacheMissError, KeyError):
        call(cache)
    assert "c" not in guard_of(halves(cache)[0])._entries.entries, name


# ---- the scheduler's books


OLD, NEW, NEXT = request("old", range(6)), request("new", range(9)), request("next", range(9))
A = Request("a", range(9), mm_features=features(("A", 0, 4), ("B", 0, 4), ("A", 0, 4)))
B = Request("b", range(9), mm_features=features(("A", 0, 4), ("D", 0, 7)))
HASHER = BlockHasher(4)
UNUSED = (("free_encoder_input", A, 0), ("free_encoder_input", A, 1))
SHARED = (("allocate", A, 2), ("allocate", B, 0))
RESERVED = ("reserve", B, 1)


def tables(*held: Request) -> Any:
    made = manager(20, ("full", 4))
    assert all(made.allocate_slots(req, req.num_tokens) is not None for req in held)
    return made


def cache(*steps: tuple[str, Request, int]) -> Any:
    made = EncoderCacheManager(10)
    for call, req, i in (("allocate", A, 0), ("allocate", A, 1), *steps):
        getattr(made, call)(req, i, *((100, 0) if call == "reserve" else ()))
    return made


BOOKS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "append": (lambda: Request("r", range(7), block_hasher=HASHER), lambda req: req.append_output_token_ids(7)),
    "allocate_slots": (lambda: tables(OLD), lambda made: made.allocate_slots(NEW, 9)),
    "free blocks": (lambda: tables(NEW, OLD), lambda made: made.free(NEW)),
    "evict": (lambda: cache(*UNUSED), lambda c: c.allocate(B, 1)),
    "reset": (lambda: cache(*SHARED), lambda c: c.reset()),
    "reserve by eviction": (lambda: cache(*UNUSED), lambda c: c.reserve(B, 1, 100, 0)),
    "allocate the reserved": (lambda: cache(*UNUSED, RESERVED), lambda c: c.allocate(B, 1)),
    "unreserve": (lambda: cache(*UNUSED, RESERVED), lambda c: c.unreserve(B)),
}


@pytest.mark.parametrize("name", BOOKS)
def test_an_interrupted_call_leaves_the_books_whole(name: str) -> None:
    make, action = BOOKS[name]
    for _, left in interrupts(make, action, MANAGERS):
        if isinstance(left, Request):  # its tokens are there with their hashes, or not at all
            assert Request("again", left.all_token_ids[:], block_hasher=HASHER).block_hashes == left.block_hashes
        elif name in ("allocate_slots", "free blocks"):  # no block is lost, and no table is another request's
            assert len(left.get_block_ids("new")[0]) in (0, 3)
            assert left.allocate_slots(NEXT, 9) is not None
            action(left)
            left.free(NEW)
            lengths = [len(left.get_block_ids(one)[0]) for one in ("old", "next")]
            assert [2, 3, 5] == [*lengths, len(left.block_pool.ref_counts())]
            left.check_valid()
        else:  # no room is lost
            for _ in range(2):
                left.check_valid()
                action(left)
            left.free(A)
            left.free(B)
            assert left.cache_size == left.num_freeable_slots
