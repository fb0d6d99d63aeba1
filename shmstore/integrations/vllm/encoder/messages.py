"""What the connector's two sides tell each other in each step, and the figures that vLLM shows of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from shmstore.integrations.encoder.outputs import APART, FIGURES
from shmstore.refs import ObjectRef


@dataclass
class Step(ECConnectorMetadata):  # type: ignore[misc]
    """What the workers do in a step."""

    namespace: str
    loads: dict[str, ObjectRef] = field(default_factory=dict)
    """References of stored outputs, by identifier."""
    saves: dict[str, str] = field(default_factory=dict)
    """Keys to store outputs under, by identifier."""


@dataclass
class Report(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """What the first worker has counted."""

    figures: Counter[str]

    def aggregate(self, other: Report) -> Report:
        """Return both in one."""
        return Report(self.figures + other.figures)


class EncoderStats(ECConnectorStats):  # type: ignore[misc]
    """Counts since the last look, by the names in `FIGURES`."""

    def reset(self) -> None:
        """Forget them."""
        self.data.clear()

    def aggregate(self, other: ECConnectorStats) -> EncoderStats:
        """Return the sums."""
        return EncoderStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """Return them as they are, for the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class EncoderMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """The same for Prometheus: `shmstore_encoder_hits_total` and so on, for each engine."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, what in FIGURES.items():
            counter = self._counter_cls(f"shmstore_encoder_{name}", what, labelnames=self._labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in self.per_engine_labelvalues.items()
            }

        gauge = self._gauge_cls(
            "shmstore_encoder_apart", APART, multiprocess_mode="mostrecent", labelnames=self._labelnames
        )
        self._apart = {engine: gauge.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last look."""
        for name, count in transfer_stats_data.items():
            if name == "apart":
                self._apart[engine_idx].set(1)
            else:
                self._counters[name][engine_idx].inc(count)
