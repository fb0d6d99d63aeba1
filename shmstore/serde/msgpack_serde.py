"""`MsgpackSerde`, the default serializer: fast paths for what is stored most, and the general walk for the rest."""

from typing import Any

import numpy as np
import torch

from shmstore.errors import CorruptStoreError
from shmstore.serde.decode import Mode, Plan, make_plan
from shmstore.serde.encode import array_address, encode_tree, fill_leaf
from shmstore.serde.protocol import Encoded, Layout
from shmstore.serde.registry import BY_CLASS

__all__ = ["MsgpackSerde"]

_CACHE_ENTRIES = 2048
_CACHED_META_BYTES = 2048
"""Larger ones are lists of data rather than shapes: unlikely to be seen again, and slow to hash."""

# All of these are pure functions of their keys, so that they serve every instance. They are emptied when full: with
# the few shapes of a model that never happens, and it needs no bookkeeping on a hit.
_ONE_TENSOR: dict[Any, tuple[bytes, int]] = {}
_ONE_ARRAY: dict[Any, tuple[bytes, int]] = {}
_FLAT: dict[Any, tuple[bytes, int, tuple[tuple[int, int], ...]]] = {}
_PLANS: dict[Mode, dict[bytes, Plan]] = {"view": {}, "copy": {}, "write": {}}
_VIEW_PLANS = _PLANS["view"]
_FLAT_LEAVES = 16

_Tensor = torch.Tensor
_ndarray = np.ndarray
_strided = torch.strided
_new = tuple.__new__  # half the cost of the generated __new__ of a NamedTuple


def _remember(cache: dict[Any, Any], key: Any, entry: Any) -> None:
    if len(cache) >= _CACHE_ENTRIES:
        cache.clear()
    cache[key] = entry


def _plan(meta: bytes, mode: Mode) -> Plan:
    plan = make_plan(meta, mode)
    if len(meta) <= _CACHED_META_BYTES:
        _remember(_PLANS[mode], meta, plan)
    return plan


class MsgpackSerde:
    """The tree as msgpack, the bytes of its tensors and arrays beside it; see shmstore.serde.wire for the format.

    Stores dicts, lists and tuples of str, bytes, int, float, bool, None, tensors, arrays, numpy's scalars of fixed
    size, `torch.Size` and the types given to `register_type`, nested up to 100 deep; dict keys are str, bytes, int,
    float, bool, None or tuples of them. Types are taken exactly: no subclasses. What comes back has the same types,
    dtypes, shapes and bits; tensors that require a gradient, and parameters, come back as plain tensors. Two things are
    refused, since forged bytes could take any amount of memory or time by them: a leaf that has more elements than
    bytes, beyond 65,536 (of shape (100000, 0), say), and a dict with more than 64 keys of the same `hash`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "MsgpackSerde()"

    def encode(self, value: Any) -> Encoded:
        """Take `value` apart; raises UnsupportedValueError (TypeError), which names the path, for what it refuses."""
        kind = type(value)
        if kind is _Tensor:
            # Nested tensors have no shape, those inside a functorch transform no address: both raise RuntimeError.
            try:
                if (
                    value.is_cpu
                    and value.layout is _strided
                    and value.is_contiguous()
                    and not value.is_neg()
                    and not value.is_conj()
                ):
                    meta, nbytes = _ONE_TENSOR[value.dtype, value.shape]
                    address = value.data_ptr()
                    if address:
                        return _new(Encoded, (meta, nbytes, ((0, nbytes, address),), (), value))
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
                return _new(Encoded, (meta, nbytes, ((0, nbytes, array_address(value)),), (), value))
            encoded = encode_tree(value)
            if encoded.spans and value.dtype.names is None:
                _remember(_ONE_ARRAY, (value.dtype, value.shape), (encoded.meta, encoded.nbytes))
            return encoded
        registration = BY_CLASS.get(kind)
        if registration is not None:
            tree = registration.to_tree(value)
            if type(tree) is dict and 0 < len(tree) <= _FLAT_LEAVES:
                return self._encode_dict(tree, value)
        return encode_tree(value)

    def _encode_dict(self, tree: dict[Any, Any], value: Any) -> Encoded:
        """Encode `value`, which is `tree`, or of a registered type and `tree` is its tree."""
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
                    type(leaf) is _Tensor
                    and type(name) is str
                    and leaf.is_cpu
                    and leaf.layout is _strided
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
            return _new(Encoded, (meta, nbytes, spans, (), leaves))
        encoded = encode_tree(value)
        # Another thread may have changed the dict since the signature was taken.
        if len(encoded.meta) <= _CACHED_META_BYTES and [span[2] for span in encoded.spans] == addresses:
            places = tuple((offset, size) for offset, size, _ in encoded.spans)
            _remember(_FLAT, signature, (encoded.meta, encoded.nbytes, places))
        return encoded

    def fill(self, dst: Any, source: Any) -> None:
        """Write a leaf of `Encoded.fills` into the writable buffer `dst` of its size, in one pass."""
        fill_leaf(dst, source)

    def decode(self, meta: bytes, payload: Any, *, copy: bool = False) -> Any:
        """Return the value; raises CorruptStoreError for bytes that do not fit together.

        Tensors and arrays view `payload`, a buffer of bytes that exports itself as writable, and keep it alive;
        arrays are flagged read-only, which torch cannot express. With `copy` they are private and writable.
        """
        if type(meta) is not bytes:  # other buffers compare by identity, or change
            meta = bytes(meta)
        needed, build = (_PLANS["copy"] if copy else _VIEW_PLANS).get(meta) or _plan(meta, "copy" if copy else "view")
        if len(payload) < needed:
            raise CorruptStoreError(f"the payload has {len(payload)} bytes where {needed} are described")
        return build(payload)

    def layout(self, template: Any) -> Layout:
        """Lay out `template`, a tree whose leaves are `TensorSpec`, tensors (of any device, meta too) or arrays.

        Only their shapes and dtypes count; all else in the tree is stored as it is.
        """
        encoded = encode_tree(template, template=True)
        needed, build = _PLANS["write"].get(encoded.meta) or _plan(encoded.meta, "write")

        def build_checked(payload: Any) -> Any:
            if len(payload) < needed:
                raise ValueError(f"a buffer of {len(payload)} bytes is too small for {needed}")
            return build(payload)

        return Layout(encoded.meta, encoded.nbytes, build_checked)
