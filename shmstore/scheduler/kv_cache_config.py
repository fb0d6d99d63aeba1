"""What the layers of a model keep in a KV cache, and how they share one pool of blocks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from shmstore.errors import shown
from shmstore.scheduler.checks import INT64_LIMIT, check_range

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "make_kv_cache_config",
]

logger = logging.getLogger(__name__)

_ITEM_SIZES = {"bfloat16": 2, "half": 2, "float": 4, "double": 8} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "fp8", "fp8_e4m3", "fp8_e5m2"), 1
)


def item_size(dtype: Any) -> int:
    """Return the bytes of one element of a torch dtype, a numpy dtype, or its name; ValueError for anything else."""
    size = getattr(dtype, "itemsize", None)
    if isinstance(size, int):
        return size
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if isinstance(name, str) and name in _ITEM_SIZES:
        return _ITEM_SIZES[name]
    import numpy as np

    try:
        return np.dtype(name).itemsize
    except TypeError as error:
        raise ValueError(f"not a dtype: {shown(dtype)}") from error


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        size = item_size(dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if size < 1:
        raise ValueError(f"{name} must have elements of at least one byte: {shown(dtype)}")


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer keeps in the cache; layers with equal specs can share a group."""

    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in ("int", int):  # a number may be 0 only if that is its default
                check_range(0 if field.default == 0 else 1, **{field.name: getattr(self, field.name)})

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps keys and values of each token."""

    num_kv_heads: int
    """Heads of keys and values."""
    head_size: int
    """Elements per head."""
    dtype: Any
    """Type of the elements: a torch or numpy dtype, or its name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dtype("dtype", self.dtype)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * item_size(self.dtype)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Attention to all earlier tokens."""

    sliding_window: int | None = None
    """A window that the layer has; it is recorded and not used."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Attention to all tokens through one latent vector for keys and values."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: one vector for keys and values."""
        return super().page_size_bytes // 2


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention to the last `sliding_window` tokens, including the token itself."""

    sliding_window: int
    """Tokens in the window."""


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention within chunks of `attention_chunk_size` tokens."""

    attention_chunk_size: int
    """Tokens in a chunk."""


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A layer that keeps a state instead of tokens; a block holds the state after its last token."""

    shapes: tuple[tuple[int, ...], ...]
    """Shape of each of its states."""
    dtypes: tuple[Any, ...]
    """Dtype of each of its states."""
    num_speculative_blocks: int = 0
    """Blocks kept ready for speculative tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Lists would make the spec unhashable, and unequal to the same one with tuples.
        object.__setattr__(self, "shapes", tuple(tuple(shape) for shape in self.shapes))
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        if len(self.shapes) != len(self.dtypes):
            raise ValueError(f"{len(self.shapes)} shapes and {len(self.dtypes)} dtypes")
        if not self.shapes or any(size < 1 for shape in self.shapes for size in shape):
            raise ValueError(f"shapes must name at least one state, none of them empty: {self.shapes}")
        for dtype in self.dtypes:
            _check_dtype("dtypes", dtype)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: all its states."""
        return sum(prod(shape) * item_size(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention of a decoder to the encoder's tokens."""


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table per request."""

    layer_names: Sequence[str]
    """The layers."""
    kv_cache_spec: KVCacheSpec
    """What each of them keeps."""


@dataclass(frozen=True)
class KVCacheConfig:
    """A pool of blocks and the groups of layers that use it."""

    num_blocks: int
    """Blocks in the pool, including the null block."""
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    """The groups; a group's id is its index here."""


def _one_spec(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """Return the spec that all layers can share; None if there is no such spec."""
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    if not isinstance(first, FullAttentionSpec):
        return None
    plain = replace(first, sliding_window=None)
    for spec in specs:
        if not isinstance(spec, FullAttentionSpec) or replace(spec, sliding_window=None) != plain:
            return None
    recorded = (spec.sliding_window for spec in specs if isinstance(spec, FullAttentionSpec))
    windows = {window for window in recorded if window is not None}
    if len(windows) > 1:
        raise ValueError(f"full attention layers record different windows, which do not merge: {sorted(windows)}")
    return replace(first, sliding_window=windows.pop())


def _equal_pages(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    largest = max(spec.page_size_bytes for spec in layers.values())
    made = {}
    for name, spec in layers.items():
        factor, rest = divmod(largest, spec.page_size_bytes)
        grown = replace(spec, block_size=spec.block_size * factor)
        if rest or grown.page_size_bytes != largest:
            raise ValueError(
                f"layer {shown(name)} has pages of {spec.page_size_bytes} bytes: no block size makes them {largest}"
            )
        made[name] = grown
    return made


def make_kv_cache_config(layers: Mapping[str, KVCacheSpec], memory_bytes: int) -> KVCacheConfig:
    """Return the groups of the layers, with pages of one size, and the number of blocks that fit into the memory.

    `layers` has the spec of each layer, in the model's order. If all specs are equal, or are full attention and differ
    only in a recorded window, there is one group. Otherwise larger blocks make the pages equal. The layers of one spec
    are dealt out to as few groups as possible, with at most g layers in each. g is the smallest number of layers per
    spec, or the largest if that is below 1.25 times the smallest.

    ValueError without layers, for pages that are empty or cannot be made equal, and for memory outside 0 … 2**63 - 1
    bytes; TypeError for memory that is not an integer. If the memory holds fewer than two blocks, including the null
    block, only log a warning that says how much is needed.
    """
    if not layers:
        raise ValueError("there are no layers: nothing needs a KV cache")
    check_range(0, INT64_LIMIT, memory_bytes=memory_bytes)
    memory_bytes = int(memory_bytes)
    for name, spec in layers.items():
        check_range(1, **{f"layer {shown(name)}: page_size_bytes": spec.page_size_bytes})
    shared = _one_spec(list(layers.values()))
    by_spec: dict[KVCacheSpec, list[str]] = {} if shared is None else {shared: list(layers)}
    for name, spec in _equal_pages(layers).items() if shared is None else ():
        by_spec.setdefault(spec, []).append(name)
    smallest, largest = min(map(len, by_spec.values())), max(map(len, by_spec.values()))
    g = largest if largest < 1.25 * smallest else smallest
    groups = []
    for spec, names in by_spec.items():
        k = -(-len(names) // g)
        groups += [KVCacheGroupSpec(tuple(names[i::k]), spec) for i in range(k)]
    page = next(iter(by_spec)).page_size_bytes
    num_blocks = memory_bytes // page // g
    if num_blocks < 2:
        logger.warning(
            "The KV cache has room for %d blocks of %d layers, %d bytes a layer: %d bytes are available and the null "
            "block with one more needs %d bytes",
            num_blocks, g, page, memory_bytes, 2 * page * g,
        )  # fmt: skip
    return KVCacheConfig(num_blocks, groups)
