"""The wire format of `MsgpackSerde`: the part that encoding and decoding share; docs/reference/wire-format.md.

meta is one msgpack value. str, bytes, None, bool, float and ints of up to 64 bits are themselves. A list is an array,
and a dict is a map in its order. All other values are arrays whose first item is a *mark*: an ext value without data,
which no plain value produces::

    tuple        [TUPLE, item...]
    other int    [INT, bytes]                        two's complement, little-endian
    tensor       [TENSOR, dtype, offset, dim...]     dtype: its name in torch
    array        [ARRAY, dtype, offset, dim...]      dtype: see shmstore.serde.dtypes
    registered   [OBJECT, name, tree]

A tensor of shape (2, 3) and dtype float32, stored alone, has 15 bytes of meta::

    95 c7 00 03 a7 66 6c 6f 61 74 33 32 00 02 03
    |  |        |                       |  |  dim, dim
    |  |        "float32"               offset in the payload area
    |  TENSOR: ext 8, no data, code 3
    array of 5 items

Marks are not ext values with nested msgpack, because one parser with one limit must bound the depth of a forged
message. Offsets count from the start of the payload area and are multiples of `ALIGNMENT`. A leaf lies there as raw
bytes in C order, which no other leaf shares. A leaf without bytes has offset 0.
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgpack

from shmstore.bindings.fold import MAX_DEPTH, MAX_SAME_HASH
from shmstore.errors import CorruptStoreError, cut

__all__ = ["ARRAY", "ATOMS", "INT", "MAX_DEPTH", "MAX_NBYTES", "MAX_SAME_HASH", "OBJECT", "PICKLE", "TENSOR", "TUPLE"]

TUPLE = msgpack.ExtType(1, b"")
INT = msgpack.ExtType(2, b"")
TENSOR = msgpack.ExtType(3, b"")
ARRAY = msgpack.ExtType(4, b"")
OBJECT = msgpack.ExtType(5, b"")
PICKLE = 6
"""The ext code of the meta of `PickleSerde`, so that neither serializer reads the bytes of the other."""

MAX_NBYTES = 2**62
"""Limit of a payload, which keeps sums of sizes within the range of C and numpy."""

ATOMS: frozenset[Any] = frozenset((str, bytes, int, float, bool, type(None)))
"""The scalar types; dict keys are scalars or tuples of them."""


def parse(meta: "bytes | memoryview", ext_hook: Callable[[int, bytes], Any]) -> Any:
    """Return meta as a tree of atoms, tuples for arrays and lists of pairs for maps.

    Raises CorruptStoreError for bytes that are not msgpack.
    """
    try:
        return msgpack.unpackb(
            meta,
            use_list=False,
            raw=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            object_pairs_hook=lambda pairs: pairs,
            ext_hook=ext_hook,
        )
    except CorruptStoreError:  # a ValueError, from the hook
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise CorruptStoreError(f"the meta bytes are not msgpack: {cut(error) or type(error).__name__}") from error


def collides(keys: Collection[Any]) -> bool:
    """Return whether so many keys have the same hash that making a dict of them takes quadratic time.

    An attacker can choose numbers, and tuples of numbers, with the same hash. The hashes of str and bytes depend on a
    secret of the process.
    """
    if len(keys) <= MAX_SAME_HASH or {str, bytes}.issuperset(map(type, keys)):
        return False
    return max(Counter(map(hash, keys)).values()) > MAX_SAME_HASH
