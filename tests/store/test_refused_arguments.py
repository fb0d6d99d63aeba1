"""Arguments that no call takes: a typed error that names the argument, and nothing has changed."""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shmstore
from shmstore import (
    Cache,
    MsgpackSerde,
    ObjectStoreReader,
    ObjectStoreWriter,
    Queue,
    StoreHandle,
    multimodal,
    scheduler,
)
from shmstore.bindings.store import MAX_CAPACITY, MAX_NAME, MAX_OBJECTS, MAX_READERS, MAX_WRITERS
from tests.support import Stores, raises, segments, state, store_name

ONE = torch.ones(1)
Call = Callable[[ObjectStoreWriter, Any], object]


def create(writer: ObjectStoreWriter, value: Any, *, option: str, call: Any = ObjectStoreWriter.create) -> None:
    call(**{"name": store_name(), "capacity": 4096, "n_readers": 8, option: value})


def opening(option: str) -> list[Call]:
    return [partial(create, option=option), partial(create, option=option, call=ObjectStoreWriter.open)]


def reserve(writer: ObjectStoreWriter, value: Any) -> None:
    with writer.reserve("new", ONE, timeout=value):
        pass


def protect(writer: ObjectStoreWriter, value: Any) -> None:
    with writer.protect(value):
        pass


SERDES: list[Call] = [
    lambda w, v: ObjectStoreReader.attach(w.handle, serde=v),
    lambda w, v: ObjectStoreWriter.join(w.handle, serde=v),
    lambda w, v: ObjectStoreWriter.recover(w.handle, serde=v),
]
NAMES = ["", ".", "..", "a/b", "/a", "a/", "a\0b", "\0", "x" * (MAX_NAME + 1), "й" * MAX_NAME, "\ud800"]
BY_NAME: list[Call] = [
    lambda w, v: ObjectStoreWriter.create(v, capacity=4096, n_readers=1),
    lambda w, v: ObjectStoreWriter.recover(v),
    lambda w, v: ObjectStoreReader.attach(v),
]
BY_HANDLE: list[Call] = [
    lambda w, v: ObjectStoreWriter.recover(StoreHandle(v, 1, 1)),
    lambda w, v: ObjectStoreReader.attach(StoreHandle(v, 1, 1)),
]

