"""Stores that end as cyclic garbage: the collector ends its parts in any order, and nothing may use what has gone.

Each case runs in a child, for which a use of freed memory is as good as its death.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from shmstore import MsgpackSerde, ObjectStoreReader, ObjectStoreWriter
from shmstore.bindings import inspect as native_inspect
from shmstore.bindings.blockpool import Pool
from shmstore.bindings.kvcache import Tables
from shmstore.scheduler import BlockHashes
from shmstore.serde import Layout
from tests.support import in_child, is_mapped, segments, store_name


class Node:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)
        self.self = self


class Request:
    """Gives back its reference at its end, as an engine's request may."""

    def __init__(self, engine: Any, ref: Any, seen: list[Any]) -> None:
        self.engine, self.ref, self.seen = engine, ref, seen

    def __del__(self) -> None:
        self.seen.append(self.engine.writer.cancel(self.ref))


def requests() -> list[Any]:
    seen: list[Any] = []
    for _ in range(20):
        engine: Any = Node(writer=ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1))
        engine.request = Request(engine, engine.writer.put("k", 1), seen)
        del engine
        gc.collect()
    return seen


class Writes:
    """Fills what its reservation has begun, at its end."""

    def __init__(self, node: Any, commits: bool) -> None:
        self.node, self.commits = node, commits

    def __del__(self) -> None:
        self.node.begun.value[:] = 7
        if self.commits:
            self.node.begun.commit()


def reservations(closed: bool = False) -> list[Any]:
    seen: list[Any] = []
    for commits in (False, True):
        writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
        node: Any = Node(writer=writer, begun=writer.begin("new", np.zeros(9, np.uint8)))
        node.writes = Writes(node, commits and not closed)
        if closed:
            writer.close()
            del writer
        del node
        gc.collect()
        seen.append(None if closed else writer.keys())
    return seen


def blocks(name: str, closed: bool = False) -> list[Any]:
    writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
    writer.put("k", 1)
    node: Any = Node(writer=writer)
    node.block = getattr(writer, name)(*([["k"]] if name == "protect" else ["new", np.zeros(9, np.uint8)]))
    node.entered = node.block.__enter__()
    if closed:
        writer.close()
    del writer, node
    gc.collect()
    return []


class Allocates:
    """What many finalizers do, also of the store's: uses memory that has become free."""

    def __init__(self, node: Node, kept: list[Any]) -> None:
        self.node, self.kept = node, kept

    def __del__(self) -> None:
        self.kept.extend(np.full(size, 0x41, np.uint8) for size in range(16, 200) for _ in range(50))


def blocks_older_than_their_batches() -> list[Any]:
    kept: list[Any] = []
    for _ in range(10):
        writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
        writer.put("k", 1)
        node: Any = Node(writer=writer, block=writer.protect(["k"]))
        gc.collect(0)  # a collection of all takes the youngest before these
        node.block.__enter__()
        node.allocates = Allocates(node, kept)
        del writer, node
        gc.collect()
    return []


class Looks:
    """Notes at its end whether a store is mapped."""

    def __init__(self, node: Node, name: str, seen: list[Any]) -> None:
        self.node, self.name, self.seen = node, name, seen

    def __del__(self) -> None:
        self.seen.append(is_mapped(self.name))


def a_batch_of_a_closed_writer() -> list[Any]:
    seen: list[Any] = []
    writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
    writer.put("k", 1)
    node: Any = Node(batch=writer._writer.batch())
    node.batch.protect([b"k"])
    node.looks = Looks(node, writer.name, seen)
    writer.close()
    del node
    gc.collect()
    return [*seen, is_mapped(writer.name)]


class Inspects:
    """Asks an inspector at its end, once what has become free is used again."""

    def __init__(self, node: Any, seen: list[Any]) -> None:
        self.node, self.seen = node, seen
        self.kept: list[Any] = []

    def __del__(self) -> None:
        self.kept = [np.full(size, 0x41, np.uint8) for size in range(16, 1200, 8) for _ in range(20)]
        try:
            self.seen.append(self.node.inspector.facts()["capacity"])
        except Exception as error:
            self.seen.append(error)


