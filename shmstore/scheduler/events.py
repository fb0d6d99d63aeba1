"""KV-cache events: they tell a router or an index in another process what this cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from operator import index
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack

from shmstore.errors import shown

MEDIUM_GPU = "GPU"
T = TypeVar("T")
EventHash = bytes | int
"""A block hash as events show it: its bytes, or its low 64 bits read big-endian."""


@dataclass(frozen=True, slots=True)
class KVCacheEvent:
    """Base of the events. The wire form is a msgpack map with `type` and the fields, or an array for older routers."""

    def to_dict(self) -> dict[str, Any]:
        """Return the map: `type`, and each field by its name, but `group_id` as "group_idx"."""
        named = {_WIRE_NAMES.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}
        return {"type": type(self).__name__, **named}

    def to_list(self) -> list[Any]:
        """Return the array: the name, and in order the fields up to `group_id`."""
        return [type(self).__name__, *(getattr(self, field.name) for field in fields(self) if not field.kw_only)]

    def to_msgpack(self, format: str = "map") -> bytes:
        """Return the wire form; with `format` "array" that of vLLM 0.13. ValueError for another word."""
        return _packed(_form(format)(self))

    @staticmethod
    def from_msgpack(data: bytes) -> KVCacheEvent:
        """Return the event whose wire form, of either format, is `data`; ValueError for anything else."""
        try:
            return _event(msgpack.unpackb(data, raw=False))
        except _DECODE_ERRORS as error:
            raise ValueError(f"not a KV-cache event: {shown(data)}") from error


@dataclass(frozen=True, slots=True)
class BlockStored(KVCacheEvent):
    """Consecutive blocks of one request got their keys: look-ups find their contents from now on."""

    block_hashes: list[EventHash]
    """Hash of each block, in order."""
    parent_block_hash: EventHash | None
    """Hash of the block before the first; None at the start of a prompt.

    With `retention_interval` windows report only some blocks, so the parent may never have been reported.
    """
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    """Where the blocks are: "GPU"."""
    group_id: int | None = None
    """The group of layers to which the blocks belong."""
    _: KW_ONLY
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """What is in the hash of each block besides tokens and parent, or None for a block without any.

    In this order: the LoRA name, [identifier, offset in the block] of each item, the cache salt, and the digest of the
    prompt embeddings.
    """
    kv_cache_spec_kind: str | None = None
    """The kind of the group's layers: "full_attention", "sliding_window" and so on."""
    kv_cache_spec_sliding_window: int | None = None
    """The tokens in their window, or None."""


@dataclass(frozen=True, slots=True)
class BlockRemoved(KVCacheEvent):
    """These blocks lost their keys. Another block may have the same key, and then look-ups still find the contents.

    So a router counts: `BlockStored` came once for each block of a key, and `BlockRemoved` comes once for each.
    """

    block_hashes: list[EventHash]
    medium: str | None
    group_id: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared(KVCacheEvent):
    """All blocks lost their keys: look-ups find nothing any more."""


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events as an engine publishes them. The wire form is a msgpack array of these fields."""

    ts: float
    """When they were taken, in seconds since 1970."""
    events: list[KVCacheEvent]
    """The events, oldest first."""
    data_parallel_rank: int | None = None
    """The rank of the engine among its data-parallel replicas."""

    def to_msgpack(self, format: str = "map") -> bytes:
        """Return the wire form; `format` is that of the events, as in `KVCacheEvent.to_msgpack`."""
        return _packed([self.ts, list(map(_form(format), self.events)), self.data_parallel_rank])

    @staticmethod
    def from_msgpack(data: bytes) -> KVEventBatch:
        """Return the batch whose wire form, with events of either format, is `data`; ValueError for anything else."""
        try:
            ts, events, *rank = msgpack.unpackb(data, raw=False)
            if not isinstance(events, list):
                raise TypeError("the events must be a list")
            return _checked(KVEventBatch(ts, [_event(form) for form in events], *rank))
        except _DECODE_ERRORS as error:
            raise ValueError(f"not a batch of KV-cache events: {shown(data)}") from error


_BY_NAME: dict[str, Any] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}
_WIRE_NAMES = {"group_id": "group_idx"}
_DECODE_ERRORS = (KeyError, TypeError, ValueError, msgpack.UnpackException)


def _form(format: str) -> Callable[[KVCacheEvent], Any]:
    if format == "map":
        return KVCacheEvent.to_dict
    if format == "array":
        return KVCacheEvent.to_list
    raise ValueError(f'format must be "map" or "array", not {shown(format)}')


def _packed(form: Any) -> bytes:
    # A request of another class may have tokens of numpy's or torch's integer types: `index` converts them.
    packed: bytes = msgpack.packb(form, use_bin_type=True, default=index)
    return packed


class _Kind:
    """What an annotation says of a value that msgpack has made: its types, or the kind of the items of a list."""

    def __init__(self, annotation: Any) -> None:
        parts = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
        more = {int: bool, float: int}  # which are numbers, too
        self.types = {*parts, *(more[part] for part in parts if part in more)}
        self.items = next((_Kind(*get_args(part)) for part in parts if get_origin(part) is list), None)

    def takes(self, value: Any) -> bool:
        """Return whether `value` is of this kind."""
        if type(value) in self.types or Any in self.types:
            return True
        if self.items is None or type(value) is not list:
            return False
        return self.items.types.issuperset(map(type, value)) or all(map(self.items.takes, value))


def _checked(event: T) -> T:
    """Return the same; TypeError if a field has a value of another type than its annotation says."""
    for name, kind in _KINDS[type(event)]:
        if not kind.takes(getattr(event, name)):
            raise TypeError(f"{name} has a value of another type")
    return event


def _event(form: Any) -> KVCacheEvent:
    event: KVCacheEvent
    if isinstance(form, dict):  # keys that other engines have besides are not looked at
        cls = _BY_NAME[form["type"]]
        wire = {field.name: _WIRE_NAMES.get(field.name, field.name) for field in fields(cls)}
        event = cls(**{name: form[key] for name, key in wire.items() if key in form})
    else:
        name, *values = form
        event = _BY_NAME[name](*values)
    return _checked(event)


_KINDS: dict[type, list[tuple[str, _Kind]]] = {
    cls: [(field.name, _Kind(get_type_hints(cls)[field.name])) for field in fields(cls) if field.name != "events"]
    for cls in (*_BY_NAME.values(), KVEventBatch)
}
