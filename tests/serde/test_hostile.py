"""Decoding bytes that nobody wrote: a value or CorruptStoreError, never a crash, another error or an over-read."""

import itertools
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shmstore.multimodal  # noqa: F401 - registers its types
from shmstore.errors import CorruptStoreError, UnsupportedValueError
from shmstore.serde import Encoded, registry
from shmstore.serde.decode import make_plan
from shmstore.serde.wire import ARRAY, INT, MAX_DEPTH, MAX_SAME_HASH, OBJECT, TENSOR, TUPLE
from tests.serde.values import SERDE, aligned, exact, random_array, store
from tests.support import in_child, raises

BIG = 2**62
HOSTILE = {
    "nothing": b"",
    "truncated array": b"\x93\x01",
    "array of 2^32 - 1 items": b"\xdd\xff\xff\xff\xff",
    "map of 2^32 - 1 items": b"\xdf\xff\xff\xff\xff",
    "string of 2^32 - 1 bytes": b"\xdb\xff\xff\xff\xff",
    "trailing byte": msgpack.packb([1]) + b"\x01",
    "reserved byte": b"\xc1",
    "bad utf-8": b"\xa1\xff",
    "timestamp": msgpack.packb(msgpack.Timestamp(1)),
    "unknown ext": msgpack.packb(msgpack.ExtType(99, b"")),
    "mark with data": msgpack.packb([msgpack.ExtType(TUPLE.code, b"x"), 1]),
    "mark alone": msgpack.packb(TENSOR),
    "mark as an item": msgpack.packb([1, TUPLE]),
    "mark as a key": msgpack.packb({TUPLE: 1}),
    "list as a key": msgpack.packb({(1, 2): 1}),
    "tensor as a key": msgpack.packb({(TENSOR, "float32", 0): 1}),
    "map as a key": b"\x81\x80\x01",
    "map in a tuple key": b"\x81\x92" + msgpack.packb(TUPLE) + b"\x80\x01",
    "tensor without anything": msgpack.packb([TENSOR]),
    "tensor without offset": msgpack.packb([TENSOR, "float32"]),
    "tensor of no dtype": msgpack.packb([TENSOR, 1, 0, 2]),
    "tensor of unknown dtype": msgpack.packb([TENSOR, "float7", 0, 2]),
    "tensor of a quantised dtype": msgpack.packb([TENSOR, "qint8", 0, 2]),
    "tensor of an attribute of torch": msgpack.packb([TENSOR, "nn", 0, 2]),
    "negative offset": msgpack.packb([TENSOR, "float32", -64, 2]),
    "unaligned offset": msgpack.packb([TENSOR, "float32", 4, 2]),
    "offset True": msgpack.packb([TENSOR, "float32", False, 2]),
    "huge offset": msgpack.packb([TENSOR, "float32", 2**63, 2]),
    "offset just outside": msgpack.packb([TENSOR, "uint8", 128, 1]),
    "one element too many": msgpack.packb([TENSOR, "float32", 64, 17]),
    "negative dimension": msgpack.packb([TENSOR, "float32", 0, -1]),
    "dimension True": msgpack.packb([TENSOR, "float32", 0, True]),
    "product that wraps to 0": msgpack.packb([TENSOR, "float32", 0, 2**32, 2**32]),
    "empty but impossible": msgpack.packb([TENSOR, "float32", 0, 0, BIG, BIG]),
    "empty with a dimension of 2^64 - 1": msgpack.packb([TENSOR, "float32", 0, 0, 2**64 - 1]),
    "too many dimensions": msgpack.packb([TENSOR, "float32", 0, *[1] * 2000]),
    "array without dtype": msgpack.packb([ARRAY]),
    "array of objects": msgpack.packb([ARRAY, "|O", 0, 2]),
    "array of a dtype expression": msgpack.packb([ARRAY, "f4,O", 0, 2]),
    "array of subarrays": msgpack.packb([ARRAY, ["<f4", [2]], 0, 2]),
    "array of a string type": msgpack.packb([ARRAY, "|T16", 0, 2]),
    "array of a strange size": msgpack.packb([ARRAY, "<f3", 0, 2]),
    "array of a huge size": msgpack.packb([ARRAY, "|S9999999999", 0, 2]),
    "array of a strange unit": msgpack.packb([ARRAY, "<M8[xyz]", 0, 2]),
    "array of unit 0": msgpack.packb([ARRAY, "<M8[0s]", 0, 2]),
    "array of unit 1/0": msgpack.packb([ARRAY, "<M8[s/0]", 0, 2]),
    "structured, field of objects": msgpack.packb([ARRAY, [["a"], ["|O"], [0], 8], 0, 2]),
    "structured, offset outside": msgpack.packb([ARRAY, [["a"], ["<f4"], [99], 8], 0, 2]),
    "structured, item too small": msgpack.packb([ARRAY, [["a"], ["<f4"], [0], 0], 0, 2]),
    "structured, fewer formats": msgpack.packb([ARRAY, [["a", "b"], ["<f4"], [0, 4], 8], 0]),
    "structured, names a number": msgpack.packb([ARRAY, [1, ["<f4"], [0], 8], 0]),
    "structured, name a number": msgpack.packb([ARRAY, [[1], ["<f4"], [0], 8], 0]),
    "structured, huge subarray": msgpack.packb([ARRAY, [["a"], [["<f4", [2**30, 2**30]]], [0], 8], 0]),
    "array, one byte too many": msgpack.packb([ARRAY, "|u1", 64, 65]),
    "array, 65 dimensions": msgpack.packb([ARRAY, "<f8", 0, *[1] * 65]),
    "array, empty but impossible": msgpack.packb([ARRAY, "<f8", 0, 0, BIG, BIG]),
    "int without bytes": msgpack.packb([INT]),
    "int of a string": msgpack.packb([INT, "12"]),
    "registered without a tree": msgpack.packb([OBJECT, "x"]),
    "registered without a name": msgpack.packb([OBJECT, 1, 2]),
    "registered, unknown": msgpack.packb([OBJECT, "x", 2]),
    "too deep": b"\x91" * (MAX_DEPTH + 1) + b"\xc0",
    "too deep by tuples": (b"\x92" + msgpack.packb(TUPLE)) * 400 + b"\xc0",
    "too deep by objects": (b"\x93" + msgpack.packb(OBJECT) + b"\xa1x") * 5000 + b"\xc0",
    "key too deep": b"\x81" + (b"\x92" + msgpack.packb(TUPLE)) * MAX_DEPTH + b"\xc0\x01",
    "leaves that share their bytes": msgpack.packb([[TENSOR, "uint8", 0, 65], [TENSOR, "uint8", 0, 65]]),
    "dtype too deep": b"\x93" + msgpack.packb(ARRAY) + b"\x92" * 300 + b"\xa3<f4" + b"\x91\x01" * 300 + b"\x00",
}


