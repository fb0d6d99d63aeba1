"""`StoreInspector`: a look into one segment."""

import time
from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal, Self

from shmstore.bindings import inspect as native
from shmstore.errors import (
    CorruptStoreError,
    LayoutMismatchError,
    ObjectNotFoundError,
    SparseStoreError,
    StaleRefError,
    StoreNotFoundError,
    shown,
)
from shmstore.inspect.records import LeaseInfo, ReaderInfo, SlotInfo, StoreFacts, StoreSnapshot
from shmstore.store.refusals import other_version, unfinished

__all__ = ["StoreInspector", "facts_from"]

_MAX_SHOWN_KEY = 65536
_PLAIN_FACTS = {field.name for field in fields(StoreFacts)} - {"store_id", "created_at", "options", "recoveries"}


def seconds(ns: int) -> float:
    """Return nanoseconds as seconds."""
    return ns / 1e9


@lru_cache(maxsize=256)  # most objects and leases of a store have the same ranks
def _bits(words: tuple[int, ...]) -> tuple[int, ...]:
    number = sum(int(word) << 64 * i for i, word in enumerate(words))
    return tuple(rank for rank in range(number.bit_length()) if number >> rank & 1)


def facts_from(raw: dict[str, int]) -> StoreFacts:
    """Return the record of what C has read."""
    plain: dict[str, Any] = {name: raw[name] for name in _PLAIN_FACTS}
    plain["writer_alive"] = bool(raw["writer_alive"])
    plain["moving"] = bool(raw["moving"])
    return StoreFacts(
        **plain,
        store_id=raw["store"],
        created_at=seconds(raw["created_ns"]),
        options=tuple(name for name, bit in native.FLAGS.items() if raw["flags"] & bit),
        recoveries=max(0, raw["writer_epoch"] - 1),
    )


def _reader(raw: dict[str, int], now: float) -> ReaderInfo:
    state: Literal["alive", "dead", "retired", "awaited"] = "alive"
    if not raw["alive"]:
        state = "retired" if raw["retired"] else "dead" if raw["epoch"] else "awaited"
    return ReaderInfo(
        rank=raw["rank"],
        state=state,
        retired=bool(raw["retired"]),
        pid=raw["pid"] if raw["epoch"] else None,
        attachments=raw["epoch"],
        attached_at=seconds(raw["attached_ns"]) if raw["epoch"] else None,
        gets=raw["gets"],
        stale=raw["stale"],
        released=raw["released"],
        pins=raw["pins"] if raw["alive"] else 0,
        pins_left=0 if raw["alive"] else raw["pins"],
        pinned_objects=raw["pinned_objects"],
        pinned_bytes=raw["pinned_bytes"],
        unacknowledged=raw["owed_leases"],
        unacknowledged_bytes=raw["owed_bytes"],
        lag_seconds=max(0.0, now - seconds(raw["oldest_owed_ns"])) if raw["owed_leases"] else None,
        held_bytes=raw["held_bytes"],
        moving=bool(raw["moving"]),
    )


