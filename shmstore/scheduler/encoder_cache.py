"""Which encoder outputs are still held; the workers hold the tensors themselves.

There are three managers, for three ways to hold an output: shared between requests by content hash, per request, and
for one step on its way into cross-attention blocks.
"""

from __future__ import annotations

from collections import deque
from itertools import starmap
from operator import call
from typing import Any, ClassVar

from shmstore.errors import StoreFullError, shown, unnamed
from shmstore.scheduler.checks import check_range


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
    if type(size) is not int or size < 0:  # nearly never, and the check takes as long as all the rest
        check_range(0, **{f"embeddings of item {i}": size})
    return item.identifier, size


_set = dict.__setitem__
_Changes = list[tuple[Any, ...]]


def _commit(changes: _Changes) -> None:
    """Make all changes, each a builtin function and its arguments, in one call into C.

    Python runs signal handlers only between its own steps, so a handler that raises finds all changes made, or none.
    """
    deque(starmap(call, changes), 0)


def _leave(table: dict[str, dict[int, Any]], request_id: str, i: int) -> _Changes:
    """Return the changes that remove the note of item i, and that of the request with its last item."""
    items = table.get(request_id, {})
    if i not in items:
        return []
    return [(dict.pop, items, i)] if len(items) > 1 else [(dict.pop, table, request_id)]


