"""The schedulers' books in C: Python values in, Python values out.

Block ids travel as `bytes` of native int32, so that a prompt of thousands of blocks crosses the border as one copy and
becomes Python integers only where somebody looks. Negative numbers that a method is documented to return are the codes
of ``books.h``; :func:`refusal` turns one into an exception.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, overload

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import held

HASH_BYTES: Final = 32
FULL: Final[int] = lib.SHMS_KV_EFULL
ARGUMENT: Final[int] = lib.SHMS_KV_EARGUMENT
COMPUTED: Final[int] = lib.SHMS_KV_ECOMPUTED
KINDS: Final[dict[str, int]] = {
    "full": lib.SHMS_KV_FULL,
    "window": lib.SHMS_KV_WINDOW,
    "chunk": lib.SHMS_KV_CHUNK,
    "mamba": lib.SHMS_KV_MAMBA,
    "cross": lib.SHMS_KV_CROSS,
}
FREE_ORDERS: Final[dict[str, int]] = {
    "tail": lib.SHMS_BLOCKPOOL_TAIL,
    "uncached_first": lib.SHMS_BLOCKPOOL_UNCACHED_FIRST,
}


def meaning(code: int) -> str:
    """Return the one line that ``books.h`` has for `code`."""
    text: bytes = ffi.string(lib.shms_kv_meaning(code))
    return text.decode()


def refusal(code: int) -> Exception:
    """Return the exception to raise for a negative `code`; nothing was changed when it came."""
    if code == lib.SHMS_KV_EMEMORY:
        return MemoryError(meaning(code))
    return ValueError(meaning(code))


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return block ids as native int32; ValueError for what is no block id at all."""
    try:
        return array("i", ids).tobytes()
    except OverflowError as error:
        raise ValueError(meaning(lib.SHMS_KV_ERANGE)) from error


def unpack_ids(ids: bytes) -> list[int]:
    """Return what :func:`pack_ids` packed."""
    return memoryview(ids).cast("i").tolist()


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


# ---- hashing ----


def sha256_ready() -> bool:
    """Return whether this process has a libcrypto that the C code can use."""
    return bool(lib.shms_blockhash_ready() == 0)


class HashExtras:
    """What tells the blocks of one request from others with the same tokens; encoded once, used for every block.

    `items`: (offset, length, identifier in CBOR), in order of offset; `lora` and `salt` are CBOR or empty.
    """

    __slots__ = ("_c", "_keep", "embeds")

    def __init__(self, lora: bytes = b"", salt: bytes = b"", items: Sequence[tuple[int, int, bytes]] = ()) -> None:
        numbers: list[int] = []
        idents = bytearray()
        for offset, length, ident in items:
            idents += ident
            numbers += (offset, length, len(idents))
        c_items = ffi.new("int64_t[]", numbers)
        c_lora, c_salt, c_idents = (ffi.from_buffer("uint8_t[]", part) for part in (lora, salt, bytes(idents)))
        self._keep: tuple[Any, ...] = (c_items, c_lora, c_salt, c_idents)
        self._c: Any = ffi.new("shms_blockhash_extras *")
        self._c.lora, self._c.lora_len = c_lora, len(lora)
        self._c.salt, self._c.salt_len = c_salt, len(salt)
        self._c.items, self._c.n_items, self._c.idents = c_items, len(items), c_idents
        self.embeds = b""

    def _with_embeds(self, embeds: bytes) -> Any:
        self.embeds = embeds
        if embeds or self._c.n_embeds:
            c_embeds = ffi.from_buffer("uint8_t[]", embeds)
            self._keep = (*self._keep[:4], c_embeds)
            self._c.embeds, self._c.n_embeds = c_embeds, len(embeds) // HASH_BYTES
        return self._c


NO_EXTRAS: Final = HashExtras()


def _token_bytes(tokens: Sequence[int]) -> tuple[bytes, int]:
    n = len(tokens)
    try:
        return struct.pack(f"{n}i", *tokens), 4
    except struct.error:  # a token id beyond 31 bits, or no integer at all: the second attempt tells
        try:
            return struct.pack(f"{n}q", *tokens), 8
        except struct.error as error:
            raise ValueError(f"token ids are integers of at most 64 bits: {error}") from None


