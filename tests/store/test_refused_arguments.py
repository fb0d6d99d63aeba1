"""Arguments that no call takes: a typed error that names the argument, and nothing has changed."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import shmstore
from shmstore import (
    MsgpackSerde,
    ObjectStoreReader,
    ObjectStoreWriter,
    Queue,
    StoreHandle,
    multimodal,
    scheduler,
)
from shmstore.bindings.store import MAX_CAPACITY, MAX_NAME, MAX_OBJECTS, MAX_READERS, MAX_WRITERS
from tests.scheduler.helpers import config as kv_config
from tests.support import Stores, raises, segments, state, store_name
from tests.test_public import MODULES

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


def test_who_passes_none_for_a_time_learns_what_does_not_wait_and_what_has_no_end(stores: Stores) -> None:
    with pytest.raises(TypeError, match=r"hint: 0 .* float\('inf'\)"):
        stores.create().put("new", ONE, timeout=None)  # type: ignore[arg-type]


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
    bools = [each for each in given if isinstance(each.default, bool) or "bool" in str(each.annotation)]
    return [each.name for each in bools if "Callable" not in str(each.annotation)]


def public() -> Iterator[tuple[Any, str, str]]:
    """Yield each flag of each public call: the function or class, the name of the method, and the flag."""
    modules = [import_module(name) for name in MODULES if "metrics" not in name or find_spec("prometheus_client")]
    for of in dict.fromkeys(getattr(module, name) for module in modules for name in module.__all__):
        for name, call in inspect.getmembers(of, callable) if isinstance(of, type) else [("", of)]:
            if of_ours(call) and (name == "__init__" or name[:1] != "_"):
                yield from ((of, name, flag) for flag in flags_of(call))


NO_CALLS_OF_USERS = {
    "BaseMultiModalProcessorCache.make_stats": "abstract",
    "ObjectSerde.decode": "a protocol",
    "PrefixCacheStats.__init__": "a record that the manager makes",
    "PrefixCacheStats.record": "the manager calls it",
    "TierStats.__init__": "a record that the tier makes",
}
FLAGGED = [each for each in public() if f"{each[0].__name__}.{each[1]}" not in NO_CALLS_OF_USERS]


def full_queue(held: dict[str, Any]) -> Queue:
    queue = Queue(1 << 20)
    queue.put(1)
    return queue


def settled_manager(held: dict[str, Any]) -> scheduler.KVCacheManager:
    """Return a manager whose next `allocate_slots` ends early."""
    manager = scheduler.KVCacheManager(held["config"], 64, 4, enable_caching=False)
    manager.allocate_slots(held["request"], 1)
    return manager


MADE: dict[type, Callable[[dict[str, Any]], Any]] = {
    ObjectStoreWriter: lambda held: held["writer"],
    ObjectStoreReader: lambda held: ObjectStoreReader.attach(held["writer"].handle),
    Queue: full_queue,
    multimodal.MultiModalField: lambda held: multimodal.MultiModalBatchedField(),
    multimodal.ShmObjectStoreSenderCache: lambda held: multimodal.processor_cache_from_config(held["config"]),
    scheduler.KVCacheManager: settled_manager,
}
"""How to make what has the method, where the constructor does not do."""


def given(call: Callable[..., Any], held: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by their names: those in `held`, and 8 for others that must be."""
    named = [each for each in inspect.signature(call).parameters.values() if each.kind is not each.VAR_KEYWORD]
    return {each.name: held.get(each.name, 8) for each in named if each.name in held or each.default is each.empty}


@pytest.mark.parametrize(("of", "name", "flag"), FLAGGED, ids=lambda part: getattr(part, "__name__", part))
def test_every_flag_is_true_or_false(of: Any, name: str, flag: str, stores: Stores) -> None:
    """The text "no" is true: `close(unlink="no")` removed a store."""
    writer = stores.create(n_readers=1)
    config: Any = multimodal.MultiModalCacheConfig(cache_type="shm", world_size=1, ipc_cache_gb=0.01)
    if of is scheduler.KVCacheManager:
        config = kv_config(9, ("full", 4))
    held: dict[str, Any] = {
        **{"key": "new", "value": ONE, "template": ONE, "ref": writer.put("a", ONE), "make": int, "timeout": 0},
        **{"name": store_name(), "capacity": 1 << 20, "handle_or_name": writer.handle, "config": config},
        **{"writer": writer, "meta": MsgpackSerde().encode(7).meta, "payload": b"", "elems": [], "slices": []},
        **{"max_tokens_by_modality": {}, "limits_per_prompt": {}, "items": {}, "blocks": [], "num_new_tokens": 1},
        **{"enable_caching": True, "prompt_token_ids": [1], "request_id": "r", "request": scheduler.Request("r", [1])},
    }
    call = getattr(of, name, of)
    if name in ("", "__init__"):
        call = of
    elif not inspect.ismethod(call):  # nor a class method
        on = MADE[of](held) if of in MADE else of(**given(of, held))
        call = getattr(stores.keep(on) if hasattr(on, "close") else on, name)
    before = state(writer)
    error = ValueError if of is multimodal.MultiModalCacheConfig else TypeError  # as for each of its fields
    none = "None" in str(inspect.signature(call).parameters[flag].annotation)
    none |= name == "allocate_slots"  # to tell it from False would take 5 % of a decode step
    for wrong in ("no", 1) if none else ("no", 1, None):
        with raises(error, [f"{flag} must be True or False"]):
            got = call(**given(call, held) | {flag: wrong})
            asyncio.run(got) if inspect.iscoroutine(got) else got.__enter__()  # of `reserve`
    assert before == state(writer)


def test_no_call_with_flags_is_exempt_for_nothing() -> None:
    assert NO_CALLS_OF_USERS.keys() <= {f"{of.__name__}.{name}" for of, name, _ in public()}
