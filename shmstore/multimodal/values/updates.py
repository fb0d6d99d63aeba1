"""Prompt updates as bytes, so that the store can keep them with their item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from shmstore.errors import CorruptStoreError, UnsupportedValueError
from shmstore.multimodal.values.items import ResolvedPromptUpdate
from shmstore.serde.decode import plain
from shmstore.serde.wire import RUN, TUPLE

__all__ = ["decode_updates", "encode_updates", "pack", "shortened", "unpack"]

_MAX_DEPTH = 16


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
    try:
        unpack(packed)
    except CorruptStoreError as error:
        raise UnsupportedValueError(f"prompt updates cannot be stored: {error.args[0]}", path="updates") from error
    return packed


def unpack(packed: bytes) -> Any:
    """Return what `pack` has packed; CorruptStoreError for other bytes."""
    return plain(packed, _MAX_DEPTH)


def shortened(value: Any) -> Any:
    """Return a list that repeats one int as a short value for `pack`, and any other value as it is.

    Most contents repeat one placeholder token, and to pack it once takes a tenth of the time.
    """
    if type(value) is list and value and type(value[0]) is int and value.count(value[0]) == len(value):
        return [RUN, value[0], len(value)]
    return value


def _marked(value: Any) -> list[Any]:
    if type(value) is tuple:
        return [TUPLE, *value]
    raise TypeError(f"no code for {type(value).__name__}")
