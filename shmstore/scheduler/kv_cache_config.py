"""What the layers of a model keep in a KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar

import numpy as np

from shmstore.errors import check_flags, shown
from shmstore.scheduler.checks import check_range

_ITEM_SIZES = {"bfloat16": 2, "float": 4} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "fp8", "fp8_e4m3", "fp8_e5m2"), 1
)


def item_size(dtype: Any, name: str = "dtype") -> int:
    """Return the bytes of one element of a torch dtype, a numpy dtype, or its name; ValueError for anything else."""
    size = getattr(dtype, "itemsize", None)
    if not isinstance(size, int):
        known = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
        try:
            size = _ITEM_SIZES[known] if known in _ITEM_SIZES else np.dtype(known).itemsize
        except TypeError as error:
            raise ValueError(f"{name} must be a dtype or its name, such as 'bfloat16', not {shown(dtype)}") from error
    if size < 1:
        raise ValueError(f"{name} must have elements of at least one byte: {shown(dtype)}")
    return size


@dataclass(frozen=True)
class KVCacheSpec(ABC):
    """What one layer keeps in the cache; layers with equal specs can share a group."""

    kind: ClassVar[str] = "unknown"
    """What events call it."""
    table: ClassVar[str] = ""
    """The kind of its block tables, one of `bindings.kvcache.KINDS`; "" has none."""
    table_field: ClassVar[str] = ""
    """The field that its block tables depend on besides the block size, if there is one."""

    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.type in ("int", int):  # a number may be 0 only if that is its default
                check_range(0 if each.default == 0 else 1, **{each.name: getattr(self, each.name)})

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps keys and values of each token."""

    num_kv_heads: int
    head_size: int
    """Elements per head."""
    dtype: Any
    """Type of the elements: a torch or numpy dtype, or its name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        item_size(self.dtype)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * item_size(self.dtype)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Attention to all earlier tokens."""

    kind = "full_attention"
    table = "full"

    sliding_window: int | None = None
    """A window that the layer has; it is recorded and not used."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Attention to all tokens through one latent vector for keys and values."""

    kind = "mla_attention"

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: one vector for keys and values."""
        return super().page_size_bytes // 2


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention to the last `sliding_window` tokens, including the token itself."""

    kind = "sliding_window"
    table = "window"
    table_field = "sliding_window"

    sliding_window: int


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention within chunks of `attention_chunk_size` tokens."""

    kind = "chunked_local_attention"
    table = "chunk"
    table_field = "attention_chunk_size"

    attention_chunk_size: int


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A layer that keeps a state instead of tokens; a block holds the state after its last token."""

    kind = "mamba"
    table = "mamba"
    table_field = "num_speculative_blocks"

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
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
            item_size(dtype, "dtypes")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: all its states."""
        return sum(prod(shape) * item_size(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention of a decoder to the encoder's tokens."""

    kind = "cross_attention"
    table = "cross"


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table per request."""

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec
    """What each of them keeps."""
    is_eagle_group: bool = False
    """The group has layers of an EAGLE or MTP draft model."""

    def __post_init__(self) -> None:
        check_flags(is_eagle_group=self.is_eagle_group)


@dataclass(frozen=True)
class KVCacheConfig:
    """A pool of blocks and the groups of layers that use it."""

    num_blocks: int
    """Blocks in the pool, including the null block."""
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    """The groups; a group's id is its index here."""
