"""Blocks as Python sees them: ids first, objects only when somebody looks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, overload

from shmstore.bindings.blockpool import Pool, pack_ids, unpack_ids

__all__ = ["BlockSequence", "KVCacheBlock", "KVCacheBlocks", "empty_blocks", "ids_of"]


class OwnsBlocks(Protocol):
    """What blocks ask of their pool; a `BlockPool` is one."""

    core: Pool


class KVCacheBlock:
    """One block of a pool, as it is now: a view, equal to every other view of the same block."""

    __slots__ = ("_pool", "block_id")

    def __init__(self, pool: OwnsBlocks, block_id: int) -> None:
        self._pool = pool
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        """Tables that use the block."""
        return self._pool.core.ref(self.block_id)

    @property
    def block_hash(self) -> tuple[bytes, int] | None:
        """The key under which its contents are found: (hash, group id); None without one."""
        return self._pool.core.key_of(self.block_id)

    @property
    def is_null(self) -> bool:
        """True for block 0, the placeholder."""
        return self.block_id == 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlock):
            return NotImplemented
        return self.block_id == other.block_id and self._pool is other._pool

    def __hash__(self) -> int:
        return hash((id(self._pool), self.block_id))

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash})"


class BlockSequence(Sequence[KVCacheBlock]):
    """Blocks of one pool in an order; makes a `KVCacheBlock` for each item that is looked at."""

    __slots__ = ("_ids", "_pool")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, pool: OwnsBlocks, ids: bytes) -> None:
        self._pool = pool
        self._ids = ids

    @property
    def packed_ids(self) -> bytes:
        """The ids as native int32."""
        return self._ids

    @property
    def pool(self) -> OwnsBlocks:
        """Whose blocks these are."""
        return self._pool

    def __len__(self) -> int:
        return len(self._ids) // 4

    @overload
    def __getitem__(self, index: int) -> KVCacheBlock: ...
    @overload
    def __getitem__(self, index: slice) -> BlockSequence: ...
    def __getitem__(self, index: int | slice) -> KVCacheBlock | BlockSequence:
        ids = memoryview(self._ids).cast("i")
        if isinstance(index, slice):
            return BlockSequence(self._pool, ids[index].tobytes())
        return KVCacheBlock(self._pool, ids[index])

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return (KVCacheBlock(self._pool, block_id) for block_id in unpack_ids(self._ids))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockSequence):
            return self._ids == other._ids and (self._pool is other._pool or not self._ids)
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __add__(self, other: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        return [*self, *other]

    def __radd__(self, other: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        return [*other, *self]

    def __repr__(self) -> str:
        return f"BlockSequence({unpack_ids(self._ids)})"


def ids_of(blocks: Iterable[Any], pool: OwnsBlocks) -> bytes:
    """Return the packed ids of blocks of any kind (``block_id``); ValueError for those of another pool than `pool`."""
    if isinstance(blocks, BlockSequence):
        ids, others = blocks.packed_ids, blocks.pool is not pool and len(blocks) > 0
    else:
        blocks = list(blocks)
        ids = pack_ids(block.block_id for block in blocks)
        others = any(getattr(block, "_pool", pool) is not pool for block in blocks)
    if others:
        raise ValueError("blocks of different pools do not mix: an id means nothing in another pool")
    return ids


class KVCacheBlocks:
    """Blocks for one request, one sequence for each group: what look-ups find and allocations give.

    A value: it does not follow the request's table. Ids are there at once, block objects when `blocks` is looked into.
    """

    __slots__ = ("_counts", "_ids", "_pool")

    def __init__(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Take the blocks of each group; they must be of one pool."""
        self._pool: OwnsBlocks | None = next((block._pool for group in blocks for block in group[:1]), None)
        packed = [ids_of(group, self._pool) if self._pool is not None else b"" for group in blocks]
        self._ids = b"".join(packed)
        self._counts = tuple(len(ids) // 4 for ids in packed)

    @classmethod
    def from_ids(cls, pool: OwnsBlocks | None, ids: bytes, counts: tuple[int, ...]) -> KVCacheBlocks:
        """Return blocks by their packed ids, group after group, `counts` of them for each."""
        made = object.__new__(cls)
        made._pool = pool
        made._ids = ids
        made._counts = counts
        return made

    @property
    def blocks(self) -> tuple[BlockSequence, ...]:
        """The blocks of each group."""
        return tuple(BlockSequence(self._pool, ids) for ids in self._split())  # type: ignore[arg-type]

    @property
    def packed_ids(self) -> bytes:
        """The ids of all groups as native int32, group after group."""
        return self._ids

    @property
    def counts(self) -> tuple[int, ...]:
        """How many blocks each group has."""
        return self._counts

    @property
    def pool(self) -> OwnsBlocks | None:
        """Whose blocks these are; None only where there are none."""
        return self._pool

    def _split(self) -> list[bytes]:
        if len(self._counts) == 1:
            return [self._ids]
        ends = list(accumulate(self._counts, initial=0))
        return [self._ids[4 * start : 4 * end] for start, end in pairwise(ends)]

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return the ids of each group; None where that is allowed and there is none at all."""
        if allow_none and not self._ids:
            return None
        return tuple(unpack_ids(ids) for ids in self._split())

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of blocks that have no key now, without null blocks; ValueError with several groups."""
        if len(self._counts) != 1:
            raise ValueError(f"only one group can be asked for its unhashed blocks, not {len(self._counts)}")
        if self._pool is None:
            return []
        keyed = set(self._pool.core.keyed(self._ids))
        return [block_id for block_id in unpack_ids(self._ids) if block_id and block_id not in keyed]

    def new_empty(self) -> KVCacheBlocks:
        """Return no blocks, for as many groups."""
        return empty_blocks(len(self._counts))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Return this and then `other`, group by group; ValueError for another number of groups or another pool."""
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        if len(self._counts) != len(other._counts):
            raise ValueError(f"{len(self._counts)} and {len(other._counts)} groups cannot be added")
        if self._ids and other._ids and self._pool is not other._pool:
            raise ValueError("the blocks belong to different pools")
        if not other._ids:
            return self
        if not self._ids:
            return other
        ids = b"".join(part for pair in zip(self._split(), other._split(), strict=True) for part in pair)
        return KVCacheBlocks.from_ids(
            self._pool, ids, tuple(a + b for a, b in zip(self._counts, other._counts, strict=True))
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        same_pool = self._pool is other._pool or not self._ids
        return self._ids == other._ids and self._counts == other._counts and same_pool

    def __hash__(self) -> int:
        return hash((self._ids, self._counts))

    def __repr__(self) -> str:
        return f"KVCacheBlocks{self.get_block_ids()}"


@cache
def empty_blocks(num_groups: int) -> KVCacheBlocks:
    """Return the one instance with no blocks for so many groups."""
    return KVCacheBlocks.from_ids(None, b"", (0,) * num_groups)
