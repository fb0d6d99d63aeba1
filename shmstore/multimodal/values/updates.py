"""Prompt updates as bytes, so that the store can keep them with their item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from shmstore.multimodal.values.items import ResolvedPromptUpdate

__all__ = ["decode_updates", "encode_updates", "pack", "shortened", "unpack"]

_TUPLE, _RUN = 0, 1
"""Codes: a tuple, which msgpack would turn into a list; a list that repeats one int."""


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
    """Return plain data as bytes, or None if there is anything else in it."""
    try:
        return msgpack.packb(value, strict_types=True, default=_pack_tuple)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError):
        return None


def unpack(packed: bytes) -> Any:
    """Return what `pack` has packed; ValueError for other bytes."""
    return msgpack.unpackb(packed, ext_hook=_unpack_ext, strict_map_key=False)


def shortened(value: Any) -> Any:
    """Return a list that repeats one int as a short value for `pack`, and any other value as it is.

    Most contents repeat one placeholder token, and to pack it once takes a tenth of the time.
    """
    if type(value) is list and value and type(value[0]) is int and value.count(value[0]) == len(value):
        return msgpack.ExtType(_RUN, b"%d %d" % (value[0], len(value)))
    return value


def _pack_tuple(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, msgpack.packb(list(value), strict_types=True, default=_pack_tuple))
    raise TypeError(f"no code for {type(value).__name__}")


def _unpack_ext(code: int, packed: bytes) -> tuple[Any, ...] | list[Any]:
    if code == _TUPLE:
        return tuple(unpack(packed))
    if code == _RUN:
        number, times = map(int, packed.split())
        return [number] * times
    raise ValueError(f"no type has the code {code}")
