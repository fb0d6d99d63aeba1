"""`LRUCache`: a bounded mapping in order of use, with pins, counts and a hook; and `CacheInfo`, what it counted.

cachetools keeps the values, their sizes and the sum; what goes, and when, is decided here, by an order of use of our
own. Only public names of cachetools are used: the order that its own LRUCache keeps is private, and its pins would
have had to be threaded through it.

An interrupt (a signal's handler that raises) may come between cachetools' change and ours. So a key is in the order
before it has a value and until after it has lost it: every value can be found there, and a key in it without a value
is absent, and dropped by whatever comes across it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import TypeVar, overload

import cachetools

from shmstore.errors import shown

__all__ = ["CacheInfo", "HitCounter", "LRUCache", "most_entries"]

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """How often a cache was asked, and how often it had the answer."""

    hits: int = 0
    """Lookups that were answered from the cache."""
    total: int = 0
    """All lookups."""

    @property
    def hit_ratio(self) -> float:
        """hits / total; 0.0 before the first lookup."""
        return self.hits / self.total if self.total else 0.0

    def __sub__(self, earlier: CacheInfo) -> CacheInfo:
        """What was counted since `earlier`."""
        return CacheInfo(self.hits - earlier.hits, self.total - earlier.total)


class HitCounter:
    """Counts lookups; the lock is its owner's."""

    __slots__ = ("_reported", "hits", "total")

    def __init__(self) -> None:
        self.hits = 0
        self.total = 0
        self._reported = CacheInfo()

    def stat(self, delta: bool = False) -> CacheInfo:
        """Everything counted; with `delta` what was counted since the last call with `delta`."""
        now = CacheInfo(self.hits, self.total)
        if not delta:
            return now
        since, self._reported = now - self._reported, now
        return since

    def clear(self) -> None:
        """Start again from 0."""
        self.hits = self.total = 0
        self._reported = CacheInfo()


def most_entries(capacity: float) -> int:
    """How many items a cache of `capacity` bytes takes at most, so that those of no size, or hardly any, have a bound.

    An entry has its own objects, which no size counts. Both sides of a lockstep pair have to come to the same number.
    """
    return 1024 + int(capacity) // 1024


class _Required:
    pass


_required = _Required()


