"""`MsgpackSerde`, the default serializer: fast paths for usual values, and the general walk for all others."""

from typing import Any

import numpy as np

from shmstore.errors import CorruptStoreError, check_flags
from shmstore.serde import tensors
from shmstore.serde.decode import Mode, Plan, make_plan
from shmstore.serde.encode import array_address, encode_tree, fill_leaf, new
from shmstore.serde.protocol import Encoded, Layout
from shmstore.serde.registry import BY_CLASS

_CACHE_ENTRIES = 2048
_CACHED_META_BYTES = 2048
"""Larger meta usually holds lists of data rather than shapes, and is unlikely to repeat."""
_LARGE_ENTRIES = 8
_LARGE_META_BYTES = 1 << 16
_LEAF_META_BYTES = 128
"""But that of many tensors does, and its plan takes 25 us a leaf to make: meta with at most so many bytes for each.

A plan takes up to 0.8 KB a leaf, so 8 of the largest, with 3,000 leaves each, take 18 MB."""

# These caches are pure functions of their keys, so all instances share them. A full cache is emptied: that needs no
# work on a hit, and the few shapes of a model never fill one.
_ONE_TENSOR: dict[Any, tuple[bytes, int]] = {}
_ONE_ARRAY: dict[Any, tuple[bytes, int]] = {}
_FLAT: dict[Any, tuple[bytes, int, tuple[tuple[int, int], ...]]] = {}
_PLANS: dict[Mode, dict[bytes, Plan]] = {"view": {}, "copy": {}, "write": {}, "device": {}}
_VIEW_PLANS, _COPY_PLANS = _PLANS["view"], _PLANS["copy"]
_LARGE_PLANS: dict[tuple[Mode, bytes], Plan] = {}
_FLAT_LEAVES = 16

_ndarray = np.ndarray


def _remember(cache: dict[Any, Any], key: Any, entry: Any, most: int = _CACHE_ENTRIES) -> None:
    if len(cache) >= most:
        cache.clear()
    cache[key] = entry


def _mode(copy: bool) -> Mode:
    check_flags(copy=copy)
    return "copy" if copy else "view"


def _plan(meta: bytes, mode: Mode) -> Plan:
    if len(meta) <= _CACHED_META_BYTES:
        plan, _ = make_plan(meta, mode)
        _remember(_PLANS[mode], meta, plan)
    elif (known := _LARGE_PLANS.get((mode, meta))) is not None:
        plan = known
    else:
        plan, leaves = make_plan(meta, mode)
        if len(meta) <= min(_LARGE_META_BYTES, leaves * _LEAF_META_BYTES):
            _remember(_LARGE_PLANS, (mode, meta), plan, _LARGE_ENTRIES)
    return plan


def _built(meta: bytes, mode: Mode, nbytes: int, source: Any) -> Any:
    needed, build = _PLANS[mode].get(meta) or _plan(meta, mode)
    if nbytes < needed:
        raise CorruptStoreError(f"the payload has {nbytes} bytes, and the meta bytes describe {needed}")
    return build(source)


