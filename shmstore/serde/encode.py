"""From a value to meta, spans and fills: one walk over the tree, which refuses before the store allocates anything.

msgpack's C code packs lists and dicts of scalars alone; Python walks all other containers. Types must match exactly,
because an OrderedDict, a namedtuple or an IntEnum would come back as another type.
"""

import ctypes
import math
from typing import Any

import msgpack
import numpy as np

from shmstore.errors import NestingError, ObjectTooLargeError, UnsupportedValueError, cut, shown
from shmstore.serde import tensors
from shmstore.serde.dtypes import MAX_NDIM, numpy_dtype_to_wire
from shmstore.serde.protocol import ALIGNMENT, Encoded, TensorSpec
from shmstore.serde.registry import BY_CLASS
from shmstore.serde.wire import (
    ARRAY,
    ATOMS,
    INT,
    MAX_DEPTH,
    MAX_NBYTES,
    MAX_SAME_HASH,
    OBJECT,
    TENSOR,
    TUPLE,
    collides,
)

new = tuple.__new__  # half the cost of the generated __new__ of a NamedTuple
_addressof = ctypes.addressof
_from_buffer = ctypes.c_char.from_buffer


def array_address(array: "np.ndarray[Any, Any]") -> int:
    """Return the address of the first byte of a non-empty `array`."""
    try:
        return _addressof(_from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # read-only, or a dtype without a name in the buffer protocol
        return array.ctypes.data


class _RefusedError(Exception):
    """A value that cannot be stored; each container on the way up adds its part of the path."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.parts: list[str] = []


def _big_int(value: Any) -> Any:
    # msgpack calls this for ints of more than 64 bits; the walk has refused all other unknown types.
    return [INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _make_packer() -> msgpack.Packer:
    return msgpack.Packer(default=_big_int, strict_types=True, autoreset=False, unicode_errors="surrogatepass")


# Packers own a large buffer, so they are reused. A packer in use is not in the list, so threads and a `to_tree` that
# encodes something get another one.
_PACKERS: list[msgpack.Packer] = []
_KEPT_PACKER_BYTES = 1 << 18

# numpy dtype -> its wire form; an application has few dtypes, but could make any number of them.
_NUMPY_WIRE: dict[Any, Any] = {}
_NUMPY_WIRE_LIMIT = 1024


def _wire_of(dtype: "np.dtype[Any]") -> Any:
    # Voids that compare equal may differ in their wire form (titles, alignment), or in a type that is refused.
    if dtype.kind == "V":
        return numpy_dtype_to_wire(dtype)
    try:
        return _NUMPY_WIRE[dtype]
    except KeyError:
        wire = numpy_dtype_to_wire(dtype)
        if wire is not None:  # dtypes that compare equal need not all be refused
            if len(_NUMPY_WIRE) >= _NUMPY_WIRE_LIMIT:
                _NUMPY_WIRE.clear()
            _NUMPY_WIRE[dtype] = wire
        return wire


def _kind_of(dtype: Any, shape: Any) -> tensors.TorchKind:
    kind = tensors.KINDS.get(dtype)
    if kind is None:
        raise _RefusedError(f"no serializer for a tensor of dtype {dtype}")
    if len(shape) > MAX_NDIM:
        raise _RefusedError(f"no serializer for a tensor of more than {MAX_NDIM} dimensions")
    return kind


class _Walk:
    """One encoding; with `template`, leaves need no bytes, and none are listed."""

    __slots__ = ("end", "fills", "keep", "pack", "packer", "spans", "template")

    def __init__(self, packer: msgpack.Packer, template: bool) -> None:
        self.packer = packer
        self.pack = packer.pack
        self.template = template
        self.end = 0
        self.spans: list[tuple[int, int, int]] = []
        self.fills: list[tuple[int, int, Any]] = []
        self.keep: list[Any] = []

    def value(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is tensors.Tensor or kind is tensors.Parameter:
            self.tensor(value)
        elif kind in ATOMS:
            self.pack(value)
        elif kind is np.ndarray:
            self.array(value)
        elif kind is dict:
            self.mapping(value, depth)
        elif kind is list:
            if depth < MAX_DEPTH and ATOMS.issuperset(map(type, value)):
                self.pack(value)
            else:
                self.packer.pack_array_header(len(value))
                self.items(value, depth)
        elif kind is tuple:
            self.packer.pack_array_header(len(value) + 1)
            self.pack(TUPLE)
            self.items(value, depth)
        elif kind is TensorSpec and self.template:
            self.spec(value)
        else:
            self.registered(value, depth)

    def items(self, values: Any, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise NestingError(f"the value is nested more than {MAX_DEPTH} containers deep")
        index = 0
        try:
            for item in values:
                self.value(item, depth + 1)
                index += 1
        except _RefusedError as refusal:
            refusal.parts.append(f"[{index}]")
            raise

    def mapping(self, value: dict[Any, Any], depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise NestingError(f"the value is nested more than {MAX_DEPTH} containers deep")
        if collides(value):
            raise _RefusedError(f"no serializer for a dict with more than {MAX_SAME_HASH} keys of the same hash")
        pack = self.pack
        if ATOMS.issuperset(map(type, value.values())) and ATOMS.issuperset(map(type, value)):
            pack(value)
            return
        self.packer.pack_map_header(len(value))
        for key, item in value.items():
            if type(key) in ATOMS:
                pack(key)
            else:
                self.key(key, depth + 1)
            try:
                self.value(item, depth + 1)
            except _RefusedError as refusal:
                refusal.parts.append(f"[{shown(key)}]")
                raise

    def key(self, key: Any, depth: int) -> None:
        if type(key) in ATOMS:
            self.pack(key)
        elif type(key) is tuple:
            if depth >= MAX_DEPTH:
                raise NestingError(f"a dict key is nested more than {MAX_DEPTH} containers deep")
            self.packer.pack_array_header(len(key) + 1)
            self.pack(TUPLE)
            for item in key:
                self.key(item, depth + 1)
        else:
            raise _RefusedError(f"no serializer for a dict key of type {type(key).__name__}")

    def registered(self, value: Any, depth: int) -> None:
        registration = BY_CLASS.get(type(value))
        if registration is None:
            if tensors.is_of_torch(type(value)):
                return self.value(value, depth)
            if type(value) is np.memmap:
                return self.array(value)
            raise _RefusedError(f"no serializer for {type(value).__name__}")
        if depth >= MAX_DEPTH:
            raise NestingError(f"the value is nested more than {MAX_DEPTH} containers deep")
        self.packer.pack_array_header(3)
        self.pack(OBJECT)
        self.pack(registration.name)
        tree = registration.to_tree(value)
        try:
            self.value(tree, depth + 1)
        except _RefusedError as refusal:
            refusal.parts.append(f"<{registration.cls.__name__}>")
            raise

    def place(self, mark: Any, dtype: Any, shape: Any, nbytes: int) -> int:
        """Write the leaf's node and return the offset of its bytes."""
        if nbytes == 0:
            self.pack([mark, dtype, 0, *shape])
            return 0
        offset = (self.end + (ALIGNMENT - 1)) & -ALIGNMENT
        self.pack([mark, dtype, offset, *shape])
        self.end = offset + nbytes
        if self.end > MAX_NBYTES:
            raise ObjectTooLargeError(f"the value needs more than {MAX_NBYTES} bytes")
        return offset

    def tensor(self, tensor: Any) -> None:
        if tensor.layout is not tensors.strided:
            raise _RefusedError(f"no serializer for a tensor of layout {tensor.layout}")
        if tensor.is_nested:
            raise _RefusedError("no serializer for a nested tensor")
        shape = tensor.shape
        kind = _kind_of(tensor.dtype, shape)
        nbytes = tensor.numel() * kind.itemsize
        if self.template:
            self.place(TENSOR, kind.name, shape, nbytes)
            return
        if tensor.is_meta:
            raise _RefusedError("no serializer for a tensor on the meta device, which has no bytes")
        if tensor.requires_grad:
            tensor = tensor.detach()
        address = 0
        if tensor.is_cpu and nbytes:
            try:
                address = tensor.data_ptr()
            except RuntimeError:
                raise _RefusedError("no serializer for a tensor without storage (inside a transform?)") from None
            if not address and not tensor._is_zerotensor():
                raise _RefusedError("no serializer for a tensor whose storage has been freed")
        offset = self.place(TENSOR, kind.name, shape, nbytes)
        if nbytes == 0:
            return
        if address and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            self.spans.append((offset, nbytes, address))
            self.keep.append(tensor)
        else:
            self.fills.append((offset, nbytes, tensor))

    def array(self, array: "np.ndarray[Any, Any]") -> None:
        wire = _wire_of(array.dtype)
        if wire is None:
            what = "object dtype" if array.dtype.hasobject else f"dtype {shown(array.dtype)}"
            raise _RefusedError(f"no serializer for an array of {what}")
        nbytes = array.nbytes
        offset = self.place(ARRAY, wire, array.shape, nbytes)
        if nbytes == 0 or self.template:
            return
        if array.flags.c_contiguous:
            self.spans.append((offset, nbytes, array_address(array)))
            self.keep.append(array)
        else:
            self.fills.append((offset, nbytes, array))

    def spec(self, spec: TensorSpec) -> None:
        count = math.prod(spec.shape)
        if not isinstance(spec.dtype, np.dtype):
            tensors.load_torch()
            kind = _kind_of(spec.dtype, spec.shape)
            nbytes, mark, wire = count * kind.itemsize, TENSOR, kind.name
        else:
            wire = _wire_of(spec.dtype)
            if wire is None or spec.dtype.subdtype is not None:
                raise _RefusedError(f"no serializer for an array of dtype {shown(spec.dtype)}")
            if len(spec.shape) > MAX_NDIM:
                raise _RefusedError(f"no serializer for an array of more than {MAX_NDIM} dimensions")
            nbytes, mark = count * spec.dtype.itemsize, ARRAY
        # torch and numpy cannot make an empty leaf either if the product of its other dimensions is too large.
        if math.prod(filter(None, spec.shape)) * max(1, spec.dtype.itemsize) > MAX_NBYTES:
            raise ObjectTooLargeError(f"a leaf of shape {shown(spec.shape)} needs more than {MAX_NBYTES} bytes")
        self.place(mark, wire, spec.shape, nbytes)


def encode_tree(value: Any, *, template: bool = False) -> Encoded:
    """Take a tree apart; with `template`, its leaves need no bytes, and spans and fills stay empty.

    Raises UnsupportedValueError (TypeError) with the path, and NestingError (ValueError) for a tree that is too deep.
    """
    packer = _PACKERS.pop() if _PACKERS else _make_packer()
    walk = _Walk(packer, template)
    try:
        walk.value(value, 0)
    except _RefusedError as refusal:
        path = "value" + "".join(reversed(refusal.parts))
        raise UnsupportedValueError(f"{cut(path)}: {refusal.reason}", path=path) from None
    return new(Encoded, (_meta_of(packer), walk.end, walk.spans, walk.fills, walk.keep))


def _meta_of(packer: msgpack.Packer) -> bytes:
    """Return what the packer has packed, and keep it for the next one."""
    meta: bytes = packer.bytes()
    if len(meta) <= _KEPT_PACKER_BYTES:
        packer.reset()
        _PACKERS.append(packer)
    return meta


def pack_rows(rows: list[list[Any]]) -> bytes | None:
    """Return the meta that `encode_tree` makes of these rows, or None if a column is no scalar and no list of scalars.

    msgpack's C code packs them alone, which takes a quarter of the time of a walk.
    """
    for row in rows:
        for value in row:
            if type(value) not in ATOMS and not (type(value) is list and ATOMS.issuperset(map(type, value))):
                return None
    packer = _PACKERS.pop() if _PACKERS else _make_packer()
    packer.pack(rows)
    return _meta_of(packer)


def fill_leaf(dst: Any, source: Any) -> None:
    """Write `source`, a tensor or an array, in C order and one pass to `dst`, a writable buffer of its size."""
    if isinstance(source, tensors.Tensor):
        kind = tensors.KINDS[source.dtype]
        view = tensors.viewer(kind, tuple(source.shape), 0)(dst)
        if kind.carrier_torch is source.dtype or source.is_conj() or source.is_neg():
            view.copy_(source)
        else:  # as integers, because some of these dtypes have no copy kernel
            view.view(kind.carrier_torch).copy_(source.view(kind.carrier_torch))
        return
    dtype = source.dtype
    if dtype.names is not None:  # as bytes, because a copy by fields would leave old bytes in the padding
        dtype = np.dtype((np.void, dtype.itemsize))
        source = source.view(dtype)
    np.copyto(np.ndarray(source.shape, dtype, dst), source)
