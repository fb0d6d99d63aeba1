"""The `shm` pair: P0 puts each item once into shared memory and sends a reference; workers read it in place.

The store decides what stays: it knows who still reads what. So the sender keeps no order and no sizes of items, only
the prompt updates, in a book of their own, and an item is *cached* where both the store and the book have it:

* The store evicts on its own, inside `put`. It writes down which keys went (`track_evictions`), and the book drops
  them before anything else is recorded, with the book's lock held: no updates without an item.
* The book is bounded by `processor_cache_gb`. Where it drops updates, the item may still be stored. Then the item
  counts as not cached, its next input brings the updates again, and the stored object is handed out.

There are two locks; who takes both takes `_storing` first. So a signal handler or a finalizer, which may come in the
middle of a hit, may hit, release and close, but not store, invalidate or clear. `_storing` belongs to who puts or takes
out, also while bytes are copied; `_lock` is for the book and the counts, for moments. So a hit waits for no copy
of tensors.
Between a put and its record other threads may sweep, but nobody can take the key out: its lease is open, and
`invalidate` waits for who stores. So whatever is swept before a key is recorded is older than it.

Each hand-out opens a lease, which ends when every worker has read it. A request that ends before that gives its leases
back by `release`; the store takes care that an item that some worker may still read is never overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from shmstore.errors import (
    CacheMissError,
    NestingError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    ShmStoreError,
    StaleRefError,
    StoreClosedError,
    StoreFullError,
    UnsupportedValueError,
    shown,
)
from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache, BaseMultiModalReceiverCache
from shmstore.multimodal.caches.checks import (
    check_batch,
    check_config,
    check_hash,
    check_input,
    check_item,
    check_known,
    check_pairs,
    checked_hashes,
    checked_sent,
)
from shmstore.multimodal.caches.lru import CacheInfo, HitCounter
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.updates_book import Entry, Kept, UpdatesBook
from shmstore.multimodal.values.items import MultiModalKwargsItem, own_memory
from shmstore.multimodal.values.sizes import updates_size
from shmstore.multimodal.values.types import ProcessorInput, ProcessorOutput, PromptUpdates, ReceiverInput
from shmstore.refs import ObjectRef
from shmstore.store import ObjectStoreReader, ObjectStoreWriter

if TYPE_CHECKING:
    from shmstore.refs import StoreHandle

__all__ = ["ShmObjectStoreReceiverCache", "ShmObjectStoreSenderCache"]

_log = logging.getLogger(__name__)
_NO_HIT = (ObjectNotFoundError, StoreFullError)  # the latter not of objects, but of open leases
_NO_VALUE = (UnsupportedValueError, NestingError)
_NO_PUT = (ObjectExistsError, StoreFullError, ObjectTooLargeError)


class _Call:
    """What one call has made so far, noted as it is made; a failure gives it back.

    What the writer was interrupted in, it gives back itself; on the way from its `return` to our variable Python does
    not look for signals. So nothing is lost in between.
    """

    __slots__ = (
        "full",
        "gone",
        "hits",
        "inline_counted",
        "large",
        "made",
        "made_hits",
        "recorded",
        "total",
        "updates",
        "writes_book",
    )

    def __init__(self) -> None:
        self.made: list[tuple[ObjectRef, str | None]] = []  # and its key, where it was put anew
        self.updates: dict[str, Entry] = {}  # for the book, and their sizes
        self.recorded: list[str] = []  # those that are in the book, or going in
        self.gone: list[tuple[str, Entry]] = []  # what the book loses for them
        self.full = self.large = self.made_hits = 0
        self.hits = self.total = 0  # of the counts, only when they are counted
        self.inline_counted = False
        self.writes_book = False  # from before its first change in the book


class ShmObjectStoreSenderCache(BaseMultiModalProcessorCache):
    """P0 of `shm`: output `(ObjectRef, updates)` with a new lease, hit or miss; where it does not fit the input.

    Owns `writer` and closes it. An item that the store has no room for, or that is larger than it takes, goes inline:
    counted in `inline_full` and `inline_too_large`, with a warning in the log that names the setting. A tensor in it
    that is a view into a larger one is then a copy of its own: pickling it would send the whole. Thread-safe.

    ValueError for a configuration of another mode, for a writer that another sender has (each would take the other's
    evictions for its own), and for one, such as a recovered one, of another number of readers than `world_size`: leases
    would wait for workers that never come. Another capacity than `ipc_cache_gb` is a warning in the log: the store goes
    on with the one that it has. After an error the writer is still the caller's.
    """

    def __init__(self, config: MultiModalCacheConfig, writer: ObjectStoreWriter) -> None:
        check_config(config)
        if not isinstance(writer, ObjectStoreWriter):
            raise TypeError(f"writer must be an ObjectStoreWriter, not {type(writer).__name__}")
        _check_fit(config, writer)
        self._storing = threading.RLock()
        self._lock = threading.RLock()
        self._writer = writer
        self._book = UpdatesBook(config.processor_cache_bytes)
        self._counts = HitCounter()
        self._inline_full = 0
        self._inline_too_large = 0
        self._closed = False
        # Calls that failed and are not yet undone; of one item only what its `_Call` is made of.
        self._broken: list[_Call | tuple[_Call | None, ObjectRef | None, str | None, int, int]] = []
        try:
            _claim(writer, self)
            _compare_capacity(config, writer)
            writer.track_evictions(True)
        except BaseException:
            _disclaim(writer, self)  # which its traceback may keep alive
            raise

    @property
    def handle(self) -> StoreHandle:
        """What the workers attach with."""
        return self._writer.handle

    @property
    def writer(self) -> ObjectStoreWriter:
        """The store's writer, for its statistics."""
        return self._writer

    @property
    def inline_full(self) -> int:
        """How many items went inline because the store was full of items that are still to be read."""
        return self._inline_full

    @property
    def inline_too_large(self) -> int:
        """How many items went inline because the store takes none of their size."""
        return self._inline_too_large

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether None will do as input; changes neither order nor counts. StoreClosedError after `close`."""
        if type(mm_hash) is not str:
            check_hash(mm_hash)
        if mm_hash in self._book:
            return self._writer.is_cached(mm_hash)
        if self._closed:
            raise self._closed_error()
        check_hash(mm_hash)
        return False

    def get_and_update_item(self, mm_item: ProcessorInput, mm_hash: str) -> ProcessorOutput:
        """A reference with a lease of its own, or the item where it does not fit; CacheMissError for None, no item.

        TypeError for an input or a hash that is none, and for an item that cannot be stored. An error, or an
        interrupt, leaves no lease, item or count of this call.
        """
        if self._broken:
            self._mend()
        if type(mm_hash) is not str:
            check_hash(mm_hash)
        if mm_item is not None and not (  # the common case without a call
            type(mm_item) is tuple
            and len(mm_item) == 2
            and type(mm_item[0]) is MultiModalKwargsItem
            and type(mm_item[1]) is list
        ):
            check_input(mm_item, mm_hash)
        # As in a batch, but what has been made is in variables, and a `_Call` only where something is unusual: it is a
        # good part of what a hit costs.
        ref: ObjectRef | None = None
        fresh: str | None = None
        hits = total = 0
        stores = by_another = False
        call: _Call | None = None
        book, counts, writer = self._book, self._counts, self._writer
        try:
            if mm_hash in book:
                with self._lock:
                    entry = book.use(mm_hash)
                    if entry is not None:
                        if mm_item is not None:
                            check_input(mm_item, mm_hash)
                        try:
                            ref = writer.get_cached(mm_hash)
                            output: ProcessorOutput = ref, list(entry[0])
                            counts.add(1, 1)
                            hits = total = 1
                            return output
                        except _NO_HIT as error:
                            self._no_hit(mm_hash, error)
            if mm_item is None:
                check_hash(mm_hash)
                raise self._closed_error() if self._closed else CacheMissError([mm_hash])
            item, updates = mm_item
            kept = tuple(updates)  # the caller may change what it has given
            try:
                size = updates_size(kept, mm_hash)
            except TypeError:  # of what is no update, which is said as in a batch
                check_input(mm_item, mm_hash)
                raise
            with self._storing:
                stores = True
                try:
                    ref = writer.put(mm_hash, item)
                    fresh = mm_hash
                    output = ref, updates
                except _NO_VALUE as error:
                    raise _of_item(error, mm_hash) from None
                except _NO_PUT as error:
                    call = _Call()
                    by_another = isinstance(error, ObjectExistsError) and mm_hash in book  # for whom this one waited
                    if not by_another:
                        output = self._store_else(call, mm_item, mm_hash, (kept, size), error)
                except ValueError:
                    check_hash(mm_hash)  # said of a hash, as in the other modes, not of a key
                    raise
                if not by_another:
                    with self._lock:
                        if call is None and not book.add(mm_hash, kept, size, writer.take_evicted()):
                            call = _Call()
                            call.updates[mm_hash] = kept, size
                        if call is not None:
                            self._record(call)
                        counts.add(0, 1)
                        total = 1
                    return output
        except BaseException:
            if stores or ref is not None:  # else nothing was done, and nobody is waited for to undo it
                self._broken += [(call, ref, fresh, hits, total)]  # no call: a second interrupt comes no sooner
                self._mend_surely()
            raise
        return self._together([mm_item], [mm_hash])[0]

    def _hand_out_again(self, call: _Call, mm_hash: str) -> ObjectRef | None:
        try:
            ref = self._writer.get_cached(mm_hash)
            call.made.append((ref, None))
            return ref
        except _NO_HIT as error:
            self._no_hit(mm_hash, error)
            return None

    def _no_hit(self, mm_hash: str, error: Exception) -> None:
        if isinstance(error, ObjectNotFoundError):  # deleted by someone else who has the writer
            with self._lock:
                self._book.drop(mm_hash)

    def _store(self, call: _Call, mm_item: tuple[MultiModalKwargsItem, PromptUpdates], mm_hash: str) -> ProcessorOutput:
        item, updates = mm_item
        kept = tuple(updates)
        entry = kept, updates_size(kept, mm_hash)
        try:
            ref = self._writer.put(mm_hash, item)
            call.made.append((ref, mm_hash))
        except _NO_VALUE as error:
            raise _of_item(error, mm_hash) from None
        except _NO_PUT as error:
            return self._store_else(call, mm_item, mm_hash, entry, error)
        call.updates[mm_hash] = entry
        return ref, updates

    def _store_else(
        self,
        call: _Call,
        mm_item: tuple[MultiModalKwargsItem, PromptUpdates],
        mm_hash: str,
        entry: Entry,
        error: ShmStoreError,
    ) -> ProcessorOutput:
        """The store has not taken the item: it is there, only its updates were gone, or it goes inline."""
        if isinstance(error, ObjectExistsError):
            try:
                ref = self._writer.get_cached(mm_hash)
                call.made.append((ref, None))
                call.updates[mm_hash] = entry
                return ref, mm_item[1]
            except StoreFullError as full:
                error = full
        if isinstance(error, StoreFullError):
            call.full += 1
            setting = "shm_max_objects" if error.resource in ("slots", "leases") else "ipc_cache_gb"
            _warn(self._inline_full + call.full, str(error), f"{setting} sets how much there is")
        else:
            call.large += 1
            # Not the store's hint, which is for its own users: its limits are settings here, and it is inline already.
            limit = "that is shm_max_object_size_mb, at most ipc_cache_gb"
            _warn(self._inline_too_large + call.large, error.message, limit)
        alone = own_memory(mm_item[0])  # a view would be pickled with all that it is a view into
        return mm_item if alone is mm_item[0] else (alone, mm_item[1])

    def _record(self, call: _Call) -> None:
        """The last step of a call that has succeeded: its updates, and what went inline."""
        call.writes_book = True
        self._sweep()
        book = self._book
        for mm_hash, (kept, size) in call.updates.items():
            call.recorded.append(mm_hash)
            if not book.add(mm_hash, kept, size):
                call.gone.extend(book.leaving(mm_hash, size))
                book.put(mm_hash, kept, size)
        if call.full or call.large:
            self._inline_full += call.full
            self._inline_too_large += call.large
            call.inline_counted = True

    def _sweep(self) -> None:
        for mm_hash in self._writer.take_evicted():
            self._book.drop(mm_hash)

    def get_and_update(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        """`get_and_update_item` of each, all or nothing: if one fails, no lease is open and no item recorded.

        What is cached is protected until the batch is done. ValueError where the lengths differ, TypeError for an input
        or a hash that is none or an item that cannot be stored, CacheMissError with all missing hashes of the batch.
        """
        if len(mm_hashes) == 1:
            check_pairs(mm_items, mm_hashes, check_input)
            return [self.get_and_update_item(mm_items[0], mm_hashes[0])]
        if self._broken:
            self._mend()
        return self._together(mm_items, mm_hashes)

    def _together(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        call = _Call()
        stores = False
        try:
            check_batch(mm_items, mm_hashes, self.is_cached_item, check_input)
            hits = self._all_hits(call, mm_hashes)
            if hits is not None:
                return hits
            with self._storing:
                stores = True
                with self._lock:
                    stored = [mm_hash for mm_hash in mm_hashes if self._writer.is_cached(mm_hash)]
                    held = {mm_hash: entry[0] for mm_hash in stored if (entry := self._book.use(mm_hash)) is not None}
                check_known(mm_items, mm_hashes, held.__contains__)  # again: it may have gone while this one waited
                with self._writer.protect(list(held)):
                    outputs = self._batch(call, mm_items, mm_hashes, held)
                with self._lock:
                    self._record(call)
                    self._count(call, call.made_hits, len(outputs))
            return outputs
        except BaseException:
            if stores or call.made or call.total:
                self._broken += [call]
                self._mend_surely()
            raise

    def _all_hits(self, call: _Call, mm_hashes: Sequence[str]) -> list[ProcessorOutput] | None:
        """The outputs of what is cached altogether, waiting for nobody who stores; else None, and nothing done."""
        outputs: list[ProcessorOutput] = []
        with self._lock:
            if not all(mm_hash in self._book for mm_hash in mm_hashes):
                return None
            for mm_hash in mm_hashes:
                entry = self._book.use(mm_hash)
                ref = None if entry is None else self._hand_out_again(call, mm_hash)
                if entry is None or ref is None:  # just now evicted, or entries for leases have run out
                    while call.made:
                        self._writer.cancel(call.made[-1][0])
                        call.made.pop()
                    return None
                outputs.append((ref, list(entry[0])))
            self._count(call, len(outputs), len(outputs))
        return outputs

    def _count(self, call: _Call, hits: int, total: int) -> None:
        self._counts.add(hits, total)  # from here on nothing can come in between
        call.hits, call.total = hits, total

    def _batch(
        self,
        call: _Call,
        mm_items: Sequence[ProcessorInput],
        mm_hashes: Sequence[str],
        held: dict[str, Kept],
    ) -> list[ProcessorOutput]:
        given: dict[str, tuple[MultiModalKwargsItem, PromptUpdates]] = {}
        outputs: list[ProcessorOutput] = []
        for at, (mm_item, mm_hash) in enumerate(zip(mm_items, mm_hashes, strict=True)):
            if mm_item is not None:
                given.setdefault(mm_hash, mm_item)
            kept = held.get(mm_hash)
            ref = None if kept is None else self._hand_out_again(call, mm_hash)
            if kept is not None and ref is not None:
                outputs.append((ref, list(kept)))
                call.made_hits += 1
                continue
            source = given.get(mm_hash)
            if source is None:
                # Entries for leases have run out, for those after it, too. All are named, or each try would find one.
                missing: dict[str, None] = {}
                for later, later_hash in zip(mm_items[at:], mm_hashes[at:], strict=True):
                    if later is not None:
                        given[later_hash] = later
                    elif later_hash not in given:
                        missing[later_hash] = None
                raise CacheMissError(missing)
            output = self._store(call, source, mm_hash)
            outputs.append(output)
            if mm_hash in call.updates:
                held[mm_hash] = call.updates[mm_hash][0]
        return outputs

    def _mend_surely(self) -> None:
        # An interrupt may come while an ordinary failure is undone. What yet another leaves, the next call undoes.
        try:
            self._mend()
        except BaseException:
            self._mend()
            raise

    def _mend(self) -> None:
        """Undo the calls that failed; one that is not undone to its end stays to be undone."""
        with self._storing, self._lock:
            while self._broken:
                call = self._broken[0]
                if isinstance(call, tuple):
                    noted, ref, fresh, hits, total = call
                    call = noted or _Call()
                    call.hits, call.total = hits, total
                    if ref is not None:
                        call.made.append((ref, fresh))
                        call.writes_book |= fresh is not None
                    self._broken[0] = call
                self._undo(call)
                if call in self._broken:  # else a call of a finalizer or signal handler has just undone it
                    self._broken.remove(call)

    def _undo(self, call: _Call) -> None:
        """Give back what the call has made so far; may be done again where it was interrupted. With both locks."""
        hits, total = call.hits, call.total
        call.hits = call.total = 0
        self._counts.add(-hits, -total)
        if call.inline_counted:
            call.inline_counted = False
            self._inline_full -= call.full
            self._inline_too_large -= call.large
        with contextlib.suppress(StoreClosedError):  # then there is nothing left to give back
            for ref, _ in call.made:
                self._writer.cancel(ref)
            for _, mm_hash in call.made:
                if mm_hash is not None:
                    self._writer.delete(mm_hash)
            written, call.writes_book = call.writes_book, True  # should this sweep be interrupted
            self._sweep()  # with the objects go their updates
            if written:  # else there is nothing to mend, and that takes longer the more there is in the book
                self._book.rebuild(call.recorded, call.gone, self._writer.is_cached)

    def release(self, refs: Iterable[ReceiverInput]) -> int:
        """A request ended before its workers read: give back the leases of what was sent; how many were open.

        Safe after they have read, and twice. An inline item and None have no lease and are passed over, so that
        whatever was sent can be given. TypeError, with nothing given back, for anything else, such as a whole output.
        StaleRefError, after the others have been given back, for a reference that this store never gave.
        """
        if self._broken:
            self._mend()
        return _each(self._writer.cancel, refs)

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """A worker has rejected a request with `CacheMissError`: put these anew when next asked."""
        hashes = checked_hashes(mm_hashes)
        with self._storing, self._lock, self._updates_need_items():
            for mm_hash in hashes:
                self._writer.delete(mm_hash)
                self._book.drop(mm_hash)
            self._sweep()

    @contextlib.contextmanager
    def _updates_need_items(self) -> Iterator[None]:
        # An interrupt may have come between the note that an item had gone and the end of its updates.
        try:
            yield
        except BaseException:
            with contextlib.suppress(StoreClosedError):
                self._book.rebuild((), (), self._writer.is_cached)
            raise

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        check_hash(mm_hash)
        with self._lock:
            self._writer.touch(mm_hash)
            self._book.use(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts; what is being read stays until it has been."""
        self._mend()  # while its counts still stand
        with self._storing, self._lock, self._updates_need_items():
            self._writer.clear()
            self._sweep()
            self._book.clear()
            self._counts.clear()
            self._inline_full = self._inline_too_large = 0

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        if self._broken:
            self._mend()
        with self._lock:
            return self._counts.stat(delta)

    def close(self) -> None:
        """Close the store and unlink its segment; idempotent. Workers that have it open can go on reading.

        A call that is just storing, in another thread, ends with StoreClosedError.
        """
        with self._lock:  # only: a signal handler may be closing, in the middle of a hit, that is with this one
            self._closed = True  # also for who asks with an empty book, and would take "no" for an answer
            self._book.clear()
            self._writer.close()

    def _closed_error(self) -> StoreClosedError:
        return StoreClosedError(f"{self._writer!r}: its sender cache is closed")


