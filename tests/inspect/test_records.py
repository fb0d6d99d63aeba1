"""Records of a store at work: each is true of one moment; and looking leaves no trace."""

import errno
import mmap
import os
import resource
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import (
    CorruptStoreError,
    ObjectStoreReader,
    ObjectStoreWriter,
    SharedMemoryError,
    StaleRefError,
    StoreClosedError,
    StoreFullError,
    StoreNotFoundError,
)
from shmstore.bindings import inspect as native
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.ring import HELD, LIVE, mark_of
from shmstore.inspect.segments import find_segments
from shmstore.serde import MsgpackSerde, register_type
from shmstore.serde.decode import Leaf, Named, describe
from tests.inspect.cases import OPTIONS, fill, piped, running, three_writers
from tests.support import SHM, Child, Stores, in_child, is_mapped, length_of, raises, span_of, store_name

SIZES = 97


def value_of(object_id: int) -> torch.Tensor:
    """Return what `_storm` stores as that object: every field of its record follows from the id."""
    return torch.full((1 + object_id % SIZES,), object_id, dtype=torch.int64)


def _storm(name: str, ready: int) -> None:
    writer = ObjectStoreWriter.create(name, capacity=1 << 13, n_readers=2, max_objects=16)
    writer.retire(1)
    reader = ObjectStoreReader.attach(name, 0)
    os.write(ready, b"r")
    for object_id in range(1, 10**9):
        value = value_of(object_id)
        ref = writer.put(f"{object_id}", value)
        view = reader.get(ref)
        del view


def test_each_record_is_consistent_in_itself_while_the_writer_runs() -> None:
    name = store_name()
    with running(name, _storm), StoreInspector.open(name) as inspector:
        ids: set[int] = set()
        moving = leases = copied = gone = 0
        end = time.monotonic() + 30
        while min(len(ids), leases, copied, gone) <= 100 and time.monotonic() < end:
            for slot in inspector.slots():
                if slot.moving:
                    moving += 1
                    continue
                ids.add(slot.object_id)
                key, value = f"{slot.object_id}", value_of(slot.object_id)
                assert slot.key in (key, None)
                assert (len(key), length_of(key, value), span_of(key, value)) == (
                    slot.key_len,
                    slot.length,
                    slot.span,
                )
                assert slot.bounded
                try:
                    copy = inspector._native.copy(slot.slot, slot.object_id, slot.payload_at, slot.payload_bytes)
                except StaleRefError:
                    gone += 1
                    continue
                copied += 1
                assert value.numpy().tobytes() == copy
            for lease in inspector.leases():
                if not lease.moving:
                    leases += 1
                    assert lease.number == lease.object_id, "each object is handed out once, in order"
            facts = inspector.facts()
            if not facts.moving:
                assert facts.next_id - 1 - facts.puts in (0, 1), "between P1 and the count"
        assert min(len(ids), leases, copied, gone) > 100, (len(ids), moving, leases, copied, gone)


def test_looking_takes_no_lock_and_leaves_no_trace(stores: Stores) -> None:
    writer = stores.create(**OPTIONS)
    fill(writer)
    writer.close(unlink=False)
    path = SHM / writer.name
    before, blocks = path.read_bytes(), path.stat().st_blocks
    inspectors = [StoreInspector.open(writer.name) for _ in range(2)]
    for inspector in inspectors:
        inspector.snapshot()
        inspector.raw_findings()
    assert (before, blocks) == (path.read_bytes(), path.stat().st_blocks)
    heir = stores.recover(writer.name)
    stores.attach(writer.name, 0)
    for inspector in inspectors:
        assert inspector.facts().writer_alive
        inspector.close()
        inspector.close()
        with pytest.raises(StoreClosedError):
            inspector.facts()
    heir.check_valid()


def test_a_rank_that_no_lease_waits_for_is_not_awaited(stores: Stores) -> None:
    """Neither in a record, which `dump` and `top` show, nor in the hint of a full store."""
    writer, other = (
        (first := stores.create(capacity=1 << 16, n_readers=3, n_writers=2)),
        stores.keep(ObjectStoreWriter.join(first.handle)),
    )
    with ObjectStoreReader.attach(writer.handle, 0, finds_only=True):
        for retiring in (writer, other):
            retiring.retire(1)
        kept = [by.put(str(by.index), bytes(40_000)) for by in (writer, other)]
        with StoreInspector.open(writer.name) as inspector:
            readers = inspector.readers()
            assert [(2,), (2,)] == [lease.waiting_for for lease in inspector.leases()]
        assert ["alive", "retired", "awaited"] == [r.state for r in readers]
        assert [(0, None), (0, None), (2, True)] == [
            (r.unacknowledged, r.lag_seconds is not None or None) for r in readers
        ]
        with raises(StoreFullError, hint=["never attached: 2"]) as caught:
            writer.put("c", bytes(40_000))
        assert {2} == set(caught.value.held_bytes_by_rank or ())
    for by, ref in zip((writer, other), kept, strict=True):
        by.retire(2)
        assert by.validate(ref)
    with StoreInspector.open(writer.name) as inspector:
        assert ["closed", "retired", "retired"] == [r.state for r in inspector.readers()]


