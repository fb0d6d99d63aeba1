"""`ObjectStoreWriter` puts and hands out."""

import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from shmstore.bindings import store as native
from shmstore.bindings.batch import Batch
from shmstore.bindings.handles import hidden
from shmstore.errors import (
    CorruptStoreError,
    ForeignStoreError,
    LayoutMismatchError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StaleRefError,
    StoreClosedError,
    StoreExistsError,
    StoreFullError,
    StoreNotFoundError,
    WriterActiveError,
    shown,
)
from shmstore.files import PREFIX
from shmstore.refs import ObjectRef, StoreHandle, trusted_ref
from shmstore.serde import ObjectSerde
from shmstore.store import leftovers, refusals
from shmstore.store.arguments import (
    DEFAULT_SERDE,
    Closable,
    checked_name,
    checked_serde,
    expected_store,
    hides_payload,
    int_of,
    packed_key,
    packed_ref,
)
from shmstore.store.stats import StoreStats

__all__ = ["Batch", "ObjectStoreWriter"]

_log = logging.getLogger(__name__)
_BROKEN = (AttributeError, OverflowError, TypeError, ValueError)
"""What becomes of a serializer's mistakes; asked about them only then, so that a put that succeeds pays nothing."""
_ORDINARY = (StoreFullError, ObjectTooLargeError, ObjectExistsError)
"""What a put may end with and the store knows more about than its code."""


