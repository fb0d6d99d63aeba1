"""The options of a store of encoder outputs, which each engine takes in its own way."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from shmstore.store.options import MAX_READERS, MAX_WRITERS, StoreOptions, mode_for

START = 600.0
"""Seconds within which the store must be there: whoever makes it reserves some GiB a second."""
CONFIG = ConfigDict(strict=True, extra="forbid")

_OUTPUT = 1 << 20
"""The bytes of a small encoder output; the store has an entry for each that fits."""

_Gib = Annotated[float, Field(gt=0, le=2**14, allow_inf_nan=False)]
_Engines = Annotated[int, Field(ge=1, le=MAX_WRITERS)]
_Readers = Annotated[int, Field(ge=1, le=MAX_READERS)]
_Id = Annotated[int, Field(ge=0, le=2**32 - 2)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_EXAMPLE = '{"store": "mm-encoder", "capacity_gb": 16}, and other options as in the guide'


@dataclass(frozen=True, config=CONFIG)
class Settings:
    """What every engine may be told about the store."""

    store: str
    """The store's name; engines with the same name share it."""
    capacity_gb: _Gib
    """The space of each engine that stores, in GiB, which is reserved in shared memory when it starts."""
    dir: str | None = None
    """The folder of the store, as this engine sees it; by default that of SHMSTORE_DIR, without it /dev/shm."""
    gid: _Id | None = None
    """A group that may use the store, too, with `allow_uid`; by default only the user who makes it may."""
    allow_uid: _Id | None = None
    """The user who owns the store, in the options of all its engines if there is a `gid`; only that user makes it."""
    engines: _Engines = 8
    """How many engines may store at a time; more of them only read."""
    readers: _Readers = 64
    """How many processes may read: of each engine its scheduler and its first stage's workers."""
    quota_gb: _Gib | None = None
    """The limit for encoder outputs, if the store is shared with something else; by default the capacity."""
    single_flight: bool = True
    """Whether an engine waits for an output that another one is making."""
    wait_s: _Seconds = 30.0
    """Seconds after a request's first wait in which it waits again; then its engine encodes what is missing."""

    @classmethod
    def parse(cls, options: dict[str, Any], where: str) -> Self:
        """Return the settings that these options say; ValueError if they say none. `where` is what has the options."""
        try:
            settings = cls(**options)
        except ValidationError as error:
            wrong = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
            raise ValueError(f"{where}: {wrong} (hint: write {_EXAMPLE})") from None
        if settings.gid is not None and settings.allow_uid is None:
            raise ValueError(f"{where}: gid needs allow_uid: name the user who owns the store, too")
        return settings

    @property
    def store_options(self) -> StoreOptions:
        """The options of the store, unless somebody has made it with others."""
        capacity = int(self.capacity_gb * 2**30)
        return {
            "capacity": capacity,
            "max_objects": max(256, capacity // _OUTPUT),
            "n_readers": self.readers,
            "n_writers": self.engines,
            "dir": self.dir,
            "mode": mode_for(self.gid),
            "gid": self.gid,
        }
