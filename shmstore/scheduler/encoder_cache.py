"""Which encoder outputs are still held: books only, the workers hold the tensors.

Three ways of holding them, three managers: shared between requests by content hash, per request, and straight into
cross-attention blocks.
"""

from __future__ import annotations

from typing import Any

from shmstore.errors import StoreFullError, shown
from shmstore.scheduler.checks import check_count

__all__ = ["EncoderCacheManager", "EncoderDecoderCacheManager", "RequestEncoderCacheManager"]

# Changes that belong together stand together, without a call between: an interrupt comes only behind a call.


def _item(request: Any, i: int) -> Any:
    if i < 0:
        raise IndexError(f"item {i}: items are counted from 0")
    features = request.mm_features
    try:
        return features[i]
    except IndexError:
        raise IndexError(f"item {i}: the request has {len(features)} items, counted from 0") from None


def _hash_and_size(request: Any, i: int) -> tuple[str, int]:
    """Content hash and embeddings of item i; ValueError where they are negative."""
    item = _item(request, i)
    size = item.mm_position.get_num_embeds
    return item.identifier, _checked(i, size() if callable(size) else size, "embeddings")


def _encoder_tokens(request: Any, i: int) -> int:
    """Encoder tokens of item i; ValueError where they are negative."""
    _item(request, i)
    return _checked(i, request.get_num_encoder_tokens(i), "encoder tokens")


def _checked(i: int, size: int, unit: str) -> int:
    if size < 0:
        raise ValueError(f"item {i} cannot have {size} {unit}")
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


class EncoderCacheManager:
    """Encoder outputs shared by content hash; an entry that nobody uses stays until its space is needed.

    `cache_size`: capacity in embeddings. An item is ``request.mm_features[i]``; its size is the number of embeddings
    that its placeholder's mask selects. Every i that a request has taken counts once, also where two of them are the
    same content. Each call that raises leaves everything as it was, but that an `allocate` or a `free` into which an
    interrupt comes may have evicted or given up some.
    """

    def __init__(self, cache_size: int) -> None:
        check_count("cache_size", cache_size)
        self.cache_size = cache_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.num_free_slots = self.cache_size
        """Embeddings that nothing takes."""
        self.num_freeable_slots = self.cache_size
        """Embeddings that nothing takes or that nobody references."""
        self.cached: dict[str, set[str]] = {}
        """Ids of the requests that use each entry, by content hash."""
        self.freeable: dict[str, int] = {}
        """Entries that nobody uses and their sizes, the first to go first."""
        self._sizes: dict[str, int] = {}
        self._taken: dict[str, dict[int, str]] = {}
        self._freed: dict[str, None] = {}

    def _look(self, request: Any, i: int) -> tuple[str, int]:
        mm_hash, size = _hash_and_size(request, i)
        cached = self._sizes.get(mm_hash, size)
        if cached != size:
            raise ValueError(
                f"item {i} ({shown(mm_hash)}) has {size} embeddings, the entry cached under its hash {cached}"
            )
        return mm_hash, size

    def _take(self, request_id: str, i: int, mm_hash: str, size: int) -> None:
        taken = self._taken.get(request_id)
        if taken is not None and i in taken and taken[i] != mm_hash:
            raise ValueError(
                f"request {shown(request_id)} holds item {i} as {shown(taken[i])}: free it before {shown(mm_hash)}"
            )
        if mm_hash not in self.cached:
            while self.num_free_slots < size:
                self._evict_oldest()
            self.cached[mm_hash] = {request_id}
            self._sizes[mm_hash] = size
            self.num_free_slots -= size
            self.num_freeable_slots -= size
            if mm_hash in self._freed:
                del self._freed[mm_hash]
        else:
            if mm_hash in self.freeable:
                del self.freeable[mm_hash]
                self.num_freeable_slots -= size
            users = self.cached[mm_hash]
            users |= {request_id}
        if taken is None:
            self._taken[request_id] = {i: mm_hash}
        else:
            taken[i] = mm_hash

    def check_and_update_cache(self, request: Any, i: int) -> bool:
        """Return whether item i is cached; a hit makes the request a user of it.

        ValueError where the cached entry has another size.
        """
        mm_hash, size = self._look(request, i)
        if mm_hash not in self.cached:
            return False
        self._take(request.request_id, i, mm_hash, size)
        return True

    def can_allocate(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Return whether item i fits into the budget and, with what is scheduled already, into the cache.

        Pure: it evicts nothing. ValueError where the cached entry has another size.
        """
        _, size = self._look(request, i)
        return size <= encoder_compute_budget and size + num_embeds_to_schedule <= self.num_freeable_slots

    def allocate(self, request: Any, i: int) -> None:
        """Take the space for item i, evicting entries without users, oldest first, as far as needed.

        An item that is cached already is only referenced. StoreFullError where it does not fit; ValueError where the
        cached entry has another size.
        """
        mm_hash, size = self._look(request, i)
        if mm_hash not in self.cached and size > self.num_freeable_slots:
            raise _full(f"item {i} ({shown(mm_hash)})", size, self.num_freeable_slots, self.cache_size, "embeddings")
        self._take(request.request_id, i, mm_hash, size)

    def _evict_oldest(self) -> None:
        mm_hash = next(iter(self.freeable))
        self.num_free_slots += self.freeable[mm_hash]
        del self.freeable[mm_hash], self.cached[mm_hash], self._sizes[mm_hash]
        self._freed[mm_hash] = None

    def get_cached_input_ids(self, request: Any) -> set[int]:
        """Return the items that this request has taken and not freed."""
        return set(self._taken.get(request.request_id, ()))

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give up item i of this request; nothing where it does not hold it.

        With the last item of the last user the entry becomes the newest of those that may go.
        """
        request_id = request.request_id
        taken = self._taken.get(request_id)
        if taken is None or i not in taken:
            return
        mm_hash, others = taken[i], taken.values()
        del taken[i]
        if not taken:
            del self._taken[request_id]
        if mm_hash in others:
            return
        users = self.cached[mm_hash]
        users -= {request_id}
        if not users:
            self.freeable[mm_hash] = self._sizes[mm_hash]
            self.num_freeable_slots += self._sizes[mm_hash]

    def free(self, request: Any) -> None:
        """Give up all items of this request, in ascending order."""
        for i in sorted(self.get_cached_input_ids(request)):
            self.free_encoder_input(request, i)

    def get_freed_mm_hashes(self) -> list[str]:
        """Return what was evicted since the last call and is not cached again, in order of eviction."""
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
        for request_id, taken in self._taken.items():
            for mm_hash in taken.values():
                holders[mm_hash].add(request_id)
        _require(holders == self.cached, "users that hold no item")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"broken invariant: {what}")


