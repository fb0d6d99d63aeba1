"""An object's metadata as a tree of shapes and dtypes, without its tensors."""

import math
from dataclasses import dataclass
from typing import Any

import msgpack

from shmstore.errors import CorruptStoreError, cut, shown
from shmstore.serde.dtypes import carrier_of, numpy_dtype_from_wire
from shmstore.serde.wire import ARRAY, ATOMS, INT, MAX_DEPTH, MAX_NBYTES, OBJECT, PICKLE, TENSOR, TUPLE, parse

_MARKS = {mark.code: mark for mark in (TUPLE, INT, TENSOR, ARRAY, OBJECT)}
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One node of a stored value."""

    path: str
    """The steps from the root, joined by slashes; "." is the root."""
    kind: str
    """"tensor", "array", "dict", "list", "tuple", "value", or the name of a registered type."""
    text: str
    """The shortened value, or the dtype of a leaf; empty for a container."""
    shape: tuple[int, ...] | None
    """The shape of a tensor or array; None for other nodes."""
    offset: int | None
    """The offset of a leaf's bytes in the payload; None for other nodes."""
    nbytes: int
    """The bytes of a leaf, or of all leaves in a container."""
    children: "tuple[TreeNode, ...]"


def _wrong(what: str) -> CorruptStoreError:
    return CorruptStoreError(
        f"the metadata {what}", hint="use the serializer that wrote the object, or check the store with shmstore verify"
    )


def _ext_hook(code: int, data: bytes) -> Any:
    if code == PICKLE:
        raise _wrong("was written by PickleSerde and has no tree")
    if code not in _MARKS or data:
        raise _wrong(f"holds an unknown ext code {code}")
    return _MARKS[code]


def parse_tree(meta: bytes, payload_bytes: int) -> TreeNode:
    """Return the tree that `MsgpackSerde` wrote; this process need not register its types.

    Raises CorruptStoreError if the bytes are not such a tree, or if a leaf lies outside the payload.
    """
    return _node(parse(meta, _ext_hook), ".", 0, payload_bytes)


def _join(path: str, step: Any) -> str:
    return str(step) if path == "." else f"{path}/{step}"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _container(path: str, kind: str, children: list[TreeNode]) -> TreeNode:
    return TreeNode(path, kind, "", None, None, sum(child.nbytes for child in children), tuple(children))


def _node(node: Any, path: str, depth: int, payload_bytes: int) -> TreeNode:
    if depth > MAX_DEPTH:
        raise _wrong(f"is nested more than {MAX_DEPTH} deep")
    if type(node) in ATOMS:
        return TreeNode(path, "value", _short(node), None, None, 0, ())
    if type(node) is list:
        parts = [_node(item, _join(path, _key(key)), depth + 1, payload_bytes) for key, item in node]
        return _container(path, "dict", parts)
    if type(node) is not tuple:
        raise _wrong(f"holds a {type(node).__name__} where a value belongs")
    mark = node[0] if node and type(node[0]) is msgpack.ExtType else None
    if mark in (TENSOR, ARRAY):
        return _leaf(node, path, payload_bytes)
    if mark == INT:
        if len(node) != 2 or type(node[1]) is not bytes:
            raise _wrong("holds a malformed int")
        return TreeNode(path, "value", _short(int.from_bytes(node[1], "little", signed=True)), None, None, 0, ())
    if mark == OBJECT:
        if len(node) != 3 or type(node[1]) is not str:
            raise _wrong("holds a malformed registered value")
        inner = _node(node[2], path, depth + 1, payload_bytes)
        return TreeNode(path, node[1], inner.text, None, None, inner.nbytes, inner.children or (inner,))
    items = node[1:] if mark == TUPLE else node
    children = [_node(item, _join(path, i), depth + 1, payload_bytes) for i, item in enumerate(items)]
    return _container(path, "tuple" if mark == TUPLE else "list", children)


def _key(key: Any) -> str:
    if type(key) is str:
        return key
    return _short(key[1:] if type(key) is tuple and key and key[0] == TUPLE else key)


def _dtype(node: tuple[Any, ...]) -> tuple[str, int]:
    """Return the name of a leaf's dtype and its size."""
    if node[0] == TENSOR:
        carrier = carrier_of(node[1]) if type(node[1]) is str else None
        if carrier is None:
            raise _wrong(f"holds a tensor of unknown dtype {shown(node[1])}")
        return node[1], carrier.itemsize
    try:
        dtype = numpy_dtype_from_wire(node[1])
    except ValueError as error:
        raise _wrong(f"holds an array with an invalid dtype: {cut(error)}") from error
    return str(dtype), dtype.itemsize


def _leaf(node: tuple[Any, ...], path: str, payload_bytes: int) -> TreeNode:
    if len(node) < 3:
        raise _wrong("holds a malformed tensor")
    name, itemsize = _dtype(node)
    offset, shape = node[2], node[3:]
    if type(offset) is not int or offset < 0 or not all(type(d) is int and 0 <= d <= MAX_NBYTES for d in shape):
        raise _wrong("holds a place or a shape out of range")
    nbytes = math.prod(shape) * itemsize
    if nbytes and offset + nbytes > payload_bytes:
        raise _wrong(f"places {cut(path)} outside the payload")
    return TreeNode(path, "tensor" if node[0] == TENSOR else "array", name, shape, offset, nbytes, ())
