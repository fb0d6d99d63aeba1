"""What the writer keeps for a request: leases that it ends itself, and protected keys."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmstore.errors import StoreClosedError
from shmstore.store.arguments import packed_key

if TYPE_CHECKING:
    from shmstore.bindings.batch import Batch
    from shmstore.refs import ObjectRef
    from shmstore.store.writer import ObjectStoreWriter

__all__ = ["LeasedRef", "Protection"]


class LeasedRef:
    """A reference whose lease ends with the request: by `end`, at the end of a `with` block, or as garbage if unsent.

    Made by `ObjectStoreWriter.hold`; send its `ref`. Readers may read the reference any number of times, and do not end
    the lease. Keep this object while the request lives. If it is collected before `sent` was called, the lease ends, so
    a request that is rejected leaves none. After `sent` only `end` ends it, or `ObjectStoreWriter.cancel` and
    `cancel_all`. Make one object for each lease. All methods are safe in finalizers and signal handlers, twice, and
    after the writer was closed.
    """

    __slots__ = ("__weakref__", "_batch", "_writer", "ref")

    def __init__(self, writer: ObjectStoreWriter, ref: ObjectRef, batch: Batch) -> None:
        self._writer = writer
        self._batch: Batch | None = batch  # its finalizer, which is C, ends the lease
        self.ref = ref

    def sent(self) -> None:
        """Keep the lease open if this object is collected: the reference was sent."""
        batch = self._batch
        if batch is not None:  # else it has ended
            batch.record.keep = 1

    def end(self) -> bool:
        """End the lease; return False if it has ended already."""
        try:
            return self._writer.cancel(self.ref)
        except StoreClosedError:
            return False
        finally:
            self._batch = None  # it would keep the store mapped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __reduce__(self) -> Any:
        raise TypeError("a LeasedRef belongs to the writer's process; send its `ref`")

    def __repr__(self) -> str:
        return f"<LeasedRef {self.ref!r}>"


class Protection:
    """Keys that the store must not reclaim, for engines that find an item in one call and take it in a later one.

    Made by `ObjectStoreWriter.protection`. A key is protected until `discard`, `end`, the next `get_cached` of it, or
    until `limit` younger ones are. An engine that never makes the second call keeps up to `limit` objects in the store,
    so choose a limit whose objects leave room. The protection also ends at the end of a `with` block, and if this
    object is collected. Safe in threads, finalizers and signal handlers: it takes no lock.
    """

    def __init__(self, writer: ObjectStoreWriter, limit: int) -> None:
        self._writer = writer._writer
        self._limit = limit
        # Each change is one operation of the dict. A batch that is in no dict is undone as garbage at the latest.
        self._kept: OrderedDict[bytes, Batch] = OrderedDict()
        self._registered = writer._protections
        self._registered.append(weakref.ref(self, self._registered.remove))

    def add(self, key: str, *, scope: str | None = None) -> None:
        """Protect the key, stored or not, as the youngest one."""
        packed = packed_key(key, scope)
        batch = self._writer.new_batch()
        batch.protect([packed])
        self.discard(key, scope=scope)  # after the new one, so that there is no gap
        self._kept[packed] = batch
        while len(self._kept) > self._limit:
            with contextlib.suppress(KeyError):  # another thread has taken the last one
                self._kept.popitem(last=False)[1].undo()

    def discard(self, key: str, *, scope: str | None = None) -> None:
        """Protect the key no longer; ignore one that is not protected."""
        batch = self._kept.pop(packed_key(key, scope), None)
        if batch is not None:
            batch.undo()

    def end(self) -> None:
        """Protect no key any longer."""
        kept, self._kept = self._kept, OrderedDict()
        for batch in list(kept.values()):
            batch.undo()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: str) -> bool:
        return packed_key(key) in self._kept

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
