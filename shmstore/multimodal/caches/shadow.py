"""The sending half of `lru`: P0's *shadow* of the cache in P1, with which both sides evict alike without a message.

The shadow has the keys of P1's cache, with the same sizes in the same order, but no tensors. Both sides do the same

    touch every hash of the batch, in order; then, in order, touch what is held and store what is not

with the same hashes and sizes. The shadow therefore loses a key when P1 loses the item. Beside a key, P0 keeps a value
(its prompt updates; in the mirrored form, the item), and bounds the sum of these separately. A key is *cached* if P0
has its value. Other keys are in the shadow only for their sizes. Three rules follow:

1. cached ⊆ shadow: a value goes with its key, and only a store adds one.
2. While the order is the same, shadow ⊆ P1: both have the most recently used keys that fit, and all sizes are equal.
   Removing a key from the middle would break this, because P0 would count on room that P1 does not have. `invalidate`
   and a full book of values therefore remove the value and leave the key.
3. Requests may overtake each other, be dropped, or fail. P1 then misses an item and rejects a request with
   `CacheMissError`. Everything that this request brought is missing in P1, too. P0 does not know which request it was,
   only that it counted on the missing hash. `invalidate` therefore takes back everything sent in or after the first
   batch that counted on it (`first_hit`). Otherwise two items of one request could reject each other endlessly, because
   each is sent only if the other is not. A batch may evict a key that it counts on, so P0 remembers `first_hit` for a
   while after the key has gone.

An interrupt may empty one side. An empty shadow breaks no rule: P1 evicts the rest, which is used less recently, first.
If P1 is empty, it rejects what P0 counts on, as in 3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from shmstore.multimodal.caches.checks import check_batch
from shmstore.multimodal.caches.counts import CacheInfo, HitCounter
from shmstore.multimodal.caches.lru import Bounded, Guard, most_entries

V = TypeVar("V")
T = TypeVar("T")


class Offer(NamedTuple, Generic[V, T]):
    """An item that P0 may send: its size in P1, the value that P0 keeps, and what to return if it is sent."""

    size: int
    kept: V
    kept_size: int
    sent: T


_REMEMBERED = 4096
"""Number of keys whose `first_hit` outlives them; far more than the items of all requests in flight."""


class _Sent(NamedTuple):
    """A key of the shadow. The number of a batch is the number of lookups before it."""

    sent_at: int
    first_hit: int | None = None  # the first one that counted on it


class SentKeys(Generic[V, T]):
    """The shadow of P1's cache of `capacity` bytes, and P0's values, up to `kept_capacity` bytes.

    Thread-safe; hold `guard.lock` to make several calls one.
    """

    def __init__(self, capacity: float, kept_capacity: float) -> None:
        self._shadow: Bounded[str, _Sent] = Bounded(capacity, most_entries(capacity))
        self._kept: Bounded[str, V] = Bounded(kept_capacity)
        self._sendings: OrderedDict[str, None] = OrderedDict()  # the keys of the shadow, the last sent last
        self._departed: OrderedDict[str, int] = OrderedDict()  # the `first_hit` of keys that have gone
        self._counts = HitCounter()
        self.guard = Guard(self._kept, self._empty)

    @property
    def order(self) -> tuple[str, ...]:
        """The keys that P1 is expected to hold, least recently used first."""
        with self.guard.lock:
            self.guard.held()
            return tuple(self._shadow.entries)

    def peek(self, mm_hash: str) -> V | None:
        """Return the value of the key, or None if it is not cached."""
        entry = self.guard.held().entries.get(mm_hash)
        return None if entry is None else entry[0]

    def stat(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""
        with self.guard.lock:
            return self._counts.stat(delta)

    def send(
        self,
        items: Sequence[Any],
        mm_hashes: Sequence[str],
        check: Callable[[Any, str], None],
        offer: Callable[[Any, str], Offer[V, T]],
        on_hit: Callable[[V], T],
    ) -> list[T]:
        """Return what to send of a batch, all or nothing: `on_hit(value)` of a hit, else the `sent` of an offer.

        `offer(item, mm_hash)` makes the offer of an item that is new. Raises the errors of `check_batch`.
        """
        with self.guard.lock:
            kept = self.guard.held()
            check_batch(items, mm_hashes, kept.entries.__contains__, check)
            held = {key: entry[0] for key in mm_hashes if (entry := kept.entries.get(key)) is not None}
            given: dict[str, Offer[V, T]] = {}
            outputs: list[T] = []
            sent: list[Offer[V, T] | None] = []
            for item, mm_hash in zip(items, mm_hashes, strict=True):
                if mm_hash in held:  # even if this batch evicts it, because P1 looks up its hits first, too
                    outputs.append(on_hit(held[mm_hash]))
                    sent.append(None)
                    continue
                if mm_hash not in given:
                    given[mm_hash] = offer(item, mm_hash)
                new = given[mm_hash]
                outputs.append(new.sent)
                sent.append(new)
                if new.size <= self._shadow.capacity and new.kept_size <= kept.capacity:
                    held[mm_hash] = new.kept
            self.guard.change(partial(self._record, mm_hashes, sent))
            self._counts.add(sent.count(None), len(sent))
            return outputs

    def _record(self, mm_hashes: Sequence[str], sent: Sequence[Offer[V, T] | None]) -> None:
        batch, shadow, kept = self._counts.total, self._shadow, self._kept
        for mm_hash in mm_hashes:
            entry = shadow.entries.get(mm_hash)
            if entry is None:
                continue
            if entry[0].first_hit is None:
                shadow.entries[mm_hash] = entry[0]._replace(first_hit=batch), entry[1]
            shadow.entries.move_to_end(mm_hash)
            kept.touch(mm_hash)
        if not any(sent):
            return
        for offer, mm_hash in zip(sent, mm_hashes, strict=True):
            if offer is None:
                self._touch(mm_hash)
                continue
            if offer.size > shadow.capacity:  # too large for P1, which does the same
                gone = shadow.pop(mm_hash)
            else:
                gone = shadow.put(mm_hash, _Sent(batch), offer.size)
                self._sendings[mm_hash] = None
                self._sendings.move_to_end(mm_hash)
            for key, (left, _) in gone.items():
                kept.pop(key)
                self._sendings.pop(key, None)
                if left.first_hit is not None:
                    self._departed[key] = left.first_hit
                    self._departed.move_to_end(key)
            if offer.size <= shadow.capacity and offer.kept_size <= kept.capacity:
                kept.put(mm_hash, offer.kept, offer.kept_size)
        while len(self._departed) > _REMEMBERED:
            self._departed.popitem(last=False)

    def _touch(self, mm_hash: str) -> None:
        self._shadow.touch(mm_hash)
        self._kept.touch(mm_hash)

    def _empty(self) -> None:
        for part in (self._shadow, self._kept, self._sendings, self._departed):
            part.clear()

    def touch(self, mm_hash: str) -> None:
        """Mark the key as just used; ignore an absent one."""
        with self.guard.lock:
            self.guard.held()
            self.guard.change(partial(self._touch, mm_hash))

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """Send these again, which P1 does not have, and what was sent with them (see 3 above)."""
        with self.guard.lock:
            kept, shadow, back = self.guard.held(), self._shadow.entries, [*mm_hashes]
            since = self._counts.total
            for mm_hash in back:
                first_hit = shadow[mm_hash][0].first_hit if mm_hash in shadow else self._departed.get(mm_hash)
                if first_hit is not None:
                    since = min(since, first_hit)
            for mm_hash in reversed(self._sendings):
                if shadow[mm_hash][0].sent_at < since:
                    break
                back.append(mm_hash)
            self.guard.change(lambda: [kept.pop(mm_hash) for mm_hash in back])

    def clear(self) -> None:
        """Forget all keys and counts."""
        with self.guard.lock:
            self.guard.change(self._empty)
            self._counts.clear()
