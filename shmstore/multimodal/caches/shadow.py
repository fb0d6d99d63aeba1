"""P0 of `lru`: its *shadow* of the cache in P1, with which both sides evict alike without a message.

The shadow has the keys of P1's cache, with the same sizes in the same order, but no tensors. Both sides do the same

    touch every hash of the batch, in order; then, in order, touch what is held and store what is not

with the same hashes and sizes. The shadow therefore loses a key when P1 loses the item. Next to a key, P0 keeps a value
(its prompt updates; in the mirrored form, the item), and bounds the sum of these separately. A key is *cached* if P0
has its value. Other keys are in the shadow only for their sizes. Three rules follow:

1. cached ⊆ shadow: a value is removed with its key, and only a store adds one.
2. While the order is the same, shadow ⊆ P1: both have the most recently used keys that fit, and all sizes are equal.
   Removing a key from the middle would break this, because P0 would count on room that P1 does not have. `invalidate`
   and a full book of values therefore remove the value and leave the key.
3. Requests may overtake each other, be dropped, or fail. P1 then misses an item and rejects a request with
   `CacheMissError`. Everything that this request brought is missing in P1, too. P0 does not know which request it was,
   only that it came after the one that sent the missing item. `invalidate` therefore takes back everything sent since
   then. Otherwise two items of one request could reject each other endlessly, because each is sent only if the other is
   not. A batch may evict a key that it counts on, so P0 remembers for a while when it sent a key that was evicted.

4. An item that is given for a key that is cached is compared with what P0 has. If it differs, it is sent, and P1 stores
   it in place of the one before. P0 keeps such an item, and sends it with every later hit. For P1 may still have the
   one before, because the request that changed it may have been dropped, and what a hit brings must be of one call. A
   request that was sent before and arrives after it would get the new item, so requests must not overtake each other
   where a name changes what it names.

An interrupt may empty one side. An empty shadow breaks no rule: P1 evicts the rest, which is used less recently, first.
If P1 is empty, it rejects what P0 counts on, as in 3.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

from shmstore.errors import unnamed
from shmstore.multimodal.caches.base import BaseMultiModalProcessorCache
from shmstore.multimodal.caches.checks import check_hash, check_known, check_pairs, one_or_more
from shmstore.multimodal.caches.counts import CacheInfo, HitCounter
from shmstore.multimodal.caches.lru import Bounded, Guard, most_entries
from shmstore.multimodal.values.nested import nested_equal
from shmstore.multimodal.values.types import CacheTypes, ItemT, ProcessorInput, ProcessorOutput, UpdatesT

_REMEMBERED = 4096
"""Number of keys that are remembered after their eviction; far more than the items of all requests in flight."""


class NewItem(NamedTuple, Generic[ItemT, UpdatesT]):
    """An item that P0 sends: its size in P1, the value that P0 keeps with its size, and the output."""

    size: int
    kept: Any
    kept_size: int
    output: ProcessorOutput[ItemT, UpdatesT]


@unnamed
class LruProcessorCache(BaseMultiModalProcessorCache[ItemT, UpdatesT]):
    """P0 without a store: the shadow of P1's cache of `capacity` bytes, and P0's values, up to `kept_capacity` bytes.

    Thread-safe.
    """

    def __init__(self, types: CacheTypes[ItemT, UpdatesT], capacity: int, kept_capacity: int) -> None:
        self.types = types
        self._shadow: Bounded[str, int] = Bounded(capacity, most_entries(capacity))
        """Of each key, the number of lookups before the batch that sent it."""
        self._kept: Bounded[str, Any] = Bounded(kept_capacity)
        self._departed: OrderedDict[str, int] = OrderedDict()
        """The same number of evicted keys."""
        self._counts = HitCounter()
        self._guard = Guard(self._kept, self._empty)

    @abstractmethod
    def _new(self, mm_item: tuple[ItemT, UpdatesT], mm_hash: str, changed: bool) -> NewItem[ItemT, UpdatesT]:
        """Return what to send and keep of an item; `changed`: in the place of another one."""

    @abstractmethod
    def _same(self, kept: Any, mm_item: tuple[ItemT, UpdatesT], mm_hash: str) -> bool:
        """Return whether the item is the one whose value is kept, as far as P0 can see."""

    @abstractmethod
    def _on_hit(self, kept: Any) -> ProcessorOutput[ItemT, UpdatesT]: ...

    @property
    def order(self) -> tuple[str, ...]:
        """The hashes cached, or expected in P1, least recently used first."""
        with self._guard.lock:
            self._guard.held()
            return tuple(self._shadow.entries)

    def is_cached_item(self, mm_hash: str) -> bool:
        """Return whether None is enough as input; changes neither order nor counts."""
        entries = self._guard.held().entries
        if type(mm_hash) is str and mm_hash in entries:
            return True
        check_hash(mm_hash)
        return mm_hash in entries

    def get_and_update_item(
        self, mm_item: ProcessorInput[ItemT, UpdatesT], mm_hash: str
    ) -> ProcessorOutput[ItemT, UpdatesT]:
        """Do `get_and_update` for one item."""
        return self.get_and_update([mm_item], [mm_hash])[0]

    def get_and_update(
        self, mm_items: Sequence[ProcessorInput[ItemT, UpdatesT]], mm_hashes: Sequence[str]
    ) -> list[ProcessorOutput[ItemT, UpdatesT]]:
        """Do `get_and_update_item` for each, all or nothing; cached items are touched before anything is stored.

        To stay in step, P1 must take the same batch at once (`get_and_update_features`).
        """
        with self._guard.lock:
            kept = self._guard.held()
            check_pairs(mm_items, mm_hashes, self.types.check_input)
            check_known(mm_items, mm_hashes, kept.entries.__contains__)
            held = {key: entry[0] for key in mm_hashes if (entry := kept.entries.get(key)) is not None}
            given: dict[str, tuple[ItemT, UpdatesT]] = {}
            news: dict[str, NewItem[ItemT, UpdatesT]] = {}
            outputs: list[ProcessorOutput[ItemT, UpdatesT]] = []
            sent: list[NewItem[ItemT, UpdatesT] | None] = []
            for mm_item, mm_hash in zip(mm_items, mm_hashes, strict=True):
                known = mm_hash in held  # even if this batch evicts it, because P1 looks up its hits first, too
                hit = known and (mm_item is None or self._same(held[mm_hash], mm_item, mm_hash))
                if mm_item is not None:
                    before, given[mm_hash] = given.get(mm_hash, mm_item), mm_item
                    hit = hit and nested_equal(before[0], mm_item[0])
                if hit:
                    outputs.append(self._on_hit(held[mm_hash]))
                    sent.append(None)
                    continue
                if mm_item is not None:
                    news[mm_hash] = self._new(mm_item, mm_hash, known)
                new = news[mm_hash]
                outputs.append(new.output)
                sent.append(new)
                held.pop(mm_hash, None)
                if new.size <= self._shadow.capacity and new.kept_size <= kept.capacity:
                    held[mm_hash] = new.kept
            self._guard.change(partial(self._record, mm_hashes, sent))
            self._counts.add(sent.count(None), len(sent))
            return outputs

    def _record(self, mm_hashes: Sequence[str], sent: Sequence[NewItem[ItemT, UpdatesT] | None]) -> None:
        batch, shadow, kept = self._counts.total, self._shadow, self._kept
        for mm_hash in mm_hashes:
            self._touch(mm_hash)
        for new, mm_hash in zip(sent, mm_hashes, strict=True) if any(sent) else ():
            if new is None:
                self._touch(mm_hash)
                continue
            fits = new.size <= shadow.capacity  # else it passes through P1, too
            gone = shadow.put(mm_hash, batch, new.size) if fits else shadow.pop(mm_hash)
            for key, (sent_at, _) in gone.items():
                kept.pop(key)
                self._departed[key] = sent_at
                self._departed.move_to_end(key)
            if fits and new.kept_size <= kept.capacity:
                kept.put(mm_hash, new.kept, new.kept_size)
            else:
                kept.pop(mm_hash)
        while len(self._departed) > _REMEMBERED:
            self._departed.popitem(last=False)

    def _touch(self, mm_hash: str) -> None:
        self._shadow.touch(mm_hash)
        self._kept.touch(mm_hash)

    def _empty(self) -> None:
        for part in (self._shadow, self._kept, self._departed):
            part.clear()

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark the item as just used; ignore an absent one."""
        check_hash(mm_hash)
        with self._guard.lock:
            self._guard.held()
            self._guard.change(partial(self._touch, mm_hash))

    def invalidate(self, mm_hashes: str | Iterable[str]) -> None:
        """Send these, and what their request brought, again: P1 has rejected it with `CacheMissError`."""
        back = one_or_more(mm_hashes)
        with self._guard.lock:
            kept, shadow = self._guard.held(), self._shadow.entries
            sent = [shadow[key][0] if key in shadow else self._departed.get(key) for key in back]
            since = min((batch for batch in sent if batch is not None), default=self._counts.total)
            back += [key for key, (batch, _) in shadow.items() if batch >= since]
            self._guard.change(lambda: [kept.pop(key) for key in back])

    def clear_cache(self) -> None:
        """Forget all items, prompt updates and counts; with `lru`, call P1's `clear_cache`, too."""
        with self._guard.lock:
            self._guard.change(self._empty)
            self._counts.clear()

    def make_stats(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""
        with self._guard.lock:
            return self._counts.stat(delta)
