"""A worker of `shm`: a reference becomes the item, read in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shmstore.errors import CacheMissError, StaleRefError
from shmstore.multimodal.caches.base import BaseMultiModalReceiverCache
from shmstore.multimodal.caches.checks import check_hash, check_item, check_pairs, checked_sent
from shmstore.multimodal.values.items import MultiModalKwargsItem
from shmstore.multimodal.values.types import ReceiverInput
from shmstore.refs import ObjectRef
from shmstore.store import ObjectStoreReader

__all__ = ["ShmObjectStoreReceiverCache", "end_each"]


def end_each(end: Callable[[ObjectRef], bool], refs: Iterable[ReceiverInput]) -> int:
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
        return end_each(self._reader.release, refs)

    def close(self) -> None:
        """Detach; idempotent. Items already read stay readable while their views live."""
        self._reader.close()
