"""`verify` finds every kind of damage, says where, and finds none in what is sound, at work, stopped or dead."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shmstore import ObjectStoreReader, ObjectStoreWriter
from shmstore.bindings import inspect as native
from shmstore.inspect import verify as module
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.verify import VerifyReport, verify
from tests.inspect.cases import CONDITIONS, OPTIONS, case, fill, peek, piped, poke, running, stop, three_writers
from tests.layout import FIELDS, SIZES, fields
from tests.support import SHM, Stores, store_name

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADER_KINDS = set(re.findall(r"#define SHMS_F_(\w+)", (CSRC / "inspect" / "inspect.h").read_text()))
SLOT, LEASE, RANK = (fields(f"shms_{table}") for table in ("slot", "lease", "reader_table"))


def slot_at(path: Path, index: int, field: str = "state") -> int:
    return peek(path, FIELDS["slots_at"]) + SIZES["shms_slot"] * index + SLOT[field]


def lease_at(path: Path, entry: int, field: str) -> int:
    return peek(path, FIELDS["leases_at"]) + SIZES["shms_lease"] * entry + LEASE[field]


def rank_at(path: Path, rank: int) -> int:
    return peek(path, FIELDS["readers_at"]) + peek(path, FIELDS["reader_stride"]) * rank


def pin_at(path: Path, rank: int, slot: int) -> int:
    return rank_at(path, rank) + SIZES["shms_reader_table"] + SIZES["shms_pin"] * slot


def ack_at(path: Path, rank: int, entry: int) -> int:
    slots = peek(path, FIELDS["max_objects"]) * peek(path, FIELDS["n_writers"])
    return pin_at(path, rank, slots) + 8 * entry


def of_writer(path: Path, writer: int, at: int) -> int:
    """Return where a writer has what writer 0 has at that offset."""
    return at + writer * peek(path, FIELDS["arena_stride"])


def cells_of(path: Path, slot: int) -> list[int]:
    """Return where the index of writer 0 names the slot: in a cell, which holds a tag and the slot."""
    start, end = peek(path, FIELDS["index_at"]), peek(path, FIELDS["holds_at"])
    cells = [at for at in range(start, end, 8) if at % 64 != 56]
    return [at for at in cells if peek(path, at) and peek(path, at) % (1 << 24) == slot]


def first_at(path: Path, writer: int, slot: int) -> int:
    return of_writer(path, writer, peek(path, FIELDS["holds_at"])) + SIZES["shms_holds"] * slot


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For damage in what is idle: no time to end what is not going on."""
    monkeypatch.setattr(module, "_PATIENCE", 0.0)


@pytest.fixture
def store(stores: Stores) -> tuple[Path, ObjectStoreWriter, ObjectStoreReader]:
    """A live, sound store: five objects and a deleted one, seven leases, rank 0 attached, rank 1 awaited."""
    writer = stores.create(**OPTIONS)
    fill(writer)
    reader = stores.attach(writer, 0)
    return SHM / writer.name, writer, reader


def wrong(report: VerifyReport) -> set[str]:
    return {finding.kind for finding in report.findings if finding.wrong}