class LRUCache(cachetools.Cache[K, V]):
    """A mapping bounded by the sum of its values' sizes, in order of use, least recently used first.

    `capacity` is in the unit of `getsizeof(value)`, by default 1 for each value. Looking up (`[]`, `get`) and storing
    is a use; `in`, `peek`, `items`, `values` and iteration are not, and see a snapshot. A value larger than `capacity`
    is a ValueError, and nothing is evicted for it. Of no size are there more than `max_entries`. Pinned entries are
    never evicted: RuntimeError where the rest would not make room, with nothing changed.

    `on_remove(key, value)` is called for each entry that has left, by whatever way, with the lock held; a value that
    is replaced under its key has not left. Thread-safe.

    A store or a removal that is interrupted may miss the hook and leave the sum of sizes wrong, until `clear`.
    """

    def __init__(
        self,
        capacity: float,
        getsizeof: Callable[[V], float] | None = None,
        *,
        max_entries: float = math.inf,
        on_remove: Callable[[K, V], None] | None = None,
    ) -> None:
        super().__init__(capacity, getsizeof)
        self._lock = threading.RLock()
        self._getsizeof = getsizeof
        self._order: OrderedDict[K, None] = OrderedDict()
        self._pinned: dict[K, float] = {}  # size of each pinned entry: what no eviction can give
        self._replacing: K | _Required = _required
        self._counts = HitCounter()
        self._max_entries = max_entries
        self._on_remove = on_remove

    @property
    def capacity(self) -> float:
        """What the sizes may add up to."""
        return self.maxsize

    @property
    def usage(self) -> float:
        """The part of the capacity in use, 0 to 1."""
        return self.currsize / self.maxsize if self.maxsize else 0.0

    @property
    def order(self) -> tuple[K, ...]:
        """The keys, least recently used first."""
        with self._lock:
            return tuple(filter(self.__contains__, self._order))

    def stat(self, delta: bool = False) -> CacheInfo:
        """How many lookups there were and how many hits; with `delta` since the last call with `delta`."""
        with self._lock:
            return self._counts.stat(delta)

    def __getitem__(self, key: K) -> V:
        with self._lock:
            self._counts.total += 1
            value = super().__getitem__(key)
            self._counts.hits += 1
            self._order.move_to_end(key)
            return value

    @overload
    def get(self, key: K, default: None = None) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: object = None) -> object:
        """The value, which counts as a use and a hit, or `default`, which counts as a lookup."""
        try:
            return self[key]
        except KeyError:
            return default

    def peek(self, key: K) -> V | None:
        """The value or None; no use, not counted."""
        with self._lock:
            return super().__getitem__(key) if key in self else None

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            size = self.getsizeof(value)
            if size > self.maxsize:
                raise ValueError("value too large")
            if self._pinned:
                self._check_room(key, size)
            # Releases of cachetools differ in what goes for a value that grows, so that nothing is left for them to do.
            before = self.getsizeof(super().__getitem__(key)) if key in self else 0
            self._replacing = key
            try:
                while self.currsize - before + size > self.maxsize or self._is_one_too_many(key):
                    self.popitem()
                self._order[key] = None
                self._order.move_to_end(key)
                if size > before and key in self:
                    super().__delitem__(key)
                super().__setitem__(key, value)
            finally:
                self._replacing = _required
            if key in self._pinned:
                self._pinned[key] = size

    def _check_room(self, key: K, size: float) -> None:
        # Entries go one by one, and some would be gone where the rest is pinned, so ask before the first goes.
        held = sum(held for other, held in self._pinned.items() if other != key and other in self)
        if held + size > self.maxsize:
            raise RuntimeError(f"no room for {size}: {held} of {self.maxsize} is pinned")
        if key not in self and sum(other in self for other in self._pinned) >= self._max_entries:
            raise RuntimeError(f"no room: all {self._max_entries} entries are pinned")

    def _is_one_too_many(self, key: K) -> bool:
        return len(self) >= self._max_entries and key not in self

    def __delitem__(self, key: K) -> None:
        with self._lock:
            value = super().__getitem__(key)
            super().__delitem__(key)
            self._forget(key)
            if self._on_remove is not None:
                self._on_remove(key, value)

    def _forget(self, key: K) -> None:
        self._order.pop(key, None)
        self._pinned.pop(key, None)

    def __iter__(self) -> Iterator[K]:
        return iter(self.order)

    def items(self) -> ItemsView[K, V]:
        """A snapshot, least recently used first."""
        with self._lock:
            return {key: super(LRUCache, self).__getitem__(key) for key in self.order}.items()

    def values(self) -> ValuesView[V]:
        """A snapshot, least recently used first."""
        return dict(self.items()).values()

    @overload
    def pop(self, key: K) -> V: ...
    @overload
    def pop(self, key: K, default: V | D) -> V | D: ...
    def pop(self, key: K, default: object = _required) -> object:
        """Remove the entry, pinned or not, and return its value; absent: `default`, KeyError without one."""
        with self._lock:
            if key not in self:
                self._forget(key)
                if default is _required:
                    raise KeyError(key)
                return default
            value = super().__getitem__(key)
            del self[key]
            return value

    def popitem(self) -> tuple[K, V]:
        """Remove and return the least recently used entry that is not pinned.

        KeyError where the cache is empty, RuntimeError where all of it is pinned.
        """
        with self._lock:
            absent: list[K] = []
            victim: K | _Required = _required
            for key in self._order:
                if key not in self:
                    absent.append(key)
                elif key not in self._pinned and key != self._replacing:
                    victim = key
                    break
            for key in absent:
                self._forget(key)
            if not isinstance(victim, _Required):
                return victim, self.pop(victim)
            if self._order:
                raise RuntimeError("all entries are pinned")
            raise KeyError("the cache is empty")

    def setdefault(self, key: K, default: V) -> V:  # type: ignore[override]
        """The value of `key`, which is `default` from now on where there was none."""
        with self._lock:
            if key in self:
                return self[key]
            self[key] = default
            return default

    def touch(self, key: K) -> None:
        """Mark the entry as just used, without counting; absent: nothing."""
        with self._lock:
            if key in self:
                self._order.move_to_end(key)

    def pin(self, key: K) -> None:
        """Never evict this entry, until `unpin`, `pop` or `clear`; ValueError where it is absent."""
        with self._lock:
            if key not in self:
                raise ValueError(f"cannot pin {shown(key)}: it is not in the cache")
            self._pinned[key] = self.getsizeof(super().__getitem__(key))

    def unpin(self, key: K) -> None:
        """Let this entry be evicted again; where it is not pinned: nothing."""
        with self._lock:
            self._pinned.pop(key, None)

    def clear(self) -> None:
        """Remove everything, the pinned entries and the counts too."""
        with self._lock:
            gone = self.items()
            super().__init__(self.maxsize, self._getsizeof)  # also mends what an interrupt has left
            self._order.clear()
            self._pinned.clear()
            self._counts.clear()
            if self._on_remove is not None:
                for key, value in gone:
                    self._on_remove(key, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} entries, {self.currsize} of {self.maxsize})"
