"""From meta to a plan, and from a plan and a payload to a value.

A plan is a pure function of the meta bytes, so `MsgpackSerde` caches plans. The items of one model have few shapes, so
a `get` usually costs a lookup and one view per leaf. Making a plan checks everything in the meta bytes. Each use of a
plan checks only that the payload is long enough.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np

from shmstore.bindings.fold import PART_PLAIN, PART_TUPLES, fold
from shmstore.errors import CorruptStoreError, UnknownTypeError, cut, shown, unless_interrupted
from shmstore.serde import tensors
from shmstore.serde.dtypes import MAX_NDIM, carrier_of, numpy_dtype_from_wire
from shmstore.serde.protocol import ALIGNMENT
from shmstore.serde.registry import BY_NAME
from shmstore.serde.wire import (
    ARRAY,
    ATOMS,
    INT,
    MAX_DEPTH,
    MAX_NBYTES,
    MAX_SAME_HASH,
    OBJECT,
    PICKLE,
    TENSOR,
    TUPLE,
    collides,
    parse,
)

Mode = Literal["view", "copy", "write", "device", "describe"]
"""The leaves that a plan makes: read-only views, private copies, writable views, views of a copy on a device, or what
`describe` says of them.

For "device" the payload is a pair: the buffer, and a tensor of the same bytes. Arrays are private copies of the first.
"""

Build = Callable[[Any], Any]
_CONTAINERS = (list, tuple)
"""The types of parsed dicts and of all other containers."""


class Plan(NamedTuple):
    """How to make a value from a payload."""

    needed: int
    """Minimum size of the payload in bytes."""
    build: Build
    """A function from the payload to the value."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or an array of a stored value, without its bytes."""

    kind: Literal["tensor", "array"]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = field(compare=False)
    """Where its bytes are in the payload."""
    carrier: "np.dtype[Any]" = field(compare=False)
    """What numpy has for the dtype: if it lacks it, an integer of the same size."""


@dataclass(frozen=True, slots=True)
class Named:
    """A stored value of a registered type, as its tree."""

    name: str
    tree: Any


class _Mark:
    """The decoded form of an ext value of the format; see shmstore.serde.wire."""


_TUPLE, _INT, _TENSOR, _ARRAY, _OBJECT = (_Mark() for _ in range(5))


class _Part(NamedTuple):
    """A part of the meta bytes that holds no tensor; see csrc/serde/fold.h."""

    unpack: Callable[[bytes], Any]
    packed: bytes


_MARKS = {TUPLE.code: _TUPLE, INT.code: _INT, TENSOR.code: _TENSOR, ARRAY.code: _ARRAY, OBJECT.code: _OBJECT}


def _ext_hook(code: int, data: bytes) -> _Mark:
    mark = _MARKS.get(code)
    if mark is None:
        other = "; PickleSerde wrote this object" if code == PICKLE else ""
        raise CorruptStoreError(f"the meta bytes hold an unknown ext code {code}{other}")
    if data:
        raise CorruptStoreError("the meta bytes hold a mark with data")
    return mark


def _list_or_tuple(items: list[Any]) -> Any:
    return tuple(items[1:]) if items and items[0] is _TUPLE else items


