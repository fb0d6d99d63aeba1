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


class AtEnd(Node):
    """Calls a function at its end, as a request of an engine may, or whatever writes a summary."""

    def __init__(self, act: Callable[[], object], **members: Any) -> None:
        super().__init__(**members)
        self.act = act

    def __del__(self) -> None:
        self.act()


def a_writer(**options: Any) -> ObjectStoreWriter:
    return ObjectStoreWriter.create(store_name(), capacity=6400, n_readers=1, **options)


def requests() -> list[Any]:
    seen: list[Any] = []
    for _ in range(20):
        engine: Any = Node(writer=a_writer())
        ref = engine.writer.put("k", 1)
        engine.request = AtEnd(lambda engine=engine, ref=ref: seen.append(engine.writer.cancel(ref)))  # type: ignore[misc]
        del engine
        gc.collect()
    return seen


def reservations(closed: bool = False) -> list[Any]:
    """Fill what a reservation has begun, at its end."""
    seen: list[Any] = []
    for commits in (False, True):
        writer = a_writer()
        node: Any = Node(writer=writer, begun=writer.begin("new", np.zeros(9, np.uint8)))

        def fill(node: Any = node, commits: bool = commits and not closed) -> None:
            node.begun.value[:] = 7
            if commits:
                node.begun.commit()

        node.writes = AtEnd(fill)
        if closed:
            writer.close()
            del writer
        del node, fill
        gc.collect()
        seen.append(None if closed else writer.keys())
    return seen


def blocks(name: str, closed: bool = False) -> list[Any]:
    writer = a_writer()
    writer.put("k", 1)
    node: Any = Node(writer=writer)
    node.block = getattr(writer, name)(*([["k"]] if name == "protect" else ["new", np.zeros(9, np.uint8)]))
    node.entered = node.block.__enter__()
    if closed:
        writer.close()
    del writer, node
    gc.collect()
    return []


def used_again(most: int) -> list[Any]:
    """Do what many finalizers do, also of the store's: use memory that has become free."""
    return [np.full(size, 0x41, np.uint8) for size in range(16, most, 8) for _ in range(50)]


def blocks_older_than_their_batches() -> list[Any]:
    kept: list[Any] = []
    for _ in range(10):
        writer = a_writer()
        writer.put("k", 1)
        node: Any = Node(writer=writer, block=writer.protect(["k"]))
        gc.collect(0)  # a collection of all takes the youngest before these
        node.block.__enter__()
        node.allocates = AtEnd(lambda: kept.append(used_again(200)), node=node)
        del writer, node
        gc.collect()
    return []


def a_batch_of_a_closed_writer() -> list[Any]:
    seen: list[Any] = []
    writer = a_writer()
    name = writer.name
    writer.put("k", 1)
    node: Any = Node(batch=writer._writer.batch())
    node.batch.protect([b"k"])
    node.looks = AtEnd(lambda: seen.append(is_mapped(name)), node=node)
    writer.close()
    del node
    gc.collect()
    return [*seen, is_mapped(name)]


def inspectors() -> list[Any]:
    """Ask an inspector at its end, once what has become free is used again."""
    seen: list[Any] = []
    with a_writer() as writer:
        writer.close(unlink=False)
        node: Any = Node(inspector=native_inspect.Inspector(writer.name))

        def ask(node: Any = node) -> None:
            node.kept = used_again(1200)
            try:
                seen.append(node.inspector.facts()["capacity"])
            except Exception as error:
                seen.append(error)

        node.inspects = AtEnd(ask)
        del node, ask
        gc.collect()
        ObjectStoreWriter.recover(writer.name).close()
    return [*seen, is_mapped(writer.name)]


def views() -> list[Any]:
    for _ in range(20):
        writer = a_writer()
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


def views_of_bytes() -> list[Any]:
    seen: list[Any] = []

    def read_at_its_end(view: Any) -> None:
        AtEnd(lambda: seen.append(bytes(view[:3])))

    writer = a_writer(serde=Raw())
    reader = ObjectStoreReader.attach(writer.handle, serde=Raw())
    read_at_its_end(reader.get(writer.put("k", np.arange(9, dtype=np.uint8))))
    with writer.reserve("new", np.zeros(9, np.uint8)) as view:
        view[:3] = b"abc"
    read_at_its_end(view)
    del view
    reader.close()
    writer.close()
    gc.collect()
    return [*seen, is_mapped(writer.name)]


def scheduler_state() -> list[int]:
    """Ask for figures at the end, for example to count what a request has used."""
    seen: list[int] = []

    def ask_at_the_end(ask: Callable[[], int]) -> None:
        AtEnd(lambda: seen.append(ask()))

    for n in range(1, 21):
        ask_at_the_end(BlockHashes([bytes([n]) * 32] * n).__len__)
        pool = Pool(n, 0)
        ask_at_the_end(lambda pool=pool: pool.n_free)  # type: ignore[misc]
        tables = Tables(pool, [(0, 16, 0, False)], 16, 16, 1 << 20, 1 << 20, True, False)
        ask_at_the_end(partial(tables.find, BlockHashes(), 0))
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