# The argument; the calls; values of a wrong size or content; values of a wrong type.
REFUSED: list[tuple[str, Sequence[Call], list[Any], list[Any]]] = [
    ("name", [*BY_NAME, *BY_HANDLE], NAMES, []),
    ("name", BY_NAME[:2], [], [3, Path("x")]),
    ("handle_or_name", BY_NAME[2:], [], [3, Path("x")]),
    (
        "store_id",
        [
            lambda w, v: ObjectStoreReader.attach(replace(w.handle, store_id=v)),
            lambda w, v: ObjectStoreWriter.recover(replace(w.handle, store_id=v)),
        ],
        [-1, 2**32, 2**70],
        [],
    ),
    ("n_readers", [lambda w, v: ObjectStoreReader.attach(replace(w.handle, n_readers=v), 2**40)], [0, 2**70], ["2"]),
    ("capacity", opening("capacity"), [0, -1, MAX_CAPACITY + 1, 2**64 + 4096], [True, 4096.0, "4096"]),
    ("n_readers", opening("n_readers"), [0, MAX_READERS + 1], [True, 2.0, "2"]),
    ("max_object_size", opening("max_object_size"), [0, 4097], [1.5]),
    ("max_objects", opening("max_objects"), [0, MAX_OBJECTS + 1], [1.5]),
    ("on_mismatch", opening("on_mismatch")[1:], ["keep"], []),
    *((unknown, opening(unknown), [], [5]) for unknown in ("capcity", "eviction")),
    ("dir", opening("dir"), ["", "/a\0b", "/" + "x" * 4000], [3, b"/dev/shm"]),
    ("mode", opening("mode"), [0o400, 0o670, 0o1660], ["0660", True]),
    ("gid", opening("gid"), [-1], ["users"]),
    ("groups", opening("groups"), [[4, 3], [4, 5], [8, 0]], [3, "44", [4, 4.0]]),
    ("serde", [*opening("serde"), *SERDES], [], [object(), "msgpack", MsgpackSerde]),
    ("keys", [protect], [], [3, None, "old", b"old"]),
    (
        "quotas",
        opening("quotas"),
        [{"a": 0.0}, {"a": 1.5}, {"a": 1}, {f"k{i}": 0.5 for i in range(16)}],
        [{"a": True}, {"a": "half"}, [("a", 0.5)]],
    ),
    ("kind", [lambda w, v: w.put("new", ONE, kind=v)], ["", "x" * 24, "a\0b", "ä" * 12, "\ud800"], [5, ["image"]]),
    (
        "namespace",
        [
            lambda w, v: w.put("new", ONE, namespace=v),
            lambda w, v: w.get_cached("old", namespace=v),
            lambda w, v: w.is_cached("old", namespace=v),
            lambda w, v: w.touch("old", namespace=v),
            lambda w, v: w.delete("old", namespace=v),
            lambda w, v: w.keys(namespace=v),
            lambda w, v: w.clear(namespace=v),
        ],
        ["", "x" * 256, "ä" * 128, "\ud800"],
        [5, b"m1", ("m1",)],
    ),
    (
        "group",
        [
            lambda w, v: w.put("new", ONE, group=v),
            lambda w, v: w.get_cached("old", group=v),
            lambda w, v: w.get_cached("absent", group=v),
            lambda w, v: w.assign_group(w.hold(w.get_cached("old")).ref, v),
        ],
        [2, 255],
        ["1"],
    ),
    (
        "timeout",
        [lambda w, v: w.put("new", ONE, timeout=v), reserve],
        [-1, -math.inf, math.nan, 10**400],
        [True, False, "1", None],
    ),
    (
        "wait",
        [
            lambda w, v: ObjectStoreReader.attach(w.handle, 1, wait=v),
            lambda w, v: ObjectStoreReader.attach(w.handle, None, wait=v),
            *opening("wait")[1:],
        ],
        [-1, math.nan, 10**400],
        ["5", True],
    ),
    ("arena", [lambda w, v: ObjectStoreWriter.join(w.name, v)], [1, MAX_WRITERS - 1], []),
    ("index", [lambda w, v: ObjectStoreWriter.join(w.name, v)], [-1, MAX_WRITERS], ["1", 1.0, True]),
    (
        "rank",
        [lambda w, v: ObjectStoreReader.attach(w.handle, v), lambda w, v: ObjectStoreReader.attach(w.name, v)],
        [-1, 2, 255, 256, 2**31, 2**32, 2**63, 2**64],
        [True, "0", 0.0],
    ),
    ("rank", [ObjectStoreWriter.retire], [-1, 2], ["0", True]),
    (
        "allow_uid",
        [
            lambda w, v: ObjectStoreReader.attach(w.name, allow_uid=v),
            lambda w, v: ObjectStoreWriter.recover(w.name, allow_uid=v),
        ],
        [-1],
        ["0", 1.5, True],
    ),
    *((flag, opening(flag), [], ["false", 1, None]) for flag in ("prefault", "huge_pages", "checksums")),
    *((flag, opening(flag)[:1], [], ["false", 1]) for flag in ("memfd", "writes")),
    *((flag, opening(flag)[1:], [], ["false", 1]) for flag in ("keep", "keep_leases")),
    ("keep_leases", [lambda w, v: ObjectStoreWriter.join(w.name, keep_leases=v)], [], ["false"]),
]


@pytest.mark.parametrize(("argument", "calls", "values", "types"), REFUSED, ids=[row[0] for row in REFUSED])
def test_an_argument_that_cannot_be_is_refused_by_name_and_changes_nothing(
    stores: Stores, argument: str, calls: Sequence[Call], values: list[Any], types: list[Any]
) -> None:
    writer = stores.create(n_readers=2, groups=[1, 1])
    ref = writer.put("old", ONE)
    before, files = state(writer), segments()
    for error, wrong in ((ValueError, values), (TypeError, types)):
        for value in wrong:
            for call in calls:
                with raises(error, names=[argument]) as caught:
                    call(writer, value)
                assert type(caught.value) is error
    after = state(writer)
    if argument == "group":  # of which one call takes a lease first, which ends as garbage
        before, after = before[0], after[0]
    assert (before, files) == (after, segments())
    for rank in range(2):
        stores.attach(writer, rank)  # none was taken
    assert writer.cancel(ref)


