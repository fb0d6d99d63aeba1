"""The block tables of all requests in C; see ``kv/kvcache.h``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.blockpool import Pool
from shmstore.bindings.handles import held
from shmstore.bindings.hashlist import HashList
from shmstore.bindings.kv_errors import ARGUMENT, check, check_valid

KINDS: Final[dict[str, int]] = {
    "full": lib.SHMS_KV_FULL,
    "window": lib.SHMS_KV_WINDOW,
    "chunk": lib.SHMS_KV_CHUNK,
    "mamba": lib.SHMS_KV_MAMBA,
    "cross": lib.SHMS_KV_CROSS,
}


class Tables:
    """The C block tables of all requests over one :class:`Pool`; see ``kvcache.h``.

    `groups`: (kind, block size, parameter) of each. Answers of the last call: :meth:`ids`, :meth:`counts`,
    :meth:`stored`.
    """

    __slots__ = ("_c", "_hold", "_pool", "n_groups")

    def __init__(
        self,
        pool: Pool,
        groups: Sequence[tuple[int, int, int]],
        hash_block_size: int,
        alignment: int,
        max_model_len: int,
        caching: bool,
        eagle: bool,
    ) -> None:
        kinds, sizes, params = (list(column) for column in zip(*groups, strict=True))
        flags = (lib.SHMS_KV_CACHING if caching else 0) | (lib.SHMS_KV_EAGLE if eagle else 0)
        self._pool = pool  # borrowed by the C side
        self._c: Any = ffi.gc(
            lib.shms_kvcache_new(
                pool._c, len(groups), kinds, sizes, params, hash_block_size, alignment, max_model_len, flags
            ),
            lib.shms_kvcache_free,
        )
        if not self._c:
            raise MemoryError("no memory for block tables")
        self._hold = held(self._c)
        self.n_groups = len(groups)

    def find(self, hashes: HashList, max_tokens: int) -> int:
        """Return the tokens of the longest cached prefix, or a negative code."""
        try:
            n: int = lib.shms_kvcache_find(self._c, hashes._c, max_tokens)
        except OverflowError:  # no int64
            return ARGUMENT
        return n

    def allocate(
        self,
        handle: int,
        seen: int,
        computed: int,
        n_new: int,
        lookahead: int,
        n_tokens: int,
        n_encoder: int,
        delay: bool,
        hashes: HashList,
        ids: bytes,
        counts: tuple[int, ...] | None,
    ) -> int:
        """Make room for new tokens; return the handle, or a negative code (FULL: too few free blocks)."""
        try:
            got: int = lib.shms_kvcache_allocate(
                self._c,
                handle,
                seen,
                computed,
                n_new,
                lookahead,
                n_tokens,
                n_encoder,
                delay,
                hashes._c,
                ids,
                ffi.NULL if counts is None else counts,
            )
        except OverflowError:  # no int64
            return ARGUMENT
        return got

    def cache(self, handle: int, hashes: HashList, n_tokens: int) -> int:
        """Give the blocks of the first `n_tokens` their keys; return 0 or a negative code."""
        rc: int = lib.shms_kvcache_cache(self._c, handle, hashes._c, n_tokens)
        return rc

    def newest(self) -> int:
        """Return the handle of the request that was begun last, -1 where it has ended."""
        handle: int = lib.shms_kvcache_newest(self._c)
        return handle

    def has(self, handle: int) -> bool:
        """Return whether the handle has not ended; the last answer is gone then."""
        return bool(lib.shms_kvcache_common(self._c, handle) == 0)

    def release(self, handle: int) -> None:
        """Free the request's blocks and end its handle."""
        check(lib.shms_kvcache_release(self._c, handle))

    def table(self, handle: int) -> tuple[bytes, tuple[int, ...]]:
        """Return the request's blocks of all groups, and how many each group has."""
        check(lib.shms_kvcache_table(self._c, handle))
        return self.ids(), self.counts()

    def common(self, handle: int) -> list[int]:
        """Return, for each group, the leading blocks that all requests share."""
        check(lib.shms_kvcache_common(self._c, handle))
        return list(self.counts())

    def quiet(self, handle: int) -> int:
        """Return up to which sum of tokens an allocate without computed blocks changes nothing."""
        n: int = lib.shms_kvcache_quiet(self._c, handle)
        return n

    def ids(self) -> bytes:
        """Return the blocks of the last answer, group after group."""
        n = lib.shms_kvcache_n_ids(self._c)
        if not n:
            return b""
        got: bytes = ffi.buffer(lib.shms_kvcache_ids(self._c), 4 * n)[:]
        return got

    def counts(self) -> tuple[int, ...]:
        """Return how many blocks of the last answer each group has."""
        return tuple(ffi.unpack(lib.shms_kvcache_counts(self._c), self.n_groups))

    def stored(self) -> list[tuple[int, int, int]]:
        """Return (group, first, end) for the blocks that the last allocate or cache gave keys to."""
        flat = ffi.unpack(lib.shms_kvcache_stored(self._c), 2 * self.n_groups)
        return [(g, flat[2 * g], flat[2 * g + 1]) for g in range(self.n_groups) if flat[2 * g] < flat[2 * g + 1]]

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant, the pool's too."""
        check_valid(lib.shms_kvcache_valid(self._c))
