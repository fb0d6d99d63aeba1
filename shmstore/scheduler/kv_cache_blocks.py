"""Blocks in Python: packed ids, and an object for each block when a caller asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

from shmstore.bindings.blockpool import pack_ids, unpack_ids
from shmstore.errors import check_flags

if TYPE_CHECKING:
    from shmstore.scheduler.block_pool import BlockPool


@dataclass(slots=True, unsafe_hash=True, repr=False)
class KVCacheBlock:
    """A view of one block of a pool as it is now; views of the same block are equal."""

    _pool: BlockPool
    block_id: int

    @property
    def ref_cnt(self) -> int:
        """Number of tables that use the block."""
        return self._pool.core.ref(self.block_id)

    @property
    def block_hash(self) -> tuple[bytes, int] | None:
        """The key of the contents, (hash, group id); None if the block has no key."""
        return self._pool.core.key_of(self.block_id)

    @property
    def is_null(self) -> bool:
        """True for block 0, the placeholder."""
        return self.block_id == 0

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash})"


def blocks_of(pool: BlockPool, ids: bytes) -> list[KVCacheBlock]:
    """Return the blocks of these packed ids."""
    return [KVCacheBlock(pool, block_id) for block_id in unpack_ids(ids)]


def ids_of(blocks: Iterable[Any], pool: BlockPool) -> bytes:
    """Return the packed ids of blocks, objects with a ``block_id``; ValueError for blocks of another pool."""
    blocks = list(blocks)
    if any(getattr(block, "_pool", pool) is not pool for block in blocks):
        raise ValueError("blocks of different pools do not mix: an id means nothing in another pool")
    return pack_ids(block.block_id for block in blocks)


@dataclass(init=False, slots=True, unsafe_hash=True, repr=False)
class KVCacheBlocks:
    """Blocks for one request, one sequence for each group: the result of look-ups and allocations.

    It is a value, and does not follow the request's table.
    """

    pool: BlockPool | None
    """The pool of the blocks; None only if there are no blocks."""
    packed_ids: bytes
    """The ids of all groups as native int32, group after group."""
    counts: tuple[int, ...]
    """Number of blocks in each group."""

    def __init__(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Take the blocks of each group, all from one pool."""
        self.pool = next((block._pool for group in blocks for block in group[:1]), None)
        packed = [ids_of(group, self.pool) if self.pool is not None else b"" for group in blocks]
        self.packed_ids = b"".join(packed)
        self.counts = tuple(len(ids) // 4 for ids in packed)

    @classmethod
    def from_ids(cls, pool: BlockPool | None, ids: bytes, counts: tuple[int, ...]) -> KVCacheBlocks:
        """Return blocks from their packed ids, group after group; `counts` has the number for each group."""
        made = object.__new__(cls)
        made.pool = pool
        made.packed_ids = ids
        made.counts = counts
        return made

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """The blocks of each group; each access makes new objects. `get_block_ids` returns the ids without them."""
        return tuple(blocks_of(self.pool, ids) for ids in self.split())  # type: ignore[arg-type]

    def split(self) -> list[bytes]:
        """Return the packed ids of each group."""
        if len(self.counts) == 1:
            return [self.packed_ids]
        ends = list(accumulate(self.counts, initial=0))
        return [self.packed_ids[4 * start : 4 * end] for start, end in pairwise(ends)]

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return the ids of each group; with `allow_none`, return None if there are no blocks."""
        if allow_none is True:
            if not self.packed_ids:
                return None
        elif allow_none is not False:
            check_flags(allow_none=allow_none)
        return tuple(unpack_ids(ids) for ids in self.split())

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of blocks that have no key now, without null blocks; ValueError with several groups."""
        if len(self.counts) != 1:
            raise ValueError(f"only one group can be asked for its unhashed blocks, not {len(self.counts)}")
        if self.pool is None:
            return []
        keyed = set(self.pool.core.keyed(self.packed_ids))
        return [block_id for block_id in unpack_ids(self.packed_ids) if block_id and block_id not in keyed]

    def new_empty(self) -> KVCacheBlocks:
        """Return an instance with no blocks and the same number of groups."""
        return empty_blocks(len(self.counts))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Return both joined, group by group; ValueError for another number of groups or another pool."""
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        if len(self.counts) != len(other.counts):
            raise ValueError(f"{len(self.counts)} and {len(other.counts)} groups cannot be added")
        if self.packed_ids and other.packed_ids and self.pool is not other.pool:
            raise ValueError("the blocks belong to different pools")
        if not other.packed_ids:
            return self
        if not self.packed_ids:
            return other
        ids = b"".join(part for pair in zip(self.split(), other.split(), strict=True) for part in pair)
        return KVCacheBlocks.from_ids(
            self.pool, ids, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        )

    def __repr__(self) -> str:
        return f"KVCacheBlocks{self.get_block_ids()}"


@cache
def empty_blocks(num_groups: int) -> KVCacheBlocks:
    """Return the shared instance with no blocks and this number of groups."""
    return KVCacheBlocks.from_ids(None, b"", (0,) * num_groups)
