"""The C store as two Python classes: bytes, ints and buffers in and out, and an exception for each code.

A C handle is freed when the last Python object that needs its mapping is freed, so views stay readable after `close`.
After `close` the pointer is NULL, which C takes for a closed handle.
"""

import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from shmstore import errors
from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.batch import Batch
from shmstore.bindings.claims import Claims
from shmstore.bindings.figures import KindFigures, figures_of, read_kinds, record_of
from shmstore.bindings.handles import fail, keep, keeps_alive, owned, require, words_of
from shmstore.bindings.hidden import held
from shmstore.namespaces import split
from shmstore.places import file_system, parts_of, place_of

_new = ffi.new
_buffer = ffi.buffer
_gc = ffi.gc
_unpack = ffi.unpack
_has = lib.shms_writer_has
_SIZE = ffi.typeof("uint64_t *")
_BYTES = ffi.typeof("uint8_t[]")
_FEW = 256  # bytes
_listed = struct.Struct("=QI")
SHARED = lib.shms_reader_acquire
PRIVATELY = lib.shms_reader_acquire_private
"""How `Reader.acquire` gets a payload that is copy-on-write."""
_find = lib.shms_reader_find
_NOT_FOUND = lib.SHMS_ENOTFOUND
_REF = ffi.typeof(f"uint8_t[{lib.SHMS_REF_SIZE}]")
_drop_view = lib.shms_view_drop
_VIEW_BOX = ffi.typeof("shms_view **")
end_pin = ffi.release
"""Ends the pin of `Reader.find`; idempotent."""

MAX_READERS: int = lib.SHMS_MAX_READERS
MAX_GROUPS: int = lib.SHMS_MAX_GROUPS
MAX_OBJECTS: int = lib.SHMS_MAX_OBJECTS
MAX_CAPACITY: int = lib.SHMS_MAX_CAPACITY
MAX_NAME: int = lib.SHMS_MAX_NAME
MAX_KEY: int = lib.SHMS_MAX_KEY
MAX_EXTRA: int = lib.SHMS_MAX_EXTRA
ALIGN: int = lib.SHMS_ALIGN
ANY_STORE: int = lib.SHMS_ANY_STORE
ANY_ARENA: int = lib.SHMS_ANY_ARENA
MAX_WRITERS: int = lib.SHMS_MAX_WRITERS
OWN_UID: int = lib.SHMS_OWN_UID
NO_STORE: int = lib.SHMS_ENOSTORE
CREATING: int = lib.SHMS_ECREATING
OTHER_RANKS: int = lib.SHMS_ERANKS
OTHER_OPTIONS: int = lib.SHMS_EOPTIONS
UNTIL_CLOSED: int = lib.SHMS_UNTIL_CLOSED
BEYOND_DEATH: int = lib.SHMS_BEYOND_DEATH
BEYOND_CLOSE: int = lib.SHMS_BEYOND_CLOSE
EPHEMERAL: int = lib.SHMS_EPHEMERAL
OUTLIVES: int = lib.SHMS_OUTLIVES
OWNS: int = lib.SHMS_OWNS
MEMFD: int = lib.SHMS_MEMFD
AS_RECORDED: int = lib.SHMS_AS_RECORDED
AS_IT_WAS: int = lib.SHMS_AS_IT_WAS


def _filled_record(kind: str, fill: Callable[..., int], handle: Any) -> Any:
    record = _new(f"{kind} *")
    require(fill(handle, record))
    return record


def no_space(needed: "Options | int", folder: str, freed: int = 0, at: str | None = None) -> errors.StoreSpaceError:
    """Return the error for a segment with these options, or so many bytes, that do not fit if `freed` are freed.

    `at` leads to the file system where this process may not see the folder.
    """
    found, hint = os.statvfs(at or folder), None
    if file_system(folder) == "hugetlbfs":
        hint = "use less capacity, raise /proc/sys/vm/nr_hugepages, or mount it with a larger size"
    return errors.StoreSpaceError(
        needed=needed if isinstance(needed, int) else lib.shms_space_needed(_packed(needed), os.fsencode(folder)),
        free=found.f_bavail * found.f_frsize + freed,
        total=found.f_blocks * found.f_frsize,
        folder=folder,
        hint=hint,
    )