@pytest.mark.parametrize("copy", [False, True], ids=["view", "copy"])
@pytest.mark.parametrize("name", HOSTILE)
def test_meta_bytes_that_describe_no_value_are_refused(name: str, copy: bool) -> None:
    with pytest.raises(CorruptStoreError):
        SERDE.decode(HOSTILE[name], aligned(128), copy=copy)


def _limited(function: Callable[..., Any], *arguments: Any) -> str:
    pages = map(int, Path("/proc/self/statm").read_text().split())
    mapped, resident = (next(pages) * resource.getpagesize() for _ in range(2))
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
    try:
        said = repr(function(*arguments))[:1000]
    except Exception as error:
        said = type(error).__name__
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident < 256 << 20
    return said


def limited(function: Callable[..., Any], *arguments: Any) -> str:
    """Run it in a child of 5 seconds and 256 MiB; returns what it returned, as text, or the type of its error.

    It cannot take more than 1 GiB, whatever it does.
    """
    return str(in_child(_limited, function, *arguments))


LARGE_LEAVES: list[tuple[Any, int]] = [
    ([ARRAY, "|S0", 0, 2**24], 0),
    ([TENSOR, "uint8", 0, 2**24, 0], 0),
    ([TENSOR, "uint8", 0, 1 << 23], 1 << 23),
    ([ARRAY, "|u1", 0, 1 << 25], 1 << 25),
]


def decode_all(trees: list[tuple[bytes, Any]]) -> None:
    for meta, payload in trees:
        with suppress(CorruptStoreError):
            SERDE.decode(meta, payload)


def test_a_leaf_in_the_place_of_a_registered_types_tree_takes_no_memory() -> None:
    trees = []
    for node, size in LARGE_LEAVES:
        payload = aligned(size)
        for name in registry.BY_NAME:
            for tree in (node, {"image": node}, [None, "image", "hash", node], {"": "b\nimage", "k": 1, "l": node}):
                trees.append((msgpack.packb([OBJECT, name, tree]), payload))
    assert limited(decode_all, trees) == "None"


EMPTY = [
    torch.zeros(65536, 0),
    torch.zeros(0, 2**31),
    torch.zeros(256, 256, 0, 2**31, dtype=torch.bfloat16),
    np.zeros((65536, 0)),
    np.ndarray(65536, np.dtype("S0")),
    np.zeros(3, [("a", "u1"), ("b", "f4", (5, 6, 0))]),
    np.zeros(1 << 17, [("a", "u1"), ("b", "f4", (0, 9))]),
]


@pytest.mark.parametrize("value", EMPTY, ids=lambda value: f"{value.dtype} {tuple(value.shape)}")
def test_an_empty_leaf_comes_back(value: Any) -> None:
    encoded = SERDE.encode([value])
    (got,) = SERDE.decode(encoded.meta, store(encoded))
    assert (type(value), value.dtype, value.shape) == (type(got), got.dtype, got.shape)


def same_hash_keys(kind: str, count: int) -> list[Any]:
    if kind == "int":
        return [k * (2**61 - 1) for k in range(1, count + 1)]  # the modulus of CPython's hash of numbers
    return list(itertools.islice(itertools.product((-1, -2), repeat=17), count))


