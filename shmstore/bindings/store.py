"""The C store as two Python classes: bytes, ints and buffers in and out, an exception for each code.

A handle of C is freed when the last Python object that needs its mapping has gone, so views stay readable after
`close`. After `close` the pointer is NULL, which C takes for a closed handle.
"""

import operator
import os
import struct
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from shmstore import errors
from shmstore.bindings._shmstore import ffi, lib

T = TypeVar("T")

_new = ffi.new
_buffer = ffi.buffer
_gc = ffi.gc
_unpack = ffi.unpack
_put = lib.shms_writer_put
_hit = lib.shms_writer_hit
_has = lib.shms_writer_has
_cancel = lib.shms_writer_cancel
_take_back = lib.shms_writer_take_back
_take_evicted = lib.shms_writer_take_evicted
_SIZE = ffi.typeof("uint64_t *")
_BYTES = ffi.typeof("uint8_t[]")
_FEW_KEYS = 256  # bytes
_length = struct.Struct("=I").unpack_from
_acquire = lib.shms_reader_acquire_to
_drop_view = lib.shms_view_drop
_VIEW_BOX = ffi.typeof("shms_view **")
# A destructor that does nothing, in C: it exists for what a partial of it keeps alive until then.
_keep = operator.is_

MAX_READERS: int = lib.SHMS_MAX_READERS
MAX_OBJECTS: int = lib.SHMS_MAX_OBJECTS
MAX_CAPACITY: int = lib.SHMS_MAX_CAPACITY
MAX_NAME: int = lib.SHMS_MAX_NAME
MAX_KEY: int = lib.SHMS_MAX_KEY
ALIGN: int = lib.SHMS_ALIGN
ANY_STORE: int = lib.SHMS_ANY_STORE
OWN_UID: int = lib.SHMS_OWN_UID
NO_STORE: int = lib.SHMS_ENOSTORE
OTHER_RANKS: int = lib.SHMS_ERANKS

_ERRORS: dict[int, type[Exception]] = {
    lib.SHMS_ETOOLARGE: errors.ObjectTooLargeError,
    lib.SHMS_EEXISTS: errors.ObjectExistsError,
    lib.SHMS_ENOTFOUND: errors.ObjectNotFoundError,
    lib.SHMS_ESTALE: errors.StaleRefError,
    lib.SHMS_ENOSTORE: errors.StoreNotFoundError,
    lib.SHMS_ESTOREEXISTS: errors.StoreExistsError,
    lib.SHMS_EWRITERACTIVE: errors.WriterActiveError,
    lib.SHMS_ERANKINUSE: errors.RankInUseError,
    lib.SHMS_ELAYOUT: errors.LayoutMismatchError,
    lib.SHMS_ECORRUPT: errors.CorruptStoreError,
    lib.SHMS_ECLOSED: errors.StoreClosedError,
    lib.SHMS_EFOREIGN: errors.ForeignStoreError,
    lib.SHMS_ESPARSE: errors.SparseStoreError,
    lib.SHMS_ENOMEM: MemoryError,
}

_FULL: dict[int, Literal["bytes", "slots", "leases"]] = {
    lib.SHMS_EFULL: "bytes",
    lib.SHMS_ENOSLOT: "slots",
    lib.SHMS_ENOLEASE: "leases",
}


def fail(code: int) -> NoReturn:
    """Raise what a negative code of C means; for SHMS_ESYS the OSError of errno."""
    raise _with_code(_error(code), code)  # a variable here would be a cycle through the traceback


def _with_code(error: Exception, code: int) -> Exception:
    if isinstance(error, errors.ShmStoreError):
        error._code = code
    return error


def _error(code: int) -> Exception:
    if code == lib.SHMS_ESYS:
        return OSError(ffi.errno, os.strerror(ffi.errno))
    text = ffi.string(lib.shms_strerror(code)).decode()
    if code == lib.SHMS_EFORKED:
        return errors.StoreClosedError(
            "this object was inherited through fork and belongs to the parent process",
            hint="attach in the child, after the fork",
        )
    if code == lib.SHMS_EOTHERSTORE:
        return errors.StoreNotFoundError(
            "its name is now another store's", hint="this handle's store is gone; attach with the new writer's handle"
        )
    if code == lib.SHMS_ERANKS:
        return errors.LayoutMismatchError(
            "it does not have as many ranks as its handle says", hint="use the handle that its writer made"
        )
    if code == lib.SHMS_ECREATING:
        return errors.StoreNotFoundError(
            "its creation is not over", hint="attach when the writer has sent its handle, or try again"
        )
    if code in _FULL:
        return errors.StoreFullError(resource=_FULL[code])
    if code == lib.SHMS_EINVAL:
        return ValueError(text)
    error = _ERRORS.get(code)
    if error is None or code == lib.SHMS_ENOMEM:
        return (error or errors.ShmStoreError)(text)
    return error()