class MsgpackSerde:
    """Stores the tree as msgpack and the bytes of its tensors and arrays after it: see shmstore.serde.wire.

    It stores str, bytes, int, float, bool, None, tensors, arrays, numpy's scalars of fixed size, `torch.Size` and
    registered types (`register_type`), and dicts, lists and tuples of them. Containers may be nested 100 deep. Dict
    keys are str, bytes, int, float, bool, None or tuples of them. Types must match exactly: it refuses subclasses.

    A stored value comes back with the same types, dtypes, shapes and bits. Parameters and tensors that require a
    gradient come back as plain tensors.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "MsgpackSerde()"

    def encode(self, value: Any) -> Encoded:
        """Take `value` apart, or raise UnsupportedValueError (TypeError) with the path of the part that it refuses."""
        kind = type(value)
        if kind is tensors.Tensor:
            # RuntimeError: a nested tensor has no shape, and a tensor inside a functorch transform has no address.
            try:
                if (
                    value.is_cpu
                    and value.layout is tensors.strided
                    and value.is_contiguous()
                    and not value.is_neg()
                    and not value.is_conj()
                ):
                    meta, nbytes = _ONE_TENSOR[value.dtype, value.shape]
                    address = value.data_ptr()
                    if address:
                        return new(Encoded, (meta, nbytes, ((0, nbytes, address),), (), value))
            except (KeyError, RuntimeError):
                pass
            encoded = encode_tree(value)
            if encoded.spans:
                _remember(_ONE_TENSOR, (value.dtype, value.shape), (encoded.meta, encoded.nbytes))
            return encoded
        if kind is dict and 0 < len(value) <= _FLAT_LEAVES:
            return self._encode_dict(value, value)
        if kind is _ndarray and value.flags.c_contiguous:
            entry = _ONE_ARRAY.get((value.dtype, value.shape))
            if entry is not None:
                meta, nbytes = entry
                return new(Encoded, (meta, nbytes, ((0, nbytes, array_address(value)),), (), value))
            encoded = encode_tree(value)
            if encoded.spans and value.dtype.kind != "V":  # as in `_wire_of`
                _remember(_ONE_ARRAY, (value.dtype, value.shape), (encoded.meta, encoded.nbytes))
            return encoded
        registration = BY_CLASS.get(kind)
        if registration is not None:
            tree = registration.to_tree(value)
            if type(tree) is dict and 0 < len(tree) <= _FLAT_LEAVES:
                return self._encode_dict(tree, value)
        return encode_tree(value)

    def _encode_dict(self, tree: dict[Any, Any], value: Any) -> Encoded:
        """Encode `value`, which is `tree` itself or has a registered type with the tree `tree`."""
        tensor, strided = tensors.Tensor, tensors.strided
        key: list[Any] = [type(value)]
        add = key.append
        leaves: list[Any] = []
        addresses = []
        try:
            for name, leaf in tree.items():
                if type(leaf) is str and type(name) is str:
                    add(name)
                    add(leaf)
                    continue
                if not (
                    type(leaf) is tensor
                    and type(name) is str
                    and leaf.is_cpu
                    and leaf.layout is strided
                    and leaf.is_contiguous()
                    and not leaf.is_neg()
                    and not leaf.is_conj()
                ):
                    return encode_tree(value)
                address = leaf.data_ptr()
                if not address:
                    return encode_tree(value)
                add(name)
                add(leaf.dtype)
                add(leaf.shape)
                leaves.append(leaf)
                addresses.append(address)
        except RuntimeError:
            return encode_tree(value)
        signature = tuple(key)
        entry = _FLAT.get(signature)
        if entry is not None:
            meta, nbytes, places = entry
            spans = [(offset, size, address) for (offset, size), address in zip(places, addresses, strict=True)]
            return new(Encoded, (meta, nbytes, spans, (), leaves))
        encoded = encode_tree(value)
        # Another thread may have changed the dict after the signature was made.
        if len(encoded.meta) <= _CACHED_META_BYTES and [span[2] for span in encoded.spans] == addresses:
            places = tuple((offset, size) for offset, size, _ in encoded.spans)
            _remember(_FLAT, signature, (encoded.meta, encoded.nbytes, places))
        return encoded

    def fill(self, dst: Any, source: Any) -> None:
        """Write a leaf of `Encoded.fills` into `dst`, a writable buffer of its size, in one pass."""
        fill_leaf(dst, source)

    def decode(self, meta: bytes, payload: Any, *, copy: bool = False) -> Any:
        """Return the value, or raise CorruptStoreError for bytes that do not fit together.

        Tensors and arrays are views of `payload`, a buffer of bytes that exports itself as writable, and keep it alive.
        Arrays are flagged read-only; torch has no such flag. With `copy`, all leaves are private and writable.
        """
        if type(meta) is not bytes:  # other buffers compare by identity, or can change
            meta = bytes(meta)
        needed, build = (_VIEW_PLANS if copy is False else _COPY_PLANS if copy is True else {}).get(meta) or _plan(
            meta, _mode(copy)
        )
        if len(payload) < needed:
            raise CorruptStoreError(f"the payload has {len(payload)} bytes, and the meta bytes describe {needed}")
        return build(payload)

    def decode_on_device(self, meta: bytes, payload: Any, there: Any) -> Any:
        """Return the value with its tensors as views of `there`, the payload's bytes on a device; arrays are copies."""
        return _built(meta, "device", len(payload), (payload, there))

    def decode_private(self, meta: bytes, payload: Any) -> Any:
        """Return the value with writable views of `payload`, a buffer that nobody else sees."""
        return _built(meta, "write", len(payload), payload)

    def layout(self, template: Any) -> Layout:
        """Lay out `template`, a tree whose leaves are `TensorSpec`, tensors (of any device, meta too) or arrays.

        Only the shapes and dtypes of leaves are used; all other values in the tree are stored.
        """
        encoded = encode_tree(template, template=True)
        needed, build = _PLANS["write"].get(encoded.meta) or _plan(encoded.meta, "write")

        def build_checked(payload: Any) -> Any:
            if len(payload) < needed:
                raise ValueError(f"payload must have at least {needed} bytes, not {len(payload)}")
            return build(payload)

        return Layout(encoded.meta, encoded.nbytes, build_checked)
