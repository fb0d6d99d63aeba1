"""KV-cache events: they tell a router or an index in another process what this cache holds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import index
from typing import Any

import msgpack

from shmstore.errors import shown

__all__ = ["MEDIUM_GPU", "AllBlocksCleared", "BlockRemoved", "BlockStored", "EventHash", "KVCacheEvent"]

MEDIUM_GPU = "GPU"
EventHash = bytes | int
"""A block hash as events show it: its bytes, or its low 64 bits read big-endian."""


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """Base of the events. The wire form is a msgpack array of the name and the fields in order."""

    def to_list(self) -> list[Any]:
        """Return the name and the fields in order."""
        return [type(self).__name__, *(getattr(self, field.name) for field in fields(self))]

    def to_msgpack(self) -> bytes:
        """Return the wire form."""
        # A request of another class may have tokens of numpy's or torch's integer types: `index` converts them.
        packed: bytes = msgpack.packb(self.to_list(), use_bin_type=True, default=index)
        return packed

    @staticmethod
    def from_msgpack(data: bytes) -> KVCacheEvent:
        """Return the event whose wire form is `data`; ValueError for anything else."""
        try:
            name, *values = msgpack.unpackb(data, raw=False)
            event: KVCacheEvent = _BY_NAME[name](*values)
            return event
        except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not a KV-cache event: {shown(data)}") from error


@dataclass(frozen=True, slots=True)
class BlockStored(KVCacheEvent):
    """Consecutive blocks of one request got their keys: look-ups find their contents from now on."""

    block_hashes: list[EventHash]
    """Hash of each block, in order."""
    parent_block_hash: EventHash | None
    """Hash of the block before the first; None at the start of a prompt."""
    token_ids: list[int]
    """The tokens in these blocks."""
    block_size: int
    """Tokens per block."""
    lora_id: int | None
    """The adapter's number, or None."""
    medium: str | None
    """Where the blocks are: "GPU"."""
    group_id: int | None = None
    """The group of layers to which the blocks belong."""


@dataclass(frozen=True, slots=True)
class BlockRemoved(KVCacheEvent):
    """These blocks lost their keys: look-ups do not find their contents any more."""

    block_hashes: list[EventHash]
    """Hash of each block."""
    medium: str | None
    """Where the blocks were: "GPU"."""
    group_id: int | None = None
    """The group of layers to which the blocks belonged."""


@dataclass(frozen=True, slots=True)
class AllBlocksCleared(KVCacheEvent):
    """All blocks lost their keys: look-ups find nothing any more."""


_BY_NAME: dict[str, Any] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}