def test_a_record_says_who_holds_what(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=4, max_objects=8)
    reader = stores.attach(writer, 0)
    stores.attach(writer, 1).close()
    writer.retire(3)
    before = time.time()
    refs = [writer.put(key, torch.ones(100)) for key in ("a", "b")]
    views = [reader.get(refs[0]), reader.get(refs[0])]
    span = span_of("a", torch.ones(100))
    with StoreInspector.open(writer.name) as inspector:
        snapshot = inspector.snapshot()
        assert ["alive", "closed", "awaited", "retired"] == [r.state for r in snapshot.readers]
        assert [False, False, False, True] == [r.retired for r in snapshot.readers]
        assert [2, 0, 0, 0] == [r.pins for r in snapshot.readers]
        assert [span, 0, 0, 0] == [r.pinned_bytes for r in snapshot.readers]
        assert [1, 0, 2, 0] == [r.unacknowledged for r in snapshot.readers]
        assert [2 * span, 0, 2 * span, 0] == [r.held_bytes for r in snapshot.readers]
        assert [os.getpid(), os.getpid(), None, None] == [r.pid for r in snapshot.readers]
        assert [((0,), (2,)), ((), (0, 2))] == [(s.pinned_by, s.leased_to) for s in snapshot.slots]
        assert [(2,), (0, 2)] == [lease.waiting_for for lease in snapshot.leases]
        for lease in snapshot.leases:
            assert before - 0.1 <= lease.opened_at <= time.time()
        lags = [r.lag_seconds for r in snapshot.readers]
        assert [True, False, True, False] == [lag is not None for lag in lags]
        stats = writer.stats()
        shared = {name for name in dir(stats) if not name.startswith("_")} & set(dir(snapshot.facts))
        assert len(shared) > 15
        assert {n: getattr(stats, n) for n in shared if not n.startswith("hit_ratio")} == {
            n: getattr(snapshot.facts, n) for n in shared if not n.startswith("hit_ratio")
        }
    del views


def test_a_held_lease_says_so_before_and_after_all_have_read(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=1)
    reader = stores.attach(writer, 0)
    refs = [writer.put("held", 1, hold=True), writer.put("read", 2)]
    with StoreInspector.open(writer.name) as inspector:
        assert [HELD, "a"] == [mark_of(slot) for slot in inspector.slots()]
        for ref in refs:
            reader.get(ref)
        snapshot = inspector.snapshot()
    assert [("held", True, ()), ("read", False, ())] == [(s.key, s.held, s.leased_to) for s in snapshot.slots]
    assert [(True, ()), (False, ())] == [(lease.held, lease.waiting_for) for lease in snapshot.leases]
    assert [HELD, LIVE] == [mark_of(slot) for slot in snapshot.slots]


def test_of_several_writers_each_has_a_record_and_the_facts_are_their_sums() -> None:
    with three_writers() as (writer, (alive, dead)):
        dead.kill()
        for key in ("own-1", "own-2"):
            writer.get_cached(key)
        with StoreInspector.open(writer.name) as inspector:
            snapshot = inspector.snapshot()
    facts = snapshot.facts
    states = [(w.index, w.state, w.pid) for w in facts.writers]
    assert [(0, "alive", os.getpid()), (1, "alive", alive.pid), (2, "dead", dead.pid)] == states
    assert [(6, 3, 2), (1, 2, 2), (1, 2, 2)] == [(w.puts, w.hits, w.remote_hits) for w in facts.writers]
    assert (8, 7, 6, 7 / 15) == (facts.puts, facts.hits, facts.remote_hits, facts.hit_ratio)
    assert 3 * 16 == facts.max_objects == sum(w.max_objects for w in facts.writers)
    assert 3 << 16 == facts.capacity == sum(w.capacity for w in facts.writers)
    assert 9 + 3 + 3 == len(snapshot.leases)
    assert facts.open_leases == sum(not lease.void for lease in snapshot.leases) == 9 + 3 + 1
    assert facts.next_lease - 1 == 6 + 1 + 2 + 3 + 3
    assert (True, os.getpid()) == (facts.writer_alive, facts.writer_pid)
    assert {"image": 2} == {name: kind.objects for name, kind in snapshot.kinds.items()}
    assert sum(slot.span for slot in snapshot.slots) == facts.used_bytes


