"""A batch: everything that one call does to a store, kept by one assignment or undone by one call into C.

Python runs signal handlers and switches threads at calls and at the end of a loop's round. A handler may raise there,
even after C has done its work and before the caller has its result. So a caller first makes all that it returns. Then
it commits by plain assignments, without a call among them or after them:

    batch = writer.batch()
    try:
        ref = trusted_ref(batch.hit(key))
        batch.record.keep = 1
        writer.spare = batch
        return ref
    except BaseException:
        batch.undo()
        raise

If an exception prevents even `undo`, the batch's destructor undoes it. If an assignment makes a tuple, CPython 3.11 may
collect garbage there. A finalizer may then let another thread run. Only that thread's count of hits may be lost.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import fail, keeps_alive, require
from shmstore.bindings.hidden import held

_new = ffi.new
_buffer = ffi.buffer
_put = lib.shms_batch_put_lent
_hit = lib.shms_batch_hit
_undo = lib.shms_batch_undo
_drop = lib.shms_batch_drop
_AGAIN = lib.SHMS_AGAIN
_LONGEST = 1e9  # seconds: 31 years; infinity is no int


@cache  # one record for all puts with the same options, which is never written to
def put_options(
    kind: int = 0, group: int = 0, hold: bool = False, unless_stored: bool = False, unleased: bool = False
) -> Any:
    """Return how to put an object, as in shms_put; the group is as in `Writer.assign_group`."""
    options = {"kind": kind, "group": group, "hold": hold, "unless_stored": unless_stored, "unleased": unleased}
    return _new("shms_put *", options)


NO_OPTIONS = put_options()


def waiting(options: Any, seconds: float) -> Any:
    """Return the same options for one put, which waits up to `seconds` for room."""
    waits = _new("shms_put *", options[0])
    waits.timeout = int(min(seconds, _LONGEST) * 1e9)
    return waits


class Batch:
    """The puts and hand-outs of one call, in one thread; it is empty after it was kept or undone."""

    __slots__ = ("_hold", "_ref", "_store", "_w", "record", "undo")

    def __init__(self, writer: Any, store: Any) -> None:
        self._w = writer
        self._store = store  # kept here: a closed writer drops its own
        self.record = ffi.gc(_new("shms_batch *"), partial(_drop, writer))
        self._hold = held(self.record)
        self._ref = _buffer(self.record.ref)
        # Not a method: Python runs signal handlers when a method begins, so before C has undone anything.
        self.undo: Callable[[], None] = partial(_undo, writer, self.record)

    def put(
        self,
        key: bytes,
        meta: bytes,
        nbytes: int,
        pieces: Sequence[tuple[int, int, int]],
        options: Any = NO_OPTIONS,
        extra: bytes = b"",
    ) -> bytes:
        """Store pieces of (offset, bytes, address), hand the object out, and return the packed reference.

        `options` is from `put_options`, and `extra` is what `Writer.extra` returns.
        """
        n, n_extra = len(pieces), len(extra)
        while code := _put(
            self._w, self.record, options, key, len(key), meta, len(meta), extra, n_extra, nbytes, pieces, n
        ):
            if code != _AGAIN:
                fail(code)
        return self._ref[:]

    def hit(self, key: bytes, hold: bool = False, group: int = 0) -> bytes | None:
        """Hand out a stored object and return the packed reference; None if it is not there, which counts as a miss."""
        code = _hit(self._w, self.record, key, len(key), group, hold)
        if code == lib.SHMS_ENOTFOUND:
            return None
        if code:
            fail(code)
        return self._ref[:]

    def begin(self, key: bytes, meta: bytes, nbytes: int, options: Any = NO_OPTIONS, extra: bytes = b"") -> None:
        """Take space for an object, and an entry for its lease if it is to have one; the rest is as in `put`."""
        while code := _put(
            self._w, self.record, options, key, len(key), meta, len(meta), extra, len(extra), nbytes, ffi.NULL, 0
        ):
            if code != _AGAIN:
                fail(code)

    def buffer(self, owner: Any = None) -> Any:
        """Return the object's payload area as a writable buffer, which keeps the mapping or `owner` alive.

        With the batch as its owner, garbage ends the unfinished object only when nobody can write to the buffer.
        """
        pending = self.record.pending
        return _buffer(keeps_alive(pending.payload, owner or self._store), pending.payload_size)

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy pieces of (offset, bytes, address) into the payload area."""
        require(lib.shms_batch_copy(self._w, self.record, pieces, len(pieces)))

    def hold(self, packed: bytes) -> bool:
        """Hold the lease of a reference; return False if it has ended."""
        return require(lib.shms_batch_hold(self._w, self.record, packed)) == 1

    def commit(self) -> bytes:
        """Publish the object and return the packed reference."""
        require(lib.shms_batch_commit(self._w, self.record))
        return self._ref[:]

    def protect(self, keys: Sequence[bytes]) -> None:
        """Protect these keys, stored or not, until the batch is undone; call this once."""
        packed = b"".join(len(key).to_bytes(4, "little") + key for key in keys)
        require(lib.shms_batch_protect(self._w, self.record, packed, len(packed)))

    def refusal(self) -> dict[str, Any]:
        """Return the fields of the last shms_refusal; those by rank or writer are dicts without zeros."""
        refusal = self.record.refusal
        lib.shms_writer_holders(self._w, ffi.addressof(refusal))  # of a writer that was closed meanwhile: nobody
        found = {name: getattr(refusal, name) for name, _ in ffi.typeof("shms_refusal").fields}
        for name in ("held", "held_by_writer", "awaited"):
            values = found[name]
            used = len(bytes(ffi.buffer(values)).rstrip(b"\0"))  # little-endian, and nearly all are 0
            n = -(-used * len(values) // ffi.sizeof(values))
            found[name] = {at: value for at, value in enumerate(ffi.unpack(values, n)) if value}
        return found