_unpack = partial(msgpack.unpackb, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
_UNPACK = {PART_PLAIN: _unpack, PART_TUPLES: partial(_unpack, ext_hook=_ext_hook, list_hook=_list_or_tuple)}


def _ext_or_part(code: int, data: bytes) -> "_Mark | _Part":
    return _Part(_UNPACK[code], data) if code in _UNPACK else _ext_hook(code, data)


class _Constant:
    """A subtree that is the same immutable object in every value that the plan makes."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def make_plan(meta: bytes, mode: Mode) -> tuple[Plan, int]:
    """Return the plan of `meta`, and how many tensors and arrays it makes.

    Raises CorruptStoreError, and no other error, if the bytes describe no value.
    """
    compiler = _Compiler(mode)
    folded = fold(meta)
    tree = parse(meta, _ext_hook) if folded is None else parse(folded, _ext_or_part)
    build = _as_build(compiler.node(tree, 0))
    return Plan(compiler.needed, build), compiler.leaves


def describe(meta: bytes, payload_bytes: int) -> Any:
    """Return the value as plain data with `Leaf` and `Named`; it needs neither torch nor the registered types.

    Raises CorruptStoreError if the bytes describe no value, or one with leaves outside of such a payload.
    """
    (needed, build), _ = make_plan(meta, "describe")
    if payload_bytes < needed:
        raise CorruptStoreError(f"the payload has {payload_bytes} bytes, and the meta bytes describe {needed}")
    return build(None)


def _as_build(part: "_Constant | Build") -> Build:
    if isinstance(part, _Constant):
        value = part.value
        return lambda payload: value
    return part


class _Compiler:
    """Checks a parsed meta and turns it into functions."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.needed = 0
        self.total = 0
        self.leaves = 0

    def node(self, node: Any, depth: int) -> "_Constant | Build":
        kind = type(node)
        if kind in ATOMS:
            return _Constant(node)
        if kind is _Part:
            return _part(node)
        mark = node[0] if kind is tuple and node else None
        if mark is _TENSOR:
            return self.tensor(node)
        if mark is _ARRAY:
            return self.array(node)
        if mark is _INT:
            return _Constant(_big_int(node))
        if kind not in _CONTAINERS:
            raise CorruptStoreError(f"the meta bytes hold a {kind.__name__} where a value belongs")
        if depth >= MAX_DEPTH:
            raise CorruptStoreError("the meta bytes are nested too deep")
        if kind is list:
            return self.mapping(node, depth)
        if mark is _TUPLE:
            return self.tuple_of(node[1:], depth)
        if mark is _OBJECT:
            return self.registered(node, depth)
        return self.sequence(node, depth)

    def mapping(self, node: list[tuple[Any, Any]], depth: int) -> Build:
        keys = [_key(key, MAX_DEPTH - depth - 1) for key, _ in node]
        if collides(keys):
            raise CorruptStoreError(f"the meta bytes hold a dict with more than {MAX_SAME_HASH} keys of the same hash")
        parts = [(key, self.node(item, depth + 1)) for key, (_, item) in zip(keys, node, strict=True)]
        if all(isinstance(part, _Constant) for _, part in parts):
            constant = {key: part.value for key, part in parts if isinstance(part, _Constant)}
            return lambda payload: constant.copy()
        builds = [(key, _as_build(part)) for key, part in parts]
        return lambda payload: {key: build(payload) for key, build in builds}

    def sequence(self, node: tuple[Any, ...], depth: int) -> Build:
        if ATOMS.issuperset(map(type, node)):
            return lambda payload: list(node)
        builds = [_as_build(self.node(item, depth + 1)) for item in node]
        return lambda payload: [build(payload) for build in builds]

    def tuple_of(self, node: tuple[Any, ...], depth: int) -> "_Constant | Build":
        parts = [self.node(item, depth + 1) for item in node]
        if all(isinstance(part, _Constant) for part in parts):
            return _Constant(tuple(part.value for part in parts if isinstance(part, _Constant)))
        builds = [_as_build(part) for part in parts]
        return lambda payload: tuple([build(payload) for build in builds])

    def registered(self, node: tuple[Any, ...], depth: int) -> Build:
        if len(node) != 3 or type(node[1]) is not str:
            raise CorruptStoreError("the meta bytes hold a malformed registered value")
        if self.mode == "describe":
            named, described = node[1], _as_build(self.node(node[2], depth + 1))
            return lambda payload: Named(named, described(payload))
        if node[1] == "torch.Size":
            tensors.load_torch()  # which registers it
        registration = BY_NAME.get(node[1])
        if registration is None:
            raise UnknownTypeError(f"no type is registered under the name {shown(node[1])}", type_name=node[1])
        name, cls, from_tree = registration.name, registration.cls, registration.from_tree
        inner = _as_build(self.node(node[2], depth + 1))

        def build(payload: Any) -> Any:
            tree = inner(payload)
            try:
                value = from_tree(tree)
            except unless_interrupted(Exception) as error:
                raise CorruptStoreError(
                    f"from_tree of {shown(name)} failed: {type(error).__name__}: {cut(error)}"
                ) from error
            if type(value) is not cls:
                raise CorruptStoreError(f"from_tree of {shown(name)} returned a {type(value).__name__}")
            return value

        return build

    def place(self, node: tuple[Any, ...], itemsize: int) -> tuple[int, tuple[int, ...], int]:
        """Check the offset, the shape and the number of bytes of a leaf, and return them."""
        self.leaves += 1
        offset, shape = node[2], node[3:]
        if len(shape) > MAX_NDIM:
            raise CorruptStoreError(f"the meta bytes hold a leaf of {len(shape)} dimensions, more than {MAX_NDIM}")
        if type(offset) is not int or offset < 0 or offset % ALIGNMENT:
            raise CorruptStoreError(f"the meta bytes hold an offset that is not a multiple of {ALIGNMENT}")
        for dim in shape:
            if type(dim) is not int or not 0 <= dim <= MAX_NBYTES:
                raise CorruptStoreError("the meta bytes hold a dimension out of range")
        nbytes = math.prod(shape) * itemsize
        if nbytes:
            end = offset + nbytes
            if end > MAX_NBYTES:
                raise CorruptStoreError("the meta bytes hold a leaf beyond the largest payload")
            self.total += nbytes  # if leaves shared bytes, a copy could take any amount of memory
            self.needed = max(self.needed, end, self.total)
        return offset, shape, nbytes

    def tensor(self, node: tuple[Any, ...]) -> "_Constant | Build":
        if len(node) < 3 or type(node[1]) is not str:
            raise CorruptStoreError("the meta bytes hold a malformed tensor")
        if self.mode == "describe":
            if (known := carrier_of(node[1])) is None:
                raise CorruptStoreError(f"the meta bytes hold a tensor of unknown dtype {shown(node[1])}")
            offset, shape, nbytes = self.place(node, known.itemsize)
            return _Constant(Leaf("tensor", node[1], shape, nbytes, offset, known))
        torch = tensors.load_torch()
        kind = tensors.KINDS_BY_NAME.get(node[1])
        if kind is None:
            raise CorruptStoreError(
                f"the meta bytes hold a tensor of unknown dtype {shown(node[1])}",
                hint="use one version of torch on both sides; the writer's may be newer",
            )
        offset, shape, nbytes = self.place(node, kind.itemsize)
        dtype = kind.dtype
        if nbytes == 0:  # no bytes to view or pin
            try:
                torch.empty(shape, dtype=dtype)
            except (RuntimeError, TypeError, ValueError, OverflowError) as error:
                raise CorruptStoreError(f"the meta bytes hold an impossible shape: {cut(error)}") from error
            if self.mode == "device":
                return lambda payload: torch.empty(shape, dtype=dtype, device=payload[1].device)
            return lambda payload: torch.empty(shape, dtype=dtype)
        if self.mode == "device":
            end, carried = offset + nbytes, kind.carrier_torch
            return lambda payload: payload[1][offset:end].view(carried).view(shape).view(dtype)
        view = tensors.viewer(kind, shape, offset)
        if self.mode != "copy":
            return view
        carrier = kind.carrier_torch
        if carrier is dtype:
            return lambda payload: view(payload).clone()
        return lambda payload: view(payload).view(carrier).clone().view(dtype)

    def array(self, node: tuple[Any, ...]) -> "_Constant | Build":
        if len(node) < 3:
            raise CorruptStoreError("the meta bytes hold a malformed array")
        try:
            dtype = numpy_dtype_from_wire(node[1])
        except ValueError as error:
            raise CorruptStoreError(f"the meta bytes hold an array with an invalid dtype: {cut(error)}") from error
        if dtype.subdtype is not None:
            raise CorruptStoreError("the meta bytes hold an array of subarrays")
        offset, shape, nbytes = self.place(node, dtype.itemsize)
        if self.mode == "describe":
            return _Constant(Leaf("array", str(dtype), shape, nbytes, offset, dtype))
        ndarray = np.ndarray
        writable = self.mode != "view"
        if nbytes == 0:

            def build_empty(payload: Any) -> Any:
                array = ndarray(shape, dtype, bytearray())
                array.setflags(write=writable)
                return array

            try:
                build_empty(None)
            except (TypeError, ValueError, OverflowError) as error:
                raise CorruptStoreError(f"the meta bytes hold an impossible shape: {cut(error)}") from error
            return build_empty
        # Copied as bytes, because numpy's copy leaves out the padding of structured dtypes.
        raw = (nbytes,)
        if self.mode == "device":
            return lambda payload: ndarray(shape, dtype, ndarray(raw, np.uint8, payload[0], offset).copy())
        if self.mode == "copy":
            return lambda payload: ndarray(shape, dtype, ndarray(raw, np.uint8, payload, offset).copy())
        if self.mode == "write":
            return lambda payload: ndarray(shape, dtype, payload, offset)

        # frombuffer, unlike ndarray, keeps the read-only buffer as the base, so numpy refuses to make the array
        # writable, and a write raises instead of crashing the process.
        count, frombuffer = math.prod(shape), np.frombuffer
        return lambda payload: frombuffer(memoryview(payload).toreadonly(), dtype, count, offset).reshape(shape)


def _part(part: _Part) -> Build:
    unpack, packed = part
    try:
        made = [unpack(packed)]
    except CorruptStoreError:  # a ValueError: of a mark with data
        raise
    except ValueError as error:  # of text that is not UTF-8: `fold` has looked at all else
        raise CorruptStoreError(f"the meta bytes are not msgpack: {cut(error)}") from error

    def build(payload: Any) -> Any:
        try:
            return made.pop()  # the first value of this plan, which is often its only one
        except IndexError:
            return unpack(packed)

    return build


def _big_int(node: tuple[Any, ...]) -> int:
    if len(node) != 2 or type(node[1]) is not bytes:
        raise CorruptStoreError("the meta bytes hold a malformed int")
    return int.from_bytes(node[1], "little", signed=True)


def _key(node: Any, left: int) -> Any:
    if type(node) in ATOMS:
        return node
    if left > 0 and type(node) is tuple and node:
        if node[0] is _TUPLE:
            return tuple([_key(item, left - 1) for item in node[1:]])
        if node[0] is _INT:
            return _big_int(node)
    raise CorruptStoreError("the meta bytes hold a key that is neither a scalar nor a tuple of scalars")
