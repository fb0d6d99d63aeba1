"""`ObjectStoreWriter` puts and hands out."""

import logging
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from shmstore.bindings import store as native
from shmstore.bindings.batch import Batch
from shmstore.bindings.hidden import hidden
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
from shmstore.scopes import MARK, named, prefix_of
from shmstore.serde import ObjectSerde
from shmstore.store import leftovers, refusals
from shmstore.store.arguments import (
    DEFAULT_SERDE,
    Closable,
    checked_name,
    checked_serde,
    expected_store,
    group_of,
    hides_payload,
    int_of,
    packed_key,
    packed_ref,
    store_options,
)
from shmstore.store.events import LOG_BYTES, StoreEvent, events_from, stored_events
from shmstore.store.holds import LeasedRef, Protection
from shmstore.store.kinds import checked_quotas, kind_stats, number_of, set_quotas
from shmstore.store.stats import StoreStats, tier_stats

__all__ = ["Batch", "ObjectStoreWriter"]

_log = logging.getLogger(__name__)
_BROKEN = (AttributeError, OverflowError, TypeError, ValueError)
"""Errors that a serializer's mistake can cause; it is checked only after one, so that other puts pay nothing."""
_ORDINARY = (StoreFullError, ObjectTooLargeError, ObjectExistsError)
"""Refusals of a put, to which the store can add more than their code."""


