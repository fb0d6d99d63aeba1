"""`LRUCache`: a bounded mapping in order of use, with pins, counts and a hook; and the parts of all `lru` caches.

**Interrupts.** A signal handler may raise between any two bytecodes. A call therefore only notes what it changes, in
`Change` records beside the entries. Its last step is `Journal.commit`, which stores one function that makes the change,
and calls it. That store is the commit point:

1. Before it, nothing has changed.
2. After it, the call has happened. If an interrupt stops the function, the next call calls it again.
3. The function sets what *is* afterwards, so calling it twice is the same as calling it once.

Every method therefore begins with `Journal.finish`. A change that is one store, or one call of C, needs no commit.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, MutableMapping, ValuesView
from itertools import count
from typing import Any, Generic, TypeVar, overload

from shmstore.errors import shown
from shmstore.multimodal.config import GIB
from shmstore.multimodal.values.sizes import leaf_size, leaves

__all__ = ["Bounded", "CacheInfo", "Change", "HitCounter", "Journal", "LRUCache", "MultiModalCache", "most_entries"]

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheInfo:
    """Number of lookups in a cache, and of those that found something."""

    hits: int = 0
    """Lookups that found something."""
    total: int = 0
    """All lookups."""

    @property
    def hit_ratio(self) -> float:
        """hits / total; 0.0 before the first lookup."""
        return self.hits / self.total if self.total else 0.0

    def __sub__(self, earlier: CacheInfo) -> CacheInfo:
        """Return what was counted since `earlier`."""
        return CacheInfo(self.hits - earlier.hits, self.total - earlier.total)


class HitCounter:
    """Counts lookups; the owner holds the lock. All counts are one tuple, so that they change together."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from 0."""
        self.counts = 0, 0, 0, 0  # hits and lookups, now and at the last report

    @property
    def total(self) -> int:
        """All lookups."""
        return self.counts[1]

    def add(self, hits: int, total: int) -> None:
        """Add hits and lookups at once; negative numbers take them back."""
        self.counts = self.after(hits, total)

    def after(self, hits: int, total: int) -> tuple[int, int, int, int]:
        """Return `counts` as they are after `add`."""
        now_hits, now_total, reported_hits, reported_total = self.counts
        return now_hits + hits, now_total + total, reported_hits, reported_total

    def stat(self, delta: bool = False) -> CacheInfo:
        """Return all counts; with `delta`, those since the last call with `delta`."""
        hits, total, reported_hits, reported_total = self.counts
        if not delta:
            return CacheInfo(hits, total)
        self.counts = hits, total, hits, total
        return CacheInfo(hits - reported_hits, total - reported_total)


def most_entries(capacity: float) -> int:
    """Return how many items a cache of `capacity` bytes takes, so that tiny items are bounded, too.

    No size counts the objects of an entry itself. Both sides of a lockstep pair must compute the same number.
    """
    return 1024 + int(capacity) // 1024