@unnamed
class _Manager:
    """Base of the managers: entries, and the items of requests that hold one or have reserved the space of one.

    `_look` says which entry an item belongs to. An entry takes its space once, however many items hold or reserve it.
    Every i that a request has taken counts once. A call that raises leaves everything as it was, except that an
    interrupted `free` or `unreserve` may have given up some items.
    """

    num_free_slots: int
    """Space that is neither used nor reserved, in the unit of `cache_size`."""
    num_freeable_slots: int
    """Free space and the entries that may be evicted."""
    cached: dict[Any, set[str]]
    """Ids of the requests that use each entry."""
    freeable: dict[Any, int]
    """Sizes of the entries that nobody uses or has reserved, the next to be evicted first."""
    _sizes: dict[Any, int]
    _held: dict[str, dict[int, Any]]
    _reserved: dict[str, dict[int, Any]]
    _freed: dict[Any, Any]
    _tables: ClassVar[tuple[str, ...]] = ("cached", "freeable", "_sizes", "_held", "_reserved", "_freed")
    _unit: ClassVar = "embeddings"
    _keeps_unused: ClassVar = False

    def __init__(self, cache_size: int) -> None:
        check_range(0, cache_size=cache_size)
        self.cache_size = cache_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        tables: dict[str, Any] = {name: {} for name in self._tables}
        vars(self).update(tables, num_free_slots=self.cache_size, num_freeable_slots=self.cache_size)

    def _size(self, request: Any, i: int) -> int:
        return _hash_and_size(request, i)[1]

    def _look(self, request: Any, i: int) -> tuple[Any, int]:
        """Return the entry of item i and its size; here it is the entry of this item alone."""
        entry = request.request_id, i
        return entry, self._sizes.get(entry, self._size(request, i))

    def _on_take(self, request: Any, i: int) -> _Changes:
        """Return what else changes when a request takes item i."""
        return []

    def _on_free(self, request: Any, i: int) -> _Changes:
        """Return what else changes when a request gives up item i."""
        return []

    def _enter(self, table: dict[str, dict[int, Any]], request_id: str, i: int, entry: Any) -> _Changes:
        """Return the changes that note the entry of an item; ValueError if the request has it as another's."""
        for notes, has in ((self._held, "holds"), (self._reserved, "has reserved")):
            known = notes.get(request_id, {}).get(i, entry)
            if known != entry:
                raise ValueError(
                    f"request {shown(request_id)} {has} item {i} as {shown(known)}: free it before {shown(entry)}"
                )
        items = table.get(request_id, {})
        return [(_set, items, i, entry), (_set, table, request_id, items)]

    def _keep(self, entry: Any, size: int) -> _Changes:
        """Return the changes that keep the space of an entry for its first user or reservation, or make it."""
        if entry in self._sizes and entry not in self.freeable:
            return []
        changes: _Changes = [(setattr, self, "num_freeable_slots", self.num_freeable_slots - size)]
        if entry in self.freeable:
            return [*changes, (dict.pop, self.freeable, entry)]
        room = self.num_free_slots
        for oldest, freed in self.freeable.items():
            if room >= size:
                break
            room += freed
            changes += [(dict.pop, table, oldest) for table in (self.freeable, self.cached, self._sizes)]
            changes.append((_set, self._freed, oldest, None))
        return [*changes, (_set, self._sizes, entry, size), (setattr, self, "num_free_slots", room - size)]

    def _release(self, entry: Any) -> _Changes:
        """Return the changes that end `_keep`, with the last user or reservation."""
        size = self._sizes[entry]
        changes: _Changes = [(setattr, self, "num_freeable_slots", self.num_freeable_slots + size)]
        if self._keeps_unused and entry in self.cached:
            return [*changes, (_set, self.freeable, entry, size)]
        return [
            *changes,
            (dict.pop, self._sizes, entry),
            (dict.pop, self.cached, entry, None),
            (setattr, self, "num_free_slots", self.num_free_slots + size),
        ]

    def _count_reserved(self, entry: Any) -> int:
        return sum(list(items.values()).count(entry) for items in self._reserved.values())

    def _take(self, request: Any, i: int, entry: Any, size: int) -> None:
        request_id = request.request_id
        changes = self._keep(entry, size) + self._enter(self._held, request_id, i, entry)
        changes += _leave(self._reserved, request_id, i)
        if entry in self.cached:
            changes.append((set.add, self.cached[entry], request_id))
        else:
            changes.append((_set, self.cached, entry, {request_id}))
        if i not in self._held.get(request_id, ()):
            changes += self._on_take(request, i)
        _commit(changes)

    def get_cached_input_ids(self, request: Any) -> set[int]:
        """Return a new set of the items that this request has taken and not freed."""
        return set(self._held.get(request.request_id, ()))

    def allocate(self, request: Any, i: int) -> None:
        """Take the space of item i, unless the request holds it. StoreFullError if it does not fit.

        That cannot happen to a reserved item.
        """
        entry, size = self._look(request, i)
        room = self.num_freeable_slots
        if entry not in self._sizes and size > room:
            name = f"{i} ({shown(entry)})" if isinstance(entry, str) else str(i)
            what = f"item {name} of request {shown(request.request_id)} needs {size} {self._unit}"
            if size > self.cache_size:
                raise StoreFullError(
                    f"{what} and the whole cache has {self.cache_size}",
                    hint="it never fits: compute_encoder_budget gives a cache size that holds the largest item",
                )
            raise StoreFullError(
                f"{what} and {room} are left",
                hint="free a request, or allocate only what can_allocate has just allowed, or what is reserved",
            )
        self._take(request, i, entry, size)

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give up item i of this request; do nothing if the request does not hold it."""
        request_id = request.request_id
        taken = self._held.get(request_id, {})
        if i not in taken:
            return
        entry = taken[i]
        users = self.cached[entry]
        changes = _leave(self._held, request_id, i) + self._on_free(request, i)
        if list(taken.values()).count(entry) == 1:
            changes.append((set.remove, users, request_id))
            if len(users) == 1 and not self._count_reserved(entry):
                changes += self._release(entry)
        _commit(changes)

    def free(self, request: Any) -> None:
        """Give up all items of this request, in ascending order."""
        for i in sorted(self.get_cached_input_ids(request)):
            self.free_encoder_input(request, i)

    def check_valid(self) -> None:
        """Raise RuntimeError at the first broken invariant."""
        used, reserved = sum(self._sizes.values()), {h for items in self._reserved.values() for h in items.values()}
        unused = {h for h, users in self.cached.items() if not users}
        holders: dict[Any, set[str]] = {entry: set() for entry in self.cached}
        for request_id, taken in self._held.items():
            for entry in taken.values():
                holders[entry].add(request_id)
        for holds, what in (
            (self.num_free_slots == self.cache_size - used, "free slots are not what the entries leave"),
            (self.num_freeable_slots == self.num_free_slots + sum(self.freeable.values()), "freeable slots"),
            (self.num_free_slots >= 0, "more is cached or reserved than the capacity"),
            (self._sizes.keys() == self.cached.keys() | reserved, "an entry without a size, or a size without one"),
            (self.freeable.keys() == unused - reserved, "entries that nobody uses or has reserved"),
            (not self._freed.keys() & self.cached.keys(), "an entry is cached and freed"),
            (all(self._held.values()) and all(self._reserved.values()), "a request without items"),
            (holders == self.cached, "users that hold no item"),
        ):
            if not holds:
                raise RuntimeError(f"broken invariant: {what}")


@unnamed
class _Reserving(_Manager):
    """Base of the managers with which a scheduler may ask about all items of a request before it allocates any."""

    def can_allocate(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Return whether item i fits into the budget and, with what is scheduled already, into the cache.

        Change nothing. `num_embeds_to_schedule` counts items of this request, and those that it has reserved have their
        room already. The answer holds until the next hit, reservation or allocation.
        """
        entry, size = self._look(request, i)
        reserved = self._reserved.get(request.request_id, {}).values()
        others = max(0, num_embeds_to_schedule - sum(map(self._sizes.__getitem__, reserved)))
        needed = 0 if entry in reserved else size
        return size <= encoder_compute_budget and needed + others <= self.num_freeable_slots

    def reserve(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Answer as `can_allocate`; if True, also keep the room for item i.

        Room is made by eviction, oldest first. Neither hits nor other reservations and allocations take it until
        `allocate` uses it, or `unreserve`, `free` or `reset` gives it back. An item reserved twice takes its room once,
        and so do items of one entry.
        """
        if not self.can_allocate(request, i, encoder_compute_budget, num_embeds_to_schedule):
            return False
        entry, size = self._look(request, i)
        _commit(self._keep(entry, size) + self._enter(self._reserved, request.request_id, i, entry))
        return True

    def unreserve(self, request: Any) -> None:
        """Give back the room of all items that this request has reserved and not allocated."""
        for i, entry in sorted(self._reserved.get(request.request_id, {}).items()):
            changes = _leave(self._reserved, request.request_id, i)
            if self._count_reserved(entry) == 1 and not self.cached.get(entry):
                changes += self._release(entry)
            _commit(changes)

    def free(self, request: Any) -> None:
        """Give up all items of this request, in ascending order, and all that it has reserved."""
        self.unreserve(request)
        super().free(request)


class EncoderCacheManager(_Reserving):
    """Encoder outputs shared by content hash; an entry that nobody uses stays until its space is needed.

    `cache_size` is the capacity in embeddings. An item is ``request.mm_features[i]``, and its size is the number of
    embeddings that its placeholder's mask selects. Every i that a request has taken counts once, even if two of them
    have the same content. With the last user, an entry becomes the newest of those that may be evicted; the oldest is
    evicted first. ValueError for an item of another size than the cached entry; a call that raises changes nothing.
    """

    _keeps_unused = True

    def _look(self, request: Any, i: int) -> tuple[str, int]:
        mm_hash, size = _hash_and_size(request, i)
        known = self._sizes.get(mm_hash, size)
        if known != size:
            raise ValueError(
                f"item {i} ({shown(mm_hash)}) has {size} embeddings, the entry cached under its hash {known}"
            )
        return mm_hash, size

    def _on_take(self, request: Any, i: int) -> _Changes:
        return [(dict.pop, self._freed, request.mm_features[i].identifier, None)]

    def check_and_update_cache(self, request: Any, i: int) -> bool:
        """Return whether item i is cached; a hit makes the request a user of it."""
        mm_hash, size = self._look(request, i)
        if mm_hash not in self.cached:
            return False
        self._take(request, i, mm_hash, size)
        return True

    def get_freed_mm_hashes(self) -> list[str]:
        """Return the hashes that were evicted since the last call and are not cached again, in order of eviction."""
        freed, self._freed = list(self._freed), {}
        return freed


class RequestEncoderCacheManager(_Manager):
    """Encoder outputs that each request holds alone, in encoder tokens (``request.get_num_encoder_tokens(i)``).

    `num_free_slots` stays within 0 … `cache_size`: an item allocated twice counts once, and so does one freed twice.
    """

    _unit = "encoder tokens"

    def _size(self, request: Any, i: int) -> int:
        _item(request, i)
        size: int = request.get_num_encoder_tokens(i)
        if type(size) is not int or size < 0:
            check_range(0, **{f"encoder tokens of item {i}": size})
        return size

    def _on_free(self, request: Any, i: int) -> _Changes:
        return [(_set, self._freed, len(self._freed), (request.request_id, i))]

    def has_cache(self, request: Any, i: int) -> bool:
        """Return whether the request holds item i."""
        return i in self._held.get(request.request_id, ())

    def can_allocate(self, request: Any, i: int) -> bool:
        """Return whether item i fits; change nothing."""
        return self._size(request, i) <= self.num_free_slots

    def get_freed_ids(self) -> list[tuple[str, int]]:
        """Return (request id, i) of each item that was given back since the last call, in order."""
        freed, self._freed = list(self._freed.values()), {}
        return freed


class EncoderDecoderCacheManager(_Reserving):
    """Encoder outputs that go straight into cross-attention blocks: held for one step, and never shared.

    It has the calls of `EncoderCacheManager`; sizes are in embeddings.
    """

    _new: dict[str, None]
    _tables = (*_Manager._tables, "_new")

    def _on_take(self, request: Any, i: int) -> _Changes:
        return [(_set, self._new, request.mm_features[i].identifier, None)]

    def check_and_update_cache(self, request: Any, i: int) -> bool:
        """Return False, because no output is kept for another request."""
        _item(request, i)
        return False

    def get_freed_mm_hashes(self) -> list[str]:
        """Return the hashes that were allocated before the last call, because the worker has used them by now."""
        freed = list(self._freed)
        vars(self).update(_freed=self._new, _new={})
        return freed