def sha256_chain(
    parent: bytes, first: int, block_size: int, tokens: Sequence[int], extras: HashExtras, embeds: bytes = b""
) -> BlockHashes:
    """Return the SHA-256 hashes of the full blocks in `tokens`, which begin at block `first`.

    `parent`: hash of the block before, or the seed hash; `embeds`: 32-byte digests of the first blocks' prompt
    embeddings. RuntimeError without libcrypto (see :func:`sha256_ready`).
    """
    out = BlockHashes()
    raw, width = _token_bytes(tokens)
    if len(parent) != HASH_BYTES:  # that many are copied
        raise refusal(lib.SHMS_KV_EWIDTH)
    rc = lib.shms_blockhash_extend(
        out._c, parent, first, len(tokens) // block_size, block_size, raw, width, extras._with_embeds(embeds)
    )
    if rc == lib.SHMS_KV_ENOLIB:
        raise RuntimeError(meaning(rc))
    if rc:
        raise refusal(rc)
    return out


def digest_chain(
    digest: Callable[[bytes], bytes],
    parent: bytes,
    first: int,
    block_size: int,
    tokens: Sequence[int],
    extras: HashExtras,
    embeds: bytes = b"",
) -> BlockHashes:
    """Like :func:`sha256_chain`, by any `digest`: the messages are still written in C, one call of `digest` a block."""
    raw, width = _token_bytes(tokens)
    n, c_extras = len(tokens) // block_size, extras._with_embeds(embeds)
    room = lib.shms_blockhash_bound(n, block_size, c_extras)
    out, ends = ffi.new("uint8_t[]", room + 1), ffi.new("int64_t[]", n + 1)
    rc = lib.shms_blockhash_bodies(out, room, ends, first, n, block_size, raw, width, c_extras)
    if rc < 0:
        raise refusal(rc)
    bodies: bytes = ffi.buffer(out, rc)[:]
    head = b"\x83" + (b"\x58" + bytes([len(parent)]) if len(parent) > 23 else bytes([0x40 + len(parent)]))
    hashes: list[bytes] = []
    begin = 0
    for end in ffi.unpack(ends, n):
        parent = digest(head + parent + bodies[begin:end])
        hashes.append(parent)
        begin = end
    return BlockHashes(hashes)


# ---- the pool ----


