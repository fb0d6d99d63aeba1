"""Checks a store: every invariant that is visible from outside and, with checksums, every byte."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from shmstore.bindings import inspect as native
from shmstore.errors import CorruptStoreError, StaleRefError
from shmstore.files import is_here
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import ReaderInfo, SlotInfo, StoreFacts
from shmstore.namespaces import named
from shmstore.places import Folder
from shmstore.serde.decode import describe


@dataclass(frozen=True, slots=True)
class Finding:
    """One violated invariant."""

    kind: str
    """The name of the kind: that in csrc/inspect/inspect.h, in lower case, or "metadata"."""
    text: str
    """What was found, where, and what was expected, in one line."""
    wrong: bool
    """Whether it is damage. It is not if a writer left it that is dead, or may be stopped; `recover` corrects that."""
    writer: int | None
    """Number of the writer whose arena it is in; None if the store has one, or if it is of no arena."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found."""

    name: str
    findings: tuple[Finding, ...]
    """The findings, in the order of the tables."""
    objects: int
    checked_objects: int
    """Number of objects whose checksum was computed."""
    checked_bytes: int
    """Number of bytes under these checksums."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.wrong for finding in self.findings)


_LEFT_BY_A_DEATH = {
    *("used", "objects", "open_leases", "lease_object", "kind_bytes", "kind_objects"),
    *("holds", "unlisted", "index"),
}
_PASSING = {*_LEFT_BY_A_DEATH, "pin_free"}
"""What a living process may be in the middle of; damage only if it lasts."""
_OF_READERS = {"base", "ack", "pin_free", "pin_count", "unattached"}
"""What is wrong with what readers have written, and nothing that a successor of the writer needs."""
READERS = -1
"""Stands for them where others have the number of an arena."""
_PATIENCE = 2.0  # seconds that a busy machine may keep a process from going on

_TEXTS: dict[str, Callable[[int, int, int], str]] = {
    "hand": lambda w, v, e: f"the hand is at {v}; it must be aligned and inside the data region of {e} bytes",
    "used": lambda w, v, e: f"used_bytes is {v}, but the objects take {e}",
    "objects": lambda w, v, e: f"objects is {v}, but {e} slots are occupied",
    "open_leases": lambda w, v, e: f"open_leases is {v}, but {e} entries are in use",
    "counters": lambda w, v, e: f"the counters are impossible (next id {v}, next lease {e})",
    "pinning": lambda w, v, e: f"the writer pins slot {v}; it must be another writer's, below {e}",
    "holds": lambda w, v, e: f"the writer's leases on slot {w} lead to entry {v}, which is not a lease on it",
    "retired": lambda w, v, e: f"rank {w} was retired at attachment {v - 1}, but has had only {e - 1}",
    "state": lambda w, v, e: f"slot {w} is in state {v}, which does not exist",
    "bounds": lambda w, v, e: f"slot {w} has {e} bytes at {v}; they or the lengths in them lie outside the data region",
    "id": lambda w, v, e: f"slot {w} has object id {v}, but the next id is {e}",
    "flags": lambda w, v, e: f"slot {w} has flags {v:#x}, which do not exist",
    "overlap": lambda w, v, e: f"slots {v} and {w} share bytes",
    "same_id": lambda w, v, e: f"slots {v} and {w} both have object id {e}",
    "same_key": lambda w, v, e: f"slots {v} and {w} both can be handed out and have the same key",
    "key": lambda w, v, e: f"slot {w} has a key of {v} bytes; it must have 1 to {e}",
    "crc": lambda w, v, e: f"slot {w} has bytes with checksum {v:08x}, but they were stored with {e:08x}",
    "kind": lambda w, v, e: f"slot {w} has kind {v}, which has no name",
    "index": lambda w, v, e: f"slot {w} has object {v}, whose key is not in the index",
    "kind_bytes": lambda w, v, e: f"kind {w} has {v} bytes, but its objects take {e}",
    "kind_objects": lambda w, v, e: f"kind {w} has {v} objects, but {e} slots are occupied by it",
    "lease_number": lambda w, v, e: f"lease entry {w} has number {v}, but the next number is {e}",
    "lease_slot": lambda w, v, e: f"lease entry {w} names slot {v}, but there are {e} slots",
    "lease_object": lambda w, v, e: f"lease entry {w} names object {e} in slot {v}, which does not hold it",
    "lease_group": lambda w, v, e: f"lease entry {w} is for group {v - 1}, but there are {e} groups",
    "unlisted": lambda w, v, e: f"lease entry {w} has number {v} and is on slot {e}, whose owner cannot find it",
    "same_lease": lambda w, v, e: f"lease entries {v} and {w} both have number {e}",
    "base": lambda w, v, e: f"rank {w} starts at lease {v}, but the next one is {e}",
    "ack": lambda w, v, e: f"rank {w} has acknowledged lease {v}, but the next one is {e}",
    "pin_free": lambda w, v, e: f"rank {w} pins slot {v} {e} times, but the slot has no object",
    "pin_count": lambda w, v, e: f"rank {w} pins slot {v} {e} times, which is more than the limit",
    "unattached": lambda w, v, e: f"rank {w} has never attached, but its table is not empty",
}


def _may_be_stopped(pid: int | None, device: int, inode: int) -> bool:
    """Return whether the process of a store's file is stopped (SIGSTOP, a debugger), or cannot be seen from here.

    One of another PID namespace cannot: its number is nobody's here, or a process's that does not map the file.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "Tt" or not is_here(pid or 0, device, inode)


