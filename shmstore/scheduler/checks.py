"""Checks of the numbers and items that the managers take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Final

from shmstore.errors import shown, unless_interrupted

TOKEN_LIMIT: Final = 1 << 60
"""Every number of tokens is below this, so that C can add any three of them."""
INT32_LIMIT: Final = 1 << 31
"""Block sizes, block ids and group ids are below this."""
INT64_LIMIT: Final = 1 << 63
"""Other numbers are below this."""


def whole(name: str, value: Any) -> int:
    """Return `value` as a Python integer; if it is not an integer, TypeError names the argument."""
    try:
        return int(index(value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {shown(value)}") from None


def plain_token_ids(name: str, tokens: Iterable[Any]) -> list[int]:
    """Return token ids of any integer types as Python's `int`, the only type that msgpack and JSON know.

    A bool or another subclass of `int` may stay as it is. TypeError for a token that is not an integer, ValueError for
    a token beyond 64 bits; both name its position.
    """
    tolist = getattr(tokens, "tolist", None)  # an array or tensor converts all elements at once
    try:
        given = list(tolist() if tolist is not None else tokens)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, not {shown(tokens)}") from None
    if given and type(given[0]) is int:
        # Only integers add up to an int: the cheapest check, some 3 ns a token. Tokens beyond 64 bits may cancel out in
        # the sum. The hasher rejects those.
        try:
            total = sum(given)
            if type(total) is int and 0 <= total < INT64_LIMIT:
                return given
        except unless_interrupted(Exception):  # scalars of numpy and torch raise their own: they are checked below
            pass
    plain = [whole(f"{name}[{i}]", token) for i, token in enumerate(given)]
    for i, token in enumerate(plain):
        if not -INT64_LIMIT <= token < INT64_LIMIT:
            raise ValueError(f"{name}[{i}] must be an integer of at most 64 bits, not {token}")
    return plain


def check_range(low: int, limit: int | None = None, /, **values: int) -> None:
    """Raise ValueError for the first argument outside low <= value < limit, and TypeError if it is not an integer."""
    for name, value in values.items():
        if whole(name, value) < low:
            raise ValueError(f"{name} must be at least {low}, not {value}")
        if limit is not None and value >= limit:
            raise ValueError(f"{name} must be below 2**{limit.bit_length() - 1}, not {value}")


def check_in_order(features: Sequence[Any]) -> None:
    """Raise ValueError for the first item that begins before the previous one."""
    for i in range(1, len(features)):
        if features[i].mm_position.offset < features[i - 1].mm_position.offset:
            raise ValueError(f"mm_features must be in order of offset: item {i} begins before item {i - 1}")


def check_placeholders(features: Sequence[Any]) -> None:
    """Raise ValueError for an item that is out of order, or whose offset, length or end is out of range."""
    check_in_order(features)
    for i, feature in enumerate(features):
        offset, length = feature.mm_position.offset, feature.mm_position.length
        numbers = {"offset": offset, "length": length, "end": offset + length}
        check_range(0, TOKEN_LIMIT, **{f"the {what} of item {i}": number for what, number in numbers.items()})
