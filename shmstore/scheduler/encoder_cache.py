"""Which encoder outputs are still held; the workers hold the tensors themselves.

There are three managers, for three ways to hold an output: shared between requests by content hash, per request, and
for one step on its way into cross-attention blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import starmap
from operator import call
from typing import Any

from shmstore.errors import StoreFullError, shown
from shmstore.scheduler.checks import check_range

__all__ = ["EncoderCacheManager", "EncoderDecoderCacheManager", "RequestEncoderCacheManager"]


def _item(request: Any, i: int) -> Any:
    if i < 0:
        raise IndexError(f"item {i}: items are counted from 0")
    features = request.mm_features
    try:
        return features[i]
    except IndexError:
        raise IndexError(f"item {i}: the request has {len(features)} items, counted from 0") from None


def _hash_and_size(request: Any, i: int) -> tuple[str, int]:
    """Return the content hash and the number of embeddings of item i; ValueError for a negative number."""
    item = _item(request, i)
    size = item.mm_position.get_num_embeds
    size = size() if callable(size) else size
    check_range(0, **{f"embeddings of item {i}": size})
    return item.identifier, size


def _encoder_tokens(request: Any, i: int) -> int:
    _item(request, i)
    size: int = request.get_num_encoder_tokens(i)
    check_range(0, **{f"encoder tokens of item {i}": size})
    return size


def _full(what: str, size: int, room: int, cache_size: int, unit: str) -> StoreFullError:
    if size > cache_size:
        return StoreFullError(
            f"{what} needs {size} {unit} and the whole cache has {cache_size}",
            hint="it never fits: compute_encoder_budget gives a cache size that holds the largest item",
        )
    return StoreFullError(
        f"{what} needs {size} {unit} and {room} are left", hint="ask can_allocate first, or free a request"
    )


_set = dict.__setitem__


def _commit(changes: Iterable[tuple[Any, ...]]) -> None:
    """Make all changes, each a builtin function and its arguments, in one call into C.

    Python runs signal handlers only between its own steps, so a handler that raises finds all changes made, or none.
    """
    deque(starmap(call, changes), 0)


class _Manager:
    """Base of the managers: `_held` has the items that each request has taken and not freed, by request id."""

    _held: dict[str, dict[int, Any]]

    def __init__(self, cache_size: int) -> None:
        check_range(0, cache_size=cache_size)
        self.cache_size = cache_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    def get_cached_input_ids(self, request: Any) -> set[int]:
        """Return a new set of the items that this request has taken and not freed."""
        return set(self._held.get(request.request_id, ()))

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give up item i of this request; do nothing if the request does not hold it."""
        raise NotImplementedError

    def free(self, request: Any) -> None:
        """Give up all items of this request, in ascending order."""
        for i in sorted(self.get_cached_input_ids(request)):
            self.free_encoder_input(request, i)


