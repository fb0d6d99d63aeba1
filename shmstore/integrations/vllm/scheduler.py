"""vLLM's scheduler with the KV-cache manager and the encoder-cache manager of shmstore.

    vllm serve MODEL --scheduler-cls shmstore.integrations.vllm.scheduler.Scheduler

It is vLLM's own scheduler, synchronous or asynchronous as the configuration says. When it has been built, our managers
take the places of vLLM's two. They answer the same calls with the same blocks. If ours do not serve a configuration, or
vLLM's manager has other methods or parameters than those known here, it stays, and one line in the log says why.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import vllm.distributed.kv_events as _events
import vllm.envs
import vllm.v1.core.encoder_cache_manager as _encoder
import vllm.v1.core.sched.async_scheduler as _async
import vllm.v1.core.sched.scheduler as _sync
import vllm.v1.core.single_type_kv_cache_manager as _types
from vllm.v1.metrics.stats import PrefixCacheStats

from shmstore.integrations.vllm.shared import note_version
from shmstore.scheduler import (
    BlockHashes,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderCacheManager,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    SlidingWindowSpec,
)

__all__ = ["AsyncScheduler", "EncoderManager", "KVManager", "Scheduler"]

_log = logging.getLogger("vllm.shmstore")  # a child of vLLM's own logger, so that its settings apply

_SPECS: dict[type, tuple[type[KVCacheSpec], tuple[str, ...]]] = {
    _types.FullAttentionManager: (FullAttentionSpec, ()),
    _types.SlidingWindowManager: (SlidingWindowSpec, ("sliding_window",)),
    _types.ChunkedLocalAttentionManager: (ChunkedLocalAttentionSpec, ("attention_chunk_size",)),
    _types.CrossAttentionManager: (CrossAttentionSpec, ()),
}
"""Our spec for each of vLLM's managers of one type of attention whose work ours does, and what it has of its own."""
_allocate_slots = KVCacheManager.allocate_slots
_EVENT = _events.BlockStored | _events.BlockRemoved | _events.AllBlocksCleared


_KNOWN = {
    "KVCacheManager": """
        __init__(self kv_cache_config max_model_len scheduler_block_size hash_block_size max_in_flight_tokens
            enable_caching use_eagle num_prefill_lookahead log_stats enable_kv_cache_events dcp_world_size
            pcp_world_size metrics_collector watermark enable_mamba_shared_prefix_checkpoint)
        allocate_slots(self request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens
            num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks
            has_scheduled_reqs skip_zeroing_group_ids)
        cache_blocks(self request num_computed_tokens) create_kv_cache_blocks(self blocks)
        estimate_cached_tokens(self request) evict_blocks(self block_ids) finalize_partial_tail_offloads(self request)
        free(self request) get_block_ids(self request_id) get_blocks(self request_id)
        get_block_ids_for_computed_tokens(self request_id num_computed_tokens) get_computed_blocks(self request)
        get_computed_blocks_for_connector(self request) get_num_common_prefix_blocks(self running_request_id)
        make_prefix_cache_stats(self) new_step_starts(self) pop_blocks_for_free(self request)
        prefix_cache_lookup_enabled(self request) record_blocks_for_zeroing(self request_id start_token)
        record_prefix_cache_stats(self request num_hits)
        remove_skipped_blocks(self request_id processed_computed_tokens num_prompt_tokens) reset_prefix_cache(self)
        take_boundary_state_offloads(self) take_events(self) take_kv_cache_block_copies(self) take_new_block_ids(self)
        truncate_computed_blocks(self blocks num_computed_tokens)""",
    "EncoderCacheManager": """
        __init__(self cache_size) allocate(self request input_id)
        can_allocate(self request input_id encoder_compute_budget num_embeds_to_schedule)
        check_and_update_cache(self request input_id) free(self request) free_encoder_input(self request input_id)
        get_cached_input_ids(self request) get_cached_num_encoder_embeds(self request input_id)
        get_freed_mm_hashes(self) get_manager_metadata(self) reset(self)""",
}
"""The methods of vLLM's managers in 0.32, which ours answer as the scheduler calls them there."""