def _finding(kind: str, text: str, wrong: bool, arena: int, facts: StoreFacts) -> Finding:
    """Return a finding that names its arena if there are several."""
    if len(facts.writers) == 1 or kind == "unattached":
        return Finding(kind, text, wrong, None)
    return Finding(kind, f"{text} (writer {arena})", wrong, arena)


def _look(inspector: StoreInspector) -> list[Finding]:
    found, broken = [], inspector.raw_findings()
    facts = inspector.facts()
    may_be_stopped = cache(partial(_may_be_stopped, **inspector.file_numbers()))
    readers: tuple[ReaderInfo, ...] = ()
    for raw in broken:
        kind, wrong = native.KINDS[raw["kind"]], True
        if kind in _LEFT_BY_A_DEATH:
            writer = facts.writers[raw["arena"]]
            wrong = writer.state == "alive" and not may_be_stopped(writer.pid)
        if kind == "pin_free":
            readers = readers or inspector.readers()
            wrong = not may_be_stopped(readers[raw["where"]].pid)
        text = _TEXTS[kind](raw["where"], raw["value"], raw["expected"])
        found.append(_finding(kind, text, wrong, raw["arena"], facts))
    return found


def _from_tables(inspector: StoreInspector) -> list[Finding]:
    end = time.monotonic() + _PATIENCE
    found = _look(inspector)
    while time.monotonic() < end and any(finding.wrong and finding.kind in _PASSING for finding in found):
        before = set(found)
        found = [finding for finding in _look(inspector) if finding in before or finding.kind not in _PASSING]
    return found


def _from_object(inspector: StoreInspector, slot: SlotInfo, facts: StoreFacts) -> Finding | None:
    name = named(slot.key, slot.namespace)
    broken = inspector.wrong_checksum(slot)
    if broken is not None:
        text = _TEXTS["crc"](slot.slot, broken["value"], broken["expected"])
        return _finding("crc", f"{text} (object {slot.object_id}, key {name})", True, slot.writer, facts)
    try:
        describe(inspector.metadata(slot), slot.payload_bytes)
    except StaleRefError:
        return None
    except CorruptStoreError as error:
        text = f"slot {slot.slot}, object {slot.object_id}, key {name}: {error}"
        return _finding("metadata", text, False, slot.writer, facts)
    return None


def damage(inspector: StoreInspector) -> dict[int, str]:
    """Return, for each writer whose arena is damaged, and for `READERS`, the first thing that is wrong there."""
    found: dict[int, str] = {}
    for finding in _from_tables(inspector):
        if finding.wrong:
            found.setdefault(READERS if finding.kind in _OF_READERS else finding.writer or 0, finding.text)
    return found


def verify(name: str, dir: Folder | None = None, allow_uid: int | None = None) -> VerifyReport:
    """Check a store, alive, stopped or dead, and report all findings; it changes nothing and stops no process.

    `allow_uid` is that of `StoreInspector.open`, whose errors it raises if the superblock cannot be read.
    It takes two seconds longer if it finds what a living process might be in the middle of.
    Metadata that the default serializer cannot read is a finding but not damage, because another serializer may have
    written it.
    """
    with StoreInspector.open(name, dir, allow_uid) as inspector:
        facts = inspector.facts()
        findings = _from_tables(inspector)
        objects = checked = checked_bytes = 0
        for slot in inspector.slots():
            if slot.moving or not slot.bounded:
                continue
            objects += 1
            if slot.crc is not None:
                checked += 1
                checked_bytes += slot.key_len + slot.meta_len + slot.payload_bytes
            finding = _from_object(inspector, slot, facts)
            if finding is not None:
                findings.append(finding)
    return VerifyReport(inspector.name, tuple(findings), objects, checked, checked_bytes)
