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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from shmstore.multimodal.caches.lru import Bounded, CacheInfo, Change, HitCounter, Journal, most_entries

__all__ = ["Offer", "SentKeys"]

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

    Thread-safe; hold `journal.lock` to make several calls one.
    """

    def __init__(self, capacity: float, kept_capacity: float, journal: Journal | None = None) -> None:
        self.journal = journal or Journal()
        self._shadow: Bounded[str, _Sent] = Bounded(capacity, most_entries(capacity))
        self._kept: Bounded[str, V] = Bounded(kept_capacity)
        self._sendings: OrderedDict[str, None] = OrderedDict()  # the keys of the shadow, the last sent last
        self._departed: OrderedDict[str, int] = OrderedDict()  # the `first_hit` of keys that have gone
        self._counts = HitCounter()

    def __contains__(self, mm_hash: str) -> bool:
        self.journal.finish()
        return mm_hash in self._kept.entries

    @property
    def order(self) -> tuple[str, ...]:
        """The keys that P1 is expected to hold, least recently used first."""
        with self.journal.lock:
            self.journal.finish()
            return tuple(self._shadow.entries)

    def peek(self, mm_hash: str) -> V | None:
        """Return the value of the key, or None if it is not cached."""
        self.journal.finish()
        entry = self._kept.entries.get(mm_hash)
        return None if entry is None else entry[0]

    def stat(self, delta: bool = False) -> CacheInfo:
        """Return hits and total so far; with `delta`, since the last call with `delta`."""
        with self.journal.lock:
            self.journal.finish()
            return self._counts.stat(delta)

    def exchange(
        self, offers: Sequence[Offer[V, T] | None], mm_hashes: Sequence[str], on_hit: Callable[[V], T]
    ) -> list[T]:
        """Return what to send of a batch: `on_hit(value)` of a hit, else the offer's `sent`.

        The caller has held the lock since its `check_batch`.
        """
        batch = self._counts.total
        hits = [entry[0] for entry in map(self._kept.entries.get, mm_hashes) if entry is not None]
        if len(hits) == len(mm_hashes):
            self._use([*mm_hashes])
            return [on_hit(value) for value in hits]
        shadow, kept = Change(self._shadow), Change(self._kept)
        held: dict[str, V] = {}
        for mm_hash in mm_hashes:
            used, entry = shadow.use(mm_hash), kept.use(mm_hash)
            if used is not None and entry is not None:
                held[mm_hash] = entry[0]
                if used[0].first_hit is None:
                    shadow.used[mm_hash] = used[0]._replace(first_hit=batch), used[1]
        given: dict[str, Offer[V, T]] = {}
        outputs: list[T] = []
        missed = 0
        for offer, mm_hash in zip(offers, mm_hashes, strict=True):
            if mm_hash in held:  # even if this batch has just evicted it, because P1 looks up its hits first, too
                shadow.use(mm_hash)
                kept.use(mm_hash)
                outputs.append(on_hit(held[mm_hash]))
                continue
            missed += 1
            offer = given.setdefault(mm_hash, offer) if offer is not None else given[mm_hash]
            outputs.append(offer.sent)
            if offer.size > self._shadow.capacity:  # too large for P1, which does the same
                gone = [mm_hash] if shadow.drop(mm_hash) else []
            else:
                gone = shadow.put(mm_hash, _Sent(batch), offer.size)
            for key in gone:
                kept.drop(key)
            if mm_hash in shadow.used and offer.kept_size <= self._kept.capacity:
                kept.put(mm_hash, offer.kept, offer.kept_size)
                held[mm_hash] = offer.kept
        counts = self._counts.after(len(outputs) - missed, len(outputs))

        def apply() -> None:
            shadow.apply()
            kept.apply()
            self._counts.counts = counts
            for key, (left, _) in shadow.gone.items():
                self._sendings.pop(key, None)
                if left.first_hit is not None:
                    self._departed[key] = left.first_hit
                    self._departed.move_to_end(key)
            while len(self._departed) > _REMEMBERED:
                self._departed.popitem(last=False)
            for key, (sent, _) in shadow.used.items():
                if sent.sent_at == batch:
                    self._sendings[key] = None
                    self._sendings.move_to_end(key)

        self.journal.commit(apply)
        return outputs

    def _use(self, mm_hashes: list[str]) -> None:
        batch, counts = self._counts.total, self._counts.after(len(mm_hashes), len(mm_hashes))

        def apply() -> None:
            for mm_hash in mm_hashes:
                entry = self._shadow.entries.get(mm_hash)
                if entry is not None and entry[0].first_hit is None:
                    self._shadow.entries[mm_hash] = entry[0]._replace(first_hit=batch), entry[1]
                self._touch(mm_hash)
            self._counts.counts = counts

        self.journal.commit(apply)

    def _touch(self, mm_hash: str) -> None:
        self._shadow.touch(mm_hash)
        self._kept.touch(mm_hash)

    def forget(self) -> None:
        """Forget all keys and counts."""
        for part in (self._shadow, self._kept, self._sendings, self._departed, self._counts):
            part.clear()

    def touch(self, mm_hash: str) -> None:
        """Mark the key as just used; ignore an absent one."""
        with self.journal.lock:
            self.journal.finish()
            self.journal.commit(lambda: self._touch(mm_hash))

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """Send these again, which P1 does not have, and what was sent with them (see 3 above)."""
        with self.journal.lock:
            self.journal.finish()
            shadow, kept = self._shadow.entries, Change(self._kept)
            since = self._counts.total
            for mm_hash in mm_hashes:
                kept.drop(mm_hash)
                first_hit = shadow[mm_hash][0].first_hit if mm_hash in shadow else self._departed.get(mm_hash)
                if first_hit is not None:
                    since = min(since, first_hit)
            for mm_hash in reversed(self._sendings):
                if shadow[mm_hash][0].sent_at < since:
                    break
                kept.drop(mm_hash)
            self.journal.commit(kept.apply)

    def clear(self) -> None:
        """Forget all keys and counts."""
        with self.journal.lock:
            self.journal.finish()
            self.journal.commit(self.forget)