def rank_pid(name: str, rank: int) -> int:
    """Return the process that last attached as `rank`, or 0; one word, since a search for a free rank asks often."""
    return lib.shms_reader_pid(os.fsencode(name), rank)


class Options(NamedTuple):
    """What a store is created with, as in shms_options; 0 is a default."""

    capacity: int
    max_object_size: int
    n_readers: int
    max_objects: int
    flags: int = 0
    groups: tuple[int, ...] = ()
    """Ranks of each group; () is one group of all."""
    n_writers: int = 1

    def rounded(self) -> "Options":
        """Return the options that a store created with these has."""
        packed = _packed(self)
        require(lib.shms_options_round(packed))
        return _unpacked(packed)


def _packed(options: Options) -> Any:
    fields = options._asdict()
    sizes = fields.pop("groups")
    return _new("shms_options *", {**fields, "n_groups": len(sizes), "group_sizes": sizes})


def _unpacked(packed: Any) -> Options:
    numbers = {name: getattr(packed, name) for name in Options._fields if name != "groups"}
    return Options(**numbers, groups=tuple(packed.group_sizes[0 : packed.n_groups]))


def _expected(
    store_id: int,
    n_readers: int,
    allow_uid: int,
    options: Any = ffi.NULL,
    end_leases: bool = False,
    finds: bool = False,
    at_once: bool = False,
) -> Any:
    return _new("shms_expected *", (store_id, allow_uid, n_readers, end_leases, finds, at_once, options))