class EncoderCacheManager(_Manager):
    """Encoder outputs shared by content hash; an entry that nobody uses stays until its space is needed.

    `cache_size` is the capacity in embeddings. An item is ``request.mm_features[i]``, and its size is the number of
    embeddings that its placeholder's mask selects. Every i that a request has taken counts once, even if two of them
    have the same content. A call that raises leaves everything as it was, except that an interrupted `free` may have
    given up some items.
    """

    num_free_slots: int
    """Free space, in embeddings."""
    num_freeable_slots: int
    """Free space and the entries that nobody uses, in embeddings."""
    cached: dict[str, set[str]]
    """Ids of the requests that use each entry, by content hash."""
    freeable: dict[str, int]
    """Sizes of the entries that nobody uses, by content hash, the next to be evicted first."""
    _sizes: dict[str, int]
    _freed: dict[str, None]

    def reset(self) -> None:
        """Forget everything."""
        tables: dict[str, Any] = {name: {} for name in ("cached", "freeable", "_sizes", "_held", "_freed")}
        vars(self).update(tables, num_free_slots=self.cache_size, num_freeable_slots=self.cache_size)

    def _look(self, request: Any, i: int) -> tuple[str, int]:
        mm_hash, size = _hash_and_size(request, i)
        cached = self._sizes.get(mm_hash, size)
        if cached != size:
            raise ValueError(
                f"item {i} ({shown(mm_hash)}) has {size} embeddings, the entry cached under its hash {cached}"
            )
        return mm_hash, size

    def _take(self, request_id: str, i: int, mm_hash: str, size: int) -> None:
        taken = self._held.get(request_id, {})
        if taken.get(i, mm_hash) != mm_hash:
            raise ValueError(
                f"request {shown(request_id)} holds item {i} as {shown(taken[i])}: free it before {shown(mm_hash)}"
            )
        changes: list[tuple[Any, ...]] = [(_set, taken, i, mm_hash), (_set, self._held, request_id, taken)]
        users = self.cached.get(mm_hash)
        if users is None:
            room = self.num_free_slots
            for oldest, freed in self.freeable.items():
                if room >= size:
                    break
                room += freed
                changes += [(dict.pop, table, oldest) for table in (self.freeable, self.cached, self._sizes)]
                changes.append((_set, self._freed, oldest, None))
            changes += [(_set, self.cached, mm_hash, {request_id}), (_set, self._sizes, mm_hash, size)]
            changes += [(dict.pop, self._freed, mm_hash, None), (setattr, self, "num_free_slots", room - size)]
        else:
            changes += [(set.add, users, request_id), (dict.pop, self.freeable, mm_hash, None)]
        if not users:  # the entry is new, or nobody used it
            changes.append((setattr, self, "num_freeable_slots", self.num_freeable_slots - size))
        _commit(changes)

    def check_and_update_cache(self, request: Any, i: int) -> bool:
        """Return whether item i is cached; a hit makes the request a user of it.

        ValueError if the cached entry has another size.
        """
        mm_hash, size = self._look(request, i)
        if mm_hash not in self.cached:
            return False
        self._take(request.request_id, i, mm_hash, size)
        return True

    def can_allocate(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Return whether item i fits into the budget and, with what is scheduled already, into the cache.

        Change nothing. ValueError if the cached entry has another size.
        """
        _, size = self._look(request, i)
        return size <= encoder_compute_budget and size + num_embeds_to_schedule <= self.num_freeable_slots

    def allocate(self, request: Any, i: int) -> None:
        """Take the space for item i; evict as many entries without users as needed, oldest first.

        If the item is cached already, the request only becomes a user of it. StoreFullError if it does not fit;
        ValueError if the cached entry has another size.
        """
        mm_hash, size = self._look(request, i)
        if mm_hash not in self.cached and size > self.num_freeable_slots:
            raise _full(f"item {i} ({shown(mm_hash)})", size, self.num_freeable_slots, self.cache_size, "embeddings")
        self._take(request.request_id, i, mm_hash, size)

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give up item i of this request; do nothing if the request does not hold it.

        If no request uses the entry any more, it becomes the newest of the entries that may be evicted.
        """
        request_id = request.request_id
        taken = self._held.get(request_id, {})
        if i not in taken:
            return
        mm_hash = taken[i]
        users = self.cached[mm_hash]
        changes: list[tuple[Any, ...]] = [(dict.pop, taken, i)]
        if len(taken) == 1:
            changes.append((dict.pop, self._held, request_id))
        if list(taken.values()).count(mm_hash) == 1:
            changes.append((set.remove, users, request_id))
            if len(users) == 1:
                size = self._sizes[mm_hash]
                changes.append((_set, self.freeable, mm_hash, size))
                changes.append((setattr, self, "num_freeable_slots", self.num_freeable_slots + size))
        _commit(changes)

    def get_freed_mm_hashes(self) -> list[str]:
        """Return the hashes that were evicted since the last call and are not cached again, in order of eviction."""
        freed, self._freed = list(self._freed), {}
        return freed

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        used = sum(self._sizes.values())
        _require(self.num_free_slots == self.cache_size - used, "free slots are not what the entries leave")
        _require(self.num_freeable_slots == self.num_free_slots + sum(self.freeable.values()), "freeable slots")
        _require(self.num_free_slots >= 0, "more is cached than the capacity")
        _require(self.cached.keys() == self._sizes.keys(), "an entry without a size")
        _require(self.freeable.keys() == {h for h, users in self.cached.items() if not users}, "entries without users")
        _require(not self._freed.keys() & self.cached.keys(), "an entry is cached and freed")
        holders: dict[str, set[str]] = {mm_hash: set() for mm_hash in self.cached}
        for request_id, taken in self._held.items():
            for mm_hash in taken.values():
                holders[mm_hash].add(request_id)
        _require(holders == self.cached, "users that hold no item")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"broken invariant: {what}")


