"""Several writers of one store: who gets which arena, and what each can do with the objects of the others."""

import fcntl
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from shmstore import (
    CorruptStoreError,
    LayoutMismatchError,
    ObjectStoreWriter,
    StaleRefError,
    StoreFullError,
    WriterActiveError,
)
from shmstore.bindings import inspect as native
from shmstore.bindings.inspect import probe
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.verify import verify
from shmstore.store import orphans
from tests.inspect.cases import piped, poke
from tests.inspect.test_verify import of_writer
from tests.layout import FIELDS
from tests.support import SHM, Child, Signal, Stores, alive, bits, is_held, raises, random_tensor, store_name

SIZE = 900
OPTIONS: dict[str, Any] = {"capacity": 16 << 10, "n_readers": 2, "max_objects": 16}


def value(seed: int) -> Any:
    return random_tensor(seed, SIZE)


def join(stores: Stores, store: Any, index: int | None = None, **options: Any) -> ObjectStoreWriter:
    return stores.keep(ObjectStoreWriter.join(store, index, **options))


@pytest.fixture
def three(stores: Stores) -> list[ObjectStoreWriter]:
    """Three writers of one store with two ranks."""
    first = stores.create(**OPTIONS, n_writers=3)
    return [first, join(stores, first.handle), join(stores, first.name)]


def live(store: Any, *rest: Any) -> None:
    """Join a store, put an object of each key, say so, and wait to be killed."""
    *keys, ready = rest
    writer = ObjectStoreWriter.join(store)
    for key in "".join(keys):
        writer.put(key, value(ord(key)))
    ready.send()
    signal.pause()


# ---- which arena


def test_a_writer_gets_the_first_free_arena_or_the_one_it_asks_for(stores: Stores) -> None:
    first = stores.create(**OPTIONS, n_writers=4)
    assert (0, 4) == (first.index, first.n_writers)
    third = join(stores, first.handle, 2)
    assert (2, 4, 0) == (third.index, third.n_writers, third.recovered)
    assert [1, 3] == [join(stores, first.name).index for _ in range(2)]
    third.put("k", value(1))
    third.close(unlink=False)
    again = join(stores, first.handle)
    assert (2, 1, ["k"]) == (again.index, again.recovered, again.keys())
    assert {first.handle} == {third.handle, again.handle}


def test_an_arena_that_is_taken_is_refused_with_the_process_that_has_it(stores: Stores) -> None:
    first = stores.create(**OPTIONS, n_writers=3)
    with alive(live, first.handle) as second, alive(live, first.handle) as third:
        for index, pid in enumerate([os.getpid(), second.pid, third.pid]):
            with raises(WriterActiveError, names=[str(pid)]) as caught:
                ObjectStoreWriter.join(first.handle, index)
            assert f"already has a writer: process {pid} (" in caught.value.message
        pids = map(str, (os.getpid(), second.pid, third.pid))
        with raises(WriterActiveError, names=[repr(first.name), "n_writers=3", *pids], hint=["larger n_writers"]):
            ObjectStoreWriter.join(first.name)
        second.kill()
        with raises(WriterActiveError, [str(os.getpid())], hint=["omit the index to take the first free arena"]):
            ObjectStoreWriter.join(first.handle, 0)
        assert 1 == join(stores, first.handle).index


def test_a_store_of_one_writer_is_joined_only_when_that_has_ended(stores: Stores) -> None:
    alone = stores.create(**OPTIONS)
    for index in (None, 0):
        with raises(
            WriterActiveError,
            names=["already has a writer", "n_writers=1", f"process {os.getpid()}"],
            hint=["n_writers"],
        ):
            ObjectStoreWriter.join(alone.handle, index)
    alone.close(unlink=False)
    assert 0 == join(stores, alone.handle).index


def test_quotas_are_those_of_an_arena(stores: Stores) -> None:
    first = stores.create(**OPTIONS, n_writers=2, quotas={"image": 4096})
    second = join(stores, first.handle, quotas={"image": 0.5})
    assert [4096, 8192] == [writer.stats().kinds["image"].quota for writer in (first, second)]
    second.close(unlink=False)
    assert 8192 == join(stores, first.handle).stats().kinds["image"].quota
    with pytest.raises(ValueError, match="quotas"):
        ObjectStoreWriter.join(stores.create(**OPTIONS, n_writers=2).handle, quotas={"image": 2.0})


# ---- open


