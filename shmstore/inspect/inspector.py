"""`StoreInspector`: reads one segment from outside."""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Self, TypeAlias

from shmstore import namespaces
from shmstore.bindings import inspect as native
from shmstore.errors import (
    CorruptStoreError,
    ForeignStoreError,
    LayoutMismatchError,
    ObjectNotFoundError,
    SparseStoreError,
    StaleRefError,
    StoreNotFoundError,
    shown,
)
from shmstore.files import classify, no_store
from shmstore.inspect.records import (
    LeaseInfo,
    ReaderInfo,
    ReaderState,
    SeenCounts,
    SlotInfo,
    StoreFacts,
    StoreSnapshot,
    WriterInfo,
    WriterState,
)
from shmstore.places import Folder, place_of
from shmstore.store.arguments import checked_id
from shmstore.store.diagnostics import cannot_open, foreign, unusable
from shmstore.store.stats import KindStats, ReaderCounters, sum_of_tiers, tier_stats

_MAX_SHOWN_KEY = 65536
_Figures: TypeAlias = tuple[int, int, int | None]
_COUNTS = [field.name for field in fields(SeenCounts)]
_READER_COUNTS = [field.name for field in fields(ReaderCounters)]
_SAME = {
    ReaderInfo: ("rank", "group", "pinned_objects", "pinned_bytes", "held_bytes"),
    LeaseInfo: ("entry", "writer", "number", "slot"),
    SlotInfo: ("slot", "writer", "offset", "length", "span", "key_len", "meta_len", "extra_len"),
}
"""The fields that a record of C has under the same name."""
_LIMITS = {"used_bytes": "capacity", "objects": "max_objects", "open_leases": "max_leases"}


def seconds(ns: int) -> float:
    """Return nanoseconds as seconds."""
    return ns / 1e9


@lru_cache(maxsize=256)  # most objects and leases of a store have equal sets of ranks
def _bits(words: tuple[int, ...]) -> tuple[int, ...]:
    number = sum(int(word) << 64 * i for i, word in enumerate(words))
    return tuple(rank for rank in range(number.bit_length()) if number >> rank & 1)


def _state(raw: dict[str, Any]) -> WriterState:
    if raw["writer_alive"]:
        return "alive"
    return "free" if not raw["writer_epoch"] else "dead" if raw["writer_pid"] else "closed"


def _writer(index: int, raw: dict[str, Any]) -> WriterInfo:
    possible = {name: min(raw[name], raw[limit]) for name, limit in _LIMITS.items()}  # damaged tables say anything
    return WriterInfo(
        **{name: raw[name] for name in _COUNTS}
        | possible
        | {"moving": bool(raw["moving"]), "tier": tier_stats(raw["tier"])},
        index=index,
        state=_state(raw),
        pid=raw["writer_pid"] or None,
        recoveries=max(0, raw["writer_epoch"] - 1),
    )


_OF_ALL = ("file_size", "control_bytes", "max_object_size", "n_readers", "groups", "finds", "find_misses")


def facts_from(arenas: Sequence[dict[str, Any]]) -> StoreFacts:
    """Return the record of the facts that C has read of each arena."""
    writers = tuple(_writer(index, raw) for index, raw in enumerate(arenas))
    counts: dict[str, Any] = {name: sum(getattr(w, name) for w in writers) for name in _COUNTS if name != "tier"}
    counts["tier"] = sum_of_tiers(w.tier for w in writers)
    counts["next_lease"] = 1 + sum(w.next_lease - 1 for w in writers)
    counts["next_id"] = max(w.next_id for w in writers)
    counts["hand"] = writers[0].hand
    counts["moving"] = any(w.moving for w in writers)
    first = next((w for w in writers if w.state == "alive"), writers[0])
    raw = arenas[0]
    options = [name for name, bit in native.FLAGS.items() if raw["flags"] & bit]
    return StoreFacts(
        **counts,
        **{name: raw[name] for name in _OF_ALL},
        store_id=raw["store"],
        created_at=seconds(raw["created_ns"]),
        options=tuple(options),
        writer_alive=first.state == "alive",
        writer_pid=first.pid or 0,
        owner_pid=raw["owner_pid"] or None,
        recoveries=sum(w.recoveries for w in writers),
        writers=writers,
    )


def _sum_of(figures: Sequence[_Figures]) -> KindStats:
    """Return the figures of a kind in all arenas that have it; without a limit, if one of them has none."""
    sizes, objects, quotas = zip(*figures, strict=True)
    limits = [quota for quota in quotas if quota is not None]
    return KindStats(sum(sizes), sum(objects), sum(limits) if len(limits) == len(quotas) else None)


