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
a leaf lies there as its raw bytes in C order. A leaf of no bytes has offset 0.
"""

from typing import Any

import msgpack

__all__ = ["ARRAY", "ATOMS", "INT", "MAX_DEPTH", "MAX_NBYTES", "OBJECT", "PICKLE", "TENSOR", "TUPLE"]

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
