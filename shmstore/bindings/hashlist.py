"""The hashes of a request's full blocks, as a sequence of bytes; see ``kv/hashlist.h``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, overload

import numpy as np

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.hidden import held
from shmstore.bindings.kv_errors import check, refusal

HASH_BYTES: Final = 32
_PADDED = np.dtype((np.void, HASH_BYTES))


def exact_bytes(value: Any) -> bytes:
    """Return all bytes of a buffer, whatever its ``len`` says; TypeError if it is not a buffer."""
    return value if type(value) is bytes else memoryview(value).tobytes()


class BlockHashes(Sequence[bytes]):
    """The hashes of a request's full blocks: a list of bytes that is kept in C and grows in place.

    All hashes of one list have the same length of 1 to 32 bytes. The list equals any sequence of the same bytes, and a
    slice of it is a Python list.
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
        """Return `hashes` itself if it is a BlockHashes, else a new one with its hashes."""
        return hashes if type(hashes) is cls else cls(hashes)

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
        if isinstance(hashes, BlockHashes) and hashes.width == HASH_BYTES:  # no padding between them
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


def split_hashes(raw: bytes, width: int, factor: int = 1) -> list[bytes]:
    """Return the last of every `factor` hashes in the result of `BlockHashes.raw`."""
    padded: list[bytes] = np.frombuffer(raw, _PADDED)[factor - 1 :: factor].tolist()
    return padded if width == HASH_BYTES else [block_hash[:width] for block_hash in padded]
