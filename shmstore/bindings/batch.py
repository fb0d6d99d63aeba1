"""What one call does to a store, as a whole: it is kept by one store into a field, or undone by one call of C.

Python looks for signals, and changes threads, at calls and where a loop goes back; so a handler's exception may come in
there, also between C's work and its caller. A caller makes all that it returns, and then commits by plain stores in a
row, with no call among them or after them but its `return`:

    batch = writer.batch()
    try:
        ref = trusted_ref(batch.hit(key))
        batch.record.keep = 1
        writer.spare = batch
        return ref
    except BaseException:
        batch.undo()
        raise

What an exception keeps even from `undo` is undone when the batch goes. If those stores make a tuple, CPython 3.11 may
collect garbage there. A finalizer may then let another thread run, whose count of hits may be lost, and nothing else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import fail, held, keeps_alive, require

_new = ffi.new
_buffer = ffi.buffer
_put = lib.shms_batch_put
_hit = lib.shms_batch_hit
_undo = lib.shms_batch_undo
_drop = lib.shms_batch_drop


class Batch:
    """Puts and hand-outs of one call, in one thread; empty after it was kept or undone."""

    __slots__ = ("_hold", "_ref", "_store", "_w", "record", "undo")

    def __init__(self, writer: Any, store: Any) -> None:
        self._w = writer
        self._store = store  # the writer may be closed, and drops its own
        self.record = ffi.gc(_new("shms_batch *"), partial(_drop, writer))
        self._hold = held(self.record)
        self._ref = _buffer(self.record.ref)
        # No method, which begins with a look for signals: before C has undone, nothing else comes in.
        self.undo: Callable[[], None] = partial(_undo, writer, self.record)

    def put(
        self, key: bytes, meta: bytes, nbytes: int, pieces: Sequence[tuple[int, int, int]], hold: bool = False
    ) -> bytes:
        """Store pieces of (offset, bytes, address) and hand out; returns the packed reference."""
        code = _put(self._w, self.record, key, len(key), meta, len(meta), nbytes, pieces, len(pieces), hold)
        if code:
            fail(code)
        return self._ref[:]  # type: ignore[no-any-return]

    def hit(self, key: bytes, hold: bool = False) -> bytes:
        """Hand out again; returns the packed reference."""
        code = _hit(self._w, self.record, key, len(key), hold)
        if code:
            fail(code)
        return self._ref[:]  # type: ignore[no-any-return]

    def begin(self, key: bytes, meta: bytes, nbytes: int, hand_out: bool = True) -> None:
        """Take space, and what it takes to hand out."""
        require(lib.shms_batch_begin(self._w, self.record, key, len(key), meta, len(meta), nbytes, hand_out))

    def buffer(self) -> Any:
        """Return the payload area that was taken as a writable buffer, which keeps the mapping alive."""
        ticket = self.record.ticket
        return _buffer(keeps_alive(ticket.payload, self._store), ticket.payload_size)

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy pieces of (offset, bytes, address) into the space."""
        require(lib.shms_batch_copy(self._w, self.record, pieces, len(pieces)))

    def hold(self, packed: bytes) -> bool:
        """Hold the lease of a reference; False if it has ended."""
        return require(lib.shms_batch_hold(self._w, self.record, packed)) == 1

    def commit(self, hold: bool = False) -> bytes:
        """Publish; returns the packed reference, which is invalid if nothing was to be handed out."""
        require(lib.shms_batch_commit(self._w, self.record, hold))
        return self._ref[:]  # type: ignore[no-any-return]

    def protect(self, keys: Sequence[bytes]) -> None:
        """Keep what is or will be stored under these keys, until this is undone; once."""
        packed = b"".join(len(key).to_bytes(4, "little") + key for key in keys)
        require(lib.shms_batch_protect(self._w, self.record, packed, len(packed)))

    def refusal(self) -> dict[str, Any]:
        """Return what the last refusal has found, the fields of shms_refusal; by rank without those of 0."""
        refusal = self.record.refusal
        found = {name: getattr(refusal, name) for name, _ in ffi.typeof("shms_refusal").fields}
        for name in ("held", "awaited"):
            found[name] = {rank: value for rank, value in enumerate(found[name]) if value}
        return found
