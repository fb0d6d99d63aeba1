"""The KV-cache blocks of each request: the layer between a scheduler and the block pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from typing import Any

from shmstore.bindings.hashlist import BlockHashes
from shmstore.bindings.kvcache import KINDS, Tables
from shmstore.errors import check_flags, shown
from shmstore.scheduler.block_pool import BlockPool
from shmstore.scheduler.checks import INT32_LIMIT, INT64_LIMIT, TOKEN_LIMIT, check_range
from shmstore.scheduler.events import KVCacheEvent
from shmstore.scheduler.extra_keys import EventSource
from shmstore.scheduler.kv_cache_blocks import KVCacheBlock, KVCacheBlocks, blocks_of, empty_blocks
from shmstore.scheduler.kv_cache_config import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from shmstore.scheduler.metrics import PrefixCacheStats
from shmstore.scheduler.request import RequestLike

_NO_HASHES = BlockHashes()


def _kind_and_parameter(spec: KVCacheSpec) -> tuple[int, int]:
    if getattr(spec, "table", "") not in KINDS:
        raise ValueError(f"no manager for {type(spec).__name__}; use one of the spec classes of shmstore.scheduler")
    parameter: int = getattr(spec, spec.table_field, 0)
    check_range(0, INT64_LIMIT, **{spec.table_field: parameter})
    return KINDS[spec.table], parameter


def _check_groups(
    specs: Sequence[KVCacheSpec], sizes: Sequence[int], hash_block_size: int, caching: bool, eagle: Sequence[bool]
) -> int:
    """Return the alignment of hit lengths in tokens; ValueError for what the look-ups cannot do."""
    if any(e and isinstance(spec, ChunkedLocalAttentionSpec) for e, spec in zip(eagle, specs, strict=True)):
        raise ValueError(
            "EAGLE cannot leave out a block of chunked local attention: mark the draft model's own groups by "
            "is_eagle_group"
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
    alignment = lcm(*sizes)
    check_range(1, TOKEN_LIMIT, **{f"the least common multiple of the block sizes {list(sizes)}": alignment})
    return alignment


def _eagle_groups(groups: Sequence[KVCacheGroupSpec], use_eagle: bool) -> tuple[list[bool], bool]:
    """Return for each group if EAGLE leaves a block out, and if that block may lie beyond what a look-up asks for."""
    marked = {group.kv_cache_spec for group in groups if group.is_eagle_group}
    specs = {group.kv_cache_spec for group in groups}
    full_and_another = 1 == sum(isinstance(spec, FullAttentionSpec) for spec in specs) == len(specs) - 1
    drops = [group.kv_cache_spec in marked or (use_eagle and not marked) for group in groups]
    return drops, len(groups) > 1 and (bool(marked) or not full_and_another)


class KVCacheManager:
    """The block tables of all requests, the prefix cache, and its statistics and events.

    * `config` has the pool's size and the groups of layers.
    * `max_model_len` is the number of tokens beyond which no table grows.
    * `hash_block_size` is the number of tokens per block hash of the requests.
    * `use_eagle` leaves the last hit block of each group out, because the draft model needs its hidden states. If the
      configuration marks groups with `is_eagle_group`, only those leave a block out, also without `use_eagle`.
    * `log_stats` keeps `PrefixCacheStats`.
    * `dcp_world_size` and `pcp_world_size` are the sizes of context parallelism, for a single full-attention group. The
      ranks share a block's tokens, so it holds that many times more; `hash_block_size` includes them already.
    * `max_in_flight_tokens` is how many tokens of a request are scheduled and not yet computed, at most (default:
      `max_model_len`). A window gives blocks back, so it holds this much more at a time; see `full_sequence_must_fit`.
    * `watermark` is the share of the blocks, 0 … 1, that `allocate_slots` leaves free with `admission`.
    * `metrics_collector` is notified last and may ask the manager anything; its exceptions are only logged.
    * `retention_interval` lets sliding windows keep only what a later request needs to go on at a multiple of so many
      tokens, or at the end of a prompt (0: only there). Then requests also have `num_prompt_tokens`, and may have
      `shared_prefix_boundary`, where other prompts part from theirs. None keeps all.
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
        retention_interval: int | None = None,
        max_in_flight_tokens: int | None = None,
        watermark: float = 0.0,
    ) -> None:
        if not hasattr(config, "kv_cache_groups"):
            raise TypeError(f"config must be a KVCacheConfig (make_kv_cache_config gives one), not {shown(config)}")
        check_flags(
            enable_caching=enable_caching, use_eagle=use_eagle, log_stats=log_stats,
            enable_kv_cache_events=enable_kv_cache_events, int_event_hashes=int_event_hashes,
        )  # fmt: skip
        groups = config.kv_cache_groups
        enable_caching = enable_caching and bool(groups)  # without layers there is nothing to cache
        check_range(1, INT64_LIMIT, max_model_len=max_model_len)
        check_range(
            1, INT32_LIMIT,
            hash_block_size=hash_block_size, dcp_world_size=dcp_world_size, pcp_world_size=pcp_world_size,
        )  # fmt: skip
        if max_in_flight_tokens is None:
            max_in_flight_tokens = min(max_model_len, TOKEN_LIMIT - 1)
        check_range(0, TOKEN_LIMIT, max_in_flight_tokens=max_in_flight_tokens)
        if not 0 <= watermark <= 1:
            raise ValueError(f"watermark is a share of the blocks, 0 to 1, not {shown(watermark)}")
        specs = [group.kv_cache_spec for group in groups]
        kinds = [_kind_and_parameter(spec) for spec in specs]
        ranks = dcp_world_size * pcp_world_size
        if ranks > 1 and (len(specs) > 1 or not isinstance(specs[0], FullAttentionSpec)):
            raise ValueError("context parallelism works with a single group of full attention only")
        sizes = [spec.block_size * ranks for spec in specs]
        for size in sizes:
            check_range(1, INT32_LIMIT, **{"block_size" if ranks == 1 else "block_size times the world sizes": size})
        eagle, ahead = _eagle_groups(groups, use_eagle)
        alignment = _check_groups(specs, sizes, hash_block_size, enable_caching, eagle)
        if retention_interval is not None:
            check_range(0, INT64_LIMIT, retention_interval=retention_interval)
        if retention_interval is not None and any(eagle) and len(specs) > 1 and not ahead:
            raise ValueError(
                "retention_interval with use_eagle and several groups needs to know the draft model's: mark them with "
                "KVCacheGroupSpec(..., is_eagle_group=True)"
            )
        if retention_interval and retention_interval % alignment:
            raise ValueError(
                f"retention_interval must be a multiple of {alignment}, where hits end, not {retention_interval}"
            )
        self.config = config
        self.max_model_len = max_model_len
        self.hash_block_size = hash_block_size
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.max_in_flight_tokens = max_in_flight_tokens
        self.watermark_blocks = int(watermark * config.num_blocks)
        self.num_groups = len(groups)
        self._several = len(groups) > 1
        self.block_pool = BlockPool(
            config.num_blocks, enable_caching, hash_block_size=hash_block_size, events=enable_kv_cache_events,
            int_event_hashes=int_event_hashes, metrics=metrics_collector, free_order=free_order, specs=specs,
        )  # fmt: skip
        self.empty_kv_cache_blocks = empty_blocks(self.num_groups)
        """The shared instance with no blocks."""
        groups_in_c = [(kind, size, value, e) for (kind, value), size, e in zip(kinds, sizes, eagle, strict=True)]
        self._tables = Tables(
            self.block_pool.core, groups_in_c, hash_block_size, alignment, max_model_len, max_in_flight_tokens,
            enable_caching, ahead, retention_interval,
        )  # fmt: skip
        self.shared_prefix_boundary = 0
        """Where the last prompt looked up parts from others, if windows have kept too little to go on there; else 0."""
        self._alignment = alignment
        self._drops = any(eagle)
        self._thin = retention_interval is not None
        self._sizes = sizes
        self._settled = self._tables.settled  # most decode steps end here
        self._stats = PrefixCacheStats()

    # ---- the scheduler's step ----

    def get_computed_blocks(self, request: RequestLike, record_stats: bool = True) -> tuple[KVCacheBlocks, int]:
        """Return the longest cached prefix of the request and its tokens; leave at least one token to compute.

        Add no reference: until `allocate_slots` has the blocks, they may be handed out to other requests. With
        `record_stats=False`, do not count the look-up: call `record_prefix_cache_stats` when the request is scheduled.
        """
        if record_stats is not True and record_stats is not False:
            check_flags(record_stats=record_stats)
        self.shared_prefix_boundary = 0
        if request.skip_reading_prefix_cache or not self.enable_caching:
            return self.empty_kv_cache_blocks, 0
        num_tokens = request.num_tokens
        hashes = request.block_hashes
        if type(hashes) is not BlockHashes:
            hashes = BlockHashes(hashes)
        try:
            tokens = self._tables.find(hashes, num_tokens - 1)
        except (OverflowError, ValueError):
            check_range(0, TOKEN_LIMIT, num_tokens=num_tokens)
            raise ValueError(f"num_tokens must be what a block table can hold, not {num_tokens}") from None
        if tokens and len(hashes) * self.hash_block_size > num_tokens:  # a miss harms nobody
            raise ValueError(f"{len(hashes)} hashes for {num_tokens} tokens: BlockHasher needs this hash_block_size")
        if self._several and self._tables.longest > tokens:  # one group agrees with itself
            self.shared_prefix_boundary = self._tables.longest
        if record_stats and self.log_stats:
            self._stats.record(num_tokens, tokens, request.num_preemptions > 0)
        if not tokens:
            return self.empty_kv_cache_blocks, 0
        return KVCacheBlocks.from_ids(self.block_pool, self._tables.ids(), self._tables.counts()), tokens

    def record_prefix_cache_stats(self, request: RequestLike, num_hits: int) -> None:
        """Count a look-up that found `num_hits` tokens, as `get_computed_blocks` does with `record_stats`.

        A request that waits is looked up in each step. To count it once, look up with `record_stats=False`, and call
        this when it is scheduled.
        """
        if self.log_stats and self.enable_caching and not request.skip_reading_prefix_cache:
            self._stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)

    def allocate_slots(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        admission: bool = False,
    ) -> KVCacheBlocks | None:
        """Make room for the request's next tokens and return the blocks added; None if too few are free.

        The new tokens follow `request.num_computed_tokens` + `num_new_computed_tokens` +
        `num_external_computed_tokens`.

        * `new_computed_blocks` are from `get_computed_blocks`, for a request that has no blocks yet.
        * `num_lookahead_tokens` are speculative tokens, which need room but are never cached.
        * `delay_cache_blocks` is for contents that arrive later; then call `cache_blocks`.
        * `num_encoder_tokens` are for cross attention.
        * `num_external_computed_tokens` are brought by a KV connector. They get blocks, except those that a window has
          passed when all are there. With them, `num_new_tokens` may be 0.
        * `full_sequence_must_fit` also asks whether all of `request.num_tokens` would fit, and takes nothing for that.
        * `reserved_blocks` is how many free blocks the allocation leaves to others.
        * `admission` says that this request is admitted while others run, and leaves the watermark free as well.

        Blocks that a window has passed are given back, even if the answer is None for too few blocks for these tokens.
        A step in flight still reads them: only `request.num_computed_tokens` - `request.num_in_flight_tokens` count as
        passed, if the request has the latter. ValueError for nothing to add, numbers out of range and missing block
        hashes. ValueError also for computed blocks of another manager, for a request that has blocks, or with caching
        off.
        """
        request_id, seen = request.request_id, request.num_computed_tokens
        if (  # most decode steps end here
            new_computed_blocks is None
            and seen >= 0
            and num_lookahead_tokens >= 0
            and num_new_tokens > 0
            and seen + num_new_tokens + num_lookahead_tokens <= self._settled.get(request_id, 0)
            and not (
                full_sequence_must_fit
                or admission
                or delay_cache_blocks
                or num_new_computed_tokens
                or num_encoder_tokens
                or num_external_computed_tokens
                or reserved_blocks
            )
        ):
            return self.empty_kv_cache_blocks
        if not (full_sequence_must_fit is admission is delay_cache_blocks is False):
            check_flags(
                delay_cache_blocks=delay_cache_blocks, full_sequence_must_fit=full_sequence_must_fit,
                admission=admission,
            )  # fmt: skip
        if num_new_tokens < 1 and (num_new_tokens or not num_external_computed_tokens):
            raise ValueError("num_new_tokens must be greater than 0")
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
        source = EventSource.of(request) if self.block_pool.events_enabled else None
        passed = seen
        try:
            in_flight = request.num_in_flight_tokens  # type: ignore[attr-defined]
        except AttributeError:  # an engine that has no step in flight
            in_flight = 0
        if in_flight:
            check_range(0, TOKEN_LIMIT, num_in_flight_tokens=in_flight)
            passed = max(0, seen - in_flight)
        computed = seen + num_new_computed_tokens
        try:
            boundaries = self._boundaries(request) if self._thin else ()
            new_ids = tables.allocate(
                request_id, hashes, ids, counts, boundaries,
                passed=passed, computed=computed, external=num_external_computed_tokens, n_new=num_new_tokens,
                lookahead=num_lookahead_tokens, n_tokens=request.num_tokens if caches else 0,
                n_encoder=num_encoder_tokens, whole=request.num_tokens if full_sequence_must_fit else 0,
                reserved=reserved_blocks, headroom=self.watermark_blocks if admission else 0,
            )  # fmt: skip
        except ValueError:
            check_range(
                0, TOKEN_LIMIT, num_computed_tokens=seen, num_new_computed_tokens=num_new_computed_tokens,
                num_external_computed_tokens=num_external_computed_tokens, num_new_tokens=num_new_tokens,
                num_lookahead_tokens=num_lookahead_tokens, num_encoder_tokens=num_encoder_tokens,
                num_tokens=request.num_tokens, reserved_blocks=reserved_blocks,
                **{"num_computed_tokens + num_new_computed_tokens": computed},
            )  # fmt: skip
            raise
        if new_ids is None:
            return None
        added = self.empty_kv_cache_blocks
        if new_ids:
            new_counts = (len(new_ids) // 4,) if self.num_groups == 1 else tables.counts()
            added = KVCacheBlocks.from_ids(self.block_pool, new_ids, new_counts)
        if self.block_pool.watched:
            self._notify(request_id, source, hashes, ids, new_ids)
        return added

    def free(self, request: RequestLike) -> None:
        """Give the request's blocks back, so that its last are reused first; do nothing for an unknown request."""
        self._tables.release(request.request_id)

    def pop_blocks_for_free(self, request: RequestLike) -> list[KVCacheBlock]:
        """Forget the request, and return its blocks with their references, group after group.

        For blocks that a step in flight or a transfer may still write: pass them to `block_pool.free_blocks` when it is
        over, in reverse order. An unknown request has none. An interrupt in this call may lose them.
        """
        return blocks_of(self.block_pool, self._tables.pop(request.request_id))

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Let other requests find the full blocks of the first `num_computed_tokens`; do nothing with caching off.

        ValueError if the request has fewer blocks or hashes, and for a number out of range.
        """
        check_range(0, TOKEN_LIMIT, num_computed_tokens=num_computed_tokens)
        if not self.enable_caching:
            return
        request_id = request.request_id
        if request_id not in self._tables:
            if num_computed_tokens >= min(self._sizes):
                raise ValueError(f"request {shown(request_id)} has no blocks to cache: call allocate_slots first")
            return
        hashes = BlockHashes.of(request.block_hashes)
        source = EventSource.of(request) if self.block_pool.events_enabled else None
        self._tables.cache(request_id, hashes, num_computed_tokens, self._boundaries(request) if self._thin else ())
        if self.block_pool.watched:
            self._notify(request_id, source, hashes, b"", b"")

    def _boundaries(self, request: Any) -> tuple[int, int, int]:
        """Return where later requests go on: after this prompt, the same with more after it, and where others part."""
        again, longer, block = request.num_prompt_tokens - 1, -1, self._alignment
        if self._drops:  # EAGLE computes the last block again
            again, longer = (max(tokens // block * block - block, 0) for tokens in (again, again + 1))
        return again, longer, getattr(request, "shared_prefix_boundary", 0) or -1

    def _kept(self, request_id: str, stored: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of `stored` that have keys: with `retention_interval` a window keeps only some of a range."""
        tables, key_of = self.get_block_ids(request_id), self.block_pool.core.key_of
        for group, first, end in stored:
            gaps = [i for i in range(first, end) if key_of(tables[group][i]) is None]
            for start, gap in zip([first, *(gap + 1 for gap in gaps)], [*gaps, end], strict=True):
                if start < gap:
                    yield group, start, gap

    def _notify(
        self, request_id: str, source: EventSource | None, hashes: BlockHashes, found: bytes, new: bytes
    ) -> None:
        """Record events, then notify the metrics, whose calls may overwrite the results of the last change."""
        pool = self.block_pool
        if source is not None:
            stored = self._tables.stored()
            for group, first, end in self._kept(request_id, stored) if self._thin else stored:
                pool.record_stored(source, hashes, first, end, self._sizes[group], group)
        if pool.metrics is not None and (found or new):
            pool.notify_metrics(found, new, new)

    # ---- the prefix cache ----

    def evict_blocks(self, ids: Iterable[int]) -> None:
        """Forget the contents of these blocks; users keep the blocks. ValueError for an id outside 1 … num_blocks-1."""
        self.block_pool.evict_blocks(ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all contents and return True; while any block is in use, log a warning and return False."""
        done = self.block_pool.reset_prefix_cache()
        self._stats.reset |= done
        return done

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

    def estimate_cached_tokens(self, request: RequestLike) -> int:
        """Return how many leading tokens of the request others can find, if nothing has been evicted.

        With `retention_interval`, what a window has given back no longer counts.
        """
        return self._tables.cached(request.request_id)

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