def inspectors() -> list[Any]:
    seen: list[Any] = []
    with ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1) as writer:
        writer.close(unlink=False)
        node: Any = Node(inspector=native_inspect.Inspector(writer.name))
        node.inspects = Inspects(node, seen)
        del node
        gc.collect()
        ObjectStoreWriter.recover(writer.name).close()
    return [*seen, is_mapped(writer.name)]


def views() -> list[Any]:
    for _ in range(20):
        writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1)
        reader = ObjectStoreReader.attach(writer.handle)
        native = reader._reader
        node: Any = Node(view=native.acquire(writer.put("k", np.zeros(9, np.uint8)).to_bytes())[1])
        node.native = native
        reader.close()
        writer.close()
        del writer, reader, native, node
        gc.collect()
    return []


class Raw(MsgpackSerde):
    """Its views are the bytes themselves."""

    __slots__ = ()

    def decode(self, meta: bytes, payload: Any, *, copy: bool = False) -> Any:
        return memoryview(payload)

    def layout(self, template: Any) -> Layout:
        return super().layout(template)._replace(build=memoryview)


class Reads:
    """Reads its view in its destructor, for example to write a summary."""

    def __init__(self, view: Any, seen: list[Any]) -> None:
        self.view, self.seen = view, seen
        self.self = self

    def __del__(self) -> None:
        self.seen.append(bytes(self.view[:3]))


def views_of_bytes() -> list[Any]:
    seen: list[Any] = []
    writer = ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1, serde=Raw())
    reader = ObjectStoreReader.attach(writer.handle, serde=Raw())
    Reads(reader.get(writer.put("k", np.arange(9, dtype=np.uint8))), seen)
    with writer.reserve("new", np.zeros(9, np.uint8)) as view:
        view[:3] = b"abc"
    Reads(view, seen)
    del view
    reader.close()
    writer.close()
    gc.collect()
    return [*seen, is_mapped(writer.name)]


class Asks:
    """Asks for figures in its destructor, for example to count what a request has used."""

    def __init__(self, ask: Callable[[], int], seen: list[int]) -> None:
        self.ask, self.seen = ask, seen
        self.self = self

    def __del__(self) -> None:
        self.seen.append(self.ask())


def scheduler_state() -> list[int]:
    seen: list[int] = []
    for n in range(1, 21):
        Asks(BlockHashes([bytes([n]) * 32] * n).__len__, seen)
        pool = Pool(n, 0)
        Asks(lambda pool=pool: pool.n_free, seen)  # type: ignore[misc]
        tables = Tables(pool, [(0, 16, 0, False)], 16, 16, 1 << 20, 1 << 20, True, False)
        Asks(partial(tables.find, BlockHashes(), 0), seen)
        del pool, tables
    gc.collect()
    return sorted(seen)


CASES: dict[str, tuple[Callable[[], list[Any]], list[Any]]] = {
    "requests": (requests, [True] * 20),
    "protect": (lambda: blocks("protect"), []),
    "reserve": (lambda: blocks("reserve"), []),
    "begin": (reservations, [[], ["new"]]),
    "begin, closed": (lambda: reservations(closed=True), [None, None]),
    "protect, closed": (lambda: blocks("protect", closed=True), []),
    "reserve, closed": (lambda: blocks("reserve", closed=True), []),
    "protect, older than its batch": (blocks_older_than_their_batches, []),
    "a batch of a closed writer": (a_batch_of_a_closed_writer, [True, False]),
    "scheduler's state": (scheduler_state, sorted([*range(1, 21), *range(20), *[0] * 20])),
    "inspectors": (inspectors, [6400, False]),
    "views": (views, []),
    "views of bytes": (views_of_bytes, [b"\0\1\2", b"abc", False]),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_is_garbage_together_ends_in_an_order_that_holds(name: str) -> None:
    before = set(segments())
    function, expected = CASES[name]
    assert expected == in_child(function)
    for left in set(segments()) - before:  # nobody closed them, which leaves the name
        ObjectStoreWriter.recover(left).close()
