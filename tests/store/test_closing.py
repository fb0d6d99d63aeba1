"""How long a store stays: what closing does to it, an owner without an arena, and `unlink`."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from shmstore import (
    ForeignStoreError,
    LayoutMismatchError,
    NoArenaError,
    ObjectRef,
    ObjectStoreWriter,
    StoreHandle,
    StoreNotFoundError,
    WriterActiveError,
)
from shmstore.bindings.inspect import probe
from shmstore.inspect.inspector import StoreInspector
from tests.inspect.cases import piped
from tests.store.children import marked, put_and_wait
from tests.support import FRESH, SHM, Child, Signal, Stores, raises

OPTIONS: dict[str, Any] = {"capacity": 16 << 10, "n_readers": 1, "max_objects": 16}


def opened(name: str, **more: Any) -> ObjectStoreWriter:
    return ObjectStoreWriter.open(name, **OPTIONS | {"n_writers": 2} | more)


def created(name: str | None, **more: Any) -> ObjectStoreWriter:
    return ObjectStoreWriter.create(name, **OPTIONS | {"n_writers": 2} | more)


def there(name: str) -> bool:
    return (SHM / name).exists()


# ---- closing


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [
        (opened, opened, True),
        (opened, ObjectStoreWriter.join, True),
        (created, opened, True),
        (created, ObjectStoreWriter.join, False),
    ],
)
@pytest.mark.parametrize("second_last", [False, True])
def test_the_store_stays_if_one_of_its_writers_has_opened_it(
    name: str, first: Callable[[str], Any], second: Callable[[str], Any], stays: bool, second_last: bool
) -> None:
    writers = [first(name), second(name)]
    for writer in writers if second_last else reversed(writers):
        assert there(name)
        with writer:
            pass
    assert stays == there(name)


@pytest.mark.parametrize("successor", [ObjectStoreWriter.recover, ObjectStoreWriter.join, partial(opened, n_writers=1)])
def test_a_clean_restart_keeps_what_is_stored(name: str, successor: Callable[[str], ObjectStoreWriter]) -> None:
    with opened(name, n_writers=1) as writer:
        writer.put("k", 1)
    for _ in range(2):
        with successor(name) as again:
            assert (1, ["k"]) == (again.recovered, again.keys())
    with successor(name) as again:
        again.close(unlink=True)
    assert not there(name)


def test_open_keeps_what_a_dead_process_has_created(name: str) -> None:
    Child(lambda: str(created(name))).join()  # which ends without a close
    opened(name).close()
    assert there(name)


def test_a_store_that_is_not_to_be_kept_goes_with_its_last_writer(name: str) -> None:
    writers = [opened(chosen := f"shmstore-{name}", keep=False) for _ in range(2)]
    for writer in writers:
        assert there(chosen)
        writer.close()
    assert not there(chosen)


# ---- an owner without an arena


def test_an_owner_costs_no_arena_and_puts_nothing(stores: Stores, name: str) -> None:
    owner = stores.keep(created(name, writes=False))
    writers = [stores.keep(ObjectStoreWriter.join(owner.handle)) for _ in range(2)]
    assert [0, 1] == [writer.index for writer in writers]
    with raises(WriterActiveError, names=[name]):
        ObjectStoreWriter.join(owner.handle)
    other = stores.keep(created(None))
    assert (SHM / other.name).stat().st_size == (SHM / name).stat().st_size
    ref = writers[0].put("k", 1)
    calls: list[Callable[[], Any]] = [
        lambda: owner.index,
        lambda: owner.put("a", 1),
        lambda: owner.reserve("a", 1).__enter__(),
        lambda: owner.get_cached("k"),
        lambda: owner.is_cached("k"),
        lambda: owner.find("k"),
        lambda: owner.find_or_claim("k"),
        lambda: owner.touch("k"),
        lambda: owner.protect(["k"]).__enter__(),
        lambda: owner.assign_group(ref, 0),
        lambda: owner.hold(ref),
        lambda: owner.validate(ref),
        lambda: owner.cancel(ref),
        owner.cancel_all,
        lambda: owner.retire(0),
        lambda: owner.delete("k"),
        owner.clear,
        owner.keys,
        owner.namespaces,
        lambda: len(owner),
        lambda: "k" in owner,
        owner.stats,
        owner.check_valid,
    ]
    for number, call in enumerate(calls):
        with raises(NoArenaError, names=["writes=False"], hint=["this call", "join(handle)", "shmstore top"]):
            call()
            pytest.fail(f"call {number}")
    assert (1, 2, (1,)) == (stores.attach(owner.handle).get(ref), owner.n_writers, owner.groups)
    with pytest.raises(ValueError, match="quotas"):
        created(None, writes=False, quotas={"encoder": 0.5})


def test_main_reads_what_workers_put_and_a_killed_worker_has_a_successor(stores: Stores) -> None:
    owner = stores.keep(created(None, writes=False))
    reader = stores.attach(owner.handle)
    pipes, workers = [], []

    def start(seed: int) -> tuple[int, Any]:
        ours, theirs = FRESH.Pipe()
        worker = FRESH.Process(target=put_and_wait, args=(owner.handle, seed, theirs))
        worker.start()
        pipes.append(ours)
        workers.append(worker)
        index, recovered, ref = ours.recv()
        assert (marked(seed) == reader.get(ObjectRef.from_bytes(ref))).all()
        return index, recovered

    try:
        assert [(0, 0), (1, 0)] == [start(seed) for seed in range(2)]
        for seed, victim in enumerate((0, 1, 2), 2):
            workers[victim].kill()
            workers[victim].join()
            assert (victim % 2, 1 if victim < 2 else 2) == start(seed)
        for worker in workers:
            worker.kill()
            worker.join()
        assert there(owner.name)
        assert 3 == stores.keep(ObjectStoreWriter.join(owner.handle)).recovered
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_an_owned_store_goes_with_the_last_that_is_killed(stores: Stores, order: tuple[int, ...]) -> None:
    reading, writing = os.pipe()
    ready = Signal()

    def own() -> None:
        with created(None, writes=False) as owner:
            os.write(writing, owner.handle.to_json().encode())
            time.sleep(600)

    def join(handle: StoreHandle) -> None:
        with ObjectStoreWriter.join(handle):
            ready.send()
            time.sleep(600)

    three = [Child(own)]
    try:
        handle = StoreHandle.from_json(os.read(reading, 4096).decode())
        for _ in range(2):
            three.append(Child(join, handle))
            ready.wait()
        for number in order:
            stores.keep(ObjectStoreWriter.create(**OPTIONS))  # which removes what dead processes have left
            assert (True, 1) == (there(handle.name), probe(handle.name)["writer_alive"])
            three[number].kill()
        stores.keep(ObjectStoreWriter.create(**OPTIONS))
        assert not there(handle.name)
    finally:
        for child in three:
            child.kill()
        ready.close()
        os.close(reading)
        os.close(writing)


def test_an_owned_store_is_shown_as_alive_and_is_not_removed(stores: Stores, name: str) -> None:
    owner = stores.keep(created(name, writes=False))
    with StoreInspector.open(name) as inspector:
        assert (os.getpid(), False) == (inspector.facts().owner_pid, inspector.facts().writer_alive)
    (line,) = [line for line in piped("ls").out.splitlines() if name in line]
    assert f"0 of 2 alive, owner {os.getpid()}" in line
    assert 1 == piped("gc", name, "--yes", "--force").status
    with raises(WriterActiveError, names=[name, f"process {os.getpid()}"]):
        ObjectStoreWriter.unlink(name)
    assert there(name)
    owner.close(unlink=False)
    with StoreInspector.open(name) as inspector:
        assert inspector.facts().owner_pid is None


# ---- unlink


def test_unlink_removes_a_store_that_no_writer_has(stores: Stores, name: str) -> None:
    with opened(name) as writer:
        ref = writer.put("k", 1)
        with raises(WriterActiveError, names=[name, f"process {os.getpid()}"], hint=["then unlink it"]):
            ObjectStoreWriter.unlink(name)
    reader = stores.attach(name)
    ObjectStoreWriter.unlink(name)
    assert (False, 1) == (there(name), reader.get(ref))
    with raises(StoreNotFoundError, names=[name]):
        ObjectStoreWriter.unlink(name)


def test_unlink_leaves_what_is_not_this_users_store(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"a file of another program"):
        (SHM / name).write_bytes(content)
        os.utime(SHM / name, (0, 0))  # or, if it is empty, it is being created
        with raises(LayoutMismatchError, names=[name]):
            ObjectStoreWriter.unlink(name)
        assert content == (SHM / name).read_bytes()
        (SHM / name).unlink()
    opened(name).close()
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with raises(ForeignStoreError, names=[name]):
        ObjectStoreWriter.unlink(name)
    assert there(name)
    with pytest.raises(TypeError, match="name must be a str"):
        ObjectStoreWriter.unlink(5)  # type: ignore[arg-type]