class _HeldByRequest(_Manager):
    """Base of the managers in which each request holds its items alone; an item taken twice counts once."""

    num_free_slots: int
    """Free space, in the unit of `cache_size`."""
    _freed: list[tuple[str, int]]
    _new: dict[str, None]
    _old: dict[str, None]

    def reset(self) -> None:
        """Forget everything."""
        vars(self).update(num_free_slots=self.cache_size, _held={}, _freed=[], _new={}, _old={})

    def _take(self, request: Any, i: int, size: int, what: str, unit: str, *changes: tuple[Any, ...]) -> None:
        held = self._held.get(request.request_id, {})
        if i in held:
            return
        if size > self.num_free_slots:
            raise _full(what, size, self.num_free_slots, self.cache_size, unit)
        room = (setattr, self, "num_free_slots", self.num_free_slots - size)
        _commit([(_set, held, i, size), (_set, self._held, request.request_id, held), room, *changes])

    def _give_back(self, request: Any, i: int, *changes: tuple[Any, ...]) -> None:
        held = self._held.get(request.request_id, {})
        if i not in held:
            return
        entry = (dict.pop, held, i) if len(held) > 1 else (dict.pop, self._held, request.request_id)
        _commit([entry, (setattr, self, "num_free_slots", self.num_free_slots + held[i]), *changes])

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give back the space of item i; do nothing if the request does not hold it."""
        self._give_back(request, i)


class RequestEncoderCacheManager(_HeldByRequest):
    """Encoder outputs that each request holds alone, in encoder tokens (``request.get_num_encoder_tokens(i)``).

    `num_free_slots` stays within 0 … `cache_size`: an item allocated twice counts once, and so does one freed twice.
    """

    def has_cache(self, request: Any, i: int) -> bool:
        """Return whether the request holds item i."""
        return i in self._held.get(request.request_id, ())

    def can_allocate(self, request: Any, i: int) -> bool:
        """Return whether item i fits; change nothing."""
        return _encoder_tokens(request, i) <= self.num_free_slots

    def allocate(self, request: Any, i: int) -> None:
        """Take the space for item i; do nothing if the request holds it. StoreFullError if it does not fit."""
        what = f"item {i} of request {shown(request.request_id)}"
        self._take(request, i, _encoder_tokens(request, i), what, "encoder tokens")

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give back item i; do nothing if the request does not hold it."""
        self._give_back(request, i, (list.append, self._freed, (request.request_id, i)))

    def get_freed_ids(self) -> list[tuple[str, int]]:
        """Return (request id, i) of each item that was given back since the last call, in order."""
        freed, self._freed = self._freed, []
        return freed


class EncoderDecoderCacheManager(_HeldByRequest):
    """Encoder outputs that go straight into cross-attention blocks: held for one step, and never shared.

    It has the calls of `EncoderCacheManager`; sizes are in embeddings.
    """

    def check_and_update_cache(self, request: Any, i: int) -> bool:
        """Return False, because no output is kept for another request."""
        _item(request, i)
        return False

    def can_allocate(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Return whether item i fits into the budget and, with what is scheduled already, into the free space."""
        _, size = _hash_and_size(request, i)
        return size <= encoder_compute_budget and size + num_embeds_to_schedule <= self.num_free_slots

    def allocate(self, request: Any, i: int) -> None:
        """Take the space for item i; do nothing if the request holds it. StoreFullError if it does not fit."""
        mm_hash, size = _hash_and_size(request, i)
        what = f"item {i} ({shown(mm_hash)})"
        self._take(request, i, size, what, "embeddings", (_set, self._new, mm_hash, None))

    def get_freed_mm_hashes(self) -> list[str]:
        """Return the hashes that were allocated before the last call, because the worker has used them by now."""
        freed = list(self._old)
        vars(self).update(_old=self._new, _new={})
        return freed