class Writer:
    """The writer's side of a segment; every method may raise StoreClosedError."""

    def __init__(self, box: Any) -> None:
        self._w = owned(box)
        self._hold = held(self._w)
        self.kinds: dict[str | None, int] = {None: 0}
        """The numbers of the kinds that calls have named."""
        self.spare: Batch | None = None
        """An empty batch for the next call."""
        self.storing = threading.RLock()
        """What caches take while they store or delete: one for all caches of this writer."""
        packed, place = _new("shms_options *"), _new("uint64_t[2]")
        self.store_id: int = lib.shms_writer_options(self._w, packed, place)
        self.options = options = _unpacked(packed)
        self.n_readers = options.n_readers
        self.n_writers = options.n_writers
        self.arena: int = place[0]
        self.place = place_of(os.fsdecode(ffi.string(lib.shms_writer_path(self._w))))
        self.damaged = [arena for arena in range(MAX_WRITERS) if place[1] >> arena & 1]
        self.groups = options.groups
        self.max_object_size = options.max_object_size

    @classmethod
    def create(cls, name: str, options: Options, mode: int = 0, gid: int | None = None) -> "Writer":
        """Create a segment; the caller has checked the numbers."""
        packed = _packed(options)
        packed.mode, packed.group = mode, 0 if gid is None else 1 + gid
        box = _gc(_new("shms_writer **"), lib.shms_writer_drop)
        try:
            code = lib.shms_writer_create(box, os.fsencode(name), packed)
            if code == lib.SHMS_ENOSPC:
                raise no_space(options, parts_of(name)[0])
            require(code)
            writer = cls(box)
            return writer  # not the call itself: its value is not yet the caller's, and this block would be over
        except BaseException:
            lib.shms_writer_close(box[0], True)  # an interrupt: nobody else has it
            raise

    @classmethod
    def recover(
        cls,
        name: str,
        store_id: int = ANY_STORE,
        n_readers: int = 0,
        allow_uid: int = OWN_UID,
        options: Options | None = None,
        arena: int | None = None,
        keep_leases: bool = True,
    ) -> "Writer":
        """Take over the segment, or the arena, of a writer that is dead or closed, if it is as expected.

        ANY_STORE, 0 ranks, OWN_UID and no options accept every store of the caller's own. ANY_ARENA takes the first
        that has no living writer. Until `stay` the name may be removed.
        """
        box = _gc(_new("shms_writer **"), lib.shms_writer_drop)
        packed = ffi.NULL if options is None else _packed(options)
        expected = _expected(store_id, n_readers, allow_uid, packed, not keep_leases)
        expected.needed = needed = _new("uint64_t *")
        code = lib.shms_writer_take(box, os.fsencode(name), arena or 0, expected)
        if code == lib.SHMS_ENOSPC:
            if name.startswith("/proc/self/fd/"):  # which is a link to the file
                raise no_space(needed[0], os.path.dirname(os.path.realpath(name)), at=name)
            raise no_space(needed[0], parts_of(name)[0])
        require(code)
        return cls(box)

    def close(self, unlink: int) -> None:
        """Close the segment, as shms_writer_close; idempotent."""
        handle, self._w = self._w, ffi.NULL
        # The mapping ends with the last batch and view of it, not with this object, also after an interrupt.
        hold, self._hold = self._hold, None
        self.spare = None
        if handle:
            code = lib.shms_writer_close(handle, unlink)
            if code < 0:
                self._w, self._hold = handle, hold
                fail(code)

    def stay(self, how: int) -> None:
        """Have the name stay, and record for how long: UNTIL_CLOSED, BEYOND_DEATH or BEYOND_CLOSE.

        StoreNotFoundError if it was removed.
        """
        require(lib.shms_writer_stay(self._w, how))

    def claims(self) -> Claims:
        """Open the claims of this process in the store."""
        return Claims(lib.shms_writer_claim_for, lib.shms_writer_claimed, self._w)

    def batch(self) -> Batch:
        """Return an empty batch: the spare one, or a new one if another thread or a signal handler has it."""
        spare, self.spare = self.spare, None
        return self.new_batch() if spare is None else spare

    def new_batch(self) -> Batch:
        """Return an empty batch that outlives the call."""
        return Batch(self._w, self._hold)

    def has(self, key: bytes) -> int:
        """Return 0 if the key cannot be handed out, 2 if it can and its object has extra bytes, else 1."""
        code: int = _has(self._w, key, len(key))
        if code < 0:
            fail(code)
        return code

    def extra(self, packed: bytes) -> bytes:
        """Return the extra bytes of an object that has just been handed out; StaleRefError if it has been evicted."""
        size, out = _new(_SIZE, _FEW), _new(_BYTES, _FEW)
        require(lib.shms_writer_extra(self._w, packed, out, size))
        while size[0] > len(out):  # again, since a broken writer of its arena may have changed it
            out = _new(_BYTES, size[0])
            require(lib.shms_writer_extra(self._w, packed, out, size))
        return bytes(_buffer(out, size[0]))

    def equals(self, packed: bytes, meta: bytes, nbytes: int, pieces: Sequence[tuple[int, int, int]]) -> bool:
        """Return whether an object is there with this metadata, size and pieces, which are as in `Batch.put`."""
        return require(lib.shms_writer_equals(self._w, packed, meta, len(meta), nbytes, pieces, len(pieces))) == 1

    def look(self, key: bytes, owner: Any) -> tuple[bytes, bytes, Any]:
        """Return metadata, extra bytes and payload of this writer's own object; `owner` protects its key.

        The payload is a buffer that keeps `owner` alive. Raises ObjectNotFoundError.
        """
        out = _new("shms_stored *")
        require(lib.shms_writer_look(self._w, key, len(key), out))
        payload = _buffer(keeps_alive(out.payload, owner), out.payload_size)
        return _unpack(out.meta, out.meta_len), _unpack(out.extra, out.extra_len), payload

    def touch(self, key: bytes) -> bool:
        """Count a use of the key; return False if it is absent."""
        return require(lib.shms_writer_touch(self._w, key, len(key))) == 1

    def cancel(self, packed: bytes) -> bool:
        """End a lease; return False if it is over already."""
        return require(lib.shms_writer_cancel(self._w, packed)) == 1

    def assign_group(self, packed: bytes, group: int) -> bool:
        """Let a lease wait for a group only: 1 + its number; or, if it does so far, for all: 0. False if it is over.

        ValueError if it waits for another group.
        """
        return require(lib.shms_writer_assign_group(self._w, packed, group)) == 1

    def validate(self, packed: bytes, key: bytes | None) -> bool:
        """Say whether the object is there, and has this key, if one is given."""
        name = ffi.NULL if key is None else key
        return require(lib.shms_writer_validate(self._w, packed, name, len(key or b""))) == 1

    def cancel_all(self) -> int:
        """End every open lease and return their number."""
        return require(lib.shms_writer_cancel_all(self._w))

    def retire(self, rank: int) -> None:
        """Stop expecting a rank."""
        require(lib.shms_writer_retire(self._w, rank))

    def delete(self, key: bytes) -> bool:
        """Delete a key; return False if it is absent."""
        return require(lib.shms_writer_delete(self._w, key, len(key))) == 1

    def clear(self, prefix: bytes) -> None:
        """Delete all keys that begin with `prefix`."""
        require(lib.shms_writer_clear(self._w, prefix, len(prefix)))

    def count(self) -> int:
        """Return the number of keys."""
        return require(lib.shms_writer_count(self._w))

    def key_list(self, prefix: bytes) -> list[tuple[str | None, str]]:
        """Return the keys that begin with `prefix`, oldest object first, each with its namespace or None."""
        size, room = _new(_SIZE), 0
        out = _new(_BYTES, room)
        while require(lib.shms_writer_keys(self._w, prefix, len(prefix), out, size)) or size[0] > room:
            room = size[0] = size[0] + size[0] // 8  # other threads may store more meanwhile
            out = _new(_BYTES, room)
        packed, found, at = _buffer(out, size[0])[:], [], 0
        while at < len(packed):
            number, length = _listed.unpack_from(packed, at)
            at += _listed.size + length
            found.append((number, packed[at - length : at]))
        found.sort()
        return [split(key) for key in dict.fromkeys(key for _, key in found)]

    def kind(self, name: bytes) -> int:
        """Return the number of a kind, or 0 if there is none left."""
        return require(lib.shms_writer_kind(self._w, name, len(name)))

    def set_quota(self, kind: int, nbytes: int) -> None:
        """Limit the bytes of a kind; 0 is no limit."""
        require(lib.shms_writer_quota(self._w, kind, nbytes))

    def read_kinds(self) -> dict[int, tuple[str, KindFigures]]:
        """Return the name and the figures of each kind, by number."""
        return read_kinds(lib.shms_writer_kinds, self._w)

    def data(self) -> tuple[Any, int]:
        """Return this writer's part of the data region, which the buffer keeps mapped, and its offset in the file."""
        place = _new("uint64_t[2]")
        address = lib.shms_writer_data(self._w, place) or fail(lib.SHMS_ECLOSED)
        return _buffer(keeps_alive(ffi.cast("char *", address), self._hold), place[0]), int(place[1])

    def stats(self) -> dict[str, Any]:
        """Return the fields of shms_stats; `tier` is as in `figures_of`."""
        record = _filled_record("shms_stats", lib.shms_writer_stats, self._w)
        return {**words_of(record), "tier": figures_of(record.tier)}

    def show_tier(self, figures: Any) -> None:
        """Replace the figures that the segment shows of this writer's tier, by those of `record_of`."""
        require(lib.shms_writer_tier(self._w, record_of(figures)))

    def clear_tier(self, moment: int) -> None:
        """Tell all writers of the store not to use what a tier got up to this moment."""
        require(lib.shms_writer_clear_tier(self._w, moment))

    def tier_cleared(self) -> int:
        """Return the last moment that a writer of the store has told; 0 if there is none."""
        out = _new("uint64_t *")
        require(lib.shms_writer_tier_cleared(self._w, out))
        return int(out[0])

    def check_valid(self) -> None:
        """Raise CorruptStoreError at the first broken invariant."""
        require(lib.shms_writer_valid(self._w))


