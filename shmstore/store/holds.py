"""What the writer keeps for a request: leases that it ends itself, and protected keys."""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shmstore.errors import StoreClosedError
from shmstore.store.arguments import packed_key

if TYPE_CHECKING:
    from shmstore.bindings.batch import Batch
    from shmstore.refs import ObjectRef
    from shmstore.store.writer import ObjectStoreWriter

__all__ = ["LeasedRef", "Protection"]


class LeasedRef:
    """A reference whose lease ends with the request: by `end`, at the end of a `with` block, or as garbage if unsent.

    Made by `ObjectStoreWriter.hold`. Readers may read the reference any number of times, and do not end the lease. Keep
    this object while the request lives. If it is collected before `sent` was called, the lease ends, so a request that
    is rejected leaves none. After `sent` only `end` ends it, or `ObjectStoreWriter.cancel` and `cancel_all`. All
    methods are safe in finalizers and signal handlers, twice, and after the writer was closed.
    """

    __slots__ = ("__weakref__", "_batch", "_writer", "ref")

    def __init__(self, writer: ObjectStoreWriter, ref: ObjectRef, batch: Batch) -> None:
        self._writer = writer
        self._batch = batch  # its finalizer, which is C, ends the lease
        self.ref = ref

    def sent(self) -> None:
        """Keep the lease open if this object is collected: the reference was sent."""
        self._batch.record.keep = 1

    def end(self) -> bool:
        """End the lease; return False if it has ended already."""
        with contextlib.suppress(StoreClosedError):
            return self._writer.cancel(self.ref)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __repr__(self) -> str:
        return f"<LeasedRef {self.ref!r}>"


class Protection:
    """Keys that the store must not reclaim, for engines that find an item in one call and take it in a later one.

    Made by `ObjectStoreWriter.protection`. A key is protected until `discard`, `end`, the next `get_cached` of it, or
    until `limit` younger ones are. So an engine that never makes the second call loses nothing but the protection.
    The protection also ends at the end of a `with` block, and if this object is collected. Thread-safe.
    """

    def __init__(self, writer: ObjectStoreWriter, limit: int) -> None:
        self._writer = writer._writer
        self._limit = limit
        self._kept: dict[str, Batch] = {}
        self._lock = threading.RLock()
        self._registered = writer._protections
        self._registered.append(weakref.ref(self, self._registered.remove))

    def add(self, key: str) -> None:
        """Protect the key, stored or not, as the youngest one."""
        packed = packed_key(key)
        with self._lock:
            self.discard(key)
            batch = self._kept[key] = self._writer.new_batch()
            batch.protect([packed])
            if len(self._kept) > self._limit:
                self.discard(next(iter(self._kept)))

    def discard(self, key: str) -> None:
        """Protect the key no longer; ignore one that is not protected."""
        with self._lock:
            if key in self._kept:
                self._kept[key].undo()
                del self._kept[key]

    def end(self) -> None:
        """Protect no key any longer."""
        with self._lock:
            for key in list(self._kept):
                self.discard(key)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