class StoreInspector:
    """Looks into one store, alive, stopped or dead, without a lock, a rank, or a change; made by `open`.

    Every record is consistent in itself while the writer works; csrc/inspect/inspect.c says why. Not for the hot path.
    """

    def __init__(self, native_inspector: native.Inspector, name: str) -> None:
        """Wrap an opened segment; callers use `open`."""
        self._native = native_inspector
        self.name = name

    @classmethod
    def open(cls, name: str) -> "StoreInspector":
        """Map the segment read-only.

        Raises StoreNotFoundError; LayoutMismatchError for a file that is not ours, of another version or not yet
        published; CorruptStoreError for a damaged superblock; SparseStoreError for a file with holes;
        PermissionError for one that may not be read.
        """
        if not name or "/" in name or "\0" in name:
            raise no_store(name)
        try:
            return cls(native.Inspector(name), name)
        except StoreNotFoundError:
            raise no_store(name) from None
        except LayoutMismatchError:
            raise _why_not(name) from None
        except SparseStoreError as error:
            raise SparseStoreError(f"{name!r}: {error.message}") from None
        except ValueError as error:
            if isinstance(error, CorruptStoreError):
                raise CorruptStoreError(
                    f"the superblock of {shown(name)} contradicts itself",
                    hint="it cannot be recovered; shmstore gc removes it",
                ) from None
            raise no_store(name) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap; idempotent."""
        self._native.close()

    def facts(self) -> StoreFacts:
        """Return the superblock as of now."""
        return facts_from(self._native.facts())

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
                entry=raw["entry"],
                number=raw["number"],
                slot=raw["slot"],
                object_id=raw["id"],
                opened_at=seconds(raw["opened_ns"]),
                age_seconds=max(0.0, now - seconds(raw["opened_ns"])),
                waiting_for=_bits(tuple(raw["owed"])),
                moving=bool(raw["moving"]),
            )
            for raw in self._native.leases()
        ]
        return tuple(sorted(found, key=lambda lease: lease.number))

    def slots(self) -> tuple[SlotInfo, ...]:
        """Return the occupied slots in address order."""
        return self._slots(self.leases())

    def _slots(self, leases: Iterable[LeaseInfo]) -> tuple[SlotInfo, ...]:
        owed: dict[tuple[int, int], set[int]] = {}
        for lease in leases:
            owed.setdefault((lease.slot, lease.object_id), set()).update(lease.waiting_for)
        found = [self._slot(raw, owed) for raw in self._native.slots()]
        return tuple(sorted(found, key=lambda slot: slot.offset))

    def _slot(self, raw: dict[str, Any], owed: dict[tuple[int, int], set[int]]) -> SlotInfo:
        moving = bool(raw["moving"])
        return SlotInfo(
            slot=raw["slot"],
            state=native.STATES.get(raw["state"], str(raw["state"])),
            object_id=raw["id"],
            key=None if moving or not raw["bounded"] else self._key(raw),
            offset=raw["offset"],
            length=raw["length"],
            span=raw["span"],
            key_len=raw["key_len"],
            meta_len=raw["meta_len"],
            stored_at=seconds(raw["put_ns"]) if raw["put_ns"] else None,
            deleted=bool(raw["deleted"]),
            crc=raw["crc"] if raw["checked"] else None,
            pinned_by=_bits(tuple(raw["pinned"])),
            leased_to=tuple(sorted(owed.get((raw["slot"], raw["id"]), ()))),
            bounded=bool(raw["bounded"]),
            moving=moving,
        )

    def _key(self, raw: dict[str, Any]) -> str | None:
        try:
            key = self._native.copy(raw["slot"], raw["id"], 0, min(raw["key_len"], _MAX_SHOWN_KEY))
        except (StaleRefError, CorruptStoreError, ValueError):
            return None
        return key.decode(errors="backslashreplace")

    def snapshot(self) -> StoreSnapshot:
        """Return everything at once."""
        leases = self.leases()
        slots = self._slots(leases)
        return StoreSnapshot(self.name, time.time(), self.facts(), self.readers(), slots, leases)

    def find(self, *, key: str | None = None, object_id: int | None = None) -> SlotInfo:
        """Return the slot of an object, by its key (one that can be handed out first) or its id.

        Raises ObjectNotFoundError.
        """
        if (key is None) == (object_id is None):
            raise TypeError("find takes either key or object_id")
        found = [s for s in self.slots() if (s.key == key if object_id is None else s.object_id == object_id)]
        if not found:
            what = f"object {object_id}" if object_id is not None else f"object of key {shown(key)}"
            raise ObjectNotFoundError(
                f"there is no {what} in {shown(self.name)}", hint="shmstore dump shows what there is"
            )
        return min(found, key=lambda slot: slot.deleted)

    def metadata(self, slot: SlotInfo) -> bytes:
        """Return a copy of an object's metadata; StaleRefError where it has gone."""
        return bytes(self._native.copy(slot.slot, slot.object_id, slot.key_len, slot.meta_len))

    def payload(self, slot: SlotInfo, start: int, size: int) -> bytearray:
        """Return a copy of `size` bytes of an object's payload from `start` on; StaleRefError where it has gone."""
        return self._native.copy(slot.slot, slot.object_id, slot.payload_at + start, size)

    def raw_findings(self) -> list[dict[str, int]]:
        """Return what verify.c finds wrong with the tables, as it comes; `shmstore.inspect.verify` explains it."""
        return self._native.verify()

    def wrong_checksum(self, slot: SlotInfo) -> dict[str, int] | None:
        """Return what is wrong with an object's checksum, as it comes; None where it is right, absent, or has gone."""
        return self._native.check(slot.slot, slot.object_id)


def no_store(name: str) -> StoreNotFoundError:
    """Return the error for a name that nothing in /dev/shm has."""
    return StoreNotFoundError(f"there is no store named {shown(name)}", hint="shmstore ls shows what there is")


def foreign(name: str) -> LayoutMismatchError:
    """Return the error for a file, or a folder, of /dev/shm that is none of ours."""
    return LayoutMismatchError(f"/dev/shm/{name} is no store", hint="shmstore ls shows the stores of this host")


def _why_not(name: str) -> Exception:
    """Say what the file is, where it is no segment that this build can read."""
    try:
        seen = native.probe(name)
    except LayoutMismatchError:  # no regular file
        return foreign(name)
    if not seen["ours"]:
        return foreign(name)
    if not seen["published"]:
        return unfinished(name, bool(seen["writer_alive"]))
    if seen["same_version"]:
        return CorruptStoreError(
            f"the file of {shown(name)} has {seen['size']} bytes, which is not what its superblock says",
            hint="it cannot be recovered; shmstore gc removes it",
        )
    return other_version(name)
