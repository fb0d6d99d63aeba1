"""The block tables of all requests in C; see ``kv/kvcache.h``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.blockpool import Pool
from shmstore.bindings.hashlist import BlockHashes
from shmstore.bindings.hidden import held
from shmstore.bindings.kv_errors import FULL, check, check_valid, refusal

KINDS: Final[dict[str, int]] = {
    "full": lib.SHMS_KV_FULL,
    "window": lib.SHMS_KV_WINDOW,
    "chunk": lib.SHMS_KV_CHUNK,
    "mamba": lib.SHMS_KV_MAMBA,
    "cross": lib.SHMS_KV_CROSS,
}
_REQUEST = ffi.typeof("shms_kv_request *")
_new, _buffer, _unpack, _NULL = ffi.new, ffi.buffer, ffi.unpack, ffi.NULL
_STEP = [
    "passed", "computed", "external", "n_new", "lookahead", "n_tokens", "n_encoder", "whole", "reserved", "headroom",
]  # fmt: skip
"""The numbers of ``shms_kv_step`` in the order in which `Tables.allocate` packs them."""
_put_step = struct.Struct(f"{len(_STEP)}q").pack_into  # a quarter of what cffi takes to write each by its name
_find, _allocate, _release = lib.shms_kvcache_find, lib.shms_kvcache_allocate, lib.shms_kvcache_release


class Tables:
    """The block tables of all requests over one :class:`Pool`, by request id.

    `groups` are (kind, block size, parameter, EAGLE) of each. `ids`, `counts` and `stored` return the answer of the
    last call.

    A change is one call into C, which writes state and answer into the request's record. The record is in `_requests`
    before the call, so an interrupted change is done or not begun. A record without tables, which it may leave, does
    not count.
    """

    __slots__ = (
        "_answer", "_c", "_found", "_hold", "_numbers", "_pool", "_requests", "_step", "n_groups", "settled",
    )  # fmt: skip

    def __init__(
        self, pool: Pool, groups: Sequence[tuple[int, int, int, bool]], hash_block_size: int, alignment: int,
        max_model_len: int, max_in_flight: int, caching: bool, ahead: bool, interval: int | None = None,
    ) -> None:  # fmt: skip
        kinds = [kind | (lib.SHMS_KV_EAGLE if eagle else 0) for kind, _, _, eagle in groups]
        sizes, params = ([group[column] for group in groups] for column in (1, 2))
        flags = (lib.SHMS_KV_CACHING if caching else 0) | (lib.SHMS_KV_AHEAD if ahead else 0)
        self._pool = pool  # borrowed by the C side
        interval = -1 if interval is None else interval
        numbers = hash_block_size, alignment, max_model_len, max_in_flight, interval, flags
        self._c: Any = ffi.gc(
            lib.shms_kvcache_new(pool._c, len(groups), kinds, sizes, params, *numbers), lib.shms_kvcache_free
        )
        if not self._c:
            raise MemoryError("no memory for block tables")
        self._hold = held(self._c)
        self.n_groups = len(groups)
        self._requests: dict[str, Any] = {}
        self._answer = self._found = _new(_REQUEST)
        self._step: Any = _new("shms_kv_step *")
        self._numbers = _buffer(self._step)
        self.settled: dict[str, int] = {}
        """The sum of tokens up to which a request's next allocate does nothing; a lower number is only slower."""

    def __contains__(self, request_id: str) -> bool:
        record = self._requests.get(request_id)
        return record is not None and record.table != 0

    def find(self, hashes: BlockHashes, max_tokens: int) -> int:
        """Return the number of tokens in the longest cached prefix."""
        record = self._answer = self._found
        n: int = _find(self._c, record, hashes._c, max_tokens)
        if n < 0:
            raise refusal(n)
        return n

    @property
    def longest(self) -> int:
        """The tokens of the longest prefix that one type of group had in the last `find`."""
        return self._found.longest

    def allocate(
        self, request_id: str, hashes: BlockHashes, ids: bytes, counts: tuple[int, ...] | None,
        boundaries: Sequence[int] = (), /, *, passed: int, computed: int, external: int, n_new: int, lookahead: int,
        n_tokens: int, n_encoder: int, whole: int, reserved: int, headroom: int,
    ) -> bytes | None:  # fmt: skip
        """Make room for a step of a request and return the blocks added; None if too few are free.

        `ids` and `counts` are the blocks found for a new request. The numbers are those of ``shms_kv_step``; ValueError
        for one that does not fit an int64.
        """
        try:
            _put_step(
                self._numbers, 0,
                passed, computed, external, n_new, lookahead, n_tokens, n_encoder, whole, reserved, headroom,
            )  # fmt: skip
        except struct.error:
            raise refusal(lib.SHMS_KV_EARGUMENT) from None
        record: Any = self._requests.get(request_id)
        if record is None:
            record = self._requests[request_id] = _new(_REQUEST)
        if boundaries:
            record.boundaries = boundaries
        try:
            n = _allocate(self._c, record, self._step, hashes._c, ids, _NULL if counts is None else counts)
        finally:
            if not record.table:
                self._requests.pop(request_id, None)
        if n == FULL:
            return None
        if n < 0:
            raise refusal(n, record.wanted, record.there)
        self.settled[request_id] = record.settled
        self._answer = record
        return _buffer(record.ids, 4 * n)[:] if n else b""  # `ids`, without the call

    def cache(self, request_id: str, hashes: BlockHashes, n_tokens: int, boundaries: Sequence[int] = ()) -> None:
        """Give keys to the blocks of the first `n_tokens` of a request, which has tables."""
        record = self._answer = self._requests[request_id]
        if boundaries:
            record.boundaries = boundaries
        rc = lib.shms_kvcache_cache(self._c, record, hashes._c, n_tokens)
        if rc:
            raise refusal(rc, record.wanted, record.there)
        self.settled[request_id] = record.settled

    def pop(self, request_id: str) -> bytes:
        """Drop the request's tables, and return the blocks of all groups with their references."""
        ids, _ = self.table(request_id)
        self._pool.touch(ids)
        self.release(request_id)
        return ids

    def release(self, request_id: str) -> None:
        """Drop the request's tables, if it has any, and their references."""
        record = self._requests.get(request_id)
        if record is None:
            return
        self.settled.pop(request_id, None)
        check(_release(self._c, record))
        self._requests.pop(request_id, None)

    def cached(self, request_id: str) -> int:
        """Return the number of leading tokens whose blocks have been given keys in all groups."""
        return lib.shms_kvcache_cached(self._c, self._requests[request_id]) if request_id in self else 0

    def table(self, request_id: str) -> tuple[bytes, tuple[int, ...]]:
        """Return the request's blocks of all groups, and the number in each group."""
        return (self.ids(), self.counts()) if self._ask(lib.shms_kvcache_table, request_id) else (b"", ())

    def common(self, request_id: str) -> list[int]:
        """Return for each group the number of leading blocks that all requests share."""
        return list(self.counts()) if self._ask(lib.shms_kvcache_common, request_id) else [0] * self.n_groups

    def _ask(self, question: Any, request_id: str) -> bool:
        if request_id not in self:
            return False
        self._answer = self._requests[request_id]
        check(question(self._c, self._answer))
        return True

    def ids(self) -> bytes:
        """Return the blocks of the last answer, group after group."""
        record = self._answer
        n = record.n_ids
        return _buffer(record.ids, 4 * n)[:] if n else b""

    def counts(self) -> tuple[int, ...]:
        """Return the number of blocks of each group in the last answer."""
        return tuple(_unpack(self._answer.counts, self.n_groups))

    def stored(self) -> list[tuple[int, int, int]]:
        """Return (group, first, end) of the blocks to which the last allocate or cache gave keys."""
        flat = _unpack(self._answer.stored, 2 * self.n_groups)
        return [(g, flat[2 * g], flat[2 * g + 1]) for g in range(self.n_groups) if flat[2 * g] < flat[2 * g + 1]]

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant, also of the pool."""
        check_valid(lib.shms_kvcache_valid(self._c))
