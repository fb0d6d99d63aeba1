"""What P0 of `shm` keeps beside the items of the store: their prompt updates, bounded by their sizes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from shmstore.multimodal.items import ResolvedPromptUpdate

__all__ = ["Kept", "UpdatesBook"]

Kept: TypeAlias = tuple[ResolvedPromptUpdate, ...]


class UpdatesBook:
    """Prompt updates by hash; the least recently used go first. Its owner lets one thread at a time change it.

    Between an entry's change and that of `nbytes` nothing is called: an interrupt comes before both or after both.
    """

    __slots__ = ("_capacity", "_entries", "nbytes")

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[Kept, int]] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, mm_hash: str) -> Kept | None:
        """Return the updates; None where there are none. For any thread, as is `touch`."""
        entry = self._entries.get(mm_hash)
        return None if entry is None else entry[0]

    def touch(self, mm_hashes: Iterable[str]) -> None:
        """Mark the updates of each as just used; absent: nothing."""
        for mm_hash in mm_hashes:
            with contextlib.suppress(KeyError):
                self._entries.move_to_end(mm_hash)

    def add(self, mm_hash: str, kept: Kept, size: int) -> None:
        """Keep the updates, for which others may go; if they are larger than the whole book, drop them alone."""
        self.drop(mm_hash)
        if size > self._capacity:
            return
        while self.nbytes + size > self._capacity:
            self.drop(next(iter(self._entries), mm_hash))  # empty: another thread has just closed
        self._entries[mm_hash] = kept, size
        self.nbytes += size

    def drop(self, mm_hash: str) -> None:
        """Forget the updates; absent: nothing."""
        if mm_hash in self._entries:
            self.nbytes -= self._entries[mm_hash][1]
            del self._entries[mm_hash]

    def clear(self) -> None:
        """Forget all updates."""
        entries: OrderedDict[str, tuple[Kept, int]] = OrderedDict()
        self._entries = entries
        self.nbytes = 0
