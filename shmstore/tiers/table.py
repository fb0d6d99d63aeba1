"""The table at the start of a value that a back end keeps: the number of its spans, and the size of each.

Also what all back ends do with the memory of spans.
"""

import struct
from collections.abc import Sequence

from shmstore.tiers.protocol import Into

_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")
_MAX_SPANS = 64
"""Of a value; a value with more is not a tier's."""


def length_of(spans: int) -> int:
    """Return the bytes of the table of so many spans."""
    return _COUNT.size + spans * _SIZE.size


LONGEST = length_of(_MAX_SPANS)


def packed(spans: Sequence[memoryview]) -> bytes:
    """Return the table of these spans; ValueError for none or too many, or if one is not flat and of bytes."""
    if not 0 < len(spans) <= _MAX_SPANS or not all(span.nbytes == len(span) and span.contiguous for span in spans):
        raise ValueError(f"spans must be 1 to {_MAX_SPANS} flat memoryviews of bytes, as memoryview(...).cast('B') is")
    return _COUNT.pack(len(spans)) + b"".join(_SIZE.pack(span.nbytes) for span in spans)


def sizes_in(value: bytes) -> list[int]:
    """Return the sizes from the table with which these bytes begin; [] if they do not begin with one."""
    count = _COUNT.unpack_from(value)[0] if len(value) >= _COUNT.size else 0
    if not 0 < count <= _MAX_SPANS or len(value) < length_of(count):
        return []
    return [size for (size,) in _SIZE.iter_unpack(value[_COUNT.size : length_of(count)])]


def take(into: Into, size: int) -> memoryview | None:
    """Return the memory that `into` gives for a span, or None; ValueError for memory of another size or read-only."""
    memory = into(size)
    if memory is None:
        return None
    span = memoryview(memory).cast("B")
    if span.readonly or span.nbytes != size:
        what = "read-only memory" if span.readonly else f"{span.nbytes} bytes"
        raise ValueError(f"into must return {size} writable bytes or None, not {what}")
    return span
