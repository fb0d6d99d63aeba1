"""A worker of `shm`: a reference becomes the item, read in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

from shmstore.errors import CacheMissError, ObjectBusyError, SharedMemoryError, StaleRefError, listed, shown
from shmstore.multimodal.caches.base import BaseMultiModalReceiverCache
from shmstore.multimodal.caches.checks import check_hash, check_known, check_pairs
from shmstore.multimodal.values.types import MULTIMODAL, CacheTypes, ItemT, ReceiverInput
from shmstore.refs import ObjectRef
from shmstore.store import ObjectStoreReader

_log = logging.getLogger(__name__)

Policy: TypeAlias = Literal["views", "copy", "private"]


def end_each(end: Callable[[ObjectRef], bool], sent: Iterable[object]) -> int:
    """Do `end` for each reference, also after a stale one, and return how many were open."""
    ended = 0
    foreign: StaleRefError | None = None
    for ref in sent:
        if isinstance(ref, ObjectRef):
            try:
                ended += end(ref)
            except StaleRefError as error:
                foreign = error
    if foreign is not None:
        raise foreign
    return ended


_PATIENCE = 3
"""How often a reader asks for an object whose writer was stopped; it waits a second each time."""


@cache
def _warn_of_copies(hint: str) -> None:
    _log.warning("items that cannot be mapped are copied instead: %s", hint)


def _get(reader: ObjectStoreReader, ref: ObjectRef, **options: Any) -> Any:
    """Return `reader.get(ref, ...)`, or a copy in place of a private value that cannot be mapped."""
    try:
        return reader.get(ref, **options)
    except SharedMemoryError as error:  # only of a private value
        _warn_of_copies(error.hint)
        return reader.get(ref, copy=True)


def get_patiently(reader: ObjectStoreReader, ref: ObjectRef, **options: Any) -> Any:
    """Return `reader.get(ref, ...)`, and ask again if the writer was stopped while it decided."""
    for _ in range(_PATIENCE - 1):
        with suppress(ObjectBusyError):
            return _get(reader, ref, **options)
    return _get(reader, ref, **options)


class ShmObjectStoreReceiverCache(BaseMultiModalReceiverCache[ItemT]):
    """A worker of `shm`: a reference becomes the item, and an inline item passes through. Thread-safe.

    Owns `reader`, whose statistics may be asked for, and closes it. `policy` says what becomes of a reference:

    * "views": the item's tensors are read-only views of shared memory. They hold its bytes until the last of them is
      gone. Writing into one is a segmentation fault.
    * "private": the item is writable, and nobody else sees what is written. It holds its bytes like views. One that
      cannot be mapped, for want of mappings or of huge pages, is a copy.
    * "copy": the item is private and writable, and holds nothing. For engines that keep items until a request ends.
    """

    def __init__(
        self,
        reader: ObjectStoreReader,
        *,
        types: CacheTypes[ItemT, Any] = MULTIMODAL,
        policy: Policy = "views",
    ) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"policy must be one of {listed(get_args(Policy))}, not {shown(policy)}")
        self._how = {policy: True} if policy in ("copy", "private") else {}
        self.types = types
        self.reader = reader

    def get_and_update_item(self, mm_item: ReceiverInput[ItemT], mm_hash: str) -> ItemT:
        """Return the item that the reference names, or that arrived inline; CacheMissError if it is not there.

        It is not there for None, for a reference of another store, and for one whose object was evicted: only after
        its lease is over, because every worker has read it, or it was released. Raises TypeError for anything else,
        and StoreNotFoundError or StoreClosedError if the store was removed, like `ObjectStoreReader.get`.
        ObjectBusyError comes after three of these, if the writer was stopped for so long.
        """
        if isinstance(mm_item, ObjectRef):
            try:
                item: ItemT = get_patiently(self.reader, mm_item, **self._how)
            except StaleRefError as stale:
                raise CacheMissError([mm_hash]) from stale
            return item
        if mm_item is None:
            check_hash(mm_hash)
            raise CacheMissError([mm_hash])
        self.types.check_item(mm_item, mm_hash)
        return mm_item

    def get_and_update(self, mm_items: Sequence[ReceiverInput[ItemT]], mm_hashes: Sequence[str]) -> list[ItemT]:
        """Do `get_and_update_item` for each; CacheMissError with all missing hashes before a reference is read.

        After an error, references that were not read are still open; the API server ends them with the sender's
        `release`.
        """
        check_pairs(mm_items, mm_hashes, self._check_arrived)
        there = self.reader.validate
        arrived = [item if not isinstance(item, ObjectRef) or there(item) else None for item in mm_items]
        try:
            check_known(arrived, mm_hashes, lambda mm_hash: False)
        except CacheMissError:
            for item, left in zip(mm_items, arrived, strict=True):
                if left is None and isinstance(item, ObjectRef):
                    with suppress(StaleRefError):
                        self.reader.get(item)  # raises if the store itself was removed
            raise
        given = {mm_hash: item for item, mm_hash in zip(arrived, mm_hashes, strict=True) if item is not None}
        return [
            self.get_and_update_item(given[mm_hash] if item is None else item, mm_hash)
            for item, mm_hash in zip(arrived, mm_hashes, strict=True)
        ]

    def _check_arrived(self, mm_item: ReceiverInput[ItemT], mm_hash: str) -> None:
        if not isinstance(mm_item, ObjectRef):
            self.types.check_item(mm_item, mm_hash)

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: ReceiverInput[ItemT] = None) -> None:
        """Do nothing but check the hash: a reference's lease keeps its item until this worker has read it."""
        check_hash(mm_hash)

    def clear_cache(self) -> None:
        """Do nothing: a worker keeps no item beyond the views that its user holds."""

    def release(self, refs: Iterable[ReceiverInput[ItemT]]) -> int:
        """End this worker's part of each lease that it will not read, and return how many it had not read.

        The sender's `release` is for all workers. Raises StaleRefError, after the others, if an object is here and its
        reference was never handed out.
        """
        return end_each(self.reader.release, self.types.checked_sent(refs))

    def close(self) -> None:
        """Detach; idempotent. Items already read stay readable while their views live."""
        self.reader.close()