def _check_known(theirs: type) -> None:
    """Raise ValueError if a method of vLLM's manager is new, is missing or has other parameters."""
    known = dict(re.findall(r"(\w+)\(([^)]*)\)", " ".join(_KNOWN.get(theirs.__name__, "").split())))
    found = {
        name: " ".join(inspect.signature(method).parameters)
        for name, method in vars(theirs).items()
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_"))
    }
    for name in sorted(known.keys() | found.keys()):
        if known.get(name) != found.get(name):
            raise ValueError(f"it knows {theirs.__name__}.{name}({known.get(name)}), and here is ({found.get(name)})")


def _spec_of(manager: Any) -> KVCacheSpec:
    """Return our spec for what one of vLLM's managers of one type manages; ValueError if we have none."""
    theirs = getattr(manager.kv_cache_spec, "first_spec", manager.kv_cache_spec)
    if type(manager) not in _SPECS:
        raise ValueError(f"it has no counterpart to vLLM's {type(manager).__name__}")
    if getattr(manager, "extra_retained_tokens", 0) or theirs.prefix_replay_tokens or not theirs.prefix_cacheable:
        raise ValueError(f"it has no counterpart to this {type(theirs).__name__}: {theirs}")
    spec, more = _SPECS[type(manager)]
    shape = ("num_kv_heads", "head_size", "dtype", *more)
    return spec(block_size=theirs.block_size, **{name: getattr(theirs, name) for name in shape})


class KVManager(KVCacheManager):
    """Our manager as vLLM's scheduler calls it, with the settings of `theirs`, the one that it has built.

    ValueError if ours does not serve them.
    """

    def __init__(self, theirs: Any, max_in_flight_tokens: int, watermark: float) -> None:
        _check_known(type(theirs))
        config, coordinator = theirs.kv_cache_config, theirs.coordinator
        managers = coordinator.single_type_managers
        if config.needs_kv_cache_zeroing:
            raise ValueError("it does not tell the workers which blocks to clear")
        if coordinator.num_reprefillable_tokens:
            raise ValueError("it does not know draft models that read several tokens ahead")
        specs = [_spec_of(manager) for manager in managers]
        groups = [
            KVCacheGroupSpec(group.layer_names, spec, i in coordinator.eagle_group_ids)
            for i, (group, spec) in enumerate(zip(config.kv_cache_groups, specs, strict=True))
        ]
        super().__init__(
            KVCacheConfig(config.num_blocks, groups),
            theirs.max_model_len,
            theirs.block_pool.hash_block_size,
            enable_caching=theirs.enable_caching,
            use_eagle=theirs.use_eagle,
            log_stats=theirs.log_stats,
            enable_kv_cache_events=theirs.enable_kv_cache_events,
            dcp_world_size=managers[0].dcp_world_size if managers else 1,
            metrics_collector=theirs.metrics_collector,
            int_event_hashes=vllm.envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES,
            retention_interval=coordinator.retention_interval,
            max_in_flight_tokens=max_in_flight_tokens,
            watermark=watermark,
        )
        self.coordinator = SimpleNamespace(
            single_type_managers=[
                SimpleNamespace(block_size=manager.block_size, kv_cache_spec=manager.kv_cache_spec)
                for manager in managers
            ]
        )
        """What vLLM's engine reads of its coordinator."""

    def get_computed_blocks(self, request: Any, record_stats: bool = False) -> Any:
        """Return the cached prefix, its tokens, and where the prompt parts from others if a window has to keep that."""
        return *super().get_computed_blocks(request, record_stats), self.shared_prefix_boundary

    def allocate_slots(  # type: ignore[override]
        self, request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0,
        has_scheduled_reqs: bool | None = None, skip_zeroing_group_ids: object = (), **named: Any,
    ) -> Any:  # fmt: skip
        """Make room; `has_scheduled_reqs` comes when a request is admitted, and says if others run."""
        if has_scheduled_reqs is None:
            return _allocate_slots(self, request, num_new_tokens, 0, None, num_lookahead_tokens)
        return super().allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, admission=has_scheduled_reqs, **named
        )

    def make_prefix_cache_stats(self) -> Any:
        """Return the statistics since the last call, as vLLM's own record; None without `log_stats`."""
        stats = super().make_prefix_cache_stats()
        return None if stats is None else PrefixCacheStats(**dataclasses.asdict(stats))

    def take_events(self) -> list[Any]:
        """Return the events since the last call, as vLLM's own."""
        return [msgspec.convert(event.to_dict(), _EVENT) for event in super().take_events()]

    # ---- what only Mamba layers have

    def new_step_starts(self) -> None:
        """Do nothing."""

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Return no states to offload."""
        return {}

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return no blocks to copy, and none that a copy holds."""
        return [], []

    def take_new_block_ids(self) -> list[int]:
        """Return no blocks to clear."""
        return []