_senders: weakref.WeakKeyDictionary[ObjectStoreWriter, list[weakref.ref[ShmObjectStoreSenderCache]]] = (
    weakref.WeakKeyDictionary()
)
"""Who has asked for a writer, in order; it is that of the first who is alive."""


def _claim(writer: ObjectStoreWriter, sender: ShmObjectStoreSenderCache) -> None:
    # Without a lock, which might be another thread's at the moment of a fork; both changes are single ones of a dict
    # and a list, so that of several threads one is the first.
    mine = weakref.ref(sender)
    claims = _senders.setdefault(writer, [])
    claims.append(mine)
    if next(claim for claim in claims if claim() is not None) is not mine:
        raise ValueError(f"writer: {writer!r} has a sender cache already, and can have one")


def _disclaim(writer: ObjectStoreWriter, sender: ShmObjectStoreSenderCache) -> None:
    mine, claims = weakref.ref(sender), _senders.get(writer, [])
    if mine in claims:  # an interrupt may have come before it was
        claims.remove(mine)


def _check_fit(config: MultiModalCacheConfig, writer: ObjectStoreWriter) -> None:
    if config.cache_type != "shm":
        raise ValueError(f"config: expected one of cache_type='shm', got cache_type={shown(config.cache_type)}")
    readers = writer.handle.n_readers
    if readers != config.world_size:
        raise ValueError(
            f"writer: {writer!r} expects {readers} readers, and config has world_size {config.world_size} "
            "(hint: create the store anew, or configure it as it was)"
        )