class ObjectStoreWriter(Closable):
    """The one process that puts objects into a store and hands out references; made by `create` or `recover`.

    Thread-safe; bytes are copied with the GIL released. Close it, or use it as a context manager: a store of a chosen
    name that nobody closes stays in /dev/shm, where `recover` finds it.
    """

    def __init__(
        self, writer: native.Writer | None = None, name: str = "", serde: ObjectSerde = DEFAULT_SERDE, **options: Any
    ) -> None:
        """Wrap an opened segment; callers use `create` or `recover`."""
        if not isinstance(writer, native.Writer) or options:
            raise TypeError("an ObjectStoreWriter is made by ObjectStoreWriter.create(...) or .recover(name)")
        self._writer = writer
        self._serde = serde
        self._handle = StoreHandle(name, writer.store_id, writer.n_readers)
        self._open = True
        self._pid = os.getpid()

    @classmethod
    def create(
        cls,
        name: str | None = None,
        *,
        capacity: int,
        n_readers: int,
        max_object_size: int | None = None,
        max_objects: int | None = None,
        eviction: Literal["clock", "fifo"] = "clock",
        prefault: bool = False,
        huge_pages: bool = False,
        checksums: bool = False,
        serde: ObjectSerde | None = None,
    ) -> "ObjectStoreWriter":
        """Create a store and be its writer; all its space is reserved before this returns.

        `capacity` is in bytes, rounded up to 64; ranks 0 to `n_readers` - 1 attach. `name` None makes a unique one, for
        a store that ends with its process: one that is open at a normal exit is removed, one that a killed process left
        by the next `create`. A store that `recover` is to find needs a name.
        An object (key, metadata and tensors) takes at most `max_object_size` bytes (default: the capacity); at most
        `max_objects` are stored at a time (default: one per 16 KiB of capacity, from 256 to 1,048,576). `eviction`
        "clock" spares what was used since it was last considered, "fifo" nothing.

        `prefault` maps every page now instead of at its first use (the first put into a cold page costs many times a
        warm one), `huge_pages` asks for 2 MiB pages and takes what it gets, `checksums` computes a CRC-32C of each
        object at its commit, for `shmstore verify` to compare; `recover` keeps these. Raises StoreExistsError;
        StoreSpaceError where /dev/shm is too small; SharedMemoryError where it cannot be used; ValueError for numbers
        out of range.
        """
        capacity = int_of("capacity", capacity, 1, native.MAX_CAPACITY)
        n_readers = int_of("n_readers", n_readers, 1, native.MAX_READERS)
        size = capacity if max_object_size is None else int_of("max_object_size", max_object_size, 1, capacity)
        objects = 0 if max_objects is None else int_of("max_objects", max_objects, 1, native.MAX_OBJECTS)
        if eviction not in ("clock", "fifo"):
            raise ValueError(f"eviction must be 'clock' or 'fifo', not {shown(eviction)}")
        chosen_serde = checked_serde(serde)
        chosen = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}" if name is None else checked_name(name)
        leftovers.remove_dead()
        writer = None
        try:
            writer = native.Writer.create(
                chosen,
                capacity=capacity,
                n_readers=n_readers,
                max_objects=objects,
                max_object_size=size if max_object_size is not None else 0,
                prefault=bool(prefault),
                huge_pages=bool(huge_pages),
                fifo=eviction == "fifo",
                checksums=bool(checksums),
                disposable=name is None,
            )
            _log.debug("created store %s: %d bytes for %d readers", chosen, capacity, n_readers)
            made = cls(writer, chosen, chosen_serde)
            if name is None:
                leftovers.close_at_exit(made)
            return made  # not the call itself: its value is not yet the caller's, and this block would be over
        except StoreExistsError:
            raise refusals.exists(chosen) from None
        except BaseException as error:
            if writer is not None:
                writer.close(unlink=True)  # an interrupt: nobody else knows of it
            if isinstance(error, OSError):
                raise refusals.unusable(error, chosen) from None
            raise

    @classmethod
    def recover(
        cls, name: str | StoreHandle, *, serde: ObjectSerde | None = None, allow_uid: int | None = None
    ) -> "ObjectStoreWriter":
        """Take over the store of a writer that is dead or closed: every committed object, its key and open leases.

        What was half-written is dropped. The store must be this user's and closed to others; with `allow_uid` it must
        be that user's, whatever its mode. Raises WriterActiveError while a writer lives, StoreNotFoundError,
        ForeignStoreError, LayoutMismatchError for what is no store of this version or not that of the handle,
        CorruptStoreError for a damaged one, SharedMemoryError where shared memory cannot be used.
        """
        chosen_serde = checked_serde(serde)
        wanted, store_id, ranks, uid = expected_store(name, allow_uid)
        try:
            writer = native.Writer.recover(wanted, store_id, ranks, uid)
        except StoreNotFoundError as error:
            raise refusals.not_found(error, wanted, isinstance(name, StoreHandle)) from None
        except WriterActiveError:
            raise WriterActiveError(f"the writer of store {shown(wanted)} is alive") from None
        except LayoutMismatchError as error:
            raise refusals.another_layout(error, wanted) from None
        except ForeignStoreError:
            raise refusals.foreign(wanted, uid) from None
        except OSError as error:
            raise refusals.unusable(error, wanted) from None
        except CorruptStoreError:
            raise CorruptStoreError(
                f"the tables of store {shown(wanted)} contradict themselves",
                hint="`shmstore verify NAME` says what is wrong; `shmstore gc --yes --force NAME` removes it",
            ) from None
        _log.info("recovered store %s with %d objects", wanted, writer.count())
        return cls(writer, wanted, chosen_serde)

    def __repr__(self) -> str:
        return f"<ObjectStoreWriter {self._handle.name!r}{'' if self._open else ' (closed)'}>"

    @property
    def handle(self) -> StoreHandle:
        """What a reader attaches with; small, picklable."""
        return self._handle

    @property
    def name(self) -> str:
        """The store's POSIX name, without a slash."""
        return self._handle.name

    # ---- putting and handing out

    def put(self, key: str, value: Any) -> ObjectRef:
        """Store `value` under `key` with one copy, open one lease and return the reference to it.

        Raises ObjectExistsError, ObjectTooLargeError, StoreFullError (nothing is evicted then), and TypeError, with
        the path, for a value that the serializer refuses; SerdeError where a serializer of the caller's own is wrong. A
        put that fails leaves the store as it was.
        """
        batch = self._writer.batch()
        try:
            ref = self._put(batch, key, value)
            batch.record.keep = 1  # the commit; see bindings.batch
            if self._writer._w:  # else it was closed meanwhile, and a spare would keep the mapping
                self._writer.spare = batch
            return ref
        except BaseException:
            batch.undo()
            raise

    def _put(self, batch: Batch, key: str, value: Any) -> ObjectRef:
        """`put`, as a part of a batch."""
        packed = packed_key(key)
        encoded = self._serde.encode(value)
        try:
            if encoded.fills:
                return self._fill(batch, packed, encoded)
            return trusted_ref(batch.put(packed, encoded.meta, encoded.nbytes, encoded.spans))
        except _ORDINARY as error:
            raise self._explain(batch, error, key, encoded.nbytes, len(packed) + len(encoded.meta)) from None
        except _BROKEN as error:
            if (wrong := refusals.wrong_encoding(encoded)) is not None:
                raise wrong from error
            raise

    def _fill(self, batch: Batch, key: bytes, encoded: Any) -> ObjectRef:
        if (wrong := refusals.wrong_encoding(encoded)) is not None:
            raise wrong  # a fill would be given less than its size, and C has no look at it
        batch.begin(key, encoded.meta, encoded.nbytes)
        batch.copy(encoded.spans)
        with memoryview(batch.buffer()) as payload:
            for offset, size, source in encoded.fills:
                self._serde.fill(payload[offset : offset + size], source)
        return trusted_ref(batch.commit())

    def _explain(
        self,
        batch: Batch,
        error: StoreFullError | ObjectTooLargeError | ObjectExistsError,
        key: str,
        nbytes: int,
        extra: int,
    ) -> Exception:
        """Return the same error with what the caller wants to know."""
        if isinstance(error, ObjectExistsError):
            return ObjectExistsError(f"{error.default_message}: {shown(key)}")
        if isinstance(error, ObjectTooLargeError):
            limit = self._writer.max_object_size
            return ObjectTooLargeError(f"{nbytes} bytes (and {extra} of key and metadata) exceed the limit of {limit}")
        return refusals.full(batch.refusal(), error.resource, nbytes, extra)

    @contextmanager
    def reserve(self, key: str, template: Any) -> Iterator[Any]:
        """Give writable views laid out like `template`, to be filled in place: no copy at all.

        `template` is a tree whose tensors, arrays and `TensorSpec` stand for shapes and dtypes; the rest of it is
        stored as it is. A clean exit commits, without a lease: `get_cached(key)` hands the object out. An
        exception gives everything back. Raises as `put` does. The views must not be written to after the block.
        """
        packed = packed_key(key)
        layout = self._serde.layout(template)
        if (wrong := refusals.wrong_layout(layout)) is not None:
            raise wrong
        batch = self._writer.batch()
        try:
            try:
                batch.begin(packed, layout.meta, layout.nbytes, hand_out=False)
            except _ORDINARY as error:
                raise self._explain(batch, error, key, layout.nbytes, len(packed) + len(layout.meta)) from None
            payload = batch.buffer()
            yield layout.build(payload if hides_payload(self._serde) else hidden(payload))
            batch.commit()
            batch.record.keep = 1
        except BaseException:
            batch.undo()
            raise

    def get_cached(self, key: str) -> ObjectRef:
        """Hand out what is stored under `key`: opens another lease and counts as a use.

        Raises ObjectNotFoundError; StoreFullError where every lease entry is taken by an open lease.
        """
        batch = self._writer.batch()
        try:
            ref = self._hand_out(batch, key)
            batch.record.keep = 1
            if self._writer._w:
                self._writer.spare = batch
            return ref
        except BaseException:
            batch.undo()
            raise

    def _hand_out(self, batch: Batch, key: str) -> ObjectRef:
        """`get_cached`, as a part of a batch."""
        try:
            return trusted_ref(batch.hit(packed_key(key)))
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(f"{error.default_message}: {shown(key)}") from None
        except StoreFullError as error:
            raise refusals.full(batch.refusal(), error.resource) from None

    def is_cached(self, key: str) -> bool:
        """Say whether `get_cached` would find `key`; changes no order and no count."""
        return self._writer.has(packed_key(key))

    def touch(self, key: str) -> bool:
        """Count a use of `key` without handing it out; False where it is absent."""
        return self._writer.touch(packed_key(key))

    @contextmanager
    def protect(self, keys: Iterable[str]) -> Iterator[None]:
        """Let none of `keys` be reclaimed inside the block, whether stored before it or during it."""
        if isinstance(keys, str):
            raise TypeError(f"keys must be an iterable of keys, not one key; write protect([{shown(keys)}])")
        packed = [packed_key(key) for key in keys]
        batch = self._writer.batch()
        try:
            batch.protect(packed)
            yield
        finally:
            batch.undo()

    # ---- letting go

    def cancel(self, ref: ObjectRef) -> bool:
        """End a lease whose request was aborted; False where it is over already.

        Safe after the readers have read, and twice. The object is not kept for this reference any more; until it is
        evicted a `get` finds it all the same. StaleRefError for a reference that this store never gave, if its object
        is here to compare it with; False if not.
        """
        try:
            return self._writer.cancel(packed_ref(ref))
        except StaleRefError as error:
            raise refusals.stale(error, ref, self._handle.store_id) from None

    def cancel_all(self) -> int:
        """End every open lease and return how many there were, also those that are over and not yet looked at.

        For after `recover`, where the requests of the writer before died with it: a reference that it handed out and
        never sent is known to nobody, and its lease would keep its object for ever.
        """
        return self._writer.cancel_all()

    def retire(self, rank: int) -> None:
        """Stop expecting `rank`, which has never come or will not come again, until it attaches.

        Every lease so far is over for it, for good, and until it attaches none waits for it. A reader that is attached
        as this rank is not stopped: what it looks at stays as it is, and it may go on to `get` what is still there, but
        what it has not read may be evicted, which makes its references stale. Leases that are opened after the rank has
        attached (anew) wait for it again.
        """
        self._writer.retire(int_of("rank", rank, 0, self._writer.n_readers - 1))

    def delete(self, key: str) -> bool:
        """Take `key` out: no new hand-outs, and the bytes are free when nobody holds them; False where absent."""
        return self._writer.delete(packed_key(key))

    def clear(self) -> None:
        """Delete every key; ids go on counting."""
        self._writer.clear()

    # ---- looking

    def keys(self) -> list[str]:
        """Return the keys that can be handed out, oldest object first."""
        return self._writer.key_list()

    def __len__(self) -> int:
        return self._writer.count()

    def __bool__(self) -> bool:
        return True  # a writer of an empty store is still a writer

    def __contains__(self, key: object) -> bool:
        try:
            return self._writer.has(packed_key(key))  # type: ignore[arg-type]
        except (TypeError, StoreClosedError):
            if isinstance(key, str):
                raise
            return False
        except ValueError:
            return False  # no such key can be in a store

    def stats(self) -> StoreStats:
        """Return the store's figures as of now."""
        return StoreStats(**self._writer.stats())

    def track_evictions(self, on: bool = True) -> None:
        """Note the keys that leave the store from now on, for `take_evicted`; or stop, and forget them."""
        self._writer.track_evictions(on)

    def take_evicted(self) -> list[str]:
        """Return the keys that were evicted or deleted since the last call, in that order; for caches beside it."""
        while True:
            before = self._writer.position
            keys, position = self._writer.evicted()
            if before == self._writer.position:  # else another thread or a signal's handler has taken them
                self._writer.position = position
                return keys

    def check_valid(self) -> None:
        """Check every invariant between the segment and the writer's books; CorruptStoreError at the first broken."""
        self._writer.check_valid()

    def close(self, unlink: bool = True) -> None:
        """Let the store go, and with `unlink` remove its name; idempotent.

        Readers keep what they have; views stay valid. Without `unlink` the segment waits for `recover`.
        """
        if self._open:
            self._writer.close(unlink)
            self._open = False
            _log.debug("closed store %s%s", self._handle.name, "" if unlink else ", which stays")
