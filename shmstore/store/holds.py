"""What is held until it is ended: a lease of a writer, for a request that may read again, and the pin of a rank."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shmstore.bindings.batch import Batch
from shmstore.bindings.store import end_pin
from shmstore.errors import StoreClosedError
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
