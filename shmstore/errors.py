"""What can go wrong, as exceptions: each is also the built-in that one would catch."""


class ShmStoreError(Exception):
    """Base of every error that shmstore raises by itself."""


class StoreFullError(ShmStoreError, MemoryError):
    """There is no room: nothing was stored and nothing was evicted."""