def _compare_capacity(config: MultiModalCacheConfig, writer: ObjectStoreWriter) -> None:
    # It is made up to a multiple of 64.
    capacity, wanted = writer.stats().capacity, (config.ipc_cache_bytes + 63) // 64 * 64
    if capacity != wanted:
        _log.warning(
            "%r has a capacity of %d bytes, and ipc_cache_gb asks for %d; it goes on with what it has",
            writer,
            capacity,
            wanted,
        )


def _of_item(error: UnsupportedValueError | NestingError, mm_hash: str) -> Exception:
    said = f"item of {shown(mm_hash)}: {error.message}"
    if isinstance(error, NestingError):
        return NestingError(said, hint=error.hint)
    return UnsupportedValueError(said, path=error.path, hint=error.hint)


def _warn(count: int, why: str, setting: str) -> None:
    # The error as text: a handler that keeps the record would keep the error's frames, and with them the items in them.
    if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: neither silence nor a flood
        _log.warning("item sent inline (%d so far): %s; %s", count, why, setting)


def _each(end: Callable[[ObjectRef], bool], refs: Iterable[ReceiverInput]) -> int:
    """`end` each reference, also those after one that is of no use; how many were open."""
    ended = 0
    foreign: StaleRefError | None = None
    for ref in checked_sent(refs):
        if isinstance(ref, ObjectRef):
            try:
                ended += end(ref)
            except StaleRefError as error:
                foreign = error
    if foreign is not None:
        raise foreign
    return ended