@pytest.mark.parametrize("kind", ["int", "tuple"])
def test_keys_of_one_hash_do_not_take_the_square_of_their_number(kind: str) -> None:
    keys = same_hash_keys(kind, 120_000)
    assert 1 == len(set(map(hash, keys)))
    nodes = [[TUPLE, *key] if kind == "tuple" else [INT, key.to_bytes(16, "little", signed=True)] for key in keys]
    meta = b"\xdf" + len(keys).to_bytes(4, "big") + b"".join(msgpack.packb(node) + b"\0" for node in nodes)
    assert "CorruptStoreError" == limited(SERDE.decode, meta, b"")


@pytest.mark.parametrize("kind", ["int", "tuple"])
def test_as_many_keys_of_one_hash_are_stored_as_come_back(kind: str) -> None:
    value = dict.fromkeys(same_hash_keys(kind, MAX_SAME_HASH), torch.zeros(1))
    encoded = SERDE.encode(value)
    assert list(value) == list(SERDE.decode(encoded.meta, store(encoded)))
    with pytest.raises(UnsupportedValueError):
        SERDE.encode(dict.fromkeys(same_hash_keys(kind, MAX_SAME_HASH + 1), torch.zeros(1)))


VALUES = [
    {"a": torch.zeros(3, 5), "b": [np.zeros(4, [("x", "<f4"), ("y", "<M8[s]")]), (1, 10**30)], ("k", 1): "text"},
    {"pixel_values": torch.zeros(3, 5), "grid": torch.zeros(2, dtype=torch.bfloat16)},
    [random_array("U3", (2, 2)), torch.zeros(0, 3), torch.tensor(1.5), b"bytes", None, 2.5],
]
ENCODED = [SERDE.encode(value) for value in VALUES]


def decode_or_refuse(meta: bytes, payload: Any, copy: bool) -> None:
    try:
        value = SERDE.decode(meta, payload, copy=copy)
    except CorruptStoreError:
        return
    exact(value)  # reads every byte of every leaf


@pytest.mark.parametrize("encoded", ENCODED, ids=range(len(ENCODED)))
def test_truncated_or_changed_bytes_give_a_value_or_a_refusal(encoded: Encoded) -> None:
    payload = store(encoded)
    for length in range(len(encoded.meta)):
        with pytest.raises(CorruptStoreError):
            SERDE.decode(encoded.meta[:length], payload)
    for position in range(len(encoded.meta)):
        for byte in range(position % 3, 256, 3):
            meta = encoded.meta[:position] + bytes([byte]) + encoded.meta[position + 1 :]
            decode_or_refuse(meta, payload, copy=byte % 2 == 0)


@pytest.mark.parametrize("encoded", ENCODED, ids=range(len(ENCODED)))
def test_a_payload_that_is_too_short_is_refused(encoded: Encoded) -> None:
    for length in {0, 1, 64, encoded.nbytes - 1}:
        with raises(CorruptStoreError, names=("payload", f"{length} bytes", f"{encoded.nbytes}")):
            SERDE.decode(encoded.meta, aligned(length))
    SERDE.decode(encoded.meta, aligned(encoded.nbytes))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.booleans())
def test_any_bytes_at_all_give_a_value_or_a_refusal(meta: bytes, copy: bool) -> None:
    decode_or_refuse(meta, aligned(256), copy)


ints = st.one_of(
    st.integers(-2, 8), st.sampled_from([64, 128, 192, 2**31, 2**32, 2**61, BIG, 2**63, 2**64 - 1, -(2**63)])
)
nodes = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        ints,
        st.floats(),
        st.sampled_from(
            ["float32", "bfloat16", "uint4", "complex32", "<f4", "|S3", "<U2", ">M8[ns]", "|V4", "|S0", "a"]
        ),
        st.binary(max_size=3),
        st.sampled_from([TUPLE, INT, TENSOR, ARRAY, OBJECT]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(st.one_of(st.text(max_size=2), ints), inner, max_size=3),
        st.builds(lambda d, o, s: [TENSOR, d, o, *s], inner, ints, st.lists(ints, max_size=5)),
        st.builds(lambda d, o, s: [ARRAY, d, o, *s], inner, ints, st.lists(ints, max_size=5)),
        st.builds(lambda n, f, o, i: [n, f, o, i], inner, inner, inner, ints),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(nodes, st.booleans())
def test_any_msgpack_with_the_marks_of_the_format_gives_a_value_or_a_refusal(node: Any, copy: bool) -> None:
    decode_or_refuse(msgpack.packb(node), aligned(256), copy)


def test_a_plan_asks_for_exactly_the_bytes_that_its_leaves_need() -> None:
    for encoded in ENCODED:
        assert make_plan(encoded.meta, "view")[0].needed == encoded.nbytes


def test_meta_may_be_another_buffer_and_is_then_compared_by_its_bytes() -> None:
    meta: Any = bytearray(SERDE.encode([1, 2]).meta)
    assert SERDE.decode(meta, b"") == [1, 2]
    meta[:] = SERDE.encode([3, 4]).meta
    assert SERDE.decode(meta, b"") == [3, 4]
    assert SERDE.decode(cast(Any, memoryview(meta)), b"") == [3, 4]
