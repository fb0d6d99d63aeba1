"""The chain of hashes that name the contents of full blocks; it is the same on every host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from shmstore.bindings import blockhash
from shmstore.bindings.blockhash import NO_EXTRAS, HashExtras
from shmstore.bindings.hashlist import HASH_BYTES, BlockHashes, exact_bytes
from shmstore.errors import shown
from shmstore.scheduler.checks import INT32_LIMIT, check_placeholders, check_range
from shmstore.scheduler.extra_keys import digest_of_rows, lora_of


def _head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << 8 * size:
            return bytes([major | code]) + value.to_bytes(size, "big")
    raise ValueError(f"an integer of more than 64 bits has no canonical CBOR here: {value}")


def encode_cbor(value: Any) -> bytes:
    """Return canonical CBOR of a str, bytes, int, None, or a list or tuple of these; TypeError for anything else."""
    if value is None:
        return b"\xf6"
    if isinstance(value, str):
        text = value.encode()
        return _head(0x60, len(text)) + text
    if isinstance(value, bytes):
        return _head(0x40, len(value)) + value
    if isinstance(value, int) and not isinstance(value, bool):
        return _head(0x00, value) if value >= 0 else _head(0x20, -1 - value)
    if isinstance(value, list | tuple):
        return _head(0x80, len(value)) + b"".join(map(encode_cbor, value))
    raise TypeError(f"a block key holds str, bytes and int only, not {type(value).__name__}")


def _no_text(name: str, error: UnicodeEncodeError) -> ValueError:
    return ValueError(f"{name} must be encodable in UTF-8: {error.reason} (position {error.start})")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _xxh3() -> Callable[[bytes], bytes]:
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise ImportError('algorithm="xxh3_cbor" needs the package xxhash: pip install xxhash') from error
    return xxh3_128_digest  # type: ignore[no-any-return, unused-ignore]


class BlockHasher:
    """Hashes the full blocks of requests; ``hasher(request)`` returns those not yet in ``request.block_hashes``.

    hash(block i) = H(CBOR of [hash of block i-1, [token ids], null or [extra keys]]), with the seed hash H(CBOR of
    `seed`) before the first. The extra keys are, in this order:

    * ["lora", name, path or null]
    * ["mm", identifier, relative offset] for each multi-modal item that overlaps the block
    * ["salt", the cache salt], in the first block only
    * ["embeds", a digest of the block's prompt embeddings]

    With `extra_keys` "flat" the key is one array of the values alone, without kinds and without the path. Then a LoRA
    name and a salt of the same text give the same hash, so use it only to get the hashes of an earlier version.
    Processes and hosts with the same block size, algorithm, seed and form of extra keys get the same hashes.

    `algorithm` is "sha256_cbor", or "xxh3_cbor" (XXH3-128; ImportError without the package xxhash). If the system has
    libcrypto, one C call makes all SHA-256 hashes of a request. ValueError for another word, or a `block_size` below 1
    or beyond an int32.
    """

    def __init__(
        self,
        block_size: int,
        algorithm: str = "sha256_cbor",
        seed: str = "0",
        *,
        extra_keys: str = "tagged",
    ) -> None:
        check_range(1, INT32_LIMIT, block_size=block_size)
        if extra_keys not in ("tagged", "flat"):
            raise ValueError(f'extra_keys must be "tagged" or "flat", not {shown(extra_keys)}')
        if algorithm == "sha256_cbor":
            self._digest: Callable[[bytes], bytes] = _sha256
        elif algorithm == "xxh3_cbor":
            self._digest = _xxh3()
        else:
            raise ValueError(f'unknown algorithm {shown(algorithm)}: it is "sha256_cbor" or "xxh3_cbor"')
        self.block_size = block_size
        self.algorithm = algorithm
        self.seed = seed
        self.extra_keys = extra_keys
        try:
            self.seed_hash: bytes = self._digest(encode_cbor(seed))
        except UnicodeEncodeError as error:
            raise _no_text("seed", error) from None
        self._in_c = algorithm == "sha256_cbor" and blockhash.sha256_ready()

    def __call__(self, request: Any) -> Sequence[bytes]:
        """Return the hashes of the full blocks of `request` that its `block_hashes` lacks; change nothing.

        ValueError for items that are out of order (a key has their positions), for negative offsets and lengths, and
        for a name or a salt that UTF-8 cannot encode.
        """
        known = request.block_hashes
        first, size = len(known), self.block_size
        n = request.num_tokens // size - first
        if n <= 0:
            return []
        parent = exact_bytes(known[first - 1]) if first else self.seed_hash
        tokens = request.all_token_ids[first * size : (first + n) * size]
        try:
            extras = self._extras_of(request, first * size, (first + n) * size)
        except UnicodeEncodeError as error:
            lora, _, path = lora_of(request)
            given = {"lora_name": lora, "lora_path": path, "cache_salt": getattr(request, "cache_salt", None)}
            name = next((name for name, text in given.items() if text == error.object), "the identifier of an item")
            raise _no_text(name, error) from None
        if self._in_c and len(parent) == HASH_BYTES:  # C reads that many bytes of the parent
            hashes = BlockHashes()
            blockhash.sha256_chain(hashes, parent, first, size, tokens, extras)
            return hashes
        return blockhash.digest_chain(self._digest, parent, first, size, tokens, extras)

    def _extras_of(self, request: Any, start: int, stop: int) -> HashExtras:
        """Return the extra keys of tokens start to stop, without items that lie outside of them."""
        (lora, _, path), salt = lora_of(request), getattr(request, "cache_salt", None)
        features, embeds = getattr(request, "mm_features", None) or (), getattr(request, "prompt_embeds", None)
        if not features and lora is None and salt is None and embeds is None:
            return NO_EXTRAS
        check_placeholders(features)
        places = ((feature, feature.mm_position.offset, feature.mm_position.length) for feature in features)
        items = [(at, n, encode_cbor(feature.identifier)) for feature, at, n in places if at < stop and at + n > start]
        rows = 0 if embeds is None else min(stop, len(embeds))
        digests = [
            digest_of_rows(embeds, s, min(s + self.block_size, rows)) for s in range(start, rows, self.block_size)
        ]
        tagged = self.extra_keys == "tagged"
        lora_key, salt_key = (["lora", lora, path], ["salt", salt]) if tagged else (lora, salt)
        return HashExtras(
            b"" if lora is None else encode_cbor(lora_key), b"" if salt is None else encode_cbor(salt_key), items,
            b"".join(digests), tagged=tagged,
        )  # fmt: skip
