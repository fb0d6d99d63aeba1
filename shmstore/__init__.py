"""shmstore: a shared-memory object store for the tensors of inference engines.

One writer puts objects into shared memory, once; readers take them in place by references of 40 bytes.
"""

import logging
from typing import TYPE_CHECKING, Any

from shmstore import errors
from shmstore.errors import *  # noqa: F403 - the public errors, as errors.__all__ lists them
from shmstore.refs import ObjectRef, StoreHandle

if TYPE_CHECKING:
    from shmstore.frontdoor.cache import Cache, CacheStats
    from shmstore.frontdoor.queue import Delivery, Queue
    from shmstore.serde import MsgpackSerde, ObjectSerde, PickleSerde, TensorSpec
    from shmstore.store import (
        Claim,
        KindStats,
        LeasedRef,
        ObjectStoreReader,
        ObjectStoreWriter,
        PinnedRef,
        ReaderStats,
        Reservation,
        StoreOptions,
        StoreStats,
    )

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet unless the application asks

__version__ = "0.1.0"

__all__ = [
    *errors.__all__,
    "Cache",
    "CacheStats",
    "Claim",
    "Delivery",
    "KindStats",
    "LeasedRef",
    "MsgpackSerde",
    "ObjectRef",
    "ObjectSerde",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "PickleSerde",
    "PinnedRef",
    "Queue",
    "ReaderStats",
    "Reservation",
    "StoreHandle",
    "StoreOptions",
    "StoreStats",
    "TensorSpec",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the rest of the public names, and numpy with them, when the first one is used.

    So `shmstore verify --quick`, which an orchestrator runs every few seconds, starts without numpy.
    """
    if name not in (*__all__, "serde", "store"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("Cache", "CacheStats", "Delivery", "Queue"):  # with asyncio and multiprocessing
        import shmstore.frontdoor.cache as cache
        import shmstore.frontdoor.queue as queue

        globals().update({late: getattr(home, late) for home in (cache, queue) for late in home.__all__})
        return globals()[name]
    import shmstore.serde as serde
    import shmstore.store as store

    globals().update({late: getattr(home, late) for home in (serde, store) for late in home.__all__ if late in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
