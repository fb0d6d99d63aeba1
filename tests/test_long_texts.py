"""A text of megabytes that a caller passes, or that bytes hold, is in an error's message only in part."""

import re
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from shmstore import ObjectStoreWriter, StoreHandle, UnsupportedValueError, scheduler
from shmstore.errors import CacheMissError, UnknownTypeError, cut, listed, shown
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.tree import parse_tree
from shmstore.multimodal import (
    MultiModalBatchedField,
    MultiModalCacheConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    ShmObjectStoreSenderCache,
    hash_item,
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


def item(data: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", data, MultiModalBatchedField())])


def sender(writer: ObjectStoreWriter) -> ShmObjectStoreSenderCache:
    return ShmObjectStoreSenderCache(MultiModalCacheConfig(processor_cache_gb=1, cache_type="shm"), writer)


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    made = stores.create(max_object_size=200_000)
    made.put(LONG_KEY, torch.zeros(1))
    return made


def enter(context: AbstractContextManager[object]) -> None:
    with context:
        pass


CALLS: dict[str, Callable[[ObjectStoreWriter], object]] = {
    "put, a value": lambda w: w.put("a", {TEXT: object()}),
    "get_cached": lambda w: w.get_cached(TEXT),
    "protect": lambda w: enter(w.protect(TEXT)),
    "create": lambda w: ObjectStoreWriter.create(TEXT, capacity=64, n_readers=1),
    "create, eviction": lambda w: ObjectStoreWriter.create(capacity=64, n_readers=1, eviction=TEXT),
    "create, capacity": lambda w: ObjectStoreWriter.create(capacity=BIG_INT, n_readers=1),
    "recover, a path": lambda w: ObjectStoreWriter.recover("/dev/shm/" + TEXT),
    "inspect, a key": lambda w: StoreInspector.open(w.name).find(key=TEXT),
    "sender, a value": lambda w: sender(w).get_and_update([(item({TEXT: object()}), [])], [LONG_KEY]),
    "handle, no JSON": lambda w: StoreHandle.from_json(TEXT),
    "encode, a path": lambda w: SERDE.encode(NESTED),
    "encode, an int for a key": lambda w: SERDE.encode({BIG_INT: object()}),
    "encode, a dtype": lambda w: SERDE.encode(np.zeros(1, [(LONG_KEY, object)])),
    "encode, a shape": lambda w: SERDE.encode(torch.zeros([1] * 900 + [70000, 0])),
    "layout, a dtype": lambda w: TensorSpec((1,), TEXT),
    "register": lambda w: register_type(TEXT, NUMBER, list, list),
    "decode, a dtype": lambda w: SERDE.decode(msgpack.packb([TENSOR, TEXT, 0, 1]), b""),
    "decode, a type": lambda w: SERDE.decode(msgpack.packb([OBJECT, TEXT, 1]), b""),
    "tree, a dtype": lambda w: parse_tree(msgpack.packb([TENSOR, TEXT, 0, 1]), 1),
    "config": lambda w: MultiModalCacheConfig(processor_cache_gb=1, cache_type=TEXT),
    "item, a key": lambda w: MultiModalKwargsItem({TEXT: NUMBER}),
    "hash": lambda w: hash_item({TEXT: object()}),
    "block pool": lambda w: scheduler.BlockPool(4, enable_caching=True, free_order=TEXT),
    "events": lambda w: scheduler.KVCacheEvent.from_msgpack(TEXT.encode()),
}


def check(function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is other tests' business
        function(*arguments)
    assert len(str(caught.value)) < 1000, traceback.format_exception_only(caught.value)[-1][:300]
    assert not isinstance(caught.value, (AttributeError, NameError)), caught.value
    assert "digits" not in str(caught.value)
    assert "positional argument" not in str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_a_message_has_a_part_of_a_long_text(name: str, writer: ObjectStoreWriter) -> None:
    check(CALLS[name], writer)


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
