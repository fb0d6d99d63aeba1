"""vLLM's scheduler with the KV-cache manager of shmstore.

    vllm serve MODEL --scheduler-cls shmstore.integrations.vllm.scheduler.Scheduler

It is vLLM's own scheduler, synchronous or asynchronous as the configuration says. When it has been built, our manager
takes the place of vLLM's. It answers the same calls with the same blocks. If ours does not serve a configuration, or
vLLM's manager or scheduler is not as `compare` knows it, vLLM's stays, and one line in the log says why. With
``SHMSTORE_VLLM=strict`` the engine fails instead.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import vllm.distributed.kv_events as _events
import vllm.envs
import vllm.v1.core.sched.async_scheduler as _async
import vllm.v1.core.sched.scheduler as _sync
import vllm.v1.core.single_type_kv_cache_manager as _types
from vllm.v1.metrics.stats import PrefixCacheStats

from shmstore.integrations.vllm import compare, stay_out
from shmstore.scheduler import (
    BlockHashes,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    SlidingWindowSpec,
)

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

    def get_computed_blocks(self, request: Any, max_cache_hit_length: None = None) -> Any:  # type: ignore[override]
        """Return the cached prefix, its tokens, and where the prompt parts from others if a window has to keep that.

        Only a connector of auxiliary outputs sets a limit, and we do not serve those.
        """
        return *super().get_computed_blocks(request, False), self.shared_prefix_boundary

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


class Scheduler(_sync.Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with our manager; an `AsyncScheduler` if the configuration says so."""

    kv_cache_manager: Any

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler:
        """Make an instance of the class for the configuration's mode; ValueError for a diffusion model."""
        if vllm_config.diffusion_config is not None:
            raise ValueError("a diffusion model needs vLLM's scheduler for it, so remove --scheduler-cls")
        is_async = cls is Scheduler and vllm_config.scheduler_config.async_scheduling
        return object.__new__(AsyncScheduler if is_async else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            if problem := compare.difference(compare.KV_CACHE):
                raise ValueError(problem)
            if self.connector is not None:
                raise ValueError("it does not know KV connectors")
            if hasattr(self, "num_hash_lookahead_tokens"):  # since 0.33
                if self.aux_output_connector is not None:
                    raise ValueError("it does not know connectors of auxiliary outputs")
                if self.use_eagle:
                    raise ValueError("it does not know how this vLLM finds prefixes for EAGLE")
            self.kv_cache_manager = KVManager(
                self.kv_cache_manager, self.vllm_config.max_in_flight_tokens, self.scheduler_config.watermark
            )
            _log.info("vLLM's scheduler uses the KV-cache manager of shmstore")
        except (AttributeError, ValueError) as why:
            stay_out("The KV-cache manager of shmstore does not serve this, so vLLM's own stays", why)

    def add_request(self, request: Any) -> None:
        """Add a request, whose block hashes are in C from now on."""
        if isinstance(self.kv_cache_manager, KVManager) and not request.resumable:  # a session cuts its hashes short
            request.block_hashes = BlockHashes(request.block_hashes)
        super().add_request(request)


class AsyncScheduler(Scheduler, _async.AsyncScheduler):  # type: ignore[misc]
    """`Scheduler` with asynchronous scheduling."""