def test_a_rank_of_a_store_of_one_is_refused_with_the_number_that_it_has(stores: Stores) -> None:
    writer = stores.create(n_readers=1)
    for rank in (-1, 1):
        with raises(ValueError, names=["rank must be 0", f"not {rank}"]):
            ObjectStoreReader.attach(writer.handle, rank)


def test_errors_of_python_about_a_call_name_no_inner_class() -> None:
    modules = (shmstore, multimodal, scheduler)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    classes = [found for found in public.values() if isinstance(found, type)]
    methods = [getattr(found, name) for found in classes for name in dir(found) if name[0] != "_"]
    owners = {getattr(each, "__qualname__", "").rpartition(".")[0] for each in methods if of_ours(each)}
    assert {"ObjectStoreWriter", ""} < owners <= {*public, ""}
    with pytest.raises(TypeError, match=r"^ObjectStoreWriter\.create or open\(\) .*'capcity'"):
        ObjectStoreWriter.create(capcity=1, capacity=1, n_readers=1)  # type: ignore[call-arg]


def of_ours(method: Any) -> bool:
    return callable(method) and str(getattr(method, "__module__", "")).startswith("shmstore")


def flags_of(call: Callable[..., Any]) -> list[str]:
    given = inspect.signature(call).parameters.values()
    return [each.name for each in given if isinstance(each.default, bool) or "bool" in str(each.annotation)]


FLAGGED = [
    (of, name, flag)
    for of in (ObjectStoreWriter, ObjectStoreReader, multimodal.ShmObjectStoreSenderCache, Cache, Queue)
    for name, call in inspect.getmembers(of, callable)
    if name == "__init__" or name[0] != "_"
    for flag in flags_of(call)
    if flag != "delta"  # of figures
]


@pytest.mark.parametrize(("of", "name", "flag"), FLAGGED, ids=lambda part: getattr(part, "__name__", part))
def test_every_flag_is_true_or_false(of: type, name: str, flag: str, stores: Stores) -> None:
    """The text "no" is true: `close(unlink="no")` removed a store."""
    writer = stores.create(n_readers=1)
    held: dict[str, Any] = {
        "key": "new",
        "value": ONE,
        "template": ONE,
        "ref": writer.put("a", ONE),
        "handle_or_name": writer.handle,
    }
    config = multimodal.MultiModalCacheConfig(cache_type="shm", world_size=1, ipc_cache_gb=0.01)
    held |= {"name": store_name(), "capacity": 4096, "n_readers": 8, "config": config, "writer": writer}
    held |= {"make": int, "timeout": 0}
    on: Any = of if name in ("create", "open", "join", "recover", "attach") else None
    if on is None and name != "__init__":
        if of is multimodal.ShmObjectStoreSenderCache:
            on = multimodal.processor_cache_from_config(config)
        elif of is Cache:
            on = Cache(held["name"], 1 << 20)
        elif of is Queue:
            on = Queue(1 << 20)
            on.put(1)
        else:
            on = writer if of is ObjectStoreWriter else stores.attach(writer)
    call = of if on is None else getattr(on, name)
    before = state(writer)
    given = {each: held[each] for each in inspect.signature(call).parameters if each in held}
    for wrong in ("no", 1, None) if flag != "unlink" else ("no", 1):
        with raises(TypeError, [flag]):
            got = call(**given | {flag: wrong})
            asyncio.run(got) if inspect.iscoroutine(got) else got.__enter__()  # of `reserve`
    assert before == state(writer)
    if isinstance(on, (multimodal.ShmObjectStoreSenderCache, Cache, Queue)):
        on.close()
