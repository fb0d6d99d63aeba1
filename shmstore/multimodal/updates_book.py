"""What P0 of `shm` keeps beside the items of the store: their prompt updates, in a book that can be put back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeAlias, TypeVar

from shmstore.multimodal.values.items import ResolvedPromptUpdate

__all__ = ["Entry", "Kept", "UpdatesBook", "ValueBook"]

V = TypeVar("V")

Kept: TypeAlias = tuple[ResolvedPromptUpdate, ...]
Entry: TypeAlias = tuple[Kept, int]
"""And their size."""


class ValueBook(Generic[V]):
    """Values by key, bounded by the sum of their sizes: the least recently used go first. The lock is its owner's.

    An interrupt leaves it as it was before or after an entry came or went: between an entry's change and that of
    `nbytes` nothing is called, and only after a call or at a loop's end is there one.
    """

    __slots__ = ("_capacity", "_entries", "nbytes")

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[V, int]] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def use(self, key: str) -> tuple[V, int] | None:
        """(value, size), marked as just used; None where there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def peek(self, key: str) -> V | None:
        """The value or None; no use."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: str, value: V, size: int) -> None:
        """Keep the value; one that is larger than the whole book is not kept, and nothing goes for it."""
        entries = self._entries
        if key in entries:
            self.drop(key)
        if size > self._capacity:
            return
        entries[key] = (value, size)
        self.nbytes += size
        while self.nbytes > self._capacity:
            self.drop(next(iter(entries)))

    def drop(self, key: str) -> None:
        """Forget the value; absent: nothing."""
        entry = self._entries.get(key)
        if entry is not None:
            self.nbytes -= entry[1]
            del self._entries[key]

    def clear(self) -> None:
        """Forget everything."""
        self._entries = OrderedDict()
        self.nbytes = 0


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
