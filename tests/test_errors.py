"""The errors: what a caller catches, reads and pickles; and texts of megabytes, of which a message has a part."""

import errno
import pickle
import re
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from shmstore import ObjectStoreWriter, StoreHandle, errors, scheduler
from shmstore.errors import CacheMissError, ShmStoreError, cut, listed, shown
from shmstore.inspect.inspector import StoreInspector
from shmstore.multimodal import MultiModalCacheConfig, hash_item
from shmstore.serde import MsgpackSerde, TensorSpec
from shmstore.serde.wire import TENSOR
from tests.support import Stores

BUILT_IN: dict[type[Exception], str] = {
    ValueError: "ObjectTooLarge ObjectExists StaleRef LayoutMismatch CorruptStore SparseStore StoreClosed UnknownType "
    "Nesting",
    RuntimeError: "ReservationEnded WriterActive NoArena RankInUse Device",
    OSError: "StoreSpace SharedMemory",
    ConnectionError: "Tier TierFull",
    MemoryError: "StoreFull",
    KeyError: "ObjectNotFound",
    FileNotFoundError: "StoreNotFound",
    FileExistsError: "StoreExists",
    PermissionError: "ForeignStore",
    TimeoutError: "ObjectBusy",
    LookupError: "CacheMiss",
    TypeError: "UnsupportedValue",
    ImportError: "MissingExtra",
}
CLASSES: dict[Any, type[Exception]] = {
    getattr(errors, f"{name}Error"): built_in for built_in, names in BUILT_IN.items() for name in names.split()
}


def test_every_public_error_is_in_the_table_of_this_test() -> None:
    assert sorted([*(cls.__name__ for cls in CLASSES), "ShmStoreError"]) == sorted(errors.__all__)


@pytest.mark.parametrize("cls", CLASSES)
def test_each_error_is_what_one_would_catch_and_has_a_hint(cls: Any) -> None:
    error, given = cls(), cls(message="no 'x' here", hint="look there")
    assert isinstance(error, ShmStoreError)
    assert isinstance(error, CLASSES[cls])
    assert error.hint not in ("", ShmStoreError.default_hint)
    assert f"{error.message} (hint: {error.hint})" == str(error)
    assert "\n" not in str(error)
    assert str(given) == "no 'x' here (hint: look there)"  # without quotes and numbers


def test_the_messages_that_the_contract_names_are_the_defaults() -> None:
    assert "already exists in the storage" in str(errors.ObjectExistsError())
    assert "has been modified or is invalid" in str(errors.StaleRefError())


# With what their text must have, and their errno.
EXAMPLES: list[tuple[Any, str, int | None]] = [
    *((cls(), "", None) for cls in CLASSES if not issubclass(cls, OSError)),
    (errors.StoreFullError(needed=10, held_bytes_by_rank={0: 5, 3: 7}), "full", None),
    (CacheMissError(iter(["b", "a"])), "b, a", None),
    (CacheMissError(("a",), "gone", hint="again"), "gone (hint: again)", None),
    (errors.UnsupportedValueError("no serializer for Foo", path="value[1]"), "Foo", None),
    (errors.StoreNotFoundError("gone"), "gone", errno.ENOENT),
    (errors.StoreExistsError(), "name", errno.EEXIST),
    (errors.StoreSpaceError(needed=2 << 20, free=1 << 20), "2 MiB needed, 1 MiB free", errno.ENOSPC),
    (errors.SharedMemoryError(number=errno.EROFS), "RLIMIT_AS", errno.EROFS),
    (errors.ForeignStoreError(), "user", errno.EACCES),
]


@pytest.mark.parametrize(("error", "text", "number"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_an_error_pickles_with_every_attribute(error: Any, text: str, number: int | None) -> None:
    assert text in str(error)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert (type(error), error.args, error.__dict__) == (type(back), back.args, back.__dict__)
        assert str(error) == str(back)
        assert number is None or (number, error.message) == (back.errno, back.strerror)


# ---- long texts

TEXT: Any = "x" * 5_000_000
BIG_INT = 10**100_000
CALLS: dict[str, Callable[[ObjectStoreWriter], object]] = {
    "put, a value": lambda w: w.put("a", {TEXT: object()}),
    "create": lambda w: ObjectStoreWriter.create(TEXT, capacity=64, n_readers=1),
    "create, capacity": lambda w: ObjectStoreWriter.create(capacity=BIG_INT, n_readers=1),
    "inspect, a key": lambda w: StoreInspector.open(w.name).find(key=TEXT),
    "handle, no JSON": lambda w: StoreHandle.from_json(TEXT),
    "layout, a dtype": lambda w: TensorSpec((1,), TEXT),
    "decode, a dtype": lambda w: MsgpackSerde().decode(msgpack.packb([TENSOR, TEXT, 0, 1]), b""),
    "config": lambda w: MultiModalCacheConfig(processor_cache_gb=1, cache_type=TEXT),
    "hash": lambda w: hash_item({TEXT: object()}),
    "events": lambda w: scheduler.KVCacheEvent.from_msgpack(TEXT.encode()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_message_has_a_part_of_a_long_text(name: str, stores: Stores) -> None:
    writer = stores.create(max_object_size=200_000)
    writer.put("k" * 65_536, torch.zeros(1))
    with pytest.raises((ValueError, TypeError, KeyError)) as caught:
        CALLS[name](writer)
    assert len(str(caught.value)) < 1000
    assert "digits" not in str(caught.value)


def test_what_is_short_is_shown_whole_and_what_is_long_by_its_ends() -> None:
    assert ("'a'", "['a', 1]", "a" * 300) == (shown("a"), shown(["a", 1]), cut("a" * 300))
    assert ("a, b", r"a\nb") == (listed(["a", "b"]), cut("a\nb"))
    assert re.fullmatch(r"'ax+\.\.\.x+b'", shown("a" + TEXT + "b"))
    assert re.fullmatch(r"ax+\.\.\.x+b", cut("a" + TEXT + "b"))
    assert "<an int of 332193 bits>" == shown(BIG_INT)
    assert listed(map(str, range(10))).endswith("7 and 2 more")


def test_the_attributes_of_an_error_are_whole() -> None:
    value: Any = object()
    for _ in range(90):
        value = {"k" * 1000: value}
    assert [TEXT] * 9 == list(CacheMissError([TEXT] * 9).mm_hashes)
    assert TEXT == errors.UnknownTypeError(type_name=TEXT).type_name
    with pytest.raises(errors.UnsupportedValueError) as caught:
        MsgpackSerde().encode(value)
    assert 89 == caught.value.path.count("kk'][")
