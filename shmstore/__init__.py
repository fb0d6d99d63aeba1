"""shmstore: a shared-memory object store for the tensors of inference engines.

One writer puts objects into shared memory, once; readers take them in place by references of 40 bytes.
"""

import logging

from shmstore import errors
from shmstore.errors import *  # noqa: F403 - the public errors, as errors.__all__ lists them
from shmstore.refs import ObjectRef, StoreHandle
from shmstore.serde import MsgpackSerde, ObjectSerde, PickleSerde, TensorSpec
from shmstore.store import (
    KindStats,
    LeasedRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    Protection,
    ReaderStats,
    StoreStats,
)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet unless the application asks

__version__ = "0.1.0"

__all__ = [
    *errors.__all__,
    "KindStats",
    "LeasedRef",
    "MsgpackSerde",
    "ObjectRef",
    "ObjectSerde",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "PickleSerde",
    "Protection",
    "ReaderStats",
    "StoreHandle",
    "StoreStats",
    "TensorSpec",
    "__version__",
]