def test_open_takes_one_arena_after_the_other_and_the_store_of_the_same_options_only(stores: Stores) -> None:
    chosen = store_name()
    writers = [stores.keep(ObjectStoreWriter.open(chosen, **OPTIONS, n_writers=2)) for _ in range(2)]
    assert [0, 1] == [writer.index for writer in writers]
    with pytest.raises(WriterActiveError, match=f"process {os.getpid()}\\b"):
        ObjectStoreWriter.open(chosen, **OPTIONS, n_writers=2)
    writers[1].put("k", value(1))
    for writer in writers:
        writer.close(unlink=False)
    for other in (1, 3):
        with pytest.raises(LayoutMismatchError, match=f"n_writers is 2, not {other}"):
            ObjectStoreWriter.open(chosen, **OPTIONS, n_writers=other, on_mismatch="raise")
    again = [stores.keep(ObjectStoreWriter.open(chosen, **OPTIONS, n_writers=2)) for _ in range(2)]
    assert [0, 1] == [writer.recovered for writer in again]
    for writer in again:
        writer.close(unlink=False)
    assert (3, 0) == (
        (replaced := stores.keep(ObjectStoreWriter.open(chosen, **OPTIONS, n_writers=3))).n_writers,
        replaced.recovered,
    )


@pytest.mark.parametrize("on_mismatch", ["recreate", "raise"])
@pytest.mark.parametrize("taken", [1, 3], ids=["with free arenas", "full"])
def test_open_names_the_options_that_differ_while_a_writer_lives(stores: Stores, on_mismatch: Any, taken: int) -> None:
    chosen = store_name()
    for _ in range(taken):
        stores.keep(ObjectStoreWriter.open(chosen, **OPTIONS, n_writers=3))
    wrong: list[tuple[dict[str, Any], list[str]]] = [
        ({"n_writers": 4}, ["n_writers is 3, not 4"]),
        ({"n_writers": 1}, ["n_writers is 3, not 1"]),
        ({"n_readers": 1, "capacity": 32 << 10}, ["n_readers is 2, not 1", f"capacity is {16 << 10}, not {32 << 10}"]),
    ]
    for more, names in wrong:
        with raises(LayoutMismatchError, names=[chosen, *names], hint=["same options", "lives"]):
            ObjectStoreWriter.open(chosen, **OPTIONS | {"n_writers": 3} | more, on_mismatch=on_mismatch)
    assert probe(chosen)["writer_alive"]


# ---- closing


def test_a_generated_name_ends_with_the_last_process() -> None:
    code = """
import os, sys
from shmstore import ObjectStoreWriter
if sys.argv[1] == "create":
    writer = ObjectStoreWriter.create(capacity=1 << 16, n_readers=1, n_writers=2)
else:
    writer = ObjectStoreWriter.join(sys.argv[1])
print(writer.name, flush=True)
sys.stdin.read()
"""

    def start(what: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, what]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(process: "subprocess.Popen[str]") -> None:
        process.communicate()
        assert 0 == process.returncode

    creator = start("create")
    assert creator.stdout
    name = creator.stdout.readline().strip()
    joined = start(name)
    assert joined.stdout
    assert name == joined.stdout.readline().strip()
    end(creator)
    assert (SHM / name).exists()
    end(joined)
    assert not (SHM / name).exists()


# ---- a writer that was killed


@pytest.mark.parametrize("keep_leases", [False, True])
def test_a_killed_writer_leaves_its_objects_to_the_next_that_joins(stores: Stores, keep_leases: bool) -> None:
    first = stores.create(**OPTIONS, n_writers=2)
    reader = stores.attach(first, 0)
    stores.attach(first, 1)
    with alive(live, first.handle, "ab"):
        pass
    assert (True, True) == (first.is_cached("a"), first.is_cached("b"))
    assert bits(value(ord("a"))) == bits(reader.get(first.get_cached("a")))
    first.cancel_all()
    heir = join(stores, first.handle, keep_leases=keep_leases)
    assert (1, 2, ["a", "b"]) == (heir.index, heir.recovered, heir.keys())
    assert (2 if keep_leases else 0) == heir.stats().open_leases
    assert is_held(heir) is keep_leases


# ---- objects of others


def test_a_refusal_says_how_much_other_writers_hold(three: list[ObjectStoreWriter]) -> None:
    first, second, third = three
    for seed, key in enumerate("ab"):
        first.cancel(first.put(key, value(seed)))
    span = first.stats().used_bytes // 2
    second.get_cached("a", hold=True)
    second.get_cached("b", hold=True)
    third.get_cached("b", hold=True)
    for writer in (second, third):  # only these end their leases now
        writer.retire(0)
        writer.retire(1)
    with raises(StoreFullError, names=[f"writer 1: {2 * span} bytes", f"writer 2: {span} bytes"]) as caught:
        first.put("all", random_tensor(0, first.stats().capacity - 256))
    assert {1: 2 * span, 2: span} == caught.value.held_bytes_by_writer
    assert {} == caught.value.held_bytes_by_rank
    assert "held by the writer" not in str(caught.value)
    second.close()
    with pytest.raises(StoreFullError) as again:
        first.put("all", random_tensor(0, first.stats().capacity - 256))
    assert {2: span} == again.value.held_bytes_by_writer


