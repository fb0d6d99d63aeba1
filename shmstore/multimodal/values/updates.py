"""Prompt updates as bytes, so that the store can keep them with their item."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from shmstore.errors import UnsupportedValueError
from shmstore.multimodal.values.items import ResolvedPromptUpdate
from shmstore.serde.decode import plain
from shmstore.serde.wire import INTS, MAX_RUNS, MAX_SAME_HASH, RUN, TUPLE, crowded

__all__ = ["decode_updates", "encode_updates", "pack", "shortened", "unpack"]

_MAX_DEPTH = 16
_CONTAINERS = frozenset((list, tuple, dict))


def encode_updates(updates: Sequence[ResolvedPromptUpdate]) -> bytes | None:
    """Return the updates as bytes, or None if they hold anything but text, numbers, lists, tuples and dicts."""
    rows = []
    for update in updates:
        if type(update) is not ResolvedPromptUpdate:
            return None
        rows.append([update.modality, update.item_idx, update.mode, update.target, shortened(update.content)])
    return pack(rows)


def decode_updates(packed: bytes) -> list[ResolvedPromptUpdate]:
    """Return what `encode_updates` has encoded; TypeError or ValueError for other bytes."""
    return [ResolvedPromptUpdate(*row) for row in unpack(packed)]


def pack(value: Any) -> bytes | None:
    """Return plain data as bytes, or None if there is anything else in it.

    Raises UnsupportedValueError for plain data that `unpack` would refuse.
    """
    try:
        packed: bytes = msgpack.packb(value, strict_types=True, default=_marked)
    except (TypeError, ValueError, OverflowError):
        return None
    if type(value) in _CONTAINERS and _check(value, _MAX_DEPTH) > MAX_RUNS:
        raise _refusal(f"their lists that repeat one number have more than {MAX_RUNS} items")
    return packed


def unpack(packed: bytes) -> Any:
    """Return what `pack` has packed; CorruptStoreError for other bytes."""
    return plain(packed, _MAX_DEPTH)


def shortened(value: Any) -> Any:
    """Return a list of ints as a short value for `pack`, and any other value as it is.

    Most contents repeat one placeholder token, and to pack it once takes a tenth of the time. Other tokens are packed
    and read together, in the time that msgpack would need without a check of each.
    """
    if type(value) is not list or not value or type(value[0]) is not int:
        return value
    if value[0] == value[-1] and value.count(value[0]) == len(value):
        return [RUN, value[0], len(value)]
    try:
        return [INTS, struct.pack(f"<{len(value)}i", *value)] if {int}.issuperset(map(type, value)) else value
    except struct.error:  # not 32 bits
        return value


def _check(value: Any, left: int) -> int:
    """Return how many items the runs of a container have; refuse it unless at most `left` containers are nested."""
    if not left:
        raise _refusal(f"they are nested more than {_MAX_DEPTH} containers deep")
    runs = 0
    if type(value) is dict:
        if crowded(value):
            raise _refusal(f"a dict has more than {MAX_SAME_HASH} keys of the same hash")
        runs = sum(_check(key, left - 1) for key in value if type(key) is tuple)
        value = value.values()
    elif value and value[0] is RUN:
        return value[2]  # type: ignore[no-any-return]
    for item in value:
        if type(item) in _CONTAINERS:
            runs += _check(item, left - 1)
    return runs


def _refusal(why: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"prompt updates cannot be stored: {why}", path="updates")


def _marked(value: Any) -> list[Any]:
    if type(value) is tuple:
        return [TUPLE, *value]
    raise TypeError(f"no code for {type(value).__name__}")
