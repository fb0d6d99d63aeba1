"""The `shm` pair: P0 puts each item once into shared memory and sends a reference; workers read it in place.

The store decides what stays: it knows who still reads what. So the sender keeps no order and no sizes of items, only
the prompt updates, in a book of their own, and an item is *cached* where both the store and the book have it:

* The store evicts on its own, inside `put`. It writes down which keys went (`track_evictions`), and the book drops
  them before anything else is recorded, with the sender's lock held: no updates without an item.
* The book is bounded by `processor_cache_gb`. Where it drops updates, the item may still be stored. Then the item
  counts as not cached, its next input brings the updates again, and the stored object is handed out.

Each hand-out opens a lease, which ends when every worker has read it. A request that ends before that gives its leases
back by `release`; the store takes care that an item that some worker may still read is never overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shmstore.errors import (
    CacheMissError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StaleRefError,
    StoreClosedError,
    StoreFullError,
)
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.interfaces import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    ProcessorInput,
    ProcessorOutput,
    PromptUpdates,
    ReceiverInput,
    check_batch,
    check_hash,
    check_hashes,
    check_input,
    check_item,
    check_pairs,
)
from shmstore.multimodal.items import MultiModalKwargsItem
from shmstore.multimodal.lockstep import ValueBook
from shmstore.multimodal.lru import CacheInfo, HitCounter
from shmstore.multimodal.sizes import updates_size
from shmstore.refs import ObjectRef

if TYPE_CHECKING:
    from shmstore.refs import StoreHandle
    from shmstore.store import ObjectStoreReader, ObjectStoreWriter

__all__ = ["ShmObjectStoreReceiverCache", "ShmObjectStoreSenderCache"]

_log = logging.getLogger(__name__)


class ShmObjectStoreSenderCache(BaseMultiModalProcessorCache):
    """P0 of `shm`: output `(ObjectRef, updates)` with a new lease, hit or miss; where it does not fit the input.

    Owns `writer` and closes it. An item that the store has no room for, or that is larger than it takes, goes inline:
    counted in `inline_full` and `inline_too_large`, with a warning in the log that names the setting. Thread-safe.
    """

    def __init__(self, config: MultiModalCacheConfig, writer: ObjectStoreWriter) -> None:
        self._lock = threading.RLock()
        self._writer = writer
        self._book: ValueBook[PromptUpdates] = ValueBook(config.processor_cache_bytes)
        self._counts = HitCounter()
        self._inline_full = 0
        self._inline_too_large = 0
        writer.track_evictions(True)

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
        """Whether None will do as input; changes neither order nor counts."""
        return mm_hash in self._book and self._writer.is_cached(mm_hash)

    def get_and_update_item(self, mm_item: ProcessorInput, mm_hash: str) -> ProcessorOutput:
        """A reference with a lease of its own, or the item where it does not fit; CacheMissError for None, no item.

        TypeError for an input or a hash that is none.
        """
        if type(mm_hash) is not str:
            check_hash(mm_hash)
        if mm_item is not None and not (  # the common case without a call
            type(mm_item) is tuple
            and len(mm_item) == 2
            and type(mm_item[0]) is MultiModalKwargsItem
            and type(mm_item[1]) is list
        ):
            check_input(mm_item, mm_hash)
        with self._lock:
            entry = self._book.use(mm_hash)
            if entry is not None:
                ref = self._hand_out_again(mm_hash, mm_item is not None)
                if ref is not None:
                    self._counts.hits += 1
                    self._counts.total += 1
                    return ref, entry[0]
            if mm_item is None:
                raise CacheMissError([mm_hash])
            output = self._store(mm_item, mm_hash)
            self._counts.total += 1
            return output

    def _hand_out_again(self, mm_hash: str, item_given: bool) -> ObjectRef | None:
        try:
            return self._writer.get_cached(mm_hash)
        except ObjectNotFoundError:  # deleted by someone else who has the writer
            self._book.drop(mm_hash)
        except StoreFullError as full:  # not of objects, but of open leases
            if not item_given:
                raise CacheMissError([mm_hash]) from full
        return None

    def _store(self, mm_item: tuple[MultiModalKwargsItem, PromptUpdates], mm_hash: str) -> ProcessorOutput:
        item, updates = mm_item
        size = updates_size(updates)
        writer = self._writer
        try:
            try:
                ref = writer.put(mm_hash, item)
            except ObjectExistsError:
                ref = writer.get_cached(mm_hash)  # only its updates were gone
        except StoreFullError as full:
            self._inline_full += 1
            short = (
                "ipc_cache_gb is" if full.resource in ("bytes", None) else f"the store's number of {full.resource} is"
            )
            _warn(self._inline_full, f"{short} too small for what is being read at a time", full)
            return mm_item
        except ObjectTooLargeError as too_large:
            self._inline_too_large += 1
            _warn(self._inline_too_large, "shm_max_object_size_mb (or ipc_cache_gb) is too small", too_large)
            return mm_item
        self._sweep()
        self._book.put(mm_hash, updates, size)
        return ref, updates

    def _sweep(self) -> None:
        for mm_hash in self._writer.take_evicted():
            self._book.drop(mm_hash)

    def get_and_update(self, mm_items: Sequence[ProcessorInput], mm_hashes: Sequence[str]) -> list[ProcessorOutput]:
        """`get_and_update_item` of each, all or nothing: if one fails, no lease is open and no item recorded.

        What is cached is protected until the batch is done. ValueError where the lengths differ, TypeError for an input
        or a hash that is none or an item that cannot be stored, CacheMissError with all missing hashes of the batch.
        """
        with self._lock:
            check_batch(mm_items, mm_hashes, self.is_cached_item, check_input)
            if len(mm_hashes) == 1:
                return [self.get_and_update_item(mm_items[0], mm_hashes[0])]
            before = (self._counts.hits, self._counts.total, self._inline_full, self._inline_too_large)
            stored = frozenset(mm_hash for mm_hash in mm_hashes if self._writer.is_cached(mm_hash))
            held = {mm_hash: entry[0] for mm_hash in stored if (entry := self._book.use(mm_hash)) is not None}
            given: dict[str, tuple[MultiModalKwargsItem, PromptUpdates]] = {}
            outputs: list[ProcessorOutput] = []
            with self._writer.protect(list(held)):
                try:
                    for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
                        outputs.append(self._next_of_batch(mm_item, mm_hash, held, given))
                except BaseException:
                    self._undo(outputs, given.keys() - stored, given.keys() & stored)
                    self._counts.hits, self._counts.total, self._inline_full, self._inline_too_large = before
                    raise
            return outputs

    def _next_of_batch(
        self,
        mm_item: ProcessorInput,
        mm_hash: str,
        held: dict[str, PromptUpdates],
        given: dict[str, tuple[MultiModalKwargsItem, PromptUpdates]],
    ) -> ProcessorOutput:
        ref = self._hand_out_again(mm_hash, mm_item is not None) if mm_hash in held else None
        if ref is not None:
            # The updates from `held`: the book may have dropped them for another item of this batch.
            output: ProcessorOutput = ref, held[mm_hash]
            self._counts.hits += 1
        else:
            # None: the same item again that went inline at an earlier place in the batch.
            source = given.get(mm_hash) if mm_item is None else given.setdefault(mm_hash, mm_item)
            if source is None:
                raise CacheMissError([mm_hash])
            output = self._store(source, mm_hash)
            if isinstance(output[0], ObjectRef):
                held[mm_hash] = output[1]
        self._counts.total += 1
        return output

    def _undo(self, outputs: Iterable[ProcessorOutput], new: Iterable[str], known: Iterable[str]) -> None:
        with contextlib.suppress(StoreClosedError):  # then there is nothing left to give back
            for sent, _ in outputs:
                if isinstance(sent, ObjectRef):
                    self._writer.cancel(sent)
            for mm_hash in new:
                self._writer.delete(mm_hash)
            self._sweep()  # with the objects go their updates
        for mm_hash in known:
            self._book.drop(mm_hash)

    def release(self, refs: Iterable[ReceiverInput]) -> int:
        """A request ended before its workers read: give back the leases of what was sent; how many were open.

        Safe after they have read, and twice. Anything but a reference (an inline item, None) has no lease and is
        passed over, so that whatever was sent can be given. StaleRefError, after the others have been given back, for
        a reference that this store never gave.
        """
        ended = 0
        foreign: StaleRefError | None = None
        for ref in refs:
            if isinstance(ref, ObjectRef):
                try:
                    ended += self._writer.cancel(ref)
                except StaleRefError as error:
                    foreign = error
        if foreign is not None:
            raise foreign
        return ended

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """A worker has rejected a request with `CacheMissError`: put these anew when next asked."""
        check_hashes(mm_hashes)
        with self._lock:
            for mm_hash in mm_hashes:
                self._writer.delete(mm_hash)
                self._book.drop(mm_hash)
            self._sweep()

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; absent: nothing."""
        with self._lock:
            self._writer.touch(mm_hash)
            self._book.use(mm_hash)

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts; what is being read stays until it has been."""
        with self._lock:
            self._writer.clear()
            self._sweep()
            self._book.clear()
            self._counts.clear()
            self._inline_full = self._inline_too_large = 0

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Hits and total so far; with `delta` since the last call with `delta`."""
        with self._lock:
            return self._counts.stat(delta)

    def close(self) -> None:
        """Close the store and unlink its segment; idempotent. Workers that have it open can go on reading."""
        with self._lock:
            self._book.clear()
            self._writer.close()

    def __enter__(self) -> ShmObjectStoreSenderCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _warn(count: int, setting: str, error: Exception) -> None:
    if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: neither silence nor a flood
        # Its text: a handler that keeps the record would keep the error's frames, and with them the items in them.
        _log.warning("item sent inline (%d so far): %s; %s", count, setting, str(error))


def _check_arrived(mm_item: ReceiverInput, mm_hash: str) -> None:
    if not isinstance(mm_item, ObjectRef):
        check_item(mm_item, mm_hash)


class ShmObjectStoreReceiverCache(BaseMultiModalReceiverCache):
    """A worker of `shm`: a reference becomes the item, read in place; an inline item passes through. Thread-safe.

    Owns `reader` and closes it. Tensors of an item that was read by reference are read-only views of shared memory, and
    keep its bytes in place until the last of them is gone: writing into one is a fault of the process.
    """

    def __init__(self, reader: ObjectStoreReader) -> None:
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

    def clear_cache(self) -> None:
        """Nothing to do here: a worker keeps no item beyond the views that its user holds."""

    def close(self) -> None:
        """Detach; idempotent. Items already read stay readable while their views live."""
        self._reader.close()

    def __enter__(self) -> ShmObjectStoreReceiverCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
