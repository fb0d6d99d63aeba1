"""The KV-cache blocks of each request: the layer between a scheduler and the block pool."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any

from shmstore.bindings.kvcache import KINDS, Tables
from shmstore.errors import shown
from shmstore.scheduler.block_hashes import BlockHashes
from shmstore.scheduler.block_pool import BlockPool
from shmstore.scheduler.checks import INT32_LIMIT, INT64_LIMIT, TOKEN_LIMIT, check_range
from shmstore.scheduler.events import KVCacheEvent
from shmstore.scheduler.kv_cache_blocks import KVCacheBlock, KVCacheBlocks, empty_blocks
from shmstore.scheduler.kv_cache_config import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from shmstore.scheduler.metrics import PrefixCacheStats
from shmstore.scheduler.request import RequestLike

__all__ = ["KVCacheManager"]

_NO_HASHES = BlockHashes()


def _kind_and_parameter(spec: KVCacheSpec) -> tuple[str, int]:
    for cls, kind, field in (
        (FullAttentionSpec, "full", None),
        (SlidingWindowSpec, "window", "sliding_window"),
        (ChunkedLocalAttentionSpec, "chunk", "attention_chunk_size"),
        (MambaSpec, "mamba", "num_speculative_blocks"),
        (CrossAttentionSpec, "cross", None),
    ):
        if isinstance(spec, cls):
            parameter = getattr(spec, field) if field else 0
            check_range(0, INT64_LIMIT, **{field or "": parameter})
            return kind, parameter
    raise ValueError(f"no manager for {type(spec).__name__}; use one of the spec classes of shmstore.scheduler")


def _check_groups(
    specs: Sequence[KVCacheSpec], sizes: Sequence[int], hash_block_size: int, caching: bool, eagle: bool
) -> int:
    """Return the alignment of hit lengths in tokens; ValueError for what the look-ups cannot do."""
    if eagle and any(isinstance(spec, ChunkedLocalAttentionSpec | MambaSpec) for spec in specs):
        raise ValueError("EAGLE works with neither chunked local attention nor mamba")
    if len(set(sizes)) > 1 and (eagle or any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs)):
        raise ValueError(
            f"EAGLE and chunked local attention need equal block sizes in all groups, not {sorted(set(sizes))}"
        )
    if not caching:
        return 1
    if any(isinstance(spec, CrossAttentionSpec) for spec in specs):
        raise ValueError("cross attention cannot be cached: pass enable_caching=False")
    if len(specs) == 1:
        if sizes[0] != hash_block_size:
            raise ValueError(f"the group's block size {sizes[0]} must be the hash block size {hash_block_size}")
        return sizes[0]
    if any(size % hash_block_size for size in sizes):
        raise ValueError(f"block sizes {list(sizes)} must be multiples of the hash block size {hash_block_size}")
    full = [isinstance(spec, FullAttentionSpec) for spec in specs]
    changes = sum(a != b for a, b in itertools.pairwise(full))
    if len(set(specs)) != 2 or changes != 1:
        raise ValueError(
            "prefix caching over several groups needs one full-attention spec and one other spec, "
            "the groups of each together"
        )
    return lcm(*sizes)


def _no_request(given: object) -> TypeError:
    return TypeError(
        f"request must have the attributes of a Request (not its id alone), and this has not: {shown(given)}"
    )


class KVCacheManager:
    """The block tables of all requests, the prefix cache, and its statistics and events.

    * `config` has the pool's size and the groups of layers.
    * `max_model_len` is the number of tokens beyond which no table grows.
    * `hash_block_size` is the number of tokens per block hash of the requests.
    * `use_eagle` leaves the last hit block out, because the draft model needs its hidden states.
    * `log_stats` keeps `PrefixCacheStats`.
    * `dcp_world_size` and `pcp_world_size` are the sizes of context parallelism, for a single full-attention group. The
      ranks share a block's tokens, so it holds that many times more; `hash_block_size` includes them already.
    * `metrics_collector` is notified last and may ask the manager anything; its exceptions are only logged.
    * The rest goes to `BlockPool`.

    The `request_id` must be unique among requests that have blocks. Nothing here touches the bytes of a block.
    ValueError for settings that do not work together, and for numbers out of range (tokens: 0 … 2**60 - 1). A call that
    is refused leaves the state as it was. Not thread-safe.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        hash_block_size: int,
        *,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any | None = None,
        free_order: str = "uncached_first",
        int_event_hashes: bool = False,
    ) -> None:
        if not hasattr(config, "kv_cache_groups"):
            raise TypeError(f"config must be a KVCacheConfig (make_kv_cache_config gives one), not {shown(config)}")
        groups = config.kv_cache_groups
        if not groups:
            raise ValueError("the configuration has no groups")
        check_range(1, INT64_LIMIT, max_model_len=max_model_len)
        check_range(
            1, INT32_LIMIT,
            hash_block_size=hash_block_size, dcp_world_size=dcp_world_size, pcp_world_size=pcp_world_size,
        )  # fmt: skip
        specs = [group.kv_cache_spec for group in groups]
        kinds = [_kind_and_parameter(spec) for spec in specs]
        ranks = dcp_world_size * pcp_world_size
        if ranks > 1 and (len(specs) > 1 or not isinstance(specs[0], FullAttentionSpec)):
            raise ValueError("context parallelism works with a single group of full attention only")
        sizes = [spec.block_size * ranks for spec in specs]
        for size in sizes:
            check_range(1, INT32_LIMIT, **{"block_size" if ranks == 1 else "block_size times the world sizes": size})
        alignment = _check_groups(specs, sizes, hash_block_size, enable_caching, use_eagle)
        self.config = config
        self.max_model_len = max_model_len
        self.hash_block_size = hash_block_size
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.num_groups = len(groups)
        self.block_pool = BlockPool(
            config.num_blocks, enable_caching, hash_block_size=hash_block_size, events=enable_kv_cache_events,
            int_event_hashes=int_event_hashes, metrics=metrics_collector, free_order=free_order,
        )  # fmt: skip
        self.empty_kv_cache_blocks = empty_blocks(self.num_groups)
        """The shared instance with no blocks."""
        groups_in_c = [(KINDS[kind], size, parameter) for (kind, parameter), size in zip(kinds, sizes, strict=True)]
        self._tables = Tables(
            self.block_pool.core, groups_in_c, hash_block_size, alignment, max_model_len, enable_caching, use_eagle
        )
        self._sizes = sizes
        self._settled = self._tables.settled  # most decode steps end here
        self._stats = PrefixCacheStats()

    # ---- the scheduler's step ----

    def get_computed_blocks(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """Return the longest cached prefix of the request and its tokens; leave at least one token to compute.

        Add no reference: until `allocate_slots` has the blocks, they may be handed out to other requests.
        """
        try:
            skip = request.skip_reading_prefix_cache
        except AttributeError as error:
            raise _no_request(request) from error
        if skip or not self.enable_caching:
            return self.empty_kv_cache_blocks, 0
        num_tokens = request.num_tokens
        preempted = self.log_stats and request.num_preemptions > 0
        hashes = request.block_hashes
        if type(hashes) is not BlockHashes:
            hashes = BlockHashes(hashes)
        try:
            tokens = self._tables.find(hashes, num_tokens - 1)
        except ValueError:
            check_range(0, TOKEN_LIMIT, num_tokens=num_tokens)
            raise ValueError(f"num_tokens must be what a block table can hold, not {num_tokens}") from None
        if self.log_stats:
            self._stats.record(num_tokens, tokens, preempted)
        if not tokens:
            return self.empty_kv_cache_blocks, 0
        return KVCacheBlocks.from_ids(self.block_pool, self._tables.ids(), self._tables.counts()), tokens

    def allocate_slots(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Make room for the request's next tokens and return the blocks added; None if too few are free.

        The new tokens follow `request.num_computed_tokens` + `num_new_computed_tokens`.

        * `new_computed_blocks` are from `get_computed_blocks`, for a request that has no blocks yet.
        * `num_lookahead_tokens` are speculative tokens, which need room but are never cached.
        * `delay_cache_blocks` is for contents that arrive later; then call `cache_blocks`.
        * `num_encoder_tokens` are for cross attention.

        Blocks that a window has passed are given back, even if the answer is None. ValueError for fewer than one new
        token, numbers out of range and missing block hashes. ValueError also for computed blocks of another manager,
        for a request that has blocks, or with caching off.
        """
        if num_new_tokens < 1:
            raise ValueError("num_new_tokens must be greater than 0")
        try:
            seen = request.num_computed_tokens
            request_id = request.request_id
        except AttributeError as error:
            raise _no_request(request) from error
        if (
            new_computed_blocks is None
            and not num_new_computed_tokens
            and not num_encoder_tokens
            and num_lookahead_tokens >= 0
            and seen >= 0
            and seen + num_new_tokens + num_lookahead_tokens <= self._settled.get(request_id, 0)
        ):
            return self.empty_kv_cache_blocks
        tables = self._tables
        ids, counts = b"" if new_computed_blocks is None else new_computed_blocks.packed_ids, None
        if ids and new_computed_blocks is not None:
            if request_id in tables:
                raise ValueError(
                    f"new_computed_blocks for {shown(request_id)}, which has blocks already: ids are unique among live "
                    "requests, and only the first allocation of one brings computed blocks"
                )
            counts = new_computed_blocks.counts
            if len(counts) != self.num_groups:
                raise ValueError(f"new_computed_blocks has {len(counts)} groups, the manager {self.num_groups}")
            if new_computed_blocks.pool is not self.block_pool:
                raise ValueError("new_computed_blocks belongs to another manager: its ids mean nothing here")
            if len(ids) != 4 * (sum(counts) if len(counts) > 1 else counts[0]):
                raise ValueError(f"new_computed_blocks has counts {counts} for {len(ids)} bytes of ids")
        caches = self.enable_caching and not delay_cache_blocks
        hashes = request.block_hashes if caches else _NO_HASHES
        if type(hashes) is not BlockHashes:
            hashes = BlockHashes(hashes)
        source = self.block_pool.source_of(request) if self.block_pool.events_enabled else None
        try:
            new_ids = tables.allocate(
                request_id, seen, seen + num_new_computed_tokens, num_new_tokens, num_lookahead_tokens,
                request.num_tokens if caches else 0, num_encoder_tokens, delay_cache_blocks, hashes, ids, counts,
            )  # fmt: skip
        except ValueError:
            check_range(
                0, TOKEN_LIMIT, num_computed_tokens=seen, num_new_computed_tokens=num_new_computed_tokens,
                num_new_tokens=num_new_tokens, num_lookahead_tokens=num_lookahead_tokens,
                num_encoder_tokens=num_encoder_tokens, num_tokens=request.num_tokens,
                **{"num_computed_tokens + num_new_computed_tokens": seen + num_new_computed_tokens},
            )  # fmt: skip
            raise
        if new_ids is None:
            return None
        added = self.empty_kv_cache_blocks
        if new_ids:
            new_counts = (len(new_ids) // 4,) if self.num_groups == 1 else tables.counts()
            added = KVCacheBlocks.from_ids(self.block_pool, new_ids, new_counts)
        if self.block_pool.watched:
            self._notify(source, hashes, ids, new_ids)
        return added

    def free(self, request: RequestLike) -> None:
        """Give the request's blocks back, so that its last are reused first; do nothing for an unknown request."""
        try:
            self._tables.release(request.request_id)
        except AttributeError as error:
            raise _no_request(request) from error

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Let other requests find the full blocks of the first `num_computed_tokens`; do nothing with caching off.

        ValueError if the request has fewer blocks or hashes, and for a number out of range.
        """
        check_range(0, TOKEN_LIMIT, num_computed_tokens=num_computed_tokens)
        if not self.enable_caching:
            return
        try:
            request_id = request.request_id
        except AttributeError as error:
            raise _no_request(request) from error
        if request_id not in self._tables:
            if num_computed_tokens >= min(self._sizes):
                raise ValueError(f"request {shown(request_id)} has no blocks to cache: call allocate_slots first")
            return
        hashes = BlockHashes.of(request.block_hashes)
        source = self.block_pool.source_of(request) if self.block_pool.events_enabled else None
        self._tables.cache(request_id, hashes, num_computed_tokens)
        if self.block_pool.watched:
            self._notify(source, hashes, b"", b"")

    def _notify(
        self, source: tuple[Sequence[int], int | None] | None, hashes: BlockHashes, found: bytes, new: bytes
    ) -> None:
        """Record events, then notify the metrics, whose calls may overwrite the results of the last change."""
        pool = self.block_pool
        if source is not None:
            for group, first, end in self._tables.stored():
                size = self._sizes[group]
                pool.record_stored(source, hashes, first, end, size, size // self.hash_block_size, group)
        if pool.metrics is not None and (found or new):
            pool.notify_metrics(found, new, new)

    # ---- the prefix cache ----

    def evict_blocks(self, ids: Iterable[int]) -> None:
        """Forget the contents of these blocks; users keep the blocks. ValueError for an id outside 1 … num_blocks-1."""
        self.block_pool.evict_blocks(ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all contents and return True; while any block is in use, log a warning and return False."""
        if not self.block_pool.forget():
            return False
        if self.log_stats:
            self._stats.reset = True
        self.block_pool.notify_reset()
        return True

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the statistics since the last call; None without `log_stats`."""
        if not self.log_stats:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events since the last call, oldest first."""
        return self.block_pool.take_events()

    # ---- questions ----

    @property
    def usage(self) -> float:
        """Share of the pool's blocks in use, 0 … 1."""
        return self.block_pool.get_usage()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return the request's blocks; an unknown request has none."""
        ids, counts = self._tables.table(request_id)
        return KVCacheBlocks.from_ids(self.block_pool, ids, counts) if ids else self.empty_kv_cache_blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of the request's blocks in each group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Return for each group how many leading blocks this request shares with all requests that have blocks."""
        return self._tables.common(request_id)

    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> KVCacheBlocks:
        """Return `blocks`, one sequence for each group, as KVCacheBlocks.

        ValueError for another number of groups and for blocks of another manager.
        """
        if len(blocks) != self.num_groups:
            raise ValueError(f"{len(blocks)} sequences of blocks for {self.num_groups} groups")
        made = KVCacheBlocks(blocks)
        if not made.packed_ids:
            return self.empty_kv_cache_blocks
        if made.pool is not self.block_pool:
            raise ValueError("the blocks belong to another manager")
        return made

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant of the tables or the pool."""
        self._tables.check_valid()
