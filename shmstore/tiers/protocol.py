"""The interface between a store and a tier: `Tier`.

A value of a tier is a few *spans* of bytes under one key. An object is two: its metadata and its payload. A back end
moves them between their memory and its server, without a copy in Python. It has no queue, no retry, no statistics and
no checksums. `StoreTier` has these once for all back ends.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

Into = Callable[[int], memoryview | None]
"""Gives the memory for the next span, whose size it gets: writable, flat and of exactly that size; None to stop."""


class Tier(Protocol):
    """Keeps values somewhere else; implement it for another back end.

    All methods are thread-safe. Each returns within the time-out of the back end, whatever its server does. A server
    that cannot be reached, is late, refuses or answers nonsense is a `TierError`, and one that has no room a
    `TierFullError`. After an error the next call tries again.

    A back end that must know memory before it moves it has one more method, `register(memory, path, offset)`. A
    `StoreTier` calls it first, for the data of its writer: its mapping of a file from an offset on.
    """

    def publish(self, key: str, spans: Sequence[memoryview]) -> None:
        """Keep these spans under `key`, in the place of earlier ones; there are 1 to 64 spans.

        `key` is printable ASCII of up to 200 characters. The bytes do not change until the call returns.
        """
        ...

    def fetch(self, key: str, into: Into) -> bool | None:
        """Read the spans of `key` into memory that `into` gives, and return whether all of them are there.

        None says that there is something else under the key, which no `publish` has left so.
        It calls `into` for each span in order, before the bytes of that span are transferred and after the span before
        is filled. If `into` returns None, the rest stays where it is. A False may leave any bytes in that memory.
        """
        ...

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether `fetch` would probably find it."""
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these keys; ignore those that are absent."""
        ...

    def close(self) -> None:
        """End connections and registrations; idempotent. Calls after it raise TierError."""
        ...