class RequestEncoderCacheManager:
    """Encoder outputs held for each request by itself, in encoder tokens (``request.get_num_encoder_tokens(i)``).

    `num_free_slots` stays within 0 … `cache_size`: freeing what is not held is nothing, allocating twice counts once.
    """

    def __init__(self, cache_size: int) -> None:
        check_count("cache_size", cache_size)
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        """Encoder tokens that nothing takes."""
        self._held: dict[str, dict[int, int]] = {}
        self._freed: list[tuple[str, int]] = []

    def has_cache(self, request: Any, i: int) -> bool:
        """Return whether the request holds item i."""
        return i in self._held.get(request.request_id, ())

    def can_allocate(self, request: Any, i: int) -> bool:
        """Return whether item i fits; pure."""
        return _encoder_tokens(request, i) <= self.num_free_slots

    def allocate(self, request: Any, i: int) -> None:
        """Take the space for item i; nothing where the request holds it. StoreFullError where it does not fit."""
        size = _encoder_tokens(request, i)
        if self.has_cache(request, i):
            return
        if size > self.num_free_slots:
            what = f"item {i} of request {shown(request.request_id)}"
            raise _full(what, size, self.num_free_slots, self.cache_size, "encoder tokens")
        held, request_id = self._held, request.request_id
        if request_id in held:
            held[request_id][i] = size
        else:
            held[request_id] = {i: size}
        self.num_free_slots -= size

    def get_cached_input_ids(self, request: Any) -> set[int]:
        """Return the items that the request holds, as a set of the caller's own."""
        return set(self._held.get(request.request_id, ()))

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give back item i; nothing where the request does not hold it."""
        request_id = request.request_id
        held = self._held.get(request_id)
        if held is None or i not in held:
            return
        self.num_free_slots += held[i]
        del held[i]
        if not held:
            del self._held[request_id]
        self._freed.append((request_id, i))

    def free(self, request: Any) -> None:
        """Give back all items of the request, in ascending order."""
        for i in sorted(self.get_cached_input_ids(request)):
            self.free_encoder_input(request, i)

    def get_freed_ids(self) -> list[tuple[str, int]]:
        """Return (request id, item) of what was given back since the last call, in that order."""
        freed, self._freed = self._freed, []
        return freed


class EncoderDecoderCacheManager:
    """Encoder outputs that go straight into cross-attention blocks: held for one step, never shared, never hit.

    The calls of `EncoderCacheManager`; sizes in embeddings.
    """

    def __init__(self, cache_size: int) -> None:
        check_count("cache_size", cache_size)
        self.cache_size = cache_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.num_free_slots = self.cache_size
        """Embeddings that nothing takes."""
        self._held: dict[str, dict[int, int]] = {}
        self._new: dict[str, None] = {}
        self._old: dict[str, None] = {}

    def check_and_update_cache(self, request: Any, i: int) -> bool:
        """Return False: nothing is kept that another request could use."""
        _item(request, i)
        return False

    def can_allocate(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Return whether item i fits into the budget and, with what is scheduled already, into the free space; pure."""
        _, size = _hash_and_size(request, i)
        return size <= encoder_compute_budget and size + num_embeds_to_schedule <= self.num_free_slots

    def allocate(self, request: Any, i: int) -> None:
        """Take the space for item i; nothing where the request holds it. StoreFullError where it does not fit."""
        mm_hash, size = _hash_and_size(request, i)
        if i in self._held.get(request.request_id, ()):
            return
        if size > self.num_free_slots:
            raise _full(f"item {i} ({shown(mm_hash)})", size, self.num_free_slots, self.cache_size, "embeddings")
        held, request_id = self._held, request.request_id
        if request_id in held:
            held[request_id][i] = size
        else:
            held[request_id] = {i: size}
        self.num_free_slots -= size
        self._new[mm_hash] = None

    def get_cached_input_ids(self, request: Any) -> set[int]:
        """Return the items that the request holds."""
        return set(self._held.get(request.request_id, ()))

    def free_encoder_input(self, request: Any, i: int) -> None:
        """Give back the space of item i; nothing where the request does not hold it."""
        request_id = request.request_id
        held = self._held.get(request_id, {})
        if i in held:
            self.num_free_slots += held[i]
            del held[i]
            if not held:
                del self._held[request_id]

    def free(self, request: Any) -> None:
        """Give back the space of all items of the request."""
        for i in self.get_cached_input_ids(request):
            self.free_encoder_input(request, i)

    def get_freed_mm_hashes(self) -> list[str]:
        """Return what was allocated before the last call: the worker has made use of it by now."""
        freed, self._old, self._new = list(self._old), self._new, {}
        return freed