def _require(code: int) -> int:
    if code < 0:
        fail(code)
    return code


def owned(box: Any) -> Any:
    """Return the handle in `box`, which keeps the box alive, whose end is the handle's."""
    return _gc(box[0], partial(_keep, box))


def held(handle: Any) -> Any:
    """Return a reference to the handle that the cycle collector does not see.

    It would end the handle of a store that is garbage in whatever order, before generators and `__del__` methods of the
    same garbage that still use it. An array is not looked into.
    """
    cell = np.empty((), object)
    cell[()] = handle
    return cell


def hidden(payload: Any) -> memoryview:
    """Return the same bytes as a buffer whose owner the cycle collector does not see, as it sees no array's.

    Else it would end the pin of a view that is garbage before `__del__` methods of the same garbage that still read it.
    """
    return np.ndarray((len(payload),), np.uint8, payload).data


def _record(kind: str, fill: Callable[..., int], handle: Any) -> dict[str, int]:
    record = _new(f"{kind} *")
    _require(fill(handle, record))
    return {name: getattr(record, name) for name, _ in ffi.typeof(kind).fields}


def _split(packed: Any, size: int) -> list[str]:
    keys, at = [], 0
    try:
        while at < size:
            start = at + 4
            at = start + _length(packed, at)[0]
            keys.append(str(packed[start:at], "utf-8"))
    except UnicodeDecodeError as error:
        raise errors.CorruptStoreError(f"the store holds a key that is not UTF-8: {error}") from None
    return keys


def _key_list(call: Callable[..., int], handle: Any) -> list[str]:
    room = 0
    size = _new(_SIZE, room)
    while True:
        out = _new(_BYTES, room)
        code = call(handle, out, size)
        if code:
            fail(code)
        needed = size[0]
        if needed <= room:
            return _split(_buffer(out, needed), needed) if needed else []
        room = needed


def space(capacity: int, n_readers: int, max_objects: int, max_object_size: int) -> tuple[int, int]:
    """Return the bytes that a segment of these options takes and those that its file system has free."""
    options = _options(capacity, n_readers, max_objects, max_object_size, 0)
    return lib.shms_space_needed(options), lib.shms_space_free()


def rank_pid(name: str, rank: int) -> int:
    """Return the process that attached as `rank` last, 0 where there is none."""
    return int(lib.shms_reader_pid(os.fsencode(name), rank))


def _options(capacity: int, n_readers: int, max_objects: int, max_object_size: int, flags: int) -> Any:
    return _new(
        "shms_options *",
        {
            "capacity": capacity,
            "max_object_size": max_object_size,
            "n_readers": n_readers,
            "max_objects": max_objects,
            "flags": flags,
        },
    )


def _expected(store_id: int, n_readers: int, allow_uid: int) -> Any:
    return _new("shms_expected *", {"store": store_id, "n_readers": n_readers, "allow_uid": allow_uid})


