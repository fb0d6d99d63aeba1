"""Prompt updates as bytes, so that the store can keep them with their item."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from shmstore.errors import CorruptStoreError, UnsupportedValueError
from shmstore.multimodal.values.items import ResolvedPromptUpdate
from shmstore.serde.decode import parse_plain, plain
from shmstore.serde.wire import ATOMS, INTS, MAX_RUNS, MAX_SAME_HASH, RUN, TUPLE, are_numbers, crowded

_MAX_DEPTH = 16
_CONTAINERS = frozenset((list, tuple, dict))
_FEW = 32
"""A list of fewer ints takes no less time as one piece."""


def encode_updates(updates: Sequence[ResolvedPromptUpdate]) -> bytes | None:
    """Return the updates as bytes, or None if they hold anything but text, numbers, lists, tuples and dicts."""
    rows, parts = [], []
    for update in updates:
        if type(update) is not ResolvedPromptUpdate:
            return None
        target, content = update.target, shortened(update.content)
        rows.append([update.modality, update.item_idx, update.mode, target, content])
        if type(target) in _CONTAINERS:
            parts.append(target)
        if type(content) in _CONTAINERS:
            parts.append(content)
    return _packed(rows, parts, _MAX_DEPTH - 2)


def decode_updates(packed: bytes) -> list[ResolvedPromptUpdate]:
    """Return what `encode_updates` has encoded; TypeError or ValueError for other bytes."""
    updates, runs = [], [0]
    for modality, item_idx, mode, target, content in parse_plain(packed):
        if type(modality) not in ATOMS or type(item_idx) not in ATOMS:
            raise CorruptStoreError("prompt updates have a modality or an index that is not a scalar")
        if type(target) not in ATOMS:
            target = plain(target, _MAX_DEPTH - 2, runs)
        if type(content) not in ATOMS:
            content = plain(content, _MAX_DEPTH - 2, runs)
        updates.append(ResolvedPromptUpdate(modality, item_idx, mode, target, content))
    return updates


def pack(value: Any) -> bytes | None:
    """Return plain data as bytes, or None if there is anything else in it.

    Raises UnsupportedValueError for plain data that `unpack` would refuse.
    """
    return _packed(value, [value] if type(value) in _CONTAINERS else [], _MAX_DEPTH)


def unpack(packed: bytes) -> Any:
    """Return what `pack` has packed; CorruptStoreError for other bytes."""
    return plain(parse_plain(packed), _MAX_DEPTH, [0])


def _packed(value: Any, parts: list[Any], depth: int) -> bytes | None:
    """Return a value as bytes; `parts` are what may be nested in it, each so deep."""
    try:
        packed: bytes = msgpack.packb(value, strict_types=True, default=_marked)
    except (TypeError, ValueError, OverflowError):
        return None
    if parts and sum([_check(part, depth) for part in parts]) > MAX_RUNS:
        raise _refusal(f"their lists that repeat one number have more than {MAX_RUNS} items")
    return packed


def shortened(value: Any) -> Any:
    """Return a list of ints as a short value for `pack`, and any other value as it is.

    Most contents repeat one placeholder token, and to pack it once takes a tenth of the time. Other tokens are packed
    and read together, in the time that msgpack would need without a check of each.
    """
    if type(value) is not list or not value or type(value[0]) is not int:
        return value
    if value[0] == value[-1] and value.count(value[0]) == len(value):
        return [RUN, value[0], len(value)]
    if len(value) < _FEW:
        return value
    try:
        packed = struct.pack(f"<{len(value)}i", *value)
    except struct.error:  # not ints of 32 bits
        return value
    if (b"\1\0\0\0" in packed or b"\0\0\0\0" in packed) and bool in set(map(type, value)):
        return value  # a look at each type takes longer than to pack them, and few lists have a 0 or a 1
    return [INTS, packed]


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
    elif value and type(value[0]) is int and are_numbers(value):
        return 0
    for item in value:
        if type(item) in _CONTAINERS:
            runs += _check(item, left - 1)
    return runs


def _refusal(why: str) -> UnsupportedValueError:
    hint = "keep them small and flat: placeholder tokens, their number and where they go"
    return UnsupportedValueError(f"prompt updates cannot be stored: {why}", path="updates", hint=hint)


def _marked(value: Any) -> list[Any]:
    if type(value) is tuple:
        return [TUPLE, *value]
    raise TypeError(f"no code for {type(value).__name__}")