class Pool:
    """The C block pool; see ``blockpool.h``. Methods named like its functions; errors as there, raised."""

    __slots__ = ("_c", "_hold", "n_blocks")

    def __init__(self, n_blocks: int, free_order: int) -> None:
        self._c: Any = ffi.gc(lib.shms_blockpool_new(n_blocks, free_order), lib.shms_blockpool_free)
        if not self._c:
            raise MemoryError(f"no memory for a pool of {n_blocks} blocks")
        self._hold = held(self._c)
        self.n_blocks = n_blocks

    @property
    def n_free(self) -> int:
        """Length of the free queue."""
        n: int = lib.shms_blockpool_n_free(self._c)
        return n

    @property
    def n_keys(self) -> int:
        """Keys that find a block."""
        n: int = lib.shms_blockpool_n_keys(self._c)
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pool takes."""
        n: int = lib.shms_blockpool_nbytes(self._c)
        return n

    def get(self, n: int) -> bytes:
        """Return the ids of n blocks from the head of the queue."""
        out = ffi.new("int32_t[]", max(n, 1) if n <= self.n_blocks else 1)
        rc = lib.shms_blockpool_get(self._c, out, n)
        if rc:
            raise refusal(rc)
        ids: bytes = ffi.buffer(out, 4 * n)[:]
        return ids

    def touch(self, ids: bytes) -> None:
        """Add a reference to each block."""
        rc = lib.shms_blockpool_touch(self._c, ids, len(ids) // 4)
        if rc:
            raise refusal(rc)

    def put(self, ids: bytes) -> None:
        """Take a reference from each block; those at 0 join the queue in this order."""
        rc = lib.shms_blockpool_put(self._c, ids, len(ids) // 4, 0)
        if rc:
            raise refusal(rc)

    def find(self, block_hash: bytes, group: int) -> int:
        """Return the block that got this key first, or 0."""
        raw = exact_bytes(block_hash)
        n: int = lib.shms_blockpool_find(self._c, raw, len(raw), group)
        return n

    def key(self, ids: bytes, hashes: BlockHashes, first: int, factor: int, group: int) -> None:
        """Give blocks `ids`, which are blocks `first`, `first` + 1, … of a request, their keys."""
        rc = lib.shms_blockpool_key(self._c, ids, len(ids) // 4, hashes._c, first, factor, group)
        if rc:
            raise refusal(rc)

    def evict(self, ids: bytes) -> None:
        """Drop the keys of those that have one."""
        rc = lib.shms_blockpool_evict(self._c, ids, len(ids) // 4)
        if rc:
            raise refusal(rc)

    def reset(self) -> bool:
        """Drop all keys, unless a block is in use: then False."""
        return bool(lib.shms_blockpool_reset(self._c) == 0)

    def ref(self, block_id: int) -> int:
        """Return the block's reference count."""
        n: int = lib.shms_blockpool_ref(self._c, block_id)
        if n < 0:
            raise refusal(n)
        return n

    def key_of(self, block_id: int) -> tuple[bytes, int] | None:
        """Return the block's key, or None."""
        out, group = ffi.new("uint8_t[32]"), ffi.new("int32_t *")
        width = lib.shms_blockpool_key_of(self._c, block_id, out, group)
        if width < 0:
            raise refusal(width)
        return (ffi.buffer(out, width)[:], group[0]) if width else None

    def unkeyed(self, ids: bytes) -> list[int]:
        """Return those of `ids` that bear no key and are not the null block, in order."""
        out = ffi.new("int32_t[]", len(ids) // 4 + 1)
        n = lib.shms_blockpool_unkeyed(self._c, out, ids, len(ids) // 4)
        if n < 0:
            raise refusal(n)
        found: list[int] = ffi.unpack(out, n)
        return found

    def free_ids(self) -> list[int]:
        """Return the free queue, head to tail."""
        out = ffi.new("int32_t[]", self.n_blocks)
        found: list[int] = ffi.unpack(out, lib.shms_blockpool_free_ids(self._c, out))
        return found

    def ref_counts(self) -> dict[int, int]:
        """Return the counts above 0, by id."""
        ids, counts = ffi.new("int32_t[]", self.n_blocks), ffi.new("int32_t[]", self.n_blocks)
        n = lib.shms_blockpool_ref_counts(self._c, ids, counts)
        return dict(zip(ffi.unpack(ids, n), ffi.unpack(counts, n), strict=True))

    def keyed_ids(self) -> list[int]:
        """Return the ids of blocks that bear a key, ascending."""
        out = ffi.new("int32_t[]", self.n_blocks)
        found: list[int] = ffi.unpack(out, lib.shms_blockpool_keyed_ids(self._c, out))
        return found

    def log(self, on: bool) -> None:
        """Log removed keys from now on, or stop."""
        lib.shms_blockpool_log(self._c, on)

    def take_log(self) -> bytes:
        """Return and clear the log: 40 bytes a key: 32 of hash, int32 width, int32 group."""
        n = lib.shms_blockpool_log_len(self._c)
        if not n:
            return b""
        records: bytes = ffi.buffer(lib.shms_blockpool_log_data(self._c), 40 * n)[:]
        lib.shms_blockpool_log_clear(self._c)
        return records

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        rc = lib.shms_blockpool_valid(self._c)
        if rc:
            raise RuntimeError(meaning(rc))


# ---- the tables ----


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

    def find(self, hashes: BlockHashes, max_tokens: int) -> int:
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
        hashes: BlockHashes,
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

    def cache(self, handle: int, hashes: BlockHashes, n_tokens: int) -> int:
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
        rc = lib.shms_kvcache_release(self._c, handle)
        if rc:
            raise refusal(rc)

    def table(self, handle: int) -> tuple[bytes, tuple[int, ...]]:
        """Return the request's blocks of all groups, and how many each group has."""
        rc = lib.shms_kvcache_table(self._c, handle)
        if rc:
            raise refusal(rc)
        return self.ids(), self.counts()

    def common(self, handle: int) -> list[int]:
        """Return, for each group, the leading blocks that all requests share."""
        rc = lib.shms_kvcache_common(self._c, handle)
        if rc:
            raise refusal(rc)
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
        rc = lib.shms_kvcache_valid(self._c)
        if rc:
            raise RuntimeError(meaning(rc))
