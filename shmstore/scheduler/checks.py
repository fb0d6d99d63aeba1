"""What every number and item that enters the books must be: one helper for each question, so that all refuse alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["INT32_LIMIT", "INT64_LIMIT", "TOKEN_LIMIT", "check_in_order", "check_placeholders", "check_range"]

TOKEN_LIMIT: Final = 1 << 60
"""Every number of tokens is below this, so that the C side can add any three of them."""
INT32_LIMIT: Final = 1 << 31
"""Block sizes, block ids and group ids are below this."""
INT64_LIMIT: Final = 1 << 63
"""Other numbers are below this."""


def check_range(name: str, value: int, low: int, limit: int) -> None:
    """Raise ValueError, which names the argument, unless low <= value < limit."""
    if not low <= value < limit:
        bound = f"at least {low}" if value < low else f"below 2**{limit.bit_length() - 1}"
        raise ValueError(f"{name} must be {bound}, not {value}")


def check_in_order(features: Sequence[Any]) -> None:
    """Raise ValueError, which names the first item that begins before the one ahead of it."""
    for i in range(1, len(features)):
        if features[i].mm_position.offset < features[i - 1].mm_position.offset:
            raise ValueError(f"mm_features must be in order of offset: item {i} begins before item {i - 1}")


def check_placeholders(features: Sequence[Any]) -> None:
    """Raise ValueError, which names the item, for one out of order, of negative offset or length, or without an end."""
    check_in_order(features)
    for i, feature in enumerate(features):
        place = feature.mm_position
        check_range(f"the offset of item {i}", place.offset, 0, TOKEN_LIMIT)
        check_range(f"the length of item {i}", place.length, 0, TOKEN_LIMIT)
        check_range(f"the end of item {i}", place.offset + place.length, 0, TOKEN_LIMIT)
