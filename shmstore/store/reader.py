"""`ObjectStoreReader` turns references into read-only views."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shmstore.bindings import store as native
from shmstore.bindings.claims import Claims
from shmstore.bindings.hidden import hidden
from shmstore.bindings.inspect import Turns
from shmstore.device import HostMemory, device_of, finish, require_cuda, upload
from shmstore.errors import (
    DeviceError,
    RankInUseError,
    StaleRefError,
    StoreNotFoundError,
    check_flags,
    unless_interrupted,
)
from shmstore.places import Folder, parts_of
from shmstore.refs import ObjectRef, StoreHandle
from shmstore.serde import MsgpackSerde, ObjectSerde
from shmstore.serde.tensors import load_torch
from shmstore.store import diagnostics
from shmstore.store.arguments import (
    LOOK_AGAIN,
    Closable,
    expected_store,
    hides_payload,
    int_of,
    packed_key,
    packed_ref,
    seconds_of,
    serde_of,
)
from shmstore.store.claims import Claiming
from shmstore.store.leases import PinnedRef
from shmstore.store.stats import ReaderStats

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_SILENT = 2.0
"""Seconds after which a wait for a store is logged: its name may be wrong."""


def _waiting(seconds: float, place: str | None, attach: Callable[[], native.Reader]) -> native.Reader:
    """Do `attach`, again every few milliseconds while there is no store, until the time is over."""
    begin = time.monotonic()
    silent = True
    while True:
        try:
            return attach()
        except StoreNotFoundError as error:
            waited = time.monotonic() - begin
            if error._code not in (native.NO_STORE, native.CREATING) or waited >= seconds:
                raise
            if silent and waited >= _SILENT:
                silent = False
                _log.warning("there is no store %s yet; waiting up to %g s: is its name right?", place, seconds)
            time.sleep(min(LOOK_AGAIN, seconds - waited))


class ObjectStoreReader(Claiming[PinnedRef], Closable):
    """One rank of a store: turns references into read-only views of the shared pages; made by `attach`.

    Thread-safe. Attach after a fork or in a spawned process, never before.
    """

    def __init__(self, reader: Any = None, rank: int = 0, serde: ObjectSerde | None = None, **_: Any) -> None:
        """Wrap an opened segment; callers use `attach`."""
        if not isinstance(reader, native.Reader):
            raise TypeError("make a reader by ObjectStoreReader.attach(handle_or_name, rank)")
        self._reader = reader
        self._serde = serde_of(serde)
        self._hides = hides_payload(self._serde)
        self._place = reader.place
        self._rank = rank
        self._registered: dict[int, HostMemory] = {}
        self._open = True
        self._pid = os.getpid()

    @classmethod
    def attach(
        cls,
        handle_or_name: StoreHandle | str | None = None,
        rank: int | None = 0,
        *,
        n_readers: int | None = None,
        wait: float | None = None,
        serde: ObjectSerde | None = None,
        allow_uid: int | None = None,
        finds_only: bool = False,
        dir: Folder | None = None,
        fd: int | None = None,
    ) -> "ObjectStoreReader":
        """Attach to a store as `rank`, from 0 to n_readers - 1, or None for the first free one.

        No lease waits for a rank that attached with `finds_only`: it looks objects up by `find`. `dir` is the folder of
        the store, by default the handle's; of a name that of SHMSTORE_DIR, without it /dev/shm. `fd` is a descriptor of
        the store's file, such as `StoreHandle.send` passes, instead of a folder and a name: the caller may close it
        after this call. A handle that is passed with it says which store it must be.

        The store must have `n_readers` ranks, if they are given: LayoutMismatchError.
        With `wait`, waits so many seconds for a store that is not there yet or is being created, also again after its
        creator was killed; if in doubt, use 60 with a name, and nothing with a handle, whose store exists. `serde` must
        be the writer's.
        If a rank attaches again, older leases do not expect it. The store must be this user's and closed to others;
        with `allow_uid` it must be that user's, whatever its mode. Raises StoreNotFoundError, ValueError for a rank out
        of range, and RankInUseError if a process (or a view of a closed reader) has the rank for 100 ms. Raises
        ForeignStoreError, LayoutMismatchError or CorruptStoreError if it is not an intact store, or not the store of
        the handle; SharedMemoryError if shared memory cannot be used.
        """
        check_flags(finds_only=finds_only)
        wait = None if wait is None else seconds_of("wait", wait)
        place, store_id, ranks, uid = expected_store(handle_or_name, allow_uid, "handle_or_name", dir, fd)
        if n_readers is not None:
            ranks = int_of("n_readers", n_readers, 1, native.MAX_READERS)
        number = 0 if rank is None else int_of("rank", rank, 0, (ranks or native.MAX_READERS) - 1)
        serde = serde_of(serde)
        turns = Turns()
        while True:
            attempt = partial(native.Reader.attach, place, number, store_id, ranks, uid, finds_only, rank is None)
            try:
                reader = attempt() if wait is None else _waiting(wait, place, attempt)
            except unless_interrupted(Exception) as error:
                if rank is None and isinstance(error, RankInUseError):
                    number += 1
                    continue
                if rank is None and number and type(error) is ValueError:  # there is no rank of this number
                    if not turns.again():
                        raise diagnostics.in_use(place, None, number) from None
                    number = 0
                    continue
                expected = place, store_id, ranks, uid
                raise diagnostics.not_opened(error, expected, "rank", number, waited=wait) from None
            return cls(reader, number, serde)

    def __repr__(self) -> str:
        return f"<ObjectStoreReader {self._place!r} rank {self._rank}{'' if self._open else ' (closed)'}>"

    @property
    def name(self) -> str:
        """The store's POSIX name, without a slash."""
        return parts_of(self._place)[1]

    @property
    def rank(self) -> int:
        """The rank that this reader attached as."""
        return self._rank

    @property
    def store_id(self) -> int:
        """The store's number, as in `ObjectRef.store_id`."""
        return self._reader.store_id

    @property
    def writer_epoch(self) -> int:
        """How many writers the store has had; it grows when another writer has taken over."""
        return self._reader.writer_epoch()

    def register_host_memory(self) -> int:
        """Page-lock the store's data for CUDA, so that copies from it are fast and asynchronous; return its bytes.

        Only arenas that a writer has taken have memory: call it again for those that are taken later. Idempotent.
        `close` unlocks the pages. Raises DeviceError without CUDA, or if the driver refuses.
        """
        for arena, data in self._reader.data().items():
            if arena not in self._registered:
                self._registered[arena] = HostMemory(*data)
        return sum(memory.nbytes for memory in self._registered.values())

    def get(
        self,
        ref: ObjectRef,
        copy: bool = False,
        *,
        private: bool = False,
        device: "torch.device | str | None" = None,
        stream: Any = None,
    ) -> Any:
        """Return the object as read-only views, which hold it until the last one is freed; acknowledge its lease.

        The same reference may be read again, as long as the object is there. Writing to a tensor view is a
        segmentation fault: torch has no read-only tensors, but the pages are read-only. With `copy` the value is
        private and writable, and holds nothing. Raises StaleRefError if the object was evicted, or was never there.
        If so because the store itself was removed: StoreNotFoundError, or StoreClosedError if there is a new one under
        its name. What is still there can be read all the same.

        With `private` the value is writable, and nobody else sees what is written, but only pages that are written are
        copied. It holds the object until the last view is freed, as views do. Raises SharedMemoryError if there is no
        memory for its mapping, and nothing is acknowledged then; TypeError with `copy` or `device`. A serializer other
        than `MsgpackSerde` copies.

        With a CUDA `device`, the tensors are views of one copy of the object there, made on `stream` or the current
        stream; arrays are private. The object is held until the copy is done, and `close` waits for it. The copy is
        asynchronous after `register_host_memory`. Raises DeviceError without CUDA; nothing is acknowledged then.
        """
        where, mapped = None, False
        if copy is not False or private is not False:
            check_flags(copy=copy, private=private)
        if private:
            if copy or device is not None:
                raise TypeError("private excludes copy and device: pass one of them")
            mapped = type(self._serde) is MsgpackSerde
            copy = not mapped
        if device is not None:
            there, copy = device_of(device), True
            if there.type != "cpu":
                where = there
                require_cuda()
                if not isinstance(self._serde, MsgpackSerde):
                    raise DeviceError(f"{self._serde!r} does not decode on a device", hint="use MsgpackSerde")
        try:
            meta, payload = self._reader.acquire(packed_ref(ref), native.PRIVATELY if mapped else native.SHARED)
        except StaleRefError as error:
            raise diagnostics.stale_or_gone(error, ref, self._reader, self._place) from None
        serde: Any = self._serde
        if mapped:
            return serde.decode_private(meta, payload)
        if not self._hides:
            payload = hidden(payload)
        if where is None:
            return serde.decode(meta, payload, copy=copy)
        host = load_torch().from_numpy(np.ndarray((len(payload),), np.uint8, payload))
        return serde.decode_on_device(meta, payload, upload(host, where, stream))

    def find(self, key: str, *, namespace: str | None = None) -> PinnedRef | None:
        """Find the object stored under `key` by any writer, and hold it; count a use. None if there is no such object.

        Pass its `ref` to `get`, here or in another process. An object that is being evicted is not found. Not a promise
        to other ranks: they hold what they have got, and a reference that comes too late is stale.
        """
        found = self._reader.find(packed_key(key, namespace))
        return None if found is None else PinnedRef(*found)

    def has(self, key: str, *, namespace: str | None = None) -> bool:
        """Return whether any writer has stored an object under `key`; changes nothing, and holds nothing."""
        return self._reader.has(packed_key(key, namespace))

    def _has(self, packed: bytes) -> bool:
        return self._reader.has(packed)

    def _open_claims(self) -> Claims:
        return self._reader.claims()

    def release(self, ref: ObjectRef) -> bool:
        """Acknowledge without reading; return False if the lease is over or its object was evicted.

        Raises StaleRefError if the object is here and this reference was never handed out for it, and like `get` if the
        store was removed.
        """
        try:
            return self._reader.release(packed_ref(ref))
        except StaleRefError as error:
            raise diagnostics.stale_or_gone(error, ref, self._reader, self._place) from None

    def validate(self, ref: ObjectRef) -> bool:
        """Return whether `get` would find the object; changes nothing."""
        return self._reader.validate(packed_ref(ref))

    def stats(self) -> ReaderStats:
        """Return the rank's current figures."""
        return ReaderStats(**self._reader.stats())

    def close(self) -> None:
        """End all calls; views stay valid, and the rank stays taken until the last of them is freed. Idempotent.

        Does nothing in a forked child.
        """
        if self._open and not self._is_inherited():
            finish()
            for memory in self._registered.values():
                memory.close()
            self._reader.close()
            vars(self).pop("_claims", None)  # its opening keeps the memory of a store that was removed
            self._open = False
