"""A text of megabytes that a caller passes, or that bytes hold, is in an error's message only in part."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from shmstore import ObjectStoreWriter, StoreHandle, UnsupportedValueError, scheduler
from shmstore.errors import CacheMissError, UnknownTypeError, cut, listed, shown
from shmstore.inspect.inspector import StoreInspector
from shmstore.multimodal import (
    MultiModalCacheConfig,
    hash_item,
)
from shmstore.serde import MsgpackSerde, TensorSpec
from shmstore.serde.wire import TENSOR
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


@pytest.fixture
def writer(stores: Stores) -> ObjectStoreWriter:
    made = stores.create(max_object_size=200_000)
    made.put(LONG_KEY, torch.zeros(1))
    return made


CALLS: dict[str, Callable[[ObjectStoreWriter], object]] = {
    "put, a value": lambda w: w.put("a", {TEXT: object()}),
    "create": lambda w: ObjectStoreWriter.create(TEXT, capacity=64, n_readers=1),
    "create, capacity": lambda w: ObjectStoreWriter.create(capacity=BIG_INT, n_readers=1),
    "inspect, a key": lambda w: StoreInspector.open(w.name).find(key=TEXT),
    "handle, no JSON": lambda w: StoreHandle.from_json(TEXT),
    "layout, a dtype": lambda w: TensorSpec((1,), TEXT),
    "decode, a dtype": lambda w: SERDE.decode(msgpack.packb([TENSOR, TEXT, 0, 1]), b""),
    "config": lambda w: MultiModalCacheConfig(processor_cache_gb=1, cache_type=TEXT),
    "hash": lambda w: hash_item({TEXT: object()}),
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
