"""What the layers of a model keep in a KV cache, and how they share one pool of blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf, prod
from typing import Any, ClassVar

import numpy as np

from shmstore.errors import shown
from shmstore.scheduler.checks import TOKEN_LIMIT, check_range

_ITEM_SIZES = {"bfloat16": 2, "float": 4} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "fp8", "fp8_e4m3", "fp8_e5m2"), 1
)

MLA_TOKEN_BYTES = {
    "fp8_ds_mla": 512 + 4 * 4 + 64 * 2,  # 512 of float8, 4 scales of float32, 64 of bfloat16 for the position
    "nvfp4_ds_mla": 352,
}
"""Bytes of a token in MLA's packed formats."""


def item_size(dtype: Any, name: str = "dtype") -> int:
    """Return the bytes of one element of a torch dtype, a numpy dtype, or its name; ValueError for anything else."""
    size = getattr(dtype, "itemsize", None)
    if not isinstance(size, int):
        known = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
        try:
            size = _ITEM_SIZES[known] if known in _ITEM_SIZES else np.dtype(known).itemsize
        except TypeError as error:
            raise ValueError(f"{name} must be a dtype, not {shown(dtype)}") from error
    if size < 1:
        raise ValueError(f"{name} must have elements of at least one byte: {shown(dtype)}")
    return size


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


