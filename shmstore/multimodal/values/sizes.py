"""`MultiModalCache`: how large the caches take a value to be.

Both sides of a lockstep pair must come to the same number for the same item, so that they evict the same keys: it
depends on the content alone, not on how the tensors lie in memory, what owns them, or how the interpreter has come
to a text: `sys.getsizeof` of one and the same text or bytearray may be another one after pickling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import getsizeof
from typing import Any, TypeVar

import numpy as np
import torch

from shmstore.errors import NestingError, UnsupportedValueError, shown
from shmstore.multimodal.caches.lru import LRUCache
from shmstore.multimodal.values.fields import MultiModalFieldElem
from shmstore.multimodal.values.items import MultiModalKwargsItem, ResolvedPromptUpdate
from shmstore.serde.advice import advice_for

__all__ = ["GIB", "MultiModalCache", "item_size", "updates_size"]

GIB = 1 << 30
_UPDATE_SIZE = getsizeof(ResolvedPromptUpdate("image", 0, "insert", "", ""))  # it has slots: the same for each

_MAX_DEPTH = 200
_TEXT_SIZE, _BYTES_SIZE = 49, 33  # what `sys.getsizeof` has for empty ones; any number will do, if on both sides

T = TypeVar("T")


def _leaves(value: object) -> Iterator[Any]:
    pending = [(value, 0)]
    while pending:
        part, depth = pending.pop()
        if isinstance(part, (list, tuple)):
            inner: Iterable[Any] = part
        elif isinstance(part, Mapping):  # also MultiModalKwargsItem and MultiModalKwargsItems
            inner = part.values()
        elif isinstance(part, MultiModalFieldElem):
            inner = (part.data,)
        else:
            yield part
            continue
        if depth == _MAX_DEPTH:  # or the walk would never end, and hold a cache's lock
            raise NestingError(f"containers in one another more than {_MAX_DEPTH} deep, or one that contains itself")
        pending.extend((piece, depth + 1) for piece in inner)


def _leaf_size(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            raise UnsupportedValueError(f"no serializer for a tensor of layout {leaf.layout}", hint="make it dense")
        return leaf.nbytes
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    if isinstance(leaf, str):
        return _TEXT_SIZE + (len(leaf) if leaf.isascii() else len(leaf.encode("utf-8", "surrogatepass")))
    if isinstance(leaf, (bytes, bytearray)):
        return _BYTES_SIZE + len(leaf)
    return getsizeof(leaf)


class MultiModalCache:
    """Sizes of cached values, and caches bounded by them."""

    @classmethod
    def get_item_size(cls, value: object) -> int:
        """Bytes of the leaves of dicts, lists, tuples and items; 0 where there are none.

        A tensor or array counts its elements, whatever its memory holds besides; text its length in UTF-8 and bytes
        theirs, with a constant for each; any other leaf (a number, None) `sys.getsizeof`. UnsupportedValueError
        (TypeError) for a sparse tensor, NestingError (ValueError) for what contains itself.
        """
        return sum(map(_leaf_size, _leaves(value)))

    @classmethod
    def get_item_complexity(cls, value: object) -> int:
        """How many leaves the value has."""
        return sum(1 for _ in _leaves(value))

    @classmethod
    def get_lru_cache(cls, capacity_gb: float, value_type: type[T]) -> LRUCache[str, T]:
        """An empty cache of values of `value_type` by hash, bounded to `capacity_gb` GiB of `get_item_size`."""
        return LRUCache(GIB * capacity_gb, cls.get_item_size)


def _check_leaf(leaf: object) -> None:
    if isinstance(leaf, torch.Tensor):
        if leaf.is_meta:
            raise UnsupportedValueError(
                "no serializer for a tensor on the meta device, which has no bytes", hint="send one with data"
            )
        if leaf.is_quantized:
            raise UnsupportedValueError(f"no serializer for a tensor of dtype {leaf.dtype}", hint=advice_for(leaf))
        if leaf.is_nested:
            raise UnsupportedValueError("no serializer for a nested tensor", hint=advice_for(leaf))
    elif isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:
        raise UnsupportedValueError("no serializer for an array of object dtype", hint=advice_for(leaf))


def item_size(item: MultiModalKwargsItem, mm_hash: str) -> int:
    """`get_item_size` of an item that is to be cached.

    UnsupportedValueError (TypeError) that names the item and the key, for a tensor or an array that the store refuses:
    one without bytes, or quantised, nested, sparse, or of objects, so that an engine finds out in any mode.
    NestingError (ValueError) for data that contains itself.
    """
    size = 0
    for key, elem in item.items():
        try:
            for leaf in _leaves(elem.data):
                _check_leaf(leaf)
                size += _leaf_size(leaf)
        except NestingError as error:
            raise NestingError(f"item of {shown(mm_hash)}, key {shown(key)}: {error.message}") from None
        except UnsupportedValueError as error:
            path = f"value<{type(item).__name__}>[{shown(key)}]"  # as the store has it
            raise UnsupportedValueError(
                f"item of {shown(mm_hash)}: {path}: {error.message}", path=path, hint=error.hint
            ) from None
    return size


def updates_size(updates: Sequence[ResolvedPromptUpdate], mm_hash: str) -> int:
    """Bytes that prompt updates keep alive in P0, counted as the memory they take there.

    A list of token ids is taken as one piece: a placeholder repeats one token, which is one object. A tensor or array,
    and any tree of other things, counts its leaves, too. NestingError for one that contains itself and
    UnsupportedValueError for a sparse tensor, both naming the item; TypeError for what is no prompt update.
    """
    size = 0
    try:
        for update in updates:
            if type(update) is not ResolvedPromptUpdate and not isinstance(update, ResolvedPromptUpdate):
                raise TypeError(f"expected a ResolvedPromptUpdate, got {type(update).__name__}")
            target, content = update.target, update.content
            size += _UPDATE_SIZE
            size += getsizeof(target) if type(target) is str else _piece_size(target)
            # The two usual cases without a call: this is a part of what each miss costs.
            if type(content) is str or (type(content) is list and content and type(content[0]) is int):
                size += getsizeof(content)
            else:
                size += _piece_size(content)
    except NestingError as error:
        raise NestingError(f"prompt updates of {shown(mm_hash)}: {error.message}", hint=error.hint) from None
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"prompt updates of {shown(mm_hash)}: {error.message}", hint=error.hint) from None
    return size


def _piece_size(piece: Any) -> int:
    if not isinstance(piece, (list, tuple, Mapping)):
        return _leaf_size(piece)
    if isinstance(piece, (list, tuple)) and piece and type(piece[0]) is int:
        return getsizeof(piece)
    return getsizeof(piece) + MultiModalCache.get_item_size(piece)