class Writer:
    """The writer's side of a segment; every method may raise StoreClosedError."""

    __slots__ = ("_hold", "_kept", "_spare", "_w", "max_object_size", "n_readers", "store_id")

    def __init__(self, box: Any) -> None:
        self._w = owned(box)
        self._hold = held(self._w)
        self._spare: tuple[Any, Any, Any] | None = None
        self._kept = b""
        options = _new("shms_options *")
        self.store_id: int = lib.shms_writer_options(self._w, options)
        self.n_readers: int = options.n_readers
        self.max_object_size: int = options.max_object_size

    @classmethod
    def create(
        cls,
        name: str,
        *,
        capacity: int,
        n_readers: int,
        max_objects: int,
        max_object_size: int,
        prefault: bool,
        huge_pages: bool,
        fifo: bool,
        checksums: bool,
        disposable: bool,
    ) -> "Writer":
        """Create a segment; the numbers are in range already."""
        flags = prefault * lib.SHMS_PREFAULT | huge_pages * lib.SHMS_HUGE_PAGES | fifo * lib.SHMS_FIFO
        flags |= checksums * lib.SHMS_CHECKSUMS | disposable * lib.SHMS_DISPOSABLE
        options = _options(capacity, n_readers, max_objects, max_object_size, flags)
        box = _gc(_new("shms_writer **"), lib.shms_writer_drop)
        try:
            code = lib.shms_writer_create(box, os.fsencode(name), options)
            if code == lib.SHMS_ENOSPC:
                needed, free = space(capacity, n_readers, max_objects, max_object_size)
                raise errors.StoreSpaceError(needed=needed, free=free)
            _require(code)
            writer = cls(box)
            return writer  # not the call itself: its value is not yet the caller's, and this block would be over
        except BaseException:
            lib.shms_writer_close(box[0], True)  # an interrupt: nobody else knows of it
            raise

    @classmethod
    def recover(cls, name: str, store_id: int, n_readers: int = 0, allow_uid: int = OWN_UID) -> "Writer":
        """Take over the segment of a writer that is dead or closed, if it is as expected.

        ANY_STORE, 0 ranks and OWN_UID expect nothing of it but that it is the caller's own.
        """
        box = _gc(_new("shms_writer **"), lib.shms_writer_drop)
        code = lib.shms_writer_recover_to(box, os.fsencode(name), _expected(store_id, n_readers, allow_uid))
        if code == lib.SHMS_ENOSPC:
            raise errors.StoreSpaceError("the segment is a sparse copy, and there is no room for all of it")
        _require(code)
        return cls(box)

    def close(self, unlink: bool) -> None:
        """Let the segment go; idempotent."""
        handle, self._w = self._w, ffi.NULL
        # The mapping goes with the last ticket, guard and view of it, not with this object; also after an interrupt.
        hold, self._hold = self._hold, None
        if handle:
            code = lib.shms_writer_close(handle, unlink)
            if code < 0:
                self._w, self._hold = handle, hold
                fail(code)

    def put(
        self,
        key: bytes,
        meta: bytes,
        nbytes: int,
        pieces: Sequence[tuple[int, int, int]],
        wrap: Callable[[bytes], T],
        blocks: Sized,
        protect: Callable[[bytes], object],
    ) -> T:
        """Store pieces of (offset, bytes, address) and hand out; returns what `wrap` makes of the packed reference.

        It is made in here, and where there are `blocks` by then, `protect` is called in here, since what an interrupt
        keeps from the caller is taken back in here. By one call of C, and nothing before it: the next interrupt may
        come at the first place where Python looks for one.
        """
        out = _new("uint8_t[40]")
        try:
            code = _put(self._w, key, len(key), meta, len(meta), nbytes, pieces, len(pieces), out)
            if code:
                fail(code)
            ref = wrap(_buffer(out)[:])
            if blocks:
                protect(key)
            return ref  # not the call itself: its value is not yet the caller's, and this block would be over
        except BaseException:
            _take_back(self._w, out)
            raise

    def ticket(self) -> "Ticket":
        """Return a ticket that is still to begin."""
        return Ticket(self._w, self._hold)

    def hit(self, key: bytes, wrap: Callable[[bytes], T]) -> T:
        """Hand out again; `wrap` as for `put`."""
        out = _new("uint8_t[40]")
        try:
            code = _hit(self._w, key, len(key), out)
            if code:
                fail(code)
            ref = wrap(_buffer(out)[:])
            return ref
        except BaseException:
            _cancel(self._w, out)
            raise

    def has(self, key: bytes) -> bool:
        """Say whether the key can be handed out."""
        code = _has(self._w, key, len(key))
        if code < 0:
            fail(code)
        return bool(code)

    def touch(self, key: bytes) -> bool:
        """Count a use."""
        return _require(lib.shms_writer_touch(self._w, key, len(key))) == 1

    def guard(self) -> "Guard":
        """Return a guard that is still to be set."""
        return Guard(self._w)

    def cancel(self, packed: bytes) -> bool:
        """End a lease."""
        return _require(lib.shms_writer_cancel(self._w, packed)) == 1

    def cancel_all(self) -> int:
        """End every open lease; returns how many there were."""
        return _require(lib.shms_writer_cancel_all(self._w))

    def retire(self, rank: int) -> None:
        """Expect a rank no longer."""
        _require(lib.shms_writer_retire(self._w, rank))

    def delete(self, key: bytes) -> bool:
        """Take a key out."""
        return _require(lib.shms_writer_delete(self._w, key, len(key))) == 1

    def clear(self) -> None:
        """Take all keys out."""
        _require(lib.shms_writer_clear(self._w))

    def count(self) -> int:
        """Return the number of keys."""
        return _require(lib.shms_writer_count(self._w))

    def key_list(self) -> list[str]:
        """Return the keys, oldest object first."""
        return _key_list(lib.shms_writer_keys, self._w)

    def track_evictions(self, on: bool) -> None:
        """Note keys that leave, or stop noting."""
        _require(lib.shms_writer_track_evictions(self._w, on))
        if not on:
            self._kept = b""

    def take_evicted(self) -> list[str]:
        """Return the keys that have left since the last call, and those that an interrupt kept from its caller."""
        # Caches ask after every put. Its few victims have room in a buffer that is kept, and is nobody's while in use:
        # it is put back by an assignment, behind which no interrupt comes that would read it after somebody else.
        # An interrupt after C's call: C has given its keys, though nothing here has them yet. None comes before it.
        spare, self._spare = self._spare, None
        if spare:
            size, out, packed = spare
        else:
            size, out = _new(_SIZE), _new(_BYTES, _FEW_KEYS)
            packed = _buffer(out)
        room, called = _FEW_KEYS, False
        kept, self._kept = self._kept, b""
        try:
            while True:
                size[0] = room
                called = True
                code = _take_evicted(self._w, out, size)
                if code:
                    called = False
                    fail(code)
                needed = size[0]
                if needed <= room:
                    break
                called = False
                out = _new(_BYTES, needed)
                packed = _buffer(out)
                room = needed
            if kept:
                keys = _split(kept + packed[:needed], len(kept) + needed)
            else:
                keys = _split(packed, needed) if needed else []
            if room == _FEW_KEYS:
                self._spare = (size, out, packed)
            return keys
        except errors.CorruptStoreError:
            raise  # it would come again for ever
        except BaseException:
            given = packed[: size[0]] if called and size[0] <= room else b""
            self._kept = kept + given + self._kept
            raise

    def stats(self) -> dict[str, int]:
        """Return the fields of shms_stats."""
        return _record("shms_stats", lib.shms_writer_stats, self._w)

    def holders(self) -> dict[int, int]:
        """Return the bytes that each rank held at the last refusal; ranks that held nothing are left out."""
        out = _new("uint64_t[]", self.n_readers)
        _require(lib.shms_writer_holders(self._w, out))
        return {rank: out[rank] for rank in range(self.n_readers) if out[rank]}

    def room(self) -> dict[str, int]:
        """Return the fields of shms_room, as of the last refusal."""
        return _record("shms_room", lib.shms_writer_room, self._w)

    def awaited(self) -> list[int]:
        """Return the ranks that have never attached and that leases wait for."""
        out = _new(_BYTES, self.n_readers)
        _require(lib.shms_writer_awaited(self._w, out))
        return [rank for rank in range(self.n_readers) if out[rank]]

    def check_valid(self) -> None:
        """Raise CorruptStoreError at the first broken invariant."""
        _require(lib.shms_writer_valid(self._w))


