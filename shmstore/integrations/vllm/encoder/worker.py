"""The workers' side of the connector: each rank of the first stage loads, and the first of them stores."""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from shmstore.integrations.encoder.outputs import Outputs
from shmstore.integrations.vllm.encoder.messages import Report, Step
from shmstore.integrations.vllm.encoder.settings import Settings


class WorkerSide(Outputs):
    """What one worker has of the store. The stages after the first neither encode nor load."""

    def __init__(self, settings: Settings, device: str, *, stores: bool) -> None:
        first = get_pp_group().is_first_rank
        stores = stores and first and get_tp_group().rank_in_group == 0
        super().__init__(settings, device, stores=stores, reads=first, views=settings.read == "views")

    def load(self, step: Step, cache: dict[str, Any]) -> None:
        """Put the outputs of this step into vLLM's cache; the scheduler holds them meanwhile."""
        if self._reader is not None:
            for identifier, ref in step.loads.items():
                cache[identifier] = self.read(ref)

    def save(self, step: Step, identifier: str, output: Any) -> None:
        """Store an output that the scheduler wants stored."""
        if (key := step.saves.get(identifier)) is not None:
            self.store(key, step.namespace, output)

    def report(self) -> Report | None:
        """Return what was counted since the last report."""
        return Report(figures) if (figures := self.figures()) else None
