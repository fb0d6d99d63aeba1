"""The list of block hashes in C; see ``kv/hashlist.h``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.hidden import held
from shmstore.bindings.kv_errors import check, refusal

HASH_BYTES: Final = 32
_PADDED = np.dtype((np.void, HASH_BYTES))


def exact_bytes(value: Any) -> bytes:
    """Return all bytes of a buffer, whatever its ``len`` says; TypeError if it is not a buffer."""
    return value if type(value) is bytes else memoryview(value).tobytes()


class HashList:
    """A growing list of block hashes in C memory."""

    __slots__ = ("_c", "_hold")

    def __init__(self) -> None:
        self._c: Any = ffi.gc(lib.shms_hashlist_new(), lib.shms_hashlist_free)
        if not self._c:
            raise MemoryError("no memory for a list of block hashes")
        self._hold = held(self._c)

    def __len__(self) -> int:
        return self._c.n

    @property
    def width(self) -> int:
        """Bytes of each hash; 0 in a new list."""
        return self._c.width

    def raw(self, start: int, stop: int) -> bytes:
        """Return hashes `start` to `stop` in one piece, each padded with zeros to 32 bytes."""
        if not 0 <= start <= stop <= self._c.n:
            raise IndexError(f"hashes {start} to {stop} of {len(self)}")
        if start == stop:
            return b""
        return ffi.buffer(self._c.data + HASH_BYTES * start, HASH_BYTES * (stop - start))[:]

    def append(self, block_hash: bytes) -> None:
        """Append one hash; ValueError if its length is not 1 to 32, or differs from the others."""
        raw = exact_bytes(block_hash)
        check(lib.shms_hashlist_append(self._c, raw, 1, len(raw)))

    def extend(self, hashes: Iterable[bytes]) -> None:
        """Append all of `hashes`; if a length does not fit, append nothing and raise ValueError."""
        if isinstance(hashes, HashList) and hashes.width == HASH_BYTES:  # no padding between them
            check(lib.shms_hashlist_append(self._c, hashes._c.data, hashes._c.n, HASH_BYTES))
            return
        items = list(hashes)
        if not items:
            return
        if set(map(type, items)) != {bytes}:
            items = list(map(exact_bytes, items))
        width = len(items[0])
        if set(map(len, items)) != {width}:
            raise refusal(lib.SHMS_KV_EWIDTH)
        check(lib.shms_hashlist_append(self._c, b"".join(items), len(items), width))


def split_hashes(raw: bytes, width: int, factor: int = 1) -> list[bytes]:
    """Return the last of every `factor` hashes in the result of `HashList.raw`."""
    padded: list[bytes] = np.frombuffer(raw, _PADDED)[factor - 1 :: factor].tolist()
    return padded if width == HASH_BYTES else [block_hash[:width] for block_hash in padded]
