"""What can go wrong, as exceptions: each is also the built-in that one would catch."""


class ShmStoreError(Exception):
    """Base of every error that shmstore raises by itself: what happened, and a hint what to do."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class StoreFullError(ShmStoreError, MemoryError):
    """There is no room: nothing was stored and nothing was evicted."""
