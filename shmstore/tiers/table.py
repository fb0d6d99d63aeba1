"""The table at the start of a value that a back end keeps: the number of its spans, and the size of each."""

import struct
from collections.abc import Sequence

from shmstore.tiers.arguments import MAX_SPANS

_COUNT, _SIZE = struct.Struct("<I"), struct.Struct("<Q")


def length_of(spans: int) -> int:
    """Return the bytes of the table of so many spans."""
    return _COUNT.size + spans * _SIZE.size


LONGEST = length_of(MAX_SPANS)


def packed(spans: Sequence[memoryview]) -> bytes:
    """Return the table of these spans."""
    return _COUNT.pack(len(spans)) + b"".join(_SIZE.pack(span.nbytes) for span in spans)


def sizes_in(value: bytes) -> list[int]:
    """Return the sizes from the table with which these bytes begin; [] if they do not begin with one."""
    count = _COUNT.unpack_from(value)[0] if len(value) >= _COUNT.size else 0
    if not 0 < count <= MAX_SPANS or len(value) < length_of(count):
        return []
    return [size for (size,) in _SIZE.iter_unpack(value[_COUNT.size : length_of(count)])]
