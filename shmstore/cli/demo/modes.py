"""What the demo compares: a configuration for each mode, from which every process builds its part by the factories.

The processes know no mode: what a factory gives, they use, and where it gives None, things pass as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmstore.multimodal import MultiModalCacheConfig

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Mode:
    """One way in which items reach the workers."""

    name: str
    summary: str
    """For the report: who keeps what, and what travels."""
    ipc_cache: bool
    cache_type: Literal["lru", "shm"] = "lru"

    @property
    def keeps_segment(self) -> bool:
        """Whether there is a segment in shared memory, which must not outlive the run."""
        return self.cache_type == "shm"

    def config(self, *, workers: int, capacity: int, store_name: str) -> MultiModalCacheConfig:
        """Return the configuration: `capacity` bytes of items wherever this mode keeps them."""
        return MultiModalCacheConfig(
            processor_cache_gb=capacity / _GIB,
            ipc_cache_gb=capacity / _GIB if self.ipc_cache else 0,
            cache_type=self.cache_type,
            world_size=workers,
            shm_max_object_size_mb=-(-capacity // _MIB) if self.keeps_segment else 128,
            shm_name=store_name if self.keeps_segment else None,
            # So that the clock sees a store in use and not the kernel clearing its pages for the first time.
            shm_prefault=self.keeps_segment,
        )


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("none", "the API process keeps items, which are pickled through every pipe", False),
        Mode("lru", "the API process keeps keys, the engine items, which are pickled to each worker", True),
        Mode("shm", "each item once in shared memory; a reference through the pipes", True, "shm"),
    )
}
"""Every mode, in the order in which they run and are shown."""