def test_a_writer_that_has_closed_is_told_from_one_that_died(stores: Stores) -> None:
    writer = stores.create(name=store_name())
    with StoreInspector.open(writer.name) as inspector:
        begun = writer.begin("a", np.zeros(9))
        writer.close(unlink=False)
        (info,) = inspector.facts().writers
        assert ("alive", os.getpid()) == (info.state, info.pid)  # as long as its bytes are being written
        begun.abort()
        (info,) = inspector.facts().writers
        assert ("closed", None) == (info.state, info.pid)
        assert [writer.name, "closed"] == piped("ls", writer.name).out.splitlines()[1].split()[:2]
        assert "writer closed" in piped("dump", writer.name).out
    ObjectStoreWriter.unlink(writer.name)


def test_a_record_says_whose_an_object_is_and_who_leases_it() -> None:
    with three_writers() as (writer, (_, dead)):
        with StoreInspector.open(writer.name) as inspector:
            assert (1, 2) == inspector.find(key="key-1").leased_by
            dead.kill()
            writer.get_cached("own-2", group=1)
            slots, leases, readers = inspector.slots(), inspector.leases(), inspector.readers()
        leased = {(s.key, s.writer, s.kind): s.leased_by for s in slots if s.leased_by or s.writer}
        assert {
            ("key-1", 0, None): (1,),
            ("key-2", 0, None): (1,),
            ("own-1", 1, "image"): (),
            ("own-2", 2, "image"): (0,),
        } == leased
        assert [0, 0] == [slot.offset for slot in slots if slot.writer]
        of_others = [(e.writer, e.remote_owner, e.group, e.held, e.waiting_for, e.void) for e in leases]
        assert [
            (1, 0, 1, False, (2, 3), False),
            (1, 0, None, True, (0, 1, 2, 3), False),
            (2, 0, 1, False, (), True),
            (2, 0, None, True, (), True),
            (0, 2, 1, False, (2, 3), False),
        ] == [lease for lease in of_others if lease[1] is not None]
        assert [7 + 2 + 1, 7 + 2 + 1, 7 + 2 + 3, 7 + 2 + 3] == [reader.unacknowledged for reader in readers]


def test_a_rank_is_retired_when_every_writer_has_retired_it(stores: Stores) -> None:
    one = stores.create(capacity=1 << 16, n_readers=1, n_writers=3)
    other = stores.keep(ObjectStoreWriter.join(one.name))
    one.retire(0)
    with StoreInspector.open(one.name) as inspector:
        assert "awaited" == inspector.readers()[0].state
        other.retire(0)
        assert "retired" == inspector.readers()[0].state


def test_a_rank_that_attaches_again_owes_nothing_from_before(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=1, max_objects=8)
    stores.attach(writer, 0).close()
    reader = stores.attach(writer, 0)
    writer.put("a", 1)
    reader.close()
    stores.attach(writer, 0)
    writer.put("b", 2)
    with StoreInspector.open(writer.name) as inspector:
        assert [(), (0,)] == [lease.waiting_for for lease in inspector.leases()]
        assert [1] == [reader.unacknowledged for reader in inspector.readers()]


def test_pins_of_a_killed_reader_hold_nothing(stores: Stores) -> None:
    writer = stores.create(capacity=1 << 16, n_readers=1, max_objects=8)
    ref = writer.put("a", torch.ones(100))

    def hold() -> None:
        reader = ObjectStoreReader.attach(writer.name, 0)
        reader.get(ref)
        view = reader.get(ref)
        os.kill(os.getpid(), 9)
        del view

    child = Child(hold)
    with pytest.raises(AssertionError, match="SIGKILL"):
        child.join()
    with StoreInspector.open(writer.name) as inspector:
        (reader,), (slot,) = inspector.readers(), inspector.slots()
    assert ("dead", 0, 1, 0) == (reader.state, reader.pins, reader.pins_left, reader.pinned_bytes)
    assert 0 == reader.held_bytes
    assert ((), ()) == (slot.pinned_by, slot.leased_to)


def test_an_inspector_inherited_through_fork_says_so(stores: Stores) -> None:
    writer = stores.create(**OPTIONS)
    with StoreInspector.open(writer.name) as inspector:

        def look() -> str:
            try:
                inspector.facts()
            except StoreClosedError as error:
                return error.message
            return ""

        assert "fork" in Child(look).join()


