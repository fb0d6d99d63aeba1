"""A tier in a dict, whose behaviour a test can change."""

import threading
from collections.abc import Sequence

from shmstore.errors import TierError
from shmstore.tiers import Into


class MemoryTier:
    """Keeps copies; `fail` makes every call raise it, and `pause` makes fetches wait for an event before each span."""

    def __init__(self) -> None:
        self.values: dict[str, list[bytearray]] = {}
        self.fail: Exception | None = None
        self.pause: threading.Event | None = None
        self.waiting = threading.Event()
        self.calls: list[str] = []
        self.closed = False

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fail is not None:
            raise self.fail

    def publish(self, key: str, spans: Sequence[memoryview]) -> None:
        self._called("publish")
        if self.pause is not None:
            self.waiting.set()
            self.pause.wait(10)
        self.values[key] = [bytearray(span) for span in spans]

    def fetch(self, key: str, into: Into) -> bool:
        self._called("fetch")
        for span in self.values.get(key, [None]):
            if self.pause is not None:
                self.waiting.set()
                self.pause.wait(10)
            if span is None or (memory := into(len(span))) is None:
                return False
            memory[:] = span
        return True

    def has(self, keys: Sequence[str]) -> list[bool]:
        self._called("has")
        return [key in self.values for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        self._called("remove")
        for key in keys:
            self.values.pop(key, None)

    def close(self) -> None:
        self.closed = True


def late() -> TierError:
    """Return the error of a server that does not answer."""
    return TierError("the server did not answer in time")
