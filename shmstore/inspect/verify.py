"""Is a store sound? Every invariant that can be seen from outside and, where there are checksums, every byte."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shmstore.bindings import inspect as native
from shmstore.errors import CorruptStoreError, StaleRefError, shown
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import ReaderInfo, SlotInfo, StoreFacts
from shmstore.inspect.tree import parse_tree

__all__ = ["Finding", "VerifyReport", "verify"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    kind: str
    """Its name: that of csrc/inspect/inspect.h, in lower case, or "metadata"."""
    text: str
    """What, where, and what was expected, in one line."""
    wrong: bool
    """False: a writer that died or was stopped between two stores leaves this; `recover` puts it right."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found."""

    name: str
    """The store's name."""
    findings: tuple[Finding, ...]
    """In the order of the tables."""
    objects: int
    """Objects looked at."""
    checked_objects: int
    """Objects whose checksum was computed."""
    checked_bytes: int
    """Bytes that it was computed over."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.wrong for finding in self.findings)


_LEFT_BY_A_DEATH = {"used", "objects", "open_leases", "lease_object"}

_TEXTS: dict[str, Callable[[int, int, int], str]] = {
    "hand": lambda w, v, e: f"the hand is at {v}, outside the data region of {e} bytes or not aligned",
    "used": lambda w, v, e: f"used_bytes says {v}, the objects take {e}",
    "objects": lambda w, v, e: f"objects says {v}, {e} slots are occupied",
    "open_leases": lambda w, v, e: f"open_leases says {v}, {e} entries are in use",
    "published": lambda w, v, e: f"leases below {v} are said to be handed out, the next one is {e}",
    "retired": lambda w, v, e: f"rank {w} was retired at attachment {v - 1}, and has had {e - 1}",
    "state": lambda w, v, e: f"slot {w} is in state {v}, which there is not",
    "bounds": lambda w, v, e: f"slot {w}: {e} bytes at {v}, or the lengths in them, leave the data region",
    "id": lambda w, v, e: f"slot {w} has object id {v}, the next one is {e}",
    "flags": lambda w, v, e: f"slot {w} has flags {v:#x}, which nobody writes",
    "overlap": lambda w, v, e: f"slots {v} and {w} share bytes",
    "same_id": lambda w, v, e: f"slots {v} and {w} both have object id {e}",
    "same_key": lambda w, v, e: f"slots {v} and {w} have the same key, and both can be handed out",
    "key": lambda w, v, e: f"slot {w} has a key of {v} bytes; 1 to {e} are allowed",
    "crc": lambda w, v, e: f"slot {w}: the bytes have the checksum {v:08x}, they were stored with {e:08x}",
    "lease_number": lambda w, v, e: f"lease entry {w} has number {v}, the next one is {e}",
    "lease_slot": lambda w, v, e: f"lease entry {w} names slot {v} of {e}",
    "lease_object": lambda w, v, e: f"lease entry {w} is for object {e} in slot {v}, which is not there",
    "same_lease": lambda w, v, e: f"lease entries {v} and {w} both have number {e}",
    "base": lambda w, v, e: f"rank {w} starts at lease {v}, the next one is {e}",
    "ack": lambda w, v, e: f"rank {w} has acknowledged lease {v}, the next one is {e}",
    "pin_free": lambda w, v, e: f"rank {w} pins slot {v} {e} times, where no object is",
    "pin_count": lambda w, v, e: f"rank {w} pins slot {v} {e} times, more than there can be views",
    "unattached": lambda w, v, e: f"rank {w} has never attached, and its table is not empty",
}


def _stopped(pid: int | None) -> bool:
    """Is this process stopped (SIGSTOP, a debugger)? Not known: no."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


def _from_tables(inspector: StoreInspector, facts: StoreFacts) -> list[Finding]:
    paused = not facts.writer_alive or _stopped(facts.writer_pid)
    found = []
    readers: tuple[ReaderInfo, ...] = ()
    for raw in inspector.raw_findings():
        kind = native.KINDS[raw["kind"]]
        wrong = not (paused and kind in _LEFT_BY_A_DEATH)
        if kind == "pin_free":
            readers = readers or inspector.readers()
            wrong = not _stopped(readers[raw["where"]].pid)
        text = _TEXTS[kind](raw["where"], raw["value"], raw["expected"])
        found.append(Finding(kind, text, wrong))
    return found


def _from_object(inspector: StoreInspector, slot: SlotInfo) -> Finding | None:
    broken = inspector.wrong_checksum(slot)
    if broken is not None:
        text = _TEXTS["crc"](slot.slot, broken["value"], broken["expected"])
        return Finding("crc", f"{text} (object {slot.object_id}, key {shown(slot.key)})", True)
    try:
        parse_tree(inspector.metadata(slot), slot.payload_bytes)
    except StaleRefError:
        return None
    except CorruptStoreError as error:
        return Finding("metadata", f"slot {slot.slot}, object {slot.object_id}, key {shown(slot.key)}: {error}", False)
    return None


def verify(name: str) -> VerifyReport:
    """Check a store, alive, stopped or dead, and say all that is wrong with it; changes nothing, stops nobody.

    Metadata that the default serializer cannot read is noted and not held wrong: another one may have written it.
    Raises as `StoreInspector.open` does where the superblock cannot be read.
    """
    with StoreInspector.open(name) as inspector:
        findings = _from_tables(inspector, inspector.facts())
        objects = checked = checked_bytes = 0
        for slot in inspector.slots():
            if slot.moving or not slot.bounded:
                continue
            objects += 1
            if slot.crc is not None:
                checked += 1
                checked_bytes += slot.key_len + slot.meta_len + slot.payload_bytes
            finding = _from_object(inspector, slot)
            if finding is not None:
                findings.append(finding)
    return VerifyReport(name, tuple(findings), objects, checked, checked_bytes)