def _closed_while_threads_look(name: str) -> int:
    ended = 0
    for _ in range(40):
        inspector = StoreInspector.open(name)

        def look(inspector: StoreInspector = inspector) -> None:
            nonlocal ended
            with suppress(StoreClosedError):
                while True:
                    inspector._native.ranks(8)
            ended += 1

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)  # anywhere in a look
        inspector.close()
        for thread in threads:
            thread.join()
    return ended


def test_an_inspector_may_be_closed_while_other_threads_look(stores: Stores) -> None:
    writer = stores.create(1 << 26, n_readers=8, max_objects=20000)
    assert 80 == in_child(_closed_while_threads_look, writer.name)


def test_an_inspector_that_is_closed_maps_nothing() -> None:
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        writer.close(unlink=False)
        inspector = native.Inspector(writer.name)
        mapped = is_mapped(writer.name)
        inspector.close()
        assert (True, False) == (mapped, is_mapped(writer.name))
        ObjectStoreWriter.recover(writer.name).close()


class Point:
    def __init__(self, xy: list[torch.Tensor]) -> None:
        self.xy = xy


def leaf(kind: Any, dtype: str, shape: tuple[int, ...], nbytes: int) -> Leaf:
    return Leaf(kind, dtype, shape, nbytes, 0, np.dtype(np.uint8))


def test_the_tree_names_every_leaf(stores: Stores) -> None:
    register_type("test.Point", Point, lambda point: {"xy": point.xy}, lambda tree: Point(tree["xy"]))
    value = {
        "a": [torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), (np.arange(4).astype("<M8[s]"), 1 << 70)],
        "e": torch.empty(0, 3),
        "p": Point([torch.tensor(5)]),
        "r": np.array([(1, 2.5)], dtype=[("i", "<i2"), ("f", "<f8")]),
        (1, "x"): None,
    }
    writer = stores.create(capacity=1 << 16)
    writer.put("k", value)
    with StoreInspector.open(writer.name) as inspector:
        slot = inspector.find(key="k")
        assert describe(inspector.metadata(slot), slot.payload_bytes) == {
            "a": [leaf("tensor", "bfloat16", (2, 3), 12), (leaf("array", "datetime64[s]", (4,), 32), 1 << 70)],
            "e": leaf("tensor", "float32", (0, 3), 0),
            "p": Named("test.Point", {"xy": [leaf("tensor", "int64", (), 8)]}),
            "r": leaf("array", "[('i', '<i2'), ('f', '<f8')]", (1,), 10),
            (1, "x"): None,
        }
    parts = piped("dump", writer.name, "--key", "k", "--json").json["tree"]
    assert [("p", "test.Point"), ("p/xy/0", "tensor")] == [(p["path"], p["kind"]) for p in parts if p["path"][0] == "p"]
    with pytest.raises(StoreNotFoundError):
        StoreInspector.open(f"{writer.name}\0x")


def test_forged_metadata_is_a_typed_error_and_never_a_crash() -> None:
    meta = MsgpackSerde().encode({"x": torch.ones(10), "y": [1, 2, (3,)]}).meta
    generator = np.random.default_rng(3)
    trees = errors = 0
    for _ in range(3000):
        forged = bytearray(meta)
        for at in generator.integers(0, len(meta), 1 + generator.integers(3)):
            forged[at] = generator.integers(256)
        try:
            described = describe(bytes(forged), 64)
            parts = described.values() if isinstance(described, dict) else []
            assert sum(part.nbytes for part in parts if isinstance(part, Leaf)) <= 64
            trees += 1
        except CorruptStoreError:
            errors += 1
    assert min(trees, errors) > 100


def test_a_store_that_cannot_be_mapped_is_listed_and_says_why(stores: Stores) -> None:
    name = stores.create(1 << 20, n_writers=64, max_objects=64, max_object_size=4096, n_readers=1).name

    def look() -> tuple[int | None, str | None, object]:
        with open("/proc/self/statm") as pages:
            now = int(pages.read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), resource.RLIM_INFINITY))
        with pytest.raises(SharedMemoryError, match=name) as caught:
            StoreInspector.open(name)
        (seen,) = [seen for seen in find_segments() if seen.name == name]
        return caught.value.errno, seen.problem, seen.facts

    number, problem, facts = in_child(look)
    assert (errno.ENOMEM, None) == (number, facts)
    assert "ulimit" in problem
    assert "Cannot allocate memory" in problem