class Guard:
    """Keeps one object from being reclaimed until `end`, or until this has gone.

    It is made before it guards anything, so that whatever interrupts `set` finds it where its maker has put it.
    """

    __slots__ = ("_guard", "_hold", "_w")

    def __init__(self, writer: Any) -> None:
        self._w = writer
        self._guard = _gc(_new("shms_guard *"), partial(lib.shms_guard_drop, writer))
        # And with it the writer's handle, which may be closed: whose block is garbage, too, ends the guard itself.
        self._hold = held(self._guard)

    def set(self, key: bytes) -> None:
        """Guard what is under `key`, also where it is still being written; nothing where it is absent. Once."""
        code = lib.shms_writer_protect(self._w, key, len(key), self._guard)
        if code != lib.SHMS_ENOTFOUND:
            _require(code)

    def end(self) -> None:
        """Let the object go; idempotent, and nothing on a closed store, which keeps no guards."""
        lib.shms_guard_end(self._guard)


class Ticket:
    """Space in the ring that is being written.

    It is made before there is any space, so that whatever interrupts `begin` or `commit` finds something to undo.
    """

    __slots__ = ("_hold", "_out", "_ticket", "_w", "undo")

    def __init__(self, writer: Any, hold: Any) -> None:
        self._w = writer
        self._hold = hold  # the writer may be closed, and lets go of its own
        self._ticket = _new("shms_ticket *")
        self._out = _new("uint8_t[40]")
        # Gives the space back, and what came of it: nothing if it was not begun. No method, which begins with a look
        # for signals: where this is the first call of an `except`, no second interrupt comes before it.
        self.undo = partial(lib.shms_ticket_undo, writer, self._ticket, self._out)

    def begin(self, key: bytes, meta: bytes, nbytes: int, hand_out: bool = True) -> None:
        """Take space, and what it takes to hand out; the ticket is to be committed or aborted."""
        begin = lib.shms_writer_begin if hand_out else lib.shms_writer_reserve
        _require(begin(self._w, key, len(key), meta, len(meta), nbytes, self._ticket))

    def buffer(self) -> Any:
        """Return the payload area as a writable buffer, which keeps the mapping alive."""
        payload = self._ticket.payload
        return _buffer(_gc(payload, partial(_keep, self._hold)), self._ticket.payload_size)

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy pieces of (offset, bytes, address)."""
        _require(lib.shms_writer_copy(self._w, self._ticket, pieces, len(pieces)))

    def commit(self, hand_out: bool = True) -> bytes:
        """Publish; returns the packed reference, or nothing where none was to be handed out."""
        out = self._out if hand_out else ffi.NULL
        _require(lib.shms_writer_commit(self._w, self._ticket, out))
        packed: bytes = _buffer(out)[:] if hand_out else b""
        return packed


class Reader:
    """One rank's side of a segment; every method may raise StoreClosedError."""

    __slots__ = ("_hold", "_r", "store_id")

    def __init__(self, box: Any) -> None:
        self._r = owned(box)
        self._hold = held(self._r)
        self.store_id: int = lib.shms_reader_store(self._r)

    @classmethod
    def attach(cls, name: str, rank: int, store_id: int, n_readers: int = 0, allow_uid: int = OWN_UID) -> "Reader":
        """Attach as `rank`, if it is as expected; see `Writer.recover`."""
        box = _gc(_new("shms_reader **"), lib.shms_reader_drop)
        expected = _expected(store_id, n_readers, allow_uid)
        _require(lib.shms_reader_attach_to(box, os.fsencode(name), rank, expected))
        return cls(box)

    def close(self) -> None:
        """Make no more calls; the rank is free when the last view has gone. Idempotent."""
        handle, self._r = self._r, ffi.NULL
        hold, self._hold = self._hold, None  # as in Writer.close
        if handle:
            code = lib.shms_reader_close(handle)
            if code < 0:
                self._r, self._hold = handle, hold
                fail(code)

    def acquire(self, packed: bytes) -> tuple[bytes, Any]:
        """Pin and acknowledge; returns the metadata and the payload as a buffer, whose end is the pin's end."""
        reader = self._r
        box = _gc(_new(_VIEW_BOX), _drop_view)  # the pin has an owner before there is a pin
        code = _acquire(reader, packed, box)
        if code:
            fail(code)
        view = box[0]
        payload = _gc(view.payload, partial(_keep, box))
        return _unpack(view.meta, view.meta_len), _buffer(payload, view.payload_size)

    def release(self, packed: bytes) -> bool:
        """Acknowledge unread."""
        return _require(lib.shms_reader_release(self._r, packed)) == 1

    def validate(self, packed: bytes) -> bool:
        """Say whether the object is there."""
        return _require(lib.shms_reader_validate(self._r, packed)) == 1

    def stats(self) -> dict[str, int]:
        """Return the fields of shms_reader_stats."""
        return _record("shms_reader_stats", lib.shms_reader_stats_get, self._r)
