"""`ObjectStoreWriter` puts and hands out."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shmstore.bindings import store as native
from shmstore.bindings.batch import NO_OPTIONS, Batch, put_options, waiting
from shmstore.bindings.claims import Claims
from shmstore.bindings.hidden import hidden
from shmstore.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    ShmStoreError,
    StaleRefError,
    StoreFullError,
    check_flags,
    shown,
)
from shmstore.namespaces import MARK, named, prefix_of, split
from shmstore.refs import ObjectRef, trusted_ref
from shmstore.serde.encode import array_address
from shmstore.serde.protocol import Encoded, Layout
from shmstore.store import diagnostics
from shmstore.store.arguments import (
    group_of,
    hides_payload,
    int_of,
    packed_key,
    packed_ref,
    seconds_of,
    several_of,
)
from shmstore.store.claims import Claiming
from shmstore.store.kinds import kind_stats, number_of
from shmstore.store.leases import LeasedRef, Reservation
from shmstore.store.opening import Openable
from shmstore.store.stats import StoreStats, tier_stats

__all__ = ["Batch", "ObjectStoreWriter", "put_options"]

_AT_ONCE = 0.0  # the default, which is not checked at each put
_ORDINARY = (StoreFullError, ObjectTooLargeError, ObjectExistsError)
"""Refusals of a put, to which the store can add more than their code."""


class ObjectStoreWriter(Claiming[LeasedRef], Openable):
    """A process that puts objects into a store and hands out references; made by `open`, `create` or `join`.

    A store has one writer, or as many as its `n_writers`.
    Thread-safe; bytes are copied with the GIL released. Close it, or use it as a context manager. A store with a chosen
    name that is not closed stays in /dev/shm, where `open` finds it.
    """

    # ---- putting and handing out

    def put(
        self,
        key: str,
        value: Any,
        *,
        hold: bool = False,
        lease: bool = True,
        group: int | None = None,
        kind: str | None = None,
        namespace: str | None = None,
        timeout: float = _AT_ONCE,
        unless_stored: bool = False,
    ) -> ObjectRef:
        """Store `value` under `key` with one copy, open one lease and return the reference to it.

        Without a `lease` no rank is awaited: readers `find` the object by its key, `get_cached` hands it out, and the
        store may evict it at any time. The reference has no lease, like that of `find`. `hold` and `group`, which say
        how long a lease waits and for whom, are then a TypeError.
        With `hold` only the writer ends the lease, by `cancel`; readers may read the reference any number of times.
        The lease waits for the ranks of `group`, and for all ranks by default; `assign_group` can name the group later.
        `kind` is a name for statistics and quotas, of up to 23 bytes; a store has up to 15. `namespace` (a model, a
        processor, a tenant) sets keys apart: a key is found only with its namespace, of up to 255 bytes.
        If the store is full, waits up to `timeout` seconds for room. Other threads go on meanwhile, and of several that
        wait any may be the first. Ctrl-C ends the wait, and so does `close`, with StoreClosedError.
        If in doubt, use 0, and send what is refused in another way: waiting helps only if readers release soon.
        With `unless_stored`, ObjectExistsError also for what another writer has stored, not only for what this one has.
        That spares space and guards nothing: two writers that put at the same time may still both store it.
        Raises ObjectExistsError, ObjectTooLargeError, StoreFullError (nothing is evicted then), and TypeError with the
        path for a value that the serializer refuses. A put that fails leaves the store as it was.
        """
        packed = packed_key(key, namespace)
        plain = hold is False and lease is True and unless_stored is False
        if plain and kind is None and group is None and timeout is _AT_ONCE:
            options = NO_OPTIONS
        else:
            check_flags(lease=lease)
            options = self._put_options(kind, group, hold, unless_stored, timeout, not lease)
        encoded = self._serde.encode(value)
        batch = self._writer.batch()
        try:
            try:
                ref = self._put(batch, packed, encoded, options)
            except _ORDINARY as error:
                raise self._explain(batch, error, packed, encoded, options) from None
            batch.record.keep = 1  # the commit; see bindings.batch
            self._writer.spare = batch if self._writer._w else None  # closed: a spare would keep the mapping
            return ref
        except BaseException:
            batch.undo()
            raise

    def _put_options(
        self,
        kind: str | None,
        group: int | None = None,
        hold: bool = False,
        unless_stored: bool = False,
        timeout: float = _AT_ONCE,
        unleased: bool = False,
    ) -> Any:
        """Return the checked arguments as a record; TypeError or ValueError for a wrong one."""
        check_flags(hold=hold, unless_stored=unless_stored)
        if unleased and (hold or group is not None):
            raise TypeError("lease=False excludes hold and group, which are about a lease: pass either")
        seconds = timeout if timeout is _AT_ONCE else seconds_of("timeout", timeout)  # a check takes 0.2 us
        whom = 0 if group is None else group_of(self._writer, group)
        options = put_options(number_of(self._writer, kind), whom, hold, unless_stored, unleased)
        return waiting(options, seconds) if seconds else options

    def _put(self, batch: Batch, packed: bytes, encoded: Encoded, options: Any, extra: bytes = b"") -> ObjectRef:
        """Do `put`, as a part of a batch; `extra` is stored after the object, and no reader gets it."""
        if not encoded.fills:
            return trusted_ref(batch.put(packed, encoded.meta, encoded.nbytes, encoded.spans, options, extra))
        batch.begin(packed, encoded.meta, encoded.nbytes, options, extra)
        batch.copy(encoded.spans)
        with memoryview(batch.buffer()) as payload:
            for offset, size, source in encoded.fills:
                self._serde.fill(payload[offset : offset + size], source)
        return trusted_ref(batch.commit())

    def _explain(
        self,
        batch: Batch,
        error: StoreFullError | ObjectTooLargeError | ObjectExistsError,
        packed: bytes,
        encoded: Encoded | Layout,
        options: Any,
        extra: bytes = b"",
    ) -> ShmStoreError:
        """Return the same error with details for the caller."""
        if isinstance(error, ObjectExistsError):
            namespace, key = split(packed)
            return ObjectExistsError(f"{error.default_message}: {named(key, namespace)}")
        nbytes, more = encoded.nbytes, len(packed) + len(encoded.meta) + len(extra)
        kind = {number: name for name, number in list(self._writer.kinds.items())}[options.kind]
        if isinstance(error, StoreFullError):
            waited = options.timeout / 1e9
            return diagnostics.full(self._writer, batch.refusal(), error.resource, nbytes, more, kind, waited)
        limit = self._writer.max_object_size
        what = f"{nbytes} bytes (and {more} of key and metadata) exceed"
        quota = None if kind is None else kind_stats(self._writer)[kind].quota
        if quota is None or quota >= limit:
            error = ObjectTooLargeError(f"{what} the limit of {limit}")
        else:
            error = ObjectTooLargeError(
                f"{what} the quota of kind {shown(kind)}, {quota} bytes",
                hint="raise the quota of this kind, or send this object inline",
            )
        if more > nbytes:
            error.hint = f"str and bytes are metadata: put long ones as a uint8 array (np.frombuffer); or {error.hint}"
        return error

    def begin(
        self,
        key: str,
        template: Any,
        *,
        kind: str | None = None,
        namespace: str | None = None,
        timeout: float = 0.0,
        unless_stored: bool = False,
    ) -> Reservation:
        """Take space for an object laid out like `template`, to be filled in place and committed later.

        `template` is a tree whose tensors, arrays and `TensorSpec` stand for shapes and dtypes; the rest of it is
        stored as it is. Other puts go on meanwhile. But the space is never evicted and the key is taken
        (ObjectExistsError, also from `put`) until the reservation ends, however long that takes. `clear` and `delete`
        do not end it. The other arguments are as in `put`. Raises as `put` does.
        """
        packed = packed_key(key, namespace)
        layout = self._serde.layout(template)
        options = self._put_options(kind, None, False, unless_stored, timeout, unleased=True)
        batch = self._writer.new_batch()
        try:
            try:
                batch.begin(packed, layout.meta, layout.nbytes, options)
            except _ORDINARY as error:
                raise self._explain(batch, error, packed, layout, options) from None
            payload = batch.buffer(owner=batch)
            value = layout.build(payload if hides_payload(self._serde) else hidden(payload))
            begun = Reservation(key, batch, value)
            return begun  # not the call itself, after which an interrupt would find this block over
        except BaseException:
            batch.undo()
            raise

    @contextmanager
    def reserve(
        self,
        key: str,
        template: Any,
        *,
        kind: str | None = None,
        namespace: str | None = None,
        timeout: float = 0.0,
        unless_stored: bool = False,
    ) -> Iterator[Any]:
        """Yield the writable views of what `begin` with these arguments begins.

        Write into the views, by `view[...] = array`; after `view = array` the object is stored as zeros.
        A clean exit commits without a lease; `get_cached(key)` then hands the object out. An exception rolls everything
        back. Raises as `put` does. Do not write to the views after the block.
        """
        begun = self.begin(key, template, kind=kind, namespace=namespace, timeout=timeout, unless_stored=unless_stored)
        try:
            yield begun.value
            if not self._is_inherited():
                begun.commit()
        except BaseException:
            begun.abort()
            raise

    def get_cached(
        self, key: str, *, hold: bool = False, group: int | None = None, namespace: str | None = None
    ) -> ObjectRef:
        """Hand out the object stored under `key`: open another lease and count a use.

        `hold`, `group` and `namespace` are as in `put`. Raises ObjectNotFoundError, and
        StoreFullError if every lease entry is taken by an open lease.
        """
        if hold is not False:
            check_flags(hold=hold)
        batch = self._writer.batch()
        try:
            ref = self._hand_out(batch, key, hold, namespace, group)
            batch.record.keep = 1
            self._writer.spare = batch if self._writer._w else None
            return ref
        except BaseException:
            batch.undo()
            raise

    def _hand_out(
        self, batch: Batch, key: str, hold: bool, namespace: str | None = None, group: int | None = None
    ) -> ObjectRef:
        """Do `get_cached`, as a part of a batch."""
        whom = 0 if group is None else group_of(self._writer, group)
        try:
            packed = batch.hit(packed_key(key, namespace), hold, whom)
        except StoreFullError as error:
            raise diagnostics.full(self._writer, batch.refusal(), error.resource) from None
        if packed is None:
            raise ObjectNotFoundError(f"{ObjectNotFoundError.default_message}: {named(key, namespace)}")
        return trusted_ref(packed)

    def _equals(self, ref: ObjectRef, value: Any) -> bool:
        """Return whether the object of `ref` is there, and is what `put` of this value would store: bit for bit."""
        encoded, packed, here = self._serde.encode(value), packed_ref(ref), self._writer.equals
        if not here(packed, encoded.meta, encoded.nbytes, encoded.spans):
            return False
        for offset, size, source in encoded.fills:
            filled = np.empty(size, np.uint8)
            self._serde.fill(filled.data, source)
            if not here(packed, encoded.meta, encoded.nbytes, [(offset, size, array_address(filled))]):
                return False
        return True

    def find(self, key: str, *, group: int | None = None, namespace: str | None = None) -> LeasedRef | None:
        """Hand out the object stored under `key` with a lease that only this writer ends, as `hold` does; or None.

        It counts as `get_cached`. Raises StoreFullError if every lease entry is taken by an open lease.
        """
        batch = self._writer.new_batch()
        try:
            return LeasedRef(self, self._hand_out(batch, key, True, namespace, group), batch)
        except ObjectNotFoundError:
            return None

    def _has(self, packed: bytes) -> bool:
        return self._writer.has(packed) > 0

    def _open_claims(self) -> Claims:
        return self._writer.claims()

    def assign_group(self, ref: ObjectRef, group: int) -> bool:
        """Let the lease of `ref` wait for the ranks of `group` only; return False if it is over already.

        For a request whose engine is chosen after its items were put: call it before the reference is sent. Reads that
        came before count. Once is enough, and the same group again does nothing. A lease without a group
        waits for all ranks. Raises ValueError if it waits for another group, and StaleRefError if the object is here
        and this writer never handed out this reference for it.
        """
        whom = group_of(self._writer, int_of("group", group, 0, native.MAX_GROUPS - 1))
        try:
            return self._writer.assign_group(packed_ref(ref), whom)
        except StaleRefError as error:
            raise diagnostics.stale(error, ref, self._handle.store_id, self.n_writers) from None
        except ValueError:
            raise ValueError(
                f"the lease of {ref!r} waits for another group than {group} already; get_cached(key, group=...) opens "
                "another lease"
            ) from None

    def hold(self, ref: ObjectRef) -> LeasedRef:
        """Keep the lease of `ref` open until the returned object ends it, however often it is read.

        The lease survives `recover`; the successor ends it by `cancel` or `cancel_all`. An interrupt ends it. Raises
        StaleRefError if the lease has ended, and ObjectBusyError if the object is that of another writer, which was
        stopped while it asked who holds it: the lease is still there, so try again.
        """
        batch = self._writer.new_batch()
        leased = LeasedRef(self, ref, batch)  # before the hold, so that an interrupt leaves none
        try:
            if batch.hold(packed_ref(ref)):
                return leased
        except StaleRefError as error:
            raise diagnostics.stale(error, ref, self._handle.store_id, self.n_writers) from None
        raise StaleRefError(
            f"the lease of {ref!r} has ended", hint="hold a reference before it is sent, or put with hold=True"
        )

    def validate(self, ref: ObjectRef, key: str | None = None, *, namespace: str | None = None) -> bool:
        """Return whether the object of `ref` is stored, and if a key is given, under that key and namespace.

        It changes nothing.

        Raises StaleRefError if the object is here and this reference was never handed out for it.
        """
        try:
            return self._writer.validate(packed_ref(ref), None if key is None else packed_key(key, namespace))
        except StaleRefError as error:
            raise diagnostics.stale(error, ref, self._handle.store_id, self.n_writers) from None

    def is_cached(self, key: str, *, namespace: str | None = None) -> bool:
        """Return whether `get_cached` would find `key`; changes neither order nor counts."""
        return self._writer.has(packed_key(key, namespace)) > 0

    def touch(self, key: str, *, namespace: str | None = None) -> bool:
        """Count a use of `key` without handing it out; return False if it is absent."""
        return self._writer.touch(packed_key(key, namespace))

    @contextmanager
    def protect(self, keys: Iterable[str], *, namespace: str | None = None) -> Iterator[None]:
        """Keep `keys` from being reclaimed inside the block, whether they are stored before it or in it.

        Of another writer's objects it keeps those that are there when the block begins; each takes a lease entry.
        Raises StoreFullError, before the block, if there are too few.
        """
        packed = [packed_key(key, namespace) for key in several_of("keys", keys, "keys")]
        batch = self._writer.batch()
        try:
            try:
                batch.protect(packed)
            except StoreFullError as error:
                raise diagnostics.full(self._writer, batch.refusal(), error.resource) from None
            yield
        finally:
            batch.undo()

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
            raise diagnostics.stale(error, ref, self._handle.store_id, self.n_writers) from None

    def cancel_all(self) -> int:
        """End every open lease and return their number, including complete ones not noticed yet.

        `open` does this. Call it after `recover` if the requests of the dead writer died with it. No process knows a
        reference that was handed out but never sent, so its lease would keep its object forever. What another thread
        hands out meanwhile stays.
        """
        return self._writer.cancel_all()

    def retire(self, rank: int) -> None:
        """Stop expecting `rank` in this writer's leases until it attaches: it has never attached or will not come back.

        Each lease of this writer so far is over for the rank, for good, and until the rank attaches none waits for it.
        A reader that is attached as this rank is not stopped. Its views stay valid, and it may still `get` what is
        there. But objects that it has not read may be evicted, so its references may become stale. Leases opened after
        the rank has attached again wait for it. Another writer's leases may keep this one's objects: that writer must
        retire the rank for its own.
        """
        self._writer.retire(int_of("rank", rank, 0, self._writer.n_readers - 1))

    def delete(self, key: str, *, namespace: str | None = None) -> bool:
        """Remove `key`: no new hand-outs; the bytes are free when nobody holds them. Return False if it is absent."""
        return self._writer.delete(packed_key(key, namespace))

    def clear(self, *, namespace: str | None = None) -> None:
        """Delete every key of all namespaces, or of `namespace` only. Ids continue.

        Calls of other threads go on meanwhile; what they store then stays.
        """
        self._writer.clear(b"" if namespace is None else prefix_of(namespace))

    # ---- inspecting

    def keys(self, *, namespace: str | None = None) -> list[str]:
        """Return the keys of `namespace`, or those without a namespace, that can be handed out, oldest object first."""
        prefix = b"" if namespace is None else prefix_of(namespace)
        return [key for of, key in self._writer.key_list(prefix) if of == namespace]

    def namespaces(self) -> list[str]:
        """Return the namespaces that have keys, the one of the oldest object first."""
        return list(dict.fromkeys(of for of, _ in self._writer.key_list(MARK) if of is not None))

    def __len__(self) -> int:
        return self._writer.count()  # with the keys of all namespaces

    def __bool__(self) -> bool:
        return True  # a writer of an empty store is still a writer

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key != "" and self.is_cached(key)

    def stats(self) -> StoreStats:
        """Return the store's current figures."""
        figures = self._writer.stats()
        return StoreStats(**figures | {"tier": tier_stats(figures["tier"])}, kinds=kind_stats(self._writer))

    def check_valid(self) -> None:
        """Check every invariant of the segment and the writer's memory; CorruptStoreError at the first broken one."""
        self._writer.check_valid()
