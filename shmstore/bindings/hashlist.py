"""The list of block hashes in C; see ``kv/hashlist.h``."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, overload

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import held
from shmstore.bindings.kv_errors import meaning, refusal

HASH_BYTES: Final = 32


def exact_bytes(value: Any) -> bytes:
    """Return the bytes of a buffer, as many as it really has whatever its ``len`` says; TypeError for no buffer."""
    return value if type(value) is bytes else memoryview(value).tobytes()


class BlockHashes(Sequence[bytes]):
    """The hashes of a request's full blocks: a list of bytes that lives in C and is extended in place.

    All hashes of one list have the same length of 1 to 32 bytes. It compares equal to any sequence of the same bytes,
    and a slice of it is a list.
    """

    __slots__ = ("_c", "_hold")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, hashes: Iterable[bytes] = ()) -> None:
        self._c: Any = ffi.gc(lib.shms_hashlist_new(), lib.shms_hashlist_free)
        if not self._c:
            raise MemoryError("no memory for a list of block hashes")
        self._hold = held(self._c)
        if hashes:
            self.extend(hashes)

    @classmethod
    def of(cls, hashes: Sequence[bytes]) -> BlockHashes:
        """Return `hashes` where it is such a list, else one made of it."""
        return hashes if type(hashes) is cls else cls(hashes)

    def __len__(self) -> int:
        n: int = lib.shms_hashlist_len(self._c)
        return n

    @property
    def width(self) -> int:
        """Bytes of each hash; 0 while there is none."""
        n: int = lib.shms_hashlist_width(self._c)
        return n

    def raw(self, start: int, stop: int) -> bytes:
        """Return hashes `start` to `stop`, each padded with zeros to 32 bytes, one after the other."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"hashes {start} to {stop} of {len(self)}")
        if start == stop:
            return b""
        got: bytes = ffi.buffer(lib.shms_hashlist_data(self._c) + HASH_BYTES * start, HASH_BYTES * (stop - start))[:]
        return got

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        n = len(self)
        if isinstance(index, slice):
            start, stop, step = index.indices(n)
            if step != 1:
                return [self[i] for i in range(start, stop, step)]
            return split_hashes(self.raw(start, max(start, stop)), self.width)
        i = index + n if index < 0 else index
        if not 0 <= i < n:
            raise IndexError(f"hash {index} of {n}")
        return self.raw(i, i + 1)[: self.width]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])

    def append(self, block_hash: bytes) -> None:
        """Append one hash; ValueError where its length is not 1 to 32 or not that of the others."""
        raw = exact_bytes(block_hash)
        rc = lib.shms_hashlist_append(self._c, raw, 1, len(raw))
        if rc:
            raise refusal(rc)

    def extend(self, hashes: Iterable[bytes]) -> None:
        """Append all of `hashes` or, with a ValueError for a length that does not fit, none."""
        if isinstance(hashes, BlockHashes):
            rc = lib.shms_hashlist_join(self._c, hashes._c)
        else:
            items = [item if type(item) is bytes else exact_bytes(item) for item in hashes]
            if not items:
                return
            width = len(items[0])
            if any(len(item) != width for item in items):
                raise refusal(lib.SHMS_KV_EWIDTH)
            rc = lib.shms_hashlist_append(self._c, b"".join(items), len(items), width)
        if rc:
            raise refusal(rc)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and self[:] == list(other)

    def __add__(self, other: Iterable[bytes]) -> list[bytes]:
        return self[:] + list(other)

    def __radd__(self, other: Iterable[bytes]) -> list[bytes]:
        return list(other) + self[:]

    def __repr__(self) -> str:
        return f"BlockHashes({self[:]!r})"

    def __reduce__(self) -> tuple[type[BlockHashes], tuple[list[bytes]]]:
        return BlockHashes, (self[:],)

    def check_valid(self) -> None:
        """Raise RuntimeError at a broken invariant."""
        rc = lib.shms_hashlist_valid(self._c)
        if rc:
            raise RuntimeError(meaning(rc))


def split_hashes(raw: bytes, width: int, factor: int = 1) -> list[bytes]:
    """Return every `factor`-th hash, the last of each, of what :meth:`BlockHashes.raw` gave."""
    if width == HASH_BYTES and factor == 1:
        return list(struct.unpack("32s" * (len(raw) // HASH_BYTES), raw)) if len(raw) < 8192 else _split_long(raw)
    return [raw[i : i + width] for i in range((factor - 1) * HASH_BYTES, len(raw), factor * HASH_BYTES)]


_SPLIT_256 = struct.Struct("32s" * 256)


def _split_long(raw: bytes) -> list[bytes]:
    whole = len(raw) // _SPLIT_256.size * _SPLIT_256.size
    parts = [part for chunk in _SPLIT_256.iter_unpack(memoryview(raw)[:whole]) for part in chunk]
    return parts + [raw[i : i + HASH_BYTES] for i in range(whole, len(raw), HASH_BYTES)]
