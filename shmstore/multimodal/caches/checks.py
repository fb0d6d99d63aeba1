"""Checks of arguments, the same in every cache: they raise before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmstore.errors import CacheMissError, kind_of, shown


def check_known(items: Sequence[object], mm_hashes: Sequence[str], known: Callable[[str], bool]) -> None:
    """Raise CacheMissError with each hash whose item is None, is not `known`, and is not given earlier in the batch."""
    given: set[str] = set()
    missing: dict[str, None] = {}
    for item, mm_hash in zip(items, mm_hashes, strict=True):
        if item is not None:
            given.add(mm_hash)
        elif mm_hash not in given and not known(mm_hash):
            missing[mm_hash] = None
    if missing:
        raise CacheMissError(missing)


def check_pairs(items: Sequence[object], mm_hashes: Sequence[str], check: Callable[[Any, str], None]) -> None:
    """Raise TypeError if `items` has no length, ValueError if the lengths differ, and the errors of the other checks.

    These are `checked_hashes`, and `check(item, mm_hash)` of each pair.
    """
    checked_hashes(mm_hashes)
    if not hasattr(items, "__len__"):
        raise TypeError(f"mm_items must be a sequence of an item or None for each hash, not {kind_of(items)}")
    if len(items) != len(mm_hashes):
        raise ValueError(f"{len(items)} items but {len(mm_hashes)} hashes; pass one hash for each item")
    for item, mm_hash in zip(items, mm_hashes, strict=True):
        check(item, mm_hash)


def check_hash(mm_hash: object, name: str = "mm_hash") -> None:
    """Raise TypeError if the hash is not text, and ValueError if it cannot be a key of a store."""
    if type(mm_hash) is str and mm_hash and mm_hash.isascii():
        return  # nearly all of them
    if not isinstance(mm_hash, str):
        raise TypeError(f"{name} must be a str, not {kind_of(mm_hash)}")
    try:
        mm_hash.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be a str that UTF-8 can encode, not {shown(mm_hash)}") from None
    if not mm_hash:
        raise ValueError(f"{name} must not be empty")


def checked_hashes(mm_hashes: Iterable[str]) -> list[str]:
    """Return the hashes, or raise the errors of `check_hash`, and TypeError for one str, which has letters."""
    if type(mm_hashes) is not list and (isinstance(mm_hashes, (str, bytes)) or not isinstance(mm_hashes, Iterable)):
        one = "one " if isinstance(mm_hashes, (str, bytes)) else ""
        raise TypeError(f"mm_hashes must be a sequence of hashes, not {one}{kind_of(mm_hashes)}")
    hashes = list(mm_hashes)
    for index, mm_hash in enumerate(hashes):
        if type(mm_hash) is not str or not mm_hash or not mm_hash.isascii():
            check_hash(mm_hash, f"mm_hashes[{index}]" if len(hashes) > 1 else "mm_hash")
    return hashes


def one_or_more(mm_hashes: str | Iterable[str]) -> list[str]:
    """Return one hash or several as a list, or raise the errors of `checked_hashes`."""
    return checked_hashes([mm_hashes] if isinstance(mm_hashes, str) else mm_hashes)