def _reader(raw: dict[str, int], now: float) -> ReaderInfo:
    state: ReaderState = "closed" if raw["closed"] else "alive"
    if not raw["alive"]:
        state = "retired" if raw["retired"] else state if raw["closed"] else "dead" if raw["epoch"] else "awaited"
    return ReaderInfo(
        **{name: raw[name] for name in (*_SAME[ReaderInfo], *_READER_COUNTS)},
        state=state,
        retired=bool(raw["retired"]),
        pid=raw["pid"] if raw["epoch"] else None,
        attachments=raw["epoch"],
        attached_at=seconds(raw["attached_ns"]) if raw["epoch"] else None,
        pins=raw["pins"] if raw["alive"] else 0,
        pins_left=0 if raw["alive"] else raw["pins"],
        unacknowledged=raw["owed_leases"],
        unacknowledged_bytes=raw["owed_bytes"],
        lag_seconds=max(0.0, now - seconds(raw["oldest_owed_ns"])) if raw["owed_leases"] else None,
        moving=bool(raw["moving"]),
    )


class StoreInspector:
    """Reads one store, alive, stopped or dead, without a lock or a rank, and changes nothing; made by `open`.

    Each record is consistent while the writer works; csrc/inspect/inspect.c says why. It is not for the hot path.
    """

    def __init__(self, native_inspector: native.Inspector, name: str) -> None:
        """Wrap an opened segment; call `open` instead."""
        self._native = native_inspector
        self.name = name

    @classmethod
    def open(cls, name: str, dir: Folder | None = None, allow_uid: int | None = None) -> "StoreInspector":
        """Map the segment read-only and return its inspector; `name` may be the path of its file.

        The store must be this user's, or that of user `allow_uid`, who can end this process by cutting the file short.
        Raises StoreNotFoundError if there is no such file, and ForeignStoreError if it is another user's. Raises
        LayoutMismatchError for a file that is not a store, has another version or is not yet published. Raises
        CorruptStoreError for a damaged superblock, and SparseStoreError for a file with holes. Raises SharedMemoryError
        if it cannot be mapped.
        """
        place = place_of(name, dir)
        if "\0" in name:
            raise no_store(place)
        uid = native.OWN_UID if allow_uid is None else checked_id(allow_uid)
        try:
            return cls(native.Inspector(place, uid), os.path.basename(place))
        except LayoutMismatchError:
            raise cannot_open(classify(place)) from None
        except ForeignStoreError:
            raise foreign(place, allow_uid=uid) from None
        except SparseStoreError as error:
            raise SparseStoreError(f"{place!r}: {error.message}") from None
        except CorruptStoreError:
            raise CorruptStoreError(
                f"the superblock of {shown(place)} contradicts itself",
                hint="remove it with shmstore gc; it cannot be recovered",
            ) from None
        except (StoreNotFoundError, ValueError):
            raise no_store(place) from None
        except OSError as error:
            raise unusable(error, place) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the segment; idempotent."""
        self._native.close()

    def facts(self) -> StoreFacts:
        """Return the current superblock and the counts of the writers."""
        see = self._native
        return facts_from([{**see.facts(a), "open_leases": see.open_leases(a)} for a in self._arenas()])

    def file_numbers(self) -> dict[str, int]:
        """Return the device and inode of the file."""
        facts = self._native.facts()
        return {name: facts[name] for name in ("device", "inode")}

    def kinds(self) -> dict[str, KindStats]:
        """Return the figures of each kind of objects."""
        of_arenas = [dict(kinds.values()) for kinds in self._kinds()]
        names = dict.fromkeys(name for kinds in of_arenas for name in kinds)
        return {name: _sum_of([kinds[name] for kinds in of_arenas if name in kinds]) for name in names}

    def _kinds(self) -> list[dict[int, tuple[str, _Figures]]]:
        return [self._native.kinds(arena) for arena in self._arenas()]

    def _arenas(self) -> range:
        return range(self._native.facts()["n_writers"])

    def readers(self) -> tuple[ReaderInfo, ...]:
        """Return a record for each rank."""
        n_readers = self._native.facts()["n_readers"]
        now = time.time()
        return tuple(_reader(raw, now) for raw in self._native.ranks(n_readers))

    def leases(self) -> tuple[LeaseInfo, ...]:
        """Return the open leases, oldest first."""
        now = time.time()
        found = [
            LeaseInfo(
                **{name: raw[name] for name in _SAME[LeaseInfo]},
                object_id=raw["id"],
                opened_at=seconds(raw["opened_ns"]),
                age_seconds=max(0.0, now - seconds(raw["opened_ns"])),
                waiting_for=_bits(tuple(raw["owed"])),
                held=bool(raw["held"]),
                group=raw["group"] - 1 if raw["group"] else None,
                remote_owner=None if raw["owner"] == raw["writer"] else raw["owner"],
                void=bool(raw["is_void"]),
                moving=bool(raw["moving"]),
            )
            for raw in self._native.leases()
        ]
        return tuple(sorted(found, key=lambda lease: (lease.opened_at, lease.number)))

    def slots(self) -> tuple[SlotInfo, ...]:
        """Return the occupied slots in the order of the arenas and of their addresses."""
        return self._slots(self.leases())

    def _slots(self, leases: Iterable[LeaseInfo]) -> tuple[SlotInfo, ...]:
        of_object: dict[tuple[int, int], list[LeaseInfo]] = {}
        for lease in leases:
            if not lease.void:
                of_object.setdefault((lease.slot, lease.object_id), []).append(lease)
        kinds = self._kinds()
        found = [
            self._slot(raw, of_object.get((raw["slot"], raw["id"]), []), kinds[raw["writer"]])
            for raw in self._native.slots()
        ]
        return tuple(sorted(found, key=lambda slot: (slot.writer, slot.offset)))

    def _slot(
        self,
        raw: dict[str, Any],
        leases: Sequence[LeaseInfo],
        kinds: dict[int, tuple[str, _Figures]],
    ) -> SlotInfo:
        moving = bool(raw["moving"])
        namespace, key = (None, None) if moving or not raw["bounded"] else self._key(raw)
        return SlotInfo(
            **{name: raw[name] for name in _SAME[SlotInfo]},
            state=native.STATES.get(raw["state"], str(raw["state"])),
            object_id=raw["id"],
            key=key,
            namespace=namespace,
            kind=kinds[raw["kind"]][0] if raw["kind"] in kinds else None,
            stored_at=seconds(raw["put_ns"]) if raw["put_ns"] else None,
            deleted=bool(raw["deleted"]),
            crc=raw["crc"] if raw["checked"] else None,
            pinned_by=_bits(tuple(raw["pinned"])),
            leased_to=tuple(sorted({rank for lease in leases for rank in lease.waiting_for})),
            held=any(lease.held for lease in leases),
            leased_by=tuple(sorted({lease.writer for lease in leases if lease.remote_owner is not None})),
            bounded=bool(raw["bounded"]),
            moving=moving,
        )

    def _key(self, raw: dict[str, Any]) -> tuple[str | None, str | None]:
        try:
            key = self._native.copy(raw["slot"], raw["id"], 0, min(raw["key_len"], _MAX_SHOWN_KEY))
        except (StaleRefError, CorruptStoreError, ValueError):
            return None, None
        return namespaces.split(bytes(key))

    def snapshot(self) -> StoreSnapshot:
        """Return the facts, readers, slots and leases together."""
        leases = self.leases()
        slots = self._slots(leases)
        return StoreSnapshot(self.name, time.time(), self.facts(), self.readers(), slots, leases, self.kinds())

    def find(self, *, key: str | None = None, object_id: int | None = None, namespace: str | None = None) -> SlotInfo:
        """Return the slot of an object, by its key (and namespace, if it has one) or its id.

        If several objects have the key, it returns one that is not deleted. Raises ObjectNotFoundError.
        """
        wanted = (key, namespace) if object_id is None else object_id
        found = [s for s in self.slots() if wanted == ((s.key, s.namespace) if object_id is None else s.object_id)]
        if not found:
            what = (
                f"object {object_id}" if object_id is not None else f"object of key {namespaces.named(key, namespace)}"
            )
            raise ObjectNotFoundError(
                f"there is no {what} in {shown(self.name)}", hint="list the objects with shmstore dump"
            )
        return min(found, key=lambda slot: slot.deleted)

    def metadata(self, slot: SlotInfo) -> bytes:
        """Return a copy of an object's metadata. Raises StaleRefError if the object was evicted."""
        return bytes(self._native.copy(slot.slot, slot.object_id, slot.key_len, slot.meta_len))

    def payload(self, slot: SlotInfo, start: int, size: int) -> bytearray:
        """Return a copy of `size` bytes of an object's payload from `start` on.

        Raises StaleRefError if the object was evicted.
        """
        return self._native.copy(slot.slot, slot.object_id, slot.payload_at + start, size)

    def raw_findings(self) -> list[dict[str, int]]:
        """Return the findings of verify.c in the tables; `shmstore.inspect.verify` explains them."""
        return self._native.verify()

    def wrong_checksum(self, slot: SlotInfo) -> dict[str, int] | None:
        """Return the raw finding if an object's checksum is wrong, else None; also None if the object was evicted."""
        return self._native.check(slot.slot, slot.object_id)
