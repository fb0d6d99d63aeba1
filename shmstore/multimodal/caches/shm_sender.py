"""P0 of `shm`: it puts each item once into shared memory and sends a reference; workers read it in place.

The store decides what stays: it knows who still reads what. So the sender keeps no order and no sizes of items, only
the prompt updates, in a book of their own, and an item is *cached* where both the store and the book have it:

* The store evicts on its own, inside `put`. It logs which keys went (`track_evictions`), and the book drops them before
  anything else is recorded.
* The book is bounded by `processor_cache_gb`. Where it drops updates, the item may still be stored. Then the item
  counts as not cached, its next input brings the updates again, and the stored object is handed out.

Each call is a batch (`bindings.batch`), one item a batch of one. It hands out what is cached, whose leases then keep
it; stores the rest; records the updates; and commits. What fails before, or is interrupted, is undone by the store: no
lease is open, and no new object or its updates are there. What went to make room, in the store or the book, stays away.

One lock, `_storing`, belongs to who puts or takes out, also while bytes are copied. Hits need none, and never wait.
Between a put and its record nobody can take the key out while a rank is expected: its lease is open, and `invalidate`
waits for the thread that stores. So what is in the log before a key is recorded is older than the key. If no rank is
expected, a key may be recorded whose object has gone. That is harmless, because the store is asked, too.

Each hand-out opens a lease, which ends when every worker has read it. A request that ends before that gives its leases
back by `release`; the store takes care that an item that some worker may still read is never overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shmstore.errors import (
    CacheMissError,
    NestingError,
    ObjectExistsError,
    ObjectTooLargeError,
    ShmStoreError,
    StoreClosedError,
    StoreFullError,
    UnsupportedValueError,
    shown,
)
from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache
from shmstore.multimodal.caches.checks import (
    check_config,
    check_hash,
    check_input,
    check_known,
    check_pairs,
    checked_hashes,
)
from shmstore.multimodal.caches.lru import CacheInfo, HitCounter
from shmstore.multimodal.caches.shm_receiver import end_each
from shmstore.multimodal.caches.updates_book import Entry, UpdatesBook
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.items import MultiModalKwargsItem, own_memory
from shmstore.multimodal.values.sizes import updates_size
from shmstore.multimodal.values.types import ProcessorInput, ProcessorOutput, PromptUpdates, ReceiverInput
from shmstore.store import ObjectStoreWriter

if TYPE_CHECKING:
    from shmstore.refs import StoreHandle
    from shmstore.store.writer import Batch

__all__ = ["ShmObjectStoreSenderCache"]

_log = logging.getLogger(__name__)
_NO_VALUE = (UnsupportedValueError, NestingError)
_NO_ROOM = (StoreFullError, ObjectTooLargeError)


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
        self._reporting = threading.RLock()
        self._writer = writer
        self._native = writer._writer
        self._book_bytes = config.processor_cache_bytes
        self._book = UpdatesBook(self._book_bytes)
        self._counts = HitCounter()
        self._inline_full = 0
        self._inline_too_large = 0
        self._closed = False
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
        if type(mm_hash) is not str:
            check_hash(mm_hash)
        if mm_item is not None and not (  # the common case without a call; a miss sees its updates when it sizes them
            type(mm_item) is tuple
            and len(mm_item) == 2
            and type(mm_item[0]) is MultiModalKwargsItem
            and type(mm_item[1]) is list
            and mm_hash not in self._book
        ):
            check_input(mm_item, mm_hash)
        return self._exchange((mm_item,), (mm_hash,))[0]

    def get_and_update(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        """`get_and_update_item` of each, all or nothing: if one fails, no lease is open and no item recorded.

        What is cached stays until the batch is done. ValueError where the lengths differ, TypeError for an input or a
        hash that is none or an item that cannot be stored, CacheMissError with all missing hashes of the batch.
        """
        check_pairs(mm_items, mm_hashes, check_input)
        return self._exchange(mm_items, mm_hashes)

    def _exchange(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        native, counts = self._native, self._counts
        total = hits = len(mm_hashes)
        full = large = 0
        new: dict[str, Entry] | None = None
        batch = native.batch()
        try:
            outputs = self._all_hits(batch, mm_hashes)
            if outputs is None:
                if None in mm_items:
                    check_known(mm_items, mm_hashes, self.is_cached_item)  # before it waits
                with self._storing:
                    new = {}
                    outputs, hits, full, large = self._store(batch, mm_items, mm_hashes, new)
            # The commit: without a call, so that nothing comes in between.
            now = counts.counts
            counts.counts = now[0] + hits, now[1] + total, now[2], now[3]
            self._inline_full += full
            self._inline_too_large += large
            batch.record.keep = 1
            if native._w:  # else it was closed meanwhile, and a spare would keep the mapping
                native.spare = batch
            return outputs
        except BaseException:
            batch.undo()
            if new is not None:
                self._forget(new)
            raise

    def _all_hits(self, batch: Batch, mm_hashes: Sequence[str]) -> list[ProcessorOutput] | None:
        """The outputs of what is cached altogether; else None, and nothing done."""
        book = self._book
        for mm_hash in mm_hashes:
            if mm_hash not in book:
                return None
        outputs: list[ProcessorOutput] = []
        for mm_hash in mm_hashes:
            output = self._hit(batch, mm_hash)
            if output is None:
                batch.undo()
                return None
            outputs.append(output)
        return outputs

    def _hit(self, batch: Batch, mm_hash: str) -> ProcessorOutput | None:
        """The output of what is in the book; None if it has just been evicted, or entries for leases have run out."""
        book = self._book
        try:
            updates = list(book[mm_hash][0])
            book.move_to_end(mm_hash)
            return self._writer._hand_out(batch, mm_hash), updates  # last: with the lease nothing is left to fail
        except (KeyError, StoreFullError):  # ObjectNotFoundError is a KeyError
            return None

    def _store(
        self, batch: Batch, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str], new: dict[str, Entry]
    ) -> tuple[list[ProcessorOutput], int, int, int]:
        """The outputs of a batch that is not all hits; how many hits, and items that found the store full or too small.

        What is cached is handed out first: its leases keep it while the rest is stored. The updates that are recorded
        are noted in `new`.
        """
        if self._closed:
            raise self._closed_error()
        sent: list[Any] = []
        given: dict[str, tuple[MultiModalKwargsItem, PromptUpdates]] = {}
        missing: dict[str, None] = {}
        to_put: list[int] = []
        for at, mm_hash in enumerate(mm_hashes):
            mm_item, output = mm_items[at], self._hit(batch, mm_hash) if mm_hash in self._book else None
            if mm_item is not None:
                given.setdefault(mm_hash, mm_item)
            sent.append(output)
            if output is None:
                to_put.append(at)
                if mm_hash not in given:
                    missing[mm_hash] = None
        if missing:
            raise CacheMissError(missing)
        hits = len(sent) - len(to_put)
        refused: list[type[ShmStoreError]] = []
        for at in to_put:
            mm_hash = mm_hashes[at]
            if mm_hash in new:  # a repetition
                with contextlib.suppress(StoreFullError):
                    sent[at] = self._writer._hand_out(batch, mm_hash), list(new[mm_hash][0])
                    hits += 1
            if sent[at] is None:
                sent[at] = self._put(batch, given[mm_hash], mm_hash, new, refused)
        self._sweep()
        for mm_hash, entry in new.items():
            self._book.add(mm_hash, entry)
        return sent, hits, refused.count(StoreFullError), refused.count(ObjectTooLargeError)

    def _put(
        self,
        batch: Batch,
        mm_item: tuple[MultiModalKwargsItem, PromptUpdates],
        mm_hash: str,
        new: dict[str, Entry],
        refused: list[type[ShmStoreError]],
    ) -> ProcessorOutput:
        """The output of an item that is stored, or was, and only its updates had gone; or that goes inline."""
        item, updates = mm_item
        kept = tuple(updates)  # the caller may change what it has given
        try:
            size = updates_size(kept, mm_hash)
        except TypeError:  # of what is no update, which is said of the whole input
            check_input(mm_item, mm_hash)
            raise
        try:
            try:
                ref = self._writer._put(batch, mm_hash, item)
            except ObjectExistsError:
                ref = self._writer._hand_out(batch, mm_hash)
        except _NO_VALUE as error:
            raise _of_item(error, mm_hash) from None
        except _NO_ROOM as error:
            refused.append(type(error))  # not the error, whose traceback would keep this frame, and all below it
            self._warn(error, refused.count(type(error)))
            alone = own_memory(item)  # a view would be pickled with all that it is a view into
            return mm_item if alone is item else (alone, updates)
        except ValueError:
            check_hash(mm_hash)  # said of a hash, as in the other modes, not of a key
            raise
        new[mm_hash] = kept, size
        return ref, updates

    def _warn(self, error: ShmStoreError, more: int) -> None:
        if isinstance(error, StoreFullError):
            setting = "shm_max_objects" if error.resource in ("slots", "leases") else "ipc_cache_gb"
            _warn(self._inline_full + more, str(error), f"{setting} sets how much there is")
        else:
            # Not the store's hint, which is for its own users: its limits are settings here, and it is inline already.
            limit = "that is shm_max_object_size_mb, at most ipc_cache_gb"
            _warn(self._inline_too_large + more, error.message, limit)

    def _sweep(self) -> None:
        """Drop the updates of what the store has evicted; with `_storing`."""
        evicted, position = self._native.evicted()
        for mm_hash in evicted:
            self._book.drop(mm_hash)
        if self._native.position < position:  # else a call of a signal handler has swept further
            self._native.position = position

    def _forget(self, new: Iterable[str]) -> None:
        """Drop the updates of a call that has failed, and of what the store has evicted for it."""
        with self._storing, contextlib.suppress(StoreClosedError):
            for mm_hash in new:
                self._book.drop(mm_hash)
            self._sweep()

    def release(self, refs: Iterable[ReceiverInput]) -> int:
        """A request ended before its workers read: give back the leases of what was sent; how many were open.

        Safe after they have read, and twice. An inline item and None have no lease and are passed over, so that
        whatever was sent can be given. TypeError, with nothing given back, for anything else, such as a whole output.
        StaleRefError, after the others have been given back, for a reference that this store never gave.
        """
        return end_each(self._writer.cancel, refs)

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """A worker has rejected a request with `CacheMissError`: put these anew when next asked."""
        hashes = checked_hashes(mm_hashes)
        with self._storing:
            for mm_hash in hashes:
                self._book.drop(mm_hash)  # first: there are no updates without an item
                self._writer.delete(mm_hash)
            self._sweep()

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        check_hash(mm_hash)
        self._writer.touch(mm_hash)
        with contextlib.suppress(KeyError):
            self._book.move_to_end(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts; what is being read stays until it has been."""
        with self._storing:
            self._book = UpdatesBook(self._book_bytes)
            self._writer.clear()
            self._sweep()
            self._counts.clear()
            self._inline_full = self._inline_too_large = 0

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        with self._reporting:
            return self._counts.stat(delta)

    def close(self) -> None:
        """Close the store and unlink its segment; idempotent. Workers that have it open can go on reading.

        A call that is just storing, in another thread, ends with StoreClosedError.
        """
        self._closed = True  # also for who asks with an empty book, and would take "no" for an answer
        self._book = UpdatesBook(self._book_bytes)
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
