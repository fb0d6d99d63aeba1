"""The store: `ObjectStoreWriter` puts and hands out, `ObjectStoreReader` takes in place. Two roles, two types."""

import logging
import operator
import os
import secrets
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from shmstore import explain, leftovers
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
    RankInUseError,
    ShmStoreError,
    StaleRefError,
    StoreClosedError,
    StoreExistsError,
    StoreFullError,
    StoreNotFoundError,
    WriterActiveError,
)
from shmstore.refs import ObjectRef, StoreHandle, trusted_ref
from shmstore.serde import MsgpackSerde, ObjectSerde

__all__ = ["Batch", "ObjectStoreReader", "ObjectStoreWriter", "ReaderStats", "StoreStats"]

_log = logging.getLogger(__name__)
_DEFAULT_SERDE = MsgpackSerde()
_MAX_UID = 2**32 - 2
_BROKEN = (AttributeError, OverflowError, TypeError, ValueError)
"""What becomes of a serializer's mistakes; asked about them only then, so that a put that succeeds pays nothing."""
_ORDINARY = (StoreFullError, ObjectTooLargeError, ObjectExistsError)
"""What a put may end with and the store knows more about than its code."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, and what its writers have done with it since it was created (also before a `recover`)."""

    capacity: int
    """Bytes of the data region."""
    max_object_size: int
    """Bytes that one object may have: key, metadata and tensors together."""
    max_objects: int
    """Slots; one an object."""
    n_readers: int
    """Ranks that each hand-out expects."""
    objects: int
    """Objects stored, deleted ones that somebody still holds among them."""
    used_bytes: int
    """Bytes of the data region under objects and unfinished puts, with their padding."""
    next_id: int
    """`monotonic_id` of the next object."""
    next_lease: int
    """Number of the next hand-out."""
    open_leases: int
    """Hand-outs not known to be over. The writer looks only when it needs room, so that some of them may be."""
    max_leases: int
    """Lease entries; one an open hand-out."""
    puts: int
    """Objects stored."""
    put_bytes: int
    """Bytes of tensors copied in."""
    hits: int
    """Calls of `get_cached` that found their key."""
    misses: int
    """Calls of `get_cached` that did not."""
    evictions: int
    """Objects reclaimed for another's sake."""
    evicted_bytes: int
    """Bytes of the data region that they had."""
    deletes: int
    """Objects taken out by `delete` and `clear`."""
    refusals: int
    """Puts and hand-outs answered with StoreFullError."""
    cancels: int
    """Leases ended by `cancel`."""
    control_bytes: int
    """Bytes of the segment besides the data region."""
    heap_bytes: int
    """Bytes of the writer's private books."""

    @property
    def hit_ratio(self) -> float:
        """Hits per item handed out, put or hit; 0 where there was none. (Who asks `is_cached` first never misses.)"""
        given = self.hits + self.puts
        return self.hits / given if given else 0.0


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """What the processes of one rank have done; the counts survive them."""

    gets: int
    """References turned into values."""
    stale: int
    """References refused."""
    releases: int
    """Leases ended unread by `release`."""
    live_views: int
    """Values of this reader that somebody still looks at."""


