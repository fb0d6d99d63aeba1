"""`LRUCache`: a bounded mapping in order of use, with pins and a hook; and the parts of all `lru` caches.

**Interrupts.** A signal handler may raise between any two bytecodes. A call therefore computes what it returns first,
and changes the entries last, in `Guard.change`. If an interrupt stops it there, the next call empties the cache. A
change that is one store, or one call of C, needs no guard.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, Iterator, MutableMapping, Sequence, ValuesView
from functools import partial
from typing import Any, Generic, TypeVar, overload

from shmstore.errors import shown
from shmstore.multimodal.caches.counts import CacheInfo, HitCounter
from shmstore.multimodal.config import GIB
from shmstore.multimodal.values.sizes import leaf_size, leaves

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
T = TypeVar("T")
B = TypeVar("B")


def most_entries(capacity: float) -> int:
    """Return how many items a cache of `capacity` bytes takes, so that tiny items are bounded, too.

    No size counts the objects of an entry itself. Both sides of a lockstep pair must compute the same number.
    """
    return 1024 + int(capacity) // 1024


class Guard(Generic[B]):
    """The lock of a cache's entries, and the one way to them; see the top of this module."""

    __slots__ = ("_changing", "_empty", "_entries", "lock")

    def __init__(self, entries: B, empty: Callable[[], object]) -> None:
        self.lock = threading.RLock()
        self._entries = entries
        self._empty = empty  # may be called with the entries in any state
        self._changing: object = None

    def held(self) -> B:
        """Return the entries, emptied if an interrupt has stopped a change."""
        if self._changing is not None:
            with self.lock:
                if self._changing is not None:
                    self._empty()
                    self._changing = None
        return self._entries

    def change(self, change: Callable[[], T]) -> T:
        """Change the entries. The caller holds the lock and has called `held`."""
        mine = self._changing = object()
        result = change()
        # If a signal handler or finalizer has used the cache in between, the sums may be wrong: leave them to `held`.
        self._changing = None if self._changing is mine else mine
        return result


