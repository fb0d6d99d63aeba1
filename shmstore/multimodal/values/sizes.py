"""The size of a value for the caches.

Both sides of a lockstep pair must compute the same size of an item, so that they evict the same keys. A size therefore
depends on the content alone, and not on the layout or the owner of memory. `sys.getsizeof` of a str or a bytearray is
no such size, because it may change by pickling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import getsizeof
from typing import Any

import numpy as np
import torch

from shmstore.errors import NestingError, UnsupportedValueError, kind_of, shown
from shmstore.multimodal.values.fields import MultiModalFieldElem
from shmstore.multimodal.values.items import MultiModalKwargsItem, ResolvedPromptUpdate

_UPDATE_SIZE = getsizeof(ResolvedPromptUpdate("image", 0, "insert", "", ""))  # the same for all, because it has slots

_MAX_DEPTH = 200
_TEXT_SIZE, _BYTES_SIZE = 49, 33  # as `sys.getsizeof` of empty ones; any number that both sides share will do


def leaves(value: object) -> Iterator[Any]:
    """Return all leaves in dicts, lists, tuples and items; NestingError if the value contains itself."""
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
        if depth == _MAX_DEPTH:  # an endless walk would hold the lock of a cache
            raise NestingError(f"a container is nested over {_MAX_DEPTH} deep, or contains itself")
        pending.extend((piece, depth + 1) for piece in inner)


def leaf_size(leaf: Any) -> int:
    """Return the bytes of a leaf; UnsupportedValueError (TypeError) for a sparse tensor."""
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise UnsupportedValueError(f"no serializer for a tensor of layout {leaf.layout}")
        return leaf.nbytes
    if isinstance(leaf, str):
        return _TEXT_SIZE + (len(leaf) if leaf.isascii() else len(leaf.encode("utf-8", "surrogatepass")))
    if isinstance(leaf, (bytes, bytearray)):
        return _BYTES_SIZE + len(leaf)
    return getsizeof(leaf)


def named(error: NestingError | UnsupportedValueError, whose: str) -> Exception:
    """Return the error with the words that say whose value it is about."""
    message = f"{whose}: {error.message}"
    if isinstance(error, NestingError):
        return NestingError(message, hint=error.hint)
    return UnsupportedValueError(message, path=error.path, hint=error.hint)


def item_size(item: MultiModalKwargsItem, mm_hash: str) -> int:
    """Return `get_item_size` of an item that a cache is going to keep.

    Raises UnsupportedValueError (TypeError), with the item, for a sparse tensor, and NestingError (ValueError) for data
    that contains itself.
    """
    try:
        return sum(leaf_size(leaf) for data in item.get_data().values() for leaf in leaves(data))
    except (NestingError, UnsupportedValueError) as error:
        raise named(error, f"item of {shown(mm_hash)}") from None


def tree_size(tree: object, mm_hash: str) -> int:
    """Return the bytes of the leaves of dicts, lists and tuples.

    Raises TypeError for a leaf of another class, whose size only its engine knows, and else as `item_size`.
    """
    try:
        every = list(leaves(tree))
        for leaf in every:
            if not isinstance(leaf, _LEAVES):
                raise TypeError(
                    f"item of {shown(mm_hash)}: the size of a {type(leaf).__name__} is not known "
                    "(hint: pass item_size to CacheTypes)"
                )
        return sum(map(leaf_size, every))
    except (NestingError, UnsupportedValueError) as error:
        raise named(error, f"item of {shown(mm_hash)}") from None


_LEAVES = (torch.Tensor, np.ndarray, np.generic, str, bytes, bytearray, int, float, complex, type(None))


def updates_size(updates: Sequence[ResolvedPromptUpdate], mm_hash: str) -> int:
    """Return the number of bytes that prompt updates keep alive in P0.

    A list of token ids counts as one object, because a placeholder repeats one token. Tensors, arrays and other trees
    also count their leaves. Raises NestingError for an update that contains itself, and UnsupportedValueError for a
    sparse tensor; both name the item. Raises TypeError for a value that is not a prompt update.
    """
    size = 0
    if type(updates) is not list and (not isinstance(updates, Sequence) or isinstance(updates, str)):
        raise _wrong_updates(mm_hash, f"must be a sequence of ResolvedPromptUpdate, not {kind_of(updates)}")
    try:
        for update in updates:
            if type(update) is not ResolvedPromptUpdate and not isinstance(update, ResolvedPromptUpdate):
                raise _wrong_updates(mm_hash, f"must be ResolvedPromptUpdate, not {kind_of(update)}")
            size += _UPDATE_SIZE + _piece_size(update.target) + _piece_size(update.content)
    except (NestingError, UnsupportedValueError) as error:
        raise named(error, f"prompt updates of {shown(mm_hash)}") from None
    return size


def _wrong_updates(mm_hash: str, why: str) -> TypeError:
    return TypeError(f"input of {shown(mm_hash)}: prompt updates {why}")


def _piece_size(piece: Any) -> int:
    if type(piece) is str or (isinstance(piece, (list, tuple)) and piece and type(piece[0]) is int):
        return getsizeof(piece)
    if not isinstance(piece, (list, tuple, Mapping)):
        return leaf_size(piece)
    return getsizeof(piece) + sum(map(leaf_size, leaves(piece)))
