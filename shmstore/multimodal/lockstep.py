"""What P0 knows of the cache in P1: the sending half of `lru`, in which both sides evict alike without a word.

P0 keeps a *shadow* of P1's cache: the same keys with the same sizes in the same order, but no tensors. Both sides run

    touch every hash of the batch, in order; then take the items in order: touch what is held, store what is not

over the same hashes and sizes, so the shadow loses a key when P1 loses the item. What P0 keeps beside a key (its prompt
updates; the mirrored form: the item) lies in a `ValueBook`, and a key is *cached* where it is in the book.
The shadow may hold keys that are not cached: they are there for their size only. So:

1. cached ⊆ shadow: the hook of the shadow removes a value with its key, and nothing else adds one.
2. While the order is the same, shadow ⊆ P1: both are the most recently used keys that fit, and every size in the shadow
   is that of P1. Removing a key from the middle would break this, since P0 would then believe in room that P1
   has not got. That is why `invalidate`, and a book that is too full, take the value and leave the key.
3. Where the order was not the same (requests overtook each other, were dropped, failed), P1 misses something and
   rejects the request with `CacheMissError`. `invalidate` then has to take back more than the missing hashes: what the
   same request brought was rejected with it. P0 cannot know which request it was, but it was one that counted on
   the missing hash; so it takes back everything sent in or after the first batch that did (`first_hit`). Without this
   two items of one request could reject each other for ever, each being sent only when the other is not. A batch may
   itself push out a key that it counts on, so `first_hit` is remembered for a while after its key has gone.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from shmstore.multimodal.lru import HitCounter, LRUCache, most_entries

__all__ = ["Offer", "SentKeys", "ValueBook"]

V = TypeVar("V")
T = TypeVar("T")


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


class Offer(NamedTuple, Generic[V, T]):
    """An item as P0 offers it: its size in P1, what P0 keeps beside the key, and what is returned where it is sent."""

    size: int
    kept: V
    kept_size: int
    sent: T


_REMEMBERED = 4096
"""Keys whose `first_hit` outlives them; far more than requests in flight have items."""


@dataclasses.dataclass(slots=True)
class _Sent:
    size: int
    sent_at: int  # the batch that brought it
    first_hit: int | None = None  # the first batch that counted on it


def _size(entry: _Sent) -> int:
    return entry.size


class SentKeys(Generic[V, T]):
    """The shadow of P1's cache of `capacity` bytes, and a book of `book_capacity` bytes; the lock is its owner's.

    Where an interrupt stops a change half-way, all keys are forgotten: that is always safe, since what is not known to
    be in P1 is sent.
    """

    _book: ValueBook[V]
    _shadow: LRUCache[str, _Sent]
    _sendings: OrderedDict[str, None]  # the keys of the shadow, the last sent last
    _departed: OrderedDict[str, int]

    def __init__(self, capacity: float, book_capacity: float, counts: HitCounter) -> None:
        self._capacity = capacity
        self._book_capacity = book_capacity
        self._counts = counts
        self._batch = 0
        self.clear()

    def _gone(self, key: str, entry: _Sent) -> None:
        self._book.drop(key)
        self._sendings.pop(key, None)
        if entry.first_hit is not None:
            self._departed[key] = entry.first_hit
            if len(self._departed) > _REMEMBERED:
                self._departed.popitem(last=False)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._book

    @property
    def order(self) -> tuple[str, ...]:
        """The keys that P1 is taken to hold, least recently used first."""
        return self._shadow.order

    def peek(self, mm_hash: str) -> V | None:
        """What is kept beside the key; None where it is not cached."""
        return self._book.peek(mm_hash)

    def exchange(
        self,
        offers: Sequence[Offer[V, T] | None],
        mm_hashes: Sequence[str],
        on_hit: Callable[[V], T],
    ) -> list[T]:
        """What to send of a batch that `check_batch` let pass: `on_hit(kept)` of what P1 has, else the offer's `sent`.

        Nothing in here fails but by an interrupt, after which nothing is recorded, and nothing counted.
        """
        before = self._counts.hits, self._counts.total
        try:
            return self._exchange(offers, mm_hashes, on_hit)
        except BaseException:
            self._counts.hits, self._counts.total = before
            self.clear()
            raise

    def _exchange(
        self,
        offers: Sequence[Offer[V, T] | None],
        mm_hashes: Sequence[str],
        on_hit: Callable[[V], T],
    ) -> list[T]:
        self._batch += 1
        held: dict[str, V] = {}
        for mm_hash in mm_hashes:
            self.touch(mm_hash)
            kept = self._book.use(mm_hash)
            if kept is not None:
                held[mm_hash] = kept[0]
                entry = self._shadow.peek(mm_hash)
                if entry is not None and entry.first_hit is None:
                    entry.first_hit = self._batch
        given: dict[str, Offer[V, T]] = {}
        outputs: list[T] = []
        for offer, mm_hash in zip(offers, mm_hashes, strict=True):
            self._counts.total += 1
            if mm_hash in held:
                # Also where the batch itself has just pushed it out: P1 looks up its hits first, too.
                self._counts.hits += 1
                self.touch(mm_hash)
                outputs.append(on_hit(held[mm_hash]))
                continue
            offer = given.setdefault(mm_hash, offer) if offer is not None else given[mm_hash]
            outputs.append(offer.sent)
            if self._store(mm_hash, offer):
                held[mm_hash] = offer.kept
        return outputs

    def _store(self, mm_hash: str, offer: Offer[V, T]) -> bool:
        try:
            self._shadow[mm_hash] = _Sent(offer.size, self._batch)
        except ValueError:  # too large for P1, which does the same
            self._shadow.pop(mm_hash, None)
            return False
        self._sendings[mm_hash] = None
        self._sendings.move_to_end(mm_hash)
        self._book.put(mm_hash, offer.kept, offer.kept_size)
        return mm_hash in self._book

    def touch(self, mm_hash: str) -> None:
        """Mark as just used; absent: nothing."""
        self._shadow.touch(mm_hash)
        self._book.use(mm_hash)

    def invalidate(self, mm_hashes: Iterable[str]) -> None:
        """P1 has none of these: they are sent again, and so is what went with them (see 3 above)."""
        since = self._batch + 1
        for mm_hash in mm_hashes:
            self._book.drop(mm_hash)
            entry = self._shadow.peek(mm_hash)
            first_hit = self._departed.get(mm_hash) if entry is None else entry.first_hit
            if first_hit is not None:
                since = min(since, first_hit)
        for mm_hash in reversed(self._sendings):
            entry = self._shadow.peek(mm_hash)
            if entry is not None and entry.sent_at < since:
                break
            self._book.drop(mm_hash)

    def clear(self) -> None:
        """Forget all keys."""
        # New ones, since an interrupt may have left the old ones in any state.
        book: ValueBook[V] = ValueBook(self._book_capacity)
        shadow: LRUCache[str, _Sent] = LRUCache(
            self._capacity, _size, max_entries=most_entries(self._capacity), on_remove=self._gone
        )
        departed: OrderedDict[str, int] = OrderedDict()
        sendings: OrderedDict[str, None] = OrderedDict()
        self._book, self._shadow, self._sendings, self._departed = book, shadow, sendings, departed
