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
        f"{what} needs {size} {unit} and {room} are left",
        hint="free a request, or allocate only what can_allocate has just allowed, or what is reserved",
    )


_set = dict.__setitem__


def _commit(changes: Iterable[tuple[Any, ...]]) -> None:
    """Make all changes, each a builtin function and its arguments, in one call into C.

    Python runs signal handlers only between its own steps, so a handler that raises finds all changes made, or none.
    """
    deque(starmap(call, changes), 0)


def _enter(table: dict[str, dict[int, Any]], request_id: str, i: int, value: Any) -> list[tuple[Any, ...]]:
    """Return the changes that note `value` for item i of a request."""
    items = table.get(request_id, {})
    return [(_set, items, i, value), (_set, table, request_id, items)]


def _leave(table: dict[str, dict[int, Any]], request_id: str, i: int) -> list[tuple[Any, ...]]:
    """Return the changes that remove the note of item i, and that of the request with its last item."""
    items = table.get(request_id, {})
    if i not in items:
        return []
    return [(dict.pop, items, i)] if len(items) > 1 else [(dict.pop, table, request_id)]


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
    have the same content. A call that raises leaves everything as it was, except that an interrupted `free` or
    `unreserve` may have given up some items.

    The answer of `can_allocate` holds until the next hit, reservation or allocation. A scheduler that asks about all
    items of a request before it allocates any asks by `reserve`.
    """

    num_free_slots: int
    """Space that is neither used nor reserved, in embeddings."""
    num_freeable_slots: int
    """Free space and the entries that may be evicted, in embeddings."""
    cached: dict[str, set[str]]
    """Ids of the requests that use each entry, by content hash."""
    freeable: dict[str, int]
    """Sizes of the entries that nobody uses or has reserved, by content hash, the next to be evicted first."""
    _reserved: dict[str, dict[int, str]]
    _sizes: dict[str, int]
    _freed: dict[str, None]

    def reset(self) -> None:
        """Forget everything."""
        tables: dict[str, Any] = {n: {} for n in ("cached", "freeable", "_sizes", "_held", "_reserved", "_freed")}
        vars(self).update(tables, num_free_slots=self.cache_size, num_freeable_slots=self.cache_size)

    def _look(self, request: Any, i: int) -> tuple[str, int]:
        mm_hash, size = _hash_and_size(request, i)
        known = self._sizes.get(mm_hash, size)
        if known != size:
            raise ValueError(
                f"item {i} ({shown(mm_hash)}) has {size} embeddings, the entry cached under its hash {known}"
            )
        return mm_hash, size

    def _check_same(self, request_id: str, i: int, mm_hash: str) -> None:
        for table, has in ((self._held, "holds"), (self._reserved, "has reserved")):
            known = table.get(request_id, {}).get(i, mm_hash)
            if known != mm_hash:
                raise ValueError(
                    f"request {shown(request_id)} {has} item {i} as {shown(known)}: free it before {shown(mm_hash)}"
                )

    def _keep(self, mm_hash: str, size: int) -> list[tuple[Any, ...]]:
        """Return the changes that keep the space of an entry for its first user or reservation, or make it."""
        if mm_hash in self._sizes and mm_hash not in self.freeable:
            return []
        changes: list[tuple[Any, ...]] = [(setattr, self, "num_freeable_slots", self.num_freeable_slots - size)]
        if mm_hash in self.freeable:
            return [*changes, (dict.pop, self.freeable, mm_hash)]
        room = self.num_free_slots
        for oldest, freed in self.freeable.items():
            if room >= size:
                break
            room += freed
            changes += [(dict.pop, table, oldest) for table in (self.freeable, self.cached, self._sizes)]
            changes.append((_set, self._freed, oldest, None))
        return [*changes, (_set, self._sizes, mm_hash, size), (setattr, self, "num_free_slots", room - size)]

    def _release(self, mm_hash: str) -> list[tuple[Any, ...]]:
        """Return the changes that end `_keep`, with the last user or reservation."""
        size = self._sizes[mm_hash]
        changes: list[tuple[Any, ...]] = [(setattr, self, "num_freeable_slots", self.num_freeable_slots + size)]
        if mm_hash in self.cached:
            return [*changes, (_set, self.freeable, mm_hash, size)]
        return [
            *changes,
            (dict.pop, self._sizes, mm_hash),
            (setattr, self, "num_free_slots", self.num_free_slots + size),
        ]

    def _count_reserved(self, mm_hash: str) -> int:
        return sum(list(items.values()).count(mm_hash) for items in self._reserved.values())

    def _take(self, request_id: str, i: int, mm_hash: str, size: int) -> None:
        self._check_same(request_id, i, mm_hash)
        changes = self._keep(mm_hash, size) + _enter(self._held, request_id, i, mm_hash)
        changes += _leave(self._reserved, request_id, i)
        if mm_hash in self.cached:
            changes.append((set.add, self.cached[mm_hash], request_id))
        else:
            changes += [(_set, self.cached, mm_hash, {request_id}), (dict.pop, self._freed, mm_hash, None)]
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

        Change nothing. `num_embeds_to_schedule` counts items of this request, and those that it has reserved have their
        room already. ValueError if the cached entry has another size.
        """
        mm_hash, size = self._look(request, i)
        reserved = self._reserved.get(request.request_id, {}).values()
        others = max(0, num_embeds_to_schedule - sum(map(self._sizes.__getitem__, reserved)))
        needed = 0 if mm_hash in reserved else size
        return size <= encoder_compute_budget and needed + others <= self.num_freeable_slots

    def reserve(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Answer as `can_allocate`; if True, also keep the room for item i of this request.

        Room is made by eviction, oldest first. Neither hits nor other reservations and allocations take it until
        `allocate` uses it, or `unreserve`, `free` or `reset` gives it back. An item reserved twice takes its room once,
        and so do items with the same content.
        """
        if not self.can_allocate(request, i, encoder_compute_budget, num_embeds_to_schedule):
            return False
        mm_hash, size = self._look(request, i)
        self._check_same(request.request_id, i, mm_hash)
        _commit(self._keep(mm_hash, size) + _enter(self._reserved, request.request_id, i, mm_hash))
        return True

    def unreserve(self, request: Any) -> None:
        """Give back the room of all items that this request has reserved and not allocated."""
        for i, mm_hash in sorted(self._reserved.get(request.request_id, {}).items()):
            changes = _leave(self._reserved, request.request_id, i)
            if self._count_reserved(mm_hash) == 1 and not self.cached.get(mm_hash):
                changes += self._release(mm_hash)
            _commit(changes)

    def allocate(self, request: Any, i: int) -> None:
        """Take the space for item i; evict as many entries without users as needed, oldest first.

        If the item is cached already, the request only becomes a user of it. StoreFullError if it does not fit, which
        cannot happen to a reserved item; ValueError if the cached entry has another size.
        """
        mm_hash, size = self._look(request, i)
        if mm_hash not in self._sizes and size > self.num_freeable_slots:
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
        changes = _leave(self._held, request_id, i)
        if list(taken.values()).count(mm_hash) == 1:
            changes.append((set.remove, users, request_id))
            if len(users) == 1 and not self._count_reserved(mm_hash):
                changes += self._release(mm_hash)
        _commit(changes)

    def free(self, request: Any) -> None:
        """Give up all items of this request, in ascending order, and all that it has reserved."""
        self.unreserve(request)
        super().free(request)

    def get_freed_mm_hashes(self) -> list[str]:
        """Return the hashes that were evicted since the last call and are not cached again, in order of eviction."""
        freed, self._freed = list(self._freed), {}
        return freed

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        used, reserved = sum(self._sizes.values()), {h for items in self._reserved.values() for h in items.values()}
        unused = {h for h, users in self.cached.items() if not users}
        _require(self.num_free_slots == self.cache_size - used, "free slots are not what the entries leave")
        _require(self.num_freeable_slots == self.num_free_slots + sum(self.freeable.values()), "freeable slots")
        _require(self.num_free_slots >= 0, "more is cached or reserved than the capacity")
        _require(self._sizes.keys() == self.cached.keys() | reserved, "an entry without a size, or a size without one")
        _require(self.freeable.keys() == unused - reserved, "entries that nobody uses or has reserved")
        _require(not self._freed.keys() & self.cached.keys(), "an entry is cached and freed")
        _require(all(self._held.values()) and all(self._reserved.values()), "a request without items")
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
    _reserved: dict[str, dict[int, int]]
    _new: dict[str, None]
    _old: dict[str, None]

    def reset(self) -> None:
        """Forget everything."""
        vars(self).update(num_free_slots=self.cache_size, _held={}, _freed=[], _reserved={}, _new={}, _old={})

    def _take(self, request: Any, i: int, size: int, what: str, unit: str, *changes: tuple[Any, ...]) -> None:
        request_id = request.request_id
        if i in self._held.get(request_id, {}):
            return
        room = self.num_free_slots + self._reserved.get(request_id, {}).get(i, 0)
        if size > room:
            raise _full(what, size, room, self.cache_size, unit)
        notes = _enter(self._held, request_id, i, size) + _leave(self._reserved, request_id, i)
        _commit([*notes, (setattr, self, "num_free_slots", room - size), *changes])

    def _give_back(self, request: Any, i: int, *changes: tuple[Any, ...]) -> None:
        entry = _leave(self._held, request.request_id, i)
        if entry:
            room = self.num_free_slots + self._held[request.request_id][i]
            _commit([*entry, (setattr, self, "num_free_slots", room), *changes])

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
        """Return whether item i fits into the budget and, with what is scheduled already, into the free space.

        `num_embeds_to_schedule` counts items of this request, and those that it has reserved have their room already.
        """
        _, size = _hash_and_size(request, i)
        reserved = self._reserved.get(request.request_id, {})
        others = max(0, num_embeds_to_schedule - sum(reserved.values()))
        return size <= encoder_compute_budget and size - reserved.get(i, 0) + others <= self.num_free_slots

    def reserve(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Answer as `can_allocate`; if True, also keep the room for item i until `allocate`, `unreserve` or `free`.

        An item that the request holds keeps the room that it has.
        """
        if not self.can_allocate(request, i, encoder_compute_budget, num_embeds_to_schedule):
            return False
        _, size = _hash_and_size(request, i)
        request_id = request.request_id
        if i not in self._held.get(request_id, {}):
            room = self.num_free_slots + self._reserved.get(request_id, {}).get(i, 0) - size
            _commit([*_enter(self._reserved, request_id, i, size), (setattr, self, "num_free_slots", room)])
        return True

    def unreserve(self, request: Any) -> None:
        """Give back the room of all items that this request has reserved and not allocated."""
        sizes = self._reserved.get(request.request_id)
        if sizes:
            room = (setattr, self, "num_free_slots", self.num_free_slots + sum(sizes.values()))
            _commit([(dict.pop, self._reserved, request.request_id), room])

    def free(self, request: Any) -> None:
        """Give up all items of this request, in ascending order, and all that it has reserved."""
        self.unreserve(request)
        super().free(request)

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
