"""The modes that the demo compares: a configuration each, from which the factories build every process's part.

No process knows its mode: it uses what its factory returns, and forwards items unchanged if that is None.
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
    """For the report: which process keeps what, and what travels."""
    ipc_cache: bool
    cache_type: Literal["lru", "shm"] = "lru"

    @property
    def keeps_segment(self) -> bool:
        """Whether the mode makes a segment in shared memory, which must not outlive the run."""
        return self.cache_type == "shm"

    def config(self, *, workers: int, capacity: int, store_name: str) -> MultiModalCacheConfig:
        """Return the configuration: `capacity` bytes of items in whichever process keeps them."""
        return MultiModalCacheConfig(
            processor_cache_gb=capacity / _GIB,
            ipc_cache_gb=capacity / _GIB if self.ipc_cache else 0,
            cache_type=self.cache_type,
            world_size=workers,
            shm_max_object_size_mb=-(-capacity // _MIB) if self.keeps_segment else 128,
            shm_name=store_name if self.keeps_segment else None,
            # Time a store in use, not the kernel that clears its pages for the first time.
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
"""Every mode, in the order of runs and reports."""