class ObjectStoreWriter(Closable):
    """A process that puts objects into a store and hands out references; made by `open`, `create` or `join`.

    A store has one writer, or as many as its `n_writers`.
    Thread-safe; bytes are copied with the GIL released. Close it, or use it as a context manager. A store with a chosen
    name that is not closed stays in /dev/shm, where `open` finds it.
    """

    def __init__(
        self, writer: native.Writer | None = None, name: str = "", serde: ObjectSerde = DEFAULT_SERDE, **options: Any
    ) -> None:
        """Wrap an opened segment; callers use `open`, `create` or `recover`."""
        if not isinstance(writer, native.Writer) or options:
            raise TypeError(
                "an ObjectStoreWriter is made by ObjectStoreWriter.open(...), .create(...) or .recover(name)"
            )
        self._writer = writer
        self._serde = serde
        self._handle = StoreHandle(name, writer.store_id, writer.n_readers)
        self._protections: list[weakref.ref[Protection]] = []
        self._recovered = 0
        self._open = True
        self._pid = os.getpid()

    @classmethod
    def create(
        cls,
        name: str | None = None,
        *,
        capacity: int,
        n_readers: int,
        groups: Sequence[int] | None = None,
        n_writers: int = 1,
        max_object_size: int | None = None,
        max_objects: int | None = None,
        eviction: Literal["clock", "fifo"] = "clock",
        prefault: bool = False,
        huge_pages: bool = False,
        checksums: bool = False,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
    ) -> "ObjectStoreWriter":
        """Create a store and be its writer; all its space is reserved before this returns.

        `capacity` is in bytes, rounded up to 64; ranks 0 to `n_readers` - 1 attach. With `name` None the name is unique
        and the store ends with its process: a normal exit removes it, and after a kill the next `create` does. A store
        that `open` must find later needs a name.
        `groups` are the numbers of ranks of each group, such as [4, 4] for two replicas of an engine: ranks 0 to 3 are
        group 0. A hand-out can wait for one group only. By default all ranks are one group.
        With `n_writers` above 1, as many processes share the store: this one is writer 0, and the others `join`. Each
        has an arena of its own, with this capacity and number of objects. All find the objects of all by key, so each
        is stored once.
        An object (key, metadata and tensors) takes at most `max_object_size` bytes (default: the capacity). At most
        `max_objects` are stored at a time (default: one per 16 KiB of capacity, from 256 to 1,048,576). `eviction`
        "clock" spares objects used since they were last considered; "fifo" spares none.

        `prefault` maps every page now; otherwise the first put into each page is many times slower. `huge_pages` asks
        for 2 MiB pages, as far as there are any. `checksums` computes a CRC-32C of each object at its commit, for
        `shmstore verify`.

        `quotas` limits kinds of objects, each to a fraction of the capacity (a float) or to a number of bytes (an int).
        A put of a kind that has filled its quota evicts objects of its own kind. Raises StoreExistsError,
        StoreSpaceError if /dev/shm is too small, SharedMemoryError if it cannot be used, and ValueError for numbers out
        of range.
        """
        options = store_options(
            capacity=capacity,
            n_readers=n_readers,
            groups=groups,
            n_writers=n_writers,
            max_object_size=max_object_size,
            max_objects=max_objects,
            eviction=eviction,
            prefault=prefault,
            huge_pages=huge_pages,
            checksums=checksums,
        )
        chosen_serde = checked_serde(serde)
        chosen = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}" if name is None else checked_name(name)
        limits = checked_quotas(quotas, options.capacity)
        return cls._create(chosen, options, chosen_serde, limits, disposable=name is None)

    @classmethod
    def _create(
        cls,
        name: str,
        options: native.Options,
        serde: ObjectSerde,
        quotas: Mapping[str, int] | None,
        disposable: bool = False,
    ) -> "ObjectStoreWriter":
        leftovers.remove_dead()
        writer = None
        try:
            writer = native.Writer.create(name, options, disposable)
            if quotas:
                set_quotas(writer, quotas)
            _log.debug("created store %s: %d bytes for %d readers", name, options.capacity, options.n_readers)
            made = cls(writer, name, serde)
            if disposable:
                leftovers.close_at_exit(made)
            return made  # not the call itself: its value is not yet the caller's, and this block would be over
        except StoreExistsError:
            raise refusals.exists(name) from None
        except BaseException as error:
            if writer is not None:
                writer.close(unlink=True)  # an interrupt: nobody else knows of it
            if isinstance(error, OSError):
                raise refusals.unusable(error, name) from None
            raise

    @classmethod
    def join(
        cls,
        store: str | StoreHandle,
        index: int | None = None,
        *,
        keep_leases: bool = False,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
        allow_uid: int | None = None,
    ) -> "ObjectStoreWriter":
        """Become one of the writers of a store that was created with `n_writers`.

        The writer takes the arena of that number, or the first one without a living writer, new or left by a dead one.
        What is in the arena comes along, and `recovered` is the number of its objects. Its leases end, because the
        requests of the dead writer died with it; `keep_leases` keeps them. `quotas` and `allow_uid` are those of
        `recover`, and so are the errors. Raises WriterActiveError if the arena, or each of them, has a living writer,
        and ValueError if there is no arena of that number.
        """
        chosen_serde = checked_serde(serde)
        wanted, store_id, ranks, uid = expected_store(store, allow_uid, "store")
        arena = native.ANY_ARENA if index is None else int_of("index", index, 0, native.MAX_WRITERS - 1)
        by_handle = isinstance(store, StoreHandle)
        made = cls._recover(wanted, chosen_serde, store_id, ranks, uid, quotas=quotas, by_handle=by_handle, arena=arena)
        if leftovers.is_disposable(wanted):
            leftovers.close_at_exit(made)
        return made._without_leases(keep_leases)

    @classmethod
    def recover(
        cls,
        name: str | StoreHandle,
        *,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
        allow_uid: int | None = None,
    ) -> "ObjectStoreWriter":
        """Take over the store of a writer that is dead or closed: every committed object, its key and open leases.

        Objects that were not committed are dropped. With `quotas`, as for `create`, these replace the store's quotas; a
        kind that exceeds its new one shrinks at its next put. The store must be this user's and closed to others; with
        `allow_uid` it must be that user's, whatever its mode. Raises WriterActiveError while a writer lives,
        StoreNotFoundError, ForeignStoreError, CorruptStoreError if it is damaged, LayoutMismatchError if it is not a
        store of this version or not the store of the handle, and SharedMemoryError if shared memory cannot be used.
        """
        chosen_serde = checked_serde(serde)
        wanted, store_id, ranks, uid = expected_store(name, allow_uid, "name")
        by_handle = isinstance(name, StoreHandle)
        return cls._recover(wanted, chosen_serde, store_id, ranks, uid, quotas=quotas, by_handle=by_handle)

    @classmethod
    def _recover(
        cls,
        name: str,
        serde: ObjectSerde,
        store_id: int = native.ANY_STORE,
        ranks: int = 0,
        uid: int = native.OWN_UID,
        *,
        options: native.Options | None = None,
        quotas: Mapping[str, float] | None = None,
        by_handle: bool = False,
        arena: int | None = None,
    ) -> "ObjectStoreWriter":
        try:
            writer = native.Writer.recover(name, store_id, ranks, uid, options, arena)
        except StoreNotFoundError as error:
            raise refusals.not_found(error, name, by_handle) from None
        except WriterActiveError:
            raise refusals.active(name, arena, options) from None
        except LayoutMismatchError as error:
            if options is not None and error._code == native.OTHER_OPTIONS:
                raise refusals.other_options(name, options) from None
            raise refusals.another_layout(error, name) from None
        except ForeignStoreError:
            raise refusals.foreign(name, uid) from None
        except OSError as error:
            raise refusals.unusable(error, name) from None
        except CorruptStoreError:
            raise CorruptStoreError(
                f"the tables of store {shown(name)} contradict themselves",
                hint="`shmstore verify NAME` says what is wrong; `shmstore gc --yes --force NAME` removes it",
            ) from None
        except ValueError:
            raise refusals.there_is_no("arena", arena, name) from None
        try:
            if (limits := checked_quotas(quotas, writer.stats()["capacity"])) is not None:
                set_quotas(writer, limits)
            made = cls(writer, name, serde)
            made._recovered = writer.count()
            if arena is None or made._recovered:
                _log.info("recovered store %s with %d objects", name, made._recovered)
            else:
                _log.debug("joined store %s as writer %d", name, made.index)
            return made  # as in `create`
        except BaseException:
            writer.close(unlink=False)  # another call can recover it
            raise

    @classmethod
    def open(
        cls,
        name: str,
        *,
        capacity: int,
        n_readers: int,
        groups: Sequence[int] | None = None,
        n_writers: int = 1,
        max_object_size: int | None = None,
        max_objects: int | None = None,
        eviction: Literal["clock", "fifo"] = "clock",
        prefault: bool = False,
        huge_pages: bool = False,
        checksums: bool = False,
        quotas: Mapping[str, float] | None = None,
        serde: ObjectSerde | None = None,
        on_mismatch: Literal["recreate", "raise"] = "recreate",
        keep: bool = True,
        keep_leases: bool = False,
    ) -> "ObjectStoreWriter":
        """Take over the store that a dead or closed writer left under this name, or create it.

        This is the call for a process that restarts. With `n_writers` above 1 it is the call for every one of them: it
        takes the first arena without a living writer, and waits while another one creates the store. The options are
        those of `create`. If the store that is there was created with the same options, all its objects come along;
        `recovered` is their number. Its leases end, because the requests of the dead writer died with it;
        `keep_leases` keeps them. With `keep` False a store that this call creates ends with its processes, as one with
        a generated name does; its name must begin with "shmstore-".

        A store with other options, of another version or damaged is removed and created again, with a warning in the
        log. With `on_mismatch` "raise" it stays as it was, and LayoutMismatchError or CorruptStoreError says what is
        wrong. A file that is not a store is never removed: LayoutMismatchError.
        A store is never removed while a writer lives. Raises LayoutMismatchError then if the options differ and
        `n_writers`, there or here, is above 1; else WriterActiveError, unless an arena is free. Raises
        ForeignStoreError, StoreSpaceError, SharedMemoryError and ValueError like `recover` and `create`.
        """
        options = store_options(
            capacity=capacity,
            n_readers=n_readers,
            groups=groups,
            n_writers=n_writers,
            max_object_size=max_object_size,
            max_objects=max_objects,
            eviction=eviction,
            prefault=prefault,
            huge_pages=huge_pages,
            checksums=checksums,
        )
        limits = checked_quotas(quotas, options.capacity)
        chosen, chosen_serde = checked_name(name), checked_serde(serde)
        arena = None if options.n_writers == 1 else native.ANY_ARENA
        if on_mismatch not in ("recreate", "raise"):
            raise ValueError(f"on_mismatch must be 'recreate' or 'raise', not {shown(on_mismatch)}")
        if not keep and not chosen.startswith(PREFIX):
            raise ValueError(f"the name of a store that is not kept must begin with {PREFIX!r}, not be {shown(chosen)}")
        while True:  # again if another process has changed meanwhile what the name names
            seen = leftovers.look(chosen)
            try:
                made = cls._recover(chosen, chosen_serde, options=options, quotas=quotas, arena=arena)
            except StoreNotFoundError as error:
                if error._code == native.CREATING:
                    native.await_creation(chosen)
                    continue
                try:
                    return cls._create(chosen, options, chosen_serde, limits, disposable=not keep)
                except (StoreExistsError, StoreNotFoundError, WriterActiveError):
                    continue
            except (LayoutMismatchError, CorruptStoreError) as error:
                leftovers.make_room(chosen, seen, error, on_mismatch == "raise", options)
                continue
            if not keep:
                leftovers.close_at_exit(made)
            return made._without_leases(keep_leases)

    def _without_leases(self, keep: bool) -> "ObjectStoreWriter":
        try:
            if not keep:
                self.cancel_all()
            return self
        except BaseException:
            self.close(unlink=False)  # another call can take it over
            raise

    def __repr__(self) -> str:
        return f"<ObjectStoreWriter {self._handle.name!r}{'' if self._open else ' (closed)'}>"

    @property
    def handle(self) -> StoreHandle:
        """The handle with which readers attach; small and picklable."""
        return self._handle

    @property
    def name(self) -> str:
        """The store's POSIX name, without a slash."""
        return self._handle.name

    @property
    def index(self) -> int:
        """The number of its arena: 0 for the writer that created the store."""
        return self._writer.arena

    @property
    def n_writers(self) -> int:
        """How many arenas the store has."""
        return self._writer.n_writers

    @property
    def recovered(self) -> int:
        """How many objects came along when this writer took the store over; 0 after `create`."""
        return self._recovered

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of ranks of each group."""
        return self._writer.groups

    # ---- putting and handing out

    def put(
        self,
        key: str,
        value: Any,
        *,
        hold: bool = False,
        group: int | None = None,
        kind: str | None = None,
        scope: str | None = None,
    ) -> ObjectRef:
        """Store `value` under `key` with one copy, open one lease and return the reference to it.

        With `hold` only the writer ends the lease, by `cancel`; readers may read the reference any number of times.
        The lease waits for the ranks of `group`, and for all ranks by default; `address` can name the group later.
        `kind` is a name for statistics and quotas, of up to 23 bytes; a store has up to 15. `scope` (a model, a
        processor, a tenant) sets keys apart: a key is found only with its scope, of up to 255 bytes.
        Raises ObjectExistsError, ObjectTooLargeError, StoreFullError (nothing is evicted then), TypeError with the path
        for a value that the serializer refuses, and SerdeError if the caller's own serializer is wrong. A put that
        fails leaves the store as it was.
        """
        batch = self._writer.batch()
        try:
            ref = self._put(batch, key, value, hold, b"", kind, scope, group)
            batch.record.keep = 1  # the commit; see bindings.batch
            if self._writer._w:  # else it was closed meanwhile, and a spare would keep the mapping
                self._writer.spare = batch
            return ref
        except BaseException:
            batch.undo()
            raise

    def _put(
        self,
        batch: Batch,
        key: str,
        value: Any,
        hold: bool,
        extra: bytes = b"",
        kind: str | None = None,
        scope: str | None = None,
        group: int | None = None,
    ) -> ObjectRef:
        """Do `put`, as a part of a batch; `extra` is stored behind the object, and no reader gets it."""
        packed = packed_key(key, scope)
        number = 0 if kind is None else number_of(self._writer, kind)
        whom = 0 if group is None else group_of(self._writer, group)
        encoded = self._serde.encode(value)
        try:
            if encoded.fills:
                return self._fill(batch, packed, encoded, hold, extra, number, whom)
            return trusted_ref(
                batch.put(packed, encoded.meta, encoded.nbytes, encoded.spans, hold, extra, number, whom)
            )
        except _ORDINARY as error:
            more = len(packed) + len(encoded.meta) + len(extra)
            raise self._explain(batch, error, named(key, scope), encoded.nbytes, more, kind) from None
        except _BROKEN as error:
            if (wrong := refusals.wrong_encoding(encoded)) is not None:
                raise wrong from error
            raise

    def _fill(
        self, batch: Batch, key: bytes, encoded: Any, hold: bool, extra: bytes, kind: int, group: int
    ) -> ObjectRef:
        if (wrong := refusals.wrong_encoding(encoded)) is not None:
            raise wrong  # C does not see the fills: one might get less than its size
        batch.begin(key, encoded.meta, encoded.nbytes, extra=extra, kind=kind)
        batch.copy(encoded.spans)
        with memoryview(batch.buffer()) as payload:
            for offset, size, source in encoded.fills:
                self._serde.fill(payload[offset : offset + size], source)
        return trusted_ref(batch.commit(hold, group))

    def _explain(
        self,
        batch: Batch,
        error: StoreFullError | ObjectTooLargeError | ObjectExistsError,
        key: str,
        nbytes: int,
        extra: int,
        kind: str | None,
    ) -> Exception:
        """Return the same error with details for the caller."""
        if isinstance(error, ObjectExistsError):
            return ObjectExistsError(f"{error.default_message}: {key}")
        if isinstance(error, ObjectTooLargeError):
            limit = self._writer.max_object_size
            what = f"{nbytes} bytes (and {extra} of key and metadata) exceed"
            quota = None if kind is None else kind_stats(self._writer)[kind].quota
            if quota is None or quota >= limit:
                return ObjectTooLargeError(f"{what} the limit of {limit}")
            return ObjectTooLargeError(
                f"{what} the quota of kind {shown(kind)}, {quota} bytes",
                hint="raise the quota of this kind, or send this object inline",
            )
        return refusals.full(self._writer, self.name, batch.refusal(), error.resource, nbytes, extra, kind)

    @contextmanager
    def reserve(self, key: str, template: Any, *, kind: str | None = None, scope: str | None = None) -> Iterator[Any]:
        """Yield writable views laid out like `template`, to be filled in place without a copy.

        `template` is a tree whose tensors, arrays and `TensorSpec` stand for shapes and dtypes; the rest of it is
        stored as it is. A clean exit commits without a lease; `get_cached(key)` then hands the object out. An exception
        rolls everything back. `kind` and `scope` are as in `put`. Raises as `put` does. Do not write to the views after
        the block.
        """
        packed = packed_key(key, scope)
        layout = self._serde.layout(template)
        if (wrong := refusals.wrong_layout(layout)) is not None:
            raise wrong
        number = 0 if kind is None else number_of(self._writer, kind)
        batch = self._writer.batch()
        try:
            try:
                batch.begin(packed, layout.meta, layout.nbytes, hand_out=False, kind=number)
            except _ORDINARY as error:
                extra = len(packed) + len(layout.meta)
                raise self._explain(batch, error, named(key, scope), layout.nbytes, extra, kind) from None
            payload = batch.buffer()
            yield layout.build(payload if hides_payload(self._serde) else hidden(payload))
            batch.commit()
            batch.record.keep = 1
        except BaseException:
            batch.undo()
            raise

    def get_cached(
        self, key: str, *, hold: bool = False, group: int | None = None, scope: str | None = None
    ) -> ObjectRef:
        """Hand out the object stored under `key`: open another lease and count a use.

        `hold`, `group` and `scope` are as in `put`. A `Protection` of this key ends. Raises ObjectNotFoundError, and
        StoreFullError if every lease entry is taken by an open lease.
        """
        batch = self._writer.batch()
        try:
            ref = self._hand_out(batch, key, hold, scope, group)
            if self._protections:
                self._unprotect([key], scope)
            batch.record.keep = 1
            if self._writer._w:
                self._writer.spare = batch
            return ref
        except BaseException:
            batch.undo()
            raise

    def _hand_out(
        self, batch: Batch, key: str, hold: bool, scope: str | None = None, group: int | None = None
    ) -> ObjectRef:
        """Do `get_cached`, as a part of a batch."""
        whom = 0 if group is None else group_of(self._writer, group)
        try:
            ref = trusted_ref(batch.hit(packed_key(key, scope), hold, whom))
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError(f"{error.default_message}: {named(key, scope)}") from None
        except StoreFullError as error:
            raise refusals.full(self._writer, self.name, batch.refusal(), error.resource) from None
        return ref

    def _unprotect(self, keys: Iterable[str], scope: str | None = None) -> None:
        """End the protections of keys that a lease keeps now."""
        for protection in [found() for found in self._protections]:
            if protection is not None:
                for key in keys:
                    protection.discard(key, scope=scope)

    def address(self, ref: ObjectRef, group: int) -> bool:
        """Let the lease of `ref` wait for the ranks of `group` only; return False if it is over already.

        For a request whose engine is chosen after its items were put: call it before the reference is sent. Reads that
        came before count. Once is enough, and the same group again does nothing. A lease that is addressed to no group
        waits for all ranks. Raises ValueError if it waits for another group, and StaleRefError if the object is here
        and this writer never handed out this reference for it.
        """
        whom = group_of(self._writer, int_of("group", group, 0, native.MAX_GROUPS - 1))
        try:
            return self._writer.address(packed_ref(ref), whom)
        except StaleRefError as error:
            raise refusals.stale(error, ref, self._handle.store_id, self.n_writers) from None
        except ValueError:
            raise ValueError(
                f"the lease of {ref!r} waits for {refusals.group_of_lease(self._writer, self.name, ref)} already, not "
                f"for group {group}; "
                "get_cached(key, group=...) opens another lease"
            ) from None

    def hold(self, ref: ObjectRef) -> LeasedRef:
        """Keep the lease of `ref` open until the returned object ends it, however often it is read.

        The lease survives `recover`; the successor ends it by `cancel` or `cancel_all`. An interrupt ends it. Raises
        StaleRefError if the lease has ended.
        """
        batch = self._writer.new_batch()
        leased = LeasedRef(self, ref, batch)  # before the hold, so that an interrupt leaves none
        try:
            if batch.hold(packed_ref(ref)):
                return leased
        except StaleRefError as error:
            raise refusals.stale(error, ref, self._handle.store_id, self.n_writers) from None
        raise StaleRefError(
            f"the lease of {ref!r} has ended", hint="hold a reference before it is sent, or put with hold=True"
        )

    def validate(self, ref: ObjectRef, key: str | None = None, *, scope: str | None = None) -> bool:
        """Return whether the object of `ref` is stored, and if a key is given, under that key and scope.

        It changes nothing.

        Raises StaleRefError if the object is here and this reference was never handed out for it.
        """
        try:
            return self._writer.validate(packed_ref(ref), None if key is None else packed_key(key, scope))
        except StaleRefError as error:
            raise refusals.stale(error, ref, self._handle.store_id, self.n_writers) from None

    def is_cached(self, key: str, *, scope: str | None = None) -> bool:
        """Return whether `get_cached` would find `key`; changes neither order nor counts."""
        return self._writer.has(packed_key(key, scope)) > 0

    def touch(self, key: str, *, scope: str | None = None) -> bool:
        """Count a use of `key` without handing it out; return False if it is absent."""
        return self._writer.touch(packed_key(key, scope))

    @contextmanager
    def protect(self, keys: Iterable[str], *, scope: str | None = None) -> Iterator[None]:
        """Keep `keys` from being reclaimed inside the block, whether they are stored before it or in it."""
        if isinstance(keys, str):
            raise TypeError(f"keys must be an iterable of keys, not one key; write protect([{shown(keys)}])")
        packed = [packed_key(key, scope) for key in keys]
        batch = self._writer.batch()
        try:
            batch.protect(packed)
            yield
        finally:
            batch.undo()

    def protection(self, limit: int = 64) -> Protection:
        """Return an object with `add(key)`, `discard(key)` and `end()`, which protects up to `limit` keys at a time.

        It is for engines that find an item in one call and take it in a later one; `protect` is for one block of code.
        """
        return Protection(self, int_of("limit", limit, 1, native.MAX_OBJECTS))

    # ---- releasing

    def cancel(self, ref: ObjectRef) -> bool:
        """End a lease whose request was aborted; return False if it is over already.

        It is safe after the readers have read, and twice. The lease no longer keeps the object, but until it is evicted
        a `get` still finds it. Raises StaleRefError if the object is here and this writer never handed out this
        reference for it.
        """
        try:
            return self._writer.cancel(packed_ref(ref))
        except StaleRefError as error:
            raise refusals.stale(error, ref, self._handle.store_id, self.n_writers) from None

    def cancel_all(self) -> int:
        """End every open lease and return their number, including complete ones not noticed yet.

        `open` does this. Call it after `recover` if the requests of the dead writer died with it. No process knows a
        reference that was handed out but never sent, so its lease would keep its object forever.
        """
        return self._writer.cancel_all()

    def retire(self, rank: int) -> None:
        """Stop expecting `rank`, which has never attached or will not come back, until it attaches.

        Every lease so far is over for it, for good, and until it attaches no lease waits for it. A reader that is
        attached as this rank is not stopped. Its views stay valid, and it may still `get` what is there. But objects
        that it has not read may be evicted, so its references may become stale. Leases opened after the rank has
        attached again wait for it.
        """
        self._writer.retire(int_of("rank", rank, 0, self._writer.n_readers - 1))

    def delete(self, key: str, *, scope: str | None = None) -> bool:
        """Remove `key`: no new hand-outs; the bytes are free when nobody holds them. Return False if it is absent."""
        return self._writer.delete(packed_key(key, scope))

    def clear(self, *, scope: str | None = None) -> None:
        """Delete every key, with or without a scope; if `scope` is given, every key of that scope. Ids continue."""
        self._writer.clear(b"" if scope is None else prefix_of(scope))

    # ---- inspecting

    def keys(self, *, scope: str | None = None) -> list[str]:
        """Return the keys of `scope`, or those without a scope, that can be handed out, oldest object first."""
        if scope is None:
            return [key for key in self._writer.key_list(b"") if type(key) is str]
        return [key[1] for key in self._writer.key_list(prefix_of(scope))]

    def scopes(self) -> list[str]:
        """Return the scopes that have keys, the one of the oldest object first."""
        return list(dict.fromkeys(key[0] for key in self._writer.key_list(MARK)))

    def __len__(self) -> int:
        return self._writer.count()  # with the keys of all scopes

    def __bool__(self) -> bool:
        return True  # a writer of an empty store is still a writer

    def __contains__(self, key: object) -> bool:
        try:
            return self._writer.has(packed_key(key)) > 0  # type: ignore[arg-type]
        except (TypeError, StoreClosedError):
            if isinstance(key, str):
                raise
            return False
        except ValueError:
            return False  # a store cannot have such a key

    def stats(self) -> StoreStats:
        """Return the store's current figures."""
        figures = self._writer.stats()
        return StoreStats(**figures | {"tier": tier_stats(figures["tier"])}, kinds=kind_stats(self._writer))

    def track_events(self, log_bytes: int = LOG_BYTES) -> None:
        """Record events from now on, in a log of `log_bytes` bytes (at least 128 KiB); with 0 stop, and forget them.

        A full log drops its oldest events. A log that is there already is kept. Until it is called, or `events`, a
        store records nothing.
        """
        self._writer.track_events(int_of("log_bytes", log_bytes, 0, native.MAX_CAPACITY))

    def events(self, position: int | None = None) -> Iterator[StoreEvent]:
        """Return an iterator of the events from `position` on, which ends when there are no more; for routers.

        A listener keeps the `position` of the last event that it has used, and calls again with it. Any number of
        listeners may do so. Without a position it yields a put for each stored object, oldest first, with the position
        at which they hold; use all of them before you go on from there.
        Raises EventsLostError if the log does not have the next event any more, and ValueError for a position that no
        event has had.
        """
        self.track_events()
        if position is None:
            return stored_events(self._writer)
        return events_from(self._writer.events, int_of("position", position, 0, 2**63 - 1))

    def track_evictions(self, on: bool = True) -> None:
        """Record the keys that leave the store from now on, for `take_evicted`; or stop, and forget them.

        The log stays for those who use `events`; `track_events(0)` ends it.
        """
        if not on:
            self._writer.position = -1
        elif self._writer.position < 0:
            self._writer.position = self._writer.track_events(LOG_BYTES)

    def take_evicted(self) -> list[str | tuple[str, str]]:
        """Return the keys evicted or deleted since the last call, in that order; for caches beside the store.

        A key of a scope comes as a pair of the scope and the key. Raises EventsLostError once if the log was too small
        for all that has happened.
        """
        while True:
            before = self._writer.position
            keys, position = self._writer.evicted()
            if before == self._writer.position:  # else another thread or a signal handler has taken them
                self._writer.position = position
                return keys

    def check_valid(self) -> None:
        """Check every invariant of the segment and the writer's memory; CorruptStoreError at the first broken one."""
        self._writer.check_valid()

    def close(self, unlink: bool = True) -> None:
        """Close the store, and with `unlink` remove its name; idempotent.

        Readers keep what they have; views stay valid. Without `unlink` the segment stays for `open`.
        """
        if self._open:
            self._writer.close(unlink)
            self._open = False
            _log.debug("closed store %s%s", self._handle.name, "" if unlink else ", which stays")
