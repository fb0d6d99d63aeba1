"""Checks of arguments, the same in every cache: they raise before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmstore.errors import CacheMissError, shown
from shmstore.multimodal.config import MultiModalCacheConfig
from shmstore.multimodal.values.items import MultiModalKwargsItem, ResolvedPromptUpdate
from shmstore.multimodal.values.types import ProcessorInput, ReceiverInput
from shmstore.refs import ObjectRef

__all__ = [
    "MAX_HASH",
    "check_batch",
    "check_config",
    "check_hash",
    "check_hashes",
    "check_input",
    "check_item",
    "check_known",
    "check_pairs",
    "checked_hashes",
    "checked_sent",
    "no_features",
]

MAX_HASH = 65536
"""Bytes of a hash in UTF-8: the bound of the store for its keys; a test compares them."""


def check_batch(
    items: Sequence[object],
    mm_hashes: Sequence[str],
    known: Callable[[str], bool],
    check: Callable[[Any, str], None],
) -> None:
    """Do `check_pairs` and `check_known`."""
    check_pairs(items, mm_hashes, check)
    check_known(items, mm_hashes, known)


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
    """Raise ValueError if the lengths differ, the errors of `check_hash`, and those of `check(item, mm_hash)`."""
    check_hashes(mm_hashes)
    if len(items) != len(mm_hashes):
        raise ValueError(f"{len(items)} items but {len(mm_hashes)} hashes; pass one hash for each item")
    _check_each(mm_hashes)
    for item, mm_hash in zip(items, mm_hashes, strict=True):
        check(item, mm_hash)


def _check_each(mm_hashes: Sequence[str]) -> None:
    for index, mm_hash in enumerate(mm_hashes):
        if type(mm_hash) is not str or not mm_hash.isascii() or not 0 < len(mm_hash) <= MAX_HASH:
            check_hash(mm_hash, f"mm_hashes[{index}]" if len(mm_hashes) > 1 else "mm_hash")


def check_hash(mm_hash: object, name: str = "mm_hash") -> None:
    """Raise TypeError if the hash is not text, and ValueError if it cannot be a key of a store."""
    if type(mm_hash) is str and mm_hash.isascii() and 0 < len(mm_hash) <= MAX_HASH:
        return  # nearly all of them
    if not isinstance(mm_hash, str):
        raise TypeError(f"{name} must be a str, not {_kind(mm_hash)}")
    try:
        size = len(mm_hash.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be a str that UTF-8 can encode, not {shown(mm_hash)}") from None
    if not 0 < size <= MAX_HASH:
        raise ValueError(f"{name} must have 1 to {MAX_HASH} bytes in UTF-8, not {size}")


def check_hashes(mm_hashes: object) -> None:
    """Raise TypeError if the hashes are not a sequence, or are one str, which would be read as letters."""
    if type(mm_hashes) is list:
        return
    if isinstance(mm_hashes, (str, bytes)) or not isinstance(mm_hashes, Iterable):
        one = "one " if isinstance(mm_hashes, (str, bytes)) else ""
        raise TypeError(f"mm_hashes must be a sequence of hashes, not {one}{_kind(mm_hashes)}")


def check_config(config: object) -> None:
    """Raise TypeError if this is not a configuration."""
    if not isinstance(config, MultiModalCacheConfig):
        raise TypeError(f"config must be a MultiModalCacheConfig, not {type(config).__name__}")


def checked_hashes(mm_hashes: Iterable[str]) -> list[str]:
    """Return the hashes, or raise the errors of `check_hashes` and `check_hash`."""
    check_hashes(mm_hashes)
    hashes = list(mm_hashes)
    _check_each(hashes)
    return hashes


def checked_sent(refs: Iterable[ReceiverInput]) -> list[ReceiverInput]:
    """Return the argument of `release`, or raise TypeError for what was not sent, such as a whole output."""
    takes = "refs must be what was sent (ObjectRef, MultiModalKwargsItem or None)"
    if isinstance(refs, (ObjectRef, MultiModalKwargsItem, str, bytes)) or not isinstance(refs, Iterable):
        raise TypeError(f"{takes} in a list, not one {_kind(refs)}")
    sent = list(refs)
    for index, ref in enumerate(sent):
        if ref is not None and not isinstance(ref, (ObjectRef, MultiModalKwargsItem)):
            raise TypeError(f"{takes}, the first part of each output; refs[{index}] is {_kind(ref)}")
    return sent


def check_input(mm_item: ProcessorInput, mm_hash: str) -> None:
    """Raise TypeError if this is neither None nor an item with a sequence of its prompt updates."""
    if mm_item is None:
        return
    if isinstance(mm_item, tuple) and len(mm_item) == 2:
        item, updates = mm_item
        if isinstance(item, MultiModalKwargsItem) and isinstance(updates, Sequence) and not isinstance(updates, str):
            for index, update in enumerate(updates):
                if not isinstance(update, ResolvedPromptUpdate):
                    raise TypeError(
                        f"input of {shown(mm_hash)}: prompt update {index} must be a ResolvedPromptUpdate, "
                        f"not {_kind(update)}"
                    )
            return
        got = f"({_kind(item)}, {_kind(updates)})"
    elif isinstance(mm_item, tuple):
        got = f"a tuple of {len(mm_item)}"
    else:
        got = _kind(mm_item)
    raise TypeError(
        f"input of {shown(mm_hash)}: expected None or a tuple (MultiModalKwargsItem, sequence of prompt updates), "
        f"got {got}"
    )


def check_item(mm_item: MultiModalKwargsItem | None, mm_hash: str) -> None:
    """Raise TypeError if this is neither None nor an item."""
    if mm_item is not None and not isinstance(mm_item, MultiModalKwargsItem):
        hint = " (hint: pass the first part of an output, without the prompt updates)"
        raise TypeError(
            f"item of {shown(mm_hash)}: must be None or a MultiModalKwargsItem, not {_kind(mm_item)}"
            f"{hint if isinstance(mm_item, tuple) else ''}"
        )


def no_features(features: object) -> TypeError:
    """Return the error for features that are not a sequence of MultiModalFeatureSpec."""
    said = "features must be a sequence of MultiModalFeatureSpec, not"
    if not isinstance(features, Iterable):
        return TypeError(f"{said} {_kind(features)}")
    wrong = (one for one in features if not (hasattr(one, "data") and hasattr(one, "identifier")))
    return TypeError(f"{said} one with {_kind(next(wrong, None))} in it (hint: a feature's data is what was sent)")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
