"""The prompt updates that P0 of `shm` keeps for the items in the store, bounded by their sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

__all__ = ["Entry", "UpdatesBook"]

Entry: TypeAlias = tuple[Any, int]
"""Prompt updates as they are kept, and their size."""


class UpdatesBook(OrderedDict[str, Entry]):
    """Prompt updates by hash, the least recently used first; only one thread at a time may call `change`.

    No call comes between the change of an entry and that of `nbytes`, so an interrupt finds both changed or neither.
    """

    __slots__ = ("_capacity", "nbytes")

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self._capacity = capacity
        self.nbytes = 0

    def change(self, gone: Iterable[str], new: Mapping[str, Entry]) -> None:
        """Drop the updates of `gone`, then keep `new` and drop the oldest to make room.

        Ignore absent keys, and updates that are larger than the capacity.
        """
        for mm_hash in gone:  # inline, not a method: each miss pays for it
            if mm_hash in self:
                self.nbytes -= self[mm_hash][1]
                del self[mm_hash]
        for mm_hash, entry in new.items():
            size = entry[1]
            if mm_hash in self:
                self.nbytes -= self[mm_hash][1]
                del self[mm_hash]
            if size > self._capacity:
                continue
            while self.nbytes + size > self._capacity:
                for oldest in self:  # not `next(iter(self))`: another thread's hit could come between the two calls
                    self.nbytes -= self[oldest][1]
                    del self[oldest]
                    break
            self[mm_hash] = entry
            self.nbytes += size
