"""vLLM's connector for encoder outputs: what one engine has encoded, every engine of the host loads.

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "ShmstoreECConnector",
      "ec_connector_module_path": "shmstore.integrations.vllm.encoder", "ec_role": "ec_both",
      "ec_connector_extra_config": {"store": "mm-encoder", "capacity_gb": 16}}'

The scheduler finds outputs and claims those that its engine will make; the first worker stores them; each rank of the
first pipeline stage loads. The store outlives its engines. `Settings` has the options.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from shmstore.integrations.vllm import compare, names
from shmstore.integrations.vllm.encoder import scope
from shmstore.integrations.vllm.encoder.messages import EncoderMetrics, EncoderStats, Step
from shmstore.integrations.vllm.encoder.scheduler import SchedulerSide
from shmstore.integrations.vllm.encoder.settings import Settings
from shmstore.integrations.vllm.encoder.worker import WorkerSide

__all__ = ["ShmstoreECConnector"]

_log = logging.getLogger("vllm.shmstore")
_MANAGER = "shmstore.integrations.vllm.encoder_cache.FollowedManager"


class ShmstoreECConnector(ECConnectorBase):  # type: ignore[misc]
    """What vLLM calls in its scheduler, or in a worker, of a store of encoder outputs."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        """Open the store. Raises ValueError for wrong options, and for an engine that it cannot serve."""
        super().__init__(vllm_config, role)
        if (problem := compare.difference(compare.ENCODER_CONNECTOR)) is not None:
            raise RuntimeError(f"shmstore does not know this vLLM: {problem} (hint: remove --ec-transfer-config)")
        settings, own = Settings.of(vllm_config), scope.of(vllm_config)
        self._scheduler: Any = None
        self._worker: Any = None
        if role is ECConnectorRole.SCHEDULER:
            hashed = vllm_config.model_config.multimodal_config.media_io_kwargs and not names.numbered_by_run
            if hashed and not settings.share_uuids:
                _log.warning("with --media-io-kwargs items that clients have named are shared as well: see the guide")
            fields_for = PlaceholderMetadataResolver(vllm_config.model_config).fields_for
            self._scheduler = SchedulerSide(
                settings,
                own,
                fields_for,
                dtype=vllm_config.model_config.dtype,
                widths=getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", {}),
                stores=self.is_producer,
            )
            manager = vllm_config.ec_manager_config  # which other engines may have, too
            if manager.encoder_cache_manager_cls is None:  # the scheduler makes it after this
                vllm_config.ec_manager_config = replace(manager, encoder_cache_manager_cls=_MANAGER)
        else:
            self._worker = WorkerSide(settings, vllm_config.device_config.device_type, stores=self.is_producer)

    def shutdown(self) -> None:
        """Close the store, which stays. vLLM may kill its processes instead; then the kernel ends what they hold."""
        (self._scheduler or self._worker).close()

    # ---- in a worker

    def start_load_caches(self, encoder_cache: dict[str, Any], **_: Any) -> None:
        """Load the stored outputs of this step."""
        self._worker.load(self._connector_metadata, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_: Any) -> None:
        """Store an output that was just made."""
        self._worker.save(self._connector_metadata, mm_hash, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> Any:
        """Report the figures."""
        return self._worker.report()

    # ---- in the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Return False if the request should wait for an output that another engine is making."""
        ready: bool = self._scheduler.ensure(request, num_computed_tokens)
        return ready

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether an output is stored."""
        found: bool = self._scheduler.has(identifier)
        return found

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Note an item of the next step."""
        self._scheduler.allocate(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """Return what the workers do in this step."""
        step: Step = self._scheduler.build(scheduler_output)
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the first worker's report."""
        if (report := connector_output.ec_connector_worker_meta) is not None:
            self._scheduler.count(report)

    def take_unavailable_requests(self) -> set[str]:
        """Return the requests that must fail; the output of the oldest step has come."""
        lost: set[str] = self._scheduler.lost()
        return lost

    def request_finished(self, request: Any) -> tuple[bool, None]:
        """Forget a request."""
        self._scheduler.finish(request)
        return False, None

    # ---- figures

    def get_ec_connector_stats(self) -> EncoderStats | None:
        """Return what the scheduler has counted since the last call, with what the first worker has reported."""
        if self._scheduler is None or not (figures := self._scheduler.figures()):
            return None
        return EncoderStats(dict(figures))

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EncoderStats:
        """Return figures that another process has sent."""
        return EncoderStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> EncoderMetrics:
        """Return the counters for `/metrics`."""
        return EncoderMetrics(*given)