def damages(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Return, for each kind of finding, the words to overwrite (offset, value) that make one."""
    slots = {peek(path, slot_at(path, i, "id")): i for i in range(16) if peek(path, slot_at(path, i)) == 2}
    one, two, five = slots[1], slots[2], slots[5]
    free = next(i for i in range(16) if i not in slots.values())
    offset = peek(path, slot_at(path, two, "offset"))
    return {
        "hand": [(FIELDS["hand"], 1 << 40)],
        "used": [(FIELDS["used_bytes"], 64)],
        "objects": [(FIELDS["objects"], 99)],
        "open_leases": [(FIELDS["open_leases"], 99)],
        "retired": [(FIELDS["retired"], 77)],
        "counters": [(FIELDS["published"], 1 << 40)],
        "state": [(slot_at(path, one), 9)],
        "bounds": [(slot_at(path, one, "offset"), 1 << 50)],
        "id": [(slot_at(path, one, "id"), 1 << 40)],
        "flags": [(slot_at(path, one, "flags"), 1 << 7)],
        "overlap": [(slot_at(path, one, "offset"), offset)],
        "same_id": [(slot_at(path, one, "id"), 2)],
        "same_key": [(slot_at(path, one, "offset"), offset)],
        "key": [(slot_at(path, one, "head"), 5 << 32)],
        "crc": [(slot_at(path, five, "flags"), peek(path, slot_at(path, five, "flags")) ^ 1 << 40)],
        "kind": [(slot_at(path, one, "flags"), peek(path, slot_at(path, one, "flags")) | 7 << 2)],
        "kind_bytes": [(FIELDS["kinds"] + 24, 64)],
        "kind_objects": [(FIELDS["kinds"] + 48 + 32, 99)],
        "lease_number": [(lease_at(path, 0, "number"), 1 << 40)],
        "lease_slot": [(lease_at(path, 0, "what"), 16)],
        "lease_group": [(lease_at(path, 0, "what"), one | 2 << 25)],
        "lease_object": [(lease_at(path, 0, "id"), 3), (lease_at(path, 0, "what"), free)],
        "same_lease": [(lease_at(path, 0, "number"), peek(path, lease_at(path, 1, "number")))],
        "index": [(cell, 0) for cell in cells_of(path, one)],
        "base": [(rank_at(path, 0) + RANK["base"], 1 << 40)],
        "ack": [(ack_at(path, 0, 3), 1 << 40)],
        "pin_free": [(pin_at(path, 0, free & ~1), 1 if free % 2 == 0 else 1 << 32)],
        "pin_count": [(pin_at(path, 0, 0), 0xFFFFFFFF)],
        "unattached": [(pin_at(path, 1, 0), 1)],
    }


KINDS = sorted(native.KINDS.values())


def damages_of_several(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Return the same for writer 1 of the store of `three_writers`."""
    slots, entries = peek(path, FIELDS["max_objects"]), peek(path, FIELDS["max_leases"])
    return {
        "used": [(of_writer(path, 1, FIELDS["used_bytes"]), 64)],
        "pinning": [(of_writer(path, 1, FIELDS["pinning"]), slots + 1)],
        "holds": [(first_at(path, 1, 3 * slots - 1), 1)],
        "unlisted": [(first_at(path, 1, 0), 0)],
        "lease_object": [(of_writer(path, 1, lease_at(path, 1, "id")), 77)],
        "base": [(rank_at(path, 0) + RANK["base"] + 8, 1 << 40)],
        "ack": [(ack_at(path, 0, entries), 1 << 40)],
        "pin_count": [(pin_at(path, 0, slots), 0xFFFFFFFF)],
    }


OF_SEVERAL = ("used", "pinning", "holds", "unlisted", "lease_object", "base", "ack", "pin_count")


def test_every_kind_of_finding_has_a_damage_that_makes_it(store: tuple[Path, object, object]) -> None:
    assert {kind.lower() for kind in HEADER_KINDS} - {"inspect_h"} == set(KINDS)
    assert set(KINDS) == set(damages(store[0])) | {"pinning", "holds", "unlisted"}
    assert set(OF_SEVERAL) == set(damages_of_several(store[0]))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", OF_SEVERAL)
def test_damage_in_one_arena_is_found_and_names_it(kind: str) -> None:
    with three_writers() as (writer, _):
        path = SHM / writer.name
        reader = ObjectStoreReader.attach(writer.handle, 0)
        assert () == verify(path.name).findings
        whole = path.read_bytes()
        for offset, value in damages_of_several(path)[kind]:
            poke(path, offset, value)
        (finding,) = verify(path.name).findings
        assert (kind, True, 1) == (finding.kind, finding.wrong, finding.writer)
        assert f"WRONG  {finding.text}\n" in piped("verify", path.name).out
        assert finding.text.endswith("(writer 1)")
        with path.open("r+b") as file:
            file.write(whole)
        assert () == verify(path.name).findings
        reader.close()


def test_each_arena_is_judged_by_its_own_writer() -> None:
    with three_writers() as (writer, (_, dead)):
        path = SHM / writer.name
        dead.kill()
        assert () == verify(path.name).findings
        poke(path, of_writer(path, 2, FIELDS["pinning"]), 1)
        poke(path, of_writer(path, 2, lease_at(path, 1, "id")), 77)
        assert () == verify(path.name).findings, "pins and leases of a dead writer on objects of others are void"
        poke(path, of_writer(path, 2, FIELDS["used_bytes"]), 64)
        poke(path, first_at(path, 2, 0), 0)
        poke(path, first_at(path, 2, 5), 1)
        left = {("used", False, 2), ("unlisted", False, 2), ("holds", False, 2)}
        assert left == {(f.kind, f.wrong, f.writer) for f in verify(path.name).findings}
        poke(path, FIELDS["used_bytes"], 64)
        poke(path, of_writer(path, 2, slot_at(path, 0)), 9)
        found = {(f.kind, f.writer) for f in verify(path.name).findings if f.wrong}
        assert {("used", 0), ("state", 2)} == found


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"pinning", "holds", "unlisted"}))
def test_damage_is_found_and_the_store_sound_again_without_it(kind: str, store: tuple[Path, object, object]) -> None:
    path = store[0]
    assert verify(path.name).ok
    whole = path.read_bytes()
    for offset, value in damages(path)[kind]:
        poke(path, offset, value)
    report = verify(path.name)
    assert kind in wrong(report), report
    with path.open("r+b") as file:
        file.write(whole)
    assert verify(path.name).ok