class EncoderManager:
    """Our encoder-cache manager as vLLM's scheduler calls it; calls that are not here go to `EncoderCacheManager`.

    vLLM asks about all items of a request, and then allocates them, or not if blocks are short.
    """

    def __init__(self, cache_size: int) -> None:
        self._ours = EncoderCacheManager(cache_size)
        self._asked: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def can_allocate(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Reserve room for item i. The first item of a request gives back what the last one has not allocated."""
        if self._asked is not None and not num_embeds_to_schedule:
            self._ours.unreserve(self._asked)
        self._asked = request
        return self._ours.reserve(request, i, encoder_compute_budget, num_embeds_to_schedule)

    def get_cached_num_encoder_embeds(self, request: Any, i: int) -> int | None:
        """Return the size of the entry that is cached under item i's hash, or None."""
        mm_hash = request.mm_features[i].identifier
        return self._ours._sizes[mm_hash] if mm_hash in self._ours.cached else None

    def get_manager_metadata(self) -> None:
        """Return nothing: the workers need not be told."""


class Scheduler(_sync.Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with our managers; an `AsyncScheduler` if the configuration says so."""

    kv_cache_manager: Any
    encoder_cache_manager: Any

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
        """Make an instance of the class for the configuration's mode."""
        is_async = cls is Scheduler and vllm_config.scheduler_config.async_scheduling
        return object.__new__(AsyncScheduler if is_async else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            if self.connector is not None:
                raise ValueError("it does not know KV connectors")
            self.kv_cache_manager = KVManager(
                self.kv_cache_manager, self.vllm_config.max_in_flight_tokens, self.scheduler_config.watermark
            )
            _log.info("vLLM's scheduler uses the KV-cache manager of shmstore")
        except ValueError as why:
            _log.warning("The KV-cache manager of shmstore does not serve this, so vLLM's own stays: %s", why)
        if type(self.encoder_cache_manager) is _encoder.EncoderCacheManager:
            try:
                _check_known(_encoder.EncoderCacheManager)
                self.encoder_cache_manager = EncoderManager(self.encoder_cache_manager.cache_size)
            except ValueError as why:
                _log.warning("The encoder-cache manager of shmstore does not serve this, so vLLM's own stays: %s", why)
        note_version()

    def add_request(self, request: Any) -> None:
        """Add a request, whose block hashes are in C from now on."""
        if isinstance(self.kv_cache_manager, KVManager) and not request.resumable:  # a session cuts its hashes short
            request.block_hashes = BlockHashes(request.block_hashes)
        super().add_request(request)


class AsyncScheduler(Scheduler, _async.AsyncScheduler):  # type: ignore[misc]
    """`Scheduler` with asynchronous scheduling."""
