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
    """Do `end` for each reference, also after a stale one, and return how many were open."""
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

    Owns `reader` and closes it. The tensors of an item that was read by reference are read-only views of shared memory.
    They hold its bytes until the last of them is gone. Writing into one is a segmentation fault.
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
        """Return the item that the reference names, or that came inline; CacheMissError if it is not there.

        It is not there for None, for a reference of another store, and for one whose object is gone. An object can go
        only after its lease is over: every worker has read it, or it was released. Raises TypeError for anything else.
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
        """Do `get_and_update_item` for each; CacheMissError with all missing hashes before a reference is read.

        Before that, raises ValueError if the lengths differ, and TypeError for a wrong item, reference or hash. After
        an error, references that were not read are still open; the API server ends them with the sender's `release`.
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
        """Do nothing but check the hash: a reference's lease keeps its item until this worker has read it."""
        check_hash(mm_hash)

    def clear_cache(self) -> None:
        """Do nothing: a worker keeps no item beyond the views that its user holds."""

    def release(self, refs: Iterable[ReceiverInput]) -> int:
        """End this worker's part of each lease that it will not read, and return how many it had not read.

        The other workers are not affected; the sender's `release` is for all of them. It is safe after a read, and
        twice. Raises TypeError for anything else than what is sent, and has then changed nothing. Raises StaleRefError,
        after the others, if an object is here and its reference was never handed out.
        """
        return end_each(self._reader.release, refs)

    def close(self) -> None:
        """Detach; idempotent. Items already read stay readable while their views live."""
        self._reader.close()
