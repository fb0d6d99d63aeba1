"""`MultiModalCacheConfig`: which caches are on, how large they are, and a description of both.

The *processor* cache avoids preprocessing an item twice, and the *IPC* cache avoids sending it twice. The first size
bounds what the API server keeps for itself; the second size bounds what the two sides share.
"""

from __future__ import annotations

import dataclasses
from numbers import Real
from typing import Any, Literal

from shmstore.errors import check_flags, kind_of, shown
from shmstore.places import folder_of
from shmstore.store.arguments import checked_id, checked_name, int_of
from shmstore.store.options import (
    MAX_GROUPS,
    MAX_OBJECTS,
    MAX_READERS,
    MAX_WRITERS,
    StoreOptions,
    mode_for,
)
from shmstore.tiers.urls import read_url

GIB = 1 << 30
_MAX_GB = 1 << 18  # what a store can have; more than a machine has
_UNBOUNDED = 1 << 31


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalCacheConfig:
    """The configuration of all caches of one engine; each process builds its own caches from it.

    Sizes are in GiB, and 0 switches a cache off. The constructor raises ValueError, with the name of the wrong field.
    """

    processor_cache_gb: float = 4.0
    """Size of the cache of each API server.

    It holds preprocessed items and prompt updates; with an IPC cache it holds prompt updates alone."""
    ipc_cache_gb: float | None = None
    """Size of the cache of items in the engine core (`lru`) or in shared memory (`shm`).

    None means the size of `processor_cache_gb`. In shared memory each API server has a part of this size."""
    cache_type: Literal["lru", "shm"] = "lru"
    """Place of the IPC cache: the engine core's memory, or shared memory that the workers read."""
    shm_max_object_size_mb: int = 128
    """Size in MiB above which an item is sent inline. For `shm` only."""
    shm_max_objects: int | None = None
    """Maximum number of items in the segment; the limit of unread references grows with it. For `shm` only.

    None means that of `max_objects` of `StoreOptions`. Set a larger number if most items are smaller than 16 KiB, or a
    part of the segment is never used. Each item takes about 110 bytes (1 rank) to 330 bytes (32 ranks) next to
    `ipc_cache_gb`."""
    shm_name: str | None = None
    """POSIX name of the segment; None means a unique name. It is ignored if there is no segment.

    API servers that share a segment find it by this name, so they need one. A host has one segment of a name, so each
    replica (`data_parallel_external_lb`) needs its own."""
    shm_dir: str | None = None
    """Folder of the segment, as this process sees it; None means that of `dir` of `StoreOptions`."""
    shm_gid: int | None = None
    """Group that may use the segment, too (mode 0660), with `shm_allow_uid`; None means its own user alone."""
    shm_allow_uid: int | None = None
    """User who owns the segment, for the processes of all its users, if `shm_gid` is set; only that user creates it."""
    shm_prefault: bool = False
    """Whether to touch every page of the segment at the start, so that no request pays for it. For `shm` only."""
    tier_url: str | None = dataclasses.field(default=None, repr=False)  # it may have a password
    """URL of a tier that has the items of other hosts, such as "redis://host:6379"; see `open_tier`. For `shm` only."""
    tier_namespace: str = ""
    """What must be the same on two hosts if one may use the items of the other, such as the version of a processor.

    It must not be empty if there is a `tier_url`."""
    world_size: int = 1
    """Number of worker processes of an engine core; all of them read each item that it gets."""
    api_process_count: int = 1
    """Number of API servers. With `shm` they share the items; with `lru` more than one have no IPC cache, because none
    knows what the others have sent."""
    data_parallel_size: int = 1
    """Number of engine cores; unless `data_parallel_external_lb` is set, any API server may send to any of them.

    With `shm` they share the items; with `lru` more than one have no IPC cache."""
    data_parallel_external_lb: bool = False
    """Whether an external load balancer spreads requests over replicas, each with API servers for its own core."""
    supports_multimodal: bool = True
    """Whether the model accepts inputs other than text."""

    def __post_init__(self) -> None:
        try:
            self._check()
        except TypeError as error:
            raise ValueError(str(error)) from None

    def _check(self) -> None:
        shared = self.cache_type == "shm"
        if self.cache_type not in ("lru", "shm"):
            raise ValueError(f"cache_type must be 'lru' or 'shm', not {shown(self.cache_type)}")
        fields = dataclasses.fields(self)
        check_flags(**{field.name: getattr(self, field.name) for field in fields if field.type == "bool"})
        for name in ("processor_cache_gb", "ipc_cache_gb"):
            size = getattr(self, name)
            if size is None and name == "ipc_cache_gb":
                continue
            if type(size) is bool or not issubclass(type(size), Real):
                raise ValueError(f"{name} must be a number of GiB, not {shown(size)}")
            if not 0 <= size <= _MAX_GB or (size and not round(float(size) * GIB)):  # a NaN is not in this range
                raise ValueError(f"{name} must be 0 (off), or from one byte to {_MAX_GB} GiB, not {shown(size)}")
            object.__setattr__(self, name, float(size))  # the products of NumPy's numbers keep their few bits
        for name, most in (
            ("shm_max_object_size_mb", _UNBOUNDED),
            ("shm_max_objects", MAX_OBJECTS),
            ("world_size", MAX_READERS if shared else _UNBOUNDED),
            ("api_process_count", MAX_WRITERS if shared else _UNBOUNDED),
            ("data_parallel_size", _UNBOUNDED),
        ):
            number = getattr(self, name)
            if number is not None or name != "shm_max_objects":
                object.__setattr__(self, name, int_of(name, number, 1, most))
        for name, check in (
            ("shm_name", checked_name),
            ("shm_dir", folder_of),
            ("shm_gid", checked_id),
            ("shm_allow_uid", checked_id),
        ):
            if (given := getattr(self, name)) is not None:
                try:
                    check(given)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{name} cannot be {shown(given)}: {error}") from None
        if self.shm_gid is not None and self.shm_allow_uid is None:
            raise ValueError("shm_gid needs shm_allow_uid: name the user who owns the segment, too, or omit shm_gid")
        for name, kind in (("tier_url", str | None), ("tier_namespace", str)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a string, not {kind_of(getattr(self, name))}")
        if shared:
            self._check_shared()
            return
        for name in ("shm_max_object_size_mb", "shm_max_objects", "shm_prefault", "tier_url"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name} is for 'shm' only; omit it, or set cache_type='shm', not 'lru'")

    def _check_shared(self) -> None:
        if self.tier_url is not None:
            try:
                read_url(self.tier_url, {})
            except ValueError as error:
                raise ValueError(f"tier_url cannot be used: {error}") from None
            if not self.tier_namespace:
                raise ValueError("tier_namespace must not be empty with a tier_url: two models would share items")
        most = min(MAX_GROUPS, MAX_READERS // self.world_size)
        if self.n_engines > most:
            raise ValueError(
                f"data_parallel_size must be at most {most} with cache_type='shm' and world_size {self.world_size}, "
                f"not {self.data_parallel_size}; "
                f"a segment has at most {MAX_READERS} workers in {MAX_GROUPS} engine cores"
            )
        if self.ipc_cache_enabled and self.api_process_count > 1 and self.shm_name is None:
            raise ValueError(
                f"shm_name must be set, because {self.api_process_count} API servers find the segment by its name; use "
                "one that no other deployment on the host has (api_process_count)"
            )

    @property
    def processor_cache_bytes(self) -> int:
        """`processor_cache_gb` in bytes."""
        return round(self.processor_cache_gb * GIB)

    @property
    def ipc_cache_bytes(self) -> int:
        """`ipc_cache_gb`, or its default, in bytes."""
        gb = self.processor_cache_gb if self.ipc_cache_gb is None else self.ipc_cache_gb
        return round(gb * GIB)

    @property
    def store_options(self) -> StoreOptions:
        """The options of the segment."""
        return {
            "capacity": self.ipc_cache_bytes,
            "n_readers": self.n_readers,
            "groups": [self.world_size] * self.n_engines,
            "n_writers": self.api_process_count,
            "max_object_size": self.max_object_bytes,
            "max_objects": self.shm_max_objects,
            "prefault": self.shm_prefault,
            "dir": self.shm_dir,
            "mode": mode_for(self.shm_gid),
            "gid": self.shm_gid,
        }

    @property
    def max_object_bytes(self) -> int:
        """The largest object that the shared-memory store accepts, in bytes."""
        return min(self.shm_max_object_size_mb << 20, self.ipc_cache_bytes)

    @property
    def processor_cache_enabled(self) -> bool:
        """Whether any cache is on."""
        return self.supports_multimodal and self.processor_cache_bytes > 0

    @property
    def n_engines(self) -> int:
        """The number of engine cores that an API server may send an item to."""
        return 1 if self.data_parallel_external_lb else self.data_parallel_size

    @property
    def n_readers(self) -> int:
        """The number of workers of these engine cores together."""
        return self.world_size * self.n_engines

    @property
    def ipc_cache_enabled(self) -> bool:
        """Whether the IPC cache is on, so that an item is sent only once."""
        can_share = self.cache_type == "shm" or (self.api_process_count == 1 and self.n_engines == 1)
        return self.processor_cache_enabled and self.ipc_cache_bytes > 0 and can_share

    def describe(self) -> str:
        """Return what each kind of process keeps and the most memory that it takes, one line for each."""
        processor, ipc = _gib(self.processor_cache_bytes), _gib(self.ipc_cache_bytes)
        server = engine = worker = "nothing"
        if not self.processor_cache_enabled:
            why = "processor_cache_gb is 0" if self.supports_multimodal else "the model takes text only"
            summary = f"No multi-modal cache: {why}. Each item is preprocessed and sent every time."
        elif not self.ipc_cache_enabled:
            summary = f"Processor cache only: {self._why_no_ipc()}. Each item is sent every time."
            server = f"up to {processor} of items and prompt updates"
        elif self.cache_type == "lru":
            summary = "Processor and IPC cache, in the engine core's memory."
            server = f"keys, sizes and up to {processor} of prompt updates; no tensors"
            engine = f"up to {ipc} of items"
            worker = "nothing; items reach them from the engine core each time"
        else:
            summary = "Processor and IPC cache, in shared memory."
            parts = self.api_process_count
            whole = _gib(parts * self.ipc_cache_bytes)
            segment = f"its part, {ipc}, of one segment of {whole}" if parts > 1 else f"one segment of {ipc}"
            most = self.shm_max_objects
            entries = "one entry for each 16 KiB, from 256 to 1048576" if most is None else f"entries for {most} items"
            server = (
                f"writes {segment}, allocated in {folder_of(self.shm_dir)} at the start, with {entries} "
                f"(shm_max_objects), and keeps up to {processor} of prompt updates. Items over "
                f"{_gib(self.max_object_bytes)}, and items without room or an entry, are sent inline and not cached"
            )
            engine = "nothing; it forwards references"
            worker = "the same segment, mapped; no copy of an item"
        lines = [
            summary,
            f"{_each(self.api_process_count, 'API server')}: {server}.",
            f"{_each(self.data_parallel_size, 'engine core')}: {engine}.",
            f"{_each(self.world_size * self.data_parallel_size, 'worker')}: {worker}.",
        ]
        return "\n".join(lines)

    def _why_no_ipc(self) -> str:
        if self.ipc_cache_bytes == 0:
            return "ipc_cache_gb is 0"
        if self.api_process_count > 1:
            return f"there are {self.api_process_count} API servers, and each does not know what the others have sent"
        return f"{self.data_parallel_size} engine cores share one API server, and an item may go to any of them"


def _each(count: int, what: str) -> str:
    return what[0].upper() + what[1:] if count == 1 else f"Each of {count} {what}s"


def _gib(nbytes: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} bytes"


def checked_config(config: Any) -> MultiModalCacheConfig:
    """Return the configuration; TypeError if it is none."""
    if not isinstance(config, MultiModalCacheConfig):
        raise TypeError(f"config must be a MultiModalCacheConfig, not {kind_of(config)}")
    return config
