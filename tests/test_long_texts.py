"""A text of megabytes that a caller passes, or that bytes hold, is in an error's message only in part."""

import json
import re
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreHandle, UnsupportedValueError, scheduler
from shmstore.errors import CacheMissError, UnknownTypeError, cut, listed, shown
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.tree import parse_tree
from shmstore.multimodal import (
    MultiModalBatchedField,
    MultiModalCacheConfig,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
    ResolvedPromptUpdate,
    ShmObjectStoreSenderCache,
    hash_item,
    processor_cache_from_config,
)
from shmstore.serde import MsgpackSerde, TensorSpec, register_type
from shmstore.serde.wire import OBJECT, TENSOR
from tests.support import Stores

TEXT: Any = "x" * 5_000_000
NUMBER: Any = 5
LONG_KEY = "k" * 65_536
SERDE = MsgpackSerde()
BIG_INT = 10**100_000
NESTED: dict[str, Any] = {}
current = NESTED
for _ in range(90):
    current["k" * 1000] = {}
    current = current["k" * 1000]
current["end"] = object()


def elem(key: str = "k", modality: str = "image", data: Any = None) -> MultiModalFieldElem:
    return MultiModalFieldElem(modality, key, torch.zeros(1) if data is None else data, MultiModalBatchedField())


def item(**of: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_elems([elem(**of)])


def sender(writer: ObjectStoreWriter) -> ShmObjectStoreSenderCache:
    return ShmObjectStoreSenderCache(MultiModalCacheConfig(processor_cache_gb=1, cache_type="shm"), writer)


def lru() -> Any:
    return processor_cache_from_config(MultiModalCacheConfig(processor_cache_gb=1))


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    made = stores.create(max_object_size=200_000)
    made.put(LONG_KEY, torch.zeros(1))
    return made


def enter(context: AbstractContextManager[object]) -> None:
    with context:
        pass


STORE: dict[str, Callable[[ObjectStoreWriter], object]] = {
    "put, a value": lambda w: w.put("a", {TEXT: object()}),
    "put, too large": lambda w: w.put("a", TEXT),
    "get_cached": lambda w: w.get_cached(TEXT),
    "get_cached, not there": lambda w: w.get_cached("l" * 65_536),
    "protect": lambda w: enter(w.protect(TEXT)),
    "reserve, a template": lambda w: enter(w.reserve("a", {TEXT: object()})),
    "create": lambda w: ObjectStoreWriter.create(TEXT, capacity=64, n_readers=1),
    "create, eviction": lambda w: ObjectStoreWriter.create(capacity=64, n_readers=1, eviction=TEXT),
    "create, capacity": lambda w: ObjectStoreWriter.create(capacity=BIG_INT, n_readers=1),
    "recover, a path": lambda w: ObjectStoreWriter.recover("/dev/shm/" + TEXT),
    "attach": lambda w: ObjectStoreReader.attach(TEXT),
    "inspect": lambda w: StoreInspector.open(TEXT),
    "inspect, a key": lambda w: StoreInspector.open(w.name).find(key=TEXT),
    "sender, a value": lambda w: sender(w).get_and_update([(item(data={TEXT: object()}), [])], [LONG_KEY]),
    "sender, no item": lambda w: sender(w).get_and_update([NUMBER], [LONG_KEY]),
}
OTHERS: dict[str, Callable[[], object]] = {
    "handle, no JSON": lambda: StoreHandle.from_json(TEXT),
    "handle, without fields": lambda: StoreHandle.from_json(json.dumps({"name": TEXT})),
    "handle, a wrong type": lambda: StoreHandle.from_json(json.dumps({"name": 1, "store_id": TEXT, "n_readers": 1})),
    "reference": lambda: ObjectRef.from_bytes(TEXT.encode()),
    "encode, a path": lambda: SERDE.encode(NESTED),
    "encode, an int for a key": lambda: SERDE.encode({BIG_INT: object()}),
    "encode, a dtype": lambda: SERDE.encode(np.zeros(1, [(LONG_KEY, object)])),
    "encode, a shape": lambda: SERDE.encode(torch.zeros([1] * 900 + [70000, 0])),
    "layout, a dtype": lambda: TensorSpec((1,), TEXT),
    "layout, a shape": lambda: TensorSpec(TEXT, np.dtype("u1")),
    "register": lambda: register_type(TEXT, NUMBER, list, list),
    "decode, a dtype": lambda: SERDE.decode(msgpack.packb([TENSOR, TEXT, 0, 1]), b""),
    "decode, a type": lambda: SERDE.decode(msgpack.packb([OBJECT, TEXT, 1]), b""),
    "decode, an item": lambda: SERDE.decode(
        msgpack.packb([OBJECT, "shmstore.mm.Item", {"": TEXT + "\nimage", "k": 1}]), b""
    ),
    "tree, a dtype": lambda: parse_tree(msgpack.packb([TENSOR, TEXT, 0, 1]), 1),
    "config": lambda: MultiModalCacheConfig(processor_cache_gb=1, cache_type=TEXT),
    "item, a key": lambda: MultiModalKwargsItem({TEXT: NUMBER}),
    "field, slices": lambda: MultiModalFlatField([TEXT]),
    "update, a mode": lambda: ResolvedPromptUpdate("image", 0, TEXT, 1, 1),
    "range": lambda: PlaceholderRange(TEXT, 1),
    "hash": lambda: hash_item({TEXT: object()}),
    "lru, misses": lambda: lru().get_and_update([None] * 50, [LONG_KEY] * 50),
    "misses": lambda: (_ for _ in ()).throw(CacheMissError([LONG_KEY] * 1000)),
    "block pool": lambda: scheduler.BlockPool(4, enable_caching=True, free_order=TEXT),
    "events": lambda: scheduler.KVCacheEvent.from_msgpack(TEXT.encode()),
}


def check(function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is other tests' business
        function(*arguments)
    assert len(str(caught.value)) < 1000, traceback.format_exception_only(caught.value)[-1][:300]
    assert not isinstance(caught.value, (AttributeError, NameError)), caught.value
    assert "digits" not in str(caught.value)
    assert "positional argument" not in str(caught.value)


@pytest.mark.parametrize("name", STORE)
def test_a_store_shows_a_part_of_a_long_text(name: str, writer: ObjectStoreWriter) -> None:
    check(STORE[name], writer)


@pytest.mark.parametrize("name", OTHERS)
def test_a_value_shows_a_part_of_a_long_text(name: str) -> None:
    check(OTHERS[name])


def test_what_is_short_is_shown_whole() -> None:
    assert "'a'" == shown("a")
    assert "['a', 1]" == shown(["a", 1])
    assert "a" * 300 == cut("a" * 300)
    assert "a, b" == listed(["a", "b"])


def test_what_is_long_is_shown_by_its_ends() -> None:
    assert re.fullmatch(r"'ax+\.\.\.x+b'", shown("a" + TEXT + "b"))
    assert re.fullmatch(r"ax+\.\.\.x+b", cut("a" + TEXT + "b"))
    assert "<an int of 332193 bits>" == shown(BIG_INT)
    assert listed(map(str, range(10))).endswith("7 and 2 more")


def test_the_attributes_of_an_error_are_whole() -> None:
    assert [LONG_KEY] * 9 == list(CacheMissError([LONG_KEY] * 9).mm_hashes)
    assert TEXT == UnknownTypeError(type_name=TEXT).type_name
    with pytest.raises(UnsupportedValueError) as caught:
        SERDE.encode(NESTED)
    assert caught.value.path.endswith("['end']")
    assert 90 == caught.value.path.count("kk'][")
