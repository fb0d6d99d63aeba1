"""The block pool in C; see ``kv/blockpool.h``.

Block ids travel as `bytes` of native int32. So thousands of blocks are one copy, and become Python integers only when
they are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Final

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.hashlist import HASH_BYTES, BlockHashes, exact_bytes
from shmstore.bindings.hidden import held
from shmstore.bindings.kv_errors import FULL, MEANINGS, check, check_valid

FREE_ORDERS: Final[dict[str, int]] = {
    "tail": lib.SHMS_BLOCKPOOL_TAIL,
    "uncached_first": lib.SHMS_BLOCKPOOL_UNCACHED_FIRST,
}
LOG_BYTES: Final = 40


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return block ids as native int32; ValueError for a number that cannot be a block id."""
    try:
        return array("i", ids).tobytes()
    except OverflowError as error:
        raise ValueError(MEANINGS[lib.SHMS_KV_ERANGE]) from error


def unpack_ids(ids: bytes) -> list[int]:
    """Return the ids that `pack_ids` has packed."""
    return memoryview(ids).cast("i").tolist()


class Pool:
    """The C block pool; its methods have the names and errors of the C functions."""

    __slots__ = ("_c", "_hold", "_n", "n_blocks")

    def __init__(self, n_blocks: int, free_order: int) -> None:
        self._c: Any = ffi.gc(lib.shms_blockpool_new(n_blocks, free_order), lib.shms_blockpool_free)
        if not self._c:
            raise MemoryError(f"no memory for a pool of {n_blocks} blocks")
        self._hold = held(self._c)
        self._n = ffi.new("int64_t *")
        self.n_blocks = n_blocks

    @property
    def n_free(self) -> int:
        """Length of the free queue."""
        return lib.shms_blockpool_n_free(self._c)

    @property
    def n_keys(self) -> int:
        """Number of keys that find a block."""
        return lib.shms_blockpool_n_keys(self._c)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pool takes."""
        return lib.shms_blockpool_nbytes(self._c)

    def get(self, n: int) -> bytes | None:
        """Return the ids of n blocks from the head of the queue; None if it is shorter."""
        out = ffi.new("int32_t[]", max(n, 1) if n <= self.n_blocks else 1)
        rc = lib.shms_blockpool_get(self._c, out, n)
        if rc == FULL:
            return None
        check(rc)
        return ffi.buffer(out, 4 * n)[:]

    def touch(self, ids: bytes) -> None:
        """Add a reference to each block."""
        check(lib.shms_blockpool_touch(self._c, ids, len(ids) // 4))

    def put(self, ids: bytes) -> None:
        """Remove a reference from each block; blocks at 0 join the queue in this order."""
        check(lib.shms_blockpool_put(self._c, ids, len(ids) // 4, 0))

    def find(self, block_hash: bytes, group: int) -> int:
        """Return the block that got this key first, or 0."""
        raw = exact_bytes(block_hash)
        return check(lib.shms_blockpool_find(self._c, raw.ljust(HASH_BYTES, b"\0"), len(raw), group))

    def key(self, ids: bytes, hashes: BlockHashes, first: int, factor: int, group: int) -> None:
        """Give blocks `ids`, which are blocks `first`, `first` + 1, … of a request, their keys."""
        check(lib.shms_blockpool_key(self._c, ids, len(ids) // 4, hashes._c, first, factor, group))

    def evict(self, ids: bytes) -> None:
        """Drop the keys of these blocks, if they have one."""
        check(lib.shms_blockpool_evict(self._c, ids, len(ids) // 4))

    def reset(self) -> bool:
        """Drop all keys and return True; do nothing and return False if a block is in use."""
        return bool(lib.shms_blockpool_reset(self._c) == 0)

    def ref(self, block_id: int) -> int:
        """Return the block's reference count."""
        return check(lib.shms_blockpool_ref(self._c, block_id))

    def key_of(self, block_id: int) -> tuple[bytes, int] | None:
        """Return the block's key, or None if it has no key."""
        out, group = ffi.new("uint8_t[32]"), ffi.new("int32_t *")
        width = check(lib.shms_blockpool_key_of(self._c, block_id, out, group))
        return (ffi.buffer(out, width)[:], group[0]) if width else None

    def keyed(self, ids: bytes) -> list[int]:
        """Return those of `ids` that have a key, in order."""
        out = ffi.new("int32_t[]", len(ids) // 4 + 1)
        return ffi.unpack(out, check(lib.shms_blockpool_keyed(self._c, out, ids, len(ids) // 4)))

    def free_ids(self) -> list[int]:
        """Return the free queue, head to tail."""
        out = ffi.new("int32_t[]", self.n_blocks)
        return ffi.unpack(out, lib.shms_blockpool_free_ids(self._c, out))

    def log(self, on: bool) -> None:
        """Log removed keys from now on, or stop."""
        lib.shms_blockpool_log(self._c, on)

    @property
    def log_len(self) -> int:
        """Bytes in the log."""
        return LOG_BYTES * lib.shms_blockpool_log_len(self._c)

    def take_log(self) -> bytes:
        """Return and clear the log: for each key 32 bytes of hash, int32 width, int32 group."""
        records: Any = lib.shms_blockpool_log_take(self._c, self._n)
        n = self._n[0]
        return ffi.buffer(records, LOG_BYTES * n)[:] if n else b""

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        check_valid(lib.shms_blockpool_valid(self._c))
