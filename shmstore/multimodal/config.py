"""`MultiModalCacheConfig`: what to cache where, checked once, and told in words.

Two independent questions: is the *processor* cache on (don't preprocess twice), and is the *IPC* cache on (don't send
twice)? The first bounds what the API server keeps for itself, the second what the two sides share.
"""

from __future__ import annotations

import dataclasses
import math
from numbers import Integral, Real
from typing import Literal

from shmstore.errors import shown
from shmstore.multimodal.values.sizes import GIB

__all__ = ["MultiModalCacheConfig"]

_DEFAULT_MAX_OBJECT_SIZE_MB = 128
_MAX_GB = 1 << 32  # more than any machine has, and in bytes still a 64-bit number
_MAX_READERS, _MAX_NAME, _MAX_OBJECTS = 256, 200, 1 << 24  # the store's own bounds; a test compares them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalCacheConfig:
    """The configuration of every cache of one engine; each process builds its own part from it.

    Sizes in GiB, 0 switches off. ValueError at construction, naming the field.
    """

    processor_cache_gb: float = 4.0
    """Of each API server: preprocessed items and prompt updates; with an IPC cache the prompt updates alone."""
    ipc_cache_gb: float | None = None
    """Of the items beyond the API server: in the engine core (`lru`) or in shared memory (`shm`).

    None: as `processor_cache_gb`."""
    cache_type: Literal["lru", "shm"] = "lru"
    """Where the IPC cache is: in the engine core's memory, or in shared memory that the workers read."""
    shm_max_object_size_mb: int = _DEFAULT_MAX_OBJECT_SIZE_MB
    """MiB; a larger item is sent inline. `shm` only."""
    shm_max_objects: int | None = None
    """Items that the segment holds at a time, however small; the number of references not yet read grows with it.

    None: one for each 16 KiB, from 256 to 1,048,576; more where most items are smaller, else a part of the segment is
    never used. Each takes some 110 bytes (1 rank) to 330 (32 ranks) beside `ipc_cache_gb`. `shm` only."""
    shm_name: str | None = None
    """POSIX name of the segment; None: a unique one. It stands for nothing where there is no segment.

    A name is one segment of a host: replicas (`data_parallel_external_lb`) each need a configuration with their own."""
    shm_prefault: bool = False
    """Touch every page of the segment at the start, so that no request pays for it. `shm` only."""
    world_size: int = 1
    """Worker processes that read each item."""
    api_process_count: int = 1
    """API servers; with more than one there is no IPC cache, since each would have to know what the others sent."""
    data_parallel_size: int = 1
    """Engine cores; with more than one there is no IPC cache unless each has its own API server, see below."""
    data_parallel_external_lb: bool = False
    """Requests are spread over complete replicas from outside: each API server has one engine core."""
    supports_multimodal: bool = True
    """Whether the model takes anything but text."""

    def __post_init__(self) -> None:
        for name in ("processor_cache_gb", "ipc_cache_gb"):
            size = getattr(self, name)
            if size is None and name == "ipc_cache_gb":
                continue
            if isinstance(size, bool) or not isinstance(size, Real):
                raise ValueError(f"{name}: expected a number of GiB, got {shown(size)}")
            if not isinstance(size, (int, float)):  # such as NumPy's, whose products are as short as they are
                size = _float(size)
                object.__setattr__(self, name, size)
            if not 0 <= size <= _MAX_GB:  # also false for a NaN
                raise ValueError(f"{name}: expected 0 (off) to {_MAX_GB} GiB, got {shown(size)}")
            if size and not round(size * GIB):
                raise ValueError(f"{name}: expected 0 (off) or at least a byte, got {shown(size)} GiB")
        for name in ("data_parallel_external_lb", "supports_multimodal"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected a bool, got {shown(getattr(self, name))}")
        if self.cache_type not in ("lru", "shm"):
            raise ValueError(f"cache_type: expected 'lru' or 'shm', got {shown(self.cache_type)}")
        for name in ("shm_max_object_size_mb", "world_size", "api_process_count", "data_parallel_size"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {shown(count)}")
            object.__setattr__(self, name, int(count))
        if self.cache_type == "shm" and self.world_size > _MAX_READERS:
            raise ValueError(f"world_size: a store has up to {_MAX_READERS} readers, got {shown(self.world_size)}")
        most = self.shm_max_objects
        if most is not None:
            if isinstance(most, bool) or not isinstance(most, Integral) or not 1 <= most <= _MAX_OBJECTS:
                raise ValueError(
                    f"shm_max_objects: expected None or an integer from 1 to {_MAX_OBJECTS}, got {shown(most)}"
                )
            object.__setattr__(self, "shm_max_objects", int(most))
        if not isinstance(self.shm_prefault, bool) or (self.shm_prefault and self.cache_type != "shm"):
            raise ValueError(f"shm_prefault: expected a bool, True with 'shm' only, got {shown(self.shm_prefault)}")
        if self.shm_name is not None and not _is_name(self.shm_name):
            raise ValueError(
                f"shm_name: expected 1 to {_MAX_NAME} bytes in UTF-8, without a slash, not . or .., "
                f"got {shown(self.shm_name)}"
            )
        if self.cache_type != "shm":
            default = MultiModalCacheConfig.__dataclass_fields__
            for name in ("shm_max_object_size_mb", "shm_max_objects"):
                if getattr(self, name) != default[name].default:
                    raise ValueError(
                        f"{name}: has no meaning with cache_type={shown(self.cache_type)}, only with 'shm'"
                    )

    @property
    def processor_cache_bytes(self) -> int:
        """`processor_cache_gb` in bytes."""
        return round(self.processor_cache_gb * GIB)

    @property
    def ipc_cache_bytes(self) -> int:
        """`ipc_cache_gb` in bytes, or its default."""
        gb = self.processor_cache_gb if self.ipc_cache_gb is None else self.ipc_cache_gb
        return round(gb * GIB)

    @property
    def max_object_bytes(self) -> int:
        """The largest object that the shared-memory store takes, in bytes."""
        return min(self.shm_max_object_size_mb << 20, self.ipc_cache_bytes)

    @property
    def processor_cache_enabled(self) -> bool:
        """Whether anything is cached at all."""
        return self.supports_multimodal and self.processor_cache_bytes > 0

    @property
    def ipc_cache_enabled(self) -> bool:
        """Whether an item that was sent once need not be sent again."""
        one_to_one = self.data_parallel_size == 1 or self.data_parallel_external_lb
        return self.processor_cache_enabled and self.ipc_cache_bytes > 0 and self.api_process_count == 1 and one_to_one

    def describe(self) -> str:
        """Which process keeps what, and how much memory that takes at most, one line for each kind of process."""
        p0, p1, workers = self._processes()
        if not self.processor_cache_enabled:
            why = "processor_cache_gb is 0" if self.supports_multimodal else "the model takes text only"
            return (
                f"No multi-modal cache: {why}. Each item is preprocessed and sent every time.\n"
                f"{_together(p0, p1, workers)}: nothing."
            )
        processor, ipc = _gib(self.processor_cache_bytes), _gib(self.ipc_cache_bytes)
        if not self.ipc_cache_enabled:
            return (
                f"Processor cache only: {self._why_no_ipc()}. "
                "Nothing is preprocessed twice; each item is sent every time.\n"
                f"{p0}: up to {processor} of items and prompt updates.\n{_together(p1, workers)}: nothing."
            )
        if self.cache_type == "lru":
            return (
                "Processor and IPC cache, in the engine core's memory: nothing is preprocessed or sent twice.\n"
                f"{p0}: keys, sizes and up to {processor} of prompt updates; no tensors.\n"
                f"{p1}: up to {ipc} of items.\n{workers}: nothing; items reach them from the engine core each time."
            )
        return (
            "Processor and IPC cache, in shared memory: what is in it is not preprocessed or sent twice.\n"
            f"{p0}: writes one segment of {ipc}, taken from /dev/shm at the start, once for all processes of the host; "
            f"beside it up to {processor} of prompt updates. "
            f"Items over {_gib(self.max_object_bytes)} are sent inline, and nobody keeps them, "
            f"and so are those that find no room or entry: it has {self._entries()}.\n"
            f"{p1}: nothing; it forwards references.\n{workers}: the same segment, mapped; no copy of an item."
        )

    def _entries(self) -> str:
        if self.shm_max_objects is not None:
            return f"entries for {self.shm_max_objects} items (shm_max_objects)"
        return "one for each 16 KiB, at least 256 and at most 1048576 (shm_max_objects)"

    def _processes(self) -> tuple[str, str, str]:
        p0 = "API server" if self.api_process_count == 1 else f"Each of {self.api_process_count} API servers"
        p1 = "Engine core" if self.data_parallel_size == 1 else f"Each of {self.data_parallel_size} engine cores"
        workers = "Worker" if self.world_size == 1 else f"Each of {self.world_size} workers"
        return p0, p1, workers

    def _why_no_ipc(self) -> str:
        if self.ipc_cache_bytes == 0:
            return "ipc_cache_gb is 0"
        if self.api_process_count > 1:
            return f"there are {self.api_process_count} API servers, and none knows what the others have sent"
        return f"{self.data_parallel_size} engine cores share one API server, and an item may go to any of them"


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= _MAX_NAME
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _float(size: Real) -> float:
    try:
        return float(size)
    except OverflowError:
        return math.inf


def _together(first: str, *others: str) -> str:
    *between, last = (other[0].lower() + other[1:] for other in others)
    return f"{', '.join([first, *between])} and {last}"


def _gib(nbytes: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} bytes"
