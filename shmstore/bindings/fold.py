"""The parts of an object's metadata that hold no tensor; see ``serde/fold.h``."""

from typing import Final

from shmstore.bindings._shmstore import ffi, lib

PART_PLAIN: Final[int] = lib.SHMS_PART_PLAIN
PART_TUPLES: Final[int] = lib.SHMS_PART_TUPLES
MAX_DEPTH: Final[int] = lib.SHMS_MAX_DEPTH
"""Limit of the nesting of containers; it is well below the limits of msgpack's parser and of Python's stack."""
MAX_SAME_HASH: Final[int] = lib.SHMS_MAX_NUMBERS
"""Limit of the keys of one dict that have the same hash."""
_room = ffi.new_allocator(should_clear_after_alloc=False)  # most of it is not touched
_ONE_TENSOR = 24
"""Meta of so many bytes is a tensor or little more, which Python is fast enough at."""


def fold(meta: bytes) -> memoryview | None:
    """Return `meta` with each part that holds no tensor as one ext value; None if there is no such part."""
    if len(meta) <= _ONE_TENSOR:
        return None
    out = _room("uint8_t[]", 3 * len(meta) + 16)
    length = lib.shms_meta_fold(meta, len(meta), out)
    return memoryview(ffi.buffer(out, length)) if length else None
