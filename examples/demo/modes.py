"""The modes that the demo compares: a configuration each, from which the factories build every process's part.

No process knows its mode: it uses what its factory returns, and forwards items unchanged if that is None.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shmstore.multimodal import MultiModalCacheConfig

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Mode:
    """One way in which items reach the workers."""

    summary: str
    """For the report: which process keeps what, and what travels."""
    ipc_cache: bool
    cache_type: Literal["lru", "shm"] = "lru"

    def config(self, *, workers: int, capacity: int, store_name: str) -> MultiModalCacheConfig:
        """Return the configuration: `capacity` bytes of items in whichever process keeps them."""
        config = MultiModalCacheConfig(
            processor_cache_gb=capacity / _GIB,
            ipc_cache_gb=capacity / _GIB if self.ipc_cache else 0,
            cache_type=self.cache_type,
            world_size=workers,
        )
        if self.cache_type == "lru":
            return config
        # Time a store in use, not the kernel that clears its pages for the first time.
        size = -(-capacity // _MIB)
        return replace(config, shm_max_object_size_mb=size, shm_name=store_name, shm_prefault=True)


MODES = {
    "none": Mode("the API process keeps items, which are pickled through every pipe", False),
    "lru": Mode("the API process keeps keys, the engine items, which are pickled to each worker", True),
    "shm": Mode("each item once in shared memory; a reference through the pipes", True, "shm"),
}
"""Every mode, in the order of runs and reports."""
