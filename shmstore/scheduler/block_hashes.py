"""The hashes of a request's full blocks, as a sequence of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from shmstore.bindings.hashlist import HashList, split_hashes


class BlockHashes(HashList, Sequence[bytes]):
    """The hashes of a request's full blocks: a list of bytes that is kept in C and grows in place.

    All hashes of one list have the same length of 1 to 32 bytes. The list equals any sequence of the same bytes, and a
    slice of it is a Python list.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, hashes: Iterable[bytes] = ()) -> None:
        super().__init__()
        if hashes:
            self.extend(hashes)

    @classmethod
    def of(cls, hashes: Sequence[bytes]) -> BlockHashes:
        """Return `hashes` itself if it is a BlockHashes, else a new one with its hashes."""
        return hashes if type(hashes) is cls else cls(hashes)

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