def _int(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` as an int of the range; TypeError or ValueError, naming the argument, where it is none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {explain.shown(number)}")
    return number


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        more = "; pass its handle" if isinstance(name, ObjectStoreWriter) else ""
        raise TypeError(f"name must be a str, not {type(name).__name__}{more}")
    if name.startswith("/dev/shm/"):
        raise ValueError(f"not a store's name: {explain.shown(name)}; pass it without /dev/shm/")
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError as error:
        raise ValueError(
            f"not a store's name: {explain.shown(name)}; {error.reason} (position {error.start})"
        ) from None
    if "/" in name or "\0" in name or name in ("", ".", "..") or size > native.MAX_NAME:
        raise ValueError(
            f"not a store's name: {explain.shown(name)}; up to {native.MAX_NAME} bytes, without a slash, not . or .."
        )
    return name


def _checked_handle(handle: StoreHandle) -> tuple[str, int, int]:
    """Return the name, the store's number and the number of ranks, none of which was checked on its way here."""
    try:
        return (
            _checked_name(handle.name),
            _int("store_id", handle.store_id, 0, 0xFFFFFFFF),
            _int("n_readers", handle.n_readers, 1, native.MAX_READERS),
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"this StoreHandle is none that a writer made: {error}") from None


def _expected(store: str | StoreHandle, allow_uid: int | None) -> tuple[str, int, int, int]:
    """Return the name, and what the store of that name must be to be the one that is meant."""
    uid = native.OWN_UID if allow_uid is None else _int("allow_uid", allow_uid, 0, _MAX_UID)
    if isinstance(store, StoreHandle):
        return *_checked_handle(store), uid
    return _checked_name(store), native.ANY_STORE, 0, uid


def _checked_serde(serde: ObjectSerde | None) -> ObjectSerde:
    if serde is None:
        return _DEFAULT_SERDE
    if isinstance(serde, type):
        raise TypeError(f"serde must be an instance: pass {serde.__name__}()")
    missing = [name for name in ("encode", "fill", "decode", "layout") if not callable(getattr(serde, name, None))]
    if missing:
        raise TypeError(
            f"serde must be an ObjectSerde, such as MsgpackSerde(); {type(serde).__name__} has no {', '.join(missing)}"
        )
    return serde


def _hides_payload(serde: ObjectSerde) -> bool:
    """Say whether its views are arrays and tensors, which show the collector no payload; others may be anything."""
    return type(serde) is MsgpackSerde


def _key(key: str) -> bytes:
    try:
        packed = key.encode()
    except AttributeError:
        raise TypeError(f"a key must be a str, not {type(key).__name__}") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"a key must be encodable in UTF-8: {error.reason} (position {error.start})") from None
    if not 0 < len(packed) <= native.MAX_KEY:
        raise ValueError(f"a key must have 1 to {native.MAX_KEY} bytes in UTF-8, not {len(packed)}")
    return packed


def _packed(ref: ObjectRef) -> bytes:
    try:
        return ref._packed
    except AttributeError:
        more = ""
        if isinstance(ref, (bytes, bytearray, memoryview)):
            more = "; ObjectRef.from_bytes makes one of 40 bytes"
        elif isinstance(ref, str):
            more = "; the writer's put and get_cached make one of a key"
        raise TypeError(f"expected an ObjectRef, not {type(ref).__name__}{more}") from None


class _Closable:
    """Context manager, and a warning where a store's end was forgotten."""

    _open = False
    _pid = 0

    def close(self) -> None:
        raise NotImplementedError  # pragma: no cover - both subclasses have their own

    def __enter__(self) -> Self:
        if not self._open:
            raise StoreClosedError(f"{self!r} cannot be entered again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open and self._pid == os.getpid():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __reduce__(self) -> Any:
        raise TypeError(f"an {type(self).__name__} cannot be pickled; send the writer's `handle` and attach there")


class ObjectStoreWriter(_Closable):
    """The one process that puts objects into a store and hands out references; made by `create` or `recover`.

    Thread-safe; bytes are copied with the GIL released. Close it, or use it as a context manager: a store of a chosen
    name that nobody closes stays in /dev/shm, where `recover` finds it.
    """

    def __init__(
        self, writer: native.Writer | None = None, name: str = "", serde: ObjectSerde = _DEFAULT_SERDE, **options: Any
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
        capacity = _int("capacity", capacity, 1, native.MAX_CAPACITY)
        n_readers = _int("n_readers", n_readers, 1, native.MAX_READERS)
        size = capacity if max_object_size is None else _int("max_object_size", max_object_size, 1, capacity)
        objects = 0 if max_objects is None else _int("max_objects", max_objects, 1, native.MAX_OBJECTS)
        if eviction not in ("clock", "fifo"):
            raise ValueError(f"eviction must be 'clock' or 'fifo', not {explain.shown(eviction)}")
        chosen_serde = _checked_serde(serde)
        chosen = f"{leftovers.PREFIX}{os.getpid()}-{secrets.token_hex(4)}" if name is None else _checked_name(name)
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
            raise explain.exists(chosen) from None
        except BaseException as error:
            if writer is not None:
                writer.close(unlink=True)  # an interrupt: nobody else knows of it
            if isinstance(error, OSError):
                raise explain.unusable(error, chosen) from None
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
        chosen_serde = _checked_serde(serde)
        wanted, store_id, ranks, uid = _expected(name, allow_uid)
        try:
            writer = native.Writer.recover(wanted, store_id, ranks, uid)
        except StoreNotFoundError as error:
            raise explain.not_found(error, wanted, isinstance(name, StoreHandle)) from None
        except WriterActiveError:
            raise WriterActiveError(f"the writer of store {explain.shown(wanted)} is alive") from None
        except LayoutMismatchError as error:
            raise explain.another_layout(error, wanted) from None
        except ForeignStoreError:
            raise explain.foreign(wanted, uid) from None
        except OSError as error:
            raise explain.unusable(error, wanted) from None
        except CorruptStoreError:
            raise CorruptStoreError(
                f"the tables of store {explain.shown(wanted)} contradict themselves",
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
            self._writer.spare = batch
            return ref
        except BaseException:
            batch.undo()
            self._writer.spare = batch
            raise

    def _put(self, batch: Batch, key: str, value: Any) -> ObjectRef:
        """`put`, as a part of a batch."""
        packed_key = _key(key)
        encoded = self._serde.encode(value)
        try:
            if encoded.fills:
                return self._fill(batch, packed_key, encoded)
            return trusted_ref(batch.put(packed_key, encoded.meta, encoded.nbytes, encoded.spans))
        except _ORDINARY as error:
            raise self._explain(batch, error, key, encoded.nbytes, len(packed_key) + len(encoded.meta)) from None
        except _BROKEN as error:
            if (wrong := explain.wrong_encoding(encoded)) is not None:
                raise wrong from error
            raise

    def _fill(self, batch: Batch, key: bytes, encoded: Any) -> ObjectRef:
        if (wrong := explain.wrong_encoding(encoded)) is not None:
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
            return ObjectExistsError(f"{error.default_message}: {explain.shown(key)}")
        if isinstance(error, ObjectTooLargeError):
            limit = self._writer.max_object_size
            return ObjectTooLargeError(f"{nbytes} bytes (and {extra} of key and metadata) exceed the limit of {limit}")
        return explain.full(batch.refusal(), error.resource, nbytes, extra)

    @contextmanager
    def reserve(self, key: str, template: Any) -> Iterator[Any]:
        """Give writable views laid out like `template`, to be filled in place: no copy at all.

        `template` is a tree whose tensors, arrays and `TensorSpec` stand for shapes and dtypes; the rest of it is
        stored as it is. A clean exit commits, without a lease: `get_cached(key)` hands the object out. An
        exception gives everything back. Raises as `put` does. The views must not be written to after the block.
        """
        packed_key = _key(key)
        layout = self._serde.layout(template)
        if (wrong := explain.wrong_layout(layout)) is not None:
            raise wrong
        batch = self._writer.batch()
        try:
            try:
                batch.begin(packed_key, layout.meta, layout.nbytes, hand_out=False)
            except _ORDINARY as error:
                raise self._explain(batch, error, key, layout.nbytes, len(packed_key) + len(layout.meta)) from None
            payload = batch.buffer()
            yield layout.build(payload if _hides_payload(self._serde) else hidden(payload))
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
            self._writer.spare = batch
            return ref
        except BaseException:
            batch.undo()
            self._writer.spare = batch
            raise

    def _hand_out(self, batch: Batch, key: str) -> ObjectRef:
        """`get_cached`, as a part of a batch."""
        try:
            return trusted_ref(batch.hit(_key(key)))
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(f"{error.default_message}: {explain.shown(key)}") from None
        except StoreFullError as error:
            raise explain.full(batch.refusal(), error.resource) from None

    def is_cached(self, key: str) -> bool:
        """Say whether `get_cached` would find `key`; changes no order and no count."""
        return self._writer.has(_key(key))

    def touch(self, key: str) -> bool:
        """Count a use of `key` without handing it out; False where it is absent."""
        return self._writer.touch(_key(key))

    @contextmanager
    def protect(self, keys: Iterable[str]) -> Iterator[None]:
        """Let none of `keys` be reclaimed inside the block, whether stored before it or during it."""
        if isinstance(keys, str):
            raise TypeError(f"keys must be an iterable of keys, not one key; write protect([{explain.shown(keys)}])")
        packed = [_key(key) for key in keys]
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
            return self._writer.cancel(_packed(ref))
        except StaleRefError as error:
            raise explain.stale(error, ref, self._handle.store_id) from None

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
        self._writer.retire(_int("rank", rank, 0, self._writer.n_readers - 1))

    def delete(self, key: str) -> bool:
        """Take `key` out: no new hand-outs, and the bytes are free when nobody holds them; False where absent."""
        return self._writer.delete(_key(key))

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
            return self._writer.has(_key(key))  # type: ignore[arg-type]
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


class ObjectStoreReader(_Closable):
    """One rank of a store: turns references into read-only views of the shared pages; made by `attach`.

    Thread-safe. Attach after a fork or in a spawned process, never before.
    """

    def __init__(
        self,
        reader: native.Reader | None = None,
        name: str = "",
        rank: int = 0,
        serde: ObjectSerde = _DEFAULT_SERDE,
        **options: Any,
    ) -> None:
        """Wrap an opened segment; callers use `attach`."""
        if not isinstance(reader, native.Reader) or options:
            raise TypeError("an ObjectStoreReader is made by ObjectStoreReader.attach(handle, rank)")
        self._reader = reader
        self._serde = serde
        self._hides = _hides_payload(serde)
        self._name = name
        self._rank = rank
        self._open = True
        self._pid = os.getpid()

    @classmethod
    def attach(
        cls,
        handle_or_name: StoreHandle | str,
        rank: int = 0,
        *,
        serde: ObjectSerde | None = None,
        allow_uid: int | None = None,
    ) -> "ObjectStoreReader":
        """Attach to a store as `rank`, from 0 to n_readers - 1; `serde` must be the writer's.

        A rank that attaches again starts anew: older leases are not for it. The store must be this user's and closed
        to others; with `allow_uid` it must be that user's, whatever its mode. Raises StoreNotFoundError,
        RankInUseError while a process (or views of a closed reader) has the rank, ValueError for a rank out of range,
        ForeignStoreError, LayoutMismatchError and CorruptStoreError for what is no intact store or not that of the
        handle, SharedMemoryError where shared memory cannot be used.
        """
        chosen_serde = _checked_serde(serde)
        name, store_id, ranks, uid = _expected(handle_or_name, allow_uid)
        rank = _int("rank", rank, 0, (ranks or native.MAX_READERS) - 1)
        try:
            reader = native.Reader.attach(name, rank, store_id, ranks, uid)
        except StoreNotFoundError as error:
            raise explain.not_found(error, name, isinstance(handle_or_name, StoreHandle)) from None
        except RankInUseError:
            raise explain.in_use(name, rank) from None
        except LayoutMismatchError as error:
            raise explain.another_layout(error, name) from None
        except ForeignStoreError:
            raise explain.foreign(name, uid) from None
        except OSError as error:
            raise explain.unusable(error, name) from None
        except ValueError as error:
            if isinstance(error, ShmStoreError):
                raise
            raise ValueError(
                f"store {explain.shown(name)} has no rank {rank}: it was created for fewer readers"
            ) from None
        return cls(reader, name, rank, chosen_serde)

    def __repr__(self) -> str:
        return f"<ObjectStoreReader {self._name!r} rank {self._rank}{'' if self._open else ' (closed)'}>"

    @property
    def name(self) -> str:
        """The store's POSIX name, without a slash."""
        return self._name

    @property
    def rank(self) -> int:
        """The rank attached as."""
        return self._rank

    @property
    def store_id(self) -> int:
        """The store's number, as in `ObjectRef.store_id`."""
        return self._reader.store_id

    def get(self, ref: ObjectRef, copy: bool = False) -> Any:
        """Return the object and acknowledge its lease: read-only views that keep it alive until the last has gone.

        The same reference may be read again, as long as the object is there. Writing to a tensor view is a
        segmentation fault: torch has no read-only tensors, the pages are. With `copy` the value is private and
        writable, and nothing is kept. Raises StaleRefError where the object has gone, or was never there.
        """
        try:
            meta, payload = self._reader.acquire(_packed(ref))
        except StaleRefError as error:
            raise explain.stale(error, ref, self._reader.store_id) from None
        if not self._hides:
            payload = hidden(payload)
        return self._serde.decode(meta, payload, copy=copy)

    def release(self, ref: ObjectRef) -> bool:
        """Acknowledge without reading; False where the lease is over, or its object has gone.

        StaleRefError for a reference whose object is here and never had it.
        """
        try:
            return self._reader.release(_packed(ref))
        except StaleRefError as error:
            raise explain.stale(error, ref, self._reader.store_id) from None

    def validate(self, ref: ObjectRef) -> bool:
        """Say whether `get` would find the object; changes nothing."""
        return self._reader.validate(_packed(ref))

    def stats(self) -> ReaderStats:
        """Return the rank's figures as of now."""
        return ReaderStats(**self._reader.stats())

    def close(self) -> None:
        """Make no more calls; views stay valid, and the rank is taken until the last of them has gone. Idempotent."""
        if self._open:
            self._reader.close()
            self._open = False
