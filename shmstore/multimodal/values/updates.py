"""Prompt updates as bytes, so that the store can keep them with their item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from shmstore.multimodal.values.items import ResolvedPromptUpdate

__all__ = ["decode_updates", "encode_updates"]

_TUPLE = 0
"""Code of a tuple, which msgpack would turn into a list."""


def encode_updates(updates: Sequence[ResolvedPromptUpdate]) -> bytes | None:
    """Return the updates as bytes, or None if they hold anything but text, numbers, lists, tuples and dicts."""
    rows = []
    for update in updates:
        if type(update) is not ResolvedPromptUpdate:
            return None
        content, times = update.content, 0
        # Most contents repeat one placeholder token. To write it once takes a tenth of the time.
        if type(content) is list and content and type(content[0]) is int and content.count(content[0]) == len(content):
            times, content = len(content), content[0]
        rows.append([update.modality, update.item_idx, update.mode, update.target, content, times])
    try:
        packed: bytes = msgpack.packb(rows, strict_types=True, default=_pack_tuple)
    except (TypeError, ValueError, OverflowError):
        return None
    return packed


def decode_updates(packed: bytes) -> list[ResolvedPromptUpdate]:
    """Return what `encode_updates` has encoded; an exception if it has not."""
    rows = msgpack.unpackb(packed, ext_hook=_unpack_tuple, strict_map_key=False)
    return [
        ResolvedPromptUpdate(modality, item_idx, mode, target, [content] * times if times else content)
        for modality, item_idx, mode, target, content, times in rows
    ]


def _pack_tuple(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, msgpack.packb(list(value), strict_types=True, default=_pack_tuple))
    raise TypeError(f"no code for {type(value).__name__}")


def _unpack_tuple(code: int, packed: bytes) -> tuple[Any, ...]:
    if code != _TUPLE:
        raise ValueError(f"no type has the code {code}")
    return tuple(msgpack.unpackb(packed, ext_hook=_unpack_tuple, strict_map_key=False))