class Journal:
    """The commit point of a cache; see the top of this module."""

    __slots__ = ("_pending", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._pending: Callable[[], object] | None = None

    def commit(self, change: Callable[[], object]) -> None:
        """Make a change that can be repeated and does not fail. The caller holds the lock."""
        self._pending = change  # the commit point
        change()
        self._pending = None

    def finish(self) -> None:
        """Finish the last commit if an interrupt has stopped it."""
        if self._pending is not None:
            with self.lock:
                if self._pending is not None:
                    self.commit(self._pending)


_numbers = count()  # one for each change


class Bounded(Generic[K, V]):
    """Entries in order of use, and the sum of their sizes. The owner holds the lock."""

    def __init__(self, capacity: float, max_entries: float = math.inf) -> None:
        self.capacity = capacity
        self.max_entries = max_entries
        self.clear()

    def clear(self) -> None:
        """Remove everything; a change for `Journal.commit`."""
        self.entries: OrderedDict[K, tuple[V, float]] = OrderedDict()  # value and size, least recently used first
        self.nbytes: float = 0
        self.changed_by = next(_numbers)

    def touch(self, key: K) -> None:
        """Mark the entry as just used; ignore an absent one. This needs no commit."""
        if key in self.entries:
            self.entries.move_to_end(key)

    def touch_each(self, keys: Iterable[K]) -> None:
        """Touch these entries in order; a change for `Journal.commit`."""
        for key in keys:
            self.touch(key)


_NONE: set[Any] = set()


class Change(Generic[K, V]):
    """What one call is going to change in a `Bounded`."""

    __slots__ = ("_bounded", "_count", "_nbytes", "_number", "_old", "_pinned", "_previous", "gone", "used")

    def __init__(self, bounded: Bounded[K, V], pinned: set[K] = _NONE) -> None:
        self._bounded = bounded
        self._number = next(_numbers)
        self._previous = bounded.changed_by
        self._pinned = pinned
        self._count = len(bounded.entries)
        self._nbytes = bounded.nbytes
        self._old: Iterator[K] | None = None  # the keys that `victim` has not looked at
        self.used: dict[K, tuple[V, float]] = {}  # used or stored by this call, least recently used first
        self.gone: dict[K, tuple[V, float]] = {}  # removed by this call, in order

    def _take(self, key: K) -> tuple[V, float] | None:
        entry = self.used.pop(key, None)
        return self._bounded.entries.get(key) if entry is None and key not in self.gone else entry

    def use(self, key: K) -> tuple[V, float] | None:
        """Mark the entry as just used and return it."""
        entry = self._take(key)
        if entry is not None:
            self.used[key] = entry
        return entry

    def drop(self, key: K) -> tuple[V, float] | None:
        """Remove the entry and return it."""
        entry = self._take(key)
        if entry is not None:
            self.gone[key] = entry
            self._count -= 1
            self._nbytes -= entry[1]
        return entry

    def put(self, key: K, value: V, size: float) -> list[K]:
        """Store a value, no larger than the capacity, as just used, and return the keys evicted for it.

        Raises RuntimeError if the pinned entries leave too little room.
        """
        bounded, evicted = self._bounded, []
        self.drop(key)
        while self._nbytes + size > bounded.capacity or self._count >= bounded.max_entries:
            victim = self.victim()
            if victim is None:
                held = f"{self._count} of {bounded.max_entries} entries and {self._nbytes} of {bounded.capacity}"
                raise RuntimeError(f"no room for {size}: {held} are pinned (hint: unpin some)")
            self.drop(victim[0])
            evicted.append(victim[0])
        self.gone.pop(key, None)  # replaced
        self.used[key] = value, size
        self._count += 1
        self._nbytes += size
        return evicted

    def victim(self) -> tuple[K] | None:
        """Return the least recently used key that is not pinned, or None if there is none."""
        if self._old is None:
            self._old = iter(self._bounded.entries)
        for key in self._old:
            if key not in self.used and key not in self.gone and key not in self._pinned:
                return (key,)
        return next(((key,) for key in self.used if key not in self._pinned), None)

    def apply(self) -> None:
        """Make the change; a change for `Journal.commit`."""
        bounded = self._bounded
        entries = bounded.entries
        for key in self.gone:
            entries.pop(key, None)
            self._pinned.discard(key)
        for key, entry in self.used.items():
            entries[key] = entry
            entries.move_to_end(key)
        if bounded.changed_by == self._previous or bounded.changed_by == self._number:
            bounded.nbytes = self._nbytes
        else:  # a signal handler or finalizer has changed the entries within this call
            bounded.nbytes = sum(size for _, size in entries.values())
        bounded.changed_by = self._number


class _Required:
    pass


_required = _Required()


class LRUCache(MutableMapping[K, V]):
    """A mapping bounded by the sum of its values' sizes, in order of use, least recently used first.

    `capacity` is in the unit of `getsizeof(value)`, by default 1 for each value. Lookups (`[]`, `get`) and stores are
    uses. `in`, `peek`, `items`, `values` and iteration are not, and see a snapshot. A value larger than `capacity` is a
    ValueError and evicts nothing. There are never more than `max_entries`. Pinned entries are never evicted. If the
    others do not make room, a store raises RuntimeError and changes nothing.

    `on_remove(key, value)` is called, with the lock held, for each entry that has left the cache for any reason. A
    value that is replaced under its key has not left. Thread-safe.

    An interrupted call is done or not begun. If it is done, the hook may have missed it, and a lookup may be a use that
    is not counted.
    """

    def __init__(
        self,
        capacity: float,
        getsizeof: Callable[[V], float] | None = None,
        *,
        max_entries: float = math.inf,
        on_remove: Callable[[K, V], None] | None = None,
    ) -> None:
        self._held: Bounded[K, V] = Bounded(capacity, max_entries)
        self._getsizeof = getsizeof
        self._pinned: set[K] = set()
        self._counts = HitCounter()
        self._on_remove = on_remove
        self._journal = Journal()
        self._lock = self._journal.lock

    @property
    def capacity(self) -> float:
        """The largest sum of the sizes."""
        return self._held.capacity

    maxsize = capacity

    @property
    def currsize(self) -> float:
        """The sum of the sizes."""
        self._journal.finish()
        return self._held.nbytes

    @property
    def usage(self) -> float:
        """The part of the capacity in use, 0 to 1."""
        return self.currsize / self.capacity if self.capacity else 0.0

    @property
    def order(self) -> tuple[K, ...]:
        """The keys, least recently used first."""
        return tuple(self._snapshot())

    def getsizeof(self, value: V) -> float:
        """Return the size of the value, as the cache counts it."""
        return 1 if self._getsizeof is None else self._getsizeof(value)

    def stat(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""
        with self._lock:
            self._journal.finish()
            return self._counts.stat(delta)

    def _begin(self) -> Change[K, V]:
        self._journal.finish()
        return Change(self._held, self._pinned)

    def _end(self, change: Change[K, V]) -> None:
        self._journal.commit(change.apply)
        if change.gone:
            self._removed(change.gone)

    def _removed(self, gone: dict[K, tuple[V, float]]) -> None:
        if self._on_remove is not None:
            for key, (value, _) in gone.items():
                self._on_remove(key, value)

    def __contains__(self, key: object) -> bool:
        self._journal.finish()
        return key in self._held.entries

    def __len__(self) -> int:
        self._journal.finish()
        return len(self._held.entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._snapshot())

    def __getitem__(self, key: K) -> V:
        with self._lock:
            self._journal.finish()
            entry = self._held.entries.get(key)
            if entry is None:
                self._counts.add(0, 1)
                raise KeyError(key)
            self._held.entries.move_to_end(key)
            self._counts.counts = self._counts.after(1, 1)
            return entry[0]

    def peek(self, key: K) -> V | None:
        """Return the value or None, without a use or a count."""
        self._journal.finish()
        entry = self._held.entries.get(key)
        return None if entry is None else entry[0]

    def __setitem__(self, key: K, value: V) -> None:
        size = self.getsizeof(value)
        if size > self.capacity:
            raise ValueError("value too large")
        with self._lock:
            change = self._begin()
            change.put(key, value, size)
            self._end(change)

    def __delitem__(self, key: K) -> None:
        self.pop(key)

    def _snapshot(self) -> dict[K, V]:
        with self._lock:
            self._journal.finish()
            return {key: value for key, (value, _) in self._held.entries.items()}

    def items(self) -> ItemsView[K, V]:
        """Return a snapshot, least recently used first."""
        return self._snapshot().items()

    def values(self) -> ValuesView[V]:
        """Return a snapshot, least recently used first."""
        return self._snapshot().values()

    @overload
    def pop(self, key: K) -> V: ...
    @overload
    def pop(self, key: K, default: V | D) -> V | D: ...
    def pop(self, key: K, default: object = _required) -> object:
        """Remove the entry, even if it is pinned, and return its value, or `default`, or raise KeyError."""
        with self._lock:
            change = self._begin()
            entry = change.drop(key)
            if entry is not None:
                self._end(change)
                return entry[0]
            if default is _required:
                raise KeyError(key)
            return default

    def popitem(self) -> tuple[K, V]:
        """Remove and return the least recently used entry that is not pinned.

        Raises KeyError if the cache is empty, and RuntimeError if all entries are pinned.
        """
        with self._lock:
            victim = self._begin().victim()
            if victim is not None:
                return victim[0], self.pop(victim[0])
            raise RuntimeError("all entries are pinned (hint: unpin some)") if self else KeyError("the cache is empty")

    def setdefault(self, key: K, default: V) -> V:
        """Return the value of `key`; if it is absent, store `default` first."""
        with self._lock:
            if key not in self:
                self[key] = default
                return default
            return self[key]

    def touch(self, key: K) -> None:
        """Mark the entry as just used, without a count; ignore an absent one."""
        with self._lock:
            self._journal.finish()
            self._held.touch(key)

    def pin(self, key: K) -> None:
        """Keep this entry from eviction until `unpin`, `pop` or `clear`; ValueError if it is absent."""
        with self._lock:
            if key not in self:
                raise ValueError(f"cannot pin {shown(key)}: it is not in the cache (hint: store it first)")
            self._pinned.add(key)

    def unpin(self, key: K) -> None:
        """Allow eviction of this entry again; ignore one that is not pinned."""
        with self._lock:
            self._pinned.discard(key)

    def clear(self) -> None:
        """Remove all entries, pins and counts."""
        with self._lock:
            self._journal.finish()
            gone = self._held.entries
            self._journal.commit(self._forget)
            self._removed(gone)

    def _forget(self) -> None:
        self._held.clear()
        self._pinned.clear()
        self._counts.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} entries, {self.currsize} of {self.capacity})"


class MultiModalCache:
    """Sizes of cached values, and caches that these sizes bound."""

    @classmethod
    def get_item_size(cls, value: object) -> int:
        """Return the number of bytes of all leaves in dicts, lists, tuples and items; 0 without leaves.

        A tensor or array counts the bytes of its elements alone. A str counts its length in UTF-8 and bytes count
        theirs, plus a constant. Any other leaf (a number, None) counts `sys.getsizeof`. Raises UnsupportedValueError
        (TypeError) for a sparse tensor, and NestingError (ValueError) for a value that contains itself.
        """
        return sum(map(leaf_size, leaves(value)))

    @classmethod
    def get_item_complexity(cls, value: object) -> int:
        """Return the number of leaves of the value."""
        return sum(1 for _ in leaves(value))

    @classmethod
    def get_lru_cache(cls, capacity_gb: float, value_type: type[V]) -> LRUCache[str, V]:
        """Return an empty cache of values of `value_type` by hash, bounded to `capacity_gb` GiB of `get_item_size`."""
        return LRUCache(GIB * capacity_gb, cls.get_item_size)
