"""Prompt updates as bytes, so that the store can keep them with their item.

They are rows of plain data in the format of the store's serializer. The last two columns are the content: a form and a
value. Form 0 is the value itself, form -1 ints of 32 bits in one piece, and form n a list that repeats one int n times.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from shmstore.errors import CorruptStoreError, NestingError, UnsupportedValueError
from shmstore.multimodal.values.items import ResolvedPromptUpdate
from shmstore.serde.decode import make_plan
from shmstore.serde.encode import encode_tree, pack_rows
from shmstore.serde.wire import ATOMS

_FORM = itemgetter(-2)
_INTS = -1
_FEW = 32
"""A list of fewer ints takes no less time as one piece."""
_MAX_REPEATED = 1 << 20
"""Limit of the items of all lists that repeat one int, because no bytes bound them."""


def encode_updates(updates: Sequence[ResolvedPromptUpdate]) -> bytes | None:
    """Return the updates as bytes, or None if they hold anything but text, numbers, lists, tuples and dicts."""
    rows = []
    for update in updates:
        if type(update) is not ResolvedPromptUpdate:
            return None
        rows.append([update.modality, update.item_idx, update.mode, update.target, *shortened(update.content)])
    return pack(rows)


def decode_updates(packed: bytes) -> list[ResolvedPromptUpdate]:
    """Return what `encode_updates` has encoded; TypeError or ValueError for other bytes."""
    rows = unpack(packed)
    if not all(ATOMS.issuperset(map(type, row[:2])) for row in rows):
        raise CorruptStoreError("prompt updates have a modality or an index that is not a scalar")
    return [ResolvedPromptUpdate(*row) for row in rows]


def pack(rows: list[list[Any]]) -> bytes | None:
    """Return rows that end with what `shortened` has returned as bytes, or None if they are not plain data."""
    if sum(map(_FORM, rows)) > _MAX_REPEATED:
        return None
    if (packed := pack_rows(rows)) is not None:
        return packed
    try:
        encoded = encode_tree(rows)
    except (NestingError, UnsupportedValueError):
        return None
    return None if encoded.nbytes else encoded.meta


def unpack(packed: bytes) -> list[list[Any]]:
    """Return rows with their content as it was; TypeError or ValueError for bytes that `pack` has not packed."""
    (needed, build), _ = make_plan(packed, "view")
    rows = [] if needed else [(row, form, value) for *row, form, value in build(b"")]
    if needed or sum([max(form, 0) for _, form, _ in rows]) > _MAX_REPEATED:
        raise CorruptStoreError(f"prompt updates hold a tensor, or more than {_MAX_REPEATED} items that repeat")
    return [[*row, _lengthened(form, value)] for row, form, value in rows]


def shortened(value: Any) -> tuple[int, Any]:
    """Return the form and the value of a content for `pack`.

    Most contents repeat one placeholder token, and to pack it once takes a tenth of the time. Other tokens are packed
    and read together, without a look at each.
    """
    if type(value) is not list or not value or type(value[0]) is not int:
        return 0, value
    if value[0] == value[-1] and value.count(value[0]) == len(value):
        return len(value), value[0]
    if len(value) < _FEW:
        return 0, value
    try:
        packed = array("i", value).tobytes()
    except (OverflowError, TypeError):  # not ints of 32 bits
        return 0, value
    if (b"\1\0\0\0" in packed or b"\0\0\0\0" in packed) and bool in set(map(type, value)):
        return 0, value  # a look at each type takes longer than to pack them, and few lists have a 0 or a 1
    return _INTS, packed


def _lengthened(form: int, value: Any) -> Any:
    if form == _INTS:
        return array("i", value).tolist()
    return [value] * form if form else value
