"""What is held until it is ended: a lease of a writer, space that it fills, and the pin of a rank."""

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from shmstore.bindings.batch import Batch
from shmstore.bindings.store import end_pin
from shmstore.errors import ReservationEndedError, StoreClosedError, shown
from shmstore.refs import ObjectRef, trusted_ref

if TYPE_CHECKING:
    from shmstore.store.writer import ObjectStoreWriter


class Held(ABC):
    """What a process has until it ends it: a context manager that cannot be sent."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def end(self) -> Any:
        """Let it go; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end()

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to the process that has it; send the `ref` of what is stored")


class LeasedRef(Held):
    """A reference whose lease ends with the request: by `end`, at the end of a `with` block, or as garbage if unsent.

    Made by `ObjectStoreWriter.hold`; send its `ref`. Readers may read the reference any number of times, and do not end
    the lease. Keep this object while the request lives. If it is collected before `sent` was called, the lease ends, so
    a request that is rejected leaves none. After `sent` only `end` ends it, or `ObjectStoreWriter.cancel` and
    `cancel_all`. Make one object for each lease. All methods are safe in finalizers and signal handlers, twice, and
    after the writer was closed.
    """

    __slots__ = ("_batch", "_writer", "ref")

    def __init__(self, writer: "ObjectStoreWriter", ref: ObjectRef, batch: Batch) -> None:
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

    def __repr__(self) -> str:
        return f"<LeasedRef {self.ref!r}>"


class PinnedRef(Held):
    """A reference to an object that was found by key, and stays until `end`, the end of a `with` block, or garbage.

    Made by `ObjectStoreReader.find`. `ref` has no lease: any rank may `get` it while the object is there, and what it
    gets it holds for itself, so it may go on after the end of this one. The pin ends with its process, however that
    dies. `end` may be called twice, and after the reader was closed.
    """

    __slots__ = ("_pin", "ref")

    def __init__(self, packed: bytes, pin: Any) -> None:
        self._pin = pin  # its finalizer, which is C, unpins
        self.ref = trusted_ref(packed)

    def end(self) -> None:
        """Let the object go."""
        end_pin(self._pin)

    def __repr__(self) -> str:
        return f"<PinnedRef {self.ref!r}>"


class Reservation(Held):
    """Space for an object that is begun now and committed later; garbage, or the end of the process, aborts it.

    Made by `ObjectStoreWriter.begin`. Nobody finds the object before `commit`. `value` is the writable views, and None
    once it has ended. Do not write to views of it after that, and let asynchronous copies to them end before: the bytes
    are then readers' or another object's. As garbage it ends once the views are garbage, too.

    As a context manager it commits on a clean exit, and aborts on an exception; in a forked child it does neither. A
    thread may have several, and end them in any order. `commit` and `abort` may come from any thread; the first of them
    counts. After the writer's `close` only `abort` is left, and no other process can take the writer's place until all
    have ended.
    """

    __slots__ = ("_batch", "_key", "_pid", "value")

    def __init__(self, key: str, batch: Batch, value: Any) -> None:
        self._pid = os.getpid()
        self._key = key
        self._batch: Batch | None = batch  # its finalizer, which is C, aborts; the views keep it, too
        self.value = value

    def commit(self) -> ObjectRef:
        """Store the object, and return the reference to it, which has no lease: as `put` does with `lease=False`.

        Raises ReservationEndedError if it was committed or aborted before, and StoreClosedError. If it fails, or is
        interrupted, the object is not stored and the reservation has ended.
        """
        batch, self._batch = self._batch, None  # at once, as threads see it
        if batch is None:
            raise ReservationEndedError(f"the reservation of {shown(self._key)} has ended")
        try:
            ref = trusted_ref(batch.commit())
            batch.record.keep = 1
            return ref
        except BaseException:
            batch.undo()
            raise
        finally:
            self.value = None

    def abort(self) -> None:
        """Give the space back; do nothing if it has ended. Safe in finalizers, and after the writer was closed."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.undo()
            self.value = None

    end = abort

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._batch is not None and self._pid == os.getpid():
            self.commit()
        self.abort()
