"""What P0 of `shm` keeps beside the items of the store: their prompt updates, in a book that can be put back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from shmstore.multimodal.items import ResolvedPromptUpdate
from shmstore.multimodal.lockstep import ValueBook

__all__ = ["Entry", "Kept", "UpdatesBook"]

Kept: TypeAlias = tuple[ResolvedPromptUpdate, ...]
Entry: TypeAlias = tuple[Kept, int]
"""And their size."""


class UpdatesBook(ValueBook[Kept]):
    """A book that can be made again as it was."""

    __slots__ = ()

    def add(self, key: str, value: Kept, size: int, gone: Iterable[str] = ()) -> bool:
        """`drop` each of `gone`, then `put` where nothing goes for it; False, and not put, where something would."""
        entries = self._entries
        for other in gone:  # without a call for each: it is a part of what each miss costs
            entry = entries.get(other)
            if entry is not None:
                self.nbytes -= entry[1]
                del entries[other]
        nbytes = self.nbytes + size
        if nbytes > self._capacity or key in entries:
            return False
        entries[key] = value, size
        self.nbytes = nbytes
        return True

    def leaving(self, key: str, size: int) -> list[tuple[str, Entry]]:
        """What `put` of a value of this size is going to take out, the first first."""
        entries = self._entries
        gone = []
        over = self.nbytes + size - self._capacity
        if key in entries:
            gone.append((key, entries[key]))
            over -= entries[key][1]
        if size <= self._capacity:
            for other, entry in entries.items():
                if over <= 0:
                    break
                if other != key:
                    gone.append((other, entry))
                    over -= entry[1]
        return gone

    def rebuild(self, put: Iterable[str], gone: Iterable[tuple[str, Entry]], known: Callable[[str], bool]) -> None:
        """Without `put` and with `gone`, which left first; of both only what is `known`. Any `put` may be half done."""
        entries: OrderedDict[str, Entry] = OrderedDict()
        for key, entry in gone:
            if key not in entries and known(key):
                entries[key] = entry
        new = frozenset(put)
        for key, entry in self._entries.items():
            if key not in entries and key not in new and known(key):
                entries[key] = entry
        nbytes = sum(size for _, size in entries.values())
        self._entries, self.nbytes = entries, nbytes
