"""`StoreTier`: publishes to a tier what its writer stores, and fetches what its store misses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from shmstore.bindings.hidden import hidden
from shmstore.errors import ShmStoreError, StoreClosedError, TierError, TierFullError, unless_interrupted
from shmstore.store import ObjectStoreWriter
from shmstore.store.arguments import int_of
from shmstore.store.batch import internals_of
from shmstore.store.stats import TierStats
from shmstore.tiers.breaker import Breaker, Costs
from shmstore.tiers.objects import Incoming, serializer_of, spans_of, tier_key
from shmstore.tiers.protocol import Tier
from shmstore.tiers.write_behind import WriteBehind

__all__ = ["StoreTier", "TierStats"]

_log = logging.getLogger(__name__)
_MAX_QUEUE = 1 << 20
_CLOSING = 5.0
_PROBE = "shmstore:probe"
_AHEAD = 3600 * 10**9
"""How far another host's clock may be ahead, in ns; a later moment is forged, and would survive each clear."""
_AT_ONCE = 32
"""How many objects one call removes: a slow tier is to do that within its time-out."""


class StoreTier:
    """The tier of a store, for the process that writes to it; no call raises what the tier does wrong.

    `fetch` asks the tier, in the caller's thread. All other calls return at once. Owns `tier` and closes it, and not
    the writer. Thread-safe; an interrupt of a call keeps no other waiting. Stores find each other's objects if their
    `namespace` is the same, such as the version of a model. At most `queue` objects wait to be published. Raises
    TypeError for a writer whose serializer has no `format_name`.
    """

    def __init__(
        self,
        writer: ObjectStoreWriter,
        tier: Tier,
        *,
        namespace: str = "",
        queue: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        inside = internals_of(writer)
        self._writer, self._native = writer, inside.native
        self._tier = tier
        self._clock = clock
        self._namespace = namespace
        self._serializer = serializer_of(inside.serde)
        if (register := getattr(tier, "register", None)) is not None:
            data, offset = inside.native.data()
            register(memoryview(hidden(data)), writer.handle.path, offset)
        self._breaker = Breaker(lambda: tier.has([_PROBE]), self._answered)
        self._costs = Costs(clock)
        self._write_behind = WriteBehind(int_of("queue", queue, 1, _MAX_QUEUE), self._send_removals)
        self._lock = threading.Lock()
        self._fetching: dict[tuple[str, str | None], threading.Lock] = {}
        self._moment = inside.native.tier_cleared()
        self._last_removal = 0
        self._removed: dict[str, int] = {}
        """What the tier may still have, and when it was removed here."""
        self._counts: dict[str, Any] = {}
        self._count()

    def fetch(
        self, key: str, *, namespace: str | None = None, accepts: Callable[[bytes], bool] = lambda extra: True
    ) -> bool:
        """Fetch a missing object into the store, unless its extra bytes are not accepted; return if it is there now.

        Callers that ask for one key at a time fetch it once. If the answer is False, the caller will process the item:
        the time until `publish` for it is what processing takes, and `fetch` fetches only what takes less.
        """
        fetched, mine = (key, namespace), threading.Lock()
        with mine:  # nobody waits for longer than this call, also if it is interrupted
            try:
                if self._fetching.setdefault(fetched, mine) is not mine:
                    self.wait(key, namespace=namespace)
                    return self._writer.is_cached(key, namespace=namespace)
                found = self._writer.is_cached(key, namespace=namespace)  # by the fetch before
                if not found:
                    self._ask(self._fetch, key, namespace, accepts)
                    found = self._writer.is_cached(key, namespace=namespace)
            finally:
                self._fetched(fetched, mine)
        if not found:
            self._costs.missed(key)
        return found

    def wait(self, key: str, *, namespace: str | None = None) -> None:
        """Wait until nobody fetches this key; for a caller that is about to put it."""
        if (other := self._fetching.get((key, namespace))) is not None:
            with other:
                self._fetched((key, namespace), other)  # an interrupt may have kept its owner from that

    def _fetched(self, key: tuple[str, str | None], lock: threading.Lock) -> None:
        if self._fetching.get(key) is lock:
            del self._fetching[key]

    def publish(self, key: str, *, namespace: str | None = None) -> None:
        """Send an object that was just put, some time soon; the oldest of too many are dropped."""
        name = self._name(key, namespace)
        self._costs.processed(key)
        with self._lock:
            moment = self._next_moment()
        self._write_behind.add((key, namespace), partial(self._publish, key, namespace, name, moment))

    def remove(self, keys: Iterable[str], *, namespace: str | None = None) -> None:
        """Fetch these objects no more, unless they are published again; and remove them from the tier, some time soon.

        They are removed once the tier answers. Call it before you delete them from the store.
        """
        keys = list(keys)
        names = [self._name(key, namespace) for key in keys]
        self._write_behind.drop({(key, namespace) for key in keys})  # one that is sent now is removed after it
        with self._lock:
            self._last_removal = self._next_moment()
            self._removed.update(dict.fromkeys(names, self._last_removal))
        self._write_behind.wake()

    def clear(self) -> None:
        """Fetch nothing that was published before, by any host; the same holds for all writers of the store.

        The tier keeps it for the other hosts. Call it before you clear the store.
        """
        with self._lock:
            self._native.clear_tier(self._next_moment())

    def _next_moment(self) -> int:
        """Return a moment after all that this object has returned, in ns; the lock is taken."""
        self._moment = max(self._moment + 1, time.time_ns())
        return self._moment

    def flush(self, timeout: float) -> bool:
        """Wait until each object was sent, refused or dropped; return False if `timeout` seconds were not enough."""
        return self._write_behind.flush(timeout)

    def stats(self) -> TierStats:
        """Return the figures so far."""
        with self._lock:
            return self._stats()

    def _stats(self) -> TierStats:
        counts = {"dropped": 0} | self._counts
        counts["dropped"] += self._write_behind.dropped
        return TierStats(**counts, queued=len(self._write_behind), open=self._breaker.open)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most, and close the tier; idempotent.

        Close the writer after it. From then on `fetch` finds nothing, and `publish` drops and counts what it is given.
        """
        self._write_behind.close(_CLOSING)
        self._breaker.close()
        try:
            self._tier.close()
        except unless_interrupted(Exception) as error:  # a back end may raise anything
            _log.warning("the tier could not be closed: %s", error)
        self._count()

    def _count(self, **more: float) -> None:
        """Add to the counts, and show all figures in the segment; so each call to the tier ends with it."""
        with self._lock:
            for name, value in more.items():
                self._counts[name] = self._counts.get(name, 0) + value
            with suppress(StoreClosedError):  # nobody looks there any more
                self._native.show_tier(self._stats())  # within the lock, so that no older figures come later

    def _ask(self, call: Callable[..., bool], *arguments: Any) -> bool:
        """Return what the call does; False if it fails or is not made. This is where the tier's errors end."""
        if self._breaker.open:
            self._count(skipped=1)
            return False
        begin = self._clock()
        try:
            answer = call(*arguments)
        except unless_interrupted(Exception) as error:
            if isinstance(error, ShmStoreError) and not isinstance(error, TierError):
                raise  # the store's, which was closed
            opened = self._breaker.failed(self._clock() - begin)
            self._count(errors=1)
            if not isinstance(error, TierError):  # a back end's mistake is not the request's
                _log.exception("the tier's back end failed")
            if opened:
                _log.warning("circuit open: the tier is not asked for a while: %s", error)
            return False
        self._breaker.succeeded()
        return answer

    def _fetch(self, key: str, namespace: str | None, accepts: Callable[[bytes], bool]) -> bool:
        begin, begun_at, name = self._clock(), self._moment, self._name(key, namespace)
        if name in self._removed:
            self._count(misses=1)
            return False

        def valid(moment: int) -> bool:
            cleared = self._native.tier_cleared()
            return cleared < moment <= max(cleared, time.time_ns()) + _AHEAD and self._last_removal <= begun_at

        incoming = Incoming(self._writer, key, namespace, name, self._costs.worth, valid, accepts)
        whole = self._tier.fetch(name, incoming.into)
        if not whole or not incoming.verifies():
            outcome = "damaged" if whole or whole is None else incoming.refused
            if outcome == "damaged" and "damaged" not in self._counts:
                _log.warning(
                    "%r has under key %s what does not verify; more of them are only counted, as `damaged`: look for "
                    "another program that writes to the tier",
                    self._tier,
                    name,
                )
            self._count(**{outcome: 1})
            return False
        incoming.commit()
        if not valid(
            incoming.moment
        ):  # asked after the commit: else a `remove` or `clear` of another might not see the object
            self._writer.delete(key, namespace=namespace)
            self._count(misses=1)
            return False
        seconds = self._clock() - begin
        self._costs.fetched(incoming.nbytes, seconds)
        self._count(hits=1, hit_bytes=incoming.nbytes, saved_seconds=self._costs.saved(seconds))
        return True

    def _publish(self, key: str, namespace: str | None, name: str, moment: int) -> None:
        if not self._ask(self._send, key, namespace, name, moment):
            self._count(dropped=1)

    def _send(self, key: str, namespace: str | None, name: str, moment: int) -> bool:
        spans = spans_of(self._writer, key, namespace, name, moment)  # pinned until they are sent
        if spans is None:
            return False
        try:
            self._tier.publish(name, spans)
        except TierFullError:
            self._count(refused=1)
            return True
        self._count(published=1, published_bytes=len(spans[1]))
        return True

    def _send_removals(self) -> None:
        while self._removed and not self._breaker.open:
            with self._lock:
                names, moment = list(islice(self._removed, _AT_ONCE)), self._moment
            if not self._ask(self._remove, names, moment):
                return

    def _remove(self, names: list[str], moment: int) -> bool:
        self._tier.remove(names)
        with self._lock:
            for name in names:
                if self._removed.get(name, moment + 1) <= moment:  # not removed again meanwhile
                    del self._removed[name]
        self._count()
        return True

    def _answered(self) -> None:
        self._count()
        self._write_behind.wake()

    def _name(self, key: str, namespace: str | None) -> str:
        return tier_key(key, namespace, self._serializer, self._namespace)