@pytest.mark.parametrize("kind", ["used", "index", "lease_object", "pin_free"])
def test_what_a_living_process_was_late_to_end_is_not_damage(kind: str, store: tuple[Path, object, object]) -> None:
    path = store[0]
    whole = {offset: peek(path, offset) for offset, _ in damages(path)[kind]}
    for offset, value in damages(path)[kind]:
        poke(path, offset, value)

    def end() -> None:
        for offset, value in whole.items():
            poke(path, offset, value)

    late = threading.Timer(0.3, end)
    late.start()
    try:
        assert () == verify(path.name).findings
    finally:
        late.join()


def test_damage_where_a_living_writer_is_idle_is_found_in_seconds(store: tuple[Path, object, object]) -> None:
    poke(store[0], FIELDS["used_bytes"], 64)
    assert {"used"} == wrong(verify(store[0].name))
    assert not piped("verify", store[0].name, "--json").json["ok"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("pid", [1 << 30, os.getppid()])
def test_what_a_living_writer_may_have_left_when_it_was_stopped_is_a_note_if_it_cannot_be_seen(
    store: tuple[Path, object, object], pid: int
) -> None:
    """It has recorded its number of another PID namespace: here nobody's, or a process's that maps no store."""
    path = store[0]
    poke(path, FIELDS["pid"], pid)
    poke(path, FIELDS["used_bytes"], 64)
    report = verify(path.name)
    assert ([("used", False)], True) == ([(f.kind, f.wrong) for f in report.findings], report.ok)
    poke(path, slot_at(path, 0), 9)
    assert {"state"} == wrong(verify(path.name)), "no stop leaves that"


def test_a_reader_that_was_closed_is_sound(store: tuple[Path, object, ObjectStoreReader]) -> None:
    path, _, reader = store
    reader.close()
    assert 2**64 - 1 == peek(path, rank_at(path, 0) + RANK["base"])
    assert verify(path.name).ok


@pytest.mark.usefixtures("impatient")
def test_the_ranks_are_looked_at_once_however_many_pins_are_wrong(
    store: tuple[Path, object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store[0]
    looks: list[StoreInspector] = []
    readers = StoreInspector.readers

    def looking(self: StoreInspector) -> Any:
        looks.append(self)
        return readers(self)

    monkeypatch.setattr(StoreInspector, "readers", looking)
    free = [i for i in range(16) if peek(path, slot_at(path, i)) == 0]
    for slot in {i & ~1 for i in free if i ^ 1 in free}:
        poke(path, pin_at(path, 0, slot), 1 << 32 | 1)
    found = [finding.kind for finding in verify(path.name).findings]
    assert found.count("pin_free") >= 4
    assert 1 == len(looks)


def test_every_flipped_bit_of_an_object_is_found(store: tuple[Path, object, object]) -> None:
    path = store[0]
    with StoreInspector.open(path.name) as inspector:
        slot = inspector.find(key="key-3")
        data = peek(path, FIELDS["data_at"]) + slot.offset
        head = slot.key_len + slot.meta_len
        parts = [*range(head), *range(slot.payload_at, slot.length, 7)]
        with path.open("r+b", buffering=0) as file:
            for at in parts:
                bit = 1 << at % 8
                (true,) = os.pread(file.fileno(), 1, data + at)
                os.pwrite(file.fileno(), bytes([true ^ bit]), data + at)
                assert inspector.wrong_checksum(slot) is not None, at
                os.pwrite(file.fileno(), bytes([true]), data + at)
        assert inspector.wrong_checksum(slot) is None
    assert len(parts) > 100


def test_without_checksums_only_damaged_metadata_is_noted(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16)
    writer.put("a", torch.zeros(100))
    path = SHM / writer.name
    with StoreInspector.open(writer.name) as inspector:
        slot = inspector.find(key="a")
    assert slot.crc is None
    data = peek(path, FIELDS["data_at"]) + slot.offset
    poke(path, data + slot.payload_at, 1)
    assert () == verify(writer.name).findings
    with path.open("r+b") as file:
        file.seek(data + slot.key_len)
        file.write(b"\xc1")
    assert [("metadata", False)] == [(f.kind, f.wrong) for f in verify(writer.name).findings]
    assert 0 == piped("verify", writer.name).status


def test_checksums_cover_reserve_and_survive_recover(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=1, checksums=True)
    with writer.reserve("a", {"x": torch.empty(50, dtype=torch.float32)}) as space:
        space["x"][:] = 5
    writer.put("b", torch.ones(10))
    writer.put("c", "no payload")
    writer.delete("b")
    report = verify(writer.name)
    assert (True, 3, 3) == (report.ok, report.objects, report.checked_objects)
    space["x"][7] = 6  # what the documentation forbids
    assert {"crc"} == wrong(verify(writer.name))
    space["x"][7] = 5
    del space
    writer.close(unlink=False)
    heir = stores.recover(writer.name)
    heir.put("d", torch.ones(10))
    report = verify(writer.name)
    assert (True, 4, 4) == (report.ok, report.objects, report.checked_objects)


@pytest.mark.parametrize("condition", [c for c in CONDITIONS if c not in ("live", "stopped", "dead", "ephemeral")])
def test_what_cannot_be_opened_is_said(condition: str) -> None:
    with case(condition) as name:
        ran = piped("verify", name, "--json")
        assert (1, False) == (ran.status, ran.json["ok"])


def test_what_a_death_between_two_stores_leaves_is_a_note() -> None:
    with case("dead") as name:
        path = SHM / name
        assert () == verify(name).findings
        poke(path, FIELDS["used_bytes"], 64)
        poke(path, lease_at(path, 0, "id"), 77)
        assert {("used", False), ("lease_object", False)} == {(f.kind, f.wrong) for f in verify(name).findings}
        poke(path, slot_at(path, 0), 9)
        assert {"state"} == wrong(verify(name))
    with case("stopped") as name:
        poke(SHM / name, FIELDS["objects"], 64)
        assert {("objects", False)} == {(f.kind, f.wrong) for f in verify(name).findings}


def _storm(name: str, ready: int) -> None:
    """Put, read, hit, cancel and delete as fast as possible."""
    writer = ObjectStoreWriter.create(name, **OPTIONS)
    reader = ObjectStoreReader.attach(name, 0)
    writer.retire(1)
    os.write(ready, b"r")
    kept: object = None
    for i in range(10**9):
        ref = writer.put(f"{i}", torch.full((i % 500,), i, dtype=torch.int64))
        if i % 3:
            kept = reader.get(ref)
        else:
            reader.release(ref)
        writer.cancel(writer.get_cached(f"{i}"))
        if i % 5 == 0:
            writer.delete(f"{i}")
    del kept


def test_a_store_at_full_speed_is_sound_also_when_stopped_or_killed() -> None:
    name = store_name()
    with running(name, _storm) as child:
        end = time.monotonic() + 1
        reports = 0
        while time.monotonic() < end:
            assert set() == wrong(verify(name))
            reports += 1
        for _ in range(20):
            stop(child.pid)
            assert set() == wrong(verify(name))
            os.kill(child.pid, signal.SIGCONT)
        child.kill()
        assert set() == wrong(verify(name))
    assert reports > 5


def test_damage_is_found_at_full_speed() -> None:
    name = store_name()
    with running(name, _storm):
        poke(SHM / name, rank_at(SHM / name, 1) + RANK["base"], 1 << 60)
        assert {"base", "unattached"} == wrong(verify(name))
        poke(SHM / name, FIELDS["kinds"] + 3 * 48 + 24, 64)  # which lasts while the limit of `base` grows
        assert {"base", "unattached", "kind_bytes"} == wrong(verify(name))


@pytest.mark.parametrize("objects", [3, 3000], ids=["findings that fit a buffer", "findings that do not"])
def test_the_exit_status_is_that_of_the_findings_also_where_nobody_reads_them(objects: int) -> None:
    name = store_name()
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1, max_objects=objects) as writer:
        for i in range(objects):
            writer.put(str(i), 1)
        writer.close(unlink=False)
        try:
            with (SHM / name).open("r+b") as file:
                file.seek(peek(SHM / name, FIELDS["slots_at"]))
                file.write(b"\x07" * 64 * objects)
            command = [sys.executable, "-m", "shmstore", "verify", name]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                assert process.stdout
                assert process.stderr
                process.stdout.close()
                errors = process.stderr.read()
            assert (1, b"") == (process.returncode, errors)
        finally:
            (SHM / name).unlink()
