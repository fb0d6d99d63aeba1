"""What P0 of `shm` keeps beside the items of the store: their prompt updates, bounded by their sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

__all__ = ["Entry", "UpdatesBook"]

Entry: TypeAlias = tuple[Any, int]
"""Prompt updates as they are kept, and their size."""


class UpdatesBook(OrderedDict[str, Entry]):
    """Prompt updates by hash, the least recently used first; changed by `change`, in one thread at a time.

    Between an entry's change and that of `nbytes` nothing is called: an interrupt comes before both or after both.
    """

    __slots__ = ("_capacity", "nbytes")

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self._capacity = capacity
        self.nbytes = 0

    def change(self, gone: Iterable[str], new: Mapping[str, Entry]) -> None:
        """Drop the updates of `gone`, then keep `new`; for them the oldest may go.

        Ignores an absent key, and updates that are larger than the whole book.
        """
        for mm_hash in gone:  # not a method for one: this is a part of what each miss costs
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
                for oldest in self:  # not `next(iter(self))`: a hit of another thread could come between the two calls
                    self.nbytes -= self[oldest][1]
                    del self[oldest]
                    break
            self[mm_hash] = entry
            self.nbytes += size
