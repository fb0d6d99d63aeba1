"""The pool of KV-cache blocks: the free queue, reference counts, and the keys of cached contents."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from shmstore.bindings.blockpool import FREE_ORDERS, Pool, pack_ids, unpack_ids
from shmstore.bindings.hashlist import HASH_BYTES, BlockHashes, split_hashes
from shmstore.errors import check_flags, shown, unless_interrupted
from shmstore.scheduler.checks import INT32_LIMIT, check_range, whole
from shmstore.scheduler.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, EventHash, KVCacheEvent
from shmstore.scheduler.extra_keys import EventSource
from shmstore.scheduler.kv_cache_blocks import KVCacheBlock, blocks_of, ids_of
from shmstore.scheduler.kv_cache_config import KVCacheSpec, SlidingWindowSpec

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("=32sii")


def _shown(raw: bytes, width: int, ints: bool, factor: int = 1) -> list[EventHash]:
    """Return every factor-th of the padded hashes in `raw`, as events show them."""
    if not ints:
        return list[EventHash](split_hashes(raw, width, factor))
    if width % 8 or len(raw) <= 4 * HASH_BYTES:
        return [int.from_bytes(block_hash[-8:], "big") for block_hash in split_hashes(raw, width, factor)]
    words = np.frombuffer(raw, ">u8").reshape(-1, factor, HASH_BYTES // 8)
    low: list[EventHash] = words[:, -1, width // 8 - 1].tolist()
    return low


class BlockPool:
    """Blocks 0 … num_blocks-1: the users of each, the queue of free ones, and the contents that each still has.

    Block 0 is the null block: a placeholder that is never handed out, freed or counted.

    * `hash_block_size` is the number of tokens per block hash (default: the block size of each call).
    * `events` keeps KV events for `take_events`; `int_event_hashes` makes their hashes integers.
    * `metrics` is notified last of blocks that were handed out, accessed and evicted; its exceptions are only logged.
    * `free_order` says where freed blocks without a key go. "uncached_first": to the head of the queue, because
      nobody can find their contents. "tail": after the others.
    * `specs` are the specs of the groups, by group id; events name the kind and window of those they know.

    A refusal is a ValueError (TypeError for a number that is not an integer, and for a flag that is not a bool) and
    leaves the pool as it was.
    """

    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        *,
        hash_block_size: int | None = None,
        events: bool = False,
        int_event_hashes: bool = False,
        metrics: Any | None = None,
        free_order: str = "uncached_first",
        specs: Sequence[KVCacheSpec] = (),
    ) -> None:
        check_range(1, 1 << 30, num_blocks=num_blocks)
        check_flags(enable_caching=enable_caching, events=events, int_event_hashes=int_event_hashes)
        if free_order not in FREE_ORDERS:
            raise ValueError(f"free_order must be one of {', '.join(FREE_ORDERS)}, not {shown(free_order)}")
        if hash_block_size is not None:
            check_range(1, INT32_LIMIT, hash_block_size=hash_block_size)
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.int_event_hashes = int_event_hashes
        self.metrics = metrics
        self.specs = specs
        self.events_enabled = events
        self.watched = events or metrics is not None
        """Whether changes of blocks are reported."""
        self.core = Pool(num_blocks, FREE_ORDERS[free_order])
        """The C pool that this one wraps; for the managers."""
        self.core.log(events)
        # C logs the removed keys. The other events wait here as functions, each with the log's length before it.
        self._pending: list[tuple[int, Callable[[], KVCacheEvent]]] = []

    # ---- blocks ----

    @property
    def null_block(self) -> KVCacheBlock:
        """The placeholder, block 0."""
        return KVCacheBlock(self, 0)

    def get_num_free_blocks(self) -> int:
        """Return the length of the free queue."""
        return self.core.n_free

    def get_usage(self) -> float:
        """Return the share of blocks in use, 0 … 1."""
        return 1.0 - self.core.n_free / (self.num_blocks - 1) if self.num_blocks > 1 else 0.0

    def get_cached_block(self, block_hash: bytes, group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        """Return for each group the first block that has this key; None if a group has none."""
        found: list[int] = []
        for group in group_ids:
            check_range(0, INT32_LIMIT, group_id=group)
            found.append(self.core.find(block_hash, group))
        return [KVCacheBlock(self, block_id) for block_id in found] if all(found) else None

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Take n blocks, which lose their contents, from the head of the queue. ValueError if fewer are free."""
        check_range(0, n=n)
        ids = self.core.get(n)
        if ids is None:
            raise ValueError(f"Cannot get {n} free blocks from the pool")
        self.notify_metrics(b"", ids, ids)
        return blocks_of(self, ids)

    def touch(self, groups: Sequence[Iterable[KVCacheBlock]]) -> None:
        """Add a reference to each block of each group, except null blocks; free blocks leave the queue."""
        ids = b"".join(ids_of(blocks, self) for blocks in groups)
        self._change(self.core.touch, ids)
        self.notify_metrics(ids, b"", b"")

    def free_blocks(self, ordered: Iterable[KVCacheBlock]) -> None:
        """Drop a reference of each block; blocks without any other join the queue in this order."""
        self._change(self.core.put, ids_of(ordered, self))

    def _change(self, change: Callable[[bytes], None], ids: bytes) -> None:
        try:
            change(ids)
        except ValueError:
            for block_id in unpack_ids(ids):
                if not 0 <= block_id < self.num_blocks:
                    raise self._no_block(block_id) from None
            raise

    def _no_block(self, block_id: int) -> ValueError:
        why = "names the null block" if block_id == 0 else "is outside the pool"
        return ValueError(f"block id {block_id} {why}: ids of blocks with contents are 1 to {self.num_blocks - 1}")

    # ---- contents ----

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached: int,
        num_full: int,
        block_size: int,
        group_id: int,
    ) -> None:
        """Give blocks num_cached … num_full-1 of a request their keys, from its block hashes.

        Null blocks may lead the range and get no key. ValueError for a null block after another block, a block that
        has a key, fewer blocks or hashes than `num_full`, and negative numbers; and if caching is off.
        """
        if not self.enable_caching:
            raise ValueError("the pool was made with enable_caching=False: it keeps no contents")
        if num_cached < 0 or num_full < 0 or max(num_cached, num_full) > len(blocks):
            raise ValueError(f"blocks {num_cached} to {num_full} of {len(blocks)}")
        check_range(1, INT32_LIMIT, block_size=block_size)
        check_range(0, INT32_LIMIT, group_id=group_id)
        factor, rest = divmod(block_size, self.hash_block_size or block_size)
        if rest or not factor:
            raise ValueError(f"block_size {block_size} is not a multiple of the hash block size {self.hash_block_size}")
        ids = ids_of(blocks[num_cached:num_full], self)
        numbers = unpack_ids(ids)
        lead = next((i for i, block_id in enumerate(numbers) if block_id), len(numbers))
        if not all(numbers[lead:]):
            raise ValueError("null blocks can only lead the blocks to be cached")
        if lead == len(numbers):
            return
        hashes = BlockHashes.of(request.block_hashes)
        source = EventSource.of(request) if self.events_enabled else None
        self.core.key(ids[4 * lead :], hashes, num_cached + lead, factor, group_id)
        if source is not None:
            self.record_stored(source, hashes, num_cached + lead, num_full, block_size, group_id)

    def evict_blocks(self, ids: Iterable[int]) -> None:
        """Drop the keys of these blocks, in this order; users keep the blocks. ValueError for another id."""
        given = list(ids)
        for block_id in given:
            if not 1 <= whole("a block id", block_id) < self.num_blocks:
                raise self._no_block(block_id)
        packed = pack_ids(given)
        keyed = pack_ids(dict.fromkeys(self.core.keyed(packed)))
        self.core.evict(packed)
        self.notify_metrics(b"", keyed, b"")

    def reset_prefix_cache(self) -> bool:
        """Forget all contents and return True; while any block is in use, log a warning and return False."""
        if not self.core.reset():
            in_use = self.num_blocks - 1 - self.core.n_free
            logger.warning("The prefix cache was not reset: %d blocks are in use; free their requests first", in_use)
            return False
        if self.events_enabled:
            self._pending.append((self.core.log_len, AllBlocksCleared))
        if self.metrics is not None:
            self._notify([("reset", ())])
        return True

    # ---- metrics and events; called by the managers after each change, the metrics last ----

    def notify_metrics(self, accessed: bytes, evicted: bytes, allocated: bytes) -> None:
        """Tell the metrics, if there are any, which blocks were accessed, evicted and allocated.

        Call it at the end of a change, because the collector may ask the pool and its manager anything. If the
        collector raises, log its first exception, and report the other blocks all the same.
        """
        if self.metrics is None:
            return
        changes = (("on_block_accessed", accessed), ("on_block_evicted", evicted), ("on_block_allocated", allocated))
        self._notify((name, (KVCacheBlock(self, i),)) for name, ids in changes for i in unpack_ids(ids) if i)

    def _notify(self, calls: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        failed = False
        for name, about in calls:
            try:
                getattr(self.metrics, name)(*about)
            except unless_interrupted(Exception):
                if not failed:
                    logger.exception("The metrics collector failed; its figures may be incomplete, the pool is not")
                failed = True

    def record_stored(
        self, source: EventSource, hashes: BlockHashes, first: int, end: int, block_size: int, group_id: int
    ) -> None:
        """Record that blocks first … end-1 of a request got their keys; `source` was read before, as it may raise."""
        factor = block_size // (self.hash_block_size or block_size)
        width, ints, raw = hashes.width, self.int_event_hashes, hashes.raw(first * factor, end * factor)
        before = hashes.raw(first * factor - 1, first * factor) if first else b""
        tokens = source.token_ids[first * block_size : end * block_size]
        tokens = tokens if isinstance(tokens, list) else list(tokens)

        def event() -> BlockStored:  # made later: an object for each hash takes time
            parent = _shown(before, width, ints)[0] if before else None
            spec = self.specs[group_id] if group_id < len(self.specs) else None
            return BlockStored(
                _shown(raw, width, ints, factor), parent, tokens, block_size, source.lora_id, MEDIUM_GPU, group_id,
                lora_name=source.lora_name,
                extra_keys=source.extra_keys(first * block_size, end * block_size, block_size),
                kv_cache_spec_kind=spec.kind if spec else None,
                kv_cache_spec_sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
            )  # fmt: skip

        self._pending.append((self.core.log_len, event))

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first."""
        pending, self._pending = self._pending, []
        log, start = self.core.take_log(), 0
        events: list[KVCacheEvent] = []
        for end, event in (*pending, (len(log), None)):
            for block_hash, width, group in _RECORD.iter_unpack(log[start:end]) if start < end else ():
                events.append(BlockRemoved(_shown(block_hash, width, self.int_event_hashes), MEDIUM_GPU, group))
            start = end
            if event is not None:
                events.append(event())
        return events

    # ---- for tests and tools ----

    def free_block_ids(self) -> list[int]:
        """Return the free queue, head to tail."""
        return self.core.free_ids()

    def ref_counts(self) -> dict[int, int]:
        """Return the reference counts above 0, by block id."""
        return {i: count for i in range(1, self.num_blocks) if (count := self.core.ref(i))}

    def cached_block_ids(self) -> list[int]:
        """Return the blocks that have a key, ascending."""
        return self.core.keyed(pack_ids(range(self.num_blocks)))

    @property
    def num_cached_keys(self) -> int:
        """Number of keys that have a block."""
        return self.core.n_keys

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        self.core.check_valid()