def test_a_reference_belongs_to_the_writer_that_handed_it_out(three: list[ObjectStoreWriter]) -> None:
    first, second, third = three
    first.put("k", value(1))
    ref = second.get_cached("k")
    for other in (first, third):
        assert other.validate(ref, "k")
        for call in (other.cancel, other.hold, lambda ref, other=other: other.assign_group(ref, 0)):
            with raises(StaleRefError, hint=["writer"]):
                call(ref)
    assert is_held(first)
    assert second.cancel(ref)
    assert not second.cancel(ref)


def test_what_a_protection_or_an_undone_batch_ends_is_no_cancel(three: list[ObjectStoreWriter]) -> None:
    first, second, _ = three
    ref = first.put("k", 1)
    with second.protect(["k"]):
        assert second.stats().open_leases == 1
    batch = second._writer.new_batch()
    batch.hit(b"k")
    batch.undo()
    assert (second.stats().open_leases, second.stats().cancels) == (0, 0)
    first.cancel(ref)
    assert first.cancel_all() == 0
    first.get_cached("k")
    assert first.cancel_all() == 1
    assert first.stats().cancels == 2


def test_what_is_protected_of_another_stays_until_the_block_ends(three: list[ObjectStoreWriter]) -> None:
    first, second, _ = three
    first.cancel(first.put("k", value(1)))
    before = second.stats()
    with second.protect(["absent", "k"]):
        assert is_held(first)
        after = second.stats()
        assert (after.hits, after.remote_hits, after.open_leases) == (before.hits, before.remote_hits, 1)
    assert second.stats().open_leases == 0
    assert not is_held(first)


def test_protection_without_a_free_entry_is_refused_and_protects_nothing(stores: Stores) -> None:
    first = stores.create(capacity=64 * 1024, n_readers=1, n_writers=2, max_objects=2)
    second = join(stores, first.handle)
    for key in ("k", "l"):
        first.cancel(first.put(key, value(1)))
    taken = [second.get_cached("k") for _ in range(second.stats().max_leases - 1)]
    with pytest.raises(StoreFullError) as refused, second.protect(["k", "l"]):
        raise AssertionError("the block was entered")
    assert "leases" == refused.value.resource
    assert second.stats().open_leases == len(taken)
    assert all(map(second.cancel, taken))
    with second.protect(["k", "l"]):
        assert second.stats().open_leases == 2
    assert not is_held(first)


# ---- deleting


def test_clear_takes_the_keys_of_all_writers_and_of_a_namespace_only_its_own(three: list[ObjectStoreWriter]) -> None:
    first, second, _ = three
    for number, writer in enumerate(three):
        writer.put(f"a{number}", value(1))
        writer.put(f"b{number}", value(1), namespace="s")
        writer.put(f"c{number}", value(1), namespace="t")
    second.clear(namespace="s")
    assert [2, 2, 2] == [len(writer) for writer in three]  # their next call, which deletes
    for writer in three:
        assert [False] * 3 == [writer.is_cached(f"b{n}", namespace="s") for n in range(3)]
        assert [True] * 3 == [writer.is_cached(f"a{n}") for n in range(3)]
        assert [True] * 3 == [writer.is_cached(f"c{n}", namespace="t") for n in range(3)]
    first.clear()
    assert [0, 0, 0] == [len(writer) for writer in three]
    for writer in three:
        assert [False] * 3 == [writer.is_cached(f"c{n}", namespace="t") for n in range(3)]
        assert ([], 0) == (writer.keys(), len(writer))


@pytest.mark.parametrize(("module", "step"), [(orphans, "make_room"), (native, "remove")])
def test_an_empty_file_that_its_creator_locks_only_now_is_left_to_it(
    name: str, stores: Stores, monkeypatch: pytest.MonkeyPatch, module: Any, step: str
) -> None:
    """The creator makes the file, and locks it an instant later; `open` may have looked in between."""
    real = getattr(module, step)
    seen: list[int] = []

    def while_it_is_locked(*arguments: Any) -> None:
        with (SHM / name).open("r+b") as file:
            if not seen:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
            seen.append(os.fstat(file.fileno()).st_ino)
            real(*arguments)

    (SHM / name).touch(0o600)
    os.utime(SHM / name, (0, 0))  # or nobody would come so far
    monkeypatch.setattr(module, step, while_it_is_locked)
    stores.keep(ObjectStoreWriter.open(name, **OPTIONS, n_writers=2))
    assert 2 == len(seen)  # left alone once; removed when nobody was creating it
    assert 1 == len(set(seen))