class Bounded(Generic[K, V]):
    """Entries in order of use, and the sum of their sizes; `pinned` ones are not evicted. The owner has the `Guard`."""

    def __init__(self, capacity: float, max_entries: float = math.inf) -> None:
        self.capacity = capacity
        self.max_entries = max_entries
        self.nbytes: float
        self.pinned: set[K]
        self.entries: OrderedDict[K, tuple[V, float]]  # value and size, least recently used first
        self.clear()

    def clear(self) -> None:
        """Remove everything. This needs no guard: no call is between the stores, and the last one frees the entries."""
        self.nbytes, self.pinned, self.entries = 0, set(), OrderedDict()

    def touch(self, key: K) -> None:
        """Mark the entry as just used; ignore an absent one. This needs no guard."""
        if key in self.entries:
            self.entries.move_to_end(key)

    def pop(self, key: K) -> dict[K, tuple[V, float]]:
        """Remove the entry and return it; return nothing if it is absent."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return {}
        self.pinned.discard(key)
        self.nbytes -= entry[1]
        return {key: entry}

    def victims(self, key: K, size: float) -> list[K]:
        """Return which keys to evict for a value, no larger than the capacity.

        Raises RuntimeError if the pinned entries leave too little room.
        """
        old = self.entries.get(key)
        excess = self.nbytes + size - self.capacity - (0 if old is None else old[1])
        too_many = len(self.entries) + (old is None) - self.max_entries
        found: list[K] = []
        for victim, (_, nbytes) in self.entries.items():
            if excess <= 0 and too_many <= 0:
                break
            if victim not in self.pinned and victim != key:
                found.append(victim)
                excess -= nbytes
                too_many -= 1
        if excess > 0:
            pinned = excess + self.capacity - size
            raise RuntimeError(f"no room for {size}: {pinned} of {self.capacity} are pinned (hint: unpin some)")
        return found

    def put(self, key: K, value: V, size: float, victims: Iterable[K] | None = None) -> dict[K, tuple[V, float]]:
        """Store a value as just used, and return the entries evicted for it, which are `victims` if that is known."""
        gone: dict[K, tuple[V, float]] = {}
        for victim in self.victims(key, size) if victims is None else victims:
            gone |= self.pop(victim)
        _, before = self.entries.pop(key, (None, 0))
        self.entries[key] = value, size
        self.nbytes += size - before
        return gone

    def exchange(self, keys: Iterable[K], news: Sequence[tuple[V, float] | None]) -> None:
        """Touch all keys; then, in order, store what is new, and remove its key if it is larger than the capacity."""
        for key in keys:
            self.touch(key)
        if not any(news):
            return
        for key, new in zip(keys, news, strict=True):
            if new is None:
                self.touch(key)
            elif new[1] <= self.capacity:
                self.put(key, *new)
            else:
                self.pop(key)


_REQUIRED = object()


class LRUCache(MutableMapping[K, V]):
    """A mapping bounded by the sum of its values' sizes, in order of use, least recently used first.

    `capacity` is in the unit of `getsizeof(value)`, by default 1 for each value. Lookups (`[]`, `get`) and stores are
    uses. `in`, `items`, `values` and iteration are not, and see a snapshot. A value larger than `capacity`, or with a
    size that is negative, infinite or not a number, is a ValueError and evicts nothing. Pinned entries are never
    evicted. If the others do not make room, a store raises RuntimeError and changes nothing.

    `on_remove(key, value)` is called, with the lock held, for each entry that has left the cache for any reason. A
    value that is replaced under its key has not left. Thread-safe.

    An interrupted call is done, has changed nothing, or empties the cache; the hook may miss entries. So does a call
    within which a signal handler or a finalizer uses the cache.
    """

    def __init__(
        self,
        capacity: float,
        getsizeof: Callable[[V], float] | None = None,
        *,
        on_remove: Callable[[K, V], None] | None = None,
    ) -> None:
        if not capacity >= 0:  # also true for a NaN
            raise ValueError(f"capacity must be at least 0, not {shown(capacity)}")
        self._held: Bounded[K, V] = Bounded(capacity)
        self._getsizeof = getsizeof
        self._counts = HitCounter()
        self._on_remove = on_remove
        self._guard = Guard(self._held, self._empty)
        self._lock = self._guard.lock

    @property
    def capacity(self) -> float:
        """The largest sum of the sizes."""
        return self._held.capacity

    @property
    def currsize(self) -> float:
        """The sum of the sizes."""
        return self._guard.held().nbytes

    @property
    def usage(self) -> float:
        """The part of the capacity in use, 0 to 1."""
        return self.currsize / self.capacity if self.capacity else 0.0

    @property
    def order(self) -> tuple[K, ...]:
        """The keys, least recently used first."""
        return tuple(self._snapshot())

    def stat(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""
        with self._lock:
            return self._counts.stat(delta)

    def _removed(self, gone: dict[K, tuple[V, float]]) -> None:
        if self._on_remove is not None:
            for key, (value, _) in gone.items():
                self._on_remove(key, value)

    def __reduce__(self) -> Any:
        raise TypeError("an LRUCache cannot be copied, because of its lock (hint: fill a new one by `update`)")

    def __contains__(self, key: object) -> bool:
        return key in self._guard.held().entries

    def __len__(self) -> int:
        return len(self._guard.held().entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._snapshot())

    def __getitem__(self, key: K) -> V:
        with self._lock:
            entries = self._guard.held().entries
            entry = entries.get(key)
            if entry is None:
                self._counts.add(0, 1)
                raise KeyError(key)
            entries.move_to_end(key)
            self._counts.add(1, 1)
            return entry[0]

    def __setitem__(self, key: K, value: V) -> None:
        size = 1 if self._getsizeof is None else self._getsizeof(value)
        if not 0 <= size < math.inf:
            raise ValueError(f"the size of a value must be a number from 0 on, not {shown(size)}")
        if size > self.capacity:
            raise ValueError("value too large")
        with self._lock:
            held = self._guard.held()
            victims = held.victims(key, size)  # before the change, because it may raise
            self._removed(self._guard.change(partial(held.put, key, value, size, victims)))

    def __delitem__(self, key: K) -> None:
        self.pop(key)

    def _snapshot(self) -> dict[K, V]:
        with self._lock:
            return {key: value for key, (value, _) in self._guard.held().entries.items()}

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
    def pop(self, key: K, default: object = _REQUIRED) -> object:
        """Remove the entry, even if it is pinned, and return its value, or `default`, or raise KeyError."""
        with self._lock:
            gone = self._guard.change(partial(self._guard.held().pop, key))
            self._removed(gone)
            if gone:
                return gone[key][0]
            if default is _REQUIRED:
                raise KeyError(key)
            return default

    def popitem(self) -> tuple[K, V]:
        """Remove and return the least recently used entry that is not pinned.

        Raises KeyError if the cache is empty, and RuntimeError if all entries are pinned.
        """
        with self._lock:
            held = self._guard.held()
            for key in held.entries:
                if key not in held.pinned:
                    return key, self.pop(key)
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
            self._guard.held().touch(key)

    def pin(self, key: K) -> None:
        """Keep this entry from eviction until `unpin`, `pop` or `clear`; ValueError if it is absent."""
        with self._lock:
            if key not in self:
                raise ValueError(f"cannot pin {shown(key)}: it is not in the cache (hint: store it first)")
            self._held.pinned.add(key)

    def unpin(self, key: K) -> None:
        """Allow eviction of this entry again; ignore one that is not pinned."""
        with self._lock:
            self._guard.held().pinned.discard(key)

    def clear(self) -> None:
        """Remove all entries, pins and counts."""
        with self._lock:
            self._counts.clear()
            self._empty()

    def _empty(self) -> None:
        gone = self._held.entries
        self._held.clear()
        self._removed(gone)


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
