"""The C inspector as Python values: records come out as dicts of ints.

Their fields are `uint64_t`, so a table of records is one numpy array and needs no loop here.
"""

import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.figures import KindFigures, figures_of, read_kinds
from shmstore.bindings.handles import owned, require, words_of

if TYPE_CHECKING:
    import numpy as np

FLAGS: dict[str, int] = {name: getattr(lib, f"SHMS_{name.upper()}") for name in ("prefault", "huge_pages", "checksums")}
STATES: dict[int, str] = {
    lib.SHMS_STATE_WRITING: "writing",
    lib.SHMS_STATE_LIVE: "live",
    lib.SHMS_STATE_EVICTING: "evicting",
}
OWN_UID: int = lib.SHMS_OWN_UID
SPARSE, CORRUPT, LAYOUT = -lib.SHMS_ESPARSE, -lib.SHMS_ECORRUPT, -lib.SHMS_ELAYOUT
"""What shms_probe calls a fault."""
KINDS: dict[int, str] = {
    getattr(lib, name): name.removeprefix("SHMS_F_").lower() for name in dir(lib) if name.startswith("SHMS_F_")
}
"""The names of the kinds of `shms_finding`, by number, as in csrc/inspect/inspect.h."""

_BATCH = 4096
_MAX_FINDINGS = 1000


def _words(record: Any) -> Iterator[tuple[str, int]]:
    """Yield the fields of a C type, each with its number of words; of counters, their fields."""
    for name, field in record.fields:
        if field.type.kind == "struct":
            yield from _words(field.type)
        else:
            yield name, ffi.sizeof(field.type) // ffi.sizeof("uint64_t")


@cache
def _dtype(kind: str) -> "np.dtype[Any]":
    import numpy as np  # here, for `shmstore verify --quick`, which needs none of it

    return np.dtype([(name, "<u8", (n,)) if n > 1 else (name, "<u8") for name, n in _words(ffi.typeof(kind))])


def _dicts(kind: str, records: Any, n: int) -> list[dict[str, Any]]:
    import numpy as np

    array = np.frombuffer(ffi.buffer(records), _dtype(kind), n)
    names = array.dtype.names or ()
    columns = [array[name].tolist() for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def probe(name: str) -> dict[str, int]:
    """Return the fields of shms_probe for a file in /dev/shm, which need not be a segment."""
    record = ffi.new("shms_probe *")
    require(lib.shms_probe_file(record, os.fsencode(name)))
    return words_of(record)


def remove(name: str, device: int, inode: int, size: int, force: bool) -> None:
    """Remove the name of a segment whose writer is dead."""
    require(lib.shms_segment_remove(os.fsencode(name), device, inode, size, force))


class Turns:
    """The turns of a call that is refused because a process has a lock: one that was killed has it for milliseconds."""

    def __init__(self) -> None:
        self._turns = ffi.new("uint32_t *")

    def again(self) -> bool:
        """Wait a millisecond; return whether to make the call again, as shms_lock_again."""
        return bool(lib.shms_lock_again(self._turns))


def crc32c(*pieces: Any) -> int:
    """Return the CRC-32C of buffers in a row."""
    crc = 0
    for piece in pieces:
        crc = int(lib.shms_crc32c(crc, ffi.from_buffer(piece), len(piece)))
    return crc


class Inspector:
    """A segment mapped read-only; no method changes it or waits. It is this user's, or that of `allow_uid`."""

    __slots__ = ("_hold", "_i")

    def __init__(self, name: str, allow_uid: int = OWN_UID) -> None:
        from shmstore.bindings.hidden import held  # here, because it loads numpy

        box = ffi.gc(ffi.new("shms_inspector **"), lib.shms_inspector_drop)
        require(lib.shms_inspector_open(box, os.fsencode(name), allow_uid))
        self._i = owned(box)
        self._hold = held(self._i)

    def close(self) -> None:
        """Unmap when the last call in progress has ended; idempotent."""
        self._i, self._hold = ffi.NULL, None

    def facts(self, arena: int = 0) -> dict[str, Any]:
        """Return the fields of shms_facts for an arena, with the number of ranks of each group as `groups`.

        `tier` is as in `figures_of`.
        """
        record = ffi.new("shms_facts *")
        require(lib.shms_inspector_facts(self._i, arena, record))
        facts: dict[str, Any] = words_of(record)
        ranks = bytes(facts.pop("group_of")[0 : record.n_readers])
        facts["groups"] = tuple(ranks.count(group) for group in range(ranks[-1] + 1))
        return {**facts, "tier": figures_of(record.tier)}

    def open_leases(self, arena: int) -> int:
        """Return how many leases of an arena wait for a rank, or are held; it reads those that are in use."""
        return require(lib.shms_inspector_open_leases(self._i, arena))

    def kinds(self, arena: int) -> dict[int, tuple[str, KindFigures]]:
        """Return the name and the figures of each kind of an arena, by number."""
        return read_kinds(lambda inspector, out: lib.shms_inspector_kinds(inspector, arena, out), self._i)

    def ranks(self, n_readers: int) -> list[dict[str, Any]]:
        """Return the fields of shms_rank_record for each rank."""
        records = ffi.new("shms_rank_record[]", n_readers)
        require(lib.shms_inspector_ranks(self._i, records))
        return _dicts("shms_rank_record", records, n_readers)

    def slots(self) -> Iterator[dict[str, Any]]:
        """Yield the fields of shms_slot_record for each occupied slot; `pinned` is a list of words of bits."""
        return self._table("shms_slot_record", lib.shms_inspector_slots)

    def leases(self, at_once: int = _BATCH) -> Iterator[dict[str, Any]]:
        """Yield the fields of shms_lease_record for each open lease; `owed` is a list of words of bits."""
        return self._table("shms_lease_record", lib.shms_inspector_leases, at_once)

    def _table(self, kind: str, read: Any, at_once: int = _BATCH) -> Iterator[dict[str, Any]]:
        records = ffi.new(f"{kind}[]", at_once)
        at = ffi.new("uint64_t *")
        while n := require(read(self._i, at, records, at_once)):
            yield from _dicts(kind, records, n)

    def copy(self, slot: int, object_id: int, start: int, size: int) -> bytearray:
        """Return a copy of `size` bytes of an object, from `start` bytes after the start of its key."""
        out = bytearray(size)
        require(lib.shms_inspector_copy(self._i, slot, object_id, start, size, ffi.from_buffer(out)))
        return out

    def verify(self) -> list[dict[str, int]]:
        """Return the fields of shms_finding for each broken invariant, up to 1000."""
        records = ffi.new("shms_finding[]", _MAX_FINDINGS)
        n = require(lib.shms_inspector_verify(self._i, records, _MAX_FINDINGS))
        return _dicts("shms_finding", records, n)

    def check(self, slot: int, object_id: int) -> dict[str, int] | None:
        """Return what is wrong with an object's checksum; None if it is right or missing, or the object was evicted."""
        finding = ffi.new("shms_finding *")
        code = lib.shms_inspector_check(self._i, slot, object_id, finding)
        if code in (lib.SHMS_ESTALE, lib.SHMS_ENOTFOUND):
            return None
        return None if require(code) else words_of(finding)