def _check_arrived(mm_item: ReceiverInput, mm_hash: str) -> None:
    if not isinstance(mm_item, ObjectRef):
        check_item(mm_item, mm_hash)


class ShmObjectStoreReceiverCache(BaseMultiModalReceiverCache):
    """A worker of `shm`: a reference becomes the item, read in place; an inline item passes through. Thread-safe.

    Owns `reader` and closes it. Tensors of an item that was read by reference are read-only views of shared memory, and
    keep its bytes in place until the last of them is gone: writing into one is a fault of the process.
    """

    def __init__(self, reader: ObjectStoreReader) -> None:
        if not isinstance(reader, ObjectStoreReader):
            raise TypeError(f"reader must be an ObjectStoreReader, not {type(reader).__name__}")
        self._reader = reader

    @property
    def reader(self) -> ObjectStoreReader:
        """The store's reader, for its statistics."""
        return self._reader

    def get_and_update_item(self, mm_item: ReceiverInput, mm_hash: str) -> MultiModalKwargsItem:
        """The item that the reference names, or that came inline; CacheMissError where there is none.

        That is so for None, for a reference of another store, and for one whose object has gone, which it can only when
        its lease is over: read by every worker, or given back. Until then such a reference is still read. TypeError for
        anything else.
        """
        if isinstance(mm_item, ObjectRef):
            try:
                item: MultiModalKwargsItem = self._reader.get(mm_item)
            except StaleRefError as stale:
                raise CacheMissError([mm_hash]) from stale
            return item
        if mm_item is None:
            check_hash(mm_hash)
            raise CacheMissError([mm_hash])
        check_item(mm_item, mm_hash)
        return mm_item

    def get_and_update(self, mm_items: Sequence[ReceiverInput], mm_hashes: Sequence[str]) -> list[MultiModalKwargsItem]:
        """`get_and_update_item` of each; CacheMissError with all missing hashes before a reference is read.

        ValueError where the lengths differ, TypeError for what is no item, reference or hash, both before that, too.
        After an error the references that were not read are still open: the API server gives them back by the sender's
        `release`.
        """
        check_pairs(mm_items, mm_hashes, _check_arrived)
        given: dict[str, MultiModalKwargsItem | ObjectRef] = {}
        missing: dict[str, None] = {}
        for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
            if mm_item is None:
                if mm_hash not in given:
                    missing[mm_hash] = None
            elif isinstance(mm_item, ObjectRef) and not self._reader.validate(mm_item):
                missing[mm_hash] = None
            else:
                given[mm_hash] = mm_item
        if missing:
            raise CacheMissError(missing)
        return [
            self.get_and_update_item(given[mm_hash] if mm_item is None else mm_item, mm_hash)
            for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True)
        ]

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: ReceiverInput = None) -> None:
        """Nothing to do here: a reference holds its item by its lease until this worker has read it."""
        check_hash(mm_hash)

    def clear_cache(self) -> None:
        """Nothing to do here: a worker keeps no item beyond the views that its user holds."""

    def release(self, refs: Iterable[ReceiverInput]) -> int:
        """This worker will not read what was sent: its part of each lease is over; how many it had not read.

        The other workers go on; the sender's `release` is for them all. Safe after it was read, and twice. TypeError,
        with nothing changed, for what was never sent. StaleRefError, after the others, for a reference whose object is
        here and never had it.
        """
        return _each(self._reader.release, refs)

    def close(self) -> None:
        """Detach; idempotent. Items already read stay readable while their views live."""
        self._reader.close()
