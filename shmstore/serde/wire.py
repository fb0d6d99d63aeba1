"""The wire format of `MsgpackSerde`, the part that its two directions share.

meta is one msgpack value. str, bytes, None, bool, float and ints of up to 64 bits are themselves, a list is an
array, a dict is a map with its order. Everything else is an array whose first item is a *mark*, an ext value
without data, which no plain value can produce::

    tuple        [TUPLE, item...]
    other int    [INT, bytes]                        two's complement, little-endian
    tensor       [TENSOR, dtype, offset, dim...]     dtype: its name in torch
    array        [ARRAY, dtype, offset, dim...]      dtype: see shmstore.serde.dtypes
    registered   [OBJECT, name, tree]

The tensor of shape (2, 3) and dtype float32, alone, is 15 bytes::

    95 c7 00 03 a7 66 6c 6f 61 74 33 32 00 02 03
    |  |        |                       |  |  dim, dim
    |  |        "float32"               offset in the payload area
    |  TENSOR: ext 8, no data, code 3
    array of 5 items

Marks inside arrays, rather than ext values with nested msgpack in them, keep the depth of a forged message under
the one limit of the one parser. Offsets count from the start of the payload area and are multiples of `ALIGNMENT`;
a leaf lies there as its raw bytes in C order, and shares them with no other. A leaf of no bytes has offset 0.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgpack

__all__ = [
    "ARRAY",
    "ATOMS",
    "INT",
    "MAX_DEPTH",
    "MAX_NBYTES",
    "MAX_SAME_HASH",
    "OBJECT",
    "PICKLE",
    "TENSOR",
    "TUPLE",
    "crowded",
    "parse",
]

TUPLE = msgpack.ExtType(1, b"")
INT = msgpack.ExtType(2, b"")
TENSOR = msgpack.ExtType(3, b"")
ARRAY = msgpack.ExtType(4, b"")
OBJECT = msgpack.ExtType(5, b"")
PICKLE = 6
"""The ext code of the meta of `PickleSerde`, so that neither reads what the other wrote."""

MAX_DEPTH = 100
"""How deep containers may be nested; well below the limits of msgpack's parser and of Python's stack."""
MAX_NBYTES = 2**62
"""No payload is larger; keeps every sum of sizes within what C and numpy take."""

ATOMS: frozenset[Any] = frozenset((str, bytes, int, float, bool, type(None)))
"""The scalar types; dict keys are of these, or tuples of them."""
MAX_SAME_HASH = 64
"""How many keys of one dict may have the same hash."""


def parse(meta: bytes, ext_hook: Callable[[int, bytes], Any]) -> Any:
    """Return meta as a tree of atoms, tuples for arrays and lists of pairs for maps: no key is hashed here.

    Raises ValueError, TypeError, OverflowError or msgpack.UnpackException for what is not msgpack.
    """
    return msgpack.unpackb(
        meta,
        use_list=False,
        raw=False,
        strict_map_key=False,
        unicode_errors="surrogatepass",
        object_pairs_hook=lambda pairs: pairs,
        ext_hook=ext_hook,
    )


def crowded(keys: Collection[Any]) -> bool:
    """Say whether so many keys have the same hash that a dict of them takes the square of their number to make.

    The hashes of text and bytes depend on a secret of the process. Anybody can choose numbers, and tuples of numbers,
    of the same hash.
    """
    if len(keys) <= MAX_SAME_HASH or {str, bytes}.issuperset(map(type, keys)):
        return False
    return max(Counter(map(hash, keys)).values()) > MAX_SAME_HASH