def open_and_close(name: str, rounds: int) -> None:
    for _ in range(rounds):
        ObjectStoreWriter.open(name, **OPTIONS, n_writers=3).close(unlink=True)


def test_writers_that_close_while_others_open_are_not_in_the_way(name: str) -> None:
    children = [Child(open_and_close, name, 60) for _ in range(3)]
    for child in children:
        child.join()
    assert not (SHM / name).exists()


@pytest.mark.parametrize("index", [None, 0])
def test_a_generated_name_goes_with_the_last_writer_unless_one_of_them_keeps_it(index: int | None) -> None:
    def left(keep: bool) -> int:
        first = ObjectStoreWriter.create(**OPTIONS, n_writers=2)
        second = ObjectStoreWriter.join(first.handle)
        handle = first.handle
        first.close(unlink=False) if keep else first.close()
        third = ObjectStoreWriter.join(handle, index)
        seen = probe(handle.name)["ephemeral"]
        second.close()
        third.close()
        return seen

    assert [1, 0] == [left(keep=False), left(keep=True)]


# ---- an arena that is damaged


def dead(name: str, n_writers: int, damaged: Iterable[int]) -> int:
    """Leave a store of dead writers, each with one object, and damage some arenas; return the store's number."""
    with ObjectStoreWriter.create(name, **OPTIONS, n_writers=n_writers) as first:
        for index in range(n_writers):
            writer = first if index == 0 else ObjectStoreWriter.join(name, index)
            writer.put(f"k{index}", value(index))
            if index:
                writer.close(unlink=False)
        store_id = first.handle.store_id
        first.close(unlink=False)
    for index in damaged:
        damage(name, index)
    return store_id


def damage(name: str, index: int) -> None:
    for field in ("next_id", "objects", "used_bytes", "open_leases"):
        poke(SHM / name, of_writer(SHM / name, index, FIELDS[field]), 1 << 63)


def test_a_damaged_arena_of_a_dead_peer_is_passed_by_and_named(
    stores: Stores, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    dead(name, 3, [1])
    first = join(stores, name)
    third = stores.keep(ObjectStoreWriter.open(name, **OPTIONS, n_writers=3))
    assert [(0, 1), (2, 1)] == [(writer.index, writer.recovered) for writer in (first, third)]
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert all(part in record.getMessage() for part in (name, "arena 1"))
    for again in (
        partial(ObjectStoreWriter.join, name),
        partial(ObjectStoreWriter.join, name, 1),
        partial(ObjectStoreWriter.open, name, **OPTIONS, n_writers=3),
    ):
        with raises(CorruptStoreError, names=[name], hint=["gc --yes --force"]):
            again()
    assert {1} == {finding.writer for finding in verify(name).findings if finding.wrong}
    assert "(writer 1)" in " ".join(line for line in piped("dump", name).out.splitlines() if "damaged" in line)
    listed = piped("ls")
    assert 1 == listed.status
    assert [True] == ["writer 1" in line for line in listed.err.splitlines() if name in line]
    with StoreInspector.open(name) as inspector:
        facts = inspector.facts()
    assert facts.objects <= facts.max_objects
    assert facts.used_bytes <= facts.capacity
    assert facts.open_leases <= facts.max_leases


def test_a_store_is_created_again_only_where_each_arena_is_damaged(
    stores: Stores, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = dead(name, 2, [0])
    writer = ObjectStoreWriter.open(name, **OPTIONS, n_writers=2)
    assert (before, 1, ["k1"]) == (writer.handle.store_id, writer.index, writer.keys())
    writer.close(unlink=False)
    damage(name, 1)
    with raises(CorruptStoreError, names=[name]):
        ObjectStoreWriter.join(name)
    writer = stores.keep(ObjectStoreWriter.open(name, **OPTIONS, n_writers=2))
    assert (0, 0) == (writer.index, writer.recovered)
    assert before != writer.handle.store_id


def test_open_waits_for_a_stopped_creator_only_so_long_and_names_it(stores: Stores, name: str) -> None:
    def create(ready: Signal) -> None:
        with ObjectStoreWriter.create(name, **OPTIONS, n_writers=2):
            poke(SHM / name, FIELDS["stamp"], 0)  # as before the end of its creation
            ready.send()
            time.sleep(600)

    with alive(create) as creator:
        started = time.monotonic()
        with raises(WriterActiveError, names=[name, f"process {creator.pid}"], hint=["wait=seconds"]):
            ObjectStoreWriter.open(name, **OPTIONS, n_writers=2, wait=0.3)
        assert 0.3 <= time.monotonic() - started < 30
    assert 0 == stores.keep(ObjectStoreWriter.open(name, **OPTIONS, n_writers=2, wait=0)).recovered