@dataclass(frozen=True)
class KVCacheSpec:
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
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError

    @property
    def first(self) -> KVCacheSpec:
        """The spec from which a group's block tables follow: this one, or the first of several."""
        return self

    @property
    def type_key(self) -> Hashable:
        """What decides which blocks a request needs; layers with equal keys can share a block table."""
        return self

    def max_blocks(self, num_tokens: int, in_flight_tokens: int, encoder_tokens: int) -> int:
        """Return how many blocks a request of `num_tokens` holds at most at a time; see `KVCacheConfig`."""
        return _blocks(num_tokens, self.block_size)


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

    @property
    def type_key(self) -> Hashable:
        """What its block tables depend on."""
        return self.table, self.block_size, getattr(self, self.table_field, None)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Attention to all earlier tokens."""

    kind = "full_attention"
    table = "full"

    sliding_window: int | None = None
    """A window that the layer has; it is recorded and not used."""
    attention_chunk_size: int | None = None
    """A chunk size that the layer has; it is recorded and not used."""


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Attention to all tokens through one latent vector for keys and values."""

    kind = "mla_attention"

    cache_dtype: str | None = None
    """A format whose tokens have a size of their own, of `MLA_TOKEN_BYTES`; None: `head_size` elements of `dtype`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_dtype is not None and self.cache_dtype not in MLA_TOKEN_BYTES:
            raise ValueError(f"cache_dtype must be one of {list(MLA_TOKEN_BYTES)}, not {shown(self.cache_dtype)}")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: one vector for keys and values."""
        if self.cache_dtype is not None:
            return self.block_size * self.num_kv_heads * MLA_TOKEN_BYTES[self.cache_dtype]
        return super().page_size_bytes // 2


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention to the last `sliding_window` tokens, including the token itself."""

    kind = "sliding_window"
    table = "window"
    table_field = "sliding_window"

    sliding_window: int

    def max_blocks(self, num_tokens: int, in_flight_tokens: int, encoder_tokens: int) -> int:
        """Return the blocks of the window and of what is in flight, and one because they may begin within a block."""
        return _blocks(min(self.sliding_window - 1 + in_flight_tokens, num_tokens), self.block_size) + 1


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Attention within chunks of `attention_chunk_size` tokens."""

    kind = "chunked_local_attention"
    table = "chunk"
    table_field = "attention_chunk_size"

    attention_chunk_size: int

    def max_blocks(self, num_tokens: int, in_flight_tokens: int, encoder_tokens: int) -> int:
        """Return the blocks of a chunk and of what is in flight, and one if chunks may begin within a block."""
        within = self.attention_chunk_size % self.block_size > 0
        return _blocks(min(self.attention_chunk_size + in_flight_tokens, num_tokens), self.block_size) + within


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
    page_size_padded: int | None = None
    """Bytes of a page with its padding; None: no padding."""

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
        if self.page_size_padded is not None:
            check_range(self._state_bytes, page_size_padded=self.page_size_padded)

    @property
    def _state_bytes(self) -> int:
        return sum(prod(shape) * item_size(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: all its states, and the padding."""
        return self._state_bytes if self.page_size_padded is None else self.page_size_padded

    def max_blocks(self, num_tokens: int, in_flight_tokens: int, encoder_tokens: int) -> int:
        """Return the blocks of the tokens, and the speculative ones."""
        return _blocks(num_tokens, self.block_size) + self.num_speculative_blocks


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention of a decoder to the encoder's tokens."""

    kind = "cross_attention"
    table = "cross"

    def max_blocks(self, num_tokens: int, in_flight_tokens: int, encoder_tokens: int) -> int:
        """Return the blocks of the encoder's tokens."""
        return _blocks(encoder_tokens, self.block_size)


@dataclass(frozen=True)
class UniformTypeSpec(KVCacheSpec):
    """Layers of one type that differ in what a token takes: they share block tables, and have pages of their own."""

    layers: Mapping[str, KVCacheSpec] = field(hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", dict(self.layers))
        types = {spec.type_key for spec in self.layers.values()}
        if len(types) != 1 or self.first.block_size != self.block_size:
            raise ValueError(
                f"layers must have one type and blocks of {self.block_size} tokens, not {shown(self.layers)}"
            )

    @property
    def first(self) -> KVCacheSpec:
        """The first layer's spec; a block table follows from any layer's."""
        return next(iter(self.layers.values()))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of all these layers."""
        return sum(spec.page_size_bytes for spec in self.layers.values())

    @property
    def type_key(self) -> Hashable:
        """That of each layer."""
        return self.first.type_key

    def max_blocks(self, num_tokens: int, in_flight_tokens: int, encoder_tokens: int) -> int:
        """Return what each layer's spec returns."""
        return self.first.max_blocks(num_tokens, in_flight_tokens, encoder_tokens)


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table per request."""

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec
    """What each of them keeps."""
    is_eagle_group: bool = False
    """The group has layers of an EAGLE or MTP draft model."""


@dataclass(frozen=True)
class KVCacheTensor:
    """One buffer of a worker: the pages of all blocks, for one layer of each group."""

    size: int
    """Bytes: the page times the number of blocks."""
    shared_by: Sequence[str]
    """The layers that use it. They are of different groups, and a block belongs to one group at a time."""


@dataclass(frozen=True)
class KVCacheConfig:
    """A pool of blocks and the groups of layers that use it.

    The questions are about requests of `num_tokens` or `max_model_len` tokens. `max_in_flight_tokens` are the tokens of
    a request that are scheduled and not computed yet, in all steps that run at a time, with speculative ones: windows
    and chunks hold their blocks. None: all tokens. `max_encoder_tokens` are for cross attention. With context
    parallelism, give one rank's share of the tokens. ValueError for numbers out of range.
    """

    num_blocks: int
    """Blocks in the pool, including the null block."""
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    """The groups; a group's id is its index here."""
    kv_cache_tensors: Sequence[KVCacheTensor] = ()

    def blocks_per_request(
        self, num_tokens: int, *, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        """Return how many blocks of the pool a request of so many tokens holds at most at a time, in all groups."""
        in_flight = num_tokens if max_in_flight_tokens is None else max_in_flight_tokens
        check_range(1, TOKEN_LIMIT, num_tokens=num_tokens, max_in_flight_tokens=in_flight)
        check_range(0, TOKEN_LIMIT, max_encoder_tokens=max_encoder_tokens)
        return sum(
            group.kv_cache_spec.max_blocks(num_tokens, in_flight, max_encoder_tokens) for group in self.kv_cache_groups
        )

    def estimate_max_model_len(
        self, max_model_len: int, *, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> int:
        """Return the tokens of the longest request, up to `max_model_len`, that fits into the pool; 0 if none fits."""
        check_range(1, TOKEN_LIMIT, max_model_len=max_model_len)
        return bisect_right(
            range(1, max_model_len + 1),
            self.num_blocks - 1,  # not the null block
            key=lambda num_tokens: self.blocks_per_request(
                num_tokens, max_in_flight_tokens=max_in_flight_tokens, max_encoder_tokens=max_encoder_tokens
            ),
        )

    def max_concurrency(
        self, max_model_len: int, *, max_in_flight_tokens: int | None = None, max_encoder_tokens: int = 0
    ) -> float:
        """Return how many requests of `max_model_len` tokens fit into the pool; infinity without layers."""
        blocks = self.blocks_per_request(
            max_model_len, max_in_flight_tokens=max_in_flight_tokens, max_encoder_tokens=max_encoder_tokens
        )
        return (self.num_blocks - 1) / blocks if blocks else inf
