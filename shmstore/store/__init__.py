"""The store: `ObjectStoreWriter` puts and hands out, `ObjectStoreReader` reads in place. Two roles, two types."""

from shmstore.store.claims import Claim
from shmstore.store.leases import LeasedRef, PinnedRef, Reservation
from shmstore.store.options import StoreOptions
from shmstore.store.reader import ObjectStoreReader
from shmstore.store.stats import KindStats, ReaderStats, StoreStats
from shmstore.store.writer import ObjectStoreWriter

__all__ = [
    "Claim",
    "KindStats",
    "LeasedRef",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "PinnedRef",
    "ReaderStats",
    "Reservation",
    "StoreOptions",
    "StoreStats",
]
