"""The hash chain over the blocks of a request in C; see ``kv/blockhash.h``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.hashlist import HASH_BYTES, BlockHashes
from shmstore.bindings.kv_errors import check, refusal


def sha256_ready() -> bool:
    """Return whether this process has a libcrypto that the C code can use."""
    return bool(lib.shms_blockhash_ready() == 0)


class HashExtras:
    """What distinguishes the blocks of one request from others with the same tokens, encoded once.

    `items` are (offset, length, identifier in CBOR) in order of offset. `lora` and `salt` are CBOR of the whole key, or
    empty. `embeds` are 32-byte digests of the first blocks' prompt embeddings. `tagged` makes an array of each item and
    digest, with its kind first.
    """

    __slots__ = ("_c", "_keep")

    def __init__(
        self,
        lora: bytes = b"",
        salt: bytes = b"",
        items: Sequence[tuple[int, int, bytes]] = (),
        embeds: bytes = b"",
        *,
        tagged: bool = False,
    ) -> None:
        numbers: list[int] = []
        idents = bytearray()
        for offset, length, ident in items:
            idents += ident
            numbers += (offset, length, len(idents))
        c_items = ffi.new("int64_t[]", numbers)
        parts = [ffi.from_buffer("uint8_t[]", part) for part in (lora, salt, bytes(idents), embeds)]
        self._keep: tuple[Any, ...] = (c_items, *parts)
        self._c: Any = ffi.new("shms_blockhash_extras *")
        self._c.items, self._c.n_items, self._c.tagged = c_items, len(items), tagged
        self._c.lora, self._c.salt, self._c.idents, self._c.embeds = parts
        self._c.lora_len, self._c.salt_len, self._c.n_embeds = len(lora), len(salt), len(embeds) // HASH_BYTES


NO_EXTRAS: Final = HashExtras()


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"{len(tokens)}q", *tokens)
    except struct.error as error:
        raise ValueError(f"token ids are integers of at most 64 bits: {error}") from None


def sha256_chain(
    out: BlockHashes, parent: bytes, first: int, block_size: int, tokens: Sequence[int], extras: HashExtras
) -> None:
    """Append to `out` the SHA-256 hashes of the full blocks in `tokens`, which begin at block `first`.

    `parent` is the hash of the block before, or the seed hash. It needs libcrypto; see `sha256_ready`.
    """
    raw = _token_bytes(tokens)
    if len(parent) != HASH_BYTES:  # C copies this many
        raise refusal(lib.SHMS_KV_EWIDTH)
    n = len(tokens) // block_size
    check(lib.shms_blockhash_extend(out._c, parent, first, n, block_size, raw, extras._c))


def digest_chain(
    digest: Callable[[bytes], bytes], parent: bytes, first: int, block_size: int, tokens: Sequence[int],
    extras: HashExtras,
) -> list[bytes]:  # fmt: skip
    """Return the hashes by any `digest`; C writes the messages, and `digest` is called once for each block."""
    raw = _token_bytes(tokens)
    n, c_extras = len(tokens) // block_size, extras._c
    room = check(lib.shms_blockhash_bound(n, block_size, c_extras))
    out, ends = ffi.new("uint8_t[]", room + 1), ffi.new("int64_t[]", n + 1)
    rc = check(lib.shms_blockhash_bodies(out, room, ends, first, n, block_size, raw, c_extras))
    bodies: bytes = ffi.buffer(out, rc)[:]
    head = b"\x83" + (b"\x58" + bytes([len(parent)]) if len(parent) > 23 else bytes([0x40 + len(parent)]))
    hashes: list[bytes] = []
    begin = 0
    for end in ffi.unpack(ends, n):
        parent = digest(head + parent + bodies[begin:end])
        hashes.append(parent)
        begin = end
    return hashes