class Reader:
    """One rank's side of a segment; every method may raise StoreClosedError."""

    __slots__ = ("_hold", "_r", "place", "store_id")

    def __init__(self, box: Any) -> None:
        self._r = owned(box)
        self._hold = held(self._r)
        self.store_id: int = lib.shms_reader_store(self._r)
        self.place = place_of(os.fsdecode(ffi.string(lib.shms_reader_path(self._r))))

    @classmethod
    def attach(
        cls,
        name: str,
        rank: int,
        store_id: int,
        n_readers: int = 0,
        allow_uid: int = OWN_UID,
        finds: bool = False,
        at_once: bool = False,
    ) -> Self:
        """Attach as `rank`, if it is as expected; see `Writer.recover`. No lease expects a rank that only `finds`.

        Tries for 100 ms while a process has the rank, unless `at_once`.
        """
        box = _gc(_new("shms_reader **"), lib.shms_reader_drop)
        expected = _expected(store_id, n_readers, allow_uid, finds=finds, at_once=at_once)
        require(lib.shms_reader_attach(box, os.fsencode(name), rank, expected))
        return cls(box)

    def close(self) -> None:
        """End all calls; the rank is free when the last view is freed. Idempotent."""
        handle, self._r = self._r, ffi.NULL
        hold, self._hold = self._hold, None  # as in Writer.close
        if handle:
            code = lib.shms_reader_close(handle)
            if code < 0:
                self._r, self._hold = handle, hold
                fail(code)

    def acquire(self, packed: bytes, call: Callable[..., int] = SHARED) -> tuple[bytes, Any]:
        """Pin and acknowledge; return the metadata, and the payload as a buffer whose end is the end of the pin.

        With `PRIVATELY` the payload is copy-on-write: SharedMemoryError, and nothing is acknowledged, if it cannot be.
        """
        reader = self._r
        box = _gc(_new(_VIEW_BOX), _drop_view)  # the owner exists before the pin
        code = call(reader, packed, box)
        if code:
            fail(code)
        view = box[0]
        payload = _gc(view.payload, partial(keep, box))  # keeps_alive, without the call
        return _unpack(view.meta, view.meta_len), _buffer(payload, view.payload_size)

    def find(self, key: bytes) -> tuple[bytes, Any] | None:
        """Pin the object of a key; return a reference without a lease, and the pin, for `end_pin`."""
        box = _gc(_new(_VIEW_BOX), _drop_view)  # the owner exists before the pin
        packed = _new(_REF)
        if code := _find(self._r, key, len(key), packed, box):
            return None if code == _NOT_FOUND else fail(code)
        return _buffer(packed)[:], box

    def has(self, key: bytes) -> bool:
        """Return whether the key is in any arena; changes nothing."""
        return require(lib.shms_reader_has(self._r, key, len(key))) == 1

    def writer_epoch(self) -> int:
        """Return the writer's epoch: 1, and one more for each takeover."""
        return require(lib.shms_reader_writer_epoch(self._r)) or fail(lib.SHMS_ECLOSED)

    def claims(self) -> Claims:
        """Open the claims of this process in the store."""
        return Claims(lib.shms_reader_claim_for, lib.shms_reader_claimed, self._r)

    def named(self) -> bool:
        """Return whether the name still names this segment."""
        return require(lib.shms_reader_named(self._r)) == 1

    def data(self) -> dict[int, tuple[int, int, Any]]:
        """Return the address and size of each taken arena's data, and an object that keeps it mapped."""
        size, arena, found = _new("uint64_t *"), 0, {}
        while address := lib.shms_reader_data(self._r, arena, size):
            if size[0]:
                found[arena] = address, size[0], self._hold
            arena += 1
        return found if arena else fail(lib.SHMS_ECLOSED)

    def release(self, packed: bytes) -> bool:
        """Acknowledge without reading; return False if the lease is over."""
        return require(lib.shms_reader_release(self._r, packed)) == 1

    def validate(self, packed: bytes) -> bool:
        """Return whether the object is there."""
        return require(lib.shms_reader_validate(self._r, packed)) == 1

    def stats(self) -> dict[str, int]:
        """Return the fields of shms_rank_stats."""
        return words_of(_filled_record("shms_rank_stats", lib.shms_reader_stats, self._r))
